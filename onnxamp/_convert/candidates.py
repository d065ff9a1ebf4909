"""The ways to convert a model: at which opset, and with which patterns folded into single ops.

Each candidate is a problem of its own, solved once. Only candidates that may pay are tried: a newer opset where the
model's own holds nodes back (:mod:`onnxamp._convert.upgrades`), and folds where nodes of a pattern stay in float32.
"""

from collections.abc import Iterator
from dataclasses import replace

from onnxamp._convert.analysis import Analysis, Decided, analyze, is_low
from onnxamp._convert.estimate import estimate_on_target, time_on_target
from onnxamp._convert.plan import Plan
from onnxamp._convert.raising import prepare_raised
from onnxamp._convert.upgrades import Upgrades, unproven_at
from onnxamp._decide.patterns import growing_nodes
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.fold import output_of
from onnxamp._rewrite.fold_search import find_folds
from onnxamp._rewrite.prepare import Prepared


def candidates(
    model: Model, options: Options, plan: Plan | None = None
) -> Iterator[Decided]:
    """Yield the ways to convert a model, the best first.

    One whose float32 model must be proven to compute the same (:attr:`Decided.unproven`) is followed by the next best.

    Args:
        model: the model.
        options: the options of the conversion.
        plan: decisions to repeat, at the opset that they were made for.

    Raises:
        OpsetError: an opset that was requested, or that the low-precision type needs, cannot be reached. Others as
            :func:`onnxamp._rewrite.prepare.prepare` and :func:`onnxamp._convert.analysis.analyze`.
    """
    prepared = prepare_raised(model, options)
    if plan is not None:
        planned = _as_planned(prepared, options, plan)
        yield Decided(planned, analyze(planned.graph, options, plan.of_nodes()))
        return
    # Patterns that stay in float32 in any case are folded first. If a bound shows that this pays, the model without
    # folds need not be solved.
    folding = None
    pinned = _pinned_patterns(prepared.graph, options)
    if pinned:
        folding = _only_lowered(model, next(_folded(model, options, pinned)))
    if folding is not None and _is_surely_faster(folding.analysis, prepared.graph):
        yield folding.told(_gain("makes the result faster"))
        yield from _at_opsets(prepared, options)
        return
    opsets = _at_opsets(prepared, options)
    unfolded = next(opsets)
    patterns = _foldable(unfolded.analysis)
    # Other patterns than those that were tried stay in float32 as well: try all of them together.
    if not set(patterns) <= set(pinned):
        asked = (*options.folded, *patterns)
        folding = _only_lowered(model, next(_folded(model, options, asked)))
    before = unfolded.analysis
    if folding is not None and _is_faster(folding.analysis, before):
        saved = before.casts - folding.analysis.casts
        gain = f"saves {saved} of {before.casts} new Casts"
        yield folding.told(_gain(gain if saved > 0 else "makes the result faster"))
    yield unfolded
    yield from opsets


def _folded(
    model: Model, options: Options, patterns: tuple[str, ...]
) -> Iterator[Decided]:
    """Return the ways to convert a model with these patterns folded, by the names of their outputs, the best first."""
    asked = replace(options, folded=patterns)
    return _at_opsets(prepare_raised(model, asked), asked)


def _at_opsets(original: Prepared, options: Options) -> Iterator[Decided]:
    """Yield a prepared model at the opsets that pay, the best first, and at last at the least that is possible."""
    upgrades = Upgrades(original)
    least = upgrades.at_least(options)
    own = Decided(
        prepared=least,
        analysis=analyze(least.graph, options),
        unproven="" if least is original else unproven_at(options.low.min_opset),
    )
    yield from upgrades.paying(own)


def _as_planned(prepared: Prepared, options: Options, plan: Plan) -> Prepared:
    """Return the model at the opset of a plan, unless the user requested another."""
    upgrades = Upgrades(prepared)
    if not options.may_upgrade or plan.opset <= upgrades.current:
        return prepared
    planned = upgrades.at(plan.opset)
    note = f"Upgraded from opset {upgrades.current} to {plan.opset}, as the plan says."
    return replace(planned, notes=(*planned.notes, note))


def _pinned_patterns(graph: Graph, options: Options) -> tuple[str, ...]:
    """Return the outputs of the patterns that hazards keep in float32 in any case.

    They are folded at once, because a decision without folds would show nothing else. Where the user names nodes or
    ops, none are certain.
    """
    is_open = options.may_fold and not options.folded
    is_certain = options.hazards and options.level != Level.AUTO
    if not is_open or not is_certain or options.has_names or options.rule is not None:
        return ()
    folds = graph.ask(find_folds, with_weights=False)
    pinned = set[int]()
    if folds:
        pinned.update(graph.ask(growing_nodes))
    return tuple(
        output_of(graph, fold) for fold in folds if not pinned.isdisjoint(fold.nodes)
    )


def _only_lowered(model: Model, folded: Decided) -> Decided | None:
    """Return the model with only those patterns folded that become low by it; None if there are none.

    Patterns that stay in float32 beside the folded ones are tried as well.
    """
    options = folded.analysis.options
    more = _foldable(folded.analysis)
    if more:
        folded = next(_folded(model, options, (*options.folded, *more)))
    lowered = _lowered(folded.analysis)
    if not lowered:
        return None
    if len(lowered) < len(folded.analysis.options.folded):
        folded = next(_folded(model, options, lowered))
    return replace(folded, unproven="Not folded into single ops:")


def _is_surely_faster(folded: Analysis, unfolded: Graph) -> bool:
    """Return whether a model is faster with folds than it could be without, wherever Casts stood there."""
    options = folded.options
    pinned = unfolded.ask(growing_nodes)
    least = estimate_on_target(unfolded, options).least_time(pinned)
    return time_on_target(folded) < least


def _is_faster(folded: Analysis, unfolded: Analysis) -> bool:
    """Return whether a model is faster with folds than without, as estimated."""
    return time_on_target(folded) < time_on_target(unfolded)


def _gain(gain: str) -> str:
    """Return a sentence about the benefit of folds."""
    return f"Folding {gain}; --no-fold leaves the patterns as they are."


def _foldable(analysis: Analysis) -> tuple[str, ...]:
    """Return the outputs of the patterns to fold: those that are not low as they are, unless the user named a node."""
    graph = analysis.graph
    if not analysis.options.may_fold or all(analysis.decision.low):
        return ()
    folds = graph.ask(find_folds, with_weights=False)
    problem = analysis.problem
    kept = {*problem.overrides.of_node, *problem.listed.black} if folds else set[int]()
    found = list[str]()
    for fold in folds:
        is_named = not fold.nodes.isdisjoint(kept)
        if not is_named and not all(is_low(analysis, node) for node in fold.nodes):
            found.append(output_of(graph, fold))
    return tuple(found)


def _lowered(analysis: Analysis) -> tuple[str, ...]:
    """Return the outputs of the folded patterns whose single ops are low."""
    folded = frozenset(analysis.options.folded)
    found = list[str]()
    for value in analysis.graph.values:
        is_folded = value.name in folded and value.producer in analysis.ports.of_node
        if is_folded and is_low(analysis, value.producer):
            found.append(value.name)
    return tuple(found)
