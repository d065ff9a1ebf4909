"""Folding: every form of ``_data/folds.toml`` becomes its op and computes the same; whole models keep what they say.

What each kind becomes, and what almost matches and stays, is shown in ``golden/fold_*.txt``.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
from engine import prepared
from every import every
from graphs import CASES
from graphs.case import add_weights, parse
from onnx import ModelProto, NodeProto, helper, numpy_helper
from real_models import REAL_MODELS
from repository import MODELS

import onnxamp
from onnxamp import convert_file
from onnxamp._convert.plan import load_plan
from onnxamp._facts.ops import op_facts
from onnxamp._graph.match import Choice, Form, Op, Pattern, Scalar, Var, form_table
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._runtime.inputs.random_inputs import random_inputs
from onnxamp._runtime.inputs.samples import load_samples
from onnxamp._runtime.sessions.values import check_inputs

OPSETS = (11, 13, 17, 18, 20, 22)
ROWS, COLUMNS = 3, 8
ROUNDING = 2e-6
"""Relative L2 that the order of sums makes in float32."""


def folded(model: ModelProto, **wishes: Any) -> ModelProto:
    """The model folded and otherwise as it is."""
    return onnxamp.convert_model(model, "O0", fold=True, **wishes)


def ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def copied(model: ModelProto) -> ModelProto:
    """A copy, for what changes its argument."""
    result = ModelProto()
    result.CopyFrom(model)
    return result


def run(model: ModelProto, feeds: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# --- the forms --------------------------------------------------------------------------------------------------


class Writer:
    """Writes a form out as nodes: the alternatives that ``picks`` names by position, the first ones elsewhere."""

    def __init__(self, picks: dict[int, int], *, shared: bool, opset: int) -> None:
        self.picks, self.shared, self.opset = picks, shared, opset
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.known: dict[Pattern, str] = {}
        self.choices: list[int] = []
        """Alternatives of each choice, in the order in which the form comes to them."""

    def value(self, pattern: Pattern) -> str:
        if isinstance(pattern, Choice):
            pick = self.picks.get(len(self.choices), 0)
            self.choices.append(len(pattern.options))
            return self.value(pattern.options[pick])
        if isinstance(pattern, Var):
            return self.variable(pattern.name)
        if isinstance(pattern, Scalar):
            name = f"number{len(self.weights)}"
            self.weights[name] = np.array(pattern.value, np.float32)
            return name
        if not self.shared or pattern not in self.known:
            self.known[pattern] = self.node(pattern)
        return self.known[pattern]

    def variable(self, name: str) -> str:
        values = {"epsilon": 1e-5, "count": COLUMNS, "share": 1 / COLUMNS}
        rng = np.random.default_rng(1)
        if name in values:
            self.weights[name] = np.array([values[name]], np.float32)
        elif name != "x":
            self.weights[name] = rng.standard_normal((1, COLUMNS) if self.shared else COLUMNS).astype(np.float32)
        return name

    def node(self, pattern: Op) -> str:
        inputs, attributes = [self.value(item) for item in pattern.inputs], {}
        if pattern.key.startswith("Reduce"):
            as_input = self.opset >= (13 if pattern.key == "ReduceSum" else 18)
            if as_input:
                self.weights["axes"] = np.array([-1])
                inputs.append("axes")
            else:
                attributes["axes"] = [-1]
        output = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(pattern.key, inputs, [output], **attributes))
        return output


def written(form: Form, picks: dict[int, int], *, shared: bool, opset: int, with_bias: bool = False) -> ModelProto:
    writer = Writer(picks, shared=shared, opset=opset)
    last = writer.value(form.pattern)
    if with_bias:
        writer.nodes.append(helper.make_node("Add", [last, writer.variable("bias")], ["Y"]))
    else:
        writer.nodes[-1].output[0] = "Y"
    model = parse(f"(float[N,{ROWS},{COLUMNS}] x) => (float[N,{ROWS},{COLUMNS}] Y) {{ Y = Relu (x) }}", opset)
    del model.graph.node[:]
    model.graph.node.extend(writer.nodes)
    arrays = sorted(writer.weights.items(), key=lambda item: item[0] != "gain")  # first of all values, whose index is 0
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays)
    return model


def variants(kind: str) -> Iterator[tuple[Form, dict[int, int], bool, int]]:
    """Every form with each of its choices varied by itself, values shared or not, axes as attributes and as inputs."""
    forms = [form for form in form_table().forms if form.kind == kind]
    for number, form in enumerate(dict.fromkeys(forms)):
        writer = Writer({}, shared=False, opset=17)
        writer.value(form.pattern)
        yield form, {}, True, 17
        for position, alternatives in enumerate(writer.choices):
            for pick in range(1, alternatives):
                shared, opset = position % 2 == 0, OPSETS[(number + position + pick) % len(OPSETS)]
                yield form, {position: pick}, shared, opset


def form_values(pattern: Pattern) -> set[str]:
    """Names of values that stand in the form."""
    if isinstance(pattern, Var):
        return {pattern.name}
    below = pattern.options if isinstance(pattern, Choice) else pattern.inputs if isinstance(pattern, Op) else ()
    return set().union(*map(form_values, below))


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("kind", form_table().kinds)
def test_every_form_becomes_its_op_and_computes_the_same(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, ROWS, COLUMNS), np.float32) * 3
    for number, (form, picks, shared, opset) in enumerate(variants(kind)):
        with_bias = kind == "LayerNorm" and number % 2 == 0
        original = written(form, picks, shared=shared, opset=opset, with_bias=with_bias)
        note = f"opset {opset}: {onnx.printer.to_text(original.graph)}"
        result = folded(original)
        left = [op for op in ops(result) if op != "Constant"]
        assert left[0] == form_table().kinds[kind].op, note
        assert len(left) == 1 + (with_bias and "bias" in form_values(form.pattern)), note
        onnx.checker.check_model(result, full_check=True)
        wanted = run(original, {"x": x})[0]
        assert distance(run(result, {"x": x})[0], wanted) < ROUNDING, note
        reference = onnx.reference.ReferenceEvaluator(result).run(None, {"x": x})[0]
        assert distance(reference, wanted) < ROUNDING, note
        assert folded(result) == result


@pytest.mark.slow
@pytest.mark.parametrize("kind", form_table().kinds)
def test_identities_hide_no_form(kind: str) -> None:
    for form, picks, shared, opset in variants(kind):
        model = written(form, picks, shared=shared, opset=opset)
        made = {node.output[0]: f"{node.output[0]}_same" for node in model.graph.node}
        for node in model.graph.node:
            node.input[:] = [made.get(name, name) for name in node.input]
        nodes = [step for node in model.graph.node for step in (node, same(node, made[node.output[0]]))]
        model.graph.ClearField("node")
        model.graph.node.extend(nodes[:-1])
        assert form_table().kinds[kind].op in ops(folded(model)), onnx.printer.to_text(model.graph)


def same(node: NodeProto, name: str) -> NodeProto:
    """An Identity behind the node."""
    return helper.make_node("Identity", [node.output[0]], [name])


def test_forms_name_ops_and_rules_that_there_are() -> None:
    def keys(pattern: Pattern) -> set[str]:
        below = pattern.options if isinstance(pattern, Choice) else pattern.inputs if isinstance(pattern, Op) else ()
        return set().union({pattern.key} if isinstance(pattern, Op) else set(), *map(keys, below))

    for form in form_table().forms:
        assert all(onnx.defs.has(key) for key in keys(form.pattern)), form
        assert form.cores <= op_facts().core_of.keys(), f"{form}: it would be looked for nowhere"
    for kind in form_table().kinds.values():
        assert kind.op in ("Softmax", "LogSoftmax") or onnx.defs.get_schema(kind.op).since_version >= kind.opset
        assert kind.attributes.keys() <= onnx.defs.get_schema(kind.op).attributes.keys()


# --- whole models -----------------------------------------------------------------------------------------------

NETWORK = """(float[2,8] X) => (float[2,8] Y) <float two = {2.0}, float e = {1e-5}, float k = {1.4142135},
    float one = {1.0}, float half = {0.5}> {
    h = MatMul (X, w) u = ReduceMean <axes = [-1]> (h) c = Sub (h, u) p = Pow (c, two) v = ReduceMean <axes = [-1]> (p)
    a = Add (v, e) r = Sqrt (a) n = Div (c, r) s = Mul (n, g) t = Add (s, b) m = MatMul (t, w)
    d = Div (m, k) f = Erf (d) i = Add (f, one) j = Mul (m, i) q = Mul (j, half) Y = MatMul (q, w)
}"""
WEIGHTS = {"w": (8, 8), "g": (8,), "b": (8,)}


def network(opset: int = 17) -> ModelProto:
    weights = WEIGHTS if opset < 18 else WEIGHTS | {"last": np.array([-1])}
    return add_weights(parse(NETWORK if opset < 18 else with_axes(NETWORK), opset), weights)


def with_axes(text: str) -> str:
    """ReduceMean as opset 18 wants it."""
    return re.sub(r"ReduceMean <axes = \[-1\]> \((\w+)\)", r"ReduceMean (\1, last)", text)


@pytest.mark.slow
@every(name=[name for name, case in CASES.items() if case.loads], parts=2)
def test_minimal_graphs_stay_what_they_are(name: str) -> None:
    """Whatever is folded in them: types, names and numbers of inputs and outputs, and folding twice changes nothing."""
    case = CASES[name]
    original = case.build()
    result = folded(original)
    assert folded(result) == result
    if ops(result) == ops(original):
        return
    assert list(result.graph.input) == list(original.graph.input)
    assert list(result.graph.output) == list(original.graph.output)
    onnx.checker.check_model(result, full_check=True)
    for found, wanted in zip(run(result, case.inputs()), run(original, case.inputs()), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", [*MODELS, *REAL_MODELS], ids=lambda path: path.stem)
def test_models_compute_the_same(path: Path) -> None:
    original, given = onnx.load(path), path.with_suffix(".npz")
    feeds = load_samples(given)[0] if given.is_file() else random_inputs(original, seed=0)
    feeds, result = check_inputs(original, feeds), folded(original)
    assert folded(result) == result
    for found, wanted in zip(run(result, feeds), run(original, feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_folds_of_the_models_of_the_repository() -> None:
    found = {path.stem: onnxamp.convert_model(path, "O0", fold=True) for path in MODELS}
    assert ops(found["decoder"]).count("RMSNormalization") == 5
    assert not {"BatchNormalization"} & set(ops(found["classifier"]))


def test_a_value_that_a_body_reads_is_kept() -> None:
    text = """(float[2,8] X, bool B) => (float[2,8] Y) <float two = {2.0}, float e = {1e-5}> {
        p = Pow (X, two) v = ReduceMean <axes = [-1]> (p) a = Add (v, e) r = Sqrt (a) n = Div (X, r) s = Mul (n, g)
        Y = If (B) <then_branch = t () => (float[2,8] T) { T = Add (s, r) },
            else_branch = f () => (float[2,8] F) { F = Identity (s) }>
    }"""
    text, weights = with_axes(text), {"g": (8,), "last": np.array([-1])}
    assert "RMSNormalization" not in ops(folded(add_weights(parse(text, 23, 10), weights)))
    text = text.replace("T = Add (s, r)", "T = Add (s, s)")
    assert "RMSNormalization" in ops(folded(add_weights(parse(text, 23, 10), weights)))


def test_functions_are_inlined_and_folded() -> None:
    text = """(float[2,8] X) => (float[2,8] Y) { Y = my.Norm (X, g) }
    <domain: "my", opset_import: ["" : 17]> Norm (x, gain) => (y) {
        two = Constant <value = float {2.0}> () e = Constant <value = float {0.001}> ()
        p = Pow (x, two) v = ReduceMean <axes = [-1]> (p) a = Add (v, e) r = Sqrt (a) n = Div (x, r) y = Mul (n, gain)
    }"""
    model = add_weights(parse(text, 17, 8, {"my": 1}), {"g": (8,)})
    result = onnxamp.convert_model(model, "O1", fold=True)
    assert ops(result) == ["RMSNormalization"]
    assert not result.functions


def test_the_new_node_keeps_name_and_metadata_of_the_last_one() -> None:
    model = network(20)
    for number, node in enumerate(model.graph.node):
        node.name = f"layer/{number}"
        node.doc_string = f"line {number}"
        node.metadata_props.add(key="at", value=str(number))
    kept = {node.name: node for node in folded(model).graph.node}
    assert list(kept) == ["layer/0", "layer/9", "layer/10", "layer/15", "layer/16"]
    for name in ("layer/9", "layer/15"):
        number = name.removeprefix("layer/")
        assert (kept[name].doc_string, kept[name].metadata_props[0].value) == (f"line {number}", number)


def test_the_opset_that_is_asked_for_is_a_ceiling() -> None:
    result = folded(network(13), opset=17)
    assert (result.opset_import[0].version, "LayerNormalization" in ops(result), "Erf" in ops(result)) == (
        17,
        True,
        True,
    )
    assert folded(network(13)).opset_import[0].version == 20


def test_upgrading_keeps_declarations() -> None:
    """Fusions of the runtime want the shapes that a model declares."""
    model = onnx.shape_inference.infer_shapes(network(13))
    result = folded(model)
    kept = {entry.name: entry for entry in model.graph.value_info if entry.name in {"h", "t", "m", "q"}}
    assert {entry.name: entry for entry in result.graph.value_info} == kept


def test_a_folded_batch_norm_is_rounded_once() -> None:
    rng = np.random.default_rng(0)
    text = """(float[1,4,6,6] X) => (float[1,6,9,9] Y) {
        h = ConvTranspose <group = 2> (X, w, k) Y = BatchNormalization <epsilon = 0.001> (h, s, b, m, v)
    }"""
    shapes = {"w": (4, 3, 4, 4), "k": (6,), "s": (6,), "b": (6,), "m": (6,)}
    model = add_weights(parse(text), {**shapes, "v": rng.uniform(0.01, 2, 6).astype(np.float32)})
    result = folded(model)
    assert ops(result) == ["ConvTranspose"]
    feeds = {"X": rng.standard_normal((1, 4, 6, 6), np.float32)}
    assert distance(run(result, feeds)[0], run(model, feeds)[0]) < ROUNDING
    old = {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer}
    factor = (old["s"] / np.sqrt(old["v"] + np.float32(0.001))).reshape(2, 1, 3, 1, 1)
    wanted = (old["w"].reshape(2, 2, 3, 4, 4) * factor).reshape(4, 3, 4, 4).astype(np.float32)
    new = next(tensor for tensor in result.graph.initializer if tensor.name == "w")
    assert np.array_equal(numpy_helper.to_array(new), wanted)


# --- plans, files, reports --------------------------------------------------------------------------------------


def test_a_plan_says_that_it_folds(tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "model.onnx")
    plan = onnxamp.plan_model(network(), "O2", lists="fast", fold=True)
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["options"]["fold"] is True
    again = load_plan(tmp_path / "plan.json")
    wanted = onnxamp.convert_model(network(), "O2", lists="fast", fold=True)
    assert onnxamp.apply_plan(network(), again) == wanted
    convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", plan=again, validate=False)
    assert onnx.load(tmp_path / "low.onnx") == wanted


def test_files_with_external_data(tmp_path: Path) -> None:
    text = """(float[1,16,8,8] X) => (float[1,16,8,8] Y) <float two = {2.0}, float e = {1e-5}> {
        h = Conv <pads = [1, 1, 1, 1]> (X, w) n = BatchNormalization (h, s, b, m, v)
        p = Pow (n, two) q = ReduceMean <axes = [-1]> (p) a = Add (q, e) r = Sqrt (a) i = Div (n, r) j = Mul (i, g)
        Y = Conv <pads = [1, 1, 1, 1]> (j, k)
    }"""
    positive = np.random.default_rng(0).uniform(0.5, 2, 16).astype(np.float32)
    shapes = {"w": (16, 16, 3, 3), "k": (16, 16, 3, 3), "g": (8,), "s": (16,), "b": (16,), "m": (16,), "v": positive}
    model = add_weights(parse(text), shapes)
    source, target = tmp_path / "model.onnx", tmp_path / "low.onnx"
    onnx.save(copied(model), source, save_as_external_data=True, location="model.data", size_threshold=0)
    made = convert_file(source, target, "O2", lists="fast", fold=True, validate=False)
    assert (tmp_path / "low.onnx.data").exists()
    assert any(note.startswith("Folded 1 BatchNorm and 1 RMSNorm") for note in made.notes)
    wanted = onnxamp.convert_model(model, "O2", lists="fast", fold=True)
    assert ops(wanted) == ["Cast", "Conv", "RMSNormalization", "Conv", "Cast"]
    found = onnx.load(target)
    assert list(found.graph.node) == list(wanted.graph.node)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in wanted.graph.initializer}
    for tensor in found.graph.initializer:
        assert np.array_equal(numpy_helper.to_array(tensor), weights[tensor.name])


@pytest.mark.parametrize("wishes", [{"level": "O3"}, {"lists": "conservative"}, {}], ids=str)
def test_what_folding_would_save_is_what_it_saves(wishes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(network(), path)
    made = convert_file(path, tmp_path / "low.onnx", fold=False, **wishes, validate=False)
    hint = next(note for note in made.notes if "--no-fold" in note)
    assert hint.startswith(
        "1 LayerNorm and 1 Gelu are decomposed into basic ops; without --no-fold, each becomes a single"
    )
    plain, other = (ops(onnxamp.convert_model(network(), **wishes, fold=fold)).count("Cast") for fold in (False, True))
    assert (f"saves {plain - other} of {plain} Casts" in hint) == (other < plain)
    assert ("--lists default" in hint) == ("lists" in wishes)
    assert not any(
        "--no-fold" in note
        for note in convert_file(path, tmp_path / "low.onnx", fold=True, **wishes, validate=False).notes
    )


def test_reports_tell_of_folds(tmp_path: Path) -> None:
    path, low = tmp_path / "model.onnx", tmp_path / "low.onnx"
    onnx.save(network(), path)
    told = commands.run("convert", path, "-o", low, "--fold", "-v")
    assert told.exit_code == 0, told.output
    assert "Upgraded from opset 17 to 20 to fold 1 Gelu." in told.output
    assert "Folded 1 LayerNorm and 1 Gelu." in told.output
    assert "1 LayerNorm and 1 Gelu are decomposed" in commands.run("inspect", path, "--no-fold").output
    onnxamp.convert_file(path, low, fold=False, validate=False)
    told = commands.run("check", low, "--static")
    assert "1 LayerNorm is decomposed into basic ops, with 2 Casts around" in " ".join(told.output.split())


# --- folding by default -------------------------------------------------------------------------------------------


def test_patterns_are_folded_where_that_makes_the_result_faster(tmp_path: Path) -> None:
    """The LayerNorm may be low as one op. The Gelu is low as it is, so it stays, and the opset with it."""
    onnx.save(network(), tmp_path / "model.onnx")
    made = convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", validate=False)
    result = onnx.load(tmp_path / "low.onnx")
    assert ops(result).count("LayerNormalization") == 1
    assert {"Erf", "Sqrt"} & set(ops(result)) == {"Erf"}
    assert ops(result).count("Cast") == 2, "of the model's input and output"
    assert result.opset_import[0].version == 17
    assert "Folded 1 LayerNorm." in made.notes
    assert "Folding makes the result faster; --no-fold leaves the patterns as they are." in made.notes


@pytest.mark.parametrize(
    "wishes",
    [
        {"fold": False},
        {"level": "O0"},
        {"level": "O1"},
        {"lists": "conservative"},
        {"lists": "mindspore"},
        {"keep_nodes": ["r"]},
        {"black_list": ["Pow"]},
        {"black_list": ["LayerNormalization"]},
        {"target": "cuda@1.24"},
    ],
    ids=str,
)
def test_patterns_stay_where_their_op_would_not_be_low_or_the_user_named_a_node(wishes: dict[str, Any]) -> None:
    result = ops(onnxamp.convert_model(network(), **wishes))
    assert "LayerNormalization" not in result
    assert "Sqrt" in result


def test_only_units_that_become_low_are_folded() -> None:
    """One LayerNorm is between products. The other reads an input and makes an output, which are float32."""
    norm = """u{0} = ReduceMean <axes = [-1]> ({1}) c{0} = Sub ({1}, u{0}) p{0} = Pow (c{0}, two)
        v{0} = ReduceMean <axes = [-1]> (p{0}) a{0} = Add (v{0}, e) r{0} = Sqrt (a{0}) n{0} = Div (c{0}, r{0})
        s{0} = Mul (n{0}, g) {2} = Add (s{0}, b) """
    text = f"h = MatMul (X, w) {norm.format(1, 'h', 't')} Y = MatMul (t, w) {norm.format(2, 'X', 'Z')}"
    head = "(float[2,8] X) => (float[2,8] Y, float[2,8] Z) <float two = {2.0}, float e = {1e-5}>"
    model = add_weights(parse(f"{head} {{ {text} }}"), WEIGHTS)
    result = onnxamp.convert_model(model)
    assert [ops(result).count(op) for op in ("LayerNormalization", "Sqrt", "Cast")] == [1, 1, 2]
    assert onnxamp.plan_model(model).options.folded == ("t",)
    alone = onnxamp.convert_model(model, black_list=["MatMul"])
    assert ops(alone) == ops(model), "no unit becomes low"


def test_what_is_folded_by_default_stays_within_the_opset_that_is_asked_for() -> None:
    assert "LayerNormalization" in ops(onnxamp.convert_model(network(13)))
    assert "LayerNormalization" not in ops(onnxamp.convert_model(network(13), opset="keep"))
    plan = onnxamp.plan_model(network(), opset="keep")
    assert plan.options.folded == ("t",)


def test_a_plan_repeats_the_folds_that_were_found_to_pay(tmp_path: Path) -> None:
    model = network(13)
    plan = onnxamp.plan_model(model)
    plan.save(tmp_path / "plan.json")
    assert onnxamp.apply_plan(model, load_plan(tmp_path / "plan.json")) == onnxamp.convert_model(model)


def test_a_fold_that_would_change_results_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpgradeProof, "__call__", lambda *_: "float32 results would change as well")
    onnx.save(network(), tmp_path / "model.onnx")
    told = commands.run("convert", tmp_path / "model.onnx", "-o", tmp_path / "low.onnx", "-v")
    assert told.exit_code == 0, told.output
    assert "Not folded into single ops: float32 results would change as well." in told.output
    assert "LayerNormalization" not in ops(onnx.load(tmp_path / "low.onnx"))


def test_converting_a_folded_result_again_changes_nothing() -> None:
    result = onnxamp.convert_model(network())
    assert onnxamp.convert_model(result) == result


def test_tuning_folds_first() -> None:
    _, tuned = onnxamp.tune_model(network(), 0.5, count=1, fold=True)
    assert tuned.plan.options.fold
    assert {row.op for row in tuned.plan.rows} >= {"LayerNormalization", "Gelu"}


def test_folds_that_would_cost_a_kernel_are_told() -> None:
    text = """(float[1,1,2,8] X) => (float[1,1,2,8] Y) <float two = {2.0}, float e = {1e-5}> {
        m = MaxPool <kernel_shape = [1, 1]> (X) p = Pow (m, two) v = ReduceMean <axes = [-1]> (p) a = Add (v, e)
        r = Sqrt (a) n = Div (m, r) Y = Mul (n, g)
    }"""
    model = add_weights(parse(text), {"g": (8,)})
    why = "1 RMSNorm stays decomposed: that needs opset 23, where MaxPool would lose kernels on cuda."
    assert prepared(model, fold=True).unfolded == (why,)
    assert "RMSNormalization" in ops(folded(model, target="any"))


def test_onnx_runtimes_own_op_stands_for_one_of_an_opset_that_costs_kernels() -> None:
    model = parse("(float[2,8] x) => (float[2,8] y) { s = Sin (x) p = Mul (s, s) m = ReduceMean <axes = [-1]> (p)"
                  " v = Add (m, e) r = Sqrt (v) n = Div (s, r) y = Mul (n, g) }")  # fmt: skip
    model = add_weights(model, {"e": np.array(1e-6, np.float32), "g": np.ones(8, np.float32)})
    result = onnxamp.convert_model(model, "O3", fold=True, target="webgpu")
    assert [node.op_type for node in result.graph.node if node.op_type != "Cast"] == [
        "Sin",
        "SimplifiedLayerNormalization",
    ]
    assert result.opset_import[0].version == model.opset_import[0].version
    x = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    assert onnxamp.diff_models(model, result, x, provider="cpu").passed
    portable = onnxamp.convert_model(model, "O3", fold=True, target="cuda")
    assert "RMSNormalization" in [node.op_type for node in portable.graph.node]


def test_folds_that_are_not_made_are_told_where_nothing_else_is(tmp_path: Path) -> None:
    text = """(float[2,8] X) => (float[2,8] Y) <float two = {2.0}, float e = {1e-5}> {
        p = Pow (X, two) v = ReduceMean <axes = [-1]> (p) a = Add (v, e) r = Sqrt (a) n = Div (X, r) Y = Mul (n, g)
    }"""
    source = tmp_path / "model.onnx"
    onnx.save(add_weights(parse(text), {"g": (8,)}), source)
    target = tmp_path / "same.onnx"
    made = onnxamp.convert_file(source, target, "O1", fold=True, opset="keep", black_list=["Mul"], validate=False)
    assert target.read_bytes() == source.read_bytes()
    why = "1 RMSNorm stays decomposed: that needs opset 23, which --opset keep rules out."
    assert made.notes.count(why) == 1


PARTED = """(float[1,2,4,4] x) => (float[1,2,4,4] y) {
    [one] a = Conv (x, w) [norm] b = BatchNormalization (a, s, s, s, s) [two] y = Conv (b, w) }"""


def parted(variance: float = 1.0) -> ModelProto:
    """A normalization between two convolutions; with a variance that is negative, it computes no number."""
    return add_weights(parse(PARTED, opset=22), {"w": (2, 2, 1, 1), "s": np.full(2, variance, np.float32)})


@pytest.mark.parametrize(
    ("options", "folds"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "level": "O1"}, True),
        ({"dtype": "bfloat16", "level": "O3"}, True),
        ({"dtype": "bfloat16", "target": "openvino"}, True),
        ({"dtype": "bfloat16", "target": "cuda@1.24"}, True),
        ({"dtype": "bfloat16", "fold": False}, False),
        ({"dtype": "bfloat16", "target": "openvino", "fold": False}, False),
        ({"dtype": "bfloat16", "level": "O0"}, False),
        ({"dtype": "bfloat16", "black_list": ["BatchNormalization"]}, False),
        ({"dtype": "bfloat16", "keep_high": ["norm"]}, False),
        ({"dtype": "bfloat16", "keep_nodes": ["one"]}, False),
        ({"dtype": "bfloat16", "lists": "paddle"}, False),
        ({"dtype": "bfloat16", "target": "webgpu"}, False),
        ({"dtype": "bfloat16", "target": "tensorrt"}, False),
        ({"dtype": "float16"}, False),
    ],
)
def test_normalizations_without_a_kernel_go_into_weights(options: dict[str, Any], folds: bool) -> None:
    """CUDA and OpenVINO have no bfloat16 BatchNormalization: Casts would part it from its convolution."""
    ready = prepared(parted(), **options)
    assert ("BatchNormalization" in ops(ready.graph.model)) != folds
    assert ready.requested is False
    model = parted()
    low = onnxamp.convert_model(model, **options)
    counts = [ops(low).count(op) for op in ("BatchNormalization", "Cast")]
    assert counts[0] == (not folds)
    if folds:
        assert counts[1] == 2
        plan = onnxamp.plan_model(model, **options)
        assert plan.options.fold is None
        assert onnxamp.apply_plan(model, plan) == low
        feeds = {"x": np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)}
        report = onnxamp.diff_models(model, low, feeds, provider="cpu", layers=False)
        assert report.outputs[0].rel_l2 < 1e-2


def test_what_stays_float32_is_not_folded_either() -> None:
    model = parted()
    kept = onnxamp.convert_model(model, dtype="bfloat16", black_list=["Conv"])
    assert kept.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "bfloat16"}, 0),
        ({"dtype": "bfloat16", "fold": False}, 1),
        ({"dtype": "bfloat16", "black_list": ["BatchNormalization"]}, 1),
        ({"dtype": "float16"}, 0),
    ],
)
def test_normalizations_that_part_from_their_convolutions_are_told_of(
    options: dict[str, Any], told: int, tmp_path: Path
) -> None:
    onnx.save(parted(), tmp_path / "model.onnx")
    notes = convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", **options, validate=False).notes
    text = "1 BatchNormalization after bfloat16: ONNX Runtime does not fuse them, because they stay in float32; --fold"
    assert [note.startswith(text) for note in notes if "--fold" in note] == [True] * told
    assert all("saves 2 of 4 Casts" in note for note in notes if "--fold" in note)


def test_normalizations_that_cannot_be_folded_stay(tmp_path: Path) -> None:
    """No advice is given either that would not help."""
    onnx.save(parted(variance=-1.0), tmp_path / "model.onnx")
    made = convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", dtype="bfloat16", validate=False)
    assert ops(onnx.load(tmp_path / "low.onnx")).count("BatchNormalization") == 1
    assert not any("--fold" in note for note in made.notes)
