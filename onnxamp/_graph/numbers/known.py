"""Numbers that are known before a model runs, although no tensor of the model stores them.

A number may come from arithmetic of constants, a Cast of a double, a look-up in a small table, an If whose branches are
both constant, an invariant of a loop, or a default that callers may override. What a hazard depends on is the value of
an operand, whichever of these computes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.constants import MAKERS
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.evaluate import (
    ALTERNATIVES,
    Computation,
    Evaluator,
    Number,
    Numbers,
    overridable_defaults,
)
from onnxamp._graph.view import ABSENT, Node, carried_states, passed_from
from onnxamp._model.constant_stats import ConstantStats, constant_stats

_ROWS: Final = 64
"""Most elements of a table from which a look-up may pick any."""


class Known:
    """The known numbers of a graph; see :func:`known_numbers`."""

    def __init__(
        self,
        numbers: Mapping[int, Numbers],
        sources: Mapping[int, Sequence[int]],
        computations: Sequence[Computation],
    ) -> None:
        """Measure the known numbers.

        Args:
            numbers: value -> the values that it may have.
            sources: value -> the values that it is computed from.
            computations: the nodes that computed something from constants.
        """
        self.computations = computations
        self._stats = dict[int, tuple[ConstantStats, ...]]()
        for value, alternatives in numbers.items():
            arrays = (alternative.array for alternative in alternatives)
            self._stats[value] = tuple(map(constant_stats, arrays))
        self._sources = sources
        self.numbers = numbers

    def floats(self) -> Iterator[tuple[int, ConstantStats]]:
        """Yield the values that are computed or overridable, with the statistics of each value that they may have."""
        for value, alternatives in self._stats.items():
            for stats in alternatives:
                yield value, stats

    def stats(self, value: int) -> tuple[ConstantStats, ...]:
        """Return the statistics of each value that an operand may have; none if a tensor stores it or it is unknown."""
        return self._stats.get(value, ())

    def computes(self, value: int) -> bool:
        """Return whether a value is computed from constants alone."""
        return value in self._sources

    def origins(self, value: int) -> list[int]:
        """Return the value and all those that it is computed from.

        Complexity: linear in these values.
        """
        if value not in self._sources:
            return []
        seen = {value: None}
        stack = [value]
        while stack:
            for source in self._sources.get(stack.pop(), ()):
                if source in self._sources and source not in seen:
                    seen[source] = None
                    stack.append(source)
        return list(seen)


def known_numbers(graph: Graph) -> Known:
    """Return the float32 values whose numbers are known although no constant tensor stores them.

    Complexity: linear in nodes. Ops run only on small constants, and each distinct computation runs once.
    """
    plan = _Plan(graph)
    evaluate = Evaluator(graph)
    numbers = {value: evaluate.numbers_of(value, {}) for value in evaluate.defaults}
    for derivation in plan.needed():
        numbers |= derivation.results(numbers, evaluate)
    floats = {
        value: alternatives
        for value, alternatives in numbers.items()
        if alternatives and _tells(graph, value)
    }
    return Known(floats, plan.sources, evaluate.computations)


def stats_of(graph: Graph, value: int) -> tuple[ConstantStats, ...]:
    """Return the statistics of each value that a float32 operand may have, stored or computed; none if unknown."""
    computed = graph.ask(known_numbers).stats(value)
    if computed:
        return computed
    stored = graph.constants.stats(value)
    return () if stored is None else (stored,)


def floats_of(graph: Graph) -> Iterator[tuple[int, ConstantStats]]:
    """Yield all float32 values that are constant, stored or computed, with the statistics of their possible numbers."""
    known = graph.ask(known_numbers)
    for value, stats in graph.constants.floats().items():
        if stats is not None and value not in known.numbers:
            yield value, stats
    yield from known.floats()


def is_known(graph: Graph, value: int) -> bool:
    """Return whether all numbers of a float32 operand are known, stored or computed."""
    return graph.constants.is_constant(value) or bool(
        graph.ask(known_numbers).stats(value)
    )


def is_fixed(graph: Graph, value: int) -> bool:
    """Return whether a value is computed from constants alone, such as a table that an If picks, however large."""
    constants = graph.constants
    return constants.is_constant(value) or graph.ask(known_numbers).computes(value)


def is_out_of_range(graph: Graph, value: int, low: Format) -> bool:
    """Return whether a constant has an element that low precision cannot hold."""
    return any(stats.out_of_range(low) is not None for stats in stats_of(graph, value))


def is_rounded(graph: Graph, value: int, low: Format) -> bool:
    """Return whether low precision rounds any number of a constant."""
    is_constant = graph.constants.stats(value) is not None
    return is_constant and not graph.constants.fits(value, low)


def _tells(graph: Graph, value: int) -> bool:
    """Return whether the numbers of a value say more than the statistics of the graph's constants."""
    maker = graph.producer(value)
    if graph.types[value] != FLOAT or (maker is not None and maker.key in MAKERS):
        return False
    if not graph.constants.is_constant(value):
        return True
    stats = graph.constants.stats(value)
    return stats is None or stats.uniform is None


