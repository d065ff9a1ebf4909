"""Models that were converted before they are trained: every weight trains, and the precision stays."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run as command
from norms import LAYER_NORM
from onnx import ModelProto, TensorProto, helper, numpy_helper
from repository import ROOT
from train_nets import Array, conv_net, feeds, make, mlp, network

import onnxamp
from onnxamp.amp import auto_mixed_precision, custom_mixed_precision, decorate
from onnxamp.train import SGD, AdamW, FixedLossScaleManager, Momentum, TrainNetwork, build_train_network

IMAGES = feeds(6, (1, 8, 8), 10)
ENCODER = ROOT / "models" / "encoder.onnx"


def built(model: Any, **more: Any) -> TrainNetwork:
    given = {"optimizer": SGD(learning_rate=0.05), "loss_fn": "cross-entropy", **more}
    return build_train_network(model, **{"loss_scale_manager": FixedLossScaleManager(256), **given})


def weights_of(net: TrainNetwork) -> dict[str, Array]:
    return {name: net.state()[name] for name in net.plan.weights}


def distance(one: TrainNetwork, other: TrainNetwork) -> float:
    """Of the weights, relative to their norm."""
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys()
    return float(
        (sum(((mine[n] - theirs[n]) ** 2).sum() for n in mine) / sum((theirs[n] ** 2).sum() for n in mine)) ** 0.5
    )


def kinds(model: ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::onnxamp.HazardWarning")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_all_weights_of_a_converted_encoder_train_as_those_of_the_original(level: str) -> None:
    batch = {**onnxamp.random_samples(ENCODER)[0], "label": np.ones((1, 8, 64), np.float32)}
    low = auto_mixed_precision(ENCODER, level)
    exact, converted, direct = (
        built(model, loss_fn="mean-squared-error", level=kind)
        for model, kind in ((ENCODER, "O0"), (low, "O0"), (ENCODER, level))
    )
    assert sum(array.size for array in weights_of(converted).values()) == 79_360
    assert all(array.dtype == np.float32 for array in weights_of(converted).values())
    for _ in range(3):
        results = [net.step(batch) for net in (exact, converted, direct)]
        assert results[1].loss == pytest.approx(results[2].loss, rel=2e-4)
        assert results[1].loss == pytest.approx(results[0].loss, rel=2e-4)
    assert 0 < distance(converted, direct) < 5e-4
    assert converted.runs_on in ("CPU, emulated", "CUDA")


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("io", [True, False])
def test_the_export_is_the_model_that_came(dtype: str, io: bool) -> None:
    model = onnx.version_converter.convert_version(conv_net(), 22)
    low = onnxamp.convert_model(model, "O3", dtype=dtype, keep_io_types=io, fold=False)
    net = built(low, optimizer=Momentum(learning_rate=0.05))
    assert weights_of(net).keys() == weights_of(built(conv_net())).keys()
    for _ in range(5):
        result = net.step(IMAGES)
    assert result.loss < 2.2
    trained = net.export()
    assert kinds(trained) == kinds(low)
    assert list(trained.graph.node) == list(low.graph.node)
    assert trained.graph.input == low.graph.input
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in trained.graph.initializer}
    for name, array in net.state().items():
        if name in held:
            np.testing.assert_allclose(held[name].astype(np.float32), array, rtol=2.0**-8, atol=1e-4)
    assert set(kinds(net.export("O0")).values()) & {TensorProto.FLOAT16, TensorProto.BFLOAT16} == set()
    assert TensorProto.FLOAT16 in kinds(net.export("O2")).values()


def test_the_precision_of_each_node_is_kept() -> None:
    low = custom_mixed_precision(conv_net(), white_list=["Gemm"])
    net = built(low)
    casts = {output for node in net.model.graph.node if casts_low(node) for output in node.output}
    touched = {node.name.split("/")[0] for node in net.model.graph.node if casts & {*node.input, *node.output}}
    assert "y.node" in touched
    assert not touched & {"c0.node", "c1.node", "r0.node"}


def casts_low(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT16


def test_casts_of_float32_weights_and_low_weights_train_alike() -> None:
    """One MatMul reads a float32 weight through a Cast, the other a float16 weight."""
    rng = np.random.default_rng(0)
    exact = {"w0": rng.standard_normal((6, 5)), "w1": rng.standard_normal((5, 3))}
    nodes = [make("MatMul", "x w0", "h"), make("Tanh", "h", "t"), make("MatMul", "t w1", "y")]
    low = network(nodes, exact, ["N", 6], ["N", 3])
    del low.graph.node[:]
    low.graph.node.extend([
        helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["w0"], ["w16"], to=TensorProto.FLOAT16),
        make("MatMul", "x16 w16", "h"), make("Tanh", "h", "t"), make("MatMul", "t w1", "y16"),
        helper.make_node("Cast", ["y16"], ["y"], to=TensorProto.FLOAT),
    ])  # fmt: skip
    low.graph.initializer[1].CopyFrom(numpy_helper.from_array(exact["w1"].astype(np.float16), "w1"))
    onnx.checker.check_model(low, full_check=True)
    net, plain = built(low), built(network(nodes, exact, ["N", 6], ["N", 3]))
    assert net.plan.weights == ("w0", "w1")
    for one in (net, plain):
        one.fit([feeds()], 3)
    assert distance(net, plain) < 2e-3


def test_a_weight_that_conversion_stores_twice_has_one_master() -> None:
    table = np.random.default_rng(0).standard_normal((6, 6))
    nodes = [make("Mul", "x table", "h"), make("MatMul", "h table", "y")]
    model = network(nodes, {"table": table}, [6, 6], [6, 6])
    low = custom_mixed_precision(model, white_list=["MatMul"])
    assert len(kinds(low)) == 2
    data = {"x": np.ones((6, 6), np.float32), "label": np.zeros((6, 6), np.float32)}
    net = built(low, loss_fn="mean-squared-error")
    net.step(data)
    assert net.plan.weights == ("table",)
    one, other = (numpy_helper.to_array(tensor).astype(np.float32) for tensor in net.export().graph.initializer)
    np.testing.assert_allclose(one, other, rtol=2.0**-10)
    assert not np.allclose(one, table)


def test_other_levels_convert_anew() -> None:
    low = auto_mixed_precision(mlp(), "O3", "bfloat16")
    net = built(low, level="O2")
    elems = {node.attribute[0].i for node in net.model.graph.node if node.op_type == "Cast"}
    assert TensorProto.FLOAT16 in elems
    assert TensorProto.BFLOAT16 not in elems
    assert built(low, cast_model_type="float32").runs_on in ("CPU", "CUDA")


def test_decorating_a_converted_model_starts_from_its_masters() -> None:
    low = auto_mixed_precision(mlp(), "O2")
    net = built(decorate(low, level="O2", save_dtype="float64"))
    assert len(net.plan.weights) == 4
    assert np.isfinite(net.step(feeds()).loss)
    assert kinds(net.export()) == kinds(low)


def test_scalars_behind_casts_are_no_weights() -> None:
    nodes = [make("Add", "x eps", "s"), make("MatMul", "s w", "y")]
    model = network(nodes, {"eps": np.array([0.5]), "w": np.ones((6, 3))}, ["N", 6], ["N", 3])
    model.graph.node[0].input[1] = "passed"
    model.graph.node.insert(0, make("Identity", "eps", "passed"))
    assert built(model).plan.weights == ("w",)


@pytest.mark.filterwarnings("ignore::onnxamp.HazardWarning")
def test_norms_in_single_ops_keep_their_precision() -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N,6] x) => (float[N,6] y) <float[6,6] w, float two = {{2}}, float eps = {{1e-5}}, float[6] gain =
        {{1,1,1,1,1,1}}> {{ h = MatMul (x, w) {LAYER_NORM} }}""".replace("float[6,6] w", "float[6,6] w = {" + ",".join(
        str(number) for number in np.eye(6).ravel()) + "}"))  # fmt: skip
    low = auto_mixed_precision(model, "O2")
    net = built(low, loss_fn="mean-squared-error")
    data = {"x": feeds()["x"], "label": np.zeros((4, 6), np.float32)}
    assert net.step(data).loss == pytest.approx(built(model, loss_fn="mean-squared-error").step(data).loss, rel=1e-3)


