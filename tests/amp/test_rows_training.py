"""One test per row of "Training" in docs/coming-from.md."""

import inspect
import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from coming_from import RowTests, rows
from norms import LAYER_NORM
from onnx import ModelProto, TensorProto
from train_nets import conv_net, feeds, mlp

import onnxamp
from onnxamp import amp
from onnxamp.train import FROM_LEVEL, SGD, AdamW, Loss, TrainNetwork

TESTS = RowTests()
row = TESTS.row
IMAGES = feeds(6, (1, 8, 8), 10)
LOUD = {**feeds(), "x": feeds()["x"] * np.float32(np.inf)}


def test_each_row_has_a_test() -> None:
    assert sorted(TESTS) == sorted(rows("Training"))


@pytest.mark.mostly_slow(fast=20)
@pytest.mark.filterwarnings("ignore::onnxamp.HazardWarning")
@pytest.mark.parametrize("cell", rows("Training"))
def test_row(cell: str) -> None:
    TESTS[cell]()


def built(network: Any = None, optimizer: Any = None, loss_fn: Any = "cross-entropy", **more: Any) -> TrainNetwork:
    return amp.build_train_network(network or mlp(), optimizer or SGD(), loss_fn, **more)


def signature(function: Any) -> list[str]:
    return [str(item.replace(annotation=item.empty)) for item in inspect.signature(function).parameters.values()]


def low(net: TrainNetwork) -> set[str]:
    """Names of nodes of the step, Casts and those of data movement apart, with a float16 output."""
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in inferred(net.model).graph.value_info}
    return {
        node.name
        for node in net.model.graph.node
        if node.op_type not in ("Cast", "Identity") and kinds.get(node.output[0]) == TensorProto.FLOAT16
    }


def inferred(model: ModelProto) -> ModelProto:
    return onnx.shape_inference.infer_shapes(model)


def written_out() -> ModelProto:
    """A MatMul, and a LayerNorm in single ops, the nodes of which are named by their outputs."""
    text = f"""<ir_version: 9, opset_import: ["": 18]> g (float[N,6] x) => (float[N,6] y)
        <float two = {{2}}, float eps = {{1e-5}}> {{ h = MatMul (x, w) {LAYER_NORM} }}"""
    text = text.replace("ReduceMean <axes = [-1]> (h)", "ReduceMean (h, last)")
    text = text.replace("ReduceMean <axes = [-1]> (p)", "ReduceMean (p, last)")
    model = onnx.parser.parse_model(text)
    arrays = {"w": np.eye(6, dtype=np.float32), "gain": np.ones(6, np.float32), "last": np.array([-1])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def raises(kind: type[Exception], said: str, **arguments: Any) -> None:
    with pytest.raises(kind, match=re.escape(said)) as caught:
        built(**arguments)
    assert isinstance(caught.value, onnxamp.OnnxAmpError)


# --- build_train_network ----------------------------------------------------------------------------------------


@row("`build_train_network(network, optimizer, loss_fn=None, level='O0', boost_level='O0', **kwargs)`")
def _() -> None:
    found = signature(amp.build_train_network)
    assert found[:5] == ["network", "optimizer", "loss_fn=None", "level='O0'", "boost_level='O0'"]
    assert {item.partition("=")[0] for item in found[5:]} == {
        "cast_model_type", "keep_batchnorm_fp32", "loss_scale_manager", "dtype", "provider", "seed", "**unknown",
    }  # fmt: skip


@row("`network`: a Cell to train")
def _() -> None:
    model = mlp()
    before = model.SerializeToString()
    for network in (model, amp.decorate(model, level="O2")):
        built(network).step(feeds())
    assert model.SerializeToString() == before


@row("`optimizer`: an `nn.Optimizer`")
def _() -> None:
    for kind in (onnxamp.train.SGD, onnxamp.train.Momentum, onnxamp.train.Adam, onnxamp.train.AdamW):
        assert built(optimizer=kind(learning_rate=0.1)).plan.weights == ("w0", "b0", "w1", "b1")


@row("`nn.Momentum(net.trainable_params(), learning_rate=0.1)`, `SGD(0.1, parameters=net.parameters())`")
def _() -> None:
    params: Any = [np.ones(3)]
    wrong = (
        lambda: onnxamp.train.Momentum(params, learning_rate=0.1, momentum=0.9),
        lambda: onnxamp.train.Momentum(params, 0.1, 0.9),
        lambda: onnxamp.train.Adam(params=params, learning_rate=0.1),
        lambda: SGD(0.1, parameters=params),
        lambda: AdamW(learning_rate=0.1, parameters=params, weight_decay=0.01),
    )
    for call in wrong:
        with pytest.raises(TypeError, match=r"needs no parameters; .* such as learning_rate=0.1") as caught:
            call()
        assert isinstance(caught.value, onnxamp.ArgumentTypeError)


@row("`loss_fn`: a Cell, which stays in float32")
def _() -> None:
    def loss(output: Any, label: Any) -> Any:
        return (output - label).op("Abs").op("ReduceMean", keepdims=0)

    for loss_fn in ("cross-entropy", Loss(loss), loss):
        net = built(loss_fn=loss_fn, level="O3")
        assert not [name for name in low(net) if name.startswith("train/loss")]


def with_own_loss(dims: list[Any], **reduction: Any) -> ModelProto:
    """A model whose output is a mean of squares."""
    model = mlp()
    model.graph.node.append(onnx.helper.make_node("Mul", ["y", "y"], ["square"]))
    axes = ["last"] if "axis" in reduction else []
    keepdims = reduction.get("keepdims", 0)
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["square", *axes], ["loss"], keepdims=keepdims))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "last"))
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", TensorProto.FLOAT, dims))
    return model


