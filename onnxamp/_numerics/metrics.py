"""Measures of how far a result is from its reference: their definitions, names, and limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, log10, nan, sqrt
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from onnxamp._dtypes import FORMATS, LOWEST_FIRST

Index: TypeAlias = tuple[int, ...]

DiffMetric: TypeAlias = Literal["auto", "detections", "elements"]
"""How outputs are compared; see :func:`onnxamp.diff_models`."""

RELATIVE_FLOOR: Final = 1e-3
"""Share of the reference's largest magnitude below which an element's error counts relative to this share."""

VANISHED_ABOVE: Final = 0.05
"""Share of the reference's largest magnitude above which a zero in the result is no rounding error."""

AT_MOST: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rel_l2": "relative L2 error",
        "max_abs": "largest absolute error",
        "max_rel": "largest relative error",
        "required_tolerance": "required tolerance",
        "rmse": "RMS error",
        "mean_abs": "mean absolute error",
        "differing": "share of elements that differ",
        "detections": "error of the detections",
    }
)
"""Metrics of :class:`TensorDiff` that a limit bounds from above, in words."""

AT_LEAST: Final[Mapping[str, str]] = MappingProxyType(
    {
        "snr_db": "SNR in dB",
        "cosine": "cosine",
        "argmax_agreement": "top-1 agreement",
        "top5_agreement": "top-5 agreement",
    }
)
"""Those that a limit bounds from below."""

BOUNDS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        **dict.fromkeys(AT_MOST, (0.0, inf)),
        "differing": (0.0, 1.0),
        "snr_db": (-inf, inf),
        "cosine": (-1.0, 1.0),
        "argmax_agreement": (0.0, 1.0),
        "top5_agreement": (0.0, 1.0),
    }
)
"""The least and the largest value that each of them can have."""

TOLERANCES: Final[Mapping[str, float]] = MappingProxyType(
    {"float32": 1e-5, **{low.name: low.tolerance for low in FORMATS.values()}}
)
"""Default limit of the relative L2 error per output, by the lower precision of the two models."""

LOWNESS: Final[Mapping[str, int]] = MappingProxyType(
    {name: place for place, name in enumerate((*LOWEST_FIRST, "float32"))}
)
"""Precisions, the lowest first."""


def metric_name(metric: str) -> str:
    """A metric in words."""
    return AT_MOST.get(metric) or AT_LEAST.get(metric) or metric


def decibels(relative_l2: float) -> float:
    """Signal-to-noise ratio in decibels of a relative L2 error; inf if it is zero."""
    if relative_l2 == 0:
        return inf
    return -20 * log10(relative_l2) if isfinite(relative_l2) else -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What all metrics derive from, of a result *f* and its reference *r*: the one place that defines them.

    NumPy fills it for outputs (:mod:`onnxamp._numerics.compare`), ONNX Runtime for all other values
    (:mod:`onnxamp._numerics.measure`), each over the elements that its documentation names.

    Attributes:
        elements: their number.
        error_sum: sum of abs(f - r).
        error_norm: Euclidean norm of f - r.
        reference_norm: Euclidean norm of r.
        dot: r . f, over elements where both are finite.
        dot_energies: sums of r^2 and of f^2 over these, in units in which ``dot`` has the product of both.
        is_comparable: whether there are such elements, or nothing differs.
    """

    elements: int
    error_sum: float
    error_norm: float
    reference_norm: float
    dot: float
    dot_energies: tuple[float, float]
    is_comparable: bool

    @property
    def mean_abs(self) -> float:
        """Mean abs(f - r)."""
        return self.error_sum / self.elements if self.elements else 0.0

    @property
    def rmse(self) -> float:
        """Root of the mean (f - r)^2."""
        return self.error_norm / sqrt(self.elements)

    @property
    def rel_l2(self) -> float:
        """Norm of f - r relative to that of r: 0 if equal, infinite if only r is zero."""
        if self.error_norm == 0:
            return 0.0
        return self.error_norm / self.reference_norm if self.reference_norm else inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between r and f: 1 if both are zero, NaN if no elements can be compared."""
        if not self.is_comparable:
            return nan
        reference, found = self.dot_energies
        norms = sqrt(reference) * sqrt(found)
        if norms == 0:
            return 1.0 if reference == found else 0.0
        return max(-1.0, min(1.0, self.dot / norms))


