"""One number followed from op to op, to find where it leaves the range of low precision.

Two points are known to matter. Where a guarded value is zero, its epsilon stands alone: ``1 / (x + 1e-6)`` is a
million there, although the epsilon itself is float32. And where a value of a few units is multiplied by a tiny
constant, low precision flushes the product and all that is computed from it.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, Format
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.evaluate import Evaluator
from onnxamp._graph.numbers.known import known_numbers
from onnxamp._graph.passed import passed_on
from onnxamp._graph.view import ABSENT, Node

_REACH: Final = 64
"""Limit on the nodes that are visited from one constant."""

_NEAR: Final = 24
"""Limit on the values that are visited upstream of a guard or a numerator: a decomposed norm has fewer."""

_STEPS: Final = 8
"""Limit on the nodes from a constant to the op whose result is out of range: ``exp(-log(sqrt(x + eps)))`` has five."""

_SMALL: Final = 0.1
"""Constants below this are followed: only results of more than the largest float16 number divided by the numerator, or
of less than the smallest one, matter."""

DIGITS: Final = 64
"""Smallest numbers of a type that make up a unit: with fewer, rounding moves a product of values of a few units by more
than a percent."""


class Extreme(NamedTuple):
    """A node that computes or reads a number out of range, and that number."""

    node: Node
    start: Node
    number: float
    value: int = ABSENT
    """What passes the number on, if the node is one of control flow."""


def exploding(graph: Graph, low: Format) -> Iterator[Extreme]:
    """Yield nodes that compute or read numbers out of range where a guarded value is zero, until a product scales them.

    Complexity: linear in nodes, because the walk from each guard is limited.
    """
    if not low.is_narrow:
        return
    walk = _NumberWalk(graph, low, unknown_factor=None, unknown_term=0.0)
    facts = op_facts()
    for node in graph.nodes_of(
        {*facts.added_epsilons, *facts.bounding_epsilons, *facts.choices}
    ):
        start = walk.guard(node)
        if start is not None:
            yield from walk.follow(node, start)


def shrinking(graph: Graph, low: Format) -> Iterator[Extreme]:
    """Yield nodes that compute or read values of a few units times a constant that low precision cannot resolve, until
    something larger is added, or another constant brings them back.

    Integers and what is dequantized may be large, so that a small product of theirs is none.
    """
    walk = _NumberWalk(graph, low, unknown_factor=1.0, unknown_term=None)
    for node in graph.nodes_of(("Mul", "Div")):
        start = walk.factor(node)
        if start is not None:
            yield from walk.follow(node, start)


class _NumberWalk:
    """Follows a number from op to op."""

    def __init__(
        self,
        graph: Graph,
        low: Format,
        *,
        unknown_factor: float | None,
        unknown_term: float | None,
    ) -> None:
        """Prepare walks in a graph.

        Args:
            graph: the graph.
            low: the low-precision type.
            unknown_factor: what stands for an unknown operand of a product; None if the walk ends there.
            unknown_term: what stands for an unknown operand of a sum; None if the walk ends there.
        """
        self.graph = graph
        self.low = low
        self.unknown_factor = unknown_factor
        self.unknown_term = unknown_term
        self.evaluator = Evaluator(graph)
        self.known = graph.ask(known_numbers).numbers
        self.origins = dict[int, set[int]]()
        self.followed = set[tuple[int, float]]()
        self.arrays = dict[int, NDArray[Any] | None]()

    def guard(self, node: Node) -> float | None:
        """Return the result of a node that joins a value with a small constant, where the value is zero; None for other
        nodes.
        """
        facts = op_facts()
        ports = (
            facts.added_epsilons.get(node.key)
            or facts.bounding_epsilons.get(node.key)
            or facts.choices[node.key]
        )
        small = list[float]()
        for port, value in enumerate(node.inputs):
            if port not in ports or not self.may_be_small(value):
                continue
            number = self.uniform(value)
            if number is not None and 0 < abs(number) < _SMALL:
                small.append(number)
        # Clip before opset 11 has its bound in an attribute.
        name = facts.bounding_attribute.get(node.key)
        bound = None if name is None else attribute(node.proto, name)
        if bound is not None:
            return float(bound) if 0 < bound < _SMALL else None
        if not small or not self.unknown(node):
            return None
        if node.key in facts.choices:
            return min(small, key=abs)
        return self.computed(node, dict.fromkeys(self.unknown(node), 0.0))

    def factor(self, node: Node) -> float | None:
        """Return the result of a product with a small constant, where the other operand is 1; None for other nodes."""
        # Most products have a large constant, or none.
        if node.key == "Mul" and any(map(self.is_large, node.inputs)):
            return None
        unknown = self.unknown(node)
        if len(unknown) != 1 or len(self.graph.float_inputs(node)) != 2:
            return None
        if node.key in op_facts().divisors and node.inputs[0] != unknown[0]:
            return None
        number = self.computed(node, {unknown[0]: 1.0})
        is_small = number is not None and abs(number) < _SMALL
        if not is_small or _counts(self.graph, unknown[0]):
            return None
        return number

    def follow(self, start: Node, number: float) -> Iterator[Extreme]:
        """Yield the nodes that compute or read the number, or a result of it, where that is out of range."""
        graph = self.graph
        numbers = {start.index: number}
        steps = {start.index: 0}
        guarded = frozenset(self.unknown(start))
        if self.is_lost(number):
            yield Extreme(start, start, number)
        # An earlier walk that came here with the same number has found all that this one would.
        is_new = (start.index, number) not in self.followed
        self.followed.add((start.index, number))
        stack = [start] if is_new else []
        seen = {start.index}
        known = dict[int, float]()
        while stack and len(seen) < _REACH:
            last = stack.pop()
            number = numbers[last.index]
            passed = passed_on(graph, last)
            known.update(dict.fromkeys(passed.values, number))
            if self.is_lost(number):
                yield from (
                    Extreme(graph.nodes[owner], start, number, value)
                    for owner, value in passed.owners
                )
            for reader, _ in passed.readers(graph):
                others = self.factors(reader, known)
                if reader.index in seen and not others.keys() - passed.values:
                    continue
                seen.add(reader.index)
                held = {**others, **dict.fromkeys(passed.values, number)}
                result, is_read = self.result(reader, held, number, guarded)
                is_lost = result is not None and self.is_lost(result)
                if is_lost or (is_read and self.is_lost(number)):
                    yield Extreme(
                        reader,
                        start,
                        number if result is None or not is_lost else result,
                    )
                # The limit counts from the last number out of range, which further nodes may read.
                steps[reader.index] = 0 if is_lost else steps[last.index] + 1
                is_near = steps[reader.index] < _STEPS
                if (
                    result is not None
                    and is_near
                    and (reader.index, result) not in self.followed
                ):
                    self.followed.add((reader.index, result))
                    numbers[reader.index] = result
                    stack.append(reader)

    def is_lost(self, number: float) -> bool:
        """Return whether low precision cannot hold the number."""
        size = abs(number)
        if self.unknown_factor is None:
            return size >= self.low.overflow
        return 0 < size < DIGITS * self.low.smallest_subnormal

    def factors(self, reader: Node, known: Mapping[int, float]) -> dict[int, float]:
        """Return the numbers of a product's operands that the walk has met, unless unknown ones have a stand-in."""
        if reader.key != "Mul" or self.unknown_factor is not None:
            return {}
        return {value: known[value] for value in reader.inputs if value in known}

    def result(
        self,
        reader: Node,
        held: Mapping[int, float],
        number: float,
        guarded: frozenset[int],
    ) -> tuple[float | None, bool]:
        """Return what a reader computes from the number, None if that is unknown or back in range for good; and whether
        it depends on the number at all.
        """
        facts = op_facts()
        if not self.graph.is_float_output(reader):
            return None, True
        if reader.key in facts.moves_data or reader.key in facts.reduces_axes:
            return number, True
        unknown = [value for value in self.unknown(reader) if value not in held]
        if reader.key in facts.contractions:
            return (None if unknown and self.unknown_factor is None else number), True
        if reader.key not in facts.elementwise:
            return None, True
        return self.elementwise(reader, held, number, guarded)

    def elementwise(
        self,
        reader: Node,
        held: Mapping[int, float],
        number: float,
        guarded: frozenset[int],
    ) -> tuple[float | None, bool]:
        """Return the same as :meth:`result`, for an op that computes each element alone."""
        unknown = [value for value in self.unknown(reader) if value not in held]
        is_product = reader.key == "Mul" or reader.key in op_facts().divisors
        stand_in = self.unknown_factor if is_product else self.unknown_term
        # A numerator that may be zero where the guarded value is keeps the quotient in range; any other counts as 1.
        if self.divides(reader, held, number) and not self.vanishes(unknown, guarded):
            stand_in = 1.0
        if unknown and stand_in is None:
            return None, is_product or self.unknown_term is not None
        given = {**dict.fromkeys(unknown, stand_in or 0.0), **held}
        return self.computed(reader, given), True

    def divides(self, reader: Node, held: Collection[int], number: float) -> bool:
        """Return whether a node divides something by a number so small that a quotient of 1 is out of range."""
        ports = op_facts().divisors.get(reader.key, ())
        is_small = self.unknown_factor is None and abs(number) * self.low.overflow <= 1
        return is_small and any(reader.input(port) in held for port in ports)

    def vanishes(self, values: Iterable[int], guarded: Iterable[int]) -> bool:
        """Return whether values may be zero where guarded ones are, because both are computed from the same value."""
        return not self.upstream(values).isdisjoint(self.upstream(guarded))

    def upstream(self, values: Iterable[int]) -> set[int]:
        """Return the results of :func:`_upstream` for all of the values together."""
        for value in values:
            if value not in self.origins:
                self.origins[value] = _upstream(self.graph, value)
        return set[int]().union(*(self.origins[value] for value in values))

    def unknown(self, node: Node) -> list[int]:
        """Return the float operands whose numbers are not known."""
        values = dict.fromkeys(self.graph.float_inputs(node))
        return [value for value in values if self.array(value) is None]

    def may_be_small(self, value: int) -> bool:
        """Return whether a value may be a small number, by what is known of it without reading its elements."""
        if value in self.known:
            return True
        stats = self.graph.constants.stats(value)
        number = None if stats is None else stats.uniform
        return number is not None and 0 < abs(number) < _SMALL

    def is_large(self, value: int) -> bool:
        """Return whether a value is a constant that has an element which is not small, unless it is a part of one."""
        stats = None if value in self.known else self.graph.constants.stats(value)
        return stats is not None and stats.largest >= _SMALL

    def array(self, value: int) -> NDArray[Any] | None:
        """Return the elements of a small constant; None of other values."""
        if value not in self.arrays:
            self.arrays[value] = self._array(value)
        return self.arrays[value]

    def _array(self, value: int) -> NDArray[Any] | None:
        source = self.graph.constants.source(value)
        numbers = self.known.get(value) or self.evaluator.numbers_of(source, {})
        return numbers[0].array if numbers else None

    def uniform(self, value: int) -> float | None:
        """Return the number that all elements of a constant equal; None for other values."""
        array = self.array(value) if self.graph.types[value] == FLOAT else None
        if array is None or not array.size:
            return None
        flat = array.reshape(-1)
        return float(flat[0]) if (flat == flat[0]).all() else None

    def computed(self, node: Node, given: Mapping[int, float]) -> float | None:
        """Return the largest finite magnitude that a node computes, with its sign, for these numbers of unknown
        operands; None if there is none.
        """
        arrays = [self.operand(value, given) for value in node.inputs]
        results = self.evaluator.run(node, arrays)
        if results is None or results[0].dtype.kind != "f" or not results[0].size:
            return None
        flat = results[0].reshape(-1)
        number = float(flat[np.abs(flat).argmax()])
        return number if np.isfinite(number) else None

    def operand(self, value: int, given: Mapping[int, float]) -> NDArray[Any] | None:
        """Return the array that stands for an operand; None for an omitted one."""
        if value == ABSENT:
            return None
        if value in given:
            return np.array(given[value], np.float32)
        array = self.array(value)
        return np.zeros((), np.bool_) if array is None else array


