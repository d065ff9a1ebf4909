"""Sliding caches, whose rows are undefined where no token has reached them: models with zeros there."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from onnxamp._facts.dtypes import ELEM_NUMBERS, FLOAT
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied


def with_defined_windows(graph: Graph) -> Graph:
    """Return the model with zeros in the rows of sliding caches that no token has reached; itself without such caches.

    Such rows are undefined, so that two runs of one model may differ in them.
    """
    windows = op_facts().windows
    sliding = [
        node
        for node in graph.nodes_of(windows)
        if node.scope == 0 and attribute(node.proto, windows[node.key].when)
    ]
    if not sliding:
        return graph
    editor = GraphEditor(graph)
    for node in sliding:
        editor.replace(node.index, [*_defined(editor, graph, node)])
    return Graph.of(editor.finish())


def _defined(editor: GraphEditor, graph: Graph, node: Node) -> Iterator[NodeProto]:
    """Return the node, and nodes that set the rows of its caches after the last token to zero."""
    given = copied(node.proto)
    make = editor.make
    window = op_facts().windows[node.key]
    # Tokens are on the third axis of a cache: [batch, heads, rows, width].
    zero, one, axis = (editor.ints(n, f"window/{n}") for n in range(3))

    def fresh(part: str) -> str:
        return editor.names.fresh(f"{node.label}/{part}")

    last = fresh("last")
    tokens = fresh("tokens")
    after = [
        make("Cast", [given.input[window.seen]], [last], to=TensorProto.INT64),
        make("Reshape", [last, editor.ints([-1, 1, 1, 1], "window/all")], [tokens]),
    ]
    for at in window.caches:
        name = given.output[at]
        value = node.outputs[at]
        if value == ABSENT:
            continue
        given.output[at] = held = fresh("held")
        shape, size, rows, column, keeps = map(
            fresh, ("shape", "size", "rows", "column", "keeps")
        )
        elem = ELEM_NUMBERS[(graph.types[value] or FLOAT)[len("tensor(") : -1]]
        nothing = editor.constant(np.zeros((), np.float32), "window/nothing", elem)
        after += [
            make("Shape", [held], [shape]),
            make("Gather", [shape, axis], [size]),
            make("Range", [zero, size, one], [rows]),
            make("Unsqueeze", [rows, editor.ints([1], "window/axis")], [column]),
            make("LessOrEqual", [column, tokens], [keeps]),
            make("Where", [keeps, held, nothing], [name]),
        ]
    yield given
    yield from after
