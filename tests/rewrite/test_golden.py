"""Golden cases: a small model, and what it becomes, one behavior each.

A file of ``golden/`` holds a comment that names the behavior, one line of options (JSON), the model in ONNX's text
syntax, a line ``----``, and the converted model in the notation of :func:`notation`, with the type of every value.
``ONNXAMP_REGENERATE=1`` rewrites the second half; read the difference before it is committed.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from judge_kernels import complete, declared_types, subgraphs, tensor_of, type_name
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper, parser

import onnxamp

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))
SEPARATOR = "----\n"
SHOWN = 8
"""Elements up to which a constant's values are shown."""


def notation(model: ModelProto) -> str:
    """The model as one line per input, weight, node and output: ``name: type = Op(inputs) attribute=value``."""
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    lines = [f"{entry.key} = {entry.value}" for entry in model.metadata_props]
    lines += [f"doc = {model.doc_string}"] if model.doc_string else []
    lines += graph_lines(model, model.graph, typed.graph, {})
    for function in model.functions:
        lines.append(f"function {function.name}({', '.join(function.input)}) -> {', '.join(function.output)}")
        lines += [f"  {line}" for node in function.node for line in node_lines(model, node, node, {})]
    return "".join(f"{line}\n" for line in lines)


def graph_lines(model: ModelProto, graph: GraphProto, typed: GraphProto, outer: dict[str, str]) -> Iterator[str]:
    """``typed`` is the same graph after onnx's inference, from which the types come."""
    types = outer | declared_types(typed)
    while sum(complete(model, node, types) for node in graph.node):
        pass  # completes what onnx does not infer, as ops of other domains
    yield from (f"input {entry.name}: {declared(entry)}" for entry in graph.input)
    yield from (f"weight {tensor.name}: {content(tensor)}" for tensor in graph.initializer)
    for node, same in zip(graph.node, typed.node, strict=True):
        yield from node_lines(model, node, same, types)
    yield from (f"declared {entry.name}: {declared(entry)}" for entry in graph.value_info)
    yield from (f"output {entry.name}: {declared(entry)}" for entry in graph.output)


def node_lines(model: ModelProto, node: NodeProto, same: NodeProto, types: dict[str, str]) -> Iterator[str]:
    outputs = ", ".join(f"{name}: {short(types[name])}" if name in types else name or "_" for name in node.output)
    inputs = ", ".join(name or "_" for name in node.input)
    generated = f"{node.output[0]}/{node.op_type}"
    name = f"[{node.name}] " if node.name not in ("", generated) else ""
    op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    plain = "".join(f" {shown}" for item in node.attribute if (shown := attribute(item)))
    yield f"{name}{outputs} = {op}({inputs}){plain}"
    bodies = [item.name for item in node.attribute if item.type == AttributeProto.GRAPH]
    for label, body, inferred in zip(bodies, subgraphs(node), subgraphs(same), strict=True):
        yield f"  {label}:"
        yield from (f"    {line}" for line in graph_lines(model, body, inferred, types))


def attribute(item: AttributeProto) -> str:
    """``name=value``; bodies are shown below their node."""
    value = onnx.helper.get_attribute_value(item)
    match item.type:
        case AttributeProto.GRAPH:
            return ""
        case AttributeProto.TENSOR:
            return f"{item.name}={content(value)}"
        case AttributeProto.STRING:
            return f"{item.name}={value.decode()}"
        case AttributeProto.FLOAT | AttributeProto.FLOATS:
            return f"{item.name}={numbers(np.asarray(value, np.float32))}"
    if item.name in ("to", "dtype"):
        return f"{item.name}={short(tensor_of(value))}"
    return f"{item.name}={value}"


def content(tensor: TensorProto) -> str:
    return f"{short(tensor_of(tensor.data_type))}{list(tensor.dims)} = {numbers(numpy_helper.to_array(tensor))}"


def numbers(array: np.ndarray) -> str:
    """All elements of a small array; those of a large one are not the point of a golden case."""
    if array.size > SHOWN:
        return "..."
    flat = array.reshape(-1)
    shown = flat.astype(np.float64) if array.dtype.name in ("float16", "bfloat16") else flat
    return " ".join(f"{x:.6g}" if shown.dtype.kind == "f" else str(x) for x in shown)


def declared(entry: ValueInfoProto) -> str:
    name = short(type_name(entry.type))
    if not entry.type.tensor_type.HasField("shape"):
        return name
    dims = (str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?"
            for dim in entry.type.tensor_type.shape.dim)  # fmt: skip
    return f"{name}[{', '.join(dims)}]"


def short(type_: str) -> str:
    """``tensor(float16)`` as ``float16``, in sequences, too."""
    for name in ("float16", "bfloat16", "float", "double", "int64", "int32", "int8", "uint8", "bool"):
        type_ = type_.replace(f"tensor({name})", name)
    return type_


def read(path: Path) -> tuple[str, dict[str, Any], ModelProto, str]:
    """The whole first half, the options, the model, and what it shall become."""
    before, _, after = path.read_text(encoding="utf-8").partition(SEPARATOR)
    comment, options, text = before.split("\n", 2)
    assert comment.startswith("# "), "the first line names the behavior"
    return before, json.loads(options), parser.parse_model(text), after


def converted(model: ModelProto, options: dict[str, Any]) -> ModelProto:
    if "rule" in options:  # JSON holds no functions: a mapping from node name to opinion
        opinions = options["rule"]
        options = {**options, "rule": lambda node: opinions.get(node.name)}
    return onnxamp.convert_model(model, **options)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    before, options, model, after = read(path)
    result = converted(model, options)
    found = notation(result)
    if os.environ.get("ONNXAMP_REGENERATE") == "1":
        path.write_text(before + SEPARATOR + found, encoding="utf-8")
        after = found
    assert found == after
    onnx.checker.check_model(result, full_check=True)


def test_there_are_golden_cases() -> None:
    assert len(FILES) >= 35


@pytest.mark.mostly_slow(fast=64)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_converting_again_changes_nothing(path: Path) -> None:
    _, options, model, _ = read(path)
    once = converted(model, options)
    assert notation(converted(once, {**options, "opset": "keep"})) == notation(once)


def test_each_behavior_is_shown_once() -> None:
    comments = [path.read_text(encoding="utf-8").split("\n", 1)[0] for path in FILES]
    assert len(set(comments)) == len(comments)


def test_notation_shows_what_matters() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17], metadata_props: ["k" : "v"]>
    g (float[N] X) => (float[N] Y) <float[2] w = {1, 2.5}> { [first] Y = Add (X, w) }"""
    lines = [
        "k = v",
        "input X: float[N]",
        "weight w: float[2] = 1 2.5",
        "[first] Y: float = Add(X, w)",
        "output Y: float[N]",
    ]
    assert notation(parser.parse_model(text)).splitlines() == lines
