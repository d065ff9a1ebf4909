"""Training: the step's graph, optimizers, loss scaling, levels, checkpoints."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from gradient_cases import missing_kernels
from graphs.case import parse
from onnx import TensorProto, helper, numpy_helper
from train_nets import Array, conv_net, feeds, make, mlp, network

import onnxamp
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import infer_types
from onnxamp._graph.view import ABSENT
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.sessions.session import cuda_available, make_session, run
from onnxamp.debugging import check_numerics
from onnxamp.train import (
    FROM_LEVEL,
    SGD,
    Adam,
    AdamW,
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    DynamicLossScaleManager,
    FixedLossScaleManager,
    FlushedGradient,
    GradScaler,
    Loss,
    Momentum,
    MSELoss,
    StepResult,
    TrainNetwork,
    all_finite,
    build_train_network,
)  # fmt: skip
from onnxamp.train._losses import LOSSES
from onnxamp.train._sessions import with_shapes
from onnxamp.train._step import SCALE

IMAGES = feeds(6, (1, 8, 8), 10)


def weights_of(net: TrainNetwork) -> dict[str, Array]:
    return {name: net.state()[name] for name in net.plan.weights}


def same(a: dict[str, Array], b: dict[str, Array]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


# The step


def test_the_loss_falls_and_the_model_is_read_only() -> None:
    model = mlp()
    before = model.SerializeToString()
    net = build_train_network(model, SGD(learning_rate=0.3), "cross-entropy")
    losses = [net.step(feeds()).loss for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]
    assert model.SerializeToString() == before
    assert net.runs_on in ("CPU", "CUDA")


def test_statistics_that_share_a_tensor_with_weights() -> None:
    """Exporters store equal tensors once: the scale and the variance of a new BatchNormalization are both ones."""
    nodes = [make("BatchNormalization", "x one zero MEAN VAR", "n"), make("MatMul", "n w", "y")]
    losses = []
    for mean, variance in (("mean", "variance"), ("zero", "one")):
        for node in nodes[:1]:
            node.input[3:5] = [mean, variance]
        weights = {"one": np.ones(4), "zero": np.zeros(4), "mean": np.zeros(4), "variance": np.ones(4)}
        weights = {name: array for name, array in weights.items() if name in nodes[0].input}
        model = network(nodes, weights | {"w": np.eye(4, 3)}, ["N", 4], ["N", 3])
        net = build_train_network(model, SGD(learning_rate=0.3), "cross-entropy")
        x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
        losses.append([net.step({"x": x, "label": np.arange(6) % 3}).loss for _ in range(10)])
        assert set(net.plan.weights) == {"one", "zero", "w"}
        assert run(make_session(net.export()), {"x": x})["y"].shape == (6, 3)
    assert losses[0] == losses[1]


def test_the_bias_of_a_layer_with_one_output() -> None:
    nodes = [make("MatMul", "x w", "h"), make("Add", "h b", "y")]
    model = network(nodes, {"w": np.ones((3, 1)), "b": np.zeros(1)}, ["N", 3], ["N", 1])
    assert set(build_train_network(model, SGD(), "mean-squared-error").plan.weights) == {"w", "b"}


def test_masks_are_no_weights() -> None:
    """Weight decay would make NaN of minus infinity."""
    nodes = [make("MatMul", "x w", "h"), make("Add", "h mask", "y")]
    mask = np.triu(np.full((4, 4), -np.inf), 1)
    model = network(nodes, {"w": np.ones((4, 4)), "mask": mask}, [4, 4], [4, 4])
    net = build_train_network(model, SGD(weight_decay=0.1), "mean-squared-error")
    assert set(net.plan.weights) == {"w"}


def test_labels_of_fewer_samples() -> None:
    net = build_train_network(mlp(), SGD(), "mean-squared-error")
    with pytest.raises(onnxamp.ArgumentError, match="'label' has the size 1 in 'N', and another one 4"):
        net.step({"x": feeds()["x"], "label": np.zeros((1, 3), np.float32)})


@pytest.mark.parametrize("ir_version", [3, 8])
def test_weights_that_are_listed_as_inputs_are_trained(ir_version: int) -> None:
    """Older exporters list all of them; before IR version 4 they had to."""
    model, plain = mlp(), build_train_network(mlp(), SGD(learning_rate=0.3), "cross-entropy")
    weights = [(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in model.graph.initializer]
    model.graph.input.extend(helper.make_tensor_value_info(*weight) for weight in weights)
    model.ir_version = ir_version
    net = build_train_network(model, SGD(learning_rate=0.3), "cross-entropy")
    for _ in range(3):
        assert net.step(feeds()).loss == plain.step(feeds()).loss
    assert len(net.export().graph.input) == len(model.graph.input)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_step_is_an_ordinary_graph_with_kernels_on_cpu_and_cuda(level: str) -> None:
    net = build_train_network(conv_net(dropout=True), AdamW(clip_norm=1.0, accumulate=2), "cross-entropy", level)
    onnx.checker.check_model(net.model, full_check=True)
    assert missing_kernels(net.model, "cuda") == []
    assert missing_kernels(net.plan.model, "cpu") == []
    assert {node.domain for node in net.model.graph.node} == {""}


def test_the_models_own_loss() -> None:
    nodes = [make("Sub", "x w", "d"), make("ReduceSumSquare", "d", "y", keepdims=0)]
    net = build_train_network(network(nodes, {"w": np.zeros(3)}, ["N", 3], []), SGD(learning_rate=0.5))
    assert net.step({"x": np.array([[1, 2, 3]], np.float32)}).loss == 14
    np.testing.assert_allclose(weights_of(net)["w"], [1, 2, 3])


def test_losses() -> None:
    x, target = feeds()["x"], np.random.default_rng(2).uniform(0, 1, (4, 3)).astype(np.float32)
    logits = run(make_session(mlp()), {"x": x})["y"]
    squared = build_train_network(mlp(), SGD(), "mean-squared-error").step({"x": x, "label": target})
    assert squared.loss == pytest.approx(((logits - target) ** 2).mean(), rel=1e-5)
    binary = build_train_network(mlp(), SGD(), "binary-cross-entropy").step({"x": x, "label": target})
    chance = 1 / (1 + np.exp(-logits))
    wanted = -(target * np.log(chance) + (1 - target) * np.log(1 - chance)).mean()
    assert binary.loss == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(onnxamp.ModelError, match="no float output 'z' for the loss"):
        build_train_network(mlp(), SGD(), Loss(lambda output, label: output, output="z"))
    own = Loss(
        lambda output, label: (output - label).op("Abs").op("ReduceMean", keepdims=0), label="target", output="y"
    )
    absolute = build_train_network(mlp(), SGD(), own).step({"x": x, "target": target})
    assert absolute.loss == pytest.approx(np.abs(logits - target).mean(), rel=1e-5)


def test_running_statistics_and_weights_are_exported() -> None:
    model = conv_net()
    net = build_train_network(model, Momentum(learning_rate=0.05), "cross-entropy")
    for _ in range(40):
        result = net.step(IMAGES)
    trained = net.export()
    held = {t.name: numpy_helper.to_array(t) for t in trained.graph.initializer}
    assert all(np.array_equal(held[name], net.state()[name]) for name in (*net.plan.weights, "n0.m", "n1.v"))
    assert [n.op_type for n in trained.graph.node] == [n.op_type for n in model.graph.node]
    logits = run(make_session(trained), {"x": IMAGES["x"]})["y"]
    assert (logits.argmax(1) == IMAGES["label"]).all()
    assert result.loss < 0.1
    half = net.export("O2")
    assert any(t.data_type == TensorProto.FLOAT16 for t in half.graph.initializer)


def test_accumulation_is_one_larger_batch() -> None:
    whole = feeds(8)
    halves = [{name: array[part] for name, array in whole.items()} for part in (slice(4), slice(4, 8))]
    one = build_train_network(mlp(), Adam(learning_rate=0.1), "cross-entropy")
    two = build_train_network(mlp(), Adam(learning_rate=0.1, accumulate=2), "cross-entropy")
    for _ in range(3):
        one.step(whole)
        two.step(halves[0])
        two.step(halves[1])
    for name, array in weights_of(one).items():
        np.testing.assert_allclose(weights_of(two)[name], array, rtol=1e-4, atol=1e-5)


def test_schedules_groups_and_the_choice_of_weights() -> None:
    rates = []

    def schedule(step: int) -> float:
        rates.append(step)
        return 0.0 if step == 0 else 0.1

    optimizer = SGD(learning_rate=schedule, weights=["w.*"], weight_decay=0.5, weight_decays={"w1": 0.0})
    net = build_train_network(mlp(), optimizer, lambda output, label: (output * 0.0).op("ReduceSum", keepdims=0))
    assert net.plan.weights == ("w0", "w1")
    start, data = weights_of(net), {"x": feeds()["x"], "label": np.zeros((4, 3), np.float32)}
    net.step(data)
    assert same(weights_of(net), start)
    net.step(data)
    np.testing.assert_allclose(weights_of(net)["w0"], start["w0"] * 0.95, rtol=1e-6)
    np.testing.assert_array_equal(weights_of(net)["w1"], start["w1"])
    assert rates == [0, 1]


def test_what_is_frozen_still_runs_over_the_batch() -> None:
    net = build_train_network(conv_net(), SGD(learning_rate=0.1, weights=["head.*"]), "cross-entropy")
    before = net.state()
    net.step(IMAGES)
    moved = {name for name, array in net.state().items() if not np.array_equal(array, before[name])}
    statistics = {"n0.m", "n0.v", "n1.m", "n1.v"}
    assert moved == {"head.w", "head.b", *statistics, "train/updates", "train/steps"}


def test_constants_of_a_loss_are_no_weights() -> None:
    weighed = Loss(lambda output, label: (output * output.writer.constant(np.float32([[1, 2, 3]])) * label).op(
        "ReduceMean", keepdims=0))  # fmt: skip
    assert build_train_network(mlp(), SGD(), weighed).plan.weights == ("w0", "b0", "w1", "b1")


# Loss scaling


def scales(manager: Any, overflows: str, window: int) -> list[float]:
    """The scale after each step of a network whose steps overflow where there is an "x"."""
    net = build_train_network(mlp(), SGD(learning_rate=1e-3), "cross-entropy", loss_scale_manager=manager)
    found = []
    for sign in overflows:
        data = feeds()
        if sign == "x":
            data["x"] = data["x"] * np.float32(np.inf)
        before = weights_of(net)
        result = net.step(data)
        assert result.overflow == (sign == "x")
        assert same(before, weights_of(net)) == (sign == "x")
        found.append(manager.get_loss_scale())
    return found


def test_a_dynamic_scale_moves_as_mindspores() -> None:
    manager = DynamicLossScaleManager(init_loss_scale=2.0**10, scale_factor=4, scale_window=2)
    assert scales(manager, "..x...x.x", 2) == [1024, 4096, 1024, 1024, 4096, 4096, 1024, 1024, 256]


def test_the_scale_never_falls_below_one() -> None:
    assert scales(DynamicLossScaleManager(init_loss_scale=2.0, scale_window=5), "xxx", 5) == [1, 1, 1]


def test_grad_scaler_counts_bad_steps_as_paddles() -> None:
    scaler = GradScaler(init_loss_scaling=64.0, incr_every_n_steps=3, decr_every_n_nan_or_inf=2)
    assert scales(scaler, "...x.xx...", 3) == [64, 64, 128, 128, 128, 128, 64, 64, 64, 128]


def test_a_fixed_scale_stays() -> None:
    assert scales(FixedLossScaleManager(), "..x.", 0) == [128] * 4
    assert scales(GradScaler(use_dynamic_loss_scaling=False), ".x", 0) == [65536] * 2


def test_without_dropping_bad_updates_are_made() -> None:
    manager = FixedLossScaleManager(drop_overflow_update=False)
    net = build_train_network(mlp(), SGD(), "cross-entropy", loss_scale_manager=manager)
    data = feeds()
    data["x"] = data["x"] * np.float32(np.inf)
    assert net.step(data).overflow
    assert not np.isfinite(weights_of(net)["w0"]).all()


def test_scaling_changes_no_float32_result() -> None:
    plain = build_train_network(mlp(), Adam(), "cross-entropy")
    scaled = build_train_network(mlp(), Adam(), "cross-entropy", loss_scale_manager=FixedLossScaleManager(1024.0))
    assert plain.step(feeds()).grad_norm == pytest.approx(scaled.step(feeds()).grad_norm, rel=1e-6)
    assert scaled.step(feeds()).scale == 1024


def test_small_gradients_flush_without_a_scale_and_live_with_one() -> None:
    """In float16, a loss times 1e-9 has gradients below what the type holds."""
    faint = Loss(lambda output, label: (output * label).op("ReduceMean", keepdims=0) * 1e-9)
    data = {"x": feeds()["x"], "label": np.ones((4, 3), np.float32)}
    norms = [
        build_train_network(mlp(), SGD(), faint, "O3", loss_scale_manager=manager).step(data).grad_norm
        for manager in (None, FixedLossScaleManager(2.0**24))
    ]
    exact = build_train_network(mlp(), SGD(), faint).step(data).grad_norm
    assert norms[0] == 0
    assert norms[1] == pytest.approx(exact, rel=0.01)


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_report_shows_what_flushes(dtype: str) -> None:
    """Gradients between float16's smallest number and a thousandth of it; bfloat16 has the range of float32."""
    faint = Loss(lambda output, label: (output * label).op("ReduceMean", keepdims=0) * 1e-7)
    data = {"x": feeds()["x"], "label": np.ones((4, 3), np.float32)}
    plain = build_train_network(mlp(), SGD(), faint, "O3", dtype=dtype)
    before = plain.state()
    found = plain.flushed(data)
    assert found.keys() == {"w0", "b0", "w1", "b1"}
    assert found["w0"].elements == 30
    assert same(plain.state(), before)
    scaled = build_train_network(
        mlp(), SGD(), faint, "O3", dtype=dtype, loss_scale_manager=FixedLossScaleManager(2.0**20)
    ).flushed(data)
    assert all(row.flushed == row.exact_zeros == 0 and row.error < 0.05 for row in scaled.values())
    if dtype == "float16":
        assert all(row.flushed == row.zeros > 0.5 and row.error > 0.5 for row in found.values())
    else:
        assert all(row.flushed == 0 for row in found.values())


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_layer_has_its_scale(dtype: str) -> None:
    """Small weights behind a layer make its gradients small: it wants a larger scale than the layer behind it."""
    model = mlp()
    for tensor in model.graph.initializer:
        if tensor.name == "w1":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(2.0**-20), "w1"))
    found = build_train_network(model, SGD(), "cross-entropy", "O3", dtype=dtype).flushed(feeds())
    scales = {name: row.loss_scale for name, row in found.items()}
    assert scales["w0"] == scales["b0"]
    assert scales["w1"] == scales["b1"]
    if dtype == "bfloat16":
        assert set(scales.values()) == {1.0}
        return
    assert np.log2(scales["w0"] / scales["w1"]) >= 10
    net = build_train_network(
        model, SGD(), "cross-entropy", "O3", loss_scale_manager=FixedLossScaleManager(scales["w0"])
    )
    helped = net.flushed(feeds())
    assert helped["w0"].error < 0.05 < found["w0"].error
    assert helped["w0"].loss_scale == scales["w0"]


