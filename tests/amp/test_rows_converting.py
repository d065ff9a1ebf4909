"""One test per row of "Converting" in docs/coming-from.md."""

import inspect
import warnings
from random import Random
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from coming_from import RowTests, rows
from graphs.case import parse
from onnx import ModelProto, TensorProto
from repository import ROOT
from strategies.networks import random_network

import onnxamp
from onnxamp import amp

CLASSIFIER, ENCODER = ROOT / "models" / "classifier.onnx", ROOT / "models" / "encoder.onnx"
TESTS = RowTests()
row = TESTS.row
TEXT = """(float[N,2] X) => (float[N,2] Y) <float[2,2] w = {1, 2, 3, 4}, float[2] s = {1, 1}> {
    [first] a = MatMul (X, w) [norm] b = LayerNormalization (a, s) [soft] c = Softmax (b) [relu] d = Relu (c)
    [last] Y = MatMul (d, w) }"""


def model() -> ModelProto:
    return parse(TEXT, opset=17)


def low(converted: ModelProto) -> set[str]:
    """Op types with a low-precision output, Casts apart."""
    stats = onnxamp.debugging.collect_operator_stats(converted)
    return {op for (op, precision), count in stats.calls.items() if count and precision == "float16"} - {"Cast"}


def test_each_row_has_a_test() -> None:
    assert sorted(TESTS) == sorted(rows("Converting"))


@pytest.mark.mostly_slow(fast=20)
@pytest.mark.parametrize("cell", rows("Converting"))
@pytest.mark.filterwarnings("ignore::onnxamp.HazardWarning")
def test_row(cell: str) -> None:
    TESTS[cell]()


@row("`from mindspore import amp`")
def _() -> None:
    names = (
        "auto_mixed_precision custom_mixed_precision get_white_list get_black_list build_train_network LossScaleManager"
        " FixedLossScaleManager DynamicLossScaleManager auto_cast decorate GradScaler is_float16_supported"
        " is_bfloat16_supported debugging"
    )
    assert set(names.split()) <= set(amp.__all__)
    assert all(hasattr(amp, name) for name in amp.__all__)


@row('`auto_mixed_precision(network, amp_level="O0", dtype=mstype.float16)`')
def _() -> None:
    assert signature(amp.auto_mixed_precision) == "(network, amp_level='O0', dtype='float16', *, lists='mindspore')"
    assert amp.auto_mixed_precision(model(), "O1", lists="paddle") == onnxamp.convert_model(
        model(), "O1", lists="paddle"
    )


