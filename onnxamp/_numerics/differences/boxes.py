"""Boxes as their least and largest coordinates on both axes, and how much of them they share."""

import numpy as np

from onnxamp._numerics.differences.blocks import Array


def corners_of(boxes: Array) -> Array:
    """Return the corners of boxes, [..., 4], that are given by centers and sizes."""
    centers, halves = boxes[..., :2], boxes[..., 2:] / 2
    return np.concatenate([centers - halves, centers + halves], axis=-1)


def overlaps_of(one: Array, other: Array) -> Array:
    """Return the intersection over union of every pair of boxes; 0 where that is no number."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.prod(np.maximum(high - low, 0), axis=-1)
    union = _areas(one)[:, None] + _areas(other) - shared
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(union > 0, shared / union, 0.0)
    return np.asarray(np.nan_to_num(shares, nan=0.0))


def _areas(boxes: Array) -> Array:
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    return np.asarray(np.prod(sides, axis=-1))