@pytest.mark.slow
def test_zeros_of_float32_are_not_flushed() -> None:
    data = feeds()
    data["x"][:, 2] = 0
    found = build_train_network(mlp(), SGD(), "cross-entropy", "O3").flushed(data)
    assert replace(found["w0"], error=0.0, loss_scale=1.0) == FlushedGradient(30, 1 / 6, 1 / 6, 0.0, 0.0)
    assert 0 < found["w0"].error < 0.01
    data["x"][:] = 0
    assert np.isnan(build_train_network(mlp(), SGD(), "cross-entropy", "O3").flushed(data)["w0"].error)


def test_an_overflow_skips_one_update_and_halves_the_scale() -> None:
    manager = DynamicLossScaleManager(init_loss_scale=2.0**10)
    net = build_train_network(conv_net(), AdamW(), "cross-entropy", "O2", loss_scale_manager=manager)
    assert not net.step(IMAGES).overflow
    before = net.state()
    loud = {**IMAGES, "x": IMAGES["x"] * np.float32(1e30)}
    assert net.step(loud).overflow
    after = net.state()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {SCALE, "train/good", "train/steps"}
    assert after[SCALE] == 2.0**9
    assert not net.step(IMAGES).overflow
    assert not same(weights_of(net), {name: after[name] for name in net.plan.weights})


