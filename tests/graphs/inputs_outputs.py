"""Model inputs and outputs, names, and what else a model file holds (rows 6, 9 to 12, 20, 37, 39, 47)."""

import numpy as np
from onnx import ModelProto, TensorProto, external_data_helper, helper, numpy_helper

from .case import Case, case, fixed, graph, parse

MAX_BLOCKED = {"black_list": ("Max", "Min")}
X_TO_Y = "(float[2,3] X) => (float[2,3] Y)"


def named(model: ModelProto, *names: str) -> None:
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name


@case(11, feeds={"X": fixed(1, 2, 3)})
def initializer_is_input_ir3() -> ModelProto:
    """Below IR version 4 every initializer is listed as an input, and is a weight nevertheless."""
    model = parse("(float[3] X, float[3,2] w) => (float[2] Y) { Y = MatMul (X, w) }", opset=8, ir=3)
    weight = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


@case(47)
def metadata() -> ModelProto:
    """Everything that a model may say about itself."""
    model = parse(f"{X_TO_Y} {{ m = MatMul (X, w) Y = Softmax (m) }}", domains={"com.microsoft": 1})
    model.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    model.producer_name, model.producer_version = "exporter", "1.2"
    model.domain, model.model_version, model.doc_string = "org.example", 7, "a model"
    helper.set_model_props(model, {"sample_rate": "16000", "language": "none"})
    model.graph.name, model.graph.doc_string = "main", "a graph"
    for key in ("graph", "made_by"):
        model.graph.metadata_props.add(key=key, value="x")
    for node in model.graph.node:
        node.name, node.doc_string = f"block/{node.op_type}", "a node"
        node.metadata_props.add(key="namespace", value="encoder.layer.0")
    model.graph.input[0].doc_string = "an input"
    model.graph.input[0].type.denotation = "TENSOR"
    model.graph.output[0].type.tensor_type.shape.dim[1].denotation = "DATA_FEATURE"
    return model


def external(tensor: TensorProto) -> None:
    """Store the tensor in a file that is not there, as after ``onnx.load(..., load_external_data=False)``."""
    external_data_helper.set_external_data(tensor, "weights.bin", offset=0, length=36)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL


@case(37, loads=False)
def external_initializer() -> ModelProto:
    model = parse(f"{X_TO_Y} {{ Y = MatMul (X, w) }}")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    external(model.graph.initializer[0])
    return model


@case(37, loads=False)
def external_constant() -> ModelProto:
    model = parse(f"{X_TO_Y} {{ Y = MatMul (X, w) }}")
    constant = helper.make_node("Constant", [], ["w"])
    constant.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.eye(3, dtype=np.float32))))
    external(constant.attribute[0].t)
    model.graph.node.insert(0, constant)
    return model


def stale(model: ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("m", TensorProto.FLOAT, [9, 9, 9]))


def fresh(model: ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("m", TensorProto.FLOAT, [2, 3]))
    model.graph.value_info.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, ["N", 3]))


