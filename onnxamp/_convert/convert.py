"""Decide and rewrite: from a model and options to a verified, converted copy.

    Model -> prepare -> Graph -> Problem -> Pins -> Decision -> Edits -> verified copy

:func:`onnxamp._convert.analysis.analyze` covers the steps from the Graph to the Edits, which only read the model;
:func:`carried_out` runs it at the opset, and with the folds, that pay.
:func:`convert` applies the edits to a copy and verifies it. Nothing here runs a model or writes a file: the whole job
is in :mod:`onnxamp._job`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final, TypeVar

from onnx import ModelProto

from onnxamp._base.errors import ArgumentError, InternalError
from onnxamp._base.public import no_collections
from onnxamp._convert.analysis import (
    Analysis,
    RoundedWeights,
    Rounder,
    time_on_target,
    with_rounding,
)
from onnxamp._convert.plan import Plan
from onnxamp._convert.upgrades import Proof, at_best_opset
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import Model, load_external_data
from onnxamp._model.protos import copied
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.apply import apply_edits
from onnxamp._rewrite.avoid_optimizers import avoid_optimizers
from onnxamp._rewrite.fold import output_of
from onnxamp._rewrite.fold_search import find_folds
from onnxamp._rewrite.prepare import Prepared
from onnxamp._rewrite.verify import verify

_ROUNDS: Final = 8
"""Number of wrong results after which no more nodes are kept in float32."""

T = TypeVar("T")


def analyse_model(
    model: Model,
    options: Options,
    plan: Plan | None = None,
    proof: Proof | None = None,
) -> tuple[Prepared, Analysis]:
    """Prepare a model and decide its precision.

    The options of the analysis name the patterns that were folded (:attr:`Options.folded`), so that a plan repeats it.

    Args:
        model: the model.
        options: the options of the conversion.
        plan: decisions to repeat, at the opset that they were made for.
        proof: judges upgrades and folds that were not requested.

    Raises:
        OpsetError: an opset that was requested, or that the low-precision type needs, cannot be reached. Others as
            :func:`onnxamp._rewrite.prepare.prepare` and :func:`onnxamp._convert.analysis.analyze`.
    """
    if plan is not None or not options.may_fold:
        return at_best_opset(model, options, plan, proof)
    unproven: list[Graph] = []
    unfolded = at_best_opset(model, options, None, unproven.append)
    folded = _folded(model, unfolded[1])
    why = None
    if folded is not None:
        why = proof(folded[1].graph) if proof is not None else None
        if why is None:
            return folded
    if unproven and proof is not None:
        unfolded = at_best_opset(model, options, None, proof)
    if why is None:
        return unfolded
    refused = f"Not folded into single ops: {why}."
    return replace(unfolded[0], refused=(*unfolded[0].refused, refused)), unfolded[1]


def soundly(options: Options, attempt: Callable[[Options], T]) -> T:
    """Return the result of an attempt.

    If its result is wrong, which is a bug, the nodes around the fault stay float32 (:attr:`Options.unsound`), and
    another attempt follows.

    Raises:
        InternalError: the fault has no place, or stays. Others as the attempt.
    """
    for _ in range(_ROUNDS):
        try:
            return attempt(options)
        except InternalError as error:
            unsound = tuple(dict.fromkeys((*options.unsound, *error.nodes)))
            if len(unsound) == len(options.unsound):
                raise
            _LOG.info("%d nodes stay float32: %s", len(unsound), error)
            options = replace(options, unsound=unsound)
    return attempt(options)


def carried_out(
    model: Model,
    options: Options,
    plan: Plan | None,
    proof: Proof | None,
    carry_out: Callable[[Prepared, Analysis], T],
) -> T:
    """Return a correct result for a model, even if there are bugs.

    The nodes around a fault stay float32, or else the whole model, and a warning says so.

    Args:
        model, options, plan, proof: as for :func:`analyse_model`.
        carry_out: creates the result, and verifies it.

    Raises:
        As :func:`analyse_model` and ``carry_out``.
    """
    try:
        return soundly(
            options, lambda asked: carry_out(*analyse_model(model, asked, plan, proof))
        )
    except InternalError as error:
        return carry_out(*_in_float32(model, options, error))


def all_unsound(model: Model, options: Options) -> Options:
    """Return the options with which the whole model stays unchanged, even if there are bugs."""
    outputs = (node.proto.output for node in model.ask(graph_of).nodes)
    return replace(
        options,
        unsound=tuple(filter(None, chain.from_iterable(outputs))),
        keep_io_types=True,
        low_weights=(),
        weights_only=False,
        keep_functions=True,
        fold=False,
        folded=(),
        rescale=False,
        rescaling=None,
        split_k=False,
    )


def analyse_safely(
    model: Model,
    options: Options,
    plan: Plan | None = None,
    proof: Proof | None = None,
) -> tuple[Prepared, Analysis]:
    """As :func:`analyse_model`; if that hits a bug, return the model in float32."""
    return carried_out(
        model, options, plan, proof, lambda ready, analysis: (ready, analysis)
    )


def _in_float32(
    model: Model, options: Options, error: InternalError
) -> tuple[Prepared, Analysis]:
    """Return the model as level O0 leaves it, with a warning that a bug is why.

    Raises:
        As :func:`analyse_model`.
    """
    prepared, analysis = analyse_model(model, replace(options, level=Level.O0))
    warnings = (*analysis.pins.warnings, f"The whole model stays in float32: {error}")
    pins = analysis.pins._replace(warnings=warnings)
    return prepared, replace(analysis, pins=pins)


def _folded(model: Model, unfolded: Analysis) -> tuple[Prepared, Analysis] | None:
    """Return the analysis with those patterns folded that become low by it; None if the result is no faster."""
    options = unfolded.options
    candidates = _candidates(unfolded)
    if not candidates:
        return None
    prepared, analysis = at_best_opset(model, replace(options, folded=candidates))
    lowered = _lowered(analysis)
    if lowered and len(lowered) < len(candidates):
        prepared, analysis = at_best_opset(model, replace(options, folded=lowered))
    if not lowered or time_on_target(analysis) >= time_on_target(unfolded):
        return None
    return replace(
        prepared, notes=(*prepared.notes, _note(unfolded, analysis))
    ), analysis


def _candidates(analysis: Analysis) -> tuple[str, ...]:
    """Return the outputs of the patterns that are not low as they are, unless the user named one of their nodes."""
    graph = analysis.graph
    folds = graph.ask(find_folds, with_weights=False)
    if not folds:
        return ()
    problem = analysis.problem
    kept = {*problem.overrides.of_node, *problem.listed.black}
    return tuple(
        output_of(graph, fold)
        for fold in folds
        if fold.nodes.isdisjoint(kept)
        and not all(is_low(analysis, node) for node in fold.nodes)
    )


def _lowered(analysis: Analysis) -> tuple[str, ...]:
    """Return the outputs of the folded patterns whose single ops are low."""
    folded = frozenset(analysis.options.folded)
    low = (
        value
        for value in analysis.graph.values
        if value.producer in analysis.ports.of_node
        and is_low(analysis, value.producer)
    )
    return tuple(value.name for value in low if value.name in folded)


def is_low(analysis: Analysis, node: int) -> bool:
    """Return whether all precision variables of a node are low."""
    return all(analysis.decision.low[variable] for variable in analysis.ports.of(node))


def _note(before: Analysis, after: Analysis) -> str:
    gain = "makes the result faster"
    if after.casts < before.casts:
        gain = f"saves {before.casts - after.casts} of {before.casts} new Casts"
    return f"Folding {gain}; --no-fold leaves the patterns as they are."


_LOG: Final = logging.getLogger("onnxamp")


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted model in memory. ``proto`` is always a new object, even if nothing changed."""

    proto: ModelProto
    prepared: Prepared
    analysis: Analysis
    weights: WeightConverter
    rounded: RoundedWeights | None = None

    @property
    def changed(self) -> bool:
        """Whether the result differs from the original model."""
        return bool(self.analysis.edits) or self.prepared.requested

    def embedded(self) -> ModelProto:
        """``proto`` with all weights inside.

        Raises:
            ExternalDataError: a weight cannot be read.
        """
        if self.weights.base_dir is not None:
            load_external_data(self.proto, self.weights.base_dir)
        return self.proto


