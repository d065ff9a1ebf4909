"""Measuring a pair of tensors: one of the many values of a model, with sums that add up."""

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from onnxamp._base.errors import RuntimeFailure
from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.differences.blocks import Array, blocks, dot_product
from onnxamp._numerics.differences.metrics import VANISHED_ABOVE, Measurement
from onnxamp._runtime.sessions.values import from_value

if TYPE_CHECKING:
    import onnxruntime as ort


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


def measure(reference: "ort.OrtValue", result: "ort.OrtValue") -> Measurement:
    """Measure one pair of tensors.

    Args:
        reference: floats of any width, integers or booleans, on any device.
        result: the same shape, of any such type.

    Raises:
        RuntimeFailure: the tensors are of kinds that cannot be compared (strings).

    Complexity: linear in elements, with temporaries for a fixed number of them.
    """
    one = _flat(reference)
    other = one if result is reference else _flat(result)
    total = Measurement()
    with np.errstate(invalid="ignore", over="ignore"):
        for r, f in blocks(one, other, _BLOCK):
            total += _block_measured(r, f)
    if not total.flushed:
        return total
    limit = VANISHED_ABOVE * total.reference_max
    vanished = 0
    for r, f in blocks(one, other, _BLOCK):  # rare: the limit needs a second pass
        vanished += int(np.count_nonzero((f == 0) & (np.abs(r) > limit)))
    return replace(total, vanished=vanished)


def _flat(value: "ort.OrtValue") -> Array:
    """Return the elements of a tensor, not copied from the host's memory unless NumPy lacks their type."""
    if value.data_type() not in MEASURABLE:
        raise RuntimeFailure(
            f"Values of type {value.data_type()} cannot be measured: they are not tensors of numbers."
        )
    return np.ravel(from_value(value))


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
        error_energy=dot_product(error, error),
        error_max=float(abs_error.max()),
        reference_energy=dot_product(r, r),
        found_energy=dot_product(f, f),
        reference_max=largest,
        found_max=found_max,
        reference_least=float(used.min(initial=np.inf)),
        reference_zero=int(np.count_nonzero(zero_r)),
        found_zero=int(np.count_nonzero(zero_f)),
        flushed=int(np.count_nonzero(flushed)),
        **{name: int(np.count_nonzero(mask)) for name, mask in odd.items()},
    )
