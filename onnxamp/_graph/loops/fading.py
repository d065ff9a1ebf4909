"""Sums and products in loops: which of them preserve a state, and which fade or replace it."""

import itertools
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import readers_of
from onnxamp._graph.view import ABSENT, Node, passed_from

_WIDEST: Final = 1024
"""Most rows of a matrix whose growth is computed; larger ones are weights of networks."""
_FADING: Final = 1 - 1 / 64
"""Largest growth of a matrix that fades a state. Roundings in different directions partly cancel: beside the last one,
those of 64 products add up to less than 6 of them.
"""
_POWERS: Final = 32
"""Products of a matrix with a vector over which its growth is averaged, after as many that turn the vector."""
_REACH: Final = 24
"""Most nodes that one walk visits: gates and norms consist of fewer."""


class Fate(Enum):
    """The effect of a sum or a product on a state."""

    ACCUMULATES = "adds to it, or multiplies it"
    PASSES = "passes it on exactly, as a factor of 1 does"
    DECAYS = "multiplies it by a factor below 1, so that it is forgotten where something is added to it"
    FADES = "computes something else of it"


_GATE: Final = "gate"
_MASK: Final = "mask"


def loop_scopes(graph: Graph) -> frozenset[int]:
    """Return the bodies of loops, and all that are inside them."""
    inside = set[int]()
    for scope in graph.scopes[1:]:
        is_body = graph.nodes[scope.owner].key in op_facts().repeats
        if is_body or scope.parent in inside:
            inside.add(scope.index)
    return frozenset(inside)


