"""The tables of the page that shows the results of verdict.py."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from corpora import ALARM_SECONDS
from large_bounds import MOST_MEMORY, MOST_SECONDS
from verdict_sums import HEADROOM, is_planted, kept_rows

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explain" / "verdict.md"
START, END = "<!-- written by benchmarks/verdict.py -->", "<!-- end -->"
"""What the tables of the page stand between."""
MOST_BYTES, MOST_TIMES = 100_000_000, 1.5
"""Models for which there is a limit on how many times as long a validated conversion may take as without stress."""
WIDTH = 130
"""Of the page's paragraphs."""
Facts = dict[str, Any]


def tables(results: Facts) -> str:
    """Return the tables of the page."""
    facts, rows = results["summary"], results["rows"]
    others = [row for row in rows if not is_planted(row)]
    parts = (
        _corpora(facts, results["corpora"]),
        _planted(facts, [row for row in rows if is_planted(row)]),
        _values(facts, others),
        _alarms(facts, others),
        _bounds(results["bounds"]),
        _source(results),
    )
    return "\n\n".join("\n".join(part) for part in parts)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]


def _planted(facts: Facts, rows: Sequence[Facts]) -> list[str]:
    planted = facts["planted"]
    text = (
        f"{planted['models']} networks stay below 20,000 on 1,000 random inputs, although a long search finds an input"
        " within the range of the sample that brings a value beyond 65,504. The default of four steps finds such an"
        f" input for {len(planted['repaired by stress alone'])} of them, and the result is repaired."
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
    text = (
        "Of the single models, the table shows the value with the least headroom. Time is the processor time of a"
        " validated conversion beside one without stress, each with one thread; that of all models is"
        f" {facts['others, processor time']}. {_beside(rows)}"
    )
    titles = "model", "proven", "value", "random inputs", "hard inputs", "error", "error, hard", "time", "wall"
    cells = list[Sequence[str]]()
    for row in rows:
        value = f"`{row['value']}`" if "value" in row else "none"
        proven = f"{row['proven']} of {row['values']}" if row["values"] else "none"
        sizes = [_short(row.get(name)) for name in ("largest, random", "largest, stressed")]
        errors = [_short(row[name]) for name in ("error, samples", "error, hard inputs")]
        took = f"{row['seconds'] / row['seconds without stress']:.2f}"
        wall = f"{row['wall'] / row['wall before']:.2f}{'' if row['bytes'] <= MOST_BYTES else ' *'}"
        cells.append((row["model"], proven, value, *sizes, *errors, took, wall))
    return [fill(text, WIDTH), "", *_table(titles, cells)]


def _beside(rows: Sequence[Facts]) -> str:
    """Return how wall times compare with those before there was stress."""
    small = [row for row in rows if row["bytes"] <= MOST_BYTES]
    before = sum(row["wall before"] for row in small)
    most = max(small, key=lambda row: float(row["wall"] / row["wall before"]))
    return (
        "The last column is the wall time of the default command on all cores beside that of commit"
        f" {rows[0]['before']}, the last without stress and without proofs:"
        f" {sum(row['wall'] for row in small) / before:.2f} for all of them together, and at most"
        f" {most['wall'] / most['wall before']:.2f}, of `{most['model']}`. Wanted are at most {MOST_TIMES}. Models with"
        " a star exceed 100 MB, and are left out of this."
    )


def _alarms(facts: Facts, rows: Sequence[Facts]) -> list[str]:
    found = facts["others"]["false alarms"]
    passed = found["kept"] - found["needed"]
    text = (
        "What stays in float32, as a share of the float traffic, and whether random samples need it: the nodes of each"
        " row run in float16, and all others as in the result, until one of 1,000 samples fails on which the result"
        " passes. What validation keeps for larger inputs, other branches or masks counts as needed. Of"
        f" {found['kept']} rows, {found['needed']} fail; of the other {passed}, {found['at 1,000 samples']} reached"
        f" 1,000 samples{'' if passed == found['at 1,000 samples'] else ', and the rest as many as the time allowed'}."
        f" On the mean of all models, {_share(facts['false alarms of stress'])} of the traffic stays in float32 for"
        f" stress although no sample needs it, {_share(facts['false alarms of validation'])} for validation as a whole,"
        f" and {_share(facts['false alarms of hazards'])} for hazards, or"
        f" {_share(facts['false alarms of hazards, by traffic'])} of the traffic of all models together. Models without"
        " a row keep nothing for these reasons."
    )
    titles = "model", "kept for", "nodes", "traffic", "samples need it", "samples"
    cells = list[Sequence[str]]()
    for row in rows:
        for one in kept_rows(row["false alarms"]):
            what = one["hazard"] if "hazard" in one else f"validation, {one['reason']}"
            needed = "yes" if one["fails"] else "no"
            nodes = str(one.get("nodes", ""))
            cells.append((row["model"], what, nodes, _share(one["share"]), needed, f"{one['samples']:,}"))
    return [fill(text, WIDTH), "", *_table(titles, cells)]


def _corpora(facts: Facts, corpora: Sequence[Facts]) -> list[str]:
    text = (
        "How far the verdict reaches, over all that was measured: the single models and the planted networks of the"
        " tables below, the small models of the tests of onnxamp and of onnx, real models on inputs of their own, and"
        " models that broke in other tools or earlier versions. Models that ONNX Runtime does not run are left out. Of"
        " the values that are not proven, the table shows how many reach which share of float16's range on samples or"
        " hard inputs; those without a figure are inputs, or nothing leads there. False alarms are the traffic that"
        " stays in float32 although no random sample needs it, as a share of all traffic and on the mean of the models."
        f" {_sampled(corpora)}"
    )
    ends = [f"{end:.0%}".replace("%", " %") for end in HEADROOM]
    titles = (
        *("", "models", "values", "proven", f"below {ends[0]}"),
        *(f"to {end}" for end in ends[1:]),
        *("above", "no figure", "only stress finds", "false alarms", "per model"),
    )
    others = facts["others"]
    rows = [
        ("single models", others, others["false alarms"], len(others["repaired by stress alone"])),
        ("planted networks", facts["planted"], None, len(facts["planted"]["repaired by stress alone"])),
        *((row["corpus"], row, row["false alarms"], len(row["found by stress alone"])) for row in corpora),
    ]
    cells = list[Sequence[str]]()
    for name, row, alarms, found in rows:
        shares = [_share(alarms[key]) for key in ("of all traffic", "mean of models")] if alarms else ["", ""]
        counts = (f"{count:,}" for count in (row["values"], row["proven"], *row["headroom"], found))
        models = f"{row['models']:,}"
        if row.get("compared", row["models"]) < row["models"]:
            models = f"{row['compared']:,} of {models}"
        cells.append((name, models, *counts, *shares))
    return [fill(text, WIDTH), "", *_table(titles, cells), *_judged(corpora)]


def _sampled(corpora: Sequence[Facts]) -> str:
    """Return on how many samples the nodes in float32 of corpora were tried."""
    every = [row["false alarms"] for row in corpora]
    passed = sum(one["kept"] - one["needed"] for one in every)
    most = sum(one["at 1,000 samples"] for one in every)
    return (
        f"In the corpora, {most} of {passed} such trials reached 1,000 samples, and the others as many as fit in"
        f" {ALARM_SECONDS:.0f} s."
    )


def _judged(corpora: Sequence[Facts]) -> list[str]:
    """Return what results are on inputs that once broke them, those that are not right in mixed precision by name."""
    lines = list[str]()
    for row in corpora:
        verdicts = row["verdicts"]
        if not verdicts:
            continue
        right = sum(verdict == "right" for verdict in verdicts.values())
        others = dict[str, list[str]]()
        for name, verdict in verdicts.items():
            if verdict != "right":
                others.setdefault(verdict.rstrip("."), []).append(f"`{name}`")
        rest = "".join(f" {', '.join(names)}: {verdict}." for verdict, names in others.items())
        text = f"Of the {len(verdicts)} {row['corpus']}, {right} are right on the inputs that once broke them.{rest}"
        lines += ["", fill(text, WIDTH)]
    return lines


def _bounds(rows: Sequence[Facts]) -> list[str]:
    said = [
        f"{one['processor seconds']:.1f} s of processor time and {one['anonymous'] / 1e9:.2f} GB for {one['model']}"
        f" ({one['bytes'] / 1e9:.1f} GB)"
        for one in rows
    ]
    text = (
        f"Bounds of a generated decoder with 20 layers take {' and '.join(said)}: the memory of the whole process"
        f" without the pages of files. Wanted are at most {MOST_SECONDS:.0f} s and {MOST_MEMORY / 1e9:.1f} GB."
    )
    return [fill(text, WIDTH)]


def _source(results: Facts) -> list[str]:
    machine, versions = results["machine"], results["versions"]
    engine = f"ONNX Runtime {versions['ONNX Runtime']}"
    text = (
        f"Measured on an {machine['processor']} with one thread and {engine}, the last at commit"
        f" {results['commit'][:8]}; the results name the commit of each row and of its times. `bert`, `gpt2`,"
        " `hifigan`, `llama`, `resnet50`, `vit` and `whisper` are exports with random weights, whose activations may be"
        " smaller than trained ones; the norms of `resnet50` are calibrated."
    )
    return [fill(text, WIDTH)]


def _share(number: float) -> str:
    return f"{float(f'{100 * number:.2g}'):g} %"


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
