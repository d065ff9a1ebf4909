"""Gradients of elementwise ops (activations, arithmetic with broadcasting, selection), of reductions and of CumSum.

Most are formulas of ``_data/gradients.toml``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import mul
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from onnxamp._dtypes import FLOAT_ELEMS
from onnxamp._gradients.writer import Call, Forward, Grads, Rule, Several, Tensor
from onnxamp._ops.targets import read_table

_SQRT_2_OVER_PI: Final = math.sqrt(2 / math.pi)


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


def _gelu(call: Call) -> Tensor:
    """Return the derivative of x * Phi(x), with Phi exact or approximated by tanh, depending on the node."""
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
    """Return the gradients of Max and Min: inputs equal to the output share its gradient evenly."""
    if len(call.inputs) == 1:
        return [call.dy]
    hits = [call[i].equals(call.y).cast(call.dy.elem) for i in range(len(call.inputs))]
    share = call.dy / (hits[0].op("Sum", *hits[1:]))
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
        dx = local(
            replace(call, outputs=(_kept(call, call.y),), dys=(_kept(call, call.dy),))
        )
        return dx if wide else dx.op("Expand", call.x.shape())

    return rule


def _kept(call: Call, y: Tensor) -> Tensor:
    """Return the output or its gradient with reduced axes of size 1; a scalar broadcasts anyway."""
    if call.attribute("keepdims") or not call.has(1):
        return y
    return y.op("Unsqueeze", call[1])


def _reduced(call: Call, op_type: str, x: Tensor) -> Tensor:
    """Return ``x`` reduced over the node's axes, which remain with size 1."""
    empty = call.attribute("noop_with_empty_axes")
    return x.op(op_type, *call.inputs[1:], keepdims=1, noop_with_empty_axes=empty)


def _prod(call: Call) -> Tensor:
    """Return the product of the other elements without dividing by zero: if two are zero, every product is zero."""
    zero = call.x.equals(0)
    filled = zero.where(1, call.x)
    others = _reduced(call, "ReduceProd", filled)
    zeros = _reduced(call, "ReduceSum", zero.cast(call.dy.elem))
    at_zero = call.dy * (zeros < 1.5).where(others, 0)
    return zero.where(at_zero, call.dy * (zeros < 0.5).where(others, 0) / filled)


def _cast(call: Call) -> Tensor:
    """Return the gradient of a Cast. Integers that have gradients have them in float32."""
    return call.dy.cast(call.x.elem) if call.x.elem in FLOAT_ELEMS else call.dy


class _Names(dict[str, Any]):
    """The names that a formula may use; see ``_data/gradients.toml``."""

    def __init__(self, call: Call) -> None:
        super().__init__(
            dy=call.dy, x=call.x, y=call.y, rest=call.inputs[1:], where=Tensor.where
        )
        self.call = call

    def __missing__(self, name: str) -> Any:
        if name[0].isupper():
            return partial(_node, name)
        if name == "b":
            return self.call[1]
        if name == "spatial":
            return range(2, self.call.rank())
        return self.call.attribute(name)


def _node(op_type: str, x: Tensor, *others: Any, **attributes: Any) -> Tensor:
    """Write a node of an op, with numbers of the type of its first input."""
    inputs = [x.like(item) if isinstance(item, int) else item for item in others]
    return x.op(op_type, *inputs, **attributes)


def _gradient(formula: str, call: Call) -> Tensor:
    """Write the gradient that a formula describes."""
    gradient: Tensor = eval(formula, {}, _Names(call))  # noqa: S307 - the formula is our own
    return gradient


def _each(formulas: Sequence[str], call: Call) -> Several:
    return [partial(_gradient, text, call) if text else None for text in formulas]


_TABLE: Final = read_table("gradients")
SINGULAR: Final = frozenset(_TABLE["singular"])
"""Ops whose derivative may be infinite, such as Sqrt at 0."""
RULES: Final[Mapping[str, Rule]] = {
    **{op: partial(_gradient, text) for op, text in _TABLE["first"].items()},
    **{op: _broadcast(partial(_each, row)) for op, row in _TABLE["broadcast"].items()},
    **{
        op: _reduction(partial(_gradient, text))
        for op, text in _TABLE["reductions"].items()
    },
    **{
        op: _reduction(partial(_gradient, text), wide=False)
        for op, text in _TABLE["means"].items()
    },
    **dict.fromkeys(("Cast", "CastLike"), _cast),
    **dict.fromkeys(("Max", "Min"), _broadcast(_extremes)),
    "Clip": _broadcast(_clip),
    "Dropout": _dropout,
    "Gelu": _gelu,
    "Mean": _broadcast(_mean),
    "Pow": _broadcast(_pow),
    "ReduceProd": _reduction(_prod),
    "Sum": _broadcast(lambda call: [call.dy] * len(call.inputs)),
}
FORWARD: Final[Mapping[str, Forward]] = {"Dropout": _dropout_forward}
