"""Values that reach a reader unrounded: float32 sources, and what only exact ops compute from them.

In low precision, a path of exact ops would round a float32 value on its way to a float32 reader. Up-casts on such a
path therefore carry an accuracy charge.
"""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from onnxamp._decide.pins.find import Pins
from onnxamp._decide.problem import Problem
from onnxamp._decide.variables.ports import HIGH
from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin


class Unrounded(NamedTuple):
    """The values that low precision would be the first to round.

    Attributes:
        values: float32 sources, and the values that exact ops alone compute from them.
        charged: those of them whose up-cast carries a charge.
    """

    values: AbstractSet[int]
    charged: AbstractSet[int]


def find_unrounded(problem: Problem, pins: Pins, heavy: AbstractSet[int]) -> Unrounded:
    """Find the values that low precision would be the first to round. Complexity: linear in nodes.

    Sources are constants, graph inputs that keep their type, and producers pinned to float32; they carry no charge. Nor
    does a path of constants alone if one of them is heavy: it is rounded once and stored, like any weight. Values that
    are already low precision count as float32, or a second conversion would charge for less than the first.

    Args:
        problem: the problem.
        pins: its pins.
        heavy: constants that take more memory than a Cast is worth.
    """
    graph = problem.graph
    paths = _Paths(problem, pins)
    computed = paths.computed_high()
    lowered = graph.ask(low_constants, problem.options.low)
    stored = all_constants(problem)
    on_heavy = set(heavy)
    reached = set[int]()
    for node in paths.nodes():
        moved = [value for value in paths.moved(node) if value not in computed]
        if not moved:
            continue
        is_reached = False
        for sources in (computed, stored, on_heavy):
            if not sources.isdisjoint(node.inputs):
                is_reached = True
                sources.update(moved)
        if is_reached and not _raises_weight(graph, node, lowered):
            reached.update(moved)
    charged = (reached & computed) | ((reached & stored) - on_heavy)
    return Unrounded(computed | stored, charged)


def all_constants(problem: Problem) -> set[int]:
    """Return the constants of either precision, the low weights that the user asks for among them."""
    lowered = problem.graph.ask(low_constants, problem.options.low)
    return {*problem.ports.free, *lowered, *problem.overrides.low_weights}


def low_constants(graph: Graph, low: Format) -> frozenset[int]:
    """Return constants that are stored in the low type, and Casts to it from values that either type represents."""
    stored = {value for value, kind in enumerate(graph.types) if kind == low.tensor}
    if not stored:
        return frozenset()
    free = op_facts().free_sources["Cast"]
    casts = (node for node in graph.nodes_of({"Cast"}) if node.input(0) != ABSENT)
    results = {
        node.outputs[0] for node in casts if graph.types[node.inputs[0]] in free
    }
    results |= {
        node.outputs[0] for node in graph.nodes_of({"Constant"}) if node.outputs
    }
    results |= {
        value for value in stored if graph.values[value].origin is Origin.INITIALIZER
    }
    return frozenset(results & stored)


class _Paths:
    """Tells where paths of exact ops begin, and which values are on them.

    Attributes:
        makers: value -> the variable that decides for its producer.
    """

    def __init__(self, problem: Problem, pins: Pins) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.pins = pins
        ports = problem.ports
        roots = ports.roots_of_ports()
        self.makers = [roots[variable] for variable in ports.produced]

    def computed_high(self) -> set[int]:
        """Return the values that are float32 in any case, apart from those that either precision stores."""
        pins = self.pins.verdicts.items()
        high = {root for root, pin in pins if not pin.low} | {HIGH}
        computed = {value for value, root in enumerate(self.makers) if root in high}
        # Shields of an earlier conversion make up-casts of low values.
        shields = self.graph.at(self.graph.shields)
        shielded = {node.outputs[0] for node in shields}
        return computed - self.problem.ports.free - shielded

    def nodes(self) -> list[Node]:
        """Return the nodes of the paths, in execution order: exact ops, Casts and shields.

        A node that shares its precision with an exact op is one of them. Control flow is none, since its bodies return
        what it passes on.
        """
        graph = self.graph
        exact = self.pins.exact
        moving = graph.exact | graph.shields
        alike = {value for value, root in enumerate(self.makers) if root in exact}
        nodes = list[Node]()
        for node in graph.order:
            is_mover = node.key == "Cast" or node.index in moving
            if is_mover or not alike.isdisjoint(node.outputs):
                nodes.append(node)
        control_flow = op_facts().control_flow
        return [node for node in nodes if node.key not in control_flow]

    def moved(self, node: Node) -> list[int]:
        """Return the results of such a node that are on a path, or were before an earlier conversion lowered them."""
        results = [value for value in node.outputs if value != ABSENT]
        if node.index in self.graph.shields:
            return results
        return [value for value in results if self._is_moved(node, value)]

    def _is_moved(self, node: Node, value: int) -> bool:
        """Return whether an exact op makes a result, or a Cast to or from the low type."""
        if self.makers[value] in self.pins.exact:
            return True
        types = self.graph.types
        low = self.problem.options.low.tensor
        if node.key != "Cast":
            return node.index in self.graph.exact and types[value] == low
        source = node.input(0)
        return source != ABSENT and {types[value], types[source]} == {FLOAT, low}


def _raises_weight(graph: Graph, node: Node, lowered: AbstractSet[int]) -> bool:
    """Return whether a Cast raises a low weight, whose value is stored and not rounded on the way."""
    is_cast = node.key == "Cast" and node.input(0) in lowered
    return is_cast and graph.types[node.outputs[0]] == FLOAT
