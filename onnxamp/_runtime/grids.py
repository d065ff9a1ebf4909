"""The float network that a quantized one stands for, which shows the effect of rounding to integers."""

from collections.abc import Iterator
from typing import Any

from onnx import NodeProto, TensorProto

from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.model import Model
from onnxamp._ops.facts import op_facts


def without_grids(model: Model) -> Model | None:
    """Return the model without rounding computed values to integers. Weights are still rounded, because they are stored
    as integers.

    Returns:
        A model that reads the values from before they were quantized; None if nothing was quantized.
    """
    graph = model.ask(graph_of)
    if not any(_pairs(graph)) and not any(_products(graph)):
        return None
    graph = Model(model.embedded()).ask(graph_of)
    editor = GraphEditor(graph)
    for node, before in _pairs(graph):
        name = graph.values[before].name
        moved = editor.make("Identity", [name], node.proto.output[:1], node.proto.name)
        editor.replace(node.index, [moved])
    for node, maker in _products(graph):
        editor.replace(node.index, _in_floats(editor, node, maker))
    return Model(editor.finish())


def _pairs(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Yield (node that dequantizes, value of the same type that was quantized before)."""
    facts, types = op_facts(), graph.types
    for node in graph.nodes_of(facts.dequantize):
        maker = graph.producer(node.input(0), *facts.quantize)
        if maker is None:
            continue
        before = maker.input(0)
        if before != ABSENT and types[before] == types[node.outputs[0]]:
            yield node, before


_DYNAMIC = "DynamicQuantizeLinear"
"""The op that gives its scale beside its integers."""


def _products(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield (product of integers, node that quantizes what it multiplies)."""
    for node in graph.nodes_of(op_facts().integer_products):
        maker = graph.producer(node.input(0), _DYNAMIC)
        if maker is not None:
            yield node, maker


def _in_floats(editor: GraphEditor, node: Node, maker: Node) -> list[NodeProto]:
    """Return the product of the numbers over their scale, and of the weight less its zero point."""
    fresh, proto, made = editor.names.fresh, node.proto, list[NodeProto]()

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        made.append(
            editor.make(op, inputs, [fresh(f"{proto.output[0]}/{op}")], **attributes)
        )
        return made[-1].output[0]

    numbers = add("Div", maker.proto.input[0], maker.proto.output[1])
    factors = [
        add("Cast", name, to=TensorProto.FLOAT)
        for name in (proto.input[1], *proto.input[3:])
    ]
    weight = factors[0] if len(factors) == 1 else add("Sub", *factors)
    op = proto.op_type.removesuffix("Integer")
    product = editor.make(op, [numbers, weight], proto.output, proto.name)
    product.attribute.extend(proto.attribute)
    return [*made, product]
