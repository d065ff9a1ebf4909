"""Constants that a model computes: hazards ask for the value of an operand, whichever node it comes from."""

from itertools import count
from random import Random

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser
from strategies import Computed

import onnxamp

LOWEST = -3.4028234663852886e38
WAYS = [(dtype, level) for dtype in ("float16", "bfloat16") for level in ("O1", "O2", "O3")]


def model(text: str, opset: int = 18, domains: str = "", **weights: np.ndarray) -> ModelProto:
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}{domains}]> g {text}')
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return made


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def agrees(original: ModelProto, feeds: dict[str, np.ndarray], dtype: str = "float16", level: str = "O2") -> None:
    """Convert without samples, and compare on inputs that reveal the fault; converting again changes nothing."""
    result = onnxamp.convert_model(original, level, dtype=dtype)
    onnx.checker.check_model(result, full_check=True)
    found = onnxamp.diff_models(original, result, feeds, layers=False)
    assert found.passed, found.failure
    assert onnxamp.convert_model(result, level, dtype=dtype) == result


def precisions(original: ModelProto, level: str = "O2", **wishes: object) -> dict[str, set[bool]]:
    """First output of each node -> whether its variables are low."""
    found: dict[str, set[bool]] = {}
    for row in onnxamp.plan_model(original, level, **wishes).rows:
        found.setdefault(row.key.rpartition(":")[0].rpartition("/")[2], set()).add(row.low)
    return found


WEIGHT = random(16, 16) / 4
ROWS = random(4, 16)
ROWS[1] = 0


def guarded(
    computed: str, constants: str, joined: str = "d = Add (s, e)", divided: str = "q = Div (h, d)"
) -> ModelProto:
    """Rows of a product, divided by their sums, which an epsilon guards."""
    text = f"""(float[4,16] x) => (float[4,16] y) <int64[1] axis = {{1}}, {constants}> {{
        h = MatMul (x, w) a = Abs (h) s = ReduceSum (a, axis) {computed} {joined} {divided} y = MatMul (q, w) }}"""
    return model(text, w=WEIGHT)


EPSILONS = {
    "CastLike": ("e = CastLike (c, x)", "double c = {1e-12}"),
    "Cast": ("e = Cast <to = 1> (c)", "double c = {1e-12}"),
    "square": ("e = Mul (c, c)", "float c = {1e-6}"),
    "quotient": ("b = Mul (c, c) e = Div (b, h2)", "float c = {1e-5}, float h2 = {100.0}"),
    "Exp": ("e = Exp (c)", "float c = {-30.0}"),
    "Pow": ("e = Pow (c, p)", "float c = {10.0}, int64 p = {-12}"),
    "Sqrt": ("e = Sqrt (c)", "float c = {1e-24}"),
    "Reciprocal": ("e = Reciprocal (c)", "float c = {1e12}"),
    "Identity": ("b = Mul (c, c) e = Identity (b)", "float c = {1e-6}"),
    "Gather": ("e = Gather (t, i)", "float[3] t = {1.0, 1e-12, 70000.0}, int64 i = {1}"),
    "Expand": ("n = Shape (s) b = Mul (c, c) e = Expand (b, n)", "float c = {1e-6}"),
    "ConstantOfShape": (
        "n = Shape (s) b = ConstantOfShape <value = float[1] {1e-6}> (n) e = Mul (b, c)",
        "float c = {1e-6}",
    ),
    "value_float": ("b = Constant <value_float = 1e-6> () e = Mul (b, b)", "float unused = {0}"),
}  # fmt: skip


@pytest.mark.parametrize("origin", EPSILONS)
def test_an_epsilon_that_is_computed(origin):
    agrees(guarded(*EPSILONS[origin]), {"x": ROWS})


@pytest.mark.parametrize(("dtype", "level"), WAYS)
def test_a_computed_epsilon_in_every_way(dtype, level):
    agrees(guarded(*EPSILONS["CastLike"]), {"x": ROWS}, dtype, level)


