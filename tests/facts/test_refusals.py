"""What CUDA leaves to CPU although it has a kernel: the rules as data, and what they do to checks and conversions."""

from typing import Any

import onnx
import onnx.defs
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto, helper

import onnxamp
from onnxamp._audit.audit import audit_model
from onnxamp._facts.kernels import kernel_table
from onnxamp._facts.providers import kernel_limit
from onnxamp._facts.tables import target_names, target_table

RULES = {name: target_table(name, "placement").get("rows", []) for name in target_names()}
TRANSPOSED = "(float[1,2,4,4] X) => (float[1,2,H,W] Y) { h = Relu (X) Y = ConvTranspose <ATTRIBUTES> (h, w) }"


@pytest.mark.parametrize(
    ("op", "attributes", "inputs", "refused"),
    [
        ("ConvTranspose", {"pads": [1, 1, 1, 1]}, 2, False),
        ("ConvTranspose", {"pads": [0, 1, 1, 1]}, 2, True),
        ("ConvTranspose", {}, 2, False),
        ("ConvTranspose", {"auto_pad": "SAME_UPPER"}, 2, True),
        ("ConvTranspose", {"auto_pad": "VALID"}, 2, False),
        ("Conv", {"pads": [0, 1, 1, 1]}, 2, False),
        ("LSTM", {"hidden_size": 4}, 7, False),
        ("LSTM", {"clip": 1.0}, 7, True),
        ("LSTM", {"input_forget": 1}, 7, True),
        ("LSTM", {}, 8, True),
        ("LSTM", {"activations": ["Sigmoid", "TANH", "Tanh"]}, 7, False),
        ("LSTM", {"activations": ["Sigmoid", "Tanh", "Relu"]}, 7, True),
        ("GRU", {}, 6, True),
        ("GRU", {"linear_before_reset": 1}, 6, False),
        ("GRU", {"linear_before_reset": 1, "activations": ["Sigmoid", "Tanh", "Sigmoid", "Tanh"]}, 6, False),
        ("RNN", {}, 6, False),
        ("RNN", {"activations": ["Relu", "Relu"]}, 6, True),
        ("RNN", {"activation_alpha": [0.5]}, 6, True),
        ("ArgMax", {"axis": 1}, 1, False),
        ("ArgMin", {"select_last_index": 1}, 1, True),
    ],
)
def test_rules(op: str, attributes: dict[str, Any], inputs: int, refused: bool) -> None:
    node = helper.make_node(op, [f"in{number}" for number in range(inputs)], ["out"], **attributes)
    assert (kernel_limit("cuda", node, {}) is not None) == refused
    assert kernel_limit("cpu", node, {}) is None


def test_rules_are_about_kernels_that_there_are() -> None:
    """A rule for an op without a kernel would say nothing; each has a source, and names attributes of the schema."""
    for provider, rules in RULES.items():
        for rule in rules:
            assert rule["source"]
            assert rule["because"]
            for op in rule["ops"]:
                assert kernel_table(provider)[op]
                if "::" in op:  # whose schema onnx does not have
                    continue
                schema = onnx.defs.get_schema(op)
                named = {rule.get("attribute"), rule.get("asymmetric"), *rule.get("present", ())} - {None}
                assert named <= set(schema.attributes)
                assert rule.get("input", 0) < len(schema.inputs)
                if "default" in rule:
                    default = helper.get_attribute_value(schema.attributes[rule["attribute"]].default_value)
                    assert (default.decode() if isinstance(default, bytes) else default) == rule["default"]


def transposed(attributes: str) -> ModelProto:
    return add_weights(parse(TRANSPOSED.replace("ATTRIBUTES", attributes), 17), {"w": (2, 2, 3, 3)})


def test_checks_say_where_such_nodes_run() -> None:
    audit = audit_model(transposed("pads = [0, 0, 1, 1]"))
    assert [(node.op, node.provider) for node in audit.nodes] == [("Relu", "CUDA"), ("ConvTranspose", "CPU")]
    finding = next(found for found in audit.findings if found.node == "Y")
    assert (finding.kind, finding.severity) == ("fallback", "warning")
    assert finding.text.startswith("CUDA leaves it to the CPU (its pads are not symmetric)")
    audit = audit_model(transposed("pads = [1, 1, 1, 1]"))
    assert {node.provider for node in audit.nodes} == {"CUDA"}
    audit = audit_model(transposed("pads = [0, 0, 1, 1]"), "cpu")
    assert {node.provider for node in audit.nodes} == {"CPU"}
    assert not audit.findings


def test_low_nodes_that_fall_back_are_told(tmp_path: Any) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(transposed("pads = [0, 0, 1, 1]"), path)
    made = onnxamp.convert_file(path, tmp_path / "low.onnx", validate=False)
    assert made.summary.fallbacks == (("Y", "ConvTranspose"),)
    low = audit_model(onnx.load(tmp_path / "low.onnx"))
    assert next(node.provider for node in low.nodes if node.op == "ConvTranspose") == "CPU"
    # CPU has no bfloat16 kernel either: there the node stays in float32, and the model loads.
    low = onnxamp.convert_model(transposed("pads = [0, 0, 1, 1]"), dtype="bfloat16", target="cuda")
    assert {tensor.data_type for tensor in low.graph.initializer} == {onnx.TensorProto.FLOAT}


def test_same_ops_with_other_attributes_are_told_apart() -> None:
    text = """(float[1,2,4,4] X) => (float[1,2,H,W] Y) {
        h = ConvTranspose <pads = [1, 1, 1, 1]> (X, w) Y = ConvTranspose <pads = [0, 1, 0, 0]> (h, w)
    }"""
    model = add_weights(parse(text), {"w": (2, 2, 3, 3)})
    assert [node.provider for node in audit_model(model).nodes] == ["CUDA", "CPU"]
