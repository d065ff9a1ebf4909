"""Measures of how far a result is from its reference: their definitions, names, and limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import exp, inf, isfinite, log, log10, nan, sqrt
from operator import add, attrgetter
from types import MappingProxyType
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

from onnxamp._base.records import record
from onnxamp._facts.dtypes import FORMATS, LOWEST_FIRST

Index: TypeAlias = tuple[int, ...]


RELATIVE_FLOOR: Final = 1e-3
"""Share of the reference's largest magnitude that bounds the divisor of an element's relative error from below."""

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
        "kl_divergence": "KL divergence",
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
"""The metrics that a limit bounds from below."""

_OTHERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "part_rel_l2": "relative L2 error",
        "typical_rel_l2": "typical relative L2 error of the samples",
        "usual_rel_l2": "relative L2 error of the first samples",
    }
)
"""Metrics that only default limits bound."""

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
    """Return a metric in words."""
    return AT_MOST.get(metric) or AT_LEAST.get(metric) or _OTHERS.get(metric, metric)


def decibels(error: float) -> float:
    """Return the signal-to-noise ratio in decibels of a relative L2 error; inf if it is zero."""
    if error == 0:
        return inf
    return -20 * log10(error) if isfinite(error) else -inf


def from_decibels(ratio: float) -> float:
    """Return the relative L2 error of a signal-to-noise ratio in decibels."""
    return float(10 ** (-ratio / 20))


@record(kw_only=True)
class Sums:
    """The quantities from which all metrics of a result *f* and its reference *r* derive: the one place that defines
    them.

    :class:`TensorDiff` derives them for outputs, :class:`Measurement` for all other values, each over the elements
    that its documentation names.

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
        reference, result = self.dot_energies
        norms = sqrt(reference) * sqrt(result)
        if norms == 0:
            return 1.0 if reference == result else 0.0
        return max(-1.0, min(1.0, self.dot / norms))


@record
class Bad:
    """The first element that fails at any tolerance: ``kind`` is "NaN", "Inf" or "zero" (vanished)."""

    kind: str
    index: Index
    reference: float
    count: int
    """Number of elements that fail in the same way."""
    sample: int = 0


@dataclass(frozen=True, slots=True, order=True)
class PartError:
    """The relative L2 error of one of the values that an output joins, or of its small numbers."""

    rel_l2: float
    value: str
    """The value; the output itself, if these are some of its numbers."""
    numbers: str = ""
    """Which of its numbers: "64 of about 0.001, the first at [0, 64]"; "" for all."""

    @property
    def told(self) -> str:
        """The part in words."""
        if self.numbers:
            return f"its small numbers ({self.numbers})"
        return f"its part {self.value!r}"


