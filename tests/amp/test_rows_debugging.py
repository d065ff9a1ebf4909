"""One test per row of "Debugging" in docs/coming-from.md."""

import inspect
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from coming_from import RowTests, rows
from graphs.case import parse
from onnx import ModelProto, numpy_helper
from train_nets import feeds, mlp

import onnxamp
from onnxamp import amp
from onnxamp.amp import debugging
from onnxamp.debugging import DebugMode, TensorCheckerConfig
from onnxamp.train import SGD, FixedLossScaleManager, TrainNetwork, build_train_network

TESTS = RowTests()
row = TESTS.row


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows write where they like."""
    monkeypatch.chdir(tmp_path)


def test_each_row_has_a_test() -> None:
    assert sorted(TESTS) == sorted(rows("Debugging"))


@pytest.mark.mostly_slow(fast=11)
@pytest.mark.parametrize("cell", rows("Debugging"))
def test_row(cell: str) -> None:
    try:
        TESTS[cell]()
    finally:
        debugging.disable_tensor_checker()
        debugging.disable_operator_stats_collection()


def signature(function: Any) -> str:
    """Parameters with their defaults, without types."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters]))


def config(mode: DebugMode = DebugMode.CHECK_ALL, **arguments: Any) -> TensorCheckerConfig:
    return TensorCheckerConfig(True, mode, **arguments)


def overflowing() -> tuple[ModelProto, dict[str, Any]]:
    """A model, and an input at which its first op overflows."""
    model = parse("(float16[3] X) => (float16[3] Y) { s = Mul (X, X)  r = Sqrt (s)  Y = Neg (r) }")
    return model, {"X": np.array([300, 1, 2], np.float16)}


def checked(model: ModelProto, batch: dict[str, Any], checker_config: TensorCheckerConfig) -> Any:
    """The records of one run."""
    with debugging.tensor_checker(checker_config) as checker, warnings.catch_warnings(action="ignore"):
        debugging.InferenceSession(model).run(None, batch)
    return checker.steps[0].records if checker.steps else None


def training(scale: float = 1.0, level: str = "O2") -> TrainNetwork:
    return build_train_network(mlp(), SGD(), "cross-entropy", level, loss_scale_manager=FixedLossScaleManager(scale))


@row("`DebugMode`")
def _() -> None:
    names = ["CHECK_NAN_INF_AND_ABORT", "CHECK_NAN_INF", "CHECK_ALL_FOR_OVERFLOW", "CHECK_ALL"]
    assert [(mode.name, mode.value) for mode in debugging.DebugMode] == [(name, i) for i, name in enumerate(names)]


@row("every Inf counts as a finding")
def _() -> None:
    model = parse("(float[3] X, float[3] M) => (float[3] Y) { s = Add (X, M)  Y = Softmax (s) }")
    masked = {"X": np.ones(3, np.float32), "M": np.array([0, 0, -np.inf], np.float32)}
    assert checked(model, masked, config(DebugMode.CHECK_NAN_INF)) == ()


@row(
    "`TensorCheckerConfig(enable, debug_mode=CHECK_NAN_INF_AND_ABORT, output_dir=None, checked_op_list=None,"
    " skipped_op_list=None, debug_step=None, stack_height_limit=1)`"
)
def _() -> None:
    first = DebugMode.CHECK_NAN_INF_AND_ABORT
    assert signature(TensorCheckerConfig) == (
        f"(enable, debug_mode={first!r}, output_dir=None, checked_op_list=None, skipped_op_list=None, debug_step=None,"
        " stack_height_limit=1, *, scaled_overflows=False)"
    )


@row("`enable=False`")
def _() -> None:
    assert checked(*overflowing(), TensorCheckerConfig(False)) is None


@row("`debug_mode` that is no DebugMode: `AttributeError`")
def _() -> None:
    with pytest.raises(ValueError, match="debug_mode") as caught:
        TensorCheckerConfig(True, 1)  # type: ignore[arg-type]
    assert isinstance(caught.value, onnxamp.ArgumentError)


@row("`output_dir=None` prints; a path writes logs")
def _() -> None:
    kept = checked(*overflowing(), config())
    assert [record.tensor for record in kept] == ["X", "s", "r", "Y"]
    assert not list(Path().iterdir())
    checked(*overflowing(), config(output_dir="dump"))
    assert str(debugging.read_dump("dump")) == str(kept)


@row("`checked_op_list`, `skipped_op_list`: names of Paddle's operators")
def _() -> None:
    for lists in (
        {"checked_op_list": ["Sqrt", "Neg"]},
        {"checked_op_list": ["sqrt", "ops.Neg"]},
        {"skipped_op_list": ("Mul", "")},
        {"skipped_op_list": ["square", ""]},
    ):
        records = checked(*overflowing(), config(**lists))
        assert [record.op for record in records] == ["Sqrt", "Neg"]


