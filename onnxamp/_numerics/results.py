"""Results of comparisons and checks: frozen records for reports to print, save and draw."""

import re
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final

from onnxamp._base.public import Shown
from onnxamp._base.records import record
from onnxamp._numerics.choices.close_calls import CloseCalls
from onnxamp._numerics.differences.detections import Detections
from onnxamp._numerics.differences.metrics import (
    Measurement,
    Perplexity,
    TensorDiff,
    both,
)
from onnxamp._numerics.unseen.stressed import ErrorSought, Headroom, Proof, Room


@record
class LayerDiff:
    """One value that both models share: the error of its op alone, and the error accumulated up to it.

    ``local`` compares the result's op, fed with the *reference's* inputs, with the reference; ``accumulated`` compares
    the models' own values. Either is None if it could not be measured; ``note`` tells why.
    """

    position: int
    """Rank of the node in the reference's execution order, from 0."""
    value: str
    node: str
    op: str
    dtype: str
    """Element type in the result ("float16", "bfloat16", "float32", ...)."""
    local: Measurement | None
    accumulated: Measurement | None
    note: str | None = None
    exponent: int = 0
    """e, if the result stores the value times 2^-e; errors are in the units of the reference."""
    state: str = ""
    """The state in the body of a Loop or Scan whose last value it is, by its name at the beginning of a trip."""
    hidden: tuple[float, float] = (0.0, 0.0)
    """Relative L2 errors, local and accumulated, of the worst group of numbers far below its largest; 0 if none is."""

    @property
    def own_error(self) -> float:
        """The local error of the whole value or of such a group, whichever is larger; 0 if it is unknown."""
        return 0.0 if self.local is None else max(self.local.rel_l2, self.hidden[0])

    @property
    def whole_error(self) -> float:
        """The accumulated error in the same way."""
        known = self.accumulated
        return 0.0 if known is None else max(known.rel_l2, self.hidden[1])

    def __add__(self, other: "LayerDiff") -> "LayerDiff":
        """With that of another sample. Positions are those of a sample's own flow: other branches shift them."""
        return replace(
            self,
            position=max(self.position, other.position),
            local=both(self.local, other.local),
            accumulated=both(self.accumulated, other.accumulated),
            note=self.note or other.note,
            hidden=(
                max(self.hidden[0], other.hidden[0]),
                max(self.hidden[1], other.hidden[1]),
            ),
        )


@record
class Parting:
    """Sequences of tokens that differ, over all samples.

    Attributes:
        output: the output that holds them, [..., positions]; "" for tokens that were generated greedily after each
            prompt until the models choose different ones.
        sequences: number of sequences; ``parted`` of them differ.
        same: the number of generated tokens that agree.
        sample, sequence, position: where the first differing sequence starts to differ.
        reference, result: the tokens there.
        gap: by how much the reference's logit of its own token exceeds that of the result's token there; None if it
            is not known. A small gap is a tie that any rounding may turn.
    """

    output: str
    sequences: int
    parted: int = 0
    sample: int = 0
    sequence: int = 0
    position: int = 0
    reference: int = 0
    result: int = 0
    gap: float | None = None
    same: int = 0

    def __add__(self, later: "Parting") -> "Parting":
        """With those of a later sample, or of one in which nothing parts."""
        return replace(
            self if self.parted else later,
            sequences=self.sequences + later.sequences,
            parted=self.parted + later.parted,
            same=self.same + later.same,
        )


@record
class FirstBad:
    """The first value, in execution order, that goes wrong; ``alarm`` tells how."""

    value: str
    node: str
    op: str
    alarm: str
    breaks: bool = True
    """False if no single op breaks, and this is where the accumulated error exceeds the limit."""


@record
class Judgement:
    """One limit applied to one output: ``metric`` is a field of :class:`TensorDiff`."""

    output: str
    metric: str
    found: float
    limit: float
    passed: bool


