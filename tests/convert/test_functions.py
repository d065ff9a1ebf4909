"""Attributes of model-local functions: what calls leave out is the function's default, or else is absent."""

import numpy as np
import onnx
import pytest
from judge_numbers import session
from onnx import ModelProto, NodeProto, helper, numpy_helper, parser
from properties import raised

import onnxamp

X = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)

LEAKY = "L <alpha: float = 0.5>(a) => (b) { b = LeakyRelu <alpha: float = @alpha>(a) }"
HEAD = '<domain: "d", opset_import: ["" : 18, "d" : 1]>'
CASES = {
    "default": ("y = d.L(x)", LEAKY),
    "given": ("y = d.L <alpha = 0.75>(x)", LEAKY),
    "both": ("u = d.L(x) y = d.L <alpha = 0.75>(u)", LEAKY),
    "absent": ("y = d.L(x)", "L <alpha>(a) => (b) { b = LeakyRelu <alpha: float = @alpha>(a) }"),
    "default behind a reference": (
        "y = d.O(x)",
        LEAKY,
        "O <beta: float = 0.25>(p) => (q) { q = d.L <alpha: float = @beta>(p) }",
    ),
    "default behind an absent reference": (
        "u = d.O <beta = 0.125>(x) y = d.O(u)",
        LEAKY,
        "O <beta>(p) => (q) { q = d.L <alpha: float = @beta>(p) }",
    ),
    "chain of three": (
        "u = d.P(x) v = d.P <gamma = 0.75>(u) y = d.O(v)",
        LEAKY,
        "O <beta>(p) => (q) { q = d.L <alpha: float = @beta>(p) }",
        "P <gamma>(p) => (q) { r = d.O <beta: float = @gamma>(p) q = d.L(r) }",
    ),
    "body of a function": (
        "y = d.S(x)",
        """S <alpha: float = 0.5>(a) => (b) {
            c = Constant <value = bool {1}>()
            b = If(c) <then_branch = t () => (k) { k = LeakyRelu <alpha: float = @alpha>(a) },
                       else_branch = e () => (n) { n = Neg(a) }>
        }""",
    ),
    "body of the graph": (
        """c = Constant <value = bool {1}>()
        y = If(c) <then_branch = t () => (k) { k = d.L(x) }, else_branch = e () => (n) { n = Neg(x) }>""",
        LEAKY,
    ),
    "integer": ("y = d.C(x)", "C <axis: int = 0>(a) => (b) { b = Softmax <axis: int = @axis>(a) }"),
    "integers": ("y = d.C(x)", "C <perm: ints = [1, 0]>(a) => (b) { b = Transpose <perm: ints = @perm>(a) }"),
    "floats": (
        "y = d.C(x)",
        "C <v: floats = [1.0, 2.0, 3.0]>(a) => (b) { k = Constant <value_floats: floats = @v>() b = Add(a, k) }",
    ),
    "string": (
        "y = d.C(x)",
        'C <way: string = "tanh">(a) => (b) { b = Gelu <approximate: string = @way>(a) }',
    ),
    "op of the same name": ("y = Relu(x)", '<domain: "", opset_import: ["" : 20]> Relu (a) => (b) { b = Neg(a) }'),
}


def model_of(graph: str, *functions: str) -> ModelProto:
    head = '<ir_version: 10, opset_import: ["" : 20, "d" : 1]>'
    inner = "\n".join(f"{'' if text.startswith('<') else HEAD.replace('18', '20')} {text}" for text in functions)
    return parser.parse_model(f"{head} g (float[2, 3] x) => (float[N, M] y) {{ {graph} }} {inner}")


def with_graph_default() -> ModelProto:
    """A function whose default is a branch, which refers to another default and reads a value of the function."""
    branch = helper.make_node("LeakyRelu", ["a"], ["k"])
    branch.attribute.add(name="alpha", ref_attr_name="alpha", type=onnx.AttributeProto.FLOAT)
    default, other = (
        helper.make_graph([node], name, [], [helper.make_tensor_value_info(node.output[0], 1, None)])
        for name, node in (("one", branch), ("other", helper.make_node("Neg", ["a"], ["n"])))
    )
    model = model_of("y = d.L(x)", LEAKY)
    function = model.functions[0]
    condition = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True)))
    chosen = helper.make_node("If", ["c"], ["b"], else_branch=other)
    chosen.attribute.add(name="then_branch", ref_attr_name="body", type=onnx.AttributeProto.GRAPH)
    del function.node[:]
    function.node.extend([condition, chosen])
    function.attribute_proto.append(helper.make_attribute("body", default))
    return model


