"""Facts about op types, read once from ``_data/ops.toml``: data for the passes, without any of their logic."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import NodeProto, defs, helper

from onnxamp._base.records import record
from onnxamp._facts.tables import read_table


class DtypeAttribute(NamedTuple):
    """The attribute that fixes the element type of a node's first output."""

    attribute: str
    default: str | None = None
    """Element type if the attribute is absent; "input" or "scale" name the input that determines it."""

    @property
    def giver(self) -> int | None:
        """The input that determines the type if the attribute is absent; None if none does."""
        return _GIVERS.get(self.default)


class Lookup(NamedTuple):
    """The positions of a lookup's indices and table among its inputs, and the attribute that names the axis."""

    indices: int
    table: int
    axis: str | None = None
    """None: axis 0."""


class Product(NamedTuple):
    """The weight by which a node multiplies rows, and its layout; the comments of the table define each column."""

    form: str
    weight: int
    rows: int | None = None
    steps: int | None = None
    is_left: bool = False
    turned: str | None = None
    rows_turned: str | None = None
    when: tuple[Mapping[str, Any], ...] = ()

    def applies(self, node: NodeProto) -> bool:
        """Return whether the node's attributes have the requested values."""
        return all(
            attribute_of(node, row["attribute"], row["default"]) == row["equals"]
            for row in self.when
        )


class Count(NamedTuple):
    """An output that holds integers, and what they may reach; the comments of the table define each column."""

    output: int
    up_to: str = ""
    default: int = 0
    """The axis, if the attribute is absent."""


class CacheWindow(NamedTuple):
    """Outputs that hold a window of rows while an attribute is set, and the input that holds their number less one."""

    when: str
    seen: int
    caches: tuple[int, ...]


class OutputParameter(NamedTuple):
    """The attribute that fixes a type parameter of outputs alone, and the element type if it is absent."""

    parameter: str
    attribute: str
    default: str


