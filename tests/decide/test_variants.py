"""The ways in which exporters write rates and epsilons: whatever computes one, the hazard is the same."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp

WIDTH = 16
RATES = (1 / 10000 ** (np.arange(WIDTH) / WIDTH)).astype(np.float32)
NUMBERS = {
    "w": np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH),
    "rates": RATES, "more_rates": np.stack([RATES, RATES / 2]), "logs": np.log(np.expm1(RATES)).astype(np.float32),
    "steps": np.arange(WIDTH, dtype=np.float32), "slope": np.float32(-np.log(10000) / WIDTH), "base": np.float32(10000),
    "size": np.float32(WIDTH), "half": np.float32(0.5), "e": np.float32(1e-9), "power": np.float32(1.1),
    "far": np.float32(2048), "each": np.linspace(1e-9, 3e-9, WIDTH, dtype=np.float32), "axis": np.array([1]),
}  # fmt: skip
"""Constants by name; the product with ``w`` of what a model computes is its result."""

RATE_FORMS = {
    "stored": "r = Identity (rates)",
    "Exp": "l = Mul (steps, slope) r = Exp (l)",
    "Pow": "q = Div (steps, size) b = Pow (base, q) r = Reciprocal (b)",
    "Softplus": "r = Softplus (logs)",
    "Gather": "r = Gather (more_rates, which)",
    "scaled": "r = Mul (rates, half)",
    "If": """r = If (go) <then_branch = t () => (float[16] u) { u = Identity (rates) },
        else_branch = f () => (float[16] v) { v = Mul (rates, half) }>""",
    "by the longest": """m = ReduceMax <keepdims = 0> (f) q = Div (m, far) b = Pow (q, power) r = Div (rates, b)""",
}
EPSILON_FORMS = {
    "Clip of opset 10": (10, "a = Abs (h) s = ReduceSum <axes = [1]> (a) g = Clip <min = 1e-12> (s)"),
    "inverse Clip of opset 10": (10, "a = Abs (h) s = ReduceSum <axes = [1]> (a) g = Clip <min = 1e-6> (s)"),
    "by channel": (18, "a = Abs (h) g = Add (a, each)"),
    "Expand": (18, "a = Abs (h) s = ReduceSum (a, axis) z = Shape (s) v = Expand (e, z) g = Add (s, v)"),
}


def model_of(text: str, opset: int = 18) -> ModelProto:
    model = parse(text, opset=opset)
    read = {name for node in model.graph.node for name in node.input}
    read |= {name for node in model.graph.node for one in node.attribute for n in one.g.node for name in n.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in NUMBERS.items() if name in read
    )
    return model


def agree(model: ModelProto, feeds: dict[str, np.ndarray], dtype: str) -> None:
    for level in ("O1", "O2", "O3"):
        result = onnxamp.convert_model(model, level, dtype=dtype)
        found = onnxamp.diff_models(model, result, samples=[feeds], layers=False)
        assert found.passed, (level, found.failure)


@pytest.mark.mostly_slow(fast=5)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", RATE_FORMS)
def test_the_rate_of_an_angle(name: str, dtype: str) -> None:
    """The angle of position 30,000 is rounded by many turns if its rate is."""
    model = model_of(f"""(int64[n] p, int64 which, bool go) => (float[n,{WIDTH}] y) {{ f = Cast <to = 1> (p)
        {RATE_FORMS[name]} k = Unsqueeze (f, axis) t = Mul (k, r) c = Cos (t) y = MatMul (c, w) }}""")
    positions = np.random.default_rng(0).integers(0, 30_000, 40)
    agree(model, {"p": positions, "which": np.array(1), "go": np.array(True)}, dtype)


@pytest.mark.parametrize("name", EPSILON_FORMS)
def test_the_form_of_an_epsilon(name: str) -> None:
    opset, nodes = EPSILON_FORMS[name]
    end = "z = Reciprocal (g) q = Mul (h, z)" if "inverse" in name else "q = Div (h, g)"
    text = f"(float[4,{WIDTH}] x) => (float[4,{WIDTH}] y) {{ h = MatMul (x, w) {nodes} {end} y = MatMul (q, w) }}"
    model = model_of(text, opset)
    rows = np.random.default_rng(0).standard_normal((4, WIDTH)).astype(np.float32)
    rows[1] = 0
    agree(model, {"x": rows}, "float16")
