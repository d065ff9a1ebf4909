"""Facts about op types, read once from ``_data/ops.toml``: data for the passes, no logic of theirs."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from onnx import NodeProto, helper


@dataclass(frozen=True, slots=True)
class DtypeAttribute:
    """The attribute that fixes the element type of a node's first output."""

    attribute: str
    default: str | None
    """Element type where the attribute is absent; "input" or "scale" name the input that gives it."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where a node that looks up rows has their indices and its table, and the attribute that names the axis."""

    indices: int
    table: int
    axis: str | None = None
    """None: axis 0."""


@dataclass(frozen=True, slots=True)
class OutputParameter:
    """The attribute that fixes a type parameter which only outputs have, and the element type where it is absent."""

    parameter: str
    attribute: str
    default: str


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The tables of ``_data/ops.toml``; the comments there say what each means."""

    exact: frozenset[str]
    exact_when: Mapping[str, Mapping[str, Any]]
    dtype_attribute: Mapping[str, DtypeAttribute]
    output_parameter: Mapping[str, OutputParameter]
    pinned_parameters: Mapping[str, frozenset[str]]
    quantize: frozenset[str]
    dequantize: frozenset[str]
    folded: frozenset[str]
    folds_into: frozenset[str]
    kernel_free: frozenset[str]
    control_flow: frozenset[str]
    following: frozenset[str]
    idle: frozenset[str]
    uncounted: frozenset[str]
    """``idle`` and control flow."""
    random: frozenset[str]
    uninferable: frozenset[str]
    contractions: frozenset[str]
    unrounded: frozenset[str]
    computes_in: Mapping[str, str]
    reads_bits: frozenset[str]
    lookups: Mapping[str, tuple[Lookup, ...]]
    size_inputs: Mapping[str, tuple[int, ...]]
    mask_inputs: Mapping[str, tuple[int, ...]]
    carriers: frozenset[str]
    joining: frozenset[str]
    parting: frozenset[str]
    hazard: Mapping[str, frozenset[str]]
    index_inputs: Mapping[str, tuple[int, ...]]
    guarded: Mapping[str, tuple[int, ...]]
    added_epsilons: Mapping[str, tuple[int, ...]]
    bounding_epsilons: Mapping[str, tuple[int, ...]]
    divisors: Mapping[str, tuple[int, ...]]


@cache
def op_facts() -> OpFacts:
    """The facts, parsed at the first call."""
    text = resources.files("onnxamp").joinpath("_data/ops.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    hazard = data["hazard"]
    return OpFacts(
        exact=frozenset(data["exact"]["ops"]),
        exact_when=data["exact"]["when"],
        dtype_attribute={
            op: DtypeAttribute(row["attribute"], row.get("default")) for op, row in data["dtype_attribute"].items()
        },
        output_parameter={op: OutputParameter(**row) for op, row in data["output_parameter"].items()},
        pinned_parameters={op: frozenset(names) for op, names in data["pinned_parameters"].items()},
        quantize=frozenset(data["quantization"]["quantize"]),
        dequantize=frozenset(data["quantization"]["dequantize"]),
        folded=frozenset(data["folding"]["batch_norm"]),
        folds_into=frozenset(data["folding"]["into"]),
        kernel_free=frozenset(data["kernel_free"]["ops"]),
        control_flow=frozenset(data["control_flow"]["ops"]),
        following=frozenset(data["following"]["ops"]),
        idle=frozenset(data["idle"]["ops"]),
        uncounted=frozenset(data["idle"]["ops"] + data["control_flow"]["ops"]),
        random=frozenset(data["random"]["ops"]),
        uninferable=frozenset(data["uninferable"]["ops"]),
        contractions=frozenset(data["contractions"]["ops"]),
        unrounded=frozenset(data["unrounded"]["movement"] + data["unrounded"]["sources"]),
        computes_in=data["computes_in"],
        reads_bits=frozenset(data["reads_bits"]["ops"]),
        lookups={op: tuple(Lookup(**row) for row in rows) for op, rows in data["lookups"].items()},
        size_inputs=_ports(data["size_inputs"]),
        mask_inputs=_ports(data["mask_inputs"]),
        carriers=frozenset(data["carriers"]["ops"]),
        joining=frozenset(data["carriers"]["joining"]),
        parting=frozenset(data["carriers"]["parting"]),
        hazard={name: frozenset(ops) for name, ops in hazard.items() if isinstance(ops, list)},
        index_inputs=_ports(hazard["index_inputs"]),
        guarded=_ports(hazard["guarded"]),
        added_epsilons=_ports(hazard["added_epsilons"]),
        bounding_epsilons=_ports(hazard["bounding_epsilons"]),
        divisors=_ports(hazard["divisors"]),
    )


def _ports(table: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {op: tuple(ports) for op, ports in table.items()}


def op_key(node: NodeProto) -> str:
    """How tables name the node's op: ``Conv``, ``com.microsoft::Gelu``; "ai.onnx" is the default domain."""
    domain = node.domain
    return node.op_type if domain in ("", "ai.onnx") else f"{domain}::{node.op_type}"


def attribute(node: NodeProto, name: str) -> Any:
    """Value of the node's attribute, or None where it is absent. Complexity: linear in the attributes."""
    for item in node.attribute:
        if item.name == name:
            return helper.get_attribute_value(item)
    return None


def is_exact(node: NodeProto) -> bool:
    """Whether the node commutes with rounding, so that its precision changes no number but by one rounding."""
    facts, key = op_facts(), op_key(node)
    if key not in facts.exact:
        return False
    condition = facts.exact_when.get(key)
    if condition is None:
        return True
    if "absent_output" in condition:
        position = condition["absent_output"]
        return len(node.output) <= position or not node.output[position]
    value = attribute(node, condition["attribute"])
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return bool((condition["default"] if text is None else text) == condition["equals"])
