"""Rounding with compensation: low-precision weights whose *products* stay near, instead of the weights themselves.

A weight ``W`` of K rows that rows ``X`` of samples are multiplied by is rounded so that ``|X (W - Q)|`` is small, row
after row: what rounding one row of ``W`` adds to the product is taken from the rows that are not rounded yet (optimal
brain surgeon; Frantar et al. 2022, arXiv 2210.17323). Here the grid is that of a float type, so nothing is scaled, and
zeros stay zeros. This module knows no ONNX.

Rows that were not seen are other than the samples. So ``X^T X`` is damped by a multiple of the identity, which keeps
``Q`` near ``W`` itself, and rows that are held out judge: they choose the multiple, and whether ``Q`` is better at all.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from onnxamp._dtypes import Format
from onnxamp._model.lowering import rounded
from onnxamp._optional import require

Floats = NDArray[np.float32]

DAMPING: Final = (0.01, 0.1, 1.0)
"""Multiples of the mean of the diagonal of X^T X that are tried in turn, ..."""
_ENOUGH: Final = 1 / 2
"""... until the error on rows held out is this much of that of rounding to nearest."""
_HELD_OUT: Final = 4
"""One of so many rows judges, and does not compensate."""
_FEWEST: Final = 8
"""Rows below which none is held out: the strongest damping has to do."""
_BLOCK: Final = 64
"""Rows of a weight that are rounded before the rest takes up what they added."""
_WIDTH: Final = 1024
"""Columns that are rounded together: few enough to stay in the processor's cache."""


class Compensation(NamedTuple):
    """A rounded weight, and the norms of its product's errors on all rows: rounded to nearest, and with compensation.

    ``signal`` is the norm of the product itself.
    """

    weight: Floats
    nearest: float
    compensated: float
    signal: float


def compensate(weight: Floats, rows: Floats, low: Format) -> Compensation | None:
    """Round a weight with compensation; None where all rows together, or those held out, gain nothing.

    Args:
        weight: G matrices of K rows and N columns.
        rows: G matrices of any number of rows and K columns, which these are multiplied by.
        low: the type to round to.

    Complexity: G (K^3 + K^2 (rows + N)) for each multiple of :data:`DAMPING`.
    """
    nearest = rounded(weight, low, low.max_finite)
    if (
        not np.isfinite(weight).all()
        or np.abs(nearest).max(initial=0.0) >= low.max_finite
        or not rows.any()
    ):
        return None
    count = rows.shape[1]
    judges = count // _HELD_OUT if count >= _FEWEST else 0
    result = _best(
        weight, nearest, rows[:, : count - judges], rows[:, count - judges :], low
    )
    if result is None:
        return None
    before, after = (error_norm(rows, weight, other) for other in (nearest, result))
    if after >= before:  # where rows are few, those held out may be alone in gaining
        return None
    return Compensation(
        result, before, after, error_norm(rows, weight, np.zeros_like(weight))
    )


def _best(
    weight: Floats, nearest: Floats, rows: Floats, others: Floats, low: Format
) -> Floats | None:
    """The weight rounded on some rows with the damping that is best on others; None where that is to nearest.

    Where there are no others, the strongest damping has to do.
    """
    gram, is_judged = _gram(rows), others.shape[1] > 0
    judges = others if is_judged else rows
    before = least = error_norm(judges, weight, nearest)
    best = None
    for damping in DAMPING if is_judged else DAMPING[-1:]:
        result = _rounded(weight, gram, damping, low)
        error = error_norm(judges, weight, result)
        if error < least and np.abs(result).max(initial=0.0) < low.max_finite:
            best, least = result, error
        if least <= _ENOUGH * before:
            break
    return best


def error_norm(rows: Floats, weight: Floats, other: Floats) -> float:
    """The norm of the difference of two products."""
    columns = (
        slice(start, start + _WIDTH) for start in range(0, weight.shape[2], _WIDTH)
    )
    parts = (rows @ (weight[:, :, part] - other[:, :, part]) for part in columns)
    return float(
        np.sqrt(sum(np.square(part, dtype=np.float64).sum() for part in parts))
    )


def _gram(rows: Floats) -> Floats:
    """X^T X of each group, with a mean diagonal of 1."""
    means = np.sqrt(np.square(rows, dtype=np.float64).sum((1, 2)) / rows.shape[2])
    scaled = (rows / np.where(means > 0, means, 1.0)[:, None, None]).astype(np.float32)
    return scaled.swapaxes(1, 2) @ scaled


def _rounded(weight: Floats, gram: Floats, damping: float, low: Format) -> Floats:
    """The weight rounded row by row, those first that count most."""
    order = np.argsort(-np.diagonal(gram, axis1=1, axis2=2), axis=1, kind="stable")
    factors = np.stack(
        [
            _factor(group[np.ix_(rank, rank)], damping)
            for group, rank in zip(gram, order, strict=True)
        ]
    )
    placed = np.take_along_axis(weight, order[:, :, None], axis=1)
    for start in range(0, placed.shape[2], _WIDTH):
        _round_columns(placed[:, :, start : start + _WIDTH], factors, low)
    result = np.empty_like(placed)
    np.put_along_axis(result, order[:, :, None], placed, axis=1)
    return result


def _factor(gram: Floats, damping: float) -> Floats:
    """The upper U with ``U^T U`` the inverse of the damped matrix, and rows divided by their diagonal elements."""
    require("scipy", "Compensated rounding needs scipy", "measure")
    from scipy.linalg import lapack  # noqa: PLC0415 - importing it costs memory, and most conversions need it not

    backwards = np.asfortranarray(
        gram[::-1, ::-1]
    )  # of which the Cholesky factor is that of an upper R: gram = R R^T
    backwards[np.diag_indices(len(gram))] += damping
    lower, _ = lapack.spotrf(backwards, lower=1, overwrite_a=1)
    inverse, _ = lapack.strtri(lower, lower=1, overwrite_c=1)
    upper = inverse[::-1, ::-1]
    return np.triu(upper / np.diagonal(upper)[:, None])


def _round_columns(weight: Floats, factors: Floats, low: Format) -> None:
    """Round some columns in place."""
    kept, size = weight != 0, weight.shape[1]
    kind = helper.tensor_dtype_to_np_dtype(low.elem)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        block = weight[:, start:stop].copy()
        errors = np.empty_like(block)
        for row in range(stop - start):
            exact = block[:, row]
            near = exact.astype(kind).astype(np.float32) * kept[:, start + row]
            errors[:, row] = exact - near
            weight[:, start + row] = near
            block[:, row + 1 :] -= (
                factors[:, start + row, start + row + 1 : stop, None]
                * errors[:, row, None, :]
            )
        weight[:, stop:] -= np.swapaxes(factors[:, start:stop, stop:], 1, 2) @ errors
