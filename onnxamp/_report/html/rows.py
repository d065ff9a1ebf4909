"""The nodes of the table, in execution order: what audit, plan and measurements say, joined by the nodes' names."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from onnxamp._audit import Audit
from onnxamp._convert.plan import Plan
from onnxamp._dtypes import LOW_TYPES
from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.results import FirstBad, LayerDiff, ValueCheck
from onnxamp._report.html.records import Level, Message, NodeRow, ValueRow, named, said

_SUFFIXES: Final = ("", *(f"_{low.suffix}" for low in LOW_TYPES.values()), "_fp32")
"""An unnamed node is known by its output, which a conversion may rename in this way."""
_SEVERITIES: Final[Mapping[str, Level]] = {"error": Level.ERROR, "warning": Level.WARNING, "note": Level.NOTE}
_MILD: Final = frozenset({"flushed"})
"""Faults of a value that cost accuracy, and no more."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One value of either report: a :class:`LayerDiff`, or a :class:`ValueCheck` (whose error is local)."""

    value: str
    node: str
    op: str
    dtype: str
    local: Measurement | None
    accumulated: Measurement | None
    messages: tuple[Message, ...]


@dataclass(slots=True)
class _Draft:
    """A node while facts about it are gathered."""

    name: str
    op: str
    scope: str = ""
    precision: str = ""
    provider: str = ""
    verdicts: list[tuple[str, str, str, bool]] = field(default_factory=list)
    """(type parameter, reason, detail, low)."""
    messages: list[Message] = field(default_factory=list)


def of_layers(layers: Iterable[LayerDiff], limit: float | None) -> list[Measured]:
    """The values of a comparison in execution order; ``limit`` is that of the relative L2 error."""
    ordered, found = sorted(layers, key=lambda layer: layer.position), []
    several = _several(ordered)
    for layer in ordered:
        of = f" of {layer.value}" if (layer.node, layer.op) in several else ""
        messages = [Message(Level.NOTE, f"not measured{of}: {layer.note}")] if layer.note else []
        for kind, measured in (("local", layer.local), ("accumulated", layer.accumulated)):
            if measured is not None and measured.alarm:
                messages.append(Message(Level.ERROR, f"{kind} error{of}: {measured.alarm}"))
        if layer.local is not None and limit is not None and not layer.local.alarm and layer.local.rel_l2 > limit:
            text = f"local error{of}: this op alone is off by {layer.local.rel_l2:.2g} (relative L2)"
            messages.append(Message(Level.WARNING, text))
        names = (layer.value, layer.node, layer.op, layer.dtype)
        found.append(Measured(*names, layer.local, layer.accumulated, tuple(messages)))
    return found


def of_checks(values: Iterable[ValueCheck]) -> list[Measured]:
    """The values of a check in execution order."""
    ordered, found = sorted(values, key=lambda check: check.position), []
    several = _several(ordered)
    for check in ordered:
        messages = []
        of = f" of {check.value}" if (check.node, check.op) in several else ""
        if check.fault:
            level = Level.WARNING if check.fault in _MILD else Level.ERROR
            cause = check.measured.alarm
            messages.append(Message(level, f"fault{of}: {check.fault}" + (f", {cause}" if cause else "")))
        elif check.inherited:
            messages.append(Message(Level.NOTE, f"passes on what was wrong before{of}"))
        names = (check.value, check.node, check.op, check.dtype)
        found.append(Measured(*names, check.measured, None, tuple(messages)))
    return found


def _several(values: Sequence[LayerDiff | ValueCheck]) -> set[tuple[str, str]]:
    """(node, op type) of the nodes that have more than one value: messages about them must say which."""
    counts = Counter((value.node, value.op) for value in values)
    return {key for key, count in counts.items() if count > 1}


@dataclass(frozen=True, slots=True)
class Rows:
    """Nodes, their values, what is said of no node among them, and the number of the node that goes wrong first."""

    nodes: tuple[NodeRow, ...]
    values: tuple[ValueRow, ...]
    unplaced: tuple[Message, ...]
    first_bad: int | None


