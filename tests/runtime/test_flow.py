"""Running a model in pieces of any size gives, bit for bit, what one session gives."""

from collections import Counter

import decoders
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import MODELS
from conversions import converted
from every import every
from graphs import CASES
from graphs.case import add_weights, parse
from onnx import TensorProto, helper, numpy_helper
from repository import feeds as model_feeds

from onnxamp import convert_model, random_samples
from onnxamp._base.errors import RuntimeFailure
from onnxamp._graph.view import inline_functions
from onnxamp._model.model import Model
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.piecewise.flow import fitted, flow_of, make_flow
from onnxamp._runtime.piecewise.parts import ancestors, parts_of, peak_together, weights_read
from onnxamp._runtime.piecewise.pieces import Executor, start
from onnxamp._runtime.sessions.session import make_session, run
from onnxamp._runtime.sessions.shell import take_weights
from onnxamp._runtime.sessions.values import check_inputs

RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
BUDGETS = (0, 64, 2**40)
"""One node at a time; a few; all at once."""


def in_pieces(model, feeds, budget, *, keep=2**40, base_dir=None, emulated=False, twice=False):
    """The outputs of the model, a few nodes at a time."""
    return outputs_of(make_flow(model, base_dir, emulated=emulated, keep=keep), model, feeds, budget, twice=twice)


def weights_fed(model, feeds, budget, *, emulated):
    """The outputs of the model in pieces that are fed all float weights, however small."""
    shell = take_weights(model, None, keep=0, large=1)
    flow = flow_of(shell._replace(model=inline_functions(shell.model)), emulated=emulated)
    return outputs_of(flow, model, feeds, budget)


def outputs_of(flow, model, feeds, budget, *, twice=False):
    runner = Executor(flow, "cpu")
    for _ in range(1 + twice):
        side = start(runner, fitted(flow, check_inputs(model, feeds)), Counter())
        for part in parts_of(flow, range(len(flow.nodes)), budget):
            side.run(part)
            runner.forget()
        found = {name: side.output(name) for name in flow.outputs}
        assert side.values.keys() <= {*flow.outputs, *feeds, *flow.inputs}, "nothing else is held at the end"
    return found


def whole(model, feeds):
    return run(make_session(model, optimize=False), check_inputs(model, feeds))


def emulated_whole(model, feeds):
    """What one session gives for the emulated model, whose inputs are float32."""
    low = emulate(model)
    return run(make_session(low, optimize=False), fitted(make_flow(low, emulated=False), check_inputs(model, feeds)))


def assert_identical(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        one_of(name, found[name], value)


def assert_close(found, wanted):
    """Kernels that get a weight as an input may add in another order than those that know it before."""
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)
        else:
            one_of(name, found[name], value)


def one_of(name, found, wanted):
    if isinstance(wanted, list):
        assert isinstance(found, list), name
        assert len(found) == len(wanted), name
        for one, other in zip(found, wanted, strict=True):
            one_of(name, one, other)
    elif wanted is None:
        assert found is None, name
    else:
        assert found.dtype == wanted.dtype, name
        assert found.shape == wanted.shape, name
        np.testing.assert_array_equal(found, wanted, err_msg=name)


def is_random(model):
    return any(node.op_type in RANDOM for node in model.graph.node)


def is_low(model):
    """Whether the CPU provider would hide the rounding of some values: then only the emulation is well defined."""
    return make_flow(model, emulated=False).lowest != "float32"


LOADS = [case for case in CASES.values() if case.loads and not is_random(case.build())]


@pytest.mark.slow
@every(case=LOADS, parts=4)
def test_corpus(case):
    model, feeds = case.build(), case.inputs()
    low = is_low(model)
    wanted = emulated_whole(model, feeds) if low else whole(model, feeds)
    for budget in (64, 2**40):
        assert_identical(in_pieces(model, feeds, budget, emulated=low), wanted)
    assert_identical(in_pieces(model, feeds, 0, emulated=low, twice=True), wanted)


