"""The float network behind a quantized one, which tells what rounding to integers costs."""

from collections.abc import Iterator

from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.model import Model
from onnxamp._ops.facts import op_facts


def without_grids(model: Model) -> Model | None:
    """The model whose computed values are not rounded to a grid of integers; weights are, as they are stored so.

    Returns:
        A model that reads what was quantized and dequantized as it was before; None if nothing was.
    """
    pairs = list(_pairs(model.ask(graph_of)))
    if not pairs:
        return None
    whole = Model(model.embedded())
    editor = GraphEditor(whole.ask(graph_of))
    for node, before in pairs:
        name = editor.view.values[before].name
        moved = editor.make("Identity", [name], node.proto.output[:1], node.proto.name)
        editor.replace(node.index, [moved])
    return Model(editor.finish())


def _pairs(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Yield (node that dequantizes, value of the same type that was quantized before)."""
    facts, types = op_facts(), graph.types
    for node in graph.nodes_of(facts.dequantize):
        maker = graph.producer(node.input(0))
        if maker is None or maker.key not in facts.quantize:
            continue
        before = maker.input(0)
        if before != ABSENT and types[before] == types[node.outputs[0]]:
            yield node, before
