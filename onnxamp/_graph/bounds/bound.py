"""The bound of a tensor for every input, and its arithmetic.

A bound holds for the numbers that low precision computes, not only for the exact ones: each operation widens it by its
own rounding, see :meth:`Bound.rounded`. Beside an interval it has norms, because an interval alone grows with every
sum, whereas a normalized row keeps its length however many elements it has.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf, isfinite, isnan, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._base.records import record
from onnxamp._facts.dtypes import Format
from onnxamp._graph.bounds.rounding import Rounding

_FAR: Final = 1e300
"""A number that stands for infinity where a formula multiplies infinity by zero."""

_FINEST: Final = 2.0**-24
"""The smallest step that bounds keep: the smallest number of float16."""

_COARSEST: Final = 2.0**64
"""The step of zeros, which are multiples of any number."""

Curve = Callable[[Any], Any]
"""A function of one number, or of an array of them."""


def times(one: float, other: float) -> float:
    """Return a product in which zero times infinity is zero: an infinite bound stands for finite numbers."""
    return one * other if one and other else 0.0


def step_in(number: float) -> float:
    """Return the largest power of two of which a number is a multiple; 0 if that is too fine to matter."""
    if not isfinite(number):
        return _COARSEST  # what no element reaches needs no step
    multiple = number / _FINEST
    if not multiple.is_integer():
        return 0.0
    if not multiple:
        return _COARSEST
    whole = int(multiple)
    return float(whole & -whole) * _FINEST


def step_of(numbers: NDArray[np.float64]) -> float:
    """Return the largest power of two of which all numbers are multiples; 0 if that is too fine, or some are large."""
    # Most weights show with their first numbers that they are no multiples.
    for some in (numbers.flat[:16], numbers):
        multiples = some / _FINEST
        is_large = not np.abs(multiples).max() < 2.0**62
        if is_large or not np.array_equal(multiples, np.rint(multiples)):
            return 0.0
    bits = int(np.bitwise_or.reduce(multiples.astype(np.int64), axis=None))
    return float(bits & -bits) * _FINEST if bits else _COARSEST


@record
class Bound:
    """A range that all elements of a tensor are in, and limits on the lengths of its vectors.

    Attributes:
        low: the least that an element may be; ``-inf`` if nothing bounds it.
        high: the most that an element may be; ``inf`` if nothing bounds it.
        row: the largest L2 norm of a vector along the last axis.
        column: the largest L2 norm of a vector along the axis before it.
        total: the largest sum of magnitudes along the last axis.
        width: the size of the last axis; None if it is unknown.
        is_single: whether the tensor has one element, so that broadcasting it repeats one number.
        step: a power of two of which all elements are multiples, such as 1 for integers; 0 if none is known. Rounding
            to few digits keeps it, because it makes steps larger.
    """

    low: float = -inf
    high: float = inf
    row: float = inf
    column: float = inf
    total: float = inf
    width: int | None = None
    is_single: bool = False
    step: float = 0.0

    @classmethod
    def of_array(cls, array: NDArray[Any]) -> "Bound":
        """Return the bound of constant numbers. Complexity: linear in them."""
        if not array.size:
            return cls(
                low=0.0, high=0.0, row=0.0, column=0.0, total=0.0, step=_COARSEST
            )
        rows = np.atleast_1d(array.astype(np.float64))
        low = float(rows.min())
        # The least of several numbers is NaN if one of them is.
        if isnan(low):
            return cls(width=rows.shape[-1])
        with np.errstate(all="ignore"):  # infinities stand for masks
            squares = rows * rows
            column = float(np.sqrt(squares.sum(-2).max())) if rows.ndim > 1 else inf
            return cls(
                low=low,
                high=float(rows.max()),
                row=float(np.sqrt(squares.sum(-1).max())),
                column=column,
                total=float(np.abs(rows).sum(-1).max()),
                width=rows.shape[-1],
                is_single=rows.size == 1,
                step=step_of(rows),
            )

    @property
    def magnitude(self) -> float:
        """The largest magnitude that an element may have."""
        return max(abs(self.low), abs(self.high))

    @property
    def bare(self) -> "Bound":
        """The range of the elements alone, for a tensor whose vectors are others."""
        return Bound(low=self.low, high=self.high, step=self.step)

    @property
    def unstepped(self) -> "Bound":
        """The range of means, or other mixtures, of the elements."""
        return Bound(low=self.low, high=self.high)

    @property
    def is_unbounded(self) -> bool:
        """Whether nothing is known of the elements."""
        return self.magnitude == inf

    def sized(self, width: int | None) -> "Bound":
        """Return the bound of a tensor with this last axis; its norms follow from its elements where that is less."""
        row, total = self.row, self.total
        if width is not None:
            root, magnitude = sqrt(width), self.magnitude
            row = min(row, times(root, magnitude))
            total = min(total, times(width, magnitude), times(root, row))
        row = min(row, total)
        largest = min(row, self.column)
        return Bound(
            low=max(self.low, -largest),
            high=min(self.high, largest),
            row=row,
            column=self.column,
            total=total,
            width=width,
            is_single=self.is_single,
            step=self.step,
        )

    def spread(self, width: int | None) -> "Bound":
        """Return the bound after broadcasting the last axis to a size."""
        if self.width is not None and self.width == width:
            return self
        return replace(self.bare, column=self.column).sized(width)

    def rounded(self, by: Rounding, height: int | None = None) -> "Bound":
        """Return the bound of what numbers in this one may be rounded to. None changes its sign.

        Args:
            by: how far rounding moves a number.
            height: the size of the axis before the last one; None if it is unknown.
        """
        low, high = by.downward(self.low), by.upward(self.high)
        if -inf in (low, -high):  # an infinite number has no norm
            return Bound(low=low, high=high, width=self.width, step=self.step)
        return Bound(
            low=low,
            high=high,
            row=by.length(self.row, self.width),
            column=by.length(self.column, height),
            total=by.total(self.total, self.width),
            width=self.width,
            is_single=self.is_single,
            step=self.step,
        )

    def is_exact_in(self, low: Format) -> bool:
        """Return whether a low-precision type holds all elements as they are."""
        magnitude = self.magnitude
        if magnitude > low.max_finite or self.step < low.smallest_subnormal:
            return False
        return magnitude <= low.exact_integers * self.step

    def __neg__(self) -> "Bound":
        """Return the bound of the negated tensor."""
        return replace(self, low=-self.high, high=-self.low)

    def __abs__(self) -> "Bound":
        """Return the bound of the magnitudes."""
        least = max(self.low, -self.high, 0.0)
        return replace(self, low=least, high=self.magnitude)

    def __add__(self, other: "Bound | float") -> "Bound":
        """Return the bound of a sum, with broadcasting."""
        if not isinstance(other, Bound):
            return self.shifted(other)
        one, two, width = aligned(self, other)
        return Bound(
            low=one.low + two.low,
            high=one.high + two.high,
            row=one.row + two.row,
            total=one.total + two.total,
            step=min(one.step, two.step),
        ).sized(width)

    def __sub__(self, other: "Bound | float") -> "Bound":
        """Return the bound of a difference, with broadcasting."""
        return self + -other

    def __mul__(self, other: "Bound | float") -> "Bound":
        """Return the bound of a product, with broadcasting."""
        if not isinstance(other, Bound):
            other = replace(between(other, other), width=1, is_single=True)
        one, two, width = aligned(self, other)
        ends = [
            times(end, factor)
            for end in (one.low, one.high)
            for factor in (two.low, two.high)
        ]
        return Bound(
            low=min(ends),
            high=max(ends),
            row=_scaled(one, two, one.row, two.row),
            column=_scaled_column(self, other),
            total=_scaled(one, two, one.total, two.total),
            step=min(one.step * two.step, _COARSEST),
        ).sized(width)

    def __truediv__(self, other: "Bound | float") -> "Bound":
        """Return the bound of a quotient; nothing bounds it where the divisor may be zero."""
        if not isinstance(other, Bound):
            return self * (1.0 / other)
        return self * other.inverse()

    def inverse(self) -> "Bound":
        """Return the bound of the reciprocals."""
        if self.low <= 0.0 <= self.high:  # of a negative zero, it is negative
            return Bound(width=self.width)
        return between(1.0 / self.high, 1.0 / self.low).sized(self.width)

    def shifted(self, by: float) -> "Bound":
        """Return the bound after adding a number to each element."""
        step = min(self.step, step_in(by))
        return Bound(low=self.low + by, high=self.high + by, step=step).sized(
            self.width
        )

    def clipped(self, low: float, high: float) -> "Bound":
        """Return the bound after each element is brought into a range.

        Norms grow only where the range does not hold zero.
        """
        ends = [min(max(end, low), high) for end in (self.low, self.high)]
        step = min(self.step, step_in(low), step_in(high))
        if low <= 0.0 <= high:
            return replace(self, low=ends[0], high=ends[1], step=step).sized(
                self.width
            )
        return Bound(low=ends[0], high=ends[1], step=step).sized(self.width)

    def through(self, curve: Curve, turn: float | None = None) -> "Bound":
        """Return the bound after a function of each element.

        Args:
            curve: the function. It rises everywhere or falls everywhere, unless it has one turning point.
            turn: where the function turns, from falling to rising or the other way round.
        """
        points = [self.low, self.high]
        if turn is not None and self.low < turn < self.high:
            points.append(turn)
        with np.errstate(all="ignore"):  # the ends of a bound may be infinite
            results = [_limit(curve, point) for point in points]
        if any(map(isnan, results)):
            return Bound(width=self.width)
        return Bound(low=min(results), high=max(results)).sized(self.width)


def _limit(curve: Curve, point: float) -> float:
    """Return a function at a point, or what it tends to where the point is infinite."""
    result = float(curve(np.float64(point)))
    if not isnan(result):
        return result
    # inf * 0, as in x * sigmoid(x): far out, the factor that vanishes has become exactly 0.
    return float(curve(np.float64(np.copysign(_FAR, point))))


def aligned(one: Bound, other: Bound) -> tuple[Bound, Bound, int | None]:
    """Return two bounds broadcast to each other, and the size of the last axis."""
    # Either axis may have one element if both sizes are unknown.
    if one.width is not None and one.width == other.width:
        return one, other, one.width
    known = [bound.width for bound in (one, other)]
    width = next((size for size in known if size not in (None, 1)), None)
    return one.spread(width), other.spread(width), width


def _scaled(one: Bound, two: Bound, norm: float, other: float) -> float:
    """Return the norm of a product of which both factors have a norm."""
    return min(times(norm, two.magnitude), times(other, one.magnitude))


def _scaled_column(one: Bound, two: Bound) -> float:
    """Return the norm along the second axis from the end of a product; unknown unless one factor is a single number.

    Other factors may repeat the axis, which makes its vectors longer.
    """
    if two.is_single:
        return times(one.column, two.magnitude)
    return times(two.column, one.magnitude) if one.is_single else inf


def within(x: Bound, result: Bound) -> Bound:
    """Return the bound of a result of which no element is of larger magnitude than that of ``x``."""
    limited = replace(result, row=x.row, column=x.column, total=x.total)
    return limited.sized(x.width)


def hull(bounds: Iterable[Bound]) -> Bound:
    """Return the bound of a tensor that may be any of several."""
    several = list(bounds)
    widths = {bound.width for bound in several}
    return Bound(
        low=min(bound.low for bound in several),
        high=max(bound.high for bound in several),
        row=max(bound.row for bound in several),
        column=max(bound.column for bound in several),
        total=max(bound.total for bound in several),
        width=widths.pop() if len(widths) == 1 else None,
        step=min(bound.step for bound in several),
    )


def contains(outer: Bound, inner: Bound) -> bool:
    """Return whether all elements of one range are in another one, and multiples of its step."""
    is_inside = outer.low <= inner.low and inner.high <= outer.high
    return is_inside and inner.step >= outer.step


def intersection(one: Bound, other: Bound) -> Bound:
    """Return the bound of a tensor of which two bounds hold."""
    return Bound(
        low=max(one.low, other.low),
        high=min(one.high, other.high),
        row=min(one.row, other.row),
        column=min(one.column, other.column),
        total=min(one.total, other.total),
        width=one.width,
        is_single=one.is_single or other.is_single,
        step=max(one.step, other.step),
    )


def between(low: float, high: float) -> Bound:
    """Return the bound of a tensor of which only a range is known."""
    return Bound(low=low, high=high, step=step_in(low) if low == high else 0.0)


def whole(bound: Bound) -> Bound:
    """Return the bound of a tensor of which all elements are integers."""
    return replace(bound, step=max(bound.step, 1.0))


UNKNOWN: Final = Bound()
"""The bound of a tensor of which nothing is known."""
