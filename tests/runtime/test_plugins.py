"""Plugin providers: what is said where one cannot be used, and what runs on WebGPU where it can."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run as run_cli
from onnx import ModelProto, parser

import onnxamp
from onnxamp import ArgumentError, RuntimeFailure
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.sessions.plugins import engine_called
from onnxamp._runtime.sessions.session import choose_provider, make_session
from onnxamp.train import SGD, build_train_network

DRIVERS = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
"""Variables that say where Vulkan's loader finds drivers; the second is the older name."""


def pooled() -> ModelProto:
    """A convolution of made-up images and its mean: a sum of 4,096 numbers around 40."""
    return parser.parse_model("""
        <ir_version: 9, opset_import: ["": 17]>
        pooled (float[1, 1, 64, 64] x) => (float[1, 8, 1, 1] y)
        <float[8, 1, 1, 1] w = {40, 41, 42, 43, 44, 45, 46, 47}, float one = {1}> {
            big = Add (x, one)
            [conv] c = Conv (big, w)
            [pool] y = GlobalAveragePool (c)
        }""")


def as_float16(model: ModelProto) -> ModelProto:
    return onnxamp.convert_model(model, level="O3")


FEEDS = {"x": np.zeros((1, 1, 64, 64), np.float32)}


def test_an_unknown_provider_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ArgumentError, match="Unknown provider 'vulkan': choose one of cuda, cpu, webgpu, openvino"):
        choose_provider("vulkan")


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    text = "the package onnxruntime-ep-none is not installed; pip install onnxruntime-ep-none installs it"
    with pytest.raises(RuntimeFailure, match=text):
        make_session(pooled(), "onnxruntime-ep-none")


def test_a_package_of_another_kind_is_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime_tools_of_mine.py").write_text("version = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeFailure, match="onnxruntime-tools-of-mine is not a plugin provider of ONNX Runtime"):
        choose_provider("onnxruntime-tools-of-mine")