@row("`checked_op_list=['linear']` in training steps")
def _() -> None:
    with debugging.tensor_checker(config(checked_op_list=["linear", "softmax_with_cross_entropy"])) as checker:
        training().step(feeds())
    assert {record.op for record in checker.steps[0].records} == {"Gemm", "LogSoftmax"}
    with (
        debugging.tensor_checker(config(checked_op_list=["conv2d"])) as checker,
        pytest.warns(onnxamp.OptionWarning, match="checked_op_list: no op of the model is a 'conv2d'"),
    ):
        training().step(feeds())
    assert checker.steps[0].records == ()


@row("`checked_op_list`, `skipped_op_list`: `ValueError` unless they are lists or tuples")
def _() -> None:
    for name in ("checked_op_list", "skipped_op_list"):
        with pytest.raises(onnxamp.ArgumentTypeError, match=name) as caught:
            config(**{name: "Sqrt"})
        assert isinstance(caught.value, TypeError)
        for misspelled, meant in (("Sqrtt", "Sqrt"), ("elementwise_ad", "elementwise_add"), ("nn.Dens", "Dense")):
            with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
                config(**{name: [misspelled]})


@row("(nothing)")
def _() -> None:
    model, batch = overflowing()
    with debugging.tensor_checker(config(skipped_op_list=["conv2d", "own::Sqrtt"])):
        session = debugging.InferenceSession(model)
        with warnings.catch_warnings(record=True, action="always") as told:
            session.run(None, batch)
            session.run(None, batch)
    texts = [str(one.message) for one in told if one.category is onnxamp.OptionWarning]
    assert [text.partition(": ")[2] for text in texts] == [
        "no op of the model is a 'conv2d'.",
        "no op of the model is a 'own::Sqrtt'. Did you mean 'Sqrt'?",
    ]


@row("`debug_step=[1, 5]`: from iteration 1 up to, not including, iteration 5; calls of `enable_tensor_checker` count")
def _() -> None:
    checker = debugging.enable_tensor_checker(config(debug_step=[1, 5]))
    net, (model, batch) = training(), overflowing()
    session = debugging.InferenceSession(model)
    for _ in range(3):
        net.step(feeds())
        with warnings.catch_warnings(action="ignore"):
            session.run(None, batch)
    assert [check.step for check in checker.steps] == [1, 2, 3, 4]


@row("`debug_step`: `ValueError` unless it is a list or tuple, `AssertionError` unless it ends after its start")
def _() -> None:
    with pytest.raises(TypeError, match="debug_step"):
        config(debug_step=5)
    with pytest.raises(ValueError, match="start < end"):
        config(debug_step=(5, 5))


@row("`stack_height_limit`: 0 or 1, whether the call stack is printed")
def _() -> None:
    texts = []
    for height in (0, 1):
        with pytest.raises(onnxamp.NumericsError) as caught:
            checked(*overflowing(), config(DebugMode.CHECK_NAN_INF_AND_ABORT, stack_height_limit=height))
        texts.append(str(caught.value))
    assert ["Computed from 'X'" in text for text in texts] == [False, True]


@row("a config seeds random numbers, and makes kernels deterministic")
def _() -> None:
    before = random.getstate()
    config()
    assert random.getstate() == before


@row("`enable_tensor_checker(checker_config)`")
def _() -> None:
    assert signature(debugging.enable_tensor_checker) == "(checker_config)"
    checker = debugging.enable_tensor_checker(config())
    debugging.InferenceSession(mlp()).run(None, {"x": feeds()["x"]})
    assert len(checker.steps) == 1


@row("`disable_tensor_checker()`")
def _() -> None:
    checker = debugging.enable_tensor_checker(config())
    assert debugging.disable_tensor_checker() is None
    training().step(feeds())
    assert checker.steps == []


@row("the forward pass, gradients and the update of a step are checked, as far as the checker is on")
def _() -> None:
    plain, watched = training(), training()
    with debugging.tensor_checker(config()) as checker:
        result = watched.step(feeds())
    assert result == plain.step(feeds())
    assert all(np.array_equal(array, watched.state()[name]) for name, array in plain.state().items())
    assert {"train/loss", "train/norm", watched.plan.successors["w0"]} <= {
        record.tensor for record in checker.steps[0].records
    }


@row("CHECK_NAN_INF_AND_ABORT: `RuntimeError`")
def _() -> None:
    net, batch = training(), feeds()
    batch["x"][0, 0] = np.nan
    debugging.enable_tensor_checker(config(DebugMode.CHECK_NAN_INF_AND_ABORT))
    with pytest.raises(RuntimeError, match="NaN or Inf in 'x'") as caught:
        net.step(batch)
    assert isinstance(caught.value, onnxamp.NumericsError)
    assert (caught.value.value, caught.value.node, caught.value.op) == ("x", "", "")
    assert net.steps == 0


