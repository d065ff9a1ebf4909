"""The report of why Casts are where they are."""

from collections.abc import Sequence

from onnxamp._convert.cast_trace import CastTrace, Side
from onnxamp._facts.dtypes import FORMATS
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
            section(_title(level, trace), *_items(trace), _sides(trace))
            for level, trace in traces
        ),
    )


def _title(level: str, trace: CastTrace) -> str:
    """Return the heading of a value."""
    where = f" in the body of {trace.body}" if trace.body else ""
    return f"{trace.value}{where} at level {level}"


def _items(trace: CastTrace) -> Sequence[Statement]:
    """Return an item for each Cast."""
    if not trace.casts:
        return [Statement(f"There is no Cast at this value: {_agreement(trace)}.")]
    return [
        Statement(cast.text, label=cast.cast, action=cast.option)
        for cast in trace.casts
    ]


def _agreement(trace: CastTrace) -> str:
    """Return why a value needs no Cast, in a clause."""
    if not trace.read:
        return "nothing reads it"
    if trace.made.precision not in FORMATS.keys() | {"float32"}:
        return f"conversions leave {trace.made.precision} as it is"
    return "its producer and readers agree"


def _sides(trace: CastTrace) -> Table:
    """Return a row for what makes the value, and one for each reader."""
    sides = (("made by", trace.made), *(("read by", side) for side in trace.read))
    return table("sides", (_row(role, side) for role, side in sides))


def _row(role: str, side: Side) -> TableRow:
    why = f"{side.why} (nearest: {side.asked_by})" if side.asked_by else side.why
    return TableRow((role, side.node, side.op, side.precision, why, side.option))
