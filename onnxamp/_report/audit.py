"""What an audit found, for the terminal: the head in numbers, then the findings, worst first."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxamp._audit import Audit, Finding, NodeFacts
from onnxamp._ops.facts import op_facts
from onnxamp._report.parts import heading, make_table, plain, size

_NAMES = 3
"""Nodes of one sort that are named, unless everything is asked for."""
_GROUPS = 12
"""Sorts of findings of one severity that are shown, unless everything is asked for."""
_WORDS = {"error": ("✘", "red", "error"), "warning": ("!", "yellow", "warning"), "note": ("•", "dim", "note")}
"""Severity -> its sign, style and name."""
_OPS = 8
"""Rows of the table of providers, unless everything is asked for."""
_PROVIDERS = {"none": "nothing"}
_PRECISIONS = ("float16", "bfloat16", "mixed", "float32", "float64", "no floats")


def audit_table(audit: Audit, *, verbose: bool = False) -> RenderableType:
    """The whole audit. ``verbose``: every finding, with the names of all its nodes."""
    parts: list[RenderableType] = [_verdict(audit)]
    if audit.nodes:
        parts.append(Padding(_head(audit), (0, 0, 0, 2), expand=False))
        parts += _placed(audit, verbose=verbose)
    for severity in _WORDS:
        parts += _findings([found for found in audit.findings if found.severity == severity], severity, verbose=verbose)
    return Group(*parts)


def _verdict(audit: Audit) -> Text:
    """One line: how many findings of each severity, or that there are none."""
    counts = Counter(found.severity for found in audit.findings)
    sorts = Counter(severity for severity, *_ in _grouped(audit.findings))
    worst = next((severity for severity in ("error", "warning") if counts[severity]), None)
    head = Text.assemble(("✔ ", "green") if worst is None else (f"{_WORDS[worst][0]} ", _WORDS[worst][1]))
    for severity, (_, _, word) in _WORDS.items():
        if counts[severity]:
            several = f"{counts[severity]} {word}{'s' if counts[severity] != 1 else ''}"
            some = f" of {sorts[severity]} sorts" if 1 < sorts[severity] < counts[severity] else ""
            head.append(f"{several}{some}   ")
    if not counts:
        head.append("nothing to complain of   ")
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in audit.opsets.items())
    return head.append_text(plain(f"target {audit.target}, opsets: {opsets}"))


def _head(audit: Audit) -> Table:
    """Nodes per precision and provider, Casts and weights."""
    counted = [node for node in audit.nodes if node.op not in op_facts().uncounted]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("nodes", Text(_shares(counted, [node.precision for node in counted], _PRECISIONS)))
    providers = [node.provider for node in audit.nodes if node.provider]  # all, as what findings say of them
    if providers:
        names = {"none": "without any kernel"}
        order = ("CUDA", "CPU", "none")
        shown = [f"{count} on {name}" if name not in names else f"{count} {names[name]}" for name, count in
                 sorted(Counter(providers).items(), key=lambda item: order.index(item[0]))]  # fmt: skip
        besides = len(providers) - sum(bool(node.provider) for node in counted)
        note = f" (with {besides} Casts and control flow)" if besides else ""
        table.add_row("run", Text(", ".join(shown) + note))
    casts = f"{audit.casts.count} between floats"
    if audit.casts.count:
        casts += f", about {size(audit.casts.bytes)} per run"
    if audit.casts.redundant:
        casts += f"; {audit.casts.redundant} redundant"
    table.add_row("Casts", Text(casts))
    weights = ", ".join(f"{size(count)} {name}" for name, count in audit.weight_bytes.items() if count)
    table.add_row("weights", Text(weights or "none"))
    return table


def _placed(audit: Audit, *, verbose: bool) -> list[RenderableType]:
    """Nodes per op type, and where they run in which precision: those that the target does not run come first."""
    rows = Counter((node.op, node.provider, node.precision) for node in audit.nodes if node.provider)
    home = audit.target.upper()
    ranked = sorted(rows.items(), key=lambda row: (row[0][1] == home, -row[1], row[0]))
    if not ranked:
        return []
    shown = ranked if verbose else ranked[:_OPS]
    table = make_table("op", "runs on", "precision", "nodes", right=(3,))
    for (op, provider, precision), count in shown:
        style = "" if provider == home else "yellow" if precision != "no floats" else "dim"
        table.add_row(plain(op), _PROVIDERS.get(provider, provider), precision, str(count), style=style)
    parts: list[RenderableType] = [heading("Where nodes run"), Padding(table, (0, 0, 0, 2), expand=False)]
    if len(shown) < len(ranked):
        parts.append(Text(f"  … and {len(ranked) - len(shown)} more kinds (-v shows all)", style="dim"))
    return parts


def _shares(nodes: Sequence[NodeFacts], found: Sequence[str], order: Sequence[str]) -> str:
    counts = Counter(found)
    shown = ", ".join(f"{counts[name]} {_word(name)}" for name in order if counts[name])
    return f"{len(nodes)}: {shown}" if shown else "0"


def _word(precision: str) -> str:
    return {"mixed": "in both", "no floats": "without floats"}.get(precision, precision)


def _grouped(findings: Sequence[Finding]) -> dict[tuple[str, str, str, str], list[Finding]]:
    """(severity, kind, text, action) -> findings of that sort; sorts with one action stand together."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for found in findings:
        groups.setdefault((found.severity, found.kind, found.text, found.action), []).append(found)
    first: dict[tuple[str, str], int] = {}
    for position, (_, kind, _, action) in enumerate(groups):
        first.setdefault((kind, action), position)
    return dict(sorted(groups.items(), key=lambda item: first[item[0][1], item[0][3]]))


