"""The page as data: a report, with the nodes in execution order, and the plot of a tuning's candidates.

Facts about a node come from audit, plan and measurements, and are joined by its name.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf, log10
from pathlib import PurePath
from typing import Final, NamedTuple, TypeAlias

from onnxamp._audit import Audit
from onnxamp._convert.plan import Plan
from onnxamp._decide.verdicts import title_of, told
from onnxamp._facts.dtypes import FORMATS, Format
from onnxamp._job.writing import Conversion
from onnxamp._numerics.results import (
    DiffReport,
    FirstBad,
    LayerDiff,
    RunCheck,
    ValueCheck,
)
from onnxamp._report import count, number, percent
from onnxamp._report.check import check_report, finding_items, finding_text
from onnxamp._report.comparison import diff_report
from onnxamp._report.conversion import conversion_report, preview_report
from onnxamp._report.parts import Level, Report, section
from onnxamp._report.tuning import (
    error_text,
    known_error,
    measured_error,
    speedup_text,
    time_text,
    tolerance_text,
    tuning_report,
)
from onnxamp._tuning.results import Tuned

_TICKS: Final = 8
"""Ticks of the error axis, at most."""
_EDGE: Final = 8.0
"""Percent of an axis that stays free at each end."""
_SUFFIXES: Final = ("", *(f"_{low.suffix}" for low in FORMATS.values()), "_fp32")
"""An unnamed node is identified by its output, which a conversion may rename with one of these."""
_MILD: Final = frozenset({"flushed"})
"""Faults of a value that only cost accuracy."""


class Message(NamedTuple):
    """A statement about a node."""

    level: Level
    text: str


@dataclass(slots=True)
class NodeRow:
    """A node, while facts about it are gathered and when they are.

    ``precision`` is "float16", "bfloat16", "float32", "float64", "mixed", "no floats", or "" if it is unknown;
    ``quantized`` is as in :class:`onnxamp._audit.NodeFacts`.
    """

    name: str
    op: str
    scope: str = ""
    precision: str = ""
    provider: str = ""
    quantized: str = ""
    verdicts: list[tuple[str, str, str, bool]] = field(default_factory=list)
    """(type parameter, reason, detail, low)."""
    messages: list[Message] = field(default_factory=list)

    def say(self, level: Level, text: str) -> None:
        """Note a statement."""
        self.messages.append(Message(level, text))

    @property
    def why(self) -> str:
        """The kind of the reason for its precision."""
        high = [title_of(reason) for _, reason, _, low in self.verdicts if not low]
        kinds = high or [
            title_of(reason, low=True) for _, reason, _, _ in self.verdicts
        ]
        return kinds[0] if kinds else ""

    @property
    def reason(self) -> str:
        """All of it."""
        texts: dict[str, list[str]] = {}
        for param, reason, detail, low in self.verdicts:
            text = told(reason, "" if detail == self.op else detail, low=low)
            texts.setdefault(text, []).append(param)
        if len(texts) < 2:
            return next(iter(texts), "")
        return "; ".join(
            f"{', '.join(params)}: {text}" for text, params in texts.items()
        )

    @property
    def is_cast(self) -> bool:
        """Whether it is a Cast between two float types."""
        return self.op == "Cast" and self.precision == "mixed"


class ValueRow(NamedTuple):
    """A measured value: the number of its node, relative L2 errors, and magnitudes of the reference.

    ``least`` is the smallest non-zero |x|, ``largest`` the largest finite one; None if nothing was measured. The result
    stores them as multiples by 2 to the power of minus ``exponent``.
    """

    node: int
    name: str
    dtype: str
    local: float | None
    accumulated: float | None
    least: float | None
    largest: float | None
    exponent: int = 0


Measured: TypeAlias = LayerDiff | ValueCheck
"""A value of a comparison, or of a check."""


class Tick(NamedTuple):
    """A mark on an axis: where, in percent of its length from the left or the top, and its label."""

    at: float
    text: str


class Point(NamedTuple):
    """A candidate, in percent from the left and from the top; ``read`` are the lines of its tooltip."""

    x: float
    y: float
    holds: bool
    chosen: bool
    read: tuple[str, ...]


class Plot(NamedTuple):
    """Candidates, those from fast to slow that none is both faster and more accurate than, axes, and the tolerance."""

    metric: str
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    limit: Tick


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page shows. Sections without data are left out of it.

    ``low`` is the low-precision type whose range the figures show, ``limit`` the limit of the relative L2 error if all
    outputs share it, ``first_bad`` the number of the node that goes wrong first.
    """

    report: Report
    nodes: tuple[NodeRow, ...] = ()
    values: tuple[ValueRow, ...] = ()
    low: Format | None = None
    limit: float | None = None
    first_bad: int | None = None
    first_bad_text: str = ""
    plot: Plot | None = None

    @property
    def title(self) -> str:
        """Return the action and the names of its models."""
        command = f"onnxamp {self.report.task.partition(' ')[0].strip(',')}"
        names = " → ".join(
            PurePath(model).name or model for model in self.report.models
        )
        return f"{command}: {names}" if names else command

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Reason -> nodes that stay float32 for it, most frequent first."""
        kept = Counter(
            row.why
            for row in self.nodes
            if row.why and row.precision in ("float32", "mixed")
        )
        return sorted(kept.items(), key=lambda item: (-item[1], item[0]))


class Places:
    """Positions of nodes by name; among nodes of the same name, the one with the wanted op type."""

    def __init__(self, nodes: Sequence[NodeRow]) -> None:
        """Number the nodes in their order."""
        self._of: dict[str, list[int]] = defaultdict(list)
        self._ops = [node.op for node in nodes]
        for position, node in enumerate(nodes):
            self._of[node.name].append(position)
            if node.scope:
                self._of[f"{node.scope}/{node.name}"].append(position)

    def find(self, name: str, op: str, rank: int = 0) -> int | None:
        """Number of the node, None if there is none; ``rank`` counts nodes of equal name.

        If no op type matches, a node with exactly this name is used, because runtimes may replace the op.
        """
        for suffix in _SUFFIXES:
            found = [n for n in self._of.get(name + suffix, ()) if self._ops[n] == op]
            if found:
                return found[min(rank, len(found) - 1)]
        return next(iter(self._of.get(name, ())), None)


def _joined(
    report: Report,
    audit: Audit | None,
    measured: Iterable[Measured],
    *,
    bad: FirstBad | None,
    limit: float | None = None,
    plan: Plan | None = None,
    low: Format | None = None,
) -> Page:
    """Return the page on which all facts about nodes are joined.

    The audit's nodes give the order where there is an audit, else the plan's and the measured ones. A measured node
    that is not among them comes after the one that was measured before it. Complexity: linear, but for a sort.

    Args:
        report: the report of the page.
        audit: of the model whose nodes are listed.
        measured: values of a comparison or of a check.
        bad: the value that goes wrong first.
        limit: the limit of the relative L2 error, None if outputs have different ones.
        plan: of the conversion that made the model.
        low: the low-precision type of the page.
    """
    ordered = sorted(measured, key=lambda item: item.position)
    rows = _skeleton(audit, plan)
    rows, owners = _with_measured(rows, Places(rows), ordered)
    places, values = Places(rows), []
    first = places.find(bad.node, bad.op) if bad is not None else None
    if bad is not None and first is not None:
        level, text = Level.WARNING, "the error exceeds the limit from here on"
        if bad.breaks:
            level, text = Level.ERROR, "first bad value"
        rows[first].say(level, f"{text}: {bad.alarm}")
    for item, node in zip(ordered, owners, strict=True):
        rows[node].messages += _messages(item, limit)
        values.append(_value(node, item))
    _add_types(rows, values)
    if plan is not None:
        _add_plan(rows, places, plan)
    for finding in audit.findings if audit is not None else ():
        where = places.find(finding.node, finding.op) if finding.node else None
        if where is not None:
            rows[where].say(Level[finding.severity.upper()], finding_text(finding))
    return Page(
        report=report,
        nodes=tuple(rows),
        values=tuple(values),
        low=low,
        limit=limit,
        first_bad=first,
        first_bad_text=f"{bad.op}: {bad.alarm}" if bad else "",
    )


def _messages(item: Measured, limit: float | None) -> Iterator[Message]:
    """Return the text of a measured value about its node."""
    if isinstance(item, ValueCheck):
        if item.fault:
            cause = f", {item.measured.alarm}" if item.measured.alarm else ""
            level = Level.WARNING if item.fault in _MILD else Level.ERROR
            yield Message(level, f"fault of {item.value}: {item.fault}{cause}")
        elif item.inherited:
            yield Message(Level.NOTE, f"{item.value} inherits a fault from its inputs")
        return
    if item.note:
        yield Message(Level.NOTE, f"{item.value} was not measured: {item.note}")
    for kind, measured in (("local", item.local), ("accumulated", item.accumulated)):
        if measured is not None and measured.alarm:
            yield Message(
                Level.ERROR, f"{kind} error of {item.value}: {measured.alarm}"
            )
    local = item.local
    if local is None or limit is None or local.alarm:
        return
    if local.rel_l2 > limit:
        yield Message(
            Level.WARNING,
            f"this op alone is off by {number(local.rel_l2)} (relative L2) in {item.value}",
        )


def _skeleton(audit: Audit | None, plan: Plan | None) -> list[NodeRow]:
    if audit is not None:
        nodes = sorted(audit.nodes, key=lambda node: node.position)
        return [
            NodeRow(
                name=node.node,
                op=node.op,
                scope=node.scope,
                precision=node.precision,
                provider=node.provider,
                quantized=node.quantized,
            )
            for node in nodes
        ]
    found: dict[tuple[str, str, int], NodeRow] = {}
    for row in plan.rows if plan is not None else ():
        if row.op != "initializer":
            found.setdefault(
                (row.scope, row.node, row.rank), NodeRow(row.node, row.op, row.scope)
            )
    return list(found.values())


def _with_measured(
    rows: list[NodeRow], places: Places, measured: Sequence[Measured]
) -> tuple[list[NodeRow], list[int]]:
    """Drafts with those of measured nodes that were missing, and the place of the node of each measured value."""
    keys = [(place, 0) for place in range(len(rows))]
    new: dict[tuple[str, str], int] = {}
    found, anchor, every = [], -1, list(rows)
    for item in measured:
        place = places.find(item.node, item.op)
        if place is None:
            place = new.setdefault((item.node, item.op), len(every))
            if place == len(every):
                every.append(NodeRow(item.node, item.op))
                keys.append((anchor, place))
        else:
            anchor = place
        found.append(place)
    order = sorted(range(len(every)), key=lambda place: keys[place])
    rank = {old: new for new, old in enumerate(order)}
    return [every[place] for place in order], [rank[place] for place in found]


def _value(node: int, item: Measured) -> ValueRow:
    """Return the numbers of a measured value; the error of a check is local."""
    if isinstance(item, LayerDiff):
        local, accumulated, exponent = item.local, item.accumulated, item.exponent
    else:
        local, accumulated, exponent = item.measured, None, 0
    ranged = accumulated or local
    has_range = ranged is not None and ranged.reference_max > 0
    is_ordinary = ranged is not None and (has_range or ranged.reference_zero > 0)
    return ValueRow(
        node=node,
        name=item.value,
        dtype=item.dtype,
        local=local.rel_l2 if local else None,
        accumulated=accumulated.rel_l2 if accumulated else None,
        least=ranged.reference_least if ranged and has_range else None,
        largest=ranged.reference_max if ranged and is_ordinary else None,
        exponent=exponent,
    )


def _add_types(rows: Sequence[NodeRow], values: Iterable[ValueRow]) -> None:
    """Set a node's precision by the types of its values, if nothing else determines it."""
    seen: dict[int, set[str]] = defaultdict(set)
    for value in values:
        if value.dtype in ("float32", *FORMATS):
            seen[value.node].add(value.dtype)
    for place, types in seen.items():
        if not rows[place].precision:
            rows[place].precision = types.pop() if len(types) == 1 else "mixed"


