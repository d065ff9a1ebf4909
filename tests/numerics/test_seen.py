"""Checking and comparing op by op on OpenVINO, which computes low precision itself."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp
from onnxamp._runtime.piecewise import pieces

pytestmark = pytest.mark.openvino
FEEDS = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)}


def chain() -> ModelProto:
    model = parse("""(float[N,8] x) => (float[N,8] y) {
        [product] h = MatMul (x, w) [bent] r = Relu (h) [gate] g = Sigmoid (r) [last] y = Mul (g, r)
    }""")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float32) * 1.7, "w"))
    return model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_op_is_checked_there(dtype: str) -> None:
    low = onnxamp.convert_model(chain(), "O3", dtype=dtype, target="openvino")
    report = onnxamp.check_run(low, FEEDS, provider="openvino")
    assert report.skipped is None
    assert {"MatMul", "Relu", "Sigmoid", "Mul"} <= {row.op for row in report.values}
    assert report.first_bad is None


def test_each_layer_has_an_error_of_its_own() -> None:
    low = onnxamp.convert_model(chain(), "O3", dtype="bfloat16", target="openvino")
    report = onnxamp.diff_models(chain(), low, FEEDS, provider="openvino", layers=True)
    assert {row.node: row.note for row in report.layers} == dict.fromkeys(("product", "bent", "gate", "last"))
    errors = {row.node: row.local.rel_l2 for row in report.layers if row.local is not None}
    assert errors["product"] > 1e-4
    assert len(errors) == 4


def test_it_is_said_if_no_op_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "wants_ranks", lambda name: False)
    monkeypatch.setattr(pieces, "declare_dims", lambda entry, dims: None)
    low = onnxamp.convert_model(chain(), "O3", target="openvino")
    report = onnxamp.check_run(low, FEEDS, provider="openvino")
    assert report.skipped is not None
    assert "None of its ops runs on its own. ONNX Runtime could not" in report.skipped
    assert not report.values


def test_a_check_stops_at_the_first_sample_with_a_fault() -> None:
    low = onnxamp.convert_model(chain(), "O3", dtype="float16", target="openvino", hazards=False)
    given = (FEEDS, {"x": FEEDS["x"] * 1e5}, FEEDS)
    taken = []

    def read():
        for sample in given:
            taken.append(sample)
            yield sample

    report = onnxamp.check_run(low, read(), provider="openvino", stop=True)
    assert report.first_bad is not None
    assert report.first_bad.alarm.startswith("Inf")
    assert len(taken) == report.samples == 2