# Levels


def low_nodes(net: TrainNetwork) -> dict[str, set[str]]:
    """Names of nodes by whether they touch a float16 value."""
    view = Graph.of(net.model)
    types = infer_types(view)
    found: dict[str, set[str]] = {"low": set(), "high": set()}
    for node in view.nodes:
        touched = {types[v] for v in (*node.inputs, *node.outputs) if v != ABSENT}
        if node.key != "Cast":
            found["low" if "tensor(float16)" in touched else "high"].add(node.proto.name)
    return found


@pytest.mark.mostly_slow(fast=5)
@pytest.mark.parametrize(("level", "more", "low", "scaled"), [
    ("O0", {}, "", False),
    ("O1", {}, "conv", False),
    ("O2", {}, "conv relu", True),
    ("O3", {}, "conv relu norm", False),
    ("O2", {"keep_batchnorm_fp32": False}, "conv relu norm", True),
    ("O3", {"keep_batchnorm_fp32": True}, "conv relu", False),
    ("O2", {"cast_model_type": "float32"}, "", True),
    ("O0", {"cast_model_type": "float16"}, "conv relu norm", False),
    ("O1", {"cast_model_type": "float16"}, "conv relu norm", False),
    ("O2", {"cast_model_type": "float16"}, "conv relu", True),
    ("O0", {"cast_model_type": "float16", "keep_batchnorm_fp32": True}, "conv relu", False),
    ("O1", {"keep_batchnorm_fp32": False}, "conv", False),
    ("O2", {"loss_scale_manager": None}, "conv relu", False),
    ("O2", {"loss_scale_manager": FROM_LEVEL}, "conv relu", True),
    ("O2", {"loss_scale_manager": GradScaler(enable=False)}, "conv relu", False),
    ("O1", {"loss_scale_manager": FixedLossScaleManager()}, "conv", True),
])  # fmt: skip
def test_levels_mean_what_mindspores_mean(level: str, more: dict[str, Any], low: str, scaled: bool) -> None:
    net = build_train_network(conv_net(), SGD(), "cross-entropy", level, **more)
    found = low_nodes(net)
    assert ("c1.node" in found["low"]) == ("conv" in low)
    assert any(name.startswith("c1.node/gradient/Conv") for name in found["low"]) == ("conv" in low)
    if level != "O1":
        assert ("r0.node" in found["low"]) == ("relu" in low)
    assert any(name.startswith("n0.node/") for name in found["low"]) == ("norm" in low)
    assert not [name for name in found["low"] if name.startswith("train/")]
    assert (net.plan.scaling is not None) == scaled
    assert all(net.state()[name].dtype == np.float32 for name in net.plan.weights)
    assert np.isfinite(net.step(IMAGES).loss)


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_low_steps_stay_near_float32(level: str, dtype: str) -> None:
    exact = build_train_network(conv_net(), SGD(), "cross-entropy").step(IMAGES)
    net = build_train_network(conv_net(), SGD(), "cross-entropy", level, dtype=dtype,
                              loss_scale_manager=FixedLossScaleManager(256.0))  # fmt: skip
    assert net.runs_on in ("CPU, emulated", "CUDA")
    found = net.step(IMAGES)
    assert found.loss == pytest.approx(exact.loss, rel=0.02)
    assert found.grad_norm == pytest.approx(exact.grad_norm, rel=0.06)
    assert found.loss != exact.loss


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_no_level_rounds_masters(level: str) -> None:
    net = build_train_network(conv_net(), Momentum(), "cross-entropy", level, loss_scale_manager=None)
    net.fit([IMAGES], 3)
    for name in net.plan.state:
        array = net.state()[name]
        if np.any(array) and array.size > 1:
            assert (array.astype(np.float16) != array).any(), name


