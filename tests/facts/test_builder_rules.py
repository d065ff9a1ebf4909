"""What TensorRT's builder refuses although it takes all types of all nodes: results hold none of it."""

from typing import Any

import pytest
from graphs.case import parse
from onnx import ModelProto, TensorProto

import onnxamp
from onnxamp import convert_model
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._runtime.building import build_engine

DROPOUT = """() => (float[3] y, bool[3] m) {
    k = Constant <value = FORM> ()
    h = Cast <to = 1> (k)
    y, m = Dropout (h)
}"""
SCATTER = """(float[1,2,4,8] cache) => (float[1,2,4,8] present) <float16[1,2,1,8] u = {NUMBERS}> {
    h = Cast <to = 1> (u)
    present = TensorScatter (cache, h)
}""".replace("NUMBERS", ",".join(["15360"] * 16))
PRODUCT = """(float[2,4,8] x) => (float[2,4,8] y)
    <float s = {0.1}, int8 z = {0}, int8[8,8] w = {NUMBERS}, float[8] t = {SCALES}> {
    q = QuantizeLinear (x, s, z)
    [left] a = DequantizeLinear (q, s, z)
    [right] b = DequantizeLinear <axis = 1> (w, t)
    BETWEEN
    y = MatMul (c, b)
}""".replace("NUMBERS", ",".join(map(str, range(64)))).replace("SCALES", ",".join(["0.1"] * 8))

DIVIDED = """(float[1,2,5,5] x, int64[3] n, bool c) => (float[1,2,5,5] y, float[1,2,5,5] z, int64[3] m) {
    BRANCH
    [apart] y = OP (x)
    [kept] z = Relu (x)
}"""
BRANCHES = {
    "If": """m = If (c) <then_branch = a () => (int64[3] i) { i = Identity (n) },
                        else_branch = b () => (int64[3] j) { j = Identity (n) }>""",
    "": "m = Identity (n)",
}
COMPUTED = """(float[1,4,8,8] x, float[4,4,3,3] w, float[4] g, bool c) => (float[1,4,8,8] y, float[1,4,8,8] z)
    <float[4] k = {1, 2, 3, 4}> {
    v = Sqrt (x)
    y = If (c) <then_branch = a () => (float[1,4,8,8] p) { p = Identity (v) },
                else_branch = b () => (float[1,4,8,8] q) { q = Neg (v) }>
    h = Cast <to = 10> (v)
    j = Cast <to = 1> (h)
    [conv] r = Conv <pads = [1,1,1,1]> (j, w)
    s = Abs (g)
    z = BatchNormalization (r, s, k, k, k)
}"""
"""A normalization whose scale is computed, behind a convolution that reads what the If reads, but rounded."""
UNREAD = """(float[2,4] w, float[2,4] x, bool c, bool d) => (float[2,4] y) {
    [outer] y = If (d) <
        then_branch = a () => (float[2,4] p) { [p] p = Identity (w) },
        else_branch = b () => (float[2,4] q) {
            [inner] e, q = If (c) <
                then_branch = f () => (float[2,4] r, float[2,4] s) { [r] r = Identity (w) [s] s = Identity (w) },
                else_branch = g () => (float[2,4] t, float[2,4] u) { [t] t = Identity (w) [u] u = Identity (w) }
            >
        }
    >
}"""
"""The inner If has an output that nobody reads."""


def maker(model: ModelProto, op: str, port: int) -> str:
    """The op that makes an input of the only node of an op; "" for constants and inputs of the model."""
    made = {name: node.op_type for node in model.graph.node for name in node.output}
    (node,) = [node for node in model.graph.node if node.op_type == op]
    found = made.get(node.input[port], "")
    return "" if found == "Constant" else found


def read_types(model: ModelProto) -> dict[str, str | None]:
    """The type of the first input of each node that has a name, bodies included."""
    graph = Graph.of(model)
    return {node.proto.name: graph.types[node.inputs[0]] for node in graph.nodes if node.proto.name}


def scale_type(model: ModelProto, name: str) -> int:
    """The type of the scale that a node reads."""
    (node,) = [node for node in model.graph.node if node.name == name]
    (scale,) = [tensor for tensor in model.graph.initializer if tensor.name == node.input[1]]
    return scale.data_type


def refused(model: ModelProto) -> list[str]:
    """What the builder says against a model."""
    return [found.text for found in build_engine(Model.of(model)).refusals]


@pytest.mark.parametrize("form", ["float16[3] {15360, 16384, 16896}", "float[3] {1, 2, 3}", "double[3] {1, 2, 3}"])
def test_a_dropout_reads_no_constant(form: str) -> None:
    model = parse(DROPOUT.replace("FORM", form), 22)
    kept, other = (maker(convert_model(model, "O3", target=target), "Dropout", 0) for target in ("tensorrt", "any"))
    assert kept == "Cast"
    assert other == ("" if form.startswith("float[") else "Cast"), "other targets take a float32 constant itself"


