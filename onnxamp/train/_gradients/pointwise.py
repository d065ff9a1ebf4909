"""Gradients of ops that work element by element: activations, arithmetic with broadcasting, selection."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxamp.train._gradients.calls import At, Call, Forward, Grads, Rule, first
from onnxamp.train._gradients.shapes import sum_to
from onnxamp.train._gradients.writer import Tensor

_Local = Callable[[At], Tensor]
"""The gradient of the only input that counts."""
_Recipes = Sequence[Callable[[], Tensor]]
"""For each input, what writes its gradient in the shape of the output."""

_SELU_ALPHA: Final = 1.67326319217681884765625
_SELU_GAMMA: Final = 1.05070102214813232421875
"""Defaults of the schema."""
_SQRT_2_OVER_PI: Final = math.sqrt(2 / math.pi)


def unary(local: _Local) -> Rule:
    """The rule of an op with one input that counts and one output."""

    def rule(call: Call, dys: Grads) -> Grads:
        return [local(At(call, call.x(), call.y, first(dys)))]

    return rule


def broadcast(local: Callable[[At], _Recipes]) -> Rule:
    """The rule of an op that broadcasts its inputs: a recipe for each, cooked where wanted, summed to its shape."""

    def rule(call: Call, dys: Grads) -> Grads:
        recipes = local(At(call, call.x(), call.y, first(dys)))
        return [sum_to(cook(), call.y.dims, call.x(i)) if call.wants[i] else None for i, cook in enumerate(recipes)]

    return rule


def _relu(at: At) -> Tensor:
    return (at.y > 0).where(at.dy, 0)


def _leaky(at: At) -> Tensor:
    return (at.x > 0).where(at.dy, at.dy * float(at.call.attribute("alpha", 0.01)))


def _elu(at: At) -> Tensor:
    return _exponential(at.x, at.dy, float(at.call.attribute("alpha", 1.0)), 1.0)


def _selu(at: At) -> Tensor:
    gamma = float(at.call.attribute("gamma", _SELU_GAMMA))
    return _exponential(at.x, at.dy, float(at.call.attribute("alpha", _SELU_ALPHA)), 1.0) * gamma


def _celu(at: At) -> Tensor:
    return _exponential(at.x, at.dy, 1.0, float(at.call.attribute("alpha", 1.0)))


def _exponential(x: Tensor, dy: Tensor, factor: float, width: float) -> Tensor:
    """``dy`` where x is positive, ``dy * factor * exp(x / width)`` elsewhere; the exponential never overflows."""
    low = x.op("Min", x.writer.number(0, x.elem))
    slope = (low if width == 1 else low / width).op("Exp")
    return (x > 0).where(dy, dy * (slope if factor == 1 else slope * factor))


def _hard_sigmoid(at: At) -> Tensor:
    inside = (at.y > 0).op("And", at.y < 1)
    return inside.where(at.dy * float(at.call.attribute("alpha", 0.2)), 0)


def _hard_swish(at: At) -> Tensor:
    return (at.x > -3).where((at.x < 3).where(at.dy * (at.x / 3 + 0.5), at.dy), 0)


def _thresholded(at: At) -> Tensor:
    return (at.x > float(at.call.attribute("alpha", 1.0))).where(at.dy, 0)


def _softsign(at: At) -> Tensor:
    base = at.x.op("Abs") + 1
    return at.dy / (base * base)


def _mish(at: At) -> Tensor:
    t = at.x.op("Softplus").op("Tanh")
    return at.dy * (t + at.x * at.x.op("Sigmoid") * (1 - t * t))


def _swish(at: At) -> Tensor:
    alpha = float(at.call.attribute("alpha", 1.0))
    s = (at.x * alpha).op("Sigmoid")
    return at.dy * (s + at.x * alpha * s * (1 - s))


def _gelu(at: At) -> Tensor:
    """The derivative of x * Phi(x), Phi exact or by the tanh formula as the node's attribute says."""
    if at.call.attribute("approximate", "none") == "tanh":
        squared = at.x * at.x
        t = ((at.x * (squared * 0.044715 + 1)) * _SQRT_2_OVER_PI).op("Tanh")
        inner = (squared * (3 * 0.044715) + 1) * _SQRT_2_OVER_PI
        return at.dy * 0.5 * (1 + t + at.x * (1 - t * t) * inner)
    phi = ((at.x * math.sqrt(0.5)).op("Erf") + 1) * 0.5
    return at.dy * (phi + at.x * (at.x * at.x * -0.5).op("Exp") * (1 / math.sqrt(2 * math.pi)))


