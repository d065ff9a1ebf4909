"""A value that is proven to stay in range for every input is no hazard; nothing else changes by the proof."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import helper, numpy_helper

import onnxamp

NUMBERS = "<int64[1] last = {-1}, float big = {20000}, float n = {60000}, float one = {1}, float tiny = {1e-6}"
NUMBERS += ", float little = {1e-3}>"
MODELS = {
    "softmax by hand": """(float[4,8] x) => (float[4,8] y) {
        [at] e = Exp (x) [at2] s = ReduceSum (e, last) [at3] y = Div (e, s) }""",
    "logarithm of a sum": """(float[4,8] x) => (float[4,1] y) {
        [at] e = Exp (x) [at2] s = ReduceSum (e, last) [at3] y = Log (s) }""",
    "long sum": """(float[1,9000] x) => (float[1,1] y) { [at] s = ReduceSum (x, last) y = Div (s, n) }""",
    "large factor": "(float[4,8] x) => (float[4,8] y) { [at] a = Mul (x, big) [at2] b = Add (a, big) y = Div (b, n) }",
    "inverse of a guard": """(float[4,8] x, float[4,8] z) => (float[4,8] y) {
        [at] a = Add (x, tiny) [at2] b = Reciprocal (a) y = Mul (b, z) }""",
    "logarithm of a probability": """(float[4,8] x) => (float[4,8] y) {
        [at] p = Sigmoid (x) [at2] y = Log (p) }""",
    "small factor": """(float[4,8] x) => (float[4,8] y) {
        z = Mul (x, little) [at] a = Mul (z, little) [at2] y = Div (a, little) }""",
    "logarithm of a guarded square": """(float[4,8] x) => (float[4,8] y) {
        [at] p = Abs (x) [at2] s = Mul (p, p) [at3] a = Add (s, tiny) [at4] y = Log (a) }""",
    "guard that a branch passes on": """(float[4,8] x, bool b) => (float[4,8] y) {
        s = Mul (x, x) [at] a = Add (s, tiny)
        [at2] g = If (b) <then_branch = one () => (float[4,8] p) { p = Identity (a) },
                          else_branch = two () => (float[4,8] q) { [at3] q = Add (a, a) }>
        [at4] y = Div (big, g) }""",
    "odds": """(float[4,8] x) => (float[4,8] y) {
        [at] p = Sigmoid (x) [at2] q = Sub (one, p) [at3] y = Div (p, q) }""",
}  # fmt: skip
NEAR = {
    "small factor": (10, 50), "logarithm of a guarded square": (2, 5), "guard that a branch passes on": (1, 5),
    "long sum": (-5, 5), "large factor": (-1, 1), "inverse of a guard": (0.1, 2),
}  # fmt: skip
"""Ranges in which the nodes are safe; by default -2 to 2."""
FAR = {
    "small factor": (0, 50), "logarithm of a guarded square": (0, 5), "guard that a branch passes on": (0, 5),
    "long sum": (0, 20), "large factor": (-4, 4), "inverse of a guard": (0, 2),
}  # fmt: skip
"""Ranges in which they are not; by default -20 to 20."""


def model_of(text):
    return parse(text.replace(" {", f" {NUMBERS} {{", 1), 17)


def low_nodes(text, **options):
    """The nodes of interest that are float16."""
    plan = onnxamp.plan_model(model_of(text), level="O3", **options)
    return {row.node for row in plan.rows if row.low and row.node.startswith("at")}


def marked(text):
    return {part.removesuffix("]") for part in text.replace("[at", " at").split() if part.startswith("at")}


@pytest.mark.parametrize("name", MODELS)
def test_a_range_of_the_input_disproves_a_hazard(name):
    text = MODELS[name]
    assert low_nodes(text) == set(), "nothing is known of the input"
    assert low_nodes(text, input_ranges={"x": NEAR.get(name, (-2, 2))}) == marked(text)
    assert low_nodes(text, input_ranges={"x": FAR.get(name, (-20, 20))}) == set()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_disproved_computes_the_same(name):
    model = model_of(MODELS[name])
    low, high = NEAR.get(name, (-2, 2))
    result = onnxamp.convert_model(model, level="O3", input_ranges={"x": (low, high)})
    draw = np.random.default_rng(0)
    shapes = {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in model.graph.input}
    ends = [np.full(shapes["x"], end, np.float32) for end in (low, high)]
    inside = draw.uniform(low, high, shapes["x"]).astype(np.float32)
    kinds = {one.name: helper.tensor_dtype_to_np_dtype(one.type.tensor_type.elem_type) for one in model.graph.input}
    others = {name: np.ones(shape, kinds[name]) for name, shape in shapes.items() if name != "x"}
    samples = [{"x": x, **others} for x in (inside, *ends)]
    assert onnxamp.diff_models(model, result, samples, provider="cpu").passed


def test_a_network_may_bound_the_value_itself():
    """A Tanh bounds the scores, so that no range has to be stated."""
    text = """(float[4,8] x) => (float[4,8] y) {
        t = Tanh (x) [at] e = Exp (t) [at2] s = ReduceSum (e, last) [at3] y = Div (e, s) }"""
    assert low_nodes(text) == marked(text)


def test_ranges_of_one_input_say_nothing_of_another():
    text = """(float[4,8] x, float[4,8] z) => (float[4,8] y) {
        a = Add (x, z) [at] e = Exp (a) [at2] s = ReduceSum (e, last) [at3] y = Div (e, s) }"""
    assert low_nodes(text, input_ranges={"x": (-1, 1)}) == set()
    assert low_nodes(text, input_ranges={"x": (-1, 1), "z": (-1, 1)}) == marked(text)


def test_both_branches_and_all_trips_count():
    """The state of the loop grows, so that nothing is proven of it; what is read after a Clip is proven."""
    body = "{ s = Loop (trips, keep, x) <body = b (int64 i, bool c, float[4,8] v) => (bool d, float[4,8] w) "
    body += "{ d = Identity (c) w = Add (v, v) }> "
    open_ended = f"(float[4,8] x, int64 trips, bool keep) => (float[4,1] y) {body}"
    text = open_ended + "[at] e = Exp (s) [at2] t = ReduceSum (e, last) [at3] y = Log (t) }"
    assert low_nodes(text, input_ranges={"x": (-1, 1)}) == set()


@pytest.mark.parametrize(
    "guard", ["[at] m = Max (x, tiny)", "[at] m = Clip (x, tiny)", "s = Abs (x) [at] m = Add (s, tiny)"]
)
@pytest.mark.parametrize("is_far", [True, False])
def test_an_epsilon_matters_only_where_what_it_guards_may_be_small(guard, is_far):
    added = "one" if is_far else "x"
    text = f"""(float[4,8] x) => (float[4,8] y) {{ t = Tanh (x) {guard}
        [at2] d = Add (m, {added}) [at3] y = Div (t, d) }}"""
    assert low_nodes(text) == (marked(text) if is_far else set())


def test_each_epsilon_counts_where_it_guards():
    text = """(float[4,8] x, float[4,8] z) => (float[4,8] y, float[4,8] u) {
        [at] a = Add (x, tiny) [at2] y = Div (one, a) s = Abs (z) b = Add (s, tiny) u = Div (one, b) }"""
    assert low_nodes(text, input_ranges={"x": (1, 2)}) == {"at", "at2"}
    assert low_nodes(text, input_ranges={"x": (0, 2)}) == set()


def test_an_epsilon_that_leaves_the_model_is_kept():
    text = """(float[4,8] x) => (float[4,8] y, float[4,8] m) {
        [at] m = Max (x, lost) [at2] d = Add (m, one) [at3] y = Div (x, d) }"""
    plan = onnxamp.plan_model(
        parse(text.replace(" {", f" {NUMBERS[:-1]}, float lost = {{1e-9}}> {{", 1).replace("[at", "[at"), 17),
        level="O3",
    )
    assert {row.node for row in plan.rows if row.low and row.node.startswith("at")}.isdisjoint({"at"})


def test_what_two_numbers_make_up_in_rounding_is_no_proof():
    """The weights differ by 0.0004, and float16 makes them equal, so that the logarithm is that of zero."""
    text = "(float[4,2] x) => (float[4,1] y) { p = MatMul (x, w) [at] a = Add (p, tiny) [at2] y = Log (a) }"
    model = model_of(text)
    weight = np.array([[1.0004], [-1]], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    plan = onnxamp.plan_model(model, level="O3", input_ranges={"x": (1000, 1000)})
    assert not any(row.low for row in plan.rows if row.node.startswith("at"))


def test_small_squares_vanish_in_any_range():
    """A norm is no bound of what it divides where low precision rounds its squares to zero."""
    text = """(float[4,8] x) => (float[4,8] y) { [at] a = Mul (x, x) [at2] m = ReduceMean <axes = [-1]> (a)
        [at3] r = Sqrt (m) [at4] y = Div (x, r) }"""
    assert low_nodes(text, input_ranges={"x": (-1, 1)}) == set()


def test_sums_that_a_target_keeps_in_float16_fit_in_a_small_range():
    text = "(float[1,4000] x) => (float[1,1] y) { [at] y = ReduceMean <axes = [-1]> (x) }"
    assert low_nodes(text, target="webgpu") == set()
    assert low_nodes(text, target="webgpu", input_ranges={"x": (-1, 1)}) == {"at"}
    assert low_nodes(text, target="webgpu", input_ranges={"x": (-30, 30)}) == set()


COUNTS = "<int64 zero = {0}, int64 one = {1}, float none = {0}, float unit = {1}, float half = {0.5}"
COUNTS += ", bool go = {1}, int64 three = {3}>"
LOOP = """(float[4] x) => (float[4] y) { [at] k, s = Loop (turns, go, none, x) <
    body = b (int64 i, bool c, float k0, float[4] s0) => (bool d, float k1, float[4] s1) {
        d = Identity (c) ADD [at3] g = Sin (k1) t = Mul (g, s0) s1 = Tanh (t) }> y = Identity (s) }"""
EXACT = {
    "range": """(float[4,N] x) => (float[4,N] y) { r = Range (zero, N, one) [at] c = Cast <to = 1> (r) [at2] s = Sin (c)
        y = Mul (x, s) }""",
    "flags": """(float[4,N] x, bool[4,N] m) => (float[4,N] y) { [at] c = Cast <to = 1> (m) [at2] s = CumSum (c, one)
        [at3] f = Mod <fmod = 1> (s, half) y = Sub (x, f) }""",
    "constant turns": LOOP.replace("turns", "N").replace("ADD", "[at2] k1 = Add (k0, unit)"),
    "half steps": LOOP.replace("turns", "N").replace("ADD", "k2 = Sub (k0, half) [at2] k1 = Add (k2, unit)"),
    "computed steps": LOOP.replace("turns", "N").replace(
        "ADD", "m = Mod (i, three) e = Cast <to = 1> (m) [at2] k1 = Add (k0, e)"
    ),
    "turns by a shape": LOOP.replace("[4] x", "[4] x, float[N,2] w").replace("turns", "n")
    .replace("{ [at]", "{ n = Size (w) [at]", 1).replace("ADD", "[at2] k1 = Add (k0, unit)"),
    "branches": LOOP.replace("turns", "N").replace("ADD", """[at2] k1 = If (c) <
        then_branch = t () => (float p) { [at4] p = Add (k0, unit) },
        else_branch = e () => (float q) { q = Identity (k0) }>"""),
    "flags of a Scan": """(float[N,4] x, bool[N,4] m) => (float[4] y) {
        first = ConstantOfShape <value = float[1] {0}> (shape)
        [at] s = Scan <num_scan_inputs = 1, body = b (float[4] s0, bool[4] f) => (float[4] s1) {
            [at2] e = Cast <to = 1> (f) [at3] s1 = Add (s0, e) }> (first, m)
        [at4] f = Floor (s) y = Tanh (f) }""",
}  # fmt: skip
"""Positions and counters, from few to many of them."""


def counting(name, size):
    """The model with so many positions or turns."""
    text = EXACT[name].replace("[N", f"[{size}").replace(",N", f",{size}")
    text = text.replace("(zero, N", "(zero, size").replace("Loop (N", "Loop (size")
    constants = COUNTS.replace(">", f", int64 size = {{{size}}}, int64[1] shape = {{4}}>")
    return parse(text.replace(" {", f" {constants} {{", 1), 18)


@pytest.mark.parametrize("name", EXACT)
def test_counters_are_no_hazard_where_low_precision_counts_exactly(name):
    for dtype, few, many in (("float16", 300, 5000), ("bfloat16", 60, 600)):
        found = []
        for size in (few, many):
            plan = onnxamp.plan_model(counting(name, size), level="O3", target="any", dtype=dtype)
            found.append({row.node for row in plan.rows if row.low and row.node.startswith("at")})
        assert found[0] == marked(EXACT[name])
        assert found[1] != found[0], "it stops counting"


def test_rates_of_positions_stay_in_float32():
    """Angles are no integers: their digits are lost with their size, however few positions there are."""
    model = parse(
        """(float[4,8] x) => (float[4,8] y) <int64 zero = {0}, int64 one = {1}, int64 n = {8}, float rate = {0.3}> {
            r = Range (zero, n, one) c = Cast <to = 1> (r) [at] a = Mul (c, rate) [at2] s = Sin (a) y = Mul (x, s) }""",
        17,
    )
    plan = onnxamp.plan_model(model, level="O3", target="any")
    assert not any(row.low for row in plan.rows if row.node.startswith("at"))
