"""What tuning a pipeline returns."""

from dataclasses import dataclass
from pathlib import Path

from onnxamp._convert.plan import Plan
from onnxamp._public import Shown


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of the pipeline with some models converted.

    ``model`` is the one that was tried, and ``choice`` its level and type; ``others`` are models that were low already;
    ``error`` is by how much the pipeline was worse than in float32, infinite if it broke, and ``failure`` says how.
    ``time`` is that of the model per run of the pipeline, in estimated microseconds.
    """

    model: str
    choice: str
    others: tuple[str, ...]
    error: float
    held: bool
    time: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class TunedMember:
    """A model of a pipeline, and what was decided about it.

    ``choice`` is "float32", or the level and the low type; ``exponents`` are values that are stored with one. ``alone``
    is the error of the pipeline with this model alone as decided, None if it was never so; ``error`` that with all
    models that were decided before, too. ``gain`` is the time that it saves. Times are estimated microseconds per run
    of the pipeline, in which the model is called ``calls`` times; weights are in bytes.
    """

    name: str
    source: str
    target: Path | None
    plan: Plan
    choice: str
    exponents: int
    calls: int
    alone: float | None
    error: float
    time_before: float
    time: float
    weights_before: int
    weights: int
    nodes: int

    @property
    def is_float32(self) -> bool:
        """Whether nothing of it is low."""
        return self.choice == "float32"

    @property
    def gain(self) -> float:
        """The time that its choice saves."""
        return self.time_before - self.time


@dataclass(frozen=True, slots=True, repr=False)
class TunedPipeline(Shown):
    """The outcome of tuning a pipeline.

    Attributes:
        models: the models in the order of the manifest, each with its plan.
        order: their names in the order in which they were decided: the least error per time saved first.
        source: the manifest; None if there is none.
        output: the folder that the models were written to; None if nothing was written.
        function: name of the function that runs them.
        metric: how its outputs are compared; "" if it returns a number.
        better: which of two numbers is the better one, "lower" or "higher".
        tolerance: by how much the pipeline may be worse than in float32.
        reference: the number that the function returned in float32; None for outputs.
        value: the number that it returned at last.
        error: by how much the pipeline is worse than in float32, with all models as decided.
        held: whether that is within the tolerance.
        noise: by how much a second run in float32 was worse than the first.
        ran_on: what ran the converted models.
        written_error: the error of a run with the written files as ONNX Runtime loads them; None if there was none.
        note: why there was none.
        runs: runs of the pipeline that were made. recalled: those that were taken from the state file.
        stopped: whether the search ended because its time or its runs were over.
        device: the device that times are for.
        trials: all choices that were tried.
        warnings: about options that match nothing or cannot be obeyed, in sentences.

    Example:
        >>> import onnxamp
        >>> tuned = onnxamp.tune_pipeline("models/speech/pipeline.toml", provider="cpu")
        >>> tuned.held, [model.name for model in tuned.models if model.is_float32]
        (True, ['vocoder'])
    """

    models: tuple[TunedMember, ...]
    order: tuple[str, ...]
    source: Path | None
    output: Path | None
    function: str
    metric: str
    better: str
    tolerance: float
    reference: float | None
    value: float | None
    error: float
    held: bool
    noise: float
    ran_on: str
    written_error: float | None
    note: str
    runs: int
    recalled: int
    stopped: bool
    device: str
    trials: tuple[Trial, ...]
    warnings: tuple[str, ...]

    def __getitem__(self, name: str) -> TunedMember:
        """The model of that name."""
        return next(model for model in self.models if model.name == name)

    @property
    def time_before(self) -> float:
        """Estimated microseconds per run of the pipeline in float32, in its models."""
        return sum(model.time_before for model in self.models)

    @property
    def time(self) -> float:
        """The same with all models as decided."""
        return sum(model.time for model in self.models)
