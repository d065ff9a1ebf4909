"""The model of the tests of rows, and what became of it."""

from typing import Any

import numpy as np
import onnx
from click.testing import CliRunner, Result
from graphs.case import parse
from onnx import ModelProto, TensorProto

import onnxamp
from onnxamp._cli.command import group

TEXT = """(float[N,2] X) => (float[N,2] Y, float[N,2] top) <float[2,2] w = {1, 2, 3, 20000}, float[2,2] v = {0.5, 0.00000003, 0, 1}> {
    [first] a = MatMul (X, w) [soft] c = Softmax (a) [plus] d = Add (c, c) [last] Y = MatMul (d, v) [ends] top = Max (Y, d) }"""  # noqa: E501
FEEDS = {"X": np.array([[0.5, -1], [0.25, 2]], np.float32)}


def model(opset: int = 17) -> ModelProto:
    return parse(TEXT, opset=opset)


def low(converted: ModelProto) -> set[str]:
    """Op types with a low-precision output, Casts apart."""
    stats = onnxamp.debugging.collect_operator_stats(converted)
    return {op for (op, kind), count in stats.calls.items() if count and kind in ("float16", "bfloat16")} - {"Cast"}


def low_nodes(converted: ModelProto) -> set[str]:
    """Nodes that read or write float16."""
    types = {item.name: item.data_type for item in converted.graph.initializer}
    halves = {name for name, kind in types.items() if kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16)}
    return {node.name for node in converted.graph.node if halves.intersection(node.input)}


def io_types(converted: ModelProto) -> dict[str, int]:
    entries = (*converted.graph.input, *converted.graph.output)
    return {entry.name: entry.type.tensor_type.elem_type for entry in entries}


def weights(converted: ModelProto) -> dict[str, Any]:
    return {item.name: onnx.numpy_helper.to_array(item) for item in converted.graph.initializer}


def command(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(group, list(map(str, arguments)))
