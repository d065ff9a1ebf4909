"""Which gradients low precision flushes to zero: those of a step, beside those of the same step in float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from onnxamp._dtypes import ELEM_NUMBERS
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import infer_types
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.session import Provider, make_session, run


@dataclass(frozen=True, slots=True)
class FlushedGradient:
    """The gradient of one weight: shares of its elements, from 0 to 1, and how far it is from float32's.

    ``zeros`` are exactly zero in the step, ``exact_zeros`` in float32; ``flushed`` are so in the step alone. ``error``
    is the L2 norm of the difference by that of float32's (NaN where that is zero): it shows what is flushed on the way
    to a weight, too, when what is left is not zero. Rounding alone makes it 1e-3 to 1e-1 in float16.
    """

    elements: int
    zeros: float
    exact_zeros: float
    flushed: float
    error: float


def flushed_gradients(
    low: ModelProto, exact: ModelProto, gradients: Mapping[str, str], feeds: Mapping[str, NDArray[Any]], where: Provider
) -> dict[str, FlushedGradient]:
    """Compute gradients twice, and compare.

    Args:
        low, exact: a step in mixed precision, and in float32.
        gradients: weight -> the value that holds its gradient, scaled as the loss is, in both.
        feeds: what both take.
        where: low precision is emulated on "cpu".
    """
    names = list(gradients.values())
    ready = _showing(low, names)
    mine = run(make_session(emulate(ready) if where == "cpu" else ready, where), feeds, names)
    theirs = run(make_session(_showing(exact, names), where), feeds, names)
    return {weight: _compared(mine[name], theirs[name]) for weight, name in gradients.items()}


def _showing(model: ModelProto, names: list[str]) -> ModelProto:
    """The model with these values as its outputs."""
    view = Graph.of(model)
    types = infer_types(view)
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.output[:]
    for name in names:
        kind = types[view.scopes[0].names[name]] or ""
        elem = ELEM_NUMBERS[kind.removeprefix("tensor(").removesuffix(")")]
        result.graph.output.append(helper.make_tensor_value_info(name, elem, None))
    return result


def _compared(mine: NDArray[Any], theirs: NDArray[Any]) -> FlushedGradient:
    zeros, exact = mine == 0, theirs == 0
    flushed, norm = float(np.mean(zeros & ~exact)), float(np.linalg.norm(theirs))
    error = float(np.linalg.norm(np.asarray(mine, np.float64) - theirs)) / norm if norm else nan
    return FlushedGradient(zeros.size, float(zeros.mean()), float(exact.mean()), flushed, error)
