"""Nodes that ONNX Runtime keeps on the CPU because what they read is in the host's memory, kernel or not.

Arithmetic with shapes, mostly. The rule is that of ``GetCpuPreferredNodes`` in microsoft/onnxruntime,
onnxruntime/core/framework/fallback_cpu_capability.cc, graph by graph.
"""

import tomllib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from importlib import resources
from typing import Final

from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.types import Types
from onnxamp._graph.view import ABSENT, Node, Origin, View

_FEW: Final = 100
"""Elements up to which a constant may be on either side."""

_STAYING: Final = frozenset(
    f"tensor({name})"
    for name in ("float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")
)
"""Types of inputs that keep a node on the target: the CPU has few kernels for them."""


@cache
def memory_table(target: str, which: str) -> Mapping[str, frozenset[int]]:
    """Op key -> positions of its "inputs" or "outputs" that the target's kernels have in the host's memory."""
    text = resources.files("onnxamp").joinpath("_data/kernels/memory.toml").read_text(encoding="utf-8")
    return {op: frozenset(ports) for op, ports in tomllib.loads(text).get(target, {}).get(which, {}).items()}


def host_nodes(
    view: View, types: Types, shapes: Sequence[Shape | None], providers: Sequence[str], target: str
) -> set[int]:
    """The nodes that run on the CPU where their inputs are: no data move for them.

    Args:
        providers: of each node, by kernels alone.

    Complexity: linear in nodes and ports.
    """
    kept, found, touched = set[int](), set[int](), set[int]()  # values on the host; nodes there; nodes that read such
    for index in view.order:
        node = view.nodes[index]
        made: Sequence[int] = node.outputs
        if providers[index] == target.upper():
            if index in touched and _on_host(view, types, shapes, node, target, kept):
                found.add(index)
            else:
                ports = memory_table(target, "outputs").get(node.key, frozenset())
                made = [value for port, value in enumerate(node.outputs) if port in ports]
        elif index in touched and providers[index] == "CPU":
            if _on_host(view, types, shapes, node, target, kept):
                found.add(index)
        else:
            continue
        kept.update(made)
        touched.update(_reader(view, index, user) for value in made if value != ABSENT for user, _ in view.uses[value])
    return found


def _on_host(
    view: View, types: Types, shapes: Sequence[Shape | None], node: Node, target: str, kept: AbstractSet[int]
) -> bool:
    """Whether all that the node reads is on the host, and not because its kernel wants it there."""
    wanted = memory_table(target, "inputs").get(node.key, frozenset())
    for port, value in enumerate(node.inputs):
        if value == ABSENT or types[value] in _STAYING:
            return False
        own = view.values[value].scope == node.scope
        if _is_small(view, shapes, value) or (own and view.values[value].origin is Origin.INPUT):
            continue
        if not (own and value in kept) or port in wanted:
            return False
    return True


def is_constant(view: View, value: int) -> bool:
    """Whether the value is an initializer that callers cannot override, or made by a Constant."""
    producer = view.producer(value)
    return view.values[value].origin is Origin.INITIALIZER or (producer is not None and producer.key == "Constant")


def _is_small(view: View, shapes: Sequence[Shape | None], value: int) -> bool:
    shape, stored = shapes[value], is_constant(view, value) or view.values[value].origin is Origin.DEFAULT
    return stored and shape is not None and elements(shape) <= _FEW


def _reader(view: View, maker: int, user: int) -> int:
    """The node of the maker's graph that reads its value: the user, or the node whose bodies the user is in."""
    while view.nodes[user].scope != view.nodes[maker].scope:
        user = view.scopes[view.nodes[user].scope].owner
    return user
