"""``auto_cast``: what is made within the context has its precision, and nothing else."""

import contextvars
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import CLASSIFIER
from onnx import TensorProto
from torch_door import low_ops
from train_nets import conv_net, feeds

import onnxamp
from onnxamp._runtime.inputs.random_inputs import random_inputs
from onnxamp.train import SGD, build_train_network

FEEDS = random_inputs(onnx.load(CLASSIFIER), seed=0)


def logits() -> np.ndarray:
    return onnxamp.InferenceSession(CLASSIFIER).run(["logits"], FEEDS)[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sessions_round_within_the_context_alone(dtype: str) -> None:
    exact = logits()
    with onnxamp.auto_cast(level="O2", dtype=dtype):
        low = logits()
        with onnxamp.auto_cast(enable=False):
            assert (logits() == exact).all()
        others: list[np.ndarray] = []
        thread = threading.Thread(target=lambda: others.append(logits()))
        thread.start()
        thread.join()
    assert (logits() == exact).all()
    assert (others[0] == exact).all()
    error = np.abs(low - exact).max() / np.abs(exact).max()
    assert 1e-6 < error < 5e-2


def test_lists_are_paddles_and_ones_own() -> None:
    with onnxamp.auto_cast(custom_black_list=["Conv", "Gemm", "MatMul"], custom_white_list=["Relu"]):
        assert (logits() == onnxamp.InferenceSession(CLASSIFIER).run(None, FEEDS)[0]).all()
        net = build_train_network(conv_net(), SGD(), "cross-entropy")
    conv = next(node for node in net.model.graph.node if node.op_type == "Conv")
    casts = {node.output[0] for node in net.model.graph.node if node.op_type == "Cast"}
    assert not casts & set(conv.input)


def calls(**options: Any) -> dict[tuple[str, str], int]:
    """Calls by op type and precision of a session within the context."""
    with onnxamp.auto_cast(**options), onnxamp.debugging.collect_operator_stats() as stats:
        onnxamp.InferenceSession(CLASSIFIER).run(["logits"], FEEDS)
    return {key: count for key, count in stats.calls.items() if key[0] != "Cast"}


def test_od_lowers_convolutions_and_matrix_products_alone() -> None:
    found = calls(level="OD")
    assert {op for op, precision in found if precision == "float16"} == {"Conv", "Gemm"}
    assert {op for op, precision in found if precision == "float32"} >= {"Relu", "BatchNormalization", "MaxPool", "Add"}
    assert {op for op, precision in calls(level="od", custom_white_list={"relu"}) if precision == "float16"} == {
        "Conv", "Gemm", "Relu"}  # fmt: skip


def test_levels_in_either_case() -> None:
    assert calls(level="o1") == calls(level="O1") == calls()
    assert calls(level="o2") == calls(level="O2") != calls()


def test_no_promotion_at_o2_lowers_all_that_is_not_black_listed() -> None:
    found = calls(level="O2", use_promote=False)
    assert not any(precision == "float32" for op, precision in found if op in {"Add", "Relu", "MaxPool"})
    assert ("BatchNormalization", "float16") not in found


def test_training_networks_follow() -> None:
    with onnxamp.auto_cast(level="O2", dtype="bfloat16"):
        net = build_train_network(conv_net(), SGD(), "cross-entropy")
        with pytest.raises(onnxamp.ArgumentError, match="leave both at their defaults"):
            build_train_network(conv_net(), SGD(), "cross-entropy", "O1")
    to = {a.i for node in net.model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    assert TensorProto.BFLOAT16 in to
    assert np.isfinite(net.step(feeds(6, (1, 8, 8), 10)).loss)


@pytest.mark.parametrize(("wishes", "said"), [
    ({"level": "O3"}, "Unknown level 'O3'"),
    ({"dtype": "float8"}, "Unknown dtype 'float8'"),
    ({"level": 2}, "Unknown level 2: auto_cast takes O0, OD, O1, O2"),
    ({"custom_white_list": ["Relu"], "custom_black_list": ["Relu"]}, "Relu: in white_list"),
])  # fmt: skip
def test_wrong_wishes(wishes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said), onnxamp.auto_cast(**wishes):
        pass


@pytest.mark.slow
def test_a_listed_normalization_trains_in_low_precision() -> None:
    kept, listed = [], []
    for found, names in ((kept, None), (listed, ["BatchNorm2D"])):
        with onnxamp.auto_cast(level="O2", custom_white_list=names):
            net = build_train_network(conv_net(), SGD(), "cross-entropy")
        raised = {node.output[0] for node in net.model.graph.node if node.op_type == "Cast"}
        found += [bool(raised & set(node.input)) for node in net.model.graph.node if node.name.startswith("n0.node/s")]
        assert np.isfinite(net.step(feeds(6, (1, 8, 8), 10)).loss)
    assert kept != listed


# --- PyTorch's autocast -----------------------------------------------------------------------------------------


def test_autocast_follows_the_lists_of_pytorch() -> None:
    wanted = {"MatMul", "Tanh", "ReduceMean", "Mul"}
    assert low_ops(onnxamp.amp.autocast("cuda")) == wanted
    assert low_ops(onnxamp.amp.autocast("cuda", dtype="float16", cache_enabled=False)) == wanted
    assert low_ops(onnxamp.amp.autocast("cuda:1", "float16", True, None)) == wanted
    assert low_ops(onnxamp.amp.autocast()) == low_ops(onnxamp.amp.autocast(True)) == wanted, "torch.cuda.amp.autocast"
    assert low_ops(onnxamp.amp.autocast("cuda", enabled=False)) == low_ops(onnxamp.amp.autocast(False)) == set()
    assert low_ops(onnxamp.amp.auto_cast()) == {"MatMul", "Tanh"}, "Paddle's black list holds means"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), ("cuda", "float16"), ("mps", "float16")])
