"""Forms that TensorRT's builder refuses, though all their types are taken and all their Casts look harmless."""

from typing import Any

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, TensorProto

import onnxamp
from onnxamp import convert_model
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._runtime.building import build_engine

SHARED = """(int8[4,8] q) => (float[4,4] y, float[4,4] z)
    <float s = {0.1}, int8 o = {0}, int8[8,4] v = {NUMBERS}, int8[8,4] w = {NUMBERS}, float[4] k = {1, 2, 3, 4}> {
    a = DequantizeLinear (q, s, o)
    AGAIN
    b = DequantizeLinear (v, s, o)
    c = DequantizeLinear (w, s, o)
    [one] m = MatMul (a, b)
    y = Add (m, k)
    [other] z = Gemm (d, c, k)
}""".replace("NUMBERS", ",".join(["3"] * 32))
"""Two products of one dequantized factor."""
AGAIN = {
    "itself": "d = Identity (a)",
    "twice": "d = DequantizeLinear (q, s, o)",
    "quantized": "e = QuantizeLinear (a, s, o) d = DequantizeLinear (e, s, o)",
    "apart": "e = Abs (a) f = QuantizeLinear (e, s, o) d = DequantizeLinear (f, s, o)",
}
LOOP = """(float[2,3] x, float[3,4] a) => (float[2,3] y, float[3,3,4] z) <float k = {0.25}> {
    m = Constant <value = int64 {3}> ()
    g = Constant <value = bool {1}> ()
    [low] v = Sigmoid (a)
    y, z = Loop (m, g, x) <body = b (int64 i, bool c, float[2,3] p) => (bool d, float[2,3] q, float[3,4] s) {
        d = Identity (c)
        q = Relu (p)
        FORM
    }>
}"""
PASSING = {
    "n = Greater (v, k) [kept] s = Where (n, v, v)": True,
    "n = Greater (v, k) [kept] s = Where (n, v, k)": False,
    "[kept] s = Max (v)": True,
    "[kept] s = Max (v, k)": False,
    "[kept] s = Concat <axis = 0> (v)": True,
    '[kept] s = Einsum <equation = "ij->ij"> (v)': True,
    "[kept] s = Neg (v)": False,
}
"""What a loop stacks up, and whether the builder sees through it."""
GROUPED = """(float[N,C,H,W] open) => (float[N,C,H,W] y) <float[4,1,3,3] w = {NUMBERS}> {
    [conv] y = Conv <group = 4, pads = [1,1,1,1]> (open, w)
}""".replace("NUMBERS", ",".join(["0.5"] * 36))
SCALED = """(int8[4,8] q) => (int8[4,8] y) <float s = {0.1}, float t = {0.2}, int8 o = {0}> {
    [first] a = DequantizeLinear (q, s, o)
    [second] y = QuantizeLinear (a, t, o)
}"""
POOLED = """(float[2,4,8] x, float[3,2,4,8] h) => (float[3,2,4,8] u, float[3,2,2,4] y, float[3,2,2,4] z) {
    m = Constant <value = int64 {3}> ()
    g = Constant <value = bool {1}> ()
    a, v = Loop (m, g, x) <body = b (int64 i, bool c, float[2,4,8] p) => (bool d, float[2,4,8] q, float[2,4,8] s) {
        d = Identity (c)
        q = Relu (p)
        s = Identity (p)
    }>
    u = Loop (m, g, STATE) <body = e (int64 j, bool f, float[3,2,4,8] r) => (bool k, float[3,2,4,8] t) {
        k = Identity (f)
        t = Relu (r)
    }>
    [one] y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (v)
    [other] z = AveragePool <kernel_shape = [2,2], strides = [2,2]> (OTHER)
}"""
LONELY = """() => (float[2,1,4,4] y, KIND[2,4,8] z)
    <float16[2,4,8] c = {LOW}, float[1,12,8] w = {INPUT}, float[1,12,4] r = {RECURRENT}> {
    [raise] v = Cast <to = 1> (c)
    [gru] y = GRU <hidden_size = 4> (v, w, r)
    READ
}"""
for word, number, count in (("LOW", "15360", 64), ("INPUT", "0.1", 96), ("RECURRENT", "0.1", 48)):
    LONELY = LONELY.replace(word, ",".join([number] * count))
