"""What keeps nodes in float32, how many Casts that costs, and which option would lower them.

The Casts are counted by solving the same problem again without the reason in question.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from onnxamp._convert.analysis import Analysis, analyse
from onnxamp._decide.hazards import kinds
from onnxamp._decide.verdicts import Reason
from onnxamp._decide.words import title_of
from onnxamp._graph.view import ABSENT
from onnxamp._options.levels import Level
from onnxamp._options.lists import preset
from onnxamp._options.options import Options


@dataclass(frozen=True, slots=True)
class Cause:
    """What a reason costs that keeps nodes in float32.

    Attributes:
        reason: the reason, as decisions call it; "inputs and outputs" where these keep their types.
        ops: op type -> number of nodes that it keeps in float32.
        casts: new Casts that would go without it.
        advice: the option that saves them, in a clause; "" if there is none.
    """

    reason: str
    ops: Mapping[str, int]
    casts: int
    advice: str

    @property
    def nodes(self) -> int:
        """Number of nodes that stay float32 for the reason."""
        return sum(self.ops.values())


SIGNATURE: Final = "inputs and outputs"
"""The reason of Casts that convert the model's inputs and outputs."""

_NAMED: Final = 4
"""Op types that a sentence names."""

_HAZARDS: Final[frozenset[Reason]] = frozenset(
    kind for kind in kinds() if kind.breaks and not kind.is_of_kernels
)
"""What low precision is known to break. They count together: the nodes of a written-out norm have two or three."""

_KERNELS: Final = frozenset({Reason.NO_KERNEL, *(kind for kind in kinds() if kind.is_of_kernels)})
"""Missing and wrong kernels of the target."""


_Kept = Mapping[Reason, frozenset[int]]
"""Nodes that stay float32, by the reason of their pin."""


def find_causes(analysis: Analysis) -> tuple[Cause, ...]:
    """Return what keeps nodes in float32, the costliest reason first.

    Complexity: one solution of the cut for each kind of reason that keeps nodes in float32, if there are Casts at all.
    """
    if analysis.options.level in (Level.O0, Level.AUTO):
        return ()
    kept = _kept_nodes(analysis)
    causes = [*_listed(analysis, kept), *_pinned(analysis, kept)]
    if not any(cause.casts for cause in causes):
        causes += _together(analysis, kept)
    causes += [*_wished(analysis, kept), *_signature(analysis)]
    return tuple(sorted(causes, key=lambda cause: (-cause.casts, -cause.nodes, cause.reason)))


def _kept_nodes(analysis: Analysis) -> _Kept:
    """Return the nodes that stay float32, with those that share their precision."""
    ports, found = analysis.ports, dict[Reason, set[int]]()
    for index, variable in enumerate(ports.variables):
        pin = analysis.pins.verdicts.get(ports.root(index))
        if pin is not None and not pin.low and variable.node != ABSENT:
            found.setdefault(pin.reason, set()).add(variable.node)
    return {reason: frozenset(nodes) for reason, nodes in found.items()}


def _kept_for(kept: _Kept, reasons: frozenset[Reason]) -> frozenset[int]:
    """Return the nodes that stay float32 for one of these reasons."""
    return frozenset[int]().union(*(nodes for reason, nodes in kept.items() if reason in reasons))


def _listed(analysis: Analysis, kept: _Kept) -> Iterator[Cause]:
    """Yield what the black list costs: the user's part, what another preset would lower, and the rest."""
    by_op: dict[str, set[int]] = {}
    for node in kept.get(Reason.BLACK, ()):
        by_op.setdefault(analysis.graph.nodes[node].key, set()).add(node)
    groups: dict[str, set[int]] = {}
    for op in (
        by_op.keys() & analysis.options.black
    ):  # others share the precision of one that is listed
        groups.setdefault(_list_advice(analysis.options, op), set()).update(by_op[op])
    for advice, nodes in groups.items():
        yield _ignoring(
            analysis, Reason.BLACK.value, frozenset({Reason.BLACK}), frozenset(nodes), advice
        )


def _list_advice(options: Options, op: str) -> str:
    """Return what takes an op type off the black list."""
    if op in options.user_black:
        return "they are on your own black list"
    if op not in Options(lists="default", dtype=options.dtype, target=options.target).black:
        return "--lists default lowers them, as the kernels accumulate in float32"
    return (
        "--lists fast lowers them" if op not in preset("fast").black else "--white OP lowers them"
    )


