"""Elements of reports as data: built once, then printed (:mod:`onnxamp._report.terminal`) and put on the page.

Texts may contain unescaped names from models; every view escapes them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from itertools import chain, pairwise
from typing import Final, NamedTuple, TypeAlias

from onnxamp._audit.findings import Audit
from onnxamp._dtypes import FORMATS
from onnxamp._report.text import count, percent, size
from onnxamp._runtime.sizes import listed


class Status(StrEnum):
    """The verdict in one word: the same on the terminal, on the page and in JSON."""

    PASSED = "passed"
    INEXACT = "inexact"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Nothing was run, so nothing is known."""


class Level(IntEnum):
    """Severity of a message. WARNING and ERROR are problems."""

    NONE = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


class Verdict(NamedTuple):
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


class Row(NamedTuple):
    """A row of a table. ``remark`` follows the row; ``is_strong`` sets it off from the others."""

    cells: tuple[str, ...]
    status: Status | None = None
    remark: str = ""
    is_strong: bool = False


class Table(NamedTuple):
    """Rows under titles; the columns whose positions are in ``right`` hold numbers.

    ``shown`` limits the rows on the terminal, where -v shows all of them. ``key`` names the rows on the page
    (``key-0``, ``key-1``, ...). On a narrow terminal, the columns in ``prose`` are folded, names lose their middle, and
    then the columns in ``drop`` are left out, in this order; if it is None, from the right, all but the first.
    """

    columns: tuple[str, ...]
    right: Sequence[int]
    rows: tuple[Row, ...]
    shown: int | None = None
    key: str = ""
    prose: Sequence[int] = ()
    drop: Sequence[int] | None = None


class Item(NamedTuple):
    """A statement, and its subject: ``members`` are names, or "name: detail". ``action`` says what to do."""

    text: str
    level: Level = Level.NOTE
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


Part: TypeAlias = Table | Item | Bars | Figure


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


class Step(NamedTuple):
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
    says where and on which inputs they ran.
    """

    task: str
    verdict: Verdict | None = None
    models: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    sections: tuple[Section, ...] = ()
    steps: tuple[Step, ...] = ()


def table(
    columns: Sequence[str],
    rows: Iterable[Row | Sequence[str]],
    *,
    right: Sequence[int] = (),
    shown: int | None = None,
    key: str = "",
    prose: Sequence[int] = (),
    drop: Sequence[int] | None = None,
) -> Table:
    """Return a table of rows, or of cells alone."""
    every = tuple(row if isinstance(row, Row) else Row(tuple(row)) for row in rows)
    return Table(tuple(columns), tuple(right), every, shown, key, prose, drop)


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
    return not isinstance(part, Table) or bool(part.rows)


def hint(text: str) -> Item:
    """Return a sentence without a sign."""
    return Item(text, Level.NONE)


def notes(texts: Iterable[str]) -> list[Item]:
    """Return each sentence once, as an item."""
    return [Item(text) for text in dict.fromkeys(texts)]


def listed_parts(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts for a list, with each action after the last item that needs it."""
    for part, behind in pairwise(chain(parts, [None])):
        if isinstance(part, Item) and isinstance(behind, Item):
            is_repeated = (part.label, part.action) == (behind.label, behind.action)
            yield part._replace(action="") if is_repeated else part
        elif part is not None:
            yield part


def shown_rows(table: Table, *, verbose: bool) -> tuple[Row, ...]:
    """Return the rows that the terminal shows."""
    return table.rows if verbose else table.rows[: table.shown]


def problems(report: Report) -> Iterator[Item]:
    """All items that are warnings or errors, but for those in details."""
    for one in report.sections:
        items = (
            part for part in one.parts if isinstance(part, Item) and not one.is_detail
        )
        yield from (item for item in items if item.level >= Level.WARNING)


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
    """Bytes of weights by type."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shares = (Share(kind, bytes_, size(bytes_)) for kind, bytes_ in ordered if bytes_)
    return Bar(label, size(sum(sizes.values())), tuple(shares))


def traffic_figures(audit: Audit | None) -> tuple[Figure, ...]:
    """Return the Casts between floats, and the bytes that they move."""
    if audit is None:
        return ()
    casts = audit.casts
    redundant = f"{casts.redundant:,} redundant; " if casts.redundant else ""
    at = (
        f" at {listed(casts.assumed)} (assumed)"
        if casts.assumed and casts.count
        else ""
    )
    left = f"; {casts.unsized:,} of unknown size" if casts.unsized else ""
    return (
        Figure(
            "Casts between floats",
            f"{casts.count:,}",
            f"{redundant}about {size(casts.bytes)} moved per run{at}{left}"
            if casts.count
            else "",
            count(casts.count, "Cast"),
        ),
    )


def bars_table(bars: Bars) -> Table:
    """Return bars as columns of a table."""
    kinds = dict.fromkeys(share.kind for bar in bars.bars for share in bar.shares)
    texts = [{share.kind: share.text for share in bar.shares} for bar in bars.bars]
    rows = [(kind, *(text.get(kind, "") for text in texts)) for kind in kinds]
    titles = (bars.title, *(bar.label for bar in bars.bars))
    total = ("in all", *(bar.total for bar in bars.bars))
    return table(titles, [*rows, total], right=range(1, len(titles)))
