"""Do calls of a model's functions end, and in how many nodes? Part of :mod:`onnxamp._model.wellformed`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Final, TypeAlias

from onnx import ModelProto, NodeProto

from onnxamp._errors import ModelError
from onnxamp._model.protos import all_nodes, default_domain
from onnxamp._model.wellformed_values import utf8

MAX_INLINED: Final = 500_000
"""Nodes that a model may have once its functions are inlined: ten times those of large models."""
_SHOWN: Final = 10**15
"""Number of nodes from which on a message says no digits."""

_Name: TypeAlias = tuple[str, str]
"""Domain and name of an op or a function."""


def check_functions(model: ModelProto) -> None:
    """Refuse functions that call themselves, directly or not, and calls that do not end in sensible time if inlined.

    Some versions of onnx never stop inlining the former, and a few functions that call each other twice are more nodes
    than any memory holds. Complexity: linear in the nodes of the graph and of the functions.

    Raises:
        ModelError: there are such functions.
    """
    if not model.functions:
        return
    nodes: dict[_Name, Counter[_Name]] = {}
    for function in model.functions:
        domain = default_domain(utf8(function.domain, "the domain of a function"))
        found = nodes.setdefault((domain, utf8(function.name, "the name of a function")), Counter())
        found.update(_op_counts(function.node))
    try:
        order = [name for name in TopologicalSorter(nodes).static_order() if name in nodes]
    except CycleError as error:
        cycle = " -> ".join(repr(name) for _, name in error.args[1])
        raise ModelError(f"The function {error.args[1][0][1]!r} calls itself: {cycle}.") from None
    sizes: dict[_Name, int] = {}
    for name in order:
        sizes[name] = _inlined(nodes[name], sizes)
    main = _op_counts(model.graph.node)
    total = _inlined(main, sizes)
    if total > max(MAX_INLINED, 2 * main.total()):
        domain, largest = max((name for name in main if name in sizes), key=lambda name: main[name] * sizes[name])
        amount = f"{total:,}" if total < _SHOWN else f"more than {_SHOWN:,}"
        raise ModelError(
            f"The model's functions are {amount} nodes once their calls are inlined, as onnxamp and ONNX Runtime do;"
            f" {MAX_INLINED:,} are allowed. Most of them come from calls of {f'{domain}::{largest}'!r}: let functions"
            " call each other less often, or repeat calls in a Loop."
        )


def _op_counts(nodes: Sequence[NodeProto]) -> "Counter[_Name]":
    """How many nodes of each op there are, with those of bodies."""
    return Counter((default_domain(node.domain), node.op_type) for node in all_nodes(nodes))


def _inlined(counts: "Counter[_Name]", sizes: Mapping[_Name, int]) -> int:
    """How many nodes remain where calls of functions become their bodies."""
    return sum(count * sizes.get(name, 1) for name, count in counts.items())
