"""Preparation of a model for analysis.

Functions are inlined, and redundant Casts removed; opset, defaults and patterns change on request.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final

from onnx import ModelProto, TensorProto

from onnxamp._decide.hazards.ranges import beyond_init_max
from onnxamp._decide.overrides import find_overrides
from onnxamp._decide.ports import own_casts
from onnxamp._decide.straight import casts_of_constants
from onnxamp._dtypes import LOW_ELEMS
from onnxamp._errors import ArgumentError, ModelError
from onnxamp._graph.bodies import inline_functions
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.model import Model
from onnxamp._model.protos import copy_without
from onnxamp._ops.facts import op_facts
from onnxamp._ops.profiles import folded_first, profile_of
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._rewrite.casts import remove_idle_casts
from onnxamp._rewrite.fold import BATCH_NORM, Selection, fold_graph
from onnxamp._rewrite.pairs import remove_pairs
from onnxamp._rewrite.rescale import rescale_graph
from onnxamp._rewrite.split_k import split_graph
from onnxamp._rewrite.upgrade.upgrade import upgraded
from onnxamp._target.kernels import takes_anywhere

_FLOATS: Final = LOW_ELEMS | {TensorProto.FLOAT}


@dataclass(frozen=True, slots=True)
class Prepared:
    """The graph to analyse.

    Attributes:
        graph: the graph of the prepared model.
        notes: one sentence per change.
        requested: whether there is a change that holds even if nothing is lowered: an upgrade or a folding that the
            user asked for, or Casts that went.
        pairs: number of redundant pairs of Casts that went.
        casts: number of all Casts that went: those of pairs, idle ones and duplicates.
        widened: bytes that its weights take more than those of the model.
        refused: upgrades to newer opsets that were not taken, and why, in sentences.
        unfolded: folds that were asked for and not made, and why, in sentences.
    """

    graph: Graph
    notes: tuple[str, ...]
    requested: bool
    pairs: int = 0
    casts: int = 0
    widened: int = 0
    refused: tuple[str, ...] = ()
    unfolded: tuple[str, ...] = ()


def prepare(model: Model, options: Options) -> Prepared:
    """Prepare a copy of a model; a model that needs no preparation is analysed as it is.

    Raises:
        OpsetError: the model cannot be upgraded to the requested opset.
        ModelError: the model is invalid.
        ArgumentError: exponents or ``data_max`` are asked for, but no ranges were measured, or those of another model.
    """
    if options.lacks_ranges:
        raise ArgumentError(
            f"{'rescale' if options.data_max is None else 'data_max'} needs the ranges of values on inputs, which"
            " 'onnxamp convert' and 'onnxamp tune' measure (convert_model, convert_file, plan_model and tune_model)."
        )
    ready = with_casts(model, options)
    if options.level == Level.O0 or "Cast" in options.black:
        return ready
    kept = partial(_kept, options=options)
    freed = remove_pairs(ready.graph, options.target, kept)
    bare = remove_idle_casts(freed.graph, kept)
    casts = freed.casts + bare.casts
    return replace(
        ready,
        graph=bare.graph,
        requested=ready.requested or casts > 0,
        pairs=freed.pairs,
        casts=casts,
    )


def _kept(graph: Graph, options: Options) -> set[int]:
    """Nodes that the user wants in float32, or decides for one by one, and Casts that the target needs."""
    large = () if options.init_max is None else beyond_init_max(graph, options)
    listed = (node.index for node in graph.nodes if node.key in options.black)
    profile = profile_of(options.target)
    casts = (
        [*casts_of_constants(graph, profile), *own_casts(graph, profile)]
        if profile is not None
        else []
    )
    named = find_overrides(graph, options).of_node
    return {*named, *listed, *(hazard.node for hazard in large), *(cast.index for _, cast in casts)}


def with_casts(model: Model, options: Options) -> Prepared:
    """:func:`prepare` without the removal of Casts."""
    notes = list(model.repairs)
    proto = model.proto
    if proto.functions and not options.keep_functions and options.level != Level.O0:
        proto = inline(proto, notes)
    requested, unfolded = False, tuple[str, ...]()
    if isinstance(options.opset, int):
        graph = _at_opset(_graph(model, proto), options.opset, notes)
        requested, proto = graph.model is not proto, graph.model
    if options.level != Level.O0 or options.freeze_defaults:
        proto = _frozen(proto, options.freeze_defaults, notes)
    graph = _graph(model, proto)
    if selection := _folds_of(graph, options):
        folded = fold_graph(graph, options, selection)
        requested, graph = requested or (options.folds and folded.graph is not graph), folded.graph
        notes, unfolded = [*notes, *folded.notes], folded.refused
    if options.rescaling is not None and options.level != Level.O0:
        rescaled = rescale_graph(graph, options.rescaling)
        requested, graph = requested or rescaled.graph is not graph, rescaled.graph
        notes += rescaled.notes
    split = split_graph(graph, options)
    graph, notes = split.graph, [*notes, *split.notes]
    return Prepared(graph, tuple(notes), requested, unfolded=unfolded)


def _folds_of(graph: Graph, options: Options) -> Selection:
    """Return the folds that are made before anything is decided."""
    if options.folds:
        return Selection(every=True)
    kinds = _folded_first(options)
    spared = frozenset(find_overrides(graph, options).of_node) if kinds else frozenset[int]()
    outputs = frozenset(options.folded) if options.may_fold else frozenset[str]()
    return Selection(kinds=kinds, spared=spared, outputs=outputs)


def _folded_first(options: Options) -> frozenset[str]:
    """Kinds of folds to make where nobody asks for all or for none: those that the target asks for, and those of ops
    that would part from what they follow, since the target has no low-precision kernel for them alone.
    """
    if options.level == Level.O0 or options.fold is False or not options.folds_batch_norm:
        return frozenset()
    facts, able = op_facts(), partial(takes_anywhere, options.target, type_name=options.low.tensor)
    parts = any(map(able, facts.folds_into)) and not any(map(able, facts.folded))
    return folded_first(options.target) | ({BATCH_NORM} if parts else frozenset())


def _graph(model: Model, proto: ModelProto) -> Graph:
    """The graph of the model's proto, or of another that was made of it."""
    return model.ask(graph_of) if proto is model.proto else Graph.of(proto, model.folder)


