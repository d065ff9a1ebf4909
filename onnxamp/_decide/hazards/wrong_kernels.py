"""Kernels that are wrong on the target, or in its version of ONNX Runtime, from the target's ``wrong.toml``."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from onnxamp._decide.verdicts import Hazard, Kind
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import attribute
from onnxamp._facts.tables import device_of, is_older, target_table
from onnxamp._facts.targets import version_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node


def wrong_kernel_hazards(graph: Graph, low: Format, target: str) -> list[Hazard]:
    """Return nodes that would run on a kernel that is wrong in low precision, in node order. Complexity: linear in
    nodes.
    """
    found = wrong_kernels(graph, low.name, target)
    return [Hazard(node.index, KIND, why) for node, why in found]


def wrong_kernels(graph: Graph, low: str, target: str) -> Iterator[tuple[Node, str]]:
    """Yield the nodes of ops whose kernels are wrong in this type on the target, and the fault."""
    rules = _rules(target)
    for node in graph.nodes_of(frozenset(rules)):
        rule = rules[node.key]
        is_small = (_head_size(graph, node) or 0) <= rule.get("head_size", -1)
        if low not in rule["types"] or is_small:
            continue
        where = device_of(target)
        if "before" in rule:
            where = f"ONNX Runtime {version_of(target)}"
        yield node, f"{where}: {rule['because']}"


@cache
def _rules(target: str) -> Mapping[str, Mapping[str, Any]]:
    """Return op -> the rule for the target's version; without a version, only rules for all versions."""
    version = version_of(target)
    rules = target_table(target, "wrong").get("rows", ())
    held = (
        rule
        for rule in rules
        if "before" not in rule or (version and is_older(version, rule["before"]))
    )
    return {op: rule for rule in held for op in rule["ops"]}


def _head_size(graph: Graph, node: Node) -> int | None:
    """Numbers per head of the queries of an Attention; None if it is not known."""
    shape = graph.shapes[node.inputs[0]] if node.input(0) != ABSENT else None
    if not shape or shape[-1] is None:
        return None
    heads = attribute(node.proto, "q_num_heads") if len(shape) == 3 else 1
    return shape[-1] // heads if heads else None


KIND: Final = Kind(
    "wrong kernel",
    title="a kernel of that version of the runtime computes wrong results in low precision",
    on_target=wrong_kernel_hazards,
    is_of_kernels=True,
)
