"""What reports say of conversions that were repaired because their results failed validation."""

from pathlib import Path

import numpy as np
import onnx
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
