"""One test per row about functions in docs/coming-from-converters.md."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from coming_from import RowTests, rows
from compat_nets import FEEDS, io_types, low, low_nodes, model, weights
from onnx import ModelProto, TensorProto, numpy_helper
from repository import ROOT

import onnxamp
from onnxamp.compat import autocast, onnxconverter_common, onnxruntime_transformers
from onnxamp.compat import onnxconverter_common as float16

PAGE = "coming-from-converters"
SECTIONS = ("onnxconverter-common", "ONNX Runtime's float16", "ModelOpt AutoCast")
CELLS = [cell for cell in rows(*SECTIONS, page=PAGE) if not cell.startswith(("`-", "no `-"))]
"""AutoCast's command line is tested beside the other commands."""

TESTS = RowTests()
row = TESTS.row
ALL = {"MatMul", "Softmax", "Add"}
FLOAT, HALF, BRAIN = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
convert = float16.convert_float_to_float16
ort_convert = onnxruntime_transformers.convert_float_to_float16
NUMBERS = np.array([0, -0.0, 1e-9, -1e-9, 3, -7e4, 1e6, np.inf, -np.inf, np.nan], np.float32)


def test_each_row_has_a_test() -> None:
    assert sorted(TESTS) == sorted(CELLS)


@pytest.mark.mostly_slow(fast=20)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.filterwarnings("ignore::onnxamp.OnnxAmpWarning")
def test_row(cell: str) -> None:
    TESTS[cell]()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")


def has_signature(function: Any, cell: str) -> None:
    """The function has the names, order and defaults that the row shows."""
    written = cell.strip("`")
    name, _, listed = written.partition("(")
    assert function.__name__ == name
    wanted: list[tuple[str, Any]] = []
    for item in re.findall(r"(\w+)(?:=((?:\[[^\]]*\]|[^,\[])*?))?(?:, |\)$)", listed):
        wanted.append((item[0], eval(item[1]) if item[1] else inspect.Parameter.empty))
    found = [(key, value.default) for key, value in inspect.signature(function).parameters.items()]
    assert [key for key, _ in found] == [key for key, _ in wanted]
    for (key, ours), (_, theirs) in zip(found, wanted, strict=True):
        assert ours == (tuple(theirs) if isinstance(theirs, list) else theirs) or (ours is None and theirs == {}), key


