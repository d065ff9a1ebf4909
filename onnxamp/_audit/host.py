"""Nodes that ONNX Runtime keeps on the CPU although the target has a kernel, since their inputs are in host memory.

That is mostly arithmetic with shapes. The rule is that of ``GetCpuPreferredNodes`` in microsoft/onnxruntime,
onnxruntime/core/framework/fallback_cpu_capability.cc, applied graph by graph.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Final

from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.view import ABSENT, Node, Origin, View
from onnxamp._ops.tables import read_table

_FEW: Final = 100
"""Elements up to which a constant may be on the host or on the device."""

_STAYING: Final = frozenset(
    f"tensor({name})"
    for name in ("float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")
)
"""Types of inputs that keep a node on the target, since the CPU has few kernels for them."""


@cache
def memory_table(target: str, which: str) -> Mapping[str, frozenset[int]]:
    """Op key -> positions of its "inputs" or "outputs" that the target's kernels expect in host memory."""
    table = read_table("kernels/memory").get(target, {}).get(which, {})
    return {op: frozenset(ports) for op, ports in table.items()}


def host_nodes(graph: Graph, shapes: Sequence[Shape | None], providers: Sequence[str], target: str) -> set[int]:
    """The nodes that run on the CPU because their inputs are there: no data move for them.

    Args:
        graph: the model.
        shapes: by value index.
        providers: by node, the provider if only kernels counted.
        target: "cuda" or "cpu".

    Complexity: linear in nodes and ports.
    """
    on_host, nodes, readers = set[int](), set[int](), set[int]()  # values, nodes, and nodes that read such values
    for index in graph.order:
        node = graph.nodes[index]
        values: Sequence[int] = node.outputs
        if providers[index] == target.upper():
            if index in readers and _prefers_host(graph, shapes, node, target, on_host):
                nodes.add(index)
            else:
                ports = memory_table(target, "outputs").get(node.key, frozenset())
                values = [value for port, value in enumerate(node.outputs) if port in ports]
        elif index in readers and providers[index] == "CPU":
            if _prefers_host(graph, shapes, node, target, on_host):
                nodes.add(index)
        else:
            continue
        on_host.update(values)
        uses = (use for value in values if value != ABSENT for use in graph.uses[value])
        readers.update(_reader(graph, index, user) for user, _ in uses)
    return nodes


def _prefers_host(
    graph: Graph, shapes: Sequence[Shape | None], node: Node, target: str, on_host: AbstractSet[int]
) -> bool:
    """Whether all inputs of the node are on the host, and not because its kernel expects them there."""
    wanted = memory_table(target, "inputs").get(node.key, frozenset())
    for port, value in enumerate(node.inputs):
        if value == ABSENT or graph.types[value] in _STAYING:
            return False
        own = graph.values[value].scope == node.scope
        if _is_small(graph, shapes, value) or (own and graph.values[value].origin is Origin.INPUT):
            continue
        if not (own and value in on_host) or port in wanted:
            return False
    return True


def is_constant(view: View, value: int) -> bool:
    """Whether the value is an initializer that callers cannot override, or the output of a Constant."""
    producer = view.producer(value)
    return view.values[value].origin is Origin.INITIALIZER or (producer is not None and producer.key == "Constant")


def _is_small(view: View, shapes: Sequence[Shape | None], value: int) -> bool:
    shape, stored = shapes[value], is_constant(view, value) or view.values[value].origin is Origin.DEFAULT
    return stored and shape is not None and elements(shape) <= _FEW


def _reader(view: View, maker: int, user: int) -> int:
    """The node in the maker's own graph that reads its value: the user, or the node around the user."""
    while view.nodes[user].scope != view.nodes[maker].scope:
        user = view.scopes[view.nodes[user].scope].owner
    return user
