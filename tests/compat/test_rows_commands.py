"""One test per row about options of commands and passes in docs/coming-from-converters.md."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from coming_from import RowTests, rows
from compat_nets import FEEDS, command, io_types, low, low_nodes, model, weights
from graphs.case import parse
from onnx import ModelProto, TensorProto
from repository import ROOT

import onnxamp

PAGE = "coming-from-converters"
AUTOCAST = [cell for cell in rows("ModelOpt AutoCast", page=PAGE) if cell.startswith(("`-", "no `-"))]
CELLS = [*AUTOCAST, *rows("Olive", "transformers.js", page=PAGE)]
TESTS = RowTests()
row = TESTS.row
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
CLASSIFIER = ROOT / "models" / "classifier.onnx"
HELP = command("convert", "--help-all").output


def test_each_row_has_a_test() -> None:
    assert sorted(TESTS) == sorted(CELLS)


@pytest.mark.mostly_slow(fast=10)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.filterwarnings("ignore::onnxamp.OnnxAmpWarning")
def test_row(cell: str) -> None:
    TESTS[cell]()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")
    np.savez("x.npz", **FEEDS)


def converted(*options: str, strict: bool = True) -> ModelProto:
    """What the command line makes of the model."""
    done = command("convert", "m.onnx", "-o", "out.onnx", "--no-validate", *options, *(["--strict"] if strict else []))
    assert done.exit_code == 0, done.output
    return onnx.load("out.onnx")


def nothing(*flags: str) -> Callable[[], None]:
    """A test that the command line has no such options."""

    def test() -> None:
        assert [flag for flag in flags if flag in HELP] == []

    return test


# --- ModelOpt AutoCast ------------------------------------------------------------------------------------------------


@row("`--onnx_path MODEL`")
def _() -> None:
    assert low(converted()) >= {"MatMul", "Add"}


@row("`--output_path OUT`")
def _() -> None:
    assert command("convert", "m.onnx", "--no-validate").exit_code == 0
    assert Path("m_fp16.onnx").exists()


@row("`--low_precision_type bf16`, `-t bf16`")
def _() -> None:
    assert weights(converted("--dtype", "bf16"))["v"].dtype.name == "bfloat16"


@row("`--calibration_data PATH`, `-d PATH`")
def _() -> None:
    assert low_nodes(converted("--inputs", "x.npz", "--data-max", "512")) == {"last"}


@row("`--nodes_to_exclude REGEX`, `-ne REGEX`")
def _() -> None:
    assert low_nodes(converted("--keep-fp32", "(fir).*")) == {"last"}
    assert low_nodes(converted("--keep-fp32", "(fir|las).*")) == set()


@row("`--op_types_to_exclude OP`, `-ope OP`")
def _() -> None:
    assert low(converted("--black", "MatMul")).isdisjoint({"MatMul"})


@row("`--nodes_to_include REGEX`, `-ni REGEX`")
def _() -> None:
    assert low_nodes(converted("--black", "MatMul", "--force-low", "(las).*")) == {"last"}
    done = command("convert", "m.onnx", "-o", "out.onnx", "--keep-fp32", ".*", "--force-low", "(las).*")
    assert "contradicts" in done.output


@row("`--op_types_to_include OP`, `-opi OP`")
def _() -> None:
    assert "Softmax" not in low(converted("--lists", "conservative"))
    assert "Softmax" in low(converted("--lists", "conservative", "--white", "Softmax"))


@row("no `--data_max`")
def _() -> None:
    assert low_nodes(converted("--inputs", "x.npz", "--data-max", "512")) == {"last"}
    assert low_nodes(converted()) == {"first", "last"}


@row("`--data_max X`")
def _() -> None:
    assert low_nodes(converted("--inputs", "x.npz", "--data-max", "1e6")) == {"first", "last"}


@row("`--init_max X`")
def _() -> None:
    assert low_nodes(converted("--init-max", "19999")) == {"last"}


row("`--init_conversion_max_bytes N`")(nothing("max-bytes"))
row("`--max_depth_of_reduction N`")(nothing("depth"))


@row("no `--keep_io_types`")
def _() -> None:
    assert set(io_types(converted("--io-types", "low")).values()) == {HALF}


@row("`--keep_io_types`")
def _() -> None:
    assert set(io_types(converted()).values()) == set(io_types(converted("--io-types", "keep")).values()) == {FLOAT}


@row("`--log_level LEVEL`")
def _() -> None:
    lengths = [len(command("convert", "m.onnx", "-o", "out.onnx", *more).output) for more in (["-q"], [], ["-v"])]
    assert 0 == lengths[0] < lengths[1] < lengths[2]


@row("`--providers cuda:0`")
def _() -> None:
    done = command("convert", "m.onnx", "-o", "out.onnx", "--provider", "cuda")
    assert onnxamp.amp.is_float16_supported() == (done.exit_code == 0)


@row("`--trt_plugins LIB`")
def _() -> None:
    done = command("convert", "m.onnx", "-o", "out.onnx", "--custom-ops-library", "x.npz")
    assert done.exit_code == 2
    assert "ONNX Runtime cannot load custom ops from" in done.output


@row("`--trt_plugins_precision OP:fp16`")
def _() -> None:
    plugin = model()
    plugin.graph.node[2].CopyFrom(onnx.helper.make_node("Plug", ["c"], ["d"], "plus", domain="trt.plugins"))
    plugin.opset_import.add(domain="trt.plugins", version=1)
    onnx.save(plugin, "m.onnx")
    types = 'inputs = ["T"]\noutputs = ["T"]\ntypes = { T = ["float", "float16"] }\n'
    Path("ops.toml").write_text(f'[[op]]\ndomain = "trt.plugins"\ntype = "Plug"\n{types}', encoding="utf-8")
    result = converted("--custom-ops", "ops.toml", "--black", "Softmax")
    onnx.save(result, "out.onnx")
    casts = {node.input[0] for node in result.graph.node if node.op_type == "Cast"}
    assert "c" in casts
    assert "d" not in casts  # it is low as it is made


@row("`--opset N`")
def _() -> None:
    assert converted("--opset", "18").opset_import[0].version == 18


row("`--use_standalone_type_inference`")(nothing("inference", "infer"))


# --- Olive ------------------------------------------------------------------------------------------------------------


@row("`OnnxFloatToFloat16`")
def _() -> None:
    result = converted("--io-types", "low")
    assert set(io_types(result).values()) == {HALF}
    assert low_nodes(result) == {"first", "last"}


@row("`min_positive_val`, `max_finite_val` of `OnnxFloatToFloat16`")
def _() -> None:
    nothing("min-positive", "max-finite")()
    limited = onnxamp.compat.onnxruntime_transformers.convert_float_to_float16("m.onnx", 1e-3, 1000)
    assert weights(limited)["w"].max() == 1000


@row("`keep_io_types`: a bool or a list")
def _() -> None:
    assert io_types(converted("--io-types", "keep:Y,X")) == {"X": FLOAT, "Y": FLOAT, "top": HALF}


row("`use_symbolic_shape_infer`")(nothing("shape-infer", "symbolic"))


@row("`op_block_list` of `OnnxFloatToFloat16`")
def _() -> None:
    assert "Add" not in low(converted("--black", "Add"))


@row("`op_include_list`")
def _() -> None:
    assert low(converted("--level", "O1", "--white", "Softmax", strict=False)) >= {"MatMul", "Softmax"}
    assert low(onnxamp.amp.custom_mixed_precision("m.onnx", white_list=["Softmax"])) == {"Softmax"}


@row("`node_block_list` of `OnnxFloatToFloat16`")
def _() -> None:
    assert low_nodes(converted("--keep-node", "first")) == {"last"}


@row("`node_include_list`")
def _() -> None:
    names = {"last"}
    only = onnxamp.convert_model("m.onnx", rule=lambda node: "low" if node.name in names else "high")
    assert low_nodes(only) == {"last"}
    assert low(only) == {"MatMul"}


@row("`save_as_external_data=True`")
def _() -> None:
    shutil.copy(CLASSIFIER, "m.onnx")
    converted("--external-data", "always")
    assert Path("out.onnx.data").exists()


@row("`all_tensors_to_one_file=False`")
def _() -> None:
    shutil.copy(CLASSIFIER, "m.onnx")
    converted("--external-data", "always", "--shard-size", "20kB")
    assert len(list(Path().glob("out.onnx-*.data"))) > 1


@row("`external_data_name`, `size_threshold`, `convert_attribute`")
def _() -> None:
    nothing("external-data-name", "threshold", "attribute")()


@row("`OrtMixedPrecision`")
def _() -> None:
    assert low_nodes(converted(strict=False)) == {"first", "last"}


@row(
    "`op_block_list` of `OrtMixedPrecision`: SimplifiedLayerNormalization, SkipSimplifiedLayerNormalization, Relu, Add"
)
def _() -> None:
    skip = "com.microsoft::SkipSimplifiedLayerNormalization"
    result = converted("--black", skip, "--black", "SimplifiedLayerNormalization", "--black", "Add", "--black", "Relu")
    assert low(result).isdisjoint({"Add", "Relu"})


@row("`atol` of `OrtMixedPrecision`: whether weights are float16 numbers already")
def _() -> None:
    result = converted("--keep-node", "last", "--io-types", "keep:Y")
    assert low_nodes(result) == {"first"}
    assert io_types(result) == {"X": HALF, "Y": FLOAT, "top": HALF}


@row("`OnnxIODataTypeConverter` with `name_pattern`, `source_dtype=10`, `target_dtype=1`")
def _() -> None:
    assert io_types(converted("--io-types", "keep:Y")) == {"X": HALF, "Y": FLOAT, "top": HALF}


row("`MixedPrecisionOverrides`")(nothing("int16", "uint16"))


# --- transformers.js --------------------------------------------------------------------------------------------------


@row("`python -m scripts.convert --quantize --modes fp16`")
def _() -> None:
    assert low_nodes(converted(strict=False)) == {"first", "last"}


@row("`scripts/quantize.py --input_folder IN --output_folder OUT --modes fp16`")
def _() -> None:
    Path("in").mkdir()
    onnx.save(model(), "in/m.onnx")
    done = command("convert", "in", "-o", "out", "--jobs", "1", "--no-validate", "--strict")
    assert done.exit_code == 0, done.output
    assert low(onnx.load("out/m.onnx")) >= {"MatMul", "Add"}


@row("inputs and outputs stay in float32")
def _() -> None:
    assert set(io_types(converted()).values()) == {FLOAT}


@row('`dtype: "fp16", device: "webgpu"`; data files `model_fp16.onnx_data`, `_data_1`, ...')
def _() -> None:
    made = converted("--preset", "transformers.js", "--external-data", "always")
    places = {
        item.value for tensor in made.graph.initializer for item in tensor.external_data if item.key == "location"
    }
    assert set(io_types(made).values()) == {FLOAT}
    assert all(place.endswith(".onnx_data") for place in places)


@row("`--op_block_list OP ...`")
def _() -> None:
    assert low(converted("--black", "MatMul", "--black", "Add")).isdisjoint({"MatMul", "Add"})


@row("`scripts/float16.py` keeps Cast in float32")
def _() -> None:
    casts: Any = [("Cast", ["X"], ["half"], {"to": HALF}), ("Cast", ["half"], ["again"], {"to": FLOAT})]
    made = converted()
    for op, inputs, outputs, attributes in casts:
        made.graph.node.insert(0, onnx.helper.make_node(op, inputs, outputs, **attributes))
    nodes = sorted(made.graph.node, key=lambda node: node.output[0] != "half")
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    for node in made.graph.node:
        if node.input[0] == "X" and node.output[0] != "half":
            node.input[0] = "again"
    onnx.save(made, "m.onnx")
    assert sum(node.op_type == "Cast" for node in converted().graph.node) < sum(
        node.op_type == "Cast" for node in made.graph.node
    )


row("`onnxslim.slim` after the conversion")(nothing("slim"))
row("`--modes q8`, `int8`, `uint8`, `q4`, `bnb4`")(nothing("int8", "q4", "quantize"))


@row("`--modes q4f16`")
def _() -> None:
    text = """(float[N,2] X) => (float[N,2] Y)
        <int8[2,2] q = {1, 2, 3, 4}, float s = {0.5}, float[2,2] w = {1, 2, 3, 4}> {
        a = DequantizeLinear (q, s) b = MatMul (X, a) [last] Y = MatMul (b, w) }"""
    onnx.save(parse(text), "m.onnx")
    result = converted()
    assert weights(result)["q"].dtype == np.int8
    assert weights(result)["w"].dtype == np.float16


row(
    "`--model_id`, `--tokenizer_id`, `--task`, `--library_name`, `--variant`, `--opset`, `--device`,"
    " `--skip_validation`, `--custom_onnx_configs` and so on"
)(nothing("model-id", "tokenizer-id", "variant", "skip-validation"))
row("`--per_channel`, `--reduce_range`, `--block_size`, `--is_symmetric`, `--accuracy_level`, `--quant_type`")(
    nothing("per-channel", "block-size", "symmetric", "accuracy-level")
)
