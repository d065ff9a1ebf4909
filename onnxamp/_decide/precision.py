"""Decisions: the precision problem solved as one minimum cut, and why each variable got its precision.

An assignment costs one Cast for each value that is needed in a precision it is not produced in: a kernel launch plus
the bytes moved, times the iterations of the loops around it. Weights cost their memory, in each precision in which they
are stored. Unpinned ops that gain by low precision cost this gain if they stay in float32.

See :mod:`onnxamp._decide.mincut` for the solver.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from onnxamp._decide.mincut import INFINITE, Network, Question
from onnxamp._decide.pins.find import Pins
from onnxamp._decide.problem import Problem
from onnxamp._decide.unrounded import all_constants, find_unrounded
from onnxamp._decide.variables.ports import HIGH, LOW, NONE
from onnxamp._decide.verdicts import Reason, Verdict, reason_text
from onnxamp._facts.dtypes import FLOAT, FLOAT32_BYTES, element_name, is_lossless
from onnxamp._facts.ops import op_facts
from onnxamp._facts.targets import LAUNCH, MAX_ELEMENTS, target_of
from onnxamp._graph.determined import loop_trips
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.values import Level

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Prices(NamedTuple):
    """Measurements of nodes, by node index.

    Attributes:
        pins: why a node must stay in float32.
        gains: time that a node saves in low precision, in cost units.
        prices: price of the error that a node makes in low precision, in cost units.
        high: nodes that stay in float32 unless pinned low. Not even the bytes of their weights outweigh this.
        fusions: pairs of nodes -> the cost, in addition to Casts, if their precisions differ.
    """

    pins: Mapping[int, str] = MappingProxyType({})
    gains: Mapping[int, int] = MappingProxyType({})
    prices: Mapping[int, int] = MappingProxyType({})
    high: AbstractSet[int] = frozenset()
    fusions: Mapping[tuple[int, int], int] = MappingProxyType({})


class Decision(NamedTuple):
    """The optimal assignment: whether each variable is low, and the cost of the cut."""

    low: Sequence[bool]
    cost: int

    def is_low(self, variable: Question) -> bool:
        """Return whether a port with this variable is low precision."""
        return variable == LOW or (variable >= 0 and self.low[variable])

    def of_ports(self) -> Sequence[bool]:
        """Return :meth:`is_low` by variable, for loops over all ports: HIGH, LOW and NONE count from the end."""
        # The constants are -1, -2 and -3, which index a sequence from its end.
        ends = {HIGH: False, LOW: True, NONE: False}
        return [*self.low, *(ends[variable] for variable in sorted(ends))]


def verdict_on(
    problem: Problem, pins: Pins, decision: Decision, variable: Question
) -> Verdict:
    """Return the verdict for one variable."""
    variables = problem.ports.variables
    low = decision.low[variable]
    own = variables[variable]
    root = problem.ports.root(variable)
    pin = pins.verdicts.get(root)
    if pin is not None:
        if pin.variable == variable or variables[pin.variable].node == own.node:
            return replace(pin, variable=variable)
        why = reason_text(pin.reason.value, pin.detail, low=pin.low)
        why = f"shares its type with another node: {why}"
        return Verdict(variable, pin.low, Reason.TIE, why)
    if own.param == "value":
        return Verdict(variable, low, Reason.CONSTANT, "follows its readers")
    if root in pins.worthy:
        kind = pins.worthy[root]
        if low:
            return Verdict(variable, low, Reason.WHITE, kind.why_low)
        return Verdict(variable, low, kind, kind.why_high)
    reason = Reason.EXACT if root in pins.exact else Reason.CUT
    return Verdict(variable, low, reason, "fewest Casts")


DUPLICATE: Final = 1
"""Cost of storing a constant twice, once in each precision, in addition to its bytes."""
_FEWER_BYTES: Final = 2 * DUPLICATE
"""Cost of dequantizing to float32, which writes more bytes. It outweighs a scale that is stored twice, and no Cast."""
_ACCURACY_CASTS: Final = 64
"""Casts that one accuracy charge outweighs. The factor is the same for all values, or else Casts would move to places
with a small charge, where more of them might be needed."""

_WORTH: Final = 1.5
"""Pairs of Casts that a white-listed product is worth in low precision, if sums have a price. Alone between float32
nodes it is low precision up to half of the bearable squared error, and among others up to all of it."""


class CutProblem:
    """The network of a problem without prices: built once, solved once per set of prices.

    Nodes charge their variables for one precision, see :meth:`charge_nodes`. Values charge their producer and readers
    for differing, see :meth:`charge_value`.

    Attributes:
        roots: as ``ports.roots``, but constants that follow their only reader have its root. The last entries are those
            of NONE, LOW and HIGH, so that every port has one.
        tied: roots that decide for more than one variable.
        sizes: the number of elements of each value.
        unrounded: values that low precision would be the first to round.
        twice: variables of nodes that may dequantize twice -> those of their readers, which may disagree.
    """

    def __init__(self, problem: Problem, pins: Pins) -> None:
        self.problem = problem
        self.pins = pins
        self.graph = problem.graph
        self.ports = problem.ports
        self.low = problem.options.low
        self.costs = target_of(problem.options.target).costs
        self.roots = self.ports.roots_of_ports()
        variables = self.ports.variables
        pairs = zip(self.ports.roots, variables, strict=True)
        self.tied = {root for root, one in pairs if root != one.index}
        self.sizes = _sizes(self.graph)
        self.trips = self.graph.ask(loop_trips)
        self.twice = dict[Question, AbstractSet[Question]]()
        self.network = Network()
        self.network.add(len(self.ports.variables))
        # Large models repeat few sizes and ask for the same nodes with every set of prices.
        self.known_casts = dict[tuple[int, int], int]()
        self.known_gains = dict[tuple[int, int], int]()
        self.known_deciders = dict[int, Question]()
        self.unrounded = find_unrounded(problem, pins, self.heavy())
        self.add_pins()
        self.charge_nodes()
        for value, produced in enumerate(self.ports.produced):
            if produced != NONE:
                self.charge_value(value)

    def decide(self, prices: Prices | None = None) -> Decision:
        """Return the cheapest assignment. Complexity: near linear in ports for real graphs."""
        network = self.network.copy()
        if prices is not None:
            self.charge_prices(network, prices)
        cut = network.solve()
        settled = self.dequantized_once(cut.low, prices)
        roots = self.roots[: len(self.ports.roots)]
        low = settled[roots].tolist() if roots else []
        return Decision(low, cut.cost)

    # -- nodes -------------------------------------------------------------------------------------------------

    def add_pins(self) -> None:
        """Add the pins and their implications to the network."""
        for root, verdict in self.pins.verdicts.items():
            if verdict.low:
                self.network.pin_low(root)
            else:
                self.network.pin_high(root)
        for p, q in self.pins.implies:
            self.network.imply(p, q)

    def charge_nodes(self) -> None:
        """Charge nodes in float32 the gain or the worth of low precision that they miss, and Casts what they round."""
        for node in self.graph.nodes_of({"Cast"}):
            self.charge_idle_cast(node)
            self.charge_widening_cast(node)
        for index in self.problem.twofold:
            for root in self.ports.deciding(index):
                self.network.charge_high(root, _FEWER_BYTES)
        gaining = self.pins.preferred - self.pins.verdicts.keys()
        worthy = self.pins.worthy.keys() - self.pins.verdicts.keys()
        joined = self.problem.joined
        for index in self.ports.of_node:
            for root in self.ports.deciding(index):
                if root in worthy:
                    self.charge_product(index, root)
                elif root in gaining and not self.is_high(joined.get(index, ABSENT)):
                    self.network.charge_high(root, self.gain(self.graph.nodes[index]))

    def charge_product(self, index: int, root: Question) -> None:
        """Charge a white-listed product its worth if it is float32, and the error of its float16 sum otherwise.

        The error costs up to a pair of Casts, as much as the hazard that applies above the limit.
        """
        node = self.graph.nodes[index]
        ends = {node.input(0), node.outputs[0]} - {ABSENT}
        largest = min(MAX_ELEMENTS, max(self.sizes[value] for value in ends))
        pair = 2 * self.costs.cast(largest, self.trips[node.scope], self.low)
        self.network.charge_high(root, int(pair * _WORTH))
        _, share = self.problem.shares.get(index, (None, 0.0))
        self.network.charge_low(root, int(pair * share))

    def is_high(self, node: int) -> bool:
        """Return whether the node is pinned to float32."""
        if node == ABSENT:
            return False
        pins = map(self.pins.verdicts.get, self.ports.deciding(node))
        return any(pin is not None and not pin.low for pin in pins)

    def gain(self, node: Node) -> int:
        """Return the time that a node saves by moving fewer bytes per element.

        It is always less than the pair of Casts that the node might need, so that a gain alone never adds these. Views
        share memory and move nothing, so their gain only settles ties.
        """
        trips = self.trips[node.scope]
        if node.key in op_facts().views:
            return trips
        produced, sizes = self.ports.produced, self.sizes
        counts = [
            min(sizes[value], MAX_ELEMENTS)
            for value in (*node.inputs, *node.outputs)
            if produced[value] != NONE
        ]
        key = max(counts, default=0), sum(counts)
        gain = self.known_gains.get(key)
        if gain is None:
            largest, total = key
            less_than_casts = 2 * self.costs.cast(largest, 1, self.low) - 1
            saved = (FLOAT32_BYTES - self.low.bytes) * total
            gain = max(1, min(self.costs.traffic(saved), less_than_casts))
            self.known_gains[key] = gain
        return gain * trips

    def charge_idle_cast(self, node: Node) -> None:
        """Charge an original Cast from float32 to float32 if its sides differ: it becomes the Cast between them."""
        sides = self.ports.of_node.get(node.index, {})
        if len(sides) == 2:
            # One unit less than a new Cast, so that the Cast of the model is used where both cost the same.
            cost = self.cast_cost(node.inputs[0], node.scope) - 1
            one, other = map(self.ports.root, sides.values())
            self.network.differ(one, other, cost)

    def charge_widening_cast(self, node: Node) -> None:
        """Charge an original Cast from float32 to double for reading a float32 value in low precision."""
        source = node.input(0)
        kind = self.graph.types[node.output(0)]
        if source not in self.unrounded.values or kind in (None, FLOAT):
            return
        variable = self.roots[self.ports.consumed[node.index][0]]
        is_wider = is_lossless(element_name(FLOAT), element_name(kind))
        if variable >= 0 and is_wider and self.problem.options.level != Level.O3:
            cost = self.cast_cost(source, node.scope) * _ACCURACY_CASTS
            self.network.charge_low(variable, cost)

    # -- values ------------------------------------------------------------------------------------------------

    def charge_value(self, value: int) -> None:
        """Charge what a value costs if its producer and its readers differ: bytes, a second node, or Casts."""
        producer = self.roots[self.ports.produced[value]]
        readers = set(map(self.roots.__getitem__, self.ports.read[value]))
        readers.discard(producer)
        if not readers:
            return
        if value in self.ports.free and self.is_stored(value):
            self.charge_weight(producer, readers, self.bytes_saved(value))
        elif self.is_made_twice(value, producer, readers):
            self.twice[producer] = readers
            self.charge_casts(producer, readers, up=DUPLICATE, down=DUPLICATE)
        else:
            cost = self.cast_cost(value, self.graph.values[value].scope)
            is_charged = value in self.unrounded.charged
            charge = cost * _ACCURACY_CASTS if is_charged else 0
            self.charge_casts(producer, readers, up=cost + charge, down=cost)

    def charge_casts(
        self,
        producer: Question,
        readers: AbstractSet[Question],
        *,
        up: int,
        down: int,
    ) -> None:
        """Charge ``up`` if the producer is low and any reader float32, and ``down`` if it is the other way round."""
        if producer != HIGH:
            self.network.arc(producer, self.any_high(readers), up)
        if producer != LOW:
            self.network.arc(self.any_low(readers), producer, down)

    def any_high(self, readers: AbstractSet[Question]) -> Question:
        """Return a variable that is float32 if any of these is, so that they share the cost of one Cast."""
        if HIGH in readers:
            return HIGH
        undecided = readers - {LOW}
        if len(undecided) < 2:
            return next(iter(undecided), LOW)
        helper = self.network.add()
        for variable in undecided:
            self.network.imply(helper, variable)
        return helper

    def any_low(self, readers: AbstractSet[Question]) -> Question:
        """Return a variable that is low if any of these is, as :meth:`any_high`."""
        if LOW in readers:
            return LOW
        undecided = readers - {HIGH}
        if len(undecided) < 2:
            return next(iter(undecided), HIGH)
        helper = self.network.add()
        for variable in undecided:
            self.network.imply(variable, helper)
        return helper

    def cast_cost(self, value: int, scope: int) -> int:
        """Return the cost of a Cast of a value in a scope."""
        key = self.sizes[value], self.trips[scope]
        cost = self.known_casts.get(key)
        if cost is None:
            cost = self.known_casts[key] = self.costs.cast(*key, self.low)
        return cost

    # -- weights -----------------------------------------------------------------------------------------------

    def charge_weight(
        self, producer: Question, readers: set[Question], saved: int
    ) -> None:
        """Charge the bytes that a constant takes beyond those of low precision, in float32 or in both."""
        is_bound = producer in self.tied or producer in self.pins.verdicts
        only = next(iter(readers)) if len(readers) == 1 else NONE
        if _is_variable(only) and _is_variable(producer) and not is_bound:
            # Nothing else asks for it, so it is never stored twice.
            self.roots[producer] = only
            self.network.charge_high(only, saved)
            return
        self.network.charge_high(producer, saved)
        # A second copy takes its own bytes: in low precision as many as are saved there, in float32 twice as many.
        up = DUPLICATE + 2 * saved
        self.charge_casts(producer, readers, up=up, down=DUPLICATE + saved)

    def bytes_saved(self, value: int) -> int:
        """Return the cost of the bytes that a constant saves in low precision; 0 if it does not fit that."""
        if value in self.problem.unfit:
            return 0
        saved = FLOAT32_BYTES - self.low.bytes
        return self.costs.stored(saved * self.sizes[value])

    def heavy(self) -> set[int]:
        """Return the constants that fit low precision and save more there than the launch of a Cast."""
        stored = filter(self.is_stored, all_constants(self.problem))
        return {value for value in stored if self.bytes_saved(value) > LAUNCH}

    def is_stored(self, value: int) -> bool:
        """Return whether the value is an initializer or a Constant, of either precision."""
        producer = self.graph.producer(value)
        return producer is None or producer.key != "Cast"

    # -- nodes that may dequantize twice -----------------------------------------------------------------------

    def is_made_twice(
        self, value: int, producer: Question, readers: AbstractSet[Question]
    ) -> bool:
        """Return whether a value is dequantized again, at no cost, for readers that need it in the other precision.

        ONNX Runtime gives each of several readers a node of its own that dequantizes (EnsureUniqueDQForNodeUnit, seen
        in 1.31.1). If all readers turn out to agree, the node follows them, so nothing else may depend on it.
        """
        is_twofold = self.graph.values[value].producer in self.problem.twofold
        if not is_twofold or len(readers) < 2 or producer < 0:
            return False
        is_chained = not self.chained.isdisjoint({producer, *readers})
        return producer not in self.bound and not is_chained

    def dequantized_once(
        self, low: "NDArray[np.bool_]", prices: Prices | None
    ) -> "NDArray[np.bool_]":
        """Return an assignment whose nodes dequantize once where all readers agree, in their precision."""
        settled = low.copy()
        high = (
            set[Question]() if prices is None else set(map(self.decider, prices.high))
        )
        for variable, readers in self.twice.items():
            needed = {
                reader == LOW or (reader >= 0 and bool(low[reader]))
                for reader in readers
            }
            if len(needed) == 1 and variable not in high:
                settled[variable] = needed.pop()
        return settled

    @cached_property
    def bound(self) -> AbstractSet[Question]:
        """Return the variables that decide for others, are pinned, or occur in an implication."""
        implied = set(chain.from_iterable(self.pins.implies))
        return implied | self.tied | self.pins.verdicts.keys()

    @cached_property
    def chained(self) -> AbstractSet[Question]:
        """Return the variables of nodes that dequantize with a dequantized scale, and of those that make the scale."""
        dequantize = op_facts().dequantize
        variables = set[Question]()
        for node in self.graph.nodes_of(dequantize):
            maker = self.graph.producer(node.input(1), *dequantize)
            if maker is not None:
                variables.update(self.ports.deciding(node.index))
                variables.update(self.ports.deciding(maker.index))
        return variables

    # -- prices ------------------------------------------------------------------------------------------------

    def charge_prices(self, network: Network, prices: Prices) -> None:
        """Charge each node its error in low precision, and its gain in float32, and what parts fused nodes."""
        for root, cost in self.by_decider(prices.prices).items():
            network.charge_low(root, cost)
        for root, cost in self.by_decider(prices.gains).items():
            network.charge_high(root, cost)
        for pair, cost in prices.fusions.items():
            one, other = map(self.decider, pair)
            if min(one, other) >= 0:
                network.differ(one, other, cost)
        for root in set(map(self.decider, prices.high)) - self.bound_low:
            network.charge_low(root, INFINITE)

    @cached_property
    def bound_low(self) -> set[Question]:
        """Return variables that no price can keep in float32: those pinned low, those that they imply, and NONE.

        Complexity: linear in implications.
        """
        implied: dict[Question, list[Question]] = {}
        for p, q in self.pins.implies:
            implied.setdefault(p, []).append(q)
        bound = {NONE}
        waiting = [root for root, verdict in self.pins.verdicts.items() if verdict.low]
        while waiting:
            if (root := waiting.pop()) not in bound:
                bound.add(root)
                waiting += implied.get(root, ())
        return bound

    def by_decider(self, costs: Mapping[int, int]) -> dict[Question, int]:
        """Return the costs of nodes, summed over the variables that decide for them."""
        totals: dict[Question, int] = defaultdict(int)
        for index, cost in costs.items():
            if cost and (root := self.decider(index)) != NONE:
                totals[root] += cost
        return totals

    def decider(self, index: int) -> Question:
        """Return the variable that decides for a node: of its first output that has one, otherwise of an input."""
        if index not in self.known_deciders:
            outputs = self.graph.nodes[index].outputs
            produced = self.ports.produced
            variables = [produced[value] for value in outputs]
            variables += self.ports.of(index)
            roots = (self.roots[variable] for variable in variables if variable >= 0)
            self.known_deciders[index] = next(roots, NONE)
        return self.known_deciders[index]


def _is_variable(variable: Question) -> bool:
    """Return whether a port has a variable: NONE, LOW and HIGH, which mark the others, are negative."""
    return variable >= 0


def _sizes(graph: Graph) -> Sequence[int]:
    """Return the number of elements of each value. Large models repeat few shapes, and each is counted once."""
    counts = {shape: elements(shape) for shape in set(graph.shapes)}
    return [*map(counts.__getitem__, graph.shapes)]
