"""Elements of reports as data: built once, then printed (:mod:`onnxamp._report.terminal`) and put on the page.

Texts may contain unescaped names from models; every view escapes them. Several reports have the parts about expected
errors and quantized networks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from functools import cache, partial
from itertools import chain, pairwise
from typing import Final, NamedTuple, Self, TypeAlias

from onnxamp._audit import Audit
from onnxamp._base.words import count
from onnxamp._convert.plan import ExpectedError, Plan, QuantizedUnit
from onnxamp._decide.verdicts import title_of
from onnxamp._facts.dtypes import FORMATS
from onnxamp._facts.tables import read_table
from onnxamp._graph.quantized import INTEGERS, PRODUCTS, SCALES
from onnxamp._numerics.results import DiffReport
from onnxamp._report import as_sentence, detailed, number, percent, size, tally
from onnxamp._runtime.sizes import listed

_ROLES: Final[Mapping[str, str]] = {
    SCALES: "quantize or dequantize",
    PRODUCTS: "multiply dequantized numbers",
    INTEGERS: "compute with integers inside",
    "rest": "compute with floats alone",
}


class Status(StrEnum):
    """The verdict in one word: the same on the terminal, on the page and in JSON."""

    PASSED = "passed"
    INEXACT = "inexact"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Nothing was run, or what was run says nothing sure."""
    NO_GAIN = "no-gain"
    """The result is right, but no better than the original. In JSON, it has passed."""

    @classmethod
    def of(cls, passed: bool) -> Self:
        """Return the verdict on a condition that was checked."""
        return cls.PASSED if passed else cls.FAILED


class Mark(NamedTuple):
    """The sign of a verdict in each view, and its color on a terminal."""

    terminal: str
    color: str
    page: str
    markdown: str


MARKS: Final[Mapping[Status, Mark]] = {
    Status.PASSED: Mark("✔", "green", "✓", "✅"),
    Status.INEXACT: Mark("≈", "yellow", "≈", "⚠️"),
    Status.FAILED: Mark("✘", "red", "✕", "❌"),
    Status.UNKNOWN: Mark("?", "yellow", "?", "❔"),
    Status.NO_GAIN: Mark("!", "yellow", "!", "⚠️"),
}


class Severity(IntEnum):
    """Severity of a message. WARNING and ERROR are problems."""

    NONE = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


class Headline(NamedTuple):
    """``sentence`` is the headline, ``details`` are the sentences that follow it."""

    status: Status
    sentence: str
    details: tuple[str, ...] = ()


class Figure(NamedTuple):
    """A key figure: its name, the number with its unit, and a remark; ``brief`` says it within a line."""

    label: str
    value: str
    remark: str = ""
    brief: str = ""


class TableRow(NamedTuple):
    """A row of a table. ``remark`` follows the row; ``is_strong`` sets it off from the others."""

    cells: tuple[str, ...]
    status: Status | None = None
    remark: str = ""
    is_strong: bool = False


class Table(NamedTuple):
    """Rows under titles; the columns whose positions are in ``right`` hold numbers.

    ``shown`` limits the rows on the terminal, where -v shows all of them. ``key`` names the rows on the page
    (``key-0``, ``key-1``, ...). The columns in ``drawn`` hold drawings, which no terminal cuts. On a narrow terminal,
    the columns in ``prose`` are folded, or stand below their rows if they would be too narrow to read, and names lose
    their middle. Then the columns in ``drop`` are left out, in this order; if it is None, from the right, all but the
    first.
    """

    columns: tuple[str, ...]
    right: Sequence[int]
    rows: tuple[TableRow, ...]
    shown: int | None = None
    key: str = ""
    prose: Sequence[int] = ()
    drop: Sequence[int] | None = None
    drawn: Sequence[int] = ()


class Statement(NamedTuple):
    """A statement, and its subject: ``members`` are names, or "name: detail". ``action`` says what to do."""

    text: str
    level: Severity = Severity.NOTE
    label: str = ""
    members: tuple[str, ...] = ()
    action: str = ""


class Share(NamedTuple):
    """Part of a bar; ``kind`` chooses its color."""

    kind: str
    amount: int
    text: str


class Bar(NamedTuple):
    """Shares of a total, such as the nodes per precision before the conversion."""

    label: str
    total: str
    shares: tuple[Share, ...]


class Bars(NamedTuple):
    """Bars that share one scale: on the terminal, columns of a table."""

    title: str
    bars: tuple[Bar, ...]


