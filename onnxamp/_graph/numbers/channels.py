"""How large each channel is that a node makes of numbers of a unit, by its constants."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.ops import attribute_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node


def weight_lengths(graph: Graph, node: Node) -> NDArray[np.float64] | None:
    """Return the lengths of the vectors of weights by which a product multiplies its first input; None for others."""
    if node.key not in ("Gemm", "MatMul", "Conv"):
        return None
    weights = graph.constants.numbers(node.input(1), most=_MOST_WEIGHTS)
    if weights is None or weights.ndim < 2 or not weights.size:
        return None
    if node.key == "Conv":
        rows = weights.reshape(len(weights), -1)
    elif weights.ndim == 2:
        is_turned = bool(attribute_of(node.proto, "transB", 0))
        rows = weights if is_turned else weights.T
    else:
        return None
    # Factors alpha and beta of a Gemm are 1 in layers.
    return np.asarray(np.linalg.norm(rows.astype(np.float64), axis=1))


def channel_factors(graph: Graph, node: Node) -> NDArray[np.float64] | None:
    """Return the magnitudes of the channels that a node makes of numbers of a unit; None if it is no such node."""
    if node.key not in ("Mul", "Div"):
        return weight_lengths(graph, node)
    for value in node.inputs[1:] if node.key == "Div" else node.inputs:
        numbers = graph.constants.numbers(value, most=_MOST_WEIGHTS)
        if numbers is not None and numbers.size:
            sizes = np.abs(numbers.astype(np.float64).reshape(-1))
            with np.errstate(divide="ignore"):
                return np.asarray(1 / sizes if node.key == "Div" else sizes)
    return None


_MOST_WEIGHTS: Final = 1 << 20
"""Weights up to which their lengths are computed: milliseconds."""
