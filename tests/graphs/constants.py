"""Constants and nodes that fix their own type (rows 2, 3, 5, 21, 46)."""

import numpy as np
from onnx import ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper

from .case import Case, at_opsets, case, graph, integers, parse

MAX_BLOCKED = {"black_list": ("Max",)}
RANDOM = {"tolerance": np.inf}


def sparse_tensor(name: str) -> SparseTensorProto:
    """[0, 3, 0, -2] stored by its two non-zero elements."""
    values = helper.make_tensor(name, TensorProto.FLOAT, [2], [3.0, -2.0])
    indices = helper.make_tensor(f"{name}_indices", TensorProto.INT64, [2], [1, 3])
    return helper.make_sparse_tensor(values, indices, [4])


@case(3)
def constant_sparse_value() -> ModelProto:
    model = parse("(float[2,4] X) => (float[2,4] Y) { Y = Mul (X, k) }")
    constant = helper.make_node("Constant", [], ["k"], sparse_value=sparse_tensor("k"))
    model.graph.node.insert(0, constant)
    return model


@case(21)
def sparse_initializer() -> ModelProto:
    model = parse("(float[2,4] X) => (float[2,4] Y) { Y = Mul (X, k) }")
    model.graph.sparse_initializer.append(sparse_tensor("k"))
    return model


@case(21)
def float_data_and_raw_data() -> ModelProto:
    model = parse("(float[2,4] X) => (float[2,4] Y) { m = Mul (X, a) n = Mul (m, b) Y = MatMul (n, c) }")
    model.graph.initializer.append(helper.make_tensor("a", TensorProto.FLOAT, [4], [1, 2, 3, 0.1]))
    raw = np.array([0.3, 1, -1, 7], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(raw, "b"))
    model.graph.initializer.append(helper.make_tensor("c", TensorProto.FLOAT, [4, 4], np.eye(4).ravel()))
    return model


def dtype_graph(name: str, node: str, *, row: int = 2, shape: str = "2,3", **arguments) -> tuple[Case, ...]:
    """A node that chooses its own output type meets a value of the model's, directly and in a MatMul."""
    plain = f"(float[{shape}] X) => (float[{shape}] Y) {{ {node} Y = Mul (r, X) }}"
    product = f"(float[{shape}] X) => (float[{shape}] Y) {{ {node} m = MatMul (X, w) Y = Add (r, m) }}"
    width = int(shape.rsplit(",", maxsplit=1)[-1])
    return (
        graph(name, row, plain, **arguments),
        graph(f"{name}_after_matmul", row, product, weights={"w": (width, width)}, **arguments),
    )


CASES: tuple[Case, ...] = (
    *dtype_graph("random_normal_like", "r = RandomNormalLike <dtype = 1, seed = 1.0> (X)", **RANDOM),
    *dtype_graph("random_normal_like_untyped", "r = RandomNormalLike <seed = 1.0> (X)", **RANDOM),
    *dtype_graph("random_uniform_like", "r = RandomUniformLike <dtype = 1> (X)", **RANDOM),
    *dtype_graph("random_normal", "r = RandomNormal <dtype = 1, shape = [2, 3]> ()", **RANDOM),
    *dtype_graph("random_uniform", "r = RandomUniform <shape = [2, 3]> ()", **RANDOM),
    *dtype_graph("bernoulli", "p = Sigmoid (X) r = Bernoulli <dtype = 1> (p)", **RANDOM),
    *dtype_graph("bernoulli_untyped", "p = Sigmoid (X) r = Bernoulli (p)", **RANDOM),
    *dtype_graph("eye_like_untyped", "r = EyeLike (X)", shape="3,3"),
    *dtype_graph("constant_of_shape_default", "s = Shape (X) r = ConstantOfShape (s)"),
    *dtype_graph("constant_of_shape", "s = Shape (X) r = ConstantOfShape <value = float[1] {2.5}> (s)"),
    *(
        one
        for op in ("HannWindow", "HammingWindow", "BlackmanWindow")
        for one in dtype_graph(op, f"n = Constant <value = int64 {{3}}> () r = {op} <output_datatype = 1> (n)")
    ),
    graph(
        "eye_like_from_integers",
        2,
        """(int64[3,3] I, float[3,3] X) => (float[3,3] Y) {
            e = EyeLike <dtype = 1> (I)
            Y = MatMul (e, X)
        }""",
    ),
    graph(
        "multinomial",
        2,
        """(float[2,3] X) => (int32[2,4] Y) {
            l = MatMul (X, w)
            Y = Multinomial <sample_size = 4, seed = 1.0, dtype = 6> (l)
        }""",
        weights={"w": (3, 3)},
        loose_integers=True,
    ),
    *at_opsets(
        17,
        22,
        name="constant_value_float",
        row=3,
        text="(float[2,3] X) => (float[2,3] Y) { k = Constant <value_float = 0.5> () Y = Mul (X, k) }",
    ),
    graph(
        "constant_value_floats",
        3,
        """(float[2,3] X) => (float[2,3] Y) {
            k = Constant <value_floats = [0.5, 0.1, 3.0]> ()
            m = Mul (X, k)
            Y = MatMul (m, w)
        }""",
        weights={"w": (3, 3)},
    ),
    graph(
        "constant_tensor",
        3,
        """(float[2,3] X) => (float[2,3] Y) {
            k = Constant <value = float[3] {0.5, 0.1, 3.0}> ()
            Y = Mul (X, k)
        }""",
    ),
    graph(
        "constant_integers",
        3,
        """(float[2,3] X) => (float[2,3] Y) {
            k = Constant <value_ints = [1, 2, 3]> ()
            c = Cast <to = 1> (k)
            Y = Mul (X, c)
        }""",
    ),
    graph(
        "constant_is_output",
        3,
        """(float[2,3] X) => (float[2,3] Y, float k) {
            k = Constant <value_float = 0.1> ()
            Y = Mul (X, k)
        }""",
    ),
    constant_sparse_value,
    sparse_initializer,
    float_data_and_raw_data,
    graph(
        "shared_initializer",
        5,
        "(float[2,3] X) => (float[2,3] Y) <float[3] w = {0.1, 0.2, 0.3}> { t = Mul (X, w) Y = Max (t, w) }",
        options=MAX_BLOCKED,
    ),
    graph(
        "shared_initializer_of_matmul",
        5,
        """(float[2,3] X) => (float[2,3] Y, float[3,3] Z) {
            Y = MatMul (X, w)
            Z = Exp (w)
        }""",
        weights={"w": (3, 3)},
    ),
    graph(
        "shared_constant",
        5,
        """(float[2,3] X) => (float[2,3] Y) {
            k = Constant <value = float[3,3] {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}> ()
            t = MatMul (X, k)
            s = Exp (k)
            Y = MatMul (t, s)
        }""",
    ),
    graph(
        "unused_initializer",
        46,
        "(float[2,3] X) => (float[2,3] Y) { Y = MatMul (X, w) }",
        weights={"w": (3, 3), "unused": (5,)},
    ),
    graph(
        "gathered_table",
        46,
        "(int64[4] I) => (float[4,2] Y) { g = Gather (table, I) Y = MatMul (g, w) }",
        weights={"table": (8, 3), "w": (3, 2)},
        feeds={"I": integers(0, 8)},
    ),
)
