"""What tuning holds to its tolerance: one number per run, the smaller the better.

Prices add up as squares: errors that have nothing to do with each other add up like that, as long as they are small.
That is so for the relative L2 error and the ratio in dB that is made of it; for the share of rows with another largest
element, since rows flip in proportion to the error; but not for the cosine distance d, which is half the squared angle:
there :attr:`Metric.amplitude` is the angle, sqrt(2 d). A function of the user's is taken as it is. Where it adds up in
another way, predictions are off, and candidates are tried in a worse order; what is written has been measured all the
same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import inf, sqrt
from typing import Final, TypeAlias

import numpy as np

from onnxamp._errors import ArgumentError
from onnxamp._numerics.compare import compare_outputs
from onnxamp._numerics.metrics import TensorDiff
from onnxamp._runtime.engines import Outputs

Measure: TypeAlias = Callable[[Outputs, Outputs], float]
"""Error of a result against its reference; infinite where it is broken."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, and the largest error that is accepted."""

    name: str
    tolerance: float
    measure: Measure
    squared: bool = False
    """Whether it is a square already: then its root adds up as squares."""

    def amplitude(self, error: float) -> float:
        """What adds up as squares; :meth:`of_amplitude` leads back."""
        return sqrt(2 * error) if self.squared else error

    def of_amplitude(self, amplitude: float) -> float:
        """The error of that amplitude."""
        return amplitude**2 / 2 if self.squared else amplitude

    def error(self, reference: Outputs, result: Outputs) -> float:
        """The error of a result; infinite where it is no number."""
        found = self.measure(reference, result)
        return max(found, 0.0) if np.isfinite(found) else inf

    def holds(self, error: float) -> bool:
        """Whether an error is within the tolerance."""
        return error <= self.tolerance


_OF_OUTPUT: Final[Mapping[str, Callable[[TensorDiff], float]]] = {
    "rel-l2": lambda diff: diff.rel_l2,
    "cosine": lambda diff: 1 - diff.cosine,
    "snr": lambda diff: diff.rel_l2,
    "top1": lambda diff: 0.0 if diff.argmax_agreement is None else 1 - diff.argmax_agreement,
}
"""Metric -> the error of one float output."""

METRICS: Final = tuple(_OF_OUTPUT)


def make_metric(name: str, tolerance: float) -> Metric:
    """A metric by name.

    Args:
        name: "rel-l2": relative L2 error; "cosine": 1 - cosine; "snr": signal-to-noise ratio in dB, of which the
            tolerance is the least; "top1": share of rows whose largest element is another one; or "package:function",
            called with the outputs of the reference and of the result, by name. Of several outputs the worst counts.
        tolerance: the largest error that is accepted (for "snr": the least ratio).

    Raises:
        ArgumentError: there is no such metric, or the tolerance is no positive number.
    """
    if not np.isfinite(tolerance) or tolerance <= 0:
        raise ArgumentError(f"The tolerance must be a positive number, not {tolerance}.")
    if ":" in name:
        return Metric(name, tolerance, _function(name))
    if name not in _OF_OUTPUT:
        raise ArgumentError(f"Unknown metric {name!r}: choose one of {', '.join(METRICS)}, or 'package:function'.")
    of_output = _OF_OUTPUT[name]

    def measure(reference: Outputs, result: Outputs) -> float:
        diffs = [diff for key, value in reference.items() for diff in compare_outputs(key, value, result[key])]
        if any(diff.alarm and diff.bad and diff.bad.kind != "zero" for diff in diffs):
            return inf
        return max((of_output(diff) for diff in diffs if diff.is_float), default=0.0)

    return Metric(name, 10 ** (-tolerance / 20) if name == "snr" else tolerance, measure, squared=name == "cosine")


def _function(name: str) -> Measure:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"The metric {name!r} cannot be imported: {error}.") from None
    if not callable(found):
        raise ArgumentError(f"The metric {name!r} is no function.")

    def measure(reference: Outputs, result: Outputs) -> float:
        error = found(dict(reference), dict(result))
        try:
            return float(error)
        except (TypeError, ValueError):
            raise ArgumentError(f"The metric {name!r} must return a number, not {error!r:.80}.") from None

    return measure
