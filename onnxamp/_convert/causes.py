"""Reasons that keep nodes in float32, the Casts that they cost, and the options that would lower the nodes.

The Casts are counted by solving the same problem again without the reason in question.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Final

from onnxamp._base.words import count
from onnxamp._convert.analysis import Analysis, analyze, is_low
from onnxamp._convert.upgrades import held_back
from onnxamp._decide.fusion_groups import constant_batch_norms
from onnxamp._decide.kinds import Harm, kinds
from onnxamp._decide.verdicts import Basis, Reason, title_of
from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._options.lists import preset
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.fold import reachable, told
from onnxamp._rewrite.fold_search import Fold, batch_norms, find_folds
from onnxamp._rewrite.upgrade import plan_upgrade


@dataclass(frozen=True, slots=True)
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
    options = analysis.options
    kept = _kept_nodes(analysis)
    if options.level in (Level.O0, Level.AUTO):
        return ()

    def ignoring(
        reason: str, advice: str, reasons: frozenset[Basis], nodes: AbstractSet[int]
    ) -> Iterator[Cause]:
        """Yield the cost of reasons, by solving the problem without them; nothing if they keep no node."""
        freed = dict.fromkeys(nodes, reasons)
        if nodes:
            yield _cause(
                analysis, reason, advice, nodes, lambda: analysis.without(freed)
            )

    def changing(
        reason: str, advice: str, nodes: AbstractSet[int], **changes: Any
    ) -> Cause:
        """Return the cost of a reason, by solving the problem with other options."""
        changed = replace(options, **changes)
        without = partial(analyze, analysis.graph, changed)
        return _cause(analysis, reason, advice, nodes, without)

    def kept_for(reasons: Iterable[Basis]) -> set[int]:
        """Return the nodes that one of the reasons keeps in float32."""
        return set(chain.from_iterable(kept.get(reason, ()) for reason in reasons))

    black = frozenset({Reason.BLACK})
    causes = list[Cause]()
    for advice, nodes in _black_listed(analysis, kept.get(Reason.BLACK, ())).items():
        causes += ignoring(Reason.BLACK.value, advice, black, nodes)
    advice = "--force-low REGEX lowers some of them anyway; --no-hazards lowers all"
    causes += ignoring("known hazards", advice, _HAZARDS, kept_for(_HAZARDS))
    reason = f"no {options.dtype} kernel on {options.target}"
    causes += ignoring(reason, "", _KERNELS, kept_for(_KERNELS))
    # Where a hazard and the black list keep the same nodes, neither of them alone costs anything.
    if not any(cause.casts for cause in causes):
        both = _HAZARDS | black
        reason = "known hazards and the black list"
        causes += ignoring(reason, "", both, kept_for(both))
    if nodes := kept.get(Reason.PATTERN, set()):
        advice = "you named them (--keep-node, --keep-fp32)"
        wanted = changing(
            Reason.PATTERN.value, advice, nodes, keep_high=(), keep_nodes=()
        )
        causes.append(wanted)
    if nodes := kept.get(Reason.RULE, set()):
        wanted = changing(Reason.RULE.value, "your rule keeps them", nodes, rule=None)
        causes.append(wanted)
    if options.keep_io_types is not False:
        advice = "--io-types low lowers them as well"
        which = SIGNATURE if options.keep_io_types is True else SOME
        signature = changing(which, advice, set(), keep_io_types=False)
        causes += [signature] if signature.casts else []
    return tuple(
        sorted(causes, key=lambda cause: (-cause.casts, -cause.nodes, cause.reason))
    )


def _kept_nodes(analysis: Analysis) -> Mapping[Basis, set[int]]:
    """Return the nodes that stay in float32 by the reason of their pin, with those that share their precision."""
    ports = analysis.ports
    kept = dict[Basis, set[int]]()
    for index, variable in enumerate(ports.variables):
        pin = analysis.pins.verdicts.get(ports.root(index))
        if pin is not None and not pin.low and variable.node != ABSENT:
            kept.setdefault(pin.reason, set()).add(variable.node)
    return kept


def _black_listed(
    analysis: Analysis, nodes: Iterable[int]
) -> Mapping[str, AbstractSet[int]]:
    """Return the nodes that the black list keeps in float32, by the advice that lowers them."""
    by_op: dict[str, set[int]] = {}
    for node in nodes:
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


def _cause(
    analysis: Analysis,
    reason: str,
    advice: str,
    nodes: AbstractSet[int],
    without: Callable[[], Analysis],
) -> Cause:
    """Return the cost of a reason, by the analysis ``without`` it; if there are no Casts, nothing is analyzed."""
    casts = analysis.casts
    saved = max(0, casts - without().casts) if casts else 0
    ops = Counter(analysis.graph.nodes[node].key for node in sorted(nodes))
    return Cause(
        reason=reason, ops=dict(ops.most_common()), casts=saved, advice=advice
    )


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


def opset_hint(analysis: Analysis) -> str | None:
    """Return how many Casts a newer opset would save, if options rule it out; None if none do, or it is upgraded.

    The hint names the first opset at which all those ops that ever get a low-precision kernel have one.
    """
    options = analysis.options
    graph = analysis.graph
    if options.level == Level.O0 or options.opset == "auto":
        return None
    held = held_back(analysis)
    current = graph.book.opsets[""]
    newer = max(held.first.values(), default=0)
    if newer <= current:
        return None
    reach = plan_upgrade(graph, newer)
    if reach.obstacle is not None:
        return f"Opset {newer} has low-precision kernels for {', '.join(held.ops)}, but {reach.obstacle}."
    before = analysis.casts
    saved = before - held.freed.casts
    ops = ", ".join(held.ops)
    if saved > 0:
        return f"{saved} of {before} new Casts vanish with --opset {newer}, which brings low-precision kernels for {ops}."
    return f"--opset {newer} brings low-precision kernels for {ops}; at opset {current} there are none."


def fold_hint(analysis: Analysis) -> str | None:
    """Return a hint about decomposed patterns and the Casts that folding saves; None if there are none."""
    options = analysis.options
    graph = analysis.graph
    if options.fold is not False or options.folds or options.level == Level.O0:
        return None
    folds = graph.ask(find_folds, with_weights=False)
    opset = reachable(
        graph, folds, options.target, options.highest_opset(graph.book.opsets[""])
    )
    folds = [fold for fold in folds if fold.opset <= opset]
    if not folds:
        return None
    inside = set[int]()
    freed = dict[int, frozenset[Basis]]()
    for fold in folds:
        is_lowered = all(is_low(analysis, node) for node in fold.nodes)
        if not is_lowered and fold.op not in options.black:
            inside |= fold.nodes
    for node in graph.at(inside):
        makers = filter(None, map(graph.producer, node.inputs))
        freed |= {maker.index: _OF_CASTS for maker in makers}
    saves = _saving(analysis, freed | dict.fromkeys(inside, _OF_PATTERNS))
    text = f"{_told_as_decomposed(folds)}; without --no-fold, each becomes a single op{saves}"
    is_black = any(fold.op in options.black for fold in folds)
    if is_black and options.level in (Level.O1, Level.O2):
        text += ". With --lists default normalizations can then also be low precision"
    return f"{text}."


def batch_norm_hint(analysis: Analysis) -> str | None:
    """Return a hint about normalizations in float32 after low producers, which folding would fuse; None without any.

    ONNX Runtime folds a BatchNormalization into the weights of its producer only if there is no Cast between them.
    """
    options = analysis.options
    graph = analysis.graph
    if options.folds or options.level == Level.O0:
        return None
    stored = graph.constants.tensors.__contains__
    parted = {
        norm.index
        for producer, norm in constant_batch_norms(graph, stored)
        if producer.index in analysis.ports.of_node
        and is_low(analysis, producer.index)
        and not is_low(analysis, norm.index)
    }
    # Not all of them can be folded. Finding the folds takes longer, so it comes last.
    if parted:
        parted.intersection_update(
            chain.from_iterable(fold.nodes for fold in batch_norms(graph))
        )
    if not parted:
        return None
    saves = _saving(analysis, dict.fromkeys(parted, _OF_BATCH_NORMS))
    what = f"BatchNormalization{'' if len(parted) == 1 else 's'}"
    return (
        f"{len(parted)} {what} after {options.low.name}: ONNX Runtime does not fuse them, because they stay in float32;"
        f" --fold folds them into the weights{saves}."
    )


def _saving(analysis: Analysis, freed: Mapping[int, frozenset[Basis]]) -> str:
    """Return how many new Casts go if these reasons did not keep these nodes in float32, in a clause; "" if none."""
    saved = analysis.casts - analysis.without(freed).casts if freed else 0
    return f", and saves {saved} of {analysis.casts} Casts" if saved > 0 else ""


_OF_BATCH_NORMS: Final = frozenset({Reason.NO_KERNEL, Reason.BLACK})
"""Reasons that keep a BatchNormalization in float32, but not the Conv whose weights it is folded into."""


_OF_CASTS: Final[frozenset[Basis]] = frozenset(
    kind for kind in kinds() if kind.harm is Harm.CAST
)
"""Reasons that keep the inputs of a decomposed pattern in float32, but not those of the single op."""


_OF_PATTERNS: Final[frozenset[Basis]] = frozenset(
    {Reason.BLACK, *(kind for kind in kinds() if kind.ends_by_folding)}
)
"""Reasons that keep nodes of a decomposed pattern in float32, but not the single op."""


def _told_as_decomposed(folds: Sequence[Fold]) -> str:
    """Return a clause about folds, by op."""
    return (
        f"{told(folds)} {'is' if len(folds) == 1 else 'are'} decomposed into basic ops"
    )


def decomposed(graph: Graph) -> str | None:
    """Return a hint about decomposed patterns of any model, and the Casts around them."""
    folds = graph.ask(find_folds, with_weights=False)
    if not folds:
        return None
    casts = set[int]()
    for fold in folds:
        casts |= _casts_around(graph, fold)
    around = ""
    if casts:
        around = f", with {count(len(casts), 'Cast')} around"
    return f"{_told_as_decomposed(folds)}{around}"


def _casts_around(graph: Graph, fold: Fold) -> set[int]:
    """Return the Casts between floats within the pattern, right before it, and right after it."""
    casts = set[int]()
    inside = [graph.nodes[index] for index in fold.nodes]
    inputs = chain.from_iterable(node.inputs for node in inside)
    before = map(graph.producer, set(map(graph.passed_on, inputs)))
    after = (node for node, _ in graph.readers(graph.nodes[fold.last]))
    for node in (*inside, *before, *after):
        if node is not None and node.key == "Cast":
            ends = graph.types[node.inputs[0]], graph.types[node.outputs[0]]
            if ends[0] != ends[1] and FLOAT_TENSORS.issuperset(ends):
                casts.add(node.index)
    return casts
