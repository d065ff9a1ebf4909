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
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxamp.dtypes import LowType
from onnxamp.errors import ExternalDataError, ModelError
from onnxamp.threads import thread_limit

SENTINEL = 1e30
"""Magnitudes from here on mean "minus (or plus) infinity", as in attention masks; they saturate."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class External:
    """Where a tensor's data lies outside the model file."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ConstantStats:
    """What the hazard rules ask about a float32 constant; magnitudes are of finite elements."""

    largest: float
    uniform: float | None
    """The value where all elements are equal."""
    out_of_range: float | None
    """The first finite element that rounds to infinity and is no sentinel."""
    has_sentinel: bool


@dataclass(frozen=True, slots=True)
class ConversionCounts:
    """What became of a tensor's elements: how many overflowed, flushed to zero, or became subnormal."""

    elements: int = 0
    overflowed: int = 0
    flushed: int = 0
    subnormal: int = 0


def external_of(tensor: TensorProto, base_dir: Path | None) -> External | None:
    """Location of the tensor's external data, checked; None for a tensor stored inline.

    Raises:
        ExternalDataError: the folder is unknown, the file is missing or too short, or it lies outside the folder
            of the model (absolute paths, ``..`` and symbolic links included).
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {item.key: item.value for item in tensor.external_data}
    location = entries.get("location", "")
    if len(entries) < len(tensor.external_data) or not all(isinstance(text, str) for text in entries.values()):
        raise ExternalDataError(f"The weight {tensor.name!r} says twice, or not in UTF-8, where its data are.")
    if base_dir is None:
        raise ExternalDataError(
            f"The weight {tensor.name!r} is stored in {location!r}, which only a path can locate: pass the model's"
            " path, or load the data first (onnx.load does)."
        )
    path = _resolved(base_dir, location)
    if path is None or not path.is_relative_to(base_dir.resolve()):
        raise ExternalDataError(
            f"The weight {tensor.name!r} points to {location!r}, outside the model's folder {str(base_dir)!r}: refused."
        )
    if not path.is_file():
        what = "is no regular file" if path.exists() else "is missing"
        raise ExternalDataError(f"The data file {str(path)!r} of the weight {tensor.name!r} {what}.")
    expected = stored_bytes(tensor)
    offset, length = _number(entries.get("offset", "0")), _number(entries.get("length", str(expected)))
    if offset is None or length is None:
        raise ExternalDataError(f"The weight {tensor.name!r} has an unreadable offset or length.")
    size = path.stat().st_size
    if length != expected or offset + length > size:
        raise ExternalDataError(
            f"The weight {tensor.name!r} needs {expected} bytes at offset {offset} of {str(path)!r}, which holds"
            f" {size} bytes (entry: {length} bytes)."
        )
    return External(path, offset, length)


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
    del tensor.external_data[:]
    tensor.data_location = TensorProto.DEFAULT


def stored_bytes(tensor: TensorProto) -> int:
    """Bytes of the tensor's elements as raw data; 0 for strings, which have no such form."""
    packed: dict[int, int] = {TensorProto.UINT4: 4, TensorProto.INT4: 4, TensorProto.FLOAT4E2M1: 4, 25: 2, 26: 2}
    bits = packed.get(tensor.data_type)
    count = prod(tensor.dims) if tensor.data_type != TensorProto.STRING else 0
    if bits is not None:
        return (count * bits + 7) // 8
    try:
        return int(count * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize)
    except (KeyError, TypeError):
        return 0


