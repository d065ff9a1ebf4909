"""Comparing two tensors element by element, in full, as outputs are compared.

:mod:`onnxamp._numerics.differences.measure` compares all other values, with sums that add up.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp._facts.dtypes import FORMATS
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.differences.blocks import PART, Array, blocks, dot_product
from onnxamp._numerics.differences.metrics import (
    RELATIVE_FLOOR,
    VANISHED_ABOVE,
    Bad,
    Sums,
    TensorDiff,
    decibels,
)
from onnxamp._numerics.differences.rankings import divergence, top_agreement


def compare_outputs(name: str, reference: Any, result: Any) -> Iterator[TensorDiff]:
    """Compare an output of two models.

    An array is compared as it is, a map by its keys, and a sequence item by item; but a sequence of maps with the same
    keys, which classifiers return, is one table with a row for each map.
    """
    if isinstance(reference, Mapping) and isinstance(result, Mapping):
        keys = [key for key in reference if key in result]
        if keys or not (reference or result):
            yield compare(
                name, _table([reference], keys)[0], _table([result], keys)[0]
            )
    elif isinstance(reference, list) and isinstance(result, list):
        if keys := _shared_keys([*reference, *result]):
            size = min(len(reference), len(result))
            yield compare(
                name, _table(reference[:size], keys), _table(result[:size], keys)
            )
            return
        for position, (one, other) in enumerate(zip(reference, result, strict=False)):
            yield from compare_outputs(f"{name}[{position}]", one, other)
    elif isinstance(reference, np.ndarray) and isinstance(result, np.ndarray):
        yield compare(name, reference, result)


def _shared_keys(items: Sequence[Any]) -> list[Any]:
    """Return the keys that all maps share; none if something else is among them."""
    maps = [item for item in items if isinstance(item, Mapping)]
    if not maps or len(maps) < len(items):
        return []
    keys = maps[0].keys()
    return list(keys) if all(item.keys() == keys for item in maps) else []


def worst_rel_l2(reference: Mapping[str, Any], result: Mapping[str, Any]) -> float:
    """Return the largest relative L2 error of the float outputs that both have, by name; 0 if there are none."""
    errors = list[float]()
    for name in reference:
        if name in result:
            diffs = compare_outputs(name, reference[name], result[name])
            errors += [diff.rel_l2 for diff in diffs if diff.is_float]
    return max(errors, default=0.0)


def _table(maps: Sequence[Mapping[Any, Any]], keys: Sequence[Any]) -> Array:
    """Return the values of maps, a row for each map and a column for each key: float32 if that loses nothing."""
    table = np.array([[item[key] for key in keys] for item in maps])
    if table.dtype != np.float64:
        return table
    with np.errstate(over="ignore"):
        single = table.astype(np.float32)
    return single if np.array_equal(single, table, equal_nan=True) else table


def compare(name: str, reference: Array, result: Array) -> TensorDiff:
    """Compare two tensors; see :class:`TensorDiff` for the formulas.

    Args:
        name: name of the value in reports.
        reference: floats (``ml_dtypes`` included), integers, booleans or strings of any shape.
        result: the same shape, of any such type.

    Complexity: linear in the elements, with temporaries for a part of them, and for one row; with copies of both
    tensors if some elements are sentinels.
    """
    reference = np.asarray(reference)
    result = np.asarray(result)
    is_text = _is_text(reference) or _is_text(result)
    facts: dict[str, Any] = {
        "name": name,
        "reference_shape": reference.shape,
        "result_shape": result.shape,
        "reference_dtype": _dtype_name(reference),
        "result_dtype": _dtype_name(result),
        "size": result.size,
    }
    if reference.shape != result.shape:
        if is_text:
            reference = np.zeros(reference.size)
            result = np.ones(result.size)
        facts |= dict.fromkeys(_ERRORS, np.inf) | _counts(reference, result)
        return TensorDiff(**facts, snr_db=-np.inf, cosine=np.nan, differing=1.0)
    if is_text:
        differs = np.asarray(reference != result, np.float64)
        a = np.zeros(differs.size)
        b = differs.ravel()
    else:
        a = reference.ravel()
        b = result.ravel()
    facts |= _counts(a, b)
    if result.size == 0:
        facts |= dict.fromkeys(_ERRORS, 0.0)
        return TensorDiff(**facts, snr_db=np.inf, cosine=1.0)
    seen = _Extremes(a, b)
    parts = [(a, b, seen)] if seen.magnitude < SENTINEL else _without_sentinels(a, b)
    worst = np.unravel_index(seen.worst, reference.shape)
    facts["worst_index"] = tuple(map(int, worst))
    facts["worst_reference"] = _scalar(reference[worst])
    facts["worst_result"] = _scalar(result[worst])
    if _may_rank(reference) and reference.ndim:
        width = reference.shape[-1]
        facts["argmax_agreement"] = top_agreement(a, b, width, 1)
        facts["top5_agreement"] = top_agreement(a, b, width, 5)
    is_float = reference.dtype.kind not in "biuUSO"  # ml_dtypes call themselves "V"
    if is_float and not _is_text(result):
        facts["are_whole"] = _are_whole(a, b)
        magnitude = parts[0][2].magnitude
        facts["vanished"], facts["bad"] = _failures(
            a, b, magnitude, reference.shape, are_whole=facts["are_whole"]
        )
        if "logits" in name.lower() and reference.ndim and reference.shape[-1] > 1:
            facts["kl_divergence"] = divergence(a, b, reference.shape[-1])
    facts |= _measures(a, b, seen)
    if seen.magnitude >= SENTINEL:
        facts |= _judged_apart(parts)
    if {a.dtype.kind, b.dtype.kind} <= {"b", "i", "u"}:
        # Beyond 2^53, float64 does not tell integers apart.
        unequal = a != b
        facts["differing"] = float(np.count_nonzero(unequal) / a.size)
        if unequal.any() and not facts["max_abs"]:
            pairs = zip(a[unequal].tolist(), b[unequal].tolist(), strict=True)
            facts["max_abs"] = float(max(abs(one - other) for one, other in pairs))
    return TensorDiff(**facts)


_Part: TypeAlias = "tuple[Array, Array, _Extremes]"
"""Elements of both tensors, with their largest numbers."""


_ENDS: Final = [low.max_finite for low in FORMATS.values()]
"""The largest numbers of low-precision types."""


def _without_sentinels(a: Array, b: Array) -> list[_Part]:
    """Return the elements that are no sentinels, as masks leave them, and those that are; only kinds that occur."""
    usual = np.concatenate(
        [
            (np.abs(part) < SENTINEL) | ~np.isfinite(part)
            for part, _ in blocks(a, a, PART)
        ]
    )
    masked, theirs = a[~usual], b[~usual]
    # A sentinel means infinity, and so does the end of a narrower type.
    is_same_side = np.sign(masked) == np.sign(theirs)
    saturates = is_same_side & np.isin(np.abs(theirs), _ENDS)
    pairs = [(a[usual], b[usual]), (masked, np.where(saturates, masked, theirs))]
    return [(one, other, _Extremes(one, other)) for one, other in pairs if one.size]


def _judged_apart(parts: Sequence[_Part]) -> dict[str, float]:
    """Return the metrics that are relative to a norm, which sentinels would hide: the worst ones of the parts."""
    measured = [_measures(*part) for part in parts]
    rel_l2 = max(one["rel_l2"] for one in measured)
    cosines = [one["cosine"] for one in measured if not np.isnan(one["cosine"])]
    return {
        "rel_l2": rel_l2,
        "typical_rel_l2": rel_l2,
        "snr_db": decibels(rel_l2),
        "max_rel": max(one["max_rel"] for one in measured),
        "cosine": min(cosines, default=np.nan),
    }


_ERRORS: Final = (
    "mean_abs",
    "max_abs",
    "max_rel",
    "required_tolerance",
    "rel_l2",
    "typical_rel_l2",
    "rmse",
)


def _is_text(x: Array) -> bool:
    return x.dtype.kind in "USO"


def _may_rank(x: Array) -> bool:
    """Return whether elements may be scores: floats, or integers of a byte, which are quantized; others are labels."""
    return not _is_text(x) and (x.dtype.kind not in "biu" or x.dtype in _BYTES)


_BYTES: Final = (np.dtype(np.int8), np.dtype(np.uint8))


def _dtype_name(x: Array) -> str:
    return "string" if _is_text(x) else str(x.dtype)


def _scalar(x: Any) -> float | str:
    if isinstance(x, bytes):
        return x.decode(errors="replace")
    return str(x) if isinstance(x, str) else float(x)


def _counts(reference: Array, result: Array) -> dict[str, int]:
    kinds = {"nan": np.isnan, "inf": np.isinf, "zero": np.logical_not}
    counts = Counter[str]()
    for side, x in (("reference", reference.ravel()), ("result", result.ravel())):
        for part, _ in blocks(x, x, PART):
            for kind, is_one in kinds.items():
                counts[f"{side}_{kind}"] += int(np.count_nonzero(is_one(part)))
    return counts


class _ComparedPart(NamedTuple):
    """A part of two tensors: errors, magnitudes of the reference, and the elements of both that are finite in both."""

    errors: Array
    magnitude: Array
    x: Array
    y: Array
    both: npt.NDArray[np.bool_]


def _compared(a: Array, b: Array) -> Iterator[_ComparedPart]:
    """Compare two flat tensors part by part."""
    for one, other in blocks(a, b, PART):
        with np.errstate(invalid="ignore", over="ignore"):
            errors: Array = np.abs(one - other)
        equal = (one == other) | (np.isnan(one) & np.isnan(other))
        errors[equal] = 0  # inf - inf is NaN
        errors[np.isnan(errors)] = np.inf
        finite = np.isfinite(one)
        both = finite & np.isfinite(other)
        yield _ComparedPart(
            errors,
            np.abs(one, where=finite, out=np.zeros_like(one)),
            np.where(both, one, 0),
            np.where(both, other, 0),
            both,
        )


class _Extremes:
    """The largest numbers of two flat tensors, in units of which sums of squares do not overflow."""

    def __init__(self, a: Array, b: Array) -> None:
        self.error = -1.0
        self.worst = 0
        self.error_sum = 0.0
        self.differing = 0
        self.magnitude = self.x = self.y = self.required = 0.0
        self.is_common = False
        start = 0
        for part in _compared(a, b):
            at = int(np.argmax(part.errors))
            if part.errors[at] > self.error:
                self.error = float(part.errors[at])
                self.worst = start + at
            self.error_sum += float(part.errors.sum())
            self.differing += int(np.count_nonzero(part.errors))
            self.magnitude = max(self.magnitude, float(part.magnitude.max()))
            self.x = max(self.x, float(np.abs(part.x).max()))
            self.y = max(self.y, float(np.abs(part.y).max()))
            required = float((part.errors / (1 + part.magnitude)).max())
            self.required = max(self.required, required)
            self.is_common |= bool(part.both.any())
            start += part.errors.size


def _measures(a: Array, b: Array, seen: _Extremes) -> dict[str, float]:
    """Return the metrics of two flat tensors."""
    noise = signal = dot = xx = yy = max_rel = 0.0
    floor = RELATIVE_FLOOR * seen.magnitude
    for part in _compared(a, b):
        noise += _energy(part.errors, seen.error)
        signal += _energy(part.magnitude, seen.magnitude)
        # Sums of squares of numbers beyond 1e154 overflow float64, so they are in units of the largest number.
        x = part.x / max(seen.x, 1e-300)
        y = part.y / max(seen.y, 1e-300)
        dot = dot + dot_product(x, y)
        xx = xx + dot_product(x, x)
        yy = yy + dot_product(y, y)
        against = np.maximum(part.magnitude, floor)
        max_rel = max(max_rel, _relative(part.errors, against))
    error_norm = _root(noise, seen.error)
    sums = Sums(
        elements=a.size,
        error_sum=seen.error_sum,
        error_norm=error_norm,
        reference_norm=_root(signal, seen.magnitude),
        dot=dot,
        dot_energies=(xx, yy),
        is_comparable=seen.is_common or not error_norm,
    )
    names = ("mean_abs", "rel_l2", "rmse", "cosine")
    return {
        **{name: getattr(sums, name) for name in names},
        "typical_rel_l2": sums.rel_l2,
        "max_abs": seen.error,
        "max_rel": max_rel,
        "required_tolerance": seen.required,
        "snr_db": decibels(sums.rel_l2),
        "differing": seen.differing / a.size,
    }


def _energy(x: Array, scale: float) -> float:
    """Return the sum of squares in units of the largest number."""
    if scale == 0 or np.isinf(scale):
        return scale
    with np.errstate(under="ignore"):
        scaled = x / scale
        return dot_product(scaled, scaled)


def _root(energy: float, scale: float) -> float:
    """Return the Euclidean norm that belongs to an :func:`_energy`."""
    is_scale = scale == 0 or np.isinf(scale)
    return scale if is_scale else scale * float(np.sqrt(energy))


def _relative(errors: Array, magnitude: Array) -> float:
    """Return the largest error relative to a magnitude; if that is zero, any error is infinite."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratios = np.divide(
            errors, magnitude, where=errors != 0, out=np.zeros_like(errors)
        )
    return float(ratios.max())


