"""Ops whose low-precision kernels depend on the opset (row 41)."""

import numpy as np

from .case import Case, at_opsets, graph, integers, positive

CONV = {"k": (2, 2, 1, 1)}


def one_op(op: str, text: str, *, weights: dict | None = None, **arguments) -> tuple[Case, ...]:
    """An op behind a MatMul at opsets 13 and 22: with or without a bfloat16 kernel."""
    return at_opsets(13, 22, name=f"kernel_{op}", row=41, text=text, weights=weights or {}, **arguments)


CASES: tuple[Case, ...] = (
    *one_op(
        "conv",
        "(float[1,2,4,4] X) => (float[1,3,4,4] Y) { Y = Conv (X, k, b) }",
        weights={"k": (3, 2, 1, 1), "b": (3,)},
    ),
    *one_op(
        "conv_transpose",
        "(float[1,2,4,4] X) => (float[1,3,4,4] Y) { Y = ConvTranspose (X, k) }",
        weights={"k": (2, 3, 1, 1)},
    ),
    *one_op("exp", "(float[2,4] X) => (float[2,4] Y) { m = MatMul (X, w) Y = Exp (m) }", weights={"w": (4, 4)}),
    *one_op(
        "where",
        "(bool[2,4] C, float[2,4] X) => (float[2,4] Y) { m = MatMul (X, w) Y = Where (C, m, X) }",
        weights={"w": (4, 4)},
    ),
    *one_op("clip", "(float[2,4] X) => (float[2,4] Y) <float a = {-0.5}, float b = {0.5}> { Y = Clip (X, a, b) }"),
    *one_op(
        "max_pool",
        """(float[1,2,4,4] X) => (float[1,2,2,2] Y) {
        c = Conv (X, k) Y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c) }""",
        weights=CONV,
    ),
    *one_op(
        "average_pool",
        """(float[1,2,4,4] X) => (float[1,2,1,1] Y) {
        c = Conv (X, k) Y = GlobalAveragePool (c) }""",
        weights=CONV,
    ),
    *one_op(
        "batch_norm",
        """(float[1,2,4,4] X) => (float[1,2,4,4] Y) {
        c = Conv (X, k) Y = BatchNormalization (c, s, b, m, v) }""",
        weights={**CONV, "s": (2,), "b": (2,), "m": (2,), "v": np.array([0.5, 2], np.float32)},
    ),
    *one_op("elu", "(float[2,4] X) => (float[2,4] Y) { m = MatMul (X, w) Y = Elu (m) }", weights={"w": (4, 4)}),
    *one_op("gemm", "(float[2,4] X) => (float[2,3] Y) { Y = Gemm (X, w, b) }", weights={"w": (4, 3), "b": (3,)}),
    *one_op(
        "cum_sum",
        """(float[2,4] X) => (float[2,4] Y) <int64 a = {1}> {
        m = MatMul (X, w) Y = CumSum (m, a) }""",
        weights={"w": (4, 4)},
    ),
    *one_op(
        "softmax",
        "(float[2,4] X) => (float[2,4] Y) { m = MatMul (X, w) Y = Softmax (m) }",
        weights={"w": (4, 4)},
    ),
    *one_op(
        "gather_nd",
        "(float[2,4] X, int64[2,2] I) => (float[2] Y) { m = MatMul (X, w) Y = GatherND (m, I) }",
        weights={"w": (4, 4)},
        feeds={"I": integers(0, 2)},
    ),
    *one_op(
        "instance_norm",
        """(float[1,2,4,4] X) => (float[1,2,4,4] Y) {
        c = Conv (X, k) Y = InstanceNormalization (c, s, b) }""",
        weights={**CONV, "s": (2,), "b": (2,)},
    ),
    graph(
        "kernel_reduce_mean_opset13",
        41,
        """(float[2,4] X) => (float[2,1] Y) {
        m = MatMul (X, w) Y = ReduceMean <axes = [1]> (m) }""",
        opset=13,
        weights={"w": (4, 4)},
        feeds={"X": positive()},
    ),
    graph(
        "kernel_reduce_mean_opset22",
        41,
        """(float[2,4] X) => (float[2,1] Y) <int64[1] axes = {1}> {
        m = MatMul (X, w) Y = ReduceMean (m, axes) }""",
        opset=22,
        weights={"w": (4, 4)},
        feeds={"X": positive()},
    ),
    graph(
        "kernel_grid_sample",
        41,
        """(float[1,2,4,4] X, float[1,3,3,2] G) => (float[1,2,3,3] Y) {
        c = Conv (X, k) Y = GridSample (c, G) }""",
        weights=CONV,
        feeds={"G": positive(-0.9, 0.9)},
    ),
)
