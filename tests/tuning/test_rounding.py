"""``rounding="compensated"``: weights whose products stay near on samples, through public functions and commands."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import report_of, run
from graphs.case import parse
from onnx import ModelProto, TensorProto, helper, numpy_helper
from repository import ROOT

import onnxamp
from onnxamp._convert.compensation import MADE_UP
from onnxamp._convert.convert import convert
from onnxamp._model.model import Model
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.inputs.samples import as_samples
from onnxamp._runtime.run import Run
from onnxamp._tuning.rounding import WeightRounder

Floats = np.ndarray[Any, np.dtype[np.float32]]
LOWS = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
HOW: dict[str, Any] = {"target": "any", "rounding": "compensated"}


def drawn(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng((*shape, seed)).normal(size=shape).astype(np.float32)


def correlated(count: int, *shape: int, seed: int = 0) -> list[dict[str, Floats]]:
    """Samples of X whose last axis has a few common causes."""
    causes = np.random.default_rng(99).normal(size=(4, shape[-1])).astype(np.float32) + 1
    return [{"X": drawn(*shape[:-1], 4, seed=seed + number) @ causes} for number in range(count)]


def model_of(text: str, **weights: Floats) -> ModelProto:
    model = parse(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def perceptron() -> ModelProto:
    return model_of(
        "(float[N,24] X) => (float[N,6] Y) { [one] h = MatMul (X, w1) r = Relu (h) [two] Y = MatMul (r, w2) }",
        w1=drawn(24, 20), w2=drawn(20, 6),
    )  # fmt: skip


def with_weights_of(result: ModelProto, original: ModelProto, names: set[str]) -> ModelProto:
    """The original with the numbers of some of the result's weights: rounding of activations apart."""
    low = {tensor.name: tensor for tensor in emulate(result).graph.initializer if tensor.name in names}
    made = ModelProto()
    made.CopyFrom(original)
    for tensor in made.graph.initializer:
        if tensor.name in low:
            tensor.CopyFrom(low[tensor.name])
    return made


def outputs(model: ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return list(ort.InferenceSession(model.SerializeToString()).run(None, feeds))


def error(model: ModelProto, original: ModelProto, samples: Any) -> float:
    """Relative L2 of all outputs on all samples."""
    pairs = [(a, b) for feeds in samples
             for a, b in zip(outputs(model, feeds), outputs(original, feeds), strict=True)]  # fmt: skip
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in pairs) / sum(np.square(b).sum() for _, b in pairs)))


def errors(model: ModelProto, samples: Any, unseen: Any, **options: Any) -> tuple[float, float]:
    """The error that weights of products bring on unseen inputs: rounded to nearest, and with compensation."""
    near = onnxamp.convert_model(model, "O3", **(options | {"rounding": "nearest"}))
    far = onnxamp.convert_model(model, "O3", samples=samples, **options)
    names = {a.name for a, b in zip(near.graph.initializer, far.graph.initializer, strict=True) if a != b}
    first, second = (error(with_weights_of(each, model, names), model, unseen) for each in (near, far))
    return first, second


def same_weights(first: ModelProto, second: ModelProto) -> bool:
    return [tensor.raw_data for tensor in first.graph.initializer] == [t.raw_data for t in second.graph.initializer]


@LOWS
def test_unseen_inputs_gain(dtype: str) -> None:
    before, after = errors(perceptron(), correlated(4, 16, 24), correlated(4, 16, 24, seed=50), dtype=dtype, **HOW)
    assert after < 0.4 * before


@pytest.mark.mostly_slow(fast=1)
@LOWS
@pytest.mark.parametrize("name", ["classifier", "encoder", "unet"])
def test_unseen_inputs_of_models_gain(name: str, dtype: str) -> None:
    model = onnx.load(ROOT / "models" / f"{name}.onnx")
    dims = {"sequence": 32} if name == "encoder" else None
    seen, unseen = (onnxamp.random_samples(model, count, seed=seed, dims=dims) for count, seed in ((16, 0), (4, 1000)))
    before, after = errors(model, seen, list(unseen), dtype=dtype, **HOW)
    assert after < 0.85 * before


