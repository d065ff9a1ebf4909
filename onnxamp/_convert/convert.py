"""Decide and rewrite: from a model and options to a verified, converted copy.

    Model -> prepare -> Graph -> Problem -> Pins -> Decision -> Edits -> verified copy

:func:`decide` takes the best of the :func:`~onnxamp._convert.candidates.candidates` whose float32 model computes the
same; :func:`convert` applies its edits to a copy, verifies the copy, and decides again where that finds a fault.
Nothing here runs a model or writes a file: the whole job is in :mod:`onnxamp._job`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Final, TypeAlias

from onnx import ModelProto

from onnxamp._base.errors import ArgumentError, InternalError, OpsetError
from onnxamp._base.public import no_collections
from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis, Decided
from onnxamp._convert.candidates import candidates
from onnxamp._convert.compensation import RoundedWeights, Rounder, with_rounding
from onnxamp._convert.plan import Plan
from onnxamp._convert.upgrades import explained, held_back
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import Model, load_external_data
from onnxamp._model.protos import copied
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.avoid_optimizers import avoid_optimizers
from onnxamp._rewrite.checks.checker import check_result
from onnxamp._rewrite.checks.verify import verify
from onnxamp._rewrite.edits.apply import apply_edits, copy_to_edit
from onnxamp._rewrite.prepare import Prepared

ATTEMPTS: Final = 9
"""Attempts before the whole model stays in float32. Each one keeps more nodes in float32 than the one before."""

Proof: TypeAlias = Callable[[Graph], str | None]
"""Returns the fault of an upgraded or folded float32 model, in a clause; None if it computes what the original does."""

_LOG: Final = logging.getLogger("onnxamp")


@record
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
        """Return ``proto`` with all weights inside.

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

    A result that would be wrong is a bug. The nodes around the fault then stay in float32, or else the whole model, and
    a warning says so.

    Args:
        model: the model; it is not changed.
        options: the options of the conversion.
        plan: decisions to repeat, at the opset that they were made for.
        deferred: leave large weights as they are until :func:`onnxamp._model.saving.save_model` streams them.
        proof: judges upgrades and folds that were not requested.
        rounder: rounds weights with compensation if the options ask for it.

    Raises:
        ArgumentError: the level is "auto", and there is no plan. Others as :func:`decide`.
    """
    if options.level == Level.AUTO and plan is None:
        raise ArgumentError(
            "Level 'auto' needs measurements: use onnxamp.convert_model or onnxamp tune."
        )
    # A wrong result is a bug, but the next attempt may be right: it keeps the nodes around the fault in float32.
    attempt: Options | None = options
    for _ in range(ATTEMPTS):
        if attempt is None:
            break
        decided = decide(model, attempt, plan, proof)
        try:
            return _carried_out(model, decided, rounder, deferred=deferred)
        except InternalError as error:
            fault = error
            attempt = around_fault(attempt, error)
    unchanged = _in_float32(model, options, fault)
    return _carried_out(model, unchanged, rounder, deferred=deferred)


def decide(
    model: Model,
    options: Options,
    plan: Plan | None = None,
    proof: Proof | None = None,
) -> Decided:
    """Prepare a model and decide its precision, at the opset and with the folds that pay.

    The options of the analysis name the patterns that were folded (:attr:`Options.folded`), so that a plan repeats it.

    Args:
        model, options, plan, proof: as for :func:`convert`.

    Raises:
        OpsetError: an opset that was requested, or that the low-precision type needs, cannot be reached.
        Others as :func:`onnxamp._rewrite.prepare.prepare` and :func:`onnxamp._convert.analysis.analyze`.
    """
    refused = list[str]()
    try:
        for candidate in candidates(model, options, plan):
            why = proof(candidate.graph) if proof and candidate.refusal else None
            if why is None:
                decided = candidate.told(refused=refused)
                if not refused:
                    return decided
                return explained(decided, held_back(decided.analysis), *refused)
            refused.append(f"{candidate.refusal} {why}.")
    except InternalError as error:
        return _in_float32(model, options, error)
    current = model.ask(graph_of).book.opsets[""]
    raise OpsetError(
        f"{options.low.name} needs a newer opset than {current}. {refused[-1]}"
    )


def around_fault(options: Options, fault: InternalError) -> Options | None:
    """Return the options with the nodes around a fault in float32; None if they are already, or if it has no place."""
    unsound = tuple(dict.fromkeys((*options.unsound, *fault.nodes)))
    if len(unsound) == len(options.unsound):
        return None
    _LOG.info("%d nodes stay in float32: %s", len(unsound), fault)
    return replace(options, unsound=unsound)


def all_unsound(model: Model, options: Options) -> Options:
    """Return the options with which no node and no weight is lowered, even if there are bugs."""
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


def _in_float32(model: Model, options: Options, fault: InternalError) -> Decided:
    """Return the model as level O0 leaves it, with a warning that a bug is why.

    Raises:
        As :func:`decide`.
    """
    (unchanged,) = candidates(model, replace(options, level=Level.O0))
    return unchanged.warned(f"The whole model stays in float32: {fault}")


def _carried_out(
    model: Model, decided: Decided, rounder: Rounder | None, *, deferred: bool
) -> Converted:
    """Return the converted model, by a decision.

    Raises:
        As :func:`rewritten` and the rounder.
    """
    prepared = decided.prepared
    analysis, rounded = with_rounding(decided.analysis, rounder)
    options = analysis.options
    _LOG.info(
        "decided at level %s: %d of %d variables are %s, %d new Casts",
        options.level,
        sum(analysis.decision.low),
        len(analysis.decision.low),
        options.dtype,
        analysis.casts,
    )
    weights = WeightConverter(options.low, prepared.graph.folder, deferred=deferred)
    changed = analysis.edits or prepared.requested
    given = model.proto if model.given is None else model.given
    return Converted(
        proto=rewritten(analysis, weights, given) if changed else copied(given),
        prepared=prepared,
        analysis=analysis,
        weights=weights,
        rounded=rounded,
    )


def rewritten(
    analysis: Analysis,
    weights: WeightConverter | None = None,
    given: ModelProto | None = None,
) -> ModelProto:
    """Return a copy of the analyzed model with the edits applied, kept clear of faulty optimizers, and verified.

    Args:
        analysis: the analysis of the model.
        weights: converts its weights.
        given: the model before it was prepared, whose faults are not those of the result.

    Raises:
        InternalError, ModelError: see :func:`onnxamp._rewrite.checks.checker.check_result` and
            :func:`onnxamp._rewrite.checks.verify.verify`.
    """
    graph = analysis.graph
    options = analysis.options
    result = (
        copy_to_edit(graph, analysis.edits) if analysis.edits else copied(graph.model)
    )
    if analysis.edits:
        apply_edits(
            graph,
            analysis.edits,
            result,
            weights or WeightConverter(options.low, graph.folder),
        )
        avoid_optimizers(result, options.target)
    # The checker comes first: the verification of types needs a model whose names can be resolved.
    check_result(graph.model if given is None else given, graph, result, options)
    if analysis.edits:
        verify(graph, analysis.edits, result, options)
    return result