@row("CHECK_NAN_INF, CHECK_ALL_FOR_OVERFLOW: printed, and the program goes on")
def _() -> None:
    for mode in (DebugMode.CHECK_NAN_INF, DebugMode.CHECK_ALL_FOR_OVERFLOW):
        net, batch = training(level="O0"), feeds()
        batch["x"] *= 1e6
        if mode is DebugMode.CHECK_NAN_INF:
            batch["x"][0, 0] = np.inf
        with debugging.tensor_checker(config(mode)), pytest.warns(debugging.NumericsWarning, match="^Run 0: ") as told:
            net.step(batch)
        assert len(told) == 1
        assert net.steps == 1


def beyond_float16(text: str, **batch: Any) -> dict[str, str]:
    """What CHECK_ALL_FOR_OVERFLOW records of a run: by value, as what."""
    arrays = {name: np.array(numbers, np.float32) for name, numbers in batch.items()}
    records = checked(parse(text), arrays, config(DebugMode.CHECK_ALL_FOR_OVERFLOW))
    return {record.tensor: record.fp16 for record in records}


@row("CHECK_ALL_FOR_OVERFLOW: NaN, Inf and values beyond 65504")
def _() -> None:
    chain = "(float[2] X) => (float[2] Y) { a = Mul (X, X) b = Log (a) Y = Neg (b) }"
    assert beyond_float16(chain, X=[1, 2]) == {}
    assert beyond_float16(chain, X=[1, 256]) == {"a": "overflow"}
    assert beyond_float16(chain, X=[1, 1e15]) == {"X": "overflow", "a": "overflow"}
    assert beyond_float16(chain, X=[1, 1e16]) == {"X": "overflow", "a": "overflow"}
    assert beyond_float16(chain, X=[1, 1e30]) == dict.fromkeys("XabY", "overflow")
    assert beyond_float16(chain, X=[0, 1]) == dict.fromkeys("bY", "overflow")
    assert beyond_float16(chain, X=[np.nan, 1]) == dict.fromkeys("XabY", "NaN")
    hidden = "(float[2] X) => (float[2] Y) { a = Log (X) b = IsNaN (a) Y = Where (b, X, a) }"
    assert beyond_float16(hidden, X=[-1, 1]) == {"a": "NaN"}
    with pytest.warns(debugging.NumericsWarning, match="overflow"):
        debugging.check_numerics(np.array([1e38], np.float32), "pow", "y", DebugMode.CHECK_ALL_FOR_OVERFLOW)


@row("CHECK_ALL_FOR_OVERFLOW: constants and masks are findings")
def _() -> None:
    lowest = float(np.finfo(np.float32).min)
    softmax = """(float[2] X, float[2] M) => (float[2] Y) <float low = {-3.4028235e38}> {
        i = Mul (M, low) s = Add (X, i) Y = Softmax (s) }"""
    assert beyond_float16(softmax, X=[1, 2], M=[0, 1]) == {}
    ready = "(float[2] X, float[2] M) => (float[2] Y) { s = Add (X, M) Y = Softmax (s) }"
    for mask in (lowest, -np.inf):
        assert beyond_float16(ready, X=[1, 2], M=[0, mask]) == {}
    assert beyond_float16(ready.replace("Softmax", "Neg"), X=[1, 2], M=[0, lowest]) == dict.fromkeys("MsY", "overflow")
    scores = ready.replace("s = Add (X, M)", "x = Exp (X) s = Add (x, M)")
    assert beyond_float16(scores, X=[1, 80], M=[0, lowest]) == {"x": "overflow"}
    clip = """(float[2] X) => (float[2] Y) {
        low = Constant <value_float = -1.0> () top = Constant <value_float = 3e38> () Y = Clip (X, low, top) }"""
    assert beyond_float16(clip, X=[1, 2]) == {}


@row("an overflow of scaled gradients, which GradScaler skips, is a finding")
def _() -> None:
    abort = DebugMode.CHECK_NAN_INF_AND_ABORT
    with debugging.tensor_checker(config(abort)):
        assert training(2.0**40, "O3").step(feeds()).overflow
    with debugging.tensor_checker(config(abort, scaled_overflows=True)), pytest.raises(onnxamp.NumericsError):
        training(2.0**40, "O3").step(feeds())


@row("`check_numerics(tensor, op_type, var_name, debug_mode=CHECK_NAN_INF_AND_ABORT)`")
def _() -> None:
    first = DebugMode.CHECK_NAN_INF_AND_ABORT
    assert signature(debugging.check_numerics) == f"(tensor, op_type, var_name, debug_mode={first!r})"
    array = np.array([1, 0], np.float32)
    for tensor in (array, [1, 0], ort.OrtValue.ortvalue_from_numpy(array), numpy_helper.from_array(array)):
        assert debugging.check_numerics(tensor, "pow", "res")[0].tolist() == [0, 0, 1]


