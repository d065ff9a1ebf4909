"""Reports as rich tables. Names come from the model: markup and control characters in them are shown, not obeyed."""

from collections import Counter
from collections.abc import Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxamp.convert import Conversion
from onnxamp.numerics.validate import Validation
from onnxamp.plan import Plan

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


def plain(name: str) -> Text:
    """A name from the model as harmless text: control characters are written as escapes."""
    return Text(printable(name))


def printable(text: str) -> str:
    """Text with control characters (terminal escapes in names, say) written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def size(count: int) -> str:
    """Bytes for people: 12.3 MB (10^6 bytes)."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def conversion_report(made: Conversion, validation: Validation | None, *, verbose: bool) -> RenderableType:
    """All that a conversion has to say."""
    failed = validation is not None and validation.failure is not None
    parts: list[RenderableType] = [
        _numbers(made, failed=failed),
        *_hazards(made.plan, verbose=verbose),
        *_kernels(made),
    ]
    parts += _losses(made, verbose=verbose)
    if verbose:
        parts += [_heading("Verdicts"), verdict_table(made.plan)]
    if validation is not None:
        parts += _validation(validation)
    notes = [*made.notes, *made.plan.warnings, *_advice(made), *(validation.warnings if validation else ())]
    if notes:
        parts += [_heading("Worth knowing"), *(_line("•", plain(note)) for note in notes)]
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
    table = _table("", "before", "after")
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
    if not plan.hazards:
        return []
    groups: dict[tuple[str, str], list[str]] = {}
    for row in plan.hazards:
        groups.setdefault((row.reason, row.detail), []).append(row.node)
    low = {row.node for row in plan.hazards if row.low}
    kept = {row.node for row in plan.hazards} - low
    fates = [f"{len(kept)} nodes stay float32"] if kept else []
    fates += [f"{len(low)} are {plan.dtype} all the same"] if low else []
    parts: list[RenderableType] = [_heading(f"Hazards: {', '.join(fates)}")]
    for reason, count in Counter(row.reason for row in plan.hazards).most_common():
        parts.append(_line(f"{count:>4}", Text(_HAZARD_KINDS.get(reason, reason))))
    table = _table("node", "because", right=())
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
        parts.append(_line("", Text(f"… and {len(groups) - len(shown)} more reasons (-v shows all)", style="dim")))
    if plan.heeded:
        text = "--force-low REGEX lowers nodes all the same, with what shares their precision; --no-hazards all"
        parts.append(_line("", Text(text, style="dim")))
    return parts


def _kernels(made: Conversion) -> list[RenderableType]:
    found = made.summary.fallbacks
    if not found:
        return []
    ops = Counter(op for _, op in found)
    names = ", ".join(f"{op} ×{count}" if count > 1 else op for op, count in ops.most_common(_ROWS))
    text = Text(f"{len(found)} nodes have no kernel on {made.plan.target} in float32 either, and run on CPU: ")
    return [_heading("Kernels"), _line("•", text.append_text(plain(names)))]


def _losses(made: Conversion, *, verbose: bool) -> list[RenderableType]:
    """Weights with elements that did not just lose digits."""
    lost = {name: c for name, c in made.weights.items() if c.overflowed or c.flushed or (verbose and c.subnormal)}
    subnormal = sum(c.subnormal for c in made.weights.values())
    parts: list[RenderableType] = []
    if lost:
        worst = sorted(lost, key=lambda name: (lost[name].overflowed, lost[name].flushed), reverse=True)
        table = _table("weight", "elements", "saturated", "became zero", "became subnormal")
        for name in worst if verbose else worst[:_ROWS]:
            c = lost[name]
            table.add_row(plain(name), f"{c.elements:,}", f"{c.overflowed:,}", f"{c.flushed:,}", f"{c.subnormal:,}")
        head = f"Weights: {len(lost)} of {len(made.weights)} converted tensors lose elements"
        parts += [_heading(head), Padding(table, (0, 0, 0, 2), expand=False)]
    if subnormal and not verbose:
        elements = sum(c.elements for c in made.weights.values())
        text = f"{subnormal:,} of {elements:,} converted weight elements became subnormal, with fewer digits"
        parts.append(Text(f"\n{text}", style="dim"))
    return parts


