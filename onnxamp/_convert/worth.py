"""Whether low precision that a newer opset brings is worth the kernels that the target has no more there."""

from typing import Final

from onnxamp._convert.analysis import Analysis
from onnxamp._dtypes import FLOAT
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT
from onnxamp._target.costs import costs_on
from onnxamp._target.roofline import DEFAULT_DEVICE, device_called, work_of

_FLOAT_BYTES: Final = 4


def run_time(analysis: Analysis) -> float:
    """Estimated microseconds of one run on the target: its nodes with floats, new Casts, and what the CPU computes.

    Open dimensions count as everywhere in the cut. Complexity: linear in nodes.
    """
    graph, device, costs = analysis.graph, device_called(DEFAULT_DEVICE), costs_on(analysis.options.target)
    time, low = 0.0, analysis.decision.low
    for node in graph.nodes:
        if any(graph.types[value] == FLOAT for value in node.outputs if value != ABSENT):
            is_low = any(low[variable] for variable in analysis.ports.of_node.get(node.index, {}).values())
            time += work_of(node, graph.shapes).time(device, low=is_low)
    for index in analysis.pins.fallbacks:
        node = graph.nodes[index]
        values = (value for value in (*node.inputs, *node.outputs) if value != ABSENT)
        time += costs.host_time(_FLOAT_BYTES * sum(elements(graph.shapes[value]) for value in values))
    index_of = {value.name: value.index for value in graph.values} if analysis.edits.casts else {}
    return time + sum(costs.cast_time(elements(graph.shapes[index_of[cast.source]])) for cast in analysis.edits.casts
                      if cast.source in index_of)  # fmt: skip
