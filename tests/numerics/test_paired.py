"""What two models share, and the errors of their values: against computing each op by itself."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs.case import add_weights, parse
from onnx import TensorProto, helper, numpy_helper

from onnxamp import convert_model
from onnxamp._numerics.diff_models import diff_models
from onnxamp._numerics.differences.measure import measure
from onnxamp._numerics.paired import PairedExecution, pair
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.piecewise.flow import make_flow
from onnxamp._runtime.piecewise.pieces import Executor
from onnxamp._runtime.sessions.session import make_session, run
from onnxamp._runtime.sessions.values import to_value

LOW = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BUDGETS = [0, 500, 2**40]
low_types = pytest.mark.parametrize("dtype", LOW)


def given(*feeds):
    return Samples("given", [lambda feed=feed: feed for feed in feeds])


def x_of(*shape, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def lowered(model, dtype):
    """All floats low, inputs and outputs included, without the engine."""
    low = onnx.ModelProto()
    low.CopyFrom(model)
    elem = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}[dtype]
    for entry in (*low.graph.input, *low.graph.output):
        if entry.type.tensor_type.elem_type == TensorProto.FLOAT:
            entry.type.tensor_type.elem_type = elem
    for tensor in low.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(LOW[dtype])
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return low


def every_value(model, feeds):
    """All values of a float32 model by name, weights and inputs included."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    names = [name for node in model.graph.node for name in node.output if name]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {**weights, **feeds, **run(make_session(shown, optimize=False), feeds)}


def rounded(array, dtype):
    array = np.asarray(array)
    return array.astype(LOW[dtype]).astype(np.float32) if array.dtype == np.float32 else array


def one_op(model, node, values, dtype):
    """What a low op makes of float32 values: inputs rounded, the op in float32, outputs rounded."""
    names = list(dict.fromkeys(name for name in node.input if name))
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values[name].dtype), None) for name in names
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "one", inputs, outputs)
    single = helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(single.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: rounded(values[name], dtype) for name in names})
    return {entry.name: rounded(array, dtype) for entry, array in zip(outputs, found, strict=True)}


def close(found, wanted):
    """Counts agree, and errors up to the order of additions."""
    assert found is not None
    assert found.elements == wanted.elements
    assert (found.flushed, found.broken) == (wanted.flushed, wanted.broken)
    slack = 0.02 * wanted.rel_l2 + 1e-7
    assert found.rel_l2 == pytest.approx(wanted.rel_l2, abs=slack)
    assert found.reference_energy == pytest.approx(wanted.reference_energy, rel=1e-4)


ROWS = "(float[4,6] X) => (float[a,b] Y)"
GRAPHS = {
    "MatMul": f"{ROWS} {{ Y = MatMul (X, w) }}",
    "Exp": f"{ROWS} {{ Y = Exp (X) }}",
    "Softmax": f"{ROWS} {{ Y = Softmax (X) }}",
    "Div": f"{ROWS} {{ Y = Div (X, v) }}",
    "Transpose": f"{ROWS} {{ Y = Transpose (X) }}",
    "TopK": "(float[4,6] X) => (float[a,b] Y, int64[c,d] I) { Y, I = TopK (X, k) }",
    "chain": f"{ROWS} {{ a = MatMul (X, w) b = Relu (a) c = Add (b, X) d = Softmax (c) Y = Mul (d, v) }}",
    "diamond": f"{ROWS} {{ a = Exp (X) b = Neg (a) c = Sqrt (a) d = Sub (b, c) Y = Div (d, a) }}",
    "norm": f"""{ROWS} {{
        q = Mul (X, X) m = ReduceMean <axes = [-1]> (q) r = Sqrt (m) d = Div (X, r) Y = MatMul (d, w)
    }}""",
    "split": f"{ROWS} {{ a, b = Split <axis = 1> (X) c = Mul (a, b) d = Tanh (c) Y = Concat <axis = 1> (d, a, b) }}",
}
WEIGHTS = {"w": x_of(6, 6, seed=1), "v": x_of(6, seed=2) + 3, "k": np.array([3])}


def graph(name):
    used = {key: value for key, value in WEIGHTS.items() if f"{key})" in GRAPHS[name]}
    return add_weights(parse(GRAPHS[name], 17, 10), used)


