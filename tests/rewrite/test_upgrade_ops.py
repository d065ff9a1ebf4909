"""Every step of every op that ``_data/upgrades.toml`` takes computes what it did, as ONNX Runtime and onnx judge it."""

import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from every import every
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from upgrade_cases import CASES, OLD, REFUSED, Case

import onnxamp
from onnxamp._facts.tables import read_table
from onnxamp._graph.graph import Graph
from onnxamp._rewrite.passes.upgrade import plan_upgrade
from onnxamp._rewrite.passes.upgrade_rules import steps_of

NEWEST = min(26, onnx.defs.onnx_opset_version())
"""The newest opset that ONNX Runtime loads."""


def run(model: ModelProto, case: Case) -> list[Any] | None:
    """The outputs by ONNX Runtime, or by onnx where that has no kernel; None if neither has one."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, case.feeds)
    except Exception:  # noqa: BLE001 - it raises errors of many types
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ReferenceEvaluator(model).run(None, case.feeds)
        except Exception:  # noqa: BLE001 - so does onnx
            return None


def agree(expected: list[Any], found: list[Any]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        if one.dtype.kind == "f":
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)  # sums may go in another order
        else:
            np.testing.assert_array_equal(other, one)


def upgraded(case: Case, opset: int) -> ModelProto:
    upgrade = plan_upgrade(Graph.of(case.model()), opset)
    assert upgrade.obstacle is None
    newer = upgrade.result.model
    onnx.shape_inference.infer_shapes(newer, check_type=True)
    assert newer.opset_import[0].version == opset
    return newer


@pytest.mark.slow
@every(4, case=CASES)
def test_an_op_computes_the_same_at_every_newer_opset(case: Case) -> None:
    expected = run(case.model(), case)
    assert expected is not None
    versions = sorted({step.version for step in steps_of(case.op, case.opset, NEWEST)})
    found = [run(upgraded(case, version), case) for version in versions]
    assert not versions or any(found)
    for outputs in found:
        if outputs is not None:
            agree(expected, outputs)


@every(case=OLD)
def test_ops_from_before_opset_7_compute_what_their_documents_say(case: Case) -> None:
    found = run(upgraded(case, 13), case)
    assert found is not None
    assert case.expected is not None
    agree([case.expected], found[:1])


ERF_TAKES_INTEGERS = "tensor(int32)" in onnx.defs.get_schema("Erf", 13).type_constraints[0].allowed_type_strs
"""As onnx 1.19 had it."""


@every(case=[case for case in REFUSED if case.op != "Erf" or not ERF_TAKES_INTEGERS])
def test_what_changes_in_meaning_is_not_upgraded(case: Case) -> None:
    upgrade = plan_upgrade(Graph.of(case.model()), NEWEST)
    assert upgrade.obstacle is not None
    assert (upgrade.obstacle.node, upgrade.obstacle.op, upgrade.obstacle.opset) == ("node", case.op, case.stops)
    assert upgrade.opset == case.stops - 1
    assert upgrade.result.book.opsets[""] == max(upgrade.opset, case.opset)


def test_every_step_of_the_table_has_a_case() -> None:
    taken = {(case.op, step.version) for case in (*CASES, *OLD) for step in steps_of(case.op, case.opset, 28)}
    taken |= {
        ("Resize", step.version) for case in CASES if case.op == "Upsample" for step in steps_of("Resize", 10, 28)
    }
    refused = {(case.op, case.stops) for case in REFUSED}
    listed = {(op, row["to"]) for row in read_table("upgrades")["step"] for op in row["ops"]}
    assert listed - taken - refused <= UNTRIED


UNTRIED = {
    ("GlobalLpPool", 2), ("Gemm", 11), ("OptionalHasElement", 18), ("CastLike", 19), ("CastLike", 24), ("Range", 27),
    ("Constant", 11), ("Constant", 12), ("LSTM", 7), ("RNN", 7), ("GRU", 3), ("GRU", 7), ("Split", 2),
    ("AveragePool", 7), ("Attention", 25), ("ReduceLogSum", 28), ("ReduceLogSumExp", 28), ("SpaceToDepth", 28),
    ("Scan", 9), ("MeanVarianceNormalization", 9),
    *((op, 10) for op in (
        "Affine", "Crop", "DynamicSlice", "GivenTensorFill", "GRUUnit", "ImageScaler", "ParametricSoftplus", "Scale",
        "ScaledTanh",
    )),
}  # fmt: skip
"""Steps at which only attributes come or go that nothing here gives, or that ONNX Runtime does not load yet; and those
of its own ops, which :func:`test_ops_that_onnx_runtime_no_longer_has` is about.
"""


@pytest.mark.parametrize(("op", "attributes"), [
    ("ImageScaler", {"scale": 0.5, "bias": [0.1, 0.2, 0.3]}), ("Affine", {"alpha": 2.0, "beta": 1.0}),
    ("ScaledTanh", {"alpha": 2.0, "beta": 1.0}), ("MeanVarianceNormalization", {"across_channels": 1}),
])  # fmt: skip
def test_ops_that_onnx_runtime_no_longer_has(op: str, attributes: dict[str, Any]) -> None:
    """onnx has no schema of theirs, so that nothing else stops an upgrade: a Clip in float16 asks for one."""
    nodes = [
        helper.make_node(op, ["x"], ["a"], **attributes), helper.make_node("Conv", ["a", "w"], ["b"]),
        helper.make_node("Clip", ["b"], ["c"], min=0.0), helper.make_node("Conv", ["c", "w"], ["d"]),
        helper.make_node("Clip", ["d"], ["y"], min=0.0),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 8, 8]) for name in "xy"]
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((3, 3, 1, 1)).astype(np.float32), "w")
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 7)], ir_version=8)
    feeds = {"x": np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    assert onnxamp.diff_models(model, onnxamp.convert_model(model), feeds, provider="cpu").passed
    with pytest.raises(onnxamp.OpsetError):
        onnxamp.convert_model(model, opset=17)


@pytest.mark.parametrize(("op", "lists"), [("Unsqueeze", ["axes"]), ("Slice", ["starts", "ends"])])
def test_an_empty_list_is_a_list(op: str, lists: list[str]) -> None:
    """Only where it means the same as none, as the axes of reductions do, does it become no input."""
    node = helper.make_node(op, ["x"], ["y"])
    for name in lists:
        node.attribute.add(name=name, type=onnx.AttributeProto.INTS)
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )  # fmt: skip
    opset = 11 if op == "Unsqueeze" else 9
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    upgraded = onnxamp.convert_model(model, "O0", opset=17)
    assert onnxamp.diff_models(model, upgraded, {"x": np.ones(4, np.float32)}, provider="cpu").passed


def test_every_step_that_onnx_knows_is_silent_or_listed() -> None:
    closed = {
        (schema.name, step.version, (step.row or {}).get("why"))
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == ""
        for step in steps_of(schema.name, schema.since_version, min(onnx.defs.onnx_opset_version(), 28))
        if step.is_closed
    }
    assert {(op, version) for op, version, _ in closed} == {("Tile", 6), ("Scan", 9)}
    assert all(why for _, _, why in closed)
