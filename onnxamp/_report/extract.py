"""A region that was cut out: as terminal tables, and as JSON."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxamp._dtypes import readable_types
from onnxamp._extract import Region
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import infer_types
from onnxamp._graph.view import ABSENT
from onnxamp._model.storage import weight_bytes
from onnxamp._ops.facts import op_key
from onnxamp._report.machine import document
from onnxamp._report.parts import heading, line, make_table, plain, size
from onnxamp._runtime.inputs import Array

_ROWS: Final = 12
"""Nodes and values of a table that are shown unless all are asked for."""


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """An array in numbers; ``least`` and ``largest`` are of finite elements, None where there are none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    least: float | None
    largest: float | None
    nan: int
    inf: int
    zero: int


def value_facts(name: str, array: Array) -> ValueFacts:
    """Measure an array; of strings only the shape."""
    shape = tuple(array.shape)
    if array.dtype.kind in "OUS":
        return ValueFacts(name, "string", shape, None, None, 0, 0, 0)
    numbers: Array = (
        array if array.dtype.kind in "iu" else array.astype(np.int64 if array.dtype == bool else np.float64)
    )
    finite, nan = numbers, 0
    if numbers.dtype.kind == "f":
        finite, nan = numbers[np.isfinite(numbers)], int(np.isnan(numbers).sum())
    least, largest = (finite.min().item(), finite.max().item()) if finite.size else (None, None)
    zero = int((numbers == 0).sum())
    return ValueFacts(name, array.dtype.name, shape, least, largest, nan, numbers.size - finite.size - nan, zero)


def region_json(region: Region, files: Sequence[Path]) -> str:
    """One JSON object: what was cut, what was recorded, and where it was written."""
    facts = {
        "source": region.source,
        "around": region.around,
        "nodes": [
            {"node": name, "op": op_key(node)} for name, node in zip(region.nodes, region.model.graph.node, strict=True)
        ],
        "total": region.total,
        "weight_bytes": weight_bytes(region.model),
        "ran_on": region.ran_on,
        "sample": region.sample,
        "inputs": [value_facts(name, array) for name, array in region.inputs.items()],
        "expected": [value_facts(name, array) for name, array in region.expected.items()],
        "differing": region.differing,
        "notes": region.notes,
        "files": dict(zip(("model", "inputs", "expected"), files, strict=True)),
    }
    return document("extract", facts)


def region_report(region: Region, files: Sequence[Path], *, verbose: bool) -> RenderableType:
    """What was cut, what enters and leaves it, whether it shows the same numbers, where it is, and what to do next."""
    return Group(
        _head(region),
        *(line(Text("!", style="yellow"), plain(note)) for note in region.notes),
        heading("Nodes"),
        *_nodes(region, verbose=verbose),
        heading(f"Enters ({region.sample})"),
        *_values(region.inputs, "Nothing: it computes from constants alone.", verbose=verbose),
        heading(f"Leaves ({region.ran_on})"),
        *_values(region.expected, "Nothing that can be saved.", verbose=verbose),
        *_verdict(region),
        heading("Written"),
        *_written(files),
        heading("Next"),
        *_next(region, files),
    )


def _head(region: Region) -> Text:
    middle = ", ".join(region.around[:3]) + (f" and {len(region.around) - 3} more" if len(region.around) > 3 else "")
    counts = Counter(op_key(node) for node in region.model.graph.node)
    apart = [f"{counts[op]} {op}{'s' if counts[op] != 1 else ''}" for op in ("Cast", "Constant") if counts[op]]
    among = f", {' and '.join(apart)} among them" if apart else ""
    return Text.assemble(
        ("✂ ", "cyan"), plain(middle), "  out of  ", plain(region.source),
        f"   {len(region.nodes)} of {region.total} nodes{among}; {size(weight_bytes(region.model))} of weights",
    )  # fmt: skip


