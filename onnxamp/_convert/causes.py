"""Reasons that keep nodes in float32, the Casts that they cost, and the options that would lower the nodes.

The Casts are counted by solving the same problem again without the reason in question.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Final

from onnxamp._base.records import record
from onnxamp._base.words import count
from onnxamp._convert.analysis import Analysis, analyze
from onnxamp._decide.builder import builder_of
from onnxamp._decide.kinds import Harm, kinds
from onnxamp._decide.variables.ports import HIGH, LOW, NONE
from onnxamp._decide.variables.signature import unfit_defaults
from onnxamp._decide.verdicts import Basis, Reason, title_of
from onnxamp._facts.dtypes import FLOAT, holds_float
from onnxamp._graph.view import ABSENT, Origin
from onnxamp._options.lists import preset
from onnxamp._options.options import Options
from onnxamp._options.values import Level


@record
class Cause:
    """The cost of a reason that keeps nodes in float32.

    Attributes:
        reason: the reason, as in decisions; "inputs and outputs" if these keep their types, or "some inputs and
            outputs" if some of them do.
        ops: op type -> number of nodes that it keeps in float32.
        casts: new Casts that would disappear without it.
        advice: the option that saves them, in a clause; "" if there is none.
    """

    reason: str
    ops: Mapping[str, int]
    casts: int
    advice: str

    @property
    def nodes(self) -> int:
        """Number of nodes that stay in float32 for the reason."""
        return sum(self.ops.values())


SIGNATURE: Final = "inputs and outputs"
SOME: Final = "some inputs and outputs"
"""The reason of Casts that convert the model's inputs and outputs: all of them, or those that keep their types."""

_NAMED: Final = 4
"""Op types that a sentence names."""

_HAZARDS: Final[frozenset[Basis]] = frozenset(
    kind for kind in kinds() if kind.harm in (Harm.RESULT, Harm.CAST)
)
"""Hazards, which count together because the nodes of a decomposed norm have two or three."""

_KERNELS: Final[frozenset[Basis]] = frozenset(
    {Reason.NO_KERNEL, *(kind for kind in kinds() if kind.harm is Harm.KERNEL)}
)
"""Missing and wrong kernels of the target."""


def find_causes(analysis: Analysis) -> tuple[Cause, ...]:
    """Return the reasons that keep nodes in float32, the costliest first.

    Complexity: one solution of the cut for each kind of reason that keeps nodes in float32, if there are Casts at all.
    """
    if analysis.options.level in (Level.O0, Level.AUTO):
        return ()
    counts = _CastCounts(analysis)
    causes = [*_of_rules(counts), *_of_wishes(counts)]
    return tuple(
        sorted(causes, key=lambda cause: (-cause.casts, -cause.nodes, cause.reason))
    )


def _of_rules(counts: "_CastCounts") -> list[Cause]:
    """Return the causes that lists, hazards and kernels are."""
    options = counts.analysis.options
    black = frozenset({Reason.BLACK})
    causes = list[Cause]()
    for advice, nodes in _black_listed(counts).items():
        causes += counts.ignoring(Reason.BLACK.value, black, nodes, advice)
    advice = "--force-low REGEX lowers some of them anyway; --no-hazards lowers all"
    at_risk = counts.kept_for(_HAZARDS)
    causes += counts.ignoring("known hazards", _HAZARDS, at_risk, advice)
    reason = f"no {options.dtype} kernel on {options.target}"
    causes += counts.ignoring(reason, _KERNELS, counts.kept_for(_KERNELS))
    # Where a hazard and the black list keep the same nodes, neither of them alone costs anything.
    if not any(cause.casts for cause in causes):
        both = _HAZARDS | black
        reason = "known hazards and the black list"
        causes += counts.ignoring(reason, both, counts.kept_for(both))
    return causes


def _of_wishes(counts: "_CastCounts") -> Iterator[Cause]:
    """Yield the causes that the user's overrides and types of inputs and outputs are."""
    options = counts.analysis.options
    if named := counts.kept_for([Reason.PATTERN]):
        advice = "you named them (--keep-node, --keep-fp32)"
        without = replace(options, keep_high=(), keep_nodes=())
        yield counts.changing(Reason.PATTERN.value, without, named, advice)
    if ruled := counts.kept_for([Reason.RULE]):
        without = replace(options, rule=None)
        advice = "your rule keeps them"
        yield counts.changing(Reason.RULE.value, without, ruled, advice)
    if options.keep_io_types is not False:
        reason = SIGNATURE if options.keep_io_types is True else SOME
        advice = "--io-types low lowers them as well"
        casts = _casts_of_signature(counts.analysis)
        if casts is None:
            without = replace(options, keep_io_types=False)
            casts = counts.changing(reason, without, set(), advice).casts
        if casts:
            yield Cause(reason=reason, ops={}, casts=casts, advice=advice)


def _casts_of_signature(analysis: Analysis) -> int | None:
    """Return the Casts that the types of inputs and outputs cost; None if only another solution tells.

    Where all neighbors of an input or output are low, or pinned to float32, no decision gains more than this one if
    the input or output becomes low. So it stays the best, and only Casts beside inputs and outputs come and go.
    """
    graph = analysis.graph
    options = analysis.options
    main = graph.scopes[0]
    ends = dict.fromkeys((*main.inputs, *main.outputs))
    floats = [value for value in ends if holds_float(graph.types[value])]
    # Most of these stay in float32, or make their neighbors low.
    uncast = builder_of(graph, options.target).uncast_values()
    special = uncast | graph.ask(unfit_defaults, options.low).keys()
    if options.keep_io_types is not True or not special.isdisjoint(floats):
        return None
    saved = 0
    for value in floats:
        beside = _settled_beside(analysis, value)
        if beside is None:
            return None
        saved += int(True in beside) - int(False in beside)
    return max(0, saved)


