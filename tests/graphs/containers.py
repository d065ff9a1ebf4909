"""Sequences, optionals and model-local functions (rows 14 and 15)."""

import numpy as np

from .case import Case, at_opsets, graph

SQUARE = {"w": (3, 3)}
SIGNATURE = "(float[2,3] X) => (float[2,3] Y)"
MY = {"my": 1}
FOO = """<domain: "my", opset_import: ["" : 17]>
Foo (a) => (b) { k = Constant <value_float = 2.0> () b = Mul (a, k) }"""
BLOCK = """<domain: "my", opset_import: ["" : 17, "my" : 1]>
Block <axis: int = 1> (a, w) => (s) {
    m = MatMul (a, w)
    f = my.Foo (m)
    s = Softmax <axis: int = @axis> (f)
}"""

CASES: tuple[Case, ...] = (
    *at_opsets(
        17,
        22,
        name="sequence_construct",
        row=14,
        text=f"""{SIGNATURE} <int64 i = {{1}}> {{
            r = MatMul (X, w)
            s = SequenceConstruct (r, X)
            c = ConcatFromSequence <axis = 0> (s)
            a = SequenceAt (s, i)
            m, n = Split <axis = 0> (c)
            Y = Add (a, m)
        }}""",
        weights=SQUARE,
    ),
    graph(
        "sequence_blocked_element",
        14,
        """(float[2,3] X) => (float[4,3] Y) {
            r = MatMul (X, w)
            e = Softplus (X)
            s = SequenceConstruct (r, e)
            c = ConcatFromSequence <axis = 0> (s)
            Y = MatMul (c, w)
        }""",
        weights=SQUARE,
    ),
    graph(
        "sequence_empty_insert",
        14,
        f"""{SIGNATURE} <int64 i = {{0}}> {{
            e = SequenceEmpty <dtype = 1> ()
            m = MatMul (X, w)
            s = SequenceInsert (e, m)
            a = SequenceAt (s, i)
            Y = MatMul (a, w)
        }}""",
        weights=SQUARE,
    ),
    graph(
        "sequence_empty_untyped",
        14,
        f"""{SIGNATURE} <int64 i = {{0}}> {{
            e = SequenceEmpty ()
            s = SequenceInsert (e, X)
            a = SequenceAt (s, i)
            Y = MatMul (a, w)
        }}""",
        weights=SQUARE,
    ),
    graph(
        "split_to_sequence",
        14,
        """(float[2,3] X) => (float[1,3] Y) <int64 i = {1}> {
            m = MatMul (X, w)
            s = SplitToSequence <axis = 0> (m)
            a = SequenceAt (s, i)
            Y = Exp (a)
        }""",
        weights=SQUARE,
    ),
    graph(
        "sequence_is_input",
        14,
        """(seq(float[2,3]) S) => (float[2,3] Y) <int64 i = {1}> {
            a = SequenceAt (S, i)
            Y = MatMul (a, w)
        }""",
        weights=SQUARE,
        feeds={"S": [np.ones((2, 3), np.float32), np.full((2, 3), 0.3, np.float32)]},
    ),
    graph(
        "sequence_is_output",
        14,
        """(float[2,3] X) => (seq(float[2,3]) S) {
            m = MatMul (X, w)
            S = SequenceConstruct (m, X)
        }""",
        weights=SQUARE,
    ),
    graph(
        "sequence_carried_by_loop",
        14,
        """(int64 M, float[2,3] X) => (float[A,3] Y) <bool go = {1}> {
            e = SequenceEmpty <dtype = 1> ()
            s = Loop (M, go, e) <
                body = b (int64 i, bool c, seq(float[2,3]) p) => (bool d, seq(float[2,3]) q) {
                    d = Identity (c)
                    m = MatMul (X, w)
                    q = SequenceInsert (p, m)
                }
            >
            Y = ConcatFromSequence <axis = 0> (s)
        }""",
        weights=SQUARE,
        feeds={"M": np.array(3)},
    ),
    graph(
        "sequence_of_integers",
        14,
        """(int64[3] I, float[2,3] X) => (int64[6] J, float[2,3] Y) {
            s = SequenceConstruct (I, I)
            J = ConcatFromSequence <axis = 0> (s)
            Y = MatMul (X, w)
        }""",
        weights=SQUARE,
    ),
    graph(
        "optional",
        14,
        f"""{SIGNATURE} {{
            m = MatMul (X, w)
            o = Optional (m)
            g = OptionalGetElement (o)
            Y = Exp (g)
        }}""",
        weights=SQUARE,
    ),
    graph(
        "optional_has_element",
        14,
        """(float[2,3] X) => (float[2,3] Y, bool H) {
            o = Optional (X)
            H = OptionalHasElement (o)
            g = OptionalGetElement (o)
            Y = MatMul (g, w)
        }""",
        weights=SQUARE,
    ),
    graph(
        "optional_of_sequence",
        14,
        """(float[2,3] X) => (float[4,3] Y) {
            m = MatMul (X, w)
            s = SequenceConstruct (m, X)
            o = Optional (s)
            g = OptionalGetElement (o)
            Y = ConcatFromSequence <axis = 0> (g)
        }""",
        weights=SQUARE,
    ),
    graph(
        "function",
        15,
        f"{SIGNATURE} {{ t = my.Foo (X) m = MatMul (t, w) Y = Relu (m) }}\n{FOO}",
        domains=MY,
        weights=SQUARE,
    ),
    graph(
        "function_used_twice",
        15,
        f"{SIGNATURE} {{ t = my.Foo (X) m = MatMul (t, w) e = Exp (m) Y = my.Foo (e) }}\n{FOO}",
        domains=MY,
        weights=SQUARE,
    ),
    graph(
        "function_in_function",
        15,
        f"{SIGNATURE} {{ Y = my.Block <axis = 0> (X, w) }}\n{FOO}\n{BLOCK}",
        domains=MY,
        weights=SQUARE,
    ),
    graph(
        "function_kept",
        15,
        f"{SIGNATURE} {{ m = MatMul (X, w) t = my.Foo (m) Y = MatMul (t, w) }}\n{FOO}",
        domains=MY,
        weights=SQUARE,
        options={"keep_functions": True},
    ),
    graph(
        "function_in_branch",
        15,
        f"""(bool C, float[2,3] X) => (float[2,3] Y) {{
            Y = If (C) <
                then_branch = t () => (float[2,3] a) {{ m = MatMul (X, w) a = my.Foo (m) }},
                else_branch = e () => (float[2,3] b) {{ b = my.Foo (X) }}
            >
        }}\n{FOO}""",
        domains=MY,
        weights=SQUARE,
        feeds={"C": np.array(True)},
    ),
)
