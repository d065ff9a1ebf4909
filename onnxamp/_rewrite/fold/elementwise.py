"""Decomposed Gelu, Softmax and LogSoftmax."""

from onnxamp._graph.graph import Graph
from onnxamp._patterns.forms import Kind
from onnxamp._patterns.match import Match
from onnxamp._rewrite.fold.folds import Fold

_AXIS_BY_ITSELF = 13
"""First opset at which Softmax is along one axis, and not along all from that one on."""


def activation(graph: Graph, kind: Kind, match: Match) -> Fold | None:
    """The activation that the form is. A number without an axis would gain one by constants of shape [1]: it stays."""
    if graph.shapes[match.values["x"]] == ():
        return None
    return Fold(
        kind.name, kind.op, kind.opset, match.nodes, match.core, (match.values["x"],), kind.attributes
    )  # fmt: skip


def softmax(graph: Graph, kind: Kind, match: Match) -> Fold | None:
    """The softmax along one axis."""
    shape = graph.shapes[match.values["x"]]
    if len(match.axes) != 1:
        return None
    axis, opset = match.axes[0], kind.opset
    if graph.book.opsets[""] < _AXIS_BY_ITSELF and axis == -1 and shape is not None:
        axis, opset = len(shape) - 1, 1
    return Fold(kind.name, kind.op, opset, match.nodes, match.core, (match.values["x"],), {"axis": axis})
