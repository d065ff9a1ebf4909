"""Emulation against onnx's reference evaluator, which runs the low-precision model itself."""

import re

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, checker, defs, helper, numpy_helper, parser
from onnx.external_data_helper import set_external_data
from onnx.reference import ReferenceEvaluator

from onnxamp._base.errors import ExternalDataError, ModelError, OpsetError
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.sessions.session import cuda_available, make_session, run

LOW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ELEM = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

low_types = pytest.mark.parametrize("low", ["float16", "bfloat16"])


def graph(low, inputs, outputs, body, *, opset=21, extra="", ir=10, defaults="", functions=""):
    """A model in onnx's text form, where LOW is the low type, ELEM its number, and ``LOW {0.5}`` a constant."""
    text = (
        f'<ir_version: {ir}, opset_import: ["": {opset}{extra}]>'
        f" g ({inputs}) => ({outputs}) {defaults} {{ {body} }} {functions}"
    )

    def bits(match):
        values = np.array([float(number) for number in match[2].split(",")], LOW[low])
        return f"{match[1]}{{{', '.join(map(str, values.view(np.uint16)))}}}"

    text = re.sub(r"(LOW(?:\[[\d, ]*\])?(?: \w+ =)? )\{([\d., ]*)\}", bits, text)
    return parser.parse_model(text.replace("LOW", low).replace("ELEM", str(ELEM[low])))


def emulated(model, feeds, **session_options):
    """Outputs of the emulated model; checks what holds for every emulation."""
    before = model.SerializeToString(deterministic=True)
    result = emulate(model)
    assert model.SerializeToString(deterministic=True) == before
    assert [port.name for port in result.graph.input] == [port.name for port in model.graph.input]
    assert [port.name for port in result.graph.output] == [port.name for port in model.graph.output]
    return run(make_session(result, **session_options), feeds)


def reference(model, feeds, low):
    """Outputs of the low model, with low inputs where it has them."""
    types = {port.name: port.type.tensor_type.elem_type for port in model.graph.input}
    given = {name: x.astype(LOW[low]) if types[name] == ELEM[low] else x for name, x in feeds.items()}
    names = [port.name for port in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model).run(None, given), strict=True))


