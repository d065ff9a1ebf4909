"""Small networks in which several ops meet (rows 40 and 44)."""

from .case import Case, graph

X_TO_Y = "(float[2,4] X) => (float[2,4] Y)"
WIDE = {"w": (4, 4), "g": (4,), "b": (4,)}
RESIDUAL = f"""{X_TO_Y} {{
    i = Constant <value = int64[4] {{1, 2, 3, 4}}> ()
    k = Cast <to = 1> (i)
    c = Constant <value_float = 0.1> ()
    a = Mul (X, k)
    d = MatMul (a, w)
    e = Add (d, X)
    f = Relu (e)
    h = Mul (f, c)
    j = MatMul (h, w)
    l = Add (j, e)
    Y = Tanh (l)
}}"""
MEAN = "ReduceMean <axes = [-1]>"

CASES: tuple[Case, ...] = (
    graph(
        "gelu_erf",
        40,
        f"""{X_TO_Y} <float r = {{1.4142135}}, float one = {{1.0}}, float half = {{0.5}}> {{
            m = MatMul (X, w) d = Div (m, r) e = Erf (d) a = Add (e, one) p = Mul (m, a) q = Mul (p, half)
            Y = MatMul (q, w)
        }}""",
        weights=WIDE,
    ),
    graph(
        "gelu_tanh",
        40,
        f"""{X_TO_Y} <float t = {{3.0}}, float c = {{0.044715}}, float r = {{0.7978846}}, float one = {{1.0}},
            float half = {{0.5}}> {{
            m = MatMul (X, w) p = Pow (m, t) q = Mul (p, c) a = Add (m, q) s = Mul (a, r) h = Tanh (s)
            o = Add (h, one) u = Mul (m, o) v = Mul (u, half) Y = MatMul (v, w)
        }}""",
        weights=WIDE,
    ),
    graph(
        "layer_norm_to_fuse",
        40,
        f"""{X_TO_Y} <float two = {{2.0}}, float e = {{1e-5}}> {{
            h = MatMul (X, w) u = {MEAN} (h) d = Sub (h, u) p = Pow (d, two) v = {MEAN} (p) a = Add (v, e)
            r = Sqrt (a) n = Div (d, r) s = Mul (n, g) t = Add (s, b) Y = MatMul (t, w)
        }}""",
        weights=WIDE,
    ),
    graph(
        "skip_layer_norm_to_fuse",
        40,
        f"{X_TO_Y} {{ h = MatMul (X, w) s = Add (h, X) n = LayerNormalization (s, g, b) Y = MatMul (n, w) }}",
        weights=WIDE,
    ),
    graph(
        "attention_to_fuse",
        40,
        """(float[1,3,4] X) => (float[1,3,4] Y) <float scale = {0.5}> {
            q = MatMul (X, wq) k = MatMul (X, wk) v = MatMul (X, wv) t = Transpose <perm = [0, 2, 1]> (k)
            s = MatMul (q, t) d = Mul (s, scale) p = Softmax (d) o = MatMul (p, v) Y = MatMul (o, w)
        }""",
        weights=dict.fromkeys(("wq", "wk", "wv", "w"), (4, 4)),
    ),
    *(
        graph(
            f"residual_{'_'.join(ops).lower()}",
            44,
            RESIDUAL,
            weights={"w": (4, 4)},
            options={"black_list": ops},
        )
        for ops in (
            ("Add",),
            ("Add", "Mul"),
            ("Relu", "Tanh"),
            ("MatMul", "Add"),
            ("Cast", "Constant", "Mul"),
        )
    ),
)
