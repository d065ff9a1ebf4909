"""One test per row of "Contexts and decorate" in docs/coming-from.md."""

import inspect
import re
import subprocess
import sys
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from coming_from import RowTests, rows
from graphs.case import parse
from onnx import TensorProto
from repository import ROOT
from train_nets import conv_net, feeds, make, mlp, network

import onnxamp
from onnxamp import amp
from onnxamp.train import SGD, Decorated, build_train_network

CLASSIFIER = ROOT / "models" / "classifier.onnx"
FEEDS = onnxamp.random_samples(CLASSIFIER)[0]
SECTION = "Contexts and decorate"
TESTS = RowTests()
row = TESTS.row


def test_each_row_has_a_test() -> None:
    assert sorted(TESTS) == sorted(rows(SECTION))


@pytest.mark.mostly_slow(fast=15)
@pytest.mark.parametrize("cell", rows(SECTION))
def test_row(cell: str) -> None:
    TESTS[cell]()


def low(model: Any = CLASSIFIER, feed: Any = None, **options: Any) -> set[str]:
    """Op types, Casts apart, that a session runs in float16 within the context."""
    with amp.auto_cast(**options):
        session = onnxamp.InferenceSession(model)
        with amp.debugging.collect_operator_stats() as stats:
            session.run(None, feed or FEEDS)
    return {op for (op, precision), count in stats.calls.items() if count and precision == "float16"} - {"Cast"}


