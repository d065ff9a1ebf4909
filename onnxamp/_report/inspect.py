"""Reports of what is in a model: its contents, the op lists, and the effect of each level."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._base.words import count
from onnxamp._convert.plan import CONSTANTS, Plan
from onnxamp._decide.verdicts import Reason, title_of
from onnxamp._graph.types import PRECISIONS
from onnxamp._model.model import weight_bytes
from onnxamp._model.protos import opset_imports
from onnxamp._numerics.unseen.stressed import Room
from onnxamp._options.lists import Preset
from onnxamp._report import opset_text, size
from onnxamp._report.conversion import VARIABLES, decision_table, warning_items
from onnxamp._report.headroom import headroom_section
from onnxamp._report.parts import (
    Figure,
    Report,
    Section,
    Statement,
    Table,
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

_ROWS: Final = 12
"""Decisions, nodes or values that the terminal shows without -v."""


def inspection_report(
    path: Path,
    model: ModelProto,
    operators: Mapping[tuple[str, str], int],
    plans: Mapping[str, tuple[Plan, Mapping[str, int]]],
    hints: Mapping[str, str | None],
    *,
    rooms: Sequence[Room] = (),
    dtype: str = "",
    with_decisions: bool,
) -> Report:
    """Return a model and its levels.

    Args:
        path: the path of the model.
        model: the model.
        operators: (op type, precision) -> number of nodes.
        plans: level -> the plan, and the number of nodes by precision.
        hints: level -> preparations, and savings by folding or by another opset.
        rooms: the values with the least headroom.
        dtype: the low-precision type that these would have.
        with_decisions: show each decision even without -v.
    """
    weights = size(weight_bytes(model))
    opsets = opset_text(opset_imports(model).items())
    nodes = sum(operators.values())
    decided = {level: plan for level, (plan, _) in plans.items()}
    errors = list[Section]()
    decisions = list[Section]()
    for level, plan in decided.items():
        expected = expected_parts(plan.expected)
        errors.append(section(f"Error to expect at level {level}", expected))
        every = decision_table(plan)
        title = f"Decisions at level {level}"
        lead = hint(VARIABLES)
        decisions.append(section(title, lead, every, is_detail=not with_decisions))
    none = Statement(
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
            *errors,
            headroom_section(rooms, dtype),
            section("Quantized nodes", quantized_table(decided)),
            section("Units between integers", units_table(decided)),
            section("Notes", notes(_hint_texts(hints))),
            *decisions,
        ),
    )


def _hint_texts(hints: Mapping[str, str | None]) -> Iterator[str]:
    """Yield each hint after the levels that it is about."""
    levels = dict[str, list[str]]()
    for level, text in hints.items():
        if text:
            levels.setdefault(text, []).append(level)
    for text, names in levels.items():
        yield f"{', '.join(names)}: {text}"


def plan_report(plan: Plan) -> Report:
    """Return a plan: a summary, why nodes stay in float32, and each decision."""
    # Constants follow their readers, so counting them would count decisions twice.
    rows = tuple(row for row in plan.rows if row.op not in CONSTANTS)
    low = {row.node for row in rows if row.low}
    high = {row.node: row.reason for row in rows if not row.low}
    # A node that shares the type of another may have a reason of its own, which says more.
    for hazard in plan.hazards:
        if high.get(hazard.node) == Reason.TIE.value and not hazard.low:
            high[hazard.node] = hazard.reason
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
            section("Why nodes stay in float32", table("reasons", counts)),
            *quantized_sections(plan),
            section(
                "Decisions",
                decision_table(replace(plan, rows=rows))._replace(shown=_ROWS),
            ),
        ),
    )


def lists_report(presets: Sequence[Preset]) -> Report:
    """Return white and black lists, with the source of each entry, and the frameworks' names for ops."""
    lists = list[Section]()
    names = list[Section]()
    figures = []
    for preset in presets:
        for kind, entries in (("white", preset.white), ("black", preset.black)):
            title = f"{preset.name}: {kind} list, {len(entries)} op types"
            lists.append(section(title, table("op-list", entries.items())))
        for level, entries in preset.black_at.items():
            title = f"{preset.name}: also black at {level}"
            lists.append(section(title, table("op-list", entries.items())))
        title = f"{preset.name}: {len(preset.names)} names of the framework"
        names.append(section(title, table("op-names", _framework_rows(preset))))
        counts = f"{len(preset.white)} white, {len(preset.black)} black"
        brief = f"{preset.name} {counts}"
        figures.append(Figure(preset.name, counts, preset.summary, brief))
    return Report("lists", figures=tuple(figures), sections=(*lists, *names))


def _framework_rows(preset: Preset) -> Iterator[tuple[str, str]]:
    """Yield the framework's names, each with the ops that exporters write for it."""
    for name, ops in preset.names.items():
        yield name, ", ".join((*ops, *preset.forms.get(name, ())))


def _operators(counts: Mapping[tuple[str, str], int]) -> Table:
    """Return op types by the precisions of their nodes, as paddle.amp.debugging.collect_operator_stats does."""
    rows: dict[str, list[int]] = {}
    for op in sorted({op for op, _ in counts}):
        rows[op] = [counts.get((op, dtype), 0) for dtype in PRECISIONS]
    ops = sorted(rows, key=lambda op: -sum(rows[op]))
    cells = [(op, *(str(times or "") for times in rows[op])) for op in ops]
    return table("operators", cells, more=PRECISIONS)


def _levels(plans: Mapping[str, tuple[Plan, Mapping[str, int]]]) -> Table:
    rows = []
    for level, (plan, nodes) in plans.items():
        low = nodes.get("low", 0) + nodes.get("mixed", 0)
        kept = len({row.node for row in plan.hazards if not row.low})
        counts = (low, nodes.get("float32", 0), plan.casts, kept)
        rows.append((level, *map(str, counts)))
    return table("levels", rows)