def read_float32(tensor: TensorProto, base_dir: Path | None) -> NDArray[np.float32]:
    """Elements of a float32 tensor, without a copy where it is stored raw; external data is memory-mapped.

    Raises:
        ModelError: the tensor holds fewer or more bytes than its dimensions say.
        ExternalDataError: see :func:`external_of`.
    """
    external = external_of(tensor, base_dir)
    shape, count = tuple(tensor.dims), prod(tensor.dims)
    if external is not None:
        if count == 0:
            return np.zeros(shape, np.float32)
        return np.memmap(external.path, "<f4", "r", external.offset, (count,)).reshape(shape)
    if tensor.HasField("raw_data") and len(tensor.raw_data) == 4 * count:
        return np.frombuffer(tensor.raw_data, "<f4").reshape(shape)
    if not tensor.HasField("raw_data") and len(tensor.float_data) == count:
        return numpy_helper.to_array(tensor).astype(np.float32, copy=False)
    raise ModelError(f"The weight {tensor.name!r} does not hold the {count} elements that its shape {shape} says.")


def constant_stats(array: NDArray[np.float32], low: LowType) -> ConstantStats:
    """Statistics of a constant. Two passes over the data; more only where something is out of range."""
    if array.size == 0:
        return ConstantStats(0.0, None, None, has_sentinel=False)
    top, bottom = float(array.max()), float(array.min())
    uniform = top if top == bottom else None
    largest = max(abs(top), abs(bottom))
    if not np.isfinite(largest) or largest >= low.overflow:
        flat = np.abs(array[np.isfinite(array)])
        largest = float(flat.max(initial=0.0))
        beyond = (np.abs(array) >= low.overflow) & (np.abs(array) < SENTINEL)
        out_of_range = float(array[beyond][0]) if beyond.any() else None
        has_sentinel = bool((flat >= max(SENTINEL, low.overflow)).any())
    else:
        out_of_range, has_sentinel = None, False
    return ConstantStats(largest, uniform, out_of_range, has_sentinel)


def convert(array: NDArray[np.float32], low: LowType, saturate_at: float) -> tuple[bytes, ConversionCounts]:
    """The array in low precision, as raw little-endian bytes, and what was lost.

    Finite elements beyond the range become plus or minus ``saturate_at``; infinities and NaN stay.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    counts = _counts(flat, low)
    if counts.overflowed:
        beyond = np.isfinite(flat) & (np.abs(flat) >= low.overflow)
        flat = np.where(beyond, np.copysign(np.float32(saturate_at), flat), flat)
    return _caster(low)(flat).tobytes(), counts


def _counts(flat: NDArray[np.float32], low: LowType, block: int = 1 << 20) -> ConversionCounts:
    overflowed = flushed = subnormal = 0
    for start in range(0, flat.size, block):  # in blocks, to stay in cache and need no large temporaries
        magnitude = np.abs(flat[start : start + block])
        overflowed += int(np.count_nonzero((magnitude >= low.overflow) & (magnitude < np.inf)))
        small = int(np.count_nonzero(magnitude < low.smallest_normal))
        if small:
            zero = int(np.count_nonzero(magnitude == 0))
            gone = int(np.count_nonzero(magnitude <= low.smallest_subnormal / 2)) - zero
            flushed, subnormal = flushed + gone, subnormal + small - zero - gone
    return ConversionCounts(flat.size, overflowed, flushed, subnormal)


@cache
def _caster(low: LowType) -> Callable[[NDArray[np.float32]], Array]:
    """A function that casts a flat float32 array to the low type's bits (uint16)."""
    import onnxruntime as ort  # noqa: PLC0415 - importing it costs 0.1 s

    node = helper.make_node("Cast", ["x"], ["y"], to=low.elem)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", low.elem, ["n"])
    model = helper.make_model(
        helper.make_graph([node], "cast", [x], [y]), opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = thread_limit()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def cast(flat: NDArray[np.float32]) -> Array:
        result = np.empty(flat.shape, np.uint16)
        if flat.size:
            binding = session.io_binding()
            binding.bind_cpu_input("x", flat)
            binding.bind_output("y", "cpu", 0, low.elem, flat.shape, result.ctypes.data)
            session.run_with_iobinding(binding)
        return result

    return cast