def signature(function: Any) -> str:
    found = inspect.signature(function)
    bare = [item.replace(annotation=inspect.Parameter.empty) for item in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _enter(**arguments: Any) -> None:
    with amp.auto_cast(**arguments):
        pass


def raises(kind: type[Exception], said: str, **arguments: Any) -> None:
    """Of auto_cast, or of decorate where models are given."""
    with pytest.raises(kind, match=re.escape(said)) as caught:
        amp.decorate(**{"level": "O2", **arguments}) if "models" in arguments else _enter(**arguments)
    assert isinstance(caught.value, onnxamp.OnnxAmpError)


@row("`import paddle.amp`")
def _() -> None:
    for name in ("auto_cast", "decorate", "GradScaler", "is_float16_supported", "is_bfloat16_supported", "debugging"):
        assert name in amp.__all__


@row("`import paddle.amp.debugging`")
def _() -> None:
    code = "import onnxamp.amp.debugging as one, onnxamp; print(one is onnxamp.debugging is onnxamp.amp.debugging)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@row("`amp_guard`, `amp_decorate`")
def _() -> None:
    assert amp.amp_guard is amp.auto_cast
    assert amp.amp_decorate is amp.decorate


# --- auto_cast --------------------------------------------------------------------------------------------------


@row(
    "`auto_cast(enable=True, custom_white_list=None, custom_black_list=None, level='O1', dtype='float16',"
    " use_promote=True)`"
)
def _() -> None:
    wanted = (
        "(enable=True, custom_white_list=None, custom_black_list=None, level='O1', dtype='float16', use_promote=True)"
    )
    assert signature(amp.auto_cast) == wanted


@row("casts the ops that run in the context")
def _() -> None:
    with amp.auto_cast():
        net = build_train_network(mlp(), SGD(), "cross-entropy")
    after = build_train_network(mlp(), SGD(), "cross-entropy")
    assert amount_low(net) > 0 == amount_low(after)
    assert "Conv" in low()


def amount_low(net: Any) -> int:
    """Low-precision products of a step."""
    return amp.debugging.collect_operator_stats(net.model).calls["Gemm", "float16"]


@row("`enable=False`")
def _() -> None:
    assert low(enable=False) == set()
    with amp.auto_cast(level="O2"):
        assert low(enable=False) == set()
        assert low(enable=False, dtype="float32", custom_white_list=["Relu"], custom_black_list=["relu"]) == set()
    raises(ValueError, "auto_cast takes O0, OD, O1, O2", enable=False, level="O4")


@row("`custom_white_list={'softmax'}`")
def _() -> None:
    for names in ({"elementwise_add"}, ["Add"], ("add",)):
        assert "Add" in low(custom_white_list=names)
    assert "Add" not in low()
    raises(TypeError, "white_list must be a list of names, not str", custom_white_list="softmax")


@row("`custom_black_list={'conv2d'}`")
def _() -> None:
    for names in ({"conv2d"}, ["Conv"], ("Conv2D",)):
        assert "Conv" not in low(custom_black_list=names)
    raises(TypeError, "black_list must be a list of names, not str", custom_black_list="conv2d")


def computed(text: str, x: list[float], **options: Any) -> list[float]:
    """What a session within the context makes of a row of numbers."""
    with amp.auto_cast(**options):
        found = onnxamp.InferenceSession(parse(text)).run(None, {"x": np.array([x], np.float32)})[0]
    return found.ravel().tolist()


@row("`custom_black_list={'square'}`")
def _() -> None:
    square = "(float[1,2] x) => (float[1,2] y) { b = LeakyRelu (x) a = Mul (b, b) y = Sqrt (a) }"
    assert computed(square, [300, 2]) == [300, 2]  # square is on the default list, too
    for black in ({"square"}, ["Square"]):
        assert computed(square, [300, 2], level="O2", custom_black_list=black) == [300, 2]
    assert computed(square, [300, 2], level="O2", custom_white_list=["square"], use_promote=False) == [np.inf, 2]
    text = "(float[1,2] x, float[1,2] z) => (float[1,2] y) { b = LeakyRelu (x) a = Mul (b, z) y = Mul (a, a) }"
    product = parse(text)
    feed = {name: np.ones((1, 2), np.float32) for name in "xz"}
    with amp.auto_cast(level="O2", use_promote=False), amp.debugging.collect_operator_stats() as stats:
        onnxamp.InferenceSession(product).run(None, feed)
    assert (stats.calls["Mul", "float16"], stats.calls["Mul", "float32"]) == (1, 1)


@row("`custom_black_list={'linear'}`")
def _() -> None:
    linear = """(float[1,2] x) => (float[1,2] y) <float[2,2] w = {4e4, 0, 0, 1}, float[2] b = {4e4, 1}> {
        a = MatMul (x, w) y = Add (a, b) }"""
    assert computed(linear, [1, 1], level="O2", use_promote=False) == [np.inf, 2]
    assert computed(linear, [1, 1], level="O2", use_promote=False, custom_black_list={"matmul"}) == [np.inf, 2]
    assert computed(linear, [1, 1], level="O2", use_promote=False, custom_black_list={"linear"}) == [8e4, 2]


@row("`custom_black_list={'sum'}`")
def _() -> None:
    several = "(float[1,2] x) => (float[1,2] y) { y = Sum (x, x) }"
    lowered = computed(several, [4e4, 1], level="O2", use_promote=False, custom_white_list={"add_n"})
    assert lowered == [np.inf, 2]
    assert computed(several, [4e4, 1], level="O2", use_promote=False, custom_black_list={"sum"}) == [8e4, 2]
    after = """(float[1,2] x) => (float[1,2] y) <float[2,2] w = {4e4, 0, 0, 1}> {
        a = MatMul (x, w) b = Sum (a, a) c = MatMul (b, w) y = Add (c, x) }"""
    for level in ("O1", "O2"):  # sum is on the default list
        with amp.auto_cast(level=level), amp.debugging.collect_operator_stats() as stats:
            onnxamp.InferenceSession(parse(after)).run(None, {"x": np.ones((1, 2), np.float32)})
        assert (stats.calls["Sum", "float16"], stats.calls["Sum", "float32"]) == (0, 1)


@row("`level='O0'`")
def _() -> None:
    assert low(level="O0") == set()


@row("`level='OD'`")
def _() -> None:
    assert low(level="OD") == {"Conv", "Gemm"}
    with amp.auto_cast(level="OD"):
        net = build_train_network(mlp(), SGD(), "cross-entropy")
    assert amount_low(net) > 0
    assert "float16" not in {precision for op, precision in amp.debugging.collect_operator_stats(net.model).calls
                             if op not in {"Cast", "Conv", "Gemm", "MatMul"}}  # fmt: skip


@row("`level='O1'`")
def _() -> None:
    assert {"Conv", "Gemm"} <= low() <= {"Conv", "Gemm", "Relu", "MaxPool", "Flatten"}
    relu = parse("""(float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}> {
        a = MatMul (x, w) b = Relu (a) y = MatMul (b, w) }""")
    assert low(relu, {"x": np.ones((1, 2), np.float32)}) == {"MatMul", "Relu"}
    assert low(relu, {"x": np.ones((1, 2), np.float32)}, level="OD") == {"MatMul"}
    text = """(float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}, float two = {2}> {
        a = MatMul (x, w) b = Sigmoid (a) c = Mul (b, two) d = MatMul (c, w) e = Add (d, x) f = Tanh (e)
        g = MatMul (f, w) y = Softmax (g) }"""
    feed = {"x": np.ones((1, 2), np.float32)}
    assert low(parse(text), feed) == {"MatMul", "Sigmoid", "Mul"}  # Add reads float32, Tanh what is float32 then
    assert low(parse(text), feed, level="OD") == {"MatMul"}
    assert low(parse(text), feed, custom_black_list=["sigmoid"]) == {"MatMul"}
    biased = parse("""(float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}, float[2] b = {1, 2}> {
        a = MatMul (x, w) c = Add (a, b) d = Relu (c) y = MatMul (d, w) }""")
    assert low(biased, feed, level="OD", custom_white_list=["linear"]) == {"MatMul", "Add"}


@row("`level='O2'`")
def _() -> None:
    assert low(level="O2") >= {"Conv", "Gemm", "Relu"}
    assert "BatchNormalization" not in low(level="O2")
    assert "BatchNormalization" not in low(level="O2", use_promote=False)
    assert "BatchNormalization" in low(level="O2", custom_white_list=["batch_norm"])


@row("`level='o1'`")
def _() -> None:
    assert [low(level=level) for level in ("o0", "od", "o1", "o2")] == [
        low(level=level) for level in ("O0", "OD", "O1", "O2")
    ]


@row("`dtype='float16'`, `'bfloat16'`")
def _() -> None:
    for dtype in ("bfloat16", ml_dtypes.bfloat16, TensorProto.BFLOAT16):
        with amp.auto_cast(level="O1", dtype=dtype):
            net = build_train_network(mlp(), SGD(), "cross-entropy")
        assert amp.debugging.collect_operator_stats(net.model).calls["Gemm", "bfloat16"] > 0


@row("`use_promote=True`")
def _() -> None:
    assert low(level="O2", use_promote=False) >= low(level="O2", use_promote=True)
    assert "Add" in low(level="O2", use_promote=False)
    assert low(level="O1", use_promote=False) == low(level="O1")


@row("default white list: conv2d, matmul, matmul_v2, mul")
def _() -> None:
    assert set(amp.get_white_list("paddle")) == {"Conv", "MatMul", "Gemm"}


@row("default black list: exp, square, log, mean, sum, softmax, ...")
def _() -> None:
    assert {"Exp", "Pow", "Log", "ReduceMean", "ReduceSum", "Softmax"} <= set(amp.get_black_list("paddle"))


@row("bfloat16 where an op has no kernel")
def _() -> None:
    gru = parse("""(float[1,1,1] x) => (float[1,1,1,1] y) <float[1,3,1] w = {1, 2, 3}> {
        y = GRU <hidden_size = 1> (x, w, w) }""")
    with (
        amp.auto_cast(dtype="bfloat16", custom_white_list=["gru"]),
        pytest.warns(onnxamp.OptionWarning, match="GRU of your white list stays in float32 at 'y'"),
    ):
        onnxamp.InferenceSession(gru)
    conv = parse("""(float[1,1,2] x) => (float[1,1,2] y) <float[1,1,1] w = {1}> { [here] y = Conv (x, w) }""", opset=11)
    with amp.auto_cast(level="O2", dtype="bfloat16"), warnings.catch_warnings(action="error"):
        onnxamp.InferenceSession(conv)


@row("`ValueError`: an op is in both lists")
def _() -> None:
    raises(ValueError, "Relu: in white_list", custom_white_list=["relu"], custom_black_list=["Relu"])


@row("`ValueError`: the level is unknown")
def _() -> None:
    for level in ("O3", "O4", "auto", 1, None):
        raises(ValueError, "auto_cast takes O0, OD, O1, O2", level=level)


@row("`ValueError`: the dtype is unknown")
def _() -> None:
    for dtype in ("float32", np.float32, "float8"):
        raises(ValueError, "choose one of float16, bfloat16", dtype=dtype)


# --- decorate ---------------------------------------------------------------------------------------------------


@row(
    "`decorate(models, optimizers=None, level='O1', dtype='float16', master_weight=None, save_dtype=None,"
    " master_grad=False, excluded_layers=None)`"
)
def _() -> None:
    wanted = (
        "(models, optimizers=None, level='O1', dtype='float16', master_weight=None, save_dtype=None, master_grad=False,"
        " excluded_layers=None)"
    )
    assert signature(amp.decorate) == wanted


@row("`models`: a Layer, or a list")
def _() -> None:
    one, two = mlp(0), mlp(1)
    before = one.SerializeToString()
    found = amp.decorate([one, two], level="O2")
    assert [type(item) for item in found] == [Decorated, Decorated]
    assert isinstance(amp.decorate(models=CLASSIFIER, level="O2"), Decorated)
    assert one.SerializeToString() == before


@row("returns models, or (models, optimizers)")
def _() -> None:
    optimizer = SGD()
    decorated, same = amp.decorate(mlp(), optimizer, "O2")
    assert isinstance(decorated, Decorated)
    assert same is optimizer
    models, optimizers = amp.decorate([mlp()], [optimizer], "O2")
    assert (len(models), optimizers) == (1, [optimizer])


@row("`level='O1'` of `decorate`")
def _() -> None:
    model = mlp()
    assert amp.decorate(model) is amp.decorate(model, level="o1") is model


@row("`level='O2'` of `decorate`")
def _() -> None:
    decorated = amp.decorate(mlp(), level="o2")
    assert {tensor.data_type for tensor in decorated.model.graph.initializer} == {TensorProto.FLOAT16}
    net = build_train_network(decorated, SGD(), "cross-entropy")
    assert amount_low(net) > 0
    feed = {"x": np.ones((1, 6), np.float32)}
    wanted = onnxamp.InferenceSession(decorated.model).run(None, feed)[0]
    assert np.array_equal(onnxamp.InferenceSession(decorated).run(None, feed)[0], wanted)
    assert onnxamp.convert_model(decorated, "O0") == decorated.model
    assert onnxamp.diff_models(mlp(), decorated).passed


def weight_types(decorated: Decorated) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in decorated.model.graph.initializer}


