"""What is worth knowing of a conversion, in sentences: the same ones for the terminal and the page."""

from collections import Counter
from typing import Final

from onnxamp._convert.convert import Conversion

_OPS: Final = 12
"""Op types that a sentence names."""


def advice(made: Conversion) -> list[str]:
    """Weights that callers may override, and ops without a schema."""
    found, overridable = [], len(made.summary.overridable)
    if overridable == 1:
        found.append(
            "1 weight is a graph input, too, so callers may override it: it keeps the type of the input and is cast in"
            " every run where that is not the wanted one. --freeze-defaults makes it a plain weight."
        )
    elif overridable:
        found.append(
            f"{overridable} weights are graph inputs, too, so callers may override them: they keep the type of the"
            " input and are cast in every run where it is not the wanted one. --freeze-defaults makes them plain"
            " weights."
        )
    if made.summary.unknown:
        found.append(
            f"No schema is known for {', '.join(made.summary.unknown)}: these nodes stay float32. If they are no custom"
            " ops, check the spelling and the opset imports."
        )
    return found


def fallbacks(made: Conversion) -> str:
    """The nodes that the target does not run in any precision; "" where it runs all."""
    found = made.summary.fallbacks
    if not found:
        return ""
    ops = Counter(op for _, op in found).most_common()
    names = ", ".join(f"{op} ×{count}" if count > 1 else op for op, count in ops[:_OPS])
    more = f" and {len(ops) - _OPS} more op types" if len(ops) > _OPS else ""
    nodes = "1 node has no kernel" if len(found) == 1 else f"{len(found)} nodes have no kernel"
    verb = "runs" if len(found) == 1 else "run"
    return f"{nodes} on {made.plan.target} in float32 either, and {verb} on CPU: {names}{more}"
