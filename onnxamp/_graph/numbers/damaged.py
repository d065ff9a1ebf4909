"""Nodes that compute an ordinary constant of others that low precision cannot hold, such as log(1e-10)."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.evaluate import Computation, Evaluator
from onnxamp._graph.numbers.known import known_numbers
from onnxamp._graph.view import Node


def damaged(graph: Graph, low: Format) -> Iterator[Node]:
    """Yield nodes that compute an ordinary constant of others, and a wrong one in low precision: ``log(1e-10)`` is -23,
    and the logarithm of zero is not.

    Complexity: linear in the nodes that compute constants, which are small.
    """
    evaluator = Evaluator(graph)
    for one in graph.ask(known_numbers).computations:
        result = one.node.outputs[0]
        if (
            graph.types[result] == FLOAT
            and one.node.key != "Cast"
            and _is_damaged(evaluator, one, low)
        ):
            yield one.node


def _is_damaged(evaluator: Evaluator, one: Computation, low: Format) -> bool:
    """Return whether a computation in low precision misses an ordinary result by more than its roundings."""
    right = one.results[0].astype(np.float64)
    given = [
        array if array is None or array.dtype != np.float32 else _rounded(array, low)
        for array in one.inputs
    ]
    results = evaluator.run(one.node, given)
    if results is None:
        return False
    # Overflow is one of the results to look for here, so NumPy must not warn of it.
    with np.errstate(all="ignore"):
        rounded = _rounded(results[0], low).astype(np.float64)
        is_usual = (np.abs(right) >= low.smallest_normal) & (
            np.abs(right) < low.max_finite
        )
        # Negated, because a comparison with NaN is false, and NaN is damage.
        is_far = ~(np.abs(rounded - right) <= _BEARABLE * low.epsilon * np.abs(right))
        return bool((is_usual & is_far).any())


_BEARABLE: Final = 16
"""Roundings by which a constant may be off: those of its operands, and its own, amplified by usual functions."""


def _rounded(array: NDArray[Any], low: Format) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return array.astype(helper.tensor_dtype_to_np_dtype(low.elem)).astype(
            np.float32
        )
