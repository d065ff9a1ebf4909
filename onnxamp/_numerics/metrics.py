"""How far one tensor is from another, and whether it fails in a way that no tolerance excuses."""

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp._runtime.measure import VANISHED_ABOVE

Array: TypeAlias = npt.NDArray[Any]
Index: TypeAlias = tuple[int, ...]

RELATIVE_FLOOR: Final = 1e-3
"""Share of the reference's largest magnitude below which an element's error counts relative to this share."""


@dataclass(frozen=True, slots=True)
class Bad:
    """The first element that fails outright: ``kind`` is "NaN", "Inf" or "zero"."""

    kind: str
    index: Index
    reference: float
    count: int
    """How many elements fail in this way."""
    sample: int = 0


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """Differences between a reference *a* and a result *b*, computed in float64.

    Positions where both are NaN, or both the same infinity, are equal. Where one side alone is not finite,
    the error is infinite. Let *e* = abs(*a* - *b*) and ‖.‖ be the Euclidean norm over all elements:

    ======================  ================================================================================
    ``mean_abs``            mean e
    ``max_abs``             max e
    ``max_rel``             max e / max(abs(a), 0.001 max abs(a)); the floor is for zeros of a
    ``required_tolerance``  least t with e <= t + t abs(a), as numpy.allclose with atol = rtol = t
    ``rel_l2``              ‖a - b‖ / ‖a‖
    ``rmse``                sqrt(mean e²)
    ``snr_db``              20 log10(‖a‖ / ‖a - b‖), signal-to-noise ratio in decibels; inf if equal
    ``cosine``              a · b / (‖a‖ ‖b‖) where both are finite; 1 if both are zero,
                            NaN if no position is finite on both sides and they differ
    ``argmax_agreement``    share of rows (last axis) in which b's largest element is a largest one of a
    ``top5_agreement``      mean share of b's five largest elements of a row that are among a's five largest
    ``differing``           share of elements that are not equal
    ``vanished``            number of floats that are exactly 0 in b, with abs(a) > 0.05 max abs(a): what is
                            left of an overflow that was divided away, or of a scale that was flushed
    ======================  ================================================================================

    Maxima and norms of *a* go over finite elements. Integers and booleans count as numbers, but do not vanish.
    For strings *e* is 0 or 1. If the shapes differ, all errors are infinite; of an empty tensor all are 0.

    Over several samples (:mod:`onnxamp._numerics.merging`) maxima, ratios and the cosine are those of the worst sample,
    means and shares are over all elements or rows, and counts add up.
    """

    name: str
    reference_shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    reference_dtype: str
    result_dtype: str
    size: int
    mean_abs: float
    max_abs: float
    max_rel: float
    required_tolerance: float
    rel_l2: float
    rmse: float
    snr_db: float
    cosine: float
    argmax_agreement: float | None
    """None for scalars, strings, and where the last axis has less than two elements."""
    top5_agreement: float | None
    """None for scalars, strings, and where the last axis has less than ten elements."""
    differing: float
    reference_nan: int
    result_nan: int
    reference_inf: int
    result_inf: int
    reference_zero: int
    result_zero: int
    worst_index: Index | None
    """The first element with the largest *e*; None for empty tensors and different shapes."""
    worst_reference: float | str | None
    worst_result: float | str | None
    vanished: int
    bad: Bad | None
    worst_sample: int = 0
    """Number of the sample, from 0, that ``worst_index`` is of."""

    @property
    def is_float(self) -> bool:
        """Whether the reference holds floats."""
        return "float" in self.reference_dtype

    @property
    def alarm(self) -> str | None:
        """One sentence if the result fails outright (shape, NaN, Inf, vanished values, in this order)."""
        if self.reference_shape != self.result_shape:
            return f"The shape is {self.result_shape} instead of {self.reference_shape}."
        if self.bad is None:
            return None
        count = f"{self.bad.count} of {self.size} elements"
        where = f"the first at {list(self.bad.index)}, where the reference is {self.bad.reference:.6g}"
        if self.bad.kind == "zero":
            return f"Values vanished: {count} are exactly zero without cause, {where}."
        return f"{self.bad.kind} where the reference is finite: {count}, {where}."


