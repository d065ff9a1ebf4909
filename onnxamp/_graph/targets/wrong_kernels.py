"""Kernels that are wrong on a target, or in its version of ONNX Runtime, from the target's ``wrong.toml``."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from onnxamp._facts.ops import attribute
from onnxamp._facts.tables import device_of, is_older, target_names, target_table
from onnxamp._facts.targets import version_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node


def wrong_kernels(graph: Graph, low: str, target: str) -> Iterator[tuple[Node, str]]:
    """Yield the nodes of ops whose kernels are wrong in this type on the target, and the fault."""
    rules = _rules(target)
    for node in graph.nodes_of(frozenset(rules)):
        for rule in rules[node.key]:
            if low not in rule["types"] or _has_small_heads(graph, node, rule):
                continue
            where = device_of(target)
            if "before" in rule:
                where = f"ONNX Runtime {version_of(target)}"
            yield node, f"{where}: {rule['because']}"


def _has_small_heads(graph: Graph, node: Node, rule: Mapping[str, Any]) -> bool:
    """Return whether a rule is about larger heads than those of a node. An unknown size counts as small."""
    if "head_size" not in rule:
        return False
    size = _head_size(graph, node)
    return size is None or size <= rule["head_size"]


@cache
def _rules(target: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return op -> the rules for the target's version; without a version, only rules for all versions."""
    version = version_of(target)
    rules_of = defaultdict[str, list[Mapping[str, Any]]](list)
    for rule in target_table(target, "wrong").get("rows", ()):
        before = rule.get("before")
        if before is None or (version and is_older(version, before)):
            for op in rule["ops"]:
                rules_of[op].append(rule)
    return rules_of


def wrong_ops() -> frozenset[str]:
    """Return the ops with a kernel that is wrong on some target, in some version."""
    ops = set[str]()
    for name in target_names():
        rules = target_table(name, "wrong").get("rows", ())
        ops.update(*(rule["ops"] for rule in rules))
    return frozenset(ops)


def _head_size(graph: Graph, node: Node) -> int | None:
    """Return the numbers per head of the queries of an Attention; None if they are not known."""
    shape = graph.shapes[node.inputs[0]] if node.input(0) != ABSENT else None
    if not shape or shape[-1] is None:
        return None
    heads = attribute(node.proto, "q_num_heads") if len(shape) == 3 else 1
    return shape[-1] // heads if heads else None
