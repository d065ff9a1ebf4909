"""State that loops carry: what accumulates stays in float32, what is replaced, bounded or forgotten does not."""

from random import Random
from typing import Any

import numpy as np
import pytest
from every import every
from judge_numbers import emulated, evaluate, low_feeds, run_original
from onnx import ModelProto, defs, numpy_helper, parser
from properties import check_casts, check_onnx, check_types, frozen
from strategies.loops import random_loop

import onnxamp
from onnxamp._facts.dtypes import FORMATS

ROWS = 3000
WIDTH = 8
NUMBERS = {
    "zero": 0.0, "one": 1.0, "half": 0.5, "most": 0.999, "little": 0.001, "tiny": 1e-4,
    "turn": np.cos(0.003), "shift": np.sin(0.003),
}  # fmt: skip
KIND = "accumulated state"


def rotation() -> np.ndarray:
    matrix = np.eye(WIDTH, dtype=np.float32)
    matrix[:2, :2] = [[np.cos(0.01), -np.sin(0.01)], [np.sin(0.01), np.cos(0.01)]]
    return matrix


def slow() -> np.ndarray:
    """A filter whose slowest part fades within a thousand rows, and the fastest one at once."""
    axes = np.linalg.qr(np.random.default_rng(2).standard_normal((WIDTH, WIDTH)))[0]
    return (axes @ np.diag(np.linspace(0.1, 0.999, WIDTH)) @ axes.T).astype(np.float32)


def parse(text: str, opset: int = 18) -> ModelProto:
    rng = np.random.default_rng(0)
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> g {text}')
    weights = {name: np.array(number, np.float32) for name, number in NUMBERS.items()}
    weights |= {
        "w": (rng.standard_normal((WIDTH, WIDTH)) / 3).astype(np.float32), "rotation": rotation(), "slow": slow(),
        "zeros": np.zeros(WIDTH, np.float32), "ones": np.ones(WIDTH, np.float32),
        "two_rows": np.zeros((2, WIDTH), np.float32),
        "at0": np.array([0]), "at1": np.array([1]), "at2": np.array([2]), "row1": np.array([[1]]),
        "wide": np.array([1, WIDTH]), "flat": np.array([WIDTH]), "three": np.array(3),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def scan(body: str, states: str = "s", firsts: str = "zeros", row: str = "n", after: str = "y = MatMul (rows, w)",
         before: str = "e = Softplus (h)", shape: str = f"[{WIDTH}]") -> ModelProto:  # fmt: skip
    """A Scan over a dynamic number of rows; ``body`` makes the next states ``n`` and ``m`` of ``s`` and ``c``."""
    names = states.split()
    inside = ", ".join(f"float{shape} {name}" for name in names)
    outside = ", ".join(f"float{shape} {name}" for name in ("n", "m", "o")[: len(names)])
    finals = ", ".join(f"last_{name}" for name in names)
    return parse(f"""(float[T,{WIDTH}] x) => (float[T,{WIDTH}] y) {{ h = MatMul (x, w) {before}
        {finals}, rows = Scan <num_scan_inputs = 1, body = b ({inside}, float[{WIDTH}] e) =>
            ({outside}, float[{WIDTH}] row) {{ {body} row = Identity ({row}) }}> ({firsts}, e)
        {after} }}""")


def loop(body: str, first: str, after: str, *, kind: str = "float[4,8]", cond: str = "on = Identity (go)",
         most: str = "trips", start: str = "") -> ModelProto:  # fmt: skip
    return parse(f"""(int64 trips, float[4,{WIDTH}] x) => (float[4,{WIDTH}] y)
        <bool yes = {{1}}, int64 many = {{9000}}> {{
        h = MatMul (x, w)
        last = Loop ({most}, {start}, {first}) <body = b (int64 i, bool go, {kind} s) => (bool on, {kind} n) {{
            {body} {cond} }}>
        {after} }}""")


def rows(scale: float = 1.0) -> dict[str, Any]:
    return {"x": (np.random.default_rng(1).standard_normal((ROWS, WIDTH)) * scale).astype(np.float32)}


def trips(count: int) -> dict[str, Any]:
    return {"trips": np.array(count), "x": np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)}


