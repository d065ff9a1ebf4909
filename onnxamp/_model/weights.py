"""Weights: reading them wherever they are stored, their statistics, and their conversion to low precision.

The converter is ONNX Runtime's own Cast kernel in a one-node session: 18 GB/s for float32 to float16 where
``numpy.astype`` reaches 1.4, it knows bfloat16, and its rounding (to nearest, ties to even) is the runtime's.
"""

from collections.abc import Callable
from dataclasses import dataclass
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

SENTINEL = 1e30
"""Magnitudes from here on mean "minus (or plus) infinity", as in attention masks; they saturate."""

INSIDE: Final = f"onnxamp:{token_hex(8)}:"
"""What stands before the path in the location of a weight that lies inside a model file (see
:func:`onnxamp._model.storage.load_model`). It is random, so that no file can claim to be one
of these and name any path.
"""

WAS_DEFAULT: Final = "onnxamp:default"
"""Entry of a weight inside a model file that said, though it need not, that its data lie there."""

_MAPPED: Final = 1 << 16
"""Elements from which on data are mapped: reading is faster below."""

_BLOCK: Final = 1 << 18
"""Elements that are converted at a time."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class External:
    """Where a tensor's data lies outside the model file."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ConstantStats:
    """What the hazard rules ask about a float32 constant."""

    largest: float
    """Largest finite magnitude."""
    uniform: float | None
    """The value where all elements are equal."""
    largest_number: float
    """The element of the largest magnitude below :data:`SENTINEL`."""

    def out_of_range(self, low: LowType) -> float | None:
        """An element that rounds to infinity in the low-precision type and is no sentinel."""
        return self.largest_number if abs(self.largest_number) >= low.overflow else None

    def has_sentinel(self, low: LowType) -> bool:
        """Whether an element stands for infinity, and the low-precision type cannot hold it."""
        return self.largest >= max(SENTINEL, low.overflow)


@dataclass(frozen=True, slots=True)
class ConversionCounts:
    """What became of a tensor's elements: how many overflowed, flushed to zero, or became subnormal."""

    elements: int = 0
    overflowed: int = 0
    flushed: int = 0
    subnormal: int = 0

    def __add__(self, other: "ConversionCounts") -> "ConversionCounts":
        """Both together."""
        return ConversionCounts(
            self.elements + other.elements,
            self.overflowed + other.overflowed,
            self.flushed + other.flushed,
            self.subnormal + other.subnormal,
        )


def external_of(
    tensor: TensorProto, base_dir: Path | None, known: dict[str, tuple[Path, int]] | None = None
) -> External | None:
    """Where the tensor's data lie, checked, if they are not in memory; None for a tensor that holds them.

    Args:
        known: by location the file and its size, for the tensors of one sweep: looking for files takes long.

    Raises:
        ExternalDataError: the folder is unknown, the file is missing or too short, or it lies outside the folder
            of the model (absolute paths, ``..`` and symbolic links included).
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {item.key: item.value for item in tensor.external_data}
    if len(entries) < len(tensor.external_data) or not all(isinstance(text, str) for text in entries.values()):
        raise ExternalDataError(f"The weight {tensor.name!r} says twice, or not in UTF-8, where its data are.")
    location = entries.get("location", "")
    if location.startswith(INSIDE):
        return External(Path(location.removeprefix(INSIDE)), int(entries["offset"]), int(entries["length"]))
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
            f"The weight {tensor.name!r} needs {expected} bytes at offset {offset} of {str(path)!r}, which holds"
            f" {size} bytes (entry: {length} bytes)."
        )
    return External(path, offset, length)


def _data_file(name: str, location: str, base_dir: Path | None) -> tuple[Path, int]:
    """The file of a location, resolved, and its size; raises as :func:`external_of`."""
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
        what = "is no regular file" if path.exists() else "is missing"
        raise ExternalDataError(f"The data file {str(path)!r} of the weight {name!r} {what}.")
    return path, path.stat().st_size


def _resolved(base_dir: Path, location: str) -> Path | None:
    """Where a location leads, links followed; None where it leads nowhere."""
    if not location:
        return None
    try:
        path = (base_dir / location).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError):  # a name that is too long, has a zero byte, or links in a circle
        return None
    return path


def _number(text: str) -> int | None:
    """A number as ONNX Runtime writes it; Python's ``int`` would take signs, blanks and other digits, too."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def lies_inside(tensor: TensorProto) -> bool:
    """Whether the tensor's data lie in a model file, and were left there."""
    entries = (item.value for item in tensor.external_data if item.key == "location")
    return any(isinstance(text, str) and text.startswith(INSIDE) for text in entries)


