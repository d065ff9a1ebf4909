"""The pass that puts the bodies of local functions in the place of their calls."""

from typing import Final

from onnx import ModelProto

from onnxamp._base.errors import ModelError
from onnxamp._base.words import count, shortened
from onnxamp._graph.view import inline_functions
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult

_NAMED: Final = 5
"""Functions that a note names."""


def apply(draft: Draft, options: Options) -> PassResult:
    """Inline all functions that can be."""
    is_kept = options.keep_functions or options.level == Level.O0
    if is_kept or not draft.proto.functions:
        return PassResult(draft)
    result, note = inline(draft.proto)
    if result is not draft.proto:
        draft = Draft(result, draft.folder)
    return PassResult(draft, (note,))


def inline(model: ModelProto) -> tuple[ModelProto, str]:
    """Return the model with its local functions inlined if possible, and a sentence about it."""
    names = shortened(sorted(function.name for function in model.functions), _NAMED)
    try:
        result = inline_functions(model, partly=True)
    except ModelError:
        return (
            model,
            f"The functions ({names}) could not be inlined; their calls stay in float32.",
        )
    functions = count(len(model.functions), "model-local function")
    return result, f"Inlined {functions}: {names}."