@record
class OpFacts:
    """The rows of ``_data/ops.toml``, by flag and column; the comments there define each of these."""

    # Flags
    additive: frozenset[str]
    centering: frozenset[str]
    centering_axes: frozenset[str]
    centering_channels: frozenset[str]
    containers: frozenset[str]
    contractions: frozenset[str]
    control_flow: frozenset[str]
    cumulative: frozenset[str]
    curves: frozenset[str]
    dequantize: frozenset[str]
    elementwise: frozenset[str]
    eliminated: frozenset[str]
    empties_rows: frozenset[str]
    epsilons: frozenset[str]
    biased: frozenset[str]
    bounds: frozenset[str]
    commutative: frozenset[str]
    exponentials: frozenset[str]
    exact: frozenset[str]
    """Includes all data movement."""
    folded: frozenset[str]
    folds_into: frozenset[str]
    following: frozenset[str]
    """Includes control flow."""
    follows_type: frozenset[str]
    fused_blindly: frozenset[str]
    gates: frozenset[str]
    growing: frozenset[str]
    growing_reductions: frozenset[str]
    idle: frozenset[str]
    integer_products: frozenset[str]
    interpolates: frozenset[str]
    keeps_rows: frozenset[str]
    kernel_free: frozenset[str]
    linear: frozenset[str]
    logarithms: frozenset[str]
    loops: frozenset[str]
    magnitudes: frozenset[str]
    mask_sinks: frozenset[str]
    means: frozenset[str]
    normalizing: frozenset[str]
    periodic: frozenset[str]
    ones_at_zero: frozenset[str]
    pointwise: frozenset[str]
    position_sinks: frozenset[str]
    position_sources: frozenset[str]
    quantize: frozenset[str]
    random: frozenset[str]
    reads_bits: frozenset[str]
    reduces_axes: frozenset[str]
    reductions: frozenset[str]
    repeats: frozenset[str]
    representable: frozenset[str]
    rounding: frozenset[str]
    running_sums: frozenset[str]
    saturating: frozenset[str]
    selections: frozenset[str]
    steep: frozenset[str]
    thresholds: frozenset[str]
    transforms: frozenset[str]
    undefined: frozenset[str]
    uninferable: frozenset[str]
    vanishing: frozenset[str]
    views: frozenset[str]

    # Sets that follow from the flags
    moves_data: frozenset[str]
    """Data movement on tensors."""
    carriers: frozenset[str]
    """Ops that keep constants constant, because they only move or cast input 0."""
    relabels: frozenset[str]
    """Ops that pass on their only input, possibly in another type."""
    uncounted: frozenset[str]
    """``idle`` and control flow."""
    unlaunched: frozenset[str]
    """``views``, ``kernel_free`` and control flow."""
    unrounded: frozenset[str]
    """Ops whose outputs need no rounding if their inputs are already rounded."""

    # Kinds of arithmetic, each including data movement
    coordinate_arithmetic: frozenset[str]
    index_arithmetic: frozenset[str]
    mask_arithmetic: frozenset[str]
    norm_arithmetic: frozenset[str]
    odds_arithmetic: frozenset[str]
    position_arithmetic: frozenset[str]
    spectral_arithmetic: frozenset[str]
    transform_arithmetic: frozenset[str]

    # Columns
    moved_inputs: Mapping[str, range | tuple[int, ...]]
    passes_on: Mapping[str, str]
    core_of: Mapping[str, tuple[str, ...]]
    exact_when: Mapping[str, Mapping[str, Any]]
    dtype_attribute: Mapping[str, DtypeAttribute]
    output_parameter: Mapping[str, OutputParameter]
    pinned_parameters: Mapping[str, frozenset[str]]
    tied_parameters: Mapping[str, frozenset[str]]
    computes_in: Mapping[str, str]
    shortcut: Mapping[str, str]
    value_names: Mapping[str, tuple[str, ...]]
    misread_defaults: Mapping[str, Mapping[str, int]]
    free_sources: Mapping[str, frozenset[str]]
    """Sources as tensor types."""
    lookups: Mapping[str, tuple[Lookup, ...]]
    placements: Mapping[str, tuple[Lookup, ...]]
    size_inputs: Mapping[str, tuple[int, ...]]
    score_masks: Mapping[str, tuple[int, ...]]
    score_outputs: Mapping[str, tuple[int, ...]]
    mask_inputs: Mapping[str, tuple[int, ...]]
    index_inputs: Mapping[str, tuple[int, ...]]
    region: Mapping[str, Mapping[str, int]]
    scales: Mapping[str, tuple[int, ...]]
    guarded: Mapping[str, tuple[int, ...]]
    moments: Mapping[str, tuple[int, ...]]
    input_numbers: Mapping[str, tuple[str, ...]]
    result_numbers: Mapping[str, tuple[str, ...]]
    squashed_by: Mapping[str, tuple[str, ...]]
    boxes: Mapping[str, tuple[int, ...]]
    choices: Mapping[str, tuple[int, ...]]
    decides: Mapping[str, str]
    types_only: Mapping[str, tuple[int, ...]]
    added_epsilons: Mapping[str, range | tuple[int, ...]]
    bounding_epsilons: Mapping[str, range | tuple[int, ...]]
    bounding_attribute: Mapping[str, str]
    scattered_sums: Mapping[str, str]
    divisors: Mapping[str, tuple[int, ...]]
    adds: Mapping[str, range | tuple[int, ...]]
    carries: Mapping[str, range | tuple[int, ...]]
    multiplies: Mapping[str, range | tuple[int, ...]]
    counts: Mapping[str, tuple[Count, ...]]
    products: Mapping[str, tuple[Product, ...]]
    windows: Mapping[str, CacheWindow]


DERIVED: Final = frozenset(
    {"carriers", "moves_data", "relabels", "uncounted", "unlaunched", "unrounded"}
)
"""The sets that follow from flags and columns, so that no row names them."""


