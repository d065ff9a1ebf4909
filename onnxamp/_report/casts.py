"""The report of why Casts are where they are."""

from collections.abc import Sequence

from onnxamp._convert.cast_trace import CastTrace, Side
from onnxamp._report.parts import Report, Statement, Table, TableRow, section, table


def casts_report(model: str, traces: Sequence[tuple[str, CastTrace]]) -> Report:
    """Return the Casts of values, with what makes and reads each value.

    Args:
        model: the path of the model.
        traces: the level, and a trace.
    """
    return Report(
        "inspect",
        models=(model,),
        sections=tuple(
            section(f"{trace.value} at level {level}", *_items(trace), _sides(trace))
            for level, trace in traces
        ),
    )


def _items(trace: CastTrace) -> Sequence[Statement]:
    """Return an item for each Cast."""
    if not trace.casts:
        return [
            Statement(
                "There is no Cast at this value: its producer and readers agree."
            )
        ]
    return [
        Statement(one.text, label=one.cast, action=one.option) for one in trace.casts
    ]


def _sides(trace: CastTrace) -> Table:
    """Return a row for what makes the value, and one for each reader."""
    sides = (("made by", trace.made), *(("read by", side) for side in trace.read))
    return table("sides", (_row(role, side) for role, side in sides))


def _row(role: str, side: Side) -> TableRow:
    why = f"{side.why} (nearest: {side.asked_by})" if side.asked_by else side.why
    return TableRow((role, side.node, side.op, side.precision, why, side.option))