def written_out_norm() -> onnx.ModelProto:
    """A LayerNorm in single ops, as older exporters write it, between two MatMuls."""
    rng = np.random.default_rng(0)
    weights = {"gain": np.ones(6), "shift": np.zeros(6), "two": np.array(2.0), "eps": np.array(1e-5)}
    weights |= {"w0": rng.standard_normal((6, 6)), "w1": rng.standard_normal((6, 3))}
    nodes = [
        helper.make_node("Constant", [], ["last"], value_ints=[-1]), make("MatMul", "x w0", "h"),
        make("ReduceMean", "h last", "mean"), make("Sub", "h mean", "d"), make("Pow", "d two", "sq"),
        make("ReduceMean", "sq last", "var"), make("Add", "var eps", "ve"), make("Sqrt", "ve", "sd"),
        make("Div", "d sd", "unit"), make("Mul", "unit gain", "scaled"), make("Add", "scaled shift", "norm"),
        make("MatMul", "norm w1", "y"),
    ]  # fmt: skip
    return network(nodes, weights, ["N", 6], ["N", 3])


def test_normalizations_in_single_ops_stay_float32_with_their_gradients() -> None:
    net = build_train_network(written_out_norm(), SGD(), "cross-entropy", "O2",
                              loss_scale_manager=FixedLossScaleManager())  # fmt: skip
    found = low_nodes(net)
    inner = {"mean", "d", "sq", "var", "ve", "sd", "unit", "scaled", "norm"}
    of_norm = {name for names in found.values() for name in names if name.split("/")[0].removesuffix(".node") in inner}
    assert sum("/gradient/" in name for name in of_norm) > 10
    assert not of_norm & found["low"]
    assert {"h.node", "y.node"} <= found["low"]
    assert np.isfinite(net.step(feeds()).grad_norm)


