"""What rules know of the model: types, shapes, and constants that are known before the graph runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxamp._graph.shapes import Dims, elements, symbolic_shapes
from onnxamp._graph.view import ABSENT, Node, View, opset_imports
from onnxamp._ops.facts import attribute, op_facts
from onnxamp.train._gradients.calls import Call
from onnxamp.train._gradients.path import Path
from onnxamp.train._gradients.writer import FLOATS, Tensor, Writer

SMALL: Final = 4096
"""Elements up to which rules may look into a constant: axes, pads, sizes, exponents."""
_KINDS: Final[Mapping[str, Any]] = {
    "value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32,
}  # fmt: skip

_Known = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Reading:
    """A model, the way through it, the shapes of its values (by value index) and its small constants (by name)."""

    view: View
    path: Path
    dims: Sequence[Dims | None]
    known: Mapping[str, NDArray[Any]]

    def handle(self, writer: Writer, value: int) -> Tensor | None:
        """A value as rules see it; None for one that is left out."""
        if value == ABSENT:
            return None
        return Tensor(writer, self.view.values[value].name, self.path.elems[value], self.dims[value])

    def call(self, writer: Writer, node: Node) -> Call:
        """A node as rules see it; its proto is a copy that they may change."""
        proto = NodeProto()
        proto.CopyFrom(node.proto)
        return Call(
            writer,
            proto,
            tuple(self.handle(writer, value) for value in node.inputs),
            tuple(self.handle(writer, value) for value in node.outputs),
            tuple(value in self.path.moved for value in node.inputs),
            node.label,
            self.known,
        )


def read(view: View, path: Path) -> Reading:
    """Look at a model once. Linear, but for onnx's shape inference."""
    dims = symbolic_shapes(view)
    known = _constants(view, path.elems, dims)
    computed = {name for node in view.nodes if node.scope == 0 and node.key != "Constant" for name in node.proto.output}
    folded = {name: numpy_helper.from_array(array, name) for name, array in known.items() if name in computed}
    if folded:
        dims = symbolic_shapes(view, folded)
    return Reading(view, path, dims, known)


def _constants(view: View, elems: Sequence[int], dims: Sequence[Dims | None]) -> _Known:
    """Small constants of the main graph: initializers that no caller overrides, Constants, known shapes, and integers
    that are computed from these.
    """
    listed = {entry.name for entry in view.model.graph.input}
    found: _Known = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in view.model.graph.initializer
        if tensor.name not in listed and _is_small(tensor) and tensor.data_location != TensorProto.EXTERNAL
    }
    known, computed = set(found), []
    for node in (view.nodes[index] for index in view.order):
        if node.scope or node.bodies or node.key in op_facts().random:
            continue
        name = node.proto.output[0]
        shape = dims[node.inputs[0]] if node.key == "Shape" else None
        if shape is not None and all(isinstance(size, int) for size in shape):
            end = attribute(node.proto, "end")
            found[name] = np.asarray(shape[attribute(node.proto, "start") or 0 : end], np.int64)
            known.add(name)
        elif node.key == "Constant":
            found.update(_constant(node.proto))
            known.update(found.keys() & {name})
        elif node.inputs and all(not n or n in known for n in node.proto.input) and _counts(node, elems):
            computed.append(node)
            known.update(node.proto.output)
    return _evaluated(view.model, computed, found)


def _counts(node: Node, elems: Sequence[int]) -> bool:
    """Whether all outputs are integers or bools."""
    return all(value == ABSENT or elems[value] not in (0, *FLOATS) for value in node.outputs)


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


def _evaluated(model: ModelProto, nodes: Sequence[Node], found: _Known) -> _Known:
    """What is found, and what the nodes compute from it."""
    if not nodes:
        return found
    outputs = [name for node in nodes for name in node.proto.output if name]
    read_names = {name for node in nodes for name in node.proto.input} & found.keys()
    feeds = {name: found[name] for name in read_names}
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), None) for n, a in feeds.items()
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([node.proto for node in nodes], "constants", inputs, results)
    opsets = [helper.make_opsetid(domain, version) for domain, version in opset_imports(model).items()]
    made = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets)).run(None, feeds)
    return found | {name: np.asarray(array) for name, array in zip(outputs, made, strict=True)}
