"""What keeps nodes in float32, how many Casts that costs, and which option would lower them.

The Casts are counted by solving the same problem again without the reason in question.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from onnxamp._convert.analysis import Analysis, analyse
from onnxamp._decide.verdicts import Reason, title_of
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

_HAZARDS: Final = frozenset(
    {
        Reason.RANGE,
        Reason.EPSILON,
        Reason.MASK,
        Reason.DECOMPOSED,
        Reason.INDEX,
        Reason.REDUCTION,
        Reason.PRODUCT,
        Reason.ACCUMULATION,
        Reason.FUSION,
    }
)
"""What low precision is known to break. They count together: the nodes of a written-out norm have two or three."""

_KERNELS: Final = frozenset({Reason.NO_KERNEL, Reason.WRONG_KERNEL})
"""Missing and wrong kernels of the target."""


def find_causes(analysis: Analysis) -> tuple[Cause, ...]:
    """Return what keeps nodes in float32, the costliest reason first.

    Complexity: one solution of the cut for each kind of reason that keeps nodes in float32, if there are Casts at all.
    """
    if analysis.options.level in (Level.O0, Level.AUTO):
        return ()
    causes = [*_listed(analysis), *_pinned(analysis)]
    if not any(cause.casts for cause in causes):
        causes += _together(analysis)
    causes += [*_wished(analysis), *_signature(analysis)]
    return tuple(sorted(causes, key=lambda cause: (-cause.casts, -cause.nodes, cause.reason)))


def _kept_nodes(analysis: Analysis) -> Mapping[Reason, frozenset[int]]:
    """Return the nodes that stay float32, with those that share their precision, by the reason of their pin."""
    ports, found = analysis.ports, dict[Reason, set[int]]()
    for index, variable in enumerate(ports.variables):
        pin = analysis.pins.verdicts.get(ports.root(index))
        if pin is not None and not pin.low and variable.node != ABSENT:
            found.setdefault(pin.reason, set()).add(variable.node)
    return {reason: frozenset(nodes) for reason, nodes in found.items()}


def _listed(analysis: Analysis) -> Iterator[Cause]:
    """Yield what the black list costs: the user's part, what another preset would lower, and the rest."""
    groups: dict[str, set[int]] = {}
    for node in _kept_nodes(analysis).get(Reason.BLACK, ()):
        op = analysis.graph.nodes[node].key
        if op not in analysis.options.black:  # it shares the precision of one that is
            continue
        advice = _list_advice(analysis.options, op)
        groups.setdefault(advice, set()).add(node)
    for advice, nodes in groups.items():
        yield _cause(analysis, Reason.BLACK.value, frozenset({Reason.BLACK}), frozenset(nodes), advice)


def _list_advice(options: Options, op: str) -> str:
    """Return what takes an op type off the black list."""
    if op in options.user_black:
        return "they are on your own black list"
    if op not in Options(lists="default", dtype=options.dtype, target=options.target).black:
        return "--lists default lowers them, as the kernels accumulate in float32"
    return "--lists fast lowers them" if op not in preset("fast").black else "--white OP lowers them"


def _pinned(analysis: Analysis) -> Iterator[Cause]:
    """Yield what hazards and missing kernels cost."""
    kept = _kept_nodes(analysis)
    hazards = frozenset[int]().union(*(nodes for reason, nodes in kept.items() if reason in _HAZARDS))
    if hazards:
        advice = "--force-low REGEX lowers such nodes all the same, --no-hazards all of them"
        yield _cause(analysis, "known hazards", _HAZARDS, hazards, advice)
    lacking = frozenset[int]().union(*(nodes for reason, nodes in kept.items() if reason in _KERNELS))
    if lacking:
        target = analysis.options.target
        yield _cause(analysis, f"no {analysis.options.dtype} kernel on {target}", _KERNELS, lacking, "")


def _together(analysis: Analysis) -> Iterator[Cause]:
    """Yield what the black list and hazards cost where neither of them alone costs anything."""
    ignored = _HAZARDS | {Reason.BLACK}
    kept = (nodes for reason, nodes in _kept_nodes(analysis).items() if reason in ignored)
    if nodes := frozenset[int]().union(*kept):
        yield _cause(analysis, "known hazards and the black list", ignored, nodes, "")


def _wished(analysis: Analysis) -> Iterator[Cause]:
    """Yield what the user's own choice of single nodes costs."""
    options, kept = analysis.options, _kept_nodes(analysis)
    if nodes := kept.get(Reason.PATTERN):
        freed = replace(options, keep_high=(), keep_nodes=())
        yield _without_wishes(analysis, Reason.PATTERN, nodes, freed, "you named them (--keep-node, --keep-fp32)")
    if nodes := kept.get(Reason.RULE):
        yield _without_wishes(analysis, Reason.RULE, nodes, replace(options, rule=None), "your rule says so")


def _without_wishes(analysis: Analysis, reason: Reason, nodes: frozenset[int], options: Options, advice: str) -> Cause:
    """Return what wishes cost that other options do not have."""
    saved = len(analysis.edits.casts) - len(analyse(analysis.graph, options).edits.casts)
    return Cause(reason=reason.value, ops=_ops(analysis, nodes), casts=max(0, saved), advice=advice)


def _ops(analysis: Analysis, nodes: frozenset[int]) -> Mapping[str, int]:
    """Return how many nodes there are of each op type, the most frequent first."""
    return dict(Counter(analysis.graph.nodes[node].key for node in sorted(nodes)).most_common())


def _cause(analysis: Analysis, reason: str, ignored: frozenset[Reason], nodes: frozenset[int], advice: str) -> Cause:
    """Return what reasons cost that keep nodes in float32."""
    saved = 0
    if analysis.edits.casts:
        freed = analysis.without(dict.fromkeys(nodes, ignored))
        saved = max(0, len(analysis.edits.casts) - len(freed.edits.casts))
    return Cause(reason=reason, ops=_ops(analysis, nodes), casts=saved, advice=advice)


def _signature(analysis: Analysis) -> Iterator[Cause]:
    """Yield the Casts that go if the model's inputs and outputs may be low."""
    options = analysis.options
    if not analysis.edits.casts or options.keep_io_types is False:
        return
    freed = analyse(analysis.graph, replace(options, keep_io_types=False))
    saved = len(analysis.edits.casts) - len(freed.edits.casts)
    if saved > 0:
        yield Cause(reason=SIGNATURE, ops={}, casts=saved, advice="--io-types low lowers them, too")


def told(cause: Cause) -> str:
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
            yield f"{cause.casts:,} Cast{'' if cause.casts == 1 else 's'}: {told(cause)}"