def _validation(found: Validation) -> list[RenderableType]:
    parts: list[RenderableType] = [_heading(f"Validation on {found.ran_on}, {found.inputs}")]
    if found.skipped:
        return [*parts, _line("!", plain(f"Not validated. {found.skipped}"))]
    if found.outputs:
        table = _table("output", "shape", "rel. L2", "max abs", "SNR dB", "cosine", "NaN", "Inf", "")
        for d in found.outputs:
            good = Text("≈", style="yellow") if d.name in found.inexact else Text("✔", style="green")
            mark = Text("✘", style="red") if d.alarm and d.name not in found.inexact else good
            table.add_row(
                plain(d.name), "×".join(map(str, d.result_shape)) or "scalar", f"{d.rel_l2:.2e}", f"{d.max_abs:.2e}",
                f"{d.snr_db:.1f}", f"{d.cosine:.6f}", str(d.result_nan), str(d.result_inf), mark,
            )  # fmt: skip
        parts.append(Padding(table, (0, 0, 0, 2), expand=False))
    if found.failure:
        parts.append(_line(Text("✘", style="bold red"), plain(found.failure)))
        if found.first_bad:
            bad = found.first_bad
            parts.append(_line("", plain(f"It starts at {bad.value!r} ({bad.op}). {bad.alarm}")))
    return parts


def _advice(made: Conversion) -> Iterable[str]:
    count = len(made.summary.overridable)
    if count:
        yield (
            f"{count} weights are graph inputs, too, so callers may override them: they keep the type of the input and"
            " are cast in every run where it is not the wanted one. --freeze-defaults makes them plain weights."
        )
    if made.summary.unknown:
        yield (
            f"No schema is known for {', '.join(made.summary.unknown)}: these nodes stay float32. If they are no custom"
            " ops, check the spelling and the opset imports."
        )


def verdict_table(plan: Plan) -> Table:
    """Every variable with its precision and the reason."""
    table = _table("variable", "op", "precision", "reason", right=())
    for row in plan.rows:
        precision = Text(plan.dtype, style="cyan") if row.low else Text("float32")
        reason = f"{row.reason}: {row.detail}" if row.detail else row.reason
        table.add_row(plain(row.key), plain(row.op), precision, plain(reason))
    return table


def make_console(*, stderr: bool = False) -> Console:
    """A console; without a terminal the width is fixed, so that redirected reports do not wrap."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=140)


def _table(*columns: str, right: tuple[int, ...] | None = None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for position, column in enumerate(columns):
        is_right = position > 0 if right is None else position in right
        table.add_column(column, justify="right" if is_right else "left", overflow="fold")
    return table


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _line(mark: str | Text, text: Text) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row("", mark, text)
    return grid


def list_table(kind: str, entries: Mapping[str, str]) -> RenderableType:
    """A white or black list with the source of each entry."""
    table = _table(f"{kind}: {len(entries)}", "source", right=())
    for op, source in entries.items():
        table.add_row(op, Text(source, style="dim"))
    return Padding(table, (0, 0, 0, 2), expand=False)


def operator_table(counts: Mapping[tuple[str, str], int]) -> Table:
    """Op types against the precisions that their nodes touch, as paddle.amp.debugging.collect_operator_stats."""
    columns = ("float16", "bfloat16", "float32", "other")
    table = _table("op type", *columns)
    ops = sorted({op for op, _ in counts}, key=lambda op: (-sum(counts.get((op, c), 0) for c in columns), op))
    for op in ops:
        table.add_row(plain(op), *(str(counts.get((op, column)) or "") for column in columns))
    return table


def level_table(plans: Mapping[str, tuple[Plan, Mapping[str, int]]]) -> Table:
    """What each level would do."""
    table = _table("level", "nodes low", "nodes float32", "new Casts", "float32 for a hazard")
    for level, (plan, nodes) in plans.items():
        kept = str(len({row.node for row in plan.hazards if not row.low}))
        low = nodes.get("low", 0) + nodes.get("mixed", 0)
        table.add_row(level, str(low), str(nodes.get("float32", 0)), str(plan.casts), kept)
    return table
