"""Masks that come in as inputs, or are made of them: a row that is masked as a whole is what it is in float32."""

from collections import Counter
from random import Random

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnxamp
from onnxamp import convert_model

LOWEST = -3.4028234663852886e38
NUMBERS = (-1e3, -1e4, -6e4, -1e5, -1e6, -1e9, -1e30, LOWEST)
WAYS = [(dtype, level) for dtype in ("float16", "bfloat16") for level in ("O1", "O2", "O3")]
SHOWN = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
"""A row of which something is shown, one of which all is, and one of which nothing is."""
FIRST = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], bool)
SECOND = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], bool)
"""Two masks that leave nothing of a row together, and two of which one leaves nothing by itself."""


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def attention(
    nodes: str, masks: str = "float[3,4] m", constants: str = "float unused = {0}", opset: int = 18
) -> ModelProto:
    text = f"""(float[3,8] q, float[8,4] k, float[4,8] v, {masks}) => (float[3,8] y) <{constants}> {{
        s = MatMul (q, k) {nodes} y = MatMul (p, v) }}"""
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


def scores(scale: float) -> dict[str, np.ndarray]:
    """Inputs whose scores are about three, or some tens, for a scale of 1 or 3."""
    return {"q": scale * normal(3, 8), "k": scale * normal(8, 4), "v": normal(4, 8)}


def masked(number: float, shown: np.ndarray = SHOWN) -> np.ndarray:
    return np.where(shown, 0, number).astype(np.float32)


def agrees(original: ModelProto, feeds: dict[str, np.ndarray], dtype: str = "float16", level: str = "O2") -> ModelProto:
    """Convert, and compare with every number rounded, and as ONNX Runtime's CPU provider computes it."""
    result = convert_model(original, level, dtype=dtype)
    onnx.checker.check_model(result, full_check=True)
    found = onnxamp.diff_models(original, result, feeds, layers=False)
    assert found.passed, found.failure
    if dtype == "float16":
        reference, output = (run(one, feeds) for one in (original, result))
        np.testing.assert_allclose(output, reference, atol=1e-2 * np.abs(reference).max())
    return result


def run(model: ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feeds)[0]


