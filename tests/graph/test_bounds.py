"""Bounds hold for what ONNX Runtime computes, and are close enough to prove something."""

from random import Random

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs.case import parse
from ml_dtypes import bfloat16
from onnx import helper, numpy_helper
from repository import ROOT
from strategies.loops import random_loop
from strategies.model import random_model
from strategies.rounded import rounded
from strategies.table import all_ops
from strategies.wild import wild

from onnxamp import convert_model
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._facts.tables import read_table
from onnxamp._graph.bounds.find import find_bounds
from onnxamp._graph.bounds.walk import rules
from onnxamp._graph.bounds.weights import _BLOCK, largest_stretch, least_stretch, range_of
from onnxamp._graph.graph import Graph
from onnxamp._runtime.sessions.session import make_session, run

OPS = sorted(rules().keys() & set(all_ops()))
SLACK = 1e-6
"""Relative error of float32 sums."""
SQUARABLE = 1e18
"""A bound on numbers whose sums of squares float32 holds."""
LARGEST = float(np.finfo(np.float32).max)
"""Where float32 ends. Bounds beyond are no bounds of what float32 computes."""


def every_value(model, feeds):
    """The values of the main graph by name; None if ONNX Runtime does not run the model."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    names = [name for node in model.graph.node for name in node.output if name and not name.endswith("/low")]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        return run(make_session(shown, optimize=False), feeds)
    except Exception:  # noqa: BLE001 - random models may run nowhere
        return {}


def ranges_of(feeds):
    """The range of each float input."""
    floats = {name: array for name, array in feeds.items() if getattr(array, "dtype", None) == np.float32}
    return tuple(
        (name, (float(array.min()), float(array.max())))
        for name, array in floats.items()
        if array.size and np.isfinite(array).all()
    )


def violations(model, feeds, low=FLOAT16, rng=None):
    """What leaves its bound, and how many float values have one.

    ``rng``: what is computed is rounded to low precision, all of it or some of it, although bounds are those of the
    model as it is.
    """
    graph = Graph.of(model)
    is_lowered = rng is not None
    bounds = find_bounds(graph, low, ranges_of(feeds), is_lowered)
    names = [name for node in model.graph.node for name in node.output if name]
    shown = rounded(model, low.name, rng if rng and rng.random() < 0.5 else None) if is_lowered else model
    values = every_value(shown, feeds)
    if is_lowered:
        originals = every_value(model, feeds)
        known = {name for name, array in originals.items() if not _is_special(array)}
    found = []
    count = 0
    arrays = [array for array in (*values.values(), *feeds.values()) if isinstance(array, np.ndarray)]
    has_nan = any(array.dtype.kind == "f" and np.isnan(array).any() for array in arrays)
    for name, array in values.items():
        own = name.removeprefix("rounded/")
        if own not in names or (is_lowered and own not in known):
            continue
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub" or not array.size:
            continue
        numbers = np.atleast_1d(array.astype(np.float64))
        if np.isnan(numbers).any():  # of no number, as the logarithm of -1
            continue
        if has_nan and array.dtype.kind in "iu":  # a NaN as an integer is any
            continue
        bound = bounds[graph.scopes[0].names[own]]
        # A number beyond float16, and squares beyond float32, are infinite in any precision.
        is_beyond = array.dtype == np.float16 or bound.magnitude > SQUARABLE
        if is_beyond and not np.isfinite(numbers).all():
            continue
        count += array.dtype.kind == "f" and not bound.is_unbounded
        found += _outside(name, numbers, bound)
    return found, count


def _is_special(array):
    return isinstance(array, np.ndarray) and array.dtype.kind == "f" and not np.isfinite(array).all()


def _outside(name, numbers, bound):
    """How numbers leave their bound."""
    finite = numbers[np.isfinite(numbers)]
    error = SLACK * np.abs(finite).max(initial=0.0)
    with np.errstate(over="ignore"):
        squares = numbers * numbers
    pairs = {
        "low": (-numbers.min(), -bound.low),
        "high": (numbers.max(), bound.high),
        "row": (np.sqrt(squares.sum(-1).max()), bound.row),
        "total": (np.abs(numbers).sum(-1).max(), bound.total),
    }
    if numbers.ndim > 1:
        pairs["column"] = (np.sqrt(squares.sum(-2).max()), bound.column)
    for what, (have, limit) in pairs.items():
        if have > limit + error and limit < LARGEST:
            yield f"{name}: {what} {have} > {limit}"
    if bound.step and np.isfinite(numbers).all() and np.any(np.fmod(numbers, bound.step)):
        yield f"{name}: not all are multiples of {bound.step}"
    if bound.width not in (None, numbers.shape[-1]):
        yield f"{name}: width {bound.width} of {numbers.shape}"


@pytest.fixture(autouse=True)
def quiet():
    ort.set_default_logger_severity(4)
    yield
    ort.set_default_logger_severity(2)


@pytest.mark.mostly_slow(fast=24)
@pytest.mark.parametrize("op", OPS)
def test_random_models_stay_within_their_bounds(op):
    for number in range(4):
        made = random_model(Random(f"{op}{number}"), op)
        assert violations(made.model, made.feeds)[0] == []


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("op", ["If", "Loop", "Scan", "SequenceMap"])
def test_bodies_stay_within_their_bounds(op):
    for number in range(6):
        made = random_model(Random(f"{op}{number}"), op)
        assert violations(made.model, made.feeds)[0] == []


def test_loops_that_run_long_stay_within_their_bounds():
    for seed in range(12):
        made = random_loop(Random(seed))
        assert violations(made.model, made.feeds)[0] == []


def test_random_models_try_every_rule_of_a_standard_op():
    standard = {op for op in rules() if onnx.defs.has(op)}
    assert standard - set(OPS) == set(), "add rows to tests/strategies/ops.toml"


@pytest.mark.parametrize("op", sorted(read_table("bounds")))
def test_each_formula_bounds_numbers_of_a_known_range(op):
    domain, _, name = op.rpartition("::")
    names = ["x", "w"][: 2 if name in ("Add", "BiasGelu", "Div", "PRelu", "Sub") else 1]
    node = helper.make_node(name, names, ["y"], domain=domain, **({"size": 3} if name == "LRN" else {}))
    inputs = [helper.make_tensor_value_info(one, 1, [1, 4, 8, 8]) for one in names]
    outputs = [helper.make_tensor_value_info("y", 1, [1, 4, 8, 8])]
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets)
    assert not bound_of(model, "y", ("x", (1.5, 2.5)), ("w", (0.5, 1.5))).is_unbounded


def weights(model, **arrays):
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def bound_of(model, name, *ranges):
    graph = Graph.of(model)
    return find_bounds(graph, FLOAT16, ranges)[graph.scopes[0].names[name]]


def matrix(rows, columns, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32)


NORMS = {
    "LayerNormalization": "n = LayerNormalization <axis = -1> (x, ones)",
    "decomposed": """mean = ReduceMean <axes = [-1]> (x) d = Sub (x, mean) s = Mul (d, d)
        v = ReduceMean <axes = [-1]> (s) e = Add (v, eps) r = Sqrt (e) n = Div (d, r)""",
    "by powers": """mean = ReduceMean <axes = [-1]> (x) d = Sub (x, mean) s = Pow (d, two)
        v = ReduceMean <axes = [-1]> (s) e = Add (eps, v) r = Pow (e, half) n = Div (d, r)""",
    "RMS by a reciprocal": """s = Mul (x, x) v = ReduceMean <axes = [-1]> (s) e = Add (v, eps) r = Sqrt (e)
        i = Reciprocal (r) n = Mul (x, i)""",
    "RMS, one over a root": """s = Pow (x, two) v = ReduceMean <axes = [-1]> (s) e = Add (v, eps) r = Sqrt (e)
        i = Div (one, r) n = Mul (i, x)""",
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_normalization_makes_up_for_an_input_of_any_size(norm):
    model = parse(f"(float[N,64] x) => (float[N,64] y) {{ {NORMS[norm]} y = MatMul (n, w) }}")
    numbers = {"eps": 1e-5, "two": 2.0, "half": 0.5, "one": 1.0}
    weights(
        model,
        w=np.eye(64, dtype=np.float32),
        ones=np.ones(64, np.float32),
        **{name: np.array(number, np.float32) for name, number in numbers.items()},
    )
    n = bound_of(model, "n")
    assert 8.0 <= n.row < 8.2  # sqrt(64), and its rounding
    assert bound_of(model, "y").magnitude < 8.3


def test_a_sum_that_stands_across_its_vectors_bounds_no_quotient():
    # keepdims = 0: row sums of a square matrix are broadcast along its columns.
    model = parse(
        """(float[8,8] x) => (float[8,8] y) { e = Exp (x) s = ReduceSum <keepdims = 0> (e, last) y = Div (e, s) }""",
    )
    weights(model, last=np.array([1], np.int64))
    assert bound_of(model, "y").high == np.inf


def test_softmax_and_its_parts_average_values():
    kinds = {
        "whole": "p = Softmax (x)",
        "parts": "m = ReduceMax <axes = [-1]> (x) d = Sub (x, m) e = Exp (d) s = ReduceSum (e, last) p = Div (e, s)",
    }
    for text in kinds.values():
        model = parse(f"(float[8,8] x, float[8,4] v) => (float[8,4] y) {{ {text} y = MatMul (p, v) }}")
        weights(model, last=np.array([-1], np.int64))
        y = bound_of(model, "y", ("v", (-2.0, 3.0)))
        assert -2.1 < y.low <= -2.0
        assert 3.0 <= y.high < 3.1


def test_products_of_normalized_rows_are_bounded_by_their_norms():
    model = parse(
        """(float[N,64] x) => (float[N,N] y) {
            n = LayerNormalization (x, ones) q = MatMul (n, a) k = MatMul (n, b) t = Transpose <perm = [1, 0]> (k)
            y = MatMul (q, t) }""",
    )
    orthogonal = np.linalg.qr(matrix(64, 64).astype(np.float64))[0]
    scaled = (orthogonal * 30.0).astype(np.float32)
    weights(model, a=scaled, b=scaled, ones=np.ones(64, np.float32))
    # 900 * 64 is within float16. Elements alone allow 64 times as much.
    assert 900 * 64 <= bound_of(model, "y").magnitude < 65504


def test_both_branches_count_and_a_growing_state_is_unknown():
    model = parse(
        """(float[4] x, bool b, int64 n) => (float[4] y, float[4] z, float[4] t) {
            y = If (b) <then_branch = one () => (float[4] p) { p = Sigmoid (x) },
                        else_branch = two () => (float[4] q) { s = Sigmoid (x) q = Mul (s, ten) }>
            z = Loop (n, , y) <body = more (int64 i, bool c, float[4] a) => (bool d, float[4] o) {
                d = Identity (c) o = Add (a, y) }>
            t = Loop (n, , y) <body = less (int64 i1, bool c1, float[4] a1) => (bool d1, float[4] o1) {
                d1 = Identity (c1) u = Add (a1, y) o1 = Tanh (u) }> }""",
    )
    weights(model, ten=np.array([10.0], np.float32))
    assert 10.0 <= bound_of(model, "y").high < 10.1
    assert bound_of(model, "z").high == np.inf
    assert bound_of(model, "t").high < 10.1


def test_quantized_numbers_are_bounded_by_their_scales():
    model = parse(
        "(float[N,8] x) => (float[N,8] y) { q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }",
    )
    weights(model, s=np.array(0.5, np.float32), z=np.array(3, np.int8))
    y = bound_of(model, "y")
    assert -65.7 < y.low <= -65.5  # (-128 - 3) / 2
    assert 62.0 <= y.high < 62.2


def test_no_input_overflows_a_transformer():
    low = convert_model(ROOT / "models" / "encoder.onnx")
    bounds = find_bounds(Graph.of(low), FLOAT16)
    computed = [value for value in bounds.at_risk if bounds.graph.producer(value) is not None]
    unsafe = [value for value in computed if not bounds.is_safe(value)]
    # What adds the attention mask, an input that could hold any integer, and the mask itself.
    assert len(computed) - len(unsafe) >= 75
    assert all(
        "mask" in bounds.graph.values[value].name or "scores" in bounds.graph.values[value].name for value in unsafe
    )


def test_bounds_allow_for_rounding():
    model = parse("(float[N,64] x) => (float[N,64] y) { n = Softmax (x) y = Mul (n, w) }")
    weights(model, w=np.full(64, 65504.0, np.float32))
    graph = Graph.of(model)
    assert find_bounds(graph, FLOAT16)[graph.scopes[0].names["y"]].high > 65504


def test_a_nan_in_a_large_constant_leaves_its_range_unknown():
    numbers = np.zeros(_BLOCK + 1, np.float32)
    assert range_of(numbers) == (0, 0)
    numbers[3] = np.nan
    assert range_of(numbers) == (-np.inf, np.inf)


@pytest.mark.parametrize("kind", [np.float16, bfloat16])
def test_the_range_of_16_bits_is_that_of_the_numbers(kind):
    rng = np.random.default_rng(0)
    for mask, sign in ((0xFFFF, 0), (0x7FFF, 0), (0xFFFF, 0x8000), (0x83FF, 0)):
        for _ in range(500):
            bits = rng.integers(0, 1 << 16, rng.integers(1, 6)).astype(np.uint16)
            numbers = (bits & np.uint16(mask) | np.uint16(sign)).view(kind)
            wide = numbers.astype(np.float32)
            has_nan = bool(np.isnan(wide).any())
            assert range_of(numbers) == ((-np.inf, np.inf) if has_nan else (wide.min(), wide.max()))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 3), (64, 200), (2, 16, 16)])
@pytest.mark.parametrize("kind", ["normal", "positive", "rank one", "zero"])
def test_the_largest_singular_value_is_bounded_closely(shape, kind):
    """Closely enough to prove what the value itself would, and never by less than it."""
    draw = np.random.default_rng(0)
    makers = {
        "normal": draw.standard_normal(shape),
        "positive": draw.random(shape),
        "rank one": np.ones(shape) * draw.standard_normal(shape[-1]),
        "zero": np.zeros(shape),
    }
    weight = makers[kind].astype(np.float32)
    text = "(float[{}] x) => (float[{}] y) {{ y = MatMul (x, w) }}"
    wide, narrow = (",".join(map(str, (*shape[:-2], 4, size))) for size in shape[-2:])
    graph = Graph.of(weights(parse(text.format(wide, narrow), 17), w=weight))
    value = graph.scopes[0].names["w"]
    exact = np.linalg.norm(weight.astype(np.float64), 2, axis=(-2, -1)).max()
    assert exact <= largest_stretch(graph, value) <= 1.12 * exact
    assert least_stretch(graph, value) <= exact * (1 + 1e-6)


def test_indices_are_bounded_by_the_tables_that_they_look_up():
    text = """(int64[4] ids, int64[4] other) => (float[4,8] y, float[4] z) {
        y = Gather (table, ids) c = Cast <to = 1> (ids) z = Mul (c, c) }"""
    model = weights(parse(text, 17), table=np.zeros((50, 8), np.float32))
    assert bound_of(model, "ids").low == -50
    assert bound_of(model, "ids").high == 49
    assert bound_of(model, "z").high < 2600
    assert bound_of(model, "other").high > 1e18


def test_bounds_that_leave_the_range_of_doubles_are_unknown():
    products = " ".join(f"a{n + 1} = MatMul (a{n}, w)" for n in range(12))
    text = f"(float[4,8] a0) => (float[4,16] y) {{ {products} y = Concat <axis = -1> (a12, a12) }}"
    model = weights(parse(text, 17), w=np.full((8, 8), 1e30, np.float32))
    assert bound_of(model, "y", ("a0", (-1.0, 1.0))).is_unbounded


def test_an_op_that_is_older_than_its_schema_is_bounded():
    model = parse("(float[N,64] x) => (float[N,64] y) { y = LayerNormalization (x, ones) }", 12)
    assert bound_of(weights(model, ones=np.ones(64, np.float32)), "y").magnitude < 8.1


def test_tiny_weights_are_bounded_although_their_squares_vanish():
    small = np.full((4, 8), 1e-30, np.float32)
    model = weights(parse("(float[2,4] x) => (float[2,8] y) { y = MatMul (x, w) }", 17), w=small)
    assert bound_of(model, "y", ("x", (1.0, 1e30))).high >= 4
    graph = Graph.of(model)
    exact = np.linalg.norm(small.astype(np.float64), 2)
    assert exact <= largest_stretch(graph, graph.scopes[0].names["w"]) <= 1.12 * exact


def test_integers_are_cut_off_and_wrap_around():
    text = "(float[4] x) => (int64[4] y, int64[4] z) { i = Cast <to = 7> (x) y = Div (i, two) z = Mul (i, big) }"
    model = weights(parse(text, 17), two=np.array(2, np.int64), big=np.array(2**62, np.int64))
    assert bound_of(model, "y", ("x", (7.0, 7.5))).low <= 3
    assert bound_of(model, "z", ("x", (7.0, 7.5))).low < 0


def test_the_reciprocal_of_a_negative_zero_is_negative():
    model = weights(parse("(float[4] x) => (float[4] y) { y = Reciprocal (x) }", 17))
    assert bound_of(model, "y", ("x", (0.0, 1.0))).low == -np.inf


def test_gelu_by_tanh_is_within_its_bound():
    model = parse('(float[4] x) => (float[4] y) { y = Gelu <approximate = "tanh"> (x) }', 20)
    for low in np.linspace(-4, -0.8, 33):
        y = every_value(model, {"x": np.full(4, low, np.float32)})["y"]
        bound = bound_of(model, "y", ("x", (float(low), float(low))))
        assert bound.low <= y.min() <= y.max() <= bound.high


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_extreme_numbers_stay_within_their_bounds(op):
    for number in range(4):
        rng = Random(f"extreme {op}{number}")
        made = wild(random_model(rng, op), rng)
        assert violations(made.model, made.feeds)[0] == []


@pytest.mark.parametrize("kind", ["alone", "with first cells"])
def test_cells_grow_by_one_in_each_step(kind):
    given = "" if kind == "alone" else ", , , , c"
    model = parse(
        f"""(float[7,1,4] x, float[1,1,3] c) => (float[1,1,3] z) {{
            y, h, z = LSTM <hidden_size = 3> (x, w, r{given}) }}""",
        17,
    )
    draw = np.random.default_rng(0)
    shapes = {"w": (1, 12, 4), "r": (1, 12, 3)}
    weights(model, **{name: 9 * draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})
    limit = bound_of(model, "z", ("c", (-2.0, 2.0))).magnitude
    assert limit < (7.1 if kind == "alone" else 9.1)
    for seed in range(8):
        draw = np.random.default_rng(seed)
        feeds = {"x": 9 * draw.standard_normal((7, 1, 4)), "c": draw.uniform(-2, 2, (1, 1, 3))}
        z = every_value(model, {name: array.astype(np.float32) for name, array in feeds.items()})["z"]
        assert np.abs(z).max() <= limit


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("batched", [0, 1])
def test_sums_of_transposed_factors(turned, batched):
    """An axis of 4,096 ones, wherever FusedMatMul reads it."""
    shape = [4096, 2, 3] if (batched, turned) == (1, 1) else [2, 4096, 3] if turned else [2, 3, 4096]
    if batched and not turned:
        shape = [3, 2, 4096]
    attributes = {"transA": turned, "transBatchA": batched}
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["a"]),
        helper.make_node("Sigmoid", ["z"], ["b"]),
        helper.make_node("FusedMatMul", ["a", "b"], ["y"], domain="com.microsoft", **attributes),
    ]
    inputs = [helper.make_tensor_value_info(name, 1, size) for name, size in (("x", shape), ("z", [2, 4096, 5]))]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", 1, [2, 3, 5])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    feeds = {"x": np.full(shape, 9, np.float32), "z": np.full((2, 4096, 5), 9, np.float32)}
    assert violations(model, feeds) == ([], 3)


BROADCAST = {
    "an axis of one factor alone": (
        """(float[i,2] x, float[2] z) => (float[2] y) {
            a = Tanh (x) b = Tanh (z) y = Einsum <equation = "ij,j->j"> (a, b) }""",
        {"x": np.full((1000, 2), 9, np.float32), "z": np.full(2, 9, np.float32)},
    ),
    "a summed axis that is broadcast": (
        """(float[3,5] x, float[1,2] z) => (float[3,2] y) {
            a = Tanh (x) b = Tanh (z) y = Einsum <equation = "ij,jk->ik"> (a, b) }""",
        {"x": np.full((3, 5), 9, np.float32), "z": np.full((1, 2), 9, np.float32)},
    ),
    "rows of a product with a vector": (
        """(float[100,4] x) => (float y) <float[4] w = {1, 1, 1, 1}> {
            p = Softmax <axis = -1> (x) v = MatMul (p, w) y = ReduceSum <keepdims = 0> (v) }""",
        {"x": np.zeros((100, 4), np.float32)},
    ),
    "norms of two unknown sizes": (
        """(float[1,a] x, float[1,b] z) => (float[1,1] y) <int64[1] ax = {-1}> {
            p = Softmax <axis = -1> (x) q = Softmax <axis = -1> (z) r = Add (p, q) y = ReduceSum (r, ax) }""",
        {"x": np.zeros((1, 1), np.float32), "z": np.zeros((1, 1000), np.float32)},
    ),
    "gates of a GRU that are negative": (
        """(float[3,1,1] x, float[1,3,1] w, float[1,3,1] r, float[1,1,1] h) => (float[3,1,1,1] y) {
            y = GRU <hidden_size = 1, activations = ["Tanh", "Tanh"]> (x, w, r, , , h) }""",
        {"x": np.full((3, 1, 1), -9, np.float32), "w": np.float32([[[9], [0], [-9]]]),
         "r": np.zeros((1, 3, 1), np.float32), "h": -np.ones((1, 1, 1), np.float32)},
    ),
    "a Gelu near zero": (
        "(float[4] x) => (float[4] y) { g = com.microsoft.Gelu (x) n = Neg (g) y = Reciprocal (n) }",
        {"x": np.float32([-6, -5.97, -5.95, -5.9])},
    ),
    "an Elu near zero": ("(float[2] x) => (float[2] y) { y = Elu (x) }", {"x": np.float32([-1e-6, -9e-7])}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROADCAST)
def test_bounds_that_strangers_broke(name):
    text, feeds = BROADCAST[name]
    model = parse(text, 18)
    if "com.microsoft" in text:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert violations(model, feeds)[0] == []


@pytest.mark.parametrize("text", [
    "(float[3,4] x) => (float[0,4] y) <float[0,3] w = {}> { e = Exp (x) d = Mul (e, e) y = MatMul (w, d) }",
    "(float[1,0,4,4] x) => (float[1,0,4,4] y) <float[0] w = {}> { a = Exp (x) y = BatchNormalization (a, w, w, w, w) }",
    """(float[a,4] x) => (float[a,4] y) <float[4] w = {1, 1, 1, 1}> {
        e = Exp (x) y = LayerNormalization <epsilon = 0.0> (e, w) }""",
])  # fmt: skip
def test_empty_weights_and_no_epsilon(text):
    graph = Graph.of(parse(text, 17))
    find_bounds(graph, FLOAT16)


def test_rows_are_added_one_after_another():
    """Along the first axis, NumPy loses a rounding error with each row."""
    weight = np.full((524288, 2), 1.015, np.float32)
    model = parse("(float[1,524288] x) => (float[1,2] y) { y = MatMul (x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    graph = Graph.of(model)
    value = next(value.index for value in graph.values if value.name == "y")
    exact = float(weight.astype(np.float64).sum(0)[0])
    assert find_bounds(graph, FLOAT16, (("x", (1.0, 1.0)),))[value].high >= exact


WIDENED = {
    "a power of a vector": (
        "(float[1] x) => (float[1] y) { p = Pow (x, e) y = ReduceSum (p) }",
        {"e": np.full(700, 2.0)}, {"x": (0.0, 10.0)},
    ),
    "groups without places": (
        """(float[2,512] x) => (float[2,1] y) <int64[1] last = {-1}> {
            n = GroupNormalization <num_groups = 64> (x, s, b) m = Relu (n) y = ReduceSum (m, last) }""",
        {"s": np.ones(512), "b": np.zeros(512)}, {"x": (-10.0, 10.0)},
    ),
    "a channel that is picked": (
        """(float[2,2,1] x) => (float[2,2,1] y) <int64[2] other = {1, 0}> { s = Gather (scales, other)
            y = BatchNormalization (x, s, b, m, v) }""",
        {"scales": [1, 675], "b": [0, 0], "m": [0, 0], "v": [1e-4, 1000]}, {"x": (0.0, 1.0)},
    ),
    "a quotient that is broadcast": (
        """(float[4,1] x) => (float[4,1] y) <int64[1] last = {-1}> { q = Mul (x, x) s = ReduceSum (q, last)
            a = Add (s, e) r = Sqrt (a) d = Div (x, r) y = ReduceL2 (d, last) }""",
        {"e": np.full(64, 1e-6)}, {"x": (-1.0, 1.0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDENED)
def test_vectors_are_those_of_the_result(name):
    """Norms of an input are no norms of a result that has longer vectors, or other channels."""
    text, arrays, ranges = WIDENED[name]
    model = weights(parse(text, 18), **{key: np.asarray(array, np.float32) for key, array in arrays.items()})
    model = onnx.shape_inference.infer_shapes(model)
    (low, high) = ranges["x"]
    sizes = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    rng = np.random.default_rng(0)
    for x in (np.full(sizes, high), np.full(sizes, low), rng.choice([low, high], sizes)):
        assert violations(model, {"x": x.astype(np.float32)})[0] == []
