"""What an engine fuses into products, as its profile shows.

A node behind a product that takes no time, though it is no view, is computed by the product's kernel. A Cast between
the two keeps the engine from that: then the node takes a kernel of its own, which no profile of fused models shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxamp._convert.estimate import LAUNCH_US, Estimate
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._ops.facts import op_facts
from onnxamp._patterns.patterns import patterns_of
from onnxamp._runtime.switch import node_key


@dataclass(frozen=True, slots=True)
class Fusion:
    """Two nodes, by key and by index, that are one kernel in one precision.

    ``time`` is what the second one takes by itself, in microseconds.
    """

    keys: tuple[str, str]
    nodes: tuple[int, int]
    time: float


def find_fusions(
    graph: Graph, estimate: Estimate, high: Mapping[str, float], low: Mapping[str, float]
) -> tuple[Fusion, ...]:
    """The nodes that the kernel of a product computes, each with the last one before it, and their estimated times.

    Those of decomposed normalisations are not among them: they have kernels of their own, under whatever name.

    Args:
        graph: of the float32 model.
        estimate: of the same graph.
        high, low: seconds by node in float32 and with everything lowered.

    Complexity: linear in nodes.
    """
    normalising = frozenset[int]().union(
        *(match.nodes for match in patterns_of(graph, "normalisation", "softmax"))
    )
    place: dict[int, int] = {}
    """Products and what is fused into them, in execution order."""
    found: list[Fusion] = []
    for at, index in enumerate(graph.order):
        node = graph.nodes[index]
        key = node_key(node)
        times = high.get(key, 1.0), low.get(key, 1.0)
        if node.key in op_facts().contractions:
            if all(times):  # else no profile shows it, as in the body of a loop
                place[index] = at
            continue
        if any(times) or index in normalising or not estimate.launches(node):
            continue
        before = (graph.producer(value) for value in node.inputs if value != ABSENT)
        inside = [one.index for one in before if one is not None and one.index in place]
        if inside:
            last, place[index] = max(inside, key=place.__getitem__), at
            time = LAUNCH_US + estimate.work(node).time(estimate.device, low=None)
            found.append(Fusion((node_key(graph.nodes[last]), key), (last, index), time))
    return tuple(found)
