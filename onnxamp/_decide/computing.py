"""The nodes that compute a constant, which must not lose what a hazard needs of it."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from onnxamp._decide.verdicts import Hazard, Kind
from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.evaluate import Computation, Evaluator
from onnxamp._graph.graph import Graph
from onnxamp._graph.known import known_numbers
from onnxamp._graph.view import ABSENT, Node, passed_values


def computing(
    graph: Graph, value: int, reader: Node, kind: Kind, *, rare: bool = False
) -> Iterator[Hazard]:
    """Yield the nodes that compute a constant for a node that a hazard is about; none if a tensor stores it.

    What makes a constant in either precision at no cost follows its readers anyway.
    """
    known = graph.ask(known_numbers)
    if value not in known.numbers:
        return
    why = f"computes a number for {reader.label!r}"
    for origin in known.origins(value):
        maker = graph.producer(origin)
        if maker is not None and maker.key not in op_facts().representable:
            yield Hazard(
                maker.index, kind, why, rare, origin if maker.bodies else ABSENT
            )


class Passed(NamedTuple):
    """The results of a node, and what control flow passes them on as.

    Attributes:
        values: the results and these values.
        owners: nodes of control flow, each with the value that it passes on.
    """

    values: Collection[int]
    owners: Sequence[tuple[int, int]]

    def readers(self, graph: Graph) -> Iterator[tuple[Node, int]]:
        """Return nodes that read any of the values, with the input position."""
        return (use for value in self.values for use in graph.consumers(value))


def passed_on(graph: Graph, node: Node) -> Passed:
    """Return the results of a node, also as they enter and leave bodies."""
    passed = graph.ask(passed_values)
    seen = dict.fromkeys(node.writes)
    stack = [*seen] if passed else []
    owners = list[tuple[int, int]]()
    while stack:
        for value in passed.get(stack.pop(), ()):
            if value not in seen:
                seen[value] = None
                stack.append(value)
                maker = graph.values[value].producer
                scope = graph.scopes[graph.values[value].scope]
                owners.append((scope.owner if maker == ABSENT else maker, value))
    return Passed(seen, owners)


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
    right = one.results[0].astype(np.float64)
    given = [
        array if array is None or array.dtype != np.float32 else _rounded(array, low)
        for array in one.inputs
    ]
    results = evaluator.run(one.node, given)
    if results is None:
        return False
    with np.errstate(all="ignore"):
        found = _rounded(results[0], low).astype(np.float64)
        is_usual = (np.abs(right) >= low.smallest_normal) & (
            np.abs(right) < low.max_finite
        )
        return bool(
            (
                is_usual
                & ~(np.abs(found - right) <= _BEARABLE * low.epsilon * np.abs(right))
            ).any()
        )


_BEARABLE: Final = 16
"""Roundings by which a constant may be off: those of its operands, and its own, amplified by usual functions."""


def _rounded(array: NDArray[Any], low: Format) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return array.astype(helper.tensor_dtype_to_np_dtype(low.elem)).astype(
            np.float32
        )
