"""Kernels that are wrong in some versions of ONNX Runtime: nodes stay in float32 there, and checks say so."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp
from onnxamp._facts.tables import is_older, target_names, target_table
from onnxamp._facts.targets import known_versions

SKIP = """(float[2,8] x, float[2,8] s) => (float[2,8] y) {
    h = Relu (x)
    y = com.microsoft.SkipSimplifiedLayerNormalization (h, s, g)
}"""
ATTENTION = """(float[1,2,4,SIZE] q, float[1,2,4,SIZE] k, float[1,2,4,SIZE] v) => (float[1,2,4,SIZE] y) {
    y = Attention (q, k, v)
}"""


def skip() -> ModelProto:
    return add_weights(parse(SKIP, 17, domains={"com.microsoft": 1}), {"g": np.ones(8, np.float32)})


def is_low(model: ModelProto, op: str, target: str) -> bool:
    plan = onnxamp.plan_model(model, "O3", target=target)
    return any(row.op == op and row.low for row in plan.rows)


def test_every_row_names_its_thread_and_a_known_version() -> None:
    for device in target_names():
        for row in target_table(device, "wrong").get("rows", ()):
            assert set(row) - {"head_size", "before"} == {"ops", "types", "because", "source"}
            if "before" in row:
                assert row["before"] in known_versions(device)
                assert "issue " in row["source"]


def test_versions_are_compared_as_numbers() -> None:
    assert is_older("1.9", "1.20")
    assert not is_older("1.27", "1.27")


@pytest.mark.parametrize(
    ("target", "low"), [("cuda@1.24", False), ("cuda@1.26", False), ("cuda@1.27", True), ("cuda", True)]
)
def test_a_wrong_kernel_keeps_its_node_in_float32_in_that_version(target: str, low: bool) -> None:
    assert is_low(skip(), "com.microsoft::SkipSimplifiedLayerNormalization", target) is low


def test_only_large_heads_are_wrong() -> None:
    small, large = (parse(ATTENTION.replace("SIZE", size), 23) for size in ("64", "512"))
    older = "cuda@1.26"
    assert is_low(small, "Attention", older)
    assert not is_low(large, "Attention", older)
    assert is_low(large, "Attention", "cuda")


def test_a_check_warns_of_it() -> None:
    low = onnxamp.convert_model(skip(), "O3", target="cuda")
    found = [f for f in onnxamp.audit_model(low, "cuda@1.24").findings if "sums up squares in float16" in f.text]
    assert [(finding.severity, finding.kind) for finding in found] == [("warning", "kernel")]
    assert found[0].text.startswith("ONNX Runtime 1.24: ")
    assert "sums up squares" not in str(onnxamp.audit_model(low, "cuda@1.31").findings)
    assert "sums up squares" not in str(onnxamp.audit_model(skip(), "cuda@1.24").findings)


@pytest.mark.parametrize("op", ["Sin", "Cos", "Tan"])
@pytest.mark.parametrize(
    ("target", "dtype", "kept"),
    [("webgpu", "float16", True), ("webgpu", "bfloat16", False), ("cuda", "float16", False)],
)
def test_angles_stay_float32_where_devices_may_be_off(op: str, target: str, dtype: str, kept: bool) -> None:
    model = parse("(float[8] x) => (float[8] y) { [here] y = OP (x) }".replace("OP", op))
    hazards = onnxamp.plan_model(model, "O3", target=target, dtype=dtype).hazards
    reasons = [hazard.detail for hazard in hazards if (hazard.node, hazard.reason) == ("here", "wrong kernel")]
    assert reasons == ["webgpu: for float16 angles beyond pi, a device may compute them with any error"] * kept


def test_a_check_warns_of_angles_in_float16() -> None:
    low = parse("(float16[8] x) => (float16[8] y) { y = Sin (x) }")
    found = [f for f in onnxamp.audit_model(low, "webgpu").findings if f.kind == "kernel"]
    assert [finding.action for finding in found] == ["Keep it in float32 (--keep-fp32 NAME)."]
    assert "kernel" not in {finding.kind for finding in onnxamp.audit_model(low, "cuda").findings}


RMS = """(float[2,4] x) => (float[2,2] y) <float two = {2}, float[1] eps = {1e-6}, float one = {1}> {
    q = Pow (x, two) v = ReduceMean <axes = [-1]> (q) e = Add (v, eps) r = Sqrt (e) i = Div (one, r) n = Mul (x, i)
    t = Transpose (x) y = MatMul (n, t)
}"""


@pytest.mark.parametrize(("target", "opset"), [("cuda", 23), ("cuda@1.27", 23), ("cuda@1.20", 17)])
def test_folding_stays_within_the_opsets_that_the_version_loads(target: str, opset: int, tmp_path: Path) -> None:
    onnx.save(parse(RMS, 17), tmp_path / "m.onnx")
    done = run("convert", tmp_path / "m.onnx", "-o", tmp_path / "folded.onnx", "--fold", "--target", target, "-v")
    folded = onnx.load(tmp_path / "folded.onnx")
    assert folded.opset_import[0].version == opset, done.output
    assert ("RMSNormalization" in [node.op_type for node in folded.graph.node]) == (opset == 23)
    told = "ONNX Runtime 1.20 loads no opset beyond 21" in " ".join(done.stdout.split())
    assert told == (opset == 17), done.stdout


def test_the_report_says_in_a_sentence_what_is_wrong(tmp_path: Path) -> None:
    onnx.save(skip(), tmp_path / "m.onnx")
    done = run(
        "convert", "-v", tmp_path / "m.onnx", "-o", tmp_path / "low.onnx", "--target", "cuda@1.24", "--level", "O3",
        "--no-validate",
    )  # fmt: skip
    text = " ".join(done.stdout.split())
    assert "1 node: A kernel of that version of the runtime computes wrong results in low precision." in text
    assert "ONNX Runtime 1.24: its kernel sums up squares in float16" in text
