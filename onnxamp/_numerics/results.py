"""What comparisons and checks return: frozen records, which the reports print, save and draw."""

from dataclasses import dataclass

from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.metrics import TensorDiff


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """One value that both models share: the error of the op that makes it, and what has accumulated up to it.

    ``local`` compares the result's op, fed with the *reference's* inputs, with the reference; ``accumulated`` compares
    the two models' own values. Either is None where it could not be measured; ``note`` says why.
    """

    position: int
    """Rank of the node in the reference's execution order, from 0."""
    value: str
    node: str
    op: str
    dtype: str
    """Element type of the value in the result ("float16", "bfloat16", "float32", ...)."""
    local: Measurement | None
    accumulated: Measurement | None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The first value of the graph, in execution order, that goes wrong: its name, its node, its op type, and how."""

    value: str
    node: str
    op: str
    alarm: str
    breaks: bool = True
    """False where no op breaks by itself, and this is where what has accumulated passes the limit."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One limit held against one output: ``metric`` is a field of :class:`TensorDiff`."""

    output: str
    metric: str
    found: float
    limit: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Cure:
    """Options that make the failure go away, and how that was seen.

    ``command`` is a command line that is ready to run; for a checked model, whose original is not at hand, it is
    options for the conversion of that original (``--keep-fp32 '...'``). ``nodes`` are what it keeps in float32;
    ``outcome`` says what the trial showed. ``confirmed`` is False where ``trials`` candidates were tried and none was
    enough: then ``command`` is empty, and ``nodes`` are the most that were tried.
    """

    command: str
    nodes: tuple[str, ...]
    outcome: str
    confirmed: bool
    trials: int


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Two models on the same inputs.

    ``ran_on`` names what computed ("CUDA (device)", "CPU, emulated float16", "CPU"); ``inputs`` says where the numbers
    came from; ``skipped`` says why nothing could be compared; ``failure`` is one sentence if the comparison fails;
    ``warnings`` are what is merely inexact.
    """

    reference: str
    result: str
    ran_on: str
    inputs: str
    samples: int
    lowest: str
    """The lower precision of the two: "float32", "float16" or "bfloat16"."""
    reference_lowest: str = "float32"
    """The lowest precision in the reference alone."""
    outputs: tuple[TensorDiff, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    layers: tuple[LayerDiff, ...] = ()
    first_bad: FirstBad | None = None
    skipped: str | None = None
    failure: str | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not compared."""
    cure: Cure | None = None
    noise: float | None = None
    """Relative L2 error of the float32 reference on CUDA against itself on CPU; None where it was not measured."""

    @property
    def passed(self) -> bool:
        """Whether it was compared and is within its limits."""
        within = all(judgement.passed for judgement in self.judgements)
        return self.failure is None and self.skipped is None and within


@dataclass(frozen=True, slots=True)
class ValueCheck:
    """One output of one node of a model that was run.

    ``measured`` compares what the node's type leaves of the exact result (found) with that exact result (reference):
    broken counts overflow, flushed counts underflow. ``fault`` is "NaN", "Inf", "vanished", "all zero", "saturated" or
    "flushed" where the node goes wrong although its inputs are fine, else None; ``inherited`` tells that it only passes
    on what was wrong before.
    """

    position: int
    value: str
    node: str
    op: str
    dtype: str
    measured: Measurement
    fault: str | None
    inherited: bool
    readers: tuple[str, ...] = ()
    """Nodes that read the value, directly or behind Casts."""


@dataclass(frozen=True, slots=True)
class RunCheck:
    """What running a model showed, value by value, in execution order."""

    ran_on: str
    inputs: str
    samples: int
    values: tuple[ValueCheck, ...]
    first_bad: FirstBad | None
    skipped: str | None = None
    cure: Cure | None = None
