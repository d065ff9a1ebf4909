"""The pass that puts the bodies of local functions in the place of their calls."""

from onnx import ModelProto

from onnxamp._errors import ModelError
from onnxamp._graph.view import inline_functions
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, Passed


def applies(draft: Draft, options: Options) -> bool:
    """Return whether there are functions to inline."""
    return (
        bool(draft.proto.functions)
        and not options.keep_functions
        and options.level != Level.O0
    )


def apply(draft: Draft, _: Options) -> Passed:
    """Inline all functions that can be."""
    result, note = inline(draft.proto)
    return Passed(
        draft if result is draft.proto else Draft(result, draft.folder), (note,)
    )


def inline(model: ModelProto) -> tuple[ModelProto, str]:
    """Return the model with its local functions inlined if possible, and a sentence about it."""
    names = ", ".join(sorted(function.name for function in model.functions)[:5])
    try:
        result = inline_functions(model, partly=True)
    except ModelError:
        return (
            model,
            f"The functions ({names}) could not be inlined; their calls stay float32.",
        )
    return result, f"Inlined {len(model.functions)} model-local function(s): {names}."