"""A GRU that reads a Cast that the model brings along, and shares."""
READS = {
    "arithmetic": ("float", "[shares] z = Neg (v)"),
    "a Cast": ("float16", "[shares] n = Cast <to = 10> (v) z = Neg (n)"),
}


CHOICE = """(bool b, int8[2,4] q, float[2,4] x) => (float[2,4] y) <float s = {0.1}, int8 o = {0}> {
    [raise] a = DequantizeLinear (q, s, o)
    [moved] h = Transpose (a)
    c = Transpose (h)
    [choice] y = If (b) <
        then_branch = t () => (float[2,4] u) { u = Identity (c) },
        else_branch = e () => (float[2,4] v) { v = OTHER }
    >
}"""
CAST = LOOP.replace("FORM", "[stacked] s = Cast <to = 1> (v)")
"""A loop that stacks up what a Cast of float32 makes, which a conversion may make one from low precision."""


def types(model: ModelProto) -> dict[str, str | None]:
    """The type of the first input of each node that has a name, bodies included."""
    graph = Graph.of(model)
    return {node.proto.name: graph.types[node.inputs[0]] for node in graph.nodes if node.proto.name}


def made(model: ModelProto) -> dict[str, str | None]:
    """The type of the first output of each node that has a name."""
    graph = Graph.of(model)
    return {node.proto.name: graph.types[node.outputs[0]] for node in graph.nodes if node.proto.name}


def stored(model: ModelProto) -> dict[str, int]:
    """The types of floating-point weights."""
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer if tensor.data_type in kinds}


def refused(model: ModelProto) -> list[str]:
    """What the builder says against a model, which has four channels where it leaves them open."""
    feeds = {entry.name: np.zeros((1, 4, 8, 8), np.float32) for entry in model.graph.input if entry.name == "open"}
    return [found.text for found in build_engine(Model.of(model), feeds).refusals]


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("target", ["tensorrt", "any"])
@pytest.mark.parametrize("kept", ["one", "other"])
def test_products_that_share_a_factor_have_one_precision(again: str, target: Any, kept: str) -> None:
    model = parse(SHARED.replace("AGAIN", AGAIN[again]), 22)
    kinds = types(convert_model(model, "O3", target=target, keep_nodes=[kept], hazards=False))
    assert kinds[kept] == "tensor(float)"
    assert (kinds["one"] == kinds["other"]) == (target == "tensorrt" and again != "apart")


@pytest.mark.parametrize("form", PASSING)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loop_stacks_up_no_cast_that_is_only_passed_on(form: str, dtype: str) -> None:
    model = parse(LOOP.replace("FORM", form), 22)
    kinds = made(convert_model(model, "O3", dtype=dtype, target="tensorrt", keep_nodes=["kept"]))
    assert kinds["kept"] == "tensor(float)"
    assert kinds["low"] == ("tensor(float)" if PASSING[form] else f"tensor({dtype})")


@pytest.mark.parametrize(("text", "kept"), [(GROUPED, "conv"), (SCALED, "second")])
@pytest.mark.parametrize("target", ["tensorrt", "any"])
def test_what_must_be_a_constant_is_stored_as_it_is_read(text: str, kept: str, target: Any) -> None:
    result = convert_model(parse(text, 22), "O3", target=target, keep_nodes=[kept], low_weights=".*", hazards=False)
    (node,) = [node for node in result.graph.node if node.name == kept]
    assert (node.input[1] in stored(result)) == (target == "tensorrt")
    weight = node.input[1] if target == "tensorrt" else {"conv": "w", "second": "t"}[kept]
    assert stored(result)[weight] == (TensorProto.FLOAT if target == "tensorrt" else TensorProto.FLOAT16)


