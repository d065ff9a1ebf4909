"""The elements of weights: read wherever they lie, and converted to low precision, with the losses counted.

The converter is ONNX Runtime's own Cast kernel in a one-node session. It converts float32 to float16 at 18 GB/s, where
``numpy.astype`` reaches 1.4. NumPy converts tensors so small that the session's overhead would cost more. Both round to
nearest, ties to even, and the kernel alone decides how NaN is converted. Where ONNX Runtime is not installed, NumPy
converts everything to the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from functools import cache, partial
from itertools import accumulate
from math import prod
from operator import add
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxamp._base.errors import ModelError
from onnxamp._base.optional import has_runtime
from onnxamp._base.paths import as_path, is_remote
from onnxamp._base.records import record
from onnxamp._facts.dtypes import FORMATS, Format, low_type
from onnxamp._model.protos import small_model
from onnxamp._model.sources import (
    DataLocation,
    data_location,
    forget_location,
)

_BLOCK: Final = 1 << 18
"""Elements converted at once: few enough to stay in the processor's cache."""
_FEW: Final = 1 << 13
"""Elements up to which NumPy converts faster than a session."""
_RARE: Final = 16
"""Elements of a block for each one that is counted, from which on a search takes less time than a sum."""
MAPPED: Final = 1 << 16
"""Elements from which on external data are memory-mapped; below, reading them is faster."""

_LEAST_POWER = -126
_MOST_POWER = 127
"""Exponents of the powers of two that are float32 numbers with all their digits."""
SENTINEL: Final = 1e30
"""Magnitudes from here on mean infinity, as in attention masks; a conversion saturates them."""

_PART: Final = 1 << 20
"""Elements that are looked at together."""


@record
class ConversionCounts:
    """Counts of a tensor's elements that overflowed, were flushed to zero, or became subnormal."""

    elements: int = 0
    overflowed: int = 0
    flushed: int = 0
    subnormal: int = 0

    def __add__(self, other: "ConversionCounts") -> "ConversionCounts":
        """Return the counts of both together."""
        return ConversionCounts(*map(add, astuple(self), astuple(other)))


_WIDEST: Final = max(low.bytes for low in FORMATS.values())
"""Bytes of a number in the widest format."""


class Scratch:
    """Reusable memory for :func:`lower`: allocating fresh pages would cost more than the conversion."""

    def __init__(self, size: int) -> None:
        """Make room for up to ``size`` elements."""
        block = min(size, _BLOCK)
        self.bits = np.empty(_WIDEST * size, np.uint8)
        self.magnitude = np.empty(_WIDEST * block, np.uint8)
        self.mask = np.empty(block, np.bool_)

    def bits_of(self, low: Format, size: int) -> NDArray[Any]:
        """Buffers for the bit patterns of that many numbers."""
        return self.bits.view(low.patterns)[:size]


Saturated: TypeAlias = tuple[NDArray[np.float32], float]
"""An array, and the magnitude to which its finite numbers out of range saturate."""


def convert(
    arrays: Iterable[Saturated], low: Format
) -> Iterator[tuple[bytes, ConversionCounts]]:
    """Return the raw little-endian bytes of each array in low precision, and the losses. See :func:`lower`.

    Small arrays are joined, because converting them takes less time than the calls.
    """
    # Only neighbors are joined, so that results come in order and few numbers are held at a time.
    joined = list[Saturated]()
    room = _BLOCK
    for array, saturate_at in arrays:
        flat = array.ravel()
        is_small = 0 < flat.size <= _FEW
        if not is_small or flat.size > room:
            yield from _convert_joined(joined, low)
            joined = []
            room = _BLOCK
        if is_small:
            joined.append((flat, saturate_at))
            room -= flat.size
        else:
            bits, counts = lower(flat, low, saturate_at, Scratch(flat.size))
            yield bits.tobytes(), counts
    yield from _convert_joined(joined, low)


def _convert_joined(
    arrays: Sequence[Saturated], low: Format
) -> Iterator[tuple[bytes, ConversionCounts]]:
    """Yield what :func:`convert` yields of small arrays, which are converted at once."""
    if not arrays:
        return
    flat = np.concatenate([array for array, _ in arrays])
    scratch = Scratch(flat.size)
    ends = [*accumulate(array.size for array, _ in arrays)]
    limits = [saturate_at for _, saturate_at in arrays]
    parts = [*map(_Section, [0, *ends[:-1]], ends, limits)]
    bits = scratch.bits_of(low, flat.size)
    counts = _lower_block(flat, bits, low, parts, scratch)
    data = bits.tobytes()
    for part, lost in zip(parts, counts, strict=True):
        yield data[part.start * low.bytes : part.stop * low.bytes], lost


