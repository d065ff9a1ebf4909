"""What the results of verdict.py come to, and the tables of the page that shows them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explain" / "verdict.md"
START, END = "<!-- written by benchmarks/verdict.py -->", "<!-- end -->"
"""What the tables of the page stand between."""
WIDTH = 130
"""Of the page's paragraphs."""
TENTH, HUNDREDTH = 0.1, 0.01
"""Shares of float16's range by which values that are not proven are counted."""

Facts = dict[str, Any]


def summary(rows: Sequence[Facts]) -> Facts:
    """Return what the rows come to."""
    planted = [row for row in rows if is_planted(row)]
    others = [row for row in rows if not is_planted(row)]
    before = sum(row["seconds without stress"] for row in others)
    repaired = [row["model"] for row in others if row["repaired by stress alone"]]
    every = [of_headroom(row) for row in others]
    return {
        "planted": len(planted),
        "planted, found": sum(row["repaired by stress alone"] for row in planted),
        "planted, right on the worst input": sum(row["right"] for row in planted),
        "others": len(others),
        "others, values": sum(row["values"] or 0 for row in others),
        "others, proven": sum(row["proven"] or 0 for row in others),
        "others, by headroom": [sum(counts) for counts in zip(*every, strict=True)],
        "others, repaired by stress alone": repaired,
        "others, processor time": round(sum(row["seconds"] for row in others) / before, 2) if before else None,
        "false alarms of stress": _mean(of_stress(row["false alarms"]) for row in others),
        "false alarms of validation": _mean(of_validation(row["false alarms"]) for row in others),
        "false alarms of hazards": _mean(of_hazards(row["false alarms"]) for row in others),
        "false alarms of hazards, by traffic": _by_traffic([row["false alarms"] for row in others]),
    }


def is_planted(row: Facts) -> bool:
    """Return whether a row is that of a planted network."""
    return "hardest" in row


def _mean(numbers: Iterable[float]) -> float:
    every = list(numbers)
    return sum(every) / max(len(every), 1)


def _by_traffic(every: Sequence[Facts]) -> float:
    """Return the share of the traffic of all models that hazards keep in float32, and no sample needs."""
    kept = sum(of_hazards(alarms) * alarms["traffic"] for alarms in every)
    return kept / max(sum(alarms["traffic"] for alarms in every), 1)


def of_headroom(row: Facts) -> tuple[int, int, int, int]:
    """Return how many values that are not proven reach a tenth of the range on samples or hard inputs, how many a
    hundredth, how many less, and how many were not measured.

    The results list the values with the least headroom, those that are not proven first.
    """
    rest = (row["values"] or 0) - (row["proven"] or 0)
    shares = row["rooms"][:rest]
    measured = [share for share in shares if share > 0]
    large = sum(share >= TENTH for share in measured)
    middle = sum(share >= HUNDREDTH for share in measured) - large
    return large, middle, len(measured) - large - middle, rest - len(measured)


def of_stress(alarms: Facts) -> float:
    """Return the share of traffic that stress alone keeps in float32, and no sample needs."""
    kept = alarms["validation"]
    return of_validation(alarms) if kept and kept["reason"] == "stress" else 0.0


def of_validation(alarms: Facts) -> float:
    """Return the share of traffic that validation keeps in float32 in any way, and no sample needs."""
    kept = alarms["validation"]
    return kept["share"] if kept and not kept["fails"] else 0.0


def of_hazards(alarms: Facts) -> float:
    """Return the share of traffic that hazards keep in float32, and no sample needs."""
    return sum(row["share"] for row in alarms["hazards"] if row["share"] > 0 and not row["fails"])


def tables(results: Facts) -> str:
    """Return the tables of the page."""
    facts, rows = results["summary"], results["rows"]
    others = [row for row in rows if not is_planted(row)]
    parts = (
        _planted(facts, [row for row in rows if is_planted(row)]),
        _values(facts, others),
        _alarms(facts, others),
        _source(results),
    )
    return "\n\n".join("\n".join(part) for part in parts)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]


