"""Conversions with exponents: overflow goes, float32 bits stay, and what cannot fit is named."""

from typing import Any

import numpy as np
import onnx
import pytest
from judge_numbers import run_original
from onnx import ModelProto, TensorProto, numpy_helper, parser

import onnxamp
from onnxamp._model.model import Model
from onnxamp._runtime.inputs.samples import as_samples
from onnxamp._runtime.run import Run
from onnxamp._tuning.ranges import largest_magnitudes

DECODER = """
<ir_version: 10, opset_import: ["" : 23]>
decoder (int64[1,s] ids) => (float[1,s,50] logits) {
  h0 = Gather (embedding, ids)
  n1 = RMSNormalization <epsilon: float = 1e-6> (h0, gain)
  up = MatMul (n1, w_up)
  gate = MatMul (n1, w_gate)
  opened = Sigmoid (gate)
  swish = Mul (gate, opened)
  inner = Mul (up, swish)
  down = MatMul (inner, w_down)
  h1 = Add (h0, down)
  n2 = RMSNormalization <epsilon: float = 1e-6> (h1, gain)
  logits = MatMul (n2, w_out)
}
"""
"""A layer of a decoder whose residual stream passes 65504, as Gemma's does."""


def model_of(text: str, *weights: tuple[str, tuple[int, ...], float]) -> ModelProto:
    """A model with random weights: (name, shape, standard deviation)."""
    rng = np.random.default_rng(0)
    model = parser.parse_model(text)
    for name, shape, deviation in weights:
        array = (rng.standard_normal(shape) * deviation).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.fixture
def decoder() -> ModelProto:
    return model_of(
        DECODER, ("embedding", (50, 32), 2e5), ("gain", (32,), 1), ("w_up", (32, 64), 0.1), ("w_gate", (32, 64), 0.1),
        ("w_down", (64, 32), 3e3), ("w_out", (32, 50), 0.1),
    )  # fmt: skip


IDS = {"ids": np.arange(7).reshape(1, 7) * 5 % 50}


def floats_of(model: ModelProto) -> set[int]:
    """Element types of float weights."""
    return {tensor.data_type for tensor in model.graph.initializer if tensor.data_type in (1, 10, 16)}


def ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def error_of(model: ModelProto, result: ModelProto, feeds: dict[str, Any]) -> float:
    report = onnxamp.diff_models(model, result, samples=feeds)
    assert report.passed, report
    return max(output.rel_l2 for output in report.outputs)


@pytest.mark.slow
def test_a_residual_stream_becomes_low(decoder: ModelProto) -> None:
    plain = onnxamp.convert_model(decoder, "O3")
    result = onnxamp.convert_model(decoder, "O3", rescale=True, samples=IDS)
    assert floats_of(result) == {TensorProto.FLOAT16}
    assert ops(result).count("Cast") < ops(plain).count("Cast")
    assert sorted(set(ops(result)) - {"Cast"}) == sorted(set(ops(decoder)))
    assert error_of(decoder, result, IDS) < 2e-3
    largest = largest_magnitudes(
        Model.of(onnxamp.apply_plan(decoder, float32_plan(decoder))), Run(inputs=as_samples(IDS, decoder))
    )
    assert max(largest.values()) < 65504 / 2


def float32_plan(model: ModelProto) -> onnxamp.Plan:
    """Exponents alone: every variable is float32."""
    return onnxamp.plan_model(model, "O1", rescale=True, samples=IDS, black_list=["MatMul", "Gather", "Add"])


def test_float32_keeps_its_bits(decoder: ModelProto) -> None:
    result = onnxamp.apply_plan(decoder, float32_plan(decoder))
    assert floats_of(result) == {TensorProto.FLOAT}
    assert result != decoder
    before, after = run_original(decoder, IDS), run_original(result, IDS)
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(before[0], after[0])


def test_values_are_compared_as_they_are_stored(decoder: ModelProto) -> None:
    """A multiple is no error: neither of a value, nor of the op that reads it."""
    result = onnxamp.convert_model(decoder, "O3", rescale=True, samples=IDS)
    rows = onnxamp.diff_models(decoder, result, layers=True, samples=IDS, provider="cpu").layers
    scaled = {row.value: row for row in rows if row.exponent}
    assert set(scaled) == {"h0", "down", "h1"}
    assert {row.dtype for row in scaled.values()} == {"float16"}
    for row in rows:
        for measured in (row.local, row.accumulated):
            assert measured is not None
            assert (measured.rel_l2 < 2e-3, measured.alarm) == (True, None), row
    largest = {row.value: row.accumulated.reference_max for row in rows if row.accumulated is not None}
    assert largest == pytest.approx(
        largest_magnitudes(Model.of(decoder), Run(inputs=as_samples(IDS, decoder))) | largest
    )
    assert max(largest.values()) > 65504, "in the original's units"