@row("`loss_fn=None`")
def _() -> None:
    x = {"x": feeds()["x"]}
    mean = built(with_own_loss([]), loss_fn=None).step(x)
    assert built(with_own_loss([1, 1], keepdims=1), loss_fn=None).step(x).loss == mean.loss
    for dims, keepdims in ((["N"], 0), (["N", 1], 1)):
        found = built(with_own_loss(dims, axis=-1, keepdims=keepdims), loss_fn=None).step(x)
        assert np.shape(found.loss) == (4, 1)[: len(dims)]
        assert np.mean(found.loss) == pytest.approx(mean.loss)
        assert found.grad_norm == pytest.approx(4 * mean.grad_norm, rel=1e-5)
    raises(ValueError, "has the shape [N, 3] and is no loss: pass loss_fn", network=mlp(), loss_fn=None)


@row("a loss that is no scalar")
def _() -> None:
    """For equal logits of 4 classes, MindSpore 2.10 moves a weight by 1 - 1/4: the gradient of the sum."""
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "w"))
    loss = onnxamp.train.SoftmaxCrossEntropyWithLogits(sparse=True)
    for level, boost_level in (("O0", "O0"), ("O2", "O0"), ("O0", "O1"), ("O0", "O2")):
        net = built(model, SGD(learning_rate=1.0), loss, level=level, boost_level=boost_level, loss_scale_manager=None)
        found = net(np.eye(3, dtype=np.float32), np.array([0, 1, 2])).loss
        np.testing.assert_allclose(found, np.full(3, np.log(4)), rtol=1e-3)
        np.testing.assert_allclose(net.state()["w"], 0.75 + np.eye(3, 4), rtol=1e-3)
    first = net.gradients({"x": np.eye(3, dtype=np.float32), "label": np.array([0, 1, 2])})
    assert first.numpy().shape == (3,)
    with pytest.raises(ValueError, match="size 1"):
        first.item()
    means = net.fit([{"x": np.eye(3)[:size], "label": np.arange(size)} for size in (2, 3)])
    assert len(means) == 1
    assert 0 < means[0] < np.log(4)


@row("`train_network(data, label)`")
def _() -> None:
    assert built()(feeds()["x"], feeds()["label"]) == built().step(feeds())
    with pytest.raises(ValueError, match="A step takes x, label, in this order, not 1 arrays"):
        built()(feeds()["x"])