def unshaped(model: ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


VALUES = f"{X_TO_Y} {{ m = MatMul (X, w) e = Exp (m) Y = MatMul (e, w) }}"
SQUARE = {"w": (3, 3)}

CASES: tuple[Case, ...] = (
    graph(
        "two_blocked_consumers",
        6,
        f"{X_TO_Y} {{ r = MatMul (X, w) a = Max (r, X) b = Min (r, X) Y = Add (a, b) }}",
        weights=SQUARE,
        options=MAX_BLOCKED,
    ),
    graph(
        "blocked_twice_the_same",
        6,
        f"{X_TO_Y} {{ r = MatMul (X, w) Y = Max (r, r) }}",
        weights=SQUARE,
        options=MAX_BLOCKED,
    ),
    graph(
        "blocked_node_is_output",
        9,
        f"{X_TO_Y} {{ r = MatMul (X, w) Y = Max (r, X) }}",
        weights=SQUARE,
        options=MAX_BLOCKED,
    ),
    graph(
        "output_is_consumed",
        10,
        "(float[2,3] X) => (float[2,3] Z, float[2,3] Y) { Z = MatMul (X, w) Y = Exp (Z) }",
        weights=SQUARE,
    ),
    graph(
        "output_is_consumed_by_both_kinds",
        10,
        """(float[2,3] X) => (float[2,3] Z, float[2,3] Y, float[2,3] V) {
            Z = Softplus (X)
            Y = MatMul (Z, w)
            V = Exp (Z)
        }""",
        weights=SQUARE,
    ),
    graph(
        "initializer_is_output",
        11,
        "(float[2,3] X) => (float[2,3] Y, float[3] w) <float[3] w = {0.1, 0.2, 0.3}> { Y = Mul (X, w) }",
    ),
    graph(
        "matmul_initializer_is_output",
        11,
        "(float[2,3] X) => (float[2,3] Y, float[3,3] w) { Y = MatMul (X, w) }",
        weights=SQUARE,
    ),
    graph(
        "input_is_output",
        11,
        "(float[2,3] X) => (float[2,3] Y, float[2,3] X) { Y = MatMul (X, w) }",
        weights=SQUARE,
    ),
    graph("input_is_only_output", 11, "(float[2,3] X) => (float[2,3] X) { }"),
    initializer_is_input_ir3,
    graph(
        "initializer_is_input",
        11,
        "(float[2,3] X, float[3,3] w) => (float[2,3] Y) { Y = MatMul (X, w) }",
        weights=SQUARE,
        options={"freeze_defaults": False},
    ),
    graph(
        "every_initializer_is_input",
        11,
        "(float[2,3] X, float[3,3] w) => (float[2,3] Y) { Y = MatMul (X, w) }",
        weights=SQUARE,
    ),
    graph(
        "some_initializers_are_inputs",
        11,
        "(float[2,3] X, float[3,3] w) => (float[2,3] Y) <float[3] b = {1, 2, 3}> { h = MatMul (X, w) Y = Add (h, b) }",
        weights=SQUARE,
    ),
    graph(
        "initializer_is_input_frozen",
        11,
        "(float[2,3] X, float[3,3] w) => (float[2,3] Y) { Y = MatMul (X, w) }",
        weights=SQUARE,
        options={"freeze_defaults": True},
    ),
    graph(
        "initializer_is_input_overridden",
        11,
        "(float[2,3] X, float[3,3] w) => (float[2,3] Y, float[3,3] Z) { Y = MatMul (X, w) Z = Exp (w) }",
        weights=SQUARE,
        options={"freeze_defaults": False},
        feeds={"w": np.ones((3, 3), np.float32)},
    ),
    graph("no_node_names", 12, VALUES, weights=SQUARE),
    graph(
        "same_node_names",
        12,
        VALUES,
        weights=SQUARE,
        edit=lambda model: named(model, "n", "n", "n"),
        loads=False,
    ),
    graph(
        "names_like_ours",
        12,
        f"""{X_TO_Y} {{
            X_cast = MatMul (X, w)
            X_float16 = Exp (X_cast)
            X_cast_float16 = MatMul (X_float16, w)
            m_cast_to_fp32 = Exp (X_cast_float16)
            Y_float32 = MatMul (m_cast_to_fp32, w)
            Y = Exp (Y_float32)
        }}""",
        weights={"w": (3, 3), "w_float16": (3, 3), "w_low": (3, 3)},
        edit=lambda model: named(model, "X_cast", "Cast", "Cast_1", "X_to_float16", "Cast_X", "X_cast_0"),
    ),
    graph("value_info", 20, VALUES, weights=SQUARE, edit=fresh),
    graph("value_info_stale", 20, VALUES, weights=SQUARE, edit=stale),
    graph("output_without_shape", 20, VALUES, weights=SQUARE, edit=unshaped),
    graph(
        "unknown_rank",
        20,
        """(float[2,3] X, int64[R] S) => (float[A] Y) {
            r = Reshape (X, S)
            m = MatMul (X, w)
            f = Reshape (m, S)
            e = Exp (f)
            Y = Mul (e, r)
        }""",
        weights=SQUARE,
        feeds={"S": np.array([6])},
    ),
    external_initializer,
    external_constant,
    graph(
        "fan_out_of_input",
        39,
        """(float[2,3] X) => (float[2,3] Y) {
            a = MatMul (X, w) b = MatMul (X, w) c = MatMul (X, w)
            d = MatMul (X, w) e = MatMul (X, w) f = MatMul (X, w)
            Y = Sum (a, b, c, d, e, f)
        }""",
        weights=SQUARE,
    ),
    graph(
        "four_blocked_consumers",
        39,
        """(float[2,3] X) => (float[2,3] Y) {
            r = MatMul (X, w)
            a = Max (r, X) b = Max (r, X) c = Max (r, X) d = Max (r, X)
            Y = Sum (a, b, c, d)
        }""",
        weights=SQUARE,
        options=MAX_BLOCKED,
    ),
    graph(
        "exact_ops_between",
        39,
        """(float[2,4] X) => (float[4,2] Y) <int64[2] s = {4, 2}> {
            m = MatMul (X, w)
            r = Relu (m)
            t = Reshape (r, s)
            u = Transpose (t)
            v = Transpose (u)
            Y = MatMul (v, k)
        }""",
        weights={"w": (4, 4), "k": (2, 2)},
    ),
    graph(
        "float32_path_through_split",
        39,
        """(float[2,4] X) => (float[2,2] Y, float[2,2] Z) {
            n = LayerNormalization (X, g)
            a, b = Split <axis = 1> (n)
            Y = LayerNormalization (a, h)
            p = MatMul (a, w)
            q = MatMul (b, w)
            Z = Add (p, q)
        }""",
        weights={"w": (2, 2), "g": (4,), "h": (2,)},
        tolerance=0.1,
    ),
    metadata,
)
