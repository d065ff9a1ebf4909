"""Upgrades of a model to a newer opset by onnx's converter, with a restoration of what that loses."""

import onnx.version_converter
from onnx import ModelProto, helper

from onnxamp._errors import ArgumentError, ArgumentTypeError, OpsetError
from onnxamp._model.protos import opset_imports


def upgrade(model: ModelProto, opset: int, notes: list[str]) -> ModelProto:
    """The model at a newer opset; the same object if its opset is not older. Adds a sentence to ``notes``.

    Raises:
        OpsetError: onnx cannot convert the model.
        ArgumentError: the installed onnx does not know the opset.
        ArgumentTypeError: ``opset`` is not an integer.
    """
    if isinstance(opset, bool) or not isinstance(opset, int):
        raise ArgumentTypeError(f"opset must be an integer, not {type(opset).__name__}.")
    if opset < 1:
        raise ArgumentError(f"There is no opset {opset}: opsets start at 1.")
    newest, current = onnx.defs.onnx_opset_version(), opset_imports(model).get("", 0)
    if opset > newest:
        raise ArgumentError(f"The installed onnx {onnx.__version__} knows opsets up to {newest}: {opset} is too new.")
    if opset <= current:
        notes.append(f"The model already has opset {current}; --opset {opset} changes nothing.")
        return model
    if model.functions:
        raise OpsetError(
            "onnx cannot upgrade a model with local functions: leave out keep_functions, and use a level above O0."
        )
    try:
        result = onnx.version_converter.convert_version(model, opset)
    except Exception as error:  # noqa: BLE001 - the C++ converter raises untyped errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OpsetError(f"onnx cannot convert the model from opset {current} to {opset}: {reason}") from None
    _restore(model, result, current)
    notes.append(f"Upgraded from opset {current} to {opset}.")
    return result


def _restore(model: ModelProto, result: ModelProto, before: int) -> None:
    """Restore what onnx's converter drops (metadata, documentation, declarations) or gets wrong (Resize)."""
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
    # The converter infers declarations anew, from stale ones if need be; fusions of ONNX Runtime rely on the original.
    produced = {name for node in graph.node for name in node.output}
    del graph.value_info[:]
    graph.value_info.extend(entry for entry in kept.value_info if entry.name in produced)
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
            # Resize-11 has attributes for what Resize-10 always did, and other defaults.
            kind = {item.name for item in node.attribute}
            rules = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            node.attribute.extend(helper.make_attribute(k, v) for k, v in rules.items() if k not in kind)
