"""By how much choices are decided, and how far low precision moves what they compare.

Each function takes the numbers that an op reads in the original and in the result, and returns one margin for each
choice that the op makes: an index for each row, a Boolean or an integer for each element, a decision for each box.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from onnxamp._numerics.differences.blocks import Array
from onnxamp._numerics.differences.boxes import corners_of, overlaps_of

MOST: Final = 1 << 22
"""Elements of a value that are looked at: larger ones show as much by their first elements."""


class Counts(NamedTuple):
    """How many choices there are, how many are closer than the error, and how many differ."""

    choices: int
    close: int
    differ: int


class Margins(NamedTuple):
    """The margins of some choices.

    Attributes:
        margin: by how much each is decided in the original.
        error: by how much what it compares differs in the result.
        differs: whether the result decides otherwise.
    """

    margin: Array
    error: Array
    differs: Array

    def counts(self) -> Counts:
        """Return the numbers of choices.

        A choice counts as close if its margin is below the error of what it compares, or below the root mean square of
        all such errors, because that of one number may be small by chance. What is the same in both models has no
        error, however small its margin is.
        """
        error = np.nan_to_num(self.error, nan=np.inf)
        moved = (error > 0) & np.isfinite(error)
        typical = np.sqrt(np.mean(np.square(error[moved]))) if moved.any() else 0.0
        is_close = (error > 0) & (self.margin < np.maximum(error, typical))
        # A result whose choice differs shows by itself that the margin was too small.
        close = np.count_nonzero(is_close | self.differs)
        return Counts(
            self.margin.size, int(close), int(np.count_nonzero(self.differs))
        )


def order(how: str, pair: Sequence[Array], other: Sequence[Array]) -> Margins:
    """Return the margins of comparisons of two numbers each.

    Args:
        how: "equal", "greater", "greater_equal", "less" or "less_equal".
        pair: what the original compares.
        other: what the result compares.
    """
    compare = _COMPARISONS[how]
    one, two = map(_flat, np.broadcast_arrays(*pair))
    other_one, other_two = map(_flat, np.broadcast_arrays(*other))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = one - two
        moved = np.abs(other_one - other_two - gap)
    differs = compare(one, two) != compare(other_one, other_two)
    return Margins(np.abs(gap), moved, differs)


def _flat(numbers: Array) -> Array:
    """Return the first elements in float64."""
    return numbers.reshape(-1)[:MOST].astype(np.float64)


_COMPARISONS: Final[Mapping[str, Callable[[Array, Array], Array]]] = {
    "equal": np.equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
}


def steps(how: str, numbers: Array, other: Array) -> Margins:
    """Return the margins of numbers that become integers.

    Args:
        how: "floor", "ceil", "rint" or "trunc".
        numbers: those of the original.
        other: those of the result.
    """
    before, after = _flat(numbers), _flat(other)
    become = _INTEGERS[how]
    with np.errstate(invalid="ignore", over="ignore"):
        # Half of an integer is where rounding turns; between -1 and 1 truncation does not turn at 0.
        shifted = before - 0.5 if how == "rint" else before
        margin = np.abs(shifted - np.rint(shifted))
        if how == "trunc":
            margin = np.where(np.abs(before) < 1, 1 - np.abs(before), margin)
        return Margins(margin, np.abs(after - before), become(before) != become(after))


_INTEGERS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "ceil": np.ceil,
    "floor": np.floor,
    "rint": np.rint,
    "trunc": np.trunc,
}


def rank(
    numbers: Array, other: Array, *, axis: int, count: int, largest: bool
) -> Margins | None:
    """Return the margins of rows whose largest or smallest elements are chosen; None if all are.

    Args:
        numbers: those of the original.
        other: those of the result.
        axis: the axis along which rows lie.
        count: how many elements of each row are chosen.
        largest: whether these are the largest ones.
    """
    width = numbers.shape[axis] if numbers.ndim else 1
    if not 0 < count < width:
        return None
    rows, others = (_rows(one, axis, largest=largest) for one in (numbers, other))
    chosen, others_chosen = (_chosen(one, count) for one in (rows, others))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(others - rows)
        last = np.where(chosen, rows, np.inf).argmin(-1)[:, None]
        next_ = np.where(chosen, -np.inf, rows).argmax(-1)[:, None]
        margin, moved = (
            np.take_along_axis(rows, last, -1) - np.take_along_axis(rows, next_, -1),
            np.take_along_axis(error, last, -1) + np.take_along_axis(error, next_, -1),
        )
    differs = (chosen != others_chosen).any(-1)
    return Margins(margin[:, 0], moved[:, 0], differs)


def _rows(numbers: Array, axis: int, *, largest: bool) -> Array:
    """Return the first rows in float64, negated if the smallest elements are chosen."""
    moved = np.moveaxis(numbers, axis, -1)
    rows = moved.reshape(-1, moved.shape[-1])
    rows = rows[: max(1, MOST // rows.shape[-1])].astype(np.float64)
    return rows if largest else -rows


def _chosen(rows: Array, count: int) -> Array:
    """Return which elements of each row are among its largest ones; of equal ones, the first are."""
    least = np.partition(rows, -count, axis=-1)[:, -count, None]
    above = rows > least
    equal = rows == least
    room = count - np.count_nonzero(above, axis=-1)[:, None]
    chosen: Array = above | (equal & (np.cumsum(equal, axis=-1) <= room))
    return chosen


_LISTED: Final = 1000
"""Boxes that are kept and looked at: each is compared with all others."""


class Boxes(NamedTuple):
    """What a NonMaxSuppression reads and returns.

    Attributes:
        corners: the boxes, [images, boxes, 4]: least and largest coordinate on both axes.
        scores: [images, classes, boxes].
        kept: image, class and box of each that it keeps.
    """

    corners: Array
    scores: Array
    kept: Array

    @classmethod
    def of(cls, boxes: Array, scores: Array, kept: Array, *, centers: bool) -> "Boxes":
        """Return boxes that are given by corners, or by centers and sizes."""
        given = np.asarray(boxes, np.float64)
        given = corners_of(given) if centers else given
        one, two = given[..., :2], given[..., 2:]
        corners = np.concatenate([np.minimum(one, two), np.maximum(one, two)], -1)
        return cls(corners, np.asarray(scores, np.float64), np.asarray(kept, np.int64))

    def overlaps(self, image: int, box: int) -> Array:
        """Return the intersection over union of a box with each box of its image."""
        every = self.corners[image]
        shares: Array = overlaps_of(every[None, box], every)[0]
        return shares


def boxes(reference: Boxes, result: Boxes, overlap: float, score: float) -> Counts:
    """Count the boxes of each class that are kept or not, and those of which that is close.

    It is close where a score is near the threshold, where an overlap with a box that is kept is near the threshold, or
    where of two boxes that overlap the one with the slightly better score is kept.

    Args:
        overlap: the threshold of the overlap.
        score: that of the score.
    """
    scores, moved = reference.scores, np.abs(result.scores - reference.scores)
    rms = np.sqrt(np.mean(np.square(moved))) if moved.size else 0.0
    error = np.where(moved > 0, np.maximum(moved, rms), 0.0)
    close = np.abs(scores - score) < error
    for image, class_, box in reference.kept[:_LISTED]:
        one, other = (each.overlaps(image, box) for each in (reference, result))
        mine = scores[image, class_]
        errors = error[image, class_]
        is_candidate = mine > score
        is_candidate[box] = False
        is_near = np.abs(one - overlap) < np.abs(other - one)
        is_tied = np.abs(mine - mine[box]) < errors + errors[box]
        close[image, class_] |= is_candidate & (is_near | (is_tied & (one > overlap)))
    kept, others = ({*map(tuple, each.kept.tolist())} for each in (reference, result))
    for place in kept ^ others:
        close[place] = True
    return Counts(scores.size, int(np.count_nonzero(close)), len(kept ^ others))
