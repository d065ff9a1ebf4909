"""``onnxamp.debugging``: statistics of tensors, checked runs, dumps, counts of operators, tables of comparisons."""

import asyncio
import csv
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from math import inf, isnan, nan
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs.case import parse
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper
from openpyxl import load_workbook
from repository import ROOT

import onnxamp
from onnxamp import ArgumentError, ArgumentTypeError, ModelError, NumericsError, OutputError, RuntimeFailure, debugging
from onnxamp._model.model import Model
from onnxamp._numerics.check import check_run
from onnxamp._runtime.engines import engine_on, on_cpu
from onnxamp._runtime.inputs.samples import Samples, random_samples
from onnxamp.debugging import DebugMode, InferenceSession, NumericsWarning, TensorCheckerConfig, tensor_checker
from onnxamp.debugging._chosen import ValueFilter
from onnxamp.debugging._tables import read_csv, table_path, write_table
from onnxamp.debugging._tensors import tensor_stats
from onnxamp.debugging._watch import Watcher

MODELS = ROOT / "models"
DECODER = MODELS / "decoder.onnx"
BAD = "decoder/0/attention/norm/square"

SQUARE = "(float16[3] X) => (float16[3] Y) { s = Mul (X, X)\n r = Sqrt (s)\n Y = Neg (r) }"
"""Overflows in its first node for |X| > 256."""


@pytest.fixture(scope="module")
def low() -> ModelProto:
    return onnxamp.convert_model(str(DECODER), "O3", hazards=False)


@pytest.fixture(scope="module")
def feeds() -> dict:
    return dict(random_samples(onnx.load(DECODER))[0])


def config(mode: DebugMode = DebugMode.CHECK_ALL, **arguments) -> TensorCheckerConfig:
    return TensorCheckerConfig(True, mode, **arguments)


def halves(*numbers: float) -> dict:
    return {"X": np.array(numbers, np.float16)}


def named(records) -> list[str]:
    return [record.tensor for record in records]


# --- one tensor -------------------------------------------------------------------------------------------------


def test_statistics_of_a_tensor() -> None:
    found = debugging.check_numerics(np.array([[1.0, -3.0], [0.0, 4.0]], np.float32), "Add", "x")
    assert type(found) is tuple
    stats, values = found
    assert (stats.dtype, stats.shape, stats.tolist()) == (np.int64, (3,), [0, 0, 1])
    assert (values.dtype, values.shape, values.tolist()) == (np.float32, (3,), [4.0, -3.0, 0.5])


def test_nan_is_in_the_mean_alone_and_infinities_in_all() -> None:
    array = np.array([1, inf, nan, -2], np.float32)
    stats, values = debugging.check_numerics(array, "Div", "x", DebugMode.CHECK_ALL)
    assert (stats.tolist(), values[:2].tolist(), isnan(values[2])) == ([1, 1, 0], [inf, -2], True)
    assert debugging.check_numerics(array[:2], "Div", "x", DebugMode.CHECK_ALL)[1][2] == inf
    both = debugging.check_numerics(np.array([inf, -inf]), "Div", "x", DebugMode.CHECK_ALL)[1]
    assert (both[:2].tolist(), isnan(both[2])) == ([inf, -inf], True)


@pytest.mark.parametrize("array", [np.empty((0, 3), np.float32), np.full(3, nan, np.float32)], ids=["empty", "all NaN"])
def test_nothing_but_nan_has_no_maximum(array) -> None:
    assert np.isnan(debugging.check_numerics(array, "Slice", "x", DebugMode.CHECK_ALL)[1]).all()


def test_what_float32_cannot_hold_is_infinite_in_the_values_alone() -> None:
    stats, values = debugging.check_numerics(np.array([1e300, 1.0]), "Exp", "x")
    assert (stats.tolist(), values.tolist()) == ([0, 0, 0], [inf, 1.0, inf])


def test_large_tensors_are_looked_at_whole() -> None:
    array = np.random.default_rng(0).normal(size=2_500_000).astype(np.float32)
    array[[0, 1_048_576, -1]] = [nan, inf, 1e5]
    found = tensor_stats(array)
    assert (found.numel, found.num_nan, found.num_inf, found.fp16_over) == (array.size, 1, 1, 1)
    found = tensor_stats(array[1:1_048_576])
    assert found.mean == pytest.approx(array[1:1_048_576].astype(np.float64).mean(), rel=1e-9)
    assert (found.max, found.min) == (array[1:1_048_576].max(), array[1:1_048_576].min())


def test_tensors_of_all_kinds() -> None:
    numbers = np.array([1, 2, 0.5], np.float32)
    value = ort.OrtValue.ortvalue_from_numpy(numbers)
    proto = numpy_helper.from_array(numbers)
    kinds = [numbers, numbers.astype(np.float16), numbers.astype(ml_dtypes.bfloat16), [1, 2, 0.5], value, proto]
    means = {float(debugging.check_numerics(kind, "Add", "x")[1][2]) for kind in kinds}
    assert means == {float(numbers.mean())}
    assert debugging.check_numerics(np.array([True, False]), "Less", "x")[0].tolist() == [0, 0, 1]
    with pytest.raises(ArgumentTypeError, match="real numbers"):
        debugging.check_numerics(np.array(["a"]), "Add", "x")