def lies_elsewhere(tensor: TensorProto) -> bool:
    """Whether the tensor's data lie in another file than the model's."""
    return tensor.data_location == TensorProto.EXTERNAL and not lies_inside(tensor)


def embed(tensor: TensorProto, base_dir: str | PathLike[str] | None) -> None:
    """Read an external tensor's data into the tensor itself, in place; other tensors stay as they are.

    Raises:
        ExternalDataError: see :func:`external_of`.
    """
    external = external_of(tensor, None if base_dir is None else Path(base_dir))
    if external is None:
        return
    with external.path.open("rb") as file:
        file.seek(external.offset)
        tensor.raw_data = file.read(external.length)
    forget_place(tensor)


def forget_place(tensor: TensorProto) -> None:
    """Let the tensor say no more that its data lie elsewhere, in place; as it was where they lay inside its file."""
    if lies_elsewhere(tensor) or any(item.key == WAS_DEFAULT for item in tensor.external_data):
        tensor.data_location = TensorProto.DEFAULT
    else:
        tensor.ClearField("data_location")
    tensor.ClearField("external_data")


def stored_bytes(tensor: TensorProto) -> int:
    """Bytes of the tensor's elements as raw data; 0 for strings, which have no such form, and for unknown types."""
    bits = _bits_of(tensor.data_type)
    return (prod(tensor.dims) * bits + 7) // 8 if bits else 0


@cache
def _bits_of(elem: int) -> int:
    """Bits of one element; 0 where it has none."""
    if elem in _PACKED or elem == TensorProto.STRING:
        return _PACKED.get(elem, 0)
    try:
        return 8 * np.dtype(helper.tensor_dtype_to_np_dtype(elem)).itemsize
    except (KeyError, TypeError):
        return 0


_PACKED: Final = {TensorProto.UINT4: 4, TensorProto.INT4: 4, TensorProto.FLOAT4E2M1: 4, 25: 2, 26: 2}
"""Element types of which a byte holds several -> their bits."""


def read_float32(tensor: TensorProto, base_dir: Path | None) -> NDArray[np.float32]:
    """Elements of a float32 tensor, without a copy where it is stored raw; large external data are memory-mapped.

    Raises:
        ModelError: the tensor holds fewer or more bytes than its dimensions say.
        ExternalDataError: see :func:`external_of`.
    """
    external = external_of(tensor, base_dir)
    shape, count = tuple(tensor.dims), prod(tensor.dims)
    if external is not None:
        if count == 0:
            return np.zeros(shape, np.float32)
        if count < _MAPPED:
            return np.fromfile(external.path, "<f4", count, offset=external.offset).reshape(shape)
        return np.memmap(external.path, "<f4", "r", external.offset, (count,)).reshape(shape)
    if tensor.HasField("raw_data") and len(tensor.raw_data) == 4 * count:
        return np.frombuffer(tensor.raw_data, "<f4").reshape(shape)
    if not tensor.HasField("raw_data") and len(tensor.float_data) == count:
        return numpy_helper.to_array(tensor).astype(np.float32, copy=False)
    raise ModelError(f"The weight {tensor.name!r} does not hold the {count} elements that its shape {shape} says.")


