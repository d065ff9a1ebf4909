"""The precision of a step: its forward pass has the types that conversion gives, and its gradients stay right."""

import warnings
from random import Random

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from strategies.networks import random_network
from train_nets import Array, feeds, make, network

from onnxamp._graph.graph import Graph
from onnxamp._graph.types import infer_types
from onnxamp.amp import auto_cast, auto_mixed_precision
from onnxamp.train import SGD, FixedLossScaleManager, TrainNetwork, build_train_network

COMPARED = {"Max", "Min"}
"""Ops that training keeps in float32 in bfloat16, because CUDA cannot compare bfloat16 numbers."""


def types_of(model: ModelProto, names: list[str]) -> dict[str, str]:
    """The types of values; of an output of the model that is cast, that before the Cast."""
    graph = Graph.of(model)
    types = infer_types(graph)
    found = {}
    for name in names:
        value = graph.scopes[0].names[name]
        producer = graph.producer(value)
        if graph.results[value] and producer is not None and producer.key == "Cast":
            value = producer.inputs[0]
        found[name] = types[value]
    return found


def compared(model: ModelProto, level: str, dtype: str, loss: str = "mean-squared-error") -> TrainNetwork:
    """A step at a level, whose forward pass is compared with the converted model."""
    with warnings.catch_warnings(action="ignore"):  # about the nodes that stay in float32
        converted = auto_mixed_precision(model, level, dtype)
        net = built(model, loss, level, dtype)
    names = [name for node in model.graph.node for name in node.output]
    assert types_of(net.model, names) == types_of(converted, names), (level, dtype)
    return net


def built(model: ModelProto, loss: str, level: str, dtype: str) -> TrainNetwork:
    return build_train_network(model, SGD(), loss, level, dtype=dtype, loss_scale_manager=FixedLossScaleManager(64))


