"""Reading ONNX protos: the opsets a model imports, the subgraphs of a node, the tensors of a model and their sizes.

These functions need no graph analysis. All code that reads a bare ModelProto, NodeProto or GraphProto starts here. The
accessors that op tables need as well (``op_key``, ``attribute``) are in :mod:`onnxamp._ops.facts`.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from os import PathLike
from typing import Any, Final, TypeAlias, TypeVar, dataclass_transform

import numpy as np
from google.protobuf.message import Message
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
)
from onnx.defs import onnx_opset_version

from onnxamp._dtypes import FORMATS

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
    f"{kind}_data" for kind in ("float", "int32", "int64", "string", "double", "uint64")
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


def default_domain(domain: str) -> str:
    """Return the domain with "" for ``ai.onnx``, its alias."""
    return "" if domain == "ai.onnx" else domain


def opset_imports(model: ModelProto) -> dict[str, int]:
    """Domain -> version, with "" for ai.onnx. If that is not imported, the newest that the IR version allows."""
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
    for item in node.attribute[:]:
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


def tensors_of(model: ModelProto) -> Iterator[TensorProto]:
    """Yield all dense initializers and tensor attributes of the model, its subgraphs and its functions, each once."""
    stack: list[Any] = [model.graph, *model.functions]
    while stack:
        graph = stack.pop()
        if isinstance(graph, GraphProto):
            yield from graph.initializer
        for node in graph.node:
            for item in node.attribute[:]:
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
    following = iter(ranks)
    items.sort(key=lambda _: next(following))
    del items[len(order) :]


def drop_named(items: Any, names: Container[str]) -> None:
    """Remove the messages with one of these names from a repeated field."""
    order = [at for at, item in enumerate(items) if item.name not in names]
    if len(order) < len(items):
        arrange(items, order)


T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """As ``@dataclass(frozen=True, slots=True)``, but only type checkers see that it is frozen.

    Creating a value then takes a quarter of the time: Python sets each field of a frozen dataclass by a call.
    """
    return dataclass(slots=True)(cls)
