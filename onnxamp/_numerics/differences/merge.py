"""Merging the differences of one output over several samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from onnxamp._numerics.differences.metrics import TensorDiff

_WORST: Final = ("max_abs", "max_rel", "required_tolerance", "rel_l2")
_COUNTS: Final = (
    "size",
    "reference_nan",
    "reference_inf",
    "reference_zero",
    "result_nan",
    "result_inf",
    "result_zero",
    "vanished",
)
_WORST_FIRST: Final = ("NaN", "Inf", "zero")
"""Kinds of failures."""
_SHARES: Final = ("argmax_agreement", "top5_agreement", "kl_divergence")


def merge(diffs: Sequence[TensorDiff]) -> TensorDiff:
    """Return one output over several samples, in their order; see :class:`TensorDiff`.

    Its name and types are those of the first.
    """
    first = diffs[0]
    sizes = [diff.size for diff in diffs]
    worst = max(range(len(diffs)), key=lambda i: diffs[i].max_abs)
    bads = [replace(diff.bad, sample=i) for i, diff in enumerate(diffs) if diff.bad]
    bad = min(bads, key=lambda one: _WORST_FIRST.index(one.kind), default=None)
    if bad is not None:
        count = sum(one.count for one in bads if one.kind == bad.kind)
        bad = replace(bad, count=count)
    # The shapes are those of a sample in which they differ, if there is one: its errors are infinite.
    odd = [d for d in diffs if d.reference_shape != d.result_shape] or diffs
    detections = [diff.detections for diff in diffs if diff.detections is not None]
    parts = [diff.part for diff in diffs if diff.part is not None]
    rows = [
        diff.size // max(diff.result_shape[-1:] or (1,)) if diff.size else 0
        for diff in diffs
    ]

    def of(name: str) -> list[Any]:
        return [getattr(diff, name) for diff in diffs]

    facts: dict[str, Any] = {name: max(of(name)) for name in _WORST}
    facts |= {name: sum(of(name)) for name in _COUNTS}
    facts |= {name: _mean(of(name), rows) for name in _SHARES}
    return replace(
        first,
        **facts,
        reference_shape=odd[0].reference_shape,
        result_shape=odd[0].result_shape,
        mean_abs=_mean(of("mean_abs"), sizes) or 0.0,
        differing=_mean(of("differing"), sizes) or 0.0,
        rmse=float(np.sqrt(_mean([diff.rmse**2 for diff in diffs], sizes) or 0.0)),
        typical_rel_l2=float(np.sqrt(np.mean(np.square(of("rel_l2"))))),
        snr_db=min(of("snr_db")),
        cosine=min(of("cosine"), key=lambda cosine: (not np.isnan(cosine), cosine)),
        worst_index=diffs[worst].worst_index,
        worst_reference=diffs[worst].worst_reference,
        worst_result=diffs[worst].worst_result,
        worst_sample=worst,
        bad=bad,
        are_whole=all(of("are_whole")),
        detections=max(detections, default=None),
        part=max(parts, default=None),
    )


def _mean(numbers: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Return the weighted mean of the numbers that are not None."""
    total = 0
    sum_of_all = 0.0
    for number, weight in zip(numbers, weights, strict=True):
        if number is not None:
            total += weight
            sum_of_all += number * weight
    return sum_of_all / total if total else None