@dataclass(frozen=True, slots=True)
class Bad:
    """The first element that fails whatever the tolerance: ``kind`` is "NaN", "Inf" or "zero" (vanished)."""

    kind: str
    index: Index
    reference: float
    count: int
    """Number of elements that fail in the same way."""
    sample: int = 0


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """Differences between a reference *a* and a result *b* of the same shape, computed in float64.

    Elements that are NaN on both sides, or the same infinity, are equal. Where one side alone is not finite, the error
    is infinite. Let *e* = abs(*a* - *b*), and ‖.‖ the Euclidean norm over all elements:

    ======================  ================================================================================
    ``mean_abs``            mean e
    ``max_abs``             max e
    ``max_rel``             max e / max(abs(a), 0.001 max abs(a)); the floor is for zeros of a
    ``required_tolerance``  least t with e <= t + t abs(a), as numpy.allclose with atol = rtol = t
    ``rel_l2``              ‖a - b‖ / ‖a‖
    ``rmse``                sqrt(mean e²)
    ``snr_db``              20 log10(‖a‖ / ‖a - b‖), signal-to-noise ratio in decibels; inf if equal
    ``cosine``              a · b / (‖a‖ ‖b‖) where both are finite; 1 if both are zero,
                            NaN if no position is finite on both sides and they differ
    ``argmax_agreement``    share of rows (last axis) in which b's largest element is a largest one of a
    ``top5_agreement``      mean share of b's five largest elements of a row that are among a's five largest
    ``differing``           share of elements that are not equal
    ``vanished``            number of floats that are exactly 0 in b, with abs(a) > 0.05 max abs(a), as after
                            an overflow that was divided away or a scale that was flushed
    ======================  ================================================================================

    Maxima and norms of *a* are over finite elements. Integers and booleans count as numbers, but do not vanish. For
    strings *e* is 0 or 1. If the shapes differ, all errors are infinite; for empty tensors all are 0.

    Over several samples (:func:`onnxamp._numerics.compare.merge`) maxima, ratios and the cosine are those of the worst
    sample, means and shares are over all elements or rows, and counts add up.
    """

    name: str
    reference_shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    reference_dtype: str
    result_dtype: str
    size: int
    mean_abs: float
    max_abs: float
    max_rel: float
    required_tolerance: float
    rel_l2: float
    rmse: float
    snr_db: float
    cosine: float
    argmax_agreement: float | None
    """None for scalars, for strings, and if the last axis has fewer than two elements."""
    top5_agreement: float | None
    """None for scalars, for strings, and if the last axis has fewer than ten elements."""
    differing: float
    reference_nan: int
    result_nan: int
    reference_inf: int
    result_inf: int
    reference_zero: int
    result_zero: int
    worst_index: Index | None
    """The first element with the largest *e*; None for empty tensors and different shapes."""
    worst_reference: float | str | None
    worst_result: float | str | None
    vanished: int
    bad: Bad | None
    worst_sample: int = 0
    """Number of the sample, from 0, that ``worst_index`` belongs to."""
    detections: float | None = None
    """Error of the detections that the output lists; everything else is then over matched rows. None for others."""

    @property
    def is_float(self) -> bool:
        """Whether the reference holds floats."""
        return "float" in self.reference_dtype

    @property
    def alarm(self) -> str | None:
        """One sentence if the result fails whatever the tolerance: shape, NaN, Inf, vanished values, in this order."""
        if self.reference_shape != self.result_shape:
            return f"The shape is {self.result_shape} instead of {self.reference_shape}."
        if self.bad is None:
            return None
        count = f"{self.bad.count} of {self.size} elements"
        where = (
            f"the first at {list(self.bad.index)}, where the reference is {self.bad.reference:.6g}"
        )
        if self.bad.kind == "zero":
            return f"Values vanished: {count} are exactly zero without cause, {where}."
        return f"{self.bad.kind} where the reference is finite: {count}, {where}."