def test_an_op_that_breaks_is_found_among_multiples(decoder: ModelProto) -> None:
    result = onnxamp.convert_model(decoder, "O3", rescale=True, samples=IDS)
    weight = next(tensor for tensor in result.graph.initializer if tensor.name == "w_down")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float16(0), weight.name))
    report = onnxamp.diff_models(decoder, result, samples=IDS, provider="cpu")
    assert report.first_bad is not None
    wrong = [row.value for row in report.layers if row.local is not None and row.local.rel_l2 > 2e-3]
    assert (report.first_bad.value, wrong) == ("down", ["down"])


def test_plans_hold_exponents(decoder: ModelProto, tmp_path: Any) -> None:
    plan = onnxamp.plan_model(decoder, "O3", rescale=True, samples=IDS)
    rescaling = plan.options.rescaling
    assert rescaling is not None
    assert {row.value for row in rescaling.scaled} == {"h0", "down", "h1"}
    assert len({row.exponent for row in rescaling.scaled}) == 1
    plan.save(tmp_path / "plan.json")
    loaded = onnxamp.load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert onnxamp.apply_plan(decoder, loaded) == onnxamp.convert_model(decoder, "O3", rescale=True, samples=IDS)


def test_a_second_conversion_changes_nothing(decoder: ModelProto) -> None:
    once = onnxamp.convert_model(decoder, "O3", rescale=True, samples=IDS)
    assert onnxamp.convert_model(once, "O3", rescale=True, samples=IDS) == once


def test_nothing_to_rescale_changes_nothing(decoder: ModelProto) -> None:
    same = {"rescale": True, "samples": IDS, "dtype": "bfloat16"}
    plain = onnxamp.convert_model(decoder, "O3", dtype="bfloat16")
    assert onnxamp.convert_model(decoder, "O3", **same) == plain


def test_plans_of_other_models_are_refused(decoder: ModelProto) -> None:
    plan = onnxamp.plan_model(decoder, "O3", rescale=True, samples=IDS)
    other = onnx.parser.parse_model(DECODER.replace("h1", "other"))
    other.graph.initializer.extend(decoder.graph.initializer)
    with pytest.raises(onnxamp.ArgumentError, match="'h1'"):
        onnxamp.apply_plan(other, plan)


def test_made_up_inputs_warn(decoder: ModelProto) -> None:
    with pytest.warns(onnxamp.OptionWarning, match="random inputs"):
        onnxamp.convert_model(decoder, "O3", rescale=True)


def test_outputs_get_a_mul() -> None:
    """An output that overflows itself stays in float32, behind a Mul; all before it is low."""
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[2,8] x) => (float[2,8] y) {
      h = MatMul (x, w)
      r = Relu (h)
      y = MatMul (r, w)
    }
    """
    model = model_of(text, ("w", (8, 8), 300.0))
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    result = onnxamp.convert_model(model, "O3", rescale=True, samples=feeds)
    assert ops(result).count("Mul") == 1
    assert floats_of(result) == {TensorProto.FLOAT16}
    assert error_of(model, result, feeds) < 2e-3


def test_what_cannot_fit_is_named() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[2,8] x) => (float[2,8] y) {
      h = MatMul (x, w)
      t = Softplus (h)
      s = Sqrt (t)
      y = Tanh (s)
    }
    """
    model = model_of(text, ("w", (8, 8), 2e4))
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32) * 4}
    plan = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds)
    why = {row.op: row.detail for row in plan.rows if row.reason == "measured"}
    assert {"MatMul", "Softplus", "Sqrt"} <= why.keys()
    assert "'t' (Softplus)" in why["Softplus"]
    assert error_of(model, onnxamp.apply_plan(model, plan), feeds) < 2e-3