def _add_plan(nodes: Sequence[NodeRow], places: Places, plan: Plan) -> None:
    decided: dict[int, set[bool]] = defaultdict(set)
    for row in plan.rows:
        path = f"{row.scope}/{row.node}" if row.scope else row.node
        place = (
            None if row.op == "initializer" else places.find(path, row.op, row.rank)
        )
        if place is not None:
            nodes[place].verdicts.append((row.param, row.reason, row.detail, row.low))
            decided[place].add(row.low)
    for place, lows in decided.items():
        precision = plan.dtype if True in lows else "float32"
        nodes[place].precision = nodes[place].precision or (
            "mixed" if len(lows) == 2 else precision
        )
    for hazard in plan.hazards:
        place = places.find(hazard.node, hazard.op)
        if place is not None:
            fate = f"{plan.dtype} despite a hazard" if hazard.low else "kept float32"
            level = Level.WARNING if hazard.low else Level.NOTE
            text = f"{fate}: {told(hazard.reason, hazard.detail)}"
            nodes[place].say(level, text)


def plot_of(tuned: Tuned) -> Plot:
    """Return the plot of a tuning's candidates."""
    times = [candidate.time for candidate in tuned.candidates]
    left, right = min(times), max(times)
    errors = [known_error(tuned, position) for position in range(len(times))]
    real = [error for error in (*errors, tuned.tolerance) if 0 < error < inf]
    ticks = _ticks(min(real), max(real))
    low, high = log10(ticks[0]), log10(ticks[-1])

    def x(time: float) -> float:
        if right == left:
            return 50.0
        return _EDGE + (100 - 2 * _EDGE) * (time - left) / (right - left)

    def y(error: float) -> float:
        if not 0 < error < inf:
            return 0.0 if error == inf else 100.0
        return _EDGE + (100 - 2 * _EDGE) * (high - log10(error)) / (high - low)

    steps = (
        [left + (right - left) * k / 4 for k in range(5)] if right > left else [left]
    )
    ends = [error for error in (inf, 0.0) if error in errors]
    labels = {
        tick: error_text(tuned, tick) if tuned.metric == "snr" else number(tick, 1)
        for tick in ticks
    }
    points = tuple(
        _point(tuned, k, x(times[k]), y(error)) for k, error in enumerate(errors)
    )
    return Plot(
        metric=tuned.metric,
        points=points,
        front=tuple(points[k] for k in _front(times, errors)),
        xs=tuple(Tick(x(time), time_text(time)) for time in steps),
        ys=tuple(
            Tick(y(error), labels.get(error) or error_text(tuned, error))
            for error in (*ends, *ticks)
        ),
        limit=Tick(y(tuned.tolerance), tolerance_text(tuned)),
    )