def raises(kind: type[Exception], said: str, function: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(kind, match=said) as caught:
        function(*arguments, **options)
    assert isinstance(caught.value, onnxamp.OnnxAmpError)


def warns(said: str, function: Any, *arguments: Any, **options: Any) -> Any:
    with pytest.warns(onnxamp.OptionWarning, match=said) as caught:
        result = function(*arguments, **options)
    assert __file__ in {item.filename for item in caught}
    return result


# --- onnxconverter-common ---------------------------------------------------------------------------------------------


def holds(module: ModuleType, *names: str) -> bool:
    """Whether a module has these names, and they are those of the package that it is in."""
    package = import_module(module.__name__.rpartition(".")[0])
    return set(module.__all__) == set(names) and all(getattr(module, name) is getattr(package, name) for name in names)


@row("`from onnxconverter_common import float16`")
def _() -> None:
    from onnxamp.compat.onnxconverter_common import float16 as module

    assert holds(module, *(name for name in float16.__all__ if not name.startswith("auto_")))
    assert module.DEFAULT_OP_BLOCK_LIST == float16.DEFAULT_OP_BLOCK_LIST
    for one in (module, onnxruntime_transformers):
        blocked = one.DEFAULT_OP_BLOCK_LIST + ["Gemm"]  # noqa: RUF005 - as scripts write it
        assert low_nodes(one.convert_float_to_float16(model(), op_block_list=blocked)) == low_nodes(
            one.convert_float_to_float16(model(), op_block_list=[*blocked])
        )


@row("`from onnxconverter_common.float16 import convert_float_to_float16`")
def _() -> None:
    from onnxamp.compat.onnxconverter_common.float16 import convert_float_to_float16

    assert convert_float_to_float16 is convert


@row("`from onnxconverter_common import auto_mixed_precision`")
def _() -> None:
    from onnxamp.compat.onnxconverter_common import auto_mixed_precision, auto_mixed_precision_model_path

    assert holds(auto_mixed_precision, "auto_convert_mixed_precision")
    assert holds(auto_mixed_precision_model_path, "auto_convert_mixed_precision_model_path")


SIGNATURE = (
    "`convert_float_to_float16(model, min_positive_val=1e-7, max_finite_val=1e4, keep_io_types=False,"
    " disable_shape_infer=False, op_block_list=None, node_block_list=None, check_fp16_ready=True)`"
)


@row(SIGNATURE)
def _() -> None:
    has_signature(convert, SIGNATURE)
    assert low(convert(model())) == ALL
    assert low(convert(model(), op_block_list=[])) == ALL | {"Max"}
    onnx.checker.check_model(convert(model()), full_check=True)


@row("`model`: a ModelProto, which may be changed")
def _() -> None:
    original = model()
    assert isinstance(convert(original), ModelProto)
    assert original == model()
    assert convert("m.onnx") == convert(Path("m.onnx")) == convert(model())
    raises(TypeError, "model must be", convert, 3)


@row("`min_positive_val`, `max_finite_val`")
def _() -> None:
    limited = weights(convert(model(), 1e-3, 1000.0))
    assert limited["w"].max() == 1000
    np.testing.assert_array_equal(limited["v"], np.float16([[0.5, 1e-3], [0, 1]]))
    assert weights(convert(model()))["w"].max() == 1e4  # the default of that tool
    assert weights(onnxamp.convert_model(model(), strict=True))["w"].max() == 20000
    kept = weights(convert(model(), 1e-3, 1000.0, node_block_list=["first", "last"]))
    assert kept["w"].dtype == np.float32
    assert kept["w"].max() == 20000
    raises(ValueError, "min_positive_val must be positive", convert, model(), 0)


@row("`keep_io_types=False`")
def _() -> None:
    assert set(io_types(convert(model())).values()) == {HALF}


@row("`keep_io_types=True`")
def _() -> None:
    assert set(io_types(convert(model(), keep_io_types=True)).values()) == {FLOAT}
    assert io_types(convert(model(), keep_io_types=["Y"])) == {"X": HALF, "Y": FLOAT, "top": HALF}


@row("`disable_shape_infer=True`")
def _() -> None:
    assert convert(model(), disable_shape_infer=True) == convert(model())


@row("`op_block_list=[...]`")
def _() -> None:
    assert low(convert(model(), op_block_list=["MatMul"])) == {"Softmax", "Add", "Max"}
    warns("'Sofmax' in your lists does not occur .* mean 'Softmax'", convert, model(), op_block_list=["Sofmax"])
    other = model()
    other.graph.node[2].CopyFrom(onnx.helper.make_node("Gelu", ["c"], ["d"], "plus", domain="com.microsoft"))
    other.opset_import.add(domain="com.microsoft", version=1)
    assert "com.microsoft::Gelu" in low(convert(other))
    assert "com.microsoft::Gelu" not in low(convert(other, op_block_list=["Gelu"]))


@row("`op_block_list=None`")
def _() -> None:
    assert "Max" not in low(convert(model()))
    assert "Softmax" not in low(convert(model(), op_block_list=[*float16.DEFAULT_OP_BLOCK_LIST, "Softmax"]))
    with pytest.raises(onnxamp.ArgumentTypeError, match="must be a list of names, not str"):
        convert(model(), op_block_list="Softmax")  # its letters name no op types


@row("`node_block_list=[...]`")
def _() -> None:
    assert low_nodes(convert(model())) == {"first", "last"}
    assert low_nodes(convert(model(), node_block_list=["first"])) == {"last"}
    warns("No node and no output of a node is called 'firs'", convert, model(), node_block_list=["firs"])


@row("`check_fp16_ready=True`: `ValueError`")
def _() -> None:
    raises(ValueError, "holds float16 already", convert, convert(model()))


@row("`check_fp16_ready=False`")
def _() -> None:
    half = convert(model(), node_block_list=["first"], keep_io_types=True)
    assert low_nodes(convert(half, check_fp16_ready=False)) == {"first", "last"}


PATH = (
    "`convert_float_to_float16_model_path(model_path, min_positive_val=1e-7, max_finite_val=1e4, keep_io_types=False)`"
)


@row(PATH)
def _() -> None:
    has_signature(float16.convert_float_to_float16_model_path, PATH)
    assert float16.convert_float_to_float16_model_path("m.onnx") == convert(model())


NUMPY = "`convert_np_to_float16(np_array, min_positive_val=1e-7, max_finite_val=1e4)`"


@row(NUMPY)
def _() -> None:
    has_signature(float16.convert_np_to_float16, NUMPY)
    found = warns(r"^4 numbers are outside \[1e-07, 10000\] in magnitude", float16.convert_np_to_float16, NUMBERS)
    wanted = np.float16([0, -0.0, 1e-7, -1e-7, 3, -1e4, 1e4, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    assert found.dtype == np.float16
    assert float16.convert_np_to_float16(np.zeros((2, 0, 3), np.float32)).shape == (2, 0, 3)


TENSOR = "`convert_tensor_float_to_float16(tensor, min_positive_val=1e-7, max_finite_val=1e4)`"


@row(TENSOR)
def _() -> None:
    has_signature(float16.convert_tensor_float_to_float16, TENSOR)
    converts_in_place(float16.convert_tensor_float_to_float16, 1e4)


def converts_in_place(function: Any, most: float) -> None:
    for given in (numpy_helper.from_array(NUMBERS, "w"), onnx.helper.make_tensor("w", FLOAT, [10], NUMBERS.tolist())):
        given.doc_string = "mine"
        assert function(given) is given
        assert (given.data_type, given.name, given.doc_string) == (HALF, "w", "mine")
        assert numpy_helper.to_array(given)[6] == np.float16(most)
    integers = numpy_helper.from_array(np.arange(3), "i")
    assert numpy_helper.to_array(function(integers)).tolist() == [0, 1, 2]
    raises(TypeError, "must be an onnx.TensorProto", function, NUMBERS)
    outside = TensorProto(name="w", data_type=FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    raises(ValueError, "is in another file", function, outside)


AUTO = "`auto_convert_mixed_precision(model, feed_dict, validate_fn=None, rtol=None, atol=None, keep_io_types=False)`"


CLASSIFIER = str(ROOT / "models" / "classifier.onnx")
IMAGE = onnxamp.random_samples(CLASSIFIER)[0]


def auto(**options: Any) -> ModelProto:
    return float16.auto_convert_mixed_precision(CLASSIFIER, IMAGE, **options)


@row(AUTO)
def _() -> None:
    has_signature(float16.auto_convert_mixed_precision, AUTO)
    result = auto(rtol=0.1, atol=0.1, keep_io_types=True)
    assert {"Conv", "Gemm"} <= low(result)
    assert set(io_types(result).values()) == {FLOAT}
    assert set(io_types(auto(rtol=0.1, atol=0.1)).values()) == {HALF}


@row("`feed_dict`")
def _() -> None:
    raises(ValueError, "Z", float16.auto_convert_mixed_precision, model(), {"Z": np.ones(2)}, rtol=0.1)


@row("`validate_fn(outputs, other_outputs)`: lists")
def _() -> None:
    seen: list[list[tuple[int, ...]]] = []

    def judge(one: list[Any], other: list[Any]) -> bool:
        seen.append([np.shape(array) for array in (*one, *other)])
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    result = auto(validate_fn=judge, keep_io_types=True)
    assert seen
    assert all(shapes == [(1, 10)] * 2 for shapes in seen)
    limits = onnxamp.make_limits({"max_abs": 0})
    assert onnxamp.diff_models(CLASSIFIER, result, IMAGE, provider="cpu", limits=limits).passed


@row("`rtol`, `atol`")
def _() -> None:
    assert "Conv" in low(auto(atol=10.0))  # and rtol is 1e-5
    assert low(auto(rtol=1e-9, atol=1e-9, keep_io_types=True)) == set()
    assert low(auto(rtol=1e-9, atol=1e-9, validate_fn=lambda *_: True, keep_io_types=True)) == set()


@row("`ValueError`: neither `validate_fn` nor a tolerance is given")
def _() -> None:
    raises(ValueError, "nothing to judge by", auto)


@row("`ValueError`: validation fails for the original")
def _() -> None:
    raises(ValueError, "rejects the original's own outputs", auto, validate_fn=lambda *_: False)


AUTO_PATH = (
    "`auto_convert_mixed_precision_model_path(source_model_path, input_feed, target_model_path, provider,"
    " location=None, customized_validate_func=None, rtol=None, atol=None, keep_io_types=True, verbose=False)`"
)


def auto_path(*arguments: Any, **options: Any) -> ModelProto:
    float16.auto_convert_mixed_precision_model_path(*arguments, **options)
    return onnx.load("out/low.onnx")


GIVEN = (CLASSIFIER, IMAGE, "out/low.onnx", ["CPUExecutionProvider"])


@row(AUTO_PATH)
def _() -> None:
    has_signature(float16.auto_convert_mixed_precision_model_path, AUTO_PATH)
    result = auto_path(*GIVEN, rtol=0.1, atol=0.1)
    assert {"Conv", "Gemm"} <= low(result)
    assert set(io_types(result).values()) == {FLOAT}


@row("`provider=['CUDAExecutionProvider']`")
def _() -> None:
    arguments = (*GIVEN[:3], ["CUDAExecutionProvider"])
    if onnxamp.amp.is_float16_supported():
        assert "Conv" in low(auto_path(*arguments, rtol=0.1, atol=0.1))
    else:
        raises(onnxamp.RuntimeFailure, "CUDA cannot be used here", auto_path, *arguments)


@row("`location='fp16_tensor.data'`")
def _() -> None:
    warns("would be called 'low.onnx.data'", auto_path, *GIVEN, rtol=0.1, location="fp16_tensor.data")


@row("`customized_validate_func`")
def _() -> None:
    assert "Conv" in low(auto_path(*GIVEN, customized_validate_func=lambda *_: True, rtol=1e-9))
    close = onnxamp.diff_models(
        CLASSIFIER, auto_path(*GIVEN), IMAGE, provider="cpu",
        accept=lambda one, other: np.allclose(one["logits"], other["logits"], 1e-3, 1e-5),
    )  # fmt: skip
    assert close.passed


@row("`verbose=True`")
def _() -> None:
    warns("verbose=True has no effect", auto_path, *GIVEN, rtol=0.1, verbose=True)


@row("`TypeError`, `ValueError`: a path or feed is none")
def _() -> None:
    raises(TypeError, "source_model_path must be a path", auto_path, model(), *GIVEN[1:])
    raises(TypeError, "input_feed must be a dict", auto_path, CLASSIFIER, [1], *GIVEN[2:])
    raises(ValueError, "There is no file 'nosuch.onnx'", auto_path, "nosuch.onnx", *GIVEN[1:])


# --- ONNX Runtime's float16 -------------------------------------------------------------------------------------------


@row("`from onnxruntime.transformers.float16 import convert_float_to_float16`")
def _() -> None:
    from onnxamp.compat.onnxruntime_transformers import float16 as module

    assert holds(module, *onnxruntime_transformers.__all__)
    theirs = pytest.importorskip("onnxruntime.transformers.float16")
    for name in onnxruntime_transformers.__all__:
        ours, original = getattr(onnxruntime_transformers, name), getattr(theirs, name)
        if name == "DEFAULT_OP_BLOCK_LIST":
            assert list(ours) == original
        else:
            one, other = (inspect.signature(found).parameters.values() for found in (ours, original))
            assert [(item.name, item.default) for item in one] == [(item.name, item.default) for item in other]


ORT = (
    "`convert_float_to_float16(model, min_positive_val=5.96e-08, max_finite_val=65504.0, keep_io_types=False,"
    " disable_shape_infer=False, op_block_list=None, node_block_list=None, force_fp16_initializers=False,"
    " force_fp16_inputs=None, use_bfloat16_as_blocked_nodes_dtype=False)`"
)


@row(ORT)
def _() -> None:
    has_signature(ort_convert, ORT)
    assert low(ort_convert(model(), disable_shape_infer=True)) == ALL
    assert weights(ort_convert(model()))["w"].max() == 20000


@row("`model`: a ModelProto, or a path as a string")
def _() -> None:
    assert ort_convert("m.onnx") == ort_convert(Path("m.onnx")) == ort_convert(model())


@row("`AssertionError`: `min_positive_val` or `max_finite_val` is out of float16's range")
def _() -> None:
    raises(ValueError, "min_positive_val must be at least", ort_convert, model(), 1e-9)
    raises(ValueError, "max_finite_val at most 65504", ort_convert, model(), max_finite_val=1e5)


@row('`keep_io_types=["logits"]`')
def _() -> None:
    assert io_types(ort_convert(model(), keep_io_types=["Y"])) == {"X": HALF, "Y": FLOAT, "top": HALF}
    warns("no input or output 'logits'", ort_convert, model(), keep_io_types=["logits"])


@row("`op_block_list=None` of ONNX Runtime")
def _() -> None:
    assert "TreeEnsemble" in onnxruntime_transformers.DEFAULT_OP_BLOCK_LIST
    assert "Resize" not in onnxruntime_transformers.DEFAULT_OP_BLOCK_LIST
    assert low(ort_convert(model(), op_block_list=["Softmax"])) == {"MatMul", "Add", "Max"}


@row("`node_block_list=[...]` of ONNX Runtime")
def _() -> None:
    assert low_nodes(ort_convert(model(), node_block_list=["last"])) == {"first"}


@row("`force_fp16_initializers=True`")
def _() -> None:
    for forced, kind in ((False, np.float32), (True, np.float16)):
        result = ort_convert(model(), node_block_list=["last"], force_fp16_initializers=forced)
        assert weights(result)["v"].dtype == kind
    onnx.checker.check_model(result, full_check=True)


@row('`force_fp16_inputs={"Resize": [2]}`')
def _() -> None:
    raises(ValueError, "force_fp16_inputs is not supported", ort_convert, model(), force_fp16_inputs={"Resize": [2]})
    assert ort_convert(model(), force_fp16_inputs={}) == ort_convert(model())


@row("`use_bfloat16_as_blocked_nodes_dtype=True`")
def _() -> None:
    raises(ValueError, "blocked nodes stay in float32", ort_convert, model(), use_bfloat16_as_blocked_nodes_dtype=True)


ORT_NUMPY = "`convert_np_to_float16(np_array, min_positive_val=5.96e-08, max_finite_val=65504.0)`"
ORT_TENSOR = "`convert_tensor_float_to_float16(tensor, min_positive_val=5.96e-08, max_finite_val=65504.0)`"
ORT_DIFF = "`float_to_float16_max_diff(tensor, min_positive_val=5.96e-08, max_finite_val=65504.0)`"


@row(ORT_NUMPY)
def _() -> None:
    has_signature(onnxruntime_transformers.convert_np_to_float16, ORT_NUMPY)
    theirs = pytest.importorskip("onnxruntime.transformers.float16")
    numbers = np.concatenate([NUMBERS, np.random.default_rng(0).normal(0, 1, 1000) * 10.0 ** np.arange(-10, 6, 0.016)])
    for given in (numbers.astype(np.float32), numbers):
        found = onnxruntime_transformers.convert_np_to_float16(given)
        np.testing.assert_array_equal(
            found.view(np.uint16)[:-1], theirs.convert_np_to_float16(given).view(np.uint16)[:-1]
        )


@row(ORT_TENSOR)
def _() -> None:
    has_signature(onnxruntime_transformers.convert_tensor_float_to_float16, ORT_TENSOR)
    converts_in_place(onnxruntime_transformers.convert_tensor_float_to_float16, 65504)


@row(ORT_DIFF)
def _() -> None:
    has_signature(onnxruntime_transformers.float_to_float16_max_diff, ORT_DIFF)
    theirs = pytest.importorskip("onnxruntime.transformers.float16")
    tensor = numpy_helper.from_array(np.random.default_rng(0).normal(0, 100, (7, 9)).astype(np.float32))
    found = onnxruntime_transformers.float_to_float16_max_diff(tensor)
    assert found == pytest.approx(float(theirs.float_to_float16_max_diff(tensor)), rel=1e-6)
    raises(ValueError, "is not float32", onnxruntime_transformers.float_to_float16_max_diff,
           numpy_helper.from_array(np.arange(3)))  # fmt: skip


@row("`OnnxModel(model).convert_float_to_float16(use_symbolic_shape_infer=True, **kwargs)`")
def _() -> None:
    assert set(io_types(ort_convert(model(), keep_io_types=True)).values()) == {FLOAT}


# --- ModelOpt AutoCast ------------------------------------------------------------------------------------------------


def cast(**options: Any) -> ModelProto:
    return autocast.convert_to_mixed_precision("m.onnx", **{"data_max": None, **options})


@row("`from modelopt.onnx.autocast import convert_to_mixed_precision`")
def _() -> None:
    assert {"convert_to_mixed_precision", "convert_to_f16"} <= set(autocast.__all__)


MIXED = (
    "`convert_to_mixed_precision(onnx_path, low_precision_type='fp16', nodes_to_exclude=None, op_types_to_exclude=None,"
    " nodes_to_include=None, op_types_to_include=None, data_max=512, init_max=65504.0, keep_io_types=False,"
    " calibration_data=None, custom_rule=None, init_conversion_max_bytes=None, providers=['cpu'], trt_plugins=[],"
    " trt_plugins_precision=[], max_depth_of_reduction=None, opset=None, use_standalone_type_inference=False)`"
)


@row(MIXED)
def _() -> None:
    has_signature(autocast.convert_to_mixed_precision, MIXED)
    assert low(cast()) == ALL | {"Max"}
    assert set(io_types(cast()).values()) == {HALF}
    assert set(io_types(cast(keep_io_types=True)).values()) == {FLOAT}


@row("`low_precision_type='bf16'`")
def _() -> None:
    assert BRAIN in io_types(cast(low_precision_type="bf16")).values()
    raises(ValueError, "must be 'fp16' or 'bf16', not 'int8'", cast, low_precision_type="int8")


@row("`nodes_to_exclude=[...]`: regular expressions that match from the start of a name")
def _() -> None:
    assert low_nodes(cast(nodes_to_exclude=["fir"])) == {"last"}
    assert low_nodes(cast(nodes_to_exclude=["irst"])) == {"first", "last"}
    raises(TypeError, "must be a list", cast, nodes_to_exclude="first")
    raises(ValueError, "is not a regular expression", cast, nodes_to_exclude=["("])


@row("`op_types_to_exclude=[...]`")
def _() -> None:
    assert low(cast(op_types_to_exclude=["MatMul"])) == {"Softmax", "Add", "Max"}


@row("`nodes_to_include=[...]`, `op_types_to_include=[...]`")
def _() -> None:
    assert low_nodes(cast(op_types_to_exclude=["MatMul"], nodes_to_include=["las"])) == {"last"}
    assert low_nodes(cast(nodes_to_exclude=[".*"], op_types_to_include=["MatMul"])) == {"first", "last"}
    assert low_nodes(cast(init_max=10, nodes_to_include=["first"])) == {"first", "last"}
    assert low_nodes(cast(data_max=1e-3, nodes_to_include=["first"])) == {"first"}


@row("`data_max=512`")
def _() -> None:
    np.savez("x.npz", **FEEDS)
    assert low_nodes(cast(data_max=512, calibration_data="x.npz")) == {"last"}  # the first MatMul reaches 40,000
    assert low_nodes(cast(data_max=np.inf)) == low_nodes(cast(data_max=None)) == {"first", "last"}
    assert low_nodes(cast(data_max=1e6, calibration_data="x.npz")) == {"first", "last"}


@row("`init_max=65504.0`")
def _() -> None:
    assert low_nodes(cast(init_max=19999)) == {"last"}
    assert low_nodes(cast(init_max=20000)) == low_nodes(cast(init_max=None)) == {"first", "last"}


@row("`calibration_data=None`")
def _() -> None:
    assert low_nodes(cast(data_max=1e-3)) == set()
    raises(ValueError, "no such file", cast, data_max=3, calibration_data="nosuch.npz")


@row("`custom_rule`: a `NodeRuleBase`")
def _() -> None:
    class Rule:
        def check(self, node: onnx.NodeProto) -> bool:
            return node.name == "last"

    assert low_nodes(cast(custom_rule=Rule())) == {"first"}
    assert low_nodes(cast(custom_rule=Rule(), nodes_to_include=["last"])) == {"first", "last"}


@row("`init_conversion_max_bytes`")
def _() -> None:
    raises(ValueError, "init_conversion_max_bytes is not supported", cast, init_conversion_max_bytes=1)


@row("`providers=['cuda:0', 'cpu']`")
def _() -> None:
    warns("The provider 'trt' is not used", cast, providers=["trt", "cpu"])
    if not onnxamp.amp.is_float16_supported():
        raises(onnxamp.RuntimeFailure, "CUDA cannot be used", cast, providers=["cuda:0", "cpu"], data_max=3)


@row("`trt_plugins`, `trt_plugins_precision`")
def _() -> None:
    raises(ValueError, "Plugins of TensorRT are not loaded", cast, trt_plugins=["libplugin.so"])
    raises(ValueError, "Plugins of TensorRT are not loaded", cast, trt_plugins_precision=["Op:fp16"])
    assert cast(trt_plugins=[], trt_plugins_precision=None) == cast()
    plugin = model()
    plugin.graph.node[2].CopyFrom(onnx.helper.make_node("Plug", ["c"], ["d"], "plus", domain="trt.plugins"))
    plugin.opset_import.add(domain="trt.plugins", version=1)
    onnx.save(plugin, "m.onnx")
    assert "trt.plugins::Plug" not in low(cast())
    types = {"T": ["float", "float16"]}
    with onnxamp.custom_ops(onnxamp.CustomOp("trt.plugins", "Plug", inputs=["T"], outputs=["T"], types=types)):
        assert "trt.plugins::Plug" in low(cast())


@row("`max_depth_of_reduction`")
def _() -> None:
    raises(ValueError, "max_depth_of_reduction is not supported", cast, max_depth_of_reduction=1024)


@row("`opset=None`: at least 13 for fp16, 22 for bf16")
def _() -> None:
    assert cast().opset_import[0].version == cast(low_precision_type="bf16").opset_import[0].version == 17
    onnx.save(model(12), "m.onnx")
    assert cast().opset_import[0].version == 13


@row("`opset=18`")
def _() -> None:
    assert cast(opset=18).opset_import[0].version == 18
    assert warns("opset=13 is ignored", cast, opset=13).opset_import[0].version == 17


@row("`use_standalone_type_inference=True`")
def _() -> None:
    assert cast(use_standalone_type_inference=True) == cast()


F16 = (
    "`convert_to_f16(model, low_precision_type='fp16', keep_io_types=True, op_block_list=[], tensor_block_dict={},"
    " trt_plugins=[], use_standalone_type_inference=False, opset=None)`"
)


@row(F16)
def _() -> None:
    has_signature(autocast.convert_to_f16, F16)
    assert set(io_types(autocast.convert_to_f16(model())).values()) == {FLOAT}
    assert low(autocast.convert_to_f16(model(), op_block_list=["MatMul"])) == {"Softmax", "Add", "Max"}
    assert BRAIN in io_types(autocast.convert_to_f16(model(), "bf16", keep_io_types=False)).values()
    raises(ValueError, "TensorRT are not loaded", autocast.convert_to_f16, model(), trt_plugins=["libplugin.so"])


@row("`tensor_block_dict`")
def _() -> None:
    block = {"Add": {"inp": [0]}}
    raises(ValueError, "tensor_block_dict is not", autocast.convert_to_f16, model(), tensor_block_dict=block)


@row("fp64 is converted to float32 first")
def _() -> None:
    double = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (double[2] X) => (double[2] Y) { Y = Neg (X) }'
    )
    assert io_types(autocast.convert_to_f16(double)) == {"X": TensorProto.DOUBLE, "Y": TensorProto.DOUBLE}


def test_hazards_are_told() -> None:
    broken = model()
    broken.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((2, 2), 1e6, np.float32), "w"))
    for function in (convert, ort_convert, autocast.convert_to_f16):
        with pytest.warns(onnxamp.HazardWarning, match=r"'first' \(MatMul\)") as caught:
            assert low_nodes(function(broken)) == {"last"}
        assert {item.filename for item in caught} == {__file__}


def test_modules_are_named_by_what_they_stand_for() -> None:
    assert {onnxconverter_common, onnxruntime_transformers, autocast} == {
        getattr(onnxamp.compat, name) for name in onnxamp.compat.__all__
    }
