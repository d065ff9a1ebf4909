"""Reports of what is in a model: its contents, the op lists, the effect of each level, and a region cut out of it."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import ModelProto

from onnxamp._convert.plan import CONSTANTS, Plan
from onnxamp._decide.verdicts import title_of
from onnxamp._dtypes import readable_types
from onnxamp._extract import Region
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import PRECISIONS, infer_types
from onnxamp._model.model import weight_bytes
from onnxamp._model.protos import opset_imports
from onnxamp._ops.facts import op_key
from onnxamp._options.lists import Preset
from onnxamp._report import count, opset_text, shape, size
from onnxamp._report.conversion import decision_table, warning_items
from onnxamp._report.parts import (
    Figure,
    Item,
    Part,
    Report,
    Row,
    Status,
    Step,
    Table,
    Verdict,
    expected_figures,
    expected_parts,
    hint,
    notes,
    quantized_sections,
    quantized_table,
    section,
    table,
    units_table,
)
from onnxamp._runtime.values import Array

_ROWS: Final = 12
"""Decisions, nodes or values that the terminal shows without -v."""


def inspection_report(
    path: Path,
    model: ModelProto,
    operators: Mapping[tuple[str, str], int],
    plans: Mapping[str, tuple[Plan, Mapping[str, int]]],
    hints: Mapping[str, str | None],
    *,
    with_decisions: bool,
) -> Report:
    """Return a model and its levels.

    Args:
        path: the path of the model.
        model: the model.
        operators: (op type, precision) -> number of nodes.
        plans: level -> the plan, and the number of nodes by precision.
        hints: level -> preparations, and savings by folding or by another opset.
        with_decisions: show each decision even without -v.
    """
    weights = size(weight_bytes(model))
    opsets = opset_text(opset_imports(model).items())
    nodes = sum(operators.values())
    decided = {level: plan for level, (plan, _) in plans.items()}
    none = Item(
        "No level applies, because the opset is too old: upgrade it with --opset."
    )
    return Report(
        "inspect",
        models=(str(path),),
        figures=(
            Figure("nodes", f"{nodes:,}", brief=count(nodes, "node")),
            Figure("weights", weights, brief=f"weights {weights}"),
            Figure("opset", opsets, brief=f"opset {opsets}"),
            Figure("IR version", str(model.ir_version)),
        ),
        sections=(
            section("Operators", _operators(operators)),
            section("Levels", _levels(plans) if plans else none),
            *(
                section(
                    f"Error to expect at level {level}", expected_parts(plan.expected)
                )
                for level, (plan, _) in plans.items()
            ),
            section("Quantized nodes", quantized_table(decided)),
            section("Units between integers", units_table(decided)),
            section(
                "Notes",
                notes(
                    f"{', '.join(level for level in hints if hints[level] == told)}: {told}"
                    for told in filter(None, hints.values())
                ),
            ),
            *(
                section(
                    f"Decisions at level {level}",
                    decision_table(plan),
                    is_detail=not with_decisions,
                )
                for level, (plan, _) in plans.items()
            ),
        ),
    )


def plan_report(plan: Plan) -> Report:
    """A plan: a summary, why nodes stay float32, and each decision."""
    rows = tuple(row for row in plan.rows if row.op not in CONSTANTS)
    low = {row.node for row in rows if row.low}
    high = {row.node: row.reason for row in rows if not row.low}
    reasons = Counter(high.values()).most_common()
    counts = ((title_of(reason), f"{times:,}") for reason, times in reasons)
    named = f"{plan.level} {plan.dtype} for {plan.target}"
    able = f"of {len(low | high.keys()):,} that could be"
    return Report(
        f"plan, {named}",
        models=(f"Plan: {named}",),
        figures=(
            Figure(f"nodes in {plan.dtype}", f"{len(low):,}", able),
            Figure("new Casts", f"{plan.casts:,}"),
            *expected_figures(plan.expected),
        ),
        sections=(
            section("Warnings", warning_items(plan)),
            section("Error to expect", expected_parts(plan.expected)),
            section(
                "Why nodes stay float32",
                table("reasons", counts),
            ),
            *quantized_sections(plan),
            section(
                "Decisions",
                decision_table(replace(plan, rows=rows))._replace(shown=_ROWS),
            ),
        ),
    )


def lists_report(presets: Sequence[Preset]) -> Report:
    """White and black lists, with the source of each entry, and the frameworks' names for ops."""
    lists = (
        section(
            f"{preset.name}: {kind} list, {len(entries)} op types",
            table("op-list", entries.items()),
        )
        for preset in presets
        for kind, entries in (("white", preset.white), ("black", preset.black))
    )
    names = (
        section(
            f"{preset.name}: {len(preset.names)} names of the framework",
            table(
                "op-names",
                (
                    (name, ", ".join((*ops, *preset.forms.get(name, ()))))
                    for name, ops in preset.names.items()
                ),
            ),
        )
        for preset in presets
    )
    figures = []
    for preset in presets:
        counts = f"{len(preset.white)} white, {len(preset.black)} black"
        brief = f"{preset.name} {counts}"
        figures.append(Figure(preset.name, counts, preset.summary, brief))
    return Report("lists", figures=tuple(figures), sections=(*lists, *names))


def _operators(counts: Mapping[tuple[str, str], int]) -> Table:
    """Op types by the precisions that their nodes touch, as paddle.amp.debugging.collect_operator_stats has them."""
    rows: dict[str, list[int]] = {}
    for op in sorted({op for op, _ in counts}):
        rows[op] = [counts.get((op, dtype), 0) for dtype in PRECISIONS]
    ops = sorted(rows, key=lambda op: -sum(rows[op]))
    cells = ((op, *(str(times or "") for times in rows[op])) for op in ops)
    return table("operators", cells, more=PRECISIONS)


def _levels(plans: Mapping[str, tuple[Plan, Mapping[str, int]]]) -> Table:
    rows = []
    for level, (plan, nodes) in plans.items():
        low = nodes.get("low", 0) + nodes.get("mixed", 0)
        kept = len({row.node for row in plan.hazards if not row.low})
        rows.append(
            (level, *map(str, (low, nodes.get("float32", 0), plan.casts, kept)))
        )
    return table("levels", rows)


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
    none = "None: it reads only constants."
    unsaved = "None that can be saved."
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
    types = infer_types(view)
    asked = set(region.around)
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
    return table("region-nodes", rows[first:] + rows[:first])


def _values(arrays: Mapping[str, Array], nothing: str) -> Part:
    rows = [_value(value_facts(name, array)) for name, array in arrays.items()]
    if not rows:
        return hint(nothing)
    return table("region-values", rows)


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
    return table("region-files", rows)


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


def region_facts(region: Region, files: Sequence[Path]) -> dict[str, Any]:
    """Return the report of a region, its recorded values and its files."""
    nodes = zip(region.nodes, region.model.graph.node, strict=True)
    return {
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
