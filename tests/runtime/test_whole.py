"""Models run whole, as on CUDA; here by the CPU provider, which is right for float32."""

import io
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, MODELS, report_of, run
from cuda_double import CUDA, CudaDouble
from graphs.case import parse
from onnx import numpy_helper
from rich.console import Console

import onnxamp
from onnxamp import ArgumentError, convert_model, diff_models, random_samples
from onnxamp._model.model import Model
from onnxamp._numerics.results import DiffReport
from onnxamp._numerics.sample_diff import noise_floor
from onnxamp._report.comparison import diff_report
from onnxamp._report.terminal import as_text
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.session import EXACT, cuda_available, make_session
from onnxamp._runtime.sessions.session import run as run_session
from onnxamp._tuning.errors.foreseen import judging_engine
from onnxamp._tuning.metric import make_metric
from onnxamp._tuning.runs import converted_error, device_noise

on_cuda = pytest.mark.skipif(not cuda_available(), reason="no CUDA device")


def altered(model: onnx.ModelProto, factor: float) -> onnx.ModelProto:
    """The model with its last float weight scaled."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    tensor = next(t for t in reversed(result.graph.initializer) if t.data_type == onnx.TensorProto.FLOAT)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name))
    return result


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_whole_and_in_pieces_agree(path: Path) -> None:
    """Fusions move float32 by rounding alone."""
    found = diff_models(path, path, provider="cpu", whole=True)
    assert found.passed
    assert found.ran_on == "CPU"
    pieces = diff_models(path, path, provider="cpu")
    assert [diff.name for diff in found.outputs] == [diff.name for diff in pieces.outputs]
    for one, other in zip(found.outputs, pieces.outputs, strict=True):
        assert one.reference_shape == other.reference_shape


def test_errors_are_seen_and_located() -> None:
    model = onnx.load(CLASSIFIER)
    found = diff_models(model, altered(model, 1.5), provider="cpu", whole=True)
    assert not found.passed
    assert found.first_bad is not None  # the second look is by pieces
    assert found.layers
    layered = diff_models(model, altered(model, 1.5), provider="cpu", whole=True, layers=True)
    assert layered.outputs == found.outputs
    assert len(layered.layers) == len(found.layers)


def test_low_models_are_not_run_whole_on_cpu() -> None:
    model = onnx.load(CLASSIFIER)
    with pytest.raises(ArgumentError, match="hide the effect of float16"):
        diff_models(model, convert_model(model), provider="cpu", whole=True)


def test_a_result_that_does_not_run_is_a_failure() -> None:
    good = parse("(float[2] x) => (float[2] y) { y = Relu (x) }")
    bad = parse("(float[2] x) => (float[2] y) <int64[1] s = {3}> { y = Reshape (x, s) }")
    found = diff_models(good, bad, provider="cpu", whole=True)
    assert found.failure is not None
    assert "The result does not run" in found.failure
    assert "The reference does not run" in (diff_models(bad, good, provider="cpu", whole=True).skipped or "")


def test_empty_optionals_go_through_pieces() -> None:
    model = parse("(optional(float[2]) x, float[2] z) => (bool y, float[2] w) {\n"
                  "y = OptionalHasElement (x)\n w = Relu (z) }", opset=18)  # fmt: skip
    feeds = {"x": None, "z": np.ones(2, np.float32)}
    samples = onnxamp.Samples("given", [lambda: feeds])
    assert diff_models(model, model, samples, provider="cpu", whole=True).passed


def test_whole_takes_floats_of_another_width() -> None:
    model = parse("(float16[2] x, float[2] unused) => (float16[2] y) { y = Relu (x) }")
    found = (
        engine_on("cpu")
        .open(model, whole=True)
        .run({"x": np.float32([-1, 2]), "unused": np.float32([0, 0]), "other": np.float32([1])})
    )
    assert found["y"].dtype == np.float16
    assert found["y"].tolist() == [0, 2]


def test_the_noise_floor_is_the_worst_of_all_outputs() -> None:
    model = parse("(float[2] x) => (float[2] a, float[2] b) { a = Relu (x)\n b = Neg (x) }")
    feeds = {"x": np.float32([3, 4])}
    found = engine_on("cpu").open(model, whole=True).run(feeds)
    assert noise_floor(engine_on("cpu").open(model, whole=True), feeds, found) == 0
    found["b"] = found["b"] + np.float32([0, 0.005])
    assert noise_floor(engine_on("cpu").open(model, whole=True), feeds, found) == pytest.approx(0.001, rel=1e-3)
    broken = parse("(float[2] x) => (float[2] y) <int64[1] s = {3}> { y = Reshape (x, s) }")
    assert noise_floor(engine_on("cpu").open(broken, whole=True), feeds, found) is None


def test_the_noise_floor_stands_beside_the_error() -> None:
    model = onnx.load(CLASSIFIER)
    found = replace(diff_models(model, model, provider="cpu"), ran_on="CUDA (Test)", lowest="float16", noise=3.25e-7)
    text = shown(found)
    assert "CUDA (Test), random" in text
    assert "Noise floor: in float32, the reference on CUDA differs from itself on the CPU by 3.25e-7." in text
    assert "emulated" not in text


@pytest.mark.parametrize(("noise", "compared"), [(1e-4, True), (0.5, False)])
def test_where_float32_is_off_itself_nothing_is_told(noise: float, compared: bool, cuda_double: CudaDouble) -> None:
    cuda_double.noise = noise
    model = onnx.load(CLASSIFIER)
    found = diff_models(model, model)
    assert found.noise == pytest.approx(noise, rel=1e-2)
    assert found.passed == compared
    assert (found.skipped is None) == compared
    assert compared or "off by 50 %" in shown(found)


def shown(found: DiffReport) -> str:
    console = Console(width=140, file=io.StringIO())
    with console.capture() as capture:
        console.print(as_text(diff_report(found)))
    return capture.get()


def test_tuned_models_are_confirmed_whole() -> None:
    model = onnx.load(CLASSIFIER)
    samples, metric = random_samples(model, 2), make_metric("rel-l2", 1e-2)
    place = engine_on("cpu", emulates=False)
    assert converted_error(Model(model), Model(model), Run(inputs=samples), metric, place) == 0
    assert converted_error(Model(model), Model(altered(model, 1.5)), Run(inputs=samples), metric, place) > 1e-2
    assert device_noise(Model(model), samples[0], metric, place) == 0


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("command", ["convert", "tune", "diff", "check", "bench"])
def test_every_command_refuses_cuda_where_there_is_none(command: str, tmp_path: Path) -> None:
    extra = {
        "convert": ["-o", tmp_path / "x.onnx"], "tune": ["-o", tmp_path / "x.onnx"], "diff": [CLASSIFIER],
    }.get(command, [])  # fmt: skip
    result = run(command, CLASSIFIER, *extra, "--provider", "cuda")
    assert result.exit_code == (2 if command == "diff" else 1)
    assert "CUDA cannot be used here" in result.output
    assert not (tmp_path / "x.onnx").exists()


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_convert_validates_where_it_is_told(provider: str, cuda_double: CudaDouble, tmp_path: Path) -> None:
    assert cuda_available()
    cuda_double.started.clear()  # what was tried to see whether there is a device
    assert run("convert", CLASSIFIER, "-o", tmp_path / "x.onnx", "--provider", provider, "-q").exit_code == 0
    assert any(CUDA in providers for providers, _ in cuda_double.started) == (provider == "cuda")


def test_reports_name_what_ran(tmp_path: Path) -> None:
    result = run("diff", CLASSIFIER, CLASSIFIER, "--provider", "cpu", "--format", "json")
    assert report_of(result)["ran_on"] == "CPU"
    assert report_of(result)["noise"] is None


def test_numbers_are_asked_for_exactly(cuda_double: CudaDouble) -> None:
    """TF32 off, no timed search of algorithms, deterministic kernels; a benchmark says what it wants instead."""
    assert cuda_available()
    cuda_double.started.clear()  # what was tried to see whether there is a device
    model = parse("(float[2] x) => (float[2] y) { y = Relu (x) }")
    for options in (None, {"use_tf32": "1"}):
        make_session(model, "cuda", cuda_options=options)
    started = [(providers[CUDA], deterministic) for providers, deterministic in cuda_double.started]
    assert started == [(dict(EXACT), True), ({"use_tf32": "1"}, False)]
    assert EXACT["use_tf32"] == "0"


@pytest.mark.cuda
@on_cuda
class TestCuda:
    @pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
    def test_float32_stays_near_the_cpu(self, path: Path) -> None:
        found = diff_models(path, path)
        assert found.passed
        assert found.ran_on.startswith("CUDA (")
        assert found.noise is not None
        assert found.noise < 1e-4

    def test_low_models_are_compared_whole(self) -> None:
        model = onnx.load(CLASSIFIER)
        for dtype in ("float16", "bfloat16"):
            found = diff_models(model, convert_model(model, dtype=dtype), layers=True)
            assert found.lowest == dtype
            assert found.passed, found.warnings
            assert found.layers

    def test_bfloat16_comes_back_from_the_device(self) -> None:
        model = parse("(bfloat16[N] x) => (bfloat16[N] y) { y = Add (x, x) }")
        found = run_session(make_session(model, "cuda"), {"x": np.arange(3).astype(ml_dtypes.bfloat16)})
        assert found["y"].astype(np.float32).tolist() == [0, 2, 4]

    def test_sequences_come_back_from_the_device(self) -> None:
        model = parse("(float[2] x) => (seq(float[2]) s) { y = Add (x, x)\n s = SequenceConstruct (x, y) }")
        found = run_session(make_session(model, "cuda"), {"x": np.float32([1, 2])})
        assert [part.tolist() for part in found["s"]] == [[1, 2], [2, 4]]

    def test_a_tuned_model_is_confirmed(self) -> None:
        model = onnx.load(CLASSIFIER)
        samples, metric, place = random_samples(model, 2), make_metric("rel-l2", 1e-2), judging_engine("cuda")
        assert converted_error(Model(model), Model(convert_model(model)), Run(inputs=samples), metric, place) <= 1e-2
        noise = device_noise(Model(model), samples[0], metric, place)
        assert noise is not None
        assert noise < 1e-4
