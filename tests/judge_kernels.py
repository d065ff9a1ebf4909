"""Types of all values, and whether the CUDA provider has a kernel for them.

Written apart from onnxamp's own type inference and kernel table, and from the raw dump of the registries, so
that a mistake there cannot hide itself here.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

import onnx
import onnx.inliner
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto
from repository import ROOT

KERNELS = ROOT.parent / "shared" / "kernels" / "cuda.json"
LOW = ("float16", "bfloat16")
Answer = TypeVar("Answer")
NAMES = {number: name.lower() for name, number in TensorProto.DataType.items()}


class Typed(NamedTuple):
    """A node and the types of its values; an empty string where a value is absent or its type unknown."""

    node: NodeProto
    scope: str
    inputs: list[str]
    outputs: list[str]


def tensor_of(elem: int) -> str:
    return f"tensor({NAMES[elem]})" if elem else ""


def type_name(proto: TypeProto) -> str:
    match proto.WhichOneof("value"):
        case "tensor_type":
            return tensor_of(proto.tensor_type.elem_type)
        case "sparse_tensor_type":
            return f"sparse_{tensor_of(proto.sparse_tensor_type.elem_type)}"
        case "sequence_type":
            return f"seq({type_name(proto.sequence_type.elem_type)})"
        case "optional_type":
            return f"optional({type_name(proto.optional_type.elem_type)})"
    return ""


def is_low(type_: str) -> bool:
    return any(f"({name})" in type_ for name in LOW)


@cache
def runtime_schemas() -> Mapping[tuple[str, str], list[Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for schema in ort_state.get_all_operator_schema():
        found.setdefault((schema.domain, schema.name), []).append(schema)
    return found


@cache
def schema_of(domain: str, op_type: str, opset: int) -> Any:
    """Schema of an op at an opset: onnx's, or else ONNX Runtime's, or None."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        rows = [row for row in runtime_schemas().get((domain, op_type), ()) if row.since_version <= opset]
        return max(rows, key=lambda row: row.since_version, default=None)


def schema_for(model: ModelProto, node: NodeProto) -> Any:
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    return schema_of(node.domain, node.op_type, opsets.get(node.domain, 1))


def formals(ports: Any, count: int) -> Iterator[tuple[str, str]]:
    """Name and type of the formal behind each of ``count`` actual values; a variadic one repeats."""
    for index in range(count):
        port = ports[min(index, len(ports) - 1)] if ports else None
        if port is not None:
            yield port.name, getattr(port, "type_str", None) or port.typeStr


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def by_content(function: Callable[[ModelProto], Answer]) -> Callable[[ModelProto], Answer]:
    """Ask once of models that are equal: an original is held against a dozen conversions."""

    @lru_cache(maxsize=64)
    def answer(serialized: bytes) -> Answer:
        return function(ModelProto.FromString(serialized))

    return wraps(function)(lambda model: answer(model.SerializeToString()))


@by_content
def typed_nodes(model: ModelProto) -> list[Typed]:
    """Every node in every scope with its types, from onnx's inference completed through the schemas."""
    with suppress(Exception):  # the judge reports errors in a check of its own
        model = onnx.shape_inference.infer_shapes(model)
    found: list[Typed] = []
    stack: list[tuple[GraphProto, dict[str, str], str]] = [(model.graph, {}, "")]
    while stack:
        scope, outer, path = stack.pop()
        types = outer | declared_types(scope)
        # The nodes may be in any order: repeat until nothing new is known.
        while sum(complete(model, node, types) for node in scope.node):
            pass
        for index, node in enumerate(scope.node):
            ins, outs = ([types.get(name, "") for name in names] for names in (node.input, node.output))
            found.append(Typed(node, path, ins, outs))
            stack += [(body, types, f"{path}/{index}") for body in subgraphs(node)]
    return found


def declared_types(scope: GraphProto) -> dict[str, str]:
    types = {tensor.name: tensor_of(tensor.data_type) for tensor in scope.initializer}
    types |= {s.values.name: f"sparse_{tensor_of(s.values.data_type)}" for s in scope.sparse_initializer}
    # Inputs and outputs last: value_info may be stale.
    for info in (*scope.value_info, *scope.output, *scope.input):
        if type_name(info.type):
            types[info.name] = type_name(info.type)
    return types