class Fading:
    """Finds the effect of sums and products on a state, which is short-lived if it lasts ``memory`` iterations."""

    def __init__(self, graph: Graph, memory: int) -> None:
        self.graph = graph
        self.largest = 1 - 1 / memory
        """The largest factor of a fast decay: 1 / (1 - factor) roundings add up, which is ``memory``."""
        self._passed_from = graph.ask(passed_from)
        self._kinds: dict[int, str] = {}
        self._growths: dict[int, float] = {}

    def product(self, node: Node, port: int) -> Fate:
        """Return the effect of a product on the factor at a port."""
        facts = op_facts()
        value = node.inputs[port]
        if node.key in facts.divisors:
            divisor = node.input(1)
            if self._is_norm(divisor, value):
                return Fate.FADES
            fate = self._by_constant(divisor, inverse=True)
            return self._joined(node, value, fate)
        factors = [
            node.inputs[other]
            for other in facts.multiplies[node.key]
            if other != port and other < len(node.inputs)
        ]
        if node.key in facts.contractions:
            is_new = any(
                self._mixes(factor) or self._kind(factor) for factor in factors
            )
            return Fate.FADES if is_new else Fate.ACCUMULATES
        fate = self._by_factor(factors[0], value) if factors else Fate.ACCUMULATES
        return self._joined(node, value, fate)

    def _joined(self, node: Node, value: int, fate: Fate) -> Fate:
        """Return the effect of a product on a value of which another product may have a share: 0.4 x + 0.6 x."""
        if fate != Fate.DECAYS:
            return fate
        state = self.graph.passed_on(value)
        for reader in readers_of(self.graph, node.outputs[0]):
            if reader.key not in op_facts().additive:
                continue
            terms = [self._share(term, state) for term in reader.reads]
            known = [share for share in terms if share is not None]
            if len(known) > 1 and sum(known) > self.largest:
                return Fate.ACCUMULATES
        return fate

    def _share(self, value: int, state: int) -> float | None:
        """Return the magnitude of the constant by which a value multiplies a state; None if it does not."""
        value = self.graph.passed_on(value)
        maker = self.graph.producer(value)
        if maker is None or state not in map(self.graph.passed_on, maker.inputs):
            return None
        factors = [
            stats.largest
            for read in maker.inputs
            if (stats := self.graph.constants.stats(read)) is not None
        ]
        is_product = maker.key == "Mul" and len(factors) == 1
        return factors[0] if is_product else None

    def _by_factor(self, factor: int, value: int) -> Fate:
        """Return the effect of a factor on a value."""
        kind = self._kind(factor)
        if kind:
            return Fate.DECAYS if kind == _GATE else Fate.PASSES
        maker = self.graph.producer(self.graph.passed_on(factor))
        is_inverse = maker is not None and maker.key in op_facts().divisors
        if is_inverse and self._is_norm(factor, value):
            return Fate.FADES
        return self._by_constant(factor)

    def _by_constant(self, factor: int, *, inverse: bool = False) -> Fate:
        """Return the effect of a constant factor, or of its inverse, on a value."""
        stats = self.graph.constants.stats(factor)
        if stats is None:
            return Fate.ACCUMULATES
        largest = stats.largest
        if inverse:
            # Of a divisor with several numbers, the smallest one is not known.
            divisor = abs(stats.uniform or 0.0)
            largest = 1 / divisor if divisor else 1 / self.largest
        if stats.uniform is not None and largest == 1:
            return Fate.PASSES
        return Fate.DECAYS if largest <= self.largest else Fate.ACCUMULATES

    def sum(self, node: Node, port: int) -> Fate:
        """Return the effect of a sum on the term at a port."""
        terms = [
            value
            for other, value in enumerate(node.inputs)
            if other != port and value != ABSENT
        ]
        if len(terms) != 1 or node.key in op_facts().contractions:
            return Fate.ACCUMULATES
        factors = self._factors(terms[0])
        state = self.graph.passed_on(node.inputs[port])
        for rate, moved in (factors, factors[::-1]) if factors else ():
            if self._is_difference(node, moved, state):
                return self._towards(rate)
        is_selection = self._is_selection(state, factors)
        return Fate.PASSES if is_selection else Fate.ACCUMULATES

    def _towards(self, rate: int) -> Fate:
        """Return the effect of state + rate * (target - state) on the state: a blend of both by a gate fades it."""
        kind = self._kind(rate)
        if kind:
            return Fate.FADES if kind == _GATE else Fate.PASSES
        number = self.graph.constants.uniform(rate)
        is_slow = number is None or abs(1 - number) > self.largest
        return Fate.ACCUMULATES if is_slow else Fate.FADES

    def _is_difference(self, node: Node, value: int, state: int) -> bool:
        """Return whether the value is target - state, as an Add needs it, or state - target for a Sub."""
        difference = self.graph.producer(self.graph.passed_on(value), "Sub")
        if difference is None:
            return False
        port = 0 if node.key == "Sub" else 1
        return self.graph.passed_on(difference.input(port)) == state

    def _is_selection(self, state: int, factors: tuple[int, ...]) -> bool:
        """Return whether a sum selects: mask * state + (1 - mask) * other."""
        return any(
            self._kind(one) == _MASK and self._are_complements(one, other)
            for one, other in itertools.product(self._factors(state), factors)
        )

    def _are_complements(self, one: int, other: int) -> bool:
        """Return whether one mask selects exactly the elements that the other does not."""
        one, other = self.graph.passed_on(one), self.graph.passed_on(other)
        return self._is_inverse(one, other) or self._is_inverse(other, one)

    def _is_inverse(self, one: int, other: int) -> bool:
        """Return whether a mask is 1 - the other, or the Cast of its negation."""
        graph = self.graph
        maker = graph.producer(one, "Sub", "Cast")
        if maker is None:
            return False
        if maker.key == "Sub":
            is_from_one = graph.constants.uniform(maker.input(0)) == 1
            return is_from_one and graph.passed_on(maker.input(1)) == other
        inverted = graph.producer(maker.input(0), "Not")
        cast = graph.producer(other, "Cast")
        if inverted is None or cast is None:
            return False
        return graph.passed_on(cast.input(0)) == graph.passed_on(inverted.input(0))

    def _factors(self, value: int) -> tuple[int, ...]:
        """Return the two factors whose product the value is; none if it is no product."""
        maker = self.graph.producer(self.graph.passed_on(value), "Mul")
        return () if maker is None or len(maker.reads) < 2 else tuple(maker.inputs)

    def _mixes(self, value: int) -> bool:
        """Return whether a factor is a matrix in whose powers a state fades, also a quantized one.

        In those of a rotation, of a step of a motion, or of a slow filter, it lasts.
        """
        maker = self.graph.producer(value, *op_facts().dequantize)
        stored = value if maker is None else maker.input(0)
        if not self.graph.constants.is_constant(stored):
            return False
        rows, *columns = self.graph.shapes[stored] or (None,)
        is_square = rows is not None and columns == [rows]
        # Quantized, rectangular and large matrices are weights of networks.
        if maker is not None or not is_square or (rows or 0) > _WIDEST:
            return True
        if stored not in self._growths:
            numbers = self.graph.constants.numbers(stored)
            self._growths[stored] = 0.0 if numbers is None else _growth(numbers)
        return self._growths[stored] <= _FADING

    def _is_norm(self, divisor: int, value: int) -> bool:
        """Return whether a divisor is reduced from the value that it divides, as in norms."""
        facts = op_facts()
        value = self.graph.passed_on(value)
        walk = facts.norm_arithmetic | facts.reduces_axes
        # Each value with whether it was reduced on the way: a walk before the reduction says nothing of one after it.
        stack = [(divisor, False)]
        seen = set[tuple[int, bool]]()
        while stack and len(seen) < _REACH:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            read, is_reduced = self.graph.passed_on(one[0]), one[1]
            if is_reduced and read == value:
                return True
            maker = self.graph.producer(read)
            if maker is not None and maker.key in walk:
                is_reduced |= maker.key in facts.reduces_axes
                stack += [(given, is_reduced) for given in maker.reads]
        return False

    def _kind(self, value: int) -> str:
        """Return "gate" of numbers between 0 and 1 that a gate makes, "mask" of zeros and ones; "" if neither."""
        if value not in self._kinds:
            self._kinds[value] = self._find_kind(value)
        return self._kinds[value]

    def _find_kind(self, value: int) -> str:
        """Return the kind of a value, from all values that it depends on: a mask only if all are masks."""
        kind = _MASK
        stack, seen = [value], {ABSENT}
        while stack:
            read = stack.pop()
            if read in seen:
                continue
            seen.add(read)
            if len(seen) > _REACH:
                return ""
            own, further = self._look(read)
            if not own:
                return ""
            kind = _GATE if own == _GATE else kind
            stack += further
        return kind

    def _look(self, value: int) -> tuple[str, Sequence[int]]:
        """Return the kind of a value, and the values that must be of a kind for that."""
        graph, facts = self.graph, op_facts()
        maker = graph.producer(value)
        if graph.constants.uniform(value) in (0, 1):
            return _MASK, ()
        if maker is None or maker.key in facts.control_flow:
            sources = self._passed_from.get(value, [])
            return (_MASK if sources else ""), sources
        if maker.key in facts.gates or self._is_bounded(maker):
            return _GATE, ()
        if maker.key in facts.relabels and graph.types[maker.input(0)] == _BOOL:
            return _MASK, ()
        moved = facts.moved_inputs.get(maker.key, ())
        # A value has the kind of the values that it moves, negates from 1, converts or multiplies.
        further = maker.inputs_at(moved)
        if maker.key == "Sub" and graph.constants.uniform(maker.input(0)) == 1:
            further = [maker.input(1)]
        elif maker.key in facts.relabels:
            further = [maker.input(0)]
        elif maker.key == "Mul":
            further = maker.reads
        return (_MASK if further else ""), further

    def _is_bounded(self, node: Node) -> bool:
        """Return whether a Clip ends at 0 and 1, as in a hard sigmoid."""
        low, high = clip_bounds(self.graph, node)
        return low is not None and high is not None and low >= 0 and high <= 1


