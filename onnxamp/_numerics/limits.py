"""From measurements to a verdict: limits per output, what misses them, and where the error starts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from numbers import Real
from typing import Final, TypeAlias

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, suggestion
from onnxamp._numerics.differences.metrics import (
    AT_LEAST,
    AT_MOST,
    BOUNDS,
    TOLERANCES,
    TensorDiff,
    metric_name,
)
from onnxamp._numerics.results import Judgement
from onnxamp._numerics.user_functions import Accept
from onnxamp._runtime.inputs.sample_counts import NUMBERS

COARSE: Final = (
    "The reference rounds values to integers, so rounding anything else may move outputs by {:.2g} (relative"
    " L2). The default limit allows for that."
)
_ROUNDINGS: Final = sqrt(2)
"""Two forms of a network that round to integers at different places differ by the errors of both."""
_COARSEST: Final = 0.1
"""Largest error that is put down to integers: beyond, they have lost the network."""


_HARD: Final = 10.0
"""By what factor errors on inputs that are made to be hard may exceed the default tolerance. Such inputs agree with the
weights, so that sums cancel elsewhere: of 300 small models, one was off by 1.6 times the tolerance.
"""

WIDER: Final = 2.0
"""By what factor errors beyond the samples may exceed a tolerance that was asked for: the samples met it narrowly."""


TYPICAL: Final = 1.5
SCATTER: Final = 3.0
"""By what factors the typical and the largest error of more random samples may exceed the limit that the usual ones
meet. Their numbers are nothing that callers feed, and errors of one network differ by a factor of 2.
"""

_PART: Final = 10.0
"""How many times further off than a whole output a part of it may be."""

PART_OFF: Final = 0.1
"""What a part may be off by in any case."""

_PART_LOST: Final = 0.3
"""The largest error that a part may have; with more, little of the part is left.

