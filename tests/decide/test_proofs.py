"""A value that is proven to stay in range for every input is no hazard; nothing else changes by the proof."""

import numpy as np
import pytest
from graphs.case import parse

import onnxamp

NUMBERS = "<int64[1] last = {-1}, float big = {20000}, float n = {60000}, float one = {1}, float tiny = {1e-6}>"
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
    "odds": """(float[4,8] x) => (float[4,8] y) {
        [at] p = Sigmoid (x) [at2] q = Sub (one, p) [at3] y = Div (p, q) }""",
}  # fmt: skip
NEAR = {"long sum": (-5, 5), "large factor": (-1, 1), "inverse of a guard": (0.1, 2)}
"""Ranges in which the nodes are safe; by default -2 to 2."""
FAR = {"long sum": (0, 20), "large factor": (-4, 4), "inverse of a guard": (0, 2)}
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
    others = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if name != "x"}
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