WAYS = [(level, dtype) for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")]


@pytest.mark.mostly_slow(fast=6)
@pytest.mark.parametrize("seed", range(72))
def test_forward_passes_of_random_networks_have_the_types_of_conversion(seed: int) -> None:
    model = random_network(Random(seed), 2 + seed // 6 % 5)
    onnx.checker.check_model(model, full_check=True)
    level, dtype = WAYS[seed % 6]
    compares = not COMPARED.isdisjoint(node.op_type for node in model.graph.node)
    if dtype == "float16" or not compares:
        compared(model, level, dtype)


NEAR = (("O1", "float16", 0.05), ("O2", "float16", 0.05), ("O2", "bfloat16", 0.3))
"""How near the loss is; the norm of the gradients is half as near."""


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("seed", range(100, 124))
def test_steps_of_random_networks_stay_near_float32(seed: int) -> None:
    model = random_network(Random(seed), 5)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim[1:]]
    rng = np.random.default_rng(seed)
    batch = {"x": rng.standard_normal((4, *shape)), "label": rng.standard_normal((4, 3))}
    exact = built(model, "mean-squared-error", "O0", "float16").step(batch)
    level, dtype, bound = NEAR[seed % 3]
    with warnings.catch_warnings(action="ignore"):
        result = built(model, "mean-squared-error", level, dtype).step(batch)
    assert result.loss == pytest.approx(exact.loss, rel=bound, abs=bound / 20)
    assert result.grad_norm == pytest.approx(exact.grad_norm, rel=2 * bound, abs=bound / 10)


def token_net(middle: list[onnx.NodeProto], weights: dict[str, Array], last: str) -> ModelProto:
    """Six features, a Dense, some nodes from "c", [N, 6], to ``last``, and a MatMul."""
    rng = np.random.default_rng(0)
    dense = {"w": rng.standard_normal((6, 6)), "b": rng.standard_normal(6), "v": rng.standard_normal((6, 3))}
    nodes = [make("MatMul", "x w", "a"), make("Add", "a b", "c"), *middle, make("MatMul", f"{last} v", "y")]
    return network(nodes, dense | weights, ["N", 6], ["N", 3])


def low_values(net: TrainNetwork, names: str) -> str:
    """Those of the named values that are low."""
    types = types_of(net.model, names.split())
    return " ".join(name for name, kind in types.items() if kind != "tensor(float)")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o2_keeps_no_more_than_the_black_list(dtype: str) -> None:
    """Softmax and residual Adds are low, as MindSpore's O2 casts the whole network."""
    middle = [make("Softmax", "c", "p"), make("Add", "p c", "r")]
    net = compared(token_net(middle, {}, "r"), "O2", dtype, "cross-entropy")
    assert low_values(net, "a c p r y") == "a c p r y"
    assert np.isfinite(net.step(feeds()).grad_norm)


def test_a_dense_layer_has_its_bias_in_low_precision_at_o1() -> None:
    net = compared(token_net([make("Sigmoid", "c", "s")], {}, "s"), "O1", "float16", "cross-entropy")
    assert low_values(net, "a c s y") == "a c y"


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_gates_of_a_recurrent_cell_are_low_at_o1(op: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op] * 4
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((1, gates, 6)), "r": rng.standard_normal((1, gates, 4))}
    nodes = [make(op, "x w r", "h", hidden_size=4), make("ReduceMean", "h", "y", keepdims=0)]
    model = network(nodes, weights, [5, 2, 6], [])
    net = compared(model, "O1", "float16", "mean-squared-error")
    parts = [node for node in net.model.graph.node if node.name.startswith("h.node/")]
    graph = Graph.of(net.model)
    types = infer_types(graph)
    names = graph.scopes[0].names
    made = {node.op_type: types[names[node.output[0]]] for node in parts if "/gradient" not in node.name}
    assert made["Tanh"] == made["MatMul"] == "tensor(float16)"


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin", "Max", "Min"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_extremes_find_them_though_they_are_rounded(op: str, dtype: str) -> None:
    """A float32 weight that is compared with its rounded extreme would equal it nowhere, and 0 / 0 is NaN."""
    rng = np.random.default_rng(0)
    weights = {"s": rng.standard_normal((7, 6)), "t": rng.standard_normal((7, 6)), "at": np.array(0)}
    middle = [make("Max" if op == "Max" else "Min", "s t", "e")]
    if op.startswith("Reduce"):
        middle = [onnx.helper.make_node("Constant", [], ["first"], value_ints=[0]), make(op, "s first", "e")]
    else:
        middle.append(onnx.helper.make_node("Constant", [], ["first"], value_ints=[0]))
    middle += [make("ReduceMean", "e first", "m"), make("Add", "c m", "d")]
    model = token_net(middle, {name: weights[name] for name in ("s", "t")[: 1 if "R" in op else 2]}, "d")
    exact = built(model, "cross-entropy", "O0", dtype).gradients(feeds())
    net = built(model, "cross-entropy", "O3", dtype)
    step = net.gradients(feeds())
    assert np.abs(exact.gradients["s"]).max() > 0
    np.testing.assert_allclose(step.gradients["s"] / 64, exact.gradients["s"] / 64, rtol=0.1, atol=1e-2)


def test_gradients_of_float32_ops_are_float32() -> None:
    """Those of low ops are decided anew: sums over a batch stay in float32."""
    net = compared(token_net([make("Sigmoid", "c", "s")], {}, "s"), "O1", "float16", "cross-entropy")
    graph = Graph.of(net.model)
    types = infer_types(graph)
    made = {node.label: types[node.outputs[0]] for node in graph.nodes if node.outputs and node.key != "Cast"}
    assert {kind for name, kind in made.items() if name.startswith("s.node/gradient/")} == {"tensor(float)"}
    assert made["c.node/gradient/ReduceSum/node"] == "tensor(float)"
    assert made["y.node/gradient/Gemm/node"] == "tensor(float16)"


def test_within_auto_cast_the_forward_pass_is_that_of_a_session() -> None:
    middle = [make("Sigmoid", "a", "s"), make("Softmax", "s", "p"), make("Add", "p c", "q")]
    for level, wanted in (("OD", "a y"), ("O1", "a s y"), ("O2", "a c s q y")):
        with auto_cast(level=level):
            net = build_train_network(token_net(middle, {}, "q"), SGD(), "cross-entropy")
        assert low_values(net, "a c s p q y") == wanted, level