@pytest.mark.parametrize(("change", "said"), [
    ({"level": "O4"}, "Unknown level 'O4'"),
    ({"boost_level": "O3"}, "Unknown boost_level 'O3'"),
    ({"loss_fn": "hinge"}, "Unknown loss 'hinge'"),
    ({"dtype": "float8"}, "Unknown dtype 'float8'"),
    ({"cast_model_type": "int8"}, "cast_model_type must be float32, float16 or bfloat16, not int8"),
    ({"cast_model_type": 1.5}, "dtype must be a name"),
    ({"loss_fn": 3}, "loss_fn must be"),
    ({"level": 2}, "level must be a string"),
    ({"keep_bn": True}, "Unknown keyword 'keep_bn'"),
    ({"optimizer": "adam"}, "optimizer must be"),
    ({"keep_batchnorm_fp32": 1}, "must be a bool"),
    ({"loss_scale_manager": 128}, "loss_scale_manager must be"),
    ({"optimizer": SGD(weights=["nothing"])}, "No weight of the model matches"),
    ({"seed": "a"}, "seed must be a whole number"),
    ({"seed": 1.5}, "seed must be a whole number"),
    ({"seed": 1 << 70}, r"seed must be a whole number from 0 to 2\^63 - 1"),
])  # fmt: skip
def test_wrong_wishes(change: dict[str, Any], said: str) -> None:
    wishes: dict[str, Any] = {"optimizer": SGD(), "loss_fn": "cross-entropy", **change}
    with pytest.raises(onnxamp.OnnxAmpError, match=said):
        build_train_network(mlp(), **wishes)