def test_weights_out_of_range_hide_no_overflow() -> None:
    """They fit once they are divided; what they are multiplied to does not, whoever takes up the power."""
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[2,8] x) => (float[2,8] y) {
      n = Sigmoid (x)
      u = MatMul (n, v)
      h = MatMul (u, w)
      y = Tanh (h)
    }
    """
    model = model_of(text, ("v", (8, 8), 1.0), ("w", (8, 8), 1e5))
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    plan = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds)
    assert {row.op for row in plan.rows if not row.low} >= {"MatMul", "Tanh"}
    assert [row.value for row in plan.options.rescaling.unfit] == ["h"]
    assert error_of(model, onnxamp.apply_plan(model, plan), feeds) < 2e-3


def test_a_value_may_be_added_to_itself() -> None:
    """What a node subtracts from itself says nothing of its exponent."""
    text = """
    <ir_version: 10, opset_import: ["" : 23]>
    net (float[2,8] x) => (float[2,8] y) {
      h = MatMul (x, w)
      twice = Add (h, h)
      both = Concat <axis: int = 1> (twice, twice)
      y = RMSNormalization (twice, gain)
      z = RMSNormalization (both, wide)
    }
    """
    model = model_of(text, ("w", (8, 8), 1e5), ("gain", (8,), 1.0), ("wide", (16,), 1.0))
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    plan = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds)
    assert {row.value for row in plan.options.rescaling.scaled} >= {"h", "twice", "both"}
    result = onnxamp.apply_plan(model, plan)
    assert floats_of(result) == {TensorProto.FLOAT16}
    assert error_of(model, result, feeds) < 2e-3


def test_loops_tie_their_state() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[8] x) => (float[8] y) {
      trips = Constant <value: tensor = int64 {3}> ()
      go = Constant <value: tensor = bool {1}> ()
      h = Mul (x, w)
      last = Loop <body = step (int64 i, bool c, float[8] state) => (bool c2, float[8] next) {
        c2 = Identity (c)
        next = Add (state, h)
      }> (trips, go, h)
      y = Mul (last, v)
    }
    """
    model = model_of(text, ("w", (8,), 1e5), ("v", (8,), 1e-5))
    feeds = {"x": np.linspace(-1, 1, 8, dtype=np.float32)}
    result = onnxamp.convert_model(model, "O3", rescale=True, samples=feeds, target="any")
    plan = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds, target="any")
    assert plan.options.rescaling is not None
    exponents = {row.value: row.exponent for row in plan.options.rescaling.scaled}
    assert {name.split("/")[-1] for name in exponents} >= {"h", "last", "state", "next"}
    assert len(set(exponents.values())) == 1
    assert error_of(model, result, feeds) < 2e-3


def test_shared_weights_are_split_where_they_must() -> None:
    """The same weight before and behind an overflowing value."""
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[2,8] x) => (float[2,8] y) {
      h = Mul (x, w)
      n = LayerNormalization (h, gain)
      s = Sigmoid (w)
      y = Mul (n, s)
    }
    """
    model = model_of(text, ("w", (8,), 2e5), ("gain", (8,), 1.0))
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    result = onnxamp.convert_model(model, "O3", rescale=True, samples=feeds)
    assert {tensor.name for tensor in result.graph.initializer} >= {"w", "w_scaled"}
    assert error_of(model, result, feeds) < 2e-3


def test_ranges_are_asked_for_before_anything_runs(decoder: ModelProto) -> None:
    with pytest.raises(onnxamp.ArgumentError, match="samples is only for level 'auto'"):
        onnxamp.convert_model(decoder, "O3", samples=IDS)
    with pytest.raises(onnxamp.ArgumentTypeError, match="rescaling"):
        onnxamp.convert_model(decoder, "O3", rescaling=3)


def test_logarithms_take_an_add() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[2,8] x) => (float[2,8] y) {
      t = Tanh (x)
      h = MatMul (t, w)
      p = Mul (h, h)
      b = Add (p, floor)
      y = Log (b)
    }
    """
    model = model_of(text, ("w", (8, 8), 1e4))
    model.graph.initializer.append(numpy_helper.from_array(np.array(1e4, np.float32), "floor"))
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    result = onnxamp.convert_model(model, "O3", rescale=True, samples=feeds)
    assert ops(result).count("Add") == 2
    assert floats_of(result) == {TensorProto.FLOAT16}
    assert error_of(model, result, feeds) < 2e-3


