"""What products with constant weights make of an offset that all numbers share.

A blur or a moving average keeps it: the weights of each result add up to 1. A finite difference takes it away: they add
up to 0, as those of an edge filter and of a matrix that subtracts the mean.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.ops import Product, attribute_of, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node

_Weights: TypeAlias = NDArray[np.float64]

_MOST: Final = 1 << 16
"""Weights of a product that are added up: milliseconds."""
_SAME: Final = 1e-3
"""Share of their magnitudes by which weights may miss the sum that they are meant to have."""
_BALANCED: Final = 0.9
"""The least share of results that are differences: those at a border may be none."""
_DIFFERENT: Final = 64
"""Magnitudes of the weights of finite differences, which are designed. Trained weights without their mean have more."""


def keeps_offset(graph: Graph, node: Node, value: int) -> bool:
    """Return whether each result of a product is an average of numbers of a value."""
    return _is_made(graph, node, value, _are_averages)


def removes_offset(graph: Graph, node: Node, value: int) -> bool:
    """Return whether nearly all results of a product are differences between numbers of a value."""
    return _is_made(graph, node, value, _are_differences)


def _is_made(
    graph: Graph, node: Node, value: int, suits: Callable[[_Weights], bool]
) -> bool:
    """Return whether the weights by which a product multiplies a value suit, with a row for each result."""
    for product in op_facts().products.get(node.key, ()):
        if product.rows is None or node.input(product.rows) != value:
            continue
        if product.applies(node.proto):
            weights = _rows(graph, node, product)
            return weights is not None and suits(weights)
    return False


def _rows(graph: Graph, node: Node, product: Product) -> _Weights | None:
    """Return the constant weights of a product, those of a result in a row; None for those that are not looked at."""
    value = node.input(product.weight)
    numbers = graph.constants.numbers(value, most=_MOST)
    if numbers is None or numbers.ndim < 2 or not numbers.size:
        return None
    weights = numbers.astype(np.float64)
    if not np.isfinite(weights).all():
        return None
    if product.form == "windows":
        return weights.reshape(len(weights), -1)
    if product.form != "matrix":
        return None
    is_turned = bool(product.turned and attribute_of(node.proto, product.turned, 0))
    if is_turned == product.is_left:
        weights = weights.swapaxes(-1, -2)
    return weights.reshape(-1, weights.shape[-1])


def _are_averages(weights: _Weights) -> bool:
    return bool((weights >= 0).all() and np.allclose(weights.sum(1), 1, rtol=_SAME))


def _are_differences(weights: _Weights) -> bool:
    magnitudes = np.abs(weights)
    lengths = magnitudes.sum(1)
    # A row of zeros belongs to a border as well.
    is_balanced = np.abs(weights.sum(1)) <= _SAME * lengths
    if is_balanced.mean() < _BALANCED or not lengths.any():
        return False
    steps = np.round(magnitudes / magnitudes.max(), 6)
    return len(set(steps[steps > 0].tolist())) <= _DIFFERENT