def off(model: ModelProto, feeds: dict[str, Any], **options: Any) -> float:
    """The relative error of a conversion in which every low value is rounded."""
    want = run_original(model, feeds)
    assert want is not None
    result = onnxamp.convert_model(model, **options)
    have = emulated(result, low_feeds(result, feeds))
    return float(np.linalg.norm(want[0] - have[0]) / np.linalg.norm(want[0]))


def reasons(model: ModelProto, **options: Any) -> set[str]:
    return {hazard.reason for hazard in onnxamp.plan_model(model, **options).hazards}


NESTED = f"""n = Loop (three, , s) <body = l (int64 j, bool stay, float[{WIDTH}] v) => (bool still, float[{WIDTH}] z) {{
    still = Identity (stay) z = Add (v, e) }}>"""
BRANCHES = f"""r = ReduceMax <keepdims = 0> (e) k = Greater (r, half)
    n = If (k) <then_branch = t () => (float[{WIDTH}] p) {{ p = Add (s, e) }},
                else_branch = f () => (float[{WIDTH}] q) {{ q = Identity (s) }}>"""
FACTOR = "t = Tanh (e) u = Mul (t, tiny) f = Add (u, one)"
SINE = "p = Mul (rows, most) y = Sin (p)"
SCANS: dict[str, ModelProto] = {
    "sum": scan("n = Sum (s, e)"),
    "difference": scan("n = Sub (s, e)"),
    "mean": scan("m = Add (c, one) n = Add (s, e) r = Div (n, m)", "s c", "zeros, zeros", "r"),
    "updated mean": scan("m = Add (c, one) d = Sub (e, s) q = Div (d, m) n = Add (s, q)", "s c", "zeros, zeros"),
    "slow average": scan("a = Mul (s, most) b = Mul (e, little) n = Add (a, b)"),
    "slow step": scan("d = Sub (e, s) q = Mul (d, little) n = Add (s, q)"),
    "moves": scan("a = Reshape (s, wide) b = Add (a, e) c = Squeeze (b, at0) d = Identity (c) n = Reshape (d, flat)"),
    "double": scan("a = Cast <to = 11> (s) b = Cast <to = 11> (e) c = Add (a, b) n = Cast <to = 1> (c)"),
    "selection": scan("k = Greater (e, half) a = Add (s, e) n = Where (k, a, s)"),
    "branches": scan(BRANCHES),
    "inner loop": scan(NESTED),
    "list": scan("a = Slice (s, at1, at2, at0) u = Unsqueeze (e, at0) b = Add (a, u) n = Concat <axis = 0> (a, b)"
                 " r = Squeeze (b, at0)", "s", "two_rows", "r", shape=f"[2,{WIDTH}]"),
    "scattered": scan('u = Unsqueeze (e, at0) n = ScatterND <reduction = "add"> (s, row1, u) g = Gather (n, at1)'
                      " r = Squeeze (g, at0)", "s", "two_rows", "r", shape=f"[2,{WIDTH}]"),
    "swapped": scan("n = Identity (c) m = Add (s, e)", "s c", "zeros, zeros"),
    "product": scan(f"{FACTOR} n = Mul (s, f)", firsts="ones", before="e = Identity (h)", after="y = Log (rows)"),
    "quotient": scan(f"{FACTOR} n = Div (s, f)", firsts="ones", before="e = Identity (h)", after="y = Log (rows)"),
    "phase": scan("n = Add (s, e)", after="p = Mul (rows, shift) y = Sin (p)"),
    "wrapped phase": scan("q = Mul (e, tiny) a = Add (s, q) f = Floor (a) n = Sub (a, f)", after=SINE),
    "clipped": scan("q = Mul (e, tiny) a = Add (s, q) n = Clip (a, zero, one)"),
    "likelihood": scan("u = Unsqueeze (s, at0) t = Add (u, w) r = ReduceMax <keepdims = 0> (t, at1) n = Sub (r, e)"),
    "oscillator": scan("a = Mul (s, turn) b = Mul (c, shift) n = Sub (a, b) d = Mul (c, turn) f = Mul (s, shift)"
                       " m = Add (d, f)", "s c", "ones, zeros", before="e = Identity (h)"),
    "rotation": scan("n = MatMul (s, rotation)", firsts="ones", before="e = Identity (h)"),
    "slow filter": scan("a = MatMul (s, slow) n = Add (a, e)"),
    "slow filter by Gemm": scan("u = Unsqueeze (s, at0) a = Gemm <transB = 1> (u, slow, zeros) q = Squeeze (a, at0)"
                                " n = Add (q, e)"),
    "shares": scan("a = Mul (s, half) b = Mul (s, half) q = Add (a, b) n = Add (q, e)"),
}  # fmt: skip
WAYS = [(level, dtype) for dtype in FORMATS for level in ("O1", "O2", "O3")]


