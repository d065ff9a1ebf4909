"""Spectra of inputs before a logarithm or a division: quiet bins beside loud ones, which random inputs do not have."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp

RNG = np.random.default_rng(0)
WINDOW = np.hanning(64)
ANGLES = 2 * np.pi * np.outer(np.arange(33), np.arange(64)) / 64
COSINES = np.float32(np.cos(ANGLES) * WINDOW)
SINES = np.float32(np.sin(ANGLES) * WINDOW)
WEIGHTS = {
    "cosines": COSINES[:, None],
    "sines": SINES[:, None],
    "both": np.concatenate([COSINES, SINES])[:, None],
    "halves": np.array([1, 2, 33, 61]),
    "filters": np.float32(abs(RNG.standard_normal((16, 33)))),
    "v": RNG.standard_normal((8, 16, 3)).astype(np.float32) / 8,
    "columns": COSINES.T,
    "frames": np.arange(0, 961, 16)[:, None] + np.arange(64)[None],
    "window": np.float32(WINDOW),
    "step": np.array(16),
    "length": np.array(64),
    "last": np.array([3]),
    "ones": np.ones(16, np.float32),
    "zeros": np.zeros(16, np.float32),
}
NUMBERS = """<float two = {2}, float one = {1}, float scale = {1e4}, float tiny = {1e-10}, float some = {1e-3},
    int64[1] axis = {1}>"""
TRANSFORM = "r = Conv <strides = [16]> (x, cosines) i = Conv <strides = [16]> (x, sines)"
POWER = f"{TRANSFORM} a = Mul (r, r) b = Mul (i, i) p = Add (a, b) m = MatMul (filters, p)"
SPECTRA = {
    "clipped": f"{POWER} c = Clip (m, tiny) f = Log (c)",
    "added": f"{POWER} c = Add (m, some) f = Log (c)",
    "bare": f"{POWER} f = Log (m)",
    "of one more": f"{POWER} s = Mul (m, scale) c = Add (one, s) f = Log (c)",
    "powers": f"""{TRANSFORM} n = Neg (i) a = Pow (r, two) b = Pow (n, two) p = Add (a, b) s = Sqrt (p)
        m = MatMul (filters, s) c = Max (m, tiny) f = Log (c)""",
    "magnitudes": """h = Conv <strides = [16]> (x, both) g = Reshape (h, halves)
        s = ReduceL2 <axes = [1], keepdims = 0> (g) m = MatMul (filters, s) c = Clip (m, tiny) f = Log (c)""",
    "frames": """g = Gather <axis = 2> (x, frames) h = MatMul (g, columns) a = Abs (h) s = Squeeze (a, axis)
        t = Transpose <perm = [0, 2, 1]> (s) m = MatMul (filters, t) c = Clip (m, tiny) f = Log (c)""",
    "means": """h = Conv (x, cosines) a = Mul (h, h) p = AveragePool <kernel_shape = [16], strides = [16]> (a)
        m = MatMul (filters, p) c = Clip (m, tiny) f = Log (c)""",
    "of a transform": """h = Transpose <perm = [0, 2, 1]> (x) s = STFT <onesided = 1> (h, step, window, length)
        a = Mul (s, s) q = ReduceSum <keepdims = 0> (a, last) t = Transpose <perm = [0, 2, 1]> (q)
        m = MatMul (filters, t) c = Clip (m, tiny) f = Log (c)""",
    "normalized": f"{POWER} f = InstanceNormalization <epsilon = 1e-8> (m, ones, zeros)",
    "by their means": f"{POWER} u = ReduceMean <axes = [2]> (m) c = Add (u, tiny) f = Div (m, c)",
    "of what is left of a mean": f"""mu = ReduceMean <axes = [2]> (x) d = Sub (x, mu)
        {POWER.replace("(x,", "(d,")} c = Clip (m, tiny) f = Log (c)""",
}  # fmt: skip


def model_of(spectrum: str) -> ModelProto:
    """A small network behind a front end."""
    text = f"""(float[1,1,1024] x) => (float[1,8,N] y) {NUMBERS} {{ {spectrum} k = Conv (f, v) y = Tanh (k) }}"""
    model = parse(text)
    used = {name for node in model.graph.node for name in node.input}
    arrays = [numpy_helper.from_array(array, name) for name, array in WEIGHTS.items() if name in used]
    model.graph.initializer.extend(arrays)
    return model


def speech() -> dict[str, np.ndarray]:
    """A loud tone, a quiet one, a pause, and a little noise."""
    time = np.arange(1024) / 1024
    tones = np.sin(2 * np.pi * 48 * time) + 1e-3 * np.sin(2 * np.pi * 200 * time)
    return {"x": np.float32(tones * (time < 0.7) + 1e-5 * RNG.standard_normal(1024))[None, None]}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", SPECTRA)
def test_spectra_of_speech_are_right(form: str, dtype: str) -> None:
    model = model_of(SPECTRA[form])
    result = onnxamp.convert_model(model, dtype=dtype)
    assert onnxamp.diff_models(model, result, speech()).passed


@pytest.mark.parametrize("form", SPECTRA)
def test_the_network_behind_a_spectrum_is_low(form: str) -> None:
    plan = onnxamp.plan_model(model_of(SPECTRA[form]))
    assert {row.low for row in plan.rows if row.op == "Tanh"} == {True}


def test_the_same_in_low_precision_is_wrong() -> None:
    model = model_of(SPECTRA["clipped"])
    result = onnxamp.convert_model(model, hazards=False)
    assert not onnxamp.diff_models(model, result, speech()).passed


@pytest.mark.parametrize("activation", ["Relu", "Sigmoid", "Clip"])
def test_a_logarithm_inside_a_network_is_no_spectrum(activation: str) -> None:
    """Its features have no quiet bins. Clip bounds spectra, but what a Conv reads is an activation."""
    bounds = "(q, some, one)" if activation == "Clip" else "(q)"
    inside = f"q = Conv <pads = [32, 31]> (x, first) z = {activation} {bounds}"
    model = model_of(f"{inside} {POWER.replace('(x,', '(z,')} c = Add (m, some) f = Log (c)")
    model.graph.initializer.append(numpy_helper.from_array(WEIGHTS["cosines"][:1], "first"))
    assert not any(hazard.reason == "spectrum" for hazard in onnxamp.plan_model(model).hazards)


def test_a_norm_of_a_product_is_no_spectrum() -> None:
    """It divides what its squares are computed of."""
    norm = "a = Mul (m, m) u = ReduceMean <axes = [1]> (a) c = Add (u, tiny) s = Sqrt (c)"
    for divided in ("f = Div (m, s)", "o = Reciprocal (s) f = Mul (m, o)"):
        model = model_of(f"r = Conv <strides = [16]> (x, cosines) m = MatMul (filters, r) {norm} {divided}")
        assert not any(hazard.reason == "spectrum" for hazard in onnxamp.plan_model(model, fold=False).hazards)


def test_a_logarithm_of_an_input_s_power_is_no_spectrum() -> None:
    """Without a transform, the power of a quiet sample is as precise as that of a loud one."""
    power = "p = Mul (x, x) c = Add (p, some) l = Log (c) f = Conv <strides = [16]> (l, first)"
    model = model_of(power)
    model.graph.initializer.append(numpy_helper.from_array(COSINES[:16, None], "first"))
    assert not any(hazard.reason == "spectrum" for hazard in onnxamp.plan_model(model).hazards)
