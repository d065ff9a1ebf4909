"""What happens to a model before it is analysed: opset upgrade on request, functions inlined, defaults frozen."""

import onnx.inliner
import onnx.version_converter
from onnx import ModelProto

from onnxamp.errors import ArgumentError, ArgumentTypeError, OpsetError
from onnxamp.graph import opset_imports
from onnxamp.policy import Level, Policy


def prepare(model: ModelProto, policy: Policy, opset: int | None) -> tuple[ModelProto, list[str]]:
    """The model that is to be analysed, and a sentence for each thing that was done to it.

    The same object is returned where nothing had to be done; the input is never changed.

    Raises:
        OpsetError: the model cannot be brought to the wanted opset.
    """
    notes: list[str] = []
    if opset is not None:
        model = _upgrade(model, opset, notes)
    if model.functions and not policy.keep_functions and policy.level != Level.O0:
        model = _inline(model, notes)
    if policy.freeze_defaults and model.ir_version >= 4:
        model = _freeze(model, notes)
    return model, notes


def _upgrade(model: ModelProto, opset: int, notes: list[str]) -> ModelProto:
    if isinstance(opset, bool) or not isinstance(opset, int):
        raise ArgumentTypeError(f"opset must be an integer, not {type(opset).__name__}.")
    newest, current = onnx.defs.onnx_opset_version(), opset_imports(model).get("", 0)
    if opset > newest:
        raise ArgumentError(f"The installed onnx {onnx.__version__} knows opsets up to {newest}: {opset} is too new.")
    if opset <= current:
        notes.append(f"The model has opset {current} already; --opset {opset} changes nothing.")
        return model
    try:
        result = onnx.version_converter.convert_version(model, opset)
    except Exception as error:  # noqa: BLE001 - the C++ converter raises untyped errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OpsetError(f"onnx cannot convert the model from opset {current} to {opset}: {reason}") from None
    for name in ("producer_name", "producer_version", "domain", "doc_string", "model_version"):
        setattr(result, name, getattr(model, name))  # the converter drops these
    del result.metadata_props[:]
    result.metadata_props.extend(model.metadata_props)
    result.graph.doc_string = model.graph.doc_string
    notes.append(f"Upgraded from opset {current} to {opset}.")
    return result


def _inline(model: ModelProto, notes: list[str]) -> ModelProto:
    names = ", ".join(sorted(function.name for function in model.functions)[:5])
    try:
        result = onnx.inliner.inline_local_functions(model, convert_version=True)
    except Exception:  # noqa: BLE001 - untyped C++ errors; calls then stay as they are, in float32
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
    notes.append(f"Froze {frozen} initializer(s) that were graph inputs, too.")
    return result