@pytest.mark.slow
@every(case=LOADS[::3])
def test_corpus_with_weights_fed(case):
    model, feeds = case.build(), case.inputs()
    low = is_low(model)
    wanted = emulated_whole(model, feeds) if low else whole(model, feeds)
    assert_close(weights_fed(model, feeds, 0, emulated=low), wanted)


@pytest.mark.slow
@every(case=LOADS[1::3], dtype=["float16", "bfloat16"], parts=2)
def test_emulated_corpus(case, dtype):
    feeds = case.inputs()
    low = converted(case.name, "O3", dtype=dtype)
    wanted = emulated_whole(low, feeds)
    assert_identical(in_pieces(low, feeds, 0, emulated=True), wanted)
    assert_fed(low, feeds, wanted, dtype)


def assert_fed(low, feeds, wanted, dtype):
    """Another order of additions may round a low value to its neighbor."""
    step = 2.0 ** (-6 if dtype == "bfloat16" else -9)
    for name, found in weights_fed(low, feeds, 64, emulated=True).items():
        if isinstance(found, np.ndarray) and found.dtype == np.float32 and np.isfinite(wanted[name]).all():
            np.testing.assert_allclose(found, wanted[name], rtol=step, atol=step * np.abs(wanted[name]).max(initial=0))


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("keep", [2**40, 0], ids=["weights held", "weights fed"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models(path, keep):
    model = onnx.load(path)
    for feeds in model_feeds(path.stem):
        wanted = whole(model, feeds)
        for budget in (10_000,) if keep == 0 else (0, 2**40):
            same = assert_close if keep == 0 else assert_identical
            same(in_pieces(model, feeds, budget, keep=keep), wanted)


@pytest.mark.parametrize("low", [None, "float16", "bfloat16"])
def test_external_data(low, tmp_path):
    model = add_weights(
        parse("(float[2,64] X) => (float[2,64] Y) { a = MatMul (X, w) b = Add (a, c) Y = MatMul (b, v) }"),
        {"w": (64, 64), "v": (64, 64), "c": (64,)},
    )
    feeds = {"X": np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)}
    made = model if low is None else convert_model(model, "O3", dtype=low)
    wanted = whole(made, feeds) if low is None else emulated_whole(made, feeds)
    path = tmp_path / "model.onnx"
    onnx.save(made, path, save_as_external_data=True, location="weights", size_threshold=0)
    lazy = onnx.load(path, load_external_data=False)
    for keep in (2**40, 0):
        found = in_pieces(lazy, feeds, 0, keep=keep, base_dir=tmp_path, emulated=low is not None)
        (assert_close if low is None else assert_identical)(found, wanted)


def x_of(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def check(model, feeds, **options):
    wanted = whole(model, feeds)
    for budget in BUDGETS:
        assert_identical(in_pieces(model, feeds, budget, **options), wanted)


def test_sequences_cross_borders():
    check(
        parse("""(float[4,3] X) => (float[a,b] Y, seq(float[a,b]) S, int64 n) <int64 one = {1}> {
            s = SplitToSequence <axis = 0, keepdims = 1> (X)
            r = Relu (X)
            t = SequenceInsert (s, r, one)
            n = SequenceLength (t)
            S = SequenceErase (t)
            u = SequenceAt (S, one)
            Y = Exp (u)
        }"""),
        {"X": x_of(4, 3)},
    )


def test_sequences_of_strings_and_integers_cross_borders():
    check(
        parse("""(string[4] X, int64[4] I) => (string[a] Y, int64[b] Z) <int64 two = {2}, int64[3] cut = {1,2,1}> {
            s = SplitToSequence (X, cut)
            t = SplitToSequence (I, cut)
            Y = SequenceAt (s, two)
            e = SequenceEmpty <dtype = 7> ()
            v = SequenceAt (t, two)
            f = SequenceInsert (e, v)
            Z = ConcatFromSequence <axis = 0> (f)
        }"""),
        {"X": np.array(["a", "bc", "", "ä"], object), "I": np.arange(4)},
    )


def test_sequence_inputs_and_an_empty_one():
    model = parse("""(seq(float[N]) S) => (int64 n, seq(float[N]) T) { n = SequenceLength (S) T = Identity (S) }""")
    check(model, {"S": [x_of(2), x_of(3)]})
    assert_identical(in_pieces(model, {"S": []}, 0), {"n": np.array(0), "T": []})


def test_optionals_cross_borders():
    model = parse("""(float[3] X) => (float[3] Y, bool b) {
        o = Optional (X)
        b = OptionalHasElement (o)
        y = OptionalGetElement (o)
        Y = Neg (y)
    }""", opset=18)  # fmt: skip
    check(model, {"X": x_of(3)})


OPTIONAL = """(optional(float[3]) O) => (bool b) { p = Identity (O) b = OptionalHasElement (p) }"""


def test_an_optional_input():
    model = parse(OPTIONAL, opset=18)
    for budget in BUDGETS:
        assert bool(in_pieces(model, {"O": x_of(3)}, budget)["b"])
        with pytest.raises(RuntimeFailure, match="optional that holds nothing"):  # it would crash ONNX Runtime
            in_pieces(model, {"O": None}, budget)


def test_an_empty_optional_crosses_borders():
    model = parse("(float[3] X) => (bool b, float[3] Y) { o = Optional () b = OptionalHasElement (o) Y = Exp (X) }", 18)
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, [3])
    model.graph.node[0].attribute.append(helper.make_attribute("type", kind))
    check(model, {"X": x_of(3)})


BODIES = """(float[3] X, bool c, int64 n) => (float[3] Y, float[a,b] Z, float[a,b] W) <bool yes = {1}> {
    captured = Exp (X)
    kept = Neg (captured)
    p = If (c) <
        then_branch = t () => (float[3] u) { u = Add (captured, held) },
        else_branch = e () => (float[3] v) {
            v = If (c) <
                then_branch = tt () => (float[3] uu) { uu = Identity (kept) },
                else_branch = ee () => (float[3] vv) { vv = Mul (kept, captured) }
            >
        }
    >
    Y, Z = Loop (n, yes, p) <body = b (int64 i, bool go, float[3] s) => (bool on, float[3] r, float[3] o) {
        on = Identity (go)
        r = Add (s, kept)
        o = Mul (r, captured)
    }>
    d = Relu (captured)
    start = Sub (d, d)
    last, W = Scan <num_scan_inputs = 1, body = sc (float[3] s, float[3] z) => (float[3] r, float[3] q) {
        r = Add (s, z)
        q = Mul (r, d)
    }> (start, Z)
}"""


@pytest.mark.parametrize("flag", [True, False])
def test_values_that_bodies_capture(flag):
    """Also from two scopes out, and where only a body reads them any more."""
    model = add_weights(parse(BODIES), {"held": (3,)})
    check(model, {"X": x_of(3), "c": np.array(flag), "n": np.array(3)})


FUNCTION = """g (float[3] X) => (float[3] Y) {
    a = local.f <k : int = 1> (X)
    Y = local.f (a)
}
<domain: "local", opset_import: ["" : 17]>
f (x) => (y) { t = Exp (x) u = Neg (t) y = Add (u, x) }"""


def test_functions():
    header = '<ir_version: 8, opset_import: ["" : 17, "local" : 1]>\n'
    model = onnx.parser.parse_model(header + FUNCTION.replace(" <k : int = 1>", ""))
    check(model, {"X": x_of(3)})
    flow = make_flow(model, emulated=False)
    assert [node.op_type for node in flow.nodes] == ["Exp", "Neg", "Add"] * 2, "what is inside can be seen"


def test_an_output_that_is_listed_twice():
    """ONNX Runtime refuses such a model as a whole, but people have them."""
    model = parse("(float[3] X) => (float[3] Y) { t = Exp (X) Y = Neg (t) }")
    wanted = whole(model, {"X": x_of(3)})
    model.graph.output.add().CopyFrom(model.graph.output[0])
    for budget in BUDGETS:
        assert_identical(in_pieces(model, {"X": x_of(3)}, budget), wanted)


def test_outputs_that_are_inputs_initializers_and_read_again():
    model = add_weights(parse("(float[3] X) => (float[3] Y, float[3] t) { t = Exp (X) Y = Mul (t, w) }"), {"w": (3,)})
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3]))
    model.graph.output.append(helper.make_tensor_value_info("X", TensorProto.FLOAT, [3]))
    check(model, {"X": x_of(3)})