In 4,000 comparisons of right conversions (real models, backbones, detectors, transformers, spectra, random graphs),
groups of small numbers were off by at most 0.04 in float16 and 0.17 in bfloat16; where their digits were lost, by 0.26
and more (float16), and 0.6 (bfloat16).
"""


LimitLike: TypeAlias = float | str | Mapping[str, float] | Iterable[str]
"""A number for all outputs, numbers by output, or texts: "0.01" (all outputs), "NAME=0.01"."""


def coarseness(cost: float) -> float:
    """Return what low-precision forms of a network may be off by that is off by this since it rounds to integers."""
    return min(_ROUNDINGS * cost, _COARSEST)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the error of each output; :func:`make_limits` makes them.

    ``of[metric][output]`` is the limit of one output, ``of[metric][""]`` the limit of all others.

    An output without a limit has to meet the default tolerance of the lower precision of both models (1e-5 for float32,
    1e-2 for float16, 5e-2 for bfloat16): with its relative L2 error or, if it holds no floats and this is smaller, with
    the share of elements that differ, because labels flip and pixels are off by one. Lists of detections have to meet
    it, or a wider limit of ``rel_l2``, with their own error: other limits are over matched rows. The error of float32
    models may be twice that of float32 itself on the device, up to 1e-2.

    If a network rounds its values to integers, its low-precision forms may be off by up to 0.1 more, depending on
    the error of that rounding itself: a small change moves numbers across the border between two integers.

    If the target accumulates float16 in float16, errors on random inputs are draws. An output with fewer than 64
    numbers over all samples has to meet a share of the default tolerance, down to a quarter for one number.

    Example:
        >>> import onnxamp
        >>> onnxamp.Limits({"rel_l2": {"": 1e-3, "pooled": 1e-2}}).of["rel_l2"]["pooled"]
        0.01
    """

    of: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tolerance: float | None = None
    """In place of the default one."""
    asked: bool = False
    """Whether the user states the tolerance, so that no input beyond the first samples may exceed it far."""
    accept: Accept | None = None
    """Judges all outputs of a sample, in place of default limits."""
    margin: float = 0.0
    """Share of the default tolerance that is reserved for other samples, if errors are random."""
    otherwise: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Limits in the form of ``of``, which are accepted if an output misses the default."""
    coarse: float | None = None
    """The allowance for low-precision forms of a reference that rounds to integers; None if not measured."""
    plain: bool = False
    """Judge only floats of equal sizes that list no detections: selections change more often the more there are."""

    @property
    def beyond(self) -> "Limits":
        """Limits for inputs and branches beyond the samples, whose errors differ a little."""
        wider = None if self.tolerance is None else WIDER * self.tolerance
        return replace(self, tolerance=wider, plain=True)

    def hard(self, lowest: str) -> "Limits":
        """Return limits for inputs that are made to be hard: they are to find overflow, and may lose more digits.

        Args:
            lowest: the low-precision type.
        """
        usual = self._tolerance(lowest, None)
        return replace(
            self.beyond, tolerance=max(_HARD * TOLERANCES[lowest], WIDER * usual)
        )

    @property
    def finite(self) -> "Limits":
        """Limits for outputs that mean nothing: they may hold any number, but neither NaN nor Inf."""
        return replace(self.beyond, of={}, otherwise={}, tolerance=inf)

    @property
    def allows_any_number(self) -> bool:
        """Whether only NaN and Inf fail."""
        return self.tolerance == inf

    @property
    def scatter(self) -> float:
        """By what factor a single one of further random samples may exceed the limit."""
        return WIDER if self.asked else SCATTER

    def allowing(self, outputs: Sequence[TensorDiff]) -> "Limits":
        """Return limits for a reference that rounds to integers, given its difference from itself without rounding."""
        cost = max((diff.rel_l2 for diff in outputs if diff.is_float), default=0.0)
        return replace(self, coarse=coarseness(cost))

    def judge(
        self,
        outputs: Sequence[TensorDiff],
        lowest: str,
        noise: float | None = None,
        *,
        drawn: bool = False,
        redrawn: bool = False,
    ) -> tuple[Judgement, ...]:
        """Judge outputs by the limits.

        Args:
            outputs: the errors of the outputs.
            lowest: the lower precision of the two models.
            noise: the error of float32 itself on the device, if known.
            drawn: whether errors are random.
            redrawn: whether there are more random samples than usual, because errors were close to the limit.
        """
        tolerance = self._tolerance(lowest, noise)
        if self.allows_any_number:
            return ()
        least = min(tolerance, self._tolerance("float32", noise))
        judgements = list[Judgement]()
        for diff in outputs:
            if self.plain and not is_plain(diff):
                continue
            share = self.share(diff, lowest, drawn=drawn)
            limit = max(least, tolerance * share)
            judgements += self._judge(diff, limit, redrawn=redrawn)
        return tuple(judgements)

    def share(self, diff: TensorDiff, lowest: str, *, drawn: bool) -> float:
        """Return the share of the default tolerance that applies to an output; see :meth:`judge`."""
        is_asked = self.tolerance is not None or _given(self.of, diff)
        if not drawn or lowest != "float16" or is_asked:
            return 1.0
        # Few numbers may show only the cube root of this share of the error: see NUMBERS.
        size = diff.size if diff.is_float and diff.size else NUMBERS
        share: float = (size / NUMBERS) ** (1 / 3)
        return (1 - self.margin) * min(1.0, share)

    def _tolerance(self, lowest: str, noise: float | None) -> float:
        """Return the limit of outputs that have none."""
        if self.tolerance is not None:
            return self.tolerance
        if lowest != "float32":
            return TOLERANCES[lowest] + (self.coarse or 0.0)
        if noise is None:
            return TOLERANCES[lowest]
        return max(TOLERANCES["float32"], min(2 * noise, TOLERANCES["float16"]))

    def check(self, outputs: Iterable[str]) -> None:
        """Check that the limits name only outputs that exist.

        Raises:
            ArgumentError: there is such a limit.
        """
        names = set(outputs)
        elements = {name.partition("[")[0] for name in names}
        for metric, limits in self.of.items():
            for name in limits:
                known_by = {name, name.partition("[")[0]}
                if name and known_by.isdisjoint(names | elements):
                    known = ", ".join(sorted(names))
                    text = f"The limit for {metric} names {name!r}; the outputs are {known}."
                    raise ArgumentError(text + suggestion(names, name))

    def _judge(
        self, diff: TensorDiff, tolerance: float, *, redrawn: bool
    ) -> list[Judgement]:
        if chosen := _given(self.of, diff):
            if diff.detections is not None:
                # Other metrics are over matched rows, and know nothing of lost ones.
                usual = max(tolerance, chosen.get("rel_l2", 0.0))
                chosen.setdefault("detections", usual)
            return _held(diff, chosen)
        if self.accept is not None:
            return []
        if diff.detections is not None:
            return _held(diff, {"detections": tolerance})
        # The numbers of labels and tokens mean nothing, but how many of them differ does.
        may_be_labels = diff.are_whole or not diff.is_float
        are_labels = may_be_labels and diff.differing < diff.rel_l2
        limits = {"differing" if are_labels else "rel_l2": tolerance}
        if redrawn and not are_labels:
            # A result that comes later, when more samples are drawn already, has to meet what the first one had to.
            limits = {
                "usual_rel_l2": tolerance,
                "rel_l2": self.scatter * tolerance,
                "typical_rel_l2": TYPICAL * tolerance,
            }
        if diff.part_rel_l2 is not None:
            usual = min(max(_PART * tolerance, PART_OFF), _PART_LOST)
            limits["part_rel_l2"] = max(usual, tolerance)
        held = _held(diff, limits)
        if all(judgement.passed for judgement in held):
            return held
        return _held(diff, _given(self.otherwise, diff)) or held


def is_plain(diff: TensorDiff) -> bool:
    """Return whether an output holds floats at fixed places."""
    return diff.is_float and diff.detections is None and not size_only(diff)


def _held(diff: TensorDiff, limits: Mapping[str, float]) -> list[Judgement]:
    """Compare an output with limits by metric."""
    judgements = []
    for metric, limit in limits.items():
        number = float(getattr(diff, metric))
        passed = number >= limit if metric in AT_LEAST else number <= limit
        judgements.append(Judgement(diff.name, metric, number, limit, passed))
    return judgements


def _given(
    limits: Mapping[str, Mapping[str, float]], diff: TensorDiff
) -> dict[str, float]:
    """Return the limits of an output, by metric."""
    # An element "name[0]" of a sequence has the limits of the sequence, and "" those of all outputs.
    names = (diff.name, diff.name.partition("[")[0], "")
    chosen = {}
    for metric, by_output in limits.items():
        limit = next((by_output[name] for name in names if name in by_output), None)
        if limit is not None and getattr(diff, metric) is not None:
            chosen[metric] = limit
    return chosen


def make_limits(limits: Mapping[str, LimitLike]) -> Limits:
    """Return limits of metrics for :func:`onnxamp.diff_models`.

    Args:
        limits: by metric ("rel_l2", "max_abs", "max_rel", "required_tolerance", "rmse", "mean_abs", "differing",
            "kl_divergence", "detections" bound errors from above; "snr_db", "cosine", "argmax_agreement",
            "top5_agreement" from below): a number for all outputs, numbers by output, or texts as on the command line,
            "0.01" or "NAME=0.01".

    Raises:
        ArgumentTypeError: ``limits``, or the limit of a metric, is of another type.
        ArgumentError: a metric is unknown, a text is no limit, or a limit is no value that the metric can have.

    Example:
        >>> import onnxamp
        >>> limits = onnxamp.make_limits({"rel_l2": 1e-3, "cosine": {"pooled": 0.999}})
        >>> onnxamp.diff_models("models/encoder.onnx", "models/encoder.onnx", limits=limits).passed
        True
    """
    if not isinstance(limits, Mapping):
        raise ArgumentTypeError(
            f"limits must be a dict of limits by metric, not {type(limits).__name__}."
        )
    by_metric: dict[str, dict[str, float]] = {}
    for metric, given in limits.items():
        if metric not in AT_MOST and metric not in AT_LEAST:
            raise ArgumentError(
                f"Unknown metric {metric!r}: choose one of {', '.join((*AT_MOST, *AT_LEAST))}."
            )
        for name, limit in _by_output(metric, given):
            _check_bounds(metric, name, limit)
            by_metric.setdefault(metric, {})[name] = limit
    return Limits(by_metric)


def with_tolerance(limits: Limits, tolerance: LimitLike) -> Limits:
    """Return limits with one for the relative L2 error as well, in the forms that :func:`make_limits` accepts.

    Raises:
        ArgumentTypeError, ArgumentError: as :func:`make_limits`, or there is such a limit already.
    """
    if "rel_l2" in limits.of:
        raise ArgumentError(
            "tolerance and limits both set the limit of rel_l2: drop one of the two."
        )
    return replace(limits, of={**limits.of, **make_limits({"rel_l2": tolerance}).of})


def _check_bounds(metric: str, output: str, limit: float) -> None:
    """Check that a limit is a possible value of the metric; others are never or always met.

    Raises:
        ArgumentError: it is not.
    """
    least, largest = BOUNDS[metric]
    if least <= limit <= largest:
        return
    text = f"{output}={limit:g}" if output else f"{limit:g}"
    between = "0 or more" if least == 0 else "a number"
    if largest < inf:
        between = f"between {least:g} and {largest:g}"
    raise ArgumentError(
        f"The limit {text!r} for the {metric_name(metric)} is out of range: it must be {between}."
    )


def _by_output(metric: str, given: LimitLike) -> Iterator[tuple[str, float]]:
    """Yield (output, limit) pairs; the output is "" for all."""
    if isinstance(given, Real):
        yield "", float(given)
    elif isinstance(given, Mapping):
        for name, limit in given.items():
            if not isinstance(limit, Real):
                raise ArgumentTypeError(
                    f"The limit of {name!r} must be a number, not {type(limit).__name__}."
                )
            yield name, float(limit)
    elif isinstance(given, Iterable):
        for text in [given] if isinstance(given, str) else given:
            if not isinstance(text, str):
                raise ArgumentTypeError(
                    f"Limits must be numbers, or texts of the form OUTPUT=NUMBER, not {type(text).__name__}."
                )
            name, _, number = text.rpartition("=")
            try:
                yield name, float(number)
            except ValueError:
                raise ArgumentError(
                    f"The limit {text!r} is neither a number nor of the form OUTPUT=NUMBER."
                ) from None
    else:
        raise ArgumentTypeError(
            f"The limit for {metric} must be a number, numbers by output, or texts such as 'NAME=0.01', not"
            f" {type(given).__name__}."
        )


def size_only(diff: TensorDiff) -> bool:
    """Return whether only sizes differ. Outputs with data-dependent sizes may gain or lose an element at a
    threshold.
    """
    sizes_differ = diff.reference_shape != diff.result_shape
    return sizes_differ and len(diff.reference_shape) == len(diff.result_shape)