class Gauge(NamedTuple):
    """The magnitudes of a value against the range of a type.

    ``texts`` are what was seen, what inputs made to be hard reached, and what is proven; ``reach`` is how far each of
    these comes, as a share of the axis.
    """

    label: str
    texts: tuple[str, str, str]
    reach: tuple[float, float, float]


class Gauges(NamedTuple):
    """Magnitudes of several values on one logarithmic axis.

    ``limit`` is the share of the axis where the type ends, ``legend`` what its characters mean on a terminal.
    """

    columns: tuple[str, ...]
    gauges: tuple[Gauge, ...]
    limit: float
    legend: str


Part: TypeAlias = Table | Statement | Bars | Gauges | Figure


class Section(NamedTuple):
    """Parts under a heading.

    ``is_detail``: the terminal shows it only with -v. ``on_page``: False for parts that the page shows in another form,
    such as a column of the node table or a plot.
    """

    title: str
    parts: tuple[Part, ...]
    is_detail: bool = False
    on_page: bool = True

    @property
    def key(self) -> str:
        """The title as an identifier."""
        return self.title.lower().replace(" ", "-")


class NextStep(NamedTuple):
    """A next step, or an attempt: ``command`` is meant to be copied; ``nodes`` are those that it keeps in float32.

    ``is_options``: the command is only options, for converting the original. ``confirmed`` is False if no trial was
    good enough; then there is no command.
    """

    text: str
    command: str = ""
    nodes: tuple[str, ...] = ()
    confirmed: bool = True
    is_options: bool = False


class Report(NamedTuple):
    """The whole report of a command.

    ``task`` is a description ("convert, O2 float16 for cuda"), ``models`` are the files, original first, and ``ran``
    says where and on which inputs they ran. ``lines`` limits the lines on the terminal, unless it failed: -v shows all.
    """

    task: str
    verdict: Headline | None = None
    models: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    sections: tuple[Section, ...] = ()
    steps: tuple[NextStep, ...] = ()
    lines: int | None = None


LINES: Final = 12
"""The lines that a result without faults takes on the terminal: half a window of 24 lines."""


def table(
    name: str,
    rows: Iterable[TableRow | Sequence[str]],
    *,
    more: Iterable[str] = (),
    dtype: str = "",
    shown: int | None = None,
) -> Table:
    """Return a table of rows, or of cells alone, as ``_data/tables.toml`` lays it out.

    Args:
        name: its name there.
        rows: the rows.
        more: further columns, which hold numbers.
        dtype: the low-precision type that titles name.
        shown: how many rows the terminal shows, if that depends on the rows.
    """
    layout = _layouts()[name]
    titles = layout["columns"]
    # Layouts name columns, tables number them.
    places = {
        role: tuple(map(titles.index, layout[role]))
        for role in ("right", "prose", "drop")
        if role in layout
    }
    columns = (*(title.format(dtype=dtype) for title in titles), *more)
    numbers = range(len(titles), len(columns))
    whole = (
        row if isinstance(row, TableRow) else TableRow(tuple(row)) for row in rows
    )
    return Table(
        columns=columns,
        right=(*places.get("right", ()), *numbers),
        rows=tuple(whole),
        shown=layout.get("shown") if shown is None else shown,
        key=layout.get("key", ""),
        prose=places.get("prose", ()),
        drop=places.get("drop"),
    )


_layouts: Final = cache(partial(read_table, "tables"))


def section(
    title: str,
    *parts: Part | Iterable[Part],
    is_detail: bool = False,
    on_page: bool = True,
) -> Section:
    """Return a section of the parts that are not empty; views skip a section without parts."""
    flat = chain.from_iterable(
        (part,) if isinstance(part, Part) else part for part in parts
    )
    return Section(title, tuple(filter(_holds, flat)), is_detail, on_page)


def _holds(part: Part) -> bool:
    if isinstance(part, Bars):
        return any(bar.shares for bar in part.bars)
    if isinstance(part, Gauges):
        return bool(part.gauges)
    return not isinstance(part, Table) or bool(part.rows)


def hint(text: str) -> Statement:
    """Return a sentence without a sign."""
    return Statement(text, Severity.NONE)


def notes(texts: Iterable[str]) -> list[Statement]:
    """Return each sentence once, as an item."""
    return [Statement(text) for text in dict.fromkeys(texts)]