def compare(name: str, reference: Array, result: Array) -> TensorDiff:
    """Compare two tensors; see :class:`TensorDiff` for the formulas.

    Args:
        name: of the value, for reports.
        reference: any shape; floats (``ml_dtypes`` included), integers, booleans or strings.
        result: the same shape, of any such type.

    Complexity: linear in the elements, with a few float64 copies of both.
    """
    reference, result = np.asarray(reference), np.asarray(result)
    a, b = _numbers(reference, result)
    facts: dict[str, Any] = {
        "name": name,
        "reference_shape": reference.shape,
        "result_shape": result.shape,
        "reference_dtype": str(reference.dtype),
        "result_dtype": str(result.dtype),
        "size": result.size,
        **_counts("reference", a),
        **_counts("result", b),
        **dict.fromkeys(("worst_index", "worst_reference", "worst_result", "bad")),
        **dict.fromkeys(("argmax_agreement", "top5_agreement")),
        "vanished": 0,
        "differing": 0.0,
    }
    if reference.shape != result.shape:
        facts |= {**dict.fromkeys(_ERRORS, np.inf), "snr_db": -np.inf, "cosine": np.nan, "differing": 1.0}
        return TensorDiff(**facts)
    if result.size == 0:
        facts |= {**dict.fromkeys(_ERRORS, 0.0), "snr_db": np.inf, "cosine": 1.0}
        return TensorDiff(**facts)
    errors = _errors(a, b)
    worst = np.unravel_index(int(np.argmax(errors)), errors.shape)
    facts["worst_index"] = tuple(int(i) for i in worst)
    facts["worst_reference"], facts["worst_result"] = _scalar(reference[worst]), _scalar(result[worst])
    if not _is_text(reference):
        facts["argmax_agreement"], facts["top5_agreement"] = _top_agreement(a, b, 1), _top_agreement(a, b, 5)
    if _is_float(reference):
        facts["vanished"] = int(np.count_nonzero(_vanished(a, b)))
        facts["bad"] = first_bad(reference, result)
    facts |= _measures(a, b, errors)
    facts["differing"] = float(np.count_nonzero(errors)) / errors.size
    return TensorDiff(**facts)


def first_bad(reference: Array, result: Array) -> Bad | None:
    """First element of the result that is NaN where the reference is finite; else Inf; else vanished.

    Args:
        reference: numbers of any shape and type. Integers, booleans and strings cannot fail in this way.
        result: the same shape.

    Returns:
        The first element in C order, or None.
    """
    reference, result = np.asarray(reference), np.asarray(result)
    if not _is_float(reference) or _is_text(result):
        return None
    a, b = _numbers(reference, result)
    finite = np.isfinite(a)
    for kind, mask in (
        ("NaN", finite & np.isnan(b)),
        ("Inf", finite & np.isinf(b)),
        ("zero", _vanished(a, b)),
    ):
        count = int(np.count_nonzero(mask))
        if count:
            index = np.unravel_index(int(np.argmax(mask)), mask.shape)
            return Bad(kind, tuple(int(i) for i in index), float(a[index]), count)
    return None


_ERRORS: Final = ("mean_abs", "max_abs", "max_rel", "required_tolerance", "rel_l2", "rmse")


def _is_text(x: Array) -> bool:
    return x.dtype.kind in "USO"


def _is_float(x: Array) -> bool:
    return x.dtype.kind not in "biuUSO"  # ml_dtypes call themselves "V"


def _scalar(x: Any) -> float | str:
    if isinstance(x, bytes):
        return x.decode(errors="replace")
    return str(x) if isinstance(x, str) else float(x)


