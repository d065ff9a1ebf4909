"""One pass alone, on a graph."""

from types import ModuleType

from onnxamp._graph.graph import Graph
from onnxamp._options.options import Options
from onnxamp._rewrite import Draft, PassResult


def passed(step: ModuleType, graph: Graph, options: Options) -> PassResult:
    """What a pass makes of a graph, which may be nothing new."""
    result: PassResult = step.apply(Draft.of(graph), options)
    return result