def count(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


SOFTMAX = "p = Softmax (t)"


@pytest.mark.mostly_slow(fast=10)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sign", [1, -1], ids=["added", "subtracted"])
def test_a_mask_of_any_number(number, dtype, sign):
    original = attention(f"t = {'Add' if sign > 0 else 'Sub'} (s, m) {SOFTMAX}")
    for scale in (1, 3):
        agrees(original, {**scores(scale), "m": sign * masked(number)}, dtype)


@pytest.mark.parametrize(("dtype", "level"), WAYS)
@pytest.mark.parametrize("number", [-1e4, LOWEST])
def test_a_mask_in_every_way(number, dtype, level):
    agrees(attention(f"t = Add (s, m) {SOFTMAX}"), {**scores(3), "m": masked(number)}, dtype, level)


CONSTANTS = """int64[1] zero = {0}, int64[1] last = {-1}, bool go = {1}, float four = {4}, float minus = {-1},
    float half = {0.5}, float none = {0}, int64[2] shape = {3, 4}, int64[3] batch = {1, 3, 4}, int64 two = {2},
    int64[3] rows = {0, 2, 1}, float[3,4] table = {0.1, 3, 2, -1, 4, 2, 1, 0, -3, 1, 2, -2}"""
PATHS = {
    "Identity": f"i = Identity (m) t = Add (i, s) {SOFTMAX}",
    "Unsqueeze": f"u = Unsqueeze (m, zero) i = Squeeze (u, zero) t = Add (s, i) {SOFTMAX}",
    "Expand": f"i = Expand (m, shape) t = Add (s, i) {SOFTMAX}",
    "Reshape": "i = Reshape (m, shape) t = Add (s, i) b = Reshape (t, batch) w = Softmax (b) p = Reshape (w, shape)",
    "Transpose": "i = Transpose (m) z = Transpose (s) t = Add (z, i) w = Softmax <axis = 0> (t) p = Transpose (w)",
    "Reshape to its shape": """t = Add (s, m) h = Shape (t) b = Reshape (t, batch) w = Softmax (b)
        p = Reshape (w, h)""",
    "turned later": "i = Transpose (m) z = Transpose (s) a = Add (z, i) t = Transpose (a) p = Softmax (t)",
    "Sum": f"t = Sum (s, m) {SOFTMAX}",
    "scaled": f"i = Mul (m, half) t = Add (s, i) {SOFTMAX}",
    "divided": f"a = Add (s, m) t = Div (a, four) {SOFTMAX}",
    "negated twice": f"n = Neg (m) t = Sub (s, n) {SOFTMAX}",
    "of a table": f"b = Gather (table, rows) i = Add (b, m) t = Add (s, i) {SOFTMAX}",
    "before a table": f"b = Gather (table, rows) a = Add (s, m) t = Add (a, b) {SOFTMAX}",
    "before scores": f"a = Add (s, m) t = Add (a, s) {SOFTMAX}",
    "two readers": "a = Add (s, m) b = Softmax (a) c = Add (s, m) d = Softmax (c) e = Add (b, d) p = Mul (e, half)",
    "LogSoftmax": "t = Add (s, m) l = LogSoftmax (t) p = Exp (l)",
    "decomposed": """t = Add (s, m) b = ReduceMax (t, last) c = Sub (t, b) e = Exp (c) z = ReduceSum (e, last)
        p = Div (e, z)""",
    "If": """p = If (go) <then_branch = u () => (float[3,4] f) { t = Add (s, m) f = Softmax (t) },
        else_branch = w () => (float[3,4] g) { g = Softmax (s) }>""",
    "after If": f"""i = If (go) <then_branch = u () => (float[3,4] f) {{ f = Identity (m) }},
        else_branch = w () => (float[3,4] g) {{ g = Mul (m, half) }}> t = Add (s, i) {SOFTMAX}""",
    "Loop": """p = Loop (two, go, s) <body = l (int64 i, bool c, float[3,4] x) => (bool c2, float[3,4] x2) {
        c2 = Identity (c) t = Add (x, m) x2 = Softmax (t) }>""",
}


@pytest.mark.mostly_slow(fast=13)
@pytest.mark.parametrize("number", [-1e4, LOWEST])
@pytest.mark.parametrize("path", PATHS)
def test_the_ways_of_a_mask(path, number):
    original = attention(PATHS[path], constants=CONSTANTS)
    feeds = {**scores(1), "m": masked(number)}
    result = agrees(original, feeds)
    assert convert_model(result) == result


@pytest.mark.parametrize("nodes", ["n = Neg (m)", "n = Sub (none, m)", "n = Mul (m, minus)"])
def test_a_mask_that_is_negated(nodes):
    original = attention(f"{nodes} t = Add (s, n) {SOFTMAX}", constants=CONSTANTS)
    agrees(original, {**scores(3), "m": -masked(LOWEST)})


@pytest.mark.parametrize("shape", ["[1,4]", "[4]", "[3,1]", ""])
def test_masks_of_other_shapes(shape):
    original = attention(f"t = Add (s, m) {SOFTMAX}", f"float{shape} m")
    dims = [int(dim) for dim in shape.strip("[]").split(",") if dim]
    for number in (-1e4, LOWEST):
        agrees(original, {**scores(1), "m": np.full(dims, number, np.float32)})


@pytest.mark.parametrize("opset", [7, 8, 11, 13, 18])
@pytest.mark.parametrize("number", [-1e4, LOWEST])
def test_masks_at_every_opset(opset, number):
    agrees(attention("t = Add (s, m) p = Softmax <axis = 1> (t)", opset=opset), {**scores(3), "m": masked(number)})


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("number", [-1e4, -1e9, LOWEST])
@pytest.mark.parametrize(
    "nodes",
    [
        "b = Add (m, n) t = Add (s, b)",
        "b = Min (m, n) t = Add (s, b)",
        "b = Add (s, m) t = Add (b, n)",
        "t = Sum (s, m, n)",
    ],
)
def test_two_masks(nodes, number):
    """Twice float32's lowest number is minus infinity, which counts even in a row of such numbers."""
    original = attention(f"{nodes} {SOFTMAX}", "float[3,4] m, float[3,4] n")
    agrees(original, {**scores(1), "m": masked(number, FIRST), "n": masked(number, SECOND)})
    agrees(original, {**scores(1), "m": masked(number), "n": masked(number, FIRST)})


@pytest.mark.parametrize("number", [-1e4, -1e9, LOWEST])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mask_times_an_input(number, dtype):
    original = attention(f"b = Mul (m, c) t = Add (s, b) {SOFTMAX}", "float[3,4] m, float c")
    agrees(original, {**scores(3), "m": masked(number), "c": np.array(1, np.float32)}, dtype)
    agrees(original, {**scores(3), "m": masked(1), "c": np.array(number, np.float32)}, dtype)
    assert convert_model(original, dtype=dtype)


MADE = {
    "Where": "b = Where (keep, none, low)",
    "Mul": "f = Cast <to = 1> (keep) o = Sub (one, f) b = Mul (o, low)",
    "Not": "n = Not (keep) f = Cast <to = 1> (n) b = Mul (f, low)",
}


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("made", MADE)
def test_a_mask_that_is_made_of_a_row_for_each_query(made, level, scale):
    constants = f"float none = {{0}}, float one = {{1}}, float low = {{{LOWEST}}}"
    original = attention(f"{MADE[made]} t = Add (s, b) {SOFTMAX}", "bool[3,4] keep", constants)
    result = agrees(original, {**scores(scale), "keep": SHOWN}, level=level)
    assert convert_model(result, level) == result


@pytest.mark.parametrize("made", MADE)
def test_a_mask_with_one_row_for_all_queries_stays_as_it_is(made):
    """It masks nothing or all of a sample, and engines fuse its sum with the Softmax."""
    constants = f"float none = {{0}}, float one = {{1}}, float low = {{{LOWEST}}}"
    result = convert_model(attention(f"{MADE[made]} t = Add (s, b) {SOFTMAX}", "bool[1,4] keep", constants))
    assert not {"Max", "Clip", "ReduceMax"} & count(result).keys()
    assert count(result)["Cast"] == 4 + (made != "Where")


@pytest.mark.parametrize("number", [-1e4, LOWEST])
def test_one_mask_of_many_layers_is_bounded_once(number):
    layers = "".join(f" t{n} = Add (a{n}, m) w{n} = Softmax (t{n}) a{n + 1} = MatMul (w{n}, r)" for n in range(12))
    text = f"""(float[4,8] q, float[8,4] k, float[4,4] m) => (float[4,4] a12) {{ a0 = MatMul (q, k) {layers} }}"""
    original = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}')
    original.graph.initializer.append(numpy_helper.from_array(normal(4, 4), "r"))
    shown = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    result = agrees(original, {"q": normal(4, 8), "k": normal(8, 4), "m": masked(number, shown)})
    assert count(result)["ReduceMax"] == 1
    assert count(result)["Clip"] == 12


