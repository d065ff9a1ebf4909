"""The pass that turns initializers that are also graph inputs into plain weights."""

from collections.abc import Container
from collections.abc import Set as AbstractSet
from math import prod
from typing import Final

from onnx import ModelProto, TensorProto

from onnxamp._facts.dtypes import LOW_ELEMS
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._graph.editor import WEIGHTS_ALONE
from onnxamp._model.protos import all_nodes, copy_without
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult

_FLOATS: Final = {TensorProto.FLOAT, *LOW_ELEMS}
_SEVERAL: Final = 8
"""Fewest weights that prove the habit if tools added others: a caller has fewer settings to override."""
_ADDED: Final = 0.1
"""Share of the weights that tools may have added without listing them as inputs, as they do with folded constants."""


def apply(draft: Draft, options: Options) -> PassResult:
    """Remove the weights from the graph's inputs: by default, only if nearly every float initializer is one.

    Exporters list weights out of habit, and weights that tools added later do not change that. Scalars alone may be
    settings that callers override.
    """
    asked = options.freeze_defaults
    model = draft.proto
    graph = draft.graph
    inputs = [graph.values[value] for value in graph.scopes[0].inputs]
    frozen = {value.name for value in inputs if value.is_stored}
    if asked is None:
        asked = options.level != Level.O0 and bool(frozen) and _is_habit(model, frozen)
    # Before that IR version, all weights are listed, and none can be overridden.
    if not asked or not frozen or model.ir_version < WEIGHTS_ALONE:
        return PassResult(draft)
    result = without_inputs(model, frozen)
    if len(frozen) == 1:
        note = "1 initializer was also a graph input and is now only a weight."
    else:
        count = f"{len(frozen):,} initializers"
        note = f"{count} were also graph inputs and are now only weights."
    if not options.freeze_defaults:
        note += " --keep-overridable lets callers override them as before."
    is_requested = bool(options.freeze_defaults)
    return PassResult(Draft(result, draft.folder), (note,), requested=is_requested)


def without_inputs(model: ModelProto, names: Container[str]) -> ModelProto:
    """Return the model without the inputs of these names, which have initializers; an old IR version is raised."""
    result = copy_without(model, "input")
    result.ir_version = max(model.ir_version, WEIGHTS_ALONE)
    result.graph.input.extend(
        entry for entry in model.graph.input if entry.name not in names
    )
    return result


def _is_habit(model: ModelProto, inputs: AbstractSet[str]) -> bool:
    """Return whether the exporter listed all its weights as inputs, and not a caller a few settings."""
    sizes = {
        tensor.name: prod(tensor.dims)
        for tensor in model.graph.initializer
        if tensor.data_type in _FLOATS
    }
    listed = sizes.keys() & inputs
    weights = sizes.keys() - _scales(model)
    is_usual = len(listed) >= max(_SEVERAL, (1 - _ADDED) * len(weights))
    is_whole = len(listed) == len(sizes)
    return (is_usual or is_whole) and any(sizes[name] > 1 for name in listed)


def _scales(model: ModelProto) -> set[str]:
    """Return the scales of quantized numbers, which a quantizer added to the weights of the exporter."""
    quantizing = op_facts().quantize | op_facts().dequantize
    return {
        node.input[1]
        for node in all_nodes(model.graph.node)
        if op_key(node) in quantizing and len(node.input) > 1
    }