def _upstream(graph: Graph, value: int) -> set[int]:
    """Return values that are zero where this one is, found through norms, magnitudes and products."""
    facts = op_facts()
    is_constant = graph.constants.is_constant
    seen = {value}
    # The nearest first, because a residual stream leads far away.
    waiting = deque([value])
    while waiting and len(seen) < _NEAR:
        maker = graph.producer(waiting.popleft())
        if maker is None or maker.key not in _zero_for_zero():
            continue
        read = graph.float_inputs(maker)
        if maker.key in facts.contractions and any(map(is_constant, read)):
            continue
        fresh = [one for one in read if one not in seen and not is_constant(one)]
        seen.update(fresh)
        waiting += fresh
    return seen


@cache
def _zero_for_zero() -> frozenset[str]:
    """Return the ops through which a zero leads back to zeros: norms, magnitudes, products, and moves of data."""
    facts = op_facts()
    return frozenset().union(
        facts.norm_arithmetic,
        facts.spectral_arithmetic,
        facts.growing_reductions,
        facts.magnitudes,
        facts.exact,
    )


def _counts(graph: Graph, value: int) -> bool:
    """Return whether a value is computed from integers or quantized numbers, which may be large."""
    facts = op_facts()
    seen = {value}
    stack = [value]
    while stack and len(seen) < _REACH:
        maker = graph.producer(stack.pop())
        if maker is None:
            continue
        is_cast = (
            maker.key == "Cast" and graph.types[maker.input(0)] not in FLOAT_TENSORS
        )
        if (
            is_cast
            or maker.key in facts.dequantize
            or maker.key in facts.position_sources
        ):
            return True
        if maker.key in facts.index_arithmetic or maker.key == "Cast":
            fresh = [one for one in graph.float_inputs(maker) if one not in seen]
            seen.update(fresh)
            stack += fresh
    return False
