"""Types of results: what onnx infers and ONNX Runtime checks is what the result says, in bodies as well."""

import onnx
import onnxruntime as ort
import pytest
from graphs.case import parse
from judge import inference_error
from onnx import GraphProto, ModelProto

import onnxamp
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._rewrite.checks.verify import type_conflicts


def loads(model: ModelProto) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


# --- outer values that bodies declare again -----------------------------------------------------------------------

HEAD = "(float[2,4] x, bool c, int64 n) => (float[2,4] y) <float[4,4] w> { h = MatMul (x, w)"
BODIES = {
    "If": """r = If (c) <
        then_branch = t () => (float[2,4] a) <float[2,4] h> { a = MatMul (h, w) },
        else_branch = e () => (float[2,4] b) <float[2,4] h> { b = Relu (h) }>""",
    "nested If": """r = If (c) <
        then_branch = t () => (float[2,4] a) <float[2,4] h> {
            a = If (c) <then_branch = tt () => (float[2,4] aa) <float[2,4] h, float[4,4] w> { aa = MatMul (h, w) },
                        else_branch = te () => (float[2,4] ab) <float[2,4] h> { ab = Exp (h) }>
        },
        else_branch = e () => (float[2,4] b) <float[2,4] h> { b = Relu (h) }>""",
    "only below": """r = If (c) <
        then_branch = t () => (float[2,4] a) {
            a = If (c) <then_branch = tt () => (float[2,4] aa) <float[2,4] h> { aa = Identity (h) },
                        else_branch = te () => (float[2,4] ab) <float[2,4] h> { ab = Neg (h) }>
        },
        else_branch = e () => (float[2,4] b) { b = Relu (h) }>""",
    "Loop": """r = Loop (n, c, h) <body = l (int64 i, bool k, float[2,4] s) => (bool kk, float[2,4] t) <float[2,4] h> {
        kk = Identity (k) p = MatMul (h, w) t = Add (s, p) }>""",
    "Scan": """z = MatMul (x, w)
        z1, r = Scan <num_scan_inputs = 1, body = l (float[4] s, float[4] row) => (float[4] t, float[4] o)
        <float[2,4] h> { m = ReduceSum <keepdims = 0> (h) o = Add (row, m) t = Identity (s) }> (x0, z)""",
}


def with_weights(text: str) -> ModelProto:
    model = parse(text.replace("<float[4,4] w>", ""))
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(
            onnx.numpy_helper.to_array(
                onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [4, 4], [0.1 * k for k in range(16)])
            ),
            "w",
        )
    )
    return model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", BODIES)
def test_outer_values_that_bodies_declare_have_their_types(name: str, level: str, dtype: str) -> None:
    text = f"{HEAD} {BODIES[name]} y = MatMul (r, w) }}"
    if name == "Scan":
        text = text.replace("int64 n)", "float[4] x0)")
    model = with_weights(text)
    loads(model)
    result = onnxamp.convert_model(model, level, dtype=dtype)
    assert inference_error(result) is None
    onnx.checker.check_model(result, full_check=True)
    if dtype == "float16":  # the CPU lacks kernels for bfloat16
        loads(result)


def test_a_renamed_value_is_declared_by_its_new_name() -> None:
    """A value of a body that would hide an outer one of another type gets a new name."""
    model = parse("""(bool C, float[2,2] X) => (float[2,2] Y) {
        p = If (C) <then_branch = t () => (float[2,2] v) <float[2,2] r> { r = Exp (X) v = MatMul (r, X) },
                    else_branch = e () => (float[2,2] v) <float[2,2] r> { r = MatMul (X, X) v = Exp (r) }>
        r = MatMul (p, X)
        Y = Relu (r)
    }""")
    result = onnxamp.convert_model(model)
    assert inference_error(result) is None
    loads(result)
    for body in bodies(result.graph):
        made = {name for node in body.node for name in node.output}
        assert {entry.name for entry in body.value_info} <= made


def bodies(graph: GraphProto) -> list[GraphProto]:
    return [item.g for node in graph.node for item in node.attribute if item.HasField("g")]


# --- what onnx infers ---------------------------------------------------------------------------------------------

NORM = """(float[2,4] x, float[4] s) => (float[2,4] y) <float[4,4] w> {
    h = MatMul (x, w) n = RMSNormalization <axis = -1> (h, s) y = Exp (n) }"""


@pytest.mark.parametrize("black", [(), ("Exp",), ("MatMul",)])
@pytest.mark.parametrize("target", ["cuda", "cpu", "any"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_rms_norm_and_its_scale_have_one_type(level: str, target: str, black: tuple[str, ...]) -> None:
    """Its output has the type of the scale by the schema, and that of the input by what onnx infers."""
    model = with_weights(NORM)
    model.opset_import[0].version, model.ir_version = 23, 10
    for lists in ("default", "fast"):
        result = onnxamp.convert_model(model, level, target=target, lists=lists, black_list=black)
        assert inference_error(result) is None
        loads(result)


def mixed_norm() -> ModelProto:
    model = parse("(float[2,4] x, float16[4] s) => (float[2,4] y) { y = RMSNormalization <axis = -1> (x, s) }", 23, 10)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return model


def test_what_the_schema_admits_and_onnx_contradicts_is_found() -> None:
    (conflict,) = type_conflicts(Graph.of(mixed_norm()))
    assert conflict.where == "node 'y' (RMSNormalization)"
    assert "onnx" in conflict.text
    (finding,) = [item for item in onnxamp.audit_model(mixed_norm()).findings if item.severity == "error"]
    assert finding.text.endswith(("refused by onnx: Y has inconsistent type float32", "but onnx infers float32"))


def test_types_that_fit_are_no_conflict() -> None:
    model = mixed_norm()
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    assert not list(type_conflicts(Graph.of(model)))
    assert op_facts().tied_parameters["RMSNormalization"] == {"T", "V"}