def _at_opset(graph: Graph, opset: int, notes: list[str]) -> Graph:
    """The graph at an opset, if its own is older; adds a sentence to ``notes``."""
    result, current = upgraded(graph, opset), graph.book.opsets[""]
    if result is graph:
        notes.append(f"The model already has opset {current}; --opset {opset} changes nothing.")
    else:
        notes.append(f"Upgraded from opset {current} to {opset}.")
    return result


def inline(model: ModelProto, notes: list[str]) -> ModelProto:
    """The model with its local functions inlined if possible; adds a sentence about it to ``notes``."""
    names = ", ".join(sorted(function.name for function in model.functions)[:5])
    try:
        result = inline_functions(model, partly=True)
    except ModelError:
        notes.append(f"The functions ({names}) could not be inlined; their calls stay float32.")
        return model
    notes.append(f"Inlined {len(model.functions)} model-local function(s): {names}.")
    return result


def _frozen(model: ModelProto, asked: bool | None, notes: list[str]) -> ModelProto:
    """The model with plain weights in place of initializers that are graph inputs as well.

    Unless ``asked``, only where every float initializer is one: an exporter's habit, not a caller's wish. Scalars
    alone may well be settings.
    """
    inputs = {entry.name for entry in model.graph.input}
    listed = [tensor for tensor in model.graph.initializer if tensor.name in inputs]
    if (
        asked is False or not listed or model.ir_version < 4
    ):  # before, all are listed, and none can be overridden
        return model
    if asked is None:
        floats = [tensor for tensor in model.graph.initializer if tensor.data_type in _FLOATS]
        if not all(tensor.name in inputs for tensor in floats) or all(
            prod(tensor.dims) <= 1 for tensor in floats
        ):
            return model
    frozen = {tensor.name for tensor in listed}
    result = copy_without(model, "input")
    result.graph.input.extend(entry for entry in model.graph.input if entry.name not in frozen)
    advice = "" if asked else " To let callers override them as before, pass --keep-overridable."
    if len(listed) == 1:
        notes.append(f"1 initializer was a graph input as well, and is only a weight now.{advice}")
    else:
        notes.append(
            f"{len(listed):,} initializers were graph inputs as well, and are only weights now.{advice}"
        )
    return result
