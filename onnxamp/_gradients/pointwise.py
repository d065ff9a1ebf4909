"""Gradients of elementwise ops (activations, arithmetic with broadcasting, selection), of reductions and of CumSum."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import mul
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxamp._dtypes import FLOAT_ELEMS
from onnxamp._gradients.writer import Call, Forward, Grads, Rule, Several, Tensor

_SQRT_2_OVER_PI: Final = math.sqrt(2 / math.pi)


def _broadcast(local: Callable[[Call], Several]) -> Rule:
    """Return the rule of an op that broadcasts its inputs: gradients in the output's shape are summed to those of
    inputs.
    """

    def summed(call: Call, port: int, dx: Tensor | Callable[[], Tensor]) -> Tensor:
        return call.summed(dx() if callable(dx) else dx, port)

    return lambda call: [
        None if dx is None else partial(summed, call, port, dx)
        for port, dx in enumerate(local(call))
    ]


def _elu(call: Call) -> Tensor:
    return _exponential(call.x, call.dy, call.attribute("alpha"), 1.0)


def _exponential(x: Tensor, dy: Tensor, factor: float, width: float) -> Tensor:
    """``dy`` where x is positive, ``dy * factor * exp(x / width)`` elsewhere, without overflow."""
    low = x.op("Min", x.like(0))
    slope = (low if width == 1 else low / width).op("Exp")
    return (x > 0).where(dy, dy * (slope if factor == 1 else slope * factor))


def _hard_sigmoid(call: Call) -> Tensor:
    inside = (call.y > 0).op("And", call.y < 1)
    return inside.where(call.dy * call.attribute("alpha"), 0)


def _hard_swish(call: Call) -> Tensor:
    return (call.x > -3).where(
        (call.x < 3).where(call.dy * (call.x / 3 + 0.5), call.dy), 0
    )


def _softsign(call: Call) -> Tensor:
    base = call.x.op("Abs") + 1
    return call.dy / (base * base)


def _mish(call: Call) -> Tensor:
    t = call.x.op("Softplus").op("Tanh")
    return call.dy * (t + call.x * call.x.op("Sigmoid") * (1 - t * t))


def _swish(call: Call) -> Tensor:
    alpha: float = call.attribute("alpha")
    s = (call.x * alpha).op("Sigmoid")
    return call.dy * (s + call.x * alpha * s * (1 - s))


def _gelu(call: Call) -> Tensor:
    """Return the derivative of x * Phi(x), with Phi exact or approximated by tanh, as the node says."""
    if call.attribute("approximate") == "tanh":
        squared = call.x * call.x
        t = ((call.x * (squared * 0.044715 + 1)) * _SQRT_2_OVER_PI).op("Tanh")
        inner = (squared * (3 * 0.044715) + 1) * _SQRT_2_OVER_PI
        return call.dy * 0.5 * (1 + t + call.x * (1 - t * t) * inner)
    phi = ((call.x * math.sqrt(0.5)).op("Erf") + 1) * 0.5
    return call.dy * (
        phi + call.x * (call.x * call.x * -0.5).op("Exp") * (1 / math.sqrt(2 * math.pi))
    )


def _pow(call: Call) -> Several:
    x, given = call.x, call[1]
    exponent, known = given.cast(x.elem), call.constant(1)

    def base() -> Tensor:
        if known is not None and np.all(known == 2):
            return call.dy * x * 2
        if known is not None and np.all(known != 0):
            return call.dy * exponent * x ** (exponent - 1)
        return call.dy * exponent.equals(0).where(0, exponent * x ** (exponent - 1))

    def power() -> Tensor:
        return (
            call.dy * (x > 0).where(call.y * (x > 0).where(x, 1).op("Log"), 0)
        ).cast(given.elem)

    return base, power


def _extremes(call: Call) -> Several:
    """Max and Min: inputs equal to the output share its gradient evenly."""
    if len(call.inputs) == 1:
        return [call.dy]
    hits = [call[i].equals(call.y).cast(call.dy.elem) for i in range(len(call.inputs))]
    share = call.dy / (hits[0].op("Sum", *hits[1:]))
    return [partial(mul, share, hit) for hit in hits]


def _clip(call: Call) -> Several:
    """Return the gradients of Clip: values on a bound pass theirs on; a bound gets those of what it clips."""
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
    """Return the mask, as second output, where the node drops anything."""
    training = call.constant(2)
    if not call.has(2) or (training is not None and not training.any()):
        return ()
    return (call.second_output("mask", TensorProto.BOOL),)


def _reduction(local: Callable[[Call], Tensor], *, wide: bool = True) -> Rule:
    """Return the rule of a reduction, where ``local`` sees output and gradient with the reduced axes.

    ``wide``: its result has the input's shape already, and need not be broadcast to that.
    """

    def rule(call: Call) -> Grads:
        dx = local(
            replace(call, outputs=(_kept(call, call.y),), dys=(_kept(call, call.dy),))
        )
        return dx if wide else dx.op("Expand", call.x.shape())

    return rule


def _kept(call: Call, y: Tensor) -> Tensor:
    """Return the output or its gradient with the reduced axes as ones; a scalar broadcasts anyway."""
    if call.attribute("keepdims") or not call.has(1):
        return y
    return y.op("Unsqueeze", call[1])


def _reduced(call: Call, op_type: str, x: Tensor) -> Tensor:
    """``x`` reduced over the node's axes, which remain with size 1."""
    empty = call.attribute("noop_with_empty_axes")
    return x.op(op_type, *call.inputs[1:], keepdims=1, noop_with_empty_axes=empty)


