"""Graphs that a naive conversion computes wrongly (rows 24, 26 to 31)."""

import numpy as np

from .case import Case, around, fixed, graph, normal, positive

ROWS = "(float[2,8] X) => (float[2,8] Y)"
EPS = "float e = {1e-5}, float two = {2.0}"
WIDE = {"w": (8, 8)}
MEAN = "ReduceMean <axes = [-1]>"


def norm(name: str, nodes: str, *, magnitude: float = 500, initializers: str = EPS, **arguments) -> Case:
    text = f"{ROWS} <{initializers}> {{ {nodes} }}"
    return graph(name, 24, text, feeds={"X": around(magnitude)}, **arguments)


CASES: tuple[Case, ...] = (
    norm("rms_norm_pow", f"p = Pow (X, two) m = {MEAN} (p) a = Add (m, e) r = Sqrt (a) Y = Div (X, r)"),
    norm("rms_norm_square", f"p = Mul (X, X) m = {MEAN} (p) a = Add (m, e) r = Sqrt (a) Y = Div (X, r)"),
    norm(
        "rms_norm_in_network",
        f"""h = MatMul (X, w) p = Pow (h, two) m = {MEAN} (p) a = Add (m, e) r = Sqrt (a) q = Reciprocal (r)
        n = Mul (h, q) g = Mul (n, gain) Y = MatMul (g, w)""",
        weights={**WIDE, "gain": (8,)},
    ),
    norm(
        "rms_norm_sum",
        "p = Mul (X, X) m = ReduceSum (p, axes) d = Div (m, n) a = Add (d, e) r = Sqrt (a) Y = Div (X, r)",
        initializers=f"{EPS}, int64[1] axes = {{-1}}, float n = {{8.0}}",
    ),
    norm(
        "rms_norm_opset22",
        """h = MatMul (X, w) p = Pow (h, two) m = ReduceMean (p, axes) a = Add (m, e) r = Sqrt (a)
        Y = Div (h, r)""",
        initializers=f"{EPS}, int64[1] axes = {{-1}}",
        weights=WIDE,
        opset=22,
    ),
    norm(
        "layer_norm_decomposed",
        f"""u = {MEAN} (X) c = Sub (X, u) p = Pow (c, two) v = {MEAN} (p) a = Add (v, e)
        r = Sqrt (a) Y = Div (c, r)""",
        magnitude=400,
    ),
    norm(
        "layer_norm_decomposed_in_network",
        f"""h = MatMul (X, w) u = {MEAN} (h) c = Sub (h, u) p = Pow (c, two) v = {MEAN} (p) a = Add (v, e)
        r = Sqrt (a) n = Div (c, r) g = Mul (n, gain) b = Add (g, bias) Y = MatMul (b, w)""",
        magnitude=400,
        weights={**WIDE, "gain": (8,), "bias": (8,)},
    ),
    norm("l2_norm", "p = ReduceL2 <axes = [-1]> (X) a = Max (p, e) Y = Div (X, a)", magnitude=50),
    graph(
        "epsilon_clip",
        26,
        f"{ROWS} <float e = {{1e-12}}> {{ n = ReduceL2 <axes = [1]> (X) c = Clip (n, e) Y = Div (X, c) }}",
        feeds={"X": fixed(*[0] * 8, *range(1, 9))},
    ),
    graph(
        "epsilon_log",
        26,
        f"{ROWS} <float e = {{1e-8}}> {{ m = MatMul (X, w) r = Relu (m) a = Add (r, e) Y = Log (a) }}",
        weights=WIDE,
    ),
    graph(
        "epsilon_log_direct",
        26,
        f"{ROWS} <float e = {{1e-8}}> {{ a = Add (X, e) Y = Log (a) }}",
        feeds={"X": fixed(*[0] * 8, *range(1, 9))},
    ),
    graph(
        "epsilon_max",
        26,
        f"{ROWS} <float e = {{1e-10}}> {{ s = ReduceSum (X, axes) m = Max (s, e) Y = Div (X, m) }}",
        weights={"axes": np.array([1])},
        feeds={"X": fixed(*[0] * 8, *range(1, 9))},
    ),
    graph(
        "tiny_divisor",
        26,
        f"{ROWS} <float e = {{1e-9}}> {{ d = Div (X, e) Y = Mul (d, e) }}",
    ),
    graph(
        "tiny_weights",
        26,
        f"{ROWS} {{ Y = MatMul (X, w) }}",
        weights={"w": np.random.default_rng(0).permutation(np.geomspace(1e-9, 1, 64, dtype=np.float32)).reshape(8, 8)},
    ),
    graph(
        "large_constant_that_fits",
        27,
        f"{ROWS} <float k = {{30000.0}}> {{ Y = Mul (X, k) }}",
        feeds={"X": around(1)},
    ),
    graph(
        "large_constant",
        27,
        f"""{ROWS} <float k = {{1e6}}, float l = {{1e-6}}> {{
            a = MatMul (X, w)
            b = Mul (a, k)
            Y = Mul (b, l)
        }}""",
        weights=WIDE,
    ),
    graph(
        "large_weights",
        27,
        f"{ROWS} <float k = {{1e-6}}> {{ a = MatMul (X, w) Y = Mul (a, k) }}",
        weights={"w": np.diag(np.full(8, 3e5, np.float32))},
    ),
    graph(
        "index_as_float",
        28,
        """(int64[2] I) => (float[2] Y) <float one = {1.0}> {
            f = Cast <to = 1> (I) g = Mul (f, one) j = Cast <to = 7> (g) Y = Gather (t, j)
        }""",
        weights={"t": np.linspace(0, 1, 5000, dtype=np.float32)},
        feeds={"I": np.array([2049, 4999])},
    ),
    graph(
        "index_from_range",
        28,
        """(float N) => (int64[M] I) <float z = {0.0}, float d = {1.0}> {
            r = Range (z, N, d) I = Cast <to = 7> (r)
        }""",
        # The end of the range is exact in both low types, its elements are not.
        feeds={"N": np.array(4096, np.float32)},
    ),
    graph(
        "index_from_cumsum",
        28,
        """(float[N] X) => (int64[N] I) <int64 a = {0}> { c = CumSum (X, a) I = Cast <to = 7> (c) }""",
        feeds={"X": np.ones(3000, np.float32)},
    ),
    graph(
        "shape_as_float",
        28,
        """(float[2,2600] X) => (float[A,B] Y) <float h = {0.5}, int64[1] m = {-1}, int64[1] o = {1}> {
            r = Relu (X) s = Shape (r) f = Cast <to = 1> (s) g = Mul (f, h) i = Cast <to = 7> (g)
            k = Slice (i, o, two) n = Concat <axis = 0> (m, k) Y = Reshape (r, n)
        }""",
        weights={"two": np.array([2])},
    ),
    graph(
        "position_to_sin",
        28,
        """(int64[4] I) => (float[4,2] Y) <int64[1] a = {1}> {
            f = Cast <to = 1> (I) u = Unsqueeze (f, a) m = MatMul (u, w) Y = Sin (m)
        }""",
        weights={"w": np.array([[1.0, 0.01]], np.float32)},
        feeds={"I": np.array([1, 2049, 3001, 4999])},
    ),
    graph(
        "position_floor",
        28,
        """(int64[4] I) => (float[4] Y) <float n = {32.0}> {
            f = Cast <to = 1> (I) d = Div (f, n) g = Floor (d) h = Mul (g, n) Y = Sub (f, h)
        }""",
        feeds={"I": np.array([1, 2049, 3001, 4999])},
    ),
    graph(
        "timestep_embedding",
        29,
        """(int64[2] T) => (float[2,4] Y) <float[1,2] f = {1.0, 0.01}, int64[1] a = {1}> {
            t = Cast <to = 1> (T) u = Unsqueeze (t, a) p = Mul (u, f)
            s = Sin (p) c = Cos (p) Y = Concat <axis = 1> (s, c)
        }""",
        feeds={"T": np.array([37, 999])},
    ),
    graph(
        "timestep_embedding_of_floats",
        29,
        """(float[2,1] T) => (float[2,2] Y) <float[1,2] f = {1.0, 0.01}> { p = Mul (T, f) Y = Sin (p) }""",
        feeds={"T": fixed(37, 999)},
        # Nothing static tells that the input is large; only measured ranges can keep this float32.
        tolerance=np.inf,
    ),
    graph(
        "box_coordinates",
        29,
        """(float[1,4,4] B, float[1,1,4] S) => (float[1,4,4] P, int64[K,3] I)
        <float stride = {8.0}, float[1,4,1] o = {4000.0, 4010.0, 4100.0, 4200.0}, float t = {0.5},
            int64 n = {3}> {
            a = Mul (B, stride) P = Add (a, o) I = NonMaxSuppression (P, S, n, t)
        }""",
        feeds={"B": positive(1, 2), "S": positive(0.1, 1)},
        loose_integers=True,
    ),
    graph(
        "softmax_by_hand",
        30,
        f"{ROWS} {{ e = Exp (X) s = ReduceSum <keepdims = 1> (e, axes) Y = Div (e, s) }}",
        weights={"axes": np.array([1])},
        feeds={"X": positive(11, 13)},
    ),
    graph(
        "softmax_by_hand_in_network",
        30,
        f"""{ROWS} {{
            h = MatMul (X, w)
            e = Exp (h)
            s = ReduceSum (e, axes)
            d = Div (e, s)
            Y = MatMul (d, w)
        }}""",
        weights={"axes": np.array([1]), "w": np.eye(8, dtype=np.float32)},
        feeds={"X": positive(11, 13)},
    ),
    graph(
        "long_sum",
        30,
        "(float[70000] X) => (float[1] Y) { m = Mul (X, X) Y = ReduceSum (m, axes) }",
        weights={"axes": np.array([0])},
        feeds={"X": positive(0.2, 0.5)},
        # As a model output of type float16 the sum is kept, at its edge.
        tolerance=0.05,
    ),
    graph(
        "log_sum_exp",
        30,
        """(float[2,8] X) => (float[2,1] Y) { e = Exp (X) s = ReduceSum (e, axes) Y = Log (s) }""",
        weights={"axes": np.array([1])},
        feeds={"X": positive(11, 13)},
    ),
    graph(
        "reduce_log_sum_exp",
        30,
        "(float[2,8] X) => (float[2,1] Y) { m = MatMul (X, w) Y = ReduceLogSumExp <axes = [1]> (m) }",
        weights={"w": np.eye(8, dtype=np.float32)},
        feeds={"X": positive(11, 13)},
    ),
    graph(
        "batch_norm_tiny_variance",
        31,
        """(float[1,3,4,4] X) => (float[1,3,4,4] Y) {
            c = Conv (X, k) Y = BatchNormalization <epsilon = 0.00001> (c, s, b, m, v)
        }""",
        weights={"k": (3, 3, 1, 1), "s": (3,), "b": (3,), "m": (3,), "v": np.full(3, 1e-9, np.float32)},
        feeds={"X": normal(0.1)},
    ),
    graph(
        "batch_norm_tiny_variance_alone",
        31,
        """(float[1,3,4,4] X) => (float[1,3,4,4] Y) {
            r = Relu (X) Y = BatchNormalization <epsilon = 0.00001> (r, s, b, m, v)
        }""",
        weights={"s": (3,), "b": (3,), "m": (3,), "v": np.full(3, 1e-9, np.float32)},
    ),
)
