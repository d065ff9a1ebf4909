"""The ways to convert a model: at which opset, and with which patterns folded into single ops.

Each is a problem of its own, solved once. Only what may pay is tried: a newer opset where nodes are held back by theirs
(:mod:`onnxamp._convert.upgrades`), and folds where nodes of a pattern stay float32.
"""

from collections.abc import Iterator
from dataclasses import replace

from onnxamp._convert.analysis import Analysis, Decided, analyze, is_low
from onnxamp._convert.estimate import time_on_target
from onnxamp._convert.plan import Plan
from onnxamp._convert.raising import prepare_raised
from onnxamp._convert.upgrades import Upgrades, unproven_at
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
    upgrades = Upgrades(prepare_raised(model, options))
    if plan is not None:
        prepared = _as_planned(upgrades, options, plan)
        yield Decided(prepared, analyze(prepared.graph, options, plan.of_nodes()))
        return
    prepared = upgrades.at_least(_least_opset(options), options)
    is_own = prepared is upgrades.original
    own = Decided(
        prepared=prepared,
        analysis=analyze(prepared.graph, options),
        unproven="" if is_own else unproven_at(options.low.min_opset),
    )
    opsets = upgrades.paying(own)
    unfolded = next(opsets)
    folded = _folded(model, unfolded.analysis)
    if folded is not None:
        yield folded
    yield unfolded
    yield from opsets


def _least_opset(options: Options) -> int:
    """Return the opset that the low-precision type needs; 0 if the user requested another, or nothing becomes low."""
    is_fixed = options.opset != "auto" or options.level == Level.O0
    return 0 if is_fixed else options.low.min_opset


def _as_planned(upgrades: Upgrades, options: Options, plan: Plan) -> Prepared:
    """Return the model at the opset of a plan, unless the user requested another."""
    is_fixed = options.opset != "auto" or options.level == Level.O0
    if is_fixed or plan.opset <= upgrades.current:
        return upgrades.original
    prepared = upgrades.at(plan.opset)
    note = f"Upgraded from opset {upgrades.current} to {plan.opset}, as the plan says."
    return replace(prepared, notes=(*prepared.notes, note))


def _folded(model: Model, unfolded: Analysis) -> Decided | None:
    """Return the model with those patterns folded that become low by it; None if the result is no faster."""
    options = unfolded.options
    patterns = _foldable(unfolded) if options.may_fold and not options.folded else ()
    if not patterns:
        return None
    folded = next(candidates(model, replace(options, folded=patterns)))
    lowered = _lowered(folded.analysis)
    if lowered and len(lowered) < len(patterns):
        folded = next(candidates(model, replace(options, folded=lowered)))
    is_faster = time_on_target(folded.analysis) < time_on_target(unfolded)
    if not lowered or not is_faster:
        return None
    noted = folded.told(_gain(unfolded, folded.analysis))
    return replace(noted, unproven="Not folded into single ops:")


def _foldable(analysis: Analysis) -> tuple[str, ...]:
    """Return the outputs of the patterns that are not low as they are, unless the user named one of their nodes."""
    graph = analysis.graph
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


def _gain(before: Analysis, after: Analysis) -> str:
    """Return a sentence about the benefit of folds."""
    gain = "makes the result faster"
    if after.casts < before.casts:
        gain = f"saves {before.casts - after.casts} of {before.casts} new Casts"
    return f"Folding {gain}; --no-fold leaves the patterns as they are."