def test_a_library_that_does_not_load_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libbroken.so"
    library.write_text("no library")
    text = f"def get_library_path(): return {str(library)!r}\ndef get_ep_name(): return 'BrokenExecutionProvider'"
    (tmp_path / "onnxruntime_ep_broken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeFailure, match="'onnxruntime-ep-broken' cannot be used here: ONNX Runtime says: "):
        choose_provider("onnxruntime-ep-broken")


@pytest.mark.slow
@pytest.mark.webgpu
def test_without_a_driver_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    none = {name: str(tmp_path / "none.json") for name in DRIVERS}
    code = "from onnxamp._runtime.sessions.session import choose_provider as choose; choose('webgpu')"
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | none | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    *_, last = child.stderr.strip().splitlines()
    assert "there is no GPU driver that WebGPU can use; install the GPU's driver, or Mesa's software Vulkan" in last


@pytest.mark.webgpu
def test_a_session_runs_on_webgpu_and_counts_what_it_leaves_to_the_cpu() -> None:
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["": 17]>
        mixed (float[2, 2] x) => (float y) { s = Mul (x, x) d = Det (s) y = Neg (d) }""")
    whole = engine_on("webgpu").open(model, whole=True)
    assert whole.left_to_cpu() == {}
    assert whole.run({"x": np.array([[1, 2], [3, 4]], np.float32)})["y"] == pytest.approx(20)
    assert whole.left_to_cpu() == {"Det": 1}


@pytest.mark.webgpu
def test_the_environment_is_left_as_it_was() -> None:
    before = dict(os.environ)
    engine_called("webgpu")
    assert dict(os.environ) == before


@pytest.mark.webgpu
def test_a_sum_that_overflows_in_float16_passes_by_emulation_and_fails_where_it_is_seen() -> None:
    model, low = pooled(), as_float16(pooled())
    assert onnxamp.diff_models(model, low, FEEDS, provider="cpu").passed
    seen = onnxamp.diff_models(model, low, FEEDS, provider="webgpu")
    assert not seen.passed
    assert seen.ran_on == engine_on("webgpu").name("float16")
    assert seen.ran_on.startswith("WebGPU on ")
    assert seen.noise is not None
    assert seen.noise < 1e-5
    assert seen.first_bad is not None
    assert seen.first_bad.node == "pool"


@pytest.mark.webgpu
def test_check_names_the_op_that_goes_wrong_on_the_engine() -> None:
    low = as_float16(pooled())
    assert onnxamp.check_run(low, FEEDS, provider="cpu").first_bad is None
    found = onnxamp.check_run(low, FEEDS, provider="webgpu").first_bad
    assert found is not None
    assert (found.node, found.alarm) == ("pool", "Inf in 8 of 8 elements; the exact result reaches 47")


@pytest.mark.webgpu
def test_convert_heals_on_the_engine(tmp_path: Path) -> None:
    source, target = tmp_path / "pooled.onnx", tmp_path / "low.onnx"
    source.write_bytes(pooled().SerializeToString())
    np.savez(tmp_path / "feeds.npz", **FEEDS)
    said = run_cli(
        "convert", source, "-o", target, "--level", "O3", "--inputs", tmp_path / "feeds.npz", "--provider", "webgpu"
    ).output
    assert "with 1 more node in float32 to pass validation" in said
    assert onnxamp.diff_models(source, target, FEEDS, provider="webgpu").passed


@pytest.mark.webgpu
def test_tune_judges_converted_models_on_the_engine() -> None:
    _, tuned = onnxamp.tune_model(pooled(), 1e-2, samples=FEEDS, provider="webgpu")
    assert tuned.ran_on == engine_on("webgpu").name("float16")
    assert tuned.error <= 1e-2
    assert "pool" in {kept.node for kept in tuned.kept}


@pytest.mark.slow
@pytest.mark.webgpu
def test_bench_says_that_a_software_device_is_no_gpu() -> None:
    quick = onnxamp.BenchOptions(seconds=0.01, profile=False)
    report = onnxamp.bench_models(pooled(), as_float16(pooled()), provider="webgpu", options=quick)
    assert [model.assigned.get("CPU", 0) for model in report.models] == [0, 0]
    is_software = engine_called("webgpu").device.endswith(", software")
    assert any("say nothing about a GPU" in note for note in report.notes) is is_software


@pytest.mark.webgpu
def test_a_training_step_runs_on_the_engine() -> None:
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["": 17]>
        net (float[N, 4] x) => (float[N, 2] y) <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul (x, w) }""")
    feeds = {"x": np.eye(4, dtype=np.float32), "label": np.array([0, 1, 0, 1])}
    losses = []
    for provider in ("webgpu", "cpu"):
        net = build_train_network(model, SGD(learning_rate=0.1), "cross-entropy", "O3", provider=provider)
        losses.append([net.step(feeds).loss for _ in range(3)])
        assert net.runs_on == ("CPU, emulated" if provider == "cpu" else engine_on("webgpu").name("float16"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][2] < losses[0][0]


@pytest.mark.slow
@pytest.mark.webgpu
@pytest.mark.parametrize("command", ["convert", "tune"])
def test_the_target_of_the_engine_is_named_where_nobody_named_one(command: str, tmp_path: Path) -> None:
    onnx.save(pooled(), tmp_path / "model.onnx")
    wishes = ("-o", tmp_path / "low.onnx", "--provider", "webgpu", "--samples", "1")
    told = "Warning: Converted for cuda, but validated on webgpu: --target webgpu converts"
    for target, warned in (((), True), (("--target", "cuda"), False), (("--target", "webgpu"), False)):
        found = run_cli(command, tmp_path / "model.onnx", *wishes, *target)
        assert found.exit_code == 0, found.output
        assert (told in " ".join(found.output.split())) == warned
