"""The rows of an attention: the axis along which a Softmax makes numbers sum up to 1, seen from values before it."""

from collections.abc import Set as AbstractSet

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import axes_of
from onnxamp._graph.view import ABSENT, Node


def softmaxes(graph: Graph) -> frozenset[int]:
    """Return the nodes at which masks end: Softmaxes, and the exponentials of decomposed ones."""
    facts = op_facts()
    nodes = {node.index for node in graph.nodes_of(facts.mask_sinks)}
    cores = (op for op, parts in facts.core_of.items() if "softmax" in parts)
    for core in graph.nodes_of(cores):
        if any(reader.key in facts.reductions for reader, _ in graph.readers(core)):
            nodes.add(core.index)
    return frozenset(nodes)


def _shows_scores(node: Node) -> bool:
    """Return whether an output of an attention shows scores with their mask, whose numbers then matter."""
    shown = op_facts().score_outputs.get(node.key, ())
    return any(node.output(position) != ABSENT for position in shown)


def row_axis(
    graph: Graph, sinks: AbstractSet[int], node: Node, value: int
) -> int | None:
    """Return the axis of what a node reads along which the Softmaxes after it sum up, counted from the end.

    None if it is unknown, if they sum up along several axes, or if an output shows the scores with their mask.

    Args:
        graph: the graph.
        sinks: its Softmaxes, see :func:`softmaxes`.
        node: a node that adds a mask to scores, or an attention that takes a mask.
        value: the mask.

    Complexity: linear in the nodes from there to the Softmaxes.
    """
    if node.inputs.index(value) in op_facts().score_masks.get(node.key, ()):
        return None if _shows_scores(node) else -1
    # The last axis is that of the Softmax in all but a few models, and what moves rows as a whole keeps it the last.
    stack = [node]
    seen = {node.index}
    axes = set[int | None]()
    while stack:
        step = stack.pop()
        for reader, _ in graph.readers(step):
            if reader.index in sinks:
                axes.add(_summed_axis(graph, reader))
            elif reader.index in seen or not _makes_floats(graph, reader):
                continue
            elif reader.key in op_facts().elementwise:
                stack.append(reader)
            elif reader.key in op_facts().reduces_axes:
                # It reads the largest score, which a decomposed Softmax subtracts.
                continue
            elif _keeps_rows(graph, reader):
                axes.add(-1)
                stack.append(reader)
            else:
                axes.add(None)
            seen.add(reader.index)
    return axes.pop() if len(axes) == 1 else None


def _makes_floats(graph: Graph, node: Node) -> bool:
    """Return whether a node makes more than a shape or a comparison."""
    return any(graph.types[value] in ANY_FLOAT_TENSORS for value in node.writes)


def _summed_axis(graph: Graph, softmax: Node) -> int | None:
    """Return the axis along which a Softmax sums up, counted from the end; None if it is unknown or not one."""
    if softmax.key not in op_facts().mask_sinks:
        candidates = {
            axes_of(graph, reader)
            for reader, _ in graph.readers(softmax)
            if reader.key in op_facts().reductions
        }
        axes = candidates.pop() if len(candidates) == 1 else None
        return axes[0] if axes is not None and len(axes) == 1 else None
    # Before opset 13, it sums up along all axes from this one on.
    is_old = graph.book.opsets[""] < 13
    axis = attribute(softmax.proto, "axis")
    if axis is None:
        axis = 1 if is_old else -1
    shape = graph.shapes[softmax.inputs[0]]
    if axis >= 0:
        if shape is None:
            return None
        axis -= len(shape)
    return None if is_old and axis != -1 else int(axis)


def _keeps_rows(graph: Graph, node: Node) -> bool:
    """Return whether a node leaves the numbers along the last axis together, as far as shapes tell."""
    if node.key not in op_facts().keeps_rows:
        return False
    perm = attribute(node.proto, "perm")
    if perm is not None:
        return bool(perm[-1] == len(perm) - 1)
    before, after = graph.shapes[node.inputs[0]], graph.shapes[node.outputs[0]]
    if not before or not after:
        return True
    sizes = {before[-1], after[-1]}
    # An open dimension may be any, but hardly 1.
    return len(sizes) == 1 or (None in sizes and 1 not in sizes)
