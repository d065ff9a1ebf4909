"""The cost of an assignment by its definition, told apart from the network that the engine solves."""

from collections.abc import Sequence

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.precision import BYTES_PER_UNIT, DUPLICATE, cast_cost, loop_trips
from onnxamp._decide.terms import HIGH, LOW, NONE
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts


def price(analysis: Analysis, low: Sequence[bool]) -> int:
    """One Cast per value and precision that is needed, plus the gains that are missed. ``low`` is by variable.

    As in the cut, Casts that no assignment can avoid are left out.
    """
    view, terms = analysis.graph, analysis.terms
    trips = loop_trips(view)
    pure = purely_high(analysis)

    def is_low(term: int) -> bool:
        return term == LOW or (term >= 0 and low[terms.root(term)])

    total = 0
    for value, term in enumerate(terms.produced):
        readers = {terms.consumed[n][p] for n, p in view.uses[value]}
        readers |= {terms.returned[key] for key in view.results[value] if key in terms.returned}
        readers = {terms.root(t) for t in readers} - {NONE, terms.root(term)}
        if term == NONE or not readers:
            continue
        producer = view.producer(value)
        stored_twice = value in terms.free and (producer is None or producer.key != "Cast")
        count = elements(analysis.graph.shapes[value])
        cost = DUPLICATE if stored_twice else cast_cost(count, trips[view.values[value].scope])
        if is_low(term) and not all(map(is_low, readers)) and not (term == LOW and HIGH in readers):
            total += cost * 65 if value in pure else cost
        if not is_low(term) and any(map(is_low, readers)) and not (term == HIGH and LOW in readers):
            total += cost
    return total + sum(missed(analysis, node, trips, low) for node in view.nodes)


def missed(analysis: Analysis, node: Node, trips: Sequence[int], low: Sequence[bool]) -> int:
    """What a node does not gain in float32: two bytes per element that it touches, but less than a Cast pair."""
    terms, pins = analysis.terms, analysis.pins
    sides = [terms.root(side) for side in analysis.terms.of_node.get(node.index, {}).values()]
    lost = 0
    counts = [
        elements(analysis.graph.shapes[value])
        for value in (*node.inputs, *node.outputs)
        if value != ABSENT and terms.produced[value] != NONE
    ]
    pair = 2 * cast_cost(max(counts, default=0), 1) - 1
    for root in sides:
        if root in pins.preferred and root not in pins.verdicts and not low[root]:
            lost += max(1, min(2 * sum(counts) // BYTES_PER_UNIT, pair)) * trips[node.scope]
    if node.key == "Cast" and len(sides) == 2 and low[sides[0]] != low[sides[1]]:
        lost += cast_cost(elements(analysis.graph.shapes[node.inputs[0]]), trips[node.scope])
    return lost


def purely_high(analysis: Analysis) -> set[int]:
    """Outputs of exact ops that a float32 source reaches through exact ops alone."""
    view, terms, pins = analysis.graph, analysis.terms, analysis.pins
    pure, found = set(), set()
    for value, term in enumerate(terms.produced):
        pin = pins.verdicts.get(terms.root(term))
        if term == HIGH or value in terms.free or (pin is not None and not pin.low):
            pure.add(value)
    for node in (view.nodes[index] for index in view.order):
        for value in node.outputs if node.key not in op_facts().control_flow else ():
            exact = value != ABSENT and terms.root(terms.produced[value]) in pins.exact
            if exact and value not in pure and any(v in pure for v in node.inputs):
                pure.add(value)
                found.add(value)
    return found
