"""Finds the bounds of a graph's values, with singular values of weights where these prove more."""

from collections.abc import Set as AbstractSet
from math import inf

import numpy as np

from onnxamp._facts.dtypes import FLOAT_TENSORS, Format, Range
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import ANY
from onnxamp._graph.bounds.bounds import Bounds
from onnxamp._graph.bounds.call import Stretch
from onnxamp._graph.bounds.walk import BoundsWalk
from onnxamp._graph.bounds.weights import largest_stretch, least_stretch
from onnxamp._graph.graph import Graph


def find_bounds(
    graph: Graph,
    low: Format,
    ranges: tuple[tuple[str, Range], ...] = (),
    is_lowered: bool = False,
    target: str = ANY,
) -> Bounds:
    """Return bounds of all values of a graph that is computed in a low-precision type.

    Complexity: linear in nodes and in the elements of weights; bodies of loops count up to five times for each level of
    nesting.

    Args:
        graph: the graph, of which ``graph.ask(find_bounds, low, ranges)`` computes the bounds once.
        low: the low-precision type, whose rounding the bounds allow for.
        ranges: names of model inputs, each with the range of its numbers. Without one, a float input may hold any.
        is_lowered: whether float32 values count as if they were in low precision.
        target: what runs the model. Some add up in low precision.
    """

    def solved(
        spectral: AbstractSet[int] = frozenset(), stretch: Stretch = largest_stretch
    ) -> Bounds:
        bounds = Bounds(graph, low, dict(ranges), is_lowered=is_lowered)
        with np.errstate(over="ignore"):  # what grows so far is unbounded
            BoundsWalk(bounds, spectral, stretch, target).solve(graph.order)
        return bounds

    bounds = solved()
    unsafe = bounds.unsafe
    weights = _decisive_weights(bounds, unsafe)
    if not weights:
        return bounds
    # Singular values are dear. Which values they may prove at best is cheap to know.
    hopeful = solved(weights, least_stretch)
    spectral = _decisive_weights(bounds, unsafe - hopeful.unsafe)
    return solved(spectral) if spectral else bounds


def _decisive_weights(bounds: Bounds, unsafe: AbstractSet[int]) -> frozenset[int]:
    """Return the weights that stretch the vectors on which some values that are not safe depend.

    Only the first of such values in each path count, and only those of which something is known: the others depend on
    more than weights.
    """
    graph = bounds.graph
    stack = list[int]()
    for value in unsafe:
        maker = graph.producer(value)
        is_first = maker is None or unsafe.isdisjoint(maker.reads)
        if is_first and bounds.reach(value) < inf:
            stack.append(value)
    seen = set(stack)
    weights = set[int]()
    while stack:
        maker = graph.producer(stack.pop())
        if maker is None or maker.bodies:
            continue
        weight = maker.input(1)
        is_product = maker.key in op_facts().contractions
        if is_product and graph.constants.is_constant(weight):
            weights.add(weight)
            continue
        for value in maker.reads:
            if graph.types[value] in FLOAT_TENSORS and value not in seen:
                seen.add(value)
                stack.append(value)
    return frozenset(weights)