@row("`loss, overflow, scale = train_network(data, label)`")
def _() -> None:
    net = built(level="O2", loss_scale_manager=amp.FixedLossScaleManager(8))
    loss, overflow, scale = net(feeds()["x"], feeds()["label"])
    assert (loss > 0, overflow, scale) == (True, False, 8)


@row("`loss.asnumpy()`, `loss.numpy()`, `loss.item()`, `float(loss)`")
def _() -> None:
    for loss in (built().step(feeds()), built().gradients(feeds()), built()(feeds()["x"], feeds()["label"])):
        assert loss.asnumpy() == loss.numpy() == np.float32(loss.loss)
        assert (loss.numpy().shape, loss.numpy().dtype) == ((), np.float32)
        assert loss.item() == float(loss) == loss.loss
        assert isinstance(loss.item(), float)


@row("`level='O0'` of training")
def _() -> None:
    assert low(built()) == set()
    assert low(built(amp.auto_mixed_precision(mlp(), "O2"))) != set()


@row("`level='O1'` of training")
def _() -> None:
    found = low(built(conv_net(), level="O1"))
    assert "c0.node" in found
    assert "pool.node" not in found


@row("`level='O2'` of training")
def _() -> None:
    net = built(conv_net(), level="O2")
    found = low(net)
    assert {"c0.node", "c1.node", "y.node"} <= found
    assert not [name for name in found if name.startswith(("n0", "n1", "train"))]
    assert isinstance(net.loss_scale_manager, amp.DynamicLossScaleManager)


@row("`level='O3'` of training")
def _() -> None:
    net = built(conv_net(), level="O3")
    assert [name for name in low(net) if name.startswith("n0")]
    assert net.loss_scale_manager is None
    assert not low(built(written_out(), level="O3", loss_fn="mean-squared-error")) & {"d", "p", "q", "n"}


@row("`level='auto'`")
def _() -> None:
    if onnxamp.amp.is_float16_supported():
        assert built(level="auto").runs_on == "CUDA"
    else:
        raises(ValueError, "Level 'auto' needs a CUDA device", level="auto")


@row("`boost_level`")
def _() -> None:
    losses = {built(boost_level=level).step(feeds()).loss for level in ("O0", "o1", "O2")}
    assert max(losses) == pytest.approx(min(losses), rel=1e-5)


@row("`cast_model_type=mstype.float16`")
def _() -> None:
    for dtype in ("float16", np.float16, np.dtype(np.float16), TensorProto.FLOAT16):
        net = built(conv_net(), cast_model_type=dtype)
        assert [name for name in low(net) if name.startswith("n0")]
        assert net.loss_scale_manager is None
    net = built(conv_net(), cast_model_type="float16", level="O2")
    assert not [name for name in low(net) if name.startswith("n0")]
    assert net.loss_scale_manager is not None
    assert "d" in low(built(written_out(), cast_model_type="float16", loss_fn="mean-squared-error"))


@row("`cast_model_type=mstype.float32`")
def _() -> None:
    for dtype in ("float32", np.float32, TensorProto.FLOAT):
        net = built(level="O2", cast_model_type=dtype)
        assert low(net) == set()
        assert net.loss_scale_manager is not None


@row("`keep_batchnorm_fp32=True`")
def _() -> None:
    found = low(built(conv_net(), level="O3", keep_batchnorm_fp32=True))
    assert not [name for name in found if name.startswith("n0")]
    norm = built(written_out(), cast_model_type="float16", keep_batchnorm_fp32=True, loss_fn="mean-squared-error")
    assert not low(norm) & {"m", "d", "p", "v", "e", "q", "n", "g"}


@row("`keep_batchnorm_fp32=False`")
def _() -> None:
    net = built(conv_net(), level="O2", keep_batchnorm_fp32=False)
    assert [name for name in low(net) if name.startswith("n0")]
    norm = built(written_out(), level="O2", keep_batchnorm_fp32=False, loss_fn="mean-squared-error")
    assert {"m", "d", "p", "v", "e", "q", "n", "g"} <= low(norm)
    assert np.isfinite(norm.step({"x": feeds()["x"], "label": np.zeros((4, 6), np.float32)}).loss)
    found = low(built(conv_net(), level="O1", keep_batchnorm_fp32=False))
    assert not [name for name in found if name.startswith("n0")]


