"""Conversions of the minimal graphs, each made once in a process, and what the result is asked."""

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np
from graphs import CASES, Case
from graphs.case import parse
from judge_kernels import Typed, subgraphs, typed_nodes
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

import onnxamp
from onnxamp._model.model import Model

LEVELS = ("O1", "O2", "O3")
DTYPES = ("float16", "bfloat16")
ELEMS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
LOWS = {"float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}
LOW = LOWS["float16"]
SINGLE = "tensor(float)"


def converted(name: str, level: str = "O2", **options: Any) -> ModelProto:
    """The minimal graph of that name, converted; for reading only, as all tests get the same."""
    return _converted(name, level, tuple(sorted(options.items())))


@cache
def _converted(name: str, level: str, options: tuple[tuple[str, Any], ...]) -> ModelProto:
    original = source(name)
    before = original.proto.SerializeToString()
    result = onnxamp.convert_model(original, level, **{**CASES[name].options, **dict(options)})
    assert before == original.proto.SerializeToString(), "the conversion changed the original"
    return result


@lru_cache(maxsize=32)
def source(name: str) -> Model:
    """The minimal graph of that name, read and checked once: its conversions share what does not depend on options."""
    return Model.of(CASES[name].build())


def again(result: ModelProto, name: str, level: str, **options: Any) -> ModelProto:
    """The conversion of a result, with the options that it came from."""
    return onnxamp.convert_model(_read(result.SerializeToString()), level, **{**CASES[name].options, **options})


@lru_cache(maxsize=32)
def _read(serialized: bytes) -> Model:
    return Model.of(ModelProto.FromString(serialized))


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def count(model: ModelProto, op_type: str = "Cast") -> int:
    return sum(node.op_type == op_type for node in all_nodes(model.graph))


def typed(model: ModelProto, *op_types: str) -> list[Typed]:
    return [one for one in typed_nodes(model) if one.node.op_type in op_types]


def tensors(model: ModelProto, elem: int) -> dict[str, np.ndarray]:
    """All initializers and tensors of Constant nodes with element type ``elem``."""
    found = {}
    for tensor in model.graph.initializer:
        found[tensor.name] = tensor
    for node in all_nodes(model.graph):
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                found[node.output[0]] = attribute.t
    return {name: numpy_helper.to_array(t) for name, t in found.items() if t.data_type == elem}


def opset(model: ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if not entry.domain)


def naive(case: Case) -> ModelProto:
    """What a converter without any judgement makes: everything low."""
    model = case.build()
    nodes = [*model.graph.node]
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            with np.errstate(over="ignore"):
                low = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(low, tensor.name))
    for node in nodes:
        node.input[:] = [f"{n}_low" if n in {i.name for i in model.graph.input} else n for n in node.input]
        node.output[:] = [f"{n}_low" if n in {o.name for o in model.graph.output} else n for n in node.output]
    text = parse("(float X) => (float Y) { a = Cast <to = 10> (X) Y = Cast <to = 1> (a) }")
    down, up = text.graph.node
    for info in model.graph.input:
        down.input[:], down.output[:] = [info.name], [f"{info.name}_low"]
        model.graph.node.insert(0, down)
    for info in model.graph.output:
        up.input[:], up.output[:] = [f"{info.name}_low"], [info.name]
        model.graph.node.append(up)
    return model