def listed_parts(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts for a list, with each action after the last item that needs it."""
    for part, after in pairwise(chain(parts, [None])):
        if isinstance(part, Statement) and isinstance(after, Statement):
            is_repeated = (part.label, part.action) == (after.label, after.action)
            yield part._replace(action="") if is_repeated else part
        elif part is not None:
            yield part


def shown_rows(table: Table, *, verbose: bool) -> tuple[TableRow, ...]:
    """Return the rows that the terminal shows."""
    return table.rows if verbose else table.rows[: table.shown]


def problems(report: Report) -> Iterator[Statement]:
    """Yield all warnings and errors except those in details."""
    for one in report.sections:
        if one.is_detail:
            continue
        for part in one.parts:
            if isinstance(part, Statement) and part.level >= Severity.WARNING:
                yield part


PRECISIONS: Final = (*FORMATS, "mixed", "float32", "float64", "no floats")
"""Precisions of nodes, in the order in which they are shown."""


def node_figure(dtype: str, counts: Mapping[str, int]) -> tuple[Figure, ...]:
    """Return how many of the nodes that compute with floats are in low precision; nothing if none does."""
    low = counts.get(dtype, 0) + counts.get("mixed", 0)
    floats = sum(counts.get(kind, 0) for kind in PRECISIONS if kind != "no floats")
    kinds = ", ".join(
        f"{counts[kind]:,} {kind}" for kind in PRECISIONS if counts.get(kind)
    )
    share = percent(low, floats)
    figure = Figure(f"nodes in {dtype}", share, kinds, f"{share} of nodes in {dtype}")
    return (figure,) if floats else ()


def node_bar(label: str, counts: Mapping[str, int]) -> Bar:
    """Return nodes by precision."""
    shares = (
        Share(kind, counts[kind], f"{counts[kind]:,}")
        for kind in PRECISIONS
        if counts.get(kind)
    )
    return Bar(label, f"{sum(counts.values()):,}", tuple(shares))


def weight_bar(label: str, sizes: Mapping[str, int]) -> Bar:
    """Return bytes of weights by type."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shares = (Share(kind, bytes_, size(bytes_)) for kind, bytes_ in ordered if bytes_)
    return Bar(label, size(sum(sizes.values())), tuple(shares))


def traffic_figures(audit: Audit | None) -> tuple[Figure, ...]:
    """Return the Casts between floats, and the bytes that they move."""
    if audit is None:
        return ()
    casts = audit.casts
    redundant = f"{casts.redundant:,} redundant; " if casts.redundant else ""
    at = f" at {listed(casts.assumed)} (assumed)" if casts.assumed else ""
    left = f"; {casts.unsized:,} of unknown size" if casts.unsized else ""
    remark = ""
    if casts.count:
        remark = f"{redundant}about {size(casts.bytes)} moved per run{at}{left}"
    brief = count(casts.count, "Cast")
    return (Figure("Casts between floats", f"{casts.count:,}", remark, brief),)


def bars_table(bars: Bars) -> Table:
    """Return bars as columns of a table."""
    cells: dict[str, list[str]] = {}
    for column, bar in enumerate(bars.bars):
        for share in bar.shares:
            row = cells.setdefault(share.kind, [""] * len(bars.bars))
            row[column] = share.text
    rows = [TableRow((kind, *texts)) for kind, texts in cells.items()]
    titles = (bars.title, *(bar.label for bar in bars.bars))
    total = TableRow(("in all", *(bar.total for bar in bars.bars)))
    return Table(titles, range(1, len(titles)), (*rows, total))


_CELLS: Final = 26
"""Characters of a gauge's axis."""
_FILLS: Final = ("█", "▓", "░")
"""Up to what was seen, what hard inputs reached, and what is proven."""


def gauges_table(part: Gauges) -> Table:
    """Return gauges as a table whose last column draws them."""
    rows = [
        TableRow((gauge.label, *gauge.texts, _line(gauge, part.limit)))
        for gauge in part.gauges
    ]
    drawn = (len(part.columns) - 1,)
    return table("headroom", rows)._replace(columns=part.columns, drawn=drawn)


def _line(gauge: Gauge, limit: float) -> str:
    """Return a gauge as characters, with a bar where the type ends and an arrow where nothing ends it."""
    end = round(limit * _CELLS)
    cells = []
    for position in range(_CELLS):
        middle = (position + 0.5) / _CELLS
        fills = (
            fill
            for fill, reach in zip(_FILLS, gauge.reach, strict=True)
            if middle <= reach
        )
        cells.append(next(fills, " "))
    text = f"{''.join(cells[:end])}│{''.join(cells[end:])}"
    return f"{text}→" if gauge.reach[-1] >= 1.0 else text.rstrip()


def expected_figures(expected: ExpectedError | None) -> Iterator[Figure]:
    """Yield the expected error in one number."""
    if expected is None or expected.error is None or not expected.samples:
        return
    error = number(expected.error)
    bound = number(expected.bound or 0.0)
    remark = f"relative L2, below {bound} on 99.99 % of inputs like the samples"
    yield Figure("expected error", error, remark, f"expected error {error}")


def expected_parts(
    expected: ExpectedError | None, measured: DiffReport | None = None
) -> Iterator[Part]:
    """Yield the expected error beside the measured one, and the nodes that contribute most."""
    if expected is None:
        return
    if expected.error is None:
        yield Statement(f"Unknown: {expected.why}", Severity.WARNING)
        return
    if not expected.samples:
        yield Statement("None: all floats stay in float32.")
        return
    cells = [number(expected.error), number(expected.bound or 0.0)]
    outputs = measured.outputs if measured is not None else ()
    errors = [output.rel_l2 for output in outputs if output.is_float]
    if errors:
        cells.append(number(max(errors)))
    yield table("expected", [cells], more=["measured"] if errors else ())
    text = f"Relative L2 errors of the worst output, from one backward pass through {count(expected.samples, 'sample')}."
    if expected.samples > 1 and expected.least is not None:
        text = f"{text[:-1]}; on the sample with the smallest error, {number(expected.least)} is expected."
    yield Statement(text)
    if expected.jumps:
        select = "selects" if len(expected.jumps) == 1 else "select"
        yield Statement(
            f"{count(len(expected.jumps), 'node')} {select} by value, and may select something else: the effect of that"
            " is not predicted.",
            Severity.WARNING,
            members=expected.jumps,
        )
    if expected.spread:
        yield Statement(
            f"Errors upstream of {count(len(expected.spread), 'node')} without a gradient are known less exactly.",
            members=expected.spread,
        )
    rows = ((row.node, row.op, percent(row.share, 1.0)) for row in expected.nodes)
    yield table("expected-nodes", rows)


def quantized_sections(plan: Plan) -> Iterator[Section]:
    """Yield the result for a quantized network: its nodes by type, and the floats that stay in float32."""
    yield section("Quantized nodes", quantized_table({"": plan}))
    yield section("Units between integers", units_table({"": plan}), on_page=False)
    if plan.level != "auto":  # tuning says it
        yield section("Float32 beside integers", _kept(plan), on_page=False)


def quantized_table(plans: Mapping[str, Plan]) -> Table:
    """Return nodes of a quantized network by type and role, under each of some plans."""
    is_alone = "" in plans
    rows = []
    for level, plan in plans.items():
        lead = () if is_alone else (level,)
        for part in plan.quantized:
            total = sum(part.ops.values())
            counts = (f"{n:,}" for n in (total, part.low, len(part.float32)))
            ops = tally(part.ops)
            rows.append((*lead, part.type, _ROLES[part.role], *counts, ops))
    dtype = next((plan.dtype for plan in plans.values()), "")
    return table("quantized" if is_alone else "quantized-by-level", rows, dtype=dtype)


def units_table(plans: Mapping[str, Plan]) -> Table:
    """Return a drawing of the ops between integers, under each of some plans."""
    units = list[tuple[str, QuantizedUnit]]()
    for level, plan in plans.items():
        units += ((level, unit) for unit in plan.units)
    units.sort(key=lambda row: -row[1].count)
    is_alone = "" in plans
    rows = []
    for level, unit in units:
        lead = () if is_alone else (level,)
        rows.append((*lead, f"{unit.count:,}", _drawn(unit)))
    return table("units" if is_alone else "units-by-level", rows)


def _drawn(unit: QuantizedUnit) -> str:
    ops = (f"{tally(ops)} ({precision})" for precision, ops in unit.ops.items())
    parts = tally(unit.dequantized), " + ".join(ops), tally(unit.quantized)
    return " → ".join(part or "floats" for part in parts)


def _kept(plan: Plan) -> Iterator[Statement]:
    """Yield the reasons for which floats stay in float32, most frequent first, with the nodes."""
    kept = dict[str, str]()
    for part in plan.quantized:
        kept |= part.float32
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
        yield Statement(
            as_sentence(f"{title}{ops}"),
            label=count(times, "node"),
            members=tuple(nodes) if is_bare else detailed(mine),
        )