@row("`loss_scale_manager=None`")
def _() -> None:
    net = built(level="O2", loss_scale_manager=None)
    assert net.loss_scale_manager is None
    assert net.step(feeds()).scale == 1


@row("no `loss_scale_manager`")
def _() -> None:
    assert built(level="O2").step(feeds()).scale == built(level="O2", loss_scale_manager=FROM_LEVEL).step(feeds()).scale
    assert built(level="O1").loss_scale_manager is None


@row("training a converted network at `level='O0'`")
def _() -> None:
    converted = amp.auto_mixed_precision(conv_net(), "O2")
    net = built(converted)
    assert net.plan.weights == built(conv_net()).plan.weights
    assert {"c0.node", "c1.node", "y.node"} <= low(net)
    assert all(net.state()[name].dtype == np.float32 for name in net.plan.weights)
    net.step(IMAGES)
    kinds = [[tensor.data_type for tensor in model.graph.initializer] for model in (net.export(), converted)]
    assert kinds[0] == kinds[1]


@row("training a converted network at another level is not supported")
def _() -> None:
    net = built(amp.auto_mixed_precision(conv_net(), "O3"), level="O1")
    assert "pool.node" not in low(net)


@row("`TypeError`: `cast_model_type` is another type")
def _() -> None:
    for dtype in ("int8", np.int8, TensorProto.DOUBLE):
        raises(TypeError, "cast_model_type must be", cast_model_type=dtype)
    assert built(cast_model_type=ml_dtypes.bfloat16).step(feeds()).loss > 0


@row("`ValueError`: an unknown keyword")
def _() -> None:
    raises(ValueError, "Unknown keyword 'keep_bn'", keep_bn=True)


@row("`TypeError`: `level` is no string")
def _() -> None:
    raises(TypeError, "level must be a string", level=2)


@row("`ValueError`: the level of training is unknown")
def _() -> None:
    raises(ValueError, "Unknown level 'O4'", level="O4")


@row("`ValueError`: `boost_level` is unknown")
def _() -> None:
    raises(ValueError, "Unknown boost_level 'O3'", boost_level="O3")


@row("`TypeError`: `keep_batchnorm_fp32` is no bool")
def _() -> None:
    raises(TypeError, "keep_batchnorm_fp32 must be a bool", keep_batchnorm_fp32=1)


@row("`TypeError`: `loss_scale_manager` is of another class")
def _() -> None:
    raises(TypeError, "loss_scale_manager must be", loss_scale_manager=128)


@row("`TypeError`: network, optimizer or loss is of another class")
def _() -> None:
    raises(TypeError, "model must be", network=3)
    raises(TypeError, "optimizer must be", optimizer="adam")
    raises(TypeError, "loss_fn must be", loss_fn=3)


@row("`ValueError`: on the CPU, only managers that skip no update")
def _() -> None:
    for manager in (amp.FixedLossScaleManager(), amp.DynamicLossScaleManager(), amp.GradScaler()):
        net = built(loss_scale_manager=manager)
        before = net.state()["w0"]
        assert net.step(LOUD).overflow
        assert np.array_equal(net.state()["w0"], before)


# --- loss scale managers ----------------------------------------------------------------------------------------


class Doubling(amp.LossScaleManager):
    scale = 2.0

    def get_loss_scale(self) -> float:
        return self.scale

    def update_loss_scale(self, overflow: bool) -> None:
        self.scale *= 2


@row("`LossScaleManager`: the base class")
def _() -> None:
    net = built(loss_scale_manager=Doubling())
    assert [net.step(feeds()).scale for _ in range(3)] == [2, 4, 8]


