"""The metrics that tuning compares with its tolerance: one number per run, the smaller the better.

Predictions add errors as squares, as small independent errors add up. That holds for the relative L2 error, for the SNR
derived from it, for errors of detections, and for the share of rows whose largest element changes, which is
proportional to the error. The cosine distance d is half the squared angle: there :attr:`Metric.amplitude` is the angle,
sqrt(2 d). A user's function is used unchanged. If its errors add up differently, candidates are tried in a worse order,
but the result is measured anyway.
"""

from collections.abc import Callable, Mapping
from math import inf, sqrt
from typing import Any, Final, TypeAlias

import numpy as np

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, suggestion
from onnxamp._base.records import record
from onnxamp._numerics.differences.detections import compare_matched
from onnxamp._numerics.differences.metrics import TensorDiff, from_decibels
from onnxamp._numerics.user_functions import Accept, called, imported, name_of
from onnxamp._options.values import TOLERANCE
from onnxamp._runtime.engines import Outputs

Measure: TypeAlias = Callable[[Outputs, Outputs], float]
"""Error of a result against its reference; infinite if it is broken."""


@record
class Metric:
    """A metric and the largest accepted error."""

    name: str
    tolerance: float
    measure: Measure
    squared: bool
    """Whether the metric itself adds up, rather than its square."""
    made_from: "tuple[MetricLike, float | None, frozenset[str], Accept | None]"
    """The arguments of :func:`make_metric`, which recreates it in other processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return make_metric, self.made_from

    @property
    def is_joint(self) -> bool:
        """Whether a function of the user judges all outputs together; for other metrics, the worst output counts."""
        given = self.made_from[0]
        return not isinstance(given, str) or ":" in given

    def amplitude(self, error: float) -> float:
        """Return the quantity that adds up as squares; :meth:`of_amplitude` is the inverse."""
        return sqrt(2 * error) if self.squared else error

    def of_amplitude(self, amplitude: float) -> float:
        """Return the error of that amplitude."""
        return amplitude**2 / 2 if self.squared else amplitude

    def error(self, reference: Outputs, result: Outputs) -> float:
        """Return the error of a result; infinite if it is not a finite number."""
        error = self.measure(reference, result)
        return max(error, 0.0) if np.isfinite(error) else inf

    def holds(self, error: float) -> bool:
        """Return whether an error is within the tolerance."""
        return error <= self.tolerance


_OF_OUTPUT: Final[Mapping[str, Callable[[TensorDiff], float | None]]] = {
    "rel-l2": lambda diff: diff.rel_l2,
    "cosine": lambda diff: 1 - diff.cosine,
    "snr": lambda diff: diff.rel_l2,
    "top1": lambda diff: (
        None if diff.argmax_agreement is None else 1 - diff.argmax_agreement
    ),
    "kl": lambda diff: diff.kl_divergence,
}
"""Metric -> the error of one float output; None if it has none."""

_NEEDS: Final = {
    "kl": "it compares outputs called logits",
    "top1": "it compares the largest elements of rows, but scalars have no rows",
}
"""What outputs need for a metric."""
METRICS: Final = (*_OF_OUTPUT, "detections")
_SQUARED: Final = ("cosine", "kl")
"""The metrics that grow with the square of small errors."""

MetricLike: TypeAlias = str | Callable[[Mapping[str, Any], Mapping[str, Any]], float]
"""The forms of a metric that public functions accept: a name, or a function of the outputs of the reference and of the
result.
"""


def make_metric(
    name: MetricLike,
    tolerance: float | None = None,
    selected: frozenset[str] = frozenset(),
    accept: Accept | None = None,
) -> Metric:
    """Return a metric by name.

    Args:
        name: "auto"; "rel-l2": relative L2 error; "cosine": 1 - cosine; "snr": signal-to-noise ratio in dB, of which
            the tolerance is the smallest; "top1": share of rows whose largest element changes; "kl": KL divergence of
            the distributions that outputs called logits stand for, in nats; "detections": error of matched detections,
            and the relative L2 error of the other outputs; or a function, as it is or as "package:function"
            ("file.py:function"), called with the outputs of the reference and of the result, by name. The worst of
            several outputs counts. Outputs without floats count only if no output has any: by the share of elements
            that differ, or by their relative L2 error if that is smaller.
        tolerance: the largest accepted error (for "snr": the smallest ratio); None for an error of 1e-2 (40 dB).
        selected: outputs that list what an op selected: "auto" is "detections" if there are any, and else "rel-l2".
        accept: a function of the user; outputs that it rejects have an infinite error.

    Raises:
        ArgumentError: there is no such metric, or the tolerance is not a positive number.
    """
    if tolerance is not None and not 0 < tolerance < inf:
        raise ArgumentError(
            f"The tolerance must be a positive number, not {tolerance}."
        )
    made_from = (name, tolerance, selected, accept)
    if callable(name):
        measure = _measured(name_of(name), name)
        name = name_of(name)
    elif not isinstance(name, str):
        raise ArgumentTypeError(
            f"metric must be a name or a function, not {type(name).__name__}."
        )
    elif ":" in name:
        measure = _measured(name, imported("metric", name))
    elif name not in {"auto", *METRICS}:
        raise ArgumentError(
            f"Unknown metric {name!r}: choose one of auto, {', '.join(METRICS)}, or 'package:function'."
            f"{suggestion(('auto', *METRICS), name)}"
        )
    else:
        if name == "auto":
            name = "detections" if selected else "rel-l2"
        measure = _of_outputs(name, selected)
    largest = TOLERANCE if tolerance is None else tolerance
    if name == "snr" and tolerance is not None:
        largest = from_decibels(tolerance)
    return Metric(
        name=name,
        tolerance=largest,
        measure=_accepted(measure, accept),
        squared=name in _SQUARED,
        made_from=made_from,
    )


def _of_outputs(name: str, selected: frozenset[str]) -> Measure:
    """Return the worst error of all outputs by a metric of this name."""
    of_output = _OF_OUTPUT.get(name, _OF_OUTPUT["rel-l2"])

    def measure(reference: Outputs, result: Outputs) -> float:
        listed = frozenset[str]()
        if name == "detections":
            listed = selected or frozenset(reference)
        _, diffs = compare_matched(reference, result, listed)
        if any(diff.alarm and diff.bad and diff.bad.kind != "zero" for diff in diffs):
            return inf
        floats = [diff for diff in diffs if diff.is_float]
        if not floats:  # the outputs are labels, pixels or texts
            errors = [min(diff.differing, diff.rel_l2) for diff in diffs]
            return max(errors, default=0.0)
        candidates = (
            of_output(diff) if diff.detections is None else diff.detections
            for diff in floats
        )
        errors = [error for error in candidates if error is not None]
        if not errors and any(diff.size for diff in floats):
            raise ArgumentError(
                f"No output of the model can be measured by {name!r}: {_NEEDS[name]}. Choose another metric, such as"
                " 'rel-l2'."
            )
        return max(errors, default=0.0)

    return measure


def _measured(name: str, function: Callable[..., Any]) -> Measure:
    """Return the error that a function of the user returns."""

    def measure(reference: Outputs, result: Outputs) -> float:
        error = called("metric", name, function, reference, result)
        if isinstance(error, (bool, np.bool_)):
            raise ArgumentError(
                f"The metric {name!r} returned {error}, but a metric returns an error, which is 0 for equal outputs:"
                " use accept (--accept) for a function that returns yes or no."
            )
        try:
            return float(error)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"The metric {name!r} must return a number, not {error!r:.80}."
            ) from None

    return measure


def _accepted(judge: Measure, accept: Accept | None) -> Measure:
    """Return the error of a metric, infinite if ``accept`` returns False."""
    if accept is None:
        return judge

    def measure(reference: Outputs, result: Outputs) -> float:
        return judge(reference, result) if accept.takes(reference, result) else inf

    return measure
