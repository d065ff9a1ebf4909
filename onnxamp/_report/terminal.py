"""Reports as rich tables. Names come from the model: markup and control characters in them are shown, not obeyed."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxamp._convert.convert import Conversion
from onnxamp._convert.plan import HazardRow, Plan
from onnxamp._numerics.results import DiffReport
from onnxamp._report.advice import advice, fallbacks
from onnxamp._report.diff import comparison
from onnxamp._report.parts import heading, line, make_table, plain, size

_ROWS = 12
"""Rows of a table that may be long, unless everything is asked for."""
_HAZARD_KINDS = {
    "constant range": "a constant beyond the low range",
    "epsilon": "an epsilon that the low type loses, or what it guards",
    "mask": "an attention mask that the low type would change",
    "normalisation island": "a normalisation written out as single ops: its squares overflow",
    "index path": "integers, positions or sizes carried in floats",
    "large reduction": "a sum over very many elements",
    "quantized unit": "ops that the runtime fuses into integer kernels",
    "runtime fusion": "a Cast that a fusion of the runtime would swallow",
}


def conversion_report(made: Conversion, validation: DiffReport | None, *, verbose: bool) -> RenderableType:
    """All that a conversion has to say."""
    failed = validation is not None and not validation.passed and not validation.skipped
    parts: list[RenderableType] = [
        _numbers(made, failed=failed),
        *_hazards(made.plan, verbose=verbose),
        *_kernels(made),
    ]
    parts += _losses(made, verbose=verbose)
    if verbose:
        parts += [heading("Verdicts"), verdict_table(made.plan)]
    if validation is not None:
        parts += comparison(validation, "Validation", verbose=verbose)
    notes = [*made.notes, *made.plan.warnings, *advice(made)]
    if notes:
        parts += [heading("Worth knowing"), *(line("•", plain(note)) for note in notes)]
    return Group(*parts)


def _why_nothing(plan: Plan) -> str:
    """The most frequent reason for which the nodes stay float32."""
    if plan.level == "O0":
        return "O0 lowers nothing"
    if not plan.rows:
        return "the model computes with no float32"
    reasons = Counter(row.reason for row in plan.rows if row.reason not in ("constant", "tie"))
    if not reasons:
        return "only constants are float32"
    return f"most nodes stay float32 for this reason: {reasons.most_common(1)[0][0]}"


def _numbers(made: Conversion, *, failed: bool) -> RenderableType:
    plan, summary = made.plan, made.summary
    casts = summary.casts_before
    table = make_table("", "before", "after")
    for label, kind in (
        (f"nodes in {plan.dtype}", "low"),
        ("nodes in both", "mixed"),
        ("nodes in float32", "float32"),
        ("nodes without floats", "no floats"),
    ):
        counts = (summary.nodes_before.get(kind, 0), summary.nodes.get(kind, 0))
        if any(counts):
            table.add_row(label, *map(str, counts))
    after = casts + summary.casts_added - summary.casts_removed
    change = f"{after}  (+{summary.casts_added} −{summary.casts_removed})"
    table.add_row("Casts", str(casts), change if after != casts else str(after))
    table.add_row("weights", size(made.bytes_before), size(made.bytes_after))
    mark = ("✘ ", "red") if failed else ("✔ ", "green")
    head = Text.assemble(mark, plain(str(made.target)), f"   {plan.level} {plan.dtype} for {plan.target}")
    if not any(row.low for row in plan.rows):
        more = "more " if summary.nodes_before.get("low") else ""
        head.append(f"   nothing {more}became low: {_why_nothing(plan)}")
    return Group(head, Padding(table, (0, 0, 0, 2), expand=False))


def _hazards(plan: Plan, *, verbose: bool) -> list[RenderableType]:
    hazards = _deciding(plan)
    if not hazards:
        return []
    groups: dict[tuple[str, str], list[str]] = {}
    for row in hazards:
        groups.setdefault((row.reason, row.detail), []).append(row.node)
    low = {row.node for row in hazards if row.low}
    kept = {row.node for row in hazards} - low
    fates = [f"{len(kept)} nodes stay float32"] if kept else []
    fates += [f"{len(low)} are {plan.dtype} all the same"] if low else []
    parts: list[RenderableType] = [heading(f"Hazards: {', '.join(fates)}")]
    for reason, count in Counter(row.reason for row in hazards).most_common():
        parts.append(line(f"{count:>4}", Text(_HAZARD_KINDS.get(reason, reason))))
    table = make_table("node", "because", right=())
    shown = list(groups.items()) if verbose else list(groups.items())[:_ROWS]
    for (reason, detail), nodes in shown:
        names = plain(nodes[0])
        if verbose:
            names = Text("\n").join(map(plain, nodes))
        elif len(nodes) > 1:
            names.append(f"  and {len(nodes) - 1} more", style="dim")
        table.add_row(names, plain(f"{reason}: {detail}"))
    parts.append(Padding(table, (0, 0, 0, 2), expand=False))
    if len(shown) < len(groups):
        parts.append(line("", Text(f"… and {len(groups) - len(shown)} more reasons (-v shows all)", style="dim")))
    if plan.options.hazards:
        text = "--force-low REGEX lowers nodes all the same, with what shares their precision; --no-hazards all"
        parts.append(line("", Text(text, style="dim")))
    return parts


def _deciding(plan: Plan) -> Sequence[HazardRow]:
    """The hazards that decided something: at level auto, measurements stand for those that samples show."""
    if plan.level != "auto":
        return plan.hazards
    reasons = {row.reason for row in plan.rows if not row.low}
    return [row for row in plan.hazards if row.reason in reasons]


def _kernels(made: Conversion) -> list[RenderableType]:
    text = fallbacks(made)
    return [heading("Kernels"), line("•", plain(text))] if text else []


def _losses(made: Conversion, *, verbose: bool) -> list[RenderableType]:
    """Weights with elements that did not just lose digits."""
    lost = {name: c for name, c in made.weights.items() if c.overflowed or c.flushed or (verbose and c.subnormal)}
    subnormal = sum(c.subnormal for c in made.weights.values())
    parts: list[RenderableType] = []
    if lost:
        worst = sorted(lost, key=lambda name: (lost[name].overflowed, lost[name].flushed), reverse=True)
        table = make_table("weight", "elements", "saturated", "became zero", "became subnormal")
        for name in worst if verbose else worst[:_ROWS]:
            c = lost[name]
            table.add_row(plain(name), f"{c.elements:,}", f"{c.overflowed:,}", f"{c.flushed:,}", f"{c.subnormal:,}")
        head = f"Weights: {len(lost)} of {len(made.weights)} converted tensors lose elements"
        parts += [heading(head), Padding(table, (0, 0, 0, 2), expand=False)]
        if len(lost) > _ROWS and not verbose:
            parts.append(line("", Text(f"… and {len(lost) - _ROWS} more (-v shows all)", style="dim")))
    if subnormal and not verbose:
        elements = sum(c.elements for c in made.weights.values())
        text = f"{subnormal:,} of {elements:,} converted weight elements became subnormal, with fewer digits"
        parts.append(Text(f"\n{text}", style="dim"))
    return parts


def verdict_table(plan: Plan) -> Table:
    """Every variable with its precision and the reason."""
    table = make_table("variable", "op", "precision", "reason", right=())
    for row in plan.rows:
        precision = Text(plan.dtype, style="cyan") if row.low else Text("float32")
        reason = f"{row.reason}: {row.detail}" if row.detail else row.reason
        table.add_row(plain(row.key), plain(row.op), precision, plain(reason))
    return table


def list_table(kind: str, entries: Mapping[str, str]) -> RenderableType:
    """A white or black list with the source of each entry."""
    table = make_table(f"{kind}: {len(entries)}", "source", right=())
    for op, source in entries.items():
        table.add_row(op, Text(source, style="dim"))
    return Padding(table, (0, 0, 0, 2), expand=False)


def operator_table(counts: Mapping[tuple[str, str], int]) -> Table:
    """Op types against the precisions that their nodes touch, as paddle.amp.debugging.collect_operator_stats."""
    columns = ("float16", "bfloat16", "float32", "other")
    table = make_table("op type", *columns)
    ops = sorted({op for op, _ in counts}, key=lambda op: (-sum(counts.get((op, c), 0) for c in columns), op))
    for op in ops:
        table.add_row(plain(op), *(str(counts.get((op, column)) or "") for column in columns))
    return table


def level_table(plans: Mapping[str, tuple[Plan, Mapping[str, int]]]) -> Table:
    """What each level would do."""
    table = make_table("level", "nodes low", "nodes float32", "new Casts", "float32 for a hazard")
    for level, (plan, nodes) in plans.items():
        kept = str(len({row.node for row in plan.hazards if not row.low}))
        low = nodes.get("low", 0) + nodes.get("mixed", 0)
        table.add_row(level, str(low), str(nodes.get("float32", 0)), str(plan.casts), kept)
    return table