@row("`get_loss_scale()`")
def _() -> None:
    manager = amp.DynamicLossScaleManager(64)
    built(loss_scale_manager=manager).step(LOUD)
    assert manager.get_loss_scale() == 32


@row("`update_loss_scale(overflow)`")
def _() -> None:
    manager = amp.DynamicLossScaleManager(64, scale_window=1)
    manager.update_loss_scale(overflow=True)
    manager.update_loss_scale(overflow=False)
    assert manager.get_loss_scale() == 64


@row("`RuntimeError`: more than 1,000 overflows in a row with `DynamicLossScaleManager`")
def _() -> None:
    manager = amp.DynamicLossScaleManager()
    for _ in range(1000):
        manager.update_loss_scale(overflow=True)
    with pytest.raises(RuntimeError, match="overflowed in 1001 updates in a row") as caught:
        built(loss_scale_manager=manager).step(LOUD)
    assert isinstance(caught.value, onnxamp.NumericsError)
    assert manager.get_loss_scale() == 1
    manager.update_loss_scale(overflow=False)
    assert built(loss_scale_manager=manager).step(LOUD).overflow


@row("`get_update_cell()`")
def _() -> None:
    assert amp.DynamicLossScaleManager(scale_factor=4).get_update_cell().grow == 4
    assert amp.FixedLossScaleManager(drop_overflow_update=False).get_update_cell() is None


@row("`get_drop_overflow_update()`")
def _() -> None:
    managers = (amp.FixedLossScaleManager(8, False), amp.FixedLossScaleManager(8), amp.DynamicLossScaleManager())
    assert [manager.get_drop_overflow_update() for manager in managers] == [False, True, True]


@row("`FixedLossScaleManager(loss_scale=128.0, drop_overflow_update=True)`")
def _() -> None:
    assert signature(amp.FixedLossScaleManager) == ["loss_scale=128.0", "drop_overflow_update=True"]


@row("`DynamicLossScaleManager(init_loss_scale=2 ** 24, scale_factor=2, scale_window=2000)`")
def _() -> None:
    found = signature(amp.DynamicLossScaleManager)
    assert found == [f"init_loss_scale={2.0**24}", "scale_factor=2", "scale_window=2000"]


@row("`TypeError`: a scale or a factor that is no number, a window that is not whole")
def _() -> None:
    for values in ({"init_loss_scale": "8"}, {"scale_factor": "2"}, {"scale_window": 1.5}, {"scale_window": True}):
        with pytest.raises(onnxamp.ArgumentTypeError, match=f"{next(iter(values))} must be"):
            amp.DynamicLossScaleManager(**values)
    with pytest.raises(onnxamp.ArgumentTypeError, match="loss_scale must be"):
        amp.FixedLossScaleManager("128")


@row("`ValueError`: a scale below 1, a factor that does not grow, a window below 1")
def _() -> None:
    wrong = ({"init_loss_scale": 0.5}, {"scale_factor": 1}, {"scale_window": 0})
    for values in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(values))} must be"):
            amp.DynamicLossScaleManager(**values)
    with pytest.raises(ValueError, match="loss_scale must be"):
        amp.FixedLossScaleManager(0)


# --- GradScaler -------------------------------------------------------------------------------------------------


@row(
    "`GradScaler(enable=True, init_loss_scaling=65536.0, incr_ratio=2.0, decr_ratio=0.5, incr_every_n_steps=2000,"
    " decr_every_n_nan_or_inf=1, use_dynamic_loss_scaling=True)`"
)
def _() -> None:
    assert signature(amp.GradScaler) == [
        "enable=True", "init_loss_scaling=65536.0", "incr_ratio=2.0", "decr_ratio=0.5", "incr_every_n_steps=2000",
        "decr_every_n_nan_or_inf=1", "use_dynamic_loss_scaling=True",
    ]  # fmt: skip
    assert built(loss_scale_manager=amp.GradScaler()).step(feeds()).scale == 65536


def scaled() -> tuple[amp.GradScaler, SGD, TrainNetwork]:
    scaler, optimizer = amp.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=1), SGD(learning_rate=1.0)
    return scaler, optimizer, built(optimizer=optimizer, loss_scale_manager=scaler)


