"""What tuning found: the candidates, what stayed float32 and why, and what it took; as terminal tables and as JSON."""

import json
from collections import Counter
from math import inf, log10
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from onnxamp.convert import Conversion
from onnxamp.report.machine import as_data, conversion_json
from onnxamp.report.parts import heading, line, make_table, plain
from onnxamp.report.terminal import conversion_report
from onnxamp.tuning.confirm import Confirmed
from onnxamp.tuning.tune import Tuned

_FORMAT: Final = 1
"""Version of the JSON form."""

_ROWS: Final = 3
"""Examples of nodes that stay float32, per reason, unless all are asked for."""

_WHY: Final = {
    "costs accuracy": "their share of the error is needed elsewhere",
    "breaks on its own": "they overflow, vanish or are far off on their own",
    "breaks the outputs": "the outputs break when their block is low",
    "goes with others": "they share their precision with others",
    "not worth its Casts": "little error, but less time saved than the Casts around them take",
    "not measured": "what they do could not be measured",
}


def tuning_json(made: Conversion, tuned: Tuned, confirmed: Confirmed | None = None) -> str:
    """One JSON object: the conversion as ``convert --json`` prints it, and the tuning under "tuning".

    Where it was run there, what CUDA made of it is under "confirmed".
    """
    facts = as_data(tuned)
    del facts["plan"]
    for row, found in zip(facts["candidates"], tuned.candidates, strict=True):
        row["low"] = sorted(found.low)
    whole = json.loads(conversion_json(made, None))
    del whole["validation"]
    whole |= {"onnxamp": "tune", "format": _FORMAT, "tuning": facts, "confirmed": as_data(confirmed)}
    return json.dumps(whole, indent=1, allow_nan=False)


def tuning_report(
    made: Conversion, tuned: Tuned, state: Path | None, confirmed: Confirmed | None = None, *, verbose: bool
) -> RenderableType:
    """All that a tuning has to say. ``state`` is the file that its measurements are in."""
    mark, style = ("✔", "green") if tuned.held else ("✘", "bold red")
    found, wanted = _shown(tuned, tuned.error), _wanted(tuned)
    said = f"{tuned.metric} {found} on {tuned.inputs}; {wanted} is wanted"
    parts = [
        conversion_report(made, None, verbose=verbose),
        heading("Accuracy"),
        line(Text(mark, style=style), plain(f"{said}.")),
        *_confirmed(tuned, confirmed),
        *_candidates(tuned, state),
        *_kept(tuned, verbose=verbose),
        *_effort(tuned),
    ]
    return Group(*parts)


def _confirmed(tuned: Tuned, confirmed: Confirmed | None) -> list[RenderableType]:
    """What running the whole model where it belongs has shown."""
    if confirmed is None:
        return []
    mark, style = ("✔", "green") if confirmed.held else ("✘", "bold red")
    noise = "" if confirmed.noise is None else f"; float32 there against CPU: {_shown(tuned, confirmed.noise)}"
    text = f"On {confirmed.ran_on}, whole and fused: {_shown(tuned, confirmed.error)}{noise}."
    return [line(Text(mark, style=style), plain(text))]


def _candidates(tuned: Tuned, state: Path | None) -> list[RenderableType]:
    columns = ("time", "speed-up", "low: nodes", "arithmetic", "traffic", "predicted", "measured", "")
    table = make_table("#", *columns, right=tuple(range(1, 8)))
    slowest = max((found.time for found in tuned.candidates), default=0.0)
    for number, found in enumerate(tuned.candidates):
        chosen = number == tuned.chosen
        measured = tuned.error if chosen else found.error
        table.add_row(
            str(number), _time(found.time), f"{slowest / found.time:.2f}×" if found.time else "", str(found.nodes),
            f"{found.flops:.0%}", f"{found.bytes:.0%}", _shown(tuned, found.predicted),
            "" if measured is None else _shown(tuned, measured), Text("← written", style="green") if chosen else Text(),
        )  # fmt: skip
    parts: list[RenderableType] = [heading("Candidates"), Padding(table, (0, 0, 0, 2), expand=False)]
    parts.append(
        line(
            "",
            Text(f"Times are estimates for {tuned.device} from bytes and arithmetic, without launches.", style="dim"),
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
        parts.append(line(f"{count:>5}", plain(f"{_WHY[why]}: {ops}")))
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


def _effort(tuned: Tuned) -> list[RenderableType]:
    recalled = f", {tuned.recalled} taken from the state" if tuned.recalled else ""
    real = f"{tuned.conversions} conversion{'' if tuned.conversions == 1 else 's'} verified on all samples"
    text = f"{tuned.runs} runs with blocks or candidates low{recalled}; {real}; {tuned.units} nodes could be low."
    noise = f"Run twice, the float32 model differs from itself by {tuned.noise:.2g}." if tuned.noise else ""
    return [heading("Effort"), line("•", Text(text)), *([line("•", Text(noise))] if noise else [])]


def _shown(tuned: Tuned, error: float) -> str:
    """An error as people read it; for the signal-to-noise ratio, in dB."""
    if tuned.metric == "snr":
        return "∞ dB" if not error else f"{-20 * log10(error):.1f} dB" if error < inf else "−∞ dB"
    return f"{error:.3g}"


def _wanted(tuned: Tuned) -> str:
    return _shown(tuned, tuned.tolerance) + (" or more" if tuned.metric == "snr" else " or less")


def _time(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms" if microseconds >= 1000 else f"{microseconds:.3g} µs"
