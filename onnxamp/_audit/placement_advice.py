"""What to do about nodes that the target's own provider does not run."""

from collections.abc import Mapping

from onnxamp._dtypes import BFLOAT16, FLOAT, LOW_TYPES
from onnxamp._graph.view import Node
from onnxamp._target.kernels import kernel_table
from onnxamp._target.versions import cpu_of, device_of


def home(target: str) -> str:
    """The target's provider, as reports name it."""
    return device_of(target).upper()


def advice(target: str, node: Node, bound: Mapping[str, str], refused: str | None) -> str:
    """How to bring a node back to the target's provider."""
    signature = node.signature
    assert signature is not None
    if refused is not None:
        return "If it costs too much, export it another way: no precision brings it back."
    rows = kernel_table(target).get(node.key, ()) if device_of(target) != "cpu" else ()
    raised = in_float32(bound)
    if any(kernel.takes(signature, raised) for kernel in rows):
        return f"Keep it float32 (--keep-fp32 NAME): {home(target)} has a kernel for that."
    older = [kernel for kernel in rows if kernel.since < signature.since and _admits(kernel.types, bound)]
    if older:
        version = signature.since - 1
        return f"{home(target)} has a kernel for older versions of the op: export with opset {version} or lower."
    if device_of(target) == "cpu":
        return "Keep it float32 (--keep-fp32 NAME): that saves the Casts."
    return "It falls back in every precision: if it costs too much, replace the op."


def cure(target: str, node: Node, bound: Mapping[str, str]) -> str:
    """What to do about a node without a kernel."""
    signature = node.signature
    assert signature is not None
    raised = in_float32(bound)
    providers = dict.fromkeys((target, cpu_of(target)))
    if any(k.takes(signature, raised) for p in providers for k in kernel_table(p).get(node.key, ())):
        also = " or use float16" if any(BFLOAT16.tensor in found for found in bound.values()) else ""
        return f"Keep it float32 (--keep-fp32 NAME){also}."
    newer = [k.since for p in providers for k in kernel_table(p).get(node.key, ()) if k.since > signature.since]
    if newer:
        return f"Upgrade the model: kernels start at opset {min(newer)}."
    return "Replace the op, or register your own kernels for it."


def in_float32(bound: Mapping[str, str]) -> dict[str, str]:
    """Types of parameters, with float32 in place of low precision."""
    types = dict(bound)
    for low in LOW_TYPES.values():
        types = {param: kind.replace(low.tensor, FLOAT) for param, kind in types.items()}
    return types


def _admits(allowed: Mapping[str, frozenset[str]], bound: Mapping[str, str]) -> bool:
    return all(bound[name] in types for name, types in allowed.items() if name in bound)