def test_a_scatter_reads_no_constant() -> None:
    model = parse(SCATTER, 24)
    made = {
        target: maker(convert_model(model, "O3", target=target, keep_io_types=False), "TensorScatter", 1)
        for target in ("tensorrt", "any")
    }
    assert made == {"tensorrt": "Cast", "any": ""}


@pytest.mark.parametrize("between", ["c = Identity (a)", "c = Neg (a)", "d = Reshape (a, n) c = Reciprocal (d)"])
@pytest.mark.parametrize("low", ["left", "right"])
def test_the_scales_of_a_product_have_one_type(low: str, between: str) -> None:
    text = PRODUCT.replace("BETWEEN", f"n = Constant <value = int64[3] {{2,4,8}}> () {between}")
    kinds = {
        target: [
            scale_type(convert_model(parse(text, 22), "O3", target=target, lists="default", force_low=[low]), name)
            for name in ("left", "right")
        ]
        for target in ("tensorrt", "any")
    }
    assert kinds["tensorrt"] == [TensorProto.FLOAT16] * 2
    assert len(set(kinds["any"])) == 2, "hazards keep the other one in float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["LRN <size = 3>", "LpPool <kernel_shape = [1, 1]>", "Softplus"])
@pytest.mark.parametrize("beside", BRANCHES)
def test_an_input_is_read_in_one_precision_beside_an_if(dtype: str, op: str, beside: str) -> None:
    text = DIVIDED.replace("OP", op).replace("BRANCH", BRANCHES[beside])
    made = convert_model(
        parse(text, 22), "O3", dtype=dtype, target="tensorrt", hazards=False, keep_io_types=False, keep_nodes=["kept"]
    )
    apart = read_types(made)["apart"]
    high = (op != "Softplus" and beside == "If") or (op.startswith("LpPool") and dtype == "bfloat16")
    assert read_types(made)["kept"] == "tensor(float)"
    assert apart == ("tensor(float)" if high else f"tensor({dtype})")


def test_a_cast_of_the_model_counts_beside_an_if() -> None:
    text = """(float16[1,2,5,5] x, int64[3] n, bool c) => (float[1,2,5,5] y, float[1,2,5,5] z, int64[3] m) {
        h = Cast <to = 1> (x)
        BRANCH
        [apart] y = LRN <size = 3> (h)
        [kept] z = Relu (h)
    }""".replace("BRANCH", BRANCHES["If"])
    for kept, kind in ((["kept"], "tensor(float)"), ([], "tensor(float16)")):
        made = convert_model(parse(text, 22), "O3", target="tensorrt", hazards=False, keep_nodes=kept)
        assert read_types(made)["apart"] == kind