@low_types
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", GRAPHS)
def test_local_errors(name, budget, dtype):
    """Each op alone, on the reference's values."""
    model, feeds = graph(name), {"X": x_of(4, 6)}
    values = every_value(model, feeds)
    found = diff_models(model, lowered(model, dtype), given(feeds), layers=True, budget=budget)
    rows = {row.value: row for row in found.layers}
    assert not {row.note for row in found.layers} - {None}
    for position, node in enumerate(model.graph.node):
        for value, array in one_op(model, node, values, dtype).items():
            if array.dtype != np.float32:
                continue
            row = rows.pop(value)
            assert (row.position, row.op, row.dtype) == (position, node.op_type, dtype)
            close(row.local, measure(to_value(values[value]), to_value(array)))
    assert all(row.dtype.startswith("int") for row in rows.values())


@low_types
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", GRAPHS)
def test_accumulated_errors(name, budget, dtype):
    """Both models' own values, whole."""
    model, feeds = graph(name), {"X": x_of(4, 6)}
    low = lowered(model, dtype)
    low_feeds = {"X": rounded(feeds["X"], dtype)}
    names = [name for node in model.graph.node for name in node.output]
    shown = onnx.ModelProto()
    shown.CopyFrom(emulate(low))
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    results = run(make_session(shown, optimize=False), low_feeds)
    values = every_value(model, feeds)
    found = diff_models(model, low, given(feeds), layers=True, budget=budget)
    for row in found.layers:
        close(row.accumulated, measure(to_value(values[row.value]), to_value(results[row.value])))
    for diff in found.outputs:
        wanted = measure(to_value(values[diff.name]), to_value(results[diff.name]))
        assert diff.rel_l2 == pytest.approx(wanted.rel_l2, rel=1e-4, abs=1e-9)
        assert diff.max_abs == pytest.approx(wanted.error_max)


@low_types
def test_float32_inputs_and_outputs_behind_casts(dtype):
    """The conversion's Casts count to the op that they belong to, whatever it calls its low values."""
    model, feeds = graph("norm"), {"X": x_of(4, 6)}
    low = convert_model(model, "O3", dtype=dtype, hazards=False)
    assert {node.op_type for node in low.graph.node} > {"Cast"}
    values = every_value(model, feeds)
    found = diff_models(model, low, given(feeds), layers=True)
    assert [row.value for row in found.layers] == ["q", "m", "r", "d", "Y"]
    for node, row in zip(model.graph.node, found.layers, strict=True):
        wanted = one_op(model, node, values, dtype)[row.value]
        close(row.local, measure(to_value(values[row.value]), to_value(wanted)))


@low_types
def test_partly_low_models(dtype):
    """Ops in float32 have no error of their own where their inputs are float32, too."""
    model, feeds = graph("norm"), {"X": x_of(4, 6)}
    low = convert_model(model, "O1", dtype=dtype)
    found = {row.value: row for row in diff_models(model, low, given(feeds), layers=True).layers}
    assert found["q"].dtype == "float32"
    assert found["q"].local.error_max == found["q"].accumulated.error_max == 0
    assert found["Y"].local.rel_l2 > 1e-4


def test_equal_models_have_no_errors():
    for name in GRAPHS:
        model = graph(name)
        found = diff_models(model, model, layers=True, budget=0)
        assert found.passed
        floats = {name for node in model.graph.node for name in node.output} - {"I"}
        assert {row.value for row in found.layers} == floats
        for row in found.layers:
            assert row.local.error_max == row.accumulated.error_max == 0


def flows(one, other):
    return tuple(make_flow(model, emulated=True) for model in (one, other))


def test_pairing_is_by_name():
    one = parse("(float[3] X) => (float[3] Y) { a = Exp (X) b = Neg (a) c = Relu (b) Y = Add (c, a) }")
    renamed = parse("(float[3] X) => (float[3] Y) { a = Exp (X) other = Neg (a) c = Relu (other) Y = Add (c, a) }")
    shared = pair(*flows(one, renamed)).shared
    assert list(shared) == ["a", "c", "Y"]
    assert shared["c"].reads == ("a",), "what lies between is replayed, too"
    assert len(shared["c"].nodes) == 2
    missing = parse("(float[3] X) => (float[3] Y) { a = Exp (X) Y = Neg (a) }")
    assert list(pair(*flows(one, missing)).shared) == ["a", "Y"]
    assert list(pair(*flows(missing, one)).shared) == ["a", "Y"]