def _settled_beside(analysis: Analysis, value: int) -> AbstractSet[bool] | None:
    """Return whether the neighbors of an input or output are low; None if its type may change these decisions.

    It is also None where no new Cast stands between both: beside a constant, an original Cast, or a node that can
    dequantize in both precisions.
    """
    graph = analysis.graph
    ports = analysis.ports
    named = graph.values[value]
    nodes = {named.producer, *(node for node, _ in graph.uses[value])}
    has_cast = graph.types[value] == FLOAT and value not in ports.free
    if not has_cast or not nodes.isdisjoint(analysis.problem.twofold):
        return None
    beside = set[bool]()
    neighbors = {ports.consumed[node][port] for node, port in graph.uses[value]}
    for scope, position in graph.results[value]:
        if scope != 0:
            neighbors.add(ports.returned.get((scope, position), NONE))
    if named.origin is Origin.NODE:
        neighbors.add(ports.produced[value])
    for variable in neighbors:
        is_low = analysis.decision.is_low(variable)
        pin = analysis.pins.verdicts.get(ports.root(variable))
        is_pinned = variable == HIGH or (pin is not None and not pin.low)
        if variable in (NONE, LOW) or not (is_low or is_pinned):
            return None
        beside.add(is_low)
    return beside


class _CastCounts:
    """Counts the Casts that reasons cost, by solving the problem without them."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.kept = _kept_nodes(analysis)

    def kept_for(self, reasons: Iterable[Basis]) -> set[int]:
        """Return the nodes that one of the reasons keeps in float32."""
        return set(
            chain.from_iterable(self.kept.get(reason, ()) for reason in reasons)
        )

    def ignoring(
        self,
        reason: str,
        reasons: frozenset[Basis],
        nodes: AbstractSet[int],
        advice: str = "",
    ) -> list[Cause]:
        """Return the cost of reasons, by solving the problem without them; nothing if they keep no node."""
        freed = dict.fromkeys(nodes, reasons)
        without = partial(self.analysis.without, freed)
        return [self._cause(reason, nodes, advice, without)] if nodes else []

    def changing(
        self, reason: str, options: Options, nodes: AbstractSet[int], advice: str
    ) -> Cause:
        """Return the cost of a reason, by solving the problem with other options."""
        without = partial(analyze, self.analysis.graph, options)
        return self._cause(reason, nodes, advice, without)

    def _cause(
        self,
        reason: str,
        nodes: AbstractSet[int],
        advice: str,
        without: Callable[[], Analysis],
    ) -> Cause:
        """Return the cost of a reason, by the analysis ``without`` it; if there are no Casts, nothing is analyzed."""
        casts = self.analysis.casts
        saved = max(0, casts - without().casts) if casts else 0
        keys = (self.analysis.graph.nodes[node].key for node in sorted(nodes))
        ops = dict(Counter(keys).most_common())
        return Cause(reason=reason, ops=ops, casts=saved, advice=advice)


def _kept_nodes(analysis: Analysis) -> Mapping[Basis, set[int]]:
    """Return the nodes that stay in float32 by the reason of their pin, with those that share their precision."""
    ports = analysis.ports
    kept = dict[Basis, set[int]]()
    for variable in ports.variables:
        pin = analysis.pins.verdicts.get(ports.root(variable.index))
        if pin is not None and not pin.low and variable.node != ABSENT:
            kept.setdefault(pin.reason, set()).add(variable.node)
    return kept


def _black_listed(counts: _CastCounts) -> Mapping[str, AbstractSet[int]]:
    """Return the nodes that the black list keeps in float32, by the advice that lowers them."""
    analysis = counts.analysis
    by_op: dict[str, set[int]] = {}
    for node in counts.kept_for([Reason.BLACK]):
        by_op.setdefault(analysis.graph.nodes[node].key, set()).add(node)
    groups: dict[str, set[int]] = {}
    # Nodes of other ops share the precision of one of these.
    for op in by_op.keys() & analysis.options.black:
        groups.setdefault(_list_advice(analysis.options, op), set()).update(by_op[op])
    return groups


def _list_advice(options: Options, op: str) -> str:
    """Return the option that takes an op type off the black list."""
    if op in options.user_black:
        return "your own black list names them"
    default = Options(lists="default", dtype=options.dtype, target=options.target)
    if op not in default.black:
        return "--lists default lowers them, as the kernels accumulate in float32"
    is_fast = op not in preset("fast").black
    return "--lists fast lowers them" if is_fast else "--white OP lowers them"


def sentence_of(cause: Cause) -> str:
    """Return a cause as a sentence."""
    ops = ", ".join(
        f"{op} ×{times:,}" for op, times in islice(cause.ops.items(), _NAMED)
    )
    more = ", …" if len(cause.ops) > _NAMED else ""
    nodes = count(cause.nodes, "node")
    what = f"{nodes} in float32: {title_of(cause.reason)} ({ops}{more})"
    if cause.reason == SIGNATURE:
        what = "The model's inputs and outputs stay in float32"
    if cause.reason == SOME:
        what = "Some of the model's inputs and outputs stay in float32"
    if not cause.advice:
        return f"{what}."
    return f"{what}. {cause.advice[:1].upper()}{cause.advice[1:]}."


def cost_sentences(analysis: Analysis) -> Iterator[str]:
    """Yield sentences about the causes of Casts."""
    for cause in find_causes(analysis):
        if cause.casts:
            yield f"{count(cause.casts, 'Cast')}: {sentence_of(cause)}"