def assert_same(found, wanted):
    """Equal to the last bit, whichever of the two is float32; NaN equals NaN."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape
        np.testing.assert_array_equal(found[name], value.astype(found[name].dtype), err_msg=name)


def assert_close(found, wanted, low):
    """Within one rounding of the low type."""
    step = float(ml_dtypes.finfo(LOW[low]).eps)
    np.testing.assert_allclose(found, np.asarray(wanted).astype(np.float32), rtol=step, atol=1e-6)
    assert_rounded(found, low)


def assert_rounded(values, low):
    np.testing.assert_array_equal(values, values.astype(LOW[low]).astype(np.float32))


@pytest.fixture
def x():
    return (np.random.default_rng(0).standard_normal((4, 6)) * 3).astype(np.float32)


@low_types
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        "y = Add(x, x)",
        "t = Mul(x, x) y = Mul(t, t)",
        "t = Mul(x, x) y = Sub(t, x)",
        "t = Abs(x) y = Sqrt(t)",
        "t = Exp(x) y = Div(x, t)",
        "y = Relu(x)",
        "y = Identity(x)",
        "t = Transpose(x) y = Transpose(t)",
        "t = Transpose(x) u = Add(t, t) y = Transpose(u)",
        "a, b = Split <axis = 1, num_outputs = 2>(x) y = Concat <axis = 0>(b, a)",
        "t = Neg(x) u = Max(t, x) y = Min(u, x, t)",
        "c = Less(x, x) t = Where(c, x, x) y = Floor(t)",
        "z = Constant <value = LOW {2.5}>() y = Clip(x, , z)",
        "t = Transpose(x) y = MatMul(x, t)",
        "y = ReduceMax <keepdims = 1>(x)",
        "s = Shape(x) e = Constant <value = LOW[1] {0.1}>() t = Expand(e, s) y = Mul(t, x)",
        "s = Shape(x) t = ConstantOfShape <value = LOW[1] {0.1}>(s) y = Mul(t, x)",
        "t = EyeLike <dtype = ELEM>(x) y = Add(t, x)",
    ],
)
def test_one_rounding_per_op_is_bit_exact(body, low, optimize, x):
    model = graph(low, "LOW[4, 6] x", "LOW[M, N] y", body)
    checker.check_model(emulate(model), full_check=True)
    assert_same(emulated(model, {"x": x}, optimize=optimize), reference(model, {"x": x}, low))


@low_types
@pytest.mark.parametrize(
    "body",
    [
        "y = Softmax(x)",
        "s = Constant <value = LOW[6] {1, 2, 3, 4, 5, 6}>() y = LayerNormalization(x, s)",
        "y = ReduceMean <keepdims = 1>(x)",
        "y = Gelu(x)",
        "t = Unsqueeze(x, axes) u = AveragePool <kernel_shape = [2]>(t) y = Squeeze(u, axes)",
    ],
)
def test_composed_ops_accumulate_in_float32(body, low, x):
    arguments = {"inputs": "LOW[4, 6] x", "outputs": "LOW[M, N] y", "body": body}
    arguments["defaults"] = "<int64[1] axes = {1}>" if "axes" in body else ""
    rounded = x.astype(LOW[low]).astype(np.float32)
    exact = ReferenceEvaluator(graph("float16", **{k: v.replace("LOW", "float") for k, v in arguments.items()}))
    assert_close(emulated(graph(low, **arguments), {"x": x})["y"], exact.run(None, {"x": rounded})[0], low)


@pytest.mark.parametrize("optimize", [True, False])
def test_overflow_and_flushed_values_show(optimize):
    model = graph(
        "float16", "float[N] x", "float[N] y, float[N] z",
        """h = Cast <to = 10>(x) m = Mul(h, h) r = Sqrt(m) y = Cast <to = 1>(r)
           tiny = Constant <value = LOW {0.00000006}>() f = Mul(m, tiny) z = Cast <to = 1>(f)""",
    )  # fmt: skip
    found = emulated(model, {"x": np.array([300, 2, 0.5], np.float32)}, optimize=optimize)
    np.testing.assert_array_equal(found["y"], np.array([np.inf, 2, 0.5], np.float32))
    np.testing.assert_array_equal(found["z"], np.array([np.inf, 2.0**-22, 0], np.float32))


@low_types
def test_rounding_is_to_nearest_even_with_subnormals(low):
    model = graph(low, "float[N] x", "float[N] y", "h = Cast <to = ELEM>(x) t = Neg(h) y = Cast <to = 1>(t)")
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 6e-5, 3e-8, 2.9e-8, 65519, 65520, 3.39e38, np.inf, np.nan])
    x = np.concatenate([x, [2.0**-133, 2.0**-134, 1e-40]]).astype(np.float32)
    found = emulated(model, {"x": x})["y"]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, -x.astype(LOW[low]).astype(np.float32))


@low_types
def test_casts(low):
    model = graph(
        low, "float[N] x, int32[N] i, double[N] d",
        "float[N] a, LOW[N] b, LOW[N] c, LOW[N] e, int32[N] f, bool[N] h, double[N] k, bfloat16[N] m",
        """l = Cast <to = ELEM>(x) a = Cast <to = 1>(l) b = Cast <to = ELEM>(i) c = Cast <to = ELEM>(d)
           e = CastLike(x, l) f = Cast <to = 6>(l) h = Cast <to = 9>(l) k = Cast <to = 11>(l)
           m = Cast <to = 16>(l)""",
    )  # fmt: skip
    feeds = {
        "x": np.array([1.1, -1.3, 2049]),
        "i": np.array([3, 2049, -70001]),
        "d": np.array([1.1, -1.3, 1e300]),
    }
    feeds = {name: value.astype({"x": np.float32, "i": np.int32}.get(name, float)) for name, value in feeds.items()}
    with np.errstate(over="ignore"):
        wanted = reference(model, feeds, low)
    assert_same(emulated(model, feeds), wanted)


def test_cast_from_low_becomes_identity():
    model = graph("float16", "float16[N] x", "float[N] y", "y = Cast <to = 1>(x)")
    assert [node.op_type for node in emulate(model).graph.node] == ["Cast", "Cast", "Identity"]


@low_types
@pytest.mark.parametrize("kind", ["raw", "numbers", "external", "constant"])
def test_weights_hold_the_rounded_numbers(low, kind, tmp_path, x):
    values = (np.arange(6) / 7).astype(LOW[low])
    tensor = numpy_helper.from_array(values, "w")
    if kind == "numbers":
        numbers = values.view(np.uint16).tolist()
        tensor = TensorProto(name="w", data_type=ELEM[low], dims=[6], int32_data=numbers)
    model = graph(low, "LOW[4, 6] x", "LOW[4, 6] y", "y = Mul(x, w)", defaults="<LOW[6] w = {0, 0, 0, 0, 0, 0}>")
    model.graph.initializer[0].CopyFrom(tensor)
    wanted = reference(model, {"x": x}, low)
    if kind == "external":
        (tmp_path / "w.bin").write_bytes(tensor.raw_data)
        set_external_data(model.graph.initializer[0], "w.bin")
        model.graph.initializer[0].ClearField("raw_data")
        with pytest.raises(ExternalDataError, match="'w'"):
            emulate(model)
        with pytest.raises(ExternalDataError, match="'w'"):
            emulate(model, base_dir=tmp_path / "nowhere")
    if kind == "constant":
        node = helper.make_node("Constant", [], ["w"], value=tensor)
        del model.graph.initializer[:]
        model.graph.node.insert(0, node)
    result = emulate(model, base_dir=tmp_path)
    constants = [node.attribute[0].t for node in result.graph.node if node.op_type == "Constant"]
    (held,) = (*constants, *result.graph.initializer)
    assert held.data_type == TensorProto.FLOAT
    np.testing.assert_array_equal(numpy_helper.to_array(held), values.astype(np.float32))
    assert_same(run(make_session(result), {"x": x}), wanted)


def test_truncated_external_data_are_an_error(tmp_path):
    model = graph("float16", "float16[2] x", "float16[2] y", "y = Mul(x, w)", defaults="<LOW[2] w = {1, 2}>")
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(np.ones(2, np.float16), "w"))
    (tmp_path / "w.bin").write_bytes(b"\0")
    set_external_data(tensor, "w.bin")
    tensor.ClearField("raw_data")
    with pytest.raises(ExternalDataError, match="'w'"):
        emulate(model, base_dir=tmp_path)


def test_tensor_that_does_not_fit_its_shape():
    model = graph("float16", "LOW[2] x", "LOW[2] y", "y = Mul(x, w)", defaults="<LOW[2] w = {1, 2}>")
    model.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=10, dims=[2], raw_data=b"\0"))
    with pytest.raises(ModelError, match="'w'"):
        emulate(model)


def test_sparse_weight(x):
    dense = np.zeros((6, 3), np.float16)
    dense[1, 2], dense[4, 0] = 0.1, 0.7
    where = np.flatnonzero(dense)
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(dense.ravel()[where], "w"), numpy_helper.from_array(where, "at"), dense.shape
    )
    model = graph("float16", "float16[4, 6] x", "float16[4, 3] y", "y = MatMul(x, w)")
    model.graph.sparse_initializer.append(sparse)
    found = emulated(model, {"x": x})["y"]
    exact = x.astype(np.float16).astype(np.float32) @ dense.astype(np.float32)
    assert_close(found, exact.astype(np.float16), "float16")


@low_types
def test_if_with_captures(low, x):
    model = graph(
        low, "LOW[4, 6] x, bool c", "LOW[4, 6] y, LOW[4, 6] z",
        """t = Mul(x, x)
           y, k = If (c) <then_branch = then () => (LOW[4, 6] a, LOW[4, 6] b) {
                 a = Add(x, t) v = Mul(a, t) b = If (c) <
                     then_branch = deep () => (LOW[4, 6] q) { q = Mul(v, x) },
                     else_branch = deeper () => (LOW[4, 6] q) { q = Identity(x) }> },
               else_branch = otherwise () => (LOW[4, 6] d, LOW[4, 6] e) {
                 d = Div(t, x) e = Constant <value = LOW[4, 6] {1.1}>() }>
           z = Sub(k, y)""".replace("{1.1}", "{" + ", ".join(["1.1"] * 24) + "}"),
    )  # fmt: skip
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        assert_same(emulated(model, feeds), reference(model, feeds, low))


@low_types
def test_loop_carries_low_state(low, x):
    model = graph(
        low, "LOW[4, 6] x, int64 n", "LOW[4, 6] y, LOW[N, 4, 6] all",
        """go = Constant <value = bool {1}>() s = Div(x, x)
           y, all = Loop (n, go, s) <body = step (int64 i, bool c, LOW[4, 6] x_in)
               => (bool c_out, LOW[4, 6] x_out, LOW[4, 6] scan) {
                 c_out = Identity(c) x_out = Mul(x_in, third) t = Cast <to = ELEM>(i) scan = Add(x_out, t) }>""",
        defaults="<LOW third = {1.3}>",
    )  # fmt: skip
    feeds = {"x": x, "n": np.array(7)}
    wanted = reference(model, feeds, low)
    wanted["all"] = wanted["all"].reshape(7, 4, 6)  # the evaluator concatenates what it should stack
    assert_same(emulated(model, feeds), wanted)


@low_types
def test_scan_and_shadowed_names(low, x):
    model = graph(
        low, "LOW[4, 6] x", "LOW[6] sum, LOW[4, 6] y",
        """s = Constant <value = LOW[6] {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}>() x_low = Neg(x)
           sum, y = Scan (s, x_low) <num_scan_inputs = 1, body = step (LOW[6] x, LOW[6] s)
               => (LOW[6] t, LOW[6] u) { t = Add(x, s) u = Mul(t, s) }>""",
    )  # fmt: skip
    assert_same(emulated(model, {"x": x}), reference(model, {"x": x}, low))


@low_types
def test_sequences_and_optionals(low, x):
    model = graph(
        low, "LOW[4, 6] x", "LOW[M, 6] y, seq(LOW[K, 6]) s, LOW[4, 6] z",
        """one = Constant <value = int64 {1}>() e = SequenceEmpty <dtype = ELEM>() t = Mul(x, x)
           a = SequenceInsert(e, t) b = SequenceInsert(a, x) p = SequenceConstruct(x, t) at = SequenceAt(p, one)
           s = SequenceInsert(b, at) y = ConcatFromSequence <axis = 0>(s)
           parts = SplitToSequence <axis = 0>(t, one) first = SequenceAt(parts, one)
           o = Optional(t) g = OptionalGetElement(o) z = Mul(g, first)""",
    )  # fmt: skip
    found = emulated(model, {"x": x})
    rounded = x.astype(LOW[low])
    square = rounded * rounded
    parts = [part.astype(np.float32) for part in (square, rounded, square)]
    for part, wanted in zip(found["s"], parts, strict=True):
        np.testing.assert_array_equal(part, wanted)
    np.testing.assert_array_equal(found["y"], np.concatenate(parts))
    np.testing.assert_array_equal(found["z"], (square * square[1:2]).astype(np.float32))


def test_sequence_input_and_typed_optional():
    model = graph("float16", "seq(float16[N]) s", "float16[M] y", "c = ConcatFromSequence <axis = 0>(s) y = Mul(c, c)")
    empty = helper.make_node("Optional", [], ["none"])
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT16, None)
    empty.attribute.append(helper.make_attribute("type", kind))
    model.graph.node.append(empty)
    result = emulate(model)
    assert result.graph.node[-1].attribute[0].tp.tensor_type.elem_type == TensorProto.FLOAT
    assert result.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type == TensorProto.FLOAT
    found = run(make_session(result), {"s": [np.ones(2, np.float32), np.full(1, 300, np.float32)]})
    np.testing.assert_array_equal(found["y"], np.array([1, 1, np.inf], np.float32))


@low_types
def test_local_functions_are_inlined(low, x):
    model = graph(
        low, "LOW[4, 6] x", "LOW[4, 6] y", "t = local.twice(x) y = Mul(t, w)", extra=', "local": 1',
        defaults="<LOW w = {0.3}>",
        functions='<domain: "local", opset_import: ["": 21]> twice (a) => (b) { k = Mul(a, a) b = Mul(k, a) }',
    )  # fmt: skip
    result = emulate(model)
    assert not result.functions
    assert_same(emulated(model, {"x": x}), reference(model, {"x": x}, low))


def test_function_that_cannot_be_inlined():
    model = graph("float16", "float16[N] x", "float16[N] y", "y = local.f(x)", extra=', "local": 1',
        functions='<domain: "local", opset_import: ["": 21]> f (a) => (b) { b = local.f(a) }')  # fmt: skip
    with pytest.raises(ModelError):
        emulate(model)


@low_types
def test_contrib_ops(low, x):
    model = graph(
        low, "LOW[4, 6] x", "LOW[4, 6] y, LOW[4, 4] z",
        "y = com.microsoft.QuickGelu <alpha = 1.0>(x) t = com.microsoft.FusedMatMul <transB = 1>(x, y) z = Mul(t, t)",
        extra=', "com.microsoft": 1',
    )  # fmt: skip
    found = emulated(model, {"x": x})
    r = x.astype(LOW[low]).astype(np.float32)
    assert_close(found["y"], (r / (1 + np.exp(-r))).astype(LOW[low]), low)
    product = (r @ found["y"].T).astype(LOW[low])
    np.testing.assert_allclose(found["z"], (product * product).astype(np.float32), rtol=0.04)
    assert_rounded(found["z"], low)


def test_model_that_imports_contrib_ops_only(x):
    model = graph("float16", "float16[4, 6] x", "float16[4, 6] y", "y = com.microsoft.QuickGelu(x)",
        extra=', "com.microsoft": 1')  # fmt: skip
    del model.opset_import[0]
    assert_rounded(emulated(model, {"x": x})["y"], "float16")


@low_types
@pytest.mark.parametrize(
    ("body", "opset"),
    [
        ("t = RandomNormal <dtype = ELEM, shape = [6]>() y = Add(x, t)", 21),
        ("t = RandomUniformLike(x) y = Add(x, t)", 21),
        ("t = Bernoulli(p) y = Add(x, t)", 21),
        ("n = Constant <value = int64 {6}>() t = HannWindow <output_datatype = ELEM>(n) y = Mul(x, t)", 21),
        ("q = QuantizeLinear(x, p) y = DequantizeLinear(q, p)", 21),
        ("q = QuantizeLinear <precision = ELEM>(x, p) y = DequantizeLinear <output_dtype = ELEM>(q, f)", 23),
        ("y, m = LayerNormalization <stash_type = ELEM>(x, x)", 17),
    ],
)
def test_attributes_that_name_the_type(body, opset, low, x):
    model = graph(low, "LOW[6] x", "LOW[6] y", body, opset=opset, defaults="<LOW p = {0.5}, float f = {0.5}>")
    found = emulated(model, {"x": x[0]})["y"]
    assert found.dtype == np.float32
    assert_rounded(found, low)


@low_types
@pytest.mark.parametrize(("kind", "ends"), [("int8", (-128, 127)), ("uint8", (0, 255)), ("int4", (-8, 7))])
def test_integers_are_exact(kind, ends, low, x):
    """Rounded numbers are divided by a rounded scale, and what the nearest integers stand for is rounded."""
    zero = 1 if kind == "int8" else 3
    body = f"""z = Constant <value = {kind} {{{zero}}}>() q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)
        w = Constant <value = int8[2, 3] {{1, -2, 3, 4, -5, 127}}>()
        v = DequantizeLinear <axis = 0>(w, t) i = Cast <to = 6>(q)"""
    model = graph(low, "LOW[4, 6] x", "int32[4, 6] i, LOW[4, 6] y, LOW[2, 3] v", body,
        defaults="<LOW s = {0.0371}, LOW[2] t = {0.013, 3.1}>")  # fmt: skip
    found = emulated(model, {"x": x})
    number, scale, scales = (np.asarray(array, np.float32).astype(LOW[low]) for array in (x, 0.0371, [[0.013], [3.1]]))
    exact = number.astype(np.float32) / scale.astype(np.float32)
    integers = np.clip(np.rint(exact) + zero, *ends)
    np.testing.assert_array_equal(found["i"], integers)
    stands_for = ((integers - zero) * scale.astype(np.float32)).astype(LOW[low])
    np.testing.assert_array_equal(found["y"], stands_for.astype(np.float32))
    weight = np.array([[1, -2, 3], [4, -5, 127]]) * scales.astype(np.float32)
    np.testing.assert_array_equal(found["v"], weight.astype(LOW[low]).astype(np.float32))


@pytest.mark.skipif(defs.onnx_opset_version() < 26, reason="this onnx has no BitCast")
@low_types
def test_bit_cast_sees_low_bits(low, x):
    bits = int(np.array(0.1, LOW[low]).view(np.int16))
    model = graph(low, "LOW[6] x", "int16[6] i, LOW[6] y, LOW k",
        f"""t = Mul(x, x) i = BitCast <to = 5>(t) y = BitCast <to = ELEM>(i)
            c = Constant <value = int16 {{{bits}}}>() k = BitCast <to = ELEM>(c)""",
        opset=26, ir=13,
    )  # fmt: skip
    found = emulated(model, {"x": x[0]})
    wanted = x[0].astype(LOW[low]) ** 2
    np.testing.assert_array_equal(found["i"], wanted.view(np.int16))
    np.testing.assert_array_equal(found["y"], wanted.astype(np.float32))
    assert found["k"] == np.float32(np.array(0.1, LOW[low]))


def test_default_of_an_input_can_be_overridden(x):
    model = graph("float16", "float16[6] x, float16[6] w", "float16[6] y", "y = Mul(x, w)",
        defaults="<LOW[6] w = {1, 2, 3, 4, 5, 6}>")  # fmt: skip
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT16, [6]))
    default = np.arange(1, 7).astype(np.float16)
    row = x[0].astype(np.float16)
    np.testing.assert_array_equal(emulated(model, {"x": x[0]})["y"], (row * default).astype(np.float32))
    found = emulated(model, {"x": x[0], "w": x[1]})["y"]
    np.testing.assert_array_equal(found, (row * x[1].astype(np.float16)).astype(np.float32))
    model.ir_version = 3
    assert [node.op_type for node in emulate(model).graph.node].count("Cast") == 4, "a weight needs no rounding"


def test_names_never_collide(x):
    model = graph(
        "float16", "float16[4, 6] x", "float16[4, 6] y",
        "y_low = Mul(x, x) y_exact = Add(y_low, x) x_rounded = Neg(y_exact) y = Mul(x_rounded, x)",
    )  # fmt: skip
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("_", "/") for name in names]
    model.graph.node[0].name = "y/cast"
    result = emulate(model)
    outputs = [name for node in result.graph.node for name in node.output]
    assert len(outputs) == len(set(outputs))
    assert_same(emulated(model, {"x": x}), reference(model, {"x": x}, "float16"))


def test_nodes_out_of_order_and_untouched_parts(x):
    model = graph("float16", "float16[4, 6] x", "float16[4, 6] y", "t = Mul(x, x) y = Sub(t, x)")
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.doc_string, model.graph.doc_string, model.graph.node[0].doc_string = "a", "b", "c"
    helper.set_model_props(model, {"key": "value"})
    model.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT16, [4, 6]))
    result = emulate(model)
    assert (result.doc_string, result.graph.doc_string, result.metadata_props[0].value) == ("a", "b", "value")
    assert result.graph.value_info[0].type.tensor_type.elem_type == TensorProto.FLOAT
    ordered = graph("float16", "float16[4, 6] x", "float16[4, 6] y", "t = Mul(x, x) y = Sub(t, x)")
    assert_same(emulated(model, {"x": x}), reference(ordered, {"x": x}, "float16"))


def test_model_without_low_values_stays_as_it_is(x):
    model = graph("float16", "float[4, 6] x", "float[4, 6] y", "t = Mul(x, x) y = Sub(t, x)")
    assert emulate(model) == model


def test_old_opset_is_an_error():
    model = graph("bfloat16", "bfloat16[N] x", "bfloat16[N] y", "y = Identity(x)", opset=12)
    with pytest.raises(OpsetError, match=r"bfloat16.*opset 12.*13"):
        emulate(model)


def test_deep_nesting_and_long_chains_are_swept_iteratively():
    inner = "v = Mul(x, x) r = Identity(v)"
    for depth in range(30):
        inner = (
            f"r = If (c) <then_branch = t{depth} () => (float16[N] r) {{ {inner} }}, "
            f"else_branch = e{depth} () => (float16[N] r) {{ r = Neg(x) }}>"
        )
    result = emulate(graph("float16", "float16[N] x, bool c", "float16[N] r", inner))
    assert isinstance(result, ModelProto)
    chain = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(3000))
    result = emulate(graph("float16", "float16[N] v0", "float16[N] v3000", chain))
    assert len(result.graph.node) == 3 * 3000 + 2


@pytest.mark.cuda
@pytest.mark.skipif(not cuda_available(), reason="no CUDA device")
@low_types
def test_cuda_agrees_with_emulation_up_to_accumulation_noise(low, x):
    model = graph(low, "LOW[4, 6] x", "LOW[4, 4] y",
        "t = Transpose(x) m = MatMul(x, t) e = Relu(m) s = Softmax(e) y = Mul(s, m)")  # fmt: skip
    found = run(make_session(model, "cuda"), {"x": x.astype(LOW[low])})["y"].astype(np.float32)
    noise = 0.0035 if low == "float16" else 0.02
    np.testing.assert_allclose(found, emulated(model, {"x": x})["y"], rtol=noise, atol=noise)


def test_types_that_hold_no_numbers_stay_as_they_are() -> None:
    x = np.array([0.1, -0.1], np.float32)
    model = graph("float16", "float[2] x", "float[2] y", "h = Cast <to = ELEM> (x) y = Cast <to = 1> (h)")
    model.graph.value_info.add(name="handle").type.opaque_type.name = "Handle"
    assert_same(emulated(model, {"x": x}), {"y": x.astype(np.float16)})


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16"])
def test_infinities_are_quantized_as_a_session_does(kind):
    """The kernel makes the lowest integer of either infinity; finite numbers beyond the grid saturate."""
    body = f"""s0 = Constant <value_float = 0.5> () s = CastLike (s0, x) z0 = Constant <value_int = 3> ()
        z = Cast <to = {helper.np_dtype_to_tensor_dtype(np.dtype(kind))}> (z0) q = QuantizeLinear (x, s, z)"""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float16[5] x) => ({kind}[5] q) {{ {body} }}'
    )
    x = np.array([np.inf, -np.inf, 60000, -60000, 3], np.float16)
    wanted = run(make_session(model), {"x": x})
    assert wanted["q"][0] == np.iinfo(kind).min
    assert_same(emulated(model, {"x": x.astype(np.float32)}), wanted)
