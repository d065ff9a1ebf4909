"""The forward pass as gradient rules see it: all rules, the path of the gradients, types, shapes and constants.

Ops on the path without a rule are replaced by ops that have one: functions are inlined, recurrent ops unrolled.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import FLOAT_ELEMS
from onnxamp._errors import GradientError
from onnxamp._graph.bodies import inline_functions
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims, elements, symbolic_shapes
from onnxamp._graph.view import ABSENT, Node
from onnxamp._graph.wiring import wire
from onnxamp._model.protos import opset_imports
from onnxamp._ops.facts import attribute, op_facts
from onnxamp.train._gradients import linear, movement, normalisations, pointwise
from onnxamp.train._gradients.recurrent import UNROLLED, unroll
from onnxamp.train._gradients.writer import Call, Forward, Rule, Tensor, Writer, elem_of

RULES: Final[Mapping[str, Rule]] = {
    **linear.RULES,
    **movement.RULES,
    **normalisations.RULES,
    **pointwise.RULES,
}
"""Rules by op type of ai.onnx."""

FORWARD: Final[Mapping[str, Forward]] = {
    **linear.FORWARD,
    **normalisations.FORWARD,
    **pointwise.FORWARD,
}
"""Ops whose forward pass keeps values for the rule, or is decomposed."""

ALWAYS: Final = frozenset({"BatchNormalization"})
"""Those of them that may have no kernel: they are decomposed off the path to the loss, too."""

FLAT: Final = frozenset(
    {
        "Bernoulli",
        "Ceil",
        "ConstantOfShape",
        "EyeLike",
        "Floor",
        "Hardmax",
        "Multinomial",
        "OneHot",
        "RandomNormalLike",
        "RandomUniformLike",
        "Round",
        "Sign",
    }
)
"""Ops whose derivative is zero or undefined everywhere: no gradient flows through them.

Outputs that are not floats end the path, too, and need no entry.
"""

SMALL: Final = 4096
"""Most elements of a constant that rules look into: axes, pads, sizes, exponents."""
_ROUNDS: Final = 8
"""How deep function bodies may be nested."""

_Known = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A model, the path of its gradients, the shapes of its values by index, and its small constants by name."""

    graph: Graph
    path: Sequence[Node]
    moved: frozenset[int]
    """Values that depend on a wanted one through floats."""
    dims: Sequence[Dims | None]
    known: Mapping[str, NDArray[Any]]

    def handle(self, writer: Writer, value: int) -> Tensor | None:
        """A value as rules see it; None for an absent one."""
        if value == ABSENT:
            return None
        name, elem = self.graph.values[value].name, elem_of(self.graph.types[value])
        return Tensor(writer, name, elem, self.dims[value])

    def call(self, writer: Writer, node: Node, **more: Any) -> Call:
        """A node as rules see it."""
        return Call(
            writer=writer,
            node=node,
            inputs=tuple(self.handle(writer, value) for value in node.inputs),
            outputs=tuple(self.handle(writer, value) for value in node.outputs),
            wants=tuple(value in self.moved for value in node.inputs),
            known=self.known,
            **more,
        )


def expand(model: ModelProto, loss: str, wanted: Sequence[str]) -> ForwardPass:
    """The model, with a rule for each op between the wanted values and the loss.

    Raises:
        GradientError: an op has neither a rule nor a function body.
        ModelError: a function cannot be inlined.
    """
    model = inline_functions(model, partly=True)
    for _ in range(_ROUNDS):
        graph = Graph.of(model)
        path, moved = find_path(
            graph, [value_of(graph, name) for name in wanted], value_of(graph, loss)
        )
        lacking = [node for node in path if node.key not in RULES]
        for node in lacking:
            _check(node)
        unrolled = [node for node in lacking if node.key in UNROLLED]
        if unrolled or not lacking:
            forward = _read(graph, path, moved)
            if not lacking:
                return forward
            model = _unrolled(forward, unrolled)
        else:
            ops = {(node.proto.domain, node.proto.op_type) for node in lacking}
            model = inline_functions(model, ops)
    raise GradientError(
        f"Function bodies are nested deeper than {_ROUNDS} levels: inline them first."
    )


def value_of(graph: Graph, name: str) -> int:
    """The index of a value of the main graph.

    Raises:
        GradientError: there is no such value.
    """
    if name not in graph.scopes[0].names:
        raise GradientError(f"The model has no value {name!r} to differentiate.")
    return graph.scopes[0].names[name]


