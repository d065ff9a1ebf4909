"""Attention masks: sentinels and infinities on their way to a Softmax (row 25)."""

from typing import Any

import numpy as np

from .case import Case, at_opsets, graph

LOWEST = "-3.4028234663852886e38"
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
"""The last row is fully masked."""
OPEN_MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], np.float32)
"""Every row sees something."""
ATTENTION = "(float[3,4] Q, float[4,4] K, float[3,4] M) => (float[3,4] Y)"


def attention(name: str, nodes: str, initializers: str = "", mask: np.ndarray = MASK, **arguments) -> Case:
    text = f"{ATTENTION} <{initializers}> {{ s = MatMul (Q, K) {nodes} }}"
    return graph(name, 25, text, feeds={"M": mask}, **arguments)


MOVEMENTS = {
    "identity": ("3,4", "i = Identity (a) [soft] Y = Softmax (i)"),
    "flatten": ("3,4", "i = Flatten <axis = 1> (a) [soft] Y = Softmax (i)"),
    "gather": ("3,4", "i = Gather (a, rows) [soft] Y = Softmax (i)"),
    "split": (
        "3,4",
        "i, j = Split (a, sizes) [soft] p = Softmax (i) [soft2] q = Softmax (j) Y = Concat <axis = 0> (p, q)",
    ),
    "squeeze": ("3,4", "u = Unsqueeze (a, axis) i = Squeeze (u, axis) [soft] Y = Softmax (i)"),
    "unsqueeze": ("1,3,4", "i = Unsqueeze (a, axis) [soft] Y = Softmax (i)"),
    "expand": ("2,3,4", "i = Expand (a, shape) [soft] Y = Softmax (i)"),
    "slice": ("2,4", "i = Slice (a, one, end, axis) [soft] Y = Softmax (i)"),
    "concat": ("6,4", "i = Concat <axis = 0> (a, s) [soft] Y = Softmax (i)"),
}
"""What may stand between the addition of the mask and the Softmax, with the shape of the result."""


def moved_mask(movement: str, kind: str, number: str, mask: np.ndarray, **options: Any) -> Case:
    """Scores of some tens, which low precision forgets beside the mask's number, moved to their Softmax."""
    shape, nodes = MOVEMENTS[movement]
    text = f"""(float[3,4] Q, float[3,4] M) => (float[{shape}] Y) <
        float top = {{1}}, float low = {{{number}}}, int64[1] axis = {{0}}, int64[1] one = {{1}}, int64[1] end = {{3}},
        int64[2] sizes = {{1, 2}}, int64[3] rows = {{2, 0, 1}}, int64[3] shape = {{2, 3, 4}}> {{
        s = MatMul (Q, K) n = Sub (top, M) b = Mul (n, low) a = Add (s, b) {nodes} }}"""
    weights = {"K": 10 * np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)}
    name = f"mask_{kind}_through_{movement}"
    return graph(name, 25, text, opset=22, weights=weights, feeds={"M": mask}, options=options)


CASES: tuple[Case, ...] = (
    *(moved_mask(movement, "that_is_large", "-1e6", MASK) for movement in MOVEMENTS),
    *(moved_mask(movement, "sentinel", LOWEST, OPEN_MASK) for movement in MOVEMENTS),
    # A sentinel that is saturated, because all around it is low, forgets the scores of a row that is masked as a whole.
    *(moved_mask(movement, "float32", LOWEST, MASK, keep_high=("soft", "soft2")) for movement in MOVEMENTS),
    attention(
        "mask_lowest",
        "n = Sub (one, M) b = Mul (n, low) a = Add (s, b) Y = Softmax (a)",
        f"float one = {{1.0}}, float low = {{{LOWEST}}}",
    ),
    *at_opsets(
        14,
        17,
        22,
        name="mask_lowest_where",
        row=25,
        text=f"""{ATTENTION} <float low = {{{LOWEST}}}, float z = {{0.0}}> {{
            s = MatMul (Q, K) c = Cast <to = 9> (M) b = Where (c, z, low) a = Add (s, b) Y = Softmax (a)
        }}""",
        feeds={"M": MASK},
    ),
    attention(
        "mask_lowest_table",
        "a = Add (s, t) b = Add (a, M) Y = Softmax (b)",
        f"float[3,4] t = {{0.0, 0.0, {LOWEST}, {LOWEST}, 0.0, 0.0, 0.0, 0.0{f', {LOWEST}' * 4}}}",
    ),
    attention(
        "mask_added_twice",
        """n = Sub (one, M) b = Mul (n, low) c = Cast <to = 9> (M) d = Where (c, z, low)
        p = Add (s, b) q = Add (p, d) Y = Softmax (q)""",
        f"float one = {{1.0}}, float z = {{0.0}}, float low = {{{LOWEST}}}",
        # Twice the lowest float is -inf in float32 too: a fully masked row is NaN there.
        mask=OPEN_MASK,
    ),
    attention(
        "mask_infinite",
        "c = Cast <to = 9> (M) b = Where (c, s, inf) Y = Softmax (b)",
        "float inf = {-inf}",
        mask=OPEN_MASK,
    ),
    attention(
        "mask_infinite_row",
        "c = Cast <to = 9> (M) b = Where (c, s, inf) Y = Softmax (b)",
        "float inf = {-inf}",
    ),
    attention(
        "mask_that_fits",
        "n = Sub (one, M) b = Mul (n, low) a = Add (s, b) Y = Softmax (a)",
        "float one = {1.0}, float low = {-10000.0}",
        # Beside -10000 a score has no digits left in a low type, which shows where nothing else is in the row.
        mask=OPEN_MASK,
    ),
    attention("mask_comes_in", "a = Add (s, M) Y = Softmax (a)", mask=np.finfo(np.float32).min * (1 - MASK)),
    attention(
        "mask_softmax_lowered",
        "n = Sub (one, M) b = Mul (n, low) a = Add (s, b) Y = Softmax (a)",
        f"float one = {{1.0}}, float low = {{{LOWEST}}}",
        options={"white_list": ("Softmax", "Add", "Mul", "Sub")},
    ),
    attention(
        "mask_forced_low",
        "c = Cast <to = 9> (M) [mask] b = Where (c, z, low) [add] a = Add (s, b) [soft] Y = Softmax (a)",
        f"float z = {{0.0}}, float low = {{{LOWEST}}}",
        options={"force_low": ("mask", "add", "soft")},
    ),
    graph(
        "infinity_is_output",
        25,
        """(bool[2,3] C, float[2,3] X) => (float[2,3] Y) <float i = {-inf}> {
            m = MatMul (X, w)
            Y = Where (C, m, i)
        }""",
        weights={"w": (3, 3)},
    ),
)