@no_collections()
def convert(
    model: Model,
    options: Options,
    plan: Plan | None = None,
    *,
    deferred: bool = False,
    proof: Proof | None = None,
    rounder: Rounder | None = None,
) -> Converted:
    """Convert a copy of a model.

    Args:
        model: the model; it is not changed.
        options: the options of the conversion.
        plan: decisions to repeat.
        deferred: leave large weights as they are until :func:`onnxamp._model.saving.save_model` streams them.
        proof: judges an upgrade to a newer opset that was not requested.
        rounder: rounds weights with compensation if the options ask for it.

    Raises:
        ArgumentError: the level is "auto", and there is no plan. Others as :func:`onnxamp.convert_model`.

    A result that would be wrong is a bug; then the nodes around the fault stay float32, or else the whole model, and a
    warning says so.
    """
    if options.level == Level.AUTO and plan is None:
        raise ArgumentError(
            "Level 'auto' needs measurements: use onnxamp.convert_model or onnxamp tune."
        )
    return carried_out(
        model, options, plan, proof, partial(_converted, model, rounder, deferred)
    )


def _converted(
    model: Model,
    rounder: Rounder | None,
    deferred: bool,
    ready: Prepared,
    analysis: Analysis,
) -> Converted:
    """Return the conversion that an analysis decides."""
    analysis, rounded = with_rounding(analysis, rounder)
    options = analysis.options
    _LOG.info(
        "decided at level %s: %d of %d variables are %s, %d new Casts",
        options.level,
        sum(analysis.decision.low),
        len(analysis.decision.low),
        options.dtype,
        analysis.casts,
    )
    weights = WeightConverter(options.low, ready.graph.folder, deferred=deferred)
    changed = analysis.edits or ready.requested
    given = model.proto if model.given is None else model.given
    return Converted(
        rewritten(analysis, weights) if changed else copied(given),
        ready,
        analysis,
        weights,
        rounded,
    )


def rewritten(
    analysis: Analysis, weights: WeightConverter | None = None
) -> ModelProto:
    """Return a copy of the analyzed model with the edits applied, kept clear of faulty optimizers, and verified.

    Raises:
        InternalError, ModelError: see :func:`onnxamp._rewrite.verify.verify`.
    """
    graph = analysis.graph
    result = copied(graph.model)
    if analysis.edits:
        apply_edits(
            graph,
            analysis.edits,
            result,
            weights or WeightConverter(analysis.options.low, graph.folder),
        )
        avoid_optimizers(result, analysis.options.target)
        verify(graph, analysis.edits, result, analysis.options)
    return result
