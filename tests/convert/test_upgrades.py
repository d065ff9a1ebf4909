"""The opset that ``--opset auto`` chooses: the least that lets what is wanted become low, and else the one there is."""

import numpy as np
import onnx
import onnxruntime
import pytest
from every import every
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp
from onnxamp._convert.convert import convert, decide
from onnxamp._convert.hints import opset_hint
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._options.options import Options

NETWORK = """(float[1,3,7,9] x) => (float[1,4,M,N] y) {
    a = Conv <pads = [1,1,1,1]> (x, v) b = Clip <min = 0.0, max = 6.0> (a)
    u = UPSAMPLE
    c = Conv <pads = [1,1,1,1]> (u, w) y = Clip <min = 0.0, max = 6.0> (c) }"""
WEIGHTS = {"v": (4, 3, 3, 3), "w": (4, 4, 3, 3)}


def network(upsample: str = "Relu (b)", opset: int = 9) -> ModelProto:
    return add_weights(parse(NETWORK.replace("UPSAMPLE", upsample), opset=opset, ir=4), WEIGHTS)


def opset_of(model: ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain == "")


def run(model: ModelProto) -> np.ndarray:
    x = np.random.default_rng(3).standard_normal((1, 3, 7, 9)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def notes(model: ModelProto, level: str = "O2", **options: object) -> str:
    prepared = convert(Model.of(model), Options.of(level, options)).prepared
    return " ".join((*prepared.notes, *prepared.refused))


def test_the_least_opset_that_saves_the_casts() -> None:
    result = onnxamp.convert_model(network())
    assert opset_of(result) == 12, "the first with a float16 Clip"
    assert sum(node.op_type == "Cast" for node in result.graph.node) == 2
    assert (
        notes(network())
        == "Upgraded from opset 9 to 12, which saves 2 of 4 new Casts and brings float16 kernels for Clip."
    )
    assert opset_of(onnxamp.convert_model(network(), opset="keep")) == 9


def test_bfloat16_takes_the_opset_of_its_kernels() -> None:
    result = onnxamp.convert_model(network(), dtype="bfloat16")
    assert opset_of(result) == 22
    assert {tensor.data_type for tensor in result.graph.initializer if len(tensor.dims) == 4} == {
        onnx.TensorProto.BFLOAT16
    }


def test_nothing_is_upgraded_where_nothing_is_won() -> None:
    model = add_weights(parse("(float[2,4] x) => (float[2,4] y) { a = MatMul (x, w) y = Relu (a) }", opset=9, ir=4),
                        {"w": (4, 4)})  # fmt: skip
    assert opset_of(onnxamp.convert_model(model)) == 9
    old = parse("(float[2,4] x) => (float[2,4] y) { y = Exp (x) }", opset=9, ir=4)
    for dtype in ("float16", "bfloat16"):
        assert onnxamp.convert_model(old, dtype=dtype) == old
    assert onnxamp.convert_model(network(), "O0") == network()


@every(2, mode=["nearest", "linear"], scales=["1, 1, 2, 2", "1, 1, 1.7, 2.3", "1, 1, 3, 1"], opset=[7, 9])
def test_upsample_keeps_its_coordinates(mode: str, scales: str, opset: int) -> None:
    """The case of a segmentation network: its hint named an opset at which the model computed something else."""
    call = f'Upsample <mode = "{mode}", scales = [{", ".join(f"{float(s)}" for s in scales.split(","))}]> (b)'
    if opset == 9:
        call = f'Constant <value = float[4] {{{scales}}}> () u = Upsample <mode = "{mode}"> (b, s)'
        model = network(call.replace(" u =", "\n u ="), 9)
        model.graph.node[2].output[0] = "s"
    else:
        model = network(call, 7)
    expected = run(model)
    for newest in (13, 18, 22):
        np.testing.assert_allclose(
            run(onnxamp.convert_model(model, "O0", opset=newest)), expected, rtol=1e-5, atol=1e-6
        )


def test_what_stops_an_upgrade_is_told() -> None:
    text = (
        NETWORK.replace("y = Clip", "z, m = Dropout (c) q = Add (z, m) y = Clip")
        .replace("> (c)", "> (q)")
        .replace("UPSAMPLE", "Relu (b)")
    )
    model = add_weights(parse(text.replace("z, m = Dropout (q)", "z, m = Dropout (c)"), opset=9, ir=4), WEIGHTS)
    assert "A newer opset would lower more, but" in notes(model)
    assert "(Dropout) cannot follow to opset 10" in notes(model)
    assert opset_of(onnxamp.convert_model(model)) == 9
    with pytest.raises(onnxamp.OpsetError, match=r"bfloat16 needs opset 13.*\(Dropout\) cannot follow to opset 10"):
        onnxamp.convert_model(model, dtype="bfloat16")


NORMALISED = """(float[2,8] x) => (float[2,8] y) {
    a = MatMul (x, w) n = ReduceL2 <axes = [1], keepdims = 1> (a) c = Clip <min = 0.000001, max = 1000.0> (n)
    b = Div (a, c) y = MatMul (b, v) }"""
"""An L2 normalization in ordinary ops; Clip has a float16 kernel since opset 12."""


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        ({}, True),
        ({"white_list": ["L2Normalize"]}, True),
        ({"black_list": ["Clip"]}, False),
        ({"black_list": ["L2Normalize"]}, False),
        ({"keep_nodes": ["c"]}, False),
    ],
)
def test_no_opset_helps_what_the_user_keeps(options: dict[str, list[str]], is_told: bool) -> None:
    model = add_weights(parse(NORMALISED, opset=9, ir=6), {"w": (8, 8), "v": (8, 8)})
    analysis = decide(Model.of(model), Options.of("O2", options | {"opset": "keep"})).analysis
    assert ("brings low-precision kernels for Clip" in (opset_hint(analysis) or "")) is is_told