def recurrent(op: str, gates: int, **flags: Any) -> ModelProto:
    """A recurrent layer of 8 units in both directions."""
    node = helper.make_node(op, ["X", "W", "R"], ["Y"], hidden_size=8, direction="bidirectional", **flags)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "XY")
    weights = {"W": drawn(2, gates * 8, 24) / 5, "R": drawn(2, gates * 8, 8) / 3}
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "layer", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("op", "gates", "flags"), [
    ("RNN", 1, {}), ("GRU", 3, {"linear_before_reset": 1}), ("GRU", 3, {}), ("LSTM", 4, {}),
])  # fmt: skip
def test_recurrent_layers_gain(op: str, gates: int, flags: dict[str, Any]) -> None:
    model, samples = recurrent(op, gates, **flags), correlated(6, 20, 2, 24)
    before, after = errors(model, samples, correlated(4, 20, 2, 24, seed=50), dtype="bfloat16", **HOW)
    assert after < 0.6 * before
    near, far = (onnxamp.convert_model(model, "O3", dtype="bfloat16", target="any", samples=given, rounding=rounding)
                 for rounding, given in (("nearest", None), ("compensated", samples)))  # fmt: skip
    same = {a.name for a, b in zip(near.graph.initializer, far.graph.initializer, strict=True) if a == b}
    assert same == ({"R"} if op == "GRU" and not flags else set())


def test_nearest_is_the_default() -> None:
    model = perceptron()
    usual = onnxamp.convert_model(model, dtype="bfloat16", target="any")
    assert same_weights(usual, onnxamp.convert_model(model, dtype="bfloat16", target="any", rounding="nearest"))
    assert not same_weights(usual, onnxamp.convert_model(model, dtype="bfloat16", samples=correlated(1, 9, 24), **HOW))


def test_only_weights_of_products_differ() -> None:
    """Biases, scales and the graph itself are what they are without."""
    model = onnx.load(ROOT / "models" / "encoder.onnx")
    samples = onnxamp.random_samples(model, 2)
    near = onnxamp.convert_model(model, dtype="bfloat16", target="any")
    far = onnxamp.convert_model(model, dtype="bfloat16", samples=samples, **HOW)
    differ = {a.name for a, b in zip(near.graph.initializer, far.graph.initializer, strict=True) if a != b}
    products = {name for node in near.graph.node if node.op_type in ("MatMul", "Gemm") for name in node.input}
    assert differ
    assert differ <= products
    for model in (near, far):
        del model.graph.initializer[:]
    assert near == far


def test_the_same_samples_give_the_same_bytes() -> None:
    model, samples = perceptron(), correlated(3, 8, 24)
    first, second = (onnxamp.convert_model(model, samples=samples, **HOW).SerializeToString() for _ in range(2))
    assert first == second


def test_a_float32_node_is_not_rounded_at_all() -> None:
    model = perceptron()
    result = onnxamp.convert_model(model, "O3", samples=correlated(2, 8, 24), keep_nodes=["two"], **HOW)
    weights = {tensor.name: tensor for tensor in result.graph.initializer}
    assert weights["w2"] == next(tensor for tensor in model.graph.initializer if tensor.name == "w2")
    assert weights["w1"].data_type == TensorProto.FLOAT16


def test_a_weight_that_is_kept_in_both_precisions_has_its_low_copy_rounded() -> None:
    model = model_of(
        "(float[N,24] X) => (float[N,24] Y) { [one] h = MatMul (X, w) r = Relu (h) [two] Y = MatMul (r, w) }",
        w=drawn(24, 24),
    )  # fmt: skip
    samples = correlated(4, 16, 24)
    near, far = (
        onnxamp.convert_model(model, "O3", dtype="bfloat16", target="any", keep_nodes=["two"], **more)
        for more in ({}, {"rounding": "compensated", "samples": samples})
    )
    tensors = [{t.data_type: t for t in each.graph.initializer} for each in (near, far)]
    assert tensors[0][TensorProto.FLOAT] == tensors[1][TensorProto.FLOAT]
    assert tensors[0][TensorProto.BFLOAT16].raw_data != tensors[1][TensorProto.BFLOAT16].raw_data


SHARED = "(float[N,24] X) => (float[N,24] Y) { [one] h = MatMul (X, w) r = Tanh (h) [two] Y = MatMul (r, w) }"


def test_a_shared_weight_serves_all_its_products() -> None:
    model = model_of(SHARED, w=drawn(24, 24) / 5)
    before, after = errors(model, correlated(6, 16, 24), correlated(4, 16, 24, seed=50), dtype="bfloat16", **HOW)
    assert after < before


