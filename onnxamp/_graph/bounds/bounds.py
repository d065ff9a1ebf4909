"""The bounds of all values of a graph, in one pass from its inputs to its outputs.

Bodies of Ifs count with both branches. The state of a loop is bounded by a fixed point: where its bound grows from one
turn to the next, it is unknown.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, Format, Range
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import ANY
from onnxamp._graph.bounds import formulas, moved, normalized, products, sources
from onnxamp._graph.bounds.accumulated import accumulated, low_sums
from onnxamp._graph.bounds.bound import (
    UNKNOWN,
    Bound,
    between,
    contains,
    hull,
    intersection,
    whole,
)
from onnxamp._graph.bounds.call import Call, Rules, Stretch
from onnxamp._graph.bounds.counters import (
    after_turns,
    increment,
    most_turns,
    widened,
)
from onnxamp._graph.bounds.loops import Counter, State, bodies_of, states_of
from onnxamp._graph.bounds.ratios import Ratio, quotient, ratio_of
from onnxamp._graph.bounds.rounding import Rounding, rounding
from onnxamp._graph.bounds.weights import (
    READABLE,
    largest_stretch,
    least_stretch,
    range_of,
)
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Origin,
    Value,
    body_sources,
    body_targets,
)
from onnxamp._model.weights import read_array

_SMALL: Final = 1 << 20
"""Elements up to which a constant is looked at as a whole; of larger ones, only the range is known."""

_TURNS: Final = 3
"""Turns of a loop after which a state whose bound still grows is unknown. A bound that settles does so in two."""

_ROUNDINGS: Final = 4
"""Roundings to which the result of one op is subject: those of its result, its weights, and of steps inside the op."""


class Bounds:
    """The bounds of a graph's values; see :func:`find_bounds`."""

    def __init__(
        self,
        graph: Graph,
        low: Format,
        ranges: Mapping[str, Range],
        spectral: AbstractSet[int] = frozenset(),
        stretch: Stretch = largest_stretch,
        *,
        is_lowered: bool = False,
        target: str = ANY,
    ) -> None:
        self.graph = graph
        self.error = _ROUNDINGS * low.epsilon / 2.0
        self.low = low
        self.spectral = spectral
        self.stretch = stretch
        self.is_lowered = is_lowered
        self.low_sums = low_sums(low, target)
        self.of = dict[int, Bound]()
        self.beyond = dict[int, float]()
        self.ratios = dict[int, Ratio]()
        self.numbers = dict[tuple[bytes, tuple[int, ...], str], Bound]()
        """The bounds of single numbers by their bytes, shape and type: large models repeat few."""
        self.bodies = bodies_of(graph)
        self._seed(ranges)

    def __getitem__(self, value: int) -> Bound:
        """Return the bound of a value; an unknown one if it is omitted."""
        found = self.of.get(value)
        if found is None:
            found = self.of[value] = self._outset(value)
        return found

    def reach(self, value: int) -> float:
        """Return the magnitude that no input exceeds, before rounding makes it infinite; infinite if none is known."""
        return self.beyond.get(value, self[value].magnitude)

    def is_safe(self, value: int) -> bool:
        """Return whether no input brings an element of the value out of the range of low precision."""
        tensor = self.graph.constants.tensors.get(value)
        is_asked_for = value in self.of or tensor is None or 0 in tensor.dims
        # Of a weight that no rule has asked for, its range is enough, which takes a fraction of the time.
        if tensor is not None and not is_asked_for and tensor.data_type in READABLE:
            low, high = range_of(read_array(tensor, self.graph.folder))
            return max(-low, high) < self.low.overflow
        return self[value].magnitude < self.low.overflow

    @property
    def at_risk(self) -> list[int]:
        """The values that low precision holds, or may hold if none does yet."""
        types = self.graph.types
        low = [value for value in self.floats if types[value] == self.low.tensor]
        return low or self.floats

    @property
    def floats(self) -> list[int]:
        """The values that are low precision or float32."""
        kinds = {FLOAT, self.low.tensor}
        indices = (value.index for value in self.graph.values)
        return [value for value in indices if self.graph.types[value] in kinds]

    @property
    def unsafe(self) -> set[int]:
        """The values that some input may bring out of the range of low precision."""
        return {value for value in self.at_risk if not self.is_safe(value)}

    def decisive_weights(self, unsafe: AbstractSet[int]) -> frozenset[int]:
        """Return the weights that stretch the vectors on which some values that are not safe depend.

        Only the first of such values in each path count, and only those of which something is known: the others depend
        on more than weights.
        """
        graph = self.graph
        stack = [
            value
            for value in unsafe
            if self.reach(value) < inf and unsafe.isdisjoint(self._read_by(value))
        ]
        seen = set(stack)
        found = set[int]()
        while stack:
            maker = graph.producer(stack.pop())
            if maker is None or maker.bodies:
                continue
            weight = maker.input(1)
            is_product = maker.key in op_facts().contractions
            if is_product and graph.constants.is_constant(weight):
                found.add(weight)
                continue
            floats = [
                value for value in maker.reads if graph.types[value] in FLOAT_TENSORS
            ]
            fresh = [value for value in floats if value not in seen]
            seen.update(fresh)
            stack += fresh
        return frozenset(found)

    def _read_by(self, value: int) -> Sequence[int]:
        """Return the values that a value is computed from."""
        maker = self.graph.producer(value)
        return () if maker is None else maker.reads

    def _seed(self, ranges: Mapping[str, Range]) -> None:
        """Record the ranges that are given of the model's inputs."""
        graph = self.graph
        for value in graph.scopes[0].inputs:
            given = ranges.get(graph.values[value].name)
            if given is not None:
                known = between(*given).sized(_width(graph, value))
                self.of[value] = self._entering(value, known)

    def _outset(self, value: int) -> Bound:
        """Return the bound of what no node computes: a constant, or an input of the model or of a body."""
        if value == ABSENT:
            return UNKNOWN
        graph = self.graph
        width = _width(graph, value)
        tensor = graph.constants.tensors.get(value)
        if tensor is not None:
            return self._stored(value, tensor)
        held = graph.values[value]
        if held.origin is Origin.INPUT and held.scope:
            return self._entered(held).sized(width)
        known = intersection(
            sources.of_type(graph.types[value]), sources.of_indices(graph, value)
        )
        return known.sized(width)

    def _stored(self, value: int, tensor: TensorProto) -> Bound:
        """Return the bound of a constant."""
        graph = self.graph
        width = tensor.dims[-1] if tensor.dims else 1
        is_number = tensor.data_type in READABLE
        if not is_number:
            return sources.of_type(graph.types[value]).sized(width)
        array = read_array(tensor, graph.folder)
        if array.size == 1:
            known = self._number(array)
        elif array.size <= _SMALL:
            known = Bound.of_array(array)
        else:
            known = between(*range_of(array)).sized(width)
        return self._entering(value, known)

    def _number(self, array: NDArray[Any]) -> Bound:
        """Return the bound of a single number, which is the same object for all constants that hold it."""
        number = array.tobytes(), array.shape, array.dtype.str
        if number not in self.numbers:
            self.numbers[number] = Bound.of_array(array)
        return self.numbers[number]

    def _entering(self, value: int, known: Bound) -> Bound:
        """Return the bound of numbers that are given, of which some are rounded to low precision."""
        kind = self.graph.types[value]
        if not (self._is_low(value) and kind in FLOAT_TENSORS) or self._holds(known):
            return known
        by = rounding(self.low, kind, 1.0, is_lowered=self.is_lowered)
        return known.rounded(by, _height(self.graph, value))

    def _entered(self, value: Value) -> Bound:
        """Return the bound of a body's input in the first turn: of what enters it, or of the number of the turn."""
        graph = self.graph
        scope = graph.scopes[value.scope]
        owner = graph.nodes[scope.owner]
        source = body_sources(owner, len(scope.inputs))[value.port]
        if source != ABSENT:
            entering = self[owner.input(source)]
            return entering.bare
        return whole(between(0.0, max(self[owner.input(0)].high, 1.0) - 1.0))

    def solve(self, nodes: Sequence[Node]) -> None:
        """Bound the results of nodes, each after those that it depends on and after those of its bodies."""
        for node in nodes:
            if not node.bodies:
                self._node(node)
            elif node.key in op_facts().repeats:
                self._repeat(node)
            else:
                self._join(node)

    def _join(self, node: Node) -> None:
        """Bound the results of an If by what either branch returns; those of other ops with bodies are unknown."""
        scopes = [self.graph.scopes[body] for _, body in node.bodies]
        for port, value in enumerate(node.outputs):
            if value != ABSENT and node.key == "If":
                returned = [self[scope.outputs[port]] for scope in scopes]
                self.of[value] = hull(returned).sized(_width(self.graph, value))

    def _repeat(self, node: Node) -> None:
        """Bound the results of a loop: let the bounds of its states grow until they hold after another turn."""
        scope = self.graph.scopes[node.bodies[0][1]]
        states = list(states_of(self.graph, node))
        counters = dict[int, Counter]()
        turns = 0
        while grown := self._grown(states, counters, is_last=turns >= _TURNS):
            self._forget(node)
            self.of.update(grown)
            self.solve(self.bodies[node.index])
            turns += 1
        targets = body_targets(node, len(scope.outputs))
        known = {
            target: self[value]
            for target, value in zip(targets, scope.outputs, strict=True)
        }
        for state in states:
            counter = counters.get(state.before)
            last = known[state.target] if counter is None else counter.end
            # A loop may end before its first turn.
            known[state.target] = hull([last, self[state.start]])
        for target, bound in known.items():
            result = node.output(target)
            if result != ABSENT:
                self.of[result] = bound.bare.sized(_width(self.graph, result))

    def _grown(
        self,
        states: Sequence[State],
        counters: dict[int, Counter],
        *,
        is_last: bool,
    ) -> dict[int, Bound]:
        """Return wider bounds of the states that a turn brings out of theirs.

        If it was the last try, they are unknown, unless a turn only adds to them and the number of turns is known.
        """
        grown = dict[int, Bound]()
        for state in states:
            held, made = self[state.before], self[state.after]
            counter = counters.get(state.before)
            if counter is not None and self._allows(counter, state):
                continue
            if counter is None and contains(held, made):
                continue
            wider = hull([held, made]).bare
            if counter is not None:
                del counters[state.before]
                wider = sources.of_type(self.graph.types[state.before])
            elif is_last:
                counter = self._counter(state)
                wider = sources.of_type(self.graph.types[state.before])
                if counter is not None:
                    counters[state.before] = counter
                    wider = counter.during
            grown[state.before] = wider.sized(_width(self.graph, state.before))
        return grown

    def _counter(self, state: State) -> Counter | None:
        """Return how far the turns of a loop bring a state to which each adds something; None for other states."""
        graph = self.graph
        turns = most_turns(graph, state.loop, self[state.loop.input(0)])
        if turns == inf:
            return None
        added = increment(graph, state.before, state.after, self.__getitem__)
        if added is None:
            return None
        start, total = self[state.start].bare, added.total
        kind = graph.types[state.before]
        before_last = max(turns - 1.0, 0.0)
        during = after_turns(start, total, before_last)
        computed = during + added.reach
        if kind in FLOAT_TENSORS and not self._holds(computed):
            # Each intermediate result is rounded, and so is the state that the rounded results change.
            by = self._rounding(kind)
            each = added.steps * max(self.error * computed.magnitude, by.least)
            off = 2.0 * each
            total = widened(total, off)
            during = after_turns(start, total, before_last)
            computed = during + widened(added.reach, off)
            each = added.steps * max(self.error * computed.magnitude, by.least)
            if each > off:
                return None
        end = after_turns(start, total, turns)
        if end.is_unbounded or not contains(sources.of_type(kind), end):
            return None
        return Counter(added, during, end)

    def _allows(self, counter: Counter, state: State) -> bool:
        """Return whether a turn adds no more to a state than was assumed."""
        added = increment(self.graph, state.before, state.after, self.__getitem__)
        return added is not None and added.is_within(counter.added)

    def _forget(self, node: Node) -> None:
        """Forget the bounds of what a loop computes, but for those of its own states."""
        for inner in self.bodies[node.index]:
            for _, body in inner.bodies:
                for value in self.graph.scopes[body].inputs:
                    self.of.pop(value, None)
            for value in inner.outputs:
                self.of.pop(value, None)
                self.ratios.pop(value, None)

    def _node(self, node: Node) -> None:
        """Bound the results of one node, and record what is known of them beside."""
        call = Call(
            graph=self.graph,
            node=node,
            bounds=self.__getitem__,
            shapes=self.graph.shapes,
            rounding=self._rounding(self.graph.types[node.output(0)]),
            is_lowered=self.is_lowered,
            adds_low=node.key in self.low_sums,
            spectral=self.spectral,
            stretch=self.stretch,
        )
        try:
            results = self._results(call)
        except (
            OverflowError
        ):  # Python's own floats raise it where NumPy's are infinite
            results = ()
        stored = self.graph.constants.tensors
        for port, value in enumerate(node.outputs):
            if value == ABSENT or value in stored:
                continue
            result = results[port] if port < len(results) else UNKNOWN
            self.of[value] = self._finished(node, value, result)
        ratio = ratio_of(call, self.ratios)
        if ratio is not None and node.output(0) != ABSENT:
            self.ratios[node.outputs[0]] = ratio

    def _is_low(self, value: int) -> bool:
        """Return whether a value is stored in low precision, or may be."""
        return self.is_lowered or self.graph.types[value] == self.low.tensor

    def _rounding(self, kind: str | None) -> Rounding:
        """Return the rounding of a result of a type."""
        kind = kind or FLOAT
        return rounding(self.low, kind, _ROUNDINGS, is_lowered=self.is_lowered)

    def _results(self, call: Call) -> Sequence[Bound]:
        node = call.node
        rule = rules().get(node.key)
        if rule is not None:
            found = rule(call)
        elif node.key in op_facts().moves_data:
            found = moved.moved(call, self._sources(node))
        else:
            return ()
        results = [found] if isinstance(found, Bound) else list(found)
        fact = self.low_sums.get(node.key)
        if fact is not None and self._adds_floats(node):
            results = accumulated(call, results, fact)
        divided = quotient(call, self.ratios)
        if divided is not None:
            results[0] = intersection(results[0], divided)
        return results

    def _adds_floats(self, node: Node) -> bool:
        """Return whether a node adds up numbers in low precision, or may."""
        return any(
            value != ABSENT and self._is_low(value)
            for value in (*node.reads, *node.writes)
        )

    def _is_exact(self, node: Node, result: Bound) -> bool:
        """Return whether a node computes exactly in low precision: on numbers that are, with a result that is."""
        if not self._holds(result):
            return False
        types = self.graph.types
        return all(
            self._holds(self[value])
            for value in node.reads
            if types[value] in FLOAT_TENSORS
        )

    def _holds(self, bound: Bound) -> bool:
        """Return whether low precision holds all elements of a tensor as they are."""
        low = self.low
        return bound.is_exact_in(
            low.exact_integers, low.smallest_subnormal, low.max_finite
        )

    def is_exact(self, value: int) -> bool:
        """Return whether low precision holds a value as it is, whatever the input."""
        return self._holds(self[value])

    def _sources(self, node: Node) -> list[int]:
        ports = op_facts().moved_inputs[node.key]
        return [port for port in range(len(node.inputs)) if port in ports]

    def _finished(self, node: Node, value: int, bound: Bound) -> Bound:
        """Return the bound of a result with its rounding, its size, and the range of its type."""
        graph = self.graph
        kind = graph.types[value]
        sized = _typed(bound, kind).sized(_width(graph, value))
        is_rounded = kind in FLOAT_TENSORS and node.index not in graph.exact
        is_rounded = is_rounded and not self._is_exact(node, sized)
        height = _height(graph, value)
        if not is_rounded:
            return sized
        rounded = sized.rounded(self._rounding(kind), height)
        if rounded.is_unbounded and not sized.is_unbounded:
            self.beyond[value] = sized.magnitude * (1.0 + self.error)
        else:
            self.beyond.pop(value, None)
        return rounded


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
        bounds = Bounds(
            graph,
            low,
            dict(ranges),
            spectral,
            stretch,
            is_lowered=is_lowered,
            target=target,
        )
        with np.errstate(over="ignore"):  # what grows so far is unbounded
            bounds.solve(graph.order)
        return bounds

    bounds = solved()
    unsafe = bounds.unsafe
    weights = bounds.decisive_weights(unsafe)
    if not weights:
        return bounds
    # Singular values are dear. Which values they may prove at best is cheap to know.
    hopeful = solved(weights, least_stretch)
    spectral = bounds.decisive_weights(unsafe - hopeful.unsafe)
    return solved(spectral) if spectral else bounds


def _typed(bound: Bound, kind: str | None) -> Bound:
    """Return the bound of numbers that a type stores: integers cut off digits, and wrap around beyond their range."""
    held = sources.of_type(kind)
    if held.is_unbounded or not held.step:
        return bound
    outward = between(float(np.floor(bound.low)), float(np.ceil(bound.high)))
    if not (held.low <= outward.low and outward.high <= held.high):
        return held
    wider = replace(bound, low=outward.low, high=outward.high)
    return whole(wider)


def _width(graph: Graph, value: int) -> int | None:
    """Return the size of a value's last axis; None if it is unknown, 1 for a scalar."""
    shape = graph.shapes[value]
    if shape is None:
        return None
    return shape[-1] if shape else 1


def _height(graph: Graph, value: int) -> int | None:
    """Return the size of a value's axis before the last one; None if it is unknown, 1 if there is none."""
    shape = graph.shapes[value]
    if shape is None:
        return None
    return shape[-2] if len(shape) > 1 else 1


RULE_MODULES: Final = (formulas, moved, normalized, products, sources)
"""The modules with the rules."""


@cache
def rules() -> Rules:
    """Return all rules by op."""
    return {op: rule for module in RULE_MODULES for op, rule in module.RULES.items()}
