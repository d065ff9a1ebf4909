"""Counting what a model is made of: its nodes by op type and precision."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from onnxamp._graph.view import ABSENT, View

PRECISIONS: Final = ("float16", "bfloat16", "float32", "other")
"""What a node may count for; "other" has no float, or none but float64 and float8."""

_TYPES: Final = {"float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)", "float32": "tensor(float)"}


def operator_counts(view: View, types: Sequence[str | None]) -> Counter[tuple[str, str]]:
    """(op type, precision) -> nodes, those of bodies included; each counts for the lowest precision among its values.

    Args:
        types: by value of the view, as :func:`onnxamp._graph.types.infer_types` gives them.

    Complexity: linear in nodes.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for node in view.nodes:
        found = {types[value] for value in (*node.inputs, *node.outputs) if value != ABSENT}
        held = (name for name, kind in _TYPES.items() if any(t is not None and kind in t for t in found))
        counts[node.key, next(held, "other")] += 1
    return counts
