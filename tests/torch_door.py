"""What tests of the door for PyTorch share: types of packages that are not installed, and ops that a context lowers."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from graphs.case import parse

import onnxamp

NORMED = """(float[N,2] x) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}, float[2] s = {1, 1}> {
    m = MatMul (x, w) t = Tanh (m) n = LayerNormalization (t, s) r = Relu (n) e = Exp (r) q = MatMul (e, w)
    z = ReduceMean <keepdims = 1> (q) y = Mul (q, z) }"""


def low_ops(context: AbstractContextManager[None], text: str = NORMED) -> set[str]:
    """Op types that a session created in the context computes in low precision."""
    with context, onnxamp.debugging.collect_operator_stats() as stats:
        onnxamp.InferenceSession(parse(text)).run(None, {"x": np.ones((1, 2), np.float32)})
    return {op for op, precision in stats.calls if precision in ("float16", "bfloat16")} - {"Cast"}


def foreign(package: str, text: str) -> Any:
    """A type of a framework that is not installed: its class and its text are all that is known of it."""
    kind = type("dtype", (), {"__module__": package, "__str__": lambda _: text, "is_floating_point": True})
    return kind()
