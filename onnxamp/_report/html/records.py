"""What the HTML page shows, as data: frozen, made of plain numbers and of text that is safe to show anywhere."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from onnxamp._dtypes import LowType
from onnxamp._report.parts import printable

_LONGEST: Final = 400
"""Characters of a name that are shown; longer ones lose their middle."""
_LONGEST_SENTENCE: Final = 2000


class Status(StrEnum):
    """The verdict in one word."""

    GOOD = "good"
    INEXACT = "inexact"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Nothing was run, so nothing is known."""


class Level(IntEnum):
    """How bad a message about a node is. From WARNING on it is trouble."""

    NONE = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """``sentence`` is the headline, ``details`` are the sentences that follow it."""

    status: Status
    sentence: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the header: what it is, the number with its unit, and a remark."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """What to do next: a command to copy, what a trial of it showed, and the nodes that it keeps in float32.

    ``is_options`` tells that the command is options for the conversion of the original. ``confirmed`` is False where no
    trial was good enough: then there is no command, and ``nodes`` were kept in float32 in vain.
    """

    command: str
    is_options: bool
    outcome: str
    nodes: tuple[str, ...]
    confirmed: bool


@dataclass(frozen=True, slots=True)
class Message:
    """What is to be said about a node."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node in execution order. ``why`` is the kind of the reason for its precision, ``reason`` the whole of it.

    ``precision`` is "float16", "bfloat16", "float32", "float64", "mixed", "no floats", or "" where it is unknown;
    ``is_cast`` tells a Cast between two floats.
    """

    name: str
    op: str
    scope: str
    precision: str
    provider: str
    why: str
    reason: str
    is_cast: bool
    messages: tuple[Message, ...]

    @property
    def level(self) -> Level:
        """That of the worst message."""
        return max((message.level for message in self.messages), default=Level.NONE)


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A measured value: the number of its node, relative L2 errors, and magnitudes of the reference.

    ``least`` is the smallest non-zero |x|, ``largest`` the largest finite one; None where nothing was measured.
    """

    node: int
    name: str
    dtype: str
    local: float | None
    accumulated: float | None
    least: float | None
    largest: float | None


@dataclass(frozen=True, slots=True)
class Window:
    """The range of the low type, and its unit of rounding (the largest relative error of one rounding)."""

    name: str
    largest: float
    normal: float
    subnormal: float
    rounding: float


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One model output: ``cells`` belong to the columns of the table, ``remark`` says what is wrong."""

    name: str
    status: Status
    cells: tuple[str, ...]
    remark: str


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One limit held against one output."""

    output: str
    metric: str
    found: str
    limit: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a bar: ``kind`` chooses its colour."""

    kind: str
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar made of shares, such as the nodes per precision before the conversion."""

    label: str
    total: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars that share one scale."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class WeightRow:
    """A weight that lost elements: numbers of elements, and what became of them."""

    name: str
    elements: int
    saturated: int
    zero: int
    subnormal: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Sizes and Casts; ``lost_of`` is the number of converted weights, ``lost_count`` of those that lost elements."""

    groups: tuple[BarGroup, ...] = ()
    figures: tuple[Figure, ...] = ()
    lost: tuple[WeightRow, ...] = ()
    lost_count: int = 0
    lost_of: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: where, in percent of its length from the left or the top, and what it says."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate: where it is drawn, in percent from the left and from the top, and the cells of its row.

    ``read`` are the lines of what pointing at it shows.
    """

    x: float
    y: float
    holds: bool
    chosen: bool
    cells: tuple[str, ...]
    read: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A node that stays float32."""

    name: str
    op: str
    detail: str


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """Nodes that stay float32 for one reason, the first of ``count``."""

    why: str
    count: int
    rows: tuple[KeptRow, ...]


@dataclass(frozen=True, slots=True)
class Front:
    """What a tuning had to choose from: candidates from fast to slow, error against time."""

    columns: tuple[str, ...]
    points: tuple[Point, ...]
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    limit: Tick
    metric: str
    times: str
    said: tuple[str, ...]
    """What is to be said besides, in sentences."""
    kept: tuple[KeptGroup, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page shows. Sections without data are left out of it."""

    title: str
    task: str
    """What was done, in a few words: "convert, O2 float16 for cuda"."""
    models: tuple[str, ...]
    ran: tuple[str, ...]
    verdict: Verdict
    action: Action | None
    figures: tuple[Figure, ...]
    window: Window | None
    limit: float | None
    """Limit of the relative L2 error, where all outputs share one."""
    first_bad: int | None
    """Number of the node at which it starts to go wrong."""
    first_bad_text: str
    reasons: tuple[tuple[str, int], ...]
    """Reason -> nodes that stay float32 for it, most frequent first."""
    output_columns: tuple[str, ...]
    outputs: tuple[OutputRow, ...]
    limits: tuple[LimitRow, ...]
    findings: tuple[Message, ...]
    """What concerns no node of the table."""
    notes: tuple[str, ...]
    budget: Budget
    nodes: tuple[NodeRow, ...]
    values: tuple[ValueRow, ...]
    front: Front | None = None


def named(text: str, longest: int = _LONGEST) -> str:
    """Text from a model or a path as it can be shown: control and direction marks written out, bounded in length."""
    bounded = text if len(text) <= 4 * longest else text[:longest] + text[-longest:]
    safe = printable(bounded)
    return safe if len(safe) <= longest else f"{safe[: longest // 2]} … {safe[-longest // 2 :]}"


def said(text: str) -> str:
    """A sentence, likewise: it may hold several names."""
    return named(text, _LONGEST_SENTENCE)


def window_of(low: LowType) -> Window:
    """The window of a low type; its limits come from :mod:`onnxamp._dtypes`."""
    return Window(low.name, low.max_finite, low.smallest_normal, low.smallest_subnormal, low.epsilon / 2)
