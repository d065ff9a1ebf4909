"""What tuning found: the candidates, what stayed float32 and why, and what it took; as terminal tables and as JSON."""

import json
from collections import Counter
from math import inf, log10
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from onnxamp._convert.convert import Conversion
from onnxamp._report.machine import as_data, conversion_json
from onnxamp._report.parts import heading, line, make_table, plain
from onnxamp._report.terminal import conversion_report
from onnxamp._tuning.results import Tuned

_FORMAT: Final = 1
"""Version of the JSON form."""

_ROWS: Final = 3
"""Examples of nodes that stay float32, per reason, unless all are asked for."""

WHY: Final = {
    "never run": "no sample runs them: float32, as at level O2",
    "costs accuracy": "their share of the error is needed elsewhere",
    "breaks on its own": "they overflow, vanish or are far off on their own",
    "breaks the outputs": "the outputs break when their block is low",
    "goes with others": "they share their precision with others",
    "not worth its Casts": "little error, but less time saved than the Casts around them take",
    "not measured": "what they do could not be measured",
}


def tuning_json(made: Conversion, tuned: Tuned) -> str:
    """One JSON object: the conversion as ``convert --json`` prints it, and the tuning under "tuning"."""
    facts = as_data(tuned)
    del facts["plan"]
    for row, found in zip(facts["candidates"], tuned.candidates, strict=True):
        row["low"] = sorted(found.low)
    whole = json.loads(conversion_json(made, None))
    del whole["validation"]
    whole |= {"onnxamp": "tune", "format": _FORMAT, "tuning": facts}
    return json.dumps(whole, indent=1, allow_nan=False)


def tuning_report(made: Conversion, tuned: Tuned, state: Path | None, *, verbose: bool) -> RenderableType:
    """All that a tuning has to say. ``state`` is the file that its measurements are in."""
    mark, style = ("✔", "green") if tuned.held else ("✘", "bold red")
    found, wanted = error_text(tuned, tuned.error), wanted_text(tuned)
    said = f"{tuned.metric} {found} on {tuned.inputs}; {wanted} is wanted"
    parts = [
        conversion_report(made, None, verbose=verbose),
        heading("Accuracy"),
        line(Text(mark, style=style), plain(f"{said}.")),
        *_candidates(tuned, state),
        *_kept(tuned, verbose=verbose),
        heading("Effort"),
        *(line("•", Text(text)) for text in effort(tuned)),
    ]
    return Group(*parts)


def _candidates(tuned: Tuned, state: Path | None) -> list[RenderableType]:
    columns = ("time", "speed-up", "low: nodes", "arithmetic", "traffic", "predicted", "measured", "")
    table = make_table("#", *columns, right=tuple(range(1, 8)))
    slowest = max((found.time for found in tuned.candidates), default=0.0)
    for number, found in enumerate(tuned.candidates):
        chosen = number == tuned.chosen
        measured = tuned.error if chosen else found.error
        mark = Text("← written", style="green") if chosen else Text()
        table.add_row(
            str(number), time_text(found.time), f"{slowest / found.time:.2f}×" if found.time else "", str(found.nodes),
            f"{found.flops:.0%}", f"{found.bytes:.0%}", error_text(tuned, found.predicted),
            "" if measured is None else error_text(tuned, measured), mark,
        )  # fmt: skip
    parts: list[RenderableType] = [heading("Candidates"), Padding(table, (0, 0, 0, 2), expand=False)]
    parts.append(
        line(
            "",
            Text(f"Times are {tuned.times}.", style="dim"),
        )
    )
    if len(tuned.candidates) > 1:
        free = "no new runs" if state else "no new runs with --state FILE"
        parts.append(line("", Text(f"--pick K writes another one ({free}).", style="dim")))
    return parts


def _kept(tuned: Tuned, *, verbose: bool) -> list[RenderableType]:
    """What stays float32, by reason."""
    rows = {row.key.rpartition(":")[0]: row for row in tuned.plan.rows if row.op not in ("initializer", "Constant")}
    others = Counter(row.reason for row in rows.values() if not row.low and row.reason in _STATIC)
    if not tuned.kept and not others:
        return []
    parts: list[RenderableType] = [heading("In float32")]
    groups = Counter(row.why for row in tuned.kept)
    for why, count in groups.most_common():
        mine = [row for row in tuned.kept if row.why == why]
        ops = ", ".join(f"{op} ×{n}" if n > 1 else op for op, n in Counter(row.op for row in mine).most_common(6))
        parts.append(line(f"{count:>5}", plain(f"{WHY[why]}: {ops}")))
        for row in mine if verbose else mine[:_ROWS]:
            said = f"{row.node}: {row.detail}" if row.detail else row.node
            parts.append(line("       ", Text(plain(said).plain, style="dim")))
        if len(mine) > _ROWS and not verbose:
            parts.append(line("       ", Text(f"… and {len(mine) - _ROWS} more (-v shows all)", style="dim")))
    for reason, count in others.most_common():
        parts.append(line(f"{count:>5}", plain(f"{reason}, as at other levels")))
    return parts


_STATIC: Final = frozenset({"no kernel", "constant range", "mask", "index path", "quantized unit", "runtime fusion"})
"""Reasons that measuring has nothing to do with."""


def effort(tuned: Tuned) -> list[str]:
    """What it took, in sentences, and what samples did not show."""
    recalled = f", {tuned.recalled:,} taken from the state" if tuned.recalled else ""
    real = f"{tuned.conversions:,} converted model{'' if tuned.conversions == 1 else 's'} judged on all samples"
    could = f"{tuned.units:,} nodes could be low"
    found = [f"{tuned.runs:,} runs with blocks or candidates low{recalled}; {real} ({tuned.ran_on}); {could}."]
    if tuned.noise:
        found.append(f"Run twice, the float32 model differs from itself by {tuned.noise:.2g}.")
    if tuned.device_noise is not None:
        found.append(f"In float32, {tuned.ran_on} differs from the CPU by {error_text(tuned, tuned.device_noise)}.")
    never = len(tuned.unseen) + sum(row.why == "never run" for row in tuned.kept)
    if never:
        found.append(
            f"{never:,} node{' is' if never == 1 else 's are'} run by no sample, and as level O2 would have"
            f" {'it' if never == 1 else 'them'} ({len(tuned.unseen):,} low): no error of"
            f" {'its' if never == 1 else 'theirs'} was measured. Inputs that come by would show it."
        )
    return found


def error_text(tuned: Tuned, error: float) -> str:
    """An error as people read it; for the signal-to-noise ratio, in dB."""
    if tuned.metric == "snr":
        return "∞ dB" if not error else f"{-20 * log10(error):.1f} dB" if error < inf else "−∞ dB"
    return "∞" if error == inf else f"{error:.3g}"


def wanted_text(tuned: Tuned) -> str:
    """The tolerance, likewise."""
    return error_text(tuned, tuned.tolerance) + (" or more" if tuned.metric == "snr" else " or less")


def time_text(microseconds: float) -> str:
    """A time for people: 3.2 µs, 1.25 ms."""
    return f"{microseconds / 1000:.2f} ms" if microseconds >= 1000 else f"{microseconds:.3g} µs"