@record
class Cure:
    """Options that fix a failure, and the result of their trial.

    ``command`` is a complete command line. For a checked model, whose original is unknown, it contains options for
    converting that original (``--keep-fp32 '...'``). ``nodes`` are kept in float32; ``outcome`` is the trial in words.
    ``confirmed`` is False if ``trials`` candidates were tried and none was enough: then ``command`` is empty, and
    ``nodes`` are the most that were tried. With ``applied``, the result is that conversion, at the ``level`` that it
    fell back to, if any, or the float32 model if nothing was confirmed; ``failure`` and ``first_bad`` describe the
    fault of the requested conversion, and ``casts`` are the numbers of Casts of that one and of the result.
    """

    command: str
    nodes: tuple[str, ...]
    outcome: str
    confirmed: bool
    trials: int
    applied: bool = False
    failure: str = ""
    first_bad: FirstBad | None = None
    level: str = ""
    casts: tuple[int, int] | None = None


DOES_NOT_RUN: Final = "The result does not run: "
"""The beginning of a failure that left nothing to compare."""
_CRASHED: Final = re.compile(r"Sample \d+ could not be compared\.")
"""Likewise, where a worker process died."""


@record
class Cost:
    """Relative L2 errors of an output against the float32 model that was quantized.

    ``quantized`` is that of the quantized model, ``result`` that of its low-precision form.
    """

    output: str
    quantized: float
    result: float

    @property
    def limit(self) -> float:
        """The largest allowed error: a tenth more than the quantized model, plus a constant."""
        return 1.1 * self.quantized + 2e-3

    @property
    def passed(self) -> bool:
        """Whether low precision adds little to the error of quantization, which is known."""
        return isfinite(self.quantized) and self.result <= self.limit


