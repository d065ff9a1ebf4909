"""Hints about conversions: newer opsets and folds that would save Casts, if options rule them out."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from onnxamp._base.words import count
from onnxamp._convert.analysis import Analysis, is_low
from onnxamp._convert.upgrades import held_back
from onnxamp._decide.kinds import Harm, kinds
from onnxamp._decide.patterns.fusion_groups import constant_batch_norms
from onnxamp._decide.verdicts import Basis, Reason
from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._graph.graph import Graph
from onnxamp._options.values import Level
from onnxamp._rewrite.passes.fold import counted_kinds, reachable
from onnxamp._rewrite.passes.fold_search import Fold, batch_norms, find_folds
from onnxamp._rewrite.passes.upgrade import plan_upgrade

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


def _told_as_decomposed(folds: Sequence[Fold]) -> str:
    """Return a clause about folds, by op."""
    return f"{counted_kinds(folds)} {'is' if len(folds) == 1 else 'are'} decomposed into basic ops"


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
