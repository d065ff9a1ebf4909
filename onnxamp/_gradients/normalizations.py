"""Gradients of normalizations in closed form; batch normalization in training mode is decomposed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from onnxamp._gradients.writer import (
    Call,
    Forward,
    Grads,
    Rule,
    Several,
    Tensor,
)

SCALED: Final = "scaled"
"""Suffix of a batch normalization's label in the names of the nodes that scale and shift its normalized value."""
SKIPPED: Final = frozenset(
    {
        "com.microsoft::SkipLayerNormalization",
        "com.microsoft::SkipSimplifiedLayerNormalization",
    }
)
"""Normalizations of a sum, which is the fourth output."""
RUNNING: Final = "running"
"""Suffix for its running statistics and the nodes that compute them."""


def _normalized(
    x: Tensor, axes: Sequence[int], epsilon: float, *, centered: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return normalized ``x``, the reciprocal of its standard deviation, its mean and its variance.

    ``x`` is divided by its standard deviation and, if ``centered``, its mean is subtracted first.
    """
    mean = x.mean(axes) if centered else x
    shifted = x - mean if centered else x
    variance = (shifted * shifted).mean(axes)
    inverse = (variance + epsilon).op("Sqrt").op("Reciprocal")
    return shifted * inverse, inverse, mean, variance


def _through(
    dy: Tensor,
    unit: Tensor,
    inverse: Tensor,
    axes: Sequence[int],
    *,
    centered: bool = True,
) -> Tensor:
    """Return the gradient of the input of :func:`_normalized`, from the gradient ``dy`` of its result ``unit``."""
    rest = dy - unit * (dy * unit).mean(axes)
    return (rest - dy.mean(axes) if centered else rest) * inverse


def _refuse_moments(call: Call, changes: Sequence[Tensor | None]) -> None:
    """Refuse a node whose mean or deviation has a gradient.

    Raises:
        GradientError: one has.
    """
    if any(change is not None for change in changes):
        raise call.error(
            "passes its mean or deviation on to the loss, for which there is no gradient rule"
        )


def _layer(call: Call) -> Grads:
    """Return gradients of normalizations of each row; their mean and deviation outputs have no rule."""
    _refuse_moments(call, call.dys[1:])
    centered, dy, scale = call.node.key == "LayerNormalization", call.dy, call[1]
    start = call.attribute("axis", -1)
    axes = range(start, 0 if start < 0 else call.rank())
    unit, inverse, *_ = _normalized(
        call.x, axes, call.attribute("epsilon", 1e-5), centered=centered
    )
    return [
        lambda: _through(dy * scale, unit, inverse, axes, centered=centered),
        lambda: call.summed(dy * unit, 1),
        lambda: call.summed(dy, 2),
    ]


def _skip(call: Call) -> Grads:
    """Return gradients of the normalization of a sum, which is another output."""
    _refuse_moments(call, call.dys[1:3])
    centered = call.node.key == "com.microsoft::SkipLayerNormalization"
    added = [call[at] for at in (1, 4 if centered else 3) if call.has(at)]
    total = call.output(3) or call.x.op("Sum", *added)
    changes = [dy for dy in call.dys[3:] if dy is not None]
    unit, inverse, *_ = _normalized(
        total, [-1], call.attribute("epsilon", 1e-12), centered=centered
    )
    dy = call.dys[0]
    if dy is not None:
        changes.append(_through(dy * call[2], unit, inverse, [-1], centered=centered))
    dx = changes[0].op("Sum", *changes[1:]) if changes[1:] else changes[0]
    rows = [None if dy is None else lambda: call.summed(dy * unit, 2)]
    if centered:
        rows.append(None if dy is None else lambda: call.summed(dy, 3))
    bias = len(rows) + 2
    return [dx, lambda: call.summed(dx, 1), *rows, lambda: call.summed(dx, bias)]


def _instance(call: Call) -> Grads:
    dy, rank = call.dy, call.rank()
    axes = range(2, rank)
    unit, inverse, *_ = _normalized(call.x, axes, call.attribute("epsilon"))
    return [
        lambda: _through(dy * _per_channel(call[1], rank), unit, inverse, axes),
        *_sums(dy, unit, [0, *axes]),
    ]


def _sums(dy: Tensor, unit: Tensor, axes: Sequence[int]) -> Several:
    """Return the gradients of scale and bias, which lie along the remaining axes."""
    return [
        lambda: (dy * unit).sum(axes, keepdims=False),
        lambda: dy.sum(axes, keepdims=False),
    ]


def _batch_forward(call: Call) -> tuple[Tensor, ...]:
    """Decompose BatchNormalization in training mode, because ONNX Runtime has no CUDA kernel for it.

    As in its schema, the variance is biased and ``momentum`` is the weight of the old running statistics. In inference
    mode, the node is kept.
    """
    if not call.attribute("training_mode"):
        return ()
    rank = call.rank()
    unit, inverse, mean, variance = _normalized(
        call.x, [0, *range(2, rank)], call.attribute("epsilon")
    )
    call.writer.prefix = f"{call.node.label}/{SCALED}"
    scaled = unit * _per_channel(call[1], rank)
    (scaled + _per_channel(call[2], rank)).op("Identity", into=call.y.name)
    call.writer.prefix = f"{call.node.label}/{RUNNING}"
    momentum = call.attribute("momentum")
    for old, statistic, running in zip(
        call.inputs[3:], (mean, variance), call.outputs[1:], strict=False
    ):
        if running is not None and old is not None:
            (old * momentum).op(
                "Add", statistic.reshape(-1) * (1 - momentum), into=running.name
            )
    call.writer.prefix = call.node.label
    return unit, inverse


def _batch(call: Call) -> Grads:
    """Return the gradients. The running statistics have one if they, not the input's statistics, normalize."""
    dy, rank = call.dy, call.rank()
    axes = [0, *range(2, rank)]
    scale, statistics = _per_channel(call[1], rank), list[Callable[[], Tensor]]()
    if call.saved:
        unit, inverse = call.saved
    else:
        each = (call[4] + call.attribute("epsilon")).op("Sqrt").op("Reciprocal")
        inverse = _per_channel(each, rank)
        unit = (call.x - _per_channel(call[3], rank)) * inverse
        slope = call[1] * each
        statistics = [
            lambda: -dy.sum(axes, keepdims=False) * slope,
            lambda: (dy * unit).sum(axes, keepdims=False) * slope * each * -0.5,
        ]
    return [
        lambda: (
            _through(dy, unit, inverse, axes) * scale
            if call.saved
            else dy * (scale * inverse)
        ),
        *_sums(dy, unit, axes),
        *statistics,
    ]


def _per_channel(x: Tensor, rank: int) -> Tensor:
    """Return a vector shaped so that it lies along axis 1 of a tensor of this rank."""
    return x.reshape(1, -1, *[1] * (rank - 2))


RULES: Final[Mapping[str, Rule]] = {
    "BatchNormalization": _batch,
    "InstanceNormalization": _instance,
    "LayerNormalization": _layer,
    "RMSNormalization": _layer,
    "SimplifiedLayerNormalization": _layer,
    **dict.fromkeys(SKIPPED, _skip),
}
FORWARD: Final[Mapping[str, Forward]] = {"BatchNormalization": _batch_forward}