def complete(model: ModelProto, node: NodeProto, types: dict[str, str]) -> int:
    """Add the types of the node's outputs that follow from its schema; return how many were new."""
    schema = schema_for(model, node)
    if schema is None:
        return 0
    bound = {
        formal: types[name]
        for name, (_, formal) in zip(node.input, formals(schema.inputs, len(node.input)), strict=False)
        if types.get(name)
    }
    new = {}
    for name, (_, formal) in zip(node.output, formals(schema.outputs, len(node.output)), strict=False):
        type_ = formal if formal.endswith(")") else bound.get(formal, "")
        if node.op_type == "Cast":
            type_ = next(tensor_of(attribute.i) for attribute in node.attribute if attribute.name == "to")
        if name and type_ and name not in types:
            new[name] = type_
    types |= new
    return len(new)


@cache
def kernel_rows() -> Mapping[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads(KERNELS.read_text(encoding="utf-8"))["kernels"]:
        found.setdefault((row["domain"], row["op"]), []).append(row)
    return found


def has_kernel(domain: str, op_type: str, since: int, bound: Mapping[str, Iterable[str]]) -> bool:
    """Whether one kernel takes all the types; ``bound`` holds them by parameter and by formal name."""
    for row in kernel_rows().get((domain, op_type), ()):
        until = row["until"]
        applies = row["since"] == since or (until is not None and row["since"] <= since <= until)
        if applies and all(set(bound.get(key, ())) <= set(allowed) for key, allowed in row["types"].items()):
            return True
    return False


@by_content
def missing_kernels(model: ModelProto) -> dict[str, str]:
    """Low-precision nodes that CUDA cannot run though it runs them in float32: op and types -> where.

    Where an op has no kernel for its types, ONNX Runtime runs its function body, if the schema has one: then
    its nodes must have kernels.
    """
    missing = nodes_without_kernel(model)
    functions = {
        (typed.node.domain, typed.node.op_type)
        for typed in typed_nodes(model)
        if any(what.startswith(f"{typed.node.op_type}-") for what in missing)
        and has_body(schema_for(model, typed.node))
    }
    if not functions:
        return missing
    try:
        inlined = onnx.inliner.inline_selected_functions(told(model), sorted(functions), False, True)
    except RuntimeError:  # it wants a type even for an input that is left out
        return missing
    return nodes_without_kernel(inlined)


def told(model: ModelProto) -> ModelProto:
    """The model with all types written down: the inliner knows neither initializers nor what ORT alone knows."""
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    known = {info.name for info in (*graph.input, *graph.output, *graph.value_info)}
    found = declared_types(graph)
    for typed in typed_nodes(model):
        if not typed.scope:
            found |= dict(zip(typed.node.output, typed.outputs, strict=True))
    for name, type_ in found.items():
        if name and name not in known and type_.startswith("tensor("):
            elem = next(number for number in NAMES if tensor_of(number) == type_)
            graph.value_info.append(onnx.helper.make_tensor_value_info(name, elem, None))
    return result


def has_body(schema: Any) -> bool:
    """Schemas that ONNX Runtime alone has do not tell."""
    return isinstance(schema, onnx.defs.OpSchema) and (schema.has_function or schema.has_context_dependent_function)


def nodes_without_kernel(model: ModelProto) -> dict[str, str]:
    """As above, by kernels alone. An op that has none in float32 either goes to the CPU with any types."""
    missing = {}
    for typed in typed_nodes(model):
        node, schema = typed.node, schema_for(model, typed.node)
        if schema is None or not any(map(is_low, typed.inputs + typed.outputs)):
            continue
        bound: dict[str, set[str]] = {}
        pairs = (
            *zip(formals(schema.inputs, len(typed.inputs)), typed.inputs, strict=False),
            *zip(formals(schema.outputs, len(typed.outputs)), typed.outputs, strict=False),
        )
        for keys, type_ in pairs:
            for key in keys:
                bound.setdefault(key, set()).update({type_} - {""})
        single = {key: {in_float32(type_) for type_ in types} for key, types in bound.items()}
        key = (node.domain, node.op_type, schema.since_version)
        if has_kernel(*key, single) and not has_kernel(*key, bound):
            shown = ", ".join(f"{name}={sorted(types)}" for name, types in sorted(bound.items()) if types)
            missing[f"{node.op_type}-{schema.since_version}: {shown}"] = ", ".join(node.output)
    return missing


def in_float32(type_: str) -> str:
    for name in LOW:
        type_ = type_.replace(f"({name})", "(float)")
    return type_