def test_large_initializers_that_are_outputs():
    model = add_weights(parse("(float[200,200] X) => (float[200,200] Y) { Y = Mul (X, w) }"), {"w": (200, 200)})
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [200, 200]))
    check(model, {"X": x_of(200, 200)}, keep=0)
    low = convert_model(model, "O3", keep_io_types=False)
    feeds = {"X": x_of(200, 200)}
    assert_identical(in_pieces(low, feeds, 0, keep=0, emulated=True), emulated_whole(low, feeds))


DEFAULTS = (
    "(float[3] X, float[K] w) => (float[3] Y) <float[3] w = {1, 2, 3}> { a = Mul (X, w) b = Add (a, w) Y = Exp (b) }"
)


@pytest.mark.parametrize("given", [{}, {"w": np.float32([4, 5, 6])}, {"w": np.float32([7])}])
def test_overridable_defaults(given):
    """The last is of another size than the default, as the input's declaration allows."""
    check(parse(DEFAULTS), {"X": x_of(3), **given})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("given", [{}, {"w": np.float32([4, 5, 6.001])}])
def test_overridable_defaults_of_low_models(given, dtype):
    low = convert_model(parse(DEFAULTS), "O3", dtype=dtype, freeze_defaults=False)
    feeds = {"X": x_of(3), **given}
    wanted = emulated_whole(low, feeds)
    for budget in BUDGETS:
        assert_identical(in_pieces(low, feeds, budget, emulated=True), wanted)


