"""Outputs of every kind that ONNX has: classifiers give maps, others sequences, optionals, strings, sparse tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from commands import report_of, run, saved
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

import onnxamp

ML: Final = "ai.onnx.ml"
ROWS: Final = helper.make_tensor_type_proto(TensorProto.FLOAT, [None, 4])
WEIGHT: Final = np.arange(16, dtype=np.float32).reshape(4, 4) % 5 - 2
PROJECT: Final = helper.make_node("MatMul", ["x", "w"], ["h"], name="project")
NUMBERED: Final = {"classlabels_int64s": [5, 7]}
NAMED: Final = {"classlabels_strings": ["cat", "dog"]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tensor(elem: int, *shape: int | None) -> TypeProto:
    return helper.make_tensor_type_proto(elem, list(shape))


def built(
    nodes: list[NodeProto], outputs: Mapping[str, TypeProto], inputs: Mapping[str, TypeProto] | None = None
) -> ModelProto:
    """A model of nodes behind the projection of ``x`` to ``h``."""
    taken = {"x": ROWS} if inputs is None else inputs
    entries = [[ValueInfoProto(name=name, type=kind) for name, kind in of.items()] for of in (taken, outputs)]
    weights = [numpy_helper.from_array(WEIGHT, "w")]
    graph = helper.make_graph([PROJECT, *nodes], "kinds", *entries, weights)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def zipped(labels: Mapping[str, Any], classifier: NodeProto) -> ModelProto:
    """A classifier as skl2onnx writes it: labels, and a sequence of maps from label to probability."""
    key = TensorProto.STRING if "classlabels_strings" in labels else TensorProto.INT64
    node = helper.make_node("ZipMap", ["scores"], ["probabilities"], domain=ML, **labels)
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(key, tensor(TensorProto.FLOAT)))
    return built([classifier, node], {"label": tensor(key, None), "probabilities": maps})


def tree(labels: Mapping[str, Any]) -> ModelProto:
    return zipped(labels, helper.make_node(
        "TreeEnsembleClassifier", ["h"], ["label", "scores"], domain=ML, post_transform="NONE",
        nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[0, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.0, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
        class_treeids=[0, 0, 0, 0], class_nodeids=[1, 1, 2, 2], class_ids=[0, 1, 0, 1],
        class_weights=[0.9, 0.1, 0.2, 0.8], **labels,
    ))  # fmt: skip


def linear(labels: Mapping[str, Any], bias: float = 0.0) -> ModelProto:
    names = {key.replace("int64s", "ints"): value for key, value in labels.items()}
    return zipped(labels, helper.make_node(
        "LinearClassifier", ["h"], ["label", "scores"], domain=ML, post_transform="SOFTMAX", multi_class=1,
        coefficients=[0.1, -0.2, 0.3, 0.1, -0.1, 0.1, 0.2, 0.3], intercepts=[bias, 0.0], **names,
    ))  # fmt: skip


SEQUENCE: Final = helper.make_sequence_type_proto(ROWS)
OPTIONAL: Final = helper.make_optional_type_proto(ROWS)
STRINGS: Final = tensor(TensorProto.STRING, None, 4)
CLASSIFIERS: Final = {
    "tree of numbers": lambda: tree(NUMBERED), "tree of names": lambda: tree(NAMED),
    "linear of numbers": lambda: linear(NUMBERED), "linear of names": lambda: linear(NAMED),
}  # fmt: skip
KINDS: Final = {
    **CLASSIFIERS,
    "sequence": lambda: built([helper.make_node("SequenceConstruct", ["h", "x"], ["s"])], {"s": SEQUENCE}),
    "empty sequence": lambda: built([helper.make_node("SequenceEmpty", [], ["s"])], {"s": SEQUENCE, "h": ROWS}),
    "optional": lambda: built([helper.make_node("Optional", ["h"], ["o"])], {"o": OPTIONAL}),
    "empty optional": lambda: built(
        [helper.make_node("Optional", [], ["o"], type=ROWS)], {"o": OPTIONAL, "h": ROWS}
    ),
    "optional sequence": lambda: built(
        [helper.make_node("SequenceConstruct", ["h"], ["s"]), helper.make_node("Optional", ["s"], ["o"])],
        {"o": helper.make_optional_type_proto(SEQUENCE)},
    ),
    "strings": lambda: built([helper.make_node("Cast", ["h"], ["y"], to=TensorProto.STRING)], {"y": STRINGS}),
    "sequence of strings": lambda: built(
        [
            helper.make_node("Cast", ["h"], ["y"], to=TensorProto.STRING),
            helper.make_node("SequenceConstruct", ["y"], ["s"]),
        ],
        {"s": helper.make_sequence_type_proto(STRINGS)},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_takes_every_kind(kind: str) -> None:
    model = saved(KINDS[kind]())
    commands = [
        ("convert", model, "-o", "low.onnx", "--level", "O3"), ("diff", model, "low.onnx", "--layers"),
        ("convert", model, "-o", "auto.onnx", "--level", "auto", "--html", "page.html"), ("check", model),
        ("tune", model, "-o", "tuned.onnx", "--samples", 2), ("bench", model, "low.onnx", "--seconds", 0.01),
        ("inspect", model), ("view", model, "-o", "view.html"),
    ]  # fmt: skip
    for command in commands:
        result = run(*command)
        assert result.exit_code == 0, (command, result.output, result.exception)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_probabilities_are_compared_as_a_table_of_numbers(kind: str) -> None:
    """A row per map and a column per key: so a class that changes shows in top-1 as it does in a tensor."""
    model, feeds = CLASSIFIERS[kind](), {"x": np.array([[1, 0, 0, 2], [0, -1, 1, 0], [1, 1, 1, 1]], np.float32)}
    report = onnxamp.diff_models(model, onnxamp.convert_model(model, "O3"), feeds, provider="cpu")
    assert report.passed
    label, probabilities = report.outputs
    assert (probabilities.name, probabilities.result_shape, probabilities.result_dtype) == (
        "probabilities", (3, 2), "float32",
    )  # fmt: skip
    assert probabilities.is_float
    assert probabilities.argmax_agreement == 1
    assert label.result_dtype in {"int64", "string"}


def test_probabilities_that_differ_fail() -> None:
    feeds = {"x": np.ones((2, 4), np.float32)}
    report = onnxamp.diff_models(linear(NAMED), linear(NAMED, bias=1.0), feeds, provider="cpu")
    assert not report.passed
    probabilities = report.outputs[1]
    assert 0.1 < probabilities.max_abs < 1
    assert any("'probabilities'" in text for text in report.warnings)


def test_keys_that_differ_are_named() -> None:
    other = {"classlabels_strings": ["cat", "fox"]}
    report = onnxamp.diff_models(linear(NAMED), linear(other), provider="cpu")
    assert report.failure == "Output 'probabilities': The map lacks the key 'dog'."
    report = onnxamp.diff_models(linear(NAMED), linear(NUMBERED), provider="cpu")
    assert report.failure == "Output 'probabilities': The map lacks the 2 keys 'cat', 'dog'."


def test_labels_that_differ_fail_as_labels() -> None:
    feeds = {"x": np.array([[1, 0, 0, 2], [0, -1, 1, 0]], np.float32)}
    report = onnxamp.diff_models(linear(NAMED), linear(NAMED, bias=-50.0), feeds, provider="cpu")
    label = report.outputs[0]
    assert 0 < label.differing <= 1
    assert not report.passed


def test_maps_of_several_samples_are_merged() -> None:
    samples = [{"x": np.full((rows, 4), rows, np.float32)} for rows in (1, 3)]
    model = tree(NUMBERED)
    report = onnxamp.diff_models(model, model, samples, provider="cpu")
    assert report.passed
    assert report.outputs[1].size == 2 * 4


def test_functions_of_the_user_get_the_maps() -> None:
    seen: list[Any] = []

    def accept(reference: dict[str, Any], result: dict[str, Any]) -> bool:
        seen.append(result["probabilities"])
        return bool(reference["label"].tolist() == result["label"].tolist())

    assert onnxamp.diff_models(linear(NAMED), linear(NAMED), accept=accept, provider="cpu").passed
    assert [sorted(row) for row in seen[0]] == [["cat", "dog"]]


def test_json_of_maps_can_be_judged_again() -> None:
    model = saved(linear(NUMBERED))
    assert run("diff", model, model, "--save", "diff.json").exit_code == 0
    again = run("diff", "diff.json", "--top1", "probabilities=1", "--format", "json")
    assert again.exit_code == 0, again.output
    assert {row["output"] for row in report_of(again)["judgements"]} == {"label", "probabilities"}


def test_sparse_constants_are_not_compared_and_it_is_told() -> None:
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [1], [5.0])
    sparse = helper.make_sparse_tensor(values, helper.make_tensor("at", TensorProto.INT64, [1], [1]), [3])
    outputs = {"c": tensor(TensorProto.FLOAT, 3), "h": ROWS}
    model = saved(built([helper.make_node("Constant", [], ["c"], sparse_value=sparse)], outputs))
    result = run("convert", model, "-o", "low.onnx")
    assert result.exit_code == 0
    assert "not validated" in result.output
    assert "sparse constant 'c'" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["convert", "diff", "check", "tune", "bench"])
def test_maps_cannot_be_fed_and_the_way_out_is_named(command: str) -> None:
    maps = helper.make_map_type_proto(TensorProto.STRING, tensor(TensorProto.FLOAT, None))
    vectors = helper.make_node("DictVectorizer", ["m"], ["x"], domain=ML, string_vocabulary=list("abcd"))
    model = built([], {"h": ROWS}, {"m": maps})
    model.graph.node.insert(0, vectors)
    path = saved(model)
    result = run(command, path, *([path] if command == "diff" else []))
    assert result.exit_code == 2
    assert "Cannot generate input 'm'" in " ".join(result.output.split())
    assert run("convert", path, "-o", "low.onnx", "--no-validate").exit_code == 0
    assert {entry.name for entry in onnx.load("low.onnx").graph.input} == {"m"}


@pytest.mark.slow
def test_graphs_that_compute_nothing_are_not_timed() -> None:
    nothing = helper.make_model(helper.make_graph([], "g", [], []), opset_imports=[helper.make_opsetid("", 17)])
    nothing.ir_version = 8
    told = " ".join(run("bench", saved(nothing), "--seconds", 0.01).output.split())
    assert told.endswith(
        "model.onnx has no outputs, so there is nothing to time: name a model that computes something."
    )
    with pytest.raises(onnxamp.ArgumentError, match="has no outputs"):
        onnxamp.bench_models(nothing, provider="cpu")
    passed = helper.make_graph([], "g", [ValueInfoProto(name="x", type=ROWS)], [ValueInfoProto(name="x", type=ROWS)])
    model = helper.make_model(passed, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert run("bench", saved(model), "--seconds", 0.01).exit_code == 0