def _are_whole(a: Array, b: Array) -> bool:
    """Return whether both tensors hold nothing but whole numbers, of which some of the first are 0."""
    has_zero = False
    for one, other in blocks(a, b, PART):
        if not (
            np.array_equal(np.rint(one), one) and np.array_equal(np.rint(other), other)
        ):
            return False
        has_zero |= not one.all()
    return has_zero


def _is_mask(a: Array) -> bool:
    """Return whether a tensor holds zeros and one other number."""
    numbers = set[float]()
    has_zero = False
    for part, _ in blocks(a, a, PART):
        used = part[part != 0]
        has_zero |= used.size < part.size
        if used.size:
            numbers |= {float(used.min()), float(used.max())}
    return has_zero and len(numbers) == 1


def _failures(
    a: Array, b: Array, magnitude: float, shape: tuple[int, ...], *, are_whole: bool
) -> tuple[int, Bad | None]:
    """Return the number of vanished elements, and the first element that fails: NaN before Inf before vanished.

    Those vanish that are not small beside a ``magnitude``.
    """
    counts = dict.fromkeys(("NaN", "Inf", "zero"), 0)
    first = dict[str, int]()
    start = 0
    limit = VANISHED_ABOVE * magnitude
    for one, other in blocks(a, b, PART):
        finite = np.isfinite(one)
        masks = (
            finite & np.isnan(other),
            finite & np.isinf(other),
            finite & (other == 0) & (np.abs(one) > limit),
        )
        for kind, mask in zip(counts, masks, strict=True):
            count = int(np.count_nonzero(mask))
            counts[kind] += count
            if count:
                first.setdefault(kind, start + int(np.argmax(mask)))
        start += one.size
    # Where a mask loses some of its ones, or labels change, choices differ, which errors count.
    is_part = 0 < counts["zero"] < np.count_nonzero(a)
    if is_part and (are_whole or _is_mask(a)):
        counts["zero"] = 0
    worst = next((kind for kind in counts if counts[kind]), None)
    if worst is None:
        return 0, None
    at = first[worst]
    index = tuple(int(i) for i in np.unravel_index(at, shape))
    return counts["zero"], Bad(worst, index, float(a[at]), counts[worst])