@record
class Extra:
    """A comparison beyond the samples: through branches that none of them takes, or with larger inputs.

    ``what`` names the branches or sizes; the other fields are as those of :class:`DiffReport`. ``is_hard`` marks inputs
    that are made to be hard, which have wider limits, and ``is_empty`` inputs that hold nothing but padding: their
    outputs mean nothing, and are only asked for NaN and Inf.
    """

    what: str
    outputs: tuple[TensorDiff, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    failure: str | None = None
    warnings: tuple[str, ...] = ()
    is_hard: bool = False
    is_empty: bool = False
    choices: tuple[CloseCalls, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all outputs are within their limits."""
        return self.failure is None and all(
            judgement.passed for judgement in self.judgements
        )


@dataclass(frozen=True, slots=True, repr=False)
class DiffReport(Shown):
    """Two models compared on the same inputs; :func:`onnxamp.diff_models` returns it.

    ``ran_on`` names the engine ("CUDA (device)", "WebGPU on device", "CPU, emulated float16", "CPU"); ``inputs`` says
    where the samples come from; ``skipped`` says why nothing could be compared; ``failure`` is one sentence if an
    output is broken; ``warnings`` name outputs that are only inexact; ``detections`` describe outputs that are lists of
    detections.

    Example:
        >>> import onnxamp
        >>> low = onnxamp.convert_model("models/encoder.onnx")
        >>> report = onnxamp.diff_models("models/encoder.onnx", low, provider="cpu")
        >>> report.lowest, report.reference_lowest, report.failure
        ('float16', 'float32', None)
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
    worst_sample: int | None = None
    """The number of the sample that shows best why outputs miss their limits; None if none does."""
    first_bad: FirstBad | None = None
    skipped: str | None = None
    failure: str | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences about values that were not compared, and other notes."""
    cure: Cure | None = None
    detections: tuple[Detections, ...] = ()
    tokens: tuple[Parting, ...] = ()
    """Outputs that hold tokens, and tokens that were generated after prompts."""
    perplexity: Perplexity | None = None
    """The quality of both models' predictions of texts; None for random inputs."""
    noise: float | None = None
    """Relative L2 error of the float32 reference on the device that ran against itself on the CPU: the largest on the
    first sample and on those beyond the default limit (on all if the result is float32 as well); None if it was not
    measured."""
    drawn: bool = False
    """Whether float16 is accumulated in float16 and inputs are random, so that the errors of few numbers mean little.
    """
    redrawn: bool = False
    """Whether more random samples than usual were compared, because errors are close to their limits."""
    coarse: float | None = None
    """What the default limit allows because the reference rounds values to integers; None for nothing."""
    loaded: str = ""
    """The runtime that opened the file of the result with its default options ("ONNX Runtime 1.31.1 on CUDA"), without
    a provider if it is not that of the target; "" if nothing did.
    """
    types_only: str = ""
    """Why the runtime opened no session, and only checked the types of the result; "" if it opened one."""
    disabled: tuple[str, ...] = ()
    """Graph optimizers of the runtime without which it opens the result; with them, it fails, or its process ends."""
    unopened: str = ""
    """A sentence if neither the original nor the result loads in the runtime, so that the comparison says little."""
    original: str = ""
    """The float32 model that the reference was quantized from, if it was compared as well."""
    costs: tuple[Cost, ...] = ()
    """The errors of both models against it."""
    extras: tuple[Extra, ...] = ()
    """Comparisons beyond the samples."""
    not_run: tuple[str, ...] = ()
    """Clauses about parts of the model that neither the samples nor the extras ran, and sizes that they left out."""

    proof: Proof | None = None
    """What holds for every input; None if the models were not compared for a conversion, or nothing can overflow."""
    headroom: Headroom | None = None
    """How far inputs that were made to be hard drive the value with the least headroom; None if there are none."""
    rooms: tuple[Room, ...] = ()
    """The values with the least headroom."""
    sought: ErrorSought | None = None
    """The largest error that a search found on inputs made to be hard; None without one, or if it found a choice."""
    choices: tuple[CloseCalls, ...] = ()
    """The choices that depend on values, such as an ArgMax's, and how many are closer than the error."""

    @property
    def passed(self) -> bool:
        """Whether the models were compared and all outputs are within their limits, also beyond the samples."""
        within = all(judgement.passed for judgement in self.judgements)
        within = within and all(cost.passed for cost in self.costs)
        within = within and all(extra.passed for extra in self.extras)
        return self.failure is None and self.skipped is None and within

    @property
    def was_compared(self) -> bool:
        """Whether both models ran, so that their outputs agree or differ."""
        failure = self.failure or ""
        return (
            self.skipped is None
            and not failure.startswith(DOES_NOT_RUN)
            and not _CRASHED.match(failure)
        )


@record
class ValueCheck:
    """One output of one node of a model that ran.

    ``measured`` compares the rounded result (found) with the exact one (reference): broken counts overflow, flushed
    counts underflow. ``fault`` is "NaN", "Inf", "vanished", "all zero", "saturated" or "flushed" if the node goes wrong
    although its inputs are fine, else None; ``inherited`` means that it only passes on an earlier fault.
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
    """Nodes that read the value, directly or through Casts."""


@record
class OutOfRange:
    """A value that does not fit float16.

    ``largest`` is its largest magnitude in float32. ``value * 2**-exponent`` fits, if the exponent is not 0; otherwise,
    ``why`` says what rules one out. ``op`` is "" for an input.
    """

    value: str
    op: str
    largest: float
    exponent: int
    why: str


@record
class RangeFit:
    """The values that do not fit float16, in the order in which they are computed, without those that folding removes.

    ``tried`` is True if the model was converted with exponents, and ran without a fault; ``made_up`` if the inputs were
    random.
    """

    values: tuple[OutOfRange, ...]
    tried: bool
    made_up: bool

    @property
    def fitting(self) -> tuple[OutOfRange, ...]:
        """The values that fit with an exponent."""
        return tuple(row for row in self.values if row.exponent)


@dataclass(frozen=True, slots=True, repr=False)
class RunCheck(Shown):
    """The result of running a model, value by value in execution order; :func:`onnxamp.check_run` returns it.

    Example:
        >>> import onnxamp
        >>> check = onnxamp.check_run("models/encoder.onnx", provider="cpu")
        >>> check.samples, check.first_bad
        (1, None)
    """

    ran_on: str
    inputs: str
    samples: int
    values: tuple[ValueCheck, ...]
    first_bad: FirstBad | None
    skipped: str | None = None
    cure: Cure | None = None
    fit: RangeFit | None = None
    """Values that do not fit float16; None if all do, or if this was not requested."""
    not_run: tuple[str, ...] = ()
    """Clauses about branches that no sample takes, and bodies of loops that none runs."""
