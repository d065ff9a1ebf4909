"""Groups of numbers of very different magnitude within one tensor, each with an error of its own.

The norm of a whole tensor is that of its largest numbers. If a column of scores stands beside columns of pixels, all of
the scores may be lost, and the norm does not tell. So the numbers are grouped by magnitude: one by one, and as the
slices along each axis. Where magnitudes leave a gap, what is below it is a group that is judged by its own norm.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod, sqrt
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp._base.records import record
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.differences.metrics import Index

Array: TypeAlias = npt.NDArray[Any]

_GAP: Final = 5
"""Binary orders of magnitude from one group to the next, so that a factor of at least 16 lies between their numbers.
Numbers that are small by chance, as sums that cancel, leave no such gap: of n of them, the k-th smallest is about k/n.
"""

_APART: Final = 1e-2
"""Share of the largest group's magnitude below which the norm of the whole hides a group."""

_NOISE: Final = 2.0**-24
"""Share of the largest group's magnitude below which numbers are what rounding in float32 leaves of zeros, such as the
imaginary part of a spectrum at its last frequency.
"""

_FILL: Final = 1e3
"""The smallest number that is taken for one that fills gaps: shares of 1 and clipped numbers are smaller."""

_LEAST: Final = 16
"""Elements of a group that is judged: few numbers may be small by chance."""

_BLOCK: Final = 1 << 16
"""Elements that are compared at once, so that their float64 temporaries stay in the cache."""

_RUN: Final = 16
"""The width of rows into which a tensor of one axis is cut: it may hold rows or columns that were strung together."""

_ELEMENTS: Final = -1
"""The axis of groups of single numbers."""

_EXPONENTS: Final = 2048
"""Binary exponents of float64, as its bits hold them."""

_FRACTION: Final = 23
"""The bits of a float32 number after its exponent."""

_BIAS: Final = 127
"""The exponent of 1, as the bits of float32 hold it."""

_LARGEST: Final = _BIAS + int(np.log2(SENTINEL))
"""The exponent from which on numbers may be masks."""


@record
class Group:
    """Numbers of a tensor, or slices of it along an axis, whose magnitudes are close, over one or more samples.

    Magnitudes are those of the reference, over elements that are not zero.
    """

    axis: int
    low: int
    """Binary exponent of the smallest magnitude."""
    high: int
    """That of the largest."""
    elements: int
    reference_energy: float
    error_energy: float
    first: Index = ()
    """The first of its elements."""
    is_fill: bool = False
    """Whether all elements are the same large number, as where a mask filled them in."""

    @property
    def magnitude(self) -> float:
        """Root mean square of the elements."""
        return sqrt(self.reference_energy / self.elements)

    @property
    def told(self) -> str:
        """The group in words."""
        where = f"the first at {list(self.first)}"
        return f"{self.elements:,} of about {self.magnitude:.2g}, {where}"

    def __add__(self, other: "Group") -> "Group":
        """Both together."""
        return Group(
            axis=self.axis,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            elements=self.elements + other.elements,
            reference_energy=self.reference_energy + other.reference_energy,
            error_energy=self.error_energy + other.error_energy,
            first=self.first,
            is_fill=self.is_fill and other.is_fill,
        )

    def overlaps(self, other: "Group") -> bool:
        """Return whether both are along one axis and have magnitudes in common."""
        is_along = self.axis == other.axis
        return is_along and self.low <= other.high and other.low <= self.high

    def starting(self, at: int, shape: Sequence[int]) -> "Group":
        """Return the group with the flat index of its first element in a tensor."""
        return replace(self, first=tuple(map(int, np.unravel_index(at, shape))))

    def error(self, floor: float = 0.0) -> float:
        """Return the relative L2 error, as if no element were smaller than a floor."""
        least = self.elements * floor**2
        return sqrt(self.error_energy / max(self.reference_energy, least))


