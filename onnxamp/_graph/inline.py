"""Inlining of functions: replacing calls by the function's body."""

from collections.abc import Collection

import onnx.checker
import onnx.defs
import onnx.inliner
from onnx import ModelProto, NodeProto, helper

from onnxamp._errors import ModelError
from onnxamp._model.protos import copy_without, opset_imports
from onnxamp._model.wellformed import check_functions


def inline_functions(
    model: ModelProto, ops: Collection[tuple[str, str]] | None = None, *, partly: bool = False
) -> ModelProto:
    """Replace function calls by the bodies of the functions; the model itself if there is nothing to inline.

    onnx's inliner serialises the model, so it runs on a copy without the weights. The copy declares them as inputs, so
    that the inliner knows their types and avoids their names.

    Args:
        model: the model; it is not changed.
        ops: (domain, op type) of ops to replace by the function bodies of their schemas, at the model's opset; None for
            the model's own functions.
        partly: return a model that still calls functions that cannot be inlined, instead of failing.

    Raises:
        ModelError: a function calls itself, calls grow beyond measure, or a function cannot be inlined.
    """
    if ops is None and not model.functions:
        return model
    check_functions(model)
    shell = copy_without(model, "initializer")
    listed = {entry.name for entry in model.graph.input}
    weights = (tensor for tensor in model.graph.initializer if tensor.name not in listed)
    shell.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, tuple(t.dims)) for t in weights
    )
    for node in shell.graph.node:
        if ops is not None and (node.domain, node.op_type) in ops:
            _fill_defaults(node, opset_imports(model).get(node.domain, 1))
    try:
        if ops is None:
            result = onnx.inliner.inline_local_functions(shell, convert_version=True)
        else:
            result = onnx.inliner.inline_selected_functions(
                shell, sorted(ops), inline_schema_functions=True
            )
    except (onnx.checker.ValidationError, RuntimeError) as error:
        raise ModelError(
            f"The functions of {model.graph.name!r} cannot be inlined: {error}"
        ) from error
    if ops is None and result.functions and not partly:
        function = result.functions[0]
        raise ModelError(
            f"The model-local function {function.domain}::{function.name} cannot be inlined, so its rounding cannot be"
            " emulated: inline it in the model first."
        )
    del result.graph.input[:]
    result.graph.input.extend(model.graph.input)
    result.graph.initializer.extend(model.graph.initializer)
    return result


def _fill_defaults(node: NodeProto, version: int) -> None:
    """Write the schema's default attributes into a node, because the inliner drops some of them."""
    given = {item.name for item in node.attribute}
    for name, item in onnx.defs.get_schema(node.op_type, version, node.domain).attributes.items():
        if name not in given and item.default_value.type:
            node.attribute.append(item.default_value)
