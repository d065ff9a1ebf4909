"""Attention masks: sentinels and infinities on their way to a Softmax (row 25)."""

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


CASES: tuple[Case, ...] = (
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
