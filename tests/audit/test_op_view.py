"""What ``onnxamp lists --op`` says: all that is known of an op, each fact with its file."""

import json

import pytest
from commands import run
from repository import ROOT

import onnxamp
from onnxamp._decide.kinds import kinds
from onnxamp._facts.ops import op_facts
from onnxamp._options.lists import PRESETS, preset

OPS = (
    "LayerNormalization",
    "Softmax",
    "Conv",
    "Concat",
    "Resize",
    "QLinearConv",
    "com.microsoft::SkipLayerNormalization",
)


def topics(op: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for fact in onnxamp.describe_op(op).facts:
        found.setdefault(fact.topic, []).append(fact.text)
    return found


@pytest.mark.parametrize("op", OPS)
def test_each_fact_names_a_file_that_states_it(op):
    for fact in onnxamp.describe_op(op).facts:
        paths = (ROOT / "onnxamp" / "_data" / fact.file, ROOT / fact.file)
        (path,) = [path for path in paths if path.exists()]
        if path.suffix == ".toml" and fact.topic not in ("upgrade", "placement"):
            assert op.rpartition("::")[2] in path.read_text() or "no row" in fact.text or fact.topic == "exactness"


def test_a_normalization():
    found = topics("LayerNormalization")
    assert found["fold"] == ["3 decomposed forms of LayerNorm become it from opset 17 on"]
    assert any("cancellation" in text for text in found["hazard"])
    assert any("accumulated in float32 since 1.27" in text for text in found["accumulator"])
    assert any(text.startswith("on the black list of default, except where kernels") for text in found["list"])
    assert "inputs [... h], [h], [h]" in found["shapes"]
    assert found["bound"] == found["gradient"] == ["a rule in code"]
    assert found["exactness"] == ["not exact: low precision rounds its results"]


def test_kernels_of_adjacent_versions_are_one_fact():
    ends = "float16 for op versions 1 to 13; bfloat16 for op version 13"
    assert any(text.endswith(ends) for text in topics("MatMul")["kernel"])
    assert any(
        text.endswith("float16 and bfloat16 for op versions 1 to 17") for text in topics("LayerNormalization")["kernel"]
    )
    for op in ("Exp", "MatMul", "ReduceMean"):
        for text in topics(op)["kernel"]:
            types = [part.partition(" for ")[0] for part in text.rpartition(": ")[2].split("; ")]
            assert len(types) == len(set(types)), text


def test_arithmetic_is_told_in_words():
    told = {op: {fact.target: fact.text for fact in onnxamp.describe_op(op).facts if fact.topic == "arithmetic"}
            for op in ("MatMul", "Sigmoid", "InstanceNormalization", "AveragePool")}  # fmt: skip
    assert told["MatMul"]["cuda"].endswith(
        "accumulates in float32; errors of sums of 4,096 terms are those of one rounding"
    )
    assert "accumulates in float16, with one accumulator" in told["MatMul"]["webgpu"]
    assert "computed as 1 / (1 + exp(-x))" in told["Sigmoid"]["webgpu"]
    assert "a sum may overflow on the way to a result that fits" in told["AveragePool"]["webgpu"]
    texts = " ".join(text for texts in told.values() for text in texts.values())
    for field in ("growth", "cancels", "overflows", "False", "True"):
        assert field not in texts


def test_rules_in_code_name_their_module():
    files = {fact.topic: fact.file for fact in onnxamp.describe_op("LayerNormalization").facts}
    assert files["gradient"] == "onnxamp/_gradients/pointwise.py"
    assert files["bound"] == "onnxamp/_graph/bounds/normalized.py"


def test_a_bound_as_a_formula():
    facts = onnxamp.describe_op("Tanh").facts
    assert [(fact.text, fact.file) for fact in facts if fact.topic == "bound"] == [
        ("within(x, through(tanh, x))", "bounds.toml")
    ]


def test_lists_are_those_of_the_presets():
    for name in PRESETS:
        op = next(iter(preset(name).white))
        assert f"on the white list of {name}" in topics(op)["list"]


def test_versions_of_the_runtime_differ():
    rows = [fact for fact in onnxamp.describe_op("Conv").facts if fact.topic == "kernel" and fact.target == "cuda"]
    assert [fact.file for fact in rows] == ["targets/cuda/history.json", "targets/cuda/kernels.json"]


def test_upgrades_and_quantized_forms():
    assert "to version 4: set axis 1" in topics("Concat")["upgrade"]
    assert topics("QLinearConv")["quantized"] == ["the form of Conv for integers"]


def test_hazards_begin_at_ops_that_facts_name():
    flags = set(op_facts().__dataclass_fields__)
    for kind in kinds():
        assert set(kind.looks_at) <= flags
        assert kind.ops(), kind.value


NEAR = [("Sofmax", "Softmax"), ("conv2d", "Conv"), ("layernorm", "LayerNormalization")]


@pytest.mark.parametrize(("op", "meant"), NEAR)
def test_an_unknown_op(op, meant):
    with pytest.raises(onnxamp.ArgumentError, match=f"Did you mean {meant}"):
        onnxamp.describe_op(op)
    with pytest.raises(onnxamp.ArgumentTypeError):
        onnxamp.describe_op(1)


def test_the_command():
    done = run("lists", "--op", "Softmax", "--op", "Relu", "--format", "json")
    assert set(json.loads(done.output)["ops"]) == {"Softmax", "Relu"}
    assert "gradients.toml" in run("lists", "--op", "Relu").output
    assert run("lists", "default", "--op", "Relu").exit_code == 2
    assert str(onnxamp.describe_op("Relu")).startswith("Relu")


@pytest.mark.parametrize(("op", "said", "file"), [
    ("LSTM", "that of its steps", "expansion"),
    ("GroupNormalization", "that of the nodes of its function", "expansion"),
    ("Sign", "zero: ", "walk"),
    ("Det", "no rule", "_gradients"),
])  # fmt: skip
def test_gradients_of_ops_without_rules(op, said, file):
    (fact,) = [fact for fact in onnxamp.describe_op(op).facts if fact.topic == "gradient"]
    assert said in fact.text
    assert file in fact.file


def test_wrong_kernels_name_types_and_releases():
    (text,) = topics("Attention")["wrong kernel"]
    assert text.startswith("float16 and bfloat16 before 1.27: ")
