"""Serialised models: where the data of large tensors lie, and the same bytes with other data in their place.

A parsed model holds its weights in memory, and protobuf frees none of them before the whole model. So large weights are
cut out of a file's bytes before these are parsed, and spliced in after the rest was serialised. This module knows just
enough of protobuf's wire format (https://protobuf.dev/programming-guides/encoding/): a field is a tag, a length and a
payload, and only messages that can hold tensors are descended into.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from mmap import mmap
from types import MappingProxyType
from typing import Final, TypeAlias

from google.protobuf.message import Message
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

_BLOCK: Final = 1 << 20
"""Bytes that are fetched at a time."""
_BLOCKS: Final = 8


@dataclass(slots=True)
class Ranges:
    """Bytes elsewhere, of which only the parts that are looked at are fetched, in blocks; the last ones are kept."""

    size: int
    fetch: Callable[[int, int], bytes]
    """Takes a start and a size."""
    _kept: dict[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> int:
        number, inside = divmod(at, _BLOCK)
        if number not in self._kept:
            while len(self._kept) >= _BLOCKS:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = self.fetch(
                number * _BLOCK, min(_BLOCK, self.size - number * _BLOCK)
            )
        return self._kept[number][inside]

    def part(self, start: int, stop: int) -> memoryview:
        """The bytes from a start to an end."""
        return memoryview(self.fetch(start, stop - start))


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
        kind: {proto.DESCRIPTOR.fields_by_name[name].number: held for name, held in fields.items()}
        for kind, (proto, fields) in _HOLDERS.items()
    }
)
"""Kind of message -> field number -> kind of message in that field that may hold tensors."""

_RAW_DATA: Final = TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_DATA_LOCATION: Final = TensorProto.DESCRIPTOR.fields_by_name["data_location"].number
_EXTERNAL_DATA: Final = TensorProto.DESCRIPTOR.fields_by_name["external_data"].number
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Span:
    """The ``raw_data`` field of a tensor: tag and length from ``start``, data from ``data`` to ``end``."""

    start: int
    data: int
    end: int
    around: tuple[tuple[int, int, int], ...]
    """The messages that enclose it, outermost first, as positions: of the length, and where the content starts and
    ends.
    """
    default: bool
    """Whether the tensor says explicitly that it holds its data (``data_location`` DEFAULT)."""


@dataclass(frozen=True, slots=True)
class Hole:
    """``size`` bytes at ``position`` that are left for the data of tensor ``index``."""

    position: int
    size: int
    index: int


def find_data(data: Buffer, wanted: Callable[[int, int], bool]) -> list[Span]:
    """The raw data of tensors, in the order of the file.

    Args:
        data: a serialised ModelProto.
        wanted: whether to look into the bytes from a start to an end; anything else is skipped.

    Raises:
        ValueError: the bytes are not a ModelProto, or one in an unusual encoding.

    Complexity: linear in the fields of the messages that are looked into.
    """
    found: list[Span] = []
    stack: list[tuple[str, int, int, tuple[tuple[int, int, int], ...]]] = [
        ("model", 0, len(data), ())
    ]
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


def _tensor_data(
    data: Buffer, position: int, end: int, around: tuple[tuple[int, int, int], ...]
) -> Span | None:
    """The raw data of one tensor; None if it has none, or refers to external data."""
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
    return span and replace(span, default=default)


def _fields(data: Buffer, position: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The fields of a message: number, start of the tag, of the length and of the payload, and end of the payload.

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
    """The number at a position, and where it ends."""
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
    """A number in the encoding of messages."""
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def replaced(
    data: Buffer, spans: Sequence[Span], fields: Sequence[tuple[bytes, int]]
) -> tuple[list[tuple[int, memoryview]], list[Hole], int]:
    """Replace the data of some tensors in a message by other fields.

    Args:
        data: what :func:`find_data` searched.
        spans: what to replace, in the order of the file.
        fields: for each span, the bytes to put in its place and the size of the hole to leave behind them.

    Returns:
        The new message: pieces as (position, bytes), the holes between them, and its total size.

    Complexity: linear in the spans and the messages that enclose them; no data are copied.
    """
    grown: dict[int, int] = {}
    messages: dict[int, tuple[int, int, int]] = {}
    """Start of a message's content -> start of its length, end of its content, and start of the enclosing message."""
    for span, (text, size) in zip(spans, fields, strict=True):
        outer = -1
        for length_at, start, stop in span.around:
            messages[start] = (length_at, stop, outer)
            outer = start
        grown[outer] = grown.get(outer, 0) + len(text) + size - (span.end - span.start)
    cuts: list[tuple[int, int, bytes, int, int]] = []
    for start in sorted(
        messages, reverse=True
    ):  # inner messages first, since their lengths may grow, too
        length_at, stop, outer = messages[start]
        length = as_varint(stop - start + grown.get(start, 0))
        cuts.append((length_at, start, length, 0, -1))
        grown[outer] = grown.get(outer, 0) + grown.get(start, 0) + len(length) - (start - length_at)
    cuts += [
        (s.start, s.end, text, size, i)
        for i, (s, (text, size)) in enumerate(zip(spans, fields, strict=True))
    ]
    part = data.part if isinstance(data, Ranges) else _parts_of(memoryview(data))
    pieces, holes, read, written = list[tuple[int, memoryview]](), list[Hole](), 0, 0
    for start, stop, text, size, index in sorted(cuts):
        for piece in (part(read, start), memoryview(text)):
            if piece.nbytes:
                pieces.append((written, piece))
                written += piece.nbytes
        if index >= 0:
            holes.append(Hole(written, size, index))
            written += size
        read = stop
    pieces.append((written, part(read, len(data))))
    return pieces, holes, written + len(data) - read


def _parts_of(whole: memoryview) -> Callable[[int, int], memoryview]:
    """A function that cuts parts out, from a start to an end."""
    return lambda start, stop: whole[start:stop]


def raw_data_head(size: int) -> bytes:
    """Tag and length that start a ``raw_data`` field of ``size`` bytes."""
    return as_varint(_RAW_DATA << 3 | _BYTES) + as_varint(size)