@pytest.mark.slow
@every(case=list(enumerate(SCANS.items())), parts=4)
def test_what_a_scan_accumulates_is_exact(case: tuple[int, tuple[str, ModelProto]]) -> None:
    index, (_, model) = case
    level, dtype = WAYS[index % len(WAYS)]
    assert off(model, rows(), level=level, dtype=dtype) < FORMATS[dtype].tolerance
    assert all(KIND in reasons(model, level=level, dtype=dtype) for level, dtype in WAYS)


@pytest.mark.parametrize("name", ["mean", "slow average", "phase", "product"])
def test_without_hazards_that_is_off(name: str) -> None:
    assert off(SCANS[name], rows(), level="O3", hazards=False) > 0.05


LOOPS = {
    "counter": (loop("n = Add (s, one)", "zero", "y = Mul (h, last)", kind="float"), 4500),
    "count-down": (loop("n = Sub (s, half)", "tiny", "k = Mul (last, one) y = Mul (h, k)", kind="float"), 4500),
    "growth": (loop("f = Add (little, one) n = Mul (s, f)", "h", "y = Mul (last, tiny)"), 13000),
    "doubling": (loop("n = Add (s, s)", "h", "y = Mul (last, tiny)"), 25),
    "halving": (loop("n = Mul (s, half)", "h", "k = Div (last, tiny) y = Div (k, tiny)"), 35),
    "vanishing": (loop("g = Sigmoid (x) c = Sub (one, g) n = Mul (s, c)", "h", "y = Div (last, tiny)"), 70),
    "decay": (loop("n = Mul (s, most)", "h", "y = Div (last, tiny)"), 5000),
    "growth before a product": (loop("n = Div (s, most)", "h", "y = MatMul (last, w)"), 12000),
    "solver": (loop("a = MatMul (s, w) t = Tanh (a) d = Mul (t, little) n = Sub (s, d)", "h", "y = Neg (last)"), 2500),
}  # fmt: skip


@pytest.mark.slow
@every(name=LOOPS, way=[("O2", "float16"), ("O3", "bfloat16")])
def test_what_a_loop_accumulates_is_exact(name: str, way: tuple[str, str]) -> None:
    model, count = LOOPS[name]
    level, dtype = way
    assert off(model, trips(count), level=level, dtype=dtype) < FORMATS[dtype].tolerance


