"""Converting twice changes nothing: whatever the graph, the level, the types, the target and the lists are.

``ONNXAMP_EXAMPLES=20000 pytest tests/convert/test_twice.py -m slow`` looks for longer than the suite has time for.
"""

import os
import re
from random import Random
from typing import Any

import onnx
import pytest
from graphs.case import add_weights, parse
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import ModelProto
from properties import frozen, graphs, op_key
from strategies import random_model

import onnxamp
from onnxamp._base.errors import ArgumentError, OpsetError

EXAMPLES = int(os.environ.get("ONNXAMP_EXAMPLES", "400"))
"""Of the slow test."""

FOCUS = (
    "", "BatchNormalization", "Cast", "Clip", "Concat", "Conv", "Div", "Dropout", "Gather", "Identity", "If",
    "LayerNormalization", "Loop", "MaxPool", "Pow", "ReduceMean", "Reshape", "Resize", "Scan", "Slice", "Softmax",
    "Split", "Sqrt", "Transpose", "Where",
)  # fmt: skip
"""Ops of which a random model surely has one; none for the first."""

TARGETS = (
    "cuda", "cpu", "any", "webgpu", "openvino", "tensorrt", "float16-only", "cuda@1.20", "cuda@1.22", "cpu@1.24",
)  # fmt: skip