def _front(times: Sequence[float], errors: Sequence[float]) -> Iterator[int]:
    """From fast to slow, the candidates that are more accurate than all faster ones."""
    least = inf
    for k in sorted(range(len(times)), key=lambda k: (times[k], errors[k])):
        if errors[k] < least:
            yield k
            least = errors[k]


def _ticks(least: float, most: float) -> list[float]:
    """Round numbers from below ``least`` to above ``most``, at most as many as there is room for."""
    first, last = floor(log10(least)), ceil(log10(most))
    fine = [
        step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)
    ]
    below, above = [x for x in fine if x <= least], [x for x in fine if x >= most]
    ticks = [
        x
        for x in fine
        if below[-1] <= x <= (above[0] if above[0] > below[-1] else above[1])
    ]
    if len(ticks) <= _TICKS:
        return ticks
    every = ceil((last - first) / (_TICKS - 1))
    return [10.0**power for power in range(first, last + every, every)]


def _point(tuned: Tuned, position: int, x: float, y: float) -> Point:
    candidate, error = tuned.candidates[position], known_error(tuned, position)
    is_chosen = position == tuned.chosen
    faster = speedup_text(tuned.candidates[-1].time, candidate.time)
    flops, traffic = percent(candidate.flops, 1.0), percent(candidate.bytes, 1.0)
    status = "" if candidate.verified else ", expected"
    if measured_error(tuned, position) is None:
        status = ", predicted"
    read = (
        f"Candidate {position}" + (", written" if is_chosen else ""),
        f"{tuned.metric} {error_text(tuned, error)}{status}",
        f"{time_text(candidate.time)}, {faster} as fast as float32",
        f"{candidate.nodes:,} of {count(tuned.units, 'node')} low: {flops} of the arithmetic, {traffic} of the traffic",
    )
    return Point(x, y, error <= tuned.tolerance, is_chosen, read)