@pytest.mark.slow
@every(cond=["on = Less (n, end)", "r = GreaterOrEqual (n, end) on = Not (r)"], dtype=FORMATS)
def test_a_loop_ends_that_waits_for_its_counter(cond: str, dtype: str) -> None:
    model = loop("n = Add (s, one)", "zero", "y = Mul (h, last)", kind="float", cond=cond, most="many", start="yes")
    model.graph.initializer.append(numpy_helper.from_array(np.array(5000, np.float32), "end"))
    assert off(model, trips(0), dtype=dtype) < FORMATS[dtype].tolerance


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("seed", range(12))
def test_random_loops_are_exact(seed: int) -> None:
    looped = random_loop(Random(seed))
    level, dtype = WAYS[seed % len(WAYS)]
    assert off(looped.model, looped.feeds, level=level, dtype=dtype) < FORMATS[dtype].tolerance
    result = onnxamp.convert_model(looped.model, level, dtype=dtype)
    assert [*check_onnx(looped.model, result), *check_casts(looped.model, result), *check_types(result)] == []
    assert frozen(onnxamp.convert_model(result, level, dtype=dtype)) == frozen(result)


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("hazards", [True, False])
def test_a_counter_passes_2048_in_real_float16(hazards: bool) -> None:
    """onnx's evaluator computes float16 in float16."""
    model = loop("n = Add (s, one)", "zero", "y = Mul (h, last)", kind="float", start="yes")
    feeds = trips(2500)
    want = run_original(model, feeds)
    have = evaluate(onnxamp.convert_model(model, "O3", hazards=hazards), feeds)
    assert want is not None
    assert have is not None
    error = float(np.median(np.abs(np.asarray(have[0], np.float32) / want[0] - 1)))
    assert error < 0.005 if hazards else error > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 60))
def test_more_random_loops_are_exact(seed: int) -> None:
    test_random_loops_are_exact(seed)


# --- what does not accumulate -----------------------------------------------------------------------------------

GATES = "a = MatMul (s, w) b = Add (a, e) z = Sigmoid (b) t = Tanh (b)"
MASK = """r = ReduceMax <keepdims = 0> (e) k = Greater (r, one) z = Cast <to = 1> (k)
    a = MatMul (s, w) b = Add (a, e) t = Tanh (b)"""
BLEND = "v = Sub (one, z) p = Mul (v, t) q = Mul (z, s) n = Add (p, q)"
FORGETTING = {
    "LSTM": scan("a = MatMul (c, w) b = Add (a, e) f = Sigmoid (a) i = Sigmoid (b) g = Tanh (b) fc = Mul (f, s)"
                 " ig = Mul (i, g) n = Add (fc, ig) t = Tanh (n) m = Mul (i, t)", "s c", "zeros, zeros", "m"),
    "GRU": scan(f"{GATES} {BLEND}"),
    "GRU of torch": scan(f"{GATES} d = Sub (s, t) q = Mul (z, d) n = Add (t, q)"),
    "GRU by a step": scan(f"{GATES} d = Sub (t, s) q = Mul (z, d) n = Add (s, q)"),
    "masked RNN": scan(f"{MASK} {BLEND}"),
    "selected RNN": scan("a = MatMul (s, w) t = Tanh (a) k = Greater (e, half) n = Where (k, t, s)"),
    "RNN": scan("a = MatMul (s, w) b = Add (a, e) n = Tanh (b)"),
    "RNN with Relu": scan("a = MatMul (s, w) b = Add (a, e) n = Relu (b)"),
    "hard gate": scan("z = Clip (e, zero, one) f = Mul (z, s) n = Add (f, e)"),
    "norm": scan("a = Add (s, e) q = Mul (a, a) t = ReduceSum <keepdims = 1> (q) r = Sqrt (t) n = Div (a, r)"),
    "layer norm": scan("a = Add (s, e) n = LayerNormalization (a, ones)"),
    "softmax": scan("a = Add (s, e) n = Softmax (a)"),
    "fast average": scan("a = Mul (s, half) b = Mul (e, half) n = Add (a, b)"),
    "maximum": scan("n = Max (s, e)"),
    "replaced": scan("n = Identity (e)"),
    "cache": scan("a = Slice (s, at1, at2, at0) u = Unsqueeze (e, at0) n = Concat <axis = 0> (a, u)"
                  " r = Squeeze (u, at0)", "s", "two_rows", "r", shape=f"[2,{WIDTH}]"),
}  # fmt: skip