def lower(
    flat: NDArray[np.float32], low: Format, saturate_at: float, scratch: Scratch
) -> tuple[NDArray[Any], ConversionCounts]:
    """Convert numbers to the bit patterns of a low-precision type, and count losses.

    Finite numbers out of range become plus or minus ``saturate_at``; infinities and NaN do not change.

    Returns:
        A part of ``scratch.bits``, and the counts.
    """
    bits = scratch.bits_of(low, flat.size)
    counts = ConversionCounts()
    for block in _blocks(flat.size):
        numbers = flat[block]
        whole = [_Section(0, numbers.size, saturate_at)]
        counts += _lower_block(numbers, bits[block], low, whole, scratch)[0]
    return bits, counts


def rounded(
    array: NDArray[np.float32], low: Format, saturate_at: float
) -> NDArray[np.float32]:
    """Return the numbers of an array once they are low precision, in float32; out of range as :func:`lower` has
    them.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    bits, _ = lower(flat, low, saturate_at, Scratch(flat.size))
    return in_float32(bits.reshape(array.shape), low.elem)


def in_float32(array: NDArray[Any], elem: int) -> NDArray[np.float32]:
    """Return low-precision numbers in float32; ``elem`` is their element type."""
    result = np.empty(array.shape, np.float32)
    stored = np.ascontiguousarray(array)
    bits = stored.view(f"u{stored.itemsize}").reshape(-1)
    flat = result.reshape(-1)
    for block in _blocks(flat.size):
        _caster(elem, TensorProto.FLOAT)(bits[block], flat[block])
    return result


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, size, _BLOCK))


class _Section(NamedTuple):
    """The place of an array in a block, and the magnitude at which its numbers saturate."""

    start: int
    stop: int
    saturate_at: float


def _lower_block(
    flat: NDArray[np.float32],
    bits: NDArray[Any],
    low: Format,
    parts: Sequence[_Section],
    scratch: Scratch,
) -> list[ConversionCounts]:
    """Convert a block of one large array, or of several small ones, and return the counts of each section.

    Without their sign, bit patterns are in the order of magnitudes, so that comparing integers counts the losses.
    """
    limits = _limits(low)
    mask = scratch.mask[: flat.size]
    if is_large := flat.size > _FEW * len(parts):
        _caster(TensorProto.FLOAT, low.elem)(flat, bits)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            bits[:] = flat.astype(limits.kind).view(low.patterns)

    starts = [part.start for part in parts]
    counted = partial(_counted, starts=starts)
    magnitude = scratch.magnitude.view(low.patterns)[: flat.size]
    # Doubling shifts out the sign; patterns to compare with are doubled as well.
    np.add(bits, bits, out=magnitude)
    small = counted(np.less(magnitude, 2 * limits.smallest_normal, out=mask))
    zeros = counted(np.equal(magnitude, 0, out=mask)) if any(small) else small
    zeros_before = counted(np.equal(flat, 0, out=mask)) if any(zeros) else zeros
    overflowed = [0] * len(parts)
    largest = int(magnitude.max())
    # Patterns above infinity are NaN, whose bits the kernel alone decides.
    if largest > 2 * limits.infinity and not is_large:
        _caster(TensorProto.FLOAT, low.elem)(flat, bits)
    if largest >= 2 * limits.infinity:
        beyond = np.isfinite(flat, out=mask) & (magnitude == 2 * limits.infinity)
        overflowed = counted(beyond)
        for part, count in zip(parts, overflowed, strict=True):
            if not count:
                continue
            place = slice(part.start, part.stop)
            bound = np.float32(part.saturate_at).astype(limits.kind)
            signs = bits[place][beyond[place]] & limits.sign
            bits[place][beyond[place]] = signs | int(bound.view(low.patterns))
    return [
        ConversionCounts(part.stop - part.start, over, zero - before, little - zero)
        for part, over, zero, before, little in zip(
            parts, overflowed, zeros, zeros_before, small, strict=True
        )
    ]


def _counted(mask: NDArray[np.bool_], starts: Sequence[int]) -> list[int]:
    """Return how many elements are true in each section; the sections follow each other, and none is empty."""
    total = int(np.count_nonzero(mask))
    if len(starts) == 1 or not total:
        return [total, *[0] * (len(starts) - 1)]
    if total * _RARE < mask.size:
        sections = np.searchsorted(starts, np.flatnonzero(mask), side="right") - 1
        rare: list[int] = np.bincount(sections, minlength=len(starts)).tolist()
        return rare
    counts: list[int] = np.add.reduceat(mask, starts, dtype=np.int64).tolist()
    return counts


class _Limits(NamedTuple):
    """A low-precision type in NumPy, the bit of its sign, and bit patterns of two of its numbers."""

    kind: np.dtype[Any]
    sign: int
    smallest_normal: int
    infinity: int


@cache
def _limits(low: Format) -> _Limits:
    kind = helper.tensor_dtype_to_np_dtype(low.elem)
    numbers = np.array([low.smallest_normal, np.inf], np.float32).astype(kind)
    return _Limits(kind, 1 << 8 * low.bytes - 1, *map(int, numbers.view(low.patterns)))


@cache
def _caster(source: int, target: int) -> Callable[[NDArray[Any], NDArray[Any]], None]:
    """Return a function that casts a flat, non-empty array into another one; low precision is bit patterns.

    ``source`` and ``target`` are element types.
    """
    if not has_runtime():
        return partial(_cast_by_numpy, source, target)
    import onnxruntime as ort  # noqa: PLC0415 - importing it costs 0.1 s

    node = helper.make_node("Cast", ["x"], ["y"], to=target)
    x = helper.make_tensor_value_info("x", source, ["n"])
    y = helper.make_tensor_value_info("y", target, ["n"])
    model = small_model([node], [x], [y])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # write_blobs has its own; idle ones would spin
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def cast(numbers: NDArray[Any], into: NDArray[Any]) -> None:
        binding = session.io_binding()
        binding.bind_input("x", "cpu", 0, source, numbers.shape, numbers.ctypes.data)
        binding.bind_output("y", "cpu", 0, target, into.shape, into.ctypes.data)
        session.run_with_iobinding(binding)

    return cast


_QUIET: Final = 1 << 22
"""The bit that tells a quiet NaN of float32 from a signaling one."""


def _cast_by_numpy(
    source: int, target: int, numbers: NDArray[Any], into: NDArray[Any]
) -> None:
    """Cast a flat array into another one as ONNX Runtime's kernel does, which quiets each NaN."""
    held, wanted = map(helper.tensor_dtype_to_np_dtype, (source, target))
    values = numbers.view(held)
    if source == TensorProto.FLOAT and np.isnan(values).any():
        values = values.copy()
        values.view(np.uint32)[np.isnan(values)] |= _QUIET
    with np.errstate(over="ignore"):
        into[:] = values.astype(wanted).view(into.dtype)


