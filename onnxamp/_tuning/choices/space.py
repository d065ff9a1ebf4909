"""The search space: the nodes that can be low precision, what that saves, and which of them the samples run."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis, solve
from onnxamp._convert.estimate import LAUNCH_US, UNIT_US, Estimate
from onnxamp._decide.patterns.find import patterns_of
from onnxamp._decide.precision import Prices
from onnxamp._decide.problem import find_problem
from onnxamp._facts.ops import is_exact, op_facts
from onnxamp._facts.targets import LAUNCH
from onnxamp._graph.graph import Graph
from onnxamp._graph.work import Work
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes, copied
from onnxamp._options.options import Options
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.loop import input_failure
from onnxamp._runtime.piecewise.branches import settle
from onnxamp._runtime.sessions.values import check_inputs
from onnxamp._tuning.errors.lowered import LowNode, computes, low_node


class Fusion(NamedTuple):
    """Two nodes, by key and by index, that are one kernel in one precision.

    ``time`` is what the second one takes by itself, in microseconds.
    """

    keys: tuple[str, str]
    nodes: tuple[int, int]
    time: float


def find_fusions(
    graph: Graph,
    estimate: Estimate,
    high: Mapping[str, float],
    low: Mapping[str, float],
) -> tuple[Fusion, ...]:
    """Return the nodes that the kernel of a product also computes, each with the one before it and its estimated time.

    Nodes of decomposed normalizations are excluded, because they have kernels of their own, under any name.

    Args:
        graph: of the float32 model.
        estimate: of the same graph.
        high, low: seconds by node in float32 and with everything lowered.

    Complexity: linear in nodes.
    """
    matches = patterns_of(graph, "normalization", "softmax")
    normalizing = frozenset[int]().union(*(match.nodes for match in matches))
    # The places of products, and of the nodes that are fused into them.
    place = dict[int, int]()
    fusions: list[Fusion] = []
    for at, node in enumerate(graph.order):
        index = node.index
        key = node.first_output
        times = high.get(key, 1.0), low.get(key, 1.0)
        if node.key in op_facts().contractions:
            if all(times):  # else no profile shows it, as in the body of a loop
                place[index] = at
            continue
        if any(times) or index in normalizing or not estimate.launches(node):
            continue
        producers = map(graph.producer, node.reads)
        inside = [
            producer.index
            for producer in producers
            if producer and producer.index in place
        ]
        if inside:
            last = max(inside, key=place.__getitem__)
            place[index] = at
            time = LAUNCH_US + estimate.work(node).time(estimate.device, low=None)
            keys = (graph.nodes[last].first_output, key)
            fusions.append(Fusion(keys, (last, index), time))
    return tuple(fusions)


_CASTS_PER_NODE: Final = 16
"""The number of Casts that one more low-precision node is worth in addition to its time: tuning lowers all it can."""

_AMBIGUOUS: Final = (
    "another node has an output of the same name, so measurements are ambiguous"
)

UNSEEN: Final = "no sample runs it, so it stays in float32 as at level O2"

_EAGER: Final = 1 << 16
"""A gain in cost units that outweighs the Casts of any node."""


@record
class TunableNode(LowNode):
    """A node that can be low precision.

    ``high`` and ``low`` are its microseconds in float32 and in low precision; ``seen`` says whether any sample runs it.
    """

    label: str
    op: str
    work: Work
    high: float
    low: float
    seen: bool = True
    price: float | None = None
    """Measured time of Casts relative to the estimate. Without a measurement (None), all that can be lowered is."""

    @property
    def gain(self) -> int:
        """The savings of low precision, in cost units of the cut."""
        saved = int((self.high - self.low) / (UNIT_US * (self.price or 1)))
        most = _EAGER << 4
        more = 1
        if self.price is None:
            most = _EAGER
            more = _CASTS_PER_NODE * LAUNCH
        return max(0, min(saved, most)) + more


@record
class SearchSpace:
    """The nodes that can be low precision.

    ``all_low`` is the analysis with all of them lowered, ``tunable`` those that compute, in execution order, and
    ``pins`` the nodes that stay in float32 because they cannot be measured, with the reason.
    """

    all_low: Analysis
    tunable: tuple[TunableNode, ...]
    followers: tuple[TunableNode, ...]
    """Exact ops, which have no sensitivity of their own but round float32 values if the cut lowers them."""

    pins: Mapping[int, str]
    estimate: Estimate
    rest: float
    """Microseconds of all other nodes, and of the launches of all nodes."""
    scale: float = 1.0
    """Measured times of Casts, or else of nodes, as multiples of estimated ones."""
    fusions: tuple[Fusion, ...] = ()
    """Nodes that the engine fuses if they have the same precision."""

    @property
    def units(self) -> tuple[TunableNode, ...]:
        """All of these nodes."""
        return *self.tunable, *self.followers

    def _changed(
        self, of: Callable[[TunableNode], TunableNode], **more: Any
    ) -> "SearchSpace":
        """Return the space with all of its nodes changed, and with other fields."""
        tunable = map(of, self.tunable)
        followers = map(of, self.followers)
        return replace(
            self, tunable=tuple(tunable), followers=tuple(followers), **more
        )

    def known(
        self, live: AbstractSet[int], usual: Callable[[], AbstractSet[int]]
    ) -> "SearchSpace":
        """Return the space if samples run only the ``live`` nodes.

        Others cannot be measured. They follow level O2, where the nodes that ``usual`` returns are low precision.
        """
        unseen = [unit for unit in self.tunable if unit.node not in live]
        if not unseen:
            return self
        low = usual()
        pins = {unit.node: UNSEEN for unit in unseen if unit.node not in low}
        units = [
            replace(unit, seen=unit.node in live)
            for unit in self.tunable
            if unit.node not in pins
        ]
        return replace(self, tunable=tuple(units), pins={**self.pins, **pins})

    def retimed(
        self,
        seconds: Mapping[str, tuple[float, float | None]],
        price: float | None = None,
        fusions: Sequence[Fusion] = (),
    ) -> "SearchSpace":
        """Return the space with measured seconds by node, in float32 and, if known, in low precision.

        The estimates of all other nodes, of fused nodes and of Casts are scaled to match. If the ``price`` of Casts was
        also measured, nodes are lowered only for the time that they save.
        """
        units = self.units
        timed = [unit for unit in units if unit.key in seconds]
        measured = sum(seconds[unit.key][0] for unit in timed) * 1e6
        ratio = measured / (sum(unit.high for unit in timed) or 1)

        def of(unit: TunableNode) -> TunableNode:
            high, low = seconds.get(unit.key, (unit.high * ratio * 1e-6, None))
            if low is None:
                low = high * (unit.low / unit.high if unit.high else 1)
            return replace(unit, high=high * 1e6, low=low * 1e6, price=price)

        mine = {unit.key for unit in units}
        rest = sum(high * 1e6 for key, (high, _) in seconds.items() if key not in mine)
        scale = measured / (sum(unit.high + LAUNCH_US for unit in timed) or 1)
        own = (fusion for fusion in fusions if mine.issuperset(fusion.keys))
        apart = tuple(one._replace(time=one.time * scale) for one in own)
        scale = scale if price is None else price
        return self._changed(of, rest=rest, scale=scale, fusions=apart)

    def time(self, low: AbstractSet[str], casts: Sequence[int]) -> float:
        """Return the microseconds per run with these nodes in low precision, and these values cast."""
        saved = sum(unit.high - unit.low for unit in self.units if unit.key in low)
        parted = 0.0
        for fusion in self.fusions:
            first, second = fusion.keys
            if (first in low) != (second in low):
                parted += fusion.time
        cast = self.scale * sum(map(self.estimate.cast_time, casts))
        return self.float32 - saved + parted + cast

    @property
    def gains(self) -> int:
        """The savings of all low precision, in cost units of the cut."""
        return sum(unit.gain for unit in self.tunable)

    @property
    def float32(self) -> float:
        """Microseconds per run with everything in float32."""
        return self.rest + sum(unit.high for unit in self.units)

    def with_casts(self, factor: float) -> "SearchSpace":
        """Return the space in which Casts take several times as long."""
        scale = self.scale * factor
        return self._changed(lambda unit: replace(unit, price=scale), scale=scale)

    def parting(self) -> dict[tuple[int, int], int]:
        """Return the cost of fused nodes that differ in precision, in cost units of the cut."""
        return {
            fusion.nodes: max(1, round(fusion.time / (UNIT_US * self.scale)))
            for fusion in self.fusions
        }


def find_space(graph: Graph, options: Options, estimate: Estimate) -> SearchSpace:
    """Return the space of the nodes that kernels, schemas, overrides and hazards invisible to samples allow to lower.

    Args:
        estimate: of the same graph.

    Complexity: that of an analysis.
    """
    problem = find_problem(graph, options)
    nodes = graph.nodes
    times = Counter(node.first_output for node in nodes)
    able = [node for node in nodes if computes(node) or is_exact(node.proto)]
    # Measurements are stored by the name of the first output, which bodies of other graphs may reuse.
    ambiguous = {
        node.index: _AMBIGUOUS for node in able if times[node.first_output] > 1
    }
    gains = {node.index: _EAGER for node in able if computes(node)}
    eager = Prices(ambiguous, gains)
    all_low = solve(problem, prices=eager)
    tunable = list[TunableNode]()
    followers = list[TunableNode]()
    rest = 0.0
    device = estimate.device
    for node in graph.order:
        launches = estimate.launches(node)
        work = estimate.work(node)
        high = work.time(device, low=None)
        rest += launches * LAUNCH_US
        if (lowered := low_node(all_low, node)) is not None:
            unit = TunableNode(
                key=lowered.key,
                names=lowered.names,
                node=node.index,
                ports=lowered.ports,
                label=node.label,
                op=node.key,
                work=work,
                high=high,
                low=work.time(device, low=estimate.low),
            )
            (tunable if computes(node) else followers).append(unit)
        elif launches:
            rest += high
    return SearchSpace(
        all_low=all_low,
        tunable=tuple(tunable),
        followers=tuple(followers),
        pins=ambiguous,
        estimate=estimate,
        rest=rest,
    )


def prices_for(
    units: Sequence[TunableNode],
    prices: Sequence[float],
    pins: Mapping[int, str],
    kept: AbstractSet[int] = frozenset(),
    parting: Mapping[tuple[int, int], int] = MappingProxyType({}),
) -> Prices:
    """Return gains and error prices for the cut, in its cost units.

    ``kept`` are nodes that stay in float32 without a verdict of their own, as do those of an infinite price;
    ``parting`` comes from :meth:`SearchSpace.parting`.
    """
    # A price of several times all gains keeps its node in float32, and so would any larger one.
    ceiling = 4 * sum(unit.gain for unit in units)
    price_of = {unit.node: price for unit, price in zip(units, prices, strict=True)}
    high = {node for node, price in price_of.items() if price == inf}
    finite = {node: price for node, price in price_of.items() if price < inf}
    costs = {node: round(min(price, ceiling)) for node, price in finite.items()}
    return Prices(
        pins=pins,
        gains={unit.node: unit.gain for unit in units if unit.node not in pins},
        prices={node: cost for node, cost in costs.items() if cost > 0},
        high=high.union(pins, kept),
        fusions=parting,
    )


def exactly(
    space: SearchSpace, low: AbstractSet[str], pins: Mapping[int, str]
) -> Prices:
    """Return the prices at which the cut lowers exactly these nodes."""
    errors = [0.0 if unit.key in low else inf for unit in space.tunable]
    kept = {unit.node for unit in space.followers if unit.key not in low}
    prices = prices_for(space.tunable, errors, pins, kept)
    lowered = (unit.node for unit in space.tunable if unit.key in low)
    wanted = {node: _EAGER << 4 for node in lowered if node not in pins}
    return prices._replace(gains={**prices.gains, **wanted})


def find_live(view: Graph, samples: Samples, given: Model) -> list[frozenset[int]]:
    """Return the indices of the nodes that each sample runs. An If in a loop counts as if both branches were taken.

    Raises:
        ArgumentError: a sample does not fit the model, as it was ``given``. RuntimeFailure: a condition cannot be
            computed.

    Complexity: linear in nodes per sample if there are branches, plus the computation of their conditions.
    """
    model = view.model
    everything = frozenset(range(len(view.nodes)))
    if not any(node.op_type == "If" for node in model.graph.node):
        return [everything] * len(samples)
    tagged = copied(model)
    for node in Graph.of(tagged).nodes:
        # Unique names survive the inlining of branches.
        node.proto.name = str(node.index)
    live = []
    for number, sample in enumerate(samples):
        try:
            feeds = check_inputs(model, sample)
            shell = settle(tagged, view.folder, feeds, emulated=False).shell
        except RuntimeFailure as error:
            what = "The conditions of Ifs cannot be computed"
            text = input_failure(what, error, samples, number, given)
            raise RuntimeFailure(text) from error
        # Nodes that the inlining of branches added have no numbers.
        names = {node.name for node in all_nodes(shell.model.graph.node)}
        live.append(everything & {int(name) for name in names if name.isdecimal()})
    return live