def test_a_tensor_with_nan_aborts_or_warns_as_the_mode_says() -> None:
    bad = np.array([1, nan], np.float32)
    with pytest.raises(NumericsError, match=r"op=Div, tensor=x\\x1b, .*num_nan=1") as caught:
        debugging.check_numerics(bad, "Div", "x\x1b")
    assert (caught.value.value, caught.value.op) == ("x\x1b", "Div")
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, onnxamp.OnnxAmpError)
    for mode in (DebugMode.CHECK_NAN_INF, DebugMode.CHECK_ALL_FOR_OVERFLOW):
        with pytest.warns(NumericsWarning, match="NaN or Inf"):
            assert debugging.check_numerics(bad, "Div", "x", mode)[0].tolist() == [1, 0, 0]
    for wrong in (0, "abort"):
        with pytest.raises(ArgumentError, match="DebugMode"):
            debugging.check_numerics(bad, "Div", "x", wrong)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="DebugMode"):
            debugging.check_layer_numerics(parse(SQUARE), "Y", debug_mode=wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_only_floats_could_leave_the_range_of_float16() -> None:
    assert debugging.check_numerics(np.array([70_000]), "Add", "x", DebugMode.CHECK_ALL_FOR_OVERFLOW)[1][0] == 70_000


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([65504.0, 1.0], None),
        ([65505.0, 1.0], "overflow"),
        ([-7e4, 1.0], "overflow"),
        ([-3.4e38, 1.0], "overflow"),  # a mask, perhaps, but an array does not say so
        ([2.0**-25, 2.0**-26], "underflow"),
        ([2.0**-24, 0.0], None),
        ([1.0, 1e-9], None),  # one element is lost, but not the tensor
    ],
)
def test_the_range_of_float16(numbers: list[float], found: str | None) -> None:
    array = np.array(numbers, np.float32)
    assert tensor_stats(array).fp16 == found
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        debugging.check_numerics(array, "Mul", "x", DebugMode.CHECK_ALL_FOR_OVERFLOW)
    assert [found for row in told if found in str(row.message)] == ([found] if found else [])


