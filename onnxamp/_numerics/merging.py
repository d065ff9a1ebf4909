"""Differences of one output over several samples, as one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from onnxamp._numerics.metrics import TensorDiff

_WORST: Final = ("max_abs", "max_rel", "required_tolerance", "rel_l2")
_COUNTS: Final = (
    "size", "reference_nan", "result_nan", "reference_inf", "result_inf", "reference_zero", "result_zero", "vanished",
)  # fmt: skip
_SHARES: Final = ("argmax_agreement", "top5_agreement")


def merge(diffs: Sequence[TensorDiff]) -> TensorDiff:
    """One output over several samples, in their order; see :class:`TensorDiff`. Name and types are the first's."""
    first, sizes = diffs[0], [diff.size for diff in diffs]
    worst = max(range(len(diffs)), key=lambda i: diffs[i].max_abs)
    bad = next((replace(diff.bad, sample=i) for i, diff in enumerate(diffs) if diff.bad is not None), None)
    odd = next((diff for diff in diffs if diff.reference_shape != diff.result_shape), first)
    rows = [diff.size // max(diff.result_shape[-1:] or (1,)) if diff.size else 0 for diff in diffs]
    facts: dict[str, Any] = {name: max(getattr(diff, name) for diff in diffs) for name in _WORST}
    facts |= {name: sum(getattr(diff, name) for diff in diffs) for name in _COUNTS}
    facts |= {name: _mean([getattr(diff, name) for diff in diffs], rows) for name in _SHARES}
    return replace(
        first,
        **facts,
        reference_shape=odd.reference_shape,
        result_shape=odd.result_shape,
        mean_abs=_mean([diff.mean_abs for diff in diffs], sizes) or 0.0,
        differing=_mean([diff.differing for diff in diffs], sizes) or 0.0,
        rmse=float(np.sqrt(_mean([diff.rmse**2 for diff in diffs], sizes) or 0.0)),
        snr_db=min(diff.snr_db for diff in diffs),
        cosine=min((diff.cosine for diff in diffs), key=lambda cosine: (not np.isnan(cosine), cosine)),
        worst_index=diffs[worst].worst_index,
        worst_reference=diffs[worst].worst_reference,
        worst_result=diffs[worst].worst_result,
        worst_sample=worst,
        bad=bad,
    )


def _mean(numbers: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Weighted mean of the numbers that there are."""
    known = [(number, weight) for number, weight in zip(numbers, weights, strict=True) if number is not None]
    total = sum(weight for _, weight in known)
    return sum(number * weight for number, weight in known) / total if total else None