@pytest.mark.parametrize("wrong", [
    lambda: SGD(learning_rate=-1), lambda: SGD(accumulate=0), lambda: SGD(clip_norm=0.0), lambda: SGD(weights=["("]),
    lambda: FixedLossScaleManager(0), lambda: DynamicLossScaleManager(scale_factor=1), lambda: GradScaler(decr_ratio=2),
    lambda: SGD(learning_rate=lambda step: math.nan).rate(0),
])  # fmt: skip
def test_wrong_settings_are_value_errors(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|regular expression"):
        wrong()


@pytest.mark.parametrize("wrong", [
    lambda: SGD(learning_rate=lambda step: None).rate(0), lambda: Momentum(nesterov="no"), lambda: Loss(3),
    lambda: Loss(abs, but="a"), lambda: CrossEntropyLoss(axis="1"), lambda: CrossEntropyLoss(axis=1.5),
])  # fmt: skip
def test_settings_of_wrong_types_are_type_errors(wrong: Any) -> None:
    with pytest.raises(TypeError, match="must be") as caught:
        wrong()
    assert isinstance(caught.value, onnxamp.OnnxAmpError)


def test_a_rate_that_is_none_stops_a_step_before_it_changes_anything() -> None:
    net = build_train_network(mlp(), SGD(learning_rate=lambda step: math.nan if step else 0.1), "cross-entropy")
    net.step(feeds())
    before = net.state()
    with pytest.raises(onnxamp.ArgumentError, match=r"learning_rate\(1\) must be a finite number"):
        net.step(feeds())
    assert same(net.state(), before)


RAGGED = [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize("wrong", [
    lambda net: net.step(feeds() | {"x": RAGGED}),
    lambda net: net.load_state(net.state() | {"w0": RAGGED}),
    lambda net: net.gradients(feeds()).gradients.update(w0=RAGGED),
    lambda _: MSELoss()(RAGGED, [1]),
    lambda _: MSELoss()([[1, 2], [3, 4]], RAGGED),
    lambda _: CrossEntropyLoss(weight=RAGGED),
    lambda _: all_finite([RAGGED]),
    lambda _: GradScaler().load_state_dict(GradScaler().state_dict() | {"scale": RAGGED}),
    lambda _: check_numerics(RAGGED, "Add", "x"),
], ids=range(9))  # fmt: skip
def test_lists_that_are_no_arrays_are_type_errors(wrong: Any) -> None:
    with pytest.raises(onnxamp.ArgumentTypeError, match="must be an array, or lists of the same length"):
        wrong(build_train_network(mlp(), SGD(), "cross-entropy"))


@pytest.mark.parametrize(("loss", "labels", "said"), [
    (lambda: CrossEntropyLoss(weight=[[1, 2, 3]]), [1], r"a factor for each class, not an array of shape \[1, 3\]"),
    (lambda: CrossEntropyLoss(weight=[1, 2, 3, 4]), [1], "weight has 4 factors, but the output has 3 classes"),
    (lambda: CrossEntropyLoss(weight=[2], soft_label=True), [[0, 1, 0]], "weight has 1 factor, but the output has 3"),
    (lambda: BCELoss(weight=[[[1, 2, 3]]]), [[0, 1, 0]], r"the shape \[1, 1, 3\], which does not broadcast"),
    (lambda: BCEWithLogitsLoss(pos_weight=[1, 2]), [[0, 1, 0]], r"pos_weight has the shape \[2\], which does not"),
])  # fmt: skip
def test_weights_of_losses_fit_classes_and_labels(loss: Any, labels: Any, said: str) -> None:
    with pytest.raises(onnxamp.ArgumentError, match=said):
        loss()([[0.1, 0.2, 0.7]], labels)


@pytest.mark.parametrize("boost", ["O0", "O2"])
@pytest.mark.parametrize("labels", [[0, 3, 1, 2], [0, -1, 1, 2]])
def test_labels_that_are_no_classes(labels: list[int], boost: str) -> None:
    net = build_train_network(mlp(), SGD(), "cross-entropy", boost_level=boost)
    said = rf"'label' must be classes from 0 to 2, but 1 of 4 are not, such as {labels[1]}: correct them"
    for half in (net.step, net.gradients):
        with pytest.raises(onnxamp.ArgumentError, match=said):
            half(feeds() | {"label": np.array(labels)})
    assert net.steps == 0
    assert net.step(feeds()).loss > 0


@pytest.mark.slow
@pytest.mark.openvino
def test_steps_that_an_engine_does_not_load_name_one_that_does() -> None:
    batch, images = feeds(), feeds(4, (1, 8, 8), 10)
    mine, theirs = (build_train_network(mlp(), SGD(), "cross-entropy", "O1", provider=p) for p in ("openvino", "cpu"))
    assert mine.step(batch).loss == pytest.approx(theirs.step(batch).loss, rel=1e-3)
    with pytest.raises(onnxamp.RuntimeFailure, match=r"Convolution .* Train on the CPU, which has all ops"):
        build_train_network(conv_net(), SGD(), "cross-entropy", "O1", provider="openvino").step(images)


def test_labels_of_a_loss_that_picks_none_may_be_any_number() -> None:
    def loss(output: Any, label: Any) -> Any:
        known = (label < 0).where(0, label)
        return LOSSES["cross-entropy"].function(output, known)

    ignoring = Loss(loss, label_type=TensorProto.INT64, but=1)
    net = build_train_network(mlp(), SGD(), ignoring, level="O0")
    assert net.step(feeds() | {"label": np.array([0, -100, 1, 2])}).loss > 0


def test_labels_where_the_number_of_classes_is_open() -> None:
    model = network([make("MatMul", "w x", "y")], {"w": np.ones((2, 3))}, [3, "C"], [2, "C"])
    net = build_train_network(model, SGD(), "cross-entropy", level="O0")
    batch = {"x": np.ones((3, 4), np.float32), "label": np.array([3, 0])}
    assert net.step(batch).loss > 0
    with pytest.raises(onnxamp.ArgumentError, match="must be 0 or more, but 1 of 2 are not, such as -1"):
        net.step(batch | {"label": np.array([3, -1])})


def test_wrong_feeds() -> None:
    net = build_train_network(mlp(), SGD(), "cross-entropy")
    with pytest.raises(onnxamp.ArgumentError, match="'label' is missing or unknown"):
        net.step({"x": feeds()["x"]})
    with pytest.raises(onnxamp.ArgumentError, match="'label' takes int64 numbers, not float32"):
        net.step({name: array.astype(np.float32) for name, array in feeds().items()})
    with pytest.raises(onnxamp.ArgumentError, match=r"'label' must have the shape \[\w+\], not \[4, 2\]"):
        net.step(feeds() | {"label": np.zeros((4, 2), np.int64)})
    with pytest.raises(onnxamp.ArgumentError, match="'label' has the size 3 in 'N', and another one 4"):
        net.step(feeds() | {"label": feeds()["label"][:3]})
    assert net.step({"x": feeds()["x"].astype(np.float64), "label": feeds()["label"].astype(np.int32)}).loss > 0
    with pytest.raises(onnxamp.ArgumentError, match="another network"):
        net.load_state({"w0": np.zeros(3, np.float32)})


# Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("boost_level", ["O0", "O1", "O2"])
def test_resuming_is_bit_identical(tmp_path: Path, boost_level: str) -> None:
    def begin() -> TrainNetwork:
        model = conv_net(dropout=True)
        scale = DynamicLossScaleManager(2.0**8, scale_window=2)
        return build_train_network(
            model, AdamW(accumulate=2), "cross-entropy", "O2", boost_level, loss_scale_manager=scale, seed=5
        )

    batches = [feeds(6, (1, 8, 8), 10, seed) for seed in range(5)]
    through = begin()
    for batch in batches:
        through.step(batch)
    first = begin()
    for batch in batches[:3]:
        first.step(batch)
    first.save(tmp_path / "state.safetensors")
    second = begin()
    second.load(tmp_path / "state.safetensors")
    for batch in batches[3:]:
        second.step(batch)
    assert same(second.state(), through.state())


def boosted(boost_level: str) -> tuple[list[StepResult], TrainNetwork]:
    """Steps with batches of two sizes in turns, from the same start."""
    scale = DynamicLossScaleManager(2.0**8, scale_window=2)
    net = build_train_network(
        conv_net(dropout=True), AdamW(clip_norm=1.0), "cross-entropy", "O2", boost_level, loss_scale_manager=scale
    )
    sizes = (6, 6, 4, 6, 4, 4, 6)
    return [net.step(feeds(size, (1, 8, 8), 10, seed)) for seed, size in enumerate(sizes)], net


@pytest.mark.slow
def test_boost_changes_no_result() -> None:
    results, plain = boosted("O0")
    for level in ("O1", "O2"):
        found, net = boosted(level)
        for one, other in zip(found, results, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-4)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
            assert (one.scale, one.overflow) == (other.scale, other.overflow)
        for name, array in weights_of(plain).items():
            np.testing.assert_allclose(weights_of(net)[name], array, atol=1e-3)


def test_a_step_that_fails_leaves_the_state() -> None:
    model = network([make("MatMul", "x w", "y")], {"w": np.ones((6, 3))}, ["N", "K"], ["N", 3])
    net = build_train_network(model, SGD(), "cross-entropy", boost_level="O2")
    net.step(feeds())
    before = net.state()
    with pytest.raises(onnxamp.RuntimeFailure, match="may run at O1"):
        net.step({**feeds(), "x": feeds()["x"][:, :5]})
    assert same(net.state(), before)
    assert np.isfinite(net.step(feeds()).loss)


@pytest.mark.parametrize("model", [conv_net(dropout=True), mlp()], ids=["conv", "mlp"])
def test_fixed_shapes_leave_nothing_to_count(model: onnx.ModelProto, tmp_path: Path) -> None:
    """What counts elements would run on the CPU, and a CUDA graph has no place for copies from there."""
    net = build_train_network(model, SGD(), "cross-entropy", "O2")
    data = IMAGES if "c0.w" in net.plan.weights else feeds(6)
    shapes = {name: array.shape for name, array in data.items()} | {mask.name: (6, 16) for mask in net.plan.masks}
    fixed = with_shapes(net.model, shapes)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(emulate(fixed).SerializeToString(), options)
    ops = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert not ops & {"Shape", "Size"}
    assert "Size" in {node.op_type for node in net.model.graph.node}


@pytest.mark.cuda
@pytest.mark.skipif(not cuda_available(), reason="needs a CUDA device")
def test_cuda_graphs_make_the_steps_that_runs_make() -> None:
    results, plain = boosted("O1")
    found, net = boosted("O2")
    assert net.runs_on == plain.runs_on == "CUDA"
    for one, other in zip(found, results, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-2)
        assert one.scale == other.scale
    state = net.state()
    net.load_state(state)
    assert same(net.state(), state)


def test_dropout_draws_by_seed_and_step() -> None:
    def losses(seed: int) -> list[float]:
        net = build_train_network(conv_net(dropout=True), SGD(learning_rate=0.0), "cross-entropy", seed=seed)
        return [net.step(IMAGES).loss for _ in range(3)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)
    assert len(set(losses(1))) == 3


def test_a_mask_of_dropout_can_be_read_and_returned() -> None:
    model = conv_net(dropout=True)
    nodes = {node.op_type: node for node in model.graph.node}
    nodes["Dropout"].output.append("mask")
    nodes["Gemm"].input[0] = "masked"
    again = [make("Cast", "mask", "ones", to=TensorProto.FLOAT), make("Mul", "kept ones", "masked")]
    model.graph.node.extend([*again, model.graph.node.pop()])
    model.graph.output.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["N", 16]))
    net, plain = (build_train_network(one, SGD(), "cross-entropy", seed=3) for one in (model, conv_net(dropout=True)))
    assert net.step(IMAGES).loss == plain.step(IMAGES).loss


