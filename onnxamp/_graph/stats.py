"""Precisions of a model and its nodes, from the types of values."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from onnxamp._dtypes import FLOAT, FORMATS, LOWEST_FIRST
from onnxamp._graph.view import Node, View

PRECISIONS: Final = (*FORMATS, "float32", "other")
"""Precisions of a node; "other" has no floats, or only float64 and float8."""

_TYPES: Final = {**{low.name: low.tensor for low in FORMATS.values()}, "float32": FLOAT}


def node_precision(node: Node, types: Sequence[str | None]) -> str:
    """Return the lowest precision among a node's inputs and outputs, sequences and optionals included: see PRECISIONS.

    Args:
        types: type by value index.
    """
    own = {types[value] for value in (*node.inputs, *node.outputs)}
    held = (
        name
        for name, tensor in _TYPES.items()
        if any(kind is not None and tensor in kind for kind in own)
    )
    return next(held, "other")


def operator_counts(
    view: View, types: Sequence[str | None]
) -> Counter[tuple[str, str]]:
    """(op type, precision) -> number of nodes, those of bodies included.

    Args:
        types: type by value index.

    Complexity: linear in nodes.
    """
    return Counter((node.key, node_precision(node, types)) for node in view.nodes)


def lowest_precision(types: Iterable[str | None]) -> str:
    """Return the lowest float type among tensors: "bfloat16", "float16" or "float32"."""
    known = set(types)
    return next((name for name in LOWEST_FIRST if _TYPES[name] in known), "float32")