@pytest.mark.slow
@every(name=FORGETTING, dtype=FORMATS)
def test_what_is_replaced_or_forgotten_may_be_low(name: str, dtype: str) -> None:
    assert KIND not in reasons(FORGETTING[name], dtype=dtype)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "norm", "fast average"])
def test_what_is_forgotten_is_right_in_low_precision(name: str) -> None:
    assert off(FORGETTING[name], rows()) < 1e-2


@pytest.mark.parametrize(
    ("body", "first", "count", "kept"),
    [
        ("n = Mul (s, most)", "h", 8, False),
        ("n = Mul (s, most)", "h", 9, True),
        ("t = Tanh (s) n = Add (s, t)", "h", 64, False),
        ("t = Tanh (s) n = Add (s, t)", "h", 65, True),
        ("n = Add (s, one)", "zero", 2048, False),
        ("n = Add (s, one)", "zero", 2049, True),
        ("n = Add (s, half)", "zero", 2048, False),
        ("n = Add (s, half)", "zero", 2049, True),
    ],
)
def test_short_loops_are_like_networks_of_that_depth(body: str, first: str, count: int, kept: bool) -> None:
    kind = "float" if first == "zero" else "float[4,8]"
    after = "y = Mul (h, last)" if first == "zero" else "y = Identity (last)"
    model = loop(body, first, after, kind=kind, most="count")
    model.graph.initializer.append(numpy_helper.from_array(np.array(count), "count"))
    assert (KIND in reasons(model)) == kept


def test_state_in_a_sequence_is_exact() -> None:
    model = parse(f"""(int64 trips, float[4,{WIDTH}] x) => (float[4,{WIDTH}] y) <int64 at = {{0}}> {{
        h = MatMul (x, w) first = SequenceConstruct (h)
        last = Loop (trips, , first) <body = b (int64 i, bool go, seq(float[4,{WIDTH}]) s) =>
            (bool on, seq(float[4,{WIDTH}]) n) {{ on = Identity (go) a = SequenceAt (s, at) b = Add (a, half)
            c = SequenceErase (s, at) n = SequenceInsert (c, b) }}>
        z = SequenceAt (last, at) y = Sin (z) }}""")
    assert off(model, trips(5000), level="O3") < 1e-2


def test_a_scan_of_few_rows_is_short() -> None:
    model = scan("t = Tanh (e) n = Add (s, t)")
    assert KIND in reasons(model)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 64
    assert KIND not in reasons(model)


def test_state_is_float32_wherever_it_passes() -> None:
    """The body's input and output, what enters and leaves, and the products around it in low precision."""
    plan = onnxamp.plan_model(SCANS["mean"], "O3")
    low = {row.key.partition(":")[0].rpartition("/")[2] for row in plan.rows if row.low}
    assert {"h", "y"} <= low
    assert low.isdisjoint({"n", "m", "r"})


@pytest.mark.skipif(defs.onnx_opset_version() < 26, reason="this onnx has no CumProd")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_products_along_an_axis_accumulate(level: str) -> None:
    model = parse("(float[T,8] x) => (float[T,8] y) <int64 axis = {0}> { f = Sigmoid (x) y = CumProd (f, axis) }", 26)
    assert {row.low for row in onnxamp.plan_model(model, level).rows if row.key.startswith("y:")} == {False}


def test_an_audit_names_state_that_accumulates_in_low_precision() -> None:
    broken = onnxamp.convert_model(SCANS["slow average"], "O3", hazards=False)
    texts = [finding.text for finding in onnxamp.audit_model(broken).findings]
    assert any(text.startswith("accumulates state in float16: 'last_s' multiplies it") for text in texts), texts
