"""The agreement of two models on the rows of an output: on their largest elements, and on their distributions."""

from collections.abc import Iterator

import numpy as np

from onnxamp._numerics.differences.blocks import PART, Array, blocks


def top_agreement(a: Array, b: Array, width: int, k: int) -> float | None:
    """Return the mean share of the k largest elements of each row of *b* that are among the k largest of *a*; ties
    count.
    """
    if width < 2 * k:
        return None
    agreeing = 0
    count = a.size // width * k
    for rows, others in _rows(a, b, width):
        # An element of the result's k largest agrees if the reference has it at or above its own k-th largest.
        top = np.argpartition(others, -k, axis=-1)[:, -k:]
        chosen = np.take_along_axis(rows, top, axis=-1)
        least = np.partition(rows, -k, axis=-1)[:, -k, None]
        agrees = (chosen >= least) | (np.isnan(chosen) & np.isnan(least))
        agrees |= _equal_rows(rows, others)
        agreeing += int(np.count_nonzero(agrees))
    return agreeing / count if count else None


def _rows(a: Array, b: Array, width: int) -> Iterator[tuple[Array, Array]]:
    """Yield rows of two flat tensors in float64, several at a time."""
    for one, other in blocks(a, b, max(1, PART // width) * width):
        yield one.reshape(-1, width), other.reshape(-1, width)


def _equal_rows(rows: Array, others: Array) -> Array:
    """Return which rows are the same on both sides, NaN included, in a column."""
    same = (rows == others) | (np.isnan(rows) & np.isnan(others))
    return np.asarray(same.all(axis=-1, keepdims=True))


def divergence(a: Array, b: Array, width: int) -> float:
    """Return the mean Kullback-Leibler divergence, in nats, of the distributions of rows of logits."""
    divergences = []
    for one, other in _rows(a, b, width):
        p = log_softmax(one)
        q = log_softmax(other)
        with np.errstate(invalid="ignore"):
            terms = np.exp(p) * (p - q)
        # The limit for small probabilities, and for logits that are -inf on both sides.
        terms[np.exp(p) == 0] = 0.0
        terms[_equal_rows(one, other)[:, 0]] = 0.0
        divergences.append(terms.sum(axis=-1))
    # No divergence is negative, but rounding may leave a little less than zero.
    return float(np.maximum(np.concatenate(divergences), 0.0).mean())


def log_softmax(logits: Array) -> Array:
    """Return the logarithms of the distributions of rows of logits."""
    # The largest logit is subtracted, as the exponential of a large one would overflow.
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = logits - logits.max(axis=-1, keepdims=True)
        result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