def examples(count: int) -> settings:
    """So many models, the same ones every time."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=slow)


def random_options(rng: Random, model: ModelProto) -> dict[str, Any]:
    """Options that fit the model: its op types in the lists, its nodes and outputs by name."""
    nodes = [node for graph in graphs(model) for node in graph.node]
    keys = sorted({op_key(node) for node in nodes})
    names = sorted({name for node in nodes for name in (node.name, *node.output) if name})
    target = rng.choice(TARGETS)
    options: dict[str, Any] = {
        "level": rng.choice(("O1", "O2", "O3")),
        "dtype": "float16" if target == "float16-only" else rng.choice(("float16", "bfloat16")),
        "target": target,
        "keep_io_types": rng.random() < 0.7,
    }
    drawn = rng.sample(keys, min(3, len(keys)))
    extra = {
        "black_list": drawn[:1],
        "white_list": drawn[1:],
        "keep_nodes": [rng.choice(names)],
        "force_low": [rng.choice(names)],
        "strict": options["level"] == "O2",
        "hazards": False,
        "fold": rng.random() < 0.5,
        "opset": "keep",
        "split_k": False,
        "freeze_defaults": rng.random() < 0.5,
        "keep_functions": True,
        "init_max": 1.5,
        "low_weights": [rng.choice((".*", *map(re.escape, names)))],
    }
    return options | {name: value for name, value in extra.items() if rng.random() < 0.2}


def complaint(model: ModelProto, options: dict[str, Any]) -> str | None:
    """What a second conversion changes; None if it changes nothing, or if there is no first one."""
    try:
        once = onnxamp.convert_model(model, **options)
    except (ArgumentError, OpsetError):  # options that contradict each other, or a model that is too old
        return None
    again = onnxamp.convert_model(once, **options)
    if frozen(again) == frozen(once):
        return None
    return f"{options}:\n{onnx.printer.to_text(once)}\n{onnx.printer.to_text(again)}"


def converts_once(seed: int, op: str, size: int) -> None:
    model = random_model(Random(seed), op, size).model
    assert complaint(model, random_options(Random(seed), model)) is None


@examples(60)
@example(6280, "Scan", 8)
@given(st.integers(0, 2**64 - 1), st.sampled_from(FOCUS), st.sampled_from((2, 4, 8, 12)))
def test_random_models_and_options(seed: int, op: str, size: int) -> None:
    converts_once(seed, op, size)


@pytest.mark.slow
@examples(EXAMPLES)
@given(st.integers(0, 2**64 - 1), st.sampled_from(FOCUS), st.sampled_from((2, 4, 8, 12)))
def test_more_random_models_and_options(seed: int, op: str, size: int) -> None:
    converts_once(seed, op, size)


MODELS = {
    "decomposed norm": """(float[2,8] x) => (float[2,8] y) <float two = {2}, float epsilon = {1e-6}> {
        h = MatMul (x, w)  s = Pow (h, two)  m = ReduceMean <axes = [-1]> (s)  e = Add (m, epsilon)  r = Sqrt (e)
        n = Div (h, r)  y = MatMul (n, w) }""",
    "decomposed norm without epsilon": """(float[2,8] x) => (float[2,8] y) <float two = {2}> {
        h = MatMul (x, w)  s = Pow (h, two)  m = ReduceMean <axes = [-1]> (s)  r = Sqrt (m)  n = Div (h, r)
        y = MatMul (n, w) }""",
    "dropout": """(float[2,8] x) => (float[2,8] y) <float ratio = {0.5}> {
        h = MatMul (x, w)  y = Dropout (h, ratio) }""",
    "clip": """(float[2,8] x) => (float[2,8] y) <float least = {0}, float most = {6}> {
        h = MatMul (x, w)  y = Clip (h, least, most) }""",
    "look-up": """(int64[2] i) => (float[2,4] y) <int64[1] from = {0}, int64[1] to = {4}, int64[1] axis = {1}> {
        h = Gather (w, i)  y = Slice (h, from, to, axis) }""",
    "look-up and dropout": """(int64[2] i) => (float[2,8] y) <float ratio = {0.5}> {
        h = Gather (w, i)  y = Dropout (h, ratio) }""",
    "convolution beside dropout": """(float[1,2,5,5] x) => (float[1,3,4,4] y, float[1,2,5,5] z)
        <float ratio = {0.5}> {
        h = Conv (x, kernel)  y = Relu (h)  z = Dropout (x, ratio) }""",
    "an output by name": """(float[2,8] x) => (float[2,8] y, float[2,8] z) {
        y = MatMul (x, w)  z = MatMul (y, w) }""",
    "low weights": """(float[2,8] x) => (float[2,8] y, float z) <float[8] small = {1.125, 1.5, 2, 3, 4, 5, 6, 7}> {
        h = MatMul (x, w)  c = Concat <axis = 0> (small)  z = ReduceMax <keepdims = 0> (c)
        y = Add (h, c) }""",
    "a low constant that becomes integers": """(float[2,8] x) => (float[2,8] y, int64[2] z)
        <float[2] small = {1.125, 1.5}> { y = MatMul (x, w)  z = Cast <to = 7> (small) }""",
    "an input that becomes integers": """(float[2,8] x) => (float[2,8] y, int32[2,8] z) {
        y = MatMul (x, w)  z = Cast <to = 6> (x) }""",
    "large weights that are moved": """(float[2,8] x) => (float[2,8] y) <float[8] small = {9, 1.5, 2, 3, 4, 5, 6, 7}> {
        c = Identity (small)  h = MatMul (x, w)  y = Add (h, c) }""",
    "a function whose body depends on the opset": """(int64 n) => (float[2,3] y, float z, float[k] b)
        <float[2,3] small = {1.125, 1.625, 0.875, 0.875, 2, 2}> {
        s = Softsign (small)  y = Trilu (small)  r = ReduceMax <keepdims = 0> (s)
        z = ThresholdedRelu <alpha = 0.25> (r)  b = BlackmanWindow (n) }""",
    "a renamed value whose shape is only declared": """
        (float x, float[3] v, int64[k] n) => (float[?,?,?,?] y, float[3] z) {
        y = Expand (x, n)  d = DepthToSpace <blocksize = 2> (y)  r = ReduceMax <keepdims = 0> (d)
        e = Mul (v, r)  z = Softmax (e) }""",
    "statistics that are moved in float32": """(float[2,3] x, float[3] v) => (float[2,3] y)
        <int64[2] same = {2, 3}, int64[1] three = {3}> {
        r = Reshape (x, same)  m = ReduceMax <keepdims = 0> (r)  e = Expand (m, three)
        y = BatchNormalization (r, v, e, e, v) }""",
    "an idle Cast of an input": """(float[2,8] x) => (float[2,8] y) { y = Cast <to = 1> (x) }""",
    "an idle Cast": """(float[2,8] x) => (float[2,8] y, float[2,8] z) {
        y = Cast <to = 1> (x)  h = MatMul (y, w)  z = Softmax (h) }""",
}

WEIGHTS = {"w": (8, 8), "kernel": (3, 2, 2, 2)}
WISHES: dict[str, dict[str, Any]] = {
    "an output by name": {"keep_nodes": ["y"]},
    "statistics that are moved in float32": {"keep_nodes": ["e"]},
    "dropout": {"white_list": ["Constant", "Cast"]},
    "an idle Cast of an input": {"white_list": ["Cast"]},
    "low weights": {"low_weights": ".*", "init_max": 1.5},
    "a low constant that becomes integers": {"low_weights": "small"},
    "large weights that are moved": {"low_weights": ".*", "init_max": 1.5},
}
"""Options besides the level, the types and the target."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_small_models(name: str) -> None:
    """At every level, in both types, and on every target."""
    model = parse(MODELS[name], opset=17 if "norm" in name else 21, ir=10)
    read = {name for node in model.graph.node for name in node.input}
    add_weights(model, {key: shape for key, shape in WEIGHTS.items() if key in read})
    for level in ("O1", "O2", "O3"):
        for dtype in ("float16", "bfloat16"):
            for target in TARGETS:
                for keep in (True, False):
                    if target == "float16-only" and dtype == "bfloat16":
                        continue
                    options = {"level": level, "dtype": dtype, "target": target, "keep_io_types": keep}
                    assert complaint(model, options | WISHES.get(name, {})) is None
