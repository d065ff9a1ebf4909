"""The nodes in execution order, with facts from audit, plan and measurements, joined by name."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from onnxamp._audit import Audit
from onnxamp._convert.plan import Plan
from onnxamp._decide.verdicts import title_of, told
from onnxamp._dtypes import FORMATS
from onnxamp._numerics.metrics import Measurement
from onnxamp._numerics.results import FirstBad, LayerDiff, ValueCheck
from onnxamp._report.check import finding_text
from onnxamp._report.parts import Level
from onnxamp._report.text import number

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
    def level(self) -> Level:
        """That of the worst message."""
        return max((message.level for message in self.messages), default=Level.NONE)

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


def join_nodes(
    audit: Audit | None,
    plan: Plan | None,
    measured: Iterable[Measured],
    limit: float | None = None,
    bad: FirstBad | None = None,
) -> tuple[tuple[NodeRow, ...], tuple[ValueRow, ...], int | None]:
    """Join all facts: return the nodes, their values, and the number of the node that goes wrong first.

    The audit's nodes give the order where there is an audit, else the plan's and the measured ones. A measured node
    that is not among them comes after the one that was measured before it. Complexity: linear, but for a sort.

    Args:
        audit: of the model whose nodes are listed.
        plan: of the conversion that made it.
        measured: values of a comparison or of a check.
        limit: the limit of the relative L2 error, None if outputs have different ones.
        bad: the value that goes wrong first.
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
    return tuple(rows), tuple(values), first


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
    if (
        local is not None
        and limit is not None
        and not local.alarm
        and local.rel_l2 > limit
    ):
        yield Message(
            Level.WARNING,
            f"this op alone is off by {number(local.rel_l2)} (relative L2) in {item.value}",
        )


def _errors(item: Measured) -> tuple[Measurement | None, Measurement | None]:
    """Return the local and the accumulated error; that of a check is local."""
    return (
        (item.measured, None)
        if isinstance(item, ValueCheck)
        else (item.local, item.accumulated)
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
    keys: list[tuple[int, int]] = [(place, 0) for place in range(len(rows))]
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
    local, accumulated = _errors(item)
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
        exponent=item.exponent if isinstance(item, LayerDiff) else 0,
    )


def _add_types(rows: Sequence[NodeRow], values: Iterable[ValueRow]) -> None:
    """Return a node's precision by the types of its values, if nothing else determines it."""
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
        place = None if row.op == "initializer" else places.find(path, row.op, row.rank)
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