def with_tensor_default() -> ModelProto:
    model = model_of("y = d.L(x)", LEAKY)
    function = model.functions[0]
    table = NodeProto(op_type="Constant", output=["k"])
    table.attribute.add(name="value", ref_attr_name="table", type=onnx.AttributeProto.TENSOR)
    del function.node[:]
    function.node.extend([table, helper.make_node("Add", ["a", "k"], ["b"])])
    tensor = numpy_helper.from_array(np.arange(3, dtype=np.float32))
    function.attribute_proto.append(helper.make_attribute("table", tensor))
    return model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*CASES, "graph", "tensor"])
def test_calls_mean_what_they_mean_to_the_runtime(name: str, dtype: str) -> None:
    made = {"graph": with_graph_default, "tensor": with_tensor_default}
    model = made[name]() if name in made else model_of(*CASES[name])
    before = model.SerializeToString()
    (want,) = session(model).run(None, {"x": X})
    result = onnxamp.convert_model(model, "O3", dtype=dtype)
    (have,) = session(raised(result)).run(None, {"x": X})
    assert want.tobytes() == have.tobytes()
    assert model.SerializeToString() == before


def test_functions_of_older_opsets_may_call_each_other() -> None:
    """The inliner cannot convert the outer one, and need not: Relu and Neg are the same at all three opsets."""
    model = model_of("y = d.O(x)", "O (a) => (b) { t = d.I(a) b = Neg(t) }", "I (a) => (b) { b = Relu(a) }")
    for function, version in zip(model.functions, (17, 16), strict=True):
        function.opset_import[0].version = version
    (want,) = session(model).run(None, {"x": X})
    result = onnxamp.convert_model(model, "O3")
    assert [node.op_type for node in result.graph.node] == ["Cast", "Relu", "Neg", "Cast"]
    (have,) = session(raised(result)).run(None, {"x": X})
    assert want.tobytes() == have.tobytes()


def test_a_call_without_an_attribute_that_is_needed_stays() -> None:
    model = model_of("y = d.C(x)", "C <v>(a) => (b) { k = Constant <value_float: float = @v>() b = Add(a, k) }")
    assert [node.op_type for node in onnxamp.convert_model(model).graph.node] == ["C"]


def test_a_call_whose_default_refers_to_itself_stays() -> None:
    model = with_graph_default()
    (body,) = (item.g for item in model.functions[0].attribute_proto if item.name == "body")
    inner = body.node[0]
    inner.CopyFrom(helper.make_node("If", ["c"], ["k"]))
    for name in ("then_branch", "else_branch"):
        inner.attribute.add(name=name, ref_attr_name="body", type=onnx.AttributeProto.GRAPH)
    assert [node.op_type for node in onnxamp.convert_model(model).graph.node] == ["L"]


def test_a_damaged_default_is_refused() -> None:
    model = with_tensor_default()
    model.functions[0].attribute_proto[-1].t.raw_data = b"abc"
    with pytest.raises(onnxamp.ModelError, match="'table' of 'L'"):
        onnxamp.convert_model(model)


TRAINING = """<ir_version: 10, opset_import: ["" : 20, "ai.onnx.preview.training" : 1]>
g (float[2, 3] x, float[3, 4] w) => (float[2, 4] y, float[2, 3] dx, float[3, 4] dw) {
    y = MatMul (x, w)
    dx, dw = ai.onnx.preview.training.Gradient <xs = ["x", "w"], y = "y"> (x, w)
}"""


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_node_that_names_values_is_refused(level: str) -> None:
    """Its values would get other names, and what is computed from them would not depend on them."""
    model = parser.parse_model(TRAINING)
    assert onnxamp.convert_model(model, "O0") == model
    with pytest.raises(onnxamp.ModelError, match=r"Gradient\) names the values .*\(x, w, y\)"):
        onnxamp.convert_model(model, level)


def test_a_function_that_names_values_is_refused() -> None:
    function = '<domain: "d", opset_import: ["" : 20, "ai.onnx.preview.training" : 1]> F (a) => (c) {'
    text = 'b = Relu(a) c = ai.onnx.preview.training.Gradient <xs = ["a"], y = "b"> (a) }'
    model = model_of("y = d.F(x)", f"{function} {text}")
    model.opset_import.add(domain="ai.onnx.preview.training", version=1)
    for keep in (False, True):
        with pytest.raises(onnxamp.ModelError, match="names the values"):
            onnxamp.convert_model(model, keep_functions=keep)