class Places:
    """Where nodes are, by name: of several of one name the one with the wanted op type."""

    def __init__(self, names: Iterable[tuple[str, str, str]]) -> None:
        """Take (scope, name, op type) of each node, in order."""
        self._of: dict[str, list[int]] = defaultdict(list)
        self._ops: list[str] = []
        for number, (scope, name, op) in enumerate(names):
            self._ops.append(op)
            self._of[name].append(number)
            if scope:
                self._of[f"{scope}/{name}"].append(number)

    def find(self, name: str, op: str, rank: int = 0) -> int | None:
        """Number of the node, None if there is none; ``rank`` counts nodes of equal name.

        One that bears the very name is taken where no op type fits: runtimes may see another op in its place.
        """
        for suffix in _SUFFIXES:
            found = [n for n in self._of.get(name + suffix, ()) if self._ops[n] == op]
            if found:
                return found[min(rank, len(found) - 1)]
        return next(iter(self._of.get(name, ())), None)


def make_rows(
    audit: Audit | None, plan: Plan | None, measured: Sequence[Measured], bad: FirstBad | None = None
) -> Rows:
    """Join all facts.

    The audit's nodes give the order where there is an audit, else the plan's and the measured ones. A measured node
    that is not among them comes behind the one that was measured before it. Complexity: linear, but for a sort.
    """
    drafts = _skeleton(audit, plan)
    places = Places((draft.scope, draft.name, draft.op) for draft in drafts)
    drafts, numbers = _with_measured(drafts, places, measured)
    places = Places((draft.scope, draft.name, draft.op) for draft in drafts)
    values = []
    for item, number in zip(measured, numbers, strict=True):
        drafts[number].messages += item.messages
        values.append(_value(number, item))
    _add_types(drafts, values)
    if plan is not None:
        _add_plan(drafts, places, plan)
    first = places.find(bad.node, bad.op) if bad is not None else None
    if bad is not None and first is not None:
        level, what = (
            (Level.ERROR, "the first to go wrong") if bad.breaks else (Level.WARNING, "the limit is passed here")
        )
        drafts[first].messages.insert(0, Message(level, f"{what}: {bad.alarm}"))
    unplaced = _add_findings(drafts, places, audit) if audit is not None else []
    return Rows(tuple(map(_row, drafts)), tuple(values), tuple(unplaced), first)


def _skeleton(audit: Audit | None, plan: Plan | None) -> list[_Draft]:
    if audit is not None:
        nodes = sorted(audit.nodes, key=lambda node: node.position)
        return [_Draft(node.node, node.op, node.scope, node.precision, node.provider) for node in nodes]
    found: dict[tuple[str, int], _Draft] = {}
    for row in plan.rows if plan is not None else ():
        path, _, rank = _parsed(row.key)
        if row.op != "initializer" and (path, rank) not in found:
            found[path, rank] = _Draft(path, row.op)
    return list(found.values())


def _with_measured(
    drafts: list[_Draft], places: Places, measured: Sequence[Measured]
) -> tuple[list[_Draft], list[int]]:
    """Drafts with those of measured nodes that were missing, and the number of the node of each measured value."""
    keys: list[tuple[int, int]] = [(number, 0) for number in range(len(drafts))]
    new: dict[tuple[str, str], int] = {}
    found, anchor, every = [], -1, list(drafts)
    for item in measured:
        number = places.find(item.node, item.op)
        if number is None:
            number = new.setdefault((item.node, item.op), len(every))
            if number == len(every):
                every.append(_Draft(item.node, item.op))
                keys.append((anchor, number))
        else:
            anchor = number
        found.append(number)
    order = sorted(range(len(every)), key=lambda number: keys[number])
    rank = {number: place for place, number in enumerate(order)}
    return [every[number] for number in order], [rank[number] for number in found]