def _mean_of_all(call: Call) -> Tensor:
    count = call.x.op("Size").op("Div", call.y.op("Size"))
    return call.dy / count.cast(call.dy.elem)


def _extreme(call: Call) -> Tensor:
    """Elements equal to the output share its gradient evenly."""
    hit = call.x.equals(call.y).cast(call.dy.elem)
    return call.dy / _reduced(call, "ReduceSum", hit) * hit


def _global_max(call: Call) -> Grads:
    hit = call.x.equals(call.y).cast(call.dy.elem)
    return call.dy / hit.sum(range(2, call.rank())) * hit


def _l2(call: Call) -> Tensor:
    some = call.y > 0
    return some.where(call.dy / some.where(call.y, 1), 0) * call.x


def _prod(call: Call) -> Tensor:
    """Return the product of the other elements, without dividing by zero: with two zeros, every product is zero."""
    zero = call.x.equals(0)
    filled = zero.where(1, call.x)
    others = _reduced(call, "ReduceProd", filled)
    zeros = _reduced(call, "ReduceSum", zero.cast(call.dy.elem))
    at_zero = call.dy * (zeros < 1.5).where(others, 0)
    return zero.where(at_zero, call.dy * (zeros < 0.5).where(others, 0) / filled)


def _cumsum(call: Call) -> Grads:
    reverse, exclusive = 1 - call.attribute("reverse"), call.attribute("exclusive")
    return call.dy.op("CumSum", call[1], reverse=reverse, exclusive=exclusive)