def constant_stats(array: NDArray[np.float32]) -> ConstantStats:
    """Statistics of a constant. Two passes over the data; more only where elements are infinite, NaN or sentinels."""
    if array.size == 0:
        return ConstantStats(0.0, None, 0.0)
    top, bottom = float(array.max()), float(array.min())
    uniform, extreme = top if top == bottom else None, top if top >= -bottom else bottom
    if abs(extreme) < SENTINEL:  # false for NaN
        return ConstantStats(abs(extreme), uniform, extreme)
    magnitudes = np.abs(array[np.isfinite(array)])
    numbers = array[np.abs(array) < SENTINEL]
    extreme = float(numbers[np.abs(numbers).argmax()]) if numbers.size else 0.0
    return ConstantStats(float(magnitudes.max(initial=0.0)), uniform, extreme)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for up to ``size`` elements that :func:`lower` works in: fresh pages would cost more than the work."""

    bits: NDArray[np.uint16]
    magnitude: NDArray[np.uint16]
    mask: NDArray[np.bool_]

    @classmethod
    def make(cls, size: int) -> "Scratch":
        """Scratch for tensors of up to ``size`` elements, or for their blocks."""
        block = min(size, _BLOCK)
        return cls(np.empty(size, np.uint16), np.empty(block, np.uint16), np.empty(block, np.bool_))


def convert(array: NDArray[np.float32], low: LowType, saturate_at: float) -> tuple[bytes, ConversionCounts]:
    """The array in low precision, as raw little-endian bytes, and what was lost. See :func:`lower`."""
    flat = np.ascontiguousarray(array).reshape(-1)
    bits, counts = lower(flat, low, saturate_at, Scratch.make(flat.size))
    return bits.tobytes(), counts


def lower(
    flat: NDArray[np.float32], low: LowType, saturate_at: float, scratch: Scratch
) -> tuple[NDArray[np.uint16], ConversionCounts]:
    """Numbers in low precision, as bits, and what was lost.

    Finite numbers beyond the range become plus or minus ``saturate_at``; infinities and NaN stay.

    Returns:
        A part of ``scratch.bits``, and the counts.
    """
    counts, bits = ConversionCounts(), scratch.bits[: flat.size]
    for start in range(0, flat.size, _BLOCK):  # in blocks, which stay in the processor's cache
        block = slice(start, start + _BLOCK)
        counts += _lower_block(flat[block], bits[block], low, saturate_at, scratch)
    return bits, counts


def _lower_block(
    flat: NDArray[np.float32], bits: NDArray[np.uint16], low: LowType, saturate_at: float, scratch: Scratch
) -> ConversionCounts:
    _caster(low)(flat, bits)
    mask = scratch.mask[: flat.size]
    magnitude = np.add(bits, bits, out=scratch.magnitude[: flat.size])  # drops the sign
    small = int(np.count_nonzero(np.less(magnitude, 2 * _bits(low, low.smallest_normal), out=mask)))
    zeros = int(np.count_nonzero(np.equal(magnitude, 0, out=mask))) if small else 0
    flushed = zeros - int(np.count_nonzero(np.equal(flat, 0, out=mask))) if zeros else 0
    overflowed = 0
    if magnitude.max() >= 2 * _bits(low, np.inf):
        beyond = np.isfinite(flat, out=mask) & (magnitude == 2 * _bits(low, np.inf))
        overflowed = int(np.count_nonzero(beyond))
        bits[beyond] = bits[beyond] & 0x8000 | _bits(low, saturate_at)
    return ConversionCounts(flat.size, overflowed, flushed, small - zeros)


@cache
def _bits(low: LowType, number: float) -> int:
    """How a positive number is written in the low type."""
    bits = np.empty(1, np.uint16)
    _caster(low)(np.array([number], np.float32), bits)
    return int(bits[0])


@cache
def _caster(low: LowType) -> Callable[[NDArray[np.float32], NDArray[np.uint16]], None]:
    """A function that casts a flat float32 array, which has elements, to the low type's bits."""
    import onnxruntime as ort  # noqa: PLC0415 - importing it costs 0.1 s

    node = helper.make_node("Cast", ["x"], ["y"], to=low.elem)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", low.elem, ["n"])
    model = helper.make_model(
        helper.make_graph([node], "cast", [x], [y]), opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # whole blocks go to threads of our own; idle ones of the session's would spin
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def cast(flat: NDArray[np.float32], bits: NDArray[np.uint16]) -> None:
        binding = session.io_binding()
        binding.bind_cpu_input("x", flat)
        binding.bind_output("y", "cpu", 0, low.elem, flat.shape, bits.ctypes.data)
        session.run_with_iobinding(binding)

    return cast
