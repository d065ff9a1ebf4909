"""The pass that turns initializers that are also graph inputs into plain weights."""

from math import prod
from typing import Final

from onnx import TensorProto

from onnxamp._facts.dtypes import LOW_ELEMS
from onnxamp._graph.editor import WEIGHTS_ALONE
from onnxamp._model.protos import copy_without
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, Passed

_FLOATS: Final = {TensorProto.FLOAT, *LOW_ELEMS}


def apply(draft: Draft, options: Options) -> Passed:
    """Remove the weights from the graph's inputs: by default, only if every float initializer is one.

    That is an exporter's habit, not a caller's wish. Scalars alone may well be settings.
    """
    asked = options.freeze_defaults
    model = draft.proto
    inputs = {entry.name for entry in model.graph.input}
    weights = model.graph.initializer
    frozen = {tensor.name for tensor in weights if tensor.name in inputs}
    if asked is None:
        floats = [tensor for tensor in weights if tensor.data_type in _FLOATS]
        is_habit = frozen.issuperset(tensor.name for tensor in floats)
        is_large = any(prod(tensor.dims) > 1 for tensor in floats)
        asked = is_habit and is_large and options.level != Level.O0
    # Before, all are listed, and none can be overridden.
    if not asked or not frozen or model.ir_version < WEIGHTS_ALONE:
        return Passed(draft)
    result = copy_without(model, "input")
    result.graph.input.extend(
        entry for entry in model.graph.input if entry.name not in frozen
    )
    if len(frozen) == 1:
        note = "1 initializer was also a graph input and is now only a weight."
    else:
        count = f"{len(frozen):,} initializers"
        note = f"{count} were also graph inputs and are now only weights."
    if not options.freeze_defaults:
        note += " --keep-overridable lets callers override them as before."
    return Passed(Draft(result, draft.folder), (note,))