@row("normalizations keep float32 weights")
def _() -> None:
    found = weight_types(amp.decorate(conv_net(), level="O2"))
    assert found["n0.s"] == TensorProto.FLOAT
    assert found["c1.w"] == TensorProto.FLOAT16


@row("`master_weight=None`, `True`")
def _() -> None:
    for master_weight in (None, True):
        net = build_train_network(
            amp.decorate(conv_net(), level="O2", master_weight=master_weight), SGD(), "cross-entropy"
        )
        assert {array.dtype for name, array in net.state().items() if name.startswith("c")} == {np.dtype("float32")}


@row("`master_weight=False`")
def _() -> None:
    raises(ValueError, "training keeps float32 masters", models=mlp(), master_weight=False)


@row("`TypeError`: `master_weight` is no bool")
def _() -> None:
    for level in ("O1", "O2"):
        raises(TypeError, "master_weight must be a bool or None", models=mlp(), master_weight="x", level=level)


@row("`save_dtype='float16'`, ...")
def _() -> None:
    kinds = {"float16": 10, "bfloat16": 16, "float32": 1, "float64": 11}
    for save_dtype, elem in kinds.items():
        net = build_train_network(amp.decorate(mlp(), level="O2", save_dtype=save_dtype), SGD(), "cross-entropy")
        assert {tensor.data_type for tensor in net.export().graph.initializer} == {elem}
        assert net.state()["w0"].dtype == np.float32


