"""The one pipeline, readable on one screen: prepare, analyse, edit a copy, verify. Saving is a sink behind it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._convert.analysis import Analysis, analyse
from onnxamp._convert.hints import fold_hint, opset_hint
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._convert.summary import Summary, summarize
from onnxamp._errors import ArgumentError
from onnxamp._graph.collecting import no_collections
from onnxamp._model.lowering import ConversionCounts
from onnxamp._model.model import Model
from onnxamp._model.saving import WeightConverter, copy_file, save_model
from onnxamp._model.storage import INLINE_LIMIT, StoredWeights, load_external_data
from onnxamp._options.options import Level, Options
from onnxamp._rewrite.apply import apply_edits
from onnxamp._rewrite.prepare import Prepared, prepare
from onnxamp._rewrite.verify import verify

EXTERNAL_DATA: Final = ("auto", "always", "never")
"""Whether weights go to a data file beside the model."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted model that nobody has written yet; ``proto`` is new, and a copy where nothing was to be done."""

    proto: ModelProto
    prepared: Prepared
    analysis: Analysis
    weights: WeightConverter

    @property
    def changed(self) -> bool:
        """Whether the result differs from the model that came in."""
        return bool(self.analysis.edits) or self.prepared.wanted

    def embedded(self) -> ModelProto:
        """``proto`` with all weights inside.

        Raises:
            ExternalDataError: a weight cannot be read.
        """
        if self.weights.base_dir is not None:
            load_external_data(self.proto, self.weights.base_dir)
        return self.proto


@no_collections()
def convert(model: Model, options: Options, plan: Plan | None = None, *, deferred: bool = False) -> Converted:
    """Convert a model. The model is not changed.

    Args:
        plan: repeat its decisions.
        deferred: leave large weights to :func:`onnxamp._model.saving.save_model`.

    Raises:
        ArgumentError: the level is "auto", and no plan says what was measured. Others as :func:`onnxamp.convert_model`.
    """
    check_decided(options, plan)
    prepared = prepare(model, options)
    analysis = analyse(prepared.graph, options, plan.decisions() if plan else None)
    weights = WeightConverter(options.low, model.folder, deferred=deferred)
    kept = analysis.edits or prepared.wanted
    proto = rewritten(analysis, weights) if kept else _copy(model.proto)
    return Converted(proto, prepared, analysis, weights)


def rewritten(analysis: Analysis, weights: WeightConverter | None = None) -> ModelProto:
    """A copy of the analysed model with its edits applied and verified.

    Raises:
        InternalError, ModelError: see :func:`onnxamp._rewrite.verify.verify`.
    """
    graph = analysis.graph
    result = _copy(graph.model)
    if analysis.edits:
        apply_edits(graph, analysis.edits, result, weights or WeightConverter(analysis.options.low, graph.folder))
        verify(graph, result, analysis.options)
    return result


def check_decided(options: Options, plan: Plan | None) -> None:
    """Refuse level "auto" where nothing was measured: :mod:`onnxamp._tuning` makes its plans.

    Raises:
        ArgumentError: there is no plan.
    """
    if options.level == Level.AUTO and plan is None:
        raise ArgumentError("Level 'auto' needs measurements: use onnxamp.convert_model or onnxamp tune.")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What :func:`onnxamp.convert_file` did: the plan, what is in the model now, and what was lost in the weights.

    ``weights`` counts, by weight, elements that overflowed or were flushed; ``bytes_before`` and ``bytes_after`` are
    those of all weights.
    """

    source: Path
    target: Path
    plan: Plan
    summary: Summary
    notes: tuple[str, ...]
    weights: Mapping[str, ConversionCounts]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a converted model is written, and how.

    ``progress`` is called with (bytes written, bytes in all).
    """

    target: Path
    external_data: str = "auto"
    shard_bytes: int | None = None
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.external_data not in EXTERNAL_DATA:
            raise ArgumentError(f"external_data must be 'auto', 'always' or 'never', not {self.external_data!r}.")
        if self.shard_bytes is not None and not (self.shard_bytes > 0 and self.external_data != "never"):
            raise ArgumentError(
                f"shard_bytes must be positive, and is for external data alone, not {self.shard_bytes!r}."
            )
        if self.target.is_dir():
            raise ArgumentError(f"The output {str(self.target)!r} is a folder: name a file.")

    def is_external(self, stock: StoredWeights, low_bytes: int) -> bool:
        """Whether the result's weights go to a data file; ``low_bytes`` of the original's are halved.

        Raises:
            ArgumentError: the user wants one file, which protobuf could not hold.
        """
        size = stock.size - low_bytes // 2
        if self.external_data == "never" and size > INLINE_LIMIT:
            raise ArgumentError(
                f"{size} bytes of weights do not fit into one file: protobuf ends at 2 GiB; use external data."
            )
        is_needed = size > INLINE_LIMIT or bool(stock.files)
        return self.external_data == "always" or (self.external_data == "auto" and is_needed)


@no_collections()
def convert_to_file(model: Model, sink: Sink, options: Options, plan: Plan | None = None) -> Conversion:
    """Convert a model that was read from a file, and write the result whole or not at all.

    Raises:
        ArgumentError: the target holds weights of the model. OutputError: it cannot be written. Others as
            :func:`convert`.
    """
    assert model.path is not None
    source, stock = model.path, model.stock
    target = sink.target.resolve() if sink.target.is_symlink() else sink.target
    if target.resolve() in stock.files:
        raise ArgumentError(f"{str(target)!r} holds weights of the model: give the output another name.")
    keep = frozenset() if target.exists() and target.samefile(source) else stock.files
    made = convert(model, options, plan, deferred=True)
    analysis = made.analysis
    summary = summarize(analysis)
    external = sink.is_external(stock, summary.low_weight_bytes)
    hints = () if plan else tuple(filter(None, (opset_hint(analysis), fold_hint(analysis))))
    notes = (*made.prepared.notes, *hints) if made.changed else hints
    is_beside = source.absolute().parent.resolve() == target.resolve().parent
    if not made.changed and bool(stock.files) == external and sink.shard_bytes is None and (not external or is_beside):
        copy_file(source, target, keep | stock.files)
        return Conversion(source, target, make_plan(analysis), summary, hints, {}, stock.size, stock.size)
    total = save_model(
        made.proto,
        target,
        made.weights,
        external=external,
        shard_bytes=sink.shard_bytes,
        keep=keep,
        progress=sink.progress,
    )
    return Conversion(source, target, make_plan(analysis), summary, notes, made.weights.counts(), stock.size, total)


def _copy(proto: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(proto)
    return copy
