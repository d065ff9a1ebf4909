"""Functions that call themselves, or that become more nodes than fit in memory once they are inlined."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from onnx import ModelProto, NodeProto

from onnxamp._base.errors import ModelError
from onnxamp._model.protos import all_nodes, default_domain
from onnxamp._model.wellformed_tensors import utf8

MAX_INLINED: Final = 500_000
"""Nodes that a model may have once its functions are inlined: ten times those of large models."""
_SHOWN: Final = 10**15
"""Number of nodes from which on messages give no digits."""
_Name: TypeAlias = tuple[str, str]
"""Domain and name of an op or a function."""


def check_functions(model: ModelProto) -> None:
    """Refuse functions that call themselves, directly or not, and calls that cannot be inlined in reasonable time.

    Some versions of onnx never stop inlining the former, and a few functions that call each other twice become more
    nodes than fit in memory. Complexity: linear in the nodes of the graph and of the functions.

    Raises:
        ModelError: there are such functions.
    """
    if not model.functions:
        return
    from graphlib import CycleError, TopologicalSorter  # noqa: PLC0415 - few models have functions

    nodes: dict[_Name, Counter[_Name]] = {}
    for function in model.functions:
        domain = default_domain(utf8(function.domain, "the domain of a function"))
        name = utf8(function.name, "the name of a function")
        # Functions of one name, such as overloads, count as one function with the nodes of all of them.
        counts = nodes.setdefault((domain, name), Counter())
        counts.update(_op_counts(function.node))
    try:
        called_first = TopologicalSorter(nodes).static_order()
        order = [key for key in called_first if key in nodes]
    except CycleError as error:
        cycle = " -> ".join(repr(name) for _, name in error.args[1])
        raise ModelError(
            f"The function {error.args[1][0][1]!r} calls itself: {cycle}."
        ) from None
    sizes: dict[_Name, int] = {}
    for key in order:
        sizes[key] = _inlined(nodes[key], sizes)
    main = _op_counts(model.graph.node)
    total = _inlined(main, sizes)
    if total > max(MAX_INLINED, 2 * main.total()):
        calls = (key for key in main if key in sizes)
        domain, largest = max(calls, key=lambda key: main[key] * sizes[key])
        amount = f"{total:,}" if total < _SHOWN else f"more than {_SHOWN:,}"
        raise ModelError(
            f"The model's functions become {amount} nodes once their calls are inlined, as onnxamp and ONNX Runtime do;"
            f" {MAX_INLINED:,} are allowed. Most of them come from calls of {f'{domain}::{largest}'!r}: make functions"
            " call each other less often, or repeat calls in a Loop."
        )


def _op_counts(nodes: Sequence[NodeProto]) -> "Counter[_Name]":
    """Return how many nodes of each op there are, with those of bodies."""
    return Counter(
        (default_domain(node.domain), node.op_type) for node in all_nodes(nodes)
    )


def _inlined(counts: "Counter[_Name]", sizes: Mapping[_Name, int]) -> int:
    """Return the number of nodes after calls of functions are replaced by their bodies."""
    return sum(count * sizes.get(name, 1) for name, count in counts.items())