def test_the_device_has_a_default_type(device: str, dtype: str) -> None:
    with onnxamp.amp.autocast(device):
        assert onnxamp._amp.active_cast().dtype == dtype
    with onnxamp.amp.autocast(device, dtype="bfloat16"):
        assert onnxamp._amp.active_cast().dtype == "bfloat16"


def test_autocast_trains_and_decorates_functions() -> None:
    @onnxamp.amp.autocast("cuda")
    def made() -> onnxamp.train.TrainNetwork:
        return build_train_network(conv_net(), SGD(), "cross-entropy")

    assert made().has_low


@pytest.mark.parametrize(("wishes", "said"), [
    ({"device_type": "npu"}, "Unknown device_type 'npu'"),
    ({"device_type": 3}, "device_type must be 'cpu' or"),
    ({"dtype": "float32"}, "Unknown dtype 'float32'"),
    ({"enabled": 1}, "enabled must be a bool"),
])  # fmt: skip
def test_wrong_wishes_of_autocast(wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(onnxamp.OnnxAmpError, match=said), onnxamp.amp.autocast(**wishes):
        pass


# --- what a context does not apply to ---------------------------------------------------------------------------


def warned(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        run()
    assert all(item.category is onnxamp.OptionWarning and item.filename == __file__ for item in caught)
    return [str(item.message) for item in caught]


def test_a_session_from_outside_is_named_once() -> None:
    session = onnxamp.InferenceSession(CLASSIFIER)

    def run() -> None:
        with onnxamp.auto_cast(level="O2", dtype="bfloat16"):
            session.run(None, FEEDS)

    (text,) = warned(run)
    assert text.startswith("This session was created outside of auto_cast(level='O2', dtype='bfloat16'), and stays in")
    assert "Create the session there" in text
    assert warned(run) == []
    session.run(None, FEEDS)


def test_a_network_from_outside_is_named_once() -> None:
    batch = feeds(6, (1, 8, 8), 10)
    net = build_train_network(conv_net(), SGD(), "cross-entropy")
    (text,) = warned(lambda: within(net.step, batch))
    assert text.startswith("This network was created outside of autocast(dtype='float16'), and stays in float32")
    assert warned(lambda: within(net.step, batch)) == []
    other = build_train_network(conv_net(), SGD(), "cross-entropy")
    assert len(warned(lambda: within(other.gradients, batch))) == 1


def within(run: Callable[..., object], *arguments: object) -> None:
    with onnxamp.amp.autocast("cuda"):
        run(*arguments)


@pytest.mark.slow
def test_who_chose_a_precision_is_not_surprised() -> None:
    batch = feeds(6, (1, 8, 8), 10)
    low = onnxamp.InferenceSession(onnxamp.convert_model(CLASSIFIER))
    by_level = build_train_network(conv_net(), SGD(), "cross-entropy", "O1")
    decorated = build_train_network(onnxamp.amp.decorate(conv_net(), level="O2"), SGD(), "cross-entropy")
    with onnxamp.amp.autocast("cuda"):
        inside = onnxamp.InferenceSession(CLASSIFIER)
    within(low.run, None, FEEDS)
    within(by_level.step, batch)
    within(decorated.step, batch)
    within(inside.run, None, FEEDS)
    with onnxamp.auto_cast(enable=False):
        low.run(None, FEEDS)
        onnxamp.InferenceSession(CLASSIFIER).run(None, FEEDS)
    for level in ("OD", "o2"):
        with onnxamp.auto_cast(level=level):
            inside = onnxamp.InferenceSession(CLASSIFIER)
        with onnxamp.auto_cast(level=level):
            inside.run(None, FEEDS)
    inside.run(None, FEEDS)


def test_an_object_of_another_context_is_named() -> None:
    with onnxamp.auto_cast(level="O2"):
        session = onnxamp.InferenceSession(CLASSIFIER)

    def run() -> None:
        with onnxamp.auto_cast(enable=False):
            session.run(None, FEEDS)

    (text,) = warned(run)
    assert "created within auto_cast(level='O2', dtype='float16'), and keeps its precision within auto_cast(" in text


def test_a_context_without_effect_is_named() -> None:
    def run() -> None:
        with onnxamp.auto_cast(), onnxamp.auto_cast(level="O2"):
            ort.InferenceSession(CLASSIFIER, providers=["CPUExecutionProvider"]).run(None, FEEDS)

    inner, outer = warned(run)
    assert inner.startswith("Nothing was created or run within auto_cast(level='O2', dtype='float16'), so it changed")
    assert "It does not apply to sessions of onnxruntime" in inner
    assert "auto_cast(level='O1', dtype='float16')" in outer


def test_a_context_with_effect_or_without_a_wish_is_not_named() -> None:
    with onnxamp.auto_cast(), onnxamp.auto_cast(level="O2"):
        onnxamp.InferenceSession(CLASSIFIER)
    for wishes in ({"enable": False}, {"level": "O0"}):
        with onnxamp.auto_cast(**wishes):
            pass
    with pytest.raises(ZeroDivisionError), onnxamp.auto_cast():
        1 / 0  # noqa: B018
    context = contextvars.copy_context
    with onnxamp.auto_cast():
        context().run(onnxamp.InferenceSession, CLASSIFIER)
