"""Values that still are numbers of the model's inputs, moved, averaged, scaled, shifted or as logarithms.

Their range is unknown.

An input may be 20 with deviations of 0.01, or 3,000,000 cents, and only the model's user knows. Random samples show
neither.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import reduced_axes
from onnxamp._graph.numbers.index_paths import INTEGERS
from onnxamp._graph.numbers.offsets import keeps_offset
from onnxamp._graph.view import ABSENT, Node, Origin, carried_states, transfers


class RawInputs(NamedTuple):
    """The raw values of a graph.

    Attributes:
        channels: raw value -> the axis of the channels that one product made; None if there was none.
        wide: values of types that tell more numbers apart than low precision does, such as integers, that are inputs or
            sums, parts and the like of some -> the input.
        means: mean -> the raw value that it is the mean of, through data movement.
        sums: sum -> the raw value that it is the sum of. Divided by a number of terms, it is a mean.
        terms: product of a raw value and computed weights, such as a mask or a Softmax -> the raw value.
        shares: such weights that add up to 1.
        ratios: raw values that are quotients of two others, such as a price and the one of the day before.
        places: raw value -> the raw value that it is a function of, number by number; itself if it was moved.
        sources: raw value -> the raw values that control flow passes on as it, into a body or out of one.
    """

    channels: Mapping[int, int | None]
    wide: Mapping[int, frozenset[int]]
    means: Mapping[int, int]
    sums: Mapping[int, int]
    terms: Mapping[int, int]
    shares: AbstractSet[int]
    ratios: frozenset[int]
    places: Mapping[int, int]
    sources: Mapping[int, Sequence[int]]

    def is_read_by(self, node: Node) -> bool:
        """Return whether a node reads a raw value, a mean of one, or an input of a wide type."""
        read = node.inputs
        return not (
            self.channels.keys().isdisjoint(read)
            and self.means.keys().isdisjoint(read)
            and self.sums.keys().isdisjoint(read)
            and self.terms.keys().isdisjoint(read)
            and self.wide.keys().isdisjoint(read)
        )

    def are_plain(self, values: Sequence[int]) -> bool:
        """Return whether values are raw, and no product computes them."""
        return bool(values) and all(
            self.channels.get(value, ABSENT) is None for value in values
        )

    def are_levels(self, values: Sequence[int]) -> bool:
        """Return whether values are raw, or means of raw ones, and no product computes them."""
        return bool(values) and all(
            self.are_plain([self.means.get(value, value)]) for value in values
        )

    def is_quotient(self, node: Node) -> bool:
        """Return whether a node divides a raw value, or a mean of some, by another one."""
        if node.key != "Div" or ABSENT in node.inputs:
            return False
        dividend, divisor = node.inputs
        is_of_channels = divisor in self.means and self.are_plain([dividend])
        are_sums = self.sums.keys() >= {dividend, divisor}
        return is_of_channels or are_sums or self.are_levels(node.inputs)

    def is_comparison(self, node: Node) -> bool:
        """Return whether a node divides raw values by others, not by functions of themselves as in x / (1 + |x|)."""
        if not self.is_quotient(node):
            return False
        dividend, divisor = node.inputs
        places = self.places
        is_one_place = dividend in places and places[dividend] == places.get(divisor)
        return divisor in self.means or not is_one_place


def raw_inputs(graph: Graph) -> RawInputs:
    """Return the raw values of a graph.

    Complexity: linear, and as much again for each turn of a loop after which another one of its states is raw.
    """
    walk = _Walk(graph)
    for value in tuple(walk.channels):
        walk.pass_on(value)
    for _ in range(_TURNS):
        known = len(walk.states)
        walk.visit_nodes()
        if len(walk.states) == known:
            break
    return walk.found._replace(ratios=frozenset(walk.ratios))


def raw_readers(graph: Graph) -> frozenset[int]:
    """Return the nodes that read a raw value, a mean or a sum of one, or a wide one; hardly any node does."""
    raw = graph.ask(raw_inputs)
    read = {*raw.channels, *raw.means, *raw.sums, *raw.wide}
    return frozenset(node for value in read for node, _ in graph.uses[value])


_TURNS: Final = 4
"""Turns after which the states of a loop that change places are no longer followed."""


def _passed(graph: Graph) -> Mapping[int, Sequence[int]]:
    """Return value -> the values as which bodies get it or return it.

    The state of a loop counts as raw in its first turn. The loop returns the state that its body computed, and not the
    initial one, although a loop without turns does.
    """
    results = dict[int, list[int]]()
    owners = dict.fromkeys(scope.owner for scope in graph.scopes[1:])
    for node in graph.at(owners):
        idle = {(state.start, state.end) for state in carried_states(graph, node)}
        for source, result in dict.fromkeys(transfers(graph, node)):
            is_float = graph.types[result] in FLOAT_TENSORS
            if source != ABSENT and is_float and (source, result) not in idle:
                results.setdefault(source, []).append(result)
    return results


def raw_makers(
    graph: Graph, raw: RawInputs, node: Node, seen: set[int]
) -> Iterator[tuple[Node, int]]:
    """Yield the nodes that compute the raw values that a node reads, back to the inputs, but those in ``seen``.

    Beside each node is ABSENT; beside one with a body, the value that it passes on into the body or out of it.

    Nodes are added to ``seen``, so that all walks of a graph together take linear time, but for the values that enter
    and leave bodies.
    """
    stack = list(node.reads)
    passed = set[int]()
    while stack:
        value = stack.pop()
        maker = graph.producer(value)
        sources = raw.sources.get(value)
        if sources is not None:
            if value not in passed:
                passed.add(value)
                stack += sources
                yield from _passing(graph, value, sources)
            continue
        known = (raw.channels, raw.means, raw.sums, raw.terms, raw.shares)
        is_known = any(value in values for values in known)
        if maker is None or not is_known or maker.index in seen:
            continue
        seen.add(maker.index)
        yield maker, ABSENT
        stack += maker.reads


def _passing(
    graph: Graph, value: int, sources: Sequence[int]
) -> Iterator[tuple[Node, int]]:
    """Yield the node with a body that passes on a value, with the input or output as which it does."""
    maker = graph.producer(value)
    if maker is not None:
        yield maker, value
        return
    owner = graph.nodes[graph.scopes[graph.values[value].scope].owner]
    yield from ((owner, source) for source in sources if source in owner.inputs)


class _Walk:
    """Follows raw values from node to node."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.channels: dict[int, int | None] = dict.fromkeys(graph.given_floats)
        wide = INTEGERS | {"tensor(double)"}
        self.wide = {
            value: frozenset({value})
            for value in graph.scopes[0].inputs
            if graph.types[value] in wide
        }
        self.means = dict[int, int]()
        self.sums = dict[int, int]()
        self.terms = dict[int, int]()
        self.shares = set[int]()
        self.averaging = set[int]()
        """Terms whose weights are shares."""
        self.ratios = set[int]()
        self.places = {value: value for value in self.channels}
        self.sources = dict[int, list[int]]()
        self.passed = _passed(graph)
        self.states = set[int]()
        """Inputs of bodies that a body passes a raw value on to: from one turn of a loop to the next."""
        self.found = RawInputs(
            channels=self.channels,
            wide=self.wide,
            means=self.means,
            sums=self.sums,
            terms=self.terms,
            shares=self.shares,
            ratios=frozenset(),
            places=self.places,
            sources=self.sources,
        )

    def visit_nodes(self) -> None:
        """Follow raw values through all nodes, in the order in which they run."""
        graph = self.graph
        for node in graph.order:
            # A model that was converted before casts its inputs to low precision, and may cast them back.
            is_float = graph.types[node.output(0)] in FLOAT_TENSORS
            # Hardly any node reads raw values, and what it does to others is nothing to the walk.
            if is_float and self.found.is_read_by(node):
                self.follow(node)
            elif self.wide and not self.wide.keys().isdisjoint(node.inputs):
                self._follow_integers(node)

    def _follow_integers(self, node: Node) -> None:
        """Note the outputs of a node that moves, adds or scales integers of inputs, as the time since an event."""
        facts = op_facts()
        is_kept = node.key in facts.moves_data | facts.linear or self._passes(node)
        if not is_kept:
            return
        sources = [self.wide[value] for value in node.inputs if value in self.wide]
        moved = {
            value: frozenset().union(*sources)
            for value in node.writes
            if self.graph.types[value] in INTEGERS
        }
        self.wide.update(moved)

    def follow(self, node: Node) -> None:
        """Note the outputs of a node if they are raw, or a mean of raw values."""
        graph = self.graph
        given = [value for value in node.reads if graph.types[value] in FLOAT_TENSORS]
        computed = [value for value in given if not graph.constants.is_constant(value)]
        if node.key in op_facts().interpolates:
            computed = computed[:1]  # the others are places
        if node.key == "Cast" and node.reads[0] in self.wide:
            self.channels[node.outputs[0]] = None
        is_moved = node.key in op_facts().moves_data
        if is_moved and self.found.are_plain(computed):
            self.channels.update(dict.fromkeys(node.writes))
            self._follow_ratio(node, computed)
        elif self.found.is_quotient(node):
            self.channels[node.outputs[0]] = None
            self.ratios.add(node.outputs[0])
        elif len(computed) == 1:
            if computed[0] in self.means:
                self._follow_mean(node, computed[0])
            if computed[0] in self.channels:
                self._follow_raw(node, computed[0])
        if len(computed) == 2:
            self._follow_weighted(node, computed)
        elif not self.terms.keys().isdisjoint(computed):
            self._follow_terms(node, computed[0])
        if not self.sums.keys().isdisjoint(computed):
            self._follow_sum(node, computed)
        self._follow_place(node, computed)
        for value in node.writes if self.passed else ():
            self.pass_on(value)

    def pass_on(self, value: int) -> None:
        """Note the values as which control flow passes on a raw value, in whose place they are.

        What a product made channels of may have other axes in a body.
        """
        stack = [value]
        while stack:
            value = stack.pop()
            if not self.found.are_plain([value]):
                continue
            for result in self.passed.get(value, ()):
                is_new = result not in self.channels
                sources = self.sources.setdefault(result, [])
                if value not in sources:
                    sources.append(value)
                self.channels[result] = None
                self.places.setdefault(result, self.places.get(value, value))
                if value in self.ratios:
                    self.ratios.add(result)
                if is_new:
                    stack.append(result)
                    if self._is_next_turn(value, result):
                        self.states.add(result)

    def _is_next_turn(self, value: int, state: int) -> bool:
        """Return whether a body passes a value on to its own next turn, so that nodes before it read it."""
        values = self.graph.values
        is_within = values[value].scope == values[state].scope
        return is_within and values[state].origin is Origin.INPUT

    def _follow_place(self, node: Node, computed: Sequence[int]) -> None:
        """Note whose functions the raw outputs of a node are."""
        stays = self._passes(node) or node.key in op_facts().elementwise
        is_function = stays and len(computed) == 1
        for value in node.writes:
            if value in self.channels:
                self.places[value] = (
                    self.places.get(computed[0], value) if is_function else value
                )

    def _follow_ratio(self, node: Node, values: Sequence[int]) -> None:
        """Note the outputs of a node that moves or selects ratios."""
        if not self.ratios.isdisjoint(values):
            self.ratios.update(node.writes)

    def _follow_mean(self, node: Node, mean: int) -> None:
        """Note the outputs of a node that keeps a mean, or guards it as in mean(|x|) + 1e-6."""
        is_guard = node.key in op_facts().linear
        if self._passes(node) or node.index in self.graph.exact or is_guard:
            self.means.update(dict.fromkeys(node.writes, self.means[mean]))

    def _follow_weighted(self, node: Node, computed: Sequence[int]) -> None:
        """Note the outputs of a node that multiplies a raw value by computed weights, or adds it up by shares of 1."""
        facts = op_facts()
        plain = [value for value in computed if self.found.are_plain([value])]
        if not plain or computed[0] == computed[1]:
            return
        weights = computed[0] if plain[0] == computed[1] else computed[1]
        if node.key in facts.commutative - facts.additive:
            self.terms.update(dict.fromkeys(node.writes, plain[0]))
            self.averaging.update(node.writes if self._are_shares(weights) else ())
        elif node.key in facts.products and self._are_shares(weights):
            self.means.update(dict.fromkeys(node.writes, plain[0]))

    def _are_shares(self, value: int) -> bool:
        """Return whether the numbers of a value add up to 1, and note it then: rounded, they do not."""
        source = self.graph.passed_on(value)
        maker = self.graph.producer(source)
        if maker is None or maker.key not in op_facts().normalizing:
            return False
        self.shares.update((value, source))
        return True

    def _follow_terms(self, node: Node, terms: int) -> None:
        """Note the outputs of a node that moves weighted raw values, or adds them up."""
        if node.key in op_facts().reductions:
            noted = self.means if terms in self.averaging else self.sums
            noted.update(dict.fromkeys(node.writes, self.terms[terms]))
        elif self._passes(node):
            self.terms.update(dict.fromkeys(node.writes, self.terms[terms]))

    def _follow_sum(self, node: Node, computed: Sequence[int]) -> None:
        """Note the outputs of a node that moves or adds sums, or divides one by a number, which may be computed."""
        facts = op_facts()
        first = computed[0]
        are_sums = self.sums.keys() >= set(computed)
        is_kept = self._passes(node) or node.key in facts.moves_data | facts.additive
        if are_sums and is_kept:
            self.sums.update(dict.fromkeys(node.writes, self.sums[first]))
        elif node.key in facts.linear - facts.additive and first in self.sums:
            self.means.update(dict.fromkeys(node.writes, self.sums[first]))

    def _follow_raw(self, node: Node, value: int) -> None:
        """Note the outputs of a node that computes something of one raw value."""
        facts = op_facts()
        channel = self.channels[value]
        is_first = node.input(0) == value
        is_kept = self._passes(node) or self._moves(node, channel)
        if node.key in facts.means and is_first and self._is_apart(node, channel):
            self.means.update(dict.fromkeys(node.writes, value))
        if node.key in facts.running_sums | (facts.reductions - facts.means):
            self.sums.update(dict.fromkeys(node.writes, value))
        if self._averages(node, value):
            self.channels.update(dict.fromkeys(node.writes, channel))
        elif node.key in facts.products:
            sliced = _channels_of(node)
            if is_first and channel is None and sliced is not None:
                self.channels[node.outputs[0]] = sliced
        elif is_kept or node.key in facts.linear:
            self.channels.update(dict.fromkeys(node.writes, channel))
            self._follow_ratio(node, [value] if is_kept else [])
        elif (
            node.key in facts.curves | facts.selections
            and is_first
            and channel is None
        ):
            self.channels[node.outputs[0]] = None

    def _averages(self, node: Node, value: int) -> bool:
        """Return whether a node makes averages of neighboring numbers, which are as large and differ as little."""
        facts = op_facts()
        is_pool = node.key in facts.means - facts.reductions
        if is_pool or node.key in facts.interpolates:
            return node.input(0) == value
        is_plain = self.channels[value] is None
        return is_plain and keeps_offset(self.graph, node, value)

    def _passes(self, node: Node) -> bool:
        """Return whether the node changes no number, or only the type."""
        return node.index in self.graph.passing or node.key == "Cast"

    def _moves(self, node: Node, channel: int | None) -> bool:
        """Return whether the node is exact, and leaves channels where they are."""
        may_move = channel is None or node.key not in op_facts().moves_data
        return node.index in self.graph.exact and may_move

    def _is_apart(self, node: Node, channel: int | None) -> bool:
        """Return whether a mean is taken of each channel by itself: those of a product differ in their offsets."""
        if channel is None or node.key not in op_facts().reduces_axes:
            return True
        shape = self.graph.shapes[node.inputs[0]]
        rank = len(shape or ())
        axes = reduced_axes(self.graph, node, rank) if rank else None
        return axes is not None and channel % rank not in axes


def _channels_of(product: Node) -> int | None:
    """Return the axis of the channels that a product makes; None for recurrent ops."""
    form = op_facts().products[product.key][0].form
    return _CHANNELS.get(form)


_CHANNELS: Final = {"matrix": -1, "windows": 1, "spread": 1}
"""Form of a product -> the axis of the channels in its output."""
