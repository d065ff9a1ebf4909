"""``decorate``: low weights for models, float32 masters for training."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto
from train_nets import conv_net, feeds, make, mlp, network

import onnxamp
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.sessions.session import make_session, run
from onnxamp.train import SGD, Decorated, FixedLossScaleManager, Momentum, build_train_network, decorate

IMAGES = feeds(6, (1, 8, 8), 10)


def kinds(model: ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def weight_kind(model: ModelProto, node: str) -> int:
    """Element type of the weight that a node takes."""
    held = kinds(model)
    return next(held[name] for found in model.graph.node if found.name == node for name in found.input if name in held)


def test_o1_gives_back_what_it_was_given(tmp_path: Path) -> None:
    model, optimizer = mlp(), SGD()
    assert decorate(model) is model
    assert decorate(tmp_path / "net.onnx") == tmp_path / "net.onnx"
    assert decorate([model], optimizer, master_weight=False) == ([model], optimizer)


@pytest.mark.parametrize(("dtype", "elem"), [("float16", TensorProto.FLOAT16), ("bfloat16", TensorProto.BFLOAT16)])
def test_o2_lowers_weights_but_those_of_normalizations(dtype: str, elem: int) -> None:
    model = at_opset_22(conv_net())
    before = model.SerializeToString()
    found = decorate(model, level="O2", dtype=dtype)
    assert model.SerializeToString() == before
    assert weight_kind(found.model, "c0.node") == weight_kind(found.model, "c1.node") == elem
    held = kinds(found.model)
    assert all(held[f"n{i}.{name}"] == TensorProto.FLOAT for i in (0, 1) for name in "sbmv")
    assert [(e.name, e.type) for e in found.model.graph.input] == [(e.name, e.type) for e in model.graph.input]
    assert [(e.name, e.type) for e in found.model.graph.output] == [(e.name, e.type) for e in model.graph.output]
    exact = run(make_session(model), {"x": IMAGES["x"]})["y"]
    low = run(make_session(emulate(found.model)), {"x": IMAGES["x"]})["y"]
    assert 0 < np.abs(low - exact).max() < 0.05 * np.abs(exact).max()


def at_opset_22(model: ModelProto) -> ModelProto:
    """bfloat16 Conv has kernels from there on."""
    return onnx.version_converter.convert_version(model, 22)


@pytest.mark.parametrize("excluded", ["c1.node", ["c1.*"], ["nothing|c1", "Gemm"]])
def test_what_is_excluded_stays_float32(excluded: Any) -> None:
    found = decorate(conv_net(), level="O2", excluded_layers=excluded)
    assert weight_kind(found.model, "c0.node") == TensorProto.FLOAT16
    assert weight_kind(found.model, "c1.node") == TensorProto.FLOAT
    assert (weight_kind(found.model, "y.node") == TensorProto.FLOAT) == ("Gemm" in excluded)
    net = build_train_network(found, SGD(), "cross-entropy", loss_scale_manager=FixedLossScaleManager())
    low = {output for node in net.model.graph.node if casts_low(node) for output in node.output}
    takes_low = {node.name for node in net.model.graph.node if low & set(node.input)}
    assert "c0.node" in takes_low
    assert not [name for name in takes_low if name.split("/")[0] in ("c1.node", "c1")]


def casts_low(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT16


def test_training_begins_with_float32_masters() -> None:
    model, optimizers = mlp(), [SGD(), Momentum()]
    (first, second), same = decorate([model, mlp(1)], optimizers, "O2", master_weight=True)
    assert same is optimizers
    assert isinstance(second, Decorated)
    scale = FixedLossScaleManager()
    net = build_train_network(first, optimizers[0], "cross-entropy", loss_scale_manager=scale)
    masters = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert all(np.array_equal(net.state()[name], masters[name]) for name in net.plan.weights)
    assert net.runs_on in ("CPU, emulated", "CUDA")
    with onnxamp.auto_cast(level="O2"):
        same_net = build_train_network(first, optimizers[0], "cross-entropy", loss_scale_manager=scale)
        plain = build_train_network(model, optimizers[0], "cross-entropy", loss_scale_manager=scale)
    results = [one.step(feeds()) for one in (net, same_net, plain)]
    assert results[0] == results[1] == results[2]
    assert all(kind == TensorProto.FLOAT for kind in kinds(plain.export()).values())


@pytest.mark.parametrize(("change", "said"), [
    ({"level": "O0"}, "Unknown level 'O0'"),
    ({"level": "O3"}, "Unknown level 'O3'"),
    ({"level": 2}, "Unknown level 2"),
    ({"save_dtype": "int8"}, "Unknown save_dtype 'int8'"),
    ({"save_dtype": 0.5}, "dtype must be a name"),
    ({"dtype": "float32"}, "Unknown dtype 'float32'"),
    ({"master_weight": False}, "float32 masters"),
    ({"master_grad": "no"}, "master_grad must be a bool"),
    ({"excluded_layers": ["Conv"]}, "'Conv'"),
    ({"excluded_layers": "("}, "not a regular expression"),
    ({"excluded_layers": [int]}, "must hold strings"),
    ({"optimizers": "adam"}, "must be from onnxamp.train"),
    ({"models": 3}, "model must be"),
])  # fmt: skip
def test_wrong_wishes(change: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        decorate(**{"models": mlp(), "level": "O2", **change})


def test_levels_are_given_once() -> None:
    worn = decorate(mlp(), level="O2", dtype="bfloat16")
    with pytest.raises(onnxamp.ArgumentError, match="leave both at their defaults"):
        build_train_network(worn, SGD(), "cross-entropy", "O2")
    said = "decorated at O2 in bfloat16, but auto_cast says O1"
    with onnxamp.auto_cast(level="O1"), pytest.raises(onnxamp.ArgumentError, match=said):
        build_train_network(worn, SGD(), "cross-entropy")


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize(("save_dtype", "elem"), [
    ("float16", TensorProto.FLOAT16), ("bfloat16", TensorProto.BFLOAT16), (np.float64, TensorProto.DOUBLE),
    ("float32", TensorProto.FLOAT),
])  # fmt: skip
def test_exports_store_weights_as_asked(save_dtype: Any, elem: int) -> None:
    net = build_train_network(decorate(conv_net(), level="o2", save_dtype=save_dtype), SGD(), "cross-entropy")
    net.step(IMAGES)
    exported, state = net.export(), net.state()
    onnx.checker.check_model(exported, full_check=True)
    assert set(kinds(exported).values()) == {elem}
    trained = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in exported.graph.initializer}
    assert all((trained[name] == state[name].astype(trained[name].dtype)).all() for name in trained)
    assert all(array.dtype == np.float32 for name, array in state.items() if name in trained)  # the masters
    exact = run(make_session(conv_net_with(state)), {"x": IMAGES["x"]})["y"]
    if elem != TensorProto.BFLOAT16:
        np.testing.assert_allclose(run(make_session(exported), {"x": IMAGES["x"]})["y"], exact, rtol=0.02, atol=0.02)


def test_without_a_type_exports_store_weights_as_the_decorated_model_does() -> None:
    decorated = decorate(conv_net(), level="O2")
    exported = build_train_network(decorated, SGD(), "cross-entropy").export()
    onnx.checker.check_model(exported, full_check=True)
    assert kinds(exported) == kinds(decorated.model)
    assert set(kinds(exported).values()) == {TensorProto.FLOAT, TensorProto.FLOAT16}


def conv_net_with(state: dict[str, np.ndarray]) -> ModelProto:
    model = conv_net()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(state[tensor.name], tensor.name))
    return model


def test_an_export_with_low_weights_converts_on() -> None:
    net = build_train_network(decorate(mlp(), level="O2", save_dtype="float16"), SGD(), "cross-entropy")
    low = net.export("O2", lists="paddle")
    assert set(kinds(low).values()) == {TensorProto.FLOAT16}
    assert [node.op_type for node in low.graph.node].count("Cast") == 2


@pytest.mark.parametrize("master_grad", [False, True])
def test_master_grad_sums_in_float32(master_grad: bool) -> None:
    """The gradient of a weight that two nodes read is a sum of two."""
    nodes = [make("MatMul", "x w", "h"), make("MatMul", "h w", "y")]
    model = network(nodes, {"w": np.eye(6) * 0.5}, ["N", 6], ["N", 6])
    decorated = decorate(model, level="O2", master_grad=master_grad)
    net = build_train_network(decorated, SGD(), "cross-entropy", loss_scale_manager=FixedLossScaleManager(8))
    total = next(node for node in net.model.graph.node if node.name.startswith("w/gradient/"))
    raised = {node.output[0] for node in net.model.graph.node if node.op_type == "Cast"}
    assert total.op_type == "Add"
    assert (set(total.input) <= raised) == master_grad
    assert np.isfinite(net.step(feeds(4, (6,), 6)).loss)


def test_layers_are_excluded_by_the_names_of_frameworks() -> None:
    for name in ("Conv2D", "conv2d", "nn.Conv2d"):
        found = decorate(conv_net(), level="O2", excluded_layers=[name])
        assert weight_kind(found.model, "c0.node") == TensorProto.FLOAT
