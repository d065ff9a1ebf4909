"""Hints about options that would save Casts and fusions: a newer opset, or folding.

The savings are computed by solving the same problem again without the pins in question.
"""

from typing import Final

from onnxamp._convert.analysis import Analysis
from onnxamp._convert.deciding import is_low
from onnxamp._convert.upgrades import held_back
from onnxamp._decide.hazards import epsilons, fusions
from onnxamp._decide.hazards.decomposed import KIND as DECOMPOSED
from onnxamp._decide.verdicts import Reason
from onnxamp._dtypes import FLOAT, FORMATS
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._options.levels import Level
from onnxamp._patterns.fusion_groups import constant_batch_norms
from onnxamp._rewrite.fold.batch_norm import batch_norms
from onnxamp._rewrite.fold.fold import reachable, told
from onnxamp._rewrite.fold.folds import Fold
from onnxamp._rewrite.fold.search import find_folds
from onnxamp._rewrite.upgrade.upgrade import plan_upgrade


def opset_hint(analysis: Analysis) -> str | None:
    """How many Casts a newer opset saves, where options keep the model from it; None if none do, or it is upgraded.

    The hint names the first opset at which all those ops that ever get a low-precision kernel have one.
    """
    options, graph = analysis.options, analysis.graph
    if options.level == Level.O0 or options.opset == "auto":
        return None
    held, current = held_back(analysis), graph.book.opsets[""]
    newer = max(held.first.values(), default=0)
    if newer <= current:
        return None
    reach = plan_upgrade(graph, newer)
    if reach.obstacle is not None:
        return f"Opset {newer} has low-precision kernels for {', '.join(held.ops)}, but {reach.obstacle}."
    before = len(analysis.edits.casts)
    saved, ops = before - held.casts_without(), ", ".join(held.ops)
    if saved > 0:
        return f"{saved} of {before} new Casts vanish with --opset {newer}, which brings low-precision kernels for {ops}."
    return f"--opset {newer} brings low-precision kernels for {ops}; at opset {current} there are none."


def fold_hint(analysis: Analysis) -> str | None:
    """Which patterns of the model are decomposed, and how many Casts folding saves; None if there are none."""
    options, graph = analysis.options, analysis.graph
    if options.fold is not False or options.folds or options.level == Level.O0:
        return None
    folds = graph.ask(find_folds, with_weights=False)
    opset = reachable(graph, folds, options.target, options.highest_opset(graph.book.opsets[""]))
    folds = [fold for fold in folds if fold.opset <= opset]
    if not folds:
        return None
    text = f"{_told_as_decomposed(folds)}; without --no-fold each becomes one op"
    able = [fold for fold in folds if fold.op not in options.black]
    able = [fold for fold in able if not all(is_low(analysis, node) for node in fold.nodes)]
    inside = {node for fold in able for node in fold.nodes}
    before_them = filter(
        None, (graph.producer(value) for node in inside for value in graph.nodes[node].inputs)
    )
    freed = {node.index: _OF_CASTS for node in before_them} | dict.fromkeys(inside, _OF_PATTERNS)
    before = len(analysis.edits.casts)
    saved = before - len(analysis.without(freed).edits.casts) if freed else 0
    if saved > 0:
        text = f"{text}, and saves {saved} of {before} Casts"
    if options.level in (Level.O1, Level.O2) and any(fold.op in options.black for fold in folds):
        text = f"{text}. With --lists default normalisations can then be low precision, too"
    return f"{text}."


def batch_norm_hint(analysis: Analysis) -> str | None:
    """How many normalisations stay float32 behind a low producer, where runtimes fuse none, and folding would; or None.

    ONNX Runtime puts a BatchNormalization into the weights of what feeds it only where no Cast stands between them.
    """
    options, graph = analysis.options, analysis.graph
    if options.folds or options.level == Level.O0:
        return None
    of_node = analysis.ports.of_node
    parted = {
        node.index: _OF_BATCH_NORMS
        for producer, node in constant_batch_norms(graph, graph.constants.tensors.__contains__)
        if producer.index in of_node
        and is_low(analysis, producer.index)
        and not is_low(analysis, node.index)
    }
    able = {node for fold in batch_norms(graph) for node in fold.nodes} if parted else set[int]()
    parted = {node: reasons for node, reasons in parted.items() if node in able}
    if not parted:
        return None
    before, low = len(analysis.edits.casts), options.low.name
    saved = before - len(analysis.without(parted).edits.casts)
    saves = f", and saves {saved} of {before} Casts" if saved > 0 else ""
    what = f"{len(parted)} BatchNormalization{'' if len(parted) == 1 else 's'} behind {low}"
    return f"{what}: ONNX Runtime fuses none there, as they stay float32; --fold puts them into the weights{saves}."


_OF_BATCH_NORMS: Final = frozenset({Reason.NO_KERNEL, Reason.BLACK})
"""Reasons that keep a BatchNormalization in float32, but not the Conv whose weights it is folded into."""


_OF_CASTS: Final[frozenset[Reason]] = frozenset({fusions.KIND})
"""Reasons that keep what a decomposed pattern reads in float32, but not what the single op reads."""


_OF_PATTERNS: Final[frozenset[Reason]] = frozenset(
    {DECOMPOSED, epsilons.KIND, fusions.KIND, Reason.BLACK}
)
"""Reasons that keep nodes of a decomposed pattern in float32, but not the single op."""


def _told_as_decomposed(folds: list[Fold]) -> str:
    return f"{told(folds)} {'is' if len(folds) == 1 else 'are'} decomposed into single ops"


def decomposed(graph: Graph) -> str | None:
    """Which patterns of a model, converted or not, are decomposed, and how many Casts surround them."""
    folds = graph.ask(find_folds, with_weights=False)
    if not folds:
        return None
    casts = set().union(*(_casts_around(graph, fold) for fold in folds))
    around = f", with {len(casts)} Cast{'' if len(casts) == 1 else 's'} around" if casts else ""
    return f"{_told_as_decomposed(folds)}{around}"


def _casts_around(graph: Graph, fold: Fold) -> set[int]:
    """Casts between floats within the pattern, right before it, and right after it."""
    casts = set[int]()
    read = {
        graph.passed_on(value)
        for index in fold.nodes
        for value in graph.nodes[index].inputs
        if value != ABSENT
    }
    before = map(graph.producer, read)
    behind = (
        node for value in graph.nodes[fold.last].outputs for node, _ in graph.consumers(value)
    )
    for node in (*map(graph.nodes.__getitem__, fold.nodes), *before, *behind):
        if node is not None and node.key == "Cast":
            ends = graph.types[node.inputs[0]], graph.types[node.outputs[0]]
            if ends[0] != ends[1] and _FLOATS.issuperset(ends):
                casts.add(node.index)
    return casts


_FLOATS: Final = frozenset({FLOAT, *(low.tensor for low in FORMATS.values())})