@pytest.mark.parametrize("other", [
    "t = Transpose (w) [two] Y = MatMul (h, t)",  # another matrix
    "Y = Add (h, w)",  # no product
    "z = Identity (w) Y = Mul (h, z)",
])  # fmt: skip
def test_a_weight_with_other_readers_is_rounded_to_nearest(other: str) -> None:
    model = model_of(f"(float[24,24] X) => (float[24,24] Y) {{ [one] h = MatMul (X, w) {other} }}", w=drawn(24, 24))
    samples = correlated(2, 24, 24)
    near = onnxamp.convert_model(model, "O3", dtype="bfloat16", target="any")
    assert same_weights(near, onnxamp.convert_model(model, "O3", dtype="bfloat16", samples=samples, **HOW))


@pytest.mark.parametrize("text", [
    "t = Transpose <perm = [1, 0]> (w) Y = MatMul (X, t)", "i = Identity (w) t = Transpose (i) Y = MatMul (X, t)",
])  # fmt: skip
def test_transposed_weights_gain(text: str) -> None:
    model = model_of(f"(float[N,24] X) => (float[N,9] Y) {{ {text} }}", w=drawn(9, 24))
    before, after = errors(model, correlated(4, 16, 24), correlated(4, 16, 24, seed=50), dtype="bfloat16", **HOW)
    assert after < 0.4 * before


def test_weights_of_constant_nodes_gain() -> None:
    model = parse("(float[N,24] X) => (float[N,9] Y) { Y = MatMul (X, w) }")
    value = numpy_helper.from_array(drawn(24, 9))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=value))
    near, far = (
        onnxamp.convert_model(model, "O3", target="any", samples=samples, rounding=rounding)
        for rounding, samples in (("nearest", None), ("compensated", correlated(2, 16, 24)))
    )
    first, second = (next(node for node in each.graph.node if node.op_type == "Constant") for each in (near, far))
    assert first.attribute[0].t.data_type == second.attribute[0].t.data_type == TensorProto.FLOAT16
    assert first != second


BODY = """(float[N,24] X, bool c) => (float[N,24] Y) { Y = If (c) <
    then_branch = yes () => (float[N,24] a) { a = MatMul (X, w) },
    else_branch = no () => (float[N,24] b) { b = MatMul (X, w) }
> }"""


def test_weights_of_bodies_are_rounded_to_nearest() -> None:
    model = model_of(BODY, w=drawn(24, 24))
    samples = [{**feeds, "c": np.array(True)} for feeds in correlated(2, 8, 24)]
    near = onnxamp.convert_model(model, "O3", target="any")
    assert same_weights(near, onnxamp.convert_model(model, "O3", samples=samples, **HOW))


def test_weights_beyond_the_range_are_as_without() -> None:
    weight = drawn(24, 9)
    weight[3, 3] = 1e6
    model = model_of("(float[N,24] X) => (float[N,9] Y) { Y = MatMul (X, w) }", w=weight)
    options: dict[str, Any] = {"target": "any", "hazards": False}
    near = onnxamp.convert_model(model, "O3", **options)
    far = onnxamp.convert_model(model, "O3", samples=correlated(2, 16, 24), rounding="compensated", **options)
    assert near == far


def test_many_passes_find_what_one_does() -> None:
    """Where the rows of all weights exceed the memory, samples run again for the next weights."""
    model, samples = Model(perceptron()), as_samples(correlated(3, 16, 24), perceptron())
    options = onnxamp.Options("O3", **HOW)
    made = [
        convert(model, options, rounder=WeightRounder(Run(inputs=samples), budget=budget)).proto
        for budget in (1, 1 << 30)
    ]
    assert made[0] == made[1]


def test_a_weight_is_rounded_once_for_several_conversions() -> None:
    model, samples = Model(perceptron()), as_samples(correlated(2, 16, 24), perceptron())
    told: list[int] = []
    rounder = WeightRounder(Run(inputs=samples, report=lambda _activity, done, _total: told.append(done)))
    first, second = (convert(model, onnxamp.Options("O3", **HOW), rounder=rounder).proto for _ in range(2))
    assert first == second
    assert told == [1, 2]


@pytest.mark.slow
def test_large_weights_wait_in_a_file(tmp_path: Path) -> None:
    model = model_of("(float[N,16] X) => (float[N,270000] Y) { Y = MatMul (X, w) }", w=drawn(16, 270000))
    samples = correlated(1, 40, 16)
    wanted = onnxamp.convert_model(model, "O3", samples=samples, **HOW)
    onnx.save(model, tmp_path / "in.onnx", save_as_external_data=True)
    onnxamp.convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx", "O3", samples=samples, **HOW, validate=False)
    found = onnx.load(tmp_path / "out.onnx")
    assert found.graph.initializer[0].raw_data == wanted.graph.initializer[0].raw_data