def _findings(findings: Sequence[Finding], severity: str, *, verbose: bool) -> list[RenderableType]:
    """Findings of one severity: those of one sort in one entry, and what to do behind all that it is good for."""
    if not findings:
        return []
    sign, style, word = _WORDS[severity]
    groups = list(_grouped(findings).items())
    shown = groups if verbose else groups[:_GROUPS]
    table = Table.grid(padding=(0, 1, 0, 0))
    for position, ((_, kind, text, action), members) in enumerate(shown):
        what = Text.assemble((f"{kind}: ", "bold")).append_text(_ops(members)).append_text(plain(text))
        if any(found.node for found in members):
            what.append_text(_names([found.node for found in members], verbose=verbose))
        behind = shown[position + 1][0] if position + 1 < len(shown) else None
        if action and (behind is None or (behind[1], behind[3]) != (kind, action)):
            what.append("\n→ ").append_text(plain(action))
        table.add_row("", Text(sign, style=style), what)
    parts: list[RenderableType] = [Text(f"\n{word.capitalize()}s", style="bold"), table]
    if len(shown) < len(groups):
        parts.append(Text(f"  … and {len(groups) - len(shown)} more sorts (-v shows all)", style="dim"))
    return parts


def _ops(members: Sequence[Finding]) -> Text:
    """Op types with the number of each."""
    counts = Counter(found.op for found in members if found.op)
    text = Text()
    for position, (op, count) in enumerate(counts.most_common()):
        text.append(", " if position else "").append_text(plain(op)).append(f" ×{count}" if count > 1 else "")
    return text.append(" ") if counts else text


def _names(nodes: Sequence[str], *, verbose: bool) -> Text:
    """Where it was found: the first few names, in full only on demand."""
    shown = nodes if verbose else nodes[:_NAMES]
    text = Text("\n")
    for position, name in enumerate(shown):
        text.append(", " if position else "").append_text(plain(name))
    if len(shown) < len(nodes):
        text.append(f"  and {len(nodes) - len(shown)} more")
    text.stylize("dim")
    return text
