"""Gradients of reductions and of CumSum."""

from collections.abc import Callable, Mapping
from typing import Final

from onnxamp.train._gradients.calls import At, Call, Grads, Rule, first
from onnxamp.train._gradients.writer import Tensor

_Local = Callable[[At], Tensor]
"""The gradient of the input, or what broadcasts to it, from the output and its gradient with the axes kept."""


def _reduction(local: _Local, *, wide: bool = True) -> Rule:
    """The rule of a reduction; ``wide`` says that ``local`` gives the input's shape already."""

    def rule(call: Call, dys: Grads) -> Grads:
        dx = local(At(call, call.x(), _kept(call, call.y), _kept(call, first(dys))))
        return [dx if wide else dx.op("Expand", call.x().shape())]

    return rule


def _kept(call: Call, y: Tensor) -> Tensor:
    """An output (or its gradient) with the reduced axes as ones; a scalar broadcasts as it is."""
    if call.attribute("keepdims", 1) or not call.has(1):
        return y
    return y.op("Unsqueeze", call.x(1))


def _axes(call: Call) -> Tensor | None:
    return call.x(1) if call.has(1) else None


def _reduced(call: Call, op_type: str, x: Tensor) -> Tensor:
    """``x`` reduced over the node's axes, which stay with size 1."""
    return x.op(op_type, _axes(call), keepdims=1, noop_with_empty_axes=call.attribute("noop_with_empty_axes"))


def _mean(at: At) -> Tensor:
    count = at.x.op("Size").op("Div", at.call.y.op("Size"))
    return at.dy / count.cast(at.dy.elem)


def _extreme(at: At) -> Tensor:
    """Elements that are equal to the output share its gradient evenly."""
    hit = at.x.equals(at.y).cast(at.dy.elem)
    return at.dy / _reduced(at.call, "ReduceSum", hit) * hit


def _l2(at: At) -> Tensor:
    some = at.y > 0
    return some.where(at.dy / some.where(at.y, 1), 0) * at.x


def _prod(at: At) -> Tensor:
    """The product of the others, also where some are zero: of one zero's others, and of none where there are more."""
    zero = at.x.equals(0)
    filled = zero.where(1, at.x)
    others = _reduced(at.call, "ReduceProd", filled)
    zeros = _reduced(at.call, "ReduceSum", zero.cast(at.dy.elem))
    at_zero = at.dy * (zeros < 1.5).where(others, 0)
    return zero.where(at_zero, at.dy * (zeros < 0.5).where(others, 0) / filled)


def _cumsum(call: Call, dys: Grads) -> Grads:
    reverse, exclusive = 1 - int(call.attribute("reverse", 0)), call.attribute("exclusive")
    return [first(dys).op("CumSum", call.x(1), reverse=reverse, exclusive=exclusive), None]


RULES: Final[Mapping[str, Rule]] = {
    "CumSum": _cumsum,
    "ReduceL1": _reduction(lambda at: at.dy * at.x.op("Sign")),
    "ReduceL2": _reduction(_l2),
    "ReduceLogSum": _reduction(lambda at: at.dy / at.y.op("Exp"), wide=False),
    "ReduceLogSumExp": _reduction(lambda at: at.dy * (at.x - at.y).op("Exp")),
    "ReduceMax": _reduction(_extreme),
    "ReduceMean": _reduction(_mean, wide=False),
    "ReduceMin": _reduction(_extreme),
    "ReduceProd": _reduction(_prod),
    "ReduceSum": _reduction(lambda at: at.dy, wide=False),
    "ReduceSumSquare": _reduction(lambda at: at.dy * 2 * at.x),
}
