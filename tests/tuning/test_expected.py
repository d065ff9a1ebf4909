"""The error to expect before anything runs low: beside what is measured, in plans, files and commands."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import report_of, run
from decoders import HEAD, KV_HEADS, grouped
from graphs.case import add_weights, parse
from repository import ROOT

from onnxamp import Plan, apply_plan, convert_model, diff_models, load_plan, plan_model, random_samples, tune_model
from onnxamp._convert.plan import ExpectedError
from onnxamp._job.expecting import foreseen
from onnxamp._model.model import Model
from onnxamp._runtime.run import RunOptions

MODELS = ROOT / "models"
RANDOM = np.random.default_rng(0)


def expected(model: Any, level: Any = "O2", **how: Any) -> ExpectedError:
    found = plan_model(model, level, **how).expected
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["classifier", "decoder", "encoder", "recurrent"])
def test_it_is_about_what_is_measured(name: str, level: Any, dtype: Any) -> None:
    path = MODELS / f"{name}.onnx"
    samples = random_samples(path, 2)
    found = expected(path, level, samples=samples, dtype=dtype)
    low = convert_model(path, level, dtype=dtype)
    error = max(row.rel_l2 for row in diff_models(path, low, samples, provider="cpu", layers=False).outputs)
    assert found.error is not None
    assert found.bound is not None
    assert 1 / 1.5 < error / found.error < 1.5
    assert error < found.bound
    assert (found.samples, found.why) == (2, "")


def test_it_comes_from_the_nodes_that_round() -> None:
    """Of two nodes in low precision, the one whose result cancels contributes all there is."""
    text = "(float[64] x) => (float[64] y) { near = Tanh (x) far = Add (near, big) y = Sub (far, big) }"
    model = add_weights(parse(text, 18), {"big": np.full(1, 256, np.float32)})
    sample = {"x": RANDOM.uniform(0.1, 1, 64).astype(np.float32)}
    found = expected(model, "O3", samples=sample, hazards=False)
    first = found.nodes[0]
    assert (first.node, first.op) == ("far", "Add")
    assert 0.99 < sum(row.share for row in found.nodes) <= 1 + 1e-6
    assert first.share > 0.9


@pytest.mark.parametrize("op", ["Mul", "Where"])
def test_sentinels_among_weights_cost_nothing(op: str) -> None:
    """A conversion saturates them. A row of which nothing is left has a gradient, so that infinity would cost a lot."""
    masked = {
        "Mul": "far = Mul (hidden, lowest)",
        "Where": "gone = Greater (hidden, half) far = Where (gone, lowest, none)",
    }
    text = f"""(float[5,7] x, float[5,7] hidden) => (float[5,7] y)
        <float lowest = {{-3.4028235e38}}, float half = {{0.5}}, float none = {{0.0}}> {{
        {masked[op]} seen = Add (x, far) z = Softmax (seen) y = Mul (z, x) }}"""
    hidden = np.ones((5, 7), np.float32)
    hidden[1, :4] = 0
    sample = {"x": RANDOM.normal(size=(5, 7)).astype(np.float32), "hidden": hidden}
    found = expected(parse(text, 18), "O3", samples=sample)
    assert found.error is not None
    assert found.error < 0.01


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{"keep_io_types": False}, {"keep_io_types": ["x"]}, {"keep_io_types": ["y"]}, {"low_weights": ["w"]}],
    ids=["inputs and outputs", "outputs", "inputs", "weights"],
)
def test_what_the_user_wants_low_is_rounded_where_all_nodes_are_float32(options: Any, dtype: Any) -> None:
    text = "(float[64,64] x) => (float[64,64] y) { m = Mul (x, w) y = Softmax (m) }"
    random = np.random.default_rng(0)  # of its own: which tests run before this one depends on the worker
    model = add_weights(parse(text, 18), {"w": random.standard_normal((64, 64)).astype(np.float32)})
    sample = {"x": random.standard_normal((64, 64)).astype(np.float32)}
    plan = plan_model(model, "O2", samples=sample, dtype=dtype, keep_high=[".*"], **options)
    (row,) = diff_models(model, apply_plan(model, plan), sample, provider="cpu", layers=False).outputs
    assert plan.expected is not None
    assert plan.expected.error == pytest.approx(row.rel_l2, rel=0.15)
    assert all(share.op == "Cast" for share in plan.expected.nodes)
    assert sum(share.share for share in plan.expected.nodes) == pytest.approx(1)


@pytest.mark.parametrize(
    ("high", "ops"), [([], {"Sigmoid", "Softplus"}), (["b"], {"Sigmoid", "Cast"}), (["a", "b"], {"Cast"})]
)
def test_outputs_are_rounded_once(high: list[str], ops: set[str]) -> None:
    """By the node that makes them, or by a Cast."""
    text = "(float[64,64] x) => (float[64,64] y, float[64,64] z) { [a] y = Sigmoid (x) [b] z = Softplus (y) }"
    sample = {"x": RANDOM.standard_normal((64, 64)).astype(np.float32)}
    model, how = parse(text, 18), {"keep_high": high, "keep_io_types": ["x"]}
    plan = plan_model(model, "O3", samples=sample, **how)
    rows = diff_models(model, apply_plan(model, plan), sample, provider="cpu", layers=False).outputs
    assert plan.expected is not None
    assert plan.expected.error == pytest.approx(max(row.rel_l2 for row in rows), rel=0.05)
    assert {share.op for share in plan.expected.nodes} == ops


@pytest.mark.slow
def test_nothing_low_has_no_error() -> None:
    found = expected(MODELS / "encoder.onnx", "O0", samples=random_samples(MODELS / "encoder.onnx", 1))
    assert (found.error, found.bound, found.nodes) == (0, 0, ())


def test_selections_are_named() -> None:
    found = expected(MODELS / "detector.onnx", samples=random_samples(MODELS / "detector.onnx", 1))
    assert found.jumps == ("top/k", "nms")
    assert found.error is not None


@pytest.mark.slow
def test_a_plan_keeps_it(tmp_path: Path) -> None:
    path = MODELS / "encoder.onnx"
    plan = plan_model(path, samples=random_samples(path, 1))
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert "99.99 % bound" in plan._repr_html_()
    without = plan_model(path)
    assert without.expected is None
    assert "expected" not in without._repr_html_()


@pytest.mark.slow
def test_a_tuned_plan_tells_it_of_what_was_written() -> None:
    _, tuned = tune_model(MODELS / "encoder.onnx", 3e-3, count=1, provider="cpu")
    found = tuned.plan.expected
    assert found is not None
    assert found.error == pytest.approx(tuned.candidates[tuned.chosen].predicted, rel=1e-4)


def test_what_does_not_run_has_none() -> None:
    """The reason stands in its place."""
    model = parse("(float[4] x) => (float[4] y) { t = Tanh (x) y = local.Unknown (t) }", 18)
    found = expected(model, samples={"x": np.ones(4, np.float32)})
    assert found.error is None
    assert "Unknown" in found.why


def test_without_a_runtime_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    path = MODELS / "encoder.onnx"
    plan: Plan = plan_model(path)
    monkeypatch.setattr("onnxamp._job.expecting.has_runtime", lambda: False)
    monkeypatch.setattr("onnxamp._job.expecting.runtime_fault", lambda: "There is no ONNX Runtime.")
    found = foreseen(Model.of(path), plan, RunOptions()).expected
    assert found == ExpectedError(why="There is no ONNX Runtime.")


@pytest.mark.slow
def test_convert_shows_it_beside_what_is_measured(tmp_path: Path) -> None:
    path = MODELS / "encoder.onnx"
    arguments = ("convert", path, "-o", tmp_path / "low.onnx", "--expected-error", "--provider", "cpu")
    told = " ".join(run(*arguments, "-v").output.split())
    assert "expected 99.99 % bound measured" in told
    found = report_of(run(*arguments, "--format", "json"))
    errors = [row["rel_l2"] for row in found["validation"]["outputs"]]
    assert max(errors) < found["plan"]["expected"]["bound"]
    markdown = run(*arguments, "--format", "markdown").stdout
    assert all(text in markdown for text in ("Error to expect", "| expected |", "| measured |"))
    page = tmp_path / "page.html"
    run(*arguments, "--html", page)
    assert "99.99 % bound" in page.read_text(encoding="utf-8")
    without = report_of(run(*arguments[:4], "--provider", "cpu", "--format", "json"))
    assert without["plan"]["expected"] is None


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "view"])
def test_commands_that_write_no_model_show_it(command: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.load(MODELS / "encoder.onnx"), path)
    np.savez(tmp_path / "inputs.npz", **random_samples(path, 1)[0])
    for asked in (("--expected-error",), ("--inputs", tmp_path / "inputs.npz")):
        told = run(command, path, *asked).stdout
        assert "Error to expect" in told
        assert "share of the squared error" in told
    assert "Error to expect" not in run(command, path).stdout


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("form", [{}, {"int4": True}, {"window": 16}], ids=["float", "int4", "window"])
def test_decoders_of_genai_have_gradients_throughout(form: dict[str, Any]) -> None:
    """Attention over a cache that is shifted, rotary tables, skipped norms and matrices of 4 bits."""
    past, new = form.get("window", 5), 4
    model = grouped(**form)
    sample = {
        entry.name: RANDOM.standard_normal([1, KV_HEADS, past, HEAD]).astype(np.float32)
        for entry in model.graph.input
        if "past" in entry.name
    }
    sample |= {"input_ids": np.arange(new)[None], "attention_mask": np.ones((1, past + new), np.int64)}
    plan = plan_model(model, "O3", samples=sample)
    assert plan.expected is not None
    assert plan.expected.spread == ()
    low = apply_plan(model, plan)
    error = max(row.rel_l2 for row in diff_models(model, low, sample, provider="cpu", layers=False).outputs)
    assert plan.expected.error is not None
    assert 1 / 1.7 < error / plan.expected.error < 1.7


def measured(model: onnx.ModelProto, sample: dict[str, Any]) -> tuple[ExpectedError, float]:
    """The expected error at O3, and the measured one."""
    plan = plan_model(model, "O3", samples=sample)
    assert plan.expected is not None
    rows = diff_models(model, apply_plan(model, plan), sample, provider="cpu", layers=False).outputs
    return plan.expected, max(row.rel_l2 for row in rows)


def test_a_state_that_is_low_before_its_loop_is_not_cast_in_it() -> None:
    text = """(float[32,32] x) => (float[32,32] y) <int64 n = {9}, bool go = {1}> {
        s = MatMul (x, w)
        z = Loop (n, go, s) <body = b (int64 i, bool c, float[32,32] v) => (bool d, float[32,32] t) {
            d = Identity (c)
            t = Identity (v)
        }>
        y = Relu (z)
    }"""
    weights = {"w": RANDOM.standard_normal((32, 32)).astype(np.float32)}
    sample = {"x": RANDOM.standard_normal((32, 32)).astype(np.float32)}
    found, error = measured(add_weights(parse(text, 18), weights), sample)
    assert found.error is not None
    assert 1 / 1.3 < error / found.error < 1.3


def test_what_enters_a_sequence_counts_as_an_output() -> None:
    text = """(float[32,32] x) => (float[32,32] y) {
        s = MatMul (x, w) q = SplitToSequence <axis = 0> (s) y = ConcatFromSequence <axis = 0> (q) }"""
    weights = {"w": RANDOM.standard_normal((32, 32)).astype(np.float32)}
    sample = {"x": RANDOM.standard_normal((32, 32)).astype(np.float32)}
    found, error = measured(add_weights(parse(text, 18), weights), sample)
    assert found.error is not None
    assert 1 / 1.5 < error / found.error < 1.5


# --- a second forward pass, where numbers become integers ----------------------------------------------------------

LOOP = """y = Loop (n, c, x) <body = b (int64 i, bool ci, float[4,32] s) => (bool co, float[4,32] so) {
    co = Identity (ci) m = MatMul (s, w) so = Tanh (m) }>"""
SUM = "y = MatMul (x, deep)"


@pytest.mark.parametrize(("ops", "shape", "target"), [(LOOP, "4,32", "cuda"), (SUM, "4,4096", "webgpu")])
def test_what_the_second_pass_does_not_round_counts_as_without_it(ops: str, shape: str, target: str) -> None:
    """Whole numbers are rounded to integers elsewhere in the model, which changes nothing."""
    random = np.random.default_rng(1)
    weights = {"w": random.standard_normal((32, 32)) / 5, "deep": np.abs(random.standard_normal((4096, 32)))}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    sample = {"x": np.abs(random.standard_normal([*map(int, shape.split(","))])).astype(np.float32)}
    inner = f"<int64 n = {{8}}, bool c = {{1}}> {{ {ops}"
    alone = add_weights(parse(f"(float[{shape}] x) => (float[4,32] y) {inner} }}"), weights)
    text = f"(float[{shape}] x, float[4] z) => (float[4,32] y, float[4] r) {inner} a = Abs (z) r = Round (a) }}"
    beside = add_weights(parse(text), weights)
    whole = {"z": np.arange(4, dtype=np.float32)}
    found = expected(alone, "O3", samples=sample, target=target).error
    assert found
    assert expected(beside, "O3", samples=sample | whole, target=target).error == pytest.approx(found, rel=0.1)


def test_a_model_that_does_not_run_in_low_precision_has_an_expected_error() -> None:
    """A number just below 8 rounds up to 8, beyond the rows of the table."""
    text = """(float[8] x) => (float[8] y) <float eight = {8}> {
        s = Sigmoid (x) t = Mul (s, eight) u = Floor (t) i = Cast <to = 7> (u) y = Gather (table, i) }"""
    model = add_weights(parse(text), {"table": RANDOM.standard_normal(8).astype(np.float32)})
    found = expected(model, "O3", samples={"x": np.full(8, 8.5, np.float32)}, hazards=False)
    assert (found.error is not None, found.why) == (True, "")
    double = parse("(double[8] x) => (double[8] y) { r = Round (x) y = Add (r, x) }")
    assert expected(double, "O3", samples={"x": np.ones(8)}).error == 0


def test_a_sample_that_low_precision_breaks_counts() -> None:
    """Squares of squares of small numbers become 0, and 0 by 0 no number."""
    text = """(float[64] x) => (float[64] y) <float s = {0.01}, int8 z = {0}> {
        a = Abs (x) q = QuantizeLinear (a, s, z) p = DequantizeLinear (q, s, z)
        b = Mul (x, x) c = Mul (b, b) e = Div (c, b) y = Add (e, p) }"""
    usual = RANDOM.uniform(0.1, 1, 64).astype(np.float32)
    one, both = (
        expected(parse(text), "O3", samples=[{"x": usual * size} for size in sizes], hazards=False).error
        for sizes in ((1,), (1, np.float32(1e-3)))
    )
    assert one
    assert both
    assert one < 1e-2
    assert both > 0.99


def test_inputs_that_are_stored_low_reach_a_quantizer_rounded() -> None:
    text = """(float[64,32] x) => (float[64,32] y) <float s = {0.0625}, int8 z = {0}> {
        q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = MatMul (d, w) }"""
    model = add_weights(parse(text, 13), {"w": RANDOM.standard_normal((32, 32)).astype(np.float32) / 6})
    sample = {"x": RANDOM.standard_normal((64, 32)).astype(np.float32)}
    how: Any = {"target": "cpu", "keep_io_types": False}
    found = expected(model, "O3", samples=sample, **how).error
    low = convert_model(model, "O3", **how)
    (row,) = diff_models(model, low, sample, provider="cpu", layers=False).outputs
    assert found
    assert 1 / 1.5 < row.rel_l2 / found < 1.5