@row("`check_numerics`: `TypeError` unless `op_type` and `var_name` are strings")
def _() -> None:
    for names in ((5, "v"), ("pow", None)):
        with pytest.raises(TypeError, match="must be a string") as caught:
            debugging.check_numerics(np.ones(2), *names)
        assert isinstance(caught.value, onnxamp.OnnxAmpError)


@row("`check_numerics` returns `(stats, values)`: int64[3] of NaN, Inf and zeros; float32[3] of max, min and mean")
def _() -> None:
    numbers = np.array([np.nan, np.inf, 0, 0, 4], np.float32)
    with pytest.raises(RuntimeError):
        debugging.check_numerics(numbers, "pow", "res")
    result = debugging.check_numerics(numbers[2:], "pow", "res")
    assert isinstance(result, tuple)
    stats, values = result
    assert (stats.dtype, stats.shape, stats.tolist()) == (np.int64, (3,), [0, 0, 2])
    assert (values.dtype, values.shape, values.tolist()) == (np.float32, (3,), [4, 0, np.float32(4 / 3)])


@row("`check_layer_numerics(func)`, a decorator of a layer's `forward`")
def _() -> None:
    model, _ = overflowing()
    check = debugging.check_layer_numerics(model, "r", {"X": np.ones(3, np.float16)})
    assert [record.tensor for record in (*check.inputs, *check.values)] == ["s", "r"]
    with pytest.raises(TypeError, match="call it with a model and the names") as caught:

        @debugging.check_layer_numerics
        def forward(x: Any) -> Any:
            return x

    assert isinstance(caught.value, onnxamp.OnnxAmpError)


@row("`check_layer_numerics`: `RuntimeError` where there is NaN or Inf, or no input")
def _() -> None:
    model, batch = overflowing()
    with pytest.raises(RuntimeError, match="Inf in 's'"):
        debugging.check_layer_numerics(model, "s", batch)
    with pytest.raises(ValueError, match="nowhere"):
        debugging.check_layer_numerics(model, "nowhere", batch)


@row("`enable_operator_stats_collection()`")
def _() -> None:
    stats = debugging.enable_operator_stats_collection()
    training().step(feeds())
    assert stats.runs == 1


@row("`disable_operator_stats_collection()` prints the counts")
def _() -> None:
    stats = debugging.enable_operator_stats_collection()
    training().step(feeds())
    assert debugging.disable_operator_stats_collection() is stats
    heads = str(stats).splitlines()[0]
    assert [head in heads for head in ("FP16 calls", "BF16 calls", "FP32 calls", "other calls")] == [True] * 4


@row("`with collect_operator_stats():` prints the counts at its end")
def _() -> None:
    with debugging.collect_operator_stats() as stats, amp.auto_cast(level="O1"):
        debugging.InferenceSession(mlp()).run(None, {"x": feeds()["x"]})
    assert (stats.calls["Gemm", "float16"], stats.runs) == (2, 1)


@row("operator stats: calls in FP16, BF16, FP32 and others, by operator")
def _() -> None:
    with debugging.collect_operator_stats() as stats:
        training().step(feeds())
    by_op = {op: counts for op, *counts in stats.rows()}
    assert all(len(counts) == 4 for counts in by_op.values())
    assert by_op["Gemm"][0] > 0
    assert by_op["LogSoftmax"][2] > 0


@row("`compare_accuracy(dump_path, another_dump_path, output_filename, loss_scale=1, dump_all_tensors=False)`")
def _() -> None:
    assert signature(debugging.compare_accuracy) == (
        "(dump_path, another_dump_path, output_filename, loss_scale=1, dump_all_tensors=False)"
    )
    for folder, level in (("exact", "O0"), ("low", "O2")):
        with debugging.tensor_checker(config(output_dir=folder)):
            training(level=level).step(feeds())
    for name in ("table.xlsx", "table.csv"):
        compared = debugging.compare_accuracy("exact", "low", name)
        assert {"train/loss", "train/norm", "x", "w0"} <= {each.tensor for each in compared}
        assert Path(name).stat().st_size > 0


@row("`compare_accuracy(dump_all_tensors=True)`: `AssertionError`")
def _() -> None:
    for folder, level in (("exact", "O0"), ("low", "O2")):
        with debugging.tensor_checker(config(output_dir=folder)):
            training(level=level).step(feeds())
    few, many = (debugging.compare_accuracy("exact", "low", "t.csv", dump_all_tensors=each) for each in (False, True))
    assert {each.tensor for each in few} < {each.tensor for each in many}
