"""What is in a model and in the lists, and what each level would do."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._convert.plan import CONSTANTS, Plan
from onnxamp._decide.words import title_of
from onnxamp._graph.stats import PRECISIONS
from onnxamp._model.protos import opset_imports
from onnxamp._model.storage import weight_bytes
from onnxamp._options.lists import Preset
from onnxamp._report import parts
from onnxamp._report.conversion import decision_table
from onnxamp._report.text import count, opset_text, size

_ROWS: Final = 12
"""Decisions that the terminal shows without -v."""


def inspection_report(
    path: Path,
    model: ModelProto,
    operators: Mapping[tuple[str, str], int],
    plans: Mapping[str, tuple[Plan, Mapping[str, int]]],
    hints: Mapping[str, str | None],
    *,
    with_decisions: bool,
) -> parts.Report:
    """A model and its levels.

    Args:
        path: where the model is.
        model: the model.
        operators: (op type, precision) -> number of nodes.
        plans: level -> the plan, and the number of nodes by precision.
        hints: level -> what comes before, and what folding or another opset would save.
        with_decisions: show each decision without -v, too.
    """
    decisions = (
        parts.section(
            f"Decisions at level {level}", [decision_table(plan)], is_detail=not with_decisions
        )
        for level, (plan, _) in plans.items()
    )
    levels = (
        [_levels(plans)]
        if plans
        else [parts.Item("No level applies: the opset is too old. Upgrade it with --opset.")]
    )
    weights, opsets = size(weight_bytes(model)), opset_text(opset_imports(model).items())
    return parts.Report(
        "inspect",
        models=(str(path),),
        figures=(
            parts.Figure(
                "nodes",
                f"{sum(operators.values()):,}",
                brief=count(sum(operators.values()), "node"),
            ),
            parts.Figure("weights", weights, brief=f"weights {weights}"),
            parts.Figure("opset", opsets, brief=f"opset {opsets}"),
            parts.Figure("IR version", str(model.ir_version)),
        ),
        sections=(
            parts.section("Operators", [_operators(operators)]),
            parts.section("Levels", levels),
            parts.section("Notes", parts.notes(_hints(hints))),
            *decisions,
        ),
    )


def plan_report(plan: Plan) -> parts.Report:
    """A plan: what is decided, why nodes stay float32, and each decision."""
    rows = tuple(row for row in plan.rows if row.op not in CONSTANTS)
    low, high = (
        {row.node for row in rows if row.low},
        {row.node: row.reason for row in rows if not row.low},
    )
    reasons = Counter(high.values()).most_common()
    return parts.Report(
        f"plan, {plan.level} {plan.dtype} for {plan.target}",
        models=(f"Plan: {plan.level} {plan.dtype} for {plan.target}",),
        figures=(
            parts.Figure(
                f"nodes in {plan.dtype}",
                f"{len(low):,}",
                f"of {len(low | high.keys()):,} that could be",
            ),
            parts.Figure("new Casts", f"{plan.casts:,}"),
        ),
        sections=(
            parts.section(
                "Warnings", (parts.Item(text, parts.Level.WARNING) for text in plan.warnings)
            ),
            parts.section("Why nodes stay float32", _reasons(reasons)),
            parts.section(
                "Decisions", [replace(decision_table(replace(plan, rows=rows)), shown=_ROWS)]
            ),
        ),
    )


def _reasons(reasons: Sequence[tuple[str, int]]) -> list[parts.Table]:
    rows = ((title_of(reason), f"{times:,}") for reason, times in reasons)
    return [parts.table(("reason", "nodes"), rows, right=(1,), drop=())] if reasons else []


def lists_report(presets: Sequence[Preset]) -> parts.Report:
    """White and black lists, with the source of each entry, and the frameworks' names for ops."""
    lists = (
        parts.section(
            f"{preset.name}: {kind} list, {len(entries)} op types",
            [parts.table(("op type", "source"), entries.items(), prose=(1,), drop=())],
        )
        for preset in presets
        for kind, entries in (("white", preset.white), ("black", preset.black))
    )
    names = (
        parts.section(
            f"{preset.name}: {len(preset.names)} names of the framework",
            [parts.table(("name", "op types"), _names(preset), prose=(1,), drop=())],
        )
        for preset in presets
        if preset.names
    )
    return parts.Report("lists", figures=tuple(map(_preset, presets)), sections=(*lists, *names))


def _preset(preset: Preset) -> parts.Figure:
    counts = f"{len(preset.white)} white, {len(preset.black)} black"
    return parts.Figure(preset.name, counts, preset.summary, f"{preset.name} {counts}")


def _names(preset: Preset) -> Iterator[tuple[str, str]]:
    return ((name, ", ".join(ops)) for name, ops in preset.names.items())


def _operators(counts: Mapping[tuple[str, str], int]) -> parts.Table:
    """Op types by the precisions that their nodes touch, as paddle.amp.debugging.collect_operator_stats has them."""
    ops = sorted(
        {op for op, _ in counts},
        key=lambda op: (-sum(counts.get((op, d), 0) for d in PRECISIONS), op),
    )
    rows = ((op, *(str(counts.get((op, dtype)) or "") for dtype in PRECISIONS)) for op in ops)
    return parts.table(("op type", *PRECISIONS), rows, right=range(1, len(PRECISIONS) + 1), drop=())


def _levels(plans: Mapping[str, tuple[Plan, Mapping[str, int]]]) -> parts.Table:
    rows = (
        (
            level,
            str(nodes.get("low", 0) + nodes.get("mixed", 0)),
            str(nodes.get("float32", 0)),
            str(plan.casts),
            str(len({row.node for row in plan.hazards if not row.low})),
        )
        for level, (plan, nodes) in plans.items()
    )
    return parts.table(
        ("level", "nodes low", "nodes float32", "new Casts", "kept for hazards"),
        rows,
        right=range(1, 5),
        drop=(),
    )


def _hints(hints: Mapping[str, str | None]) -> Iterator[str]:
    for hint in dict.fromkeys(filter(None, hints.values())):
        yield f"{', '.join(level for level, text in hints.items() if text == hint)}: {hint}"
