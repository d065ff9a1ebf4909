"""Ops of other domains, and quantized models (rows 16 and 17)."""

import numpy as np

from .case import Case, graph

MICROSOFT = {"com.microsoft": 1}
SQUARE = {"w": (3, 3)}
SIGNATURE = "(float[2,3] X) => (float[2,3] Y)"
SCALE = {"s": np.array(0.05, np.float32), "z": np.array(3, np.int8), "w": (3, 3)}
INTEGERS = np.array([[3, -2, 7], [1, 0, -5], [9, 2, -4]], np.int8)


def contrib(name: str, nodes: str, weights: dict | None = None, **arguments) -> Case:
    return graph(
        name,
        16,
        f"{SIGNATURE} {{ {nodes} }}",
        domains=MICROSOFT,
        weights=SQUARE if weights is None else weights,
        **arguments,
    )


CASES: tuple[Case, ...] = (
    contrib("contrib_gelu", "m = MatMul (X, w) g = com.microsoft.Gelu (m) Y = Exp (g)"),
    contrib("contrib_fast_gelu", "m = MatMul (X, w) Y = com.microsoft.FastGelu (m, b)", {**SQUARE, "b": (3,)}),
    contrib("contrib_quick_gelu", "m = MatMul (X, w) Y = com.microsoft.QuickGelu <alpha = 1.702> (m)"),
    contrib("contrib_bias_gelu", "m = MatMul (X, w) Y = com.microsoft.BiasGelu (m, b)", {**SQUARE, "b": (3,)}),
    contrib("contrib_fused_matmul", "m = com.microsoft.FusedMatMul <alpha = 0.5> (X, w) Y = Exp (m)"),
    graph(
        "contrib_skip_layer_norm",
        16,
        """(float[1,2,4] X) => (float[1,2,4] Y, float[1,2,4] Z) {
            m = MatMul (X, w)
            y, "", "", s = com.microsoft.SkipLayerNormalization <epsilon = 0.00001> (m, X, g, b)
            Y = MatMul (y, w)
            Z = Exp (s)
        }""",
        domains=MICROSOFT,
        weights={"w": (4, 4), "g": (4,), "b": (4,)},
    ),
    graph(
        "contrib_skip_rms_norm",
        16,
        """(float[1,2,4] X) => (float[1,2,4] Y) {
            m = MatMul (X, w)
            y = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.00001> (m, X, g)
            Y = MatMul (y, w)
        }""",
        domains=MICROSOFT,
        weights={"w": (4, 4), "g": (4,)},
    ),
    graph(
        "contrib_without_import",
        16,
        f"{SIGNATURE} {{ m = MatMul (X, w) g = com.microsoft.Gelu (m) Y = Exp (g) }}",
        domains=MICROSOFT,
        weights=SQUARE,
        edit=lambda model: model.opset_import.pop(),
    ),
    graph(
        "contrib_group_norm",
        16,
        """(float[1,4,4,4] X) => (float[1,4,4,4] Y) {
            m = Conv (X, k)
            t = Transpose <perm = [0, 2, 3, 1]> (m)
            n = com.microsoft.GroupNorm <groups = 2, activation = 0> (t, g, b)
            Y = Transpose <perm = [0, 3, 1, 2]> (n)
        }""",
        domains=MICROSOFT,
        weights={"k": (4, 4, 1, 1), "g": (4,), "b": (4,)},
        loads=False,
    ),
    graph(
        "contrib_float_only",
        16,
        """(float[2,3] X) => (uint32[2,3] H, float[2,3] Y) {
            m = MatMul (X, w)
            H = com.microsoft.MurmurHash3 (m)
            Y = Relu (m)
        }""",
        domains=MICROSOFT,
        weights=SQUARE,
        loose_integers=True,
    ),
    graph(
        "custom_unknown",
        16,
        f"{SIGNATURE} {{ m = MatMul (X, w) c = acme.Custom (m) r = Relu (c) Y = MatMul (r, w) }}",
        domains={"acme": 1},
        weights=SQUARE,
        loads=False,
    ),
    graph(
        "custom_unknown_with_body",
        16,
        """(float[2,3] X) => (float[2,3] Y) {
            m = MatMul (X, w)
            c = acme.Repeat <body = b (float[2,3] v) => (float[2,3] u) { u = MatMul (v, w) }> (m)
            Y = MatMul (c, w)
        }""",
        domains={"acme": 1},
        weights=SQUARE,
        loads=False,
    ),
    *(
        graph(
            f"quantize_dequantize_opset{opset}",
            17,
            """(float[2,3] X) => (float[2,3] Y) {
                q = QuantizeLinear (X, s, z)
                d = DequantizeLinear (q, s, z)
                Y = MatMul (d, w)
            }""",
            opset=opset,
            weights=SCALE,
        )
        for opset in (13, 19, 22)
    ),
    graph(
        "dequantized_weights",
        17,
        f"{SIGNATURE} {{ d = DequantizeLinear (i, s, z) Y = MatMul (X, d) }}",
        weights={"s": np.array(0.05, np.float32), "z": np.array(0, np.int8), "i": INTEGERS},
    ),
    graph(
        "qdq_unit",
        17,
        f"""{SIGNATURE} {{
            a = QuantizeLinear (X, s, z)
            b = DequantizeLinear (a, s, z)
            d = DequantizeLinear (i, s, z)
            m = MatMul (b, d)
            q = QuantizeLinear (m, s, z)
            e = DequantizeLinear (q, s, z)
            t = Transpose (e)
            u = Transpose (t)
            Y = MatMul (u, w)
        }}""",
        weights={**SCALE, "i": INTEGERS},
        # A value on the edge of two steps may round to either one.
        tolerance=0.1,
    ),
    graph(
        "dynamic_quantization",
        17,
        f"""{SIGNATURE} {{
            m = MatMul (X, w)
            q, a, o = DynamicQuantizeLinear (m)
            p = MatMulInteger (q, i, o)
            f = Cast <to = 1> (p)
            c = Mul (a, t)
            Y = Mul (f, c)
        }}""",
        weights={**SQUARE, "i": INTEGERS, "t": np.array(0.05, np.float32)},
    ),
    graph(
        "q_linear_matmul",
        17,
        f"""{SIGNATURE} {{
            m = MatMul (X, w)
            q = QuantizeLinear (m, s, z)
            p = QLinearMatMul (q, s, z, i, s, z, s, z)
            Y = DequantizeLinear (p, s, z)
        }}""",
        weights={**SCALE, "i": INTEGERS},
        tolerance=0.1,
    ),
    graph(
        "q_of_exact_ops",
        17,
        """(float[2,3] X) => (uint8[3,2] Y) {
            m = MatMul (X, w)
            t = Transpose (m)
            Y = QuantizeLinear (t, s, z)
        }""",
        weights={**SQUARE, "s": np.array(0.05, np.float32), "z": np.array(128, np.uint8)},
        loose_integers=True,
    ),
)
