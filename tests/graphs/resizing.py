"""Inputs that stay in float32 by schema, absent inputs, and old opsets (rows 4, 13, 18, 19)."""

import numpy as np

from .case import Case, at_opsets, graph

IMAGE = "(float[1,2,4,4] X) => (float[1,2,8,8] Y)"
CONV = {"k": (2, 2, 1, 1)}
SCALES = "float[4] scales = {1.0, 1.0, 2.0, 2.0}"


def resize(name: str, opset: int, inputs: str, initializers: str = SCALES, mode: str = "") -> Case:
    """Upsampling by two, behind a Conv, so that every level has low data at hand."""
    text = f'{IMAGE} <{initializers}> {{ r = Conv (X, k) Y = Resize <mode = "linear"{mode}> ({inputs}) }}'
    return graph(name, 4, text, opset=opset, weights=CONV)


RECURRENT = {
    "LSTM": {"w": (1, 16, 3), "r": (1, 16, 4)},
    "GRU": {"w": (1, 12, 3), "r": (1, 12, 4)},
    "RNN": {"w": (1, 4, 3), "r": (1, 4, 4)},
}

CASES: tuple[Case, ...] = (
    *(resize(f"resize_opset{n}", n, "r, roi, scales", f"float[0] roi = {{}}, {SCALES}") for n in (11, 13, 18)),
    resize("resize_22", 22, 'r, "", scales'),
    resize("resize_opset10", 10, "r, scales"),
    resize("resize_without_roi", 13, 'r, "", scales'),
    resize(
        "resize_sizes",
        11,
        "r, roi, empty, sizes",
        "float[0] roi = {}, float[0] empty = {}, int64[4] sizes = {1, 2, 8, 8}",
    ),
    resize("resize_sizes_only", 13, 'r, "", "", sizes', "int64[4] sizes = {1, 2, 8, 8}"),
    resize(
        "resize_crop",
        13,
        'r, roi, "", sizes',
        "float[8] roi = {0.0, 0.0, 0.1, 0.1, 1.0, 1.0, 0.9, 0.9}, int64[4] sizes = {1, 2, 8, 8}",
        mode=', coordinate_transformation_mode = "tf_crop_and_resize"',
    ),
    graph(
        "resize_computed_scales",
        4,
        """(float[1,2,4,4] X, int64[4] S) => (float[N,C,H,W] Y) {
            r = Conv (X, k)
            sf = Cast <to = 1> (S)
            Y = Resize <mode = "linear"> (r, "", sf)
        }""",
        weights=CONV,
        feeds={"S": np.array([1, 1, 2, 2])},
    ),
    graph(
        "resize_scales_from_floats",
        4,
        """(float[1,2,4,4] X, float[4] S) => (float[N,C,H,W] Y) {
            r = Conv (X, k)
            sf = Mul (S, S)
            t = Resize <mode = "linear"> (r, "", sf)
            Y = Relu (t)
        }""",
        weights=CONV,
        feeds={"S": np.array([1, 1, 1.5, 1.5], np.float32)},
    ),
    graph(
        "upsample_opset9",
        19,
        f'{IMAGE} <{SCALES}> {{ r = Conv (X, k) Y = Upsample <mode = "nearest"> (r, scales) }}',
        opset=9,
        weights=CONV,
    ),
    graph(
        "upsample_opset7",
        19,
        f'{IMAGE} {{ r = Relu (X) Y = Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 2.0]> (r) }}',
        opset=7,
        ir=3,
    ),
    graph(
        "matmul_opset11",
        19,
        "(float[2,3] X) => (float[2,3] Y) { m = MatMul (X, w) c = Clip (m) Y = Softmax (c) }",
        opset=11,
        weights={"w": (3, 3)},
    ),
    graph(
        "layer_norm_opset12",
        19,
        """(float[2,3] X) => (float[2,3] Y) {
            m = MatMul (X, w)
            n = LayerNormalization (m, s, b)
            Y = MatMul (n, w)
        }""",
        opset=12,
        weights={"w": (3, 3), "s": (3,), "b": (3,)},
    ),
    graph(
        "non_max_suppression",
        19,
        """(float[1,4,4] B, float[1,1,4] S) => (int64[K,3] I) <float t = {0.5}, int64 n = {3}> {
            b = Mul (B, two)
            I = NonMaxSuppression (b, S, n, t)
        }""",
        weights={"two": np.array([2.0], np.float32)},
        feeds={
            "B": lambda rng, _: np.array([[[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3], [4, 4, 5, 5]]], np.float32),
            "S": lambda rng, _: np.array([[[0.9, 0.75, 0.6, 0.3]]], np.float32),
        },
    ),
    graph(
        "top_k",
        19,
        """(float[2,8] X) => (float[2,3] V, int64[2,3] I) <int64[1] k = {3}> {
            r = MatMul (X, w)
            V, I = TopK (r, k)
        }""",
        weights={"w": np.eye(8, dtype=np.float32)},
        feeds={"X": lambda rng, shape: rng.permuted(np.tile(np.arange(8, dtype=np.float32), (2, 1)), axis=1)},
    ),
    graph(
        "range_of_floats",
        19,
        "(float N) => (float[M] Y) <float z = {0.0}, float d = {1.0}> { r = Range (z, N, d) Y = Mul (r, r) }",
        feeds={"N": np.array(7, np.float32)},
    ),
    graph(
        "clip_without_min",
        13,
        '(float[2,3] X) => (float[2,3] Y) <float top = {0.5}> { r = Relu (X) Y = Clip (r, "", top) }',
    ),
    *(
        graph(
            f"{op.lower()}_with_empty_inputs",
            13,
            f"""(float[5,2,3] X) => (float[5,1,2,4] Y, float[1,2,4] Z) {{
                o, Z{', ""' if op == "LSTM" else ""} = {op} <hidden_size = 4> (X, w, r, "", "", "")
                Y = Mul (o, o)
            }}""",
            weights=shapes,
        )
        for op, shapes in RECURRENT.items()
    ),
    graph(
        "two_lstms",
        13,
        """(float[5,2,3] X) => (float[5,1,2,4] Y, float[5,1,2,4] Z) {
            Y, "", "" = LSTM <hidden_size = 4> (X, w, r, "", "", "", "")
            Z, "" = LSTM <hidden_size = 4> (X, w, r)
        }""",
        weights=RECURRENT["LSTM"],
    ),
    *at_opsets(
        17,
        22,
        name="layer_norm_three_outputs",
        row=18,
        text="""(float[2,4] X) => (float[2,4] Y, float[2,1] Z) {
            m = MatMul (X, w)
            Y, mean, inv = LayerNormalization (m, s, b)
            Z = Mul (mean, inv)
        }""",
        weights={"w": (4, 4), "s": (4,), "b": (4,)},
        tolerance=0.1,
    ),
    graph(
        "layer_norm_white",
        18,
        """(float[2,4] X) => (float[2,4] Y, float[2,1] Z) {
            h = Tanh (X)
            Y, mean, inv = LayerNormalization (h, s, b)
            Z = Add (mean, inv)
        }""",
        weights={"s": (4,), "b": (4,)},
        options={"white_list": ("LayerNormalization",)},
    ),
    graph(
        "batch_norm_behind_conv",
        18,
        """(float[1,2,4,4] X) => (float[1,3,4,4] Y) {
            c = Conv (X, k)
            n = BatchNormalization (c, s, b, m, v)
            Y = Relu (n)
        }""",
        weights={"k": (3, 2, 1, 1), "s": (3,), "b": (3,), "m": (3,), "v": np.array([0.5, 1, 2], np.float32)},
    ),
    graph(
        "batch_norm_computed_scale",
        18,
        """(float[1,3,4,4] X, float[3] S) => (float[1,3,4,4] Y) {
            t = Mul (S, S)
            n = BatchNormalization (X, t, b, m, v)
            Y = Conv (n, k)
        }""",
        weights={"k": (3, 3, 1, 1), "b": (3,), "m": (3,), "v": np.array([0.5, 1, 2], np.float32)},
    ),
)