def _softmax(at: At) -> Tensor:
    return at.y * (at.dy - (at.dy * at.y).sum([int(at.call.attribute("axis", -1))]))


def _log_softmax(at: At) -> Tensor:
    return at.dy - at.y.op("Exp") * at.dy.sum([int(at.call.attribute("axis", -1))])


def _cast(call: Call, dys: Grads) -> Grads:
    return [first(dys).cast(call.x().elem), None]


def _mul(at: At) -> _Recipes:
    return (lambda: at.dy * at.call.x(1)), (lambda: at.dy * at.x)


def _div(at: At) -> _Recipes:
    return (lambda: at.dy / at.call.x(1)), (lambda: -(at.dy * at.y / at.call.x(1)))


def _pow(at: At) -> _Recipes:
    x, given = at.x, at.call.x(1)
    exponent, known = given.cast(x.elem), at.call.constant(1)

    def base() -> Tensor:
        if known is not None and np.all(known == 2):
            return at.dy * x * 2
        if known is not None and np.all(known != 0):
            return at.dy * exponent * x ** (exponent - 1)
        return at.dy * exponent.equals(0).where(0, exponent * x ** (exponent - 1))

    def power() -> Tensor:
        return (at.dy * (x > 0).where(at.y * (x > 0).where(x, 1).op("Log"), 0)).cast(given.elem)

    return base, power


def _prelu(at: At) -> _Recipes:
    x, slope = at.x, at.call.x(1)
    return (lambda: (x > 0).where(at.dy, at.dy * slope)), (lambda: (x < 0).where(at.dy * x, 0))


def _where(at: At) -> _Recipes:
    chosen = at.x
    return (lambda: at.dy), (lambda: chosen.where(at.dy, 0)), (lambda: chosen.where(0, at.dy))


def _extremes(at: At) -> _Recipes:
    """Max and Min: what is equal to the output shares its gradient evenly."""
    if len(at.call.inputs) == 1:
        return [lambda: at.dy]
    hits = [at.call.x(i).equals(at.y).cast(at.dy.elem) for i in range(len(at.call.inputs))]
    share = at.dy / (hits[0].op("Sum", *hits[1:]))
    return [lambda hit=hit: share * hit for hit in hits]  # type: ignore[misc]


def _clip(at: At) -> _Recipes:
    """A bound itself counts as inside; the bounds get what they cut off."""
    x = at.x
    low, high = (at.call.inputs[i] if at.call.has(i) else None for i in (1, 2))

    def inside() -> Tensor:
        found = at.dy if low is None else (x < low).where(0, at.dy)
        return found if high is None else (x > high).where(0, found)

    recipes: list[Callable[[], Tensor]] = [inside]
    recipes.append(lambda: at.dy if low is None else (x < low).where(at.dy, 0))
    recipes.append(lambda: at.dy if high is None else (x > high).where(at.dy, 0))
    return recipes[: len(at.call.inputs)]


def _mean(at: At) -> _Recipes:
    share = at.dy / len(at.call.inputs) if len(at.call.inputs) > 1 else at.dy
    return [lambda: share] * len(at.call.inputs)