def united(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the groups along each axis, the smallest first, those without a gap between them as one."""
    by_axis = dict[int, list[Group]]()
    for group in sorted(groups, key=lambda group: group.low):
        along = by_axis.setdefault(group.axis, [])
        if along and group.low - along[-1].high < _GAP:
            along[-1] += group
        else:
            along.append(group)
    return list(by_axis.values())


def hidden_groups(groups: Iterable[Group]) -> Iterator[Group]:
    """Yield the groups that are judged, because the norm of the whole hides them."""
    for along in united(groups):
        largest = along[-1].magnitude
        # A number that fills gaps takes no part in the sums that leave noise.
        summed = next(
            (node for node in reversed(along) if not node.is_fill), along[-1]
        )
        least = _NOISE * summed.magnitude
        for group in along[:-1]:
            is_hidden = least < group.magnitude <= _APART * largest
            if is_hidden and group.elements >= _LEAST:
                yield group


def hidden_errors(
    reference: Array, results: Sequence[Array | None]
) -> tuple[float, ...]:
    """Return the largest relative L2 error of a group that the norm of the whole hides, for each result.

    It is 0 if there is no such group, and for what is no result.
    """
    may_hide = _may_hide(reference)
    return tuple(
        0.0
        if result is None or not (may_hide or not np.isfinite(result).all())
        else _hidden_error(reference, result)
        for result in results
    )


def _hidden_error(reference: Array, result: Array) -> float:
    """Return the error of one result, as :func:`hidden_errors`."""
    hidden = hidden_groups(groups_of(reference, result))
    return max((group.error() for group in hidden), default=0.0)


def groups_of(reference: Array, result: Array) -> tuple[Group, ...]:
    """Return the groups of numbers of two tensors of floats and of one shape.

    Complexity: linear in the elements, with temporaries for a part of them and for each slice.
    """
    a = _arranged(reference)
    b = _arranged(result)
    if reference.size < _LEAST:
        return ()
    numbers = _Sums.empty(_EXPONENTS)
    slices = [_Sums.empty(size) for size in a.shape]
    for place, one, other in _chunks(a, b):
        r, e = _energies(one, other)
        numbers.add_numbers(r, e)
        for axis, sums in enumerate(slices):
            sums.add_slices(place, axis, r, e)
    groups = list[Group]()
    for axis, sums in enumerate(slices):
        exponents = _exponents(sums.magnitudes)
        step = prod(a.shape[axis + 1 :])
        for group in sums.groups(axis, exponents):
            at = int(np.argmax(_is_in(group, exponents)))
            groups.append(group.starting(at * step, reference.shape))
    of_numbers = numbers.groups(_ELEMENTS, np.arange(_EXPONENTS))
    for group in of_numbers:
        groups.append(group.starting(_first_of(group, a, b), reference.shape))
    if len(of_numbers) > 1 and _is_fill(of_numbers[-1], a, b):
        groups[-1] = replace(groups[-1], is_fill=True)
    return tuple(groups)


def _may_hide(reference: Array) -> bool:
    """Return whether the magnitudes of a tensor may leave a gap, if all numbers count. Most leave none, and it takes a
    quarter of the time to see that in float32; where numbers need more than that, they may.
    """
    if reference.size < _LEAST:
        return False
    if reference.dtype.itemsize > np.dtype(np.float32).itemsize:
        return True
    numbers = _arranged(np.asarray(reference, np.float32))
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    # The sign is the bit before the exponent, and is lost.
    counts = np.bincount((bits >> _FRACTION).astype(np.uint8).ravel(), minlength=0x100)
    zeros = numbers.size - int(np.count_nonzero(numbers))
    occurring = np.flatnonzero(counts[1:]) + 1
    if counts[0] > zeros or counts[_LARGEST:].any():
        return True
    # The magnitude of a slice is between those of its numbers.
    if not occurring.size or occurring[-1] - occurring[0] < _GAP:
        return False
    if (np.diff(occurring) >= _GAP).any():
        return True
    one = np.float32(2.0 ** float(_BIAS - occurring[-1]))
    energies = np.square(numbers * one)
    elements = (numbers != 0).astype(np.float32) if zeros else np.ones_like(numbers)
    pairs = zip(_slice_sums(energies), _slice_sums(elements), strict=True)
    return any(_leaves_gap(energy, count) for energy, count in pairs)


def _slice_sums(array: Array) -> Iterator[Array]:
    """Yield the sums of the slices along each axis, from the last axis to the first."""
    while array.ndim:
        yield array.reshape(-1, array.shape[-1]).sum(0)
        array = array.sum(-1)


def _leaves_gap(energies: Array, elements: Array) -> bool:
    """Return whether the magnitudes of slices may leave a gap, one order less than needed: sums are not exact."""
    used = elements > 0
    squares = energies[used] / elements[used]
    if not squares.all():  # too small for float32
        return True
    exponents = np.sort(np.frexp(np.sqrt(squares))[1])
    return bool((np.diff(exponents) >= _GAP - 1).any())


def _arranged(tensor: Array) -> Array:
    """Return a tensor without axes of size 1; one with a single axis in rows, the last one filled up with zeros."""
    array = tensor.reshape([size for size in tensor.shape if size != 1])
    if array.ndim > 1:
        return array
    return np.pad(array.reshape(-1), (0, -array.size % _RUN)).reshape(-1, _RUN)


def _chunks(a: Array, b: Array) -> Iterator[tuple[tuple[slice, ...], Array, Array]]:
    """Yield parts of both tensors in float64, with all their axes, and their places along the first of these."""
    sizes = (prod(a.shape[axis + 1 :]) for axis in range(a.ndim))
    cut = next(axis for axis, size in enumerate(sizes) if size <= _BLOCK)
    step = _BLOCK // max(1, prod(a.shape[cut + 1 :]))
    outer = [range(size) for size in a.shape[:cut]]
    for *index, start in product(*outer, range(0, a.shape[cut], step)):
        place = (*(slice(at, at + 1) for at in index), slice(start, start + step))
        yield place, a[place].astype(np.float64), b[place].astype(np.float64)


def _energies(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the squares of a reference and of the error; 0 where the reference is 0, or one is no number."""
    used = (np.abs(a) < SENTINEL) & np.isfinite(b) & (a != 0)
    r = np.where(used, a, 0.0)
    e = np.where(used, b, 0.0) - r
    return r * r, e * e


def _exponents(magnitudes: Array) -> Array:
    """Return the binary exponents of float64 numbers that are not negative, as their bits hold them."""
    exponents: Array = magnitudes.view(np.int64) >> 52
    return exponents


def _is_in(group: Group, exponents: Array) -> Array:
    """Return which of some magnitudes belong to a group."""
    inside: Array = (exponents >= group.low) & (exponents <= group.high)
    return inside


def _is_fill(group: Group, a: Array, b: Array) -> bool:
    """Return whether all numbers of a group are the same large one."""
    if group.magnitude < _FILL:
        return False
    ends = set[float]()
    for _, one, other in _chunks(a, b):
        squares = _energies(one, other)[0]
        inside = squares[_is_in(group, _exponents(np.sqrt(squares)))]
        if inside.size:
            ends |= {float(inside.min()), float(inside.max())}
    return len(ends) == 1


def _first_of(group: Group, a: Array, b: Array) -> int:
    """Return the flat index of the first number of a group."""
    start = 0
    for _, one, other in _chunks(a, b):
        inside = _is_in(group, _exponents(np.sqrt(_energies(one, other)[0])))
        if inside.any():
            return start + int(np.argmax(inside))
        start += one.size
    return 0


@dataclass(slots=True)
class _Sums:
    """Sums over numbers, by their exponent or by the slice that they belong to."""

    elements: Array
    reference: Array
    error: Array

    @classmethod
    def empty(cls, size: int) -> "_Sums":
        """Return sums over nothing."""
        return cls(*np.zeros((3, size)))

    @property
    def magnitudes(self) -> Array:
        """The root mean squares."""
        magnitudes: Array = np.sqrt(self.reference / np.maximum(self.elements, 1))
        return magnitudes

    def add_numbers(self, r: Array, e: Array) -> None:
        """Add squares to the sums of their exponents."""
        at = _exponents(np.sqrt(r)).ravel()
        self.elements += np.bincount(at, r.ravel() != 0, _EXPONENTS)
        self.reference += np.bincount(at, r.ravel(), _EXPONENTS)
        self.error += np.bincount(at, e.ravel(), _EXPONENTS)

    def add_slices(
        self, place: Sequence[slice], axis: int, r: Array, e: Array
    ) -> None:
        """Add squares at a place of a tensor to the sums of the slices along an axis."""
        at = place[axis] if axis < len(place) else slice(None)
        others = tuple(other for other in range(r.ndim) if other != axis)
        self.elements[at] += np.count_nonzero(r, axis=others)
        self.reference[at] += r.sum(axis=others)
        self.error[at] += e.sum(axis=others)

    def groups(self, axis: int, exponents: Array) -> list[Group]:
        """Return the groups; each sum belongs to one of the exponents."""
        sums = (self.elements, self.reference, self.error)
        counts, reference, error = (
            np.bincount(exponents, total, _EXPONENTS) for total in sums
        )
        single = (
            Group(
                axis=axis,
                low=int(at),
                high=int(at),
                elements=int(counts[at]),
                reference_energy=float(reference[at]),
                error_energy=float(error[at]),
            )
            for at in np.flatnonzero(counts)
        )
        return [group for along in united(single) for group in along]
