"""Casts that TensorRT's builder refuses although it takes the types on both sides of them: none is written there."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, NodeProto, TensorProto

import onnxamp
from onnxamp import convert_model
from onnxamp._facts.ops import attribute
from onnxamp._model.model import Model
from onnxamp._runtime.building import build_engine

LENGTHS = """(float[3,2,4] a, float[1,20,4] w, float[1,20,5] r, int32[2] n) => (float[3,1,2,5] y) {
    b = Relu (a)
    x = MOVED (b)
    y = LSTM <hidden_size = 5> (x, w, r, "", n)
}"""
"""An LSTM that stays in float32, for the sake of its lengths, behind what need not."""
STACKED = """(float[2,3] x, float[3,3] w, float[3] v) => (float[2,3] y, float[3,3] z) {
    m = Constant <value = int64 {3}> ()
    k = Constant <value = bool {1}> ()
    u = MatMul (w, v)
    y, z = Loop (m, k, x) <body = a (int64 i, bool c, float[2,3] p) => (bool d, float[2,3] q, float[3] s) {
        d = Identity (c)
        q = Relu (p)
        h = Erf (u)
        s = Identity (h)
    }>
}"""
"""A loop that stacks up what is the same in each iteration."""
BIASED = """(float[1,4,8,8] x, float[4,4,3,3] w, float[4] b) => (float[1,4,6,6] y) {
    h = Relu (x)
    c = Neg (b)
    [conv] r = Conv (h, w, c)
    y = Relu (r)
}"""


def sources(model: ModelProto, op: str, port: int) -> list[NodeProto]:
    """What makes an input of the only node of an op, through data movement, the Cast before that included."""
    made = {name: node for node in model.graph.node for name in node.output}
    (node,) = [node for node in model.graph.node if node.op_type == op]
    found, name = list[NodeProto](), node.input[port]
    while name in made and (not found or found[-1].op_type in ("Transpose", "Identity", "Cast")):
        found.append(made[name])
        name = made[name].input[0]
    return found


@pytest.mark.parametrize("moved", ["Identity", "Transpose <perm = [0, 1, 2]>"])
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_lstm_reads_no_cast(moved: str, level: str, dtype: str) -> None:
    model = parse(LENGTHS.replace("MOVED", moved), 22)
    straight = convert_model(model, level, dtype=dtype, target="tensorrt")
    assert [node.op_type for node in sources(straight, "LSTM", 0)][-1] == "Relu"
    assert "Cast" not in [node.op_type for node in sources(straight, "LSTM", 0)]
    if level == "O3":
        other = convert_model(model, level, dtype=dtype, target="any", keep_nodes=["y"])
        assert "Cast" in [node.op_type for node in sources(other, "LSTM", 0)], "other targets take a Cast there"


def test_an_input_of_the_model_stays_float32_where_no_cast_may_follow() -> None:
    model = parse(LENGTHS.replace("b = Relu (a)", "b = Identity (a)").replace("MOVED", "Identity"), 22)
    types = {
        target: convert_model(model, "O3", target=target, keep_nodes=["y"], keep_io_types=False).graph.input[0]
        for target in ("tensorrt", "any")
    }
    elem = {target: info.type.tensor_type.elem_type for target, info in types.items()}
    assert elem == {"tensorrt": TensorProto.FLOAT, "any": TensorProto.FLOAT16}


def stacked_cast(model: ModelProto) -> bool:
    """Whether the loop stacks up a Cast."""
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    body = loop.attribute[0].g
    made = {name: node for node in body.node for name in node.output}
    node = made[body.output[2].name]
    while node.op_type == "Identity" and node.input[0] in made:
        node = made[node.input[0]]
    return node.op_type == "Cast"


def test_an_input_that_is_an_output_keeps_one_type() -> None:
    text = """(float[3,1,2] x, float[1,3,2] w, float[1,3,1] r) => (float[3,1,2] x, float[3,1,1,1] y) {
        y = GRU <hidden_size = 1> (x, w, r)
    }"""
    made = convert_model(parse(text, 22), "O3", dtype="bfloat16", target="tensorrt", keep_io_types=False)
    kinds = {info.name: info.type.tensor_type.elem_type for info in (*made.graph.input, *made.graph.output)}
    assert kinds["x"] == TensorProto.FLOAT, "the GRU reads no Cast, and is not taken in bfloat16"
    assert kinds["w"] == kinds["y"] == TensorProto.BFLOAT16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loop_stacks_up_no_cast(dtype: str) -> None:
    model = parse(STACKED, 22)
    stacked = {
        target: stacked_cast(convert_model(model, "O3", dtype=dtype, target=target, keep_nodes=["y"]))
        for target in ("tensorrt", "any")
    }
    assert stacked == {"tensorrt": False, "any": True}


def test_a_scan_passes_no_slices_of_a_cast_on() -> None:
    text = """(float[2,3] x, float[3] s, int64[1] n) => (float[3] y) {
        h = Relu (x)
        y = Scan <num_scan_inputs = 1, body = a (float[3] p, float[3] q) => (float[3] r) { r = Reshape (q, n) }> (s, h)
    }"""
    made = {
        target: convert_model(parse(text, 22), "O3", target=target, keep_nodes=["y"]) for target in ("tensorrt", "any")
    }
    read = {target: sources(model, "Scan", 1)[0].op_type for target, model in made.items()}
    assert read == {"tensorrt": "Relu", "any": "Cast"}


DELAYED = """(float[3] a, float[3] b, float[2,3] x) => (float[3] s, float[3] z) {
    y, z = Scan <num_scan_inputs = 1, body = line (float[3] p, float[3] q, float[3] r) => (float[3] o, float[3] w) {
        o = Identity (q)
        w = Add (q, r)
    }> (a, b, x)
    m = MOVED (y)
    s = Relu (m)
}"""
"""A delay line: a state that is what the other one was before."""


@pytest.mark.parametrize("moved", ["Identity", "Transpose <perm = [0]>", "Neg"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_cast_is_behind_a_state_that_the_body_of_a_scan_moves(moved: str, dtype: str) -> None:
    model, mover = parse(DELAYED.replace("MOVED", moved), 22), moved.partition(" ")[0]
    made = {
        target: convert_model(model, "O3", dtype=dtype, target=target, keep_nodes=["y"])
        for target in ("tensorrt", "any")
    }
    read = {
        target: [node.op_type for op in (mover, "Relu") for node in sources(result, op, 0)]
        for target, result in made.items()
    }
    assert "Cast" in read["any"]
    assert [node.op_type for node in sources(made["tensorrt"], mover, 0)] == ["Scan"]
    assert ("Cast" in read["tensorrt"]) == (mover == "Neg"), "arithmetic in between helps"


@pytest.mark.parametrize("mover", ["Identity", "Dropout"])
def test_an_output_of_the_model_that_is_such_a_state_keeps_its_type(mover: str) -> None:
    text = """(float[3] a, float[2,3] x) => (float[3] y) {
        y = Scan <num_scan_inputs = 1, body = b (float[3] p, float[3] q) => (float[3] o) { o = MOVER (q) }> (a, x)
    }""".replace("MOVER", mover)
    kinds = {
        target: convert_model(parse(text, 22), "O3", target=target, keep_nodes=["y"], keep_io_types=False)
        .graph.output[0]
        .type.tensor_type.elem_type
        for target in ("tensorrt", "any")
    }
    assert kinds == {"tensorrt": TensorProto.FLOAT, "any": TensorProto.FLOAT16}


@pytest.mark.parametrize("between", ["Identity", "Relu"])
def test_a_loop_stacks_up_no_low_random_numbers_as_they_are_made(between: str) -> None:
    text = """(float[2,3] x) => (float[2,3] y, float[3,2,3] z) {
        m = Constant <value = int64 {3}> ()
        k = Constant <value = bool {1}> ()
        y, z = Loop (m, k, x) <body = a (int64 i, bool c, float[2,3] p) => (bool d, float[2,3] q, float[2,3] s) {
            d = Identity (c)
            r = RandomNormal <seed = 3.0, shape = [2,3]> ()
            u = BETWEEN (r)
            q = Add (p, u)
            s = RandomUniform <seed = 3.0, shape = [2,3]> ()
        }>
    }""".replace("BETWEEN", between)
    made = convert_model(parse(text, 22), "O3", target="tensorrt")
    (body,) = [node.attribute[0].g for node in made.graph.node if node.op_type == "Loop"]
    kinds = {node.op_type: attribute(node, "dtype") for node in body.node if node.op_type.startswith("Random")}
    assert kinds["RandomNormal"] == TensorProto.FLOAT16
    assert kinds["RandomUniform"] in (None, TensorProto.FLOAT)


@pytest.mark.parametrize("given", ["", "<dtype = 1> "])
def test_random_numbers_like_others_are_not_bfloat16(given: str) -> None:
    text = "(float[2,2] x) => (float[2,2] y) { h = Relu (x) y = RandomNormalLike GIVEN(h) }".replace("GIVEN", given)
    made = convert_model(parse(text, 22), "O3", dtype="bfloat16", target="tensorrt")
    assert [node.op_type for node in made.graph.node] == ["Cast", "Relu", *["Cast"] * (not given), "RandomNormalLike"]


def test_a_bias_that_is_computed_has_the_type_of_its_convolution() -> None:
    model = parse(BIASED, 22)
    result = convert_model(model, "O3", target="tensorrt", keep_nodes=["conv"])
    assert [node.op_type for node in sources(result, "Conv", 2)] == ["Neg"]
    assert [node.op_type for node in sources(result, "Conv", 0)] == ["Cast", "Relu"]


def test_numbers_in_double_count_as_float32() -> None:
    text = """(float[1,1,4,4] x) => (float[1,1,2,2] y) {
        h = Relu (x)
        y = GridSample (h, g)
    }"""
    model = parse(text, 20)
    model.graph.initializer.append(TensorProto(name="g", data_type=TensorProto.DOUBLE, dims=[1, 2, 2, 2]))
    model.graph.initializer[0].double_data.extend([0.5] * 8)
    result = convert_model(model, "O3", target="tensorrt")
    assert [node.op_type for node in sources(result, "GridSample", 0)] == ["Cast", "Relu"]


REFUSED = {
    "LSTM": """(float16[3,2,4] x, float[1,20,4] w, float[1,20,5] r) => (float[3,1,2,5] y) {
        [up] a = Cast <to = 1> (x)
        b = Transpose <perm = [0, 1, 2]> (a)
        y = LSTM <hidden_size = 5> (b, w, r)
    }""",
    "Loop": """(float[2,3] x, float16[3] u) => (float[2,3] y, float[3,3] z) {
        m = Constant <value = int64 {3}> ()
        k = Constant <value = bool {1}> ()
        y, z = Loop (m, k, x) <body = a (int64 i, bool c, float[2,3] p) => (bool d, float[2,3] q, float[3] s) {
            d = Identity (c)
            q = Relu (p)
            s = Cast <to = 1> (u)
        }>
    }""",
    "Scan": """(float16[2,3] x, float[3] s, int64[1] n) => (float[3] y) {
        h = Cast <to = 1> (x)
        y = Scan <num_scan_inputs = 1, body = a (float[3] p, float[3] q) => (float[3] r) { r = Reshape (q, n) }> (s, h)
    }""",
    "Conv": """(float16[1,4,8,8] x, float16[4,4,3,3] w, float16[4] b) => (float16[1,4,6,6] y) {
        h = Cast <to = 1> (x)
        k = Cast <to = 1> (w)
        c = Cast <to = 1> (b)
        r = Conv (h, k, c)
        y = Cast <to = 10> (r)
    }""",
    "Scan, moving": """(float[3] a, float[3] b, float[2,3] x) => (float16[3] s, float[3] z) {
        y, z = Scan <num_scan_inputs = 1, body = line (float[3] p, float[3] q, float[3] r) => (float[3] o, float[3] w) {
            o = Identity (q)
            w = Add (q, r)
        }> (a, b, x)
        s = Cast <to = 10> (y)
    }""",
    "RandomNormal": """(float16[2,3] x) => (float16[2,3] y, float16[3,2,3] z) {
        m = Constant <value = int64 {3}> ()
        k = Constant <value = bool {1}> ()
        y, z = Loop (m, k, x) <body = a (int64 i, bool c, float16[2,3] p) => (bool d, float16[2,3] q, float16[2,3] s) {
            d = Identity (c)
            q = Relu (p)
            s = RandomNormal <seed = 3.0, shape = [2,3], dtype = 10> ()
        }>
    }""",
}
"""What other tools may write, by the op that reads a Cast, or whose result is read where it cannot be."""


@pytest.mark.parametrize("case", REFUSED)
def test_such_casts_are_found(case: str) -> None:
    model, op = parse(REFUSED[case], 22), case.partition(",")[0]
    audit = onnxamp.audit_model(model, "tensorrt")
    (found,) = [finding for finding in audit.findings if finding.kind == "kernel"]
    assert (found.severity, found.op) == ("warning", op)
    assert "tensorrt's builder may refuse that" in found.text
    assert not [found for found in onnxamp.audit_model(model, "any").findings if found.op == op]


@pytest.mark.tensorrt
@pytest.mark.parametrize("case", REFUSED)
def test_the_builder_still_refuses_them(case: str) -> None:
    assert build_engine(Model.of(parse(REFUSED[case], 22)), {"n": np.array([3])}).refusals
