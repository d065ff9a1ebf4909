"""The cost of an assignment by its definition, told apart from the network that the engine solves."""

from collections.abc import Sequence

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.precision import DUPLICATE
from onnxamp._decide.variables.ports import HIGH, LOW, NONE
from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._facts.targets import LAUNCH, target_of
from onnxamp._graph.determined import loop_trips
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._options.values import Level


def price(analysis: Analysis, low: Sequence[bool]) -> int:
    """One Cast per value and precision that is needed, the bytes of weights, and the gains that are missed.

    ``low`` is by variable. As in the cut, Casts that no assignment can avoid are left out, and so are the bytes that a
    weight takes in any case.
    """
    view, ports = analysis.graph, analysis.ports
    trips = loop_trips(view)
    pure = purely_high(analysis)
    costs, kind = target_of(analysis.options.target).costs, analysis.options.low

    def is_low(variable: int) -> bool:
        return variable == LOW or (variable >= 0 and low[ports.root(variable)])

    total = 0
    for value, variable in enumerate(ports.produced[:-1]):
        readers = {ports.consumed[n][p] for n, p in view.uses[value]}
        readers |= {ports.returned[key] for key in view.results[value] if key in ports.returned}
        readers = {ports.root(t) for t in readers} - {NONE, ports.root(variable)}
        if variable == NONE or not readers:
            continue
        producer = view.producer(value)
        stored_twice = value in ports.free and (producer is None or producer.key != "Cast")
        count = elements(analysis.graph.shapes[value])
        if stored_twice:
            versions = {is_low(variable), *map(is_low, readers)}
            count = 0 if value in analysis.problem.unfit else count
            if len(versions) == 2:
                total += costs.stored((4 - kind.bytes) * count) * 2 + DUPLICATE
            elif versions == {False}:
                total += costs.stored((4 - kind.bytes) * count)
            continue
        cost = costs.cast(count, trips[view.values[value].scope], kind)
        if is_low(variable) and not all(map(is_low, readers)) and not (variable == LOW and HIGH in readers):
            total += cost * 65 if value in pure else cost
        if not is_low(variable) and any(map(is_low, readers)) and not (variable == HIGH and LOW in readers):
            total += cost
    return total + sum(missed(analysis, node, trips, low) for node in view.nodes)


def missed(analysis: Analysis, node: Node, trips: Sequence[int], low: Sequence[bool]) -> int:
    """What a node does not gain in float32: two bytes per element that it moves, but less than a Cast pair."""
    ports, pins = analysis.ports, analysis.pins
    sides = [ports.root(side) for side in analysis.ports.of_node.get(node.index, {}).values()]
    lost = 0
    counts = [
        elements(analysis.graph.shapes[value])
        for value in (*node.inputs, *node.outputs)
        if value != ABSENT and ports.produced[value] != NONE and node.key not in op_facts().views
    ]
    costs, kind = target_of(analysis.options.target).costs, analysis.options.low
    pair = 2 * costs.cast(max(counts, default=0), 1, kind) - 1
    for root in sides:
        if root in pins.preferred and root not in pins.verdicts and not low[root]:
            lost += max(1, min(costs.traffic((4 - kind.bytes) * sum(counts)), pair)) * trips[node.scope]
    if widens_exactly(analysis, node) and low[sides[0]]:
        lost += 64 * costs.cast(elements(analysis.graph.shapes[node.inputs[0]]), trips[node.scope], kind)
    if node.key == "Cast" and len(sides) == 2 and low[sides[0]] != low[sides[1]]:
        lost += costs.cast(elements(analysis.graph.shapes[node.inputs[0]]), trips[node.scope], kind) - 1
    return lost


def widens_exactly(analysis: Analysis, node: Node) -> bool:
    """Whether the node casts to double what no arithmetic has rounded, which costs accuracy where it is low."""
    if node.key != "Cast" or analysis.graph.types[node.outputs[0]] != "tensor(double)":
        return False
    return (
        analysis.options.level != Level.O3
        and node.inputs[0] in reached(analysis)
        and bool(analysis.ports.of_node.get(node.index))
    )


def purely_high(analysis: Analysis) -> set[int]:
    """Outputs of exact ops that a float32 source reaches through exact ops alone, but for those of large constants.

    Where constants alone reach one, and one of them saves more than the launch of a Cast, rounding it is no charge.
    """
    return {
        value
        for value, (by_exact_ops, sources) in reached(analysis).items()
        if by_exact_ops and ("float32" in sources or "heavy" not in sources)
    }


def is_shield(view: Graph, value: int) -> bool:
    """Whether the value is a Max of one input behind a Cast from a low type."""
    maker = view.producer(value)
    if maker is None or maker.key != "Max" or len(maker.inputs) != 1:
        return False
    cast = view.producer(maker.inputs[0])
    return cast is not None and cast.key == "Cast" and view.types[cast.inputs[0]] in LOW_TENSORS


def is_low_constant(analysis: Analysis, value: int) -> bool:
    """Whether the value is stored in low precision, as a float32 constant is after a conversion."""
    view = analysis.graph
    maker = view.producer(value)
    stored = view.values[value].origin is Origin.INITIALIZER if maker is None else maker.key == "Constant"
    return stored and view.types[value] == analysis.options.low.tensor


def was_exact(analysis: Analysis, node: Node, value: int) -> bool:
    """Whether the node is exact in low precision, or a Cast or a shield of one that a conversion adds."""
    view, low = analysis.graph, analysis.options.low.tensor
    if node.key == "Cast":
        return {view.types[value], view.types[node.inputs[0]]} == {FLOAT, low}
    return is_shield(view, value) or (view.types[value] == low and node.index in view.exact)


def raises(analysis: Analysis, node: Node) -> bool:
    """Whether the node casts a constant from the low type to float32, which rounds nothing."""
    is_cast = node.key == "Cast" and analysis.graph.types[node.outputs[0]] == FLOAT
    return is_cast and is_low_constant(analysis, node.inputs[0])


def reached(analysis: Analysis) -> dict[int, tuple[bool, set[str]]]:
    """float32 values -> whether exact ops alone stand behind sources, and the kinds of these sources."""
    view, ports, pins = analysis.graph, analysis.ports, analysis.pins
    costs, kind = target_of(analysis.options.target).costs, analysis.options.low
    sources: dict[int, set[str]] = {}
    for value, variable in enumerate(ports.produced[:-1]):
        pin = pins.verdicts.get(ports.root(variable))
        if value in ports.free:
            producer = view.producer(value)
            computed = producer is not None and producer.key == "Cast"
            heavy = not computed and value not in analysis.problem.unfit
            heavy = heavy and costs.stored((4 - kind.bytes) * elements(view.shapes[value])) > LAUNCH
            sources[value] = {"heavy" if heavy else "light"}
        elif (variable == HIGH and not is_shield(view, value)) or (pin is not None and not pin.low):
            sources[value] = {"float32"}
        elif is_low_constant(analysis, value):
            heavy = costs.stored((4 - kind.bytes) * elements(view.shapes[value])) > LAUNCH
            sources[value] = {"heavy" if heavy else "light"}
    found = dict.fromkeys(sources, False)
    for node in view.order:
        for value in node.outputs if node.key not in op_facts().control_flow else ():
            exact = value != ABSENT and (
                ports.root(ports.produced[value]) in pins.exact or was_exact(analysis, node, value)
            )
            reaching = set().union(*(sources.get(v, set()) for v in node.inputs))
            if exact and value not in sources and reaching:
                sources[value], found[value] = reaching, not raises(analysis, node)
    return {value: (found[value], kinds) for value, kinds in sources.items()}
