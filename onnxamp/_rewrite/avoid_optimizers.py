"""Results that ONNX Runtime's graph optimizers do not break: views separate the nodes that an optimizer would fuse.

An Unsqueeze and a Squeeze copy nothing, and no optimizer removes the pair: a Reshape to the shape that is there, or an
Identity, would go first.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from onnx import ModelProto, NodeProto

from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import CPU, version_of
from onnxamp._graph.editor import GraphEditor, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.optimizers import (
    OptimizerFault,
    may_break,
    optimizer_faults,
)

_AXES_ARE_INPUT = 13
"""First opset at which the axes of Unsqueeze and Squeeze are an input."""


def avoid_optimizers(model: ModelProto, target: str) -> tuple[OptimizerFault, ...]:
    """Put views before the inputs through which an optimizer would break a model; change the model in place.

    Sessions on the target's provider count, and those on the CPU provider, which users have everywhere.

    Args:
        model: the model.
        target: the target on which it runs, optionally with a version of ONNX Runtime.

    Returns:
        The faults that the model no longer has.

    Complexity: linear in nodes, and that of shape inference if there are candidates.
    """
    if not may_break(model):
        return ()
    graph = Graph.of(model)
    providers = (device_of(target), CPU)
    faults = tuple(optimizer_faults(graph, providers, version_of(target)))
    if not faults:
        return ()
    editor = GraphEditor(graph, model)
    views = dict[tuple[int, int], str]()
    for fault in sorted(faults, key=lambda fault: fault.reader.index):
        reader = fault.reader
        # Sorted by readers, so that the views stand before the first of those that share them.
        if (reader.scope, fault.value) not in views:
            name = graph.values[fault.value].name
            pair = _views(editor, name, graph.book.opsets[""])
            editor.insert(reader.scope, reader.index, *pair)
            views[reader.scope, fault.value] = pair[-1].output[0]
        view = views[reader.scope, fault.value]
        editor.node(reader.index).input[fault.port] = view
    editor.remove(*_unread(graph, faults))
    editor.finish()
    return faults


def _unread(graph: Graph, faults: Iterable[OptimizerFault]) -> set[int]:
    """Return the skipped nodes that nothing reads any more."""
    gone = {(fault.reader.index, fault.port) for fault in faults}
    unread = set[int]()
    # From each reader upwards, so that a node whose only reader goes is unread as well.
    for node in chain.from_iterable(fault.skipped for fault in faults):
        value = node.outputs[0]
        if gone.issuperset(graph.uses[value]) and not graph.results[value]:
            unread.add(node.index)
            gone.add((node.index, 0))
    return unread


def _views(editor: GraphEditor, name: str, opset: int) -> Sequence[NodeProto]:
    """Return two nodes that give a value another dimension and take it away again."""
    wider = editor.names.fresh(f"{name}_wider")
    same = editor.names.fresh(f"{name}_view")
    pair = (
        editor.make("Unsqueeze", [name], [wider]),
        editor.make("Squeeze", [wider], [same]),
    )
    for node in pair:
        if opset >= _AXES_ARE_INPUT:
            node.input.append(editor.ints([0], "first_axis"))
        else:
            set_attribute(node, "axes", [0])
    return pair
