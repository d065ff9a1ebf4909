"""The problem and its solution: every float's precision as one minimum cut.

Cost of an assignment: one Cast per (value, precision) that is needed, its launch plus the bytes it moves, times the
trips of the loops around it; minus what unpinned ops gain by being low.

See :mod:`onnxamp._decide.mincut` for the solver.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnxamp._decide.mincut import INFINITE, Network
from onnxamp._decide.pins import Pins
from onnxamp._decide.problem import Problem
from onnxamp._decide.terms import HIGH, LOW, NONE, Terms
from onnxamp._decide.verdicts import Reason, Verdict
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts

LAUNCH = 64
"""Fixed cost of a Cast in cost units: about 2.5 microseconds for launching a kernel."""
BYTES_PER_UNIT = 32_768
"""Memory traffic that costs one unit, at about 1 TB/s."""
DUPLICATE = 1
"""Cost of storing a constant in both precisions."""
DEFAULT_TRIPS = 10
"""Iterations of a loop whose trip count is no constant."""
_MAX_ELEMENTS = 1 << 32
_ACCURACY_CASTS = 64
"""Casts that the accuracy charge on one value outweighs: the same for all values, or Casts would move to where it is
small, and more of them might be needed there."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What measurement says of nodes, by index, in cost units: ``gains`` is the time that a node saves by being low,
    ``prices`` what its error is worth; ``pins`` are nodes that must stay float32, with the reason.
    """

    pins: Mapping[int, str] = field(default_factory=dict)
    gains: Mapping[int, int] = field(default_factory=dict)
    prices: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """The optimal assignment: ``low[x]`` per variable, its verdict, and the cost of the cut."""

    low: Sequence[bool]
    verdicts: Sequence[Verdict]
    cost: int

    def is_low(self, term: int) -> bool:
        """Whether the port with this term is low."""
        return term == LOW or (term >= 0 and self.low[term])


def decide(problem: Problem, pins: Pins, prices: Prices | None = None) -> Decision:
    """Solve for the cheapest assignment. Complexity: near linear in ports for real graphs."""
    return CutProblem(problem, pins).decide(prices)


def cast_cost(count: int, trips: int) -> int:
    """Cost of one Cast of ``count`` elements (4 bytes one way, 2 the other), ``trips`` times."""
    return (LAUNCH + 6 * min(count, _MAX_ELEMENTS) // BYTES_PER_UNIT) * trips


def _explain(variable: int, terms: Terms, pins: Pins, low: Sequence[bool]) -> Verdict:
    root = terms.root(variable)
    pin = pins.verdicts.get(root)
    if pin is not None:
        if pin.variable == variable or terms.variables[pin.variable].node == terms.variables[variable].node:
            return Verdict(variable, pin.low, pin.reason, pin.detail)
        return Verdict(variable, pin.low, Reason.TIE, f"shares its precision: {pin.reason.value}, {pin.detail}")
    if terms.variables[variable].param == "value":
        return Verdict(variable, low[variable], Reason.CONSTANT, "as its readers")
    reason = Reason.EXACT if root in pins.exact else Reason.CUT
    return Verdict(variable, low[variable], reason, "fewest Casts")


@dataclass(slots=True)
class CutProblem:
    """All of the question but the prices: it is put once, and solved for as many as one likes."""

    problem: Problem
    pins: Pins
    network: Network = field(default_factory=Network)
    trips: list[int] = field(default_factory=list)
    pure: set[int] = field(default_factory=set)
    deciding: dict[int, int] = field(default_factory=dict)

    graph: Graph = field(init=False)
    terms: Terms = field(init=False)

    def __post_init__(self) -> None:
        self.graph, self.terms = self.problem.graph, self.problem.terms
        self.network.add(len(self.terms.variables))
        self.trips = self.graph.ask(loop_trips)
        self.pure = self.purely_high()
        self.variables()
        for value, produced in enumerate(self.terms.produced):
            if produced != NONE:
                self.value(value)

    def decide(self, prices: Prices | None = None, *, explained: bool = True) -> Decision:
        """The cheapest assignment; without verdicts unless it shall be explained."""
        network = self.network.copy()
        if prices is not None:
            self.measured(network, prices)
        cut = network.solve()
        low = cut.low[self.terms.roots].tolist() if self.terms.roots else []
        variables = self.terms.variables if explained else ()
        verdicts = [_explain(variable.index, self.terms, self.pins, low) for variable in variables]
        return Decision(low, verdicts, cut.cost)

    def variables(self) -> None:
        """Pins, implications and gains."""
        for root, verdict in self.pins.verdicts.items():
            (self.network.charge_high if verdict.low else self.network.charge_low)(root, INFINITE)
        for p, q in self.pins.implies:
            self.network.arc(p, q, INFINITE)
        for node in self.graph.nodes:
            if node.key == "Cast":
                self.idle_cast(node)
            for variable in self.terms.of_node.get(node.index, {}).values():
                root = self.terms.root(variable)
                gains = root in self.pins.preferred and root not in self.pins.verdicts
                if gains and not self.is_high(self.problem.joined.get(node.index, ABSENT)):
                    self.network.charge_high(root, self.gain(node))

    def is_high(self, node: int) -> bool:
        """Whether the node is pinned to float32."""
        roots = (self.terms.root(variable) for variable in self.terms.of_node.get(node, {}).values())
        return any(not verdict.low for verdict in map(self.pins.verdicts.get, roots) if verdict is not None)

    def measured(self, network: Network, prices: Prices) -> None:
        """Charge each node's error where it is low, and the time that it loses where it is not."""
        network.charge_all(self.by_variable(prices.prices), self.by_variable(prices.gains))

    def by_variable(self, costs: Mapping[int, int]) -> dict[int, int]:
        """Costs of nodes as costs of the variables that decide for them."""
        found: dict[int, int] = {}
        for index, cost in costs.items():
            root = self.deciding.get(index)
            if root is None:
                root = self.deciding[index] = self.of_node(index)
            if root != NONE and cost:
                found[root] = found.get(root, 0) + cost
        return found

    def of_node(self, index: int) -> int:
        """The variable that decides for a node: that of its first output that has one, else of an input."""
        variables = self.terms.of_node.get(index, {})
        made = [self.terms.produced[value] for value in self.graph.nodes[index].outputs if value != ABSENT]
        return next((self.terms.root(term) for term in (*made, *variables.values()) if term >= 0), NONE)

    def idle_cast(self, node: Node) -> None:
        """A Cast of the user's from float32 to float32 becomes a real one if its sides differ."""
        sides = self.terms.of_node.get(node.index, {})
        if len(sides) == 2:
            cost = cast_cost(elements(self.graph.shapes[node.inputs[0]]), self.trips[node.scope])
            one, other = (self.terms.root(side) for side in sides.values())
            self.network.arc(one, other, cost)
            self.network.arc(other, one, cost)

    def gain(self, node: Node) -> int:
        """What a node saves by touching two bytes less per element; below the cost of the Cast pair it could need."""
        touched = [
            value for value in (*node.inputs, *node.outputs) if value != ABSENT and self.terms.produced[value] != NONE
        ]
        counts = [min(elements(self.graph.shapes[value]), _MAX_ELEMENTS) for value in touched]
        pair = 2 * (LAUNCH + 6 * max(counts, default=0) // BYTES_PER_UNIT) - 1
        return max(1, min(2 * sum(counts) // BYTES_PER_UNIT, pair)) * self.trips[node.scope]

    def value(self, value: int) -> None:
        """Charge the Casts that the value needs where its producer and its consumers differ."""
        producer = self.terms.root(self.terms.produced[value])
        readers = {self.terms.root(self.terms.consumed[node][port]) for node, port in self.graph.uses[value]}
        readers |= {
            self.terms.root(self.terms.returned[key]) for key in self.graph.results[value] if key in self.terms.returned
        }
        readers -= {NONE, producer}
        if not readers:
            return
        is_constant = value in self.terms.free and not self.is_cast(value)
        cost = (
            DUPLICATE
            if is_constant
            else cast_cost(elements(self.graph.shapes[value]), self.trips[self.graph.values[value].scope])
        )
        charge = cost * _ACCURACY_CASTS if value in self.pure else 0
        self.one_cast(producer, readers, cost + charge, up=True)
        self.one_cast(producer, readers, cost, up=False)

    def one_cast(self, producer: int, readers: set[int], cost: int, *, up: bool) -> None:
        """Pay once if the producer is low and any reader float32 (``up``), or the other way round."""
        there = HIGH if up else LOW
        if producer == there:
            return
        variables = sorted(term for term in readers if term >= 0)
        if there in readers:  # somebody needs the Cast in any case: the others share it
            if producer >= 0:
                (self.network.charge_low if up else self.network.charge_high)(producer, cost)
            return
        if not variables:
            return
        if len(variables) == 1:
            self.edge(producer, variables[0], cost, up=up)
            return
        helper = self.network.add()
        self.edge(producer, helper, cost, up=up)
        for variable in variables:
            self.edge(helper, variable, INFINITE, up=up)

    def edge(self, first: int, second: int, cost: int, *, up: bool) -> None:
        """Charge when ``first`` is low and ``second`` float32 (``up``), or the other way round."""
        if first in (LOW, HIGH):
            (self.network.charge_high if up else self.network.charge_low)(second, cost)
        elif up:
            self.network.arc(first, second, cost)
        else:
            self.network.arc(second, first, cost)

    def is_cast(self, value: int) -> bool:
        producer = self.graph.producer(value)
        return producer is not None and producer.key == "Cast"

    def purely_high(self) -> set[int]:
        """Outputs of exact ops that some float32 source reaches through exact ops alone.

        A low path through those ops would round what was pure float32 if a float32 op read it: their up-casts carry
        an accuracy charge. Sources are constants, graph inputs that keep their type, and producers pinned to float32.
        """
        pure: set[int] = set()
        for value, term in enumerate(self.terms.produced):
            root = self.terms.root(term)
            pin = self.pins.verdicts.get(root)
            if term == HIGH or value in self.terms.free or (pin is not None and not pin.low):
                pure.add(value)
        found: set[int] = set()
        for index in self.graph.order:
            node = self.graph.nodes[index]
            for value in node.outputs if node.key not in op_facts().control_flow else ():
                if (
                    value == ABSENT
                    or self.terms.root(self.terms.produced[value]) not in self.pins.exact
                    or value in pure
                ):
                    continue
                if any(source in pure for source in node.inputs):
                    pure.add(value)
                    found.add(value)
        return found


def loop_trips(graph: Graph) -> list[int]:
    """How often each scope runs per run of the model; capped, since nested guesses multiply."""
    trips = [1] * len(graph.scopes)
    for scope in graph.scopes[1:]:
        owner = graph.nodes[scope.owner]
        own = 1
        if owner.key in ("Loop", "Scan", "SequenceMap"):
            own = _constant_trips(graph, owner) or DEFAULT_TRIPS
        trips[scope.index] = min(trips[scope.parent] * max(own, 1), 1000)
    return trips


def _constant_trips(graph: Graph, node: Node) -> int | None:
    known = graph.constants.integers(node.input(0)) if node.key == "Loop" and node.input(0) != ABSENT else None
    return known[0] if known else None
