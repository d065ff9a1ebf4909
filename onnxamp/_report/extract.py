"""A region that was cut out of a model: its nodes, inputs and outputs, and next steps."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from onnxamp._dtypes import readable_types
from onnxamp._extract.region import Region
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import infer_types
from onnxamp._model.storage import weight_bytes
from onnxamp._ops.facts import op_key
from onnxamp._report.formats import document
from onnxamp._report.parts import (
    Figure,
    Part,
    Report,
    Row,
    Status,
    Step,
    Table,
    Verdict,
    hint,
    notes,
    section,
    table,
)
from onnxamp._report.text import count, shape, size
from onnxamp._runtime.values import Array

_ROWS: Final = 12
"""Nodes and values that the terminal shows without -v."""


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """An array in numbers; ``least`` and ``largest`` are over finite elements, None if there are none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    least: float | None = None
    largest: float | None = None
    nan: int = 0
    inf: int = 0
    zero: int = 0


def value_facts(name: str, array: Array) -> ValueFacts:
    """Measure an array; of strings only the shape is known."""
    shape = tuple(array.shape)
    if array.dtype.kind in "OUS":
        return ValueFacts(name, "string", shape)
    numbers = array
    if array.dtype.kind not in "iu":
        numbers = array.astype(np.int64 if array.dtype == bool else np.float64)
    is_float = numbers.dtype.kind == "f"
    finite = numbers[np.isfinite(numbers)] if is_float else numbers
    nan = int(np.isnan(numbers).sum()) if is_float else 0
    return ValueFacts(
        name=name,
        dtype=array.dtype.name,
        shape=shape,
        least=finite.min().item() if finite.size else None,
        largest=finite.max().item() if finite.size else None,
        nan=nan,
        inf=numbers.size - finite.size - nan,
        zero=int((numbers == 0).sum()),
    )


def region_report(
    region: Region, files: Sequence[Path], arguments: Sequence[str] = ()
) -> Report:
    """Report of a region: its nodes, its inputs and outputs, whether it computes the same alone, its files, and next
    steps.

    ``arguments`` are those that every command about it needs.
    """
    counts = Counter(op_key(node) for node in region.model.graph.node)
    among = " and ".join(
        count(counts[op], op) for op in ("Cast", "Constant") if counts[op]
    )
    remark = f"of {region.total:,}" + (f"; {among} among them" if among else "")
    nodes = len(region.nodes)
    none, unsaved = "None: it reads only constants.", "None that can be saved."
    return Report(
        "extract",
        _verdict(region),
        (region.source,),
        figures=(
            Figure("nodes", f"{nodes:,}", remark, count(nodes, "node")),
            Figure("weights", size(weight_bytes(region.model))),
        ),
        sections=(
            section("Notes", notes(region.notes)),
            section("Nodes", _nodes(region)),
            section(f"Inputs: {region.sample}", _values(region.inputs, none)),
            section(f"Outputs: {region.ran_on}", _values(region.expected, unsaved)),
            section("Files", _files(files)),
        ),
        steps=_steps(region, files, arguments),
    )


def _verdict(region: Region) -> Verdict:
    """Whether the region computes the same alone."""
    sentence = f"Cut out {', '.join(region.around[:3])}"
    sentence += (
        f" and {len(region.around) - 3:,} more" if len(region.around) > 3 else ""
    )
    if not region.differing:
        same = "Run alone on its inputs, it computes the same, bit for bit."
        return Verdict(Status.PASSED, f"{sentence}.", (same,))
    sentence += ", but run alone, it computes something else."
    details = []
    for name, error in region.differing.items():
        known = "the two cannot be compared"
        if np.isfinite(error):
            known = f"off by {error:.1e} of its largest element"
        details.append(
            f"Run alone, it computes a different {name!r}: {known} (expected for random ops)."
        )
    return Verdict(Status.INEXACT, sentence, tuple(details))


def _nodes(region: Region) -> Table:
    """Return the nodes without Constants, starting close to the requested ones."""
    view = Graph.of(region.model)
    types, asked = infer_types(view), set(region.around)
    rows = []
    for name, node in zip(region.nodes, view.nodes, strict=False):
        if node.key != "Constant":
            kinds = (readable_types(types[value]) for value in node.writes)
            is_asked = name in asked
            cells = (
                "→" if is_asked else "",
                name,
                node.key,
                ", ".join(dict.fromkeys(kinds)),
            )
            rows.append(Row(cells, is_strong=is_asked))
    first = next((place for place, row in enumerate(rows) if row.is_strong), 0)
    first = max(0, min(first - _ROWS // 2, len(rows) - _ROWS))
    columns = ("", "node", "op", "output type")
    return table(columns, rows[first:] + rows[:first], shown=_ROWS, drop=(3,))


def _values(arrays: Mapping[str, Array], nothing: str) -> Part:
    columns = ("value", "type", "shape", "least", "largest", "NaN", "Inf", "zero")
    rows = [_value(value_facts(name, array)) for name, array in arrays.items()]
    if not rows:
        return hint(nothing)
    return table(columns, rows, right=range(3, 8), shown=_ROWS, drop=(7, 1))


def _value(facts: ValueFacts) -> Row:
    counts = (facts.nan, facts.inf, facts.zero)
    numbers = map(_number, (facts.least, facts.largest))
    cells = (facts.name, facts.dtype, shape(facts.shape), *numbers, *map(str, counts))
    return Row(cells, is_strong=bool(facts.nan or facts.inf))


def _number(x: float | None) -> str:
    if x is None:
        return "–"
    return f"{x:.4g}" if isinstance(x, float) else str(int(x))


def _files(files: Sequence[Path]) -> Table:
    contents = (
        "the region as a model",
        "its inputs",
        "its outputs (read it with numpy.load)",
    )
    pairs = zip(files, contents, strict=True)
    rows = ((str(file), size(file.stat().st_size), text) for file, text in pairs)
    return table(("file", "size", "holds"), rows, right=(1,), prose=(2,), drop=())


def _steps(
    region: Region, files: Sequence[Path], arguments: Sequence[str]
) -> tuple[Step, ...]:
    model, inputs = (shlex.quote(str(file)) for file in files[:2])
    more = "".join(f" {shlex.quote(text)}" for text in arguments)
    given = (f" --inputs {inputs}" if region.inputs else "") + more
    is_low = "emulated" in region.ran_on or any(
        "float16" in str(array.dtype) for array in region.expected.values()
    )
    look = Step("See what is in it:", f"onnxamp inspect {model}{more}")
    convert = Step(
        "See what a conversion changes in it:", f"onnxamp convert {model}{given}"
    )
    check = Step("Find the op that goes wrong:", f"onnxamp check {model}{given}")
    return check, look if is_low else convert


def region_json(region: Region, files: Sequence[Path]) -> str:
    """Return the report of a region, its recorded values and its files."""
    nodes = zip(region.nodes, region.model.graph.node, strict=True)
    facts = {
        "source": region.source,
        "around": region.around,
        "nodes": [{"node": name, "op": op_key(node)} for name, node in nodes],
        "total": region.total,
        "weight_bytes": weight_bytes(region.model),
        "ran_on": region.ran_on,
        "sample": region.sample,
        "inputs": [value_facts(name, array) for name, array in region.inputs.items()],
        "expected": [
            value_facts(name, array) for name, array in region.expected.items()
        ],
        "differing": region.differing,
        "notes": region.notes,
        "files": dict(zip(("model", "inputs", "expected"), files, strict=True)),
    }
    return document("extract", facts)
