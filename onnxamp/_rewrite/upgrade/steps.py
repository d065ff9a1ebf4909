"""The steps between versions of an op: what ``_data/upgrades.toml`` says, and what both schemas show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import onnx.defs
from onnx import helper
from onnx.defs import OpSchema

from onnxamp._ops.tables import read_table


@dataclass(frozen=True, slots=True)
class MovedAttribute:
    """An attribute that becomes an input; ``unless`` is a value that means the same as no input."""

    attribute: str
    position: int
    form: str
    unless: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of nodes of one op as its schema changes; the table documents its columns.

    ``op`` and ``version`` are those of the new schema, ``defaults`` those of attributes in the old one. ``lost`` has
    the ports, as ("inputs", 0), that admit fewer types in the new one, with these; ``known`` is False if nothing is.
    """

    op: str
    version: int
    known: bool
    renamed: bool
    defaults: Mapping[str, Any]
    lost: Mapping[tuple[str, int], frozenset[str]]
    drop: Sequence[str] = ()
    only: Mapping[str, Sequence[Any]] | None = None
    types: Sequence[str] = ()
    outputs: int | None = None
    unread: bool = False
    why: str = ""
    missing: Mapping[str, Any] | None = None
    words: Mapping[str, Mapping[str, str]] | None = None
    inputs: Sequence[MovedAttribute] = ()
    call: str = ""

    @property
    def is_closed(self) -> bool:
        """Whether no node can take the step."""
        has_condition = self.only or self.types or self.outputs is not None
        return not self.known or bool(self.why and not has_condition)

    @property
    def is_silent(self) -> bool:
        """Whether every node can take the step and stays as it is."""
        said = (
            self.lost,
            self.drop,
            self.only,
            self.types,
            self.why,
            self.missing,
            self.words,
            self.inputs,
            self.call,
        )
        return self.known and not self.renamed and self.outputs is None and not any(said)


@cache
def steps_of(op: str, current: int, wanted: int) -> tuple[Step, ...]:
    """The steps of an ai.onnx op between two opsets, in order; none for an op that has no schema there.

    A step to another op, as from Upsample to Resize, is followed by the steps of that one.
    """
    steps = list[Step]()
    while current < wanted:
        if (schema := _schema(op, current)) is None:
            break
        newer = filter(None, (_schema(op, version) for version in range(current + 1, wanted + 1)))
        found = next((other for other in newer if other.since_version > schema.since_version), None)
        if found is None:
            break
        step = _step(schema, found)
        steps.append(step)
        op, current = step.op, step.version
    return tuple(steps)


@cache
def newest_loaded() -> int:
    """The newest opset of models that ONNX Runtime loads."""
    newest: int = read_table("upgrades")["loads"]
    return newest


def is_silent(op: str, current: int, wanted: int) -> bool:
    """Whether nodes of an op stay as they are between two opsets, whatever they use."""
    return all(step.is_silent for step in steps_of(op, current, wanted))


def _schema(op: str, version: int) -> OpSchema | None:
    try:
        return onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return None


@cache
def _table() -> tuple[int, Mapping[tuple[str, int], Mapping[str, Any]]]:
    """The newest opset that was checked; (op, version) -> row."""
    table = read_table("upgrades")
    rows = ((op, row) for row in table["step"] for op in row["ops"])
    return table["checked"], {(op, row["to"]): row for op, row in rows}


def _step(old: OpSchema, new: OpSchema) -> Step:
    """The step between two schemas of an op."""
    checked, rows = _table()
    version = new.since_version
    row = rows.get((old.name, version))
    name = old.name if row is None else row.get("name", old.name)
    target = new if name == old.name else _schema(name, version)
    defaults = {
        key: helper.get_attribute_value(item.default_value)
        for key, item in _with_default(old).items()
    }
    if target is None or version > checked or (row is None and _differ(old, target)):
        return Step(name, version, known=False, renamed=False, defaults=defaults, lost={})
    row = row or {}
    moved = (
        MovedAttribute(item["from"], item["at"], item["as"], item.get("unless"))
        for item in row.get("inputs", ())
    )
    return Step(
        op=name,
        version=version,
        known=True,
        renamed=name != old.name,
        defaults=defaults,
        lost=_lost(old, target, row),
        drop=row.get("drop", ()),
        only=row.get("only"),
        types=row.get("types", ()),
        outputs=row.get("outputs"),
        unread=row.get("unread", False),
        why=row.get("why", ""),
        missing=row.get("set"),
        words=row.get("words"),
        inputs=tuple(moved),
        call=row.get("call", ""),
    )


def _with_default(schema: OpSchema) -> Mapping[str, OpSchema.Attribute]:
    return {name: item for name, item in schema.attributes.items() if item.default_value.type}


def _differ(old: OpSchema, new: OpSchema) -> bool:
    """Whether more than types and words differ."""

    def shape(schema: OpSchema) -> Any:
        ports = (
            [(port.option, port.is_homogeneous) for port in ports]
            for ports in (schema.inputs, schema.outputs)
        )
        attributes = {
            name: (item.type, item.required, item.default_value.SerializeToString())
            for name, item in schema.attributes.items()
        }
        return schema.deprecated, *ports, attributes

    return bool(shape(old) != shape(new))


_VARIADIC: Final = OpSchema.FormalParameterOption.Variadic


def _lost(
    old: OpSchema, new: OpSchema, row: Mapping[str, Any]
) -> dict[tuple[str, int], frozenset[str]]:
    """(side, position) -> the types that the new schema admits, where the old one admits others as well.

    Inputs that come or go with attributes shift others: those are what the table says, and not compared.
    """
    found = {}
    for side in ("inputs", "outputs"):
        before, after = (_types(schema, getattr(schema, side)) for schema in (old, new))
        settled = "call" in row or "name" in row
        for position, (one, other) in enumerate(zip(before, after, strict=False)):
            if one - other and not settled:
                found[side, position] = frozenset(other)
    return found


def _types(schema: OpSchema, ports: Sequence[OpSchema.FormalParameter]) -> list[set[str]]:
    admitted = {row.type_param_str: set(row.allowed_type_strs) for row in schema.type_constraints}
    return [admitted.get(port.type_str, {port.type_str}) for port in ports]
