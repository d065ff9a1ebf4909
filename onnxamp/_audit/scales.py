"""Scales of quantized numbers that low precision cannot hold, in an unconverted model."""

from collections.abc import Callable, Iterator

from onnxamp._audit.findings import ScaleAtRisk
from onnxamp._audit.hazards import RaisedGraph
from onnxamp._decide.hazards.scales import magnitudes, with_zeros
from onnxamp._dtypes import FLOAT16, FORMATS, Format, readable_types
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import quantized_nodes
from onnxamp._graph.view import ABSENT
from onnxamp._ops.facts import op_facts

_SCALE = 1
"""Position of the scale among the inputs of nodes that quantize or dequantize."""


def scales_at_risk(
    graph: Graph, view_in: Callable[[Format], RaisedGraph]
) -> Iterator[ScaleAtRisk]:
    """Yield scales that leave the range of a low type of the model, are subnormal there, or move their grid.

    For a model without low precision, yield those that float16 cannot hold. Complexity: linear in nodes and scales.

    Args:
        graph: the model.
        view_in: returns the graph with its values of a low type raised to float32, as :func:`raised` does.
    """
    facts = op_facts()
    nodes = graph.nodes_of(facts.quantize | facts.dequantize | facts.scales.keys())
    if not nodes:
        return
    present = set(graph.types)
    lows = [low for low in FORMATS.values() if low.tensor in present] or [FLOAT16]
    quantized = graph.ask(quantized_nodes)
    for low in lows:
        view = view_in(low)
        lost = dict[int, str]()
        for hazard in with_zeros(view, low):
            lost.setdefault(hazard.node, hazard.detail)
        for node in nodes:
            ports = facts.scales.get(node.key, (_SCALE,))
            read = [value for port in ports if (value := node.input(port)) != ABSENT]
            whys = (_subnormal(view, value, low) for value in read)
            if why := lost.get(node.index) or next(filter(None, whys), ""):
                yield ScaleAtRisk(
                    node=node.label,
                    op=node.key,
                    type=quantized[node.index].type if node.index in quantized else "",
                    stored=readable_types(graph.types[read[0]]),
                    low=low.name,
                    why=why,
                )


def _subnormal(graph: Graph, scale: int, low: Format) -> str:
    """Return a clause on how many of a node's scales lose digits in low precision; "" if none does."""
    known = magnitudes(graph, scale)
    if known is None:
        return ""
    small = known[(known > 0) & (known < low.smallest_normal)]
    if not small.size:
        return ""
    if known.size == 1:
        return f"a scale of {small.min():.6g} is subnormal in {low.name}"
    of = f"{small.size:,} of {known.size:,} scales"
    return f"{of} are subnormal in {low.name}, down to {small.min():.6g}"
