"""If, Loop and Scan (row 7), and the order of nodes (row 8)."""

import numpy as np
from onnx import ModelProto

from .case import Case, at_opsets, case, graph, parse

MAX_BLOCKED = {"black_list": ("Max",)}
TRUE = {"C": np.array(True)}
COUNT = {"M": np.array(3)}

LOOP = """(int64 M, float[2,2] X) => (float[2,2] Y, float[3,2,2] Z) <bool go = {1}> {
    s = MatMul (X, w)
    Y, scan = Loop (M, go, s) <
        body = b (int64 i, bool c, float[2,2] v) => (bool d, float[2,2] n, float[2,2] e) {
            d = Identity (c)
            BODY
            e = Relu (n)
        }
    >
    Z = Mul (scan, scan)
}"""


def loop(name: str, body: str, **arguments) -> Case:
    """A Loop with one carried value and one scan output; ``body`` makes ``n`` from ``v``."""
    text = LOOP.replace("BODY", body)
    return graph(name, 7, text, weights={"w": (2, 2)}, feeds=COUNT, **arguments)


@case(8, loads=True)
def unsorted_nodes() -> ModelProto:
    """ONNX Runtime sorts for itself; the checker complains, and must not complain about anything new."""
    model = parse("(float[2,2] X) => (float[2,2] Y) { a = MatMul (X, X) b = Exp (a) Y = MatMul (b, X) }")
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    return model