def test_a_broken_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, path = build_train_network(mlp(), SGD(), "cross-entropy"), tmp_path / "state.safetensors"
    net.save(path)
    before = path.read_bytes()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    net.step(feeds())
    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        net.save(path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_checkpoints_that_cannot_be_read(tmp_path: Path) -> None:
    net = build_train_network(mlp(), SGD(), "cross-entropy")
    with pytest.raises(onnxamp.ModelError, match="Cannot read"):
        net.load(tmp_path / "missing")
    net.save(tmp_path / "state")
    (tmp_path / "state").write_bytes((tmp_path / "state").read_bytes()[:-9])
    with pytest.raises(onnxamp.ModelError, match="truncated"):
        net.load(tmp_path / "state")


def test_fit_goes_over_the_batches(capsys: pytest.CaptureFixture[str]) -> None:
    net = build_train_network(mlp(), SGD(learning_rate=0.2), "cross-entropy")
    seen: list[int] = []
    means = net.fit([feeds(), feeds(seed=1)], 3, progress=True, report=lambda step, _: seen.append(step))
    assert seen == [1, 2, 3, 4, 5, 6]
    assert means[2] < means[0]
    assert capsys.readouterr().out == ""
    with pytest.raises(onnxamp.ArgumentError, match="no batches"):
        net.fit(iter([]))


def test_fit_takes_a_dict_or_a_file_as_a_batch(tmp_path: Path) -> None:
    np.savez(tmp_path / "batch.npz", **feeds())
    nets = [build_train_network(mlp(), SGD(), "cross-entropy") for _ in range(3)]
    means = [net.fit(data, 2) for net, data in zip(nets, (feeds(), tmp_path / "batch.npz", [feeds()]), strict=True)]
    assert means[0] == means[1] == means[2]


def test_unnamed_nodes_and_old_opsets() -> None:
    model = conv_net()
    for node in model.graph.node:
        node.name = ""
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 15))
    net = build_train_network(model, SGD(), "cross-entropy", "O2")
    assert np.isfinite(net.step(IMAGES).loss)
    assert net.export().opset_import[0].version == 15


