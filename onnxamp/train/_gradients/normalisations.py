"""Gradients of normalisations, by their closed forms; batch normalisation in training mode is written out."""

from collections.abc import Mapping, Sequence
from typing import Final

from onnxamp.train._gradients.calls import Call, Forward, Grads, Rule, first
from onnxamp.train._gradients.shapes import per_channel, sum_to
from onnxamp.train._gradients.writer import Tensor

SCALED: Final = "scaled"
"""In names, behind that of a batch normalisation: the nodes that scale and shift what is normalised already."""


def _normalised(x: Tensor, axes: Sequence[int], epsilon: float, *, centred: bool = True) -> tuple[Tensor, Tensor]:
    """(x minus its mean over the axes) times its inverse deviation, and that inverse deviation."""
    shifted = x - x.mean(axes) if centred else x
    inverse = ((shifted * shifted).mean(axes) + epsilon).op("Sqrt").op("Reciprocal")
    return shifted * inverse, inverse


def _through(dy: Tensor, unit: Tensor, inverse: Tensor, axes: Sequence[int], *, centred: bool = True) -> Tensor:
    """The gradient of what was normalised, from that (``dy``) of the normalised value ``unit``."""
    rest = dy - unit * (dy * unit).mean(axes)
    return (rest - dy.mean(axes) if centred else rest) * inverse


def _layer(call: Call, dys: Grads) -> Grads:
    """LayerNormalization and RMSNormalization, whose mean and deviation (outputs 1 and 2) carry no gradient."""
    if any(dy is not None for dy in dys[1:]):
        raise call.refusal("gives its mean or deviation away, which have no rule")
    centred, dy, scale = call.proto.op_type == "LayerNormalization", first(dys), call.x(1)
    start = int(call.attribute("axis", -1))
    axes = list(range(start, 0)) if start < 0 else list(range(start, call.rank()))
    unit, inverse = _normalised(call.x(), axes, float(call.attribute("epsilon", 1e-5)), centred=centred)
    return [
        _through(dy * scale, unit, inverse, axes, centred=centred) if call.wants[0] else None,
        sum_to(dy * unit, call.y.dims, scale) if call.wants[1] else None,
        sum_to(dy, call.y.dims, call.x(2)) if call.wants_input(2) else None,
    ]


def _instance(call: Call, dys: Grads) -> Grads:
    dy, rank = first(dys), call.rank()
    axes = list(range(2, rank))
    unit, inverse = _normalised(call.x(), axes, float(call.attribute("epsilon", 1e-5)))
    return [
        _through(dy * per_channel(call.x(1), rank), unit, inverse, axes) if call.wants[0] else None,
        (dy * unit).sum([0, *axes], keepdims=False) if call.wants[1] else None,
        dy.sum([0, *axes], keepdims=False) if call.wants[2] else None,
    ]


def _batch_forward(call: Call) -> tuple[Tensor, ...]:
    """BatchNormalization in training mode, in single ops: as one op it has no CUDA kernel.

    The variance is the batch's own, not corrected for its size, and ``momentum`` weighs the old running statistics,
    as the schema says. At inference the node stays as it is.
    """
    if not call.attribute("training_mode", 0):
        call.writer.nodes.append(call.proto)
        return ()
    x, rank = call.x(), call.rank()
    axes = [0, *range(2, rank)]
    mean = x.mean(axes)
    shifted = x - mean
    variance = (shifted * shifted).mean(axes)
    inverse = (variance + float(call.attribute("epsilon", 1e-5))).op("Sqrt").op("Reciprocal")
    unit = shifted * inverse
    call.writer.prefix = f"{call.label}/{SCALED}"
    scaled = unit * per_channel(call.x(1), rank)
    (scaled + per_channel(call.x(2), rank)).op("Identity", into=call.y.name)
    call.writer.prefix = call.label
    momentum = float(call.attribute("momentum", 0.9))
    for port, found in ((1, mean), (2, variance)):
        if port < len(call.outputs) and (running := call.outputs[port]) is not None:
            old, new = call.x(port + 2) * momentum, found.op("Reshape", [-1]) * (1 - momentum)
            old.op("Add", new, into=running.name)
    return unit, inverse


def _batch(call: Call, dys: Grads) -> Grads:
    """Running statistics carry no gradient."""
    dy, rank = first(dys), call.rank()
    axes = [0, *range(2, rank)]
    scale = per_channel(call.x(1), rank)
    if call.saved:
        unit, inverse = call.saved
        dx = _through(dy, unit, inverse, axes) * scale if call.wants[0] else None
    else:
        deviation = (call.x(4) + float(call.attribute("epsilon", 1e-5))).op("Sqrt")
        inverse = per_channel(deviation.op("Reciprocal"), rank)
        unit = (call.x() - per_channel(call.x(3), rank)) * inverse
        dx = dy * (scale * inverse) if call.wants[0] else None
    return [
        dx,
        (dy * unit).sum(axes, keepdims=False) if call.wants[1] else None,
        dy.sum(axes, keepdims=False) if call.wants[2] else None,
    ]


RULES: Final[Mapping[str, Rule]] = {
    "BatchNormalization": _batch,
    "InstanceNormalization": _instance,
    "LayerNormalization": _layer,
    "RMSNormalization": _layer,
}
FORWARD: Final[Mapping[str, Forward]] = {"BatchNormalization": _batch_forward}