JOINS = {
    "Sum": ("", "d = Sum (s, s, e)"),
    "Mean": ("", "d = Mean (s, e)"),
    "Max": ("", "d = Max (s, z, e)"),
    "Clip": ("", "d = Clip (s, e)"),
    "Sub": ("n = Neg (e)", "d = Sub (s, n)"),
    "Where": ("l = Less (s, e)", "d = Where (l, e, s)"),
    "Where not": ("g = Greater (s, e) l = Not (g)", "d = Where (l, e, s)"),
    "threshold": ("l = Less (s, e)", "d = Where (l, one, s)"),
    "scaled": ("", "b = Add (s, e) d = Mul (b, half)"),
    "first": ("m = ReduceMax (a, axis)", "b = Add (s, e) d = Add (b, m)"),
}


@pytest.mark.parametrize("join", JOINS)
def test_a_guard_that_joins_anywhere(join):
    computed, joined = JOINS[join]
    constants = "float e = {1e-12}, float z = {0.0}, float one = {1.0}, float half = {0.5}"
    agrees(guarded(computed, constants, joined), {"x": ROWS})


INVERSES = {
    "Reciprocal": (1e-6, "z = Reciprocal (d)"),
    "Div": (1e-6, "z = Div (one, d)"),
    "large numerator": (1e-3, "z = Div (hundred, d)"),
    "Pow": (1e-6, "z = Pow (d, minus)"),
    "Pow -1/2": (1e-12, "z = Pow (d, root)"),
    "Sqrt": (1e-12, "r = Sqrt (d) z = Reciprocal (r)"),
    "Exp": (1e-6, "l = Log (d) n = Neg (l) z = Exp (n)"),
    "moved": (1e-6, "r = Reciprocal (d) n = Shape (h) z = Expand (r, n)"),
    "cubed": (1e-4, "t = Sqrt (d) r = Reciprocal (t) p = Mul (r, r) z = Mul (r, p)"),
    "shifted": (1e-6, "r = Reciprocal (d) z = Add (r, one)"),
}


@pytest.mark.parametrize("inverse", INVERSES)
def test_the_inverse_of_a_guard(inverse):
    """A million is no float16, although the epsilon is float32."""
    epsilon, computed = INVERSES[inverse]
    constants = f"""float e = {{{epsilon}}}, float one = {{1.0}}, float hundred = {{100.0}}, float minus = {{-1.0}},
        float root = {{-0.5}}"""
    agrees(guarded("", constants, divided=f"{computed} q = Mul (h, z)"), {"x": ROWS})


@pytest.mark.parametrize("guard", ["Clip", "Max", "Add"])
def test_vectors_of_unit_length_may_be_low(guard):
    """As PyTorch normalizes: zeros divided by the bound are zeros."""
    text = f"""(float[4,16] x) => (float[4,16] y) <float e = {{1e-12}}, int64[1] ax = {{-1}}> {{
        h = MatMul (x, w) n = ReduceL2 (h, ax) d = {guard} (n, e) q = Div (h, d) y = MatMul (q, w) }}"""
    original = model(text, w=WEIGHT)
    assert precisions(original)["y"] == {True}
    agrees(original, {"x": ROWS})


def test_a_quotient_of_what_is_not_zero_with_its_guarded_divisor():
    text = """(float[4,16] x, float[4,1] m) => (float[4,16] y) <float e = {1e-6}, float tiny = {1e-6}> {
        h = MatMul (x, w) r = Relu (m) d = Add (r, e) q = Div (h, d) z = Mul (q, tiny) y = MatMul (z, w) }"""
    original = model(text, w=WEIGHT)
    agrees(original, {"x": random(4, 16), "m": np.array([[1], [0], [-1], [0.5]], np.float32)})
    related = guarded("", "float e = {1e-6}", divided="q = Div (h, d)")
    assert precisions(related)["y"] == {True}, "both are zero together, so the quotient is small"


