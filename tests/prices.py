"""The cost of an assignment by its definition, told apart from the network that the engine solves."""

from collections.abc import Sequence

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.ports import HIGH, LOW, NONE
from onnxamp._decide.precision import BYTES_PER_UNIT, DUPLICATE, cast_cost, loop_trips
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts


def price(analysis: Analysis, low: Sequence[bool]) -> int:
    """One Cast per value and precision that is needed, plus the gains that are missed. ``low`` is by variable.

    As in the cut, Casts that no assignment can avoid are left out.
    """
    view, ports = analysis.graph, analysis.ports
    trips = loop_trips(view)
    pure = purely_high(analysis)

    def is_low(variable: int) -> bool:
        return variable == LOW or (variable >= 0 and low[ports.root(variable)])

    total = 0
    for value, variable in enumerate(ports.produced):
        readers = {ports.consumed[n][p] for n, p in view.uses[value]}
        readers |= {ports.returned[key] for key in view.results[value] if key in ports.returned}
        readers = {ports.root(t) for t in readers} - {NONE, ports.root(variable)}
        if variable == NONE or not readers:
            continue
        producer = view.producer(value)
        stored_twice = value in ports.free and (producer is None or producer.key != "Cast")
        count = elements(analysis.graph.shapes[value])
        cost = DUPLICATE if stored_twice else cast_cost(count, trips[view.values[value].scope])
        if is_low(variable) and not all(map(is_low, readers)) and not (variable == LOW and HIGH in readers):
            total += cost * 65 if value in pure else cost
        if not is_low(variable) and any(map(is_low, readers)) and not (variable == HIGH and LOW in readers):
            total += cost
    return total + sum(missed(analysis, node, trips, low) for node in view.nodes)


def missed(analysis: Analysis, node: Node, trips: Sequence[int], low: Sequence[bool]) -> int:
    """What a node does not gain in float32: two bytes per element that it touches, but less than a Cast pair."""
    ports, pins = analysis.ports, analysis.pins
    sides = [ports.root(side) for side in analysis.ports.of_node.get(node.index, {}).values()]
    lost = 0
    counts = [
        elements(analysis.graph.shapes[value])
        for value in (*node.inputs, *node.outputs)
        if value != ABSENT and ports.produced[value] != NONE
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
    view, ports, pins = analysis.graph, analysis.ports, analysis.pins
    pure, found = set(), set()
    for value, variable in enumerate(ports.produced):
        pin = pins.verdicts.get(ports.root(variable))
        if variable == HIGH or value in ports.free or (pin is not None and not pin.low):
            pure.add(value)
    for node in (view.nodes[index] for index in view.order):
        for value in node.outputs if node.key not in op_facts().control_flow else ():
            exact = value != ABSENT and ports.root(ports.produced[value]) in pins.exact
            if exact and value not in pure and any(v in pure for v in node.inputs):
                pure.add(value)
                found.add(value)
    return found
