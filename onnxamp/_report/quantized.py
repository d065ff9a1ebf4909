"""Quantized networks in reports: their nodes by type and role, and the floats that stay float32 beside integers."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from onnxamp._convert.plan import Plan, QuantizedUnit
from onnxamp._decide.words import title_of
from onnxamp._graph.quantized import INTEGERS, PRODUCTS, SCALES
from onnxamp._report.parts import Item, Section, Table, section, table
from onnxamp._report.text import as_sentence, count, detailed, tally

_UNITS: Final = 8
"""Kinds of units that the terminal shows without -v."""
_ROLES: Final[Mapping[str, str]] = {
    SCALES: "quantize or dequantize",
    PRODUCTS: "multiply what was dequantized",
    INTEGERS: "compute with integers inside",
    "rest": "compute with floats alone",
}


def quantized_sections(plan: Plan) -> Iterator[Section]:
    """Yield the result for a quantized network: its nodes by type, and the floats that stay float32."""
    yield section("Quantized nodes", quantized_table({"": plan}))
    yield section("Units between integers", units_table({"": plan}), on_page=False)
    if plan.level != "auto":  # tuning says it
        yield section("Float32 beside integers", _kept(plan), on_page=False)


def quantized_table(plans: Mapping[str, Plan]) -> Table:
    """Return nodes of a quantized network by type and role, under each of some plans."""
    dtypes = dict.fromkeys(plan.dtype for plan in plans.values())
    rows = (
        (
            level,
            part.type,
            _ROLES[part.role],
            f"{sum(part.ops.values()):,}",
            f"{part.low:,}",
            f"{len(part.float32):,}",
            tally(part.ops),
        )
        for level, plan in plans.items()
        for part in plan.quantized
    )
    columns = ("level", "type", "nodes that", "nodes", *dtypes, "float32", "op types")
    first = 1 if "" in plans else 0
    return table(
        columns[first:],
        (row[first:] for row in rows),
        right=range(3 - first, 6 - first),
        prose=(6 - first,),
        drop=(6 - first,),
    )


def units_table(plans: Mapping[str, Plan]) -> Table:
    """Return a drawing of the ops between integers, under each of some plans."""
    units = [(level, unit) for level, plan in plans.items() for unit in plan.units]
    units.sort(key=lambda row: -row[1].count)
    rows = ((level, f"{unit.count:,}", _drawn(unit)) for level, unit in units)
    columns = ("level", "units", "dequantize → compute → quantize")
    first = 1 if "" in plans else 0
    return table(
        columns[first:],
        (row[first:] for row in rows),
        right=(1 - first,),
        shown=_UNITS,
        prose=(2 - first,),
        drop=(),
    )


def _drawn(unit: QuantizedUnit) -> str:
    ops = (f"{tally(ops)} ({precision})" for precision, ops in unit.ops.items())
    parts = tally(unit.dequantized), " + ".join(ops), tally(unit.quantized)
    return " → ".join(part or "floats" for part in parts)


def _kept(plan: Plan) -> Iterator[Item]:
    """Yield the reasons for which floats stay float32, most frequent first, with the nodes."""
    kept = {node: why for part in plan.quantized for node, why in part.float32.items()}
    rows = {row.node: row for row in plan.rows if not row.low and row.node in kept}
    titles = {
        node: title_of(rows[node].reason) if node in rows else why
        for node, why in kept.items()
    }
    for title, times in Counter(titles.values()).most_common():
        nodes = [node for node in kept if titles[node] == title]
        mine = [rows[node] for node in nodes if node in rows]
        ops = f": {tally(row.op for row in mine)}" if mine else ""
        is_bare = all(row.why == title for row in mine)
        yield Item(
            as_sentence(f"{title}{ops}"),
            label=count(times, "node"),
            members=tuple(nodes) if is_bare else detailed(mine),
        )
