"""Reports say what saturating int8 products do to a model, on the CPUs where they saturate, and only there."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper
from quantized import images, quantized

import onnxamp
from onnxamp._model.model import Model
from onnxamp._numerics import saturation
from onnxamp._numerics.speed.bench import BenchOptions
from onnxamp._runtime.sessions.session import make_session

FEEDS = images(1, seed=7)


def product(*, sign: bool = True) -> ModelProto:
    """A product of integers, in which two terms exceed int16 if they are uint8 and int8."""
    model = parse("(float[1,64] X) => (float[1,16] Y) {"
                  "  q = QuantizeLinear (X, one, zero) p = MatMulInteger (q, w) f = Cast <to=1> (p)"
                  "  Y = Mul (f, small) }")  # fmt: skip
    values = {
        "one": np.float32(1),
        "zero": np.uint8(0),
        "w": np.full((64, 16), 127, np.int8),
        "small": np.float32(1e-6),
    }
    if not sign:
        values["w"] = values["w"].view(np.uint8)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in values.items())
    return model


def saturated() -> bool:
    """Whether a default session of the product is wrong here."""
    session = ort.InferenceSession(product().SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"X": np.full((1, 64), 255, np.float32)})
    return not np.allclose(result, 64 * 255 * 127 * 1e-6)


def notes(*models: ModelProto, feeds: Any = FEEDS) -> list[str]:
    report = onnxamp.diff_models(*models, feeds, provider="cpu")
    return [note for note in report.notes if "saturate" in note]


def test_a_note_says_what_default_sessions_lose() -> None:
    network = quantized("qdq")
    told = notes(network, onnxamp.convert_model(network, target="tensorrt"))
    assert len(told) == saturated()
    assert all("outputs of the reference are off by" in note for note in told)
    assert all("errors above do not contain that" in note and "session.x64quantprecision" in note for note in told)


def test_products_of_integers_saturate_in_the_reference_as_well() -> None:
    feeds = [{"X": np.full((1, 64), 255, np.float32)}]
    told = notes(product(), product(), feeds=feeds)
    assert len(told) == saturated()
    assert all("errors above contain that" in note for note in told)
    assert notes(product(sign=False), product(sign=False), feeds=feeds) == []


def test_small_numbers_do_not_saturate() -> None:
    assert notes(product(), product(), feeds=[{"X": np.full((1, 64), 100, np.float32)}]) == []


@pytest.fixture
def poor_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose default sessions lose the upper half of a network's weights, whatever the machine has."""

    def poor_session(source: Any, **options: Any) -> ort.InferenceSession:
        model = ModelProto()
        given = source.proto if isinstance(source, Model) else source
        model.CopyFrom(given if isinstance(given, ModelProto) else onnx.load(given))
        for tensor in () if options.get("exact_integers") else model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.INT8:
                weight = np.minimum(numpy_helper.to_array(tensor), 64)
                tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
        return make_session(model, **options)

    monkeypatch.setattr(saturation, "_products_saturate", lambda: True)
    monkeypatch.setattr(saturation, "make_session", poor_session)


@pytest.mark.slow
@pytest.mark.usefixtures("poor_cpu")
def test_every_report_says_so() -> None:
    network = quantized("qdq")
    result = onnxamp.convert_model(network, target="tensorrt")
    assert len(notes(network, result)) == 1
    original = quantized("nbits")  # as good as any that has no int8
    assert len(notes(original, network)) == 1
    bench = onnxamp.bench_models(network, provider="cpu", feeds=FEEDS[0], options=BenchOptions(seconds=0.01))
    assert sum("saturate" in note for note in bench.notes) == 1