def _cast(call: Call) -> Tensor:
    """Integers that have gradients have them in float32."""
    return call.dy.cast(call.x.elem) if call.x.elem in FLOAT_ELEMS else call.dy


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("Cast", "CastLike"), _cast),
    "Abs": lambda call: call.dy * call.x.op("Sign"),
    "Acos": lambda call: -(call.dy / (1 - call.x * call.x).op("Sqrt")),
    "Acosh": lambda call: call.dy / (call.x * call.x - 1).op("Sqrt"),
    "Add": _broadcast(lambda call: [call.dy] * 2),
    "Asin": lambda call: call.dy / (1 - call.x * call.x).op("Sqrt"),
    "Asinh": lambda call: call.dy / (call.x * call.x + 1).op("Sqrt"),
    "Atan": lambda call: call.dy / (call.x * call.x + 1),
    "Atanh": lambda call: call.dy / (1 - call.x * call.x),
    "Celu": lambda call: _exponential(call.x, call.dy, 1.0, call.attribute("alpha")),
    "Clip": _broadcast(_clip),
    "Cos": lambda call: -(call.dy * call.x.op("Sin")),
    "Cosh": lambda call: call.dy * ((call.x.op("Exp") - (-call.x).op("Exp")) * 0.5),
    "CumSum": _cumsum,
    "Div": _broadcast(
        lambda call: [lambda: call.dy / call[1], lambda: -(call.dy * call.y / call[1])]
    ),
    "Dropout": _dropout,
    "Elu": _elu,
    "Erf": lambda call: (
        call.dy * (-(call.x * call.x)).op("Exp") * (2 / math.sqrt(math.pi))
    ),
    "Exp": lambda call: call.dy * call.y,
    "Gelu": _gelu,
    "GlobalAveragePool": _reduction(_mean_of_all, wide=False),
    "GlobalMaxPool": _global_max,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "LeakyRelu": lambda call: (call.x > 0).where(
        call.dy, call.dy * call.attribute("alpha")
    ),
    "Log": lambda call: call.dy / call.x,
    "LogSoftmax": lambda call: (
        call.dy - call.y.op("Exp") * call.dy.sum([call.attribute("axis")])
    ),
    "Max": _broadcast(_extremes),
    "Mean": _broadcast(_mean),
    "Min": _broadcast(_extremes),
    "Mish": _mish,
    "Mul": _broadcast(
        lambda call: [lambda: call.dy * call[1], lambda: call.dy * call.x]
    ),
    "Neg": lambda call: -call.dy,
    "PRelu": _broadcast(
        lambda call: [
            lambda: (call.x > 0).where(call.dy, call.dy * call[1]),
            lambda: (call.x < 0).where(call.dy * call.x, 0),
        ]
    ),
    "Pow": _broadcast(_pow),
    "Reciprocal": lambda call: -(call.dy * call.y * call.y),
    "ReduceL1": _reduction(lambda call: call.dy * call.x.op("Sign")),
    "ReduceL2": _reduction(_l2),
    "ReduceLogSum": _reduction(lambda call: call.dy / call.y.op("Exp"), wide=False),
    "ReduceLogSumExp": _reduction(lambda call: call.dy * (call.x - call.y).op("Exp")),
    "ReduceMax": _reduction(_extreme),
    "ReduceMean": _reduction(_mean_of_all, wide=False),
    "ReduceMin": _reduction(_extreme),
    "ReduceProd": _reduction(_prod),
    "ReduceSum": _reduction(lambda call: call.dy, wide=False),
    "ReduceSumSquare": _reduction(lambda call: call.dy * 2 * call.x),
    "Relu": lambda call: (call.y > 0).where(call.dy, 0),
    "Selu": lambda call: _elu(call) * call.attribute("gamma"),
    "Sigmoid": lambda call: call.dy * call.y * (1 - call.y),
    "Sin": lambda call: call.dy * call.x.op("Cos"),
    "Sinh": lambda call: call.dy * ((call.x.op("Exp") + (-call.x).op("Exp")) * 0.5),
    "Softmax": lambda call: (
        call.y * (call.dy - (call.dy * call.y).sum([call.attribute("axis")]))
    ),
    "Softplus": lambda call: call.dy * call.x.op("Sigmoid"),
    "Softsign": _softsign,
    "Sqrt": lambda call: call.dy * 0.5 / call.y,
    "Sub": _broadcast(lambda call: [call.dy, lambda: -call.dy]),
    "Sum": _broadcast(lambda call: [call.dy] * len(call.inputs)),
    "Swish": _swish,
    "Tan": lambda call: call.dy * (call.y * call.y + 1),
    "Tanh": lambda call: call.dy * (1 - call.y * call.y),
    "ThresholdedRelu": lambda call: (call.x > call.attribute("alpha")).where(
        call.dy, 0
    ),
    "Where": _broadcast(
        lambda call: [
            None,
            lambda: call.x.where(call.dy, 0),
            lambda: call.x.where(0, call.dy),
        ]
    ),
}
FORWARD: Final[Mapping[str, Forward]] = {"Dropout": _dropout_forward}
