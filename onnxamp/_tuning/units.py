"""The nodes that tuning decides about: what is low of each when it is low, and what that gains."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

from onnxamp._convert.analysis import Analysis, decided
from onnxamp._decide.precision import LAUNCH, Prices, loop_trips
from onnxamp._decide.problem import find_problem
from onnxamp._dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._ops.facts import is_exact, op_facts
from onnxamp._options.options import Options
from onnxamp._runtime.switch import Ports, node_key
from onnxamp._target.roofline import Device, Work, work_of

_UNIT_US: Final = 0.0327
"""Microseconds of one cost unit of the cut: 32,768 bytes at 1 TB/s, see :mod:`onnxamp._decide.precision`."""

_WORTH: Final = 16
"""Casts that a low node is worth besides the time that it saves: as much low precision as accuracy allows is wanted."""

_TWINS: Final = "another node makes a value of the same name: nobody could tell what is measured of which"

UNSEEN: Final = "no sample runs it: float32, as at level O2"

_EAGER: Final = 1 << 16
"""A gain that outweighs all Casts."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A node that can be low. ``high`` and ``low`` are microseconds that it takes in either precision, and ``gain`` is
    what the cut pays, in cost units, for its being float32; ``names`` are those that its first output goes by, an If's
    result among them; ``seen`` tells whether any sample runs it.
    """

    key: str
    names: tuple[str, ...]
    node: int
    label: str
    op: str
    ports: Ports
    work: Work
    high: float
    low: float
    seen: bool = True

    gain: int = field(init=False)

    def __post_init__(self) -> None:
        saved = max(0, min(int((self.high - self.low) / _UNIT_US), _EAGER))
        object.__setattr__(self, "gain", _WORTH * LAUNCH + saved)


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that can be low, decided to be low; the units, in execution order; and nodes that must stay float32
    because they cannot be measured, with the reason.
    """

    all_low: Analysis
    units: tuple[Unit, ...]
    followers: tuple[Unit, ...]
    """Exact ops, which have no price of their own: they round float32 values where the cut lowers them all the same."""

    pins: Mapping[int, str]

    def known(self, live: AbstractSet[int], usual: Callable[[], AbstractSet[int]]) -> "Space":
        """The space of a model of which samples run these nodes alone. Of the others nothing can be measured: float32
        stays what is not among the nodes that are ``usual``-ly low.
        """
        unseen = [unit for unit in self.units if unit.node not in live]
        if not unseen:
            return self
        low = usual()
        pins = {unit.node: UNSEEN for unit in unseen if unit.node not in low}
        units = [replace(unit, seen=unit.node in live) for unit in self.units if unit.node not in pins]
        return replace(self, units=tuple(units), pins={**self.pins, **pins})

    def retimed(self, seconds: Mapping[str, tuple[float, float | None]]) -> "Space":
        """The space with measured times: seconds in float32 and, where they are known, low; by unit. Others keep
        their proportion to what was measured.
        """
        timed = [unit for unit in self.units if unit.key in seconds]
        scale = sum(seconds[unit.key][0] for unit in timed) * 1e6 / (sum(unit.high for unit in timed) or 1)

        def of(unit: Unit) -> Unit:
            high, low = seconds.get(unit.key, (unit.high * scale * 1e-6, None))
            low = high * (unit.low / unit.high if unit.high else 1) if low is None else low
            return replace(unit, high=high * 1e6, low=low * 1e6)

        return replace(self, units=tuple(map(of, self.units)))

    def ports(self) -> dict[str, Ports]:
        """What is low of each node that can be low."""
        return {unit.key: unit.ports for unit in (*self.units, *self.followers)}


def find_space(graph: Graph, options: Options, device: Device) -> Space:
    """Lower all that kernels, schemas, wishes and hazards that samples cannot show leave free.

    Complexity: that of an analysis.
    """
    problem, nodes = find_problem(graph, options), graph.nodes
    taken = Counter(node_key(node) for node in nodes)
    able = [node for node in nodes if _counts(node) or is_exact(node.proto)]
    twins = {node.index: _TWINS for node in able if taken[node_key(node)] > 1}
    eager = Prices(twins, {node.index: _EAGER for node in able if _counts(node)})
    found = decided(problem, prices=eager)
    trips = graph.ask(loop_trips)
    units, followers = [], []
    for index in found.graph.order:
        node = found.graph.nodes[index]
        ports = _low_ports(found, node)
        if ports.inputs or ports.outputs:
            work = work_of(node, found.graph.shapes, trips[node.scope])
            names = (node_key(node), *_results(found.graph, node))
            times = work.time(device, low=False), work.time(device, low=True)
            unit = Unit(node_key(node), names, index, node.label, node.key, ports, work, *times)
            if _counts(node):
                units.append(unit)
            elif is_exact(node.proto):
                followers.append(unit)
    return Space(found, tuple(units), tuple(followers), twins)


def low_nodes(found: Analysis) -> frozenset[int]:
    """Nodes of which something is low."""
    ports = ((node.index, _low_ports(found, node)) for node in found.graph.nodes)
    return frozenset(index for index, at in ports if at.inputs or at.outputs)


def _counts(node: Node) -> bool:
    """Whether the node computes: exact ops cost no accuracy and follow their neighbours."""
    facts = op_facts()
    moves = is_exact(node.proto) or node.key in facts.following or node.key in facts.control_flow
    return not moves and node.key not in ("Cast", "Constant") and node.signature is not None


def _results(view: View, node: Node) -> list[str]:
    """Names under which branches hand out the node's first output."""
    found: list[str] = []
    value = next((value for value in node.outputs if value != ABSENT), ABSENT)
    while value != ABSENT:
        keys = [(view.nodes[view.scopes[scope].owner], port) for scope, port in view.results[value] if scope]
        owner, port = next(((owner, port) for owner, port in keys if owner.key == "If"), (None, 0))
        value = owner.outputs[port] if owner is not None else ABSENT
        if value != ABSENT:
            found.append(view.values[value].name)
    return found


def _low_ports(found: Analysis, node: Node) -> Ports:
    decision, ports, graph = found.decision, found.ports, found.graph

    def is_low(value: int, variable: int) -> bool:
        return value != ABSENT and found.graph.types[value] == FLOAT and decision.is_low(variable)

    consumed = ports.consumed[node.index]
    inputs = tuple(port for port, value in enumerate(node.inputs) if is_low(value, consumed[port]))
    outputs = tuple(port for port, value in enumerate(node.outputs) if is_low(value, ports.produced[value]))
    return Ports(inputs, outputs if graph.nodes[node.index].outputs else ())


def prices_for(
    units: Sequence[Unit], prices: Sequence[float], pins: Mapping[int, str], spared: AbstractSet[int] = frozenset()
) -> Prices:
    """What the cut is told: gains, and prices in the same units. Nothing is worth more than all gains together.

    ``spared`` are nodes that stay float32 without a verdict of their own.
    """
    ceiling = 4 * sum(unit.gain for unit in units)
    costs = {unit.node: round(min(price, ceiling)) for unit, price in zip(units, prices, strict=True)}
    costs |= dict.fromkeys((*pins, *spared), ceiling)
    gains = {unit.node: unit.gain for unit in units if unit.node not in pins}
    return Prices(dict(pins), gains, {node: cost for node, cost in costs.items() if cost})
