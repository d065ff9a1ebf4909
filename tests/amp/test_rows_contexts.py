"""One test per row of "Contexts and decorate" in docs/coming-from.md."""

import inspect
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from coming_from import RowTests, rows
from graphs.case import parse
from onnx import TensorProto
from repository import ROOT
from train_nets import conv_net, make, mlp, network

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


@row("`level='O2'`")
def _() -> None:
    assert low(level="O2") >= {"Conv", "Gemm", "BatchNormalization"}
    assert "BatchNormalization" not in low(level="O2", custom_black_list=["batch_norm"])


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


@row("`ValueError`: an op is in both lists")
def _() -> None:
    raises(ValueError, "Relu: in white_list", custom_white_list=["relu"], custom_black_list=["Relu"])


@row("`ValueError`: the level is unknown")
def _() -> None:
    for level in ("O3", "O4", "auto", 1, None):
        raises(ValueError, "auto_cast knows O0, OD, O1, O2", level=level)


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


def weight_types(decorated: Decorated) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in decorated.model.graph.initializer}


@row("normalisations keep float32 weights")
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


@row("`save_dtype='float16'`, ...")
def _() -> None:
    kinds = {"float16": 10, "bfloat16": 16, "float32": 1, "float64": 11, None: 10}
    for save_dtype, elem in kinds.items():
        net = build_train_network(amp.decorate(mlp(), level="O2", save_dtype=save_dtype), SGD(), "cross-entropy")
        assert {tensor.data_type for tensor in net.export().graph.initializer} == {elem}
        assert net.state()["w0"].dtype == np.float32


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


@row("`ValueError`: level or dtype of `decorate`")
def _() -> None:
    for level in ("O0", "O3", "OD", 2):
        raises(ValueError, "decorate knows O1, O2", models=mlp(), level=level)
    raises(ValueError, "choose one of float16, bfloat16", models=mlp(), dtype="float32")


@row("`ValueError`: `save_dtype`")
def _() -> None:
    raises(ValueError, "Unknown save_dtype 'int8'", models=mlp(), save_dtype="int8")


@row("`TypeError`: models or optimizers are none")
def _() -> None:
    raises(TypeError, "model must be", models=3)
    raises(TypeError, "must be of onnxamp.train", models=mlp(), optimizers="adam")


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
