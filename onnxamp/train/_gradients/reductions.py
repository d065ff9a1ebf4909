"""Gradients of reductions and of CumSum."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from onnxamp.train._gradients.calls import Call, Grads, Rule
from onnxamp.train._gradients.writer import Tensor

_Local = Callable[[Call], Tensor]
"""The gradient of the input, or a tensor that broadcasts to it, where output and gradient keep the reduced axes."""


def _reduction(local: _Local, *, wide: bool = True) -> Rule:
    """The rule of a reduction; ``wide``: the result of ``local`` already has the input's shape."""

    def rule(call: Call) -> Grads:
        dx = local(replace(call, outputs=(_kept(call, call.y),), dys=(_kept(call, call.dy),)))
        return [dx if wide else dx.op("Expand", call.x.shape())]

    return rule


def _kept(call: Call, y: Tensor) -> Tensor:
    """The output or its gradient with the reduced axes as ones; a scalar broadcasts anyway."""
    if call.attribute("keepdims", 1) or not call.has(1):
        return y
    return y.op("Unsqueeze", call[1])


def _reduced(call: Call, op_type: str, x: Tensor) -> Tensor:
    """``x`` reduced over the node's axes, which remain with size 1."""
    axes = call[1] if call.has(1) else None
    return x.op(
        op_type, axes, keepdims=1, noop_with_empty_axes=call.attribute("noop_with_empty_axes")
    )


def _mean(call: Call) -> Tensor:
    count = call.x.op("Size").op("Div", call.y.op("Size"))
    return call.dy / count.cast(call.dy.elem)


def _extreme(call: Call) -> Tensor:
    """Elements equal to the output share its gradient evenly."""
    hit = call.x.equals(call.y).cast(call.dy.elem)
    return call.dy / _reduced(call, "ReduceSum", hit) * hit


def _l2(call: Call) -> Tensor:
    some = call.y > 0
    return some.where(call.dy / some.where(call.y, 1), 0) * call.x


def _prod(call: Call) -> Tensor:
    """The product of the other elements, without dividing by zero: with two zeros, every product is zero."""
    zero = call.x.equals(0)
    filled = zero.where(1, call.x)
    others = _reduced(call, "ReduceProd", filled)
    zeros = _reduced(call, "ReduceSum", zero.cast(call.dy.elem))
    at_zero = call.dy * (zeros < 1.5).where(others, 0)
    return zero.where(at_zero, call.dy * (zeros < 0.5).where(others, 0) / filled)


def _cumsum(call: Call) -> Grads:
    reverse, exclusive = 1 - int(call.attribute("reverse", 0)), call.attribute("exclusive")
    return [call.dy.op("CumSum", call[1], reverse=reverse, exclusive=exclusive), None]


RULES: Final[Mapping[str, Rule]] = {
    "CumSum": _cumsum,
    "ReduceL1": _reduction(lambda call: call.dy * call.x.op("Sign")),
    "ReduceL2": _reduction(_l2),
    "ReduceLogSum": _reduction(lambda call: call.dy / call.y.op("Exp"), wide=False),
    "ReduceLogSumExp": _reduction(lambda call: call.dy * (call.x - call.y).op("Exp")),
    "ReduceMax": _reduction(_extreme),
    "ReduceMean": _reduction(_mean, wide=False),
    "ReduceMin": _reduction(_extreme),
    "ReduceProd": _reduction(_prod),
    "ReduceSum": _reduction(lambda call: call.dy, wide=False),
    "ReduceSumSquare": _reduction(lambda call: call.dy * 2 * call.x),
}
