"""ONNX protos, parsed and serialized: opsets, subgraphs, tensors and their sizes, and the places of large data.

These functions need no graph analysis. All code that reads a bare ModelProto, NodeProto or GraphProto starts here. The
accessors that op tables need as well (``op_key``, ``attribute``) are in :mod:`onnxamp._facts.ops`.

A parsed model holds its weights in memory, and protobuf frees them only with the whole model. So large weights are cut
out of a file's bytes before these are parsed, and spliced in after the rest was serialized. The code here knows just
enough of protobuf's wire format (https://protobuf.dev/programming-guides/encoding/): a field is a tag, a length and a
payload, and only messages that can hold tensors are descended into.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from math import prod
from mmap import mmap
from os import PathLike
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import Message
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
)
from onnx.defs import onnx_opset_version

from onnxamp._facts.dtypes import FORMATS

PLAIN: Final = frozenset(
    {
        AttributeProto.INT,
        AttributeProto.INTS,
        AttributeProto.FLOAT,
        AttributeProto.FLOATS,
        AttributeProto.STRING,
        AttributeProto.STRINGS,
    }
)
"""Types of attributes that hold neither tensors nor graphs."""

DATA_FIELDS: Final = tuple(
    f"{kind}_data"
    for kind in ("float", "int32", "int64", "string", "double", "uint64")
)
"""Fields of a tensor that hold its elements one by one."""

_PACKED: Final = {
    TensorProto.UINT4: 4,
    TensorProto.INT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    25: 2,
    26: 2,
}
"""Bits of element types that share a byte."""
_BLOCK: Final = 1 << 20
"""Bytes that are fetched at once."""
_BLOCKS: Final = 8


def small_model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
) -> ModelProto:
    """Return a model that is made to have an engine compute something, at an opset that knows all formats."""
    graph = helper.make_graph(nodes, "small", inputs, outputs)
    opset = max(18, *(low.min_opset for low in FORMATS.values()))
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8
    )


def fed_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """Return the inputs of a model that are no initializers, which callers have to feed."""
    weights = {tensor.name for tensor in graph.initializer}
    return [entry for entry in graph.input if entry.name not in weights]


def default_domain(domain: str) -> str:
    """Return the domain with "" for ``ai.onnx``, its alias."""
    return "" if domain == "ai.onnx" else domain


def opset_imports(model: ModelProto) -> dict[str, int]:
    """Return domain -> version, with "" for ai.onnx. If that is not imported, the newest that the IR version allows."""
    versions = {
        default_domain(entry.domain): entry.version for entry in model.opset_import
    }
    if "" not in versions:
        newest = [row[2] for row in helper.VERSION_TABLE if row[1] <= model.ir_version]
        versions[""] = max(newest, default=onnx_opset_version())
    return versions


def node_bodies(node: NodeProto) -> list[tuple[str, GraphProto]]:
    """Return the node's subgraphs, each with the name of its attribute."""
    bodies = []
    # Many nodes have no attributes, and a slice of none takes as long as the rest here.
    for item in node.attribute[:] if node.attribute else ():
        if item.type not in PLAIN:
            graphs = [item.g] if item.HasField("g") else []
            bodies += [(item.name, graph) for graph in (*graphs, *item.graphs)]
    return bodies


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield the nodes and those of all subgraphs below them, each once, in no particular order. Iterative."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        for _, body in node_bodies(node):
            stack += body.node