def _check(node: Node) -> None:
    what = f"Node {node.label!r} ({node.key}) lies between the loss and a trained weight"
    if node.bodies:
        raise GradientError(
            f"{what}, and has subgraphs, for which there is no gradient rule: unroll or inline it first."
        )
    if node.key not in UNROLLED and (node.signature is None or not node.signature.has_function):
        raise GradientError(
            f"{what}, and has no gradient rule: replace it, or do not train the weights before it."
        )


def _unrolled(forward: ForwardPass, nodes: Sequence[Node]) -> ModelProto:
    """The model with these recurrent nodes unrolled."""
    writer = Writer(GraphEditor(forward.graph))
    for node in nodes:
        writer.prefix = node.label
        unroll(forward.call(writer, node))
        writer.replace(node.index)
    return writer.finish()


def find_path(graph: Graph, wanted: Iterable[int], loss: int) -> tuple[list[Node], set[int]]:
    """Nodes of the main graph that depend on a wanted value, and the loss on them, through floats.

    Returns:
        The nodes in order, and the values that depend on a wanted one. Linear.
    """
    needs, moved, movers = wire(graph).needs, set(wanted), list[Node]()
    differentiable = FLOAT_ELEMS | {0}  # values of unknown type may be floats
    for node in (graph.nodes[index] for index in graph.order if index in needs):
        if node.key not in FLAT and not moved.isdisjoint(needs[node.index]):
            movers.append(node)
            moved.update(
                value
                for value in node.outputs
                if value != ABSENT and elem_of(graph.types[value]) in differentiable
            )
    needed, between = {loss} & moved, []
    for node in reversed(movers):
        if not needed.isdisjoint(node.outputs):
            between.append(node)
            needed.update(moved.intersection(needs[node.index]))
    return between[::-1], moved


def _read(graph: Graph, path: Sequence[Node], moved: Iterable[int]) -> ForwardPass:
    """Analyse a model. Linear, except for onnx's shape inference."""
    dims = graph.ask(symbolic_shapes)
    known = _constants(graph, dims)
    computed = {
        name: numpy_helper.from_array(array, name)
        for name, array in known.items()
        if (producer := graph.producer(graph.scopes[0].names[name])) is not None
        and producer.key != "Constant"
    }
    if computed:
        dims = symbolic_shapes(graph, computed)
    return ForwardPass(graph, path, frozenset(moved), dims, known)


def _constants(graph: Graph, dims: Sequence[Dims | None]) -> _Known:
    """Small constants of the main graph: initializers that callers cannot override, Constant nodes, static shapes, and
    integers computed from these.
    """
    constants: _Known = {
        graph.values[value].name: numpy_helper.to_array(tensor)
        for value, tensor in graph.constants.tensors.items()
        if graph.values[value].scope == 0
        and elements(tuple(tensor.dims)) <= SMALL
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
        elif _is_fixed(graph, node, known):
            computed.append(node)
            known.update(node.proto.output)
    return constants | _evaluated(graph.model, computed, constants)


def _is_fixed(graph: Graph, node: Node, known: Container[str]) -> bool:
    """Whether a node makes integers or bools of what is known, or numbers of its attributes."""
    if node.key == "Constant":
        return any(item.name.startswith("value_") for item in node.proto.attribute)
    inputs = node.proto.input
    kinds = {elem_of(graph.types[value]) for value in node.outputs if value != ABSENT}
    is_known = bool(inputs) and all(not name or name in known for name in inputs)
    return is_known and kinds.isdisjoint({0, *FLOAT_ELEMS})


def _evaluated(model: ModelProto, nodes: Sequence[Node], constants: _Known) -> _Known:
    """What the nodes compute from constants."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - it takes long to import

    if not nodes:
        return {}
    outputs = [name for node in nodes for name in node.proto.output if name]
    read = {name for node in nodes for name in node.proto.input} & constants.keys()
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(constants[name].dtype), None
        )
        for name in read
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([node.proto for node in nodes], "constants", inputs, results)
    opsets = [helper.make_opsetid(*row) for row in opset_imports(model).items()]
    evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
    arrays = evaluator.run(None, {name: constants[name] for name in read})
    return {name: np.asarray(array) for name, array in zip(outputs, arrays, strict=True)}