def _value(number: int, item: Measured) -> ValueRow:
    ranged = item.accumulated or item.local
    has_range = ranged is not None and ranged.reference_max > 0
    is_ordinary = ranged is not None and (has_range or ranged.reference_zero > 0)
    return ValueRow(
        number,
        named(item.value),
        item.dtype,
        item.local.rel_l2 if item.local else None,
        item.accumulated.rel_l2 if item.accumulated else None,
        ranged.reference_least if ranged and has_range else None,
        ranged.reference_max if ranged and is_ordinary else None,
    )


def _add_types(drafts: Sequence[_Draft], values: Iterable[ValueRow]) -> None:
    """Where nothing else tells a node's precision, the types of its values do."""
    seen: dict[int, set[str]] = defaultdict(set)
    for value in values:
        if value.dtype in ("float32", *LOW_TYPES):
            seen[value.node].add(value.dtype)
    for number, types in seen.items():
        if not drafts[number].precision:
            drafts[number].precision = types.pop() if len(types) == 1 else "mixed"


def _add_plan(drafts: Sequence[_Draft], places: Places, plan: Plan) -> None:
    decided: dict[int, set[bool]] = defaultdict(set)
    for row in plan.rows:
        path, param, rank = _parsed(row.key)
        number = None if row.op == "initializer" else places.find(path, row.op, rank)
        if number is not None:
            drafts[number].verdicts.append((param, row.reason, row.detail, row.low))
            decided[number].add(row.low)
    for number, lows in decided.items():
        if not drafts[number].precision:
            drafts[number].precision = "mixed" if len(lows) == 2 else plan.dtype if True in lows else "float32"
    for hazard in plan.hazards:
        number = places.find(hazard.node, hazard.op)
        if number is not None:
            fate = f"{plan.dtype} all the same" if hazard.low else "kept in float32"
            level = Level.WARNING if hazard.low else Level.NOTE
            text = f"{fate}: {hazard.reason}: {hazard.detail}" if hazard.detail else f"{fate}: {hazard.reason}"
            drafts[number].messages.append(Message(level, text))


def _add_findings(drafts: Sequence[_Draft], places: Places, audit: Audit) -> list[Message]:
    """Add each finding to its node; what concerns none of them is given back."""
    left = []
    for finding in audit.findings:
        text = f"{finding.text} {finding.action}".strip()
        message = Message(_SEVERITIES.get(finding.severity, Level.NOTE), text)
        number = places.find(finding.node, finding.op) if finding.node else None
        if number is None:
            left.append(Message(message.level, said(text)))
        else:
            drafts[number].messages.append(message)
    return left


def _parsed(key: str) -> tuple[str, str, int]:
    """(path of the node, type parameter, rank among nodes of equal path) of a variable's key."""
    path, _, param = key.rpartition(":")
    head, bracket, rank = param.rpartition(" (")
    if bracket and rank.endswith(")") and rank[:-1].isdecimal():
        return path, head, int(rank[:-1]) - 1
    return path, param, 0


def _row(draft: _Draft) -> NodeRow:
    texts: dict[str, list[str]] = {}
    for param, reason, detail, _ in draft.verdicts:
        texts.setdefault(f"{reason}: {detail}" if detail and detail != draft.op else reason, []).append(param)
    reason = next(iter(texts), "")
    if len(texts) > 1:
        reason = "; ".join(f"{', '.join(params)}: {text}" for text, params in texts.items())
    kinds = [reason for _, reason, _, low in draft.verdicts if not low] or [kind for _, kind, _, _ in draft.verdicts]
    messages = dict.fromkeys(Message(m.level, said(m.text)) for m in draft.messages)
    return NodeRow(
        named(draft.name), named(draft.op), named(draft.scope), draft.precision, draft.provider,
        kinds[0] if kinds else "", said(reason), draft.op == "Cast" and draft.precision == "mixed", tuple(messages),
    )  # fmt: skip