def signature(function: Any) -> str:
    found = inspect.signature(function)
    bare = [item.replace(annotation=inspect.Parameter.empty) for item in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@row("`network`: a Cell, which is changed")
def _() -> None:
    original, kept = model(), model()
    for network in (original, gs.import_onnx(original), CLASSIFIER, str(CLASSIFIER)):
        kind = gs.Graph if isinstance(network, gs.Graph) else ModelProto
        assert isinstance(amp.auto_mixed_precision(network, "O2"), kind)
    assert original == kept


@row('`amp_level="O0"`')
def _() -> None:
    original = model()
    assert amp.auto_mixed_precision(original) == amp.auto_mixed_precision(network=original, amp_level="O0") == original
    assert amp.auto_mixed_precision(original) is not original


@row('`amp_level="O1"`')
def _() -> None:
    assert low(amp.auto_mixed_precision(model(), "O1")) == {"MatMul", "Relu"}
    assert low(amp.auto_mixed_precision(CLASSIFIER, "O1")) <= {"Conv", "Gemm"} | EXACT


EXACT = {"Relu", "MaxPool", "Flatten"}
"""Exact ops of the classifier."""


@row('`amp_level="O2"`')
def _() -> None:
    assert low(amp.auto_mixed_precision(model(), "O2")) == {"MatMul", "Relu", "Softmax"}
    assert low(amp.auto_mixed_precision(CLASSIFIER, "O2")) == {"Conv", "Gemm", "Add", "GlobalAveragePool"} | EXACT
    alone = parse("(float[N,4] X) => (float[N,4] Y) { a = Sigmoid (X) Y = Tanh (a) }")
    assert low(amp.auto_mixed_precision(alone, "O2")) == {"Sigmoid", "Tanh"}  # though its Casts cost more than it gains
    assert low(onnxamp.convert_model(alone, "O2")) == set()


@row('`amp_level="O2"` in bfloat16')
def _() -> None:
    text = """(float[1,2,4,4] X) => (float[1,4,3,3] Y) <float low = {0}> {
        a = Clip (X, low) b = Clip (X, low) c = Concat <axis = 1> (a, b) Y = MaxPool <kernel_shape = [2, 2]> (c) }"""
    lone = amp.auto_mixed_precision(parse(text), "O2", "bfloat16")
    assert [node.op_type for node in lone.graph.node] == ["Clip", "Clip", "Concat", "MaxPool"]
    beside = onnxamp.debugging.collect_operator_stats(
        amp.auto_mixed_precision(parse(text.replace("Clip", "Add")), "O2", "bfloat16")
    )
    assert beside.calls["Concat", "bfloat16"] == 1


@row('`amp_level="O3"`')
def _() -> None:
    stats = onnxamp.debugging.collect_operator_stats(amp.auto_mixed_precision(model(), "O3"))
    assert not any(precision == "float32" for op, precision in stats.calls)
    assert low(amp.auto_mixed_precision(model(), "O3")) == {"MatMul", "Relu", "Softmax", "LayerNormalization"}


@row('a level between "O1" and "O2", by measurement')
def _() -> None:
    raises(ValueError, "Unknown level 'auto'", network=model(), amp_level="auto")
    assert low(onnxamp.convert_model(str(ENCODER), "auto")) >= {"MatMul"}


def raises(kind: type[Exception], said: str, **arguments: Any) -> None:
    function = amp.custom_mixed_precision if arguments.keys() & {"white_list", "black_list"} else None
    with pytest.raises(kind, match=said) as caught:
        (function or amp.auto_mixed_precision)(**arguments)
    assert isinstance(caught.value, onnxamp.OnnxAmpError)


@row("levels in capitals")
def _() -> None:
    assert amp.auto_mixed_precision(model(), "o2") == amp.auto_mixed_precision(model(), "O2")


@row("`dtype=mstype.float16`, `mstype.bfloat16`")
def _() -> None:
    for dtype, elem in (("bfloat16", TensorProto.BFLOAT16), (np.float16, TensorProto.FLOAT16)):
        converted = amp.auto_mixed_precision(model(), "O2", dtype)
        assert elem in {tensor.data_type for tensor in converted.graph.initializer}
        assert converted == amp.auto_mixed_precision(model(), "O2", elem)
        assert amp.custom_mixed_precision(model(), white_list=["MatMul"], dtype=dtype) == amp.custom_mixed_precision(
            model(), white_list=["MatMul"], dtype=elem
        )


@row("results are cast back to float32")
def _() -> None:
    for level in ("O1", "O2", "O3"):
        converted = amp.auto_mixed_precision(model(), level)
        assert [*converted.graph.input, *converted.graph.output] == [*model().graph.input, *model().graph.output]


@row("`TypeError`: the network is no Cell")
def _() -> None:
    for network in (3, None, b"onnx", [model()]):
        raises(TypeError, "model must be", network=network, amp_level="O1")
        raises(TypeError, "model must be", network=network)
        raises(TypeError, "model must be", network=network, white_list=["MatMul"])


@row("`ValueError`: the level is not supported")
def _() -> None:
    for level in ("O4", "", "O", 2, None):
        raises(ValueError, "auto_mixed_precision takes O0, O1, O2, O3", network=model(), amp_level=level)


@row("`ValueError`: `dtype` is neither float16 nor bfloat16")
def _() -> None:
    for dtype in ("float32", np.float32, TensorProto.FLOAT, "float8", "int8"):
        raises(ValueError, "choose one of float16, bfloat16", network=model(), amp_level="O2", dtype=dtype)


@row("`get_white_list()`")
def _() -> None:
    found = amp.get_white_list()
    found.append("Flatten")
    assert "Flatten" not in amp.get_white_list()
    assert set(amp.get_white_list("default")) > set(amp.get_white_list()) - {"Dense", "Conv2d", "Conv2dTranspose"}
    converted = amp.custom_mixed_precision(ENCODER, white_list=amp.get_white_list())
    assert converted == amp.auto_mixed_precision(ENCODER, "O1")


@row("`get_black_list()`")
def _() -> None:
    found = amp.get_black_list()
    found.clear()
    assert amp.get_black_list()
    assert "Softmax" in amp.get_black_list("paddle")


@row("built-in white list")
def _() -> None:
    wanted = {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "RNN", "GRU", "PRelu", "Relu", "Einsum"}
    assert set(amp.get_white_list()) == wanted | {"Dense", "Conv2d", "Conv2dTranspose"}


@row("built-in black list")
def _() -> None:
    assert amp.get_black_list() == ["BatchNormalization", "LayerNormalization"]
    for level in ("O1", "O2"):
        plan = onnxamp.debugging.collect_operator_stats(amp.auto_mixed_precision(CLASSIFIER, level))
        assert plan.calls["BatchNormalization", "float32"] == 5
        assert plan.calls["BatchNormalization", "float16"] == 0


@row("`nn.LayerNorm`, exported as several ops")
def _() -> None:
    for level in ("O1", "O2", "O3"):
        converted = amp.auto_mixed_precision(ENCODER, level)
        assert not low(converted) & {"Pow", "ReduceMean", "Sqrt"}


@row("`custom_mixed_precision(network, *, white_list=None, black_list=None, dtype=mstype.float16)`")
def _() -> None:
    assert signature(amp.custom_mixed_precision) == "(network, *, white_list=None, black_list=None, dtype='float16')"


@row("`white_list=[...]`")
def _() -> None:
    for op in ("Softmax", "MatMul", "LayerNormalization", "Relu"):
        assert low(amp.custom_mixed_precision(model(), white_list=[op])) == {op}
    for op in ("Softmax", "Erf", "Tanh"):
        stats = onnxamp.debugging.collect_operator_stats(amp.custom_mixed_precision(ENCODER, white_list=[op]))
        assert stats.calls[op, "float16"] > 0 == stats.calls[op, "float32"]
        assert stats.calls["MatMul", "float16"] == 0


@row("`white_list=get_white_list()`")
def _() -> None:
    nets = [parse(RELU_BETWEEN), *(random_network(Random(seed), 6) for seed in range(8))]
    for network in nets:
        for dtype in ("float16", "bfloat16"):
            with warnings.catch_warnings(record=True, action="always") as wanted:
                o1 = amp.auto_mixed_precision(network, "O1", dtype)
            with warnings.catch_warnings(record=True, action="always") as found:
                own = amp.custom_mixed_precision(network, white_list=amp.get_white_list(), dtype=dtype)
            assert own == o1
            assert [str(one.message) for one in found] == [str(one.message) for one in wanted]
    o1 = amp.auto_mixed_precision(nets[0], "O1")
    assert low_nodes(o1) == {"MatMul": 2}
    longer = amp.custom_mixed_precision(nets[0], white_list=(name for name in [*amp.get_white_list(), "Sigmoid"]))
    assert low_nodes(longer) == {"MatMul": 2, "Relu": 1, "Sigmoid": 1}
    assert low_nodes(amp.custom_mixed_precision(nets[0], white_list=["Relu"])) == {"Relu": 1}
    norm = amp.custom_mixed_precision(model(), white_list=[*amp.get_white_list(), "nn.LayerNorm"])
    assert "LayerNormalization" in low(norm)


RELU_BETWEEN = """(float[N,2] X) => (float[N,2] Y) <float[2,2] w = {1, 2, 3, 4}> {
    a = MatMul (X, w) b = Exp (a) c = Relu (b) d = Sigmoid (c) Y = MatMul (d, w) }"""


@row("`black_list=[...]`")
def _() -> None:
    assert low(amp.custom_mixed_precision(model(), black_list=["MatMul"])) == {"Softmax", "LayerNormalization", "Relu"}
    assert low(amp.custom_mixed_precision(model(), black_list=amp.get_black_list())) == {"MatMul", "Softmax", "Relu"}


@row("classes in lists: `nn.Conv2d`, `ops.MatMul`")
def _() -> None:
    wanted = amp.custom_mixed_precision(CLASSIFIER, white_list=["Conv", "Gemm", "MatMul"])
    for names in (["Conv2d", "Dense"], ["nn.Conv2d", "nn.Dense"], ["ops.Conv2D", "Dense"], ["conv2d", "linear"]):
        assert amp.custom_mixed_precision(CLASSIFIER, white_list=names) == wanted


DENSE = """(float[N,2] X) => (float[N,2] Y) <float[2,2] w = {1, 2, 3, 4}, float[2] b = {1, 2}> {
    product = MatMul (X, w) biased = Add (b, product) tail = Sigmoid (biased) Y = Add (tail, tail) }"""


@row("`nn.Dense` in a list")
def _() -> None:
    dense = parse(DENSE)
    for name in ("nn.Dense", "Dense", "paddle.nn.Linear", "linear"):
        converted = amp.custom_mixed_precision(dense, black_list=[*amp.get_black_list(), name])
        assert low_nodes(converted) == {"Sigmoid": 1, "Add": 1}
        assert low_nodes(amp.custom_mixed_precision(dense, white_list=[name])) == {"MatMul": 1, "Add": 1}
    assert low_nodes(amp.auto_mixed_precision(dense, "O1")) == {"MatMul": 1, "Add": 1}
    assert low_nodes(amp.custom_mixed_precision(dense, white_list=["MatMul"])) == {"MatMul": 1}
    assert [node.op_type for node in amp.auto_mixed_precision(ENCODER, "O1").graph.node].count("Cast") == 19


@row("`nn.GELU`, `nn.LayerNorm` in a list, exported as several ops")
def _() -> None:
    def calls(**lists: Any) -> dict[tuple[str, str], int]:
        return onnxamp.debugging.collect_operator_stats(amp.custom_mixed_precision(ENCODER, **lists)).calls

    white = calls(white_list=["nn.GELU"])
    assert {op: count for (op, kind), count in white.items() if kind == "float16" and op != "Cast"} == {
        "Div": 2, "Erf": 2, "Add": 2, "Mul": 4}  # fmt: skip
    assert calls(black_list=[*amp.get_black_list(), "gelu"])["Erf", "float32"] == 2
    assert calls(black_list=amp.get_black_list())["Erf", "float16"] == 2
    with pytest.warns(onnxamp.OptionWarning, match="nn.LayerNorm of your white list stays in float32 at 'embeddings"):
        calls(white_list=["nn.LayerNorm"])
    alone = parse("(float[N] X) => (float[N] Y) { e = Erf (X) Y = Neg (e) }")
    said = "'nn.GELU' in your lists was not recognized in the model, but its Erf may implement it"
    with pytest.warns(onnxamp.OptionWarning, match=said):
        amp.custom_mixed_precision(alone, white_list=["nn.GELU"])


@row("`ops.Square` in a list")
def _() -> None:
    squares = parse("""(float[N] X) => (float[N] Y) <float one = {1}, float two = {2}, float three = {3}> {
        x = LayerNormalization (X, one) a = Mul (x, x) b = Pow (a, two) c = Mul (a, b) Y = Pow (c, three) }""")
    found = amp.custom_mixed_precision(squares, black_list=[*amp.get_black_list(), "ops.Square"])
    assert low_nodes(found) == {"Mul": 1, "Pow": 1}
    assert low_nodes(amp.custom_mixed_precision(squares, white_list=["square"])) == {"Mul": 1, "Pow": 1}


def low_nodes(converted: ModelProto) -> dict[str, int]:
    """Float16 nodes by op type, Casts apart."""
    calls = onnxamp.debugging.collect_operator_stats(converted).calls
    return {op: count for (op, kind), count in calls.items() if count and kind == "float16" and op != "Cast"}


@row("`ValueError`: neither list is given, or both are")
def _() -> None:
    with pytest.raises(ValueError, match="exactly one of white_list and black_list; neither is given"):
        amp.custom_mixed_precision(model())
    raises(ValueError, "both are given", network=model(), white_list=["MatMul"], black_list=["Softmax"])


@row("`TypeError`: a list is none, or holds something else")
def _() -> None:
    for name in ("white_list", "black_list"):
        for wrong in ("MatMul", 3, [3], [onnx.NodeProto]):
            raises(TypeError, f"{name} must", network=model(), **{name: wrong})
    assert low(amp.custom_mixed_precision(model(), white_list={"Softmax"})) == {"Softmax"}


@row("a log message for each entry that `black_list` drops")
def _() -> None:
    with pytest.warns(onnxamp.OptionWarning) as caught:
        amp.custom_mixed_precision(model(), black_list=["nn.LayerNorm"])
    said = [str(item.message) for item in caught]
    assert said == ["BatchNormalization is on MindSpore's black list, but not on yours."]
    assert {item.filename for item in caught} == {__file__}
    with pytest.warns(onnxamp.OptionWarning, match="Your white list removes LayerNormalization from the black list"):
        onnxamp.convert_model(model(), lists="mindspore", white_list=["LayerNormalization"])


@row("(nothing) 1")
def _() -> None:
    with pytest.warns(onnxamp.OptionWarning, match="'Sofmax' in your lists does not occur .* mean 'Softmax'"):
        amp.custom_mixed_precision(model(), white_list=["Sofmax"])


@row("(nothing) 2")
def _() -> None:
    with pytest.warns(
        onnxamp.OptionWarning, match="Sqrt of your white list stays in float32 at .*: part of a decomposed op"
    ):
        amp.custom_mixed_precision(ENCODER, white_list=["Sqrt"])


@row("(nothing) 3")
def _() -> None:
    transposed = parse("""(float[1,1,2,2] X) => (float[1,1,3,3] Y) <float[1,1,2,2] w = {1, 2, 3, 4}> {
        [here] Y = ConvTranspose (X, w) }""")
    for convert in (
        lambda: amp.auto_mixed_precision(transposed, "O1", "bfloat16"),
        lambda: amp.custom_mixed_precision(transposed, white_list=["nn.Conv2dTranspose"], dtype="bfloat16"),
    ):
        with pytest.warns(onnxamp.OptionWarning, match="ConvTranspose of .* white list stays in float32 at 'here'"):
            convert()
    with warnings.catch_warnings(action="error"):
        assert low(amp.auto_mixed_precision(transposed, "O1")) == {"ConvTranspose"}


@row("(nothing) 4")
def _() -> None:
    said = "These nodes stay in float32, because float16 would .*'embeddings/norm/square' .Pow.*Part of a decomposed op"
    for level in ("O2", "O3"):
        with pytest.warns(onnxamp.HazardWarning, match=said) as caught:
            amp.auto_mixed_precision(ENCODER, level)
        assert {item.filename for item in caught} == {__file__}
    assert not issubclass(onnxamp.HazardWarning, onnxamp.OptionWarning)
    assert amp.HazardWarning is onnxamp.HazardWarning


@row("converting a converted network is not supported")
def _() -> None:
    once = amp.auto_mixed_precision(model(), "O2")
    assert amp.auto_mixed_precision(once, "O2") == once


@row('`auto_mixed_precision(network, level="O2")`, as other functions call it')
def _() -> None:
    assert amp.auto_mixed_precision(model(), level="O2") == amp.auto_mixed_precision(model(), amp_level="O2")
