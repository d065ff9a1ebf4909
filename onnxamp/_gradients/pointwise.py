"""Gradients of elementwise ops (activations, arithmetic with broadcasting, selection), of reductions and CumSum, and of
normalizations.

Most are formulas of ``_data/gradients.toml``. Those of normalizations are in closed form; batch normalization in
training mode is decomposed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import mul
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from onnxamp._facts.tables import read_table
from onnxamp._gradients.writer import (
    Call,
    Forward,
    Grads,
    Rule,
    Several,
    Tensor,
    inverse,
)

SCALED: Final = "scaled"
"""Suffix of a batch normalization's label in the names of the nodes that scale and shift its normalized value."""
RUNNING: Final = "running"
"""Suffix for its running statistics and the nodes that compute them."""
SKIPPED: Final = frozenset(
    {
        "com.microsoft::SkipLayerNormalization",
        "com.microsoft::SkipSimplifiedLayerNormalization",
    }
)
"""Normalizations of a sum, which is the fourth output."""


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
    centered = call.node.key == "LayerNormalization"
    dy = call.dy
    scale = call[1]
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
    dy = call.dy
    rank = call.rank()
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
    dy = call.dy
    rank = call.rank()
    axes = [0, *range(2, rank)]
    scale = _per_channel(call[1], rank)
    statistics = list[Callable[[], Tensor]]()
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

    def gradient() -> Tensor:
        if call.saved:
            return _through(dy, unit, inverse, axes) * scale
        return dy * (scale * inverse)

    return [gradient, *_sums(dy, unit, axes), *statistics]


def _per_channel(x: Tensor, rank: int) -> Tensor:
    """Return a vector shaped so that it lies along axis 1 of a tensor of this rank."""
    return x.reshape(1, -1, *[1] * (rank - 2))


def _broadcast(local: Callable[[Call], Several]) -> Rule:
    """Return the rule of an op that broadcasts its inputs.

    It sums gradients in the shape of the output to the shapes of the inputs.
    """

    def summed(call: Call, port: int, dx: Tensor | Callable[[], Tensor]) -> Tensor:
        return call.summed(dx() if callable(dx) else dx, port)

    return lambda call: [
        None if dx is None else partial(summed, call, port, dx)
        for port, dx in enumerate(local(call))
    ]


def _pow(call: Call) -> Several:
    x = call.x
    given = call[1]
    exponent = given.cast(x.elem)
    known = call.constant(1)

    def base() -> Tensor:
        if known is not None and np.all(known == 2):
            return call.dy * x * 2
        if known is not None and np.all(known != 0):
            return call.dy * exponent * x ** (exponent - 1)
        # At x = 0 and exponent 0, the formula is zero times infinity.
        return call.dy * exponent.equals(0).where(0, exponent * x ** (exponent - 1))

    def power() -> Tensor:
        is_positive = x > 0
        # Log must not see other numbers: its NaN would pass through the product with y.
        log = (x > 0).where(x, 1).op("Log")
        return (call.dy * is_positive.where(call.y * log, 0)).cast(given.elem)

    return base, power


def _extremes(call: Call) -> Several:
    """Return the gradients of Max and Min: inputs equal to the output share its gradient evenly."""
    if len(call.inputs) == 1:
        return [call.dy]
    inputs = [tensor for tensor in call.inputs if tensor is not None]
    hits = [tensor.equals(call.y).cast(call.dy.elem) for tensor in inputs]
    first, *others = hits
    share = call.dy / first.op("Sum", *others)
    return [partial(mul, share, hit) for hit in hits]


def _clip(call: Call) -> Several:
    """Return the gradients of Clip: values on a bound pass on their gradients; a bound gets those of clipped values."""
    x = call.x
    low, high = (*call.inputs[1:], None, None)[:2]

    def inside() -> Tensor:
        above = call.dy if low is None else (x < low).where(0, call.dy)
        return above if high is None else (x > high).where(0, above)

    recipes = (
        inside,
        lambda: call.dy if low is None else (x < low).where(call.dy, 0),
        lambda: call.dy if high is None else (x > high).where(call.dy, 0),
    )
    return recipes[: len(call.inputs)]


def _mean(call: Call) -> Several:
    share = call.dy / len(call.inputs) if len(call.inputs) > 1 else call.dy
    return [share] * len(call.inputs)


def _dropout(call: Call) -> Grads:
    dy = call.dy
    if not call.saved:
        return dy
    ratio = call[1].cast(dy.elem) if call.has(1) else dy.like(0.5)
    return call.saved[0].where(dy / (1 - ratio), 0)