@row("`save_dtype=None`")
def _() -> None:
    decorated = amp.decorate(conv_net(), level="O2", dtype="bfloat16")
    exported = build_train_network(decorated, SGD(), "cross-entropy").export()
    assert {tensor.name: tensor.data_type for tensor in exported.graph.initializer} == weight_types(decorated)
    assert {TensorProto.FLOAT, TensorProto.BFLOAT16} == set(weight_types(decorated).values())


@row("`master_grad=True`")
def _() -> None:
    twice = network([make("MatMul", "x w", "h"), make("MatMul", "h w", "y")], {"w": np.eye(6)}, ["N", 6], ["N", 6])
    calls = []
    for master_grad in (False, True):
        decorated = amp.decorate(twice, level="O2", master_grad=master_grad)
        net = build_train_network(decorated, SGD(), "cross-entropy")
        calls.append(amp.debugging.collect_operator_stats(net.model).calls)
    assert [found["Add", "float16"] for found in calls] == [1, 0]


@row("`excluded_layers`: layers or their classes")
def _() -> None:
    for excluded in ("Conv2D", ["conv2d"], "Conv", ["c0.node", "c1.node"], "c..node"):
        found = weight_types(amp.decorate(conv_net(), level="O2", excluded_layers=excluded))
        assert found["c0.w"] == found["c1.w"] == TensorProto.FLOAT
        assert found["head.w"] == TensorProto.FLOAT16
    dense = network(
        [make("MatMul", "x w", "h"), make("Add", "h b", "a"), make("Sigmoid", "a", "y")],
        {"w": np.eye(6), "b": np.ones(6)},
        ["N", 6],
        ["N", 6],
    )
    assert weight_types(amp.decorate(dense, level="O2"))["b"] == TensorProto.FLOAT16
    for excluded in (["Linear"], "nn.Dense"):
        found = weight_types(amp.decorate(dense, level="O2", excluded_layers=excluded))
        assert found["w"] == found["b"] == TensorProto.FLOAT