# --- configurations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"debug_mode": 1}, ArgumentError, "debug_mode"),
        ({"debug_step": (3, 3)}, ArgumentError, "start < end"),
        ({"debug_step": (1, 2, 3)}, ArgumentError, "debug_step"),
        ({"debug_step": 3}, ArgumentTypeError, "debug_step"),
        ({"debug_step": (0.5, 2)}, ArgumentTypeError, "debug_step"),
        ({"stack_height_limit": -1}, ArgumentError, "stack_height_limit"),
        ({"stack_height_limit": "1"}, ArgumentError, "stack_height_limit"),
        ({"checked_op_list": "Softmax"}, ArgumentTypeError, "checked_op_list"),
        ({"skipped_op_list": [1]}, ArgumentTypeError, "skipped_op_list"),
        ({"checked_op_list": ["Sofmax"]}, ArgumentError, "did you mean 'Softmax'"),
        ({"output_dir": 3}, ArgumentTypeError, "output_dir"),
        ({"scaled_overflows": "no"}, ArgumentTypeError, "scaled_overflows"),
    ],
)
def test_wrong_configurations(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        TensorCheckerConfig(True, **arguments)
    with pytest.raises(ArgumentTypeError, match="enable must be a bool"):
        TensorCheckerConfig("no")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = config(output_dir=tmp_path / "file" / "dump")
    with pytest.raises(OutputError, match="Cannot make the folder"):
        debugging.enable_tensor_checker(wrong)
    with pytest.raises(ArgumentTypeError, match="TensorCheckerConfig"):
        debugging.enable_tensor_checker(True)  # type: ignore[arg-type]


# --- sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["path", "bytes", "proto", "options"])
def test_a_session_runs_as_onnx_runtime(form: str, feeds: dict) -> None:
    model = {"path": DECODER, "bytes": DECODER.read_bytes(), "proto": onnx.load(DECODER)}.get(form, str(DECODER))
    providers = ["CPUExecutionProvider"] if form == "options" else None
    session = InferenceSession(model, providers=providers)
    expected = ort.InferenceSession(str(DECODER), providers=["CPUExecutionProvider"]).run(None, feeds)
    with tensor_checker(config(DebugMode.CHECK_NAN_INF_AND_ABORT)):
        checked = session.run(None, feeds)
    for one, other, third in zip(expected, checked, session.run([], feeds), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(other, third)
    name = session.get_outputs()[-1].name
    np.testing.assert_array_equal(session.run([name, name], feeds, ort.RunOptions())[1], checked[-1])
    assert [entry.name for entry in session.get_inputs()] == [entry.name for entry in session.session.get_inputs()]
    assert session.get_providers()[-1] == "CPUExecutionProvider"


def test_sessions_take_values_of_onnx_runtime_and_bfloat16() -> None:
    session = InferenceSession(parse("(bfloat16[2] X) => (float[2] Y) { Y = Cast <to = 1> (X) }"))
    (found,) = session.run(None, {"X": np.array([1, 2], ml_dtypes.bfloat16)})
    assert found.tolist() == [1, 2]
    session = InferenceSession(parse(SQUARE))
    value = ort.OrtValue.ortvalue_from_numpy(np.array([1, 2, 3], np.float16))
    with tensor_checker(config()) as checker:
        assert session.run(["Y"], {"X": value})[0].tolist() == [-1, -2, -3]
    assert named(checker.steps[0].records) == ["X", "s", "r", "Y"]


def test_what_is_no_model() -> None:
    with pytest.raises(ModelError, match="not an ONNX model"):
        InferenceSession(b"\xff\xff")
    with pytest.raises(ArgumentTypeError, match="ModelProto"):
        InferenceSession(3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="No such file"):
        InferenceSession("/nowhere/model.onnx")


def test_the_first_overflow_aborts(low: ModelProto, feeds: dict) -> None:
    session = InferenceSession(low)
    with tensor_checker(TensorCheckerConfig(True)) as checker, pytest.raises(NumericsError) as caught:
        session.run(None, feeds)
    assert (caught.value.node, caught.value.op) == (BAD, "Pow")
    assert f"Pow {BAD!r}, float16" in str(caught.value)
    assert "Computed from 'embeddings/scale:0' (Mul" in str(caught.value)
    (step,) = checker.steps
    assert [record.node for record in step.records] == [BAD]
    assert step.records[0].stats.num_inf > 0
    session.run(None, feeds)  # nothing is checked any more


@pytest.mark.parametrize(("height", "there", "missing"), [(0, BAD, "Made of"), (1, "scale:0", "words:0"),
                                                         (9, "words:0", "nothing")])  # fmt: skip
def test_the_error_goes_back_as_far_as_the_stack_height(
    height: int, there: str, missing: str, low: ModelProto, feeds: dict
) -> None:
    session = InferenceSession(low)
    with (
        tensor_checker(TensorCheckerConfig(True, stack_height_limit=height)),
        pytest.raises(NumericsError) as caught,
    ):
        session.run(None, feeds)
    assert there in str(caught.value)
    assert missing not in str(caught.value)


def test_runs_are_judged_as_check_run_does(low: ModelProto, feeds: dict) -> None:
    expected = check_run(low, Samples("given", [lambda: feeds]), provider="cpu")
    session = InferenceSession(low, providers=["CPUExecutionProvider"])
    with tensor_checker(config()) as checker, pytest.warns(NumericsWarning):
        session.run(None, feeds)
    records = [row for row in checker.steps[0].records if row.position >= 0]
    told = [(row.tensor, row.node, row.op, row.dtype, row.fault, row.inherited) for row in records]
    assert told == [(v.value, v.node, v.op, v.dtype, v.fault, v.inherited) for v in expected.values]
    for row, value in zip(records, expected.values, strict=True):
        m = value.measured
        assert (row.stats.numel, row.stats.num_nan, row.stats.num_inf) == (m.elements, m.found_nan, m.found_inf)
        assert row.stats.num_zero == m.found_zero


@pytest.mark.slow
def test_a_run_in_small_pieces_tells_the_same_and_stops_early(low: ModelProto, feeds: dict) -> None:
    whole = Watcher(on_cpu(Model.of(low))).watch(0, feeds)
    pieces = Watcher(engine_on("cpu").open(low, budget=1))
    assert list(map(str, pieces.watch(0, feeds).records.values())) == list(map(str, whole.records.values()))
    stopped = pieces.watch(0, feeds, stop=True)
    assert list(stopped.records) == list(whole.records)[: len(stopped.records)]
    assert stopped.records[list(stopped.records)[-1]].node == BAD
    elsewhere = pieces.watch(0, feeds, ValueFilter(only={"nowhere"}), stop=True)
    assert len(stopped.records) < len(elsewhere.records) == len(whole.records)


def test_all_overflows_are_listed_and_the_run_goes_on(low: ModelProto, feeds: dict) -> None:
    session = InferenceSession(low)
    with tensor_checker(config(DebugMode.CHECK_NAN_INF)) as checker, pytest.warns(NumericsWarning) as told:
        assert len(session.run(None, feeds)) == len(low.graph.output)
    (step,) = checker.steps
    assert step.records[0].node == BAD
    assert len(step.records) > 1
    assert all(record.stats.num_inf or record.stats.num_nan for record in step.records)
    assert f"in {len(step.records)} values" in str(told[0].message)
    assert told[0].filename == __file__


def test_warnings_point_at_any_code_that_calls() -> None:
    feeds, mode = halves(300, 1, 1), DebugMode.CHECK_NAN_INF
    with pytest.warns(NumericsWarning) as told:
        debugging.check_layer_numerics(parse(SQUARE), "s", feeds, debug_mode=mode)
    assert told[0].filename == __file__
    with pytest.warns(NumericsWarning) as told:
        debugging.check_numerics(np.array(inf), "Add", "x", mode)
    assert told[0].filename == __file__
    given = {"session": InferenceSession(parse(SQUARE)), "feeds": feeds}
    with tensor_checker(config(mode)), pytest.warns(NumericsWarning) as told:
        exec("session.run(None, feeds)", given)
    assert told[0].filename == "<string>"


def test_all_statistics_are_dumped() -> None:
    session = InferenceSession(parse(SQUARE))
    with tensor_checker(config()) as checker:
        session.run(None, halves(1, 2, 4))
    records = checker.steps[0].records
    assert [(row.position, row.op, row.tensor, row.stats.max) for row in records] == [
        (-1, "", "X", 4.0), (0, "Mul", "s", 16.0), (1, "Sqrt", "r", 4.0), (2, "Neg", "Y", -1.0),
    ]  # fmt: skip
    assert {row.dtype for row in records} == {"float16"}
    assert not any(row.is_bad or row.fault or row.fp16 for row in records)


def test_float32_that_would_not_fit_float16_is_listed(feeds: dict) -> None:
    session = InferenceSession(DECODER)
    mode = DebugMode.CHECK_ALL_FOR_OVERFLOW
    with tensor_checker(config(mode)) as checker, pytest.warns(NumericsWarning, match="beyond float16"):
        session.run(None, feeds)
    records = checker.steps[0].records
    assert records[0].node == BAD
    assert {record.fp16 for record in records} == {"overflow"}
    assert all(record.dtype == "float32" and record.stats.max >= 65520 for record in records)


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.onnx")))
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_good_models_are_not_accused(name: str, level: str) -> None:
    path = MODELS / f"{name}.onnx"
    session = InferenceSession(onnxamp.convert_model(str(path), level))
    with tensor_checker(TensorCheckerConfig(True)) as checker:
        session.run(None, dict(random_samples(onnx.load(path))[0]))
    assert [step.records for step in checker.steps] == [()]


def test_masks_are_no_infinities() -> None:
    text = """(float[2,2] X) => (float[2,2] Y) <float[2,2] mask = {0, -inf, 0, 0}> {
        m = Add (X, mask)
        Y = Softmax (m)
    }"""
    model = parse(text.replace("-inf", "-1"))
    mask = np.array([[0, -inf], [0, 0]], np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(mask, "mask"))
    session = InferenceSession(model)
    with tensor_checker(TensorCheckerConfig(True)) as checker:
        session.run(None, {"X": np.ones((2, 2), np.float32)})
    with tensor_checker(config()) as full:
        session.run(None, {"X": np.ones((2, 2), np.float32)})
    assert checker.steps[0].records == ()
    assert {row.tensor: row.stats.num_inf for row in full.steps[0].records}["m"] == 1


def test_nan_in_an_input_is_told_as_such() -> None:
    session = InferenceSession(parse(SQUARE))
    with tensor_checker(TensorCheckerConfig(True)), pytest.raises(NumericsError, match=r"'X' \(given, float16\)"):
        session.run(None, halves(1, nan, 2))


def test_only_some_ops_are_looked_at() -> None:
    session = InferenceSession(parse(SQUARE))
    with tensor_checker(config(checked_op_list=["Neg", "Sqrt"], skipped_op_list=("Sqrt",))) as checker:
        session.run(None, halves(1, 2, 4))
    assert named(checker.steps[0].records) == ["Y"]


@pytest.mark.parametrize("lists", [{"checked_op_list": ["Sqrt"]}, {"skipped_op_list": ["Mul"]}])
def test_an_op_that_inherits_is_found_where_its_source_is_not_looked_at(lists: dict) -> None:
    session = InferenceSession(parse(SQUARE))
    with tensor_checker(TensorCheckerConfig(True, **lists)), pytest.raises(NumericsError) as caught:
        session.run(None, halves(1, 2, 300))
    assert caught.value.op == "Sqrt"
    assert "It started at 's' (Mul" in str(caught.value)


def test_a_fault_that_a_value_does_not_depend_on_is_not_its_origin() -> None:
    model = parse("""(float16[3] a, float[3] x) => (float16[3] b, float[3] y) {
        k = Constant <value_float = 0.0001> () t = Cast <to = 10> (k) b = Mul (a, t) l = Log (x) n = Neg (l) y = Abs (n)
    }""")
    feeds = {"a": np.full(3, 1e-5, np.float16), "x": np.array([-1, 1, 2], np.float32)}
    with pytest.raises(NumericsError, match=r"Inf in 'n'.* It started at 'l' \(Log.* \(NaN\)"):
        debugging.check_layer_numerics(model, "y", feeds)


def test_options_of_a_run_leave_its_checks() -> None:
    session, options = InferenceSession(parse(SQUARE)), ort.RunOptions()
    feeds = halves(1, 2, 4)
    np.testing.assert_array_equal(session.run(None, feeds, options), session.run(["Y"], feeds))
    with pytest.raises(ArgumentTypeError, match="output_names must be a list"):
        session.run("Y", feeds, options)
    with pytest.raises(ArgumentTypeError, match="input_feed must be a dict"):
        session.run(None, [1], options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeFailure, match="'X'"):
        session.run(None, {}, options)
    options.terminate = True
    with pytest.raises(RuntimeFailure, match="terminate"):
        session.run(None, feeds, options)


def test_inputs_that_do_not_fit() -> None:
    session = InferenceSession(parse(SQUARE))
    with tensor_checker(config()), pytest.raises(ArgumentError, match="'X' is missing"):
        session.run(None, {})


def test_another_branch_is_looked_at_anew() -> None:
    session = InferenceSession(
        parse("""(bool c, float[2] X) => (float[2] Y) {
            Y = If (c) <then_branch = a () => (float[2] t) { t = Neg (X) },
                        else_branch = b () => (float[2] e) { e = Exp (X) }>
        }""")
    )
    x = np.array([1, 2], np.float32)
    with tensor_checker(config()) as checker:
        for condition in (True, False, True):
            session.run(None, {"c": np.array(condition), "X": x})
    assert [{"Neg", "Exp"} & {row.op for row in step.records} for step in checker.steps] == [{"Neg"}, {"Exp"}, {"Neg"}]


# --- when and where checks are on -------------------------------------------------------------------------------


def test_steps_are_counted_per_config_whatever_happens() -> None:
    wanted = config(debug_step=[1, 4])
    sessions = [InferenceSession(parse(SQUARE)) for _ in range(2)]
    steps = []
    for number in range(3):  # a loop that switches on and off in each round, as scripts for Paddle do
        checker = debugging.enable_tensor_checker(wanted)
        for session in sessions:
            session.run(None, halves(number, 1, 1))
        debugging.disable_tensor_checker()
        sessions[0].run(None, halves(1, 1, 1))
        steps += [(step.step, step.records[0].stats.max) for step in checker.steps]
    assert steps == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_a_config_that_is_not_enabled_switches_off() -> None:
    session = InferenceSession(parse(SQUARE))
    first = debugging.enable_tensor_checker(config())
    second = debugging.enable_tensor_checker(TensorCheckerConfig(False))
    session.run(None, halves(1, 2, 300))
    assert (first.steps, second.steps) == ([], [])
    debugging.disable_tensor_checker()
    debugging.disable_tensor_checker()


def test_blocks_nest() -> None:
    session = InferenceSession(parse(SQUARE))
    with tensor_checker(config()) as outer:
        with tensor_checker(config()) as inner:
            session.run(None, halves(1, 1, 1))
        with tensor_checker(TensorCheckerConfig(False)) as off:
            session.run(None, halves(1, 1, 1))
        session.run(None, halves(1, 1, 1))
    session.run(None, halves(1, 1, 1))
    assert [len(checker.steps) for checker in (outer, inner, off)] == [1, 1, 0]


def test_a_block_that_fails_switches_off() -> None:
    session = InferenceSession(parse(SQUARE))
    with pytest.raises(NumericsError), tensor_checker(TensorCheckerConfig(True)):
        session.run(None, halves(300, 1, 1))
    assert len(session.run(None, halves(300, 1, 1))) == 1


def test_threads_do_not_see_each_other() -> None:
    session, meet, found = InferenceSession(parse(SQUARE)), threading.Barrier(3), {}

    def work(number: int) -> None:
        if number < 2:
            checker = debugging.enable_tensor_checker(config())
        meet.wait()
        for _ in range(number + 2):
            session.run(None, halves(number, 1, 1))
        found[number] = [step.records[0].stats.max for step in checker.steps] if number < 2 else None

    with tensor_checker(config()) as mine, ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert found == {0: [1.0] * 2, 1: [1.0] * 3, 2: None}
    assert mine.steps == []


def test_a_copied_context_takes_the_checker_along() -> None:
    session = InferenceSession(parse(SQUARE))
    with tensor_checker(config()) as checker:
        thread = threading.Thread(target=copy_context().run, args=(session.run, None, halves(1, 1, 1)))
        thread.start()
        thread.join()
    assert len(checker.steps) == 1


def test_tasks_do_not_see_each_other() -> None:
    session = InferenceSession(parse(SQUARE))

    async def work(runs: int) -> int:
        with tensor_checker(config()) as checker:
            for _ in range(runs):
                await asyncio.sleep(0)
                session.run(None, halves(1, 1, 1))
        return len(checker.steps)

    async def both() -> list[int]:
        return await asyncio.gather(work(1), work(3))

    assert asyncio.run(both()) == [1, 3]


# --- dumps ------------------------------------------------------------------------------------------------------


def test_dumps_are_read_back(tmp_path: Path, low: ModelProto, feeds: dict) -> None:
    folder = tmp_path / "new" / "dump"
    session = InferenceSession(low)
    with tensor_checker(config(output_dir=folder)) as checker:
        for _ in range(2):
            with pytest.warns(NumericsWarning, match="All are in"):
                session.run(None, feeds)
    assert [step.file for step in checker.steps] == [folder / "step-000000.csv", folder / "step-000001.csv"]
    records = [record for step in checker.steps for record in step.records]
    assert list(map(str, debugging.read_dump(folder))) == list(map(str, records))  # NaN is not equal to itself
    calm = [row for row in records if row.stats.finite]
    assert [row for row in debugging.read_dump(str(folder)) if row.stats.finite] == calm
    assert {row.step for row in debugging.read_dump(checker.steps[1].file)} == {1}
    assert {row.fault for row in debugging.read_dump(folder)} >= {None, "Inf"}


def test_runs_without_findings_leave_empty_tables(tmp_path: Path) -> None:
    session = InferenceSession(parse(SQUARE))
    with tensor_checker(config(DebugMode.CHECK_NAN_INF, output_dir=str(tmp_path), debug_step=(1, 2))):
        for _ in range(3):
            session.run(None, halves(1, 1, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.csv"]
    assert debugging.read_dump(tmp_path) == ()


def test_an_aborted_run_leaves_its_dump(tmp_path: Path) -> None:
    session = InferenceSession(parse(SQUARE))
    wanted = TensorCheckerConfig(True, output_dir=tmp_path)
    with pytest.raises(NumericsError), tensor_checker(wanted):
        session.run(None, halves(300, 1, 1))
    assert named(debugging.read_dump(tmp_path)) == ["s"]


@pytest.mark.parametrize("text", [None, "", "a,b\n1,2\n", "step\n1,2\n", "\x00\xff", b"\xff\xfe"])
def test_what_is_no_dump(text: str | bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "step-000000.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for place in (path, tmp_path):
        with pytest.raises(ArgumentError, match=r"step-|dump"):
            debugging.read_dump(place)


# --- tables -----------------------------------------------------------------------------------------------------

EVIL = ["=1+1", "+1", "-1", "@SUM(A1)", "\uff1d1", "'quoted", "#N/A", "a\x00b\x1bc\nd\re\tf", "back\\slash", "\ufffe",
        "\u202eright to left", '=cmd|"/c calc"!A1', "Zürich, 東京", "'", "", "1e5", "\\x41"]  # fmt: skip


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_text_survives_csv(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    write_table(path, ("a", "b"), [(text, 1.5) for text in texts])
    assert [row["a"] for row in read_csv(path)] == texts


def test_csv_holds_no_formula_and_no_control_character(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_table(path, ("name", "number"), [(text, -1.5) for text in EVIL])
    assert [row["name"] for row in read_csv(path)] == EVIL
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream))[1:]
    assert all(name[:1] not in tuple("=+-@\uff1d") or not name for name, _ in rows)
    assert all(name.isprintable() for name, _ in rows)
    assert {number for _, number in rows} == {"-1.5"}


def test_spreadsheets_hold_no_formula_and_no_control_character(tmp_path: Path) -> None:
    path = tmp_path / "table.xlsx"
    numbers = [1, -2.5, nan, inf, -inf, None]
    write_table(path, ("name", "number"), [(name, number) for name in EVIL for number in numbers])
    sheet = load_workbook(path).active
    rows = list(sheet.iter_rows(min_row=2))
    assert all(row[0].data_type in ("s", "n") and (row[0].value or "").isprintable() for row in rows)
    assert [row[0].value for row in rows[:: len(numbers)]][:4] == EVIL[:4]
    assert all(row[0].data_type == "s" for row in rows if row[0].value)
    assert [cell.value for _, cell in rows[: len(numbers)]] == [1, -2.5, "nan", "inf", "-inf", None]
    assert sheet.freeze_panes == "A2"


def test_tables_have_known_endings_and_come_whole(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"\.csv or \.xlsx"):
        table_path("table.xls")
    with pytest.raises(OutputError, match="does not exist"):
        write_table(tmp_path / "missing" / "table.xlsx", ("a",), [(1,)])
    with pytest.raises(ArgumentError, match=r"write a \.csv"):
        write_table(tmp_path / "table.xlsx", ("a",), [(1,)] * 1_048_576)
    assert list(tmp_path.iterdir()) == []


# --- comparisons ------------------------------------------------------------------------------------------------


def dump(path: Path, model: ModelProto | Path, *feeds: dict) -> Path:
    session = InferenceSession(model)
    with warnings.catch_warnings(), tensor_checker(config(output_dir=path)):
        warnings.simplefilter("ignore", NumericsWarning)
        for feed in feeds:
            session.run(None, feed)
    return path


def cells(path: Path) -> list[dict]:
    head, *rows = load_workbook(path).active.iter_rows()
    return [{name.value: cell for name, cell in zip(head, row, strict=True)} for row in rows]


@pytest.mark.slow
def test_dumps_of_two_models_become_a_spreadsheet(tmp_path: Path, low: ModelProto, feeds: dict) -> None:
    one, other = dump(tmp_path / "one", DECODER, feeds, feeds), dump(tmp_path / "other", low, feeds, feeds)
    rows = debugging.compare_accuracy(one, other, tmp_path / "table.xlsx")
    assert {row.step for row in rows} == {0, 1}
    first = next(row for row in rows if row.flags)
    assert (first.reference.node, first.op) == (BAD, "Pow")
    assert first.flags == ("overflow", "out of range", "differs")
    table = cells(tmp_path / "table.xlsx")
    assert [row["tensor"].value for row in table] == [row.tensor for row in rows]
    (line,) = (row for row in table if row["tensor"].value == first.tensor and row["step"].value == 0)
    assert line["reference dtype"].value == "float32"
    assert line["result dtype"].value == "float16"
    assert line["result max"].value == "inf"
    assert line["result num_inf"].value == first.result.stats.num_inf > 0
    assert line["reference max"].value == first.reference.stats.max
    assert line["flags"].fill.fgColor.rgb.endswith("FFC7CE")
    assert table[0]["flags"].value is None


@pytest.mark.slow
def test_dumps_that_agree_have_no_flags(tmp_path: Path, feeds: dict) -> None:
    good = onnxamp.convert_model(str(DECODER), "O2")
    one, other = dump(tmp_path / "one", DECODER, feeds), dump(tmp_path / "other", good, feeds)
    rows = debugging.compare_accuracy(one / "step-000000.csv", other, tmp_path / "table.csv")
    assert [row.tensor for row in rows if row.flags] == []
    assert {row.result.dtype for row in rows} == {"float16", "float32"}
    everything = debugging.compare_accuracy(one, other, tmp_path / "table.csv", dump_all_tensors=True)
    places = [row.result.position for row in everything if row.result]
    assert places == sorted(places)
    lone = {row.op for row in everything if row.reference is None}
    assert "Cast" in lone
    assert len(read_csv(tmp_path / "table.csv")) == len(everything) > len(rows)


def scaled(tmp_path: Path, factor: float) -> tuple[Path, Path]:
    """A dump, and one of the same values times a factor."""
    model, x = parse("(float[3] X) => (float[3] Y) { Y = Neg (X) }"), np.array([1, 2, 3], np.float32)
    return dump(tmp_path / "one", model, {"X": x}), dump(tmp_path / "two", model, {"X": x * np.float32(factor)})


@pytest.mark.parametrize(
    ("factor", "loss_scale", "flags"),
    [(1, 1, ()), (1.001, 1, ("differs",)), (1024, 1024, ()), (1, 1024, ()), (1024, 1, ("differs",)),
     (0, 1, ("underflow", "differs")), (inf, 1, ("overflow", "differs")), (nan, 1, ("NaN", "differs"))],
)  # fmt: skip
def test_values_that_differ(tmp_path: Path, factor: float, loss_scale: float, flags: tuple) -> None:
    one, other = scaled(tmp_path, factor)
    rows = debugging.compare_accuracy(one, other, tmp_path / "table.csv", loss_scale)
    assert {row.tensor: row.flags for row in rows} == {"X": flags, "Y": flags}
    if factor == 1024:
        assert rows[0].ratio("max") == 1024


def test_dumps_that_cannot_be_compared(tmp_path: Path) -> None:
    one, _ = scaled(tmp_path, 1)
    other = dump(tmp_path / "other", parse(SQUARE.replace("X", "Z").replace("Y", "W")), {"Z": halves(1, 1, 1)["X"]})
    with pytest.raises(ArgumentError, match="no value in common"):
        debugging.compare_accuracy(one, other, tmp_path / "table.csv")
    with pytest.raises(ArgumentError, match="loss_scale"):
        debugging.compare_accuracy(one, one, tmp_path / "table.csv", 0)
    with pytest.raises(ArgumentError, match=r"\.xlsx"):
        debugging.compare_accuracy(one, one, tmp_path / "table.txt")
    assert not (tmp_path / "table.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["xlsx", "csv"])
def test_two_models_become_a_table(tmp_path: Path, ending: str, low: ModelProto) -> None:
    path = tmp_path / f"table.{ending}"
    found = debugging.compare_models(DECODER, low, path)
    assert not found.passed
    assert found.first_bad.node == BAD
    if ending == "xlsx":
        rows = [{name: cell.value for name, cell in row.items()} for row in cells(path)]
    else:
        rows = [{name: cell or None for name, cell in row.items()} for row in read_csv(path)]
    assert [row["tensor"] for row in rows] == [row.value for row in found.layers]
    (line,) = (row for row in rows if row["tensor"] == found.first_bad.value)
    assert line["flags"].startswith("starts here: Inf in")
    assert int(line["result num_inf"]) > int(line["reference num_inf"]) == 0
    assert rows[0]["flags"] is None


@pytest.mark.slow
def test_two_models_are_compared_on_given_inputs(tmp_path: Path, feeds: dict) -> None:
    good = onnxamp.convert_model(str(DECODER), "O2")
    found = debugging.compare_models(DECODER, good, tmp_path / "table.csv", feeds)
    assert found.passed
    assert (found.inputs, found.samples) == ("the given inputs", 1)
    assert {row["flags"] for row in read_csv(tmp_path / "table.csv")} == {""}


def test_a_model_that_does_not_run_cannot_be_compared(tmp_path: Path) -> None:
    model = parse("(float[2] X) => (float[3] Y) <float[3] w = {1, 2, 3}> { s = Reshape (w, n)\n Y = Add (X, s) }"
                  .replace("<float[3]", "<int64[1] n = {3}, float[3]"))  # fmt: skip
    with pytest.raises(RuntimeFailure, match="does not run"):
        debugging.compare_models(model, model, tmp_path / "table.csv")
    assert not (tmp_path / "table.csv").exists()


# --- operators --------------------------------------------------------------------------------------------------


def test_operators_are_counted_by_precision(tmp_path: Path) -> None:
    model = parse("""(float[2] X) => (float[2] Y, int64[1] S) {
        x = Cast <to = 10> (X)
        a = Neg (x)
        b = Neg (a)
        c = Cast <to = 1> (b)
        S = Shape (X)
        Y = Neg (c)
    }""")
    stats = debugging.collect_operator_stats(model)
    assert stats.rows() == [("Cast", 2, 0, 0, 0), ("Neg", 2, 0, 1, 0), ("Shape", 0, 0, 1, 0)]
    assert " ".join(str(stats).splitlines()[0].split()) == "op FP16 calls BF16 calls FP32 calls other calls"
    assert str(stats).splitlines()[2].split() == ["Neg", "2", "0", "1", "0"]
    assert str(stats).splitlines()[-1] == "op count: 3"
    stats.save(tmp_path / "table.xlsx")
    assert [[cell.value for cell in row] for row in load_workbook(tmp_path / "table.xlsx").active.rows][1:] == [
        list(row) for row in stats.rows()
    ]


def test_operators_of_runs_are_counted() -> None:
    session = InferenceSession(parse(SQUARE))
    with debugging.collect_operator_stats() as outer:
        session.run(None, halves(1, 1, 1))
        with debugging.collect_operator_stats() as inner:
            session.run(None, halves(1, 1, 1))
        session.run(None, halves(1, 1, 1))
    session.run(None, halves(1, 1, 1))
    assert (outer.runs, inner.runs) == (2, 1)
    assert outer.rows() == [("Mul", 2, 0, 0, 0), ("Neg", 2, 0, 0, 0), ("Sqrt", 2, 0, 0, 0)]
    assert inner.rows() == debugging.collect_operator_stats(parse(SQUARE)).rows()


def test_collection_is_switched_on_and_off() -> None:
    session = InferenceSession(parse(SQUARE))
    assert debugging.disable_operator_stats_collection() is None
    for _ in range(2):  # the second begins anew
        debugging.enable_operator_stats_collection()
        session.run(None, halves(1, 1, 1))
    found = debugging.disable_operator_stats_collection()
    session.run(None, halves(1, 1, 1))
    assert (found.runs, found.calls["Mul", "float16"]) == (1, 1)


def test_operators_of_a_file_and_of_functions() -> None:
    stats = debugging.collect_operator_stats(DECODER)
    assert stats.calls["MatMul", "float32"] == sum(n.op_type == "MatMul" for n in onnx.load(DECODER).graph.node)
    model = parse("""(bfloat16[2] X) => (bfloat16[2] Y) { Y = local.Twice (X) }""")
    model.opset_import.add(domain="local", version=1)
    model.functions.append(
        onnx.helper.make_function(
            "local", "Twice", ["x"], ["y"], [onnx.helper.make_node("Add", ["x", "x"], ["y"])], model.opset_import[:1]
        )
    )
    assert debugging.collect_operator_stats(model).rows() == [("Add", 0, 1, 0, 0)]


# --- layers -----------------------------------------------------------------------------------------------------


def test_a_layer_is_checked_with_its_inputs_and_weights(feeds: dict) -> None:
    found = debugging.check_layer_numerics(DECODER, "decoder/0/attention/norm/.*", feeds)
    assert found.values[0].node == BAD
    assert all(row.node.startswith("decoder/0/attention/norm/") for row in found.values)
    assert {"embeddings/scale:0", "decoder/0/attention/norm/weight"} <= set(named(found.inputs))
    assert found.bad == ()
    assert "'embeddings/scale:0' (Mul" in str(found)


def test_a_layer_that_overflows(low: ModelProto, feeds: dict) -> None:
    with pytest.raises(NumericsError, match="Computed from 'embeddings/scale:0'") as caught:
        debugging.check_layer_numerics(low, BAD, feeds)
    assert caught.value.node == BAD
    with pytest.warns(NumericsWarning, match="NaN or Inf in 1 value of the layer"):
        found = debugging.check_layer_numerics(low, [BAD], feeds, debug_mode=DebugMode.CHECK_NAN_INF)
    assert [row.node for row in found.bad] == [BAD]
    debugging.check_layer_numerics(low, BAD, feeds, debug_mode=DebugMode.CHECK_ALL)
    with pytest.warns(NumericsWarning, match="Beyond float16 in 1 value"):
        debugging.check_layer_numerics(DECODER, BAD, feeds, debug_mode=DebugMode.CHECK_ALL_FOR_OVERFLOW)


def test_a_layer_whose_inputs_are_bad() -> None:
    with pytest.raises(NumericsError, match=r"Inf in 's' \(Mul"):  # before what the layer itself makes of it
        debugging.check_layer_numerics(parse(SQUARE), "r", halves(300, 1, 1))
    with pytest.raises(NumericsError, match=r"Inf in 'X' \(given"):
        debugging.check_layer_numerics(parse(SQUARE), "s", halves(nan, 1, 1))


def test_a_layer_whose_weights_are_bad() -> None:
    model = parse("(float[2] X) => (float[2] Y) <float[2] w = {1, 2}> { Y = Add (X, w) }")
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([1, nan], np.float32), "w"))
    with pytest.raises(NumericsError, match=r"'w' \(given, float32\)"):
        debugging.check_layer_numerics(model, "Y")


def test_layers_of_several_samples() -> None:
    found = debugging.check_layer_numerics(parse(SQUARE), ["Y"], count=3)
    assert [row.step for row in found.values] == [0, 1, 2]
    assert len({row.stats.max for row in found.values}) > 1


def test_layers_that_there_are_not() -> None:
    with pytest.raises(ArgumentError, match=r"called 'nothing\['.* the first ones are 's', 'r', 'Y'"):
        debugging.check_layer_numerics(parse(SQUARE), "nothing[")
    with pytest.raises(ArgumentTypeError, match="layer"):
        debugging.check_layer_numerics(parse(SQUARE), [])


# --- the package ------------------------------------------------------------------------------------------------


def test_all_names_are_there_and_documented() -> None:
    assert debugging.__all__ == sorted(debugging.__all__)
    for name in debugging.__all__:
        assert (getattr(debugging, name).__doc__ or "").strip(), name
    paddle = {
        "DebugMode", "TensorCheckerConfig", "check_numerics", "enable_operator_stats_collection",
        "disable_operator_stats_collection", "collect_operator_stats", "enable_tensor_checker",
        "disable_tensor_checker", "compare_accuracy", "check_layer_numerics",
    }  # fmt: skip
    assert paddle <= set(debugging.__all__)
    assert {mode.name: mode.value for mode in DebugMode} == {
        "CHECK_NAN_INF_AND_ABORT": 0, "CHECK_NAN_INF": 1, "CHECK_ALL_FOR_OVERFLOW": 2, "CHECK_ALL": 3,
    }  # fmt: skip


@pytest.mark.slow
def test_heavy_libraries_wait_until_they_are_needed() -> None:
    code = "import onnxamp.debugging, sys; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"onnxruntime", "openpyxl", "rich", "click"} & set(loaded)
