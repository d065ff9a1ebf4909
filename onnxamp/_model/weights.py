"""Reading weights: where the bytes of a tensor lie, its elements, and statistics of constants.

The data of a tensor are in one of three places: in the proto itself; in a data file beside the model (ONNX external
data); or still in the model file, where :func:`onnxamp._model.storage.load_model` left them because they are large.
:func:`data_location` answers for the last two, with one record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from os import PathLike
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxamp._dtypes import LowType
from onnxamp._errors import ExternalDataError, ModelError
from onnxamp._model.record import record
from onnxamp._paths.paths import as_path, is_remote, read_range

SENTINEL: Final = 1e30
"""Magnitudes from here on stand for infinity, as in attention masks; a conversion saturates them."""

INSIDE: Final = f"onnxamp:{token_hex(8)}:"
"""Prefix of the location of a weight that lies inside a model file; the path follows. It is random, so that no file can
pretend to hold such an entry and name an arbitrary path.
"""
_WAS_DEFAULT: Final = "onnxamp:default"
"""Key of an entry that says: ``data_location`` was set to DEFAULT explicitly before the weight was left in its file."""
_EXPONENT: Final = "onnxamp:exponent"
"""Key of an entry with :attr:`DataLocation.exponent`; it counts where :data:`INSIDE` does."""

_LEAST_POWER, _MOST_POWER = -126, 127
"""Exponents of the powers of two that are float32 numbers with all their digits."""

_BLOCK: Final = 1 << 20
"""Elements that are looked at together."""
_MAPPED: Final = 1 << 16
"""Elements from which on external data are memory-mapped; below, reading them is faster."""


@dataclass(frozen=True, slots=True)
class DataLocation:
    """Where the data of a tensor lie in a file: ``length`` bytes from byte ``offset``.

    With an exponent they are float32, and the tensor's numbers are theirs multiplied by ``2**-exponent``.
    """

    path: Path
    offset: int
    length: int
    exponent: int = 0


@record
class ConstantStats:
    """Statistics of a float constant, for hazard rules."""

    largest: float
    """Largest finite magnitude."""
    uniform: float | None
    """The value where all elements are equal."""
    largest_number: float
    """The element of the largest magnitude below :data:`SENTINEL`."""
    has_infinite: bool = False
    """Whether any element is infinite."""

    def out_of_range(self, low: LowType) -> float | None:
        """An element that rounds to infinity in the low-precision type and is no sentinel."""
        return self.largest_number if abs(self.largest_number) >= low.overflow else None

    def has_sentinel(self, low: LowType) -> bool:
        """Whether an element stands for infinity, and the low-precision type cannot hold it."""
        return self.largest >= max(SENTINEL, low.overflow)

    def scaled(self, exponent: int) -> "ConstantStats | None":
        """Those of the numbers multiplied by ``2**-exponent``; None where other elements are sentinels then."""
        largest, uniform, number = (
            None if old is None else float(times_power(np.array([old], np.float32), exponent)[0])
            for old in (self.largest, self.uniform, self.largest_number)
        )
        if largest is None or number is None or self.largest != abs(self.largest_number) or largest >= SENTINEL:
            return None
        return ConstantStats(largest, uniform, number, self.has_infinite)


def data_location(
    tensor: TensorProto, base_dir: Path | None, known: dict[str, tuple[Path, int]] | None = None
) -> DataLocation | None:
    """Where the data of a tensor lie, checked against the file; None if the proto itself holds them.

    Args:
        tensor: any tensor.
        base_dir: folder of the model's data files.
        known: location -> (path, size) of data files that were already looked up; filled here. Pass one dict for all
            tensors of a model, since looking up files is slow.

    Raises:
        ExternalDataError: the folder is unknown, the file is missing or too short, or it lies outside the model's
            folder (absolute paths, ``..`` and symbolic links included).
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {item.key: item.value for item in tensor.external_data}
    if len(entries) < len(tensor.external_data) or not all(isinstance(text, str) for text in entries.values()):
        raise ExternalDataError(f"The weight {tensor.name!r} says twice, or not in UTF-8, where its data are.")
    location = entries.get("location", "")
    if location.startswith(INSIDE):
        return DataLocation(
            as_path(location.removeprefix(INSIDE)), int(entries["offset"]), int(entries["length"]),
            int(entries.get(_EXPONENT, 0)),
        )  # fmt: skip
    known = {} if known is None else known
    if location not in known:
        known[location] = _data_file(tensor.name, location, base_dir)
    path, size = known[location]
    expected = stored_bytes(tensor)
    offset, length = _number(entries.get("offset", "0")), _number(entries.get("length", str(expected)))
    if offset is None or length is None:
        raise ExternalDataError(f"The weight {tensor.name!r} has an unreadable offset or length.")
    if length != expected or offset + length > size:
        raise ExternalDataError(
            f"The weight {tensor.name!r} takes {expected} bytes; the model says {length}, at offset {offset} of"
            f" {str(path)!r}, which holds {size} bytes: copy or export both again."
        )
    return DataLocation(path, offset, length)