class _Derivation(NamedTuple):
    """The results of a node, or of an invariant of a loop, which are known if their operands are.

    Attributes:
        node: the node.
        operands: the values that its results are computed from.
        outputs: its results.
        moves: whether the results merely hold some of the operands' elements.
    """

    node: Node
    operands: tuple[int, ...]
    outputs: tuple[int, ...]
    moves: bool = False

    def results(
        self, numbers: Mapping[int, Numbers], evaluate: "Evaluator"
    ) -> dict[int, Numbers]:
        """Return the numbers of the results that are known."""
        given = [evaluate.numbers_of(value, numbers) for value in self.operands]
        if not all(given):
            return {}
        if not self.moves:
            return evaluate.computed(self.node, self.operands, given, self.outputs)
        sizes = evaluate.sizes(self.outputs)
        # By their bytes, so that equal numbers count once towards the limit.
        distinct = dict[bytes, Number]()
        for each in given:
            for one in _moved(each, sizes):
                distinct[one.array.tobytes()] = one
        alternatives = tuple(distinct.values())
        complete = 0 < len(alternatives) <= ALTERNATIVES
        return dict.fromkeys(self.outputs, alternatives) if complete else {}


def _moved(numbers: Numbers, sizes: Sequence[int | None]) -> Iterator[Number]:
    """Yield the numbers that a selection of elements may consist of."""
    for one in numbers:
        uniform = one.uniform
        if uniform is not None:
            yield uniform
        elif one.array.size <= _ROWS and all(size == 1 for size in sizes):
            yield from (
                Number(number.reshape(()), stretched=True)
                for number in np.unique(one.array)
            )


class _Plan:
    """The derivations that compute numbers from constants.

    Attributes:
        derivations: value -> the derivation that computes it.
        leading: op -> the first input that its results depend on.
        sources: value -> the values that it is computed from.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.seeds = {*graph.constants.tensors, *graph.ask(overridable_defaults)}
        self.derivations = dict[int, _Derivation]()
        self.sources = dict[int, Sequence[int]]()
        facts = op_facts()
        # Ops that take a size may make large results of small constants. Views keep the number of elements.
        bounded = facts.moves_data - (facts.size_inputs.keys() - facts.views)
        self.computing = facts.elementwise | bounded | facts.reduces_axes
        moved = facts.moved_inputs
        self.leading = {
            key: min(moved.get(key, (0,))[:1])
            for key in self.computing | facts.moves_data
        }
        for node in graph.order:
            derivation = self._derivation_of(node)
            if derivation is not None:
                self._add(derivation)
            if node.key in facts.repeats:
                self._invariants(node)

    def needed(self) -> list[_Derivation]:
        """Return the derivations that lead to floats, each after those that it depends on."""
        types = self.graph.types
        stack = [value for value in self.derivations if types[value] in FLOAT_TENSORS]
        marked = {*stack}
        while stack:
            for source in self.derivations[stack.pop()].operands:
                if source in self.derivations and source not in marked:
                    marked.add(source)
                    stack.append(source)
        # By identity, because a node has one derivation for all its outputs.
        derivations = {
            id(self.derivations[value]): self.derivations[value]
            for value in self.derivations
            if value in marked
        }
        return list(derivations.values())

    def _is_known(self, value: int) -> bool:
        return value in self.seeds or value in self.derivations

    def _add(self, derivation: _Derivation) -> None:
        for value in derivation.outputs:
            self.derivations[value] = derivation
            self.sources[value] = derivation.operands

    def _derivation_of(self, node: Node) -> _Derivation | None:
        """Return the derivation of a node's results; None if they depend on more than constants."""
        key = node.key
        if key in MAKERS:
            return _Derivation(node, (), tuple(node.writes))
        if key == "If":
            return self._branches(node)
        # Most nodes end here: what they compute or move first is unknown.
        if key not in self.leading or not self._is_known(
            node.input(self.leading[key])
        ):
            return None
        facts = op_facts()
        typing = facts.types_only.get(key, ())
        ports = facts.moved_inputs.get(key, ()) if key in facts.moves_data else ()
        given = [
            (port, value) for port, value in enumerate(node.inputs) if value != ABSENT
        ]
        read = tuple(value for port, value in given if port not in typing)
        moved = tuple(value for port, value in given if port in ports)
        if (
            key in self.computing
            and ABSENT not in node.outputs
            and all(map(self._is_known, read))
        ):
            return _Derivation(node, read, node.outputs)
        is_moved = moved and all(map(self._is_known, moved))
        return (
            _Derivation(node, moved, tuple(node.writes), moves=True)
            if is_moved
            else None
        )

    def _branches(self, node: Node) -> _Derivation | None:
        """Add the results of an If that are constant in all its branches; return None."""
        passed = self.graph.ask(passed_from)
        for output in node.writes:
            values = tuple(passed.get(output, ()))
            is_whole = len(values) == len(node.bodies)
            if is_whole and all(map(self._is_known, values)):
                self._add(_Derivation(node, values, (output,), moves=True))
        return None

    def _invariants(self, node: Node) -> None:
        """Add the results of a loop that returns a state unchanged."""
        for state in carried_states(self.graph, node):
            is_same = self.graph.passed_on(state.after) == state.before
            if is_same and state.start != ABSENT and self._is_known(state.start):
                results = (state.before, state.end)
                outputs = tuple(value for value in results if value != ABSENT)
                self._add(_Derivation(node, (state.start,), outputs, moves=True))