@pytest.mark.parametrize(("state", "other", "high"), [("v", "v", True), ("v", "h", False), ("h", "v", False)])
def test_what_goes_from_loop_to_loop_is_pooled_in_float32_or_once(state: str, other: str, high: bool) -> None:
    model = parse(POOLED.replace("STATE", state).replace("OTHER", other), 22)
    kinds = types(convert_model(model, "O3", dtype="bfloat16", target="tensorrt", keep_io_types=False))
    assert {kinds["one"], kinds["other"]} == {"tensor(float)" if high else "tensor(bfloat16)"}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("target", ["tensorrt", "any"])
def test_a_gru_reads_no_cast_of_a_constant_alone(read: str, target: Any) -> None:
    kind, text = READS[read]
    model = parse(LONELY.replace("KIND", kind).replace("READ", text), 22)
    result = convert_model(model, "O3", target=target, keep_nodes=["gru"])
    raised = sum(node.input[0] == "v" for node in result.graph.node)
    assert raised == (2 if target == "tensorrt" or read == "arithmetic" else 1)


@pytest.mark.parametrize(("other", "high"), [("Identity (c)", True), ("Identity (x)", False)])
def test_an_if_with_one_choice_passes_on_no_cast_of_what_is_dequantized(other: str, high: bool) -> None:
    model = parse(CHOICE.replace("OTHER", other), 22)
    result = convert_model(model, "O3", target="tensorrt", keep_nodes=["raise"], keep_io_types=False, hazards=False)
    assert made(result)["choice"] == ("tensor(float)" if high else "tensor(float16)")


def test_a_cast_of_float32_that_a_loop_stacks_up_stays_one() -> None:
    kinds = types(convert_model(parse(CAST, 22), "O3", target="tensorrt", keep_nodes=["y"]))
    assert kinds["stacked"] == "tensor(float)"


TWO_TYPES = (
    SHARED.replace("AGAIN", AGAIN["itself"])
    .replace("m = MatMul (a, b)", "f = Cast <to = 10> (a) g = Cast <to = 10> (b) m = MatMul (f, g)")
    .replace("y = Add (m, k)", "l = Cast <to = 10> (k) n = Add (m, l) y = Cast <to = 1> (n)")
)
"""What other tools may write: one product in float16, and one in float32."""


def test_products_of_two_types_are_found() -> None:
    (found,) = onnxamp.audit_model(parse(TWO_TYPES, 22), "tensorrt").findings
    assert (found.severity, found.kind, found.node) == ("warning", "kernel", "other")


@pytest.mark.tensorrt
def test_the_builder_still_refuses_products_of_two_types() -> None:
    assert refused(parse(TWO_TYPES, 22))


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.tensorrt
@pytest.mark.parametrize(
    ("text", "options"),
    [
        *((SHARED.replace("AGAIN", text), {"keep_nodes": ["one"]}) for text in AGAIN.values()),
        *((LOOP.replace("FORM", text), {"keep_nodes": ["kept"]}) for text in PASSING),
        (CAST, {"keep_nodes": ["y"]}),
        (CHOICE.replace("OTHER", "Identity (c)"), {"keep_nodes": ["raise"], "keep_io_types": False}),
        (GROUPED, {"keep_nodes": ["conv"], "low_weights": ".*"}),
        (SCALED, {"keep_nodes": ["second"], "low_weights": ".*"}),
        (POOLED.replace("STATE", "v").replace("OTHER", "v"), {"keep_io_types": False}),
        *(
            (LONELY.replace("KIND", kind).replace("READ", text), {"keep_nodes": ["gru"]})
            for kind, text in READS.values()
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_it_builds_in_float32_it_builds_converted(text: str, options: dict[str, Any], dtype: str) -> None:
    model = parse(text, 22)
    assert not refused(model)
    assert not refused(convert_model(model, "O3", dtype=dtype, target="tensorrt", hazards=False, **options))