@pytest.mark.parametrize(
    ("computed", "constants"),
    [
        ("e = Log (c)", "float c = {1e-10}"),
        ("e = Sub (c, d)", "float c = {1.0}, float d = {0.99991}"),
        ("b = Exp (c) e = Log (b)", "float c = {20.0}"),
        ("b = Mul (c, c) e = Div (b, d)", "float c = {1e6}, float d = {1e12}"),
    ],
    ids=["Log", "Sub", "Exp", "Mul"],
)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_constant_that_is_computed_of_what_low_precision_cannot_hold(computed, constants, level):
    text = f"""(float[4,16] x) => (float[4,16] y) <{constants}> {{
        h = MatMul (x, w) {computed} q = Mul (h, e) y = MatMul (q, w) }}"""
    agrees(model(text, w=WEIGHT), {"x": random(4, 16)}, level=level)


BRANCHES = """e = If (b) <then_branch = t () => (float u) { u = Constant <value_float = 1e-12> () },
    else_branch = f () => (float v) { v = Constant <value_float = 1e-10> () }>"""


@pytest.mark.parametrize(
    ("inputs", "constants", "computed"),
    [
        (", bool b", "", BRANCHES),
        (", int64 i", ", float[3] t = {1e-12, 1e-13, 1e-14}", "e = Gather (t, i)"),
        (", float e", ", float e = {1e-12}", ""),
    ],
    ids=["branches", "look-up", "default"],
)
def test_each_value_that_an_operand_may_have_counts(inputs, constants, computed):
    text = f"""(float[4,16] x{inputs}) => (float[4,16] y) <int64[1] axis = {{1}}{constants}> {{
        h = MatMul (x, w) a = Abs (h) s = ReduceSum (a, axis) {computed} d = Add (s, e)
        q = Div (h, d) y = MatMul (q, w) }}"""
    original = model(text, w=WEIGHT)
    feeds = {"x": ROWS, "b": np.array(True), "i": np.array(1, np.int64)}
    given = {entry.name for entry in original.graph.input} - {"e"}
    agrees(original, {name: feeds[name] for name in given})


@pytest.mark.parametrize("source", ["captured", "invariant"])
def test_constants_of_outside_count_in_bodies(source):
    name = "e" if source == "captured" else "k"
    text = f"""(float[4,16] x) => (float[4,16] y) <int64 n = {{3}}, bool go = {{1}}, double c = {{1e-12}},
        int64[1] axis = {{1}}> {{ h = MatMul (x, w) e = CastLike (c, x)
        y, last = Loop (n, go, h, e) <body = b (int64 i, bool on, float[4,16] g, float k)
        => (bool more, float[4,16] next, float same) {{ more = Identity (on) same = Identity (k) a = Abs (g)
        s = ReduceSum (a, axis) d = Add (s, {name}) q = Div (g, d) next = MatMul (q, w) }}> }}"""
    agrees(model(text, w=WEIGHT), {"x": ROWS})


@pytest.mark.parametrize(
    ("inside", "outside", "epsilon"),
    [("f = Add (s, e)", "q = Div (h, z)", 1e-12), ("d = Add (s, e) f = Reciprocal (d)", "q = Mul (h, z)", 1e-6)],
    ids=["guard", "inverse"],
)
def test_a_guard_that_leaves_a_branch(inside, outside, epsilon):
    text = f"""(float[4,16] x, bool b) => (float[4,16] y) <float e = {{{epsilon}}}, int64[1] axis = {{1}}> {{
        h = MatMul (x, w) z = If (b) <
            then_branch = t () => (float[4,1] f) {{ a = Abs (h) s = ReduceSum (a, axis) {inside} }},
            else_branch = u () => (float[4,1] g) {{ g = ReduceMax (h, axis) }}>
        {outside} y = MatMul (q, w) }}"""
    agrees(model(text, w=WEIGHT), {"x": ROWS, "b": np.array(True)})


