"""Casts that are in the model already (rows 1, 22, 23, 45)."""

import numpy as np
from onnx import ModelProto, numpy_helper

from .case import Case, around, at_opsets, case, graph, integers, normal, parse, positive

MAX_BLOCKED = {"black_list": ("Max",)}


@case(22)
def float16_initializer() -> ModelProto:
    """Half of the model was lowered by hand; with bfloat16 as the target, three float types meet."""
    model = parse("""(float[2,3] X) => (float[2,3] Y) {
        h = Cast <to = 10> (X)
        m = Mul (h, w)
        f = Cast <to = 1> (m)
        e = Exp (f)
        Y = MatMul (e, v)
    }""")
    half = np.array([1.5, -0.25, 3.0], np.float16)
    model.graph.initializer.append(numpy_helper.from_array(half, "w"))
    model.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=np.float32), "v"))
    return model


CASES: tuple[Case, ...] = (
    graph(
        "cast_to_the_same_twice",
        45,
        """(float[2,3] X) => (float[2,3] Y) <float[3,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
            h = MatMul (X, w)
            s = Relu (h)
            c = Cast <to = 1> (s)
            d = Cast <to = 1> (c)
            Y = MatMul (d, w)
        }""",
    ),
    *at_opsets(
        17,
        22,
        name="cast_int",
        row=1,
        text="(int64[3] I, float[2,3] X) => (float[2,3] Y) { c = Cast <to = 1> (I) Y = Mul (c, X) }",
    ),
    graph(
        "cast_int_consumer_blocked",
        1,
        "(int64[3] I, float[2,3] X) => (float[2,3] Y) { c = Cast <to = 1> (I) Y = Max (c, X) }",
        options=MAX_BLOCKED,
    ),
    graph(
        "cast_int_both_kinds",
        1,
        """(int64[3] I, float[2,3] X) => (float[2,3] Y) {
            c = Cast <to = 1> (I)
            a = Max (c, X)
            b = Mul (c, X)
            Y = Add (a, b)
        }""",
        options=MAX_BLOCKED,
    ),
    graph(
        "cast_int_to_matmul_and_blocked",
        1,
        """(int64[4,3] I, float[2,4] X) => (float[2,3] Y, float[4,3] Z) {
            c = Cast <to = 1> (I)
            Y = MatMul (X, c)
            Z = Exp (c)
        }""",
    ),
    graph(
        "cast_int_is_output",
        1,
        "(int64[3] I, float[2,3] X) => (float[2,3] Y, float[3] c) { c = Cast <to = 1> (I) Y = Mul (c, X) }",
    ),
    graph(
        "cast_int_beyond_2048",
        1,
        "(int64[3] I, float[3] X) => (float[3] Y) { c = Cast <to = 1> (I) Y = Sub (c, X) }",
        feeds={"I": integers(2049, 60000), "X": integers(2049, 60000, np.float32)},
    ),
    *at_opsets(
        17,
        22,
        name="cast_double_chain",
        row=1,
        text="""(float[2,3] X) => (float[2,3] Y) {
            d = Cast <to = 11> (X)
            s = Sqrt (d)
            f = Cast <to = 1> (s)
            Y = Add (f, X)
        }""",
        feeds={"X": positive()},
    ),
    graph(
        "cast_double_to_matmul",
        1,
        """(double[2,3] X) => (float[2,2] Y) {
            d = Sqrt (X)
            f = Cast <to = 1> (d)
            Y = MatMul (f, w)
        }""",
        weights={"w": (3, 2)},
        feeds={"X": lambda rng, shape: rng.uniform(0.5, 2, shape)},
    ),
    graph(
        "cast_bool",
        1,
        """(bool[2,3] M, float[3,2] X) => (float[2,2] Y) { c = Cast <to = 1> (M) Y = MatMul (c, X) }""",
    ),
    graph(
        "cast_to_double_beside_low_readers",
        23,
        """(float[2,2] X) => (double[2,2] D, float[2,2] A, float[2,2] B) <float[2,2] w = {1, 2, 3, 4}> {
            r = Relu (X)
            t = Transpose (r)
            Z = Cast <to = 11> (t)
            D = Sqrt (Z)
            a = MatMul (r, w)
            b = MatMul (t, w)
            A = Relu (a)
            B = Relu (b)
        }""",
    ),
    graph(
        "cast_to_double_output",
        1,
        "(float[2,3] X) => (double[2,3] Y) { r = Mul (X, X) Y = Cast <to = 11> (r) }",
    ),
    graph(
        "cast_like",
        1,
        "(int64[2,3] I, float[2,3] X) => (float[2,3] Y) { c = CastLike (I, X) Y = Mul (c, X) }",
    ),
    float16_initializer,
    graph(
        "cast_pair_around_data_movement",
        22,
        """(float16[2,4] X) => (float16[4,2] Y) {
            a = Neg (X)
            f = Cast <to = 1> (a)
            t = Transpose (f)
            h = Cast <to = 10> (t)
            Y = Relu (h)
        }""",
    ),
    graph(
        "cast_pair_of_double",
        22,
        """(float[2,3] X) => (float[3,2] Y) {
            s = Softmax (X)
            d = Cast <to = 11> (s)
            t = Transpose (d)
            f = Cast <to = 1> (t)
            Y = Relu (f)
        }""",
    ),
    graph(
        "float16_island",
        22,
        """(float[2,3] X) => (float[2,3] Y) {
            h = Cast <to = 10> (X)
            r = Relu (h)
            f = Cast <to = 1> (r)
            Y = Exp (f)
        }""",
    ),
    graph(
        "float16_input_and_output",
        22,
        """(float16[2,3] X, float[2,3] W) => (float16[2,3] Y) {
            f = Cast <to = 1> (X)
            m = Mul (f, W)
            Y = Cast <to = 10> (m)
        }""",
    ),
    graph(
        "lossy_pair_of_the_user",
        22,
        """(float[2,3] X) => (float[2,3] Y) {
            h = Cast <to = 10> (X)
            f = Cast <to = 1> (h)
            Y = Exp (f)
        }""",
        feeds={"X": normal()},
    ),
    graph(
        "cast_fan_out",
        23,
        """(float[2,3] X) => (float[2,3] A, float[2,3] B, float[2,3] Z) {
            h = Cast <to = 10> (X)
            f = Cast <to = 1> (h)
            g = Cast <to = 1> (h)
            A = Exp (f)
            B = Mul (g, g)
            c = Relu (h)
            Z = Cast <to = 1> (c)
        }""",
    ),
    graph(
        "cast_output_is_consumed",
        23,
        """(float[2,3] X) => (float[2,3] F, float[2,3] Y) {
            h = Cast <to = 10> (X)
            F = Cast <to = 1> (h)
            Y = Mul (F, X)
        }""",
    ),
    graph(
        "cast_without_consumer",
        23,
        """(float[2,3] X) => (float[2,3] Y) {
            r = Mul (X, X)
            dead = Cast <to = 10> (r)
            Y = Tanh (r)
        }""",
    ),
    graph(
        "integers_to_blocked",
        45,
        """(int64[3] I, int64[3] J, float[3] X) => (int64[3] M, float[3] Y) {
            M = Max (I, J)
            Y = Mul (X, X)
        }""",
        options=MAX_BLOCKED,
    ),
    graph(
        "pow_integer_exponent",
        45,
        "(float[2,3] X, int64[3] E) => (float[2,3] Y) { r = Relu (X) Y = Pow (r, E) }",
        feeds={"X": positive()},
    ),
    graph(
        "pow_blocked",
        45,
        "(float[2,3] X, int64[3] E) => (float[2,2] Y) { m = Pow (X, E) Y = MatMul (m, w) }",
        weights={"w": (3, 2)},
        feeds={"X": positive()},
        options={"black_list": ("Pow",)},
    ),
    graph(
        "double_blocked",
        45,
        "(double[3] D, float[3] X) => (double[3] S, float[3] Y) { S = Sqrt (D) Y = Mul (X, X) }",
        feeds={"D": lambda rng, shape: rng.uniform(0.5, 2, shape), "X": around(3)},
        options={"black_list": ("Sqrt",)},
    ),
)