def _nodes(region: Region, *, verbose: bool) -> list[RenderableType]:
    """The nodes without the Constants; where there are too many, those around the first in the middle."""
    view = Graph.of(region.model)
    types, middle = infer_types(view), set(region.around)
    rows = [row for row in zip(region.nodes, view.nodes, strict=False) if verbose or row[1].key != "Constant"]
    place = next((place for place, (name, _) in enumerate(rows) if name in middle), 0)
    first = 0 if verbose else max(0, min(place - _ROWS // 2, len(rows) - _ROWS))
    table = make_table("", "node", "op", "makes", right=())
    for name, node in rows[first : None if verbose else first + _ROWS]:
        kinds = dict.fromkeys(readable_types(types[value]) for value in node.outputs if value != ABSENT)
        mark = Text("→", style="bold cyan") if name in middle else ""
        table.add_row(mark, plain(name), plain(node.key), ", ".join(kinds))
    return _limited(table, len(rows), verbose=verbose)


def _values(arrays: Mapping[str, Array], nothing: str, *, verbose: bool) -> list[RenderableType]:
    if not arrays:
        return [line("", plain(nothing))]
    table = make_table("value", "type", "shape", "least", "largest", "NaN", "Inf", "zero", right=(3, 4, 5, 6, 7))
    for name, array in list(arrays.items())[: None if verbose else _ROWS]:
        facts = value_facts(name, array)
        counts = (Text(str(n), style="red" if n and alarming else "") for n, alarming in
                  ((facts.nan, True), (facts.inf, True), (facts.zero, False)))  # fmt: skip
        shape = "×".join(map(str, facts.shape)) or "scalar"
        table.add_row(plain(name), facts.dtype, shape, _number(facts.least), _number(facts.largest), *counts)
    return _limited(table, len(arrays), verbose=verbose)


def _limited(table: Table, count: int, *, verbose: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [Padding(table, (0, 0, 0, 2), expand=False)]
    if not verbose and count > _ROWS:
        parts.append(line("", Text(f"… and {count - _ROWS} more (-v shows all)", style="dim")))
    return parts


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.4g}" if isinstance(x, float) else str(int(x))


def _verdict(region: Region) -> list[RenderableType]:
    """Whether the region alone gives the same numbers."""
    if not region.differing:
        return [
            line(Text("✔", style="green"), Text("Run alone on what enters it, the region gives the same to the bit."))
        ]
    return [
        line(Text("≈", style="yellow"), plain(f"Run alone, the region gives another {name!r}: {_apart(error)}."))
        for name, error in region.differing.items()
    ]  # fmt: skip


def _apart(error: float) -> str:
    known = f"off by {error:.1e} of its largest element"
    return f"{known if np.isfinite(error) else 'not to be compared'} (random ops are like that)"


def _written(files: Sequence[Path]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2, 0, 0))
    for file, text in zip(
        files, ("the region as a model", "what enters it", "what leaves it (numpy.load reads it)"), strict=True
    ):
        table.add_row(plain(str(file)), Text(size(file.stat().st_size)), Text(text, style="dim"))
    return [Padding(table, (0, 0, 0, 2), expand=False)]


def _next(region: Region, files: Sequence[Path]) -> list[RenderableType]:
    model, inputs = (shlex.quote(str(file)) for file in files[:2])
    given = f" --inputs {inputs}" if region.inputs else ""
    is_low = "emulated" in region.ran_on or any("float16" in str(array.dtype) for array in region.expected.values())
    commands = [
        (f"onnxamp check {model}{given}", "where the region goes wrong, op by op"),
        (f"onnxamp inspect {model}", "what is in it")
        if is_low
        else (f"onnxamp convert {model}{given}", "what a conversion does to it"),
    ]
    table = Table.grid(padding=(0, 2, 0, 0))
    for command, text in commands:
        table.add_row(Text(plain(command).plain, style="bold"), Text(text, style="dim"))
    return [Padding(table, (0, 0, 0, 2), expand=False)]