@row("`TypeError`: `excluded_layers` are none")
def _() -> None:
    for level in ("O1", "O2"):
        for wrong in (5, [5], [CLASSIFIER]):
            raises(TypeError, "excluded_layers must", models=mlp(), excluded_layers=wrong, level=level)


@row("`ValueError`: level or dtype of `decorate`")
def _() -> None:
    for level in ("O0", "O3", "OD", 2):
        raises(ValueError, "decorate takes O1, O2", models=mlp(), level=level)
    raises(ValueError, "choose one of float16, bfloat16", models=mlp(), dtype="float32")


@row("`ValueError`: `save_dtype`")
def _() -> None:
    raises(ValueError, "Unknown save_dtype 'int8'", models=mlp(), save_dtype="int8")


@row("`TypeError`: models or optimizers are none")
def _() -> None:
    raises(TypeError, "model must be", models=3)
    raises(TypeError, "must be from onnxamp.train", models=mlp(), optimizers="adam")


# --- devices ----------------------------------------------------------------------------------------------------


@row("`is_float16_supported(device=None)`")
def _() -> None:
    devices(amp.is_float16_supported)


@row("`is_bfloat16_supported(device=None)`")
def _() -> None:
    devices(amp.is_bfloat16_supported)


def devices(ask: Any) -> None:
    assert signature(ask) == "(device=None)"
    assert ask("cpu") is ask("CPUExecutionProvider") is ask("gpu:99") is False
    assert ask() is ask("cuda") is ask("gpu:0") is ask("CUDAExecutionProvider")
    for wrong in ("npu", "gpu:", "cpu:0"):
        with pytest.raises(ValueError, match="Unknown device"):
            ask(wrong)
    with pytest.raises(TypeError, match="device must be a string"):
        ask(0)


@row("`paddle.amp.debugging`")
def _() -> None:
    assert amp.debugging is onnxamp.debugging


@row("a layer from outside of the context")
def _() -> None:
    net = build_train_network(mlp(), SGD(), "cross-entropy")
    with amp.auto_cast():
        with pytest.warns(onnxamp.OptionWarning, match="This network was created outside of auto_cast"):
            net.step(feeds())
        net.step(feeds())


@row("(nothing)")
def _() -> None:
    with pytest.warns(onnxamp.OptionWarning, match="does not apply to sessions of onnxruntime"), amp.auto_cast():
        onnxruntime.InferenceSession(mlp().SerializeToString(), providers=["CPUExecutionProvider"])