def _planted(facts: Facts, rows: Sequence[Facts]) -> list[str]:
    text = (
        f"{facts['planted']} networks stay below 20,000 on 1,000 random inputs, although a long search finds an input"
        " within the range of the sample that brings a value beyond 65,504. The default of four steps finds such an"
        f" input for {facts['planted, found']} of them, and the result is repaired."
        f" {facts['planted, right on the worst input']} results are right on the worst input of the long search."
    )
    kinds = dict[str, list[Facts]]()
    for row in rows:
        kinds.setdefault(row["model"].split()[1], []).append(row)
    titles = "planted", "networks", "random inputs", "worst input", "found", "right on the worst input"
    cells = list[Sequence[str]]()
    for kind, found in kinds.items():
        worst = [row["hardest"] for row in found]
        ends = f"{_short(min(worst))} to {_short(max(worst))}"
        counts = (str(sum(row[key] for row in found)) for key in ("repaired by stress alone", "right"))
        cells.append((kind, str(len(found)), _short(max(row["random"] for row in found)), ends, *counts))
    return [fill(text, WIDTH), "", *_table(titles, cells)]


def _values(facts: Facts, rows: Sequence[Facts]) -> list[str]:
    large, middle, small, rest = facts["others, by headroom"]
    repaired = facts["others, repaired by stress alone"]
    text = (
        f"Of the {facts['others, values']:,} float16 values of {facts['others']} other models,"
        f" {facts['others, proven']:,} are proven. Of the rest, {large} reach a tenth of the range on samples or hard"
        f" inputs, {middle} a hundredth, {small} less, and {rest} have no figure, since nothing was stressed or others"
        f" have less headroom. Stress alone repaired {len(repaired)} models. Time is the processor time of a validated"
        f" conversion beside one without stress; that of all models is {facts['others, processor time']}."
        " The table shows the value with the least headroom."
    )
    titles = "model", "proven", "value", "random inputs", "hard inputs", "error", "error, hard", "time"
    cells = list[Sequence[str]]()
    for row in rows:
        value = f"`{row['value']}`" if "value" in row else "none"
        proven = f"{row['proven']} of {row['values']}" if row["values"] else "none"
        sizes = [_short(row.get(name)) for name in ("largest, random", "largest, stressed")]
        errors = [_short(row[name]) for name in ("error, samples", "error, hard inputs")]
        took = f"{row['seconds'] / row['seconds without stress']:.2f}"
        cells.append((row["model"], proven, value, *sizes, *errors, took))
    return [fill(text, WIDTH), "", *_table(titles, cells)]


def _alarms(facts: Facts, rows: Sequence[Facts]) -> list[str]:
    text = (
        "What stays in float32, as a share of the float traffic, and whether random samples need it: the nodes of each"
        " row run in float16, and all others as in the result, on as many samples as a budget of processor time allows."
        f" On the mean of all models, {_share(facts['false alarms of stress'])} of the traffic stays in float32 for"
        f" stress although no sample needs it, {_share(facts['false alarms of validation'])} for validation as a whole,"
        f" and {_share(facts['false alarms of hazards'])} for hazards, or"
        f" {_share(facts['false alarms of hazards, by traffic'])} of the traffic of all models together. Models without"
        " a row keep nothing for these reasons."
    )
    titles = "model", "kept for", "nodes", "traffic", "samples need it", "samples"
    cells = list[Sequence[str]]()
    for row in rows:
        alarms = row["false alarms"]
        kept = [(one["hazard"], str(one["nodes"]), one) for one in alarms["hazards"] if one["share"] > 0]
        if alarms["validation"]:
            kept.append((f"validation, {alarms['validation']['reason']}", "", alarms["validation"]))
        for what, nodes, one in kept:
            needed = "yes" if one["fails"] else "no"
            cells.append((row["model"], what, nodes, _share(one["share"]), needed, str(one["samples"])))
    return [fill(text, WIDTH), "", *_table(titles, cells)]


def _source(results: Facts) -> list[str]:
    machine, versions = results["machine"], results["versions"]
    engine = f"ONNX Runtime {versions['ONNX Runtime']}"
    text = (
        f"Measured on an {machine['processor']} with one thread and {engine}, the last at commit"
        f" {results['commit'][:8]}; the results name the commit of each row. `bert`, `gpt2`, `hifigan`, `llama`,"
        " `resnet50`, `vit` and `whisper` are exports with random weights, whose activations may be smaller than"
        " trained ones; the norms of `resnet50` are calibrated."
    )
    return [fill(text, WIDTH)]


def _share(number: float) -> str:
    return f"{100 * number:.2g} %"


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def write_page(results: Facts) -> None:
    """Write the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{tables(results)}\n\n{END}{after}", encoding="utf-8")