def test_values_that_only_one_model_has_change_no_local_error():
    one = parse("(float[3] X) => (float[3] Y) { a = Exp (X) b = Neg (a) Y = Add (b, a) }")
    other = parse("(float[3] X) => (float[3] Y) { a = Exp (X) m = Neg (a) n = Identity (m) Y = Add (n, a) }")
    found = diff_models(one, other, layers=True)
    assert [row.value for row in found.layers] == ["a", "Y"]
    assert all(row.local.error_max == 0 for row in found.layers)


def test_names_that_mean_something_else():
    """A value of the same name with another type or another shape is no reason to stop."""
    one = parse("(float[3] X) => (float[3] Y) { t = Exp (X) u = Neg (t) Y = Relu (u) }")
    kinds = {
        "double": "d = Cast <to = 11> (X) t = Exp (d) f = Cast <to = 1> (t) u = Neg (f)",
        "int64": "t = Cast <to = 7> (X) e = Exp (X) u = Neg (e)",
        "bool": "t = IsNaN (X) e = Exp (X) u = Neg (e)",
        "shape": "t = Unsqueeze (X, z) e = Exp (X) u = Neg (e)",
        "float16": "h = Cast <to = 10> (X) t = Exp (h) f = Cast <to = 1> (t) u = Neg (f)",
        "sequence": "t = SequenceConstruct (X) e = Exp (X) u = Neg (e)",
    }
    for kind, body in kinds.items():
        weights = {"z": np.array([0])} if kind == "shape" else {}
        text = f"(float[3] X) => (float[3] Y) {{ {body} Y = Relu (u) }}"
        other = add_weights(parse(text), weights)
        for models in ((one, other), (other, one)):
            found = diff_models(*models, given({"X": x_of(3)}), layers=True)
            assert (found.skipped, found.failure) == (None, None), kind
            rows = {row.value: row for row in found.layers}
            if kind == "shape" and models[1] is one:  # then the op is fed with another shape, and says so
                assert rows["u"].note == "shape (1, 3) instead of (3,)"
            else:
                assert rows["u"].local.rel_l2 < 1e-3, kind
            assert rows["Y"].local.error_max == 0, kind
            assert found.outputs[0].rel_l2 < 1e-3, kind


@pytest.mark.parametrize("name", ["e", "t", "Y"])
def test_a_wrong_op_is_found_where_it_is(name):
    body = "e = Exp (X) t = Tanh (e) Y = Sqrt (t)"
    one = parse(f"(float[3] X) => (float[3] Y) {{ {body} }}")
    kinds = {"e": ("Exp", "Softplus"), "t": ("Tanh", "Sigmoid"), "Y": ("Sqrt", "Relu")}
    other = parse(f"(float[3] X) => (float[3] Y) {{ {body.replace(*kinds[name])} }}")
    found = diff_models(one, other, layers=True)
    local = {row.value: row.local.rel_l2 for row in found.layers}
    assert not found.passed
    assert {value for value, error in local.items() if error} == {name}
    later = ["e", "t", "Y"][["e", "t", "Y"].index(name) :]
    assert [row.value for row in found.layers if row.accumulated.error_max] == later


# --- shapes, branches, samples --------------------------------------------------------------------------------

SELECT = """(float[N] X) => (float[M] Y) {
    p = Greater (X, zero) i = NonZero (p) f = Squeeze (i, first) s = Gather (X, f) Y = Exp (s)
}"""


def test_shapes_that_depend_on_data():
    model = add_weights(parse(SELECT), {"zero": np.float32([0]), "first": np.array([0])})
    low = lowered(model, "float16")
    same = diff_models(model, low, given({"X": np.float32([1, -1, 2, -3])}), layers=True)
    assert same.passed
    assert same.outputs[0].result_shape == (2,)
    other = diff_models(model, low, given({"X": np.float32([1e-9, -1, 2, -3])}), layers=True)
    assert other.failure is None
    assert other.warnings == ("Output 'Y' has shape (1,), the reference (2,).",)
    rows = {row.value: row for row in other.layers}
    assert rows["s"].accumulated is None
    assert rows["s"].note == "shape (1,) instead of (2,)"
    assert rows["s"].local.elements == 2, "the op itself is still held against the reference's indices"
    assert rows["s"].local.flushed == 1