def test_a_plan_repeats_the_upgrade_that_was_chosen() -> None:
    for dtype in ("float16", "bfloat16"):
        plan = onnxamp.plan_model(network(), dtype=dtype)
        assert plan.opset == {"float16": 12, "bfloat16": 22}[dtype]
        assert onnxamp.apply_plan(network(), plan) == onnxamp.convert_model(network(), dtype=dtype)


def test_an_upgrade_that_changes_results_is_not_taken() -> None:
    asked = []

    def disproves(graph: Graph) -> str:
        asked.append(graph.book.opsets[""])
        return "it computes something else"

    found = convert(Model.of(network()), Options.of(), proof=disproves)
    assert asked == [12]
    assert opset_of(found.proto) == 9
    assert found.prepared.refused == ("Not upgraded to opset 12, where it computes something else.",)


def test_wrong_opsets() -> None:
    for wrong in ("newest", 0, 9999):
        with pytest.raises(onnxamp.ArgumentError):
            onnxamp.convert_model(network(), opset=wrong)
    for wrong in (None, True, 13.0):
        with pytest.raises(onnxamp.ArgumentTypeError, match="'auto', 'keep' or an integer"):
            onnxamp.convert_model(network(), opset=wrong)


POOLED = """(float[1,3,56,56] x) => (float[1,4,28,28] y) {
    a = Conv <pads = [1,1,1,1]> (x, v) y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (a) }"""


def test_an_upgrade_that_sends_much_to_the_cpu_is_not_taken() -> None:
    """CUDA has a bfloat16 Conv from opset 22 on, where it has no MaxPool, which then waits for copies to the CPU."""
    model = add_weights(parse(POOLED, opset=17), {"v": (4, 3, 3, 3)})
    assert opset_of(onnxamp.convert_model(model, dtype="bfloat16")) == 17
    told = notes(model, dtype="bfloat16")
    assert told.startswith(
        "Not upgraded to opset 22, where cuda has no kernel for MaxPool, and the CPU would take longer"
    )
    assert opset_of(onnxamp.convert_model(model, dtype="bfloat16", opset=22)) == 22


def test_an_upgrade_that_sends_little_to_the_cpu_is_taken() -> None:
    tail = (
        "b = Conv <pads = [1,1,1,1]> (a, w) c = Conv <strides = [28,28]> (b, s) y = MaxPool <kernel_shape = [2,2]> (c)"
    )
    text = f"(float[1,256,56,56] x) => (float[1,4,1,1] y) {{ a = Conv <pads = [1,1,1,1]> (x, v) {tail} }}"
    weights = {"v": (256, 256, 3, 3), "w": (256, 256, 3, 3), "s": (4, 256, 1, 1)}
    model = add_weights(parse(text, opset=17), weights)
    assert opset_of(onnxamp.convert_model(model, dtype="bfloat16")) == 22
    assert notes(model, dtype="bfloat16").endswith("there, cuda has no kernel for MaxPool.")


