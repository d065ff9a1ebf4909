"""What ``--target tensorrt`` decides, by a table that was made by asking the builder; nothing is built here."""

import pytest
from graphs.case import parse
from onnx import ModelProto, TensorProto

import onnxamp
from onnxamp import convert_model

GRID = """(float[1,1,4,4] x, float[1,4,4,2] grid) => (float[1,1,4,4] y) { h = Relu (x) y = GridSample (h, grid) }"""
UP = "(float[1,1,4,4] x, float[1,1,3,3] w) => (float[1,1,6,6] y) { h = Relu (x) y = ConvTranspose (h, w) }"
LSTM = """(float[3,1,2] x, float[1,8,2] w, float[1,8,2] r, float[1,16] b, float[1,6] p) => (float[3,1,1,2] y) {
    y = LSTM <hidden_size = 2> (x, w, r, b, "", "", ""PEEPHOLES)
}"""
CACHE = """(float[1,2,4,8] cache, float[1,2,1,8] new) => (float[1,2,4,8] present) {
    h = Neg (new)
    present = TensorScatter (cache, h)
}"""


def low_inputs(model: ModelProto, op: str, dtype: str = "float16") -> list[bool]:
    """Whether the inputs of the only node of an op are low, by the Casts and low values that feed them."""
    (node,) = [node for node in model.graph.node if node.op_type == op]
    made = {name: other for other in model.graph.node for name in other.output}
    low = getattr(TensorProto, dtype.upper())
    inputs = {info.name: info.type.tensor_type.elem_type for info in model.graph.input}
    inputs |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}

    def is_low(name: str) -> bool:
        if name in inputs:
            return bool(inputs[name] == low)
        other = made[name]
        return other.attribute[0].i == low if other.op_type == "Cast" else is_low(other.input[0])

    return [is_low(name) for name in node.input if name]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_grid_sample_reads_one_type(level: str) -> None:
    assert len(set(low_inputs(convert_model(parse(GRID, 20), level, target="tensorrt"), "GridSample"))) == 1


def test_bfloat16_deconvolutions_stay_float32() -> None:
    assert low_inputs(convert_model(parse(UP, 22), "O3", target="tensorrt"), "ConvTranspose") == [True, True]
    lowered = convert_model(parse(UP, 22), "O3", dtype="bfloat16", target="any")
    assert low_inputs(lowered, "ConvTranspose", "bfloat16") == [True, True]
    kept = convert_model(parse(UP, 22), "O3", dtype="bfloat16", target="tensorrt")
    assert low_inputs(kept, "ConvTranspose", "bfloat16") == [False, False]


def test_only_an_lstm_with_peepholes_stays_float32() -> None:
    plain, peeping = (parse(LSTM.replace("PEEPHOLES", text), 21) for text in ("", ", p"))
    assert set(low_inputs(convert_model(plain, "O3", target="tensorrt"), "LSTM")) == {True}
    assert set(low_inputs(convert_model(peeping, "O3", target="tensorrt"), "LSTM")) == {False}
    assert set(low_inputs(convert_model(peeping, "O3", target="any"), "LSTM")) == {True}


def test_a_cache_has_the_type_of_the_models_input() -> None:
    model = parse(CACHE, 24)
    assert low_inputs(convert_model(model, "O3", target="any"), "TensorScatter") == [True, True]
    assert low_inputs(convert_model(model, "O3", target="tensorrt"), "TensorScatter") == [False, False]
    low = convert_model(model, "O3", target="tensorrt", keep_io_types=False)
    assert low_inputs(low, "TensorScatter") == [True, True]


def test_an_op_that_the_builder_does_not_know_stays_float32_and_is_named() -> None:
    model = parse("(float[2,2] x) => (float y) { h = Relu (x) y = Det (h) }", 22)
    assert low_inputs(convert_model(model, "O3", target="tensorrt"), "Det") == [False]
    audit = onnxamp.audit_model(model, "tensorrt")
    (found,) = [finding for finding in audit.findings if finding.severity == "error"]
    assert found.op == "Det"
    assert "accepts it in no precision" in found.text
    assert {node.op: node.provider for node in audit.nodes} == {"Relu": "TENSORRT", "Det": "none"}


def test_a_refused_mixture_is_named_with_its_cure() -> None:
    model = parse(GRID.replace("float[1,1", "float16[1,1"), 20)
    (found,) = [finding for finding in onnxamp.audit_model(model, "tensorrt").findings if finding.kind == "kernel"]
    assert (found.severity, found.op) == ("error", "GridSample")
    assert "float16 with float32" in found.text or "float with float16" in found.text
    assert "--keep-fp32 NAME" in found.action
    assert not [f for f in onnxamp.audit_model(parse(GRID, 20), "tensorrt").findings if f.severity == "error"]


SCANNED = """(float[2] s, float[3,2] x, float[2] k) => (float[2] t, float[3,2] y) {
    t, y = Scan (s, x) <num_scan_inputs = 1, body = a (float[2] p, float[2] q) => (float[2] r, float[2] z) {
        h = BODY (q)
        m = Mul (h, k)
        r = Add (p, m)
        z = Identity (r)
    }>
}"""


def casts_inside(model: ModelProto) -> list[str]:
    (node,) = [node for node in model.graph.node if node.op_type == "Scan"]
    return [inner.name for item in node.attribute for inner in item.g.node if inner.op_type == "Cast"]


def test_the_body_of_a_scan_has_one_precision() -> None:
    for op, dtype, opset in (("Relu", "bfloat16", 13), ("Relu", "float16", 21), ("Cosh", "bfloat16", 21)):
        model = parse(SCANNED.replace("BODY", op), opset)
        for level in ("O1", "O2", "O3"):
            result = convert_model(model, level, dtype=dtype, target="tensorrt", opset="keep")
            assert casts_inside(result) == [], (op, dtype, level)
    mixed = convert_model(
        parse(SCANNED.replace("BODY", "Relu"), 13), "O3", dtype="bfloat16", opset="keep", target="any"
    )
    assert casts_inside(mixed), "other targets take Casts there"


def test_lengths_of_sequences_keep_recurrent_nodes_in_float32() -> None:
    text = """(float[3,1,2] x, float[1,8,2] w, float[1,8,2] r, float[1,16] b, int32[1] n) => (float[3,1,1,2] y) {
        y = LSTM <hidden_size = 2> (x, w, r, b, n)
    }"""
    assert set(low_inputs(convert_model(parse(text, 21), "O3", target="tensorrt"), "LSTM")[:4]) == {False}
