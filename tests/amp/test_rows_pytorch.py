"""One test per row of docs/coming-from-pytorch.md."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coming_from import RowTests, rows
from onnx import ModelProto, TensorProto
from repository import ROOT
from torch_door import foreign, low_ops
from train_nets import feeds, mlp

import onnxamp
from onnxamp import amp, train
from onnxamp.train import SGD, AdamW, Momentum, TrainNetwork

SECTIONS = ("Autocast", "Training in PyTorch")
PAGE = "coming-from-pytorch"
TESTS = RowTests()
row = TESTS.row
HALF, BRAIN = foreign("torch", "torch.float16"), foreign("torch", "torch.bfloat16")


def test_each_row_has_a_test() -> None:
    assert sorted(TESTS) == sorted(rows(*SECTIONS, page=PAGE))


@pytest.mark.parametrize("cell", rows(*SECTIONS, page=PAGE))
def test_row(cell: str) -> None:
    TESTS[cell]()


def built(optimizer: Any = None, **more: Any) -> TrainNetwork:
    return amp.build_train_network(mlp(), optimizer or SGD(), "cross-entropy", **more)


def signature(function: Any) -> list[str]:
    return [str(item.replace(annotation=item.empty)) for item in inspect.signature(function).parameters.values()]


def kinds(model: ModelProto) -> set[int]:
    """The types of the inputs and outputs."""
    return {entry.type.tensor_type.elem_type for entry in (*model.graph.input, *model.graph.output)}


def refuses(said: str, function: Callable[..., Any], *given: Any, **named: Any) -> None:
    with pytest.raises(onnxamp.OnnxAmpError, match=said):
        function(*given, **named)


def chain(*calls: str) -> str:
    """A model that calls ops of one input one after another."""
    lines = [f"v{number + 1} = {call.format(f'v{number}')}" for number, call in enumerate(calls)]
    return f"(float[N,2] v0) => (float[N,2] v{len(calls)}) <float[2,2] w = {{1, 2, 3, 4}}> {{ {' '.join(lines)} }}"


# --- Autocast ---------------------------------------------------------------------------------------------------


@row("`from torch.amp import GradScaler, autocast`")
def _() -> None:
    assert {"GradScaler", "autocast"} <= set(amp.__all__)
    assert "torch" not in sys.modules or sys.modules["torch"].__file__


@row("`autocast(device_type, dtype=None, enabled=True, cache_enabled=None)`")
def _() -> None:
    assert signature(amp.autocast) == ["device_type='cuda'", "dtype=None", "enabled=True", "cache_enabled=None"]


@row("`torch.cuda.amp.autocast(enabled=True, dtype=torch.float16, cache_enabled=True)`")
def _() -> None:
    wanted = low_ops(amp.autocast("cuda"))
    assert low_ops(amp.autocast(enabled=True, dtype=HALF, cache_enabled=True)) == wanted
    assert low_ops(amp.autocast(True, HALF, True)) == wanted != set()


@row("`dtype=torch.float16`, `torch.bfloat16`")
def _() -> None:
    for dtype, name in ((HALF, "float16"), (BRAIN, "bfloat16"), ("float16", "float16"), (np.float16, "float16")):
        with amp.autocast("cuda", dtype):
            assert built().plan is not None
            assert onnxamp._amp.active_cast().dtype == name


@row("`dtype=None`")
def _() -> None:
    for device, name in (("cuda", "float16"), ("cpu", "bfloat16")):
        with amp.autocast(device):
            assert onnxamp._amp.active_cast().dtype == name


@row('`device_type="cuda"`')
def _() -> None:
    with amp.autocast("cuda"):
        session = onnxamp.InferenceSession(mlp())
    assert session.get_providers() == onnxamp.InferenceSession(mlp()).get_providers()
    refuses("Unknown device_type", amp.autocast("tpu").__enter__)


@row("casts the ops that run in the context")
def _() -> None:
    with amp.autocast("cuda"):
        session, net = onnxamp.InferenceSession(mlp()), built()
    assert net.has_low
    with onnxamp.debugging.collect_operator_stats() as stats:
        session.run(None, {"x": feeds()["x"]})
    assert stats.calls["Gemm", "float16"] == 2


@row("a module from outside of the context")
def _() -> None:
    session = onnxamp.InferenceSession(mlp())
    with amp.autocast("cuda"):
        with pytest.warns(onnxamp.OptionWarning, match="session was created outside of autocast"):
            session.run(None, {"x": feeds()["x"]})
        session.run(None, {"x": feeds()["x"]})


@row("(nothing)")
def _() -> None:
    with pytest.warns(onnxamp.OptionWarning, match="Nothing was created or run"), amp.autocast("cuda"):
        pass


@row("`enabled=False` of `autocast`")
def _() -> None:
    with amp.autocast("cuda"):
        assert low_ops(amp.autocast("cuda", enabled=False)) == set()
        assert low_ops(amp.autocast("cuda")) != set()


@row("ops that autocast to float16")
def _() -> None:
    white = {"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "PRelu", "Einsum"}
    assert set(onnxamp._options.lists.autocast_preset().white) == white


@row("ops that autocast to float32")
def _() -> None:
    black = {"Exp", "Log", "Pow", "Softmax", "ReduceSum", "LayerNormalization"}
    assert black <= onnxamp._options.lists.autocast_preset().black.keys()
    assert (ROOT / "onnxamp" / "_data" / "oplists" / "pytorch.toml").is_file()
    text = chain("MatMul ({}, w)", "Softmax ({})", "MatMul ({}, w)")
    assert low_ops(amp.autocast("cuda"), text.replace("v0", "x")) == {"MatMul"}


@row("ops on no list")
def _() -> None:
    text = chain("MatMul ({}, w)", "Sigmoid ({})", "Exp ({})", "Tanh ({})").replace("v0", "x")
    assert low_ops(amp.autocast("cuda"), text) == {"MatMul", "Sigmoid"}


@row("ops that promote to the widest type")
def _() -> None:
    text = """(float[N,2] x) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}> {
        m = MatMul (x, w) e = Exp (m) s = Add (m, m) y = Mul (s, e) }"""
    assert low_ops(amp.autocast("cuda"), text) == {"MatMul", "Add"}


@row('`@autocast("cuda")` on a function')
def _() -> None:
    assert amp.autocast("cuda")(built)().has_low


@row('`torch.amp.is_autocast_available("cuda")`')
def _() -> None:
    assert {amp.is_float16_supported("cuda"), amp.is_bfloat16_supported(device_type="cuda")} <= {True, False}


@row("`model.half()`")
def _() -> None:
    low = amp.auto_mixed_precision(mlp(), "O3")
    assert {tensor.data_type for tensor in low.graph.initializer} == {TensorProto.FLOAT16}
    assert kinds(low) == {TensorProto.FLOAT}


@row("`model.half()(x.half())`")
def _() -> None:
    assert kinds(onnxamp.convert_model(mlp(), "O3", keep_io_types=False)) == {TensorProto.FLOAT16}


@row("`model.bfloat16()`")
def _() -> None:
    low = amp.auto_mixed_precision(mlp(), "O3", dtype="bfloat16")
    assert TensorProto.BFLOAT16 in {tensor.data_type for tensor in low.graph.initializer}


# --- Training ---------------------------------------------------------------------------------------------------


@row(
    "`GradScaler(device='cuda', init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000,"
    " enabled=True)`"
)
def _() -> None:
    theirs = amp.GradScaler(
        device="cuda", init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True
    )
    assert theirs.state_dict() == amp.GradScaler().state_dict()
    wanted = amp.GradScaler(True, 8.0, 4.0, 0.25, 3).state_dict()
    assert amp.GradScaler("cuda", 8.0, 4.0, 0.25, 3, True).state_dict() == wanted


@row("`torch.cuda.amp.GradScaler(init_scale=65536.0, ...)`")
def _() -> None:
    assert amp.GradScaler(8.0, 4.0).state_dict() == amp.GradScaler(True, 8.0, 4.0).state_dict()


def scaled(optimizer: Any = None, **settings: Any) -> tuple[TrainNetwork, Any]:
    scaler = amp.GradScaler("cuda", **{"init_scale": 8.0, "growth_interval": 1, **settings})
    return built(optimizer, loss_scale_manager=scaler), scaler


@row("`loss = loss_fn(model(image), label)` in PyTorch")
def _() -> None:
    net, _ = scaled()
    assert net.gradients(feeds()).scale == 8


@row("`scaler.scale(loss).backward()`")
def _() -> None:
    net, scaler = scaled()
    loss = net.gradients(feeds())
    scaler.scale(outputs=loss).backward()
    exact = built().gradients(feeds())
    for name, gradient in loss.gradients.items():
        np.testing.assert_allclose(gradient, 8 * exact.gradients[name], rtol=1e-5, atol=1e-6)


@row("`scaler.scale([a, b])`")
def _() -> None:
    assert scaled()[1].scale([1.0, 2.0]) == [8, 16]


@row("`scaler.unscale_(optimizer)` of PyTorch")
def _() -> None:
    net, scaler = scaled()
    loss = net.gradients(feeds())
    scaler.unscale_(net.optimizer)
    assert loss.scale == 1
    refuses("unscale them once", scaler.unscale_, net.optimizer)


@row("`scaler.step(optimizer)` of PyTorch")
def _() -> None:
    net, scaler = scaled()
    net.gradients(feeds())
    scaler.step(net.optimizer)
    assert net.steps == 1
    refuses("takes at most 1 positional argument, not 2", scaler.step, net.optimizer, print)


@row("`scaler.update()`, `scaler.update(new_scale)`")
def _() -> None:
    net, scaler = scaled()
    net.gradients(feeds())
    scaler.step(net.optimizer)
    scaler.update()
    assert scaler.get_scale() == 16
    scaler.update(4.0)
    assert net.step(feeds()).scale == 4


@row("`get_scale()`, `is_enabled()`, `get_growth_factor()`, and so on")
def _() -> None:
    scaler = amp.GradScaler()
    for name, value in (("growth_factor", 3.0), ("backoff_factor", 0.25), ("growth_interval", 7)):
        getattr(scaler, f"set_{name}")(value)
        assert getattr(scaler, f"get_{name}")() == value
    assert (scaler.get_scale(), scaler.is_enabled()) == (65536, True)


@row("a scale without a floor")
def _() -> None:
    net, scaler = scaled(init_scale=1.0)
    net.step({**feeds(), "x": feeds()["x"] * np.float32(np.inf)})
    assert scaler.get_scale() == 0.5


@row("`scaler.state_dict()`")
def _() -> None:
    assert {"scale", "incr_ratio", "decr_ratio", "incr_every_n_steps"} <= amp.GradScaler().state_dict().keys()


@row("`scaler.load_state_dict(state)`")
def _() -> None:
    scaler = amp.GradScaler()
    state = {"scale": 2.0, "growth_factor": 3.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 4}
    scaler.load_state_dict(state)
    scaler.update_loss_scale(overflow=False)
    assert scaler.get_scale() == 6
    other = amp.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 6


@row("`torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)`")
def _() -> None:
    assert AdamW(lr=1e-3, betas=(0.9, 0.999), eps=1e-8) == AdamW()
    assert AdamW().weight_decay == 0.01
    refuses("needs no parameters", AdamW, [], lr=1e-3)


@row("`torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)`")
def _() -> None:
    assert Momentum(lr=0.1, momentum=0.9, nesterov=True).learning_rate == 0.1
    refuses(r"use Momentum\(momentum=", SGD, lr=0.1, momentum=0.9)


@row("`optimizer.zero_grad()`")
def _() -> None:
    SGD().zero_grad(set_to_none=True)


@row("`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`")
def _() -> None:
    before = built(SGD(lr=1.0)).state()
    net = built(SGD(lr=1.0, clip_norm=0.5))
    result = net.step({**feeds(), "x": feeds()["x"] * 10})
    assert result.grad_norm > 0.5
    moved = sum(np.square(before[name] - net.state()[name]).sum() for name in net.plan.weights) ** 0.5
    assert moved == pytest.approx(0.5, rel=1e-3)


@row("several `backward()` before `scaler.step(optimizer)`")
def _() -> None:
    net = built(SGD(lr=1.0, accumulate=4))
    before = net.state()
    for step in range(1, 5):
        net.step(feeds())
        assert all((net.state()[name] == before[name]).all() for name in net.plan.weights) == (step < 4)


@row("`model.train()`")
def _() -> None:
    net = built()
    assert net.train() is net


@row("`model.eval()`")
def _() -> None:
    net = built()
    refuses(r"InferenceSession\(net.export\(\)\)", net.eval)
    assert onnxamp.InferenceSession(net.export()).run(None, {"x": feeds()["x"]})[0].dtype == np.float32


@row("`torch.nn.CrossEntropyLoss()`")
def _() -> None:
    logits, labels = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32), np.zeros((2, 4), np.int64)
    loss = train.CrossEntropyLoss(axis=1)(logits, labels)
    shifted = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert loss == pytest.approx(-shifted[:, 0].mean(), rel=1e-5)
    assert signature(train.CrossEntropyLoss)[4] == "axis=-1"


@row("`torch.nn.parallel.DistributedDataParallel`")
def _() -> None:
    assert (ROOT / "docs" / "how-to" / "average.py").is_file()


@row("pipeline stages, FSDP")
def _() -> None:
    refuses("there are no pipeline stages", built, pipeline_stages=2)