@pytest.mark.parametrize(
    ("constant", "beside", "high"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_computed_scale_keeps_a_normalization_float32_beside_an_if(constant: bool, beside: bool, high: bool) -> None:
    text = COMPUTED.replace("(r, s,", "(r, k,") if constant else COMPUTED
    text = text if beside else text[: text.index("y = If")] + "y = Neg (v)" + text[text.index("h = Cast") - 5 :]
    made = convert_model(parse(text, 22), "O3", target="tensorrt", hazards=False, fold=False)
    (normalization,) = [node for node in made.graph.node if node.op_type == "BatchNormalization"]
    graph = Graph.of(made)
    kind = graph.types[graph.visible(normalization.input[0], 0)]
    assert kind == ("tensor(float)" if high else "tensor(float16)")


@pytest.mark.parametrize("keep", [["r", "t"], ["s", "u", "p"]])
def test_what_nobody_reads_comes_from_no_cast_from_outside(keep: list[str]) -> None:
    made = {
        target: convert_model(parse(UNREAD, 22), "O3", target=target, keep_io_types=False, keep_nodes=keep)
        for target in ("tensorrt", "any")
    }
    read = {
        target: {node.proto.name: node.proto.input[0] for node in Graph.of(model).nodes}
        for target, model in made.items()
    }
    assert read["tensorrt"]["r"] == read["tensorrt"]["t"] == "w"
    assert read["any"]["r"] == ("w_fp32" if keep == ["r", "t"] else "w")


@pytest.mark.parametrize(("io", "low"), [(False, True), (["cache"], False), (["present"], False), (True, False)])
def test_a_cache_and_what_it_becomes_have_one_type(io: bool | list[str], low: bool) -> None:
    text = "(float[1,2,4,8] cache, float[1,2,1,8] u) => (float[1,2,4,8] present) { present = TensorScatter (cache, u) }"
    made = convert_model(parse(text, 24), "O3", target="tensorrt", keep_io_types=io)
    kinds = {info.name: info.type.tensor_type.elem_type for info in (*made.graph.input, *made.graph.output)}
    assert kinds["cache"] == kinds["present"] == (TensorProto.FLOAT16 if low else TensorProto.FLOAT)


CARRIED = """(float[2,4,8] x, float[2,4,8] h, float[1,4,8] w, float[1,4,4] r) => (float[2,1,4,4] y) {
    m = Constant <value = int64 {3}> ()
    k = Constant <value = bool {1}> ()
    z = Loop (m, k, h) <body = a (int64 i, bool c, float[2,4,8] p) => (bool d, float[2,4,8] q) {
        d = Identity (c)
        [moved] q = Identity (x)
    }>
    [rnn] y = RNN <hidden_size = 4> (z, w, r)
}"""
"""The last state of the loop is what its body reads from outside."""


@pytest.mark.parametrize("target", ["tensorrt", "any"])
def test_an_rnn_reads_no_cast_through_a_loop(target: Any) -> None:
    made = convert_model(parse(CARRIED, 22), "O3", target=target, keep_io_types=False, keep_nodes=["rnn"])
    assert read_types(made)["rnn"] == "tensor(float)"
    assert read_types(made)["moved"] == ("tensor(float)" if target == "tensorrt" else "tensor(float16)")
    assert (made.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT) == (target == "tensorrt")


INTEGERS = """(int64[4,8] x) => (float[4,4] y) <int8[8,4] w = {NUMBERS}, float s = {0.05}, int8 o = {0}> {
    z = Cast <to = 1> (x)
    d = DequantizeLinear (w, s, o)
    [product] y = MatMul (z, d)
}""".replace("NUMBERS", ",".join(["3"] * 32))


@pytest.mark.parametrize("target", ["tensorrt", "any"])
def test_a_product_of_integers_and_dequantized_numbers_is_float32(target: Any) -> None:
    made = read_types(convert_model(parse(INTEGERS, 22), "O3", target=target, hazards=False))
    assert made["product"] == ("tensor(float)" if target == "tensorrt" else "tensor(float16)")


ONE_CHANNEL = """(float[1,1,8,8] x, float[1,1,3,3] w) => (float[1,1,8,8] y) <float[1] k = {0.5}, float[1] b = {0.5}> {
    [conv] c = Conv <pads = [1,1,1,1]> (x, w, b)
    [norm] y = BatchNormalization (c, k, k, k, k)
}"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_float32_normalization_reads_no_casts_of_low_weights(kept: bool) -> None:
    model, keep = parse(ONE_CHANNEL, 22), ["conv", "norm"] if kept else []
    made = convert_model(model, "O3", target="tensorrt", keep_nodes=keep, low_weights=".*", fold=False)
    kinds = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    assert kinds == dict.fromkeys("kb", TensorProto.FLOAT if kept else TensorProto.FLOAT16)


REFUSED = {
    "RNN": (CARRIED.replace("(float[2,4,8] x", "(float16[2,4,8] x").replace("Identity (x)", "Cast <to = 1> (x)"),
            "warning"),
    "Dropout": ("() => (float[3] y, bool[3] m) <float[3] k = {1, 2, 3}> { y, m = Dropout (k) }", "error"),
    "TensorScatter": (SCATTER.replace("h = Cast <to = 1> (u)", "").replace("(cache, h)", "(cache, u)")
                      .replace("float[", "float16["), "error"),
    "MatMul": (PRODUCT.replace("BETWEEN", "c = Cast <to = 10> (a)").replace("float[8] t", "float16[8] t")
               .replace("0.1,", "11878,").replace(",0.1", ",11878").replace("=> (float[", "=> (float16["), "warning"),
}  # fmt: skip
"""What other tools may write, by the op at fault, and the severity of what the audit finds."""


@pytest.mark.parametrize("op", REFUSED)
def test_such_models_are_found(op: str) -> None:
    text, severity = REFUSED[op]
    (found,) = [finding for finding in onnxamp.audit_model(parse(text, 24), "tensorrt").findings if finding.op == op]
    assert (found.severity, found.kind) == (severity, "kernel")
    assert not [found for found in onnxamp.audit_model(parse(text, 24), "any").findings if found.op == op]


@pytest.mark.tensorrt
@pytest.mark.parametrize("op", REFUSED)
def test_the_builder_still_refuses_them(op: str) -> None:
    assert refused(parse(REFUSED[op][0], 24))


@pytest.mark.mostly_slow(fast=5)
@pytest.mark.tensorrt
@pytest.mark.parametrize(
    ("text", "options"),
    [
        (DROPOUT.replace("FORM", "float16[3] {15360, 16384, 16896}"), {}),
        (DROPOUT.replace("FORM", "float[3] {1, 2, 3}"), {}),
        (SCATTER, {"keep_io_types": False}),
        (INTEGERS, {"hazards": False}),
        (ONE_CHANNEL, {"keep_nodes": ["conv", "norm"], "low_weights": ".*", "fold": False}),
        (CARRIED, {"keep_io_types": False, "keep_nodes": ["rnn"]}),
        (PRODUCT.replace("BETWEEN", "c = Identity (a)"), {"force_low": ["left"]}),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_it_builds_in_float32_it_builds_converted(text: str, options: dict[str, Any], dtype: str) -> None:
    model = parse(text, 24)
    assert not refused(model)
    assert not refused(convert_model(model, "O3", dtype=dtype, target="tensorrt", **options))
