"""Random loops of many iterations, which carry counters, sums, products and phases.

What is carried is simple, since it is computed thousands of times; how it is carried is random: by which op, through
which moves, bodies and types, and what ends the loop.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper, parser

TRIPS = (2600, 4100)
"""More than float16 counts one by one, and as few as that allows."""
UPDATES = {
    "n = Add (s, one)": 1.0,
    "n = Sub (s, one)": 1.0,
    "n = Sum (s, quarter, quarter)": 0.5,
    "k = Mul (e, tenth) n = Add (s, k)": 0.1,
    "k = Add (e, one) n = Add (k, s)": 1.5,
    "k = Neg (s) n = Sub (e, k)": 0.5,
    "n = Mul (s, growing)": 0.0,
    "n = Div (s, fading)": 0.0,
    "k = Mul (s, mostly) m = Mul (e, little) n = Add (k, m)": 0.0,
    "k = Sub (e, s) m = Mul (k, little) n = Add (s, m)": 0.0,
    "d = Sub (e, s) f = Cast <to = 1> (turn) g = Add (f, one) k = Div (d, g) n = Add (s, k)": 0.0,
}
"""What makes the next state ``n`` of the state ``s`` and of ``e``, numbers from 0 to 1 -> what it adds each time."""
WAYS = (
    "STEP next = Identity (n)",
    "STEP a = Reshape (n, flat) next = Reshape (a, shape)",
    "STEP a = Cast <to = 11> (n) next = Cast <to = 1> (a)",
    "STEP next = Where (yes, n, s)",
    "STEP a = Unsqueeze (n, zeros) next = Squeeze (a, zeros)",
    """STEP next = If (yes) <then_branch = t () => (float[K] p) { p = Identity (n) },
                             else_branch = o () => (float[K] q) { q = Identity (s) }>""",
    """next = If (yes) <then_branch = t () => (float[K] n) { STEP },
                        else_branch = o () => (float[K] q) { q = Neg (s) }>""",
    """next = Loop (single, , s) <body = l (int64 j, bool stay, float[K] v) => (bool on1, float[K] z) {
        on1 = Identity (stay) STEP z = Identity (n) }>""",
)
"""How the next state comes to be; STEP stands for the update."""
WIDTH = 4


@dataclass(frozen=True)
class Looped:
    """A random loop, and inputs that make it run long."""

    model: ModelProto
    feeds: dict[str, Any]


def random_loop(rng: Random) -> Looped:
    """A product of a matrix, and of the state that a Loop or Scan carries, or of the sine of its phase."""
    trips = rng.randint(*TRIPS)
    update = rng.choice(sorted(UPDATES))
    way = rng.choice(WAYS)
    reach = UPDATES[update] * trips or 1.0
    kind = rng.choice(("Loop", "Scan", "condition"))
    if "turn" in update and kind == "Scan":
        kind = "Loop"
    body = way.replace("STEP", update)
    numbers = {
        "one": 1.0, "quarter": 0.25, "tenth": 0.1, "growing": 1 + 2 / trips, "fading": 1 + 1.5 / trips,
        "mostly": 1 - 2 / trips, "little": 2 / trips, "scale": 1 / reach, "end": float(trips), "turn0": 0.0,
    }  # fmt: skip
    weights: dict[str, np.ndarray] = {name: np.array([x], np.float32) for name, x in numbers.items()}
    draw = np.random.default_rng(rng.getrandbits(32))
    weights |= {
        "first": draw.uniform(0.5, 1, WIDTH).astype(np.float32),
        "w": (draw.standard_normal((WIDTH, WIDTH)) / 2).astype(np.float32),
        "flat": np.array([1, WIDTH], np.int64), "shape": np.array([WIDTH], np.int64), "zeros": np.array([0], np.int64),
        "single": np.array(1, np.int64), "yes": np.array(True), "none": np.array(0, np.int64),
    }  # fmt: skip
    after = rng.choice(("t = Mul (last, scale)", "u = Mul (last, scale) t = Identity (u)", "t = Sin (last)"))
    text = _text(kind, body, after)
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> looped {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    feeds: dict[str, Any] = {"x": draw.standard_normal((3, WIDTH)).astype(np.float32)}
    if kind == "Scan":
        feeds["rows"] = draw.uniform(0, 1, (trips, WIDTH)).astype(np.float32)
    else:
        feeds["row"] = draw.uniform(0, 1, WIDTH).astype(np.float32)
    if kind == "Loop":
        feeds["trips"] = np.array(trips, np.int64)
    return Looped(model, feeds)


def _text(kind: str, body: str, after: str) -> str:
    """The graph in ONNX's syntax."""
    state = f"float[{WIDTH}]"
    body = body.replace("float[K]", state)
    result = f"""h = MatMul (x, w) {after} y = Mul (h, t)"""
    if kind == "Scan":
        return f"""(float[3,{WIDTH}] x, float[T,{WIDTH}] rows) => (float[3,{WIDTH}] y) {{
            last, all = Scan <num_scan_inputs = 1, body = b ({state} s, {state} e) => ({state} next, {state} o) {{
                {body} o = Identity (next) }}> (first, rows)
            {result} }}"""
    if kind == "Loop":
        return f"""(float[3,{WIDTH}] x, {state} row, int64 trips) => (float[3,{WIDTH}] y) {{
            last = Loop (trips, , first) <body = b (int64 turn, bool go, {state} s) => (bool on, {state} next) {{
                on = Identity (go) e = Identity (row) {body} }}>
            {result} }}"""
    return f"""(float[3,{WIDTH}] x, {state} row) => (float[3,{WIDTH}] y) {{
        most = Constant <value = int64 {{9000}}> ()
        last, count = Loop (most, yes, first, turn0) <
            body = b (int64 turn, bool go, {state} s, float[1] c) => (bool on, {state} next, float[1] c1) {{
                c1 = Add (c, one) less = Less (c1, end) on = Squeeze (less) e = Identity (row) {body} }}>
        {result} }}"""
