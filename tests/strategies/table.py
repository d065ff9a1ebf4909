"""``ops.toml`` read: what is known of each op beyond its schema."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import onnx.defs
from onnx.defs import OpSchema

CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")
"""Ops with bodies: :mod:`strategies.bodies` makes them."""
NO_RECIPE: Mapping[str, str] = {}
"""Ops of ai.onnx that no random model holds, each with its reason."""


@dataclass(frozen=True)
class Recipe:
    """How to make a valid node of an op; the words are those of ``ops.toml``."""

    inputs: tuple[Any, ...] = ("any", "~")
    also: tuple[tuple[Any, ...], ...] = ()
    must: Mapping[str, list[Any]] = field(default_factory=dict)
    attr: Mapping[str, list[Any]] = field(default_factory=dict)
    types: Mapping[str, list[str]] = field(default_factory=dict)
    need: frozenset[int] = frozenset()
    out: int | None = None
    since: int = 1
    until: int | None = None
    jumps: bool = False

    def entry(self, inputs: tuple[Any, ...], position: int) -> Any:
        """What to give to the input at ``position``; the last entry stands for all further ones."""
        return inputs[min(position, len(inputs) - 1)] if inputs else "any"


@cache
def recipes() -> Mapping[str, tuple[Recipe, ...]]:
    """Op -> its entries, oldest opset first."""
    data = tomllib.loads(Path(__file__).with_name("ops.toml").read_text(encoding="utf-8"))
    found = {}
    for op, own in data.items():
        rows = data[own[0]["like"]] if "like" in own[0] else own
        found[op] = tuple(_recipe(row) for row in rows)
    return found


def _recipe(row: Mapping[str, Any]) -> Recipe:
    return Recipe(
        inputs=tuple(row.get("in", Recipe.inputs)), also=tuple(map(tuple, row.get("also", ()))),
        must=row.get("must", {}), attr=row.get("attr", {}), types=row.get("types", {}),
        need=frozenset(row.get("need", ())), out=row.get("out"), since=row.get("since", 1), until=row.get("until"),
        jumps=row.get("jumps", False),
    )  # fmt: skip


def recipe(op: str, opset: int) -> Recipe:
    """The entry that describes the op at an opset."""
    rows = recipes().get(op, (Recipe(),))
    return next(row for row in rows if row.until is None or opset < row.until)


@cache
def schemas() -> Mapping[str, tuple[OpSchema, ...]]:
    """Every version of every op of ai.onnx that the installed onnx knows, oldest first."""
    found: dict[str, list[OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            found.setdefault(schema.name, []).append(schema)
    return {op: tuple(sorted(rows, key=lambda row: row.since_version)) for op, rows in sorted(found.items())}


@cache
def schema_at(op: str, opset: int) -> OpSchema | None:
    """The op's schema at an opset; None before there is one to make nodes of, and after it is deprecated."""
    rows = [row for row in schemas()[op] if row.since_version <= opset]
    usable = rows and not rows[-1].deprecated and recipe(op, opset).since <= opset
    return rows[-1] if usable else None


OPSETS = (11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28)
OLD_OPSETS = (9, 10)
"""For what was deprecated since."""


@cache
def opsets_of(op: str) -> tuple[int, ...]:
    """Opsets that have the op, of those that random models are made for."""
    newest = onnx.defs.onnx_opset_version()
    for versions in (OPSETS, OLD_OPSETS):
        found = tuple(version for version in versions if version <= newest and schema_at(op, version) is not None)
        if found:
            return found
    return ()


def all_ops() -> tuple[str, ...]:
    """Every op of ai.onnx that random models are made of."""
    return tuple(op for op in schemas() if opsets_of(op) and op not in NO_RECIPE)


@cache
def plain_ops(opset: int) -> tuple[str, ...]:
    """Ops without bodies at an opset; before opset 11 those without a recipe, since many had attributes for inputs."""
    known = [op for op in all_ops() if op not in CONTROL_FLOW and schema_at(op, opset) is not None]
    return tuple(op for op in known if opset >= OPSETS[0] or op not in recipes())
