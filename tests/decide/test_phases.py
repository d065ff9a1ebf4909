"""Phases of oscillators, as in vocoders: angles that add up over time, from frequencies of hundreds of hertz."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp

FRAMES = 32
TIMES = 50
RATE = 16000
NUMBERS = f"""<float rate = {{{RATE}}}, float period = {{{1 / RATE}}}, float turn = {{{2 * np.pi}}},
    float turns = {{{2 * np.pi * TIMES}}}, float[3] up = {{1, 1, {TIMES}}}, int64 time = {{2}}>"""
NEAREST = 'f = Resize <mode = "nearest"> (x, , up)'
PHASES = {
    "added up": f"{NEAREST} r = Div (f, rate) c = CumSum (r, time) p = Mul (c, turn)",
    "without whole turns": f"""{NEAREST} r = Div (f, rate) c = CumSum (r, time) l = Floor (c) d = Sub (c, l)
        p = Mul (d, turn)""",
    "interpolated": """r = Mul (x, period) c = CumSum (r, time) q = Mul (c, turns)
        p = Resize <mode = "linear"> (q, , up)""",
    "frequency times time": f"{NEAREST} t = Mul (f, times) p = Mul (t, turn)",
    "by a matrix": f"{NEAREST} r = Mul (f, period) c = MatMul (r, ones) p = Mul (c, turn)",
}  # fmt: skip


def model_of(phases: str) -> ModelProto:
    """A filter behind an oscillator whose frequency is the input."""
    model = parse(
        f"(float[1,1,{FRAMES}] x) => (float[1,8,N] y) {NUMBERS} {{ {phases} s = Sin (p) h = Conv (s, w) y = Tanh (h) }}"
    )
    count = FRAMES * TIMES
    weights = {
        "times": np.arange(count, dtype=np.float32)[None, None] / RATE,
        "ones": np.triu(np.ones((count, count), np.float32)),
        "w": np.random.default_rng(0).standard_normal((8, 1, 9)).astype(np.float32) / 3,
    }
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in weights.items() if name in used
    )
    return model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", PHASES)
def test_the_phase_of_a_voice_is_right(form: str, dtype: str) -> None:
    """Random inputs are frequencies of a few hertz, of which hardly a turn adds up."""
    model = model_of(PHASES[form])
    result = onnxamp.convert_model(model, dtype=dtype)
    voice = np.float32(200 + 40 * np.sin(np.arange(FRAMES) / 5))[None, None]
    assert onnxamp.diff_models(model, result, {"x": voice}).passed
    assert {row.low for row in onnxamp.plan_model(model).rows if row.op == "Tanh"} == {True}


def test_a_predicted_frequency_is_not_rounded() -> None:
    """Errors of single frames add up to a wrong phase; the network before the last product is low all the same."""
    model = parse(f"""(float[1,16,N] x) => (float[1,8,M] y) {NUMBERS[:-1]}, float one = {{1}}> {{
        h = Conv <pads = [1, 1]> (x, v) a = LeakyRelu (h) k = Conv <pads = [1, 1]> (a, u, mean)
        f = Resize <mode = "nearest"> (k, , up) r = Div (f, rate) m = Mod <fmod = 1> (r, one) c = CumSum (m, time)
        p = Mul (c, turn) s = Sin (p) g = Conv (s, w) y = Tanh (g) }}""")
    draw = np.random.default_rng(1)
    weights = {
        "v": draw.standard_normal((32, 16, 3)) / 7,
        "u": draw.standard_normal((1, 32, 3)) * 2,
        "mean": np.array([200.0]),
        "w": draw.standard_normal((8, 1, 9)) / 3,
    }
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    rows = {row.key.partition(":")[0]: row.low for row in onnxamp.plan_model(model).rows}
    assert (rows["h"], rows["k"], rows["m"], rows["g"]) == (True, False, False, True)
    result = onnxamp.convert_model(model)
    features = draw.standard_normal((1, 16, 256)).astype(np.float32)
    assert onnxamp.diff_models(model, result, {"x": features}).passed
