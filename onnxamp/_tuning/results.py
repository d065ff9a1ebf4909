"""The settings of a tuning, checked before anything slow runs, and its results."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from onnx import ModelProto

from onnxamp._base.errors import ArgumentError, suggestion
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._base.public import Shown
from onnxamp._base.records import record
from onnxamp._convert.plan import Plan
from onnxamp._facts.devices import device_called
from onnxamp._facts.targets import AUTO
from onnxamp._options.values import check_tolerance
from onnxamp._runtime import STRESS

if TYPE_CHECKING:
    from onnxamp._base.state import StateLike
    from onnxamp._numerics.user_functions import Accept
    from onnxamp._tuning.metric import MetricLike

TIMES: Final = ("roofline", "measured")
"""The source of nodes' times."""

RUNS: Final = 12
"""Candidates that may be converted and measured by default."""

SECONDS: Final = 60.0
"""Default time for all runs of a search; each run of a large model takes some seconds."""


@record(kw_only=True)
class Search:
    """Options of level auto's search; see :func:`onnxamp.tune_model` for each field.

    Raises:
        ArgumentError: a value is not known. ArgumentTypeError: it is of another type.
    """

    tolerance: float | None = None
    """The largest accepted error; None for the default."""
    metric: "MetricLike" = "auto"
    device: str = AUTO
    times: str = TIMES[0]
    runs: int = RUNS
    pick: int | None = None
    seconds: float = SECONDS
    allow_slower: bool = False
    accept: "Accept | None" = None
    stress: int = STRESS
    """Steps toward inputs that are hard for a result: nodes whose values then leave the range stay in float32."""
    only: int | None = None
    """The number of the one sample that sensitivities are measured on; None for all. All of them verify results."""

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)
        what = "a number of at least 0"
        checked_number("seconds", self.seconds, what, lambda n: n >= 0)
        what = "a whole number of at least 1"
        checked_number("runs", self.runs, what, lambda n: n >= 1, WHOLE)
        if self.pick is not None:
            what = "the number of a candidate"
            checked_number("pick", self.pick, what, lambda n: n >= 0, WHOLE)
        if self.device != AUTO:  # which depends on the target
            device_called(self.device)
        if self.times not in TIMES:
            raise ArgumentError(
                f"Unknown times {self.times!r}: choose one of {', '.join(TIMES)}.{suggestion(TIMES, str(self.times))}"
            )

    def check_state(self, state: "StateLike") -> None:
        """Check that another process can recognize the contents of a state file.

        Raises:
            ArgumentError: there is a state, and the metric has no name.
        """
        if state is not None and not isinstance(self.metric, str):
            raise ArgumentError(
                "A state file needs a metric with a name: write it as 'package:function'."
            )


@record
class Candidate:
    """One choice of low-precision nodes.

    Attributes:
        low: keys of these nodes, including exact ops.
        nodes: how many of them compute.
        predicted: the error predicted from sensitivities.
        error: the error of the converted model on all samples if it is ``verified``, otherwise the error to
            expect from those of other converted models; None if there were none.
        time: estimated microseconds per run, with launches and Casts.
        flops, bytes: the shares of the model's arithmetic and of its float traffic that are in low precision.
        casts: how many values are cast.
        weights: bytes of weights.
        verified: whether the converted model was measured.
    """

    low: frozenset[str]
    nodes: int
    predicted: float
    error: float | None
    time: float
    flops: float
    bytes: float
    casts: int = 0
    weights: int = 0
    verified: bool = False

    @property
    def best_known_error(self) -> float:
        """The measured error, else the predicted one."""
        return self.predicted if self.error is None else self.error


@record
class KeptNode:
    """A node that stays in float32: a short reason, and its measurement."""

    node: str
    op: str
    why: str
    detail: str


@record
class Exponents:
    """The effect of exponents in a tuning that could use them.

    Attributes:
        values: how many values have one.
        used: whether the result has them.
        other: the choice of the alternative: with exponents if the result has none, and without them if it does; None
            if the alternative was not tuned because it could not be better.
        error: the error of that choice.
    """

    values: int
    used: bool
    other: Candidate | None
    error: float | None