def test_untidy_order():
    model = parse("(float[3] X) => (float[3] Y) { a = Exp (X) b = Neg (a) c = Relu (b) Y = Add (c, a) }")
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes[::-1])
    check(model, {"X": x_of(3)})


def test_strings():
    text = (
        "(string[3] X) => (string[3] Y, string[3,1] Z) <int64[2] to = {3, 1}> { Y = Identity (X) Z = Reshape (Y, to) }"
    )
    check(parse(text), {"X": np.array(["a", "b", ""], object)})


def test_nodes_that_nobody_needs_do_not_run():
    model = parse("(float[3] X) => (float[3] Y) { dead = Exp (X) deader = Neg (dead) Y = Relu (X) }")
    check(model, {"X": x_of(3)})
    flow = make_flow(model, emulated=False)
    done = set()
    assert [flow.nodes[node].op_type for node in ancestors(flow, ["Y"], done)] == ["Relu"]
    assert [flow.nodes[node].op_type for node in ancestors(flow, ["deader", "Y"], done)] == ["Exp", "Neg"]
    assert ancestors(flow, ["deader", "Y", "X"], done) == []


def test_parts_hold_the_budget():
    names = [f"v{i}" for i in range(9)]
    body = " ".join(f"{new} = Exp ({old})" for old, new in zip(["X", *names], [*names, "Y"], strict=True))
    flow = make_flow(parse(f"(float[100] X) => (float[100] Y) {{ {body} }}"), emulated=False)
    for budget in (0, 399, 400, 800, 1199, 1200, 10**6):
        parts = list(parts_of(flow, range(10), budget))
        assert [node for part in parts for node in part] == list(range(10))
        size = max(1, min(10, budget // 400))
        assert all(len(part) == size for part in parts[:-1])
        assert len(parts[-1]) <= size


def test_values_that_nothing_needs_any_more_take_no_memory():
    """Of a chain, a session holds two values at a time, and what is wanted in the end."""
    names = [f"v{i}" for i in range(9)]
    body = " ".join(f"{new} = Exp ({old})" for old, new in zip(["X", *names], [*names, "Y"], strict=True))
    flow = make_flow(parse(f"(float[100] X) => (float[100] Y) {{ {body} }}"), emulated=False)
    nodes = range(10)
    assert [len(part) for part in parts_of(flow, nodes, 800, ["Y"])] == [10]
    assert [len(part) for part in parts_of(flow, nodes, 799, ["Y"])] == [1] * 10
    assert [len(part) for part in parts_of(flow, nodes, 1200, ["v0", "Y"])] == [10]
    assert [len(part) for part in parts_of(flow, nodes, 1199, ["v0", "Y"])] == [2, 8]


def test_weights_count_once_per_part():
    text = "(float[300,300] X) => (float[300,300] Y) { a = MatMul (X, w) b = MatMul (a, w) Y = MatMul (b, v) }"
    model = add_weights(parse(text), {"w": (300, 300), "v": (300, 300)})
    flow, one = make_flow(model, emulated=False, keep=0), 360_000
    assert [len(part) for part in parts_of(flow, range(3), 3 * one)] == [2, 1]
    assert [len(part) for part in parts_of(flow, range(3), 5 * one)] == [3]
    assert [len(part) for part in parts_of(flow, range(3), 2 * one)] == [1, 1, 1]


def test_what_emulation_is_asked_for():
    low = convert_model(parse("(float[3] X) => (float[3] Y) { a = Sigmoid (X) Y = Neg (a) }"), "O3")
    flow = make_flow(low, emulated=True)
    assert flow.lowest == "float16"
    assert {flow.types[name] for name in flow.maker} <= {"tensor(float)", "tensor(float16)"}
    assert flow.low["a"] == TensorProto.FLOAT16
    assert flow.own >= {"X", "a", "Y"}
    assert not any(name.endswith("/exact") for name in flow.own)


def test_a_shortcut_of_the_cpu_is_not_taken() -> None:
    """Rows of MatMulNBits are rounded to 8 bits on the CPU, if the model allows it; not on devices."""
    model = decoders.grouped(int4=True)
    exact = onnx.ModelProto()
    exact.CopyFrom(model)
    for node in exact.graph.node:
        kept = [item for item in node.attribute if item.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    sample = random_samples(model)[0]
    emulated, expected = (engine_on("cpu", emulates=True).open(one).run(sample)["logits"] for one in (model, exact))
    np.testing.assert_array_equal(emulated, expected)
    (taken, *_) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, sample)
    assert np.abs(taken - expected).max() > 100 * np.abs(emulated - expected).max()
    assert any(item.name == "accuracy_level" for node in model.graph.node for item in node.attribute)  # as it was


def test_an_input_that_was_left_empty_is_no_condition():
    """The first sample leaves it empty; the second gives the number that conditions have."""
    branches = """then_branch = t () => (float a) { a = Constant <value = float {1}> () },
        else_branch = e () => (float b) { b = Constant <value = float {2}> () }"""
    text = f"""(float[2] x, optional(bool) o) => (float[2] y) {{
        h = OptionalHasElement (o) k = If (h) <{branches}> y = Mul (x, k) }}"""
    model = Model.of(parse(text, 18))
    session = engine_on("cpu").open(model)
    x = np.ones(2, np.float32)
    for given, expected in ((None, 2), (np.array(True), 1), (np.array(False), 1), (None, 2)):
        feeds = check_inputs(model.proto, {"x": x, "o": given})
        np.testing.assert_array_equal(session.run(feeds)["y"], x * expected)


@pytest.mark.parametrize("emulated", [False, True])
def test_the_memory_of_a_part_is_that_of_the_weights_as_they_are_read(emulated):
    """Emulation reads float16 weights in float32. A joined run reads only the weights of its nodes."""
    chain = " ".join(f"y{number + 1} = MatMul (y{number}, w{number})" for number in range(8))
    model = parse(f"(float16[1,256] y0) => (float16[1,256] y8) {{ {chain} }}")
    zeros = np.zeros((256, 256), np.float16)
    model.graph.initializer.extend(numpy_helper.from_array(zeros, f"w{number}") for number in range(8))
    flow = make_flow(model, emulated=emulated, keep=0)
    nodes = list(range(len(flow.nodes)))
    each = zeros.nbytes * (2 if emulated else 1)
    budget = int(4.5 * each)
    assert all(weights_read(flow, part) <= budget for part in parts_of(flow, nodes, budget, flow.outputs))
    few = nodes[: len(nodes) // 4]
    assert weights_read(flow, few) <= peak_together(flow, few, flow.outputs_of(few)) < weights_read(flow, few) + each