def _numbers(reference: Array, result: Array) -> tuple[Array, Array]:
    """Both tensors in float64; strings become 0, or 1 where the result differs."""
    if not _is_text(reference) and not _is_text(result):
        return reference.astype(np.float64), result.astype(np.float64)
    differs = reference != result if reference.shape == result.shape else np.ones(result.shape)
    return np.zeros(reference.shape), np.asarray(differs, np.float64)


def _counts(side: str, x: Array) -> dict[str, int]:
    return {
        f"{side}_nan": int(np.count_nonzero(np.isnan(x))),
        f"{side}_inf": int(np.count_nonzero(np.isinf(x))),
        f"{side}_zero": int(np.count_nonzero(x == 0)),
    }


def _errors(a: Array, b: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        errors: Array = np.asarray(np.abs(a - b))
    errors[(a == b) | (np.isnan(a) & np.isnan(b))] = 0  # inf - inf is NaN
    errors[np.isnan(errors)] = np.inf
    return errors


def _measures(a: Array, b: Array, errors: Array) -> dict[str, float]:
    both = np.isfinite(a) & np.isfinite(b)
    magnitude = np.abs(a, where=np.isfinite(a), out=np.zeros_like(a))
    largest, noise = float(magnitude.max()), _norm(errors)
    signal = _norm(magnitude)
    rel_l2 = _ratio(noise, signal)
    x, y = np.where(both, a, 0), np.where(both, b, 0)
    scale = max(float(np.abs(x).max()), 1e-300), max(float(np.abs(y).max()), 1e-300)
    x, y = x / scale[0], y / scale[1]
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    silent = not x.any() and not y.any()
    nothing = 1.0 if both.any() or not noise else np.nan
    return {
        "mean_abs": float(errors.mean()),
        "max_abs": float(errors.max()),
        "max_rel": _relative(errors, np.maximum(magnitude, RELATIVE_FLOOR * largest)),
        "required_tolerance": float((errors / (1 + magnitude)).max()),
        "rel_l2": rel_l2,
        "rmse": noise / float(np.sqrt(errors.size)),
        "snr_db": -20 * float(np.log10(rel_l2)) if rel_l2 else np.inf,
        "cosine": nothing if silent else float(np.clip(np.vdot(x, y) / norms, -1, 1)) if norms else 0.0,
    }


def _norm(x: Array) -> float:
    """Euclidean norm without overflow of the squares."""
    scale = float(np.abs(x).max())
    if scale == 0 or np.isinf(scale):
        return scale
    with np.errstate(under="ignore"):
        return scale * float(np.linalg.norm(x / scale))


def _ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return noise / signal if signal else np.inf


def _relative(errors: Array, magnitude: Array) -> float:
    """Largest error relative to a magnitude; where that is zero, any error is infinite."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratios = np.divide(errors, magnitude, where=errors != 0, out=np.zeros_like(errors))
    return float(ratios.max())


def _top_agreement(a: Array, b: Array, k: int) -> float | None:
    """Mean share of the k largest elements of each row of *b* that belong to the k largest of *a*; ties count."""
    if a.ndim == 0 or a.shape[-1] < 2 * k:
        return None
    chosen = np.take_along_axis(a, np.argpartition(b, -k, axis=-1)[..., -k:], axis=-1)
    least = np.partition(a, -k, axis=-1)[..., -k, None]
    agrees = (chosen >= least) | (np.isnan(chosen) & np.isnan(least))
    return float(np.mean(agrees)) if agrees.size else None


def _vanished(a: Array, b: Array) -> Array:
    """Elements that are exactly zero where a large part of the reference is not."""
    finite = np.isfinite(a)
    magnitude = np.abs(a, where=finite, out=np.zeros_like(a))
    largest = magnitude.max() if a.size else 0.0
    return np.asarray((b == 0) & (magnitude > VANISHED_ABOVE * largest))
