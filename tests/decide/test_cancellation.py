"""Normalizations of an input whose mean is far larger than its deviations."""

import numpy as np
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

NUMBERS = "<float[3] s = {1, 1, 1}, float[3] b = {0, 0, 0}, float e = {1e-6}, float two = {2}>"
IMAGE = "(float[2,3,16,16] x) => (float[2,C,16,16] y)"
ROWS = "(float[4,64] x) => (float[4,64] y)"
MEAN = "ReduceMean <axes = [1]>"

NORMS = {
    "InstanceNormalization": f"{IMAGE} {{ n = InstanceNormalization (x, s, b) y = Conv (n, c) }}",
    "moved": """(float[2,16,16,3] x) => (float[2,C,16,16] y) { t = Transpose <perm = [0, 3, 1, 2]> (x) i = Identity (t)
        n = InstanceNormalization (i, s, b) y = Conv (n, c) }""",
    "scaled and shifted": f"""{IMAGE} {{ k = Mul (x, two) l = Add (k, two) n = InstanceNormalization (l, s, b)
        y = Conv (n, c) }}""",
    "behind a Conv": f"{IMAGE} {{ f = Conv (x, c) n = InstanceNormalization (f, s, b) y = Conv (n, c) }}",
    "behind an activation": f"""{IMAGE} {{ f = Conv (x, c, b) r = Relu (f) n = InstanceNormalization (r, s, b)
        y = Conv (n, c) }}""",
    "decomposed behind a Conv": f"""{IMAGE} {{ f = Conv (x, c) m = ReduceMean <axes = [2, 3]> (f)
        d = Sub (f, m) q = Mul (d, d) v = ReduceMean <axes = [2, 3]> (q) a = Add (v, e) r = Sqrt (a)
        n = Div (d, r) y = Conv (n, c) }}""",
    "in training": f"""{IMAGE} {{ n, u, v = BatchNormalization <training_mode = 1> (x, s, b, b, s)
        y = Conv (n, c) }}""",
    "MeanVarianceNormalization": f"{IMAGE} {{ n = MeanVarianceNormalization (x) y = Conv (n, c) }}",
    "LayerNormalization": f"{ROWS} {{ n = LayerNormalization (x, g) y = MatMul (n, w) }}",
    "decomposed": f"""{ROWS} {{ m = {MEAN} (x) d = Sub (x, m) q = Pow (d, two) v = {MEAN} (q) r = Sqrt (v)
        n = Div (d, r) y = MatMul (n, w) }}""",
    "centered": f"{ROWS} {{ m = {MEAN} (x) d = Sub (x, m) y = MatMul (d, w) }}",
    "centered by a pool": f"{IMAGE} {{ m = GlobalAveragePool (x) d = Sub (x, m) y = Conv (d, c) }}",
    "variance by two means": f"""(float[4,64] x) => (float[4,1] y) {{ q = Mul (x, x) a = {MEAN} (q) m = {MEAN} (x)
        p = Mul (m, m) y = Sub (a, p) }}""",
}


def model_of(text: str) -> ModelProto:
    head, brace, body = text.partition("{")
    generator = np.random.default_rng(0)
    weights = {
        "c": (0.1 + generator.random((3, 3, 1, 1))).astype(np.float32),
        "g": np.ones(64, np.float32),
        "w": (generator.standard_normal((64, 64)) / 8).astype(np.float32),
    }
    model = parse(f"{head}{NUMBERS}{brace}{body}")
    return add_weights(
        model, {name: array for name, array in weights.items() if f"{name})" in text or f"{name}," in text}
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NORMS)
def test_deviations_of_an_input_survive(name: str, dtype: str) -> None:
    model = model_of(NORMS[name])
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    # In float32, the variance by two means has few digits itself.
    deviation = 0.1 if name == "variance by two means" else 0.01
    feeds = {"x": (20 + deviation * np.random.default_rng(1).standard_normal(shape)).astype(np.float32)}
    for level in ("O2", "O3"):
        result = onnxamp.convert_model(model, level, dtype=dtype)
        report = onnxamp.diff_models(model, result, samples=[feeds])
        assert report.outputs[0].rel_l2 < 0.01, level


FREE = {
    "inside a network": f"{ROWS} {{ h = MatMul (x, w) t = Tanh (h) n = LayerNormalization (t, g) y = MatMul (n, w) }}",
    "over the columns of a product": f"{ROWS} {{ h = MatMul (x, w) n = LayerNormalization (h, g) y = MatMul (n, w) }}",
    "without a mean": f"{ROWS} {{ q = Relu (x) y = MatMul (q, w) }}",
    "behind two products": f"""{IMAGE} {{ f = Conv (x, c) k = Conv (f, c) n = InstanceNormalization (k, s, b)
        y = Conv (n, c) }}""",
}


@pytest.mark.parametrize("name", FREE)
def test_other_normalizations_are_free(name: str) -> None:
    plan = onnxamp.plan_model(model_of(FREE[name]), "O3")
    assert [row.node for row in plan.rows if row.reason == "cancellation" and not row.low] == []
    assert all(
        row.low for row in plan.rows if row.op in ("Conv", "MatMul", "LayerNormalization", "InstanceNormalization")
    )


def test_the_cast_moves_behind_the_normalization() -> None:
    result = onnxamp.convert_model(model_of(NORMS["InstanceNormalization"]))
    assert [node.op_type for node in result.graph.node] == ["InstanceNormalization", "Cast", "Conv", "Cast"]