@record(kw_only=True)
class TensorDiff:
    """Differences between a reference *a* and a result *b* of the same shape, computed in float64.

    Elements that are NaN on both sides, or the same infinity, are equal. If only one side is not finite, the error is
    infinite. Let *e* = abs(*a* - *b*), and ‖.‖ the Euclidean norm over all elements:

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
    ``kl_divergence``       mean Σ p ln(p / q) over rows, in nats, with p = softmax(a) and q = softmax(b)
    ``differing``           share of elements that are not equal
    ``vanished``            number of floats that are exactly 0 in b, with abs(a) > 0.05 max abs(a), as after
                            an overflow that was divided away or a scale that was flushed; 0 if a holds
                            zeros and one other number, of which b keeps some
    ======================  ================================================================================

    Maxima and norms of *a* are over finite elements. Where abs(*a*) >= 1e30, as in masks, elements are compared apart:
    what is relative to a norm or to the largest number is the worse of theirs and of all others'. Integers and booleans
    count as numbers, but do not vanish. For strings *e* is 0 or 1. If the shapes differ, all errors are infinite; for
    empty tensors all are 0.

    Over several samples (:func:`onnxamp._numerics.differences.merge.merge`) maxima, ratios and the cosine are those
    of the worst sample, means and shares are over all elements or rows, and counts add up.
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
    argmax_agreement: float | None = None
    """None for scalars, strings and integers of more than a byte, and if the last axis has fewer than two elements."""
    top5_agreement: float | None = None
    """None for the same, and if the last axis has fewer than ten elements."""
    differing: float = 0.0
    reference_nan: int = 0
    result_nan: int = 0
    reference_inf: int = 0
    result_inf: int = 0
    reference_zero: int = 0
    result_zero: int = 0
    worst_index: Index | None = None
    """The first element with the largest *e*; None for empty tensors and different shapes."""
    worst_reference: float | str | None = None
    worst_result: float | str | None = None
    vanished: int = 0
    bad: Bad | None = None
    worst_sample: int = 0
    """Number of the sample, from 0, that ``worst_index`` belongs to."""
    kl_divergence: float | None = None
    """None unless the output is called logits. The distribution of a row is that of the next token, or of a class."""
    detections: float | None = None
    """Error of the detections that the output lists; everything else is then over matched rows. None for others."""
    part: PartError | None = None
    """The worst of its parts: of those that a Concat joins in it, and of the groups of numbers far below its largest;
    None if there are none."""

    typical_rel_l2: float = 0.0
    """Over several samples, the root of the mean of ``rel_l2`` squared."""
    usual_rel_l2: float | None = None
    """``rel_l2`` on the samples that a verdict takes first; None if it took no more."""
    are_whole: bool = False
    """Whether both hold nothing but whole numbers, of which some of the reference are 0, as labels do."""

    @property
    def part_rel_l2(self) -> float | None:
        """The error of the worst part."""
        return None if self.part is None else self.part.rel_l2

    @property
    def has_vanished(self) -> bool:
        """Whether vanished values are the worst that is wrong with it."""
        same_shapes = self.reference_shape == self.result_shape
        return same_shapes and self.bad is not None and self.bad.kind == "zero"

    @property
    def is_float(self) -> bool:
        """Whether the reference holds floats."""
        return "float" in self.reference_dtype

    @property
    def alarm(self) -> str | None:
        """One sentence if the result fails at any tolerance: shape, NaN, Inf, vanished values, in this order."""
        if self.reference_shape != self.result_shape:
            return (
                f"The shape is {self.result_shape} instead of {self.reference_shape}."
            )
        if self.bad is None:
            return None
        count = f"{self.bad.count} of {self.size} elements"
        where = f"the first at {list(self.bad.index)}, where the reference is {self.bad.reference:.6g}"
        if self.bad.kind == "zero":
            return f"Values vanished: {count} are exactly zero without cause, {where}."
        return f"{self.bad.kind} where the reference is finite: {count}, {where}."


def metric_of(metric: str, output: TensorDiff | None) -> str:
    """Return a metric of an output in words, with the part of the output if it is the error of a part."""
    name = metric_name(metric)
    if metric != "part_rel_l2" or output is None or output.part is None:
        return name
    return f"{name} of {output.part.told}"


@record
class Perplexity:
    """The quality of two decoders' predictions of texts: exp(-mean ln p) over all tokens but the first of each sample.

    Attributes:
        tokens: number of tokens that were predicted.
        reference: perplexity of the reference, where p is the probability that it gives to the token that follows.
        result: that of the result.
    """

    tokens: int
    reference: float
    result: float

    @classmethod
    def of(cls, tokens: int, reference: float, result: float) -> "Perplexity":
        """Return the perplexities for sums of -ln p over that many tokens."""
        of_sums = (_exp(total / tokens) for total in (reference, result))
        return cls(tokens, *of_sums)

    def __add__(self, other: "Perplexity") -> "Perplexity":
        """Both together."""
        pairs = (self.reference, other.reference), (self.result, other.result)
        sums = (self.tokens * log(a) + other.tokens * log(b) for a, b in pairs)
        return Perplexity.of(self.tokens + other.tokens, *sums)


def _exp(x: float) -> float:
    """Return the exponential function; infinite where it does not fit."""
    return exp(x) if x < _LARGEST_EXPONENT else inf if x > 0 else nan


_LARGEST_EXPONENT: Final = 709.0
"""The largest whole number whose exponential is a float64."""


@record
class Measurement:
    """The difference of a tensor *f* from its reference *r*, over one or more samples of the same value.

    Energies are sums of squares over elements where f is finite and |r| < 1e30: larger numbers are sentinels, as in
    attention masks, and may saturate. Counts are numbers of elements.
    """

    elements: int = 0
    error_sum: float = 0.0
    """sum of |f - r|"""
    error_energy: float = 0.0
    """sum of (f - r)^2"""
    error_max: float = 0.0
    """max |f - r|"""
    reference_energy: float = 0.0
    """sum of r^2"""
    found_energy: float = 0.0
    """sum of f^2"""
    reference_max: float = 0.0
    """max |r| below 1e30"""
    found_max: float = 0.0
    """max |f| over finite f"""
    reference_least: float = inf
    """min |r| below 1e30 that is not zero; inf where there is none"""
    reference_nan: int = 0
    found_nan: int = 0
    reference_inf: int = 0
    found_inf: int = 0
    reference_zero: int = 0
    found_zero: int = 0
    broken: int = 0
    """f is NaN where r is none, or infinite where |r| < 1e30"""
    flushed: int = 0
    """f is zero where r is not"""
    vanished: int = 0
    """f is zero where |r| is more than 5 % of ``reference_max``"""

    @property
    def sums(self) -> Sums:
        """The quantities from which metrics derive."""
        return Sums(
            elements=self.elements,
            error_sum=self.error_sum,
            error_norm=sqrt(self.error_energy),
            reference_norm=sqrt(self.reference_energy),
            dot=(self.reference_energy + self.found_energy - self.error_energy) / 2,
            dot_energies=(self.reference_energy, self.found_energy),
            is_comparable=self.elements > 0 and isfinite(self.error_energy),
        )

    @property
    def rel_l2(self) -> float:
        """Relative L2 error as :attr:`Sums.rel_l2`; infinite if f breaks."""
        return inf if self.broken else self.sums.rel_l2

    @property
    def snr_db(self) -> float:
        """Signal-to-noise ratio, -20 log10 of :attr:`rel_l2`, in decibels; inf if equal."""
        return decibels(self.rel_l2)

    @property
    def cosine(self) -> float:
        """Cosine as :attr:`Sums.cosine`, over finite elements."""
        return self.sums.cosine

    @property
    def mean_abs(self) -> float:
        """Mean |f - r|."""
        return self.sums.mean_abs

    @property
    def alarm(self) -> str | None:
        """A few words about a failure at any tolerance: NaN, Inf, or vanished values."""
        new = self.found_nan - self.reference_nan
        if new > 0:
            return f"NaN in {new} of {self.elements} elements"
        if self.broken and self.found_inf <= self.reference_inf:
            return f"NaN in {self.broken} of {self.elements} elements, where the reference has none"
        if self.broken:
            return f"Inf in {self.broken} of {self.elements} elements, where the largest is {self.reference_max:.4g}"
        if self.vanished:
            return f"{self.vanished} of {self.elements} elements vanished: they are zero where the reference is not small"
        return None

    def __add__(self, other: "Measurement") -> "Measurement":
        """Both together: sums add, maxima and minima are the outer ones."""
        pairs = zip(_JOINS, _numbers(self), _numbers(other), strict=True)
        return Measurement(*[join(one, more) for join, one, more in pairs])

    def __reduce__(self) -> tuple[type["Measurement"], tuple[Any, ...]]:
        """Pickled as its numbers alone: workers send one for each value of each sample."""
        return Measurement, _numbers(self)

    def times(self, factor: float) -> "Measurement":
        """Return the sums for both tensors multiplied by a positive factor."""
        if factor == 1:
            return self
        sizes = {name: getattr(self, name) * factor for name in ("error_sum", *_JOIN)}
        energies = ("error_energy", "reference_energy", "found_energy")
        return replace(
            self,
            **sizes,
            **{name: getattr(self, name) * factor**2 for name in energies},
        )


_JOIN: Final[Mapping[str, Callable[..., Any]]] = {
    "error_max": max,
    "reference_max": max,
    "found_max": max,
    "reference_least": min,
}
"""Functions that merge a field of two samples; all other fields are added."""

_NAMES: Final = tuple(field.name for field in fields(Measurement))
_JOINS: Final[tuple[Callable[..., Any], ...]] = tuple(
    _JOIN.get(name, add) for name in _NAMES
)
_numbers: Final[Callable[[Measurement], tuple[Any, ...]]] = attrgetter(*_NAMES)


class _Sum(Protocol):
    def __add__(self, other: Self, /) -> Self: ...


K = TypeVar("K")
S = TypeVar("S", bound=_Sum)


def both(one: S | None, other: S | None) -> S | None:
    """Return two measurements together, or the one that there is."""
    return one + other if one is not None and other is not None else one or other


def join(total: dict[K, S], more: Mapping[K, S]) -> None:
    """Add measurements of another sample to those so far, each to that of the same key."""
    for key, one in more.items():
        total[key] = total[key] + one if key in total else one
