"""The float network that a quantized one stands for, which shows the effect of rounding to integers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from onnx import NodeProto, TensorProto

from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.quantized import OPERATORS, as_floats
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._ops.facts import op_facts


def without_grids(model: Model) -> Model | None:
    """Return the model without rounding computed values to integers. Weights are still rounded, because they are stored
    as integers.

    Returns:
        A model that reads the values from before they were quantized; None if nothing was quantized.
    """
    graph = model.ask(graph_of)
    quantizers = op_facts().quantize | OPERATORS.keys()
    if not graph.nodes_of(quantizers) and not any(_products(graph)):
        return None
    graph = Graph.of(as_floats(model.embedded()))
    editor = GraphEditor(graph)
    before, products = _before(graph, editor), [*_products(graph)]
    pairs = [
        (node, before[node.input(0)])
        for node in graph.nodes_of(op_facts().dequantize)
        if before.get(node.input(0), _NONE).type == graph.types[node.outputs[0]]
    ]
    for node, moved in pairs:
        name, outputs = node.proto.name, node.proto.output[:1]
        identity = editor.make("Identity", [moved.name], outputs, name)
        editor.replace(node.index, [identity])
    for node, maker in products:
        editor.replace(node.index, _in_floats(editor, node, maker))
    return Model(editor.finish()) if pairs or products else None


class _Float(NamedTuple):
    """The name and type of a float that was quantized."""

    name: str
    type: str | None


_NONE: Final = _Float("", "")


def _before(graph: Graph, editor: GraphEditor) -> Mapping[int, _Float]:
    """Return the floats that integers were quantized from, by value.

    Nodes that move integers are repeated for their floats.
    """
    facts, found = op_facts(), dict[int, _Float]()
    movers = graph.nodes_of(facts.moves_data | facts.exact_when.keys())
    able = graph.exact & {node.index for node in movers}
    for node in graph.order:
        if node.key in facts.quantize and node.input(0) != ABSENT:
            name = graph.values[node.inputs[0]].name
            found[node.outputs[0]] = _Float(name, graph.types[node.inputs[0]])
        elif node.index in able:
            numbers = _moved_numbers(node)
            if numbers and all(node.inputs[at] in found for at in numbers):
                _repeat(editor, node, numbers, found)
    return found


def _moved_numbers(node: Node) -> list[int]:
    """Return the positions of the inputs with the numbers that a node moves, which share a type parameter; none if that
    is unknown.
    """
    signature = node.signature
    if signature is None:
        return []
    first = op_facts().moved_inputs.get(node.key, (0,))[0]
    moved = signature.input(first)
    formals = map(signature.input, range(len(node.inputs)))
    return [
        at for at, one in enumerate(formals) if one and moved and one.type == moved.type
    ]


def _repeat(
    editor: GraphEditor, node: Node, numbers: Sequence[int], found: dict[int, _Float]
) -> None:
    """Let a node that moves integers move floats as well, which it reads from the input positions ``numbers``."""
    twin, label = copied(node.proto), f"{node.label}_float"
    twin.name = editor.names.fresh(label)
    for at in numbers:
        twin.input[at] = found[node.inputs[at]].name
    for at, value in enumerate(node.outputs):
        if value != ABSENT:
            twin.output[at] = editor.names.fresh(label)
            found[value] = _Float(twin.output[at], found[node.inputs[numbers[0]]].type)
    editor.insert_after(node.index, twin)


_DYNAMIC = "DynamicQuantizeLinear"
"""The op that gives its scale beside its integers."""


def _products(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield (product of integers, node that quantizes what it multiplies)."""
    for node in graph.nodes_of(op_facts().integer_products):
        maker = graph.producer(node.input(0))
        if maker is not None and maker.key == _DYNAMIC:
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