def test_normalizations_that_share_statistics_update_them_in_turn() -> None:
    text = """(float[n,4] x) => (float[n,4] y) <float[4] s = {1, 1, 1, 1}, float[4] b = {0, 0, 0, 0},
        float[4] m = {0, 0, 0, 0}, float[4] v = {1, 1, 1, 1}, float three = {3}> {
        q = MatMul (x, w) r = BatchNormalization <momentum = 0.9> (q, s, b, m, v) t = Mul (r, three)
        y = BatchNormalization <momentum = 0.9> (t, s, b, m, v) }"""
    model = parse(text, 17, ir=9)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    network = build_train_network(model, SGD(learning_rate=0.0), "MSELoss")
    network.step({"x": x, "label": x})
    first = 0.9 + 0.1 * x.var(0)
    np.testing.assert_allclose(network.state()["v"], 0.9 * first + 0.1 * 9, rtol=1e-3)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = parse("(float[n,4] x) => (float[n,4] y) { y = MatMul (x, w) }", 17, ir=9)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    network = build_train_network(model, SGD(learning_rate=0.1), "MSELoss")
    state = network.state()
    with pytest.raises(onnxamp.ArgumentError, match="holds no numbers"):
        network.load_state({**state, "train/steps": np.array(5), "w": np.full((4, 4), "a")})
    assert network.steps == 0


@pytest.mark.parametrize(("make", "value"), [
    (Adam, {"beta1": 1.0}), (Adam, {"beta2": -1.0}), (Adam, {"epsilon": -1.0}), (Momentum, {"momentum": math.nan}),
])  # fmt: skip
def test_settings_of_optimizers_are_checked(make: Any, value: dict[str, float]) -> None:
    with pytest.raises(onnxamp.ArgumentError):
        make(**value)


def test_the_first_step_of_adam_is_the_rate() -> None:
    """Its corrections cancel the decay of both moments, as near to 1 as that is."""
    model = parse("(float[n,2] x) => (float[n,2] y) { y = Mul (x, w) }", 17, ir=9)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "w"))
    optimizer = Adam(learning_rate=0.5, beta2=0.999999, epsilon=0.0)
    network = build_train_network(model, optimizer, "MSELoss")
    network.step({"x": np.ones((3, 2), np.float32), "label": np.zeros((3, 2), np.float32)})
    np.testing.assert_allclose(network.state()["w"], 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    "rate", [np.float32(0.1), np.array(0.1), np.where(True, 0.1, 0.2)], ids=["number", "array", "where"]
)
def test_rates_of_schedules_are_numbers_in_any_form(rate: object) -> None:
    assert SGD(lambda _: rate).rate(0) == pytest.approx(0.1)


def test_arrays_of_arrays_are_looked_at_one_by_one() -> None:
    ragged = np.array([np.ones(2, np.float32), np.ones(3, np.float32)], dtype=object)
    assert all_finite(ragged)
    assert all_finite(np.array(1.0))
    assert not all_finite(np.array([np.ones(2), np.float32([np.inf])], dtype=object))
