"""What reports say of conversions that were repaired because their results failed validation."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse

import onnxamp

LARGE = """(float[2,8] x) => (float[2,8] y) {
    a = MatMul (x, w)  b = Mul (a, a)  c = Mul (b, b)  d = Sqrt (c)  e = Sqrt (d)  y = MatMul (e, w) }"""


def test_the_user_did_not_name_what_validation_needs(tmp_path: Path) -> None:
    """Squares of squares leave float16; no rule knows it, and validation finds the nodes."""
    model = parse(LARGE)
    add_weights(model, {"w": (8, 8)})
    onnx.save(model, tmp_path / "model.onnx")
    samples = {"x": np.full((2, 8), 100, np.float32)}
    made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", samples=samples)
    assert made.validation is not None
    assert made.validation.cure is not None
    reasons = {cause.reason: cause.advice for cause in made.causes}
    assert reasons["needed to pass validation"] == ""
    assert "user pattern" not in reasons
    named = onnxamp.convert_file(
        tmp_path / "model.onnx", tmp_path / "low.onnx", samples=samples, keep_nodes=made.validation.cure.nodes
    )
    assert "user pattern" in {cause.reason for cause in named.causes}


def test_level_auto_as_a_repair_keeps_hazards_that_random_samples_lack(tmp_path: Path) -> None:
    """Many small errors miss a tight tolerance; measured on random inputs, the normalization of the input has none."""
    layers = []
    value = "n"
    for index in range(6):
        kind = "Tanh" if index % 2 else "Softplus"
        layers.append(f"h{index} = MatMul ({value}, w{index}) r{index} = {kind} (h{index})")
        value = f"r{index}"
    body = f"n = InstanceNormalization (x, one, none) {' '.join(layers)} y = Mul ({value}, {value})"
    ports = "(float[1,4,64,64] x) => (float[1,4,64,64] y)"
    model = parse(f"{ports} <float[4] one = {{1,1,1,1}}, float[4] none = {{0,0,0,0}}> {{ {body} }}")
    draw = np.random.default_rng(0)
    add_weights(model, {f"w{index}": (draw.standard_normal((64, 64)) / 8).astype(np.float32) for index in range(6)})
    onnx.save(model, tmp_path / "model.onnx")
    made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", tolerance=3e-4)
    assert made.validation is not None
    assert made.validation.cure is not None
    assert made.validation.cure.level == "auto"
    x = (20 + 0.01 * draw.standard_normal((1, 4, 64, 64))).astype(np.float32)
    found = onnxamp.diff_models(tmp_path / "model.onnx", tmp_path / "low.onnx", {"x": x})
    assert found.outputs[0].rel_l2 < 0.002


BRANCH = """f = If (c) <
    then_branch: graph = easy () => (float[512,16] e) { e = Add (a, a) },
    else_branch: graph = hard () => (float[512,16] h) {
        p = Mul (a, k) [square] q = Mul (p, p) [root] r = Sqrt (q) h = Div (r, k) }>"""
"""Squares in the second branch overflow."""


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize(("products", "level"), [(3, "auto"), (2, "O1")])
def test_level_auto_is_repaired_and_stays_faster_than_float32(tmp_path: Path, products: int, level: str) -> None:
    """Only two nodes give up low precision; if what remains does not pay, another way is tried."""
    layers = " ".join(f"m{k} = MatMul (x{k}, w) x{k + 1} = Relu (m{k})" for k in range(products))
    body = f"{layers} d = MatMul (x{products}, v) a = Tanh (d) {BRANCH} y = Neg (f)"
    model = parse(f"(float[512,1024] x0, bool c) => (float[512,16] y) <float k = {{3000}}> {{ {body} }}", 18)
    draw = np.random.default_rng(0)
    weights = {"w": draw.standard_normal((1024, 1024)) / 32, "v": draw.standard_normal((1024, 16)) / 32}
    add_weights(model, {name: weight.astype(np.float32) for name, weight in weights.items()})
    onnx.save(model, tmp_path / "model.onnx")
    samples = {"x0": draw.standard_normal((512, 1024)).astype(np.float32), "c": np.array(True)}
    made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", level="auto", samples=samples)
    assert made.validation is not None
    assert made.validation.passed
    assert made.validation.cure is not None
    assert "the else branch" in made.validation.cure.failure
    assert made.plan.level == level
    assert made.speed_up is not None
    assert made.speed_up.factor > 1
    assert "replayed plan" not in {row.reason for row in made.plan.rows}
    if level == "auto":
        assert set(made.validation.cure.nodes) == {"square", "root"}
    samples["c"] = np.array(False)
    assert onnxamp.diff_models(tmp_path / "model.onnx", tmp_path / "low.onnx", samples, provider="cpu").passed