@pytest.mark.parametrize("form", ["frozen", "integer"])
def test_nothing_to_train_names_decorate(form: str) -> None:
    frozen = network([make("Relu", "x", "y")], {}, ["N", 6], ["N", 6])
    model = frozen if form == "frozen" else auto_mixed_precision(frozen, "O3")
    with pytest.raises(onnxamp.GradientError, match=r"nothing can be trained.*decorate"):
        built(model, loss_fn="mean-squared-error")


def test_two_low_types_are_an_error() -> None:
    low = auto_mixed_precision(mlp(), "O3")
    low.graph.node.append(helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.BFLOAT16))
    with pytest.raises(onnxamp.ModelError, match="float16 and bfloat16"):
        built(low)


@pytest.mark.slow
def test_the_command_line_trains_converted_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(auto_mixed_precision(conv_net(), "O2"), "low.onnx")
    np.savez("data.npz", **feeds(10, (1, 8, 8), 10))
    result = command("train", "low.onnx", "--data", "data.npz", "-o", "out.onnx", "--level", "O0", "--epochs", 2)
    assert result.exit_code == 0, result.output
    assert f"{len(built(conv_net(), optimizer=AdamW()).plan.weights)} weights" in result.output
    assert kinds(onnx.load("out.onnx")) == kinds(onnx.load("low.onnx"))
