"""Gelu, Softmax and LogSoftmax, written out."""

from onnxamp._patterns.forms import Kind
from onnxamp._patterns.match import Reading
from onnxamp._rewrite.fold.folds import Fold, Found

_AXIS_BY_ITSELF = 13
"""First opset at which Softmax is along one axis, and not along all from that one on."""


def activation(reading: Reading, kind: Kind, found: Found) -> Fold | None:
    """The activation that the form is. A number without an axis would gain one by constants of shape [1]: it stays."""
    if reading.graph.shapes[found.values["x"]] == ():
        return None
    return Fold(
        kind.name, kind.op, kind.opset, found.nodes, found.last, (found.values["x"],), kind.attributes
    )  # fmt: skip


def softmax(reading: Reading, kind: Kind, found: Found) -> Fold | None:
    """The softmax along one axis."""
    shape = reading.graph.shapes[found.values["x"]]
    if len(found.axes) != 1:
        return None
    axis, opset = found.axes[0], kind.opset
    if reading.graph.book.opsets[""] < _AXIS_BY_ITSELF and axis == -1 and shape is not None:
        axis, opset = len(shape) - 1, 1
    return Fold(kind.name, kind.op, opset, found.nodes, found.last, (found.values["x"],), {"axis": axis})
