"""Which nodes samples come by: what is in a branch that no sample takes cannot be measured."""

from collections.abc import Sequence

from onnx import GraphProto, ModelProto

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import View
from onnxamp._model.protos import all_nodes
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.observe import settle
from onnxamp._runtime.samples import Samples


def find_live(view: View, samples: Samples) -> list[frozenset[int]]:
    """By sample: indices of a model's nodes that it comes by. An If in a loop counts as if both branches were taken.

    Raises:
        ArgumentError: a sample does not fit the model. RuntimeFailure: a condition cannot be computed.

    Complexity: linear in nodes for each sample, where there are branches; and what conditions take to compute.
    """
    model, everything = view.model, frozenset(range(len(view.nodes)))
    if not any(node.op_type == "If" for node in model.graph.node):
        return [everything] * len(samples)
    tagged = ModelProto()
    tagged.CopyFrom(model)
    for node in Graph.of(tagged).nodes:
        node.proto.name = str(node.index)  # names stay what they are when branches are moved, if they differ
    found = []
    for sample in samples:
        shell, _ = settle(tagged, None, check_inputs(model, sample), emulated=False)
        found.append(everything & _tags(shell.model.graph))
    return found


def _tags(graph: GraphProto) -> set[int]:
    """Numbers of the nodes; those that were added where branches were moved have none."""
    return {int(node.name) for node in all_nodes(graph.node) if node.name.isdecimal()}


def choose_samples(live: Sequence[frozenset[int]], least: int) -> list[int]:
    """Samples for mask runs: together they come by all nodes that any comes by; the first ones, up to ``least``."""
    seen: set[int] = set()
    found = []
    for number, nodes in enumerate(live):
        if not nodes <= seen:
            found.append(number)
            seen |= nodes
    order = dict.fromkeys([*found, *range(len(live))])
    return sorted(list(order)[: max(least, len(found))])
