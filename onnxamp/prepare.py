"""What happens to a model before it is analysed: opset upgrade on request, functions inlined, defaults frozen."""

import onnx.inliner
import onnx.version_converter
from onnx import ModelProto, helper

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
    if model.functions and not policy.keep_functions and policy.level != Level.O0:
        model = _inline(model, notes)
    if opset is not None:
        model = _upgrade(model, opset, notes)
    if policy.freeze_defaults and model.ir_version >= 4:
        model = _freeze(model, notes)
    return model, notes


def _upgrade(model: ModelProto, opset: int, notes: list[str]) -> ModelProto:
    if isinstance(opset, bool) or not isinstance(opset, int):
        raise ArgumentTypeError(f"opset must be an integer, not {type(opset).__name__}.")
    if opset < 1:
        raise ArgumentError(f"There is no opset {opset}.")
    newest, current = onnx.defs.onnx_opset_version(), opset_imports(model).get("", 0)
    if opset > newest:
        raise ArgumentError(f"The installed onnx {onnx.__version__} knows opsets up to {newest}: {opset} is too new.")
    if opset <= current:
        notes.append(f"The model has opset {current} already; --opset {opset} changes nothing.")
        return model
    if model.functions:
        raise OpsetError("onnx cannot upgrade a model with functions of its own; let them be inlined (at O1 to O3).")
    try:
        result = onnx.version_converter.convert_version(model, opset)
    except Exception as error:  # noqa: BLE001 - the C++ converter raises untyped errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OpsetError(f"onnx cannot convert the model from opset {current} to {opset}: {reason}") from None
    _restore(model, result, current)
    notes.append(f"Upgraded from opset {current} to {opset}.")
    return result


def _restore(model: ModelProto, result: ModelProto, before: int) -> None:
    """Put back what onnx's converter drops (metadata, documentation, declarations) or gets wrong (Resize)."""
    for name in ("producer_name", "producer_version", "domain", "doc_string", "model_version"):
        setattr(result, name, getattr(model, name))
    graph, kept = result.graph, model.graph
    for ours, theirs in (
        (result.metadata_props, model.metadata_props),
        (graph.metadata_props, kept.metadata_props),
        (graph.quantization_annotation, kept.quantization_annotation),
        (graph.input, kept.input),
        (graph.output, kept.output),
    ):
        del ours[:]
        ours.extend(theirs)  # type: ignore[arg-type]
    del graph.value_info[:]  # written by the converter's own inference, from declarations that may be stale
    graph.doc_string = kept.doc_string
    nodes = {node.output[0]: node for node in kept.node if node.output}
    for node in graph.node:
        original = nodes.get(node.output[0]) if node.output else None
        if original is None:
            continue
        node.doc_string = original.doc_string
        del node.metadata_props[:]
        node.metadata_props.extend(original.metadata_props)
        if node.op_type == "Resize" and before < 11 <= opset_imports(result)[""]:
            # Resize-10 had one rule; Resize-11 names it, and has another one by default.
            kind = {item.name for item in node.attribute}
            rules = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            node.attribute.extend(helper.make_attribute(k, v) for k, v in rules.items() if k not in kind)


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