def nodes_of_model(model: ModelProto) -> Iterator[NodeProto]:
    """Yield the nodes of a model's graph, then those of its functions, with all subgraphs below them."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from all_nodes(nodes)


def tensors_of(model: ModelProto) -> Iterator[TensorProto]:
    """Yield all dense initializers and tensor attributes of the model, its subgraphs and its functions, each once.

    Attributes include the defaults of functions.
    """
    stack: list[Any] = [model.graph, *model.functions]
    while stack:
        graph = stack.pop()
        is_graph = isinstance(graph, GraphProto)
        if is_graph:
            yield from graph.initializer
        defaults = [] if is_graph else graph.attribute_proto[:]
        for item in chain(defaults, *(node.attribute[:] for node in graph.node)):
            if item.type in PLAIN:
                continue
            if item.HasField("t"):
                yield item.t
            yield from item.tensors
            if item.HasField("g"):
                stack.append(item.g)
            stack.extend(item.graphs)


def has_external_data(model: ModelProto) -> bool:
    """Return whether the data of any weight are stored outside the proto."""
    return any(
        tensor.data_location == TensorProto.EXTERNAL for tensor in tensors_of(model)
    )


def stored_bytes(tensor: TensorProto) -> int:
    """Return the bytes of a tensor's elements as raw data; 0 for strings, which have no such form, and odd types."""
    return bytes_of(tensor.data_type, tensor.dims[:])


def is_packed(elem: int) -> bool:
    """Return whether several elements of a type share a byte."""
    return elem in _PACKED


def bytes_of(elem: int, shape: Sequence[int]) -> int:
    """Return :func:`stored_bytes` of the element type and shape of a tensor."""
    return (prod(shape) * _bits_of(elem) + 7) // 8


@cache
def _bits_of(elem: int) -> int:
    """Return the bits of one element; 0 if the type has no fixed size."""
    if elem in _PACKED or elem == TensorProto.STRING:
        return _PACKED.get(elem, 0)
    try:
        return 8 * np.dtype(helper.tensor_dtype_to_np_dtype(elem)).itemsize
    except (KeyError, TypeError):
        return 0


BaseDir: TypeAlias = str | PathLike[str] | None
"""Folder that external data lies in; None if all tensors hold their data."""

M = TypeVar("M", bound=Message)


