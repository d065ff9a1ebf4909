"""The pipeline of every conversion.

    Model -> prepare -> Graph -> Problem -> Pins -> Decision -> Edits -> verified copy -> Sink

:func:`onnxamp._convert.analysis.analyse` covers the steps from the Graph to the Edits, which only read the model;
:func:`onnxamp._convert.deciding.carried_out` runs it at the opset, and with the folds, that pay.
:func:`convert` applies the edits to a copy and verifies it; :func:`convert_to_file` writes that copy to a file.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._convert.analysis import Analysis
from onnxamp._convert.causes import Cause, find_causes
from onnxamp._convert.deciding import carried_out
from onnxamp._convert.estimate import SpeedUp, expected_speed_up
from onnxamp._convert.hints import batch_norm_hint, fold_hint, opset_hint
from onnxamp._convert.plan import Plan, make_plan, plan_json
from onnxamp._convert.raising import low_note
from onnxamp._convert.rounding import RoundedWeights, Rounder, with_rounding
from onnxamp._convert.summary import Summary, summarize
from onnxamp._convert.upgrades import Proof
from onnxamp._errors import ArgumentError
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.graph import Graph
from onnxamp._model.converter import WeightConverter
from onnxamp._model.copying import copied
from onnxamp._model.data_files import referring_models
from onnxamp._model.formats import is_text
from onnxamp._model.lowering import ConversionCounts
from onnxamp._model.model import Model
from onnxamp._model.saving import Saved, copy_file, save_model
from onnxamp._model.shards import measured
from onnxamp._model.storage import INLINE_LIMIT, StoredWeights, load_external_data, unwritable, weight_bytes
from onnxamp._ops.tables import read_table
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._paths.paths import is_remote
from onnxamp._public import Shown
from onnxamp._rewrite.apply import apply_edits
from onnxamp._rewrite.prepare import Prepared
from onnxamp._rewrite.verify import verify
from onnxamp._runtime.fingerprints import file_print, versions
from onnxamp._state.state import Part, State, fingerprint
from onnxamp._workers.executor import Workers

_LOG: Final = logging.getLogger("onnxamp")
EXTERNAL_DATA: Final = ("auto", "always", "never")
"""When weights go to a data file beside the model."""


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
    model: Model, options: Options, plan: Plan | None = None, *, deferred: bool = False, proof: Proof | None = None,
    rounder: Rounder | None = None,
) -> Converted:  # fmt: skip
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
        raise ArgumentError("Level 'auto' needs measurements: use onnxamp.convert_model or onnxamp tune.")
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
        "decided at level %s: %d of %d variables are %s, %d new Casts", options.level, sum(analysis.decision.low),
        len(analysis.decision.low), options.dtype, len(analysis.edits.casts),
    )  # fmt: skip
    weights = WeightConverter(options.low, ready.graph.folder, deferred=deferred)
    changed = analysis.edits or ready.requested
    given = model.proto if model.given is None else model.given
    return Converted(rewritten(analysis, weights) if changed else copied(given), ready, analysis, weights, rounded)


def rewritten(analysis: Analysis, weights: WeightConverter | None = None) -> ModelProto:
    """A copy of the analysed model with the edits applied, and verified.

    Raises:
        InternalError, ModelError: see :func:`onnxamp._rewrite.verify.verify`.
    """
    graph = analysis.graph
    result = copied(graph.model)
    if analysis.edits:
        apply_edits(graph, analysis.edits, result, weights or WeightConverter(analysis.options.low, graph.folder))
        verify(graph, analysis.edits, result, analysis.options)
    return result


@dataclass(frozen=True, slots=True, repr=False)
class Conversion(Shown):
    """What :func:`onnxamp.convert_file` did.

    Attributes:
        source: the model that was read.
        target: the model that was written.
        plan: what was decided, and why.
        summary: nodes and Casts of the result by precision.
        notes: what was done besides, which options would save Casts, and which op types of the lists do not occur, in
            sentences.
        weights: name of a weight -> numbers of elements that overflowed, underflowed or were flushed.
        bytes_before: size of all weights of the source in bytes.
        bytes_after: size of all weights of the target in bytes.
        causes: what keeps nodes in float32, how many Casts that costs, and which option would lower them.
        speed_up: what the conversion should gain by an estimate; None where none can be made.

    Example:
        >>> import onnxamp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     conversion = onnxamp.convert_file("models/encoder.onnx", f"{folder}/low.onnx")
        >>> conversion.source.name, conversion.target.name, conversion.plan.level
        ('encoder.onnx', 'low.onnx', 'O2')
    """

    source: Path
    target: Path
    plan: Plan
    summary: Summary
    notes: tuple[str, ...]
    weights: Mapping[str, ConversionCounts]
    bytes_before: int
    bytes_after: int
    causes: tuple[Cause, ...] = ()
    speed_up: SpeedUp | None = None


@dataclass(frozen=True, slots=True)
class Sink:
    """Where and how to write a converted model.

    Attributes:
        target: the file.
        external_data: whether weights go to a data file: "auto", "always" or "never".
        shard_bytes: size in bytes at which the data file is split; None for one file.
        progress: called with (bytes written, bytes in all).
        approve: called with the new model under another name; if it raises, nothing is put in place.
        workers: who measures weights and writes data files if there are several; None for this process.
        data_names: whose names data files get: "onnx" or "transformers.js".
        kept: keeps what is measured and written, for a run that is interrupted to go on; see :func:`begun`.

    Raises:
        ArgumentError: a value is unknown, or the target is a folder. OutputError: its folder does not exist.
    """

    target: Path
    external_data: str = "auto"
    shard_bytes: int | None = None
    progress: Callable[[int, int], None] | None = None
    approve: Callable[[Path], None] | None = None
    workers: Workers | None = None
    data_names: str = "onnx"
    kept: Part | None = None

    def __post_init__(self) -> None:
        if self.data_names not in (styles := read_table("presets")):
            raise ArgumentError(f"Unknown data_names {self.data_names!r}: choose one of {', '.join(styles)}.")
        if self.external_data not in EXTERNAL_DATA:
            raise ArgumentError(f"external_data must be 'auto', 'always' or 'never', not {self.external_data!r}.")
        if self.shard_bytes is not None and self.shard_bytes <= 0:
            raise ArgumentError(f"shard_bytes must be positive, not {self.shard_bytes!r}.")
        if self.shard_bytes is not None and self.external_data == "never":
            raise ArgumentError("shard_bytes splits external data: it excludes external_data='never'.")
        if self.target.is_dir():
            raise ArgumentError(f"The output {str(self.target)!r} is a folder: name a file.")
        if not is_remote(self.target) and not self.target.parent.is_dir():
            raise unwritable(self.target, FileNotFoundError())

    def destination(self, stored: StoredWeights) -> Path:
        """The target, with a symbolic link resolved.

        Raises:
            ArgumentError: the model that is converted stores weights there, or another one beside the target.
        """
        target = self.target.resolve() if self.target.is_symlink() else self.target
        if target.resolve() in stored.files:
            raise ArgumentError(f"{str(target)!r} holds weights of the model: give the output another name.")
        others = referring_models(target.parent, [target.name] if target.exists() else [], target)
        if others:
            user = str(others[target.name])
            raise ArgumentError(f"{str(target)!r} holds weights of {user!r}: give the output another name.")
        return target

    def is_external(self, stored: StoredWeights, low_bytes: int) -> bool:
        """Whether the result's weights go to a data file.

        Args:
            stored: the weights of the original.
            low_bytes: how many of their bytes the conversion halves.

        Raises:
            ArgumentError: external_data is "never", but one file cannot hold the weights.
        """
        size = stored.size - low_bytes // 2
        if self.external_data == "never" and size > INLINE_LIMIT:
            raise ArgumentError(
                f"{size} bytes of weights do not fit into one file, since protobuf ends at 2 GiB: use external_data="
                "'auto' or 'always'."
            )
        is_needed = size > INLINE_LIMIT or bool(stored.files)
        return self.external_data == "always" or (self.external_data == "auto" and is_needed)


CONVERSION: Final = "conversion"
"""Part of a state file: what is left of a conversion that did not end."""


def begun(state: State | None, model: Model, sink: Sink, options: Options, plan: Plan | None = None) -> Sink:
    """The sink that keeps what a conversion has done in a state, until its part is dropped.

    Raises:
        ArgumentError: the state belongs to another conversion.
    """
    if state is None or options.compensates:  # whose weights depend on samples
        return sink
    assert model.path is not None
    files = sorted({model.path.resolve(), *model.stock.files})
    wanted = sink.external_data, sink.shard_bytes, sink.data_names
    facts = {
        "the model": fingerprint(*map(file_print, files)),
        "the options": fingerprint(json.dumps(options.as_json(), sort_keys=True), repr(wanted)),
        "the plan": "" if plan is None else fingerprint(json.dumps(plan_json(plan), sort_keys=True)),
        "the output": str(sink.target),
        "the version of onnxamp or ONNX Runtime": versions(),
    }
    return replace(sink, kept=state.part(CONVERSION, facts))


@no_collections()
def convert_to_file(
    model: Model, sink: Sink, options: Options, plan: Plan | None = None, proof: Proof | None = None,
    rounder: Rounder | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Conversion:  # fmt: skip
    """Convert a model that was read from a file, and write the result whole or not at all.

    An unchanged model is copied byte by byte where its weights may stay where they are. ``shapes`` are those of the
    inputs for which the speed-up is estimated, by name.

    Raises:
        ArgumentError: the target holds weights of the model.
        OutputError: the target cannot be written. Others as :func:`convert`.
    """
    source, stored = model.path, model.stock
    assert source is not None
    target = sink.destination(stored)
    kept = frozenset() if target.exists() and target.samefile(source) else stored.files
    with measured(model, sink.workers, sink.kept):
        converted = convert(model, options, plan, deferred=True, proof=proof, rounder=rounder)
    analysis = converted.analysis
    summary = summarize(converted.prepared, analysis, plan)
    external = sink.is_external(stored, summary.low_weight_bytes - 2 * converted.prepared.widened)
    is_beside = source.absolute().parent.resolve() == target.resolve().parent
    as_they_are = sink.shard_bytes is None and (not external or (is_beside and sink.data_names == "onnx"))
    weights_stay = bool(stored.files) == external and as_they_are
    if converted.changed or not weights_stay or is_text(source):
        saved = save_model(
            converted.proto, target, converted.weights,
            external=external, shard_bytes=sink.shard_bytes, data_names=sink.data_names, keep=kept,
            progress=sink.progress, approve=sink.approve, workers=sink.workers, kept=sink.kept,
        )  # fmt: skip
        counts = converted.weights.counts()
    else:
        saved = Saved(stored.size, tuple(copy_file(source, target, kept | stored.files, sink.approve)))
        counts = {}
    _LOG.info("wrote %s: %d bytes of weights", target, saved.size)
    return Conversion(
        source=source,
        target=target,
        plan=make_plan(analysis),
        summary=summary,
        notes=(*_notes(converted, plan), *saved.notes),
        weights=counts,
        bytes_before=stored.size,
        bytes_after=saved.size,
        causes=find_causes(analysis) if plan is None else (),
        speed_up=expected_speed_up(analysis, shapes),
    )


@no_collections()
def preview(model: Model, target: Path, options: Options, plan: Plan | None = None) -> tuple[Conversion, ModelProto]:
    """What :func:`convert_to_file` would do, and the model that it would write to ``target``. Nothing is written.

    Raises:
        As :func:`convert`.
    """
    assert model.path is not None
    trusted: list[int] = []

    def trust(graph: Graph) -> None:
        trusted.append(graph.book.opsets[""])

    converted = convert(model, replace(options, rounding="nearest"), plan, proof=trust)
    notes = _notes(converted, plan)
    if (opset := converted.analysis.graph.book.opsets[""]) in trusted:
        told = f"Nothing ran, so the upgrade to opset {opset} is trusted here:"
        notes = (*notes, f"{told} convert first sees whether the float32 model computes the same there.")
    summary = summarize(converted.prepared, converted.analysis, plan)
    made = Conversion(
        source=model.path,
        target=target,
        plan=make_plan(converted.analysis),
        summary=summary,
        notes=notes,
        weights=converted.weights.counts(),
        bytes_before=model.stock.size,
        bytes_after=weight_bytes(converted.proto),
        causes=find_causes(converted.analysis) if plan is None else (),
        speed_up=expected_speed_up(converted.analysis, None),
    )
    return made, converted.proto


def _notes(converted: Converted, plan: Plan | None) -> tuple[str, ...]:
    """What was done besides, and which options would save Casts."""
    analysis = converted.analysis
    hints = () if plan else tuple(filter(None, (opset_hint(analysis), fold_hint(analysis), batch_norm_hint(analysis))))
    hints += (*converted.prepared.unfolded, *converted.prepared.refused)
    hints += (converted.rounded.note(),) if converted.rounded is not None else ()
    hints += tuple(filter(None, (low_note(analysis.graph, analysis.options), *analysis.problem.overrides.notes)))
    return (*converted.prepared.notes, *hints) if converted.changed else hints
