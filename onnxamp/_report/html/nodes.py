"""The nodes and values of the page: facts from audit, plan and measurements, joined by the name of a node."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from onnxamp._audit import Audit
from onnxamp._convert.plan import HazardRow, Plan
from onnxamp._decide.verdicts import Reason, reason_text, title_of
from onnxamp._facts.dtypes import FORMATS
from onnxamp._numerics.results import FirstBad, LayerDiff, ValueCheck
from onnxamp._report import number
from onnxamp._report.check import finding_text
from onnxamp._report.parts import Severity

_SUFFIXES: Final = ("", *(f"_{low.suffix}" for low in FORMATS.values()), "_fp32")
"""An unnamed node is identified by its output, which a conversion may rename with one of these."""
_MILD: Final = frozenset({"flushed"})
"""Faults of a value that only cost accuracy."""


class Message(NamedTuple):
    """A statement about a node."""

    level: Severity
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

    def say(self, level: Severity, text: str) -> None:
        """Note a statement."""
        self.messages.append(Message(level, text))

    @property
    def why(self) -> str:
        """The kind of the reason for its precision."""
        high = [title_of(reason) for _, reason, _, low in self.verdicts if not low]
        if high:
            return high[0]
        low = [title_of(reason, low=True) for _, reason, _, _ in self.verdicts]
        return low[0] if low else ""

    @property
    def reason(self) -> str:
        """The reasons for its precision, by type parameter if these differ."""
        texts: dict[str, list[str]] = {}
        for param, reason, detail, low in self.verdicts:
            text = reason_text(reason, "" if detail == self.op else detail, low=low)
            texts.setdefault(text, []).append(param)
        if len(texts) < 2:
            return next(iter(texts), "")
        parts = (f"{', '.join(params)}: {text}" for text, params in texts.items())
        return "; ".join(parts)

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
        """Return the number of the node, None if there is none; ``rank`` counts nodes of equal name.

        If no op type matches, a node with exactly this name is used, because runtimes may replace the op.
        """
        for suffix in _SUFFIXES:
            named = self._of.get(name + suffix, ())
            places = [place for place in named if self._ops[place] == op]
            if places:
                return places[min(rank, len(places) - 1)]
        return next(iter(self._of.get(name, ())), None)


def node_rows(
    audit: Audit | None,
    measured: Iterable[Measured],
    *,
    bad: FirstBad | None,
    limit: float | None = None,
    plan: Plan | None = None,
) -> tuple[tuple[NodeRow, ...], tuple[ValueRow, ...], int | None]:
    """Return the nodes and the values of a page, and the number of the node that goes wrong first.

    The order is that of the audit's nodes or, without an audit, of the plan's. A measured node that is not among them
    comes after the one that was measured before it. Complexity: linear, except for a sort.

    Args:
        audit: of the model whose nodes are listed.
        measured: values of a comparison or of a check.
        bad: the value that goes wrong first.
        limit: the limit of the relative L2 error, None if outputs have different ones.
        plan: of the conversion that made the model.
    """
    ordered = sorted(measured, key=lambda item: item.position)
    rows = _skeleton(audit, plan)
    rows, owners = _with_measured(rows, Places(rows), ordered)
    places = Places(rows)
    values = list[ValueRow]()
    first = places.find(bad.node, bad.op) if bad is not None else None
    if bad is not None and first is not None:
        severity = Severity.ERROR if bad.breaks else Severity.WARNING
        what = "first bad value"
        if not bad.breaks:
            what = "the error exceeds the limit from here on"
        rows[first].say(severity, f"{what}: {bad.alarm}")
    for item, node in zip(ordered, owners, strict=True):
        rows[node].messages += _messages(item, limit)
        values.append(_value(node, item))
    _add_types(rows, values)
    if plan is not None:
        _add_plan(rows, places, plan)
    if audit is not None:
        for finding in audit.findings:
            where = places.find(finding.node, finding.op) if finding.node else None
            if where is not None:
                rows[where].say(
                    Severity[finding.severity.upper()], finding_text(finding)
                )
    return tuple(rows), tuple(values), first


def _messages(item: Measured, limit: float | None) -> Iterator[Message]:
    """Yield what a measured value says about its node."""
    if isinstance(item, ValueCheck):
        if item.fault:
            cause = f", {item.measured.alarm}" if item.measured.alarm else ""
            level = Severity.WARNING if item.fault in _MILD else Severity.ERROR
            yield Message(level, f"fault of {item.value}: {item.fault}{cause}")
        elif item.inherited:
            yield Message(
                Severity.NOTE, f"{item.value} inherits a fault from its inputs"
            )
        return
    if item.note:
        yield Message(Severity.NOTE, f"{item.value} was not measured: {item.note}")
    for kind, measured in (("local", item.local), ("accumulated", item.accumulated)):
        if measured is not None and measured.alarm:
            text = f"{kind} error of {item.value}: {measured.alarm}"
            yield Message(Severity.ERROR, text)
    local = item.local
    if local is None or limit is None or local.alarm:
        return
    if local.rel_l2 > limit:
        text = f"this op alone is off by {number(local.rel_l2)} (relative L2) in {item.value}"
        yield Message(Severity.WARNING, text)


def _skeleton(audit: Audit | None, plan: Plan | None) -> list[NodeRow]:
    """Return the nodes of an audit or, without one, of a plan, in order and without measurements."""
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
    if plan is None:
        return []
    # A node has a row in a plan for each of its type parameters.
    rows: dict[tuple[str, str, int], NodeRow] = {}
    for row in plan.rows:
        if row.op != "initializer":
            key = (row.scope, row.node, row.rank)
            rows.setdefault(key, NodeRow(row.node, row.op, row.scope))
    return list(rows.values())


def _with_measured(
    rows: list[NodeRow], places: Places, measured: Sequence[Measured]
) -> tuple[list[NodeRow], list[int]]:
    """Return the rows, with missing ones of measured nodes, and the place of the node of each measured value."""
    # Rows are sorted by the known node before them (the anchor), and new ones by the order in which they were measured.
    keys = [(place, 0) for place in range(len(rows))]
    new: dict[tuple[str, str], int] = {}
    owners = list[int]()
    anchor = -1
    every = list(rows)
    for item in measured:
        place = places.find(item.node, item.op)
        if place is None:
            place = new.setdefault((item.node, item.op), len(every))
            if place == len(every):
                every.append(NodeRow(item.node, item.op))
                keys.append((anchor, place))
        else:
            anchor = place
        owners.append(place)
    order = sorted(range(len(every)), key=lambda place: keys[place])
    rank = {old: new for new, old in enumerate(order)}
    return [every[place] for place in order], [rank[place] for place in owners]


def _value(node: int, item: Measured) -> ValueRow:
    """Return the numbers of a measured value; the error of a check is local."""
    if isinstance(item, LayerDiff):
        local = item.local
        accumulated = item.accumulated
        exponent = item.exponent
    else:
        local = item.measured
        accumulated = None
        exponent = 0
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


def _name_hazard(node: NodeRow, hazard: HazardRow) -> None:
    """Give a node the reason of its own where it only shares the type of another, which says less."""
    for at, (param, reason, _, low) in enumerate(node.verdicts):
        if reason == Reason.TIE.value and not low:
            node.verdicts[at] = (param, hazard.reason, hazard.detail, low)


def _add_plan(nodes: Sequence[NodeRow], places: Places, plan: Plan) -> None:
    """Add the decisions of a plan to the nodes, and its hazards."""
    decided: dict[int, set[bool]] = defaultdict(set)
    for row in plan.rows:
        if row.op == "initializer":
            continue
        path = f"{row.scope}/{row.node}" if row.scope else row.node
        place = places.find(path, row.op, row.rank)
        if place is not None:
            nodes[place].verdicts.append((row.param, row.reason, row.detail, row.low))
            decided[place].add(row.low)
    for place, lows in decided.items():
        precision = plan.dtype if True in lows else "float32"
        if len(lows) == 2:
            precision = "mixed"
        # What the audit says of the result takes precedence.
        nodes[place].precision = nodes[place].precision or precision
    for hazard in plan.hazards:
        place = places.find(hazard.node, hazard.op)
        if place is not None:
            fate = (
                f"{plan.dtype} despite a hazard" if hazard.low else "kept in float32"
            )
            level = Severity.WARNING if hazard.low else Severity.NOTE
            text = f"{fate}: {reason_text(hazard.reason, hazard.detail)}"
            if not hazard.low:
                _name_hazard(nodes[place], hazard)
            nodes[place].say(level, text)
