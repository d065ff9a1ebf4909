"""The pass that turns initializers that are also graph inputs into plain weights."""

from math import prod
from typing import Final

from onnx import ModelProto, TensorProto

from onnxamp._dtypes import LOW_ELEMS
from onnxamp._graph.editor import WEIGHTS_ALONE
from onnxamp._model.protos import copy_without
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, Passed

_FLOATS: Final = {TensorProto.FLOAT, *LOW_ELEMS}


def applies(draft: Draft, options: Options) -> bool:
    """Return whether to freeze defaults: by default, only if every float initializer is a graph input.

    That is an exporter's habit, not a caller's wish. Scalars alone may well be settings.
    """
    asked, model = options.freeze_defaults, draft.proto
    if asked is False or (not asked and options.level == Level.O0):
        return False
    if (
        model.ir_version < WEIGHTS_ALONE
    ):  # all are listed there, and none can be overridden
        return False
    listed = _listed(model)
    if asked or not listed:
        return bool(listed)
    floats = [
        tensor for tensor in model.graph.initializer if tensor.data_type in _FLOATS
    ]
    is_habit = all(tensor.name in listed for tensor in floats)
    return is_habit and any(prod(tensor.dims) > 1 for tensor in floats)


def _listed(model: ModelProto) -> frozenset[str]:
    """Initializers that are graph inputs as well."""
    inputs = {entry.name for entry in model.graph.input}
    return frozenset(
        tensor.name for tensor in model.graph.initializer if tensor.name in inputs
    )


def apply(draft: Draft, options: Options) -> Passed:
    """Remove the weights from the graph's inputs."""
    model, frozen = draft.proto, _listed(draft.proto)
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
