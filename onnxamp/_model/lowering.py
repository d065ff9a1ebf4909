"""Convert float32 weights to low precision, and count the losses.

The converter is ONNX Runtime's own Cast kernel in a one-node session. It converts float32 to float16 at 18 GB/s, where
``numpy.astype`` reaches 1.4. NumPy converts tensors so small that the session's overhead would cost more. Both round to
nearest, ties to even, and the kernel alone decides how NaN is converted. Where ONNX Runtime is not installed, NumPy
converts everything to the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from functools import cache, partial
from itertools import accumulate, groupby, islice
from operator import add
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp._dtypes import FORMATS, Format
from onnxamp._model.protos import record, small_model
from onnxamp._optional import has_runtime

_BLOCK: Final = 1 << 18
"""Elements converted at once: few enough to stay in the processor's cache."""
_FEW: Final = 1 << 13
"""Elements up to which NumPy converts faster than a session."""


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
    flat = (
        (np.ascontiguousarray(array).reshape(-1), saturate_at)
        for array, saturate_at in arrays
    )
    for are_small, group in groupby(flat, lambda pair: 0 < pair[0].size <= _FEW):
        while are_small and (joined := list(islice(group, _BLOCK // _FEW))):
            yield from _convert_joined(joined, low)
        for array, saturate_at in group:
            bits, counts = lower(array, low, saturate_at, Scratch(array.size))
            yield bits.tobytes(), counts


def _convert_joined(
    arrays: Sequence[Saturated], low: Format
) -> Iterator[tuple[bytes, ConversionCounts]]:
    flat = np.concatenate([array for array, _ in arrays])
    scratch, stops = Scratch(flat.size), accumulate(array.size for array, _ in arrays)
    parts = [
        _Part(slice(end - array.size, end), number)
        for end, (array, number) in zip(stops, arrays, strict=True)
    ]
    bits = scratch.bits_of(low, flat.size)
    counts = _lower_block(flat, bits, low, parts, scratch)
    return (
        (bits[part.place].tobytes(), lost)
        for part, lost in zip(parts, counts, strict=True)
    )


def lower(
    flat: NDArray[np.float32], low: Format, saturate_at: float, scratch: Scratch
) -> tuple[NDArray[Any], ConversionCounts]:
    """Convert numbers to the bit patterns of a low-precision type, and count losses.

    Finite numbers out of range become plus or minus ``saturate_at``; infinities and NaN do not change.

    Returns:
        A part of ``scratch.bits``, and the counts.
    """
    bits = scratch.bits_of(low, flat.size)
    whole, counts = [_Part(slice(None), saturate_at)], ConversionCounts()
    for block in _blocks(flat.size):
        counts += _lower_block(flat[block], bits[block], low, whole, scratch)[0]
    return bits, counts


def rounded(
    array: NDArray[np.float32], low: Format, saturate_at: float
) -> NDArray[np.float32]:
    """Return the numbers of an array once they are low precision, in float32; out of range as :func:`lower` has
    them.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    bits, _ = lower(flat, low, saturate_at, Scratch(flat.size))
    return raised(bits.reshape(array.shape), low.elem)


def raised(array: NDArray[Any], elem: int) -> NDArray[np.float32]:
    """Low-precision numbers in float32; ``elem`` is their element type."""
    result, stored = np.empty(array.shape, np.float32), np.ascontiguousarray(array)
    bits, flat = stored.view(f"u{stored.itemsize}").reshape(-1), result.reshape(-1)
    for block in _blocks(flat.size):
        _caster(elem, TensorProto.FLOAT)(bits[block], flat[block])
    return result


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, size, _BLOCK))


class _Part(NamedTuple):
    """An array, or the part of it in a block, and the magnitude at which its numbers saturate."""

    place: slice
    saturate_at: float


def _lower_block(
    flat: NDArray[np.float32],
    bits: NDArray[Any],
    low: Format,
    parts: Sequence[_Part],
    scratch: Scratch,
) -> list[ConversionCounts]:
    """Convert a block of one large array, or of several small ones; returns the counts of each part."""
    limits, mask = _limits(low), scratch.mask[: flat.size]
    if is_large := flat.size > _FEW * len(parts):
        _caster(TensorProto.FLOAT, low.elem)(flat, bits)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            bits[:] = flat.astype(limits.kind).view(low.patterns)

    def counted(mask: NDArray[np.bool_]) -> list[int]:
        return [int(np.count_nonzero(mask[part.place])) for part in parts]

    magnitude = scratch.magnitude.view(low.patterns)[: flat.size]
    np.add(bits, bits, out=magnitude)  # shifts out the sign
    small = counted(np.less(magnitude, 2 * limits.smallest_normal, out=mask))
    zeros = counted(np.equal(magnitude, 0, out=mask)) if any(small) else small
    zeros_before = counted(np.equal(flat, 0, out=mask)) if any(zeros) else zeros
    overflowed = [0] * len(parts)
    largest = int(magnitude.max())
    if largest > 2 * limits.infinity and not is_large:  # NaN
        _caster(TensorProto.FLOAT, low.elem)(flat, bits)
    if largest >= 2 * limits.infinity:
        beyond = np.isfinite(flat, out=mask) & (magnitude == 2 * limits.infinity)
        overflowed = counted(beyond)
        for place, saturate_at in parts:
            pattern = int(
                np.float32(saturate_at).astype(limits.kind).view(low.patterns)
            )
            bits[place][beyond[place]] = (
                bits[place][beyond[place]] & limits.sign | pattern
            )
    return [
        ConversionCounts(len(flat[part.place]), over, zero - before, little - zero)
        for part, over, zero, before, little in zip(
            parts, overflowed, zeros, zeros_before, small, strict=True
        )
    ]


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