@row("`loss = loss_fn(model(data), label)`")
def _() -> None:
    _, _, net = scaled()
    loss = net.gradients(feeds())
    assert loss.loss == built().step(feeds()).loss
    assert set(loss.gradients) == set(net.plan.weights)


@row("`scaler.scale(loss)`")
def _() -> None:
    scaler, _, net = scaled()
    loss, exact = net.gradients(feeds()), built().gradients(feeds())
    assert scaler.scale(loss) is loss
    np.testing.assert_allclose(loss.gradients["w0"], 64 * exact.gradients["w0"], rtol=1e-5, atol=1e-5)
    assert scaler.scale(2.0) == 128


@row("`scaled.backward()`")
def _() -> None:
    scaler, _, net = scaled()
    old = scaler.scale(net.gradients(feeds()))
    old.backward()
    net.gradients(feeds())
    with pytest.raises(RuntimeError, match="out of date"):
        old.backward()


@row("`scaler.unscale_(optimizer)`")
def _() -> None:
    scaler, optimizer, net = scaled()
    loss = net.gradients(feeds())
    raw = loss.gradients["w0"].copy()
    scaler.unscale_(optimizer)
    np.testing.assert_array_equal(loss.gradients["w0"], raw / 64)


@row("`scaler.step(optimizer)`")
def _() -> None:
    for target in (0, 1):
        scaler, optimizer, net = scaled()
        before, loss = net.state(), net.gradients(feeds())
        scaler.step((optimizer, net)[target])
        moved = before["w0"] - net.state()["w0"]
        np.testing.assert_allclose(moved, loss.gradients["w0"] / 64, rtol=1e-4, atol=1e-6)
    scaler, optimizer, net = scaled()
    net.gradients(LOUD)
    scaler.step(optimizer)
    assert np.array_equal(net.state()["w0"], before["w0"])


@row("`scaler.update()`")
def _() -> None:
    scaler, optimizer, net = scaled()
    for batch, expected in ((feeds(), 128), (LOUD, 64)):
        net.gradients(batch)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_loss_scale() == expected


@row("`scaler.minimize(optimizer, scaled)`, `scaler.minimize(optimizer, loss=scaled)`")
def _() -> None:
    _, _, other = scaled()
    other.step(feeds())
    for name in ("", "loss"):
        scaler, optimizer, net = scaled()
        loss = scaler.scale(net.gradients(feeds()))
        scaler.minimize(optimizer, **{name: loss}) if name else scaler.minimize(optimizer, loss)
        assert all(np.array_equal(array, other.state()[name]) for name, array in net.state().items())
    with pytest.raises(onnxamp.ArgumentError, match="'weights' of the optimizer"):
        scaler.minimize(optimizer, parameters=["w0"])


@row("`optimizer.clear_grad()`")
def _() -> None:
    scaler, optimizer, net = scaled()
    net.gradients(feeds())
    scaler.minimize(optimizer)
    optimizer.clear_grad()
    with pytest.raises(RuntimeError, match="no gradients"):
        scaler.minimize(optimizer)


