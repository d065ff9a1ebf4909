"""Results that ONNX Runtime's graph optimizers do not break: views stand between what an optimizer would take up.

An Unsqueeze and a Squeeze copy nothing, and no optimizer removes the pair: a Reshape to the shape that is there, or an
Identity, would go first.
"""

from collections.abc import Sequence

from onnx import ModelProto, NodeProto

from onnxamp._graph.editor import GraphEditor, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.optimizers import OptimizerFault, may_break, optimizer_faults
from onnxamp._ops import device_of
from onnxamp._target import CPU, version_of

_AXES_ARE_INPUT = 13
"""First opset at which the axes of Unsqueeze and Squeeze are an input."""


def avoid_optimizers(model: ModelProto, target: str) -> tuple[OptimizerFault, ...]:
    """Put views before the inputs through which an optimizer would break a model; the model is changed in place.

    Sessions on the target's provider count, and those on the CPU provider, which users have everywhere.

    Args:
        model: the model.
        target: where it runs, perhaps in a version of ONNX Runtime.

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
        value = reader.inputs[fault.port]
        if (reader.scope, value) not in views:
            name = graph.values[value].name
            pair = _views(editor, name, graph.book.opsets[""])
            editor.insert(reader.scope, reader.index, *pair)
            views[reader.scope, value] = pair[-1].output[0]
        editor.node(reader.index).input[fault.port] = views[reader.scope, value]
    editor.finish()
    return faults


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
