"""How far rounding may move a model's outputs: the model itself, with noise of that size on every float32 value."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from judge_kernels import declared_types, subgraphs
from judge_numbers import session
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance of neighbors, relative to the number."""
LARGEST = {"float16": 6e4, "bfloat16": 1e38}
FLOOR = 2.0**-14
"""Smallest normal float16: the errors of smaller numbers are no smaller than its."""
AMPLITUDE = 4
"""How much larger the noise is than what one rounding can do."""
MARGIN = 4
"""How much larger than the noise's effect an error may be; both are random."""
RUNS = 6


def noisy(model: ModelProto, unit: float) -> ModelProto:
    """The model with ``v + unit * (v + FLOOR) * r`` for every float32 output ``v`` of a node, r from [-1, 1].

    It has an input more, ``noise/phase``, with which all the r change.
    """
    result = onnx.shape_inference.infer_shapes(model)
    numbers = {"noise/unit": unit, "noise/floor": FLOOR, "noise/many": 7919.0}
    result.graph.initializer.extend(numpy_helper.from_array(np.float32(x), name) for name, x in numbers.items())
    result.graph.input.append(helper.make_tensor_value_info("noise/phase", TensorProto.FLOAT, []))
    stack: list[tuple[GraphProto, Mapping[str, str], str]] = [(result.graph, {}, "noise")]
    while stack:
        graph, outer, path = stack.pop()
        types = {**outer, **declared_types(graph)}
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
        del graph.node[:]
        for index, node in enumerate(nodes):
            behind = []
            for port, name in enumerate(node.output):
                if name and types.get(name) == "tensor(float)" and node.op_type != "Constant":
                    node.output[port] = f"{path}/{index}/{port}"
                    behind += _noise(node.output[port], name)
            graph.node.extend([node, *behind])
        stack += [
            (body, types, f"{path}/{index}/{k}")
            for index, node in enumerate(graph.node)
            for k, body in enumerate(subgraphs(node))
        ]
    return result


def _noise(raw: str, name: str) -> Iterator[NodeProto]:
    """Noise that follows from the value and the phase: ONNX Runtime draws no random numbers at every opset."""
    yield helper.make_node("Mul", [raw, "noise/many"], [f"{raw}/t"])
    yield helper.make_node("Add", [f"{raw}/t", "noise/phase"], [f"{raw}/p"])
    yield helper.make_node("Sin", [f"{raw}/p"], [f"{raw}/r"])
    yield helper.make_node("Add", [raw, "noise/floor"], [f"{raw}/a"])
    yield helper.make_node("Mul", [f"{raw}/a", f"{raw}/r"], [f"{raw}/m"])
    yield helper.make_node("Mul", [f"{raw}/m", "noise/unit"], [f"{raw}/e"])
    yield helper.make_node("Add", [raw, f"{raw}/e"], [name])


def noise_outputs(model: ModelProto, feeds: Mapping[str, Any], dtype: str) -> list[list[Any]]:
    """The outputs under noise of several times the rounding of the low type, once per run."""
    run = session(noisy(model, AMPLITUDE * UNITS[dtype]))
    return [run.run(None, {**feeds, "noise/phase": np.array(k, np.float32)}) for k in range(RUNS)]


def beyond_noise(want: np.ndarray, have: np.ndarray, moved: list[np.ndarray]) -> str | None:
    """What is wrong with ``have`` beside ``want``, which noise turns into ``moved``; None where nothing is."""
    if want.dtype.kind != "f" or not want.size:
        return None
    allowed = MARGIN * max(float(np.linalg.norm(other - want)) for other in moved) + 1e-6 * float(np.linalg.norm(want))
    error = float(np.linalg.norm(have - want))
    return (
        None if error <= allowed or np.isnan(allowed) else f"is off by {error:.3g}, and rounding explains {allowed:.3g}"
    )


def peak(model: ModelProto, feeds: Mapping[str, Any]) -> float:
    """The largest magnitude of a float32 value of the main graph; infinite where one is not finite."""
    watched = onnx.shape_inference.infer_shapes(model)
    types = declared_types(watched.graph)
    returned = {info.name for info in watched.graph.output}
    made = [name for node in watched.graph.node for name in node.output if types.get(name) == "tensor(float)"]
    watched.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in made if name not in returned)
    values = session(watched).run(None, dict(feeds))
    floats = [np.abs(value) for value in values if isinstance(value, np.ndarray) and value.dtype == np.float32]
    return max((float(value.max(initial=0)) if np.isfinite(value).all() else np.inf for value in floats), default=0.0)