def _dropout(call: Call, dys: Grads) -> Grads:
    dy = first(dys)
    if not call.saved:
        return [dy, None, None]
    ratio = call.x(1).cast(dy.elem) if call.has(1) else call.writer.number(0.5, dy.elem)
    return [call.saved[0].where(dy / (1 - ratio), 0), None, None]


def _dropout_forward(call: Call) -> tuple[Tensor, ...]:
    """Run the node as it stands, and ask it for its mask where it drops anything."""
    call.writer.nodes.append(call.proto)
    flag = call.constant(2)
    if not call.has(2) or (flag is not None and not flag.any()):
        return ()
    mask = call.proto.output[1] if len(call.proto.output) > 1 else call.writer.names.fresh(f"{call.y.name}/mask")
    del call.proto.output[1:]
    call.proto.output.append(mask)
    return (Tensor(call.writer, mask, TensorProto.BOOL),)


_UNARY: Final[Mapping[str, _Local]] = {
    "Abs": lambda at: at.dy * at.x.op("Sign"),
    "Acos": lambda at: -(at.dy / (1 - at.x * at.x).op("Sqrt")),
    "Acosh": lambda at: at.dy / (at.x * at.x - 1).op("Sqrt"),
    "Asin": lambda at: at.dy / (1 - at.x * at.x).op("Sqrt"),
    "Asinh": lambda at: at.dy / (at.x * at.x + 1).op("Sqrt"),
    "Atan": lambda at: at.dy / (at.x * at.x + 1),
    "Atanh": lambda at: at.dy / (1 - at.x * at.x),
    "Celu": _celu,
    "Cos": lambda at: -(at.dy * at.x.op("Sin")),
    "Cosh": lambda at: at.dy * ((at.x.op("Exp") - (-at.x).op("Exp")) * 0.5),
    "Elu": _elu,
    "Erf": lambda at: at.dy * (-(at.x * at.x)).op("Exp") * (2 / math.sqrt(math.pi)),
    "Exp": lambda at: at.dy * at.y,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Identity": lambda at: at.dy,
    "LeakyRelu": _leaky,
    "Log": lambda at: at.dy / at.x,
    "LogSoftmax": _log_softmax,
    "Mish": _mish,
    "Neg": lambda at: -at.dy,
    "Reciprocal": lambda at: -(at.dy * at.y * at.y),
    "Relu": _relu,
    "Selu": _selu,
    "Sigmoid": lambda at: at.dy * at.y * (1 - at.y),
    "Sin": lambda at: at.dy * at.x.op("Cos"),
    "Sinh": lambda at: at.dy * ((at.x.op("Exp") + (-at.x).op("Exp")) * 0.5),
    "Softmax": _softmax,
    "Softplus": lambda at: at.dy * at.x.op("Sigmoid"),
    "Softsign": _softsign,
    "Sqrt": lambda at: at.dy * 0.5 / at.y,
    "Swish": _swish,
    "Tan": lambda at: at.dy * (at.y * at.y + 1),
    "Tanh": lambda at: at.dy * (1 - at.y * at.y),
    "ThresholdedRelu": _thresholded,
}

RULES: Final[Mapping[str, Rule]] = {
    **{op: unary(local) for op, local in _UNARY.items()},
    "Add": broadcast(lambda at: [lambda: at.dy] * 2),
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": broadcast(_clip),
    "Div": broadcast(_div),
    "Dropout": _dropout,
    "Max": broadcast(_extremes),
    "Mean": broadcast(_mean),
    "Min": broadcast(_extremes),
    "Mul": broadcast(_mul),
    "PRelu": broadcast(_prelu),
    "Pow": broadcast(_pow),
    "Sub": broadcast(lambda at: [lambda: at.dy, lambda: -at.dy]),
    "Sum": broadcast(lambda at: [lambda: at.dy] * len(at.call.inputs)),
    "Where": broadcast(_where),
}


FORWARD: Final[Mapping[str, Forward]] = {"Dropout": _dropout_forward}
