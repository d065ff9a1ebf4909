"""What is known of targets' float16 arithmetic, and whether an engine still computes so."""

import importlib.util
from types import ModuleType

import numpy as np
import pytest
from graphs.case import parse
from onnx import numpy_helper
from repository import ROOT

from onnxamp import convert_model
from onnxamp._facts.providers import Accumulation, profile_of
from onnxamp._facts.targets import targets

CONVOLUTION = """(float[1,8,12,12] X) => (float[1,16,10,10] Y) {
    c = Conv (X, k)  Y = BatchNormalization (c, s, b, m, v)
}"""
SCRIPT = ROOT / "scripts" / "ask_engine.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ask_engine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_target_but_any_has_a_profile_with_its_source() -> None:
    seen = set[str]()
    assert profile_of("any") is None
    for target in {*targets()} - {"any"}:
        profile = profile_of(target)
        assert profile is not None
        assert profile.source
        assert profile.seen is profile.source.startswith("asked ")
        if profile.seen:
            seen.add(target)
            assert {"MatMul", "Gemm", "Conv", "ConvTranspose"} <= set(profile.products)
    assert seen >= {"cpu", "cuda", "webgpu", "openvino"}


def test_a_sum_in_float16_grows_with_the_root_of_its_terms() -> None:
    walk = Accumulation("float16", growth=43.3)
    assert walk.error(4096) == pytest.approx(8.5e-3, rel=0.01)
    assert walk.error(1024) == pytest.approx(walk.error(4096) / 2)
    assert Accumulation("float32").error(1 << 20) == pytest.approx(2.0e-4, rel=0.03)
    assert walk.error(1) == Accumulation("float32").error(1)


def test_the_worst_form_of_an_op_counts() -> None:
    profile = profile_of("webgpu")
    assert profile is not None
    assert profile.products["Conv"].growth == max(43.3, 43.6)


def test_answers_that_differ_are_named(script: ModuleType) -> None:
    said = {"values": {"overflow": "Inf"}, "products": {"MatMul": {"accumulator": "float32", "growth": 1.0}}}
    found = {"values": {"overflow": "NaN"}, "products": {"MatMul": {"accumulator": "float32", "growth": 1.9}}}
    empty = {"sums": {}, "normalizations": {}}
    assert script.differences(said, found | empty) == ["values, overflow: overflow is NaN, the profile says Inf"]
    found["products"]["MatMul"]["growth"] = 2.1
    assert script.differences(said, found | empty)[1:] == ["products, MatMul: growth is 2.1, the profile says 1.0"]


@pytest.mark.slow
def test_the_cpu_computes_as_its_profile_says(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["cpu", "--check"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.webgpu
def test_webgpu_computes_as_its_profile_says(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["webgpu", "--check"]) == 0, capsys.readouterr().out


def test_an_engine_that_is_missing_cannot_be_asked(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["onnxruntime-ep-none"]) == 1
    assert "is not installed" in capsys.readouterr().err


def test_what_is_written_by_hand_stays(script: ModuleType) -> None:
    path = script.TARGETS / "openvino" / "arithmetic.toml"
    kept = script.by_hand(path)
    assert script.BY_HAND in kept
    assert path.read_text(encoding="utf-8").endswith(kept)
    assert script.by_hand(script.TARGETS / "webgpu" / "arithmetic.toml") == ""
    assert script.as_toml("cpu", {"values": {"overflow": "Inf"}}, kept).endswith(f'overflow = "Inf"\n{kept}')


def test_folds_before_rounding() -> None:
    """OpenVINO folds a BatchNormalization whose numbers are rounded already, which costs accuracy."""
    random, options = np.random.default_rng(0), {"dtype": "bfloat16", "target": "openvino"}
    model = parse(CONVOLUTION)
    for name, shape in (("k", (16, 8, 3, 3)), ("s", 16), ("b", 16), ("m", 16)):
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name))
    model.graph.initializer.append(numpy_helper.from_array(random.uniform(1, 2, 16).astype(np.float32), "v"))
    ops = [node.op_type for node in convert_model(model, **options).graph.node]
    assert "BatchNormalization" not in ops
    kept = convert_model(model, black_list=["BatchNormalization"], **options)
    assert "BatchNormalization" in [node.op_type for node in kept.graph.node]
    assert convert_model(model, "O0", **options).graph.node == model.graph.node
    assert "BatchNormalization" in [node.op_type for node in convert_model(model, dtype="float16").graph.node]