CASES: tuple[Case, ...] = (
    *(
        one
        for branch, flag in (("then", True), ("else", False))
        for one in at_opsets(
            17,
            22,
            name=f"if_capture_{branch}",
            row=7,
            text="""(bool C, float[2,2] X) => (float[2,2] Y) {
                Y = If (C) <
                    then_branch = t () => (float[2,2] a) { a = MatMul (X, w) },
                    else_branch = e () => (float[2,2] b) { b = Add (X, w) }
                >
            }""",
            weights={"w": (2, 2)},
            feeds={"C": np.array(flag)},
        )
    ),
    graph(
        "if_blocked_inside",
        7,
        """(bool C, float[2,2] X) => (float[2,2] Y) {
            r = MatMul (X, X)
            t = If (C) <
                then_branch = t () => (float[2,2] a) { m = Max (r, X) a = MatMul (m, r) },
                else_branch = e () => (float[2,2] b) { b = Add (r, X) }
            >
            Y = MatMul (t, X)
        }""",
        feeds=TRUE,
        options=MAX_BLOCKED,
    ),
    graph(
        "if_same_initializer_names",
        7,
        """(bool C, float[2,2] X) => (float[2,2] Y) {
            Y = If (C) <
                then_branch = t () => (float[2,2] a) <float[2,2] c = {1.0, 2.0, 3.0, 4.0}> {
                    a = MatMul (X, c)
                },
                else_branch = e () => (float[2,2] a) <float[2,2] c = {5.0, 6.0, 7.0, 8.0}> {
                    a = MatMul (X, c)
                }
            >
        }""",
        feeds=TRUE,
    ),
    graph(
        "if_branch_is_capture",
        7,
        """(bool C, float[2,2] X) => (float[2,2] Y) {
            r = MatMul (X, X)
            t = If (C) <
                then_branch = t () => (float[2,2] a) { a = Identity (r) },
                else_branch = e () => (float[2,2] b) { b = Exp (r) }
            >
            Y = Tanh (t)
        }""",
        feeds=TRUE,
    ),
    graph(
        "if_capture_of_output",
        7,
        """(bool C, float[2,2] X) => (float[2,2] R, float[2,2] Y) {
            R = MatMul (X, X)
            Y = If (C) <
                then_branch = t () => (float[2,2] a) { a = MatMul (R, X) },
                else_branch = e () => (float[2,2] b) { b = Exp (R) }
            >
        }""",
        feeds=TRUE,
    ),
    graph(
        "if_branches_disagree",
        7,
        """(bool C, float[2,2] X) => (float[2,2] Y) {
            t = If (C) <
                then_branch = t () => (float[2,2] a) { a = MatMul (X, X) },
                else_branch = e () => (float[2,2] b) { b = Max (X, X) }
            >
            Y = MatMul (t, X)
        }""",
        feeds={"C": np.array(False)},
        options=MAX_BLOCKED,
    ),
    graph(
        "if_with_several_outputs",
        7,
        """(bool C, float[2,2] X) => (float[2,2] Y, int64[2] S) {
            t, S = If (C) <
                then_branch = t () => (float[2,2] a, int64[2] s) { a = MatMul (X, X) s = Shape (a) },
                else_branch = e () => (float[2,2] b, int64[2] q) { b = Relu (X) q = Shape (b) }
            >
            Y = MatMul (t, X)
        }""",
        feeds=TRUE,
    ),
    loop("loop_carried", "n = MatMul (v, w)"),
    loop("loop_carried_blocked", "m = MatMul (v, X) n = Max (m, v)", options=MAX_BLOCKED),
    loop("loop_blocked", "n = MatMul (v, w)", options={"black_list": ("Loop",)}),
    loop("loop_capture", "n = Add (v, s)"),
    loop("loop_forwards_state", "n = Identity (v)"),
    loop("loop_body_initializer", "k = Constant <value_float = 0.5> () n = Mul (v, k)"),
    loop(
        "if_inside_loop",
        """n = If (c) <
            then_branch = t () => (float[2,2] p) { p = MatMul (v, s) },
            else_branch = f () => (float[2,2] q) { q = Max (v, X) }
        >""",
        options=MAX_BLOCKED,
    ),
    graph(
        "loop_swaps_state",
        7,
        """(int64 M, float[2,2] X) => (float[2,2] Y) <bool go = {1}> {
            a, b = Loop (M, go, X, w) <
                body = l (int64 i, bool c, float[2,2] p, float[2,2] q)
                    => (bool d, float[2,2] r, float[2,2] s) {
                        d = Identity (c)
                        r = Identity (q)
                        s = Identity (p)
                    }
            >
            m = MatMul (a, w)
            e = Exp (b)
            Y = Add (m, e)
        }""",
        weights={"w": (2, 2)},
        feeds=COUNT,
    ),
    *at_opsets(
        17,
        22,
        name="scan",
        row=7,
        text="""(float[2] S, float[3,2] X) => (float[2] F, float[3,2] Y) {
            x = MatMul (X, w)
            F, Y = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] i) => (float[2] n, float[2] o) {
                n = Add (s, i)
                o = MatMul (n, w)
            }> (S, x)
        }""",
        weights={"w": (2, 2)},
    ),
    graph(
        "scan_blocked_inside",
        7,
        """(float[2] S, float[3,2] X) => (float[2] F, float[3,2] Y) {
            x = MatMul (X, w)
            F, y = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] i) => (float[2] n, float[2] o) {
                n = Max (s, i)
                o = MatMul (n, w)
            }> (S, x)
            Y = MatMul (y, w)
        }""",
        weights={"w": (2, 2)},
        options=MAX_BLOCKED,
    ),
    graph(
        "same_names_in_sibling_scopes",
        7,
        """(bool C, float[2,2] X) => (float[2,2] Y) {
            p = If (C) <
                then_branch = t () => (float[2,2] v) { u = MatMul (X, X) v = Relu (u) },
                else_branch = e () => (float[2,2] v) { u = Max (X, X) v = Exp (u) }
            >
            q = If (C) <
                then_branch = t () => (float[2,2] v) { u = Exp (p) v = Relu (u) },
                else_branch = e () => (float[2,2] v) { u = MatMul (p, X) v = Exp (u) }
            >
            Y = MatMul (q, X)
        }""",
        feeds=TRUE,
        options=MAX_BLOCKED,
    ),
    graph(
        "body_shadows_later_name",
        7,
        """(bool C, float[2,2] X) => (float[2,2] Y) {
            p = If (C) <
                then_branch = t () => (float[2,2] v) { r = Exp (X) v = MatMul (r, X) },
                else_branch = e () => (float[2,2] v) { r = MatMul (X, X) v = Exp (r) }
            >
            r = MatMul (p, X)
            Y = Relu (r)
        }""",
        feeds=TRUE,
    ),
    graph(
        "body_shadows_outer_initializer",
        7,
        """(bool C, float[2,2] X) => (float[2,2] Y) <float[2,2] k = {1.0, 0.0, 0.0, 1.0}> {
            p = If (C) <
                then_branch = t () => (float[2,2] v) <float[2,2] k = {1.0, 0.0, 0.0, 1.0}> {
                    v = MatMul (X, k)
                },
                else_branch = e () => (float[2,2] v) { v = Exp (k) }
            >
            Y = MatMul (p, k)
        }""",
        feeds=TRUE,
        # Equal values, because ONNX Runtime takes the outer one, or the inner one where it optimizes.
    ),
    graph(
        "if_after_relu",
        8,
        """(bool C, float[2,2] X) => (float[2,2] Y) {
            r = Relu (X)
            Y = If (C) <
                then_branch = t () => (float[2,2] a) { a = MatMul (r, r) },
                else_branch = e () => (float[2,2] b) { b = Exp (r) }
            >
        }""",
        feeds=TRUE,
    ),
    graph(
        "matmul_only",
        8,
        "(float[2,3] X) => (float[2,2] Y) { Y = MatMul (X, w) }",
        weights={"w": (3, 2)},
    ),
    unsorted_nodes,
)