def test_boxes_that_non_max_suppression_keeps():
    text = """(float[1,N,4] B, float[1,1,N] S) => (int64[M,3] I, float[M] Y) {
        I = NonMaxSuppression (B, S, most, overlap, least)
        i = Gather <axis = 1> (I, two) f = Squeeze (S, ones) Y = Gather (f, i)
    }"""
    weights = {
        "most": np.array([10]), "overlap": np.float32([0.5]), "least": np.float32([0.3]),
        "two": np.array(2), "ones": np.array([0, 1]),
    }  # fmt: skip
    model = add_weights(parse(text), weights)
    boxes = np.float32([[[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]])
    feeds = given(
        {"B": boxes, "S": np.float32([[[0.9, 0.30001, 0.5]]])}, {"B": boxes[:, :2], "S": np.float32([[[0.2, 0.4]]])}
    )
    low = convert_model(model, "O3", hazards=False)
    found = diff_models(model, low, feeds, layers=True, budget=0)
    assert found.skipped is None
    assert [diff.name for diff in found.outputs] == ["I", "Y"]
    assert found.samples == 2


BRANCHES = """(float[3] X) => (float[3] Y) {
    s = ReduceSum <keepdims = 0> (X) c = Greater (s, zero)
    Y = If (c) <
        then_branch = t () => (float[3] a) { p = Exp (X) a = Neg (p) },
        else_branch = e () => (float[3] b) { q = Tanh (X) b = Sqrt (q) }
    >
}"""


@low_types
def test_branches_that_samples_take(dtype):
    """What both take is seen inside; each value is of the samples that computed it."""
    model = add_weights(parse(BRANCHES), {"zero": np.zeros((), np.float32)})
    low = convert_model(model, "O3", dtype=dtype, hazards=False)
    up, down = {"X": np.float32([1, 2, 3])}, {"X": np.float32([-1, 0.5, -3])}
    one = {row.op: row for row in diff_models(model, low, given(up), layers=True).layers}
    both = {row.op: row for row in diff_models(model, low, given(up, up, down), layers=True).layers}
    assert "Exp" in one
    assert "Tanh" not in one
    assert one["Exp"].local.elements == 3
    assert {"Exp", "Tanh"} <= set(both)
    assert (both["Exp"].local.elements, both["Tanh"].local.elements) == (6, 3)
    assert both["Exp"].local.error_sum == pytest.approx(2 * one["Exp"].local.error_sum)


def test_models_that_take_different_branches():
    """float16 cannot tell the sum from zero: what follows is compared as outputs."""
    model = add_weights(parse(BRANCHES), {"zero": np.zeros((), np.float32)})
    low = lowered(model, "float16")
    found = diff_models(model, low, given({"X": np.float32([1, -1, 1e-9])}), layers=True)
    assert found.skipped is None
    assert not found.passed


def test_several_samples_are_one():
    model = graph("chain")
    low = lowered(model, "float16")
    samples = [{"X": x_of(4, 6, seed=seed, scale=1 + seed)} for seed in range(3)]
    apart = [diff_models(model, low, given(sample), layers=True) for sample in samples]
    found = diff_models(model, low, given(*samples), layers=True)
    assert found.samples == 3
    for position, row in enumerate(found.layers):
        parts = [report.layers[position] for report in apart]
        assert {part.value for part in parts} == {row.value}
        assert row.local == parts[0].local + parts[1].local + parts[2].local
        assert row.accumulated == parts[0].accumulated + parts[1].accumulated + parts[2].accumulated
    assert found.outputs[0].size == 72
    assert found.outputs[0].max_abs == max(report.outputs[0].max_abs for report in apart)


def test_samples_of_other_sizes():
    model = add_weights(parse("(float[N,6] X) => (float[N,6] Y) { a = MatMul (X, w) Y = Softmax (a) }"), {"w": (6, 6)})
    found = diff_models(model, lowered(model, "float16"), given(*({"X": x_of(n, 6)} for n in (1, 5, 2))), layers=True)
    assert found.passed
    assert [row.local.elements for row in found.layers] == [48, 48]


@pytest.mark.parametrize("given_w", [{}, {"w": np.float32([4, 5.001, 6])}])
@low_types
def test_defaults_that_the_caller_overrides(given_w, dtype):
    """The op of the result is fed with the value that was given, not with the default."""
    model = parse("(float[3] X, float[3] w) => (float[3] Y) <float[3] w = {1, 2, 3}> { a = Mul (X, w) Y = Exp (a) }")
    low = convert_model(model, "O3", dtype=dtype, freeze_defaults=False)
    for budget in BUDGETS:
        found = diff_models(model, low, given({"X": x_of(3), **given_w}), layers=True, budget=budget)
        assert found.passed
        for row in found.layers:
            assert row.local.rel_l2 < (2e-3 if dtype == "float16" else 2e-2)


def test_kinds_of_values_that_are_not_compared():
    """Numbers of four or eight bits, strings and sequences pass through; what is around them is compared."""
    texts = {
        "float8": "q = QuantizeLinear <output_dtype = 17> (X, s) d = DequantizeLinear (q, s)",
        "int4": "q = QuantizeLinear <output_dtype = 22> (X, s) d = DequantizeLinear (q, s)",
        "int8": "q = QuantizeLinear <output_dtype = 3> (X, s) d = DequantizeLinear (q, s)",
        "sequence": "q = SequenceConstruct (X, X) d = ConcatFromSequence <axis = 0> (q)",
        "optional": "q = Optional (X) d = OptionalGetElement (q)",
    }
    for kind, body in texts.items():
        model = parse(f"(float[4] X) => (float[n] Y) <float s = {{0.1}}> {{ {body} Y = Exp (d) }}", 21, 10)
        found = diff_models(model, model, given({"X": x_of(4)}), layers=True, budget=0)
        assert found.passed, (kind, found.skipped)
        assert {row.value for row in found.layers} == {"d", "Y"}, kind


def test_string_inputs_and_sequence_outputs():
    text = """(string[2] T, float[2] X) => (string[2] U, seq(float[2]) S, float[2] Y) {
        U = Identity (T) Y = Exp (X) S = SequenceConstruct (X, Y)
    }"""
    model = parse(text)
    found = diff_models(model, convert_model(model, "O3"), given({"T": np.array(["a", "b"], object), "X": x_of(2)}))
    assert found.passed
    assert [diff.name for diff in found.outputs] == ["U", "S[0]", "S[1]", "Y"]


def test_memory_is_given_back():
    """At the end a execution holds the outputs alone."""
    body = " ".join(f"v{i + 1} = Exp (v{i})" for i in range(8)).replace("v0", "X")
    model = parse(f"(float[3] X) => (float[3] Y) {{ {body} Y = Tanh (v8) }}")
    one, other = flows(model, lowered(model, "float16"))
    execution = PairedExecution(Executor(one, "cpu"), Executor(other, "cpu"), pair(one, other), 0)
    steps = []
    feeds = {"X": np.float32([-1, -2, -3])}
    outputs = execution.run(feeds, lambda done, total: steps.append((done, total)))
    assert steps == [*((done, 9) for done in range(1, 10)), (9, 9)]
    assert list(outputs.compared) == [*(f"v{i}" for i in range(1, 9)), "Y"]
    assert set(outputs.reference) == set(outputs.result) == {"Y"}


def test_names_that_end_in_what_replays_are_called():
    body = "a = Exp (X) b = Neg (a) Y = Add (b, a)"
    model = parse(f"(float[3] X) => (float[3] Y) {{ {body} }}")
    for node in model.graph.node:
        node.input[:] = [{"a": "b/local", "b": "b"}.get(name, name) for name in node.input]
        node.output[:] = [{"a": "b/local"}.get(name, name) for name in node.output]
    found = diff_models(model, lowered(model, "float16"), given({"X": x_of(3)}), layers=True)
    assert found.passed
    assert [row.value for row in found.layers] == ["b/local", "b", "Y"]
    assert all(row.local is not None for row in found.layers)