def copied(message: M) -> M:
    """Return a deep copy of a message."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def copy_fields(source: Message, target: Message, but: Container[str] = ()) -> None:
    """Copy all set fields of a message except those named in ``but``. Unknown fields are not copied."""
    for field, value in source.ListFields():
        if field.name in but:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def copy_without(model: ModelProto, *graph_fields: str) -> ModelProto:
    """Return a copy of a model without some fields of its main graph."""
    result = ModelProto()
    copy_fields(model, result, {"graph"})
    copy_fields(model.graph, result.graph, graph_fields)
    return result


def arrange(items: Any, order: Sequence[int]) -> None:
    """Keep the messages of a repeated field that are at these positions, in this order. Nothing is copied."""
    ranks = [len(items)] * len(items)
    for rank, position in enumerate(order):
        ranks[position] = rank
    # ``sort`` passes each item, which ``next`` takes for a default that is never needed: no call of Python for each.
    items.sort(key=partial(next, iter(ranks)))
    del items[len(order) :]


def drop_named(items: Any, names: Container[str]) -> None:
    """Remove the messages with one of these names from a repeated field."""
    order = [at for at, item in enumerate(items[:]) if item.name not in names]
    if len(order) < len(items):
        arrange(items, order)


class RemoteBytes:
    """Bytes at a URL, fetched on demand in blocks; the last blocks are cached."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        """Let ``fetch`` be called with a start and a size."""
        self._size = size
        self._fetch = fetch
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


Buffer: TypeAlias = bytes | memoryview | mmap | RemoteBytes

_HOLDERS: Final[dict[str, tuple[type[Message], dict[str, str]]]] = {
    "model": (ModelProto, {"graph": "graph", "functions": "function"}),
    "graph": (GraphProto, {"initializer": "tensor", "node": "node"}),
    "function": (
        FunctionProto,
        {"node": "node", "attribute_proto": "attribute"},
    ),
    "node": (NodeProto, {"attribute": "attribute"}),
    "attribute": (
        AttributeProto,
        {"t": "tensor", "tensors": "tensor", "g": "graph", "graphs": "graph"},
    ),
}


def _by_number(proto: type[Message], fields: Mapping[str, str]) -> dict[int, str]:
    """Return what fields of a message hold by their numbers, which stand in its bytes."""
    declared = proto.DESCRIPTOR.fields_by_name
    return {declared[name].number: held for name, held in fields.items()}


_FIELDS: Final = MappingProxyType(
    {kind: _by_number(*holder) for kind, holder in _HOLDERS.items()}
)
"""Kind of message -> field number -> kind of message in that field that may hold tensors."""

_RAW_DATA: Final = TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_DATA_LOCATION: Final = TensorProto.DESCRIPTOR.fields_by_name["data_location"].number
_EXTERNAL_DATA: Final = TensorProto.DESCRIPTOR.fields_by_name["external_data"].number
# Wire types of protobuf; 3 and 4 are groups, which onnx does not use.
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5

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
    spans: list[Span] = []
    stack: list[tuple[str, int, int, _Around]] = [("model", 0, len(data), ())]
    while stack:
        kind, position, end, around = stack.pop()
        if kind == "tensor":
            span = _tensor_data(data, position, end, around)
            if span is not None and wanted(span.data, span.end):
                spans.append(span)
            continue
        inner = []
        for number, _, length_at, start, stop in _fields(data, position, end):
            held = _FIELDS[kind].get(number)
            if held is not None and wanted(start, stop):
                inner.append((held, start, stop, (*around, (length_at, start, stop))))
        # The first is taken next: spans are in the order of the file.
        stack += reversed(inner)
    return spans


def _tensor_data(
    data: Buffer, position: int, end: int, around: _Around
) -> Span | None:
    """Return the raw data of one tensor; None if it has none, or refers to external data."""
    span = None
    default = False
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
        length_at = position
        kind = tag & 7
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
    # Most numbers are tags and small lengths, of one byte.
    byte = data[position] if position < len(data) else 0
    if byte < 0x80:
        return byte, position + 1
    value = shift = 0
    # Seven bits in each byte, the low ones first: ten bytes hold 64 bits.
    while position < len(data) and shift < 70:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position = position + 1
        shift = shift + 7
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
        fields: for each span, the bytes to put in its place and the size of the hole to leave after them.

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
    # Inner messages first, which begin later: a longer length of theirs makes outer messages longer.
    for start in sorted(messages, reverse=True):
        length_at, stop, outer = messages[start]
        length = as_varint(stop - start + grown[start])
        cuts.append((length_at, start, length, 0, -1))
        grown[outer] += grown[start] + len(length) - (start - length_at)
    whole = data if isinstance(data, RemoteBytes) else memoryview(data)
    result = list[tuple[int, memoryview | int]]()
    read = 0
    written = 0
    end = (len(data), len(data), b"", 0, -1)  # with it, the rest is copied
    for start, stop, text, size, number in [*sorted(cuts), end]:
        for piece in (whole[read:start], memoryview(text)):
            if piece.nbytes:
                result.append((written, piece))
                written += piece.nbytes
        if number >= 0:
            result.append((written, number))
            written += size
        read = stop
    return result


def raw_data_head(size: int) -> bytes:
    """Return the tag and length that start a ``raw_data`` field of ``size`` bytes."""
    return as_varint(_RAW_DATA << 3 | _BYTES) + as_varint(size)


def holds_type(model: ModelProto, elem: int) -> bool:
    """Return whether a model has weights or declared values of an element type, or Casts to it.

    Complexity: linear in nodes, weights and declarations.
    """
    graph = model.graph
    entries = (*graph.input, *graph.output, *graph.value_info)
    if any(entry.type.tensor_type.elem_type == elem for entry in entries):
        return True
    if any(tensor.data_type == elem for tensor in tensors_of(model)):
        return True
    casts = (node for node in all_nodes(graph.node) if node.op_type == "Cast")
    attributes = chain.from_iterable(node.attribute for node in casts)
    return any(item.i == elem for item in attributes)
