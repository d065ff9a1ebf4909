"""onnx's checker looks at every result. What it refuses stays in float32; a fault of the original is none of ours."""

from pathlib import Path

import onnx
import pytest
from commands import run
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto, helper

import onnxamp
from onnxamp._convert import convert as converting
from onnxamp._rewrite.checks.checker import complaint_about

CHAIN = """(float[2,8] x) => (float[2,8] y) {
    a = MatMul (x, w)  b = Relu (a)  c = MatMul (b, w)  d = Softplus (c)  e = MatMul (d, w)  y = Tanh (e) }"""
BODY = """(float[2,64] x, bool k) => (float[2,64] y) {
    a = MatMul (x, w)
    b = If (k) <then_branch = t () => (float[2,64] p) { p = MatMul (a, v) },
                else_branch = e () => (float[2,64] q) { q = Relu (a) }>
    y = MatMul (b, w) }"""
WARNING = "stays in float32, since the converted model would be wrong there otherwise"


def chain() -> ModelProto:
    model = parse(CHAIN)
    add_weights(model, {"w": (8, 8)})
    for node in model.graph.node:
        node.name = f"the {node.op_type} of {node.output[0]}"
    return model


def low_values(model: ModelProto) -> set[str]:
    inferred = onnx.shape_inference.infer_shapes(model)
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in inferred.graph.value_info}
    return {name for name, kind in kinds.items() if kind == TensorProto.FLOAT16}


def break_low(monkeypatch: pytest.MonkeyPatch, name: str, fault: str) -> None:
    """Let the conversion break a node if it is low."""
    apply_edits = converting.apply_edits

    def faulty(graph: object, edits: object, result: ModelProto, weights: object) -> None:
        apply_edits(graph, edits, result, weights)
        if name not in low_values(result):
            return
        node = next(node for node in result.graph.node if name in node.output)
        if fault == "attribute":
            node.attribute.append(helper.make_attribute("unheard_of", 1))
        elif fault == "undefined":
            node.input[0] = "undefined"
        else:
            node.domain = "unheard.of"

    monkeypatch.setattr(converting, "apply_edits", faulty)


@pytest.mark.parametrize("fault", ["attribute", "domain", "undefined"])
def test_a_node_that_the_checker_refuses_stays_float32(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_low(monkeypatch, "c", fault)
    with pytest.warns(onnxamp.OptionWarning, match=WARNING):
        result = onnxamp.convert_model(chain())
    assert low_values(result) >= {"a", "e"}
    assert "c" not in low_values(result)
    onnx.checker.check_model(result, full_check=True)


def test_the_whole_model_stays_float32_if_the_complaint_names_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_edits = converting.apply_edits

    def faulty(graph: object, edits: object, result: ModelProto, weights: object) -> None:
        apply_edits(graph, edits, result, weights)
        result.graph.ClearField("name")

    monkeypatch.setattr(converting, "apply_edits", faulty)
    with pytest.warns(onnxamp.OptionWarning, match="onnx's checker refuses the converted model"):
        result = onnxamp.convert_model(chain())
    assert not low_values(result)


def test_a_fault_of_the_given_model_is_none_of_the_result() -> None:
    """ONNX Runtime runs models without names, which the checker refuses."""
    model = chain()
    model.graph.ClearField("name")
    assert complaint_about(model)
    result = onnxamp.convert_model(model)
    assert low_values(result) >= {"a", "c", "e"}


def test_unknown_domains_are_no_fault() -> None:
    model = parse("(float[2,8] x) => (float[2,8] y) { a = MatMul (x, w)  y = unheard.of.Op <k = 1> (a) }")
    model.opset_import.add(domain="unheard.of", version=77)
    add_weights(model, {"w": (8, 8)})
    assert not complaint_about(onnxamp.convert_model(model))


def test_ops_that_onnx_runtime_adds_are_no_fault() -> None:
    text = """(float[2,8] x) => (float[2,8] y) {
        a = MatMul (x, w)  b = SimplifiedLayerNormalization (a, s)  y = MatMul (b, w) }"""
    model = parse(text)
    add_weights(model, {"w": (8, 8), "s": (8,)})
    assert not complaint_about(model)
    model.graph.node[-1].attribute.append(helper.make_attribute("unheard_of", 1))
    assert "unheard_of" in complaint_about(model)
    model.graph.node[1].op_type = "UnheardOf"
    assert "UnheardOf" in complaint_about(model)


def test_data_files_are_not_asked_for(tmp_path: Path) -> None:
    """Neither those of initializers nor those in bodies: results are checked before they are written."""
    model = parse(BODY)
    add_weights(model, {"w": (64, 64), "v": (64, 64)})
    body = next(node for node in model.graph.node if node.op_type == "If").attribute[0].g
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    body.initializer.append(weights["v"])
    model.graph.initializer.remove(weights["v"])
    source, target = tmp_path / "model.onnx", tmp_path / "low.onnx"
    onnx.save(model, source, save_as_external_data=True, location="data", size_threshold=0)
    assert not complaint_about(onnx.load(source, load_external_data=False))
    written = run("convert", source, "-o", target)
    assert written.exit_code == 0, written.output
    onnx.checker.check_model(target, full_check=True)
    assert "This is a bug" not in written.output


@pytest.mark.parametrize("constant", [False, True])
def test_large_weights_are_checked_without_their_data(constant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse("(float[2,256] x) => (float[2,256] y) { y = MatMul (x, w) }")
    add_weights(model, {"w": (256, 256)})
    if constant:
        node = helper.make_node("Constant", [], ["w"], value=model.graph.initializer.pop())
        model.graph.node.insert(0, node)
    sizes = []
    check_model = onnx.checker.check_model
    monkeypatch.setattr(onnx.checker, "check_model", lambda seen: (sizes.append(len(seen)), check_model(seen)))
    assert not complaint_about(model)
    assert sizes[0] < 1000
    weight = model.graph.node[0].attribute[0].t if constant else model.graph.initializer[0]
    weight.data_type = TensorProto.UNDEFINED
    weight.ClearField("raw_data")
    assert "data_type" in complaint_about(model)