def _data_file(name: str, location: str, base_dir: Path | None) -> tuple[Path, int]:
    """The data file of a location, with symbolic links resolved, and its size."""
    if base_dir is None:
        raise ExternalDataError(
            f"The weight {name!r} is stored in {location!r}, which only a path can locate: pass the model's"
            " path, or load the data first (onnx.load does)."
        )
    path = _resolved(base_dir, location)
    if path is None or not path.is_relative_to(base_dir.resolve()):
        raise ExternalDataError(
            f"The weight {name!r} points to {location!r}, outside the model's folder {str(base_dir)!r}: refused."
        )
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "is missing: copy it there, by that name"
        raise ExternalDataError(f"The data file {str(path)!r} of the weight {name!r} {what}.")
    return path, path.stat().st_size


def _resolved(base_dir: Path, location: str) -> Path | None:
    """The path of a location with symbolic links resolved; None if it can name no file."""
    if not location:
        return None
    try:
        path = (base_dir / location).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # the name is too long or holds a zero byte, or links form a circle
        return None
    return path


def _number(text: str) -> int | None:
    """A number as ONNX Runtime writes it; Python's ``int`` would also accept signs, blanks and other digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def lies_inside(tensor: TensorProto) -> bool:
    """Whether the tensor's data were left in a model file."""
    entries = (item.value for item in tensor.external_data if item.key == "location")
    return any(isinstance(text, str) and text.startswith(INSIDE) for text in entries)


def has_data_file(tensor: TensorProto) -> bool:
    """Whether the tensor's data lie in another file than the model's."""
    return tensor.data_location == TensorProto.EXTERNAL and not lies_inside(tensor)


def external_tensor(location: str, offset: int, length: int) -> TensorProto:
    """A tensor that holds nothing but an external location: a name relative to the model's folder."""
    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def inside_tensor(place: DataLocation, *, was_default: bool) -> TensorProto:
    """A tensor that holds nothing but the location of data left in a file, which is trusted from then on.

    Args:
        place: where the data lie.
        was_default: whether the tensor said explicitly that it holds its data (``data_location`` DEFAULT).
    """
    tensor = external_tensor(f"{INSIDE}{place.path}", place.offset, place.length)
    if was_default:
        tensor.external_data.add(key=_WAS_DEFAULT)
    if place.exponent:
        tensor.external_data.add(key=_EXPONENT, value=str(place.exponent))
    return tensor


def scaled_tensor(tensor: TensorProto, base_dir: Path | None, exponent: int) -> TensorProto | None:
    """A float32 tensor multiplied by ``2**-exponent``, which is done when it is read; None if it holds its data.

    Raises:
        ExternalDataError: see :func:`data_location`.
    """
    place = data_location(tensor, base_dir)
    if place is None:
        return None
    was_default = has_data_file(tensor) or any(item.key == _WAS_DEFAULT for item in tensor.external_data)
    result = inside_tensor(replace(place, exponent=place.exponent + exponent), was_default=was_default)
    result.data_type = tensor.data_type
    result.dims[:] = tensor.dims
    return result


def times_power(array: NDArray[np.float32], exponent: int, out: NDArray[np.float32] | None = None) -> NDArray[Any]:
    """Numbers multiplied by ``2**-exponent``, exactly where they stay in float32's range."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if _LEAST_POWER <= -exponent <= _MOST_POWER:  # a factor is several times as fast
            return np.multiply(array, np.float32(2.0**-exponent), out=out)
        return np.ldexp(array, np.int32(-exponent), out=out, dtype=np.float32)


def forget_location(tensor: TensorProto) -> None:
    """Remove the external location from the tensor, in place, and set ``data_location`` as it was in its file."""
    if has_data_file(tensor) or any(item.key == _WAS_DEFAULT for item in tensor.external_data):
        tensor.data_location = TensorProto.DEFAULT
    else:
        tensor.ClearField("data_location")
    tensor.ClearField("external_data")


def embed(tensor: TensorProto, base_dir: str | PathLike[str] | None) -> None:
    """Read external data into the tensor itself, in place; a tensor that holds its data stays as it is.

    Raises:
        ExternalDataError: see :func:`data_location`.
    """
    place = data_location(tensor, None if base_dir is None else as_path(base_dir))
    if place is None:
        return
    data = read_range(place.path, place.offset, place.length)
    tensor.raw_data = times_power(np.frombuffer(data, "<f4"), place.exponent).tobytes() if place.exponent else data
    forget_location(tensor)


def stored_bytes(tensor: TensorProto) -> int:
    """Bytes of the tensor's elements as raw data; 0 for strings, which have no such form, and for unknown types."""
    return bytes_of(tensor.data_type, tensor.dims[:])


