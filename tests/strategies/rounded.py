"""Low precision without a converter: a model of which some float32 values, or all, are rounded."""

from random import Random

import onnx
from judge_kernels import declared_types, subgraphs
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

ELEMS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def rounded(model: ModelProto, dtype: str, rng: Random | None = None) -> ModelProto:
    """The model with a pair of Casts behind its float32 inputs, constants and results, or behind some of them.

    What a node reads of a value is rounded or not; the value itself stays as it is under its own name.
    """
    complete = ModelProto.FromString(model.SerializeToString())
    if not any(not entry.domain for entry in model.opset_import):
        implied = max(row[2] for row in helper.VERSION_TABLE if row[1] <= model.ir_version)
        complete.opset_import.append(helper.make_opsetid("", implied))
    result = onnx.shape_inference.infer_shapes(complete)
    stack = [(result.graph, dict[str, str](), dict[str, str](), "rounded")]
    while stack:
        graph, outer, held, path = stack.pop()
        types = {**outer, **declared_types(graph)}
        renamed = {name: new for name, new in held.items() if name not in _own(graph)}
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
        del graph.node[:]
        for name in _given(graph):
            if types.get(name) == "tensor(float)":
                graph.node.extend(_pair(name, f"{path}/{name}", ELEMS[dtype]))
                renamed[name] = f"{path}/{name}"
        for index, node in enumerate(nodes):
            for port, name in enumerate(node.input):
                if rng is None or rng.random() < 0.5:
                    node.input[port] = renamed.get(name, name)
            graph.node.append(node)
            bodies = enumerate(subgraphs(graph.node[-1]))
            stack += [(body, types, dict(renamed), f"{path}/{index}/{k}") for k, body in bodies]
            for name in node.output:
                if name and types.get(name) == "tensor(float)":
                    graph.node.extend(_pair(name, f"{path}/{name}", ELEMS[dtype]))
                    renamed[name] = f"{path}/{name}"
    return result


def _given(graph: GraphProto) -> list[str]:
    return list(dict.fromkeys([*(info.name for info in graph.input), *(tensor.name for tensor in graph.initializer)]))


def _own(graph: GraphProto) -> set[str]:
    return {*_given(graph), *(name for node in graph.node for name in node.output)}


def _pair(source: str, target: str, elem: int) -> list[NodeProto]:
    low = helper.make_node("Cast", [source], [f"{target}/low"], to=elem)
    return [low, helper.make_node("Cast", [f"{target}/low"], [target], to=TensorProto.FLOAT)]
