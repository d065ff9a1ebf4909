"""Comparing two tensors element by element, and merging the differences of several samples.

Outputs are compared by :func:`compare`, in full; all other values by :func:`measure`, with sums that add up.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp._base.errors import RuntimeFailure
from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.metrics import (
    RELATIVE_FLOOR,
    VANISHED_ABOVE,
    Bad,
    Measurement,
    Sums,
    TensorDiff,
    decibels,
)
from onnxamp._runtime.values import from_value

if TYPE_CHECKING:
    import onnxruntime as ort

Array: TypeAlias = npt.NDArray[Any]


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

    Complexity: linear in the elements, with temporaries for a part of them, and for one row.
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
    worst = np.unravel_index(seen.worst, reference.shape)
    facts["worst_index"] = tuple(map(int, worst))
    facts["worst_reference"] = _scalar(reference[worst])
    facts["worst_result"] = _scalar(result[worst])
    if not _is_text(reference) and reference.ndim:
        width = reference.shape[-1]
        facts["argmax_agreement"] = _top_agreement(a, b, width, 1)
        facts["top5_agreement"] = _top_agreement(a, b, width, 5)
    is_float = reference.dtype.kind not in "biuUSO"  # ml_dtypes call themselves "V"
    if is_float and not _is_text(result):
        facts["vanished"], facts["bad"] = _failures(a, b, seen, reference.shape)
        if "logits" in name.lower() and reference.ndim:
            facts["kl_divergence"] = _divergence(a, b, reference.shape[-1])
    return TensorDiff(**facts | _measures(a, b, seen))


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


def _dtype_name(x: Array) -> str:
    return "string" if _is_text(x) else str(x.dtype)


def _scalar(x: Any) -> float | str:
    if isinstance(x, bytes):
        return x.decode(errors="replace")
    return str(x) if isinstance(x, str) else float(x)


_PART: Final = 1 << 20
"""Elements of outputs that are compared at once."""


def _counts(reference: Array, result: Array) -> dict[str, int]:
    kinds = {"nan": np.isnan, "inf": np.isinf, "zero": np.logical_not}
    counts = Counter[str]()
    for side, x in (("reference", reference.ravel()), ("result", result.ravel())):
        for part, _ in _blocks(x, x, _PART):
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
    for one, other in _blocks(a, b, _PART):
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
        dot = dot + _dot(x, y)
        xx = xx + _dot(x, x)
        yy = yy + _dot(y, y)
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
        return _dot(scaled, scaled)


def _root(energy: float, scale: float) -> float:
    """Return the Euclidean norm that belongs to an :func:`_energy`."""
    is_scale = scale == 0 or np.isinf(scale)
    return scale if is_scale else scale * float(np.sqrt(energy))


def _dot(x: Array, y: Array) -> float:
    """Return the dot product of two tensors, without BLAS, whose threads compete with those of ONNX Runtime."""
    return float(np.einsum("i,i->", x, y))


def _relative(errors: Array, magnitude: Array) -> float:
    """Return the largest error relative to a magnitude; if that is zero, any error is infinite."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratios = np.divide(
            errors, magnitude, where=errors != 0, out=np.zeros_like(errors)
        )
    return float(ratios.max())


def _top_agreement(a: Array, b: Array, width: int, k: int) -> float | None:
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
        agreeing += int(np.count_nonzero(agrees))
    return agreeing / count if count else None


