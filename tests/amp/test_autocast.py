"""``auto_cast``: what is made within the context has its precision, and nothing else."""

import threading
from typing import Any

import numpy as np
import onnx
import pytest
from commands import CLASSIFIER
from onnx import TensorProto
from train_nets import conv_net, feeds

import onnxamp
from onnxamp._runtime.random_inputs import random_inputs
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


def test_a_listed_normalization_trains_in_low_precision() -> None:
    kept, listed = [], []
    for found, names in ((kept, None), (listed, ["BatchNorm2D"])):
        with onnxamp.auto_cast(level="O2", custom_white_list=names):
            net = build_train_network(conv_net(), SGD(), "cross-entropy")
        raised = {node.output[0] for node in net.model.graph.node if node.op_type == "Cast"}
        found += [bool(raised & set(node.input)) for node in net.model.graph.node if node.name.startswith("n0.node/s")]
        assert np.isfinite(net.step(feeds(6, (1, 8, 8), 10)).loss)
    assert kept != listed
