"""Coordinates: counted integers and something computed, up to where exact numbers no longer matter."""

from typing import Any

import numpy as np
import pytest
from every import every
from judge_numbers import emulated, low_feeds, run_original
from onnx import ModelProto, numpy_helper, parser

import onnxamp
from onnxamp._facts.dtypes import FORMATS

WIDTH = 4000
"""More columns than float16 counts one by one."""
BEFORE = """f = Conv (image, kernel) shape = Shape (f) sizes = Gather (shape, last_axis) size = Squeeze (sizes)
    width = Cast <to = 1> (size)"""
COLUMNS = "r = Range (start, size, step) c = Cast <to = 1> (r) column = Unsqueeze (c, axes)"
ONES = "ones = ConstantOfShape <value = int64[1] {1}> (sizes)"
FUNCTION = '<domain: "local", opset_import: ["" : 18]> moved (a, b) => (c) { c = Add (a, b) }'


def grid(body: str, size: str = "W", functions: str = "") -> ModelProto:
    """A graph on the features ``f`` of an image of dynamic width, and on the numbers of its columns."""
    imports = '"" : 18, "local" : 1' if functions else '"" : 18'
    model = parser.parse_model(f"""<ir_version: 10, opset_import: [{imports}]>
        g (float[1,3,4,{size}] image) => (float[A,B,C,D] y) {{ {BEFORE} {body} }} {functions}""")
    numbers = {"half": 0.5, "two": 2.0, "eight": 8.0, "rate": 1.7, "edge": 2000.5, "slope": 0.3}
    weights: dict[str, Any] = {name: np.array(number, np.float32) for name, number in numbers.items()}
    weights |= {
        "kernel": np.array([0.12, 0.24, -0.61], np.float32).reshape(1, 3, 1, 1),
        "last_axis": np.array([3]), "start": np.array(0), "step": np.array(1), "axes": np.array([0, 1, 2]),
        "three": np.array([3]), "two_trips": np.array(2), "yes": np.array(True),
        "first": np.float32(0), "next": np.float32(1), "mixing": np.eye(4, dtype=np.float32),
        "stored": np.arange(WIDTH, dtype=np.float32).reshape(1, 1, 1, WIDTH),
        "centers": np.arange(0.5, WIDTH, dtype=np.float32).reshape(1, 1, 1, WIDTH),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return model


def off(model: ModelProto, width: int = WIDTH, **options: Any) -> float:
    """The largest error of a conversion in which every low value is rounded."""
    feeds = {"image": np.random.default_rng(3).standard_normal((1, 3, 4, width)).astype(np.float32)}
    want = run_original(model, feeds)
    assert want is not None
    result = onnxamp.convert_model(model, **options)
    return float(np.abs(want[0] - emulated(result, low_feeds(result, feeds))[0]).max())


def low_nodes(model: ModelProto, **options: Any) -> set[str]:
    return {row.key.partition(":")[0] for row in onnxamp.plan_model(model, **options).rows if row.low}


COORDINATES = {
    "sum": f"{COLUMNS} p = Add (f, column) q = Mul (p, rate) y = Cos (q)",
    "difference": f"{COLUMNS} p = Sub (column, f) y = Sin (p)",
    "sum of three": f"{COLUMNS} p = Sum (f, column, f) y = Sin (p)",
    "quotient": f"{COLUMNS} e = Exp (f) p = Add (f, column) q = Div (p, e) o = Mul (q, e) y = Sin (o)",
    "result": f"{COLUMNS} y = Add (f, column)",
    "boxes": f"{COLUMNS} s = Sigmoid (f) p = Add (s, column) b = Mul (p, two) e = Exp (f) h = Mul (e, half)"
             " m = Sub (b, h) o = Add (b, h) y = Concat <axis = 1> (m, o)",
    "moved": f"{COLUMNS} a = Add (f, column) b = Identity (a) t = Transpose <perm = [0, 1, 3, 2]> (b)"
             " d = Cast <to = 11> (t) p = Cast <to = 1> (d) y = Sin (p)",
    "expanded": f"{COLUMNS} g = Expand (column, shape) p = Add (f, g) y = Sin (p)",
    "CumSum": f"{ONES} r = CumSum (ones, start) c = Cast <to = 1> (r) p = Add (f, c) y = Sin (p)",
    "NonZero": f"{ONES} n = NonZero (ones) r = Squeeze (n) c = Cast <to = 1> (r) p = Add (f, c) y = Sin (p)",
    "ArgMax": "i = ArgMax <axis = 3> (f) c = Cast <to = 1> (i) p = Add (f, c) y = Sin (p)",
    "TopK": "v, i = TopK <axis = 3> (f, three) c = Cast <to = 1> (i) s = Sigmoid (v) y = Add (s, c)",
    "Shape": "y = Sub (width, f)",
    "distance": f"{COLUMNS} o = Add (column, half) d = Sub (o, column) p = Add (f, d) y = Sigmoid (p)",
    "float Range": "c = Range (first, width, next) p = Add (f, c) y = Sin (p)",
    "branch": f"""{COLUMNS} p = If (yes) <then_branch = t () => (float[1,1,4,W] u) {{ u = Add (f, column) }},
        else_branch = e () => (float[1,1,4,W] v) {{ v = Identity (f) }}> y = Sin (p)""",
    "branches of columns": f"""{COLUMNS} k = If (yes) <then_branch = t () => (float[1,1,1,W] u) {{ u = Neg (column) }},
        else_branch = e () => (float[1,1,1,W] v) {{ v = Identity (column) }}> p = Add (f, k) y = Sin (p)""",
    "loop": f"""{COLUMNS} z, q = Loop (two_trips, , f) <body = b (int64 i, bool go, float[1,1,4,W] s)
        => (bool on, float[1,1,4,W] n, float[1,1,4,W] o) {{ on = Identity (go) n = Tanh (s) o = Add (n, column) }}>
        p = Gather (q, start) y = Sin (p)""",
    "iterations": f"""{COLUMNS} g = ReduceMean <keepdims = 0> (f) z, q = Loop (size, , g) <body = b (int64 i, bool go,
        float s) => (bool on, float n, float o) {{ on = Identity (go) n = Tanh (s) t = Cast <to = 1> (i)
        o = Add (n, t) }}> p = Unsqueeze (q, axes) y = Sin (p)""",
    "comparison": f"{COLUMNS} p = Add (f, column) k = Greater (p, edge) y = Cast <to = 1> (k)",
    "inverse size": f"{COLUMNS} p = Add (f, column) i = Div (two, width) u = Mul (p, i) y = Mul (u, eight)",
    "size": f"{COLUMNS} p = Add (f, column) u = Div (p, width) y = Mul (u, eight)",
}  # fmt: skip
WAYS = [(level, dtype) for dtype in FORMATS for level in ("O1", "O2", "O3")]
ERRORS = {"float16": 0.02, "bfloat16": 0.15}
"""What rounding the computed part alone explains."""


@every(case=list(enumerate(COORDINATES.items())), parts=3)
def test_coordinates_are_exact(case: tuple[int, tuple[str, str]]) -> None:
    index, (_, body) = case
    level, dtype = WAYS[index % len(WAYS)]
    assert off(grid(body), level=level, dtype=dtype) < ERRORS[dtype]


@every(dtype=FORMATS)
def test_coordinates_in_functions_are_exact(dtype: str) -> None:
    model = grid(f"{COLUMNS} p = local.moved (f, column) y = Sin (p)", functions=FUNCTION)
    assert off(model, dtype=dtype) < ERRORS[dtype]


@pytest.mark.parametrize("name", ["sum", "result", "boxes", "CumSum", "TopK"])
def test_without_hazards_they_are_off(name: str) -> None:
    assert off(grid(COORDINATES[name]), level="O3", hazards=False) > 0.4


@pytest.mark.parametrize("body", ["y = Add (f, stored)", "p = Add (f, stored) y = Sin (p)", "y = Add (centers, f)"])
def test_stored_columns_count(body: str) -> None:
    assert off(grid(body, str(WIDTH))) < ERRORS["float16"]


SMALL = f"{COLUMNS} p = Add (f, column) y = Mul (p, two)"


@pytest.mark.parametrize(
    ("width", "dtype", "kept"),
    [("W", "float16", True), ("1000", "float16", False), ("1100", "float16", True), ("1000", "bfloat16", True)],
)
def test_columns_of_small_images_may_be_low(width: str, dtype: str, kept: bool) -> None:
    """Twice 1,000 is the largest integer, which float16 can hold; so it may be low, but angles need more digits."""
    plan = onnxamp.plan_model(grid(SMALL, width), dtype=dtype)
    assert ("position" in {hazard.reason for hazard in plan.hazards}) == kept
    angles = onnxamp.plan_model(grid(COORDINATES["sum"], width), dtype=dtype)
    assert "position" in {hazard.reason for hazard in angles.hazards}


ENDED = {
    "linear biases of attention": (f"{COLUMNS} b = Mul (column, slope) s = Sub (f, b) y = Softmax (s)", "s"),
    "a gate": (f"{COLUMNS} p = Add (f, column) y = Sigmoid (p)", "p"),
    "a product": (f"{COLUMNS} u = Div (column, width) p = Add (f, u) m = MatMul (mixing, p) y = Neg (m)", "p"),
    "a scale": ("r = Sqrt (width) s = Div (f, r) y = Softmax (s)", "s"),
    "a mean": ("t = ReduceMax (f) y = Div (t, width)", "t"),
}


@pytest.mark.parametrize("name", ENDED)
def test_what_needs_no_exact_integers_may_be_low(name: str) -> None:
    body, node = ENDED[name]
    assert node in low_nodes(grid(body), level="O3")