def conversion_page(
    made: Conversion,
    diff: DiffReport | None,
    audit: Audit | None,
    tuned: Tuned | None = None,
    compared: DiffReport | None = None,
) -> Page:
    """Return the page of a conversion.

    Args:
        made: what was done.
        diff: the result against the original, None if nothing was compared.
        audit: of the result.
        tuned: the candidates of level auto.
        compared: the result against the original if it was not judged: its values, and the figures of texts.
    """
    made, shown = replace(made, validation=diff), diff or compared
    report = (
        tuning_report(made, tuned, audit=audit, compared=compared)
        if tuned
        else conversion_report(made, audit)
    )
    page = _page(report, audit, shown, diff, made.plan)
    return replace(page, plot=plot_of(tuned)) if tuned else page


def preview_page(made: Conversion, audit: Audit, command: str) -> Page:
    """Return the page of a conversion that was only planned. ``audit`` is of the model that ``command`` would write."""
    return _page(preview_report(made, audit, command), audit, None, None, made.plan)


def diff_page(diff: DiffReport, audit: Audit | None = None) -> Page:
    """Return the page of a comparison of two models; ``audit`` is of the result."""
    return _page(diff_report(diff), audit, diff, diff)


def _page(
    report: Report,
    audit: Audit | None,
    measured: DiffReport | None,
    judged: DiffReport | None,
    plan: Plan | None = None,
) -> Page:
    """Return the page of a result, with the findings about it.

    Args:
        report: its report.
        audit: of the result.
        measured: the comparison whose values are shown.
        judged: the comparison that decides whether the result is good.
        plan: of the conversion that made it.
    """
    found = section("Findings in the result", finding_items(audit))
    lowest = plan.dtype if plan else measured.lowest if measured else ""
    return _joined(
        report._replace(sections=(*report.sections, found)),
        audit,
        measured.layers if measured else (),
        bad=judged.first_bad if judged else None,
        limit=_shared_limit(judged) if judged else None,
        plan=plan,
        low=FORMATS.get(lowest),
    )


def check_page(audit: Audit | None, run: RunCheck | None, model: str = "") -> Page:
    """Return the page of a check: facts about a model before it runs, and measurements.

    Args:
        audit: of the model.
        run: of the same model, None if it did not run.
        model: its name on the page.
    """
    page = _joined(
        check_report(audit, run, model),
        audit,
        run.values if run else (),
        bad=run.first_bad if run else None,
    )
    seen = {row.precision for row in page.nodes} | {row.dtype for row in page.values}
    low = next((low for name, low in FORMATS.items() if name in seen), None)
    return replace(page, low=low)


def _shared_limit(diff: DiffReport) -> float | None:
    """Return the limit of the relative L2 error, if there is just one."""
    limits = {one.limit for one in diff.judgements if one.metric == "rel_l2"}
    return limits.pop() if len(limits) == 1 else None