QUANTIZED = """(float[N,4] x) => (float[N,M] y) {
    q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
    w = DequantizeLinear (w8, s, zero) b = DequantizeLinear (b32, s, none)
    g = Gemm (d, w, b) t = MIDDLE
    u = QuantizeLinear (t, s, z) v = DequantizeLinear (u, s, z) h = Gemm (v, w, b)
    e = QuantizeLinear (h, s, z) y = DequantizeLinear (e, s, z) }"""


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
@pytest.mark.parametrize("middle", ["Relu (g)", "Softmax <axis = 1> (g)", "Reshape (g, rows)"])
def test_nodes_that_were_on_the_cpu_before_do_not_speak_against_an_upgrade(middle: str, target: str) -> None:
    """CUDA dequantizes no int32, at any opset; opset 19 brings float16 scales, and so saves the Casts around each."""
    model = add_weights(
        parse(QUANTIZED.replace("MIDDLE", middle), opset=11, ir=7),
        {
            "s": np.array(0.05, np.float32),
            "z": np.array(3, np.int8),
            "zero": np.array(0, np.int8),
            "none": np.array(0, np.int32),
            "w8": np.arange(16, dtype=np.int8).reshape(4, 4),
            "b32": np.arange(4, dtype=np.int32),
            "rows": np.array([0, -1]),
        },
    )
    result = onnxamp.convert_model(model, target=target)
    assert opset_of(result) == 19
    assert sum(node.op_type == "Cast" for node in result.graph.node) <= 2
    assert "no kernel" not in notes(model, target=target)


LENET = """(float[1,1,12,12] x) => (float[1,4,3,3] y) {
    a = Conv (x, v) b = Relu (a) c = POOL <kernel_shape = [2,2], strides = [2,2]> (b) y = Conv (c, w) }"""


def lenet(pool: str = "MaxPool") -> ModelProto:
    return add_weights(parse(LENET.replace("POOL", pool), opset=13), {"v": (3, 1, 3, 3), "w": (4, 3, 3, 3)})


NO_POOL = "Not upgraded to opset 22, where cuda has no kernel for MaxPool, and the CPU would take longer than"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_warnings_about_listed_ops_name_the_reason_that_the_opset_stays(level: str) -> None:
    """Convolutions would be bfloat16 at opset 22, at which CUDA has no MaxPool."""
    said = rf"Conv of the white list stays in float32 at 'a' and 1 more: schema: opset 11 .*bfloat16\. {NO_POOL}"
    with pytest.warns(onnxamp.OptionWarning, match=said):
        converted = onnxamp.auto_mixed_precision(lenet(), level, "bfloat16")
    assert opset_of(converted) == 13
    with pytest.warns(onnxamp.OptionWarning, match=said.replace("the white", "your white")):
        onnxamp.convert_model(lenet(), level, dtype="bfloat16", white_list=["Conv"])
    assert opset_of(onnxamp.auto_mixed_precision(lenet("AveragePool"), level, "bfloat16")) == 22


def test_warnings_about_listed_ops_name_the_request_to_stay() -> None:
    said = "opset 11 does not allow bfloat16. Opset 22 would help, but the model was to stay at opset 13"
    with pytest.warns(onnxamp.OptionWarning, match=said):
        onnxamp.convert_model(lenet("AveragePool"), "O1", dtype="bfloat16", white_list=["Conv"], opset="keep")


def test_an_opset_that_the_proof_refuses_is_tried_once() -> None:
    """What a node at opset 20 wants is nothing without what another one gets at 12, so both lead to that."""
    model = parse("""(float[512,512] x, float[512,512] w, float[4] z) => (float[512,512] y, bool[4] b) {
        a = MatMul (x, w) c = Clip (a) d = MatMul (c, w) e = Clip (d) y = MatMul (e, w)
        s = Softmax (z) b = IsInf (s) }""", opset=11, ir=8)  # fmt: skip
    tried = list[int]()

    def proof(graph: Graph) -> str:
        tried.append(graph.book.opsets[""])
        return "outputs differ"

    decided = decide(Model.of(model), Options("O2", target="cuda", hazards=False), None, proof)
    assert len(tried) == len(set(tried)) > 0
    assert len(decided.prepared.refused) == len(set(decided.prepared.refused))
