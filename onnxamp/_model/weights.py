"""Reading the elements of weights, wherever they lie."""

import json
from collections.abc import Mapping
from functools import cache
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import low_type
from onnxamp._errors import ModelError
from onnxamp._model.external_data import DataLocation, data_location, forget_location
from onnxamp._model.lowering import Scratch, lower
from onnxamp._paths.paths import as_path, is_remote

MAPPED: Final = 1 << 16
"""Elements from which on external data are memory-mapped; below, reading them is faster."""

_LEAST_POWER, _MOST_POWER = -126, 127
"""Exponents of the powers of two that are float32 numbers with all their digits."""


def times_power(
    array: NDArray[np.float32], exponent: int, out: NDArray[np.float32] | None = None
) -> NDArray[Any]:
    """Return numbers multiplied by ``2**-exponent``, exact within the range of float32."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if (
            _LEAST_POWER <= -exponent <= _MOST_POWER
        ):  # a factor is several times as fast
            return np.multiply(array, np.float32(2.0**-exponent), out=out)
        return np.ldexp(array, np.int32(-exponent), out=out, dtype=np.float32)


def embed(tensor: TensorProto, base_dir: str | PathLike[str] | None) -> None:
    """Read external data into the tensor, in place; a tensor that already holds its data does not change.

    Raises:
        ExternalDataError: see :func:`data_location`.
    """
    place = data_location(tensor, None if base_dir is None else as_path(base_dir))
    if place is None:
        return
    data = place.read()
    if place.exponent or place.saturate_at is not None:
        data = _computed(tensor, place, np.frombuffer(data, "<f4")).tobytes()
    tensor.raw_data = data
    forget_location(tensor)


def _computed(
    tensor: TensorProto, place: DataLocation, stored: NDArray[np.float32]
) -> NDArray[Any]:
    """Return the numbers of a tensor from those that its file holds."""
    numbers = times_power(stored, place.exponent) if place.exponent else stored
    if place.saturate_at is None:
        return numbers
    low = low_type(tensor.data_type)
    flat = np.ascontiguousarray(numbers).reshape(-1)
    bits, _ = lower(flat, low, place.saturate_at, Scratch(flat.size))
    return bits.view(_stored_kind(low.elem)).reshape(stored.shape)


def read_array(tensor: TensorProto, base_dir: Path | None) -> NDArray[Any]:
    """Return the elements of a tensor whose type fills whole bytes, without a copy if they are stored raw.

    Large external data are memory-mapped: reading a few elements of a large weight costs little memory.

    Raises:
        ModelError: the number of elements does not match the tensor's dimensions.
        ExternalDataError: see :func:`data_location`.
    """
    place = data_location(tensor, base_dir)
    shape = tuple(tensor.dims[:])
    count, kind = prod(shape), _stored_kind(tensor.data_type)
    if place is not None:
        if place.saturate_at is not None:
            kind = _stored_kind(TensorProto.FLOAT)
        is_near = not is_remote(place.path)
        flat = (
            _stored(place, kind, shape)
            if is_near
            else np.frombuffer(place.read(), kind)
        )
        array = flat.reshape(shape)
        return _computed(tensor, place, array)
    if tensor.HasField("raw_data"):
        data = tensor.raw_data
        if len(data) == kind.itemsize * count:
            return np.ndarray(shape, kind, data)
    elif len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type))) == count:
        return numpy_helper.to_array(tensor)
    raise ModelError(
        f"The weight {tensor.name!r} does not hold the {count} elements that its shape {shape} requires."
    )


def _stored(
    place: DataLocation, kind: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return the elements in a file of this machine."""
    with place.opened() as file:
        if prod(shape) < MAPPED:
            return np.fromfile(file, kind, prod(shape)).reshape(shape)
        return np.asarray(np.memmap(file, kind, "r", place.offset, shape))


@cache
def _stored_kind(elem: int) -> np.dtype[Any]:
    """Return the element type as raw data have it."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(elem)).newbyteorder("<")


EXPONENTS: Final = "onnxamp.exponents"
"""Key of the metadata: JSON, the exponent by name of a value that is stored as ``value * 2**-exponent``."""
_LARGEST: Final = 300
"""Exponents beyond are none: float32 has no such numbers."""


def stored_exponents(model: ModelProto) -> dict[str, int]:
    """Value -> its exponent, for values that are stored as ``value * 2**-exponent``. A malformed tensor is none."""
    text = next(
        (entry.value for entry in model.metadata_props if entry.key == EXPONENTS), "{}"
    )
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    rows = found.items() if isinstance(found, dict) else ()
    return {
        name: number
        for name, number in rows
        if type(number) is int and 0 < abs(number) <= _LARGEST
    }


def store_exponents(model: ModelProto, exponents: Mapping[str, int]) -> None:
    """Add exponents to those that the model has, and write them to its metadata."""
    total = stored_exponents(model)
    for name, exponent in exponents.items():
        total[name] = total.get(name, 0) + exponent
    text = json.dumps(
        {name: exponent for name, exponent in sorted(total.items()) if exponent},
        ensure_ascii=False,
    )
    entry = next(
        (entry for entry in model.metadata_props if entry.key == EXPONENTS), None
    )
    (entry or model.metadata_props.add(key=EXPONENTS)).value = text
