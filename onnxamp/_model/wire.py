"""Serialized models: the places of the data of large tensors, and the same bytes with other data there.

A parsed model holds its weights in memory, and protobuf frees them only with the whole model. So large weights are cut
out of a file's bytes before these are parsed, and spliced in after the rest was serialized. This module knows just
enough of protobuf's wire format (https://protobuf.dev/programming-guides/encoding/): a field is a tag, a length and a
payload, and only messages that can hold tensors are descended into.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from mmap import mmap
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.message import Message
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
)

_BLOCK: Final = 1 << 20
"""Bytes that are fetched at once."""
_BLOCKS: Final = 8


class Ranges:
    """Remote bytes, fetched on demand in blocks; the last blocks are cached."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        """Let ``fetch`` be called with a start and a size."""
        self._size, self._fetch = size, fetch
        self._block = lru_cache(_BLOCKS)(self._fetched)

    def _fetched(self, start: int) -> bytes:
        return self._fetch(start, min(_BLOCK, self._size - start))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return memoryview(self._fetch(at.start, at.stop - at.start))
        inside = at % _BLOCK
        return self._block(at - inside)[inside]


Buffer: TypeAlias = bytes | memoryview | mmap | Ranges

_HOLDERS: Final[dict[str, tuple[type[Message], dict[str, str]]]] = {
    "model": (ModelProto, {"graph": "graph", "functions": "function"}),
    "graph": (GraphProto, {"initializer": "tensor", "node": "node"}),
    "function": (FunctionProto, {"node": "node"}),
    "node": (NodeProto, {"attribute": "attribute"}),
    "attribute": (
        AttributeProto,
        {"t": "tensor", "tensors": "tensor", "g": "graph", "graphs": "graph"},
    ),
}
_FIELDS: Final = MappingProxyType(
    {
        kind: {
            proto.DESCRIPTOR.fields_by_name[name].number: held
            for name, held in fields.items()
        }
        for kind, (proto, fields) in _HOLDERS.items()
    }
)
"""Kind of message -> field number -> kind of message in that field that may hold tensors."""

_RAW_DATA: Final = TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_DATA_LOCATION: Final = TensorProto.DESCRIPTOR.fields_by_name["data_location"].number
_EXTERNAL_DATA: Final = TensorProto.DESCRIPTOR.fields_by_name["external_data"].number
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_Around: TypeAlias = tuple[tuple[int, int, int], ...]
"""Messages, outermost first, as positions: of the length, and where the content starts and ends."""


class Span(NamedTuple):
    """The ``raw_data`` field of a tensor: tag and length from ``start``, data from ``data`` to ``end``."""

    start: int
    data: int
    end: int
    around: _Around
    """The messages that enclose it."""
    default: bool
    """Whether the tensor says explicitly that it holds its data (``data_location`` DEFAULT)."""


def find_data(data: Buffer, wanted: Callable[[int, int], bool]) -> list[Span]:
    """Return the raw data of tensors, in the order of the file.

    Args:
        data: a serialized ModelProto.
        wanted: whether to search the bytes from a start to an end; everything else is skipped.

    Raises:
        ValueError: the bytes are not a ModelProto, or one in an unusual encoding.

    Complexity: linear in the fields of the messages that are looked into.
    """
    found: list[Span] = []
    stack: list[tuple[str, int, int, _Around]] = [("model", 0, len(data), ())]
    while stack:
        kind, position, end, around = stack.pop()
        if kind == "tensor":
            span = _tensor_data(data, position, end, around)
            if span is not None and wanted(span.data, span.end):
                found.append(span)
            continue
        inner = []
        for number, _, length_at, start, stop in _fields(data, position, end):
            held = _FIELDS[kind].get(number)
            if held is not None and wanted(start, stop):
                inner.append((held, start, stop, (*around, (length_at, start, stop))))
        stack += reversed(inner)
    return found


def _tensor_data(data: Buffer, position: int, end: int, around: _Around) -> Span | None:
    """Return the raw data of one tensor; None if it has none, or refers to external data."""
    span, default = None, False
    for number, tag_at, _, start, stop in _fields(data, position, end):
        if number == _DATA_LOCATION:
            default = data[start] == TensorProto.DEFAULT
        if number == _EXTERNAL_DATA or (number == _DATA_LOCATION and not default):
            return None
        if number == _RAW_DATA:
            if span is not None:
                raise ValueError("raw_data twice")
            span = Span(tag_at, start, stop, around, default)
    return span and span._replace(default=default)


def _fields(
    data: Buffer, position: int, end: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the fields of a message: number, start of the tag, of the length and of the payload, and end of the
    payload.

    Only fields of bytes have a length; for others its start is that of the payload.
    """
    while position < end:
        tag_at = position
        tag, position = _varint(data, position)
        length_at, kind = position, tag & 7
        if kind == _BYTES:
            length, position = _varint(data, position)
            stop = position + length
        elif kind == _VARINT:
            stop = _varint(data, position)[1]
        elif kind in (_FIXED64, _FIXED32):
            stop = position + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"wire type {kind}")
        if stop > end:
            raise ValueError("a field reaches beyond its message")
        yield tag >> 3, tag_at, length_at, position, stop
        position = stop


def _varint(data: Buffer, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    byte = data[position] if position < len(data) else 0
    if byte < 0x80:
        return byte, position + 1
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise ValueError("a number without an end")


def as_varint(value: int) -> bytes:
    """Return a number in the encoding of messages."""
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def replaced(
    data: Buffer, spans: Sequence[Span], fields: Sequence[tuple[bytes, int]]
) -> list[tuple[int, memoryview | int]]:
    """Replace the data of some tensors in a message by other fields.

    Args:
        data: what :func:`find_data` searched.
        spans: the bytes to replace, in the order of the file.
        fields: for each span, the bytes to put in its place and the size of the hole to leave behind them.

    Returns:
        The new message, as bytes by their positions in it; a hole is the number of its span.

    Complexity: linear in the spans and the messages that enclose them; no data are copied.
    """
    grown = Counter[int]()
    messages: dict[int, tuple[int, int, int]] = {}
    """Start of a message's content -> start of its length, end of its content, and start of the enclosing message."""
    cuts: list[tuple[int, int, bytes, int, int]] = []
    for number, (span, (text, size)) in enumerate(zip(spans, fields, strict=True)):
        outer = -1
        for length_at, start, stop in span.around:
            messages[start] = (length_at, stop, outer)
            outer = start
        grown[outer] += len(text) + size - (span.end - span.start)
        cuts.append((span.start, span.end, text, size, number))
    for start in sorted(
        messages, reverse=True
    ):  # inner messages first: their lengths may grow
        length_at, stop, outer = messages[start]
        length = as_varint(stop - start + grown[start])
        cuts.append((length_at, start, length, 0, -1))
        grown[outer] += grown[start] + len(length) - (start - length_at)
    whole = data if isinstance(data, Ranges) else memoryview(data)
    found, read, written = list[tuple[int, memoryview | int]](), 0, 0
    for start, stop, text, size, number in [
        *sorted(cuts),
        (len(data), len(data), b"", 0, -1),
    ]:
        for piece in (whole[read:start], memoryview(text)):
            if piece.nbytes:
                found.append((written, piece))
                written += piece.nbytes
        if number >= 0:
            found.append((written, number))
            written += size
        read = stop
    return found


def raw_data_head(size: int) -> bytes:
    """Tag and length that start a ``raw_data`` field of ``size`` bytes."""
    return as_varint(_RAW_DATA << 3 | _BYTES) + as_varint(size)
