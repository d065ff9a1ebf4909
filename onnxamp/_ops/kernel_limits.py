"""Conditions under which a provider leaves a node to the CPU, or fails, although it has a kernel.

Its registry does not contain them. ``placement.toml`` in the folder of a target lists them, each with its source.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from onnx import NodeProto

from onnxamp._dtypes import FLOAT_TENSORS
from onnxamp._ops.facts import attribute, op_key
from onnxamp._ops.targets import target_names, target_table

ANY: Final = "any"
"""The target that stands for any provider: missing kernels do not limit it, but failing ones do."""


@cache
def _rules() -> Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]:
    """Return (provider, op type) -> its conditions; "any" has the failures of all providers."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for provider in target_names():
        for rule in target_table(provider, "placement").get("rows", ()):
            types = {f"tensor({name})" for name in rule.get("types", ())}
            row = {**rule, "types": types} if types else rule
            places = (provider, ANY) if rule.get("fails") else (provider,)
            for op, place in itertools.product(rule["ops"], places):
                found.setdefault((place, op), []).append(row)
    return found


def kernel_limit(
    provider: str, node: NodeProto, bound: Mapping[str, str]
) -> str | None:
    """Return why the provider does not run the node with these types by parameter; None if it does."""
    rule = _rule_of(provider, node, bound)
    return None if rule is None else str(rule["because"])


def kernel_failure(
    provider: str, node: NodeProto, bound: Mapping[str, str], *, expanded: bool = False
) -> str | None:
    """Return why the provider takes the node with these types by parameter but fails to run it; None if it runs it.

    Args:
        provider: the provider, or "any".
        node: the node.
        bound: type parameter -> type.
        expanded: whether no kernel takes the node, so that ONNX Runtime expands it.
    """
    rule = _rule_of(provider, node, bound) or {}
    is_failing = rule.get("fails") and (rule.get("expanded") or not expanded)
    return str(rule["because"]) if is_failing else None


def _rule_of(
    provider: str, node: NodeProto, bound: Mapping[str, str]
) -> Mapping[str, Any] | None:
    for rule in _rules().get((provider, op_key(node)), ()):
        if _is_of_types(rule, bound) and _holds(rule, node, bound):
            return rule
    return None


def _is_of_types(rule: Mapping[str, Any], bound: Mapping[str, str]) -> bool:
    if "types" not in rule:
        return True
    types = (
        (bound.get(rule["parameter"], ""),) if "parameter" in rule else bound.values()
    )
    return not rule["types"].isdisjoint(types)


def has_kernel_limits(provider: str, key: str) -> bool:
    """Return whether the attributes and inputs of the op affect where it runs."""
    return (provider, key) in _rules()


def _holds(rule: Mapping[str, Any], node: NodeProto, bound: Mapping[str, str]) -> bool:
    if "differ" in rule:
        return (
            len(
                {bound[name] for name in rule["differ"] if name in bound}
                & FLOAT_TENSORS
            )
            > 1
        )
    if "present" in rule:
        return any(item.name in rule["present"] for item in node.attribute)
    if "input" in rule:
        return any(node.input[rule["input"] : rule["input"] + 1])
    if "outputs" in rule:
        return any(node.output[rule["outputs"] :])
    if "asymmetric" in rule:
        numbers = attribute(node, rule["asymmetric"]) or []
        return bool(numbers[: len(numbers) // 2] != numbers[len(numbers) // 2 :])
    return "attribute" not in rule or _is_other(
        rule, attribute(node, rule["attribute"])
    )


def _is_other(rule: Mapping[str, Any], value: Any) -> bool:
    """Return whether the value of an attribute is among those of a rule, or differs from the only supported one."""
    value = value.decode() if isinstance(value, bytes) else value
    if "among" in rule:
        return value in rule["among"]
    if "beyond" in rule:
        names = [name.decode().lower() for name in value or ()]
        return bool(names != rule["beyond"][: len(names)])
    return bool((rule["default"] if value is None else value) != rule["other_than"])
