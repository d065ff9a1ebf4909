"""Probabilities are not rounded before their logarithm or odds, which would become infinite."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp

NUMBERS = """float one = {1}, float tiny = {1e-7}, float most = {0.9999999}, int64[1] last = {-1}, int64 first = {0},
    float half = {0.5}, double double_one = {1}, int64[1] eight = {8}, int64[2] flat = {-1, 8}"""

KEPT = {
    "logarithm of a Softmax": "p = Softmax (h) y = Log (p)",
    "logarithm of a Sigmoid": "p = Sigmoid (h) y = Log (p)",
    "odds": "p = Sigmoid (h) q = Sub (one, p) o = Div (p, q) y = Log (o)",
    "odds without a logarithm": "p = Sigmoid (h) q = Sub (one, p) y = Div (p, q)",
    "odds of a Softmax": "p = Softmax (h) q = Sub (one, p) r = Reciprocal (q) y = Mul (p, r)",
    "the other class": "p = Sigmoid (h) q = Sub (one, p) y = Log (q)",
    "the other class, negated": "p = Sigmoid (h) n = Neg (p) q = Add (n, one) y = Log (q)",
    "Clip": "p = Sigmoid (h) c = Clip (p, tiny, most) y = Log (c)",
    "an epsilon": "p = Softmax (h) a = Add (p, tiny) y = Log (a)",
    "Gather": "p = Softmax (h) g = Gather <axis = 1> (p, first) y = Log (g)",
    "data movement": "p = Softmax (h) r = Reshape (p, flat) i = Identity (r) t = Transpose (i) y = Log (t)",
    "Cast": "p = Softmax (h) d = Cast <to = 11> (p) f = Cast <to = 1> (d) y = Log (f)",
    "the label's": "p = Softmax (h) m = Mul (p, mask) s = ReduceSum (m, last) y = Log (s)",
    "normalized exponentials": "e = Exp (h) s = ReduceSum (e, last) p = Div (e, s) y = Log (p)",
    "Softplus": "e = Exp (h) a = Add (one, e) y = Log (a)",
    "a decomposed Sigmoid": "n = Neg (h) e = Exp (n) a = Add (one, e) p = Reciprocal (a) y = Log (p)",
    "Tanh": "t = Tanh (h) s = Mul (t, t) q = Sub (one, s) y = Log (q)",
    "a bounded Tanh": "t = Tanh (h) s = Mul (t, t) q = Sub (one, s) r = Relu (q) a = Add (r, tiny) y = Log (a)",
    "Erf": "t = Erf (h) q = Add (one, t) y = Log (q)",
    "a mixture": "p = Softmax (h) m = MatMul (p, shares) y = Log (m)",
    "a mixture of mixtures": """p = Softmax (h) t = Transpose <perm = [1, 0]> (shares) q = Softmax (t)
        m = MatMul (p, q) y = Log (m)""",
    "a step of a hidden Markov model": """l = ReduceMax <axes = [1]> (h) d = Sub (h, l) e = Exp (d)
        s = MatMul (e, shares) g = Log (s) y = Add (g, l)""",
    "the other class, from a double": "one2 = Cast <to = 1> (double_one) p = Sigmoid (h) q = Sub (one2, p) y = Log (q)",
    "chosen by a branch": """p = Sigmoid (h) yes = Greater (first, first)
        q = If (yes) <then_branch = a () => (float[N,8] u) { u = Mul (p, half) },
        else_branch = b () => (float[N,8] v) { v = Identity (p) }> r = Sub (one, q) y = Log (r)""",
    "in a body": """yes = Greater (first, first)
        y = If (yes) <then_branch = a () => (float[N,8] u) { u = Identity (h) },
        else_branch = b () => (float[N,8] v) { p = Softmax (h) v = Log (p) }>""",
}
MOST = {"odds without a logarithm": 10, "odds of a Softmax": 5, "Tanh": 4.5, "a bounded Tanh": 4.5, "Erf": 3.5}
"""Largest logits, where they are not 14.5: float32 tells the probabilities of these from 0 and 1, and float16 ends
behind their odds.
"""
FREE = {
    "an activation": "s = Sigmoid (h) y = Mul (h, s)",
    "a decomposed activation": "n = Neg (h) e = Exp (n) a = Add (one, e) y = Div (h, a)",
    "attention": "p = Softmax (h) y = MatMul (p, w)",
    "a gate and a residual": "s = Sigmoid (h) g = Mul (h, s) a = Add (g, h) b = Abs (a) c = Add (b, h) y = Log (c)",
    "LogSoftmax": "y = LogSoftmax (h)",
    "random numbers far from 0": "u = RandomUniformLike <low = 5.0, high = 10.0> (h) y = Log (u)",
    "attention before a logarithm": """p = Softmax (h) t = Transpose (h) a = MatMul (t, p)
        b = Abs (a) y = Log (b)""",
}


def model_of(text: str) -> ModelProto:
    """Logits of large magnitude, and what is computed from them."""
    model = parse(
        f"(float[N,8] x, float[N,8] mask) => (float[N,M] z) <{NUMBERS}> {{ h = MatMul (x, w) {text} z = Identity (y) }}"
    )
    tensors = {"w": np.eye(8) * 1.01, "shares": (np.eye(8) + np.eye(8, k=1)) / 2}
    tensors = {name: array.astype(np.float32) for name, array in tensors.items() if name in text or name == "w"}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


def kept_by(model: ModelProto, dtype: str, level: str = "O2") -> set[str]:
    plan = onnxamp.plan_model(model, level, dtype=dtype)
    return {row.op for row in plan.rows if row.reason == "logarithm" and not row.low}


@pytest.mark.mostly_slow(fast=12)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", KEPT)
def test_probabilities_keep_their_digits(name: str, dtype: str) -> None:
    model = model_of(KEPT[name])
    generator = np.random.default_rng(0)
    most = MOST.get(name, 14.5)
    x = np.clip(generator.normal(0, 6, (40, 8)), -most, most).astype(np.float32)
    feeds = {"x": x, "mask": np.eye(8, dtype=np.float32)[generator.integers(0, 8, 40)]}
    for level in ("O2", "O3"):
        result = onnxamp.convert_model(model, level, dtype=dtype, fold=False)
        (output,) = onnxamp.diff_models(model, result, samples=[feeds]).outputs
        counts = output.reference_nan, output.reference_inf, output.result_nan, output.result_inf
        assert counts == (0, 0, 0, 0), level
        # The logits are rounded, and the odds are as far off as their exponentials.
        assert output.rel_l2 < 0.1, level


@pytest.mark.parametrize("name", FREE)
def test_what_is_no_logarithm_of_a_probability_is_free(name: str) -> None:
    assert kept_by(model_of(FREE[name]), "float16", "O3") == set()


def test_probabilities_that_come_in_are_not_rounded() -> None:
    model = parse("(float[4] p) => (float[4] y) <float one = {1}> { q = Sub (one, p) y = Log (q) }")
    feeds = {"p": np.array([0.5, 0.9, 0.99999, 0.999999], np.float32)}
    for dtype in ("float16", "bfloat16"):
        result = onnxamp.convert_model(model, "O3", dtype=dtype)
        assert onnxamp.diff_models(model, result, samples=[feeds]).passed