def _growth(matrix: NDArray[Any]) -> float:
    """Return by how much a square matrix multiplies a vector in the long run: its spectral radius, about.

    Complexity: linear in the elements of the matrix.
    """
    if not np.isfinite(matrix).all():
        return 0.0
    numbers = matrix.astype(np.float64)
    # Power iteration. A random vector has a part along the direction that grows most; its seed is fixed, so that
    # conversions are reproducible.
    vector = np.random.default_rng(0).standard_normal(len(numbers))
    growth = 0.0
    for turn in range(2 * _POWERS):
        vector = numbers @ vector
        norm = float(np.linalg.norm(vector))
        if not norm:
            return 0.0
        # Without this, many powers would overflow or vanish.
        vector /= norm
        growth += math.log(norm) if turn >= _POWERS else 0.0
    return math.exp(growth / _POWERS)


def clip_bounds(graph: Graph, node: Node) -> tuple[float | None, float | None]:
    """Return the constant bounds of a Clip, in attributes or inputs; None for others, and for other ops."""
    if node.key != "Clip":
        return None, None
    return _clip_bound(graph, node, 1, "min"), _clip_bound(graph, node, 2, "max")


def _clip_bound(graph: Graph, node: Node, port: int, name: str) -> float | None:
    """Return a constant bound of a Clip; before opset 11, bounds were attributes."""
    given = attribute(node.proto, name)
    return graph.constants.uniform(node.input(port)) if given is None else float(given)


_BOOL: Final = "tensor(bool)"