def _dropout_forward(call: Call) -> tuple[Tensor, ...]:
    """Return the mask as second output if the node drops anything."""
    training = call.constant(2)
    if not call.has(2) or (training is not None and not training.any()):
        return ()
    return (call.second_output("mask", TensorProto.BOOL),)


def _reduction(local: Callable[[Call], Tensor], *, wide: bool = True) -> Rule:
    """Return the rule of a reduction; ``local`` receives output and gradient with the reduced axes.

    ``wide``: the result of ``local`` already has the input's shape, and need not be broadcast to it.
    """

    def rule(call: Call) -> Grads:
        y = _kept(call, call.y)
        dy = _kept(call, call.dy)
        dx = local(replace(call, outputs=(y,), dys=(dy,)))
        return dx if wide else dx.op("Expand", call.x.shape())

    return rule


def _kept(call: Call, y: Tensor) -> Tensor:
    """Return the output or its gradient with reduced axes of size 1; a scalar broadcasts anyway."""
    if call.attribute("keepdims") or not call.has(1):
        return y
    return y.op("Unsqueeze", call[1])


class _FormulaNames(dict[str, Any]):
    """The names that a formula may use; see ``_data/gradients.toml``."""

    def __init__(self, call: Call) -> None:
        super().__init__(
            dy=call.dy,
            x=call.x,
            y=call.y,
            rest=call.inputs[1:],
            where=Tensor.where,
            inverse=inverse,
            summed=call.summed,
            range=range,
        )
        self.call = call

    def __missing__(self, name: str) -> Any:
        if name[0].isupper():
            return partial(_node, name)
        if name in _INPUTS:
            return self.call[_INPUTS.index(name)]
        if name == "second":
            return self._second()
        if name == "rank":
            return self.call.rank()
        if name == "spatial":
            return range(2, self.call.rank())
        return self.call.attribute(name)

    def _second(self) -> Tensor:
        output = self.call.output(1)
        if output is None:
            raise self.call.error(
                "leaves out its second output, which its gradient needs"
            )
        return output


_INPUTS: Final = "xbc"
"""Names of inputs."""


def _node(op_type: str, x: Tensor, *others: Any, **attributes: Any) -> Tensor:
    """Write a node of an op, with numbers of the type of its first input."""
    inputs = [x.like(item) if isinstance(item, int) else item for item in others]
    return x.op(op_type, *inputs, **attributes)


def _gradient(formula: str, call: Call) -> Tensor:
    """Write the gradient that a formula describes."""
    gradient: Tensor = eval(formula, {}, _FormulaNames(call))  # noqa: S307 - the formula is our own
    return gradient


def _each(formulas: Sequence[str], call: Call) -> Several:
    return [partial(_gradient, text, call) if text else None for text in formulas]


_TABLE: Final = read_table("gradients")
SINGULAR: Final = frozenset(_TABLE["singular"])
"""Ops whose derivative may be infinite, such as Sqrt at 0."""
FORMS: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = _TABLE["forms"]
WITHOUT: Final[Mapping[str, Sequence[int]]] = _TABLE["without"]
"""Values of attributes for which the rule of an op holds, and inputs that its nodes must lack."""
FORMULAS: Final[Mapping[str, str | Sequence[str]]] = {
    **_TABLE["first"],
    **_TABLE["several"],
    **_TABLE["broadcast"],
    **_TABLE["reductions"],
    **_TABLE["means"],
}
"""Op -> the formula of its gradient, one for each input where several have one."""
RULES: Final[Mapping[str, Rule]] = {
    **{op: partial(_gradient, text) for op, text in _TABLE["first"].items()},
    **{op: partial(_each, row) for op, row in _TABLE["several"].items()},
    **{op: _broadcast(partial(_each, row)) for op, row in _TABLE["broadcast"].items()},
    **{
        op: _reduction(partial(_gradient, text))
        for op, text in _TABLE["reductions"].items()
    },
    **{
        op: _reduction(partial(_gradient, text), wide=False)
        for op, text in _TABLE["means"].items()
    },
    **dict.fromkeys(("Max", "Min"), _broadcast(_extremes)),
    **dict.fromkeys(SKIPPED, _skip),
    "BatchNormalization": _batch,
    "Clip": _broadcast(_clip),
    "Dropout": _dropout,
    "InstanceNormalization": _instance,
    "LayerNormalization": _layer,
    "Mean": _broadcast(_mean),
    "Pow": _broadcast(_pow),
    "RMSNormalization": _layer,
    "SimplifiedLayerNormalization": _layer,
    "Sum": _broadcast(lambda call: [call.dy] * len(call.inputs)),
}
FORWARD: Final[Mapping[str, Forward]] = {
    "BatchNormalization": _batch_forward,
    "Dropout": _dropout_forward,
}
