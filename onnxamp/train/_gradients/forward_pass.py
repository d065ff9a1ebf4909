"""The forward pass as gradient rules see it: the path of the gradients, types, shapes and constants."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import ELEM_NUMBERS, FLOAT_ELEMS, element_name
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims, elements, symbolic_shapes
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import opset_imports
from onnxamp._ops.facts import attribute, op_facts
from onnxamp.train._gradients.calls import Call
from onnxamp.train._gradients.table import FLAT
from onnxamp.train._gradients.writer import Tensor, Writer

SMALL: Final = 4096
"""Most elements of a constant that rules look into: axes, pads, sizes, exponents."""
_KINDS: Final[Mapping[str, Any]] = {
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_float": np.float32,
    "value_floats": np.float32,
}

_Known = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Path:
    """Nodes of the main graph through which gradients flow, in order, and the values that have one."""

    nodes: tuple[Node, ...]
    moved: frozenset[int]
    """Values that depend on a wanted one through floats."""
    elems: Sequence[int]
    """Element type by value; 0 if it is unknown, or the value is not a tensor."""


def find_path(graph: Graph, wanted: Iterable[int], loss: int) -> Path:
    """Find the nodes that depend on a wanted value, and the loss on them, through floats. Linear."""
    elems = [ELEM_NUMBERS.get(element_name(kind), 0) for kind in graph.types]
    differentiable = FLOAT_ELEMS | {0}  # values of unknown type may be floats
    moved = set(wanted)
    movers: list[Node] = []
    captured = _captured(graph)
    order = [graph.nodes[index] for index in graph.order if graph.nodes[index].scope == 0]
    for node in order:
        reads = (*node.inputs, *captured.get(node.index, ()))
        if node.key not in FLAT and any(value in moved for value in reads):
            movers.append(node)
            moved.update(
                value
                for value in node.outputs
                if value != ABSENT and elems[value] in differentiable
            )
    needed, between = {loss} & moved, []
    for node in reversed(movers):
        if any(value in needed for value in node.outputs):
            between.append(node)
            needed.update(
                value for value in (*node.inputs, *captured.get(node.index, ())) if value in moved
            )
    return Path(tuple(between[::-1]), frozenset(moved), elems)


def _captured(graph: Graph) -> dict[int, list[int]]:
    """By node of the main graph: the values of the main graph that its bodies read."""
    owners: dict[int, int] = {}
    for body in graph.scopes[1:]:  # outer scopes come first
        outer = graph.nodes[body.owner].scope
        owners[body.index] = body.owner if outer == 0 else owners[outer]
    captured: dict[int, list[int]] = {}
    for value in graph.values:
        if value.scope == 0:
            scopes = [graph.nodes[index].scope for index, _ in graph.uses[value.index]]
            for scope in filter(
                None, (*scopes, *(scope for scope, _ in graph.results[value.index]))
            ):
                captured.setdefault(owners[scope], []).append(value.index)
    return captured


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A model, the path of its gradients, the shapes of its values by index, and its small constants by name."""

    graph: Graph
    path: Path
    dims: Sequence[Dims | None]
    known: Mapping[str, NDArray[Any]]

    def handle(self, writer: Writer, value: int) -> Tensor | None:
        """A value as rules see it; None for an absent one."""
        if value == ABSENT:
            return None
        return Tensor(
            writer, self.graph.values[value].name, self.path.elems[value], self.dims[value]
        )

    def call(self, writer: Writer, node: Node) -> Call:
        """A node as rules see it; its proto is a copy that they may change."""
        return Call(
            writer=writer,
            proto=copied(node),
            inputs=tuple(self.handle(writer, value) for value in node.inputs),
            outputs=tuple(self.handle(writer, value) for value in node.outputs),
            wants=tuple(value in self.path.moved for value in node.inputs),
            label=node.label,
            known=self.known,
        )


def copied(node: Node) -> NodeProto:
    """A copy of a node's proto."""
    proto = NodeProto()
    proto.CopyFrom(node.proto)
    return proto


def read_forward_pass(graph: Graph, path: Path) -> ForwardPass:
    """Analyse a model. Linear, except for onnx's shape inference."""
    dims = graph.ask(symbolic_shapes)
    known = _constants(graph, path.elems, dims)
    computed = {
        name
        for node in graph.nodes
        if node.scope == 0 and node.key != "Constant"
        for name in node.proto.output
    }
    folded = {
        name: numpy_helper.from_array(array, name)
        for name, array in known.items()
        if name in computed
    }
    if folded:
        dims = symbolic_shapes(graph, folded)
    return ForwardPass(graph, path, dims, known)


def _constants(graph: Graph, elems: Sequence[int], dims: Sequence[Dims | None]) -> _Known:
    """Small constants of the main graph: initializers that callers cannot override, Constant nodes, static shapes, and
    integers computed from these.
    """
    listed = {entry.name for entry in graph.model.graph.input}
    constants: _Known = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in graph.model.graph.initializer
        if tensor.name not in listed
        and _is_small(tensor)
        and tensor.data_location != TensorProto.EXTERNAL
    }
    known, computed = set(constants), []
    for node in (graph.nodes[index] for index in graph.order):
        if node.scope or node.bodies or node.key in op_facts().random:
            continue
        name = node.proto.output[0]
        shape = dims[node.inputs[0]] if node.key == "Shape" else None
        if shape is not None and all(isinstance(size, int) for size in shape):
            end = attribute(node.proto, "end")
            constants[name] = np.asarray(shape[attribute(node.proto, "start") or 0 : end], np.int64)
            known.add(name)
        elif node.key == "Constant":
            constants.update(_constant(node.proto))
            known.update(constants.keys() & {name})
        elif (
            node.inputs
            and all(not n or n in known for n in node.proto.input)
            and _counts(node, elems)
        ):
            computed.append(node)
            known.update(node.proto.output)
    return _evaluated(graph.model, computed, constants)


def _counts(node: Node, elems: Sequence[int]) -> bool:
    """Whether all outputs are integers or bools."""
    return all(value == ABSENT or elems[value] not in (0, *FLOAT_ELEMS) for value in node.outputs)


def _constant(node: NodeProto) -> _Known:
    value = attribute(node, "value")
    if isinstance(value, TensorProto):
        return {node.output[0]: numpy_helper.to_array(value)} if _is_small(value) else {}
    for kind, dtype in _KINDS.items():
        if (number := attribute(node, kind)) is not None:
            return {node.output[0]: np.asarray(number, dtype)}
    return {}


def _is_small(tensor: TensorProto) -> bool:
    return elements(tuple(tensor.dims)) <= SMALL


def _evaluated(model: ModelProto, nodes: Sequence[Node], constants: _Known) -> _Known:
    """The constants, and those that the nodes compute from them."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - it takes long to import

    if not nodes:
        return constants
    outputs = [name for node in nodes for name in node.proto.output if name]
    read_names = {name for node in nodes for name in node.proto.input} & constants.keys()
    feeds = {name: constants[name] for name in read_names}
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), None)
        for n, a in feeds.items()
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([node.proto for node in nodes], "constants", inputs, results)
    opsets = [
        helper.make_opsetid(domain, version) for domain, version in opset_imports(model).items()
    ]
    made = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets)).run(None, feeds)
    return constants | {name: np.asarray(array) for name, array in zip(outputs, made, strict=True)}
