"""Units: the nodes of a pattern that can be folded, decided together by the one variable of their single op.

A unit is low as the single op, and float32 as the nodes that it has. So it is folded before the problem is stated, and
unfolded if the cut leaves it in float32.
"""

from collections.abc import Set as AbstractSet

from onnxamp._convert.analysis import Analysis, is_low
from onnxamp._decide.kinds import breaks_always
from onnxamp._decide.listed import find_listed
from onnxamp._decide.overrides import find_overrides
from onnxamp._decide.patterns.find import GROWING, TIED, find_patterns
from onnxamp._decide.patterns.quantized_units import bounded_nodes
from onnxamp._facts.kernels import takes_anywhere
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import Match, form_table, readers_of
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.passes.fold import output_of, within_reach
from onnxamp._rewrite.passes.fold_search import Fold, folds_of
from onnxamp._rewrite.prepare import Start


def find_units(begun: Start, options: Options) -> list[Fold]:
    """Return the folds of patterns that are float32 in any case as they are, but may be low as single ops.

    Patterns with nodes that the user names are left out, and so are all patterns at level "auto", which measures
    hazards instead.
    """
    is_told = not options.may_fold or options.folded or options.level == Level.AUTO
    patterns = () if is_told else begun.graph.ask(find_patterns)
    if not patterns:
        return []
    graph = begun.graph
    named = _named(graph, options) if options.has_names or options.rule else set[int]()
    certain = [one for one in patterns if _is_high(graph, options, one)]
    free = [pattern for pattern in certain if named.isdisjoint(pattern.nodes)]
    folds = _possibly_low(graph, [*folds_of(graph, free)], options)
    return [fold for fold in folds if named.isdisjoint(fold.nodes)]


def _named(graph: Graph, options: Options) -> AbstractSet[int]:
    """Return the nodes that the user names, or that the user's lists or rule decide."""
    listed = find_listed(graph, options)
    overrides = find_overrides(graph, options)
    return overrides.of_node.keys() | listed.black.keys() | listed.white.keys()


def _is_high(graph: Graph, options: Options, pattern: Match) -> bool:
    """Return whether hazards keep a pattern in float32, or a black list keeps a node that all others are tied to."""
    if pattern.kind in GROWING and options.hazards:
        return True
    keys = (graph.nodes[index].key for index in pattern.nodes)
    return pattern.kind in TIED and not options.black.isdisjoint(keys)


def _possibly_low(graph: Graph, folds: list[Fold], options: Options) -> list[Fold]:
    """Return the folds whose single op may be low for all that opsets, lists, kernels and hazards of an op say."""
    if not folds:
        return []
    reachable = within_reach(graph, folds, options)
    # Names in the options and measurements may overrule the others, and bounds of integers overrule lists.
    if options.has_names or options.rule or options.rescaling:
        return reachable
    able = {
        kind for kind in {fold.kind for fold in reachable} if _is_able(kind, options)
    }
    bounded = graph.ask(bounded_nodes, options.target)
    return [fold for fold in reachable if fold.kind in able or fold.last in bounded]


def _is_able(name: str, options: Options) -> bool:
    """Return whether lists, kernels and hazards may let the single op of a kind of folds be low."""
    kind = form_table().kinds[name]
    target = options.target
    preset = options.preset
    lowers_listed = options.level == Level.O1 and not preset.is_literal
    for op in {kind.op, *kind.own.values()}:
        is_listed = op in options.white or not lowers_listed or preset.follows
        if op in options.black or not is_listed:
            continue
        breaks = options.hazards and breaks_always(op, options.low, target)
        if not breaks and takes_anywhere(target, op, options.low.tensor):
            return True
    return False


def unfolded_in_float32(analysis: Analysis) -> tuple[str, ...]:
    """Return the outputs of the patterns that stay in float32 without a user's wish, but may be low as single ops."""
    options = analysis.options
    graph = analysis.graph
    if not options.may_fold or all(analysis.decision.low):
        return ()
    patterns = graph.ask(find_patterns)
    high = [pattern for pattern in patterns if _is_partly_high(analysis, pattern)]
    folds = _possibly_low(graph, [*folds_of(graph, high)], options)
    problem = analysis.problem
    kept = {*problem.overrides.of_node, *problem.listed.black} if folds else set[int]()
    outputs = list[str]()
    for fold in folds:
        is_lowered = all(is_low(analysis, node) for node in fold.nodes)
        if not is_lowered and fold.nodes.isdisjoint(kept):
            outputs.append(output_of(graph, fold))
    return tuple(outputs)


def _is_partly_high(analysis: Analysis, pattern: Match) -> bool:
    """Return whether a node of a pattern, or one right after it, is float32: its forms end at no others."""
    graph = analysis.graph
    for index in pattern.nodes:
        if not is_low(analysis, index):
            return True
        for value in graph.nodes[index].writes:
            if not all(
                is_low(analysis, reader.index) for reader in readers_of(graph, value)
            ):
                return True
    return False


def lowered(analysis: Analysis) -> tuple[str, ...]:
    """Return the outputs of the folded patterns whose single ops are low."""
    folded = frozenset(analysis.options.folded)
    of_node = analysis.ports.of_node
    return tuple(
        value.name
        for value in analysis.graph.values
        if value.name in folded
        and value.producer in of_node
        and is_low(analysis, value.producer)
    )