@row("`use_dynamic_loss_scaling=False`")
def _() -> None:
    optimizer = SGD()
    scaler = amp.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=1, use_dynamic_loss_scaling=False)
    net = built(optimizer=optimizer, loss_scale_manager=scaler)
    for batch in (feeds(), LOUD, feeds()):
        loss = net.gradients(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.clear_grad()
    net.step(feeds())
    state = scaler.state_dict()
    assert (state["scale"].tolist(), state["incr_count"], state["decr_count"]) == ([64.0], 0, 0)
    assert net.steps == 4


@row("`is_enable()`, `is_use_dynamic_loss_scaling()`")
def _() -> None:
    fixed = amp.GradScaler(use_dynamic_loss_scaling=False)
    assert (fixed.is_enable(), fixed.is_use_dynamic_loss_scaling()) == (True, False)


SETTINGS = ("init_loss_scaling", "incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf")


@row("`get_init_loss_scaling()`, `get_incr_ratio()`, and so on")
def _() -> None:
    assert [getattr(amp.GradScaler(), f"get_{name}")() for name in SETTINGS] == [65536.0, 2.0, 0.5, 2000, 1]
    assert amp.GradScaler(enable=False).get_init_loss_scaling() == 1


@row("`set_init_loss_scaling(...)`, `set_incr_ratio(...)`, and so on")
def _() -> None:
    scaler, _, net = scaled()
    for name, value in zip(SETTINGS, (32, 4, 0.25, 1, 1), strict=True):
        getattr(scaler, f"set_{name}")(value)
        assert getattr(scaler, f"get_{name}")() == value
    assert [net.step(batch).scale for batch in (feeds(), LOUD, feeds())] == [32, 128, 32]


@row("`state_dict()`")
def _() -> None:
    state = amp.GradScaler().state_dict()
    assert set(state) == {
        "scale", "incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_count",
        "decr_count", "use_dynamic_loss_scaling",
    }  # fmt: skip
    assert (state["scale"].shape, state["scale"].dtype) == ((1,), np.float32)


@row("`load_state_dict(state_dict)`")
def _() -> None:
    scaler, _, net = scaled()
    net.step(feeds())
    scaler.load_state_dict({**scaler.state_dict(), "scale": np.array([8.0], np.float32), "incr_count": 0})
    assert net.step(feeds()).scale == 8


@row("`RuntimeError`: `load_state_dict({})`, the state of a disabled scaler")
def _() -> None:
    with pytest.raises(RuntimeError, match="saved by one that is disabled") as caught:
        amp.GradScaler().load_state_dict(amp.GradScaler(enable=False).state_dict())
    assert isinstance(caught.value, onnxamp.EmptyStateError)
    amp.GradScaler(enable=False).load_state_dict({})


@row("`enable=False` of `GradScaler`")
def _() -> None:
    net = built(loss_scale_manager=amp.GradScaler(enable=False))
    assert net.step(LOUD).scale == 1
    assert not np.isfinite(net.state()["w0"]).all()


@row("bfloat16 disables dynamic scaling with a warning")
def _() -> None:
    scaler = amp.GradScaler()
    with pytest.warns(onnxamp.OptionWarning, match="GradScaler is disabled"):
        net = built(level="O2", dtype="bfloat16", loss_scale_manager=scaler)
    assert net.step(feeds()).scale == 1
    assert (scaler.is_enable(), scaler.get_init_loss_scaling(), scaler.state_dict()) == (False, 1, {})
    fixed = amp.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    assert built(level="O2", dtype="bfloat16", loss_scale_manager=fixed).step(feeds()).scale == 8
    assert fixed.is_enable()


@row("`RuntimeError`: `unscale_` or `step` is called twice")
def _() -> None:
    for name in ("unscale_", "step"):
        scaler, optimizer, net = scaled()
        net.gradients(feeds())
        getattr(scaler, name)(optimizer)
        with pytest.raises(RuntimeError) as caught:
            getattr(scaler, name)(optimizer)
        assert isinstance(caught.value, onnxamp.CallOrderError)


@row("`AssertionError`: a ratio is out of range")
def _() -> None:
    for name, value in (("incr_ratio", 1.0), ("decr_ratio", 1.0)):
        with pytest.raises(onnxamp.ArgumentError, match=name):
            amp.GradScaler(**{name: value})


@row(
    "`AmpScaler(enable=True, init_loss_scaling=2 ** 15, incr_ratio=2.0, decr_ratio=0.5, incr_every_n_steps=1000,"
    " decr_every_n_nan_or_inf=1, use_dynamic_loss_scaling=True)`"
)
def _() -> None:
    assert signature(amp.AmpScaler) == [
        "enable=True", "init_loss_scaling=32768.0", "incr_ratio=2.0", "decr_ratio=0.5", "incr_every_n_steps=1000",
        "decr_every_n_nan_or_inf=1", "use_dynamic_loss_scaling=True",
    ]  # fmt: skip
    scaler, optimizer = amp.AmpScaler(init_loss_scaling=1024), SGD(learning_rate=0.01)
    net = built(optimizer=optimizer, loss_scale_manager=scaler)
    scaled = scaler.scale(net.gradients(feeds()))
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    assert (net.steps, scaler.state_dict()["incr_count"]) == (1, 1)
    assert isinstance(amp.GradScaler(), amp.AmpScaler)


@row("`paddle.DataParallel`, `mindspore.communication`")
def _() -> None:
    """Two networks on halves of a batch, with averaged gradients, train as one network on all of it."""
    whole = feeds(8)
    optimizer = AdamW(learning_rate=0.1)
    one, *nets = (built(optimizer=optimizer) for _ in range(3))
    shares = [{name: array[part::2] for name, array in whole.items()} for part in range(2)]
    for _ in range(3):
        steps = [net.gradients(share) for net, share in zip(nets, shares, strict=True)]
        for name in one.plan.weights:
            mean = sum(step.gradients[name] for step in steps) / 2
            for step in steps:
                step.gradients[name] = mean
        one.step(whole)
        for net, step in zip(nets, steps, strict=True):
            net.apply(step)
    for net in nets:
        for name in one.plan.weights:
            np.testing.assert_allclose(net.state()[name], one.state()[name], rtol=1e-4, atol=1e-5)


@row("`nn.Momentum(params, 0.1, 0.9, loss_scale=1024.0)`, with `FixedLossScaleManager(1024.0, False)`")
def _() -> None:
    fixed = amp.FixedLossScaleManager(1024.0, False)
    nets = [
        built(optimizer=onnxamp.train.Momentum(learning_rate=0.1, **more), loss_scale_manager=fixed)
        for more in ({"loss_scale": 1024.0}, {})
    ]
    one, other = [(net.step(feeds()), net.state()["w0"])[1] for net in nets]
    assert (one == other).all()
    with pytest.raises(onnxamp.ArgumentError, match="leave loss_scale out"):
        built(optimizer=onnxamp.train.Momentum(loss_scale=1024.0))


@row("`paddle.optimizer.Momentum(0.1, 0.9, use_nesterov=True)`, `nn.Adam(params, eps=1e-8)`")
def _() -> None:
    momentum = onnxamp.train.Momentum(learning_rate=0.1, nesterov=True)
    assert onnxamp.train.Momentum(0.1, 0.9, use_nesterov=True) == momentum
    assert onnxamp.train.Adam(eps=1e-8) == onnxamp.train.Adam(epsilon=1e-8)
    with pytest.raises(onnxamp.ArgumentTypeError, match="use Momentum"):
        SGD(momentum=0.9)


@row("gradient accumulation: `accumulate_step`, or several `backward()` before one `step`")
def _() -> None:
    assert SGD(accumulate_step=4) == SGD(accumulate=4)
    net = built(optimizer=SGD(accumulate=4))
    before = net.state()["w0"]
    for step in range(1, 5):
        net.step(feeds())
        assert (net.state()["w0"] == before).all() == (step < 4)


@row("`set_auto_parallel_context(pipeline_stages=2)`")
def _() -> None:
    with pytest.raises(onnxamp.OnnxAmpError, match="there are no pipeline stages"):
        built(pipeline_stages=2)


@row("`train_network.set_train()`, `model.train()`")
def _() -> None:
    net = built()
    assert net.set_train() is net.train() is net
    for call in (lambda: net.set_train(False), net.eval):
        with pytest.raises(onnxamp.ArgumentError, match=r"net.export\(\)"):
            call()


@row("a scale below 1: `GradScaler(init_loss_scaling=0.5)`")
def _() -> None:
    net = built(loss_scale_manager=amp.GradScaler(init_loss_scaling=0.5))
    assert [net.step(LOUD).scale for _ in range(3)] == [0.5, 0.25, 0.125]
    net = built(loss_scale_manager=amp.DynamicLossScaleManager(2))
    assert [net.step(LOUD).scale for _ in range(3)] == [2, 1, 1]