@cache
def op_facts() -> OpFacts:
    """Return the facts, which are parsed at the first call."""
    sets: dict[str, set[str]] = defaultdict(set)
    columns: dict[str, dict[str, Any]] = defaultdict(dict)
    for op, row in read_table("ops").items():
        for flag in row.pop("is", ()):
            sets[flag].add(op)
        for kind in row.pop("arithmetic", ()):
            sets[f"{kind}_arithmetic"].add(op)
        for name, value in row.items():
            columns[name][op] = _COLUMNS.get(name, _plain)(value)
    # The table says what an op adds; what holds of all data movement is added here, so that no row can forget it.
    moved = columns["moved_inputs"] = columns.pop("moves")
    control_flow = sets["control_flow"]
    moves_data = moved.keys() - sets["containers"]
    for name, arithmetic in sets.items():
        if name.endswith("_arithmetic"):
            arithmetic.update(moves_data)
    sets["exact"] |= moved.keys()
    sets["following"] |= control_flow
    facts: dict[str, Any] = dict(columns)
    for name, ops in sets.items():
        facts[name] = frozenset(ops)
    unread = facts.keys() - {field.name for field in fields(OpFacts)}
    if unread:
        raise TypeError(
            f"ops.toml uses {', '.join(sorted(unread))}: add a field for it to OpFacts in onnxamp/_facts/ops.py."
        )
    return OpFacts(
        **facts,
        moves_data=frozenset(moves_data),
        carriers=frozenset({"Cast", *(op for op in moves_data if moved[op] == (0,))}),
        relabels=frozenset(
            op for op, how in columns["passes_on"].items() if how != "alone"
        ),
        uncounted=frozenset(sets["idle"] | control_flow),
        unlaunched=frozenset(sets["views"] | sets["kernel_free"] | control_flow),
        unrounded=frozenset(moved.keys() | control_flow | sets["representable"]),
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_ALL_INPUTS = 1 << 31
"""More inputs than a node can have."""


def _ports(inputs: Any) -> range | tuple[int, ...]:
    """Return the positions of inputs that a column names."""
    return range(_ALL_INPUTS) if inputs == "all" else tuple(inputs)


_COLUMNS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "counts": lambda rows: tuple(Count(**row) for row in rows),
    "dtype_attribute": lambda row: DtypeAttribute(**row),
    "free_sources": lambda names: frozenset(f"tensor({name})" for name in names),
    **dict.fromkeys(
        ("lookups", "placements"), lambda rows: tuple(Lookup(**row) for row in rows)
    ),
    **dict.fromkeys(
        (
            "added_epsilons",
            "adds",
            "bounding_epsilons",
            "carries",
            "moves",
            "multiplies",
        ),
        _ports,
    ),
    "output_parameter": lambda row: OutputParameter(**row),
    "pinned_parameters": frozenset,
    "products": lambda rows: tuple(Product(**row) for row in rows),
    "tied_parameters": frozenset,
    "windows": lambda row: CacheWindow(**row | {"caches": tuple(row["caches"])}),
}
"""Parsers of columns that hold more than values and lists of values."""


def op_key(node: NodeProto) -> str:
    """Return the name of the node's op in tables: ``Conv``, ``com.microsoft::Gelu``; "ai.onnx" is left out."""
    domain = node.domain
    return node.op_type if domain in ("", "ai.onnx") else f"{domain}::{node.op_type}"


def attribute(node: NodeProto, name: str) -> Any:
    """Return the value of the node's attribute, or None if it is absent. Complexity: linear in the attributes."""
    for item in node.attribute:
        if item.name == name:
            return helper.get_attribute_value(item)
    return None


def attribute_of(node: NodeProto, name: str, default: Any) -> Any:
    """Return the value of the node's attribute, with strings decoded, or the default if it is absent."""
    value = attribute(node, name)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return default if value is None else value


def attribute_in_effect(
    node: NodeProto, key: str, opset: int, name: str, default: Any = None
) -> Any:
    """Return the value of the node's attribute, or else the schema's default, or ``default``. Bytes are decoded."""
    value = attribute(node, name)
    if value is None:
        value = declared_default(key, opset, name)
    value = default if value is None else value
    return value.decode() if isinstance(value, bytes) else value


_NEWEST: Final = defs.onnx_opset_version()


@cache
def declared_default(key: str, opset: int, name: str) -> Any:
    """Return the default of an attribute by onnx's schema; None if there is none.

    A runtime may know an op before onnx does: ONNX Runtime takes a LayerNormalization at opset 12.
    """
    if not defs.has(key):
        return None
    schema = defs.get_schema(key, opset if defs.has(key, opset) else _NEWEST)
    declared = schema.attributes.get(name)
    if declared is None or not declared.default_value.type:
        return None
    value = helper.get_attribute_value(declared.default_value)
    if isinstance(value, float):  # 0.9, not the nearest float32
        value = float(str(np.float32(value)))
    return value


def type_giver(node: NodeProto) -> int | None:
    """Return the input that gives output 0 its type if the dtype attribute is absent; None if none does."""
    rule = op_facts().dtype_attribute.get(op_key(node))
    return None if rule is None or attribute(node, rule.attribute) else rule.giver


_GIVERS: Final[Mapping[str | None, int]] = {"input": 0, "scale": 1}
"""The input that each default of a dtype attribute names."""


def is_exact(node: NodeProto) -> bool:
    """Return whether the node commutes with rounding: its precision changes each number by at most one rounding."""
    facts = op_facts()
    key = op_key(node)
    if key not in facts.exact:
        return False
    condition = facts.exact_when.get(key)
    if condition is None:
        return True
    if "absent_output" in condition:
        position = condition["absent_output"]
        return len(node.output) <= position or not node.output[position]
    value = attribute_of(node, condition["attribute"], condition["default"])
    return bool(value == condition["equals"])
