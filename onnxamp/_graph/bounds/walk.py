"""The walk that bounds all values of a graph, in one pass from its inputs to its outputs.

Bodies of Ifs count with both branches. The state of a loop is bounded by a fixed point: where its bound grows from one
turn to the next, it is unknown.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cache
from math import inf
from typing import Final

import numpy as np

from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, LOW_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.bounds import formulas, moved, normalized, products, sources
from onnxamp._graph.bounds.accumulated import bounds_of_sums, low_sums
from onnxamp._graph.bounds.bound import (
    UNKNOWN,
    Bound,
    between,
    contains,
    hull,
    intersection,
    whole,
)
from onnxamp._graph.bounds.bounds import Bounds
from onnxamp._graph.bounds.call import Call, Rules, Stretch
from onnxamp._graph.bounds.counters import (
    Counter,
    after_turns,
    increment,
    most_turns,
    widened,
)
from onnxamp._graph.bounds.ratios import Ratio, quotient, ratio_of
from onnxamp._graph.bounds.rounding import Rounding, rounding
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import height, width
from onnxamp._graph.view import (
    ABSENT,
    CarriedState,
    Node,
    carried_states,
    leaving_values,
)

_TURNS: Final = 3
"""Turns of a loop after which a state whose bound still grows is unknown. A bound that settles does so in two."""

_ROUNDINGS: Final = 4
"""Roundings to which the result of one op is subject: those of its result, its weights, and of steps inside the op."""

RULE_MODULES: Final = (formulas, moved, normalized, products, sources)
"""The modules with the rules."""


@cache
def rules() -> Rules:
    """Return all rules by op."""
    return {op: rule for module in RULE_MODULES for op, rule in module.RULES.items()}


def _bodies_of(graph: Graph) -> dict[int, Sequence[Node]]:
    """Return the nodes of the bodies of each node that has any, in the order in which they are computed."""
    bodies = dict[int, Sequence[Node]]()
    counts = dict[int, int]()
    for position, node in enumerate(graph.order):
        if node.bodies:
            inner = [graph.scopes[body].nodes for _, body in node.bodies]
            count = sum(len(nodes) for nodes in inner)
            count += sum(counts.get(index, 0) for nodes in inner for index in nodes)
            counts[node.index] = count
            bodies[node.index] = graph.order[position - count : position]
    return bodies


class BoundsWalk:
    """A walk through a graph's nodes that completes their bounds.

    Attributes:
        bounds: what is known so far.
        ratios: how values are related to those from which they are computed.
    """

    def __init__(
        self, bounds: Bounds, spectral: AbstractSet[int], stretch: Stretch, target: str
    ) -> None:
        """Begin a walk.

        Args:
            bounds: those of the model's inputs.
            spectral: weights whose largest singular value is worth its price.
            stretch: bounds that value.
            target: what runs the model. Some add up in low precision.
        """
        self.bounds = bounds
        self.ratios = dict[int, Ratio]()
        self._graph = bounds.graph
        self._spectral = spectral
        self._stretch = stretch
        self._error = _ROUNDINGS * bounds.low.epsilon / 2.0
        self._low_sums = low_sums(bounds.low, target)
        self._bodies = _bodies_of(bounds.graph)

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
        scopes = [self._graph.scopes[body] for _, body in node.bodies]
        for port, value in enumerate(node.outputs):
            if value != ABSENT and node.key == "If":
                returned = [self.bounds[scope.outputs[port]] for scope in scopes]
                self.bounds.of[value] = hull(returned).sized(
                    width(self._graph.shapes[value])
                )

    def _repeat(self, node: Node) -> None:
        """Bound the results of a loop: let the bounds of its states grow until they hold after another turn."""
        scope = self._graph.scopes[node.bodies[0][1]]
        states = list(carried_states(self._graph, node))
        most = most_turns(self._graph, node, self.bounds[node.input(0)])
        counters = dict[int, Counter]()
        tried = 0
        while grown := self._grown(
            states, counters, most if tried >= _TURNS else None
        ):
            self._forget(node)
            self.bounds.of.update(grown)
            self.solve(self._bodies[node.index])
            tried += 1
        leaving = leaving_values(node, scope)
        known = {node.output(at): self.bounds[value] for at, value in leaving.items()}
        for state in states:
            counter = counters.get(state.before)
            last = known[state.end] if counter is None else counter.end
            # A loop may end before its first turn.
            known[state.end] = hull([last, self.bounds[state.start]])
        for result, bound in known.items():
            if result != ABSENT:
                self.bounds.of[result] = bound.bare.sized(
                    width(self._graph.shapes[result])
                )

    def _grown(
        self,
        states: Sequence[CarriedState],
        counters: dict[int, Counter],
        most: float | None,
    ) -> dict[int, Bound]:
        """Return wider bounds of the states that a turn brings out of theirs.

        After the last try, they are unknown, unless a turn only adds to them and there are at most so many turns.
        """
        grown = dict[int, Bound]()
        for state in states:
            held, after = self.bounds[state.before], self.bounds[state.after]
            counter = counters.get(state.before)
            if counter is not None and self._allows(counter, state):
                continue
            if counter is None and contains(held, after):
                continue
            wider = hull([held, after]).bare
            if counter is not None:
                del counters[state.before]
                wider = sources.of_type(self._graph.types[state.before])
            elif most is not None:
                counter = self._counter(state, most)
                wider = sources.of_type(self._graph.types[state.before])
                if counter is not None:
                    counters[state.before] = counter
                    wider = counter.during
            grown[state.before] = wider.sized(width(self._graph.shapes[state.before]))
        return grown

    def _counter(self, state: CarriedState, turns: float) -> Counter | None:
        """Return how far so many turns bring a state to which each adds something; None for other states."""
        graph = self._graph
        if turns == inf:
            return None
        added = increment(graph, state.before, state.after, self.bounds.__getitem__)
        if added is None:
            return None
        start, total = self.bounds[state.start].bare, added.total
        kind = graph.types[state.before]
        before_last = max(turns - 1.0, 0.0)
        during = after_turns(start, total, before_last)
        computed = during + added.reach
        if kind in FLOAT_TENSORS and not computed.is_exact_in(self.bounds.low):
            # Each intermediate result is rounded, and so is the state that the rounded results change.
            by = self._rounding(kind)
            each = added.steps * max(self._error * computed.magnitude, by.least)
            off = 2.0 * each
            total = widened(total, off)
            during = after_turns(start, total, before_last)
            computed = during + widened(added.reach, off)
            each = added.steps * max(self._error * computed.magnitude, by.least)
            if each > off:
                return None
        end = after_turns(start, total, turns)
        if end.is_unbounded or not contains(sources.of_type(kind), end):
            return None
        return Counter(added, during, end)

    def _allows(self, counter: Counter, state: CarriedState) -> bool:
        """Return whether a turn adds no more to a state than was assumed."""
        added = increment(
            self._graph, state.before, state.after, self.bounds.__getitem__
        )
        return added is not None and added.is_within(counter.added)

    def _forget(self, node: Node) -> None:
        """Forget the bounds of what a loop computes, but for those of its own states."""
        for inner in self._bodies[node.index]:
            for _, body in inner.bodies:
                for value in self._graph.scopes[body].inputs:
                    self.bounds.of.pop(value, None)
            for value in inner.outputs:
                self.bounds.of.pop(value, None)
                self.ratios.pop(value, None)

    def _node(self, node: Node) -> None:
        """Bound the results of one node, and record how they are related to the values that it reads."""
        call = Call(
            graph=self._graph,
            node=node,
            bounds=self.bounds.__getitem__,
            shapes=self._graph.shapes,
            rounding=self._rounding(self._graph.types[node.output(0)]),
            is_lowered=self.bounds.is_lowered,
            adds_low=node.key in self._low_sums,
            spectral=self._spectral,
            stretch=self._stretch,
        )
        try:
            results = self._results(call)
        except ArithmeticError:
            # Python's own floats raise it where NumPy's are infinite.
            results = ()
        stored = self._graph.constants.tensors
        for port, value in enumerate(node.outputs):
            if value == ABSENT or value in stored:
                continue
            result = results[port] if port < len(results) else UNKNOWN
            self.bounds.of[value] = self._finished(node, value, result)
        ratio = ratio_of(call, self.ratios)
        if ratio is not None and node.output(0) != ABSENT:
            self.ratios[node.outputs[0]] = ratio

    def _rounding(self, kind: str | None) -> Rounding:
        """Return the rounding of a result of a type."""
        kind = kind or FLOAT
        return rounding(
            self.bounds.low, kind, _ROUNDINGS, is_lowered=self.bounds.is_lowered
        )

    def _results(self, call: Call) -> Sequence[Bound]:
        """Return the bounds of a node's first outputs before they are rounded."""
        node = call.node
        rule = rules().get(node.key)
        if rule is not None:
            bounds = rule(call)
        elif node.key in op_facts().moves_data:
            bounds = moved.moved(call, op_facts().moved_inputs[node.key])
        else:
            return ()
        results = [bounds] if isinstance(bounds, Bound) else list(bounds)
        fact = self._low_sums.get(node.key)
        if fact is not None and self._adds_floats(node):
            results = bounds_of_sums(call, results, fact)
        divided = quotient(call, self.ratios)
        if divided is not None:
            results[0] = intersection(results[0], divided)
        return results

    def _adds_floats(self, node: Node) -> bool:
        """Return whether a node adds up numbers in low precision, or may."""
        return any(map(self.bounds.is_low, (*node.reads, *node.writes)))

    def _is_exact(self, node: Node, result: Bound) -> bool:
        """Return whether a node computes exactly in low precision: on numbers that are, with a result that is."""
        types = self._graph.types
        # A model may be of another low-precision type already.
        kinds = (types[value] or "" for value in (*node.reads, *node.writes))
        own = (LOW_TENSORS[kind] for kind in kinds if kind in LOW_TENSORS)
        if not all(map(result.is_exact_in, (self.bounds.low, *own))):
            return False
        return all(
            self.bounds.is_exact(value)
            for value in node.reads
            if types[value] in FLOAT_TENSORS
        )

    def _finished(self, node: Node, value: int, bound: Bound) -> Bound:
        """Return the bound of a result with its rounding, its size, and the range of its type."""
        kind = self._graph.types[value]
        shape = self._graph.shapes[value]
        sized = _typed(bound, kind).sized(width(shape))
        is_rounded = kind in FLOAT_TENSORS and node.index not in self._graph.exact
        if not is_rounded or self._is_exact(node, sized):
            return sized
        rounded = sized.rounded(self._rounding(kind), height(shape))
        if rounded.is_unbounded and not sized.is_unbounded:
            self.bounds.beyond[value] = sized.magnitude * (1.0 + self._error)
        else:
            self.bounds.beyond.pop(value, None)
        return rounded


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