MASKED = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[2,8] x, bool[2,8] c) => (float[2,8] y) {
  q = MatMul (x, w)
  %s
  y = Mul (m, small)
}
"""

TIES = {
    "Where first": "m = Where (c, k, q)",
    "Where last": "m = Where (c, q, k)",
    "Max": "m = Max (k, q, k)",
    "Min": "m = Min (k, q)",
    "Sum": "m = Sum (k, q)",
    "Mean": "m = Mean (k, q, q)",
    "Add": "m = Add (k, q)",
    "Sub": "m = Sub (k, q)",
    "Clip": 'm = Clip (q, "", k)',
    "Concat": "e = Expand (k, two) j = Concat <axis: int = 0> (e, q) m, rest = Split <axis: int = 0> (j, halves)",
    "Pad": "p = Pad (q, pads, k) m = Slice (p, one, three)",
    "PRelu": "s = PRelu (q, k) m = Where (c, s, q)",
    "ScatterND": "e = Expand (k, two) m = ScatterND (e, place, r) r = Slice (q, one, two1)",
    "If": """
        go = ReduceMax <keepdims: int = 0> (i) i = Cast <to: int = 6> (c) b = Cast <to: int = 9> (go)
        m = If (b) <
            then_branch = yes () => (float[2,8] t) { t = Identity (q) },
            else_branch = no () => (float[2,8] f) { f = Expand (k, two) }
        >""",
    "Loop": """
        trips = Constant <value: tensor = int64 {3}> () go = Constant <value: tensor = bool {1}> ()
        e = Expand (k, two)
        m = Loop <body = step (int64 i, bool b, float[2,8] state) => (bool b2, float[2,8] next) {
            b2 = Identity (b) next = Max (state, q)
        }> (trips, go, e)""",
    "Loop of a constant": """
        trips = Constant <value: tensor = int64 {3}> () go = Constant <value: tensor = bool {1}> ()
        m = Loop <body = step (int64 i, bool b, float[2,8] state) => (bool b2, float[2,8] next) {
            b2 = Identity (b) next = Where (c, state, q)
        }> (trips, go, whole)""",
    "Scan": """
        last, m = Scan <num_scan_inputs: int = 1, body = step (float[8] state, float[8] row) =>
            (float[8] next, float[8] out) { next = Max (state, row) out = Identity (next) }> (part, q)""",
}
"""How a constant ``k`` meets a value ``q`` that is too large for float16."""

CONSTANTS = (0.0, np.inf, -np.inf, -3.4e38, -1e30, 1e30, 1024.0, 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("how", TIES)
def test_constants_tie_what_they_meet(how: str) -> None:
    """Zeros and infinities need no factor, but the other operand and the result share theirs; sentinels take one up."""
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 8)).astype(np.float32), "c": rng.random((2, 8)) < 0.4}
    for number in CONSTANTS:
        model = masked(TIES[how], number)
        expected = run_original(model, feeds)
        assert expected is not None
        plan = onnxamp.plan_model(model, "O1", rescale=True, samples=feeds, black_list=FLOATING, target="any")
        assert {row.value: row.exponent > 0 for row in plan.options.rescaling.scaled}.get("q"), number
        exact = run_original(onnxamp.apply_plan(model, plan), feeds)
        assert exact is not None
        np.testing.assert_array_equal(exact[0], expected[0], str(number))
        if abs(number) < 1e6:
            low = onnxamp.convert_model(model, "O3", rescale=True, samples=feeds, target="any")
            assert TensorProto.FLOAT16 in floats_of(low)
            assert error_of(model, low, feeds) < 2e-3


FLOATING = ["MatMul", "Mul", *("Where", "Max", "Min", "Sum", "Mean", "Add", "Sub", "Clip", "Concat", "Pad", "PRelu"),
            "ScatterND", "Expand", "Split", "Slice", "Identity", "If", "Loop", "Scan"]  # fmt: skip


def masked(body: str, number: float) -> ModelProto:
    model = model_of(MASKED % body, ("w", (8, 8), 1e5))
    floats = {"k": number, "small": 1e-4, "whole": np.full((2, 8), number), "part": np.full(8, number)}
    integers = {
        "two": [2, 8], "halves": [2, 2], "pads": [1, 0, 1, 0], "one": [1], "three": [3], "two1": [2], "place": [[1]],
    }  # fmt: skip
    tensors = {name: np.array(array, np.float32) for name, array in floats.items()}
    tensors |= {name: np.array(array, np.int64) for name, array in integers.items()}
    tensors = {name: array for name, array in tensors.items() if f"{name})" in body + "small)" or f"{name}," in body}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


@pytest.mark.parametrize("power", [np.inf, -np.inf, 1e32, 65.0])
def test_powers_out_of_range(power: float) -> None:
    model = masked("m = Pow (q, k)", power)
    feeds = {"x": np.ones((2, 8), np.float32), "c": np.zeros((2, 8), bool)}
    with np.errstate(all="ignore"):
        plan = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds)
    assert "q" not in {row.value for row in plan.options.rescaling.scaled}


GATE = """
<ir_version: 8, opset_import: ["" : 17]>
gate (float[16,64] x) => (float[16,64] y) {
  k = MatMul (x, w1)
  v = MatMul (x, w2)
  e = Exp (k)
  s = Mul (e, v)
  h = MatMul (s, w3)
  y = Add (h, v)
}
"""
"""An exponential beside values of a few units. It leaves the range on inputs made to be hard."""


def test_large_exponentials_take_no_digits_of_others() -> None:
    model = model_of(GATE, ("w1", (64, 64), 0.45), ("w2", (64, 64), 1 / 8), ("w3", (64, 64), 1 / 8))
    feeds = {"x": np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)}
    result = onnxamp.convert_model(model, "O2", rescale=True, samples=feeds)
    assert error_of(model, result, feeds) < 4e-3
    low = run_original(result, feeds)
    assert low is not None
    assert low[0].all()