def _rows(a: Array, b: Array, width: int) -> Iterator[tuple[Array, Array]]:
    """Yield rows of two flat tensors in float64, several at a time."""
    for one, other in _blocks(a, b, max(1, _PART // width) * width):
        yield one.reshape(-1, width), other.reshape(-1, width)


def _divergence(a: Array, b: Array, width: int) -> float:
    """Return the mean Kullback-Leibler divergence, in nats, of the distributions of rows of logits."""
    divergences = []
    for one, other in _rows(a, b, width):
        p = log_softmax(one)
        q = log_softmax(other)
        with np.errstate(invalid="ignore"):
            terms = np.exp(p) * (p - q)
        # The limit for small probabilities, and for logits that are -inf on both sides.
        terms[np.exp(p) == 0] = 0.0
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


def _failures(
    a: Array, b: Array, seen: _Extremes, shape: tuple[int, ...]
) -> tuple[int, Bad | None]:
    """Return the number of vanished elements, and the first element that fails: NaN before Inf before vanished."""
    counts = dict.fromkeys(("NaN", "Inf", "zero"), 0)
    first = dict[str, int]()
    start = 0
    limit = VANISHED_ABOVE * seen.magnitude
    for one, other in _blocks(a, b, _PART):
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
    worst = next((kind for kind in counts if counts[kind]), None)
    if worst is None:
        return 0, None
    at = first[worst]
    index = tuple(int(i) for i in np.unravel_index(at, shape))
    return counts["zero"], Bad(worst, index, float(a[at]), counts[worst])


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
_SHARES: Final = ("argmax_agreement", "top5_agreement", "kl_divergence")


def merge(diffs: Sequence[TensorDiff]) -> TensorDiff:
    """Return one output over several samples, in their order; see :class:`TensorDiff`.

    Its name and types are those of the first.
    """
    first = diffs[0]
    sizes = [diff.size for diff in diffs]
    worst = max(range(len(diffs)), key=lambda i: diffs[i].max_abs)
    bads = [replace(diff.bad, sample=i) for i, diff in enumerate(diffs) if diff.bad]
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
        bad=next(iter(bads), None),
        detections=max(detections, default=None),
        part=max(parts, default=None),
    )


def _mean(numbers: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Return the weighted mean of the numbers that are not None."""
    total = 0
    found = 0.0
    for number, weight in zip(numbers, weights, strict=True):
        if number is not None:
            total += weight
            found += number * weight
    return found / total if total else None


MEASURABLE: Final = FLOAT_TENSORS | {
    "tensor(double)",
    "tensor(bool)",
    "tensor(int8)",
    "tensor(int16)",
    "tensor(int32)",
    "tensor(int64)",
    "tensor(uint8)",
    "tensor(uint16)",
    "tensor(uint32)",
    "tensor(uint64)",
}
"""Types of values that can be measured."""

_BLOCK: Final = 1 << 15
"""Elements that are measured at once, so that their float64 temporaries stay in the cache."""


def measure(reference: "ort.OrtValue", found: "ort.OrtValue") -> Measurement:
    """Measure one pair of tensors.

    Args:
        reference: floats of any width, integers or booleans, on any device.
        found: the same shape, of any such type.

    Raises:
        RuntimeFailure: the tensors are of kinds that cannot be compared (strings).

    Complexity: linear in elements, with temporaries for a fixed number of them.
    """
    one = _flat(reference)
    other = one if found is reference else _flat(found)
    total = Measurement()
    with np.errstate(invalid="ignore", over="ignore"):
        for r, f in _blocks(one, other, _BLOCK):
            total += _block_measured(r, f)
    if not total.flushed:
        return total
    limit = VANISHED_ABOVE * total.reference_max
    vanished = 0
    for r, f in _blocks(one, other, _BLOCK):  # rare: the limit needs a second pass
        vanished += int(np.count_nonzero((f == 0) & (np.abs(r) > limit)))
    return replace(total, vanished=vanished)


def _flat(value: "ort.OrtValue") -> Array:
    """Return the elements of a tensor, not copied from the host's memory unless NumPy lacks their type."""
    if value.data_type() not in MEASURABLE:
        raise RuntimeFailure(
            f"Values of type {value.data_type()} cannot be measured: they are not tensors of numbers."
        )
    return np.ravel(from_value(value))


def _blocks(one: Array, other: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """Yield both flat tensors in float64, that many elements at a time."""
    for start in range(0, one.size, size):
        part = slice(start, start + size)
        r = one[part].astype(np.float64)
        yield r, (r if other is one else other[part].astype(np.float64))


def _block_measured(r: Array, f: Array) -> Measurement:
    """Measure a block. Masks mark sentinels and elements that are not finite. They are made only if there are any."""
    abs_r = np.abs(r)
    abs_f = np.abs(f)
    zero_r = r == 0
    zero_f = f == 0
    largest = float(abs_r.max())
    found_max = float(abs_f.max())
    flushed = zero_f & ~zero_r
    odd = dict[str, Array]()
    used = abs_r[~zero_r] if zero_r.any() else abs_r
    if not (largest < SENTINEL and found_max < np.inf):  # also true of NaN
        usual = abs_r < SENTINEL
        finite = abs_f < np.inf
        nan_r = np.isnan(r)
        nan_f = np.isnan(f)
        infinite_f = np.isinf(f)
        odd = {
            "reference_nan": nan_r,
            "found_nan": nan_f,
            "reference_inf": np.isinf(r),
            "found_inf": infinite_f,
            "broken": (nan_f & ~nan_r) | (infinite_f & usual),
        }
        flushed &= ~nan_r
        largest = float(abs_r.max(where=usual, initial=0.0))
        found_max = float(abs_f.max(where=finite, initial=0.0))
        used = abs_r[usual & ~zero_r]
        common = usual & finite
        r = np.where(common, r, 0.0)
        f = np.where(common, f, 0.0)
    error = f - r
    abs_error = np.abs(error)
    return Measurement(
        elements=r.size,
        error_sum=float(abs_error.sum()),
        error_energy=_dot(error, error),
        error_max=float(abs_error.max()),
        reference_energy=_dot(r, r),
        found_energy=_dot(f, f),
        reference_max=largest,
        found_max=found_max,
        reference_least=float(used.min(initial=np.inf)),
        reference_zero=int(np.count_nonzero(zero_r)),
        found_zero=int(np.count_nonzero(zero_f)),
        flushed=int(np.count_nonzero(flushed)),
        **{name: int(np.count_nonzero(mask)) for name, mask in odd.items()},
    )
