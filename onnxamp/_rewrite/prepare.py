"""Preparation of a model for analysis: functions are inlined, and opset, defaults and patterns changed on request."""

from dataclasses import dataclass

from onnx import ModelProto

from onnxamp._errors import ModelError
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.inline import inline_functions
from onnxamp._model.model import Model
from onnxamp._options.options import Level, Options
from onnxamp._rewrite.fold import fold_graph
from onnxamp._rewrite.opset import upgrade


@dataclass(frozen=True, slots=True)
class Prepared:
    """The graph to analyse.

    Attributes:
        graph: the graph of the prepared model.
        notes: one sentence per change.
        requested: whether the user asked for a change (an upgrade, folding), which holds even if nothing is lowered.
    """

    graph: Graph
    notes: tuple[str, ...]
    requested: bool


def prepare(model: Model, options: Options) -> Prepared:
    """Prepare a copy of a model; a model that needs no preparation is analysed as it is.

    Raises:
        OpsetError: the model cannot be upgraded to the requested opset.
        ModelError: the model is invalid.
    """
    notes: list[str] = []
    proto = model.proto
    if proto.functions and not options.keep_functions and options.level != Level.O0:
        proto = inline(proto, notes)
    inlined = proto
    if options.opset is not None:
        proto = upgrade(proto, options.opset, notes)
    requested = proto is not inlined
    frozen = options.freeze_defaults
    if frozen and proto.ir_version >= 4:
        proto = _freeze(proto, notes)
    if proto is not model.proto:
        graph = Graph.of(proto, model.folder, freeze_defaults=frozen)
    else:
        graph = model.ask(graph_of, freeze_defaults=True) if frozen else model.ask(graph_of)
    if options.fold:
        folded = fold_graph(graph, options)
        requested, graph = requested or folded.graph is not graph, folded.graph
        notes += folded.notes
    return Prepared(graph, tuple(notes), requested)


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


def _freeze(model: ModelProto, notes: list[str]) -> ModelProto:
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [entry for entry in model.graph.input if entry.name not in weights]
    frozen = len(model.graph.input) - len(kept)
    if not frozen:
        return model
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.input[:]
    result.graph.input.extend(kept)
    notes.append(f"Froze {frozen} initializer(s) that were also graph inputs.")
    return result
