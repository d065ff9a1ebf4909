"""What running a model showed, as terminal tables."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from onnxamp._numerics.results import RunCheck, ValueCheck
from onnxamp._report.diff import largest
from onnxamp._report.parts import heading, line, make_table, plain

_ROWS = 12
"""Values that are shown unless all are asked for."""


def run_report(run: RunCheck, *, verbose: bool) -> list[RenderableType]:
    """Where it goes wrong first, what that spoils, and what to do."""
    parts: list[RenderableType] = [heading(f"Run on {run.ran_on}, {run.inputs}")]
    if run.skipped:
        return [*parts, line("!", plain(f"Not run. {run.skipped}"))]
    if run.first_bad is None:
        count = f"{len(run.values)} value{'' if len(run.values) == 1 else 's'}"
        text = f"{count} checked: none overflows, vanishes or is NaN where its inputs are fine."
        parts.append(line(Text("✔", style="green"), Text(text)))
    else:
        bad = run.first_bad
        node = f"node {bad.node!r}, value {bad.value!r}" if bad.node != bad.value else f"value {bad.value!r}"
        text = f"It goes wrong first at {node} ({bad.op}): {bad.alarm}."
        parts.append(line(Text("✘", style="bold red"), plain(text)))
    shown = [row for row in run.values if verbose or row.fault or row.inherited]
    parts += _values(shown if verbose else shown[:_ROWS])
    if len(shown) > _ROWS and not verbose:
        parts.append(line("", Text(f"… and {len(shown) - _ROWS} more (-v shows all values)", style="dim")))
    return parts


def _values(rows: Sequence[ValueCheck]) -> list[RenderableType]:
    if not rows:
        return []
    columns = ("value", "op", "type", "max |x|", "exact max |x|", "NaN", "Inf", "flushed", "")
    table = make_table(*columns, right=(3, 4, 5, 6, 7))
    for row in rows:
        m = row.measured
        peaks = largest(m.found_max, m.found_zero), largest(m.reference_max, m.reference_zero)
        fate = Text(row.fault, style="red") if row.fault else Text("passed on" if row.inherited else "", style="dim")
        table.add_row(
            plain(row.value), plain(row.op), row.dtype, *peaks, str(m.found_nan or ""), str(m.found_inf or ""),
            str(m.flushed or ""), fate,
        )  # fmt: skip
    return [Padding(table, (0, 0, 0, 2), expand=False)]