def attention_op(mask: str) -> ModelProto:
    text = f"""(float[1,1,3,8] q, float[1,1,4,8] k, float[1,1,4,8] v, {mask}) => (float[1,1,3,8] y) {{
        y = Attention (q, k, v, m) }}"""
    return parser.parse_model(f'<ir_version: 11, opset_import: ["" : 23]> g {text}')


@pytest.mark.parametrize("number", [-1e4, LOWEST])
def test_the_mask_of_an_attention(number):
    """It returns 0 for a row of float32's lowest numbers."""
    feeds = {"q": 3 * normal(1, 1, 3, 8), "k": normal(1, 1, 4, 8), "v": normal(1, 1, 4, 8), "m": masked(number)}
    agrees(attention_op("float[3,4] m"), feeds)


STEPS = ("Identity", "Neg Neg", "Unsqueeze", "Expand", "half", "plus none", "Where", "factor")


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masks_at_random(dtype):
    """A mask on a random way to its scores, with random rows masked as a whole."""
    for seed in range(8):
        rng = Random(f"{dtype} {seed}")
        nodes, value = [], "m"
        for step, kind in enumerate(rng.sample(STEPS, rng.randint(0, 3))):
            after = f"m{step}"
            nodes.append(
                {
                    "Identity": f"{after} = Identity ({value})",
                    "Neg Neg": f"n{step} = Neg ({value}) {after} = Neg (n{step})",
                    "Unsqueeze": f"u{step} = Unsqueeze ({value}, zero) {after} = Squeeze (u{step}, zero)",
                    "Expand": f"{after} = Expand ({value}, shape)",
                    "half": f"{after} = Mul ({value}, half)",
                    "plus none": f"{after} = Add ({value}, none)",
                    "Where": f"{after} = Where (go, {value}, none)",
                    "factor": f"{after} = Mul ({value}, c)",
                }[kind]
            )
            value = after
        join = rng.choice((f"t = Add (s, {value})", f"t = Add ({value}, s)", f"n = Neg ({value}) t = Sub (s, n)"))
        original = attention(f"{' '.join(nodes)} {join} {SOFTMAX}", "float[3,4] m, float c", CONSTANTS)
        if not any("c)" in node for node in nodes):
            del original.graph.input[-1]
        shown = np.array([[rng.random() < 0.5 for _ in range(4)] for _ in range(3)])
        shown[rng.randrange(3)] = False
        feeds = {**scores(rng.choice((1, 3))), "m": masked(rng.choice((-1e4, -1e5, -1e9, LOWEST)), shown)}
        if len(original.graph.input) == 5:
            feeds["c"] = np.array(1, np.float32)
        agrees(original, feeds, dtype, rng.choice(("O1", "O2", "O3")))
