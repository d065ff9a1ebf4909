"""What rounding each value costs, by one backward pass: against Jacobians, conversions and other budgets."""

from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from counting import calls
from graphs.case import add_weights, parse
from judge_numbers import emulated, run_original
from onnx import ModelProto
from quantized import float_network, images, quantized
from repository import ROOT

from onnxamp import apply_plan, convert_model, diff_models, plan_model, random_samples
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._facts.providers import emulated_arithmetic
from onnxamp._gradients.expansion import expanded
from onnxamp._gradients.passes import Sensitivities
from onnxamp._gradients.sensitivity import GradientWalk
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Ports
from onnxamp._model.model import Model
from onnxamp._rewrite.passes.upgrade import upgraded
from onnxamp._runtime.engines import engine_on

RANDOM = np.random.default_rng(0)


def measured(
    model: ModelProto, feeds: dict[str, Any], budget: int = 1 << 27, target: str = "cuda", **lowered: Ports
) -> Sensitivities:
    (found,) = together(model, {0: feeds}, budget, target, **lowered)
    return found


def together(
    model: ModelProto, feeds: dict[int, dict[str, Any]], budget: int = 1 << 27, target: str = "cuda", **lowered: Ports
) -> list[Sensitivities]:
    proto = upgraded(Graph.of(model), 18).model
    executable = engine_on("cpu").open(Model(proto), budget=budget)
    return list(GradientWalk(executable, FLOAT16, emulated_arithmetic(target), lowered).run_together(feeds))