@pytest.mark.parametrize("factor", ["q = Mul (h, tiny)", "q = Div (h, large)", "b = Mul (h, tiny) q = Relu (b)"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_factor_that_flushes_its_products(factor, level):
    text = f"""(float[4,16] x) => (float[4,16] y) <float tiny = {{1e-8}}, float large = {{1e8}}> {{
        h = MatMul (x, w) {factor} m = MatMul (q, w) y = MatMul (m, w) }}"""
    agrees(model(text, w=WEIGHT), {"x": random(4, 16)}, level=level)


def test_a_small_factor_of_integers_or_beside_a_sum_is_no_hazard():
    """65,535 of 16 bits, times its inverse, is 1; and what is added to something larger is lost in float32 as well."""
    counted = """(int32[4,16] n, float[4,16] x) => (float[4,16] y) <float tiny = {1e-8}> {
        f = Cast <to = 1> (n) q = Mul (f, tiny) y = MatMul (q, w) }"""
    assert precisions(model(counted, w=WEIGHT))["y"] == {True}
    residual = """(float[4,16] x) => (float[4,16] y) <float tiny = {1e-8}> {
        h = MatMul (x, w) q = Mul (h, tiny) r = Add (h, q) y = MatMul (r, w) }"""
    assert precisions(model(residual, w=WEIGHT))["y"] == {True}


KEEP = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
FEEDS = {"q": 3 * random(3, 8), "k": 3 * random(8, 4), "v": random(4, 8), "keep": KEEP}


def attention(nodes: str, constants: str = "float unused = {0}", mask: str = "bool[3,4] keep") -> ModelProto:
    text = f"""(float[3,8] q, float[8,4] k, float[4,8] v, {mask}) => (float[3,8] y) <{constants}> {{
        s = MatMul (q, k) {nodes} y = MatMul (p, v) }}"""
    return model(text)


@pytest.mark.parametrize(
    ("computed", "constants"),
    [
        ("n = CastLike (c, s)", "double c = {-1e9}"),
        ("n = CastLike (c, s)", f"double c = {{{LOWEST}}}"),
        ("n = Neg (c)", f"float c = {{{-LOWEST}}}"),
        ("n = Mul (c, d)", "float c = {1e5}, float d = {-1e4}"),
        ("n = Mul (c, d)", f"float c = {{{LOWEST}}}, float d = {{1.0}}"),
    ],
    ids=["CastLike", "lowest", "Neg", "Mul", "Mul of lowest"],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mask_that_is_computed(computed, constants, dtype):
    original = attention(f"{computed} t = Where (keep, s, n) p = Softmax (t)", constants)
    agrees(original, FEEDS, dtype)


MASKED = {
    "Add": "t = Add (s, m) p = Softmax (t)",
    "Identity": "i = Identity (m) t = Add (i, s) p = Softmax (t)",
    "Unsqueeze": "u = Unsqueeze (m, zero) i = Squeeze (u, zero) t = Add (s, i) p = Softmax (t)",
    "Sum": "t = Sum (s, m) p = Softmax (t)",
    "divided": "a = Add (s, m) t = Div (a, four) p = Softmax (t)",
    "LogSoftmax": "t = Add (s, m) l = LogSoftmax (t) p = Exp (l)",
    "decomposed": """t = Add (s, m) b = ReduceMax (t, last) c = Sub (t, b) e = Exp (c) z = ReduceSum (e, last)
        p = Div (e, z)""",
    "If": """p = If (go) <then_branch = u () => (float[3,4] f) { t = Add (s, m) f = Softmax (t) },
        else_branch = v () => (float[3,4] g) { g = Softmax (s) }>""",
}


@pytest.mark.parametrize("path", MASKED)
def test_a_mask_that_comes_in_as_input(path):
    """A row that is masked as a whole is uniform in float32, whatever its scores are."""
    constants = "int64[1] zero = {0}, int64[1] last = {-1}, bool go = {1}, float four = {4}"
    original = attention(MASKED[path], constants, "float[3,4] m")
    mask = np.where(KEEP, 0, LOWEST).astype(np.float32)
    feeds = {name: array for name, array in FEEDS.items() if name != "keep"}
    agrees(original, {**feeds, "m": mask})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("nodes", ["", "d = Div (t, four)", "n = Add (t, m)"])
def test_a_mask_that_is_subtracted(nodes, dtype):
    last = nodes[:1] or "t"
    original = attention(f"t = Sub (s, m) {nodes} p = Softmax ({last})", "float four = {4}", "float[3,4] m")
    if "Add" in nodes:  # it is added as well, so it is no mask
        assert "Min" not in [node.op_type for node in onnxamp.convert_model(original, dtype=dtype).graph.node]
        return
    feeds = {name: array for name, array in FEEDS.items() if name != "keep"}
    agrees(original, {**feeds, "m": np.where(KEEP, 0, -LOWEST).astype(np.float32)}, dtype)


def test_a_mask_before_max_broadcasts():
    text = """(float[3,8] q, float[8,4] k, float[4,8] v, float[3,4] m) => (float[3,8] y) {
        s = MatMul (q, k) t = Add (s, m) p = Softmax <axis = 1> (t) y = MatMul (p, v) }"""
    feeds = {name: array for name, array in FEEDS.items() if name != "keep"}
    agrees(model(text, opset=7), {**feeds, "m": np.where(KEEP, 0, LOWEST).astype(np.float32)})


@pytest.mark.parametrize(("dtype", "level"), WAYS)
def test_a_mask_that_comes_in_as_input_in_every_way(dtype, level):
    original = attention(MASKED["Add"], mask="float[3,4] m")
    mask = np.where(KEEP, 0, LOWEST).astype(np.float32)
    feeds = {name: array for name, array in FEEDS.items() if name != "keep"}
    agrees(original, {**feeds, "m": mask}, dtype, level)


@pytest.mark.parametrize(
    ("nodes", "mask"),
    [
        ("n = Sub (one, m) b = Mul (n, low) t = Add (s, b) p = Softmax (t)", "float[1,4] m"),
        ("t = Mul (s, m) p = Softmax (t)", "float[3,4] m"),
        ("c = Cast <to = 9> (m) t = Where (c, s, low) p = Softmax (t)", "float[3,4] m"),
        ("t = Add (s, m) r = Softmax (t) p = Add (r, m)", "float[3,4] m"),
    ],
    ids=["negated", "factor", "condition", "read elsewhere"],
)
def test_an_input_that_is_no_added_mask_is_not_bounded(nodes, mask):
    original = attention(nodes, f"float one = {{1.0}}, float low = {{{LOWEST}}}", mask)
    result = onnxamp.convert_model(original)
    assert "Max" not in [node.op_type for node in result.graph.node]


def test_a_mask_that_is_low_already_is_not_bounded():
    result = onnxamp.convert_model(attention(MASKED["Add"], mask="float[3,4] m"), keep_io_types=False)
    added = [node.op_type for node in result.graph.node if node.op_type in ("Cast", "Max")]
    assert "Cast" not in added


ML = ', "ai.onnx.ml" : 3'


@pytest.mark.parametrize(
    "nodes",
    [
        "e = ai.onnx.ml.LabelEncoder <keys_int64s = [0, 1, 2], values_floats = [0.0, 1.0, 70000.0]> (n)",
        """f = Cast <to = 1> (n)
        e = ai.onnx.ml.LinearRegressor <coefficients = [0.0, 0.0, 1.0, 1.0], intercepts = [70000.0]> (f)""",
        "f = Cast <to = 1> (n) e = ai.onnx.ml.Scaler <offset = [0.0], scale = [70000.0]> (f)",
        """f = Cast <to = 1> (n)
        e = ai.onnx.ml.Imputer <imputed_value_floats = [70000.0], replaced_value_float = 1.0> (f)""",
    ],
    ids=["LabelEncoder", "LinearRegressor", "Scaler", "Imputer"],
)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_large_numbers_in_attributes(nodes, level):
    text = f"""(int64[2,4] n) => (float[2,8] y) <float k = {{1e-5}}> {{ {nodes} f2 = Mul (e, k) y = MatMul (f2, w) }}"""
    rows = 1 if "Regressor" in nodes else 4
    original = model(text, domains=ML, w=random(rows, 8))
    agrees(original, {"n": np.array([[0, 1, 2, 1], [2, 2, 1, 0]], np.int64)}, level=level)


def test_the_offset_of_boxes_by_class_stays_float32():
    text = """(float[1,60,4] b, int64[60] c, float[1,1,60] s) => (int64[n,3] y) <int64 most = {100}, float iou = {0.5},
        float one = {1.0}, int64[2] axes = {0, 2}> { p = Mul (b, scale) f = Cast <to = 1> (c)
        l = ReduceMax <keepdims = 0> (p) m = Add (l, one) o = Mul (f, m) u = Unsqueeze (o, axes) d = Add (p, u)
        y = NonMaxSuppression (d, s, most, iou) }"""
    original = model(text, scale=np.ones(4, np.float32))
    found = precisions(original, "O3")
    assert found["f"] == found["m"] == found["o"] == found["d"] == {False}


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("kind", ["epsilon", "mask", "factor", "term"])
def test_constants_computed_at_random(kind):
    """Operands that low precision cannot hold, each computed in some way."""
    make, dtypes = RANDOM[kind]
    for seed in range(8):
        rng = Random(f"{kind} {seed}")
        original, feeds = make(rng)
        agrees(original, feeds, rng.choice(dtypes), rng.choice(("O1", "O2", "O3")))


def with_computed(original: ModelProto, number: float, rng: Random) -> ModelProto:
    """The model with nodes that compute the number ``c`` before all others."""
    names = map("computed{}".format, count())
    made = Computed(rng, np.array(number), 18, lambda: next(names), rng.randint(1, 4))
    named = onnx.helper.make_node("Identity", [made.result], ["c"])
    nodes = [*made.nodes, named, *original.graph.node]
    del original.graph.node[:]
    original.graph.node.extend(nodes)
    entry = next(entry for entry in original.graph.input if entry.name == "c")
    original.graph.input.remove(entry)
    return original


def computed_epsilon(rng: Random) -> tuple[ModelProto, dict[str, np.ndarray]]:
    joined = rng.choice(("d = Add (s, c)", "d = Add (c, s)", "d = Max (s, c)", "d = Sum (s, c, s)", "d = Clip (s, c)"))
    divided = rng.choice(("q = Div (h, d)", "r = Reciprocal (d) q = Mul (h, r)"))
    text = f"""(float[4,16] x, float c) => (float[4,16] y) <int64[1] axis = {{1}}> {{ h = MatMul (x, w) a = Abs (h)
        s = ReduceSum (a, axis) {joined} {divided} y = MatMul (q, w) }}"""
    return with_computed(model(text, w=WEIGHT), 10.0 ** -rng.randint(6, 14), rng), {"x": ROWS}


def computed_mask(rng: Random) -> tuple[ModelProto, dict[str, np.ndarray]]:
    nodes = rng.choice(("t = Where (keep, s, c)", "f = Cast <to = 1> (drop) m = Mul (f, c) t = Add (s, m)"))
    made = attention(f"drop = Not (keep) {nodes} p = Softmax (t)", mask="bool[3,4] keep, float c")
    return with_computed(made, rng.choice((-1e9, -1e6, -1e12)), rng), FEEDS


def computed_factor(rng: Random) -> tuple[ModelProto, dict[str, np.ndarray]]:
    nodes = rng.choice(("q = Mul (h, c)", "q = Mul (c, h)", "q0 = Mul (h, c) q = Abs (q0)"))
    text = f"(float[4,16] x, float c) => (float[4,16] y) {{ h = MatMul (x, w) {nodes} y = MatMul (q, w) }}"
    return with_computed(model(text, w=WEIGHT), 10.0 ** rng.choice((-8, -7, 6, 7)), rng), {"x": random(4, 16)}


def computed_term(rng: Random) -> tuple[ModelProto, dict[str, np.ndarray]]:
    nodes = rng.choice(("q = Add (h, c) r = Sub (q, c)", "q = Sub (c, h) r = Sub (c, q)"))
    text = f"(float[4,16] x, float c) => (float[4,16] y) {{ h = MatMul (x, w) {nodes} y = MatMul (r, w) }}"
    return with_computed(model(text, w=WEIGHT), 131072.0, rng), {"x": random(4, 16)}


LOW = ("float16", "bfloat16")
RANDOM = {
    "epsilon": (computed_epsilon, LOW),
    "mask": (computed_mask, LOW),
    "factor": (computed_factor, LOW),
    "term": (computed_term, ("float16",)),  # in the range of bfloat16
}
