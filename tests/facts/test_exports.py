"""Forms of ops that exporters write (tests/exports.toml, written by scripts/list_exports.py): tables must know them."""

import tomllib
from pathlib import Path
from typing import Any

import onnx
import pytest
from commands import MODELS
from graphs.case import parse
from repository import ROOT

import onnxamp
from onnxamp._facts.kernels import kernel_table
from onnxamp._facts.signature import lookup
from onnxamp._graph.targets.freedom import Typed, runs_on

FORMS = tomllib.loads((ROOT / "tests" / "exports.toml").read_text(encoding="utf-8"))["forms"]
PLUGINS = {"CausalConvWithState", "LinearAttention", "NonMaxSuppression", "NonZero", "RoiAlign"}
"""Ops that TensorRT's parser leaves to plugins, which TensorRT-RTX has none of."""
FREE = {"Constant", "ConstantOfShape", "Shape", "Size", "Identity"}
"""Ops that compute nothing of their inputs' type."""


def node_of(form: dict[str, Any]) -> onnx.NodeProto:
    inputs, outputs = (
        [f"{port}{position}" if mark == "x" else "" for position, mark in enumerate(form[f"{port}s"])]
        for port in ("input", "output")
    )
    return onnx.helper.make_node(form["op"], inputs, outputs)


@pytest.mark.parametrize("target", ["tensorrt", "cuda"])
def test_targets_take_what_exporters_write_of_floats(target: str) -> None:
    refused = []
    for form in FORMS:
        signature = lookup("", form["op"], form["opset"])
        assert signature is not None
        port = signature.input(0)
        if port is None or form["op"] in FREE or "tensor(float16)" not in signature.params.get(port.type, ()):
            continue
        bound = {port.type: "tensor(float16)"}
        if not runs_on(target, Typed(signature, bound, node_of(form))):
            refused.append((form["op"], form["opset"], form["inputs"], form["outputs"]))
    assert refused == []


def test_the_table_of_tensorrt_has_every_op_of_the_exporters() -> None:
    assert {form["op"] for form in FORMS} - set(kernel_table("tensorrt")) - {"Constant"} == set()


@pytest.mark.tensorrt
def test_the_table_has_every_op_that_the_parser_has() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    parsed = {name for name in names if parser.supports_operator(name)}
    assert parsed - set(kernel_table("tensorrt")) == PLUGINS & names


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_table_of_tensorrt_has_every_op_of_the_zoo(path: Path) -> None:
    nodes = onnx.load(path, load_external_data=False).graph.node
    assert {node.op_type for node in nodes} - set(kernel_table("tensorrt")) <= PLUGINS


NORM = """(float[2,8] x, float[8] s, float[8] b) => (float[2,8] OUTPUTS) {
    h = Tanh (x)
    OUTPUTS = LayerNormalization (h, s, b)
}"""


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_a_layer_normalization_may_be_low_for_tensorrt(low: str) -> None:
    model = parse(NORM.replace("OUTPUTS", "y"), 17)
    assert onnxamp.audit_model(model, "tensorrt").findings == ()
    plan = onnxamp.plan_model(model, "O3", target="tensorrt", dtype=low)
    assert [row.low for row in plan.rows if row.op == "LayerNormalization"] == [True]


def test_one_with_more_outputs_is_built_in_no_precision() -> None:
    text = NORM.replace("OUTPUTS)", "y, float[2,1] m)").replace("OUTPUTS", "y, m")
    (finding,) = onnxamp.audit_model(parse(text, 17), "tensorrt").findings
    assert "it has more than one output" in finding.text
