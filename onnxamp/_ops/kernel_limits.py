"""What a provider leaves to CPU although it has a kernel: conditions that are in its code, not in its registry.

``_data/kernels/placement.toml`` lists them, each with its source.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from onnx import NodeProto

from onnxamp._ops.facts import attribute, op_key
from onnxamp._ops.tables import read_table


@cache
def _rules() -> Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]:
    """(provider, op type) -> its conditions."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for provider, rules in read_table("kernels/placement").items():
        for rule in rules:
            types = {"types": {f"tensor({name})" for name in rule["types"]}} if "types" in rule else {}
            for op in rule["ops"]:
                found.setdefault((provider, op), []).append({**rule, **types})
    return found


def kernel_limit(provider: str, node: NodeProto, bound: Mapping[str, str]) -> str | None:
    """Why the provider does not run the node with these types by parameter, None where it does."""
    for rule in _rules().get((provider, op_key(node)), ()):
        if ("types" not in rule or not rule["types"].isdisjoint(bound.values())) and _holds(rule, node):
            return str(rule["because"])
    return None


def has_kernel_limits(provider: str, key: str) -> bool:
    """Whether attributes and inputs of the op decide where it runs."""
    return (provider, key) in _rules()


def _holds(rule: Mapping[str, Any], node: NodeProto) -> bool:
    if "asymmetric" in rule:
        numbers = attribute(node, rule["asymmetric"]) or []
        return bool(numbers[: len(numbers) // 2] != numbers[len(numbers) // 2 :])
    if "present" in rule:
        return any(item.name in rule["present"] for item in node.attribute)
    if "input" in rule:
        return len(node.input) > rule["input"] and bool(node.input[rule["input"]])
    value = attribute(node, rule["attribute"])
    if "among" in rule:
        return bool(value is not None and value.decode() in rule["among"])
    if "beyond" in rule:
        names = [name.decode().lower() for name in value or ()]
        return bool(names != rule["beyond"][: len(names)])
    return bool((rule["default"] if value is None else value) != rule["other_than"])