@record
class CompensationEffect:
    """The effect of compensated rounding in a tuning that could use it.

    Attributes:
        share: the largest possible share of the rounding of weights in the squared error, from the measured prices of
            the nodes that read them.
        seconds: about how long compensating takes.
        why: why it was not tried; "" if it was.
        used: whether the result has it.
        other: the choice of the alternative; None if it was not tuned.
        error: the error of that choice.
    """

    share: float
    seconds: float
    why: str = ""
    used: bool = False
    other: Candidate | None = None
    error: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Tuned(Shown):
    """The outcome of tuning. Errors are in units of the metric; for "snr" they are relative L2 errors.

    Attributes:
        plan: the decisions that were written.
        metric: name of the metric. tolerance: the largest accepted error.
        inputs: description of the samples. samples: how many there are.
        noise: error of the float32 model against itself in a second run; None if it was not needed.
        device_noise: error of the float32 model on CUDA against itself on the CPU; None without CUDA.
        error: error of the converted model over all samples.
        ran_on: the engine that ran the converted models.
        runs: samples whose sensitivities were measured. recalled: samples whose sensitivities were in the state file.
        conversions: converted models that were measured.
        units: number of nodes that could be low precision. unseen: labels of those that no sample runs.
        candidates: the frontier of estimated time and expected error, fastest first; float32 is the last.
        chosen: position of the candidate that was written.
        kept: nodes that stay in float32 because of a measurement.
        device: the device that times are for. times: where the candidates' times come from.
        held: whether ``error`` is within the tolerance.
        stopped: whether the search ended because its time was over.
        rejected: the fastest candidate within the tolerance that is not among ``candidates`` because it is slower than
            float32; None if there is none.
        timed: seconds per run of "float32", of the "result" and, if it was timed, of "level O2", whole and in turns;
            empty if times were not measured on the device that runs the model.
        exponents: the effect of exponents; None if they were requested or forbidden, or if no value takes one.
        room: the largest share of the estimated time that a better use of the tolerance could still save, by the
            errors of the candidates; None if the search did not save time, or measured whole models.
        compensation: the effect of compensated rounding; None if it was requested or forbidden, or if the fastest
            candidate was chosen, so that there was nothing to gain.
        coarse: the part of ``tolerance`` that the default adds if the model rounds values to integers; 0 for others.

    Example:
        >>> import onnxamp
        >>> _, tuned = onnxamp.tune_model("models/classifier.onnx", 1e-2, count=1, provider="cpu")
        >>> tuned.held, tuned.metric, tuned.samples
        (True, 'rel-l2', 1)
    """

    plan: Plan
    metric: str
    tolerance: float
    inputs: str
    samples: int
    noise: float | None
    device_noise: float | None
    error: float
    ran_on: str
    runs: int
    recalled: int
    conversions: int
    units: int
    unseen: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    chosen: int
    kept: tuple[KeptNode, ...]
    device: str
    times: str
    held: bool
    stopped: bool = False
    rejected: Candidate | None = None
    exponents: Exponents | None = None
    timed: tuple[tuple[str, float], ...] = ()
    compensation: CompensationEffect | None = None
    room: float | None = None
    coarse: float = 0.0

    @property
    def is_slower(self) -> bool:
        """Whether the candidate that was written is slower than float32 by the estimate."""
        return self.candidates[self.chosen].time > self.candidates[-1].time

    @property
    def float32_nodes(self) -> tuple[str, ...]:
        """Nodes of the written model that stay in float32 for any reason; ``kept`` has those with measurements."""
        return self.plan.float32_nodes


class TunedModel(NamedTuple):
    """The pair that :func:`tune_model` returns, which shows the tuning as a report in shells and notebooks.

    Attributes:
        model: the converted model.
        tuned: the outcome of the search.

    Example:
        >>> import onnxamp
        >>> result = onnxamp.tune_model("models/classifier.onnx", 1e-2, count=1, provider="cpu")
        >>> model16, tuned = result
        >>> result.tuned is tuned
        True
    """

    model: ModelProto
    tuned: Tuned

    def __repr__(self) -> str:
        return repr(self.tuned)

    def _repr_html_(self) -> str:
        return self.tuned._repr_html_()