def _pinned(analysis: Analysis, kept: _Kept) -> Iterator[Cause]:
    """Yield what hazards and missing kernels cost."""
    if hazards := _kept_for(kept, _HAZARDS):
        advice = "--force-low REGEX lowers such nodes all the same, --no-hazards all of them"
        yield _ignoring(analysis, "known hazards", _HAZARDS, hazards, advice)
    if lacking := _kept_for(kept, _KERNELS):
        reason = f"no {analysis.options.dtype} kernel on {analysis.options.target}"
        yield _ignoring(analysis, reason, _KERNELS, lacking, advice="")


def _together(analysis: Analysis, kept: _Kept) -> Iterator[Cause]:
    """Yield what the black list and hazards cost where neither of them alone costs anything."""
    reasons = _HAZARDS | {Reason.BLACK}
    if nodes := _kept_for(kept, reasons):
        yield _ignoring(analysis, "known hazards and the black list", reasons, nodes, advice="")


def _wished(analysis: Analysis, kept: _Kept) -> Iterator[Cause]:
    """Yield what the user's own choice of single nodes costs."""
    if nodes := kept.get(Reason.PATTERN):
        advice = "you named them (--keep-node, --keep-fp32)"
        yield _changing(analysis, Reason.PATTERN.value, nodes, advice, keep_high=(), keep_nodes=())
    if nodes := kept.get(Reason.RULE):
        yield _changing(analysis, Reason.RULE.value, nodes, "your rule says so", rule=None)


def _signature(analysis: Analysis) -> Iterator[Cause]:
    """Yield the Casts that go if the model's inputs and outputs may be low."""
    if analysis.options.keep_io_types is not False:
        advice = "--io-types low lowers them, too"
        cause = _changing(analysis, SIGNATURE, frozenset(), advice, keep_io_types=False)
        if cause.casts:
            yield cause


def _ignoring(
    analysis: Analysis, reason: str, ignored: frozenset[Reason], nodes: frozenset[int], advice: str
) -> Cause:
    """Return what reasons cost that keep nodes in float32."""
    return _cause(
        analysis, reason, nodes, advice, lambda: analysis.without(dict.fromkeys(nodes, ignored))
    )


def _changing(
    analysis: Analysis, reason: str, nodes: frozenset[int], advice: str, **options: Any
) -> Cause:
    """Return what options cost that others do without."""
    changed = replace(analysis.options, **options)
    return _cause(analysis, reason, nodes, advice, lambda: analyse(analysis.graph, changed))


def _cause(
    analysis: Analysis,
    reason: str,
    nodes: frozenset[int],
    advice: str,
    without: Callable[[], Analysis],
) -> Cause:
    """Return what a reason costs, by the analysis ``without`` it; where there are no Casts nothing is analysed."""
    casts = len(analysis.edits.casts)
    saved = max(0, casts - len(without().edits.casts)) if casts else 0
    ops = Counter(analysis.graph.nodes[node].key for node in sorted(nodes))
    return Cause(reason=reason, ops=dict(ops.most_common()), casts=saved, advice=advice)


def sentence_of(cause: Cause) -> str:
    """Return a cause as a sentence."""
    ops = ", ".join(f"{op} ×{times:,}" for op, times in islice(cause.ops.items(), _NAMED))
    more = ", …" if len(cause.ops) > _NAMED else ""
    nodes = f"{cause.nodes:,} node{'' if cause.nodes == 1 else 's'}"
    what = f"{nodes} in float32: {title_of(cause.reason)} ({ops}{more})"
    if cause.reason == SIGNATURE:
        what = "The model's inputs and outputs stay float32"
    return f"{what}. {cause.advice[:1].upper()}{cause.advice[1:]}{'.' if cause.advice else ''}".rstrip()


def cost_sentences(analysis: Analysis) -> Iterator[str]:
    """Yield what costs Casts, in sentences."""
    for cause in find_causes(analysis):
        if cause.casts:
            yield f"{cause.casts:,} Cast{'' if cause.casts == 1 else 's'}: {sentence_of(cause)}"
