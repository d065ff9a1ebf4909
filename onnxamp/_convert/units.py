"""Units: the nodes of a pattern that can be folded, decided together by the one variable of their single op.

A unit is low as the single op, and float32 as the nodes that it has. So it is folded before the problem is stated, and
unfolded if the cut leaves it in float32.
"""

from collections.abc import Sequence

from onnxamp._convert.analysis import Analysis, is_low
from onnxamp._decide.patterns import GROWING, TIED, find_patterns
from onnxamp._decide.quantized_units import bounded_nodes
from onnxamp._facts.kernels import takes_anywhere
from onnxamp._facts.tables import device_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import Match, form_table
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.fold import output_of
from onnxamp._rewrite.fold_search import Fold, folds_of
from onnxamp._rewrite.prepare import Start


def find_units(begun: Start, options: Options) -> Sequence[Fold]:
    """Return the folds of patterns that are float32 in any case as they are, but may be low as single ops.

    None are certain where the user names nodes or ops, nor at level "auto", which measures hazards.
    """
    is_named = options.has_names or options.rule is not None or options.folded
    if not options.may_fold or is_named or options.level == Level.AUTO:
        return ()
    graph = begun.graph
    patterns = [
        one for one in graph.ask(find_patterns) if _is_high(graph, options, one)
    ]
    return [
        fold for fold in folds_of(graph, patterns) if _may_be_low(graph, fold, options)
    ]


def _is_high(graph: Graph, options: Options, pattern: Match) -> bool:
    """Return whether hazards keep a pattern in float32, or a black list keeps a node that all others are tied to."""
    if pattern.kind in GROWING and options.hazards:
        return True
    keys = (graph.nodes[index].key for index in pattern.nodes)
    return pattern.kind in TIED and not options.black.isdisjoint(keys)


def _may_be_low(graph: Graph, fold: Fold, options: Options) -> bool:
    """Return whether lists and kernels may let the single op be low. Names in the options may refer to it."""
    if options.has_names or options.rule is not None:
        return True
    kind = form_table().kinds[fold.kind]
    ops = {fold.op, kind.own.get(device_of(options.target), fold.op)}
    if not any(takes_anywhere(options.target, op, options.low.tensor) for op in ops):
        return False
    preset = options.preset
    is_lowered = options.level != Level.O1 or preset.is_literal or preset.follows
    if not is_lowered and ops.isdisjoint(options.white):
        return False
    # Presets ignore nodes that integers bound.
    return not ops <= options.black or fold.last in graph.ask(
        bounded_nodes, options.target
    )


def stranded(analysis: Analysis) -> tuple[str, ...]:
    """Return the outputs of the patterns that stay in float32 without a user's wish, but may be low as single ops."""
    options = analysis.options
    graph = analysis.graph
    if not options.may_fold or all(analysis.decision.low):
        return ()
    patterns = [
        one for one in graph.ask(find_patterns) if _is_partly_high(analysis, one)
    ]
    problem = analysis.problem
    kept = {*problem.overrides.of_node, *problem.listed.black}
    return tuple(
        output_of(graph, fold)
        for fold in folds_of(graph, patterns)
        if fold.nodes.isdisjoint(kept)
        and not all(is_low(analysis, node) for node in fold.nodes)
        and _may_be_low(graph, fold, options)
    )


def _is_partly_high(analysis: Analysis, pattern: Match) -> bool:
    """Return whether a node of a pattern, or right after it, is float32: no other node can end one of its forms."""
    graph = analysis.graph
    for node in map(graph.nodes.__getitem__, pattern.nodes):
        if not is_low(analysis, node.index):
            return True
        if not all(
            is_low(analysis, reader.index) for reader, _ in graph.readers(node)
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
