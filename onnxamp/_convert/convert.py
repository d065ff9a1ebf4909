"""Decide and rewrite: from a model and options to a verified, converted copy.

    Model -> prepare -> Graph -> Problem -> Pins -> Decision -> Edits -> verified copy

:func:`onnxamp._convert.analysis.analyse` covers the steps from the Graph to the Edits, which only read the model;
:func:`onnxamp._convert.deciding.carried_out` runs it at the opset, and with the folds, that pay.
:func:`convert` applies the edits to a copy and verifies it. Nothing here runs a model or writes a file: the whole job
is in :mod:`onnxamp._job.pipeline`.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Final

from onnx import ModelProto

from onnxamp._convert.analysis import Analysis
from onnxamp._convert.deciding import carried_out
from onnxamp._convert.plan import Plan
from onnxamp._convert.rounding import RoundedWeights, Rounder, with_rounding
from onnxamp._convert.upgrades import Proof
from onnxamp._errors import ArgumentError
from onnxamp._graph.collecting import no_collections
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._model.storage import load_external_data
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._rewrite.apply import apply_edits
from onnxamp._rewrite.prepare import Prepared
from onnxamp._rewrite.verify import verify

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
        proof: judges an upgrade to a newer opset that nobody asked for.
        rounder: rounds weights with compensation where the options ask for it.

    Raises:
        ArgumentError: the level is "auto", and there is no plan. Others as :func:`onnxamp.convert_model`.

    A result that would be wrong is a bug; then the nodes around the fault stay float32, or else the whole model, and a
    warning says so.
    """
    if options.level == Level.AUTO and plan is None:
        raise ArgumentError(
            "Level 'auto' needs measurements: use onnxamp.convert_model or onnxamp tune."
        )
    return carried_out(model, options, plan, proof, partial(_converted, model, rounder, deferred))


def _converted(
    model: Model,
    rounder: Rounder | None,
    deferred: bool,
    ready: Prepared,
    analysis: Analysis,
) -> Converted:
    """The conversion that an analysis decides."""
    analysis, rounded = with_rounding(analysis, rounder)
    options = analysis.options
    _LOG.info(
        "decided at level %s: %d of %d variables are %s, %d new Casts",
        options.level,
        sum(analysis.decision.low),
        len(analysis.decision.low),
        options.dtype,
        len(analysis.edits.casts),
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


def rewritten(analysis: Analysis, weights: WeightConverter | None = None) -> ModelProto:
    """A copy of the analysed model with the edits applied, and verified.

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
        verify(graph, analysis.edits, result, analysis.options)
    return result
