"""How large each channel is that a node makes of numbers of a unit, by its constants."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.ops import attribute_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node


def weight_rows(graph: Graph, node: Node) -> NDArray[np.float32] | None:
    """Return the weights of a layer, a row for each channel of its result; None for others, and for large weights."""
    if node.key not in ("Gemm", "MatMul", "Conv"):
        return None
    weights = graph.constants.numbers(node.input(1), most=MOST_WEIGHTS)
    if weights is None or weights.ndim < 2 or not weights.size:
        return None
    if node.key == "Conv":
        return weights.reshape(len(weights), -1)
    if weights.ndim > 2:
        return None
    is_turned = bool(attribute_of(node.proto, "transB", 0))
    return weights if is_turned else weights.T


def weight_lengths(graph: Graph, node: Node) -> NDArray[np.float64] | None:
    """Return the lengths of the vectors of weights by which a layer multiplies its input; None for others."""
    rows = weight_rows(graph, node)
    if rows is None:
        return None
    # Factors alpha and beta of a Gemm are 1 in layers.
    return np.asarray(np.linalg.norm(rows.astype(np.float64), axis=1))


def channel_factors(graph: Graph, node: Node) -> NDArray[np.float64] | None:
    """Return the magnitudes of the channels that a node makes of numbers of a unit, 0 for dead ones; None if it is no
    such node.
    """
    if node.key not in ("Mul", "Div"):
        lengths = weight_lengths(graph, node)
        return None if lengths is None else np.where(lengths > _DEAD, lengths, 0.0)
    for value in node.inputs[1:] if node.key == "Div" else node.inputs:
        numbers = graph.constants.numbers(value, most=MOST_WEIGHTS)
        # With several axes, they are those of places, such as a window.
        if numbers is not None and max(numbers.shape, default=1) == numbers.size > 0:
            sizes = np.abs(numbers.astype(np.float64).reshape(-1))
            with np.errstate(divide="ignore"):
                return np.asarray(1 / sizes if node.key == "Div" else sizes)
    return None


MOST_WEIGHTS: Final = 1 << 20
"""Weights of a layer up to which rules look at each: milliseconds."""

_DEAD: Final = 1e-12
"""Lengths up to which they are what a decay has left of weights; gases in the air have larger ones."""
