"""The arguments of a tuning, checked before anything takes time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model
from onnxamp._numerics.accept import Accept
from onnxamp._numerics.rounding import WeightRounder, rounder_of
from onnxamp._options.options import Options
from onnxamp._runtime.device import device_name
from onnxamp._runtime.samples import SamplesLike
from onnxamp._runtime.sampling import as_samples
from onnxamp._runtime.session import Provider
from onnxamp._runtime.side import BUDGET
from onnxamp._state.state import StateLike
from onnxamp._target.roofline import device_called, device_for, device_titled
from onnxamp._target.versions import AUTO
from onnxamp._tuning.job import TIMES
from onnxamp._tuning.metric import MetricLike
from onnxamp._tuning.search import SECONDS, SENSITIVITY_RUNS
from onnxamp._tuning.sensitivity import Progress
from onnxamp._workers.place import Place


def meant_device(name: str, target: str = "") -> str:
    """The device to estimate times for: with "auto" the one that the target is for, else the GPU that is installed, or
    an A100 where that is not known.

    Raises:
        ArgumentError: there is no device of that name.
    """
    if name != AUTO:
        return device_called(name).name
    return device_for(target) or device_titled(device_name())


@dataclass(frozen=True, slots=True)
class Search:
    """The arguments of a tuning; see :func:`onnxamp.tune_model` for each field.

    ``renews``: where the state file belongs to another tuning, begin anew.

    Raises:
        ArgumentError: a value is not known.
    """

    tolerance: float = 1e-2
    metric: MetricLike = "auto"
    samples: SamplesLike | None = None
    count: int = 4
    seed: int = 0
    dims: Mapping[str, int] | None = None
    device: str = AUTO
    times: str = "roofline"
    provider: Provider | None = None
    runs: int = SENSITIVITY_RUNS
    state: StateLike = None
    pick: int | None = None
    progress: Progress | None = None
    budget: int = BUDGET
    seconds: float = SECONDS
    allow_slower: bool = False
    accept: Accept | None = None
    place: Place = field(default_factory=Place)
    renews: bool = False

    def __post_init__(self) -> None:
        if self.device != AUTO:  # whose meaning the target tells
            device_called(self.device)
        if isinstance(self.runs, bool) or not isinstance(self.runs, int) or self.runs < 1:
            raise ArgumentError(f"runs must be a whole number of at least 1, not {self.runs!r}.")
        if self.state is not None and not isinstance(self.metric, str):
            raise ArgumentError("A state file needs a metric that has a name: write it as 'package:function'.")
        if self.times not in TIMES:
            raise ArgumentError(f"Unknown times {self.times!r}: choose one of {', '.join(TIMES)}.")


def with_rounder(model: Model, options: Options, search: Search) -> tuple[Search, WeightRounder | None]:
    """The search on samples that are read once, and what rounds weights, if the options ask for it: there and behind.

    Raises:
        As :func:`onnxamp._runtime.samples.as_samples`.
    """
    samples = as_samples(search.samples, model, count=search.count, seed=search.seed, dims=search.dims)
    return replace(search, samples=samples), rounder_of(options, samples, search.provider)