def rounding(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What each element is off by once it is rounded."""
    return array.astype(np.float16).astype(np.float64) - array


SMALL = "(float[1,6] x) => (float[1,1] y) { h = MatMul (x, w) t = Tanh (h) y = MatMul (t, v) }"
X = RANDOM.standard_normal((1, 6)).astype(np.float32)
W = RANDOM.standard_normal((6, 5)).astype(np.float32)
V = RANDOM.standard_normal((5, 1)).astype(np.float32)


def test_costs_are_squared_gradients_times_known_roundings() -> None:
    """Of a single output the signs do not matter: the gradient is the Jacobian."""
    found = measured(add_weights(parse(SMALL, 18), {"w": W, "v": V}), {"x": X}).values
    h = X.astype(np.float64) @ W
    y = np.tanh(h) @ V
    before = (1 - np.tanh(h) ** 2) * V.T
    gradients = {"h": (before, h), "t": (V.T, np.tanh(h)), "w": (X.T @ before, W), "v": (np.tanh(h).T, V), "y": (1, y)}
    for name, (gradient, value) in gradients.items():
        cost = np.sum((gradient * rounding(value.astype(np.float32))) ** 2) / y[0, 0] ** 2
        assert found[name].costs[0] == pytest.approx(cost, rel=1e-2), name
    assert found["h"].largest == pytest.approx(np.abs(h).max())


@pytest.mark.parametrize("name", ["classifier", "encoder", "recurrent", "unet"])
def test_they_add_up_to_the_error_of_a_conversion(name: str) -> None:
    """Everything is in low precision, weights, inputs and outputs included."""
    model = onnx.load(ROOT / "models" / f"{name}.onnx")
    samples = random_samples(model, 1)
    low = convert_model(model, "O3", hazards=False, fold=False, keep_io_types=False)
    error = max(row.rel_l2 for row in diff_models(model, low, samples, provider="cpu", layers=False).outputs)
    costs = [row.costs[:-1] for row in measured(model, dict(samples[0])).values.values()]
    predicted = np.sum(costs, axis=0).max() ** 0.5
    assert 1 / 1.6 < error / predicted < 1.6


@pytest.mark.slow
def test_pieces_show_what_the_whole_shows() -> None:
    model = onnx.load(ROOT / "models" / "encoder.onnx")
    feeds = dict(random_samples(model, 1)[0])
    whole, pieces = measured(model, feeds), measured(model, feeds, budget=1)
    assert pieces.values.keys() == whole.values.keys()
    for name, row in whole.values.items():
        assert pieces.values[name].costs == pytest.approx(row.costs, rel=1e-3, abs=1e-14), name
        assert pieces.values[name].largest == pytest.approx(row.largest, rel=1e-5)


def test_readers_of_a_value_are_told_apart() -> None:
    text = "(float[64] x) => (float[64] y) { t = Tanh (x) a = Mul (t, big) b = Sqrt (one) e = Exp (t) y = Add (a, e) }"
    model = add_weights(parse(text, 18), {"big": np.full(1, 100, np.float32), "one": np.ones(1, np.float32)})
    x = RANDOM.uniform(0.1, 1, 64).astype(np.float32)
    found = measured(model, {"x": x}).values["t"]
    assert found.read["a"][0] > 100 * found.read["e"][0] > 0
    assert found.read["a"][0] < found.costs[0] < 1.2 * found.read["a"][0]


def test_a_node_without_a_rule_passes_its_energy_on() -> None:
    text = "(float[4,64] x) => (float[4,64] y) { t = Tanh (x) [alone] n = LpNormalization (t) y = Exp (n) }"
    ruled = text.replace(
        "[alone] n = LpNormalization (t)", "l = ReduceL2 <keepdims = 1> (t, last) n = Div (t, l)"
    ).replace("{ t", "<int64[1] last = {-1}> { t")
    x = {"x": RANDOM.standard_normal((4, 64)).astype(np.float32)}
    found, exact = measured(parse(text, 18), x), measured(parse(ruled, 18), x)
    assert found.spread == ("alone",)
    assert exact.spread == ()
    assert found.values["n"].costs[0] == pytest.approx(exact.values["n"].costs[0], rel=0.3)
    assert 0.02 < found.values["t"].costs[0] / exact.values["t"].costs[0] < 50


@pytest.mark.parametrize(("bias", "odd"), [(-0.04, 0.1), (1.0, -np.inf)], ids=["results", "sentinels"])
def test_what_is_undefined_does_not_count_where_nodes_are_moved(bias: float, odd: float) -> None:
    """Nor do elements that no output depends on, such as those of masks: the others cost what they cost alone."""
    nodes = f"n = LRN <size = 1, alpha = 1.0, beta = 0.5, bias = {bias}> (t) u = IsNaN (n) y = Where (u, zero, n)"
    model = parse(f"(float[1,4,8,n] x) => (float[1,4,8,n] y) {{ t = Mul (x, one) {nodes} }}", 18)
    model = add_weights(model, {"one": np.ones(1, np.float32), "zero": np.zeros(1, np.float32)})
    x = RANDOM.uniform(0.5, 1, (1, 4, 8, 8)).astype(np.float32)
    partly = np.concatenate([x, np.full((1, 4, 8, 2), odd, np.float32)], 3)
    whole, found = measured(model, {"x": x}), measured(model, {"x": partly})
    assert found.spread == whole.spread != ()
    for name in ("x", "t"):
        assert 0.3 < found.values[name].costs[0] / whole.values[name].costs[0] < 3


@pytest.mark.parametrize("ops", ["s = Sqrt (x)", "l = ReduceLogSum (x, axis) s = Exp (l)"])
def test_an_infinite_derivative_does_not_spread(ops: str) -> None:
    constants = "<int64[1] axis = {1}, float c = {0.1}>"
    model = parse(f"(float[4,1] t) => (float[4,1] y) {constants} {{ x = Sub (t, c) {ops} y = Mul (s, x) }}", 18)
    x = np.array([[0.1], [1.1], [2.2], [3.3]], np.float32)
    assert all(np.isfinite(row.costs).all() for row in measured(model, {"t": x}).values.values())


def test_a_mask_that_is_exact_costs_nothing_however_large_its_gradient_is() -> None:
    text = (
        "(float[8] x, float[8] m) => (float[8] y) { i = Sub (one, m) l = Mul (i, low) s = Mul (x, c) y = Add (s, l) }"
    )
    weights = {"one": 1.0, "low": np.finfo(np.float32).min, "c": 1e-3}
    model = add_weights(parse(text, 18), {name: np.full(1, n, np.float32) for name, n in weights.items()})
    x = RANDOM.standard_normal(8).astype(np.float32)
    found = measured(model, {"x": x, "m": np.arange(8, dtype=np.float32).clip(0, 1)}).values
    assert found["i"].costs[0] == 0 < found["s"].costs[0] < 1e-6


def test_accumulators_of_the_target_count() -> None:
    model = add_weights(
        parse("(float[4,3000] x) => (float[4,4] y) { y = MatMul (x, w) }", 18),
        {"w": RANDOM.random((3000, 4)).astype(np.float32) / 1500},
    )
    x = {"x": RANDOM.random((4, 3000)).astype(np.float32)}
    assert measured(model, x).values["y"].summed == ()
    row = measured(model, x, target="webgpu").values["y"]
    assert row.summed[0] > 10 * row.costs[0] > 0


def test_what_decides_is_told_apart_from_outputs() -> None:
    text = (
        "(float[1,8] x) => (float[1,2] y) { s = Sigmoid (x) v, i = TopK (s, two) y = GatherElements <axis = 1> (x, i) }"
    )
    model = parse(text.replace("{ s", "<int64[1] two = {2}> { s"), 18)
    found = measured(model, {"x": X.reshape(1, -1).repeat(2, 1)[:, :8] + np.arange(8, dtype=np.float32)}).values
    assert found["s"].costs[0] == 0 < found["s"].costs[-1]


def test_integers_are_judged_by_the_floats_before_them() -> None:
    model = parse("(float[4,8] x) => (int64[4,1] y) { t = Tanh (x) y = ArgMax <axis = 1> (t) }", 18)
    found = measured(model, {"x": RANDOM.standard_normal((4, 8)).astype(np.float32)}).values
    assert found["t"].costs[0] > 0


def test_recurrent_nodes_after_one_another_are_all_unrolled() -> None:
    """Their gradient is that of the steps: the first weight counts through all of them."""
    text = """(float[5,2,4] x) => (float[5,2,4] y) {
        p = RNN <hidden_size = 4> (x, w, r)
        q = Squeeze (p, axis)
        s = RNN <hidden_size = 4> (q, w2, r2)
        t = Squeeze (s, axis)
        u = RNN <hidden_size = 4> (t, w3, r3)
        y = Squeeze (u, axis)
    }"""
    names = ("w", "r", "w2", "r2", "w3", "r3")
    weights = {name: (0.4 * RANDOM.standard_normal((1, 4, 4))).astype(np.float32) for name in names}
    model = add_weights(parse(text, 18), {**weights, "axis": np.array([1])})
    found = measured(model, {"x": RANDOM.standard_normal((5, 2, 4)).astype(np.float32)}).values
    assert all(0 < found[name].costs[0] < 1e-5 for name in names)


def test_the_work_for_recurrent_nodes_is_linear_and_those_that_are_refused_stay() -> None:
    def stacked(count: int) -> ModelProto:
        clips = {1: ", clip = 1.0"}
        rows = "".join(
            f"p{n} = RNN <hidden_size = 4{clips.get(n, '')}> (x{n}, w, w) x{n + 1} = Squeeze (p{n}, axis) "
            for n in range(count)
        )
        model = parse(f"(float[2,2,4] x0) => (float[2,2,4] x{count}) {{ {rows} }}", 18)
        return add_weights(model, {"w": np.ones((1, 4, 4), np.float32), "axis": np.array([1])})

    kept = [node.output[0] for node in expanded(stacked(4)).graph.node if node.op_type == "RNN"]
    assert kept == ["p1"]
    few, many = (calls(partial(expanded, stacked(count))) for count in (8, 32))
    assert many < 6 * few


LOOP = """(float[4,8] x, int64 count) => (float[4,8] y, float[turns,4,8] steps) {
    [loop] y, steps = Loop (count, , x) <
        body = turn (int64 i, bool go, float[4,8] s) => (bool on, float[4,8] t, float[4,8] r) {
            on = Identity (go) m = MatMul (s, w) t = Tanh (m) r = Exp (m)
        }>
}"""


EARLY = LOOP.replace("on = Identity (go)", "on = Less (i, last)")


@pytest.mark.parametrize(("loop", "count"), [(LOOP, 3), (EARLY, 9)], ids=["counted", "ends early"])
def test_loops_are_followed_turn_by_turn(loop: str, count: int) -> None:
    """As if the turns stood one after the other; each value of the body counts in every turn."""
    once = "m{n} = MatMul ({s}, w) t{n} = Tanh (m{n}) r{n} = Exp (m{n}) u{n} = Unsqueeze (r{n}, zero)"
    lines = " ".join(once.format(n=n, s=f"t{n - 1}" if n else "x") for n in range(3))
    text = f"(float[4,8] x) => (float[4,8] t2, float[3,4,8] steps) {{ {lines} steps = Concat <axis = 0> (u0, u1, u2) }}"
    weights = {"w": (0.5 * RANDOM.standard_normal((8, 8))).astype(np.float32)}
    x = RANDOM.standard_normal((4, 8)).astype(np.float32)
    plain = measured(add_weights(parse(text, 18), {**weights, "zero": np.array([0])}), {"x": x}).values
    model = add_weights(parse(loop, 18), {**weights, "last": np.array(2)})
    found = measured(model, {"x": x, "count": np.array(count)})
    assert found.spread == ()
    for name in ("m", "r"):
        total = np.sum([plain[f"{name}{turn}"].costs for turn in range(3)], axis=0)
        assert found.values[name].costs == pytest.approx(total, rel=1e-3), name
    assert found.values["w"].costs == pytest.approx(plain["w"].costs, rel=1e-3)


def test_scans_are_followed_turn_by_turn() -> None:
    """From the last element to the first, along any axis: as if the turns stood one after the other."""
    scan = """(float[4,3,8] x, float[4,8] h) => (float[4,8] last, float[4,8,3] steps) {
        last, steps = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
            scan_output_axes = [2], scan_output_directions = [1],
            body = turn (float[4,8] s, float[4,8] e) => (float[4,8] t, float[4,8] r) {
                m = MatMul (s, w) a = Add (m, e) t = Tanh (a) r = Exp (m)
            }> (h, x)
    }"""
    lines = " ".join(
        f"e{n} = Gather <axis = 1> (x, i{2 - n}) m{n} = MatMul ({f't{n - 1}' if n else 'h'}, w) a{n} = Add (m{n}, e{n})"
        f" t{n} = Tanh (a{n}) r{n} = Exp (m{n}) u{n} = Unsqueeze (r{n}, two)"
        for n in range(3)
    )
    plain = f"(float[4,3,8] x, float[4,8] h) => (float[4,8] t2, float[4,8,3] steps) {{ {lines}"
    plain += " steps = Concat <axis = 2> (u2, u1, u0) }"
    places = {f"i{n}": np.array(n) for n in range(3)} | {"two": np.array([2])}
    weights = {"w": (0.5 * RANDOM.standard_normal((8, 8))).astype(np.float32)}
    feeds = {"x": (4, 3, 8), "h": (4, 8)}
    feeds = {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in feeds.items()}
    turns = measured(add_weights(parse(plain, 18), weights | places), feeds).values
    found = measured(add_weights(parse(scan, 18), weights), feeds)
    assert found.spread == ()
    for name in ("m", "a", "r"):
        total = np.sum([turns[f"{name}{turn}"].costs for turn in range(3)], axis=0)
        assert found.values[name].costs == pytest.approx(total, rel=1e-3), name
    assert found.values["w"].costs == pytest.approx(turns["w"].costs, rel=1e-3)


def test_loops_of_samples_that_are_measured_together_may_turn_more_or_less_often() -> None:
    text = """(float[4,8] x, int64 count) => (float[4,8] y) {
        y = Loop (count, , x) <body = turn (int64 i, bool go, float[4,8] s) => (bool on, float[4,8] t) {
            on = Identity (go) m = MatMul (s, w) t = Tanh (m)
        }>
    }"""
    weights = {"w": (0.5 * RANDOM.standard_normal((8, 8))).astype(np.float32)}
    model, x = add_weights(parse(text, 18), weights), RANDOM.standard_normal((4, 8)).astype(np.float32)
    feeds = {number: {"x": x, "count": np.array(turns)} for number, turns in enumerate((3, 9))}
    for number, found in enumerate(together(model, feeds)):
        (alone,) = together(model, {number: feeds[number]})
        assert found.values["m"].costs == pytest.approx(alone.values["m"].costs)


@pytest.mark.parametrize("tool", ["nbits", "nbits in qdq"])
def test_a_network_of_quantized_weights_is_as_sensitive_as_the_float_one(tool: str) -> None:
    feeds = images(1)[0]
    floats, found = measured(float_network(21), feeds).values, measured(quantized(tool), feeds).values
    for name in ("c1", "r1", "c2", "r2", "p", "t1"):
        ratio = np.sqrt(found[name].costs[0] / floats[name].costs[0])
        assert 0.6 < ratio < 1.6, name
    assert found.keys() >= {"image", "scores"}


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("tool", ["qdq", "qdq with biases", "dynamic"])
def test_small_errors_before_a_quantizer_move_some_numbers_by_a_step(tool: str) -> None:
    model, samples = quantized(tool), images(16)
    plan = plan_model(model, "O3", target="cuda", samples=samples)
    assert plan.expected is not None
    assert plan.expected.error is not None
    low = apply_plan(model, plan)
    pairs = [(run_original(model, feeds)[0], emulated(low, feeds)[0]) for feeds in samples]
    worst = max(float(np.linalg.norm(one - other) / np.linalg.norm(one)) for one, other in pairs)
    assert 0.4 < worst / plan.expected.error < 2.5


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("tool", ["qdq", "dynamic"])
def test_gradients_of_integers_pass_between_pieces(tool: str) -> None:
    feeds = images(1)[0]
    whole, pieces = measured(quantized(tool), feeds), measured(quantized(tool), feeds, budget=1)
    for name, row in whole.values.items():
        assert pieces.values[name].costs == pytest.approx(row.costs, rel=1e-3, abs=1e-14), name


@pytest.mark.parametrize(("kind", "zero", "ends"), [("int8", 0, (-127, 127)), ("uint8", 3, (-3, 252))])
def test_what_is_saturated_has_no_gradient(kind: str, zero: int, ends: tuple[int, int]) -> None:
    text = f"""(float[1,4] x) => (float[1,1] y)
        <float s = {{0.5}}, {kind} z = {{{zero}}}, float[4,1] v = {{1, 1, 1, 1}}> {{
        t = Identity (x) q = QuantizeLinear (t, s, z) d = DequantizeLinear (q, s, z) y = MatMul (d, v) }}"""
    inner = np.array([[0.3, 10.7, 1.1, 2.3]], np.float32)
    outer = np.array([[ends[0] * 0.5 - 40.1, ends[1] * 0.5 + 100.1, 0.3, 1.1]], np.float32)
    for x, counted in ((inner, inner), (outer, outer[:, 2:])):
        y = run_original(parse(text, 21), {"x": x})[0]
        # An error d crosses a border of the steps of 0.5 with the probability d / 0.5, and then moves by 0.5.
        cost = 0.5 * np.sum(np.abs(rounding(counted))) / y[0, 0] ** 2
        found = measured(parse(text, 21), {"x": x}, t=Ports((0,), (0,))).values
        assert found["t"].costs[0] == pytest.approx(cost, rel=1e-2)


@pytest.mark.parametrize("op", ["Floor", "Round", "Ceil"])
def test_small_errors_before_whole_numbers_move_some_by_one(op: str) -> None:
    text = f"(float[1,8] x) => (float[1,1] y) {{ t = Identity (x) r = {op} (t) y = MatMul (r, v) }}"
    model = add_weights(parse(text, 18), {"v": np.ones((8, 1), np.float32)})
    x = np.linspace(3.1, 8.9, 8, dtype=np.float32).reshape(1, 8)
    cost = np.sum(np.abs(rounding(x))) / run_original(model, {"x": x})[0][0, 0] ** 2
    assert measured(model, {"x": x}, t=Ports((0,), (0,))).values["t"].costs[0] == pytest.approx(cost, rel=1e-2)


def expected_of(model: ModelProto, feeds: dict[str, Any]) -> float:
    found = plan_model(model, "O3", samples=feeds).expected
    assert found is not None
    assert found.error is not None
    return found.error


CHAIN = """(float[64,32] x) => (float[64,32] y) <float s = {0.0625}, int8 z = {0}> {
    h1 = MatMul (x, w1) q1 = QuantizeLinear (h1, s, z) d1 = DequantizeLinear (q1, s, z)
    h2 = MatMul (d1, w2) q2 = QuantizeLinear (h2, s, z) d2 = DequantizeLinear (q2, s, z)
    h3 = MatMul (d2, w3) q3 = QuantizeLinear (h3, s, z) d3 = DequantizeLinear (q3, s, z)
    y = MatMul (d3, w4)
}"""


def test_errors_grow_from_quantizer_to_quantizer_as_in_exact_arithmetic() -> None:
    """On inputs that were not measured, in float64, where each float of the plan is rounded to float16."""
    random = np.random.default_rng(5)
    weights = {f"w{n}": (random.standard_normal((32, 32)) / np.sqrt(32)).astype(np.float32) for n in range(1, 5)}
    model = add_weights(parse(CHAIN, 21), weights)
    inputs = [random.standard_normal((64, 32)).astype(np.float32) for _ in range(36)]

    def run_chain(x: np.ndarray[Any, Any], low: bool) -> np.ndarray[Any, Any]:
        def kept(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return (array.astype(np.float16) if low else array).astype(np.float64)

        for name in ("w1", "w2", "w3"):
            steps = np.rint(kept(kept(x) @ kept(weights[name])) / 0.0625)
            x = np.clip(steps, -128, 127) * 0.0625
        return kept(x @ kept(weights["w4"]))

    found = plan_model(model, "O3", samples=[{"x": x} for x in inputs[:4]]).expected
    assert found is not None
    assert found.error is not None
    pairs = [(run_chain(x, low=False), run_chain(x, low=True)) for x in inputs[4:]]
    size, off = (sum(np.sum(square) for square in squares) for squares in zip(
        *((one**2, (other - one) ** 2) for one, other in pairs), strict=True))  # fmt: skip
    assert 1 / 1.2 < np.sqrt(off / size) / found.error < 1.2

    # Without the pass in low precision, gradients with gains alone foresee the same.
    ports = {f"h{n}": Ports((0, 1), (0,)) for n in range(1, 4)} | {"y": Ports((0, 1), (0,))}
    (sample,) = together(model, {0: {"x": inputs[0]}}, **ports)
    rows = sample.values
    cost = sum(rows[name].costs[0] for name in ("x", "h1", "h2", "h3", "y", *weights))
    assert 1 / 1.5 < np.sqrt(off / size / cost) < 1.5


def test_a_mask_that_is_exact_costs_nothing_whatever_its_gradient() -> None:
    text = """(float[4,8] h, float[8] mask) => (float[4,8] y)
        <float lowest = {-3.4028235e38}, float s = {2.6793887e36}, float t = {0.01}, int8 z = {0}> {
        k = Abs (mask) m = Mul (k, lowest) q = QuantizeLinear (m, s, z) d = DequantizeLinear (q, s, z)
        a = Add (h, d) p = Softmax (a) r = QuantizeLinear (p, t, z) y = DequantizeLinear (r, t, z) }"""
    feeds = {
        "h": RANDOM.standard_normal((4, 8)).astype(np.float32),
        "mask": np.array([0, 0, 0, 0, 0, 0, 1, 1], np.float32),
    }
    found = expected_of(parse(text, 21), feeds)
    assert 0 < found < 0.1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_few_elements_are_exact(size: int) -> None:
    """Their vectors of signs are orthogonal: no two elements are taken together, whatever is drawn."""
    text = f"(float[1,6] x) => (float[1,{size}] y) {{ t = Identity (x) y = MatMul (t, w) }}"
    w, x = RANDOM.standard_normal((6, size)).astype(np.float32), RANDOM.standard_normal((1, 6)).astype(np.float32)
    cost = np.sum((rounding(x).T * w) ** 2) / np.sum((x @ w) ** 2)
    found = measured(add_weights(parse(text, 18), {"w": w}), {"x": x})
    assert found.values["t"].costs[0] == pytest.approx(cost, rel=1e-4)


def test_an_output_without_axes_is_measured() -> None:
    text = "(float[4] x) => (float y) { t = Identity (x) y = ReduceSum <keepdims = 0> (t) }"
    x = RANDOM.uniform(1, 2, 4).astype(np.float32)
    cost = np.sum(rounding(x) ** 2) / x.sum(dtype=np.float64) ** 2
    assert measured(parse(text, 18), {"x": x}).values["t"].costs[0] == pytest.approx(cost, rel=1e-3)


@pytest.mark.slow
def test_large_matrices_cost_what_their_gradients_say() -> None:
    """A product's columns, and rows that are gathered twice; each sum over rows has one gradient whatever the signs."""
    text = """(float[6,1024] x, int64[4] ids) => (float[1,2304] y, float[1,300] s) {
        t = Tanh (x)
        m = MatMul (t, w)
        y = ReduceSum (m, rows)
        e = Gather (table, ids)
        s = ReduceSum (e, rows)
    }"""
    w, table = RANDOM.standard_normal((1024, 2304)), RANDOM.standard_normal((64, 300))
    weights = {"w": w.astype(np.float32), "table": table.astype(np.float32), "rows": np.array([0])}
    model = add_weights(parse(text, 18), weights)
    feeds = {
        number: {"x": RANDOM.standard_normal((6, 1024)).astype(np.float32), "ids": np.array([number, 7, 9, 7])}
        for number in range(2)
    }
    for found, sample in zip(together(model, feeds), feeds.values(), strict=True):
        t = np.tanh(sample["x"].astype(np.float64))
        y, rows = (t @ weights["w"]).sum(axis=0), weights["table"][sample["ids"]].astype(np.float64)
        counts = np.bincount(sample["ids"], minlength=64)[:, None]
        own, gathered = t @ rounding(weights["w"]), counts * rounding(weights["table"])
        norms = np.sum(y**2), np.sum(rows.sum(axis=0) ** 2)
        costs = {
            ("w", 0): np.sum(own.sum(axis=0) ** 2),
            ("m", 0): np.sum(rounding((t @ weights["w"]).astype(np.float32)) ** 2),
            ("t", 0): np.sum((rounding(t.astype(np.float32)) ** 2) * np.sum(weights["w"] ** 2.0, axis=1)),
            ("table", 1): np.sum(gathered**2),
            ("e", 1): np.sum(rounding(rows.astype(np.float32)) ** 2),
        }
        for (name, group), cost in costs.items():
            rel = 0.25 if name == "t" else 0.01
            assert found.values[name].costs[group] == pytest.approx(cost / norms[group], rel=rel), name


def test_a_sample_that_takes_another_branch_costs_what_it_costs_alone() -> None:
    """Nodes of both branches have the same numbers, names and shapes."""
    text = """(float[1,6] x, bool c) => (float[1,6] y) {
        h = Tanh (x)
        y = If (c) <then_branch = t () => (float[1,6] a) { a = Exp (h) },
            else_branch = e () => (float[1,6] a) { a = Neg (h) }>
    }"""
    x = RANDOM.standard_normal((1, 6)).astype(np.float32)
    taken, other = ({"x": x, "c": np.array(condition)} for condition in (True, False))
    model = parse(text, 18)
    (alone,) = together(model, {1: other})
    _, beside = together(model, {0: taken, 1: other})
    assert beside.values == alone.values


def test_products_with_a_large_matrix_cost_the_same_beside_an_undefined_row() -> None:
    text = """(float[N,1536] x) => (float[N,1536] y) {
        r = Sqrt (x) u = MatMul (r, w) v = MatMul (u, w) y = Tanh (v)
    }"""
    w = (0.02 * RANDOM.standard_normal((1536, 1536))).astype(np.float32)
    model = add_weights(parse(text, 18), {"w": w})
    x = RANDOM.random((5, 1536)).astype(np.float32)
    wanted = measured(model, {"x": x}).values
    found = measured(model, {"x": np.vstack([x, np.full((1, 1536), -1, np.float32)])}).values
    for name in ("r", "u", "v", "w"):
        assert wanted[name].costs[0] > 0
        assert found[name].costs[0] == pytest.approx(wanted[name].costs[0], rel=0.2), name


def test_readers_of_a_large_matrix_and_of_what_it_multiplies_are_told_apart() -> None:
    text = (
        "(float[2,3,1536] x) => (float[2,3,1536] y) { t = Tanh (x) a = MatMul (t, w) b = MatMul (a, w) y = Add (t, b) }"
    )
    w = (0.1 * RANDOM.standard_normal((1536, 1536))).astype(np.float32)
    x = RANDOM.standard_normal((2, 3, 1536)).astype(np.float32)
    found = measured(add_weights(parse(text, 18), {"w": w}), {"x": x}).values
    assert found["t"].read.keys() == {"a", "y"}
    assert found["t"].read["a"][0] > 20 * found["t"].read["y"][0] > 0
    assert found["w"].read.keys() == {"a", "b"}
    assert found["w"].costs[0] == pytest.approx(found["w"].read["a"][0] + found["w"].read["b"][0])
    b = (t := np.tanh(x.astype(np.float64))) @ w @ w
    moved = t @ rounding(w) @ w, t @ w @ rounding(w)
    for reader, error in zip("ab", moved, strict=True):
        cost = np.sum(error**2) / np.sum((t + b) ** 2)
        assert found["w"].read[reader][0] == pytest.approx(cost, rel=0.2)