def times_power(
    array: NDArray[np.float32], exponent: int, out: NDArray[np.float32] | None = None
) -> NDArray[Any]:
    """Return numbers multiplied by ``2**-exponent``, exact within the range of float32."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # A product is several times as fast as ldexp, where the factor is a float32 number.
        if _LEAST_POWER <= -exponent <= _MOST_POWER:
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
    shape = tuple(tensor.dims[:])
    count = prod(shape)
    kind = _stored_kind(tensor.data_type)
    place = data_location(tensor, base_dir)
    if place is not None:
        if place.saturate_at is not None:
            kind = _stored_kind(TensorProto.FLOAT)
        return _computed(tensor, place, _stored(place, kind, shape))
    if tensor.HasField("raw_data"):
        data = tensor.raw_data
        if len(data) == kind.itemsize * count:
            return np.ndarray(shape, kind, data)
    elif len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type))) == count:
        return numpy_helper.to_array(tensor)
    raise ModelError(
        f"The weight {tensor.name!r} does not hold the {count} elements that its shape {shape} requires."
    )


def flat_array(tensor: TensorProto, base_dir: Path | None) -> NDArray[Any]:
    """Return the elements of a float32 tensor of a well-formed model one after another, as :func:`read_array` does."""
    numbers = raw_floats(tensor)
    return read_array(tensor, base_dir).ravel() if numbers is None else numbers


def raw_floats(tensor: TensorProto) -> NDArray[np.float32] | None:
    """Return the elements of a float32 tensor that stores them as raw bytes in the model; None for others."""
    data = tensor.raw_data
    is_external = tensor.data_location == TensorProto.EXTERNAL
    if not data or is_external or tensor.data_type != TensorProto.FLOAT:
        return None
    return np.frombuffer(data, _FLOAT32)


_FLOAT32: Final = np.dtype("<f4")


def _stored(
    place: DataLocation, kind: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return the elements in a file."""
    if is_remote(place.path):
        return np.frombuffer(place.read(), kind).reshape(shape)
    with place.opened() as file:
        if prod(shape) < MAPPED:
            return np.fromfile(file, kind, prod(shape)).reshape(shape)
        return np.asarray(np.memmap(file, kind, "r", place.offset, shape))


@cache
def _stored_kind(elem: int) -> np.dtype[Any]:
    """Return the element type as raw data have it."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(elem)).newbyteorder("<")


def blocks_of(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Return the elements of an array in flat blocks that fit into the processor's cache."""
    flat = array.reshape(-1)
    return (flat[start : start + _PART] for start in range(0, flat.size, _PART))