def bytes_of(elem: int, shape: Sequence[int]) -> int:
    """As :func:`stored_bytes`, of the element type and shape of a tensor."""
    return (prod(shape) * _bits_of(elem) + 7) // 8


@cache
def _bits_of(elem: int) -> int:
    """Bits of one element; 0 if the type has no fixed size."""
    if elem in _PACKED or elem == TensorProto.STRING:
        return _PACKED.get(elem, 0)
    try:
        return 8 * np.dtype(helper.tensor_dtype_to_np_dtype(elem)).itemsize
    except (KeyError, TypeError):
        return 0


_PACKED: Final = {TensorProto.UINT4: 4, TensorProto.INT4: 4, TensorProto.FLOAT4E2M1: 4, 25: 2, 26: 2}
"""Bits of element types of which one byte holds several."""


def read_array(tensor: TensorProto, base_dir: Path | None) -> NDArray[Any]:
    """Elements of a tensor whose type fills whole bytes, without a copy where they are stored raw.

    Large external data are memory-mapped: reading a few elements of a large weight costs little memory.

    Raises:
        ModelError: the tensor holds fewer or more elements than its dimensions say.
        ExternalDataError: see :func:`data_location`.
    """
    place = data_location(tensor, base_dir)
    shape = tuple(tensor.dims[:])
    count, kind = prod(shape), _stored_kind(tensor.data_type)
    if place is not None:
        if is_remote(place.path):
            array = np.frombuffer(read_range(place.path, place.offset, place.length), kind).reshape(shape)
        elif count < _MAPPED:
            array = np.fromfile(place.path, kind, count, offset=place.offset).reshape(shape)
        else:
            array = np.asarray(np.memmap(place.path, kind, "r", place.offset, shape))
        return times_power(array, place.exponent) if place.exponent else array
    if tensor.HasField("raw_data"):
        data = tensor.raw_data
        if len(data) == kind.itemsize * count:
            return np.ndarray(shape, kind, data)
    elif len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type))) == count:
        return numpy_helper.to_array(tensor)
    raise ModelError(f"The weight {tensor.name!r} does not hold the {count} elements that its shape {shape} says.")


@cache
def _stored_kind(elem: int) -> np.dtype[Any]:
    """The element type as raw data have it."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(elem)).newbyteorder("<")


def tensor_stats(tensor: TensorProto, base_dir: Path | None) -> ConstantStats:
    """Statistics of a float tensor, without a copy where it is a multiple of what a file holds.

    Raises:
        As :func:`read_array`.
    """
    place = data_location(tensor, base_dir)
    if place is not None and place.exponent:
        plain = scaled_tensor(tensor, base_dir, -place.exponent)
        if plain is not None and (found := tensor_stats(plain, base_dir).scaled(place.exponent)) is not None:
            return found
    return constant_stats(read_array(tensor, base_dir))


def constant_stats(array: NDArray[Any]) -> ConstantStats:
    """Statistics of a float constant. Two passes over the data; more only if elements are infinite, NaN or sentinels.

    Low-precision arrays are converted to float32 block by block, never as a whole.
    """
    if array.size == 0:
        return ConstantStats(0.0, None, 0.0)
    if array.dtype == np.float32:
        return _block_stats(array)
    parts = [_block_stats(block.astype(np.float32)) for block in blocks_of(array)]
    numbers = {part.uniform for part in parts}
    return ConstantStats(
        max(part.largest for part in parts),
        numbers.pop() if len(numbers) == 1 else None,
        max((part.largest_number for part in parts), key=abs),
        any(part.has_infinite for part in parts),
    )


def blocks_of(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The elements of an array in flat blocks that fit into the processor's cache."""
    flat = array.reshape(-1)
    return (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))


def _block_stats(array: NDArray[np.float32]) -> ConstantStats:
    few = array.size < _MAPPED  # there, argmax is faster than max; but it copies what is read-only, as mapped files are
    top = array.item(array.argmax()) if few else float(array.max())
    bottom = array.item(array.argmin()) if few else float(array.min())
    uniform, extreme = top if top == bottom else None, top if top >= -bottom else bottom
    if abs(extreme) < SENTINEL:  # false for NaN
        return ConstantStats(abs(extreme), uniform, extreme)
    magnitudes = np.abs(array[np.isfinite(array)])
    numbers = array[np.abs(array) < SENTINEL]
    extreme = float(numbers[np.abs(numbers).argmax()]) if numbers.size else 0.0
    infinite = bool(np.isinf(array).any())
    return ConstantStats(float(magnitudes.max(initial=0.0)), uniform, extreme, infinite)