# --- samples, plans, and what is told ---------------------------------------------------------------------------


def test_made_up_inputs_are_warned_of() -> None:
    with pytest.warns(onnxamp.OptionWarning, match="random inputs"):
        onnxamp.convert_model(perceptron(), **HOW)
    with pytest.warns(onnxamp.OptionWarning, match="random inputs"):
        onnxamp.tune_model(perceptron(), 0.1, provider="cpu", **HOW)


def test_a_plan_holds_the_option_and_needs_samples(tmp_path: Path) -> None:
    model, samples = perceptron(), correlated(2, 16, 24)
    plan = onnxamp.plan_model(model, samples=samples, **HOW)
    plan.save(tmp_path / "plan.json")
    loaded = onnxamp.load_plan(tmp_path / "plan.json")
    assert loaded.options.rounding == "compensated"
    with pytest.raises(onnxamp.ArgumentError, match="needs samples"):
        onnxamp.apply_plan(model, loaded)
    applied = onnxamp.apply_plan(model, loaded, samples=samples)
    assert applied == onnxamp.convert_model(model, samples=samples, **HOW)


def test_nothing_low_needs_no_samples() -> None:
    plan = onnxamp.plan_model(perceptron(), "O0", **HOW)
    assert onnxamp.apply_plan(perceptron(), plan) == perceptron()


@pytest.mark.parametrize(("given", "kind"), [("stochastic", onnxamp.ArgumentError), (3, onnxamp.ArgumentTypeError)])
def test_other_ways_to_round_are_refused(given: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="rounding"):
        onnxamp.convert_model(perceptron(), rounding=given)


@pytest.mark.parametrize("external", ["auto", "always"])
def test_files_are_as_models_in_memory(external: str, tmp_path: Path) -> None:
    """Also where weights stay in a data file until they are written."""
    model, samples = perceptron(), correlated(2, 16, 24)
    onnx.save(perceptron(), tmp_path / "in.onnx", save_as_external_data=True, size_threshold=0)
    made = onnxamp.convert_file(
        tmp_path / "in.onnx", tmp_path / "out.onnx", samples=samples, external_data=external, **HOW, validate=False
    )
    wanted = onnxamp.convert_model(model, samples=samples, **HOW)
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    for tensor in wanted.graph.initializer:
        assert np.array_equal(found[tensor.name], numpy_helper.to_array(tensor))
    assert any("Rounded 2 of 2 weights with compensation" in note for note in made.notes)
    assert {name: count.elements for name, count in made.weights.items()} == {"w1": 480, "w2": 120}


def test_the_command_tells_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(perceptron(), "model.onnx")
    for number, feeds in enumerate(correlated(2, 16, 24)):
        Path("inputs").mkdir(exist_ok=True)
        np.savez(f"inputs/{number}.npz", **feeds)
    result = run("convert", "model.onnx", "--rounding", "compensated", "--inputs", "inputs", "--target", "any",
                 "--format", "json", "--save-plan", "plan.json")  # fmt: skip
    assert result.exit_code == 0, result.output
    (note,) = [text for text in report_of(result)["notes"] if "compensation" in text]
    assert "2 of 2 weights" in note
    assert "2 samples of" in note
    assert MADE_UP not in result.output
    first = Path("model_fp16.onnx").read_bytes()
    again = run("convert", "model.onnx", "--plan", "plan.json", "--inputs", "inputs", "-o", "again.onnx", "-q")
    assert again.exit_code == 0, again.output
    assert Path("again.onnx").read_bytes() == first


# --- tuning ------------------------------------------------------------------------------------------------------


@LOWS
def test_tuning_judges_the_weights_that_it_writes(dtype: Any) -> None:
    """With compensation all is low within a tolerance that rounding to nearest misses."""
    model, samples = perceptron(), correlated(4, 16, 24)
    how = {"dtype": dtype, "target": "any", "provider": "cpu", "allow_slower": True}
    low, far = (
        onnxamp.tune_model(model, 1.0, samples=samples, rounding=rounding, **how)
        for rounding in ("nearest", "compensated")
    )
    assert far[1].error < 0.95 * low[1].error
    assert far[1].plan.options.rounding == "compensated"
    between = (far[1].error + low[1].error) / 2
    result, tuned = onnxamp.tune_model(model, between, samples=samples, rounding="compensated", **how)
    assert tuned.held
    assert tuned.plan.counts() == far[1].plan.counts()
    assert same_weights(result, far[0])
