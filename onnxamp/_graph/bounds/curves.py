"""Functions of one number that the formulas of bounds name."""

from collections.abc import Mapping
from math import erf, sqrt
from typing import Final

import numpy as np

from onnxamp._graph.bounds.bound import Curve


def gelu(x: float) -> float:
    """Return x times the probability that a normal number is less than x."""
    return x * 0.5 * (1.0 + erf(x / sqrt(2.0)))


def sigmoid(x: float) -> float:
    """Return the logistic function."""
    return float(1.0 / (1.0 + np.exp(-x)))


def hard_swish(x: float) -> float:
    """Return x times a line from 0 at -3 to 1 at 3."""
    return float(x * np.clip(x / 6.0 + 0.5, 0.0, 1.0))


CURVES: Final[Mapping[str, Curve]] = {
    "arccosh": np.arccosh,
    "arcsinh": np.arcsinh,
    "arctan": np.arctan,
    "ceil": np.ceil,
    "cosh": np.cosh,
    "erf": erf,
    "exp": np.exp,
    "expm1": np.expm1,
    "floor": np.floor,
    "gelu": gelu,
    "hard_swish": hard_swish,
    "log": np.log,
    "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "relu": lambda x: max(x, 0.0),
    "rint": np.rint,
    "sigmoid": sigmoid,
    "sigmoid_weighted": lambda x: x * sigmoid(x),
    "sinh": np.sinh,
    "softplus": lambda x: np.logaddexp(0.0, x),
    "softsign": lambda x: x / (1.0 + np.abs(x)),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
