"""The pass for onnx-ir's pipelines."""

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass
from repository import ROOT

import onnxamp
from onnxamp.ir import MixedPrecisionPass

ENCODER = ROOT / "models" / "encoder.onnx"


def test_the_result_is_that_of_the_function() -> None:
    model = ir.load(ENCODER)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    result = MixedPrecisionPass("O3", dtype="bfloat16")(model)
    assert result.modified
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before, "the given model is left alone"
    expected = onnxamp.convert_model(ir.to_proto(model), "O3", dtype="bfloat16")
    assert [node.op_type for node in result.model.graph] == [node.op_type for node in expected.graph.node]
    types = {value.name: value.dtype for value in result.model.graph.initializers.values()}
    assert types == {tensor.name: tensor.data_type for tensor in expected.graph.initializer}


def test_it_runs_among_other_passes() -> None:
    model = ir.load(ENCODER)
    pipeline = ir.passes.Sequential(RemoveUnusedNodesPass(), MixedPrecisionPass(), TopologicalSortPass())
    converted = ir.to_proto(pipeline(model).model)
    onnx.checker.check_model(converted, full_check=True)
    report = onnxamp.diff_models(onnx.load(ENCODER), converted)
    assert report.passed, str(report)


def test_a_model_that_stays_is_not_modified() -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (int64[2] x) => (int64[2] y) { y = Add (x, x) }'
    result = MixedPrecisionPass()(ir.from_proto(onnx.parser.parse_model(text)))
    assert not result.modified


def test_weights_in_files_are_read(tmp_path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load(ENCODER), path, save_as_external_data=True, location="data", size_threshold=0)
    result = MixedPrecisionPass()(ir.load(path)).model
    expected = onnxamp.convert_model(path)
    for tensor in expected.graph.initializer:
        found = result.graph.initializers[tensor.name].const_value
        np.testing.assert_array_equal(found.numpy(), onnx.numpy_helper.to_array(tensor))
