"""``onnxamp tune``, and level auto for files: what is written, said, and returned."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, MODELS, is_one_sentence, report_of, run, saved, small
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data

import onnxamp
from onnxamp._runtime.sessions.session import cuda_available

ENCODER, DECODER = (next(path for path in MODELS if path.stem == stem) for stem in ("encoder", "decoder"))
CANCELS = """(float[8] x) => (float[8] y) <float big = {256}> {
    [add] s = Add (x, big)
    [sub] y = Sub (s, big)
}"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def weight_types(path: str) -> set[int]:
    return {tensor.data_type for tensor in onnx.load(path).graph.initializer}


@pytest.mark.slow
def test_writes_and_reports() -> None:
    result = run("tune", ENCODER, "-o", "out.onnx", "--tolerance", "1e-3", "--save-plan", "plan.json", "-v")
    assert result.exit_code == 0, result.output
    for text in ("!", "out.onnx", "auto float16 for cuda", "The tolerance is 0.001 or less", "← written", "--pick K",
                 "The tolerance is better spent elsewhere", "of the squared error that is allowed",
                 "(4 samples, seed 0)", "A100"):  # fmt: skip
        assert text in result.output
    onnx.checker.check_model("out.onnx")
    plan = onnxamp.load_plan("plan.json")
    assert plan.level == "auto"
    assert onnxamp.apply_plan(ENCODER, plan) == onnx.load("out.onnx")
    assert any(row.reason == "measured" and "squared error" in row.detail for row in plan.rows)


@pytest.mark.slow
def test_json() -> None:
    result = run(
        "tune",
        CLASSIFIER,
        "-o",
        "out.onnx",
        "--format",
        "json",
        "--samples",
        2,
        "--device",
        "H100",
        "--allow-slower",
    )
    assert result.exit_code == 0
    found = report_of(result)
    assert (found["onnxamp"], found["format"], found["target"]) == ("tune", 1, "out.onnx")
    tuned = found["tuning"]
    assert (tuned["samples"], tuned["device"], tuned["metric"], tuned["held"]) == (2, "H100", "rel-l2", True)
    chosen = tuned["candidates"][tuned["chosen"]]
    assert chosen["low"] == sorted(chosen["low"])
    assert len(chosen["low"]) >= chosen["nodes"] > 0
    assert tuned["error"] <= 1e-2
    assert weight_types("out.onnx") >= {TensorProto.FLOAT16}


@pytest.mark.parametrize(
    ("target", "device"), [("openvino", "Xeon-8480"), ("cpu", "Xeon-8480-float32"), ("cuda", "A100")]
)
def test_times_are_those_of_what_the_target_is_for(target: str, device: str) -> None:
    if cuda_available():
        pytest.skip("there is a CUDA device, which times are estimated for")
    result = run("tune", CLASSIFIER, "-o", "out.onnx", "--samples", 1, "--target", target, "--format", "json")
    tuned = report_of(result)["tuning"]
    assert (tuned["device"], device in tuned["times"]) == (device, True)


def test_quiet_and_default_output() -> None:
    saved(onnx.load(CLASSIFIER), "net.onnx")
    result = run("tune", "net.onnx", "-q", "--allow-slower")
    assert (result.exit_code, result.output) == (0, "")
    assert TensorProto.FLOAT16 in weight_types("net_fp16.onnx")


def test_inputs_of_a_file() -> None:
    np.savez("x.npz", image=np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32))
    result = run("tune", CLASSIFIER, "-o", "out.onnx", "--inputs", "x.npz", "-v")
    assert result.exit_code == 0, result.output
    assert "1 sample of x.npz" in result.output


def test_nothing_can_be_low() -> None:
    model = saved(CANCELS)
    result = run("tune", model, "-o", "out.onnx", "--tolerance", "1e-7")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("! Nothing was converted: no node gains from low precision")
    assert len(result.stdout.splitlines()) <= 4
    assert "With larger inputs, such as a larger batch, low precision gains more." in result.stdout
    assert Path("out.onnx").read_bytes() == model.read_bytes()


def test_what_does_not_hold_ends_with_1() -> None:
    saved(CANCELS)
    result = run("tune", "model.onnx", "-o", "out.onnx", "--tolerance", "1e-7", "--pick", "0", "--allow-slower")
    assert result.exit_code == 1
    assert "✘" in result.output
    assert result.output.endswith("Error: out.onnx was written, but exceeds the tolerance.\n")
    assert Path("out.onnx").exists()


@pytest.mark.slow
def test_pick_from_a_state() -> None:
    arguments = ("tune", ENCODER, "--samples", 1, "--tolerance", "5e-4", "--state", "s.json", "--format", "json")
    first = report_of(run(*arguments, "-o", "a.onnx"))["tuning"]
    slowest = len(first["candidates"]) - 1
    result = run(*arguments, "-o", "b.onnx", "--pick", slowest)
    assert result.exit_code == 0
    second = report_of(result)["tuning"]
    assert (second["runs"], second["recalled"], second["chosen"]) == (0, first["runs"], slowest)
    assert [row["low"] for row in second["candidates"]] == [row["low"] for row in first["candidates"]]
    assert weight_types("b.onnx") == weight_types(str(ENCODER))


@pytest.mark.slow
def test_a_tolerance_that_helps_is_proposed_and_accepted() -> None:
    onnx.save(products(), "net.onnx")
    arguments = ("tune", "net.onnx", "-o", "out.onnx", "--samples", 1)
    told = " ".join(run(*arguments, "--tolerance", "1e-6").output.split())
    proposed = re.search(r"try --tolerance (\S+)\.", told)
    assert proposed, told
    assert run(*arguments, "--tolerance", proposed[1]).stdout.startswith("✔ The tolerance is met")


@pytest.mark.slow
def test_no_tolerance_is_proposed_that_ruins_the_outputs() -> None:
    """The largest of logits that float16 cannot tell apart is another one for every row."""
    random, size = np.random.default_rng(0), 2048
    like = random.standard_normal((size, 1)) * (1 + 1e-6 * random.random((1, 2 * size)))
    text = f"(float[1,{size}] x) => (float[1,{2 * size}] y) {{ y = MatMul (x, a) }}"
    onnx.save(add_weights(parse(text), {"a": like.astype(np.float32)}), "net.onnx")
    arguments = ("--metric", "top1", "--tolerance", "0.1", "--samples", 2)
    told = " ".join(run("tune", "net.onnx", "-o", "out.onnx", *arguments).output.split())
    assert "By the estimate, every faster candidate ruins the outputs (top1 1)." in told


def products() -> ModelProto:
    """Products whose weights take longer to read than Casts."""
    random, size = np.random.default_rng(0), 2048
    weights = {name: (random.standard_normal((size, size)) / size**0.5).astype(np.float32) for name in "ab"}
    text = f"(float[1,{size}] x) => (float[1,{size}] y) {{ h = MatMul (x, a) y = MatMul (h, b) }}"
    return add_weights(parse(text), weights)


@pytest.mark.slow
def test_picking_float32_is_not_called_a_failure_to_lower() -> None:
    onnx.save(products(), "net.onnx")
    arguments = ("tune", "net.onnx", "-o", "out.onnx", "--samples", 1)
    candidates = report_of(run(*arguments, "--format", "json"))["tuning"]["candidates"]
    told = run(*arguments, "--pick", len(candidates) - 1).output
    assert f"Nothing was converted: candidate {len(candidates) - 1} keeps everything in float32." in told


def test_metrics() -> None:
    result = run("tune", CLASSIFIER, "-o", "out.onnx", "--metric", "snr", "--tolerance", "50", "-v")
    assert result.exit_code == 0
    assert "the tolerance is 50.0 dB or more" in result.output
    assert run("tune", CLASSIFIER, "-o", "out.onnx", "--metric", "top1", "--tolerance", "0.1").exit_code == 0


WRONG = {
    "metric": ["--metric", "psnr"],
    "tolerance": ["--tolerance", "0"],
    "tolerance that is no number": ["--tolerance", "small"],
    "device": ["--device", "TPU"],
    "runs": ["--runs", "0"],
    "pick": ["--pick", "77"],
    "inputs": ["--inputs", "nothing.npz"],
    "inputs and samples": ["--inputs", "nothing.npz", "--samples", "3"],
    "dimension": ["--dim", "nothing=3"],
    "output is the state": ["-o", "x.onnx", "--state", "x.onnx"],
    "state": ["--state", "model.onnx"],
    "level": ["--level", "O2"],
    "times": ["--times", "guessed"],
    "page is the output": ["-o", "x.onnx", "--html", "x.onnx"],
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_wrong_usage_ends_with_2(options: list[str]) -> None:
    result = run("tune", small(), *options)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert not Path("model_fp16.onnx").exists()


def test_what_cannot_be_tuned_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxamp._tuning.job.run_noise", lambda *_: 0.5)
    result = run("tune", saved("(float[8] x) => (float[8] y) { n = RandomNormal <shape = [8]> () y = Add (x, n) }"))
    assert result.exit_code == 1
    assert is_one_sentence(result)
    assert "not deterministic" in result.output
    Path("broken.onnx").write_bytes(b"\x08")
    assert run("tune", "broken.onnx").exit_code == 1
    assert "onnxamp.ModelError: " in run("tune", "broken.onnx", "-v").output


def test_names_cannot_touch_the_terminal() -> None:
    model = onnx.load(saved(CANCELS))
    model.graph.node[0].name = "\x1b[31mred [bold]x[/bold]"
    result = run("tune", saved(model), "--tolerance", "1e-7", "-v")
    assert result.exit_code == 0
    assert "\x1b[31mred" not in result.output
    assert "[bold]x[/bold]" in result.output


def test_files_with_external_data() -> None:
    model = parse("(float[2,64] x) => (float[2,64] y) { [product] y = MatMul (x, w) }")
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    onnx.save(model, "net.onnx")
    assert run("tune", "net.onnx", "-o", "out.onnx", "-q", "--allow-slower").exit_code == 0
    assert Path("out.onnx.data").stat().st_size >= 2 * 64 * 64
    (made,) = onnx.load("out.onnx").graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(made), weight.astype(np.float16))


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [1e-2, 1e-9])
def test_convert_file_at_level_auto(tolerance: float) -> None:
    model = products()
    samples = onnxamp.random_samples(model, 2)
    onnx.save(model, "net.onnx")
    data: dict[str, Any] = {"tolerance": tolerance, "samples": samples, "dtype": "float16"}
    made = onnxamp.convert_file("net.onnx", "out.onnx", "auto", **data, validate=False)
    assert made.plan.level == "auto"
    assert onnx.load("out.onnx") == onnxamp.convert_model("net.onnx", "auto", **data)
    assert (TensorProto.FLOAT16 in weight_types("out.onnx")) == (tolerance == 1e-2)
    assert onnxamp.convert_file("net.onnx", "again.onnx", plan=made.plan, validate=False).plan.rows
    assert Path("again.onnx").read_bytes() == Path("out.onnx").read_bytes()


@pytest.mark.slow
def test_page() -> None:
    options = ["--tolerance", "7e-4", "--samples", 1, "--no-fold", "--allow-slower", "--html", "report.html", "-q"]
    result = run("tune", ENCODER, "-o", "out.onnx", *options)
    assert (result.exit_code, result.output) == (0, "")
    page = Path("report.html").read_text(encoding="utf-8")
    for text in (
        "The tolerance is met",
        'id="front"',
        "tolerance: 0.0007 or less",
        "of the squared error that is allowed",
    ):
        assert text in page
    assert page.count('class="candidate') >= 3
    assert "costs accuracy: it would use" in page, "each node says why"
    assert "replayed plan" not in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert max(filter(None, data["values"]["largest"])) > 1, "every value was compared"


def test_convert_at_level_auto_writes_the_same_page() -> None:
    options = ("convert", CLASSIFIER, "-o", "out.onnx", "--level", "auto", "--tolerance", "3e-4")
    result = run(*options, "--html", "report.html", "--save-plan", "plan.json")
    assert result.exit_code == 0, result.output
    page = Path("report.html").read_text(encoding="utf-8")
    assert "tolerance: 0.0003 or less" in page
    assert "the output matches the original" in page
    plan = onnxamp.load_plan("plan.json")
    assert plan.level == "auto"
    assert any(row.reason == "measured" for row in plan.rows)
    again = run("convert", CLASSIFIER, "-o", "again.onnx", "--level", "auto", "--plan", "plan.json")
    assert again.exit_code == 0, again.output
    assert Path("again.onnx").read_bytes() == Path("out.onnx").read_bytes()


@pytest.mark.slow
def test_measured_times() -> None:
    result = run("tune", CLASSIFIER, "-o", "out.onnx", "--times", "measured", "--provider", "cpu", "-v")
    assert result.exit_code == 0, result.output
    assert "Times are measured in float32 on the CPU" in result.output
    assert "the savings of low precision are estimated for A100" in " ".join(result.output.split())


def test_what_no_sample_runs_is_told() -> None:
    recurrent = next(path for path in MODELS if path.stem == "recurrent")
    result = run("tune", recurrent, "-o", "out.onnx", "--samples", 1, "-v")
    assert result.exit_code == 0, result.output
    assert "No sample runs 3 nodes, so level O2 decides about them (3 low)" in result.output


def test_help() -> None:
    assert "tune" in run("--help").output
    text = run("tune", "--help-all").output
    for option in ("--tolerance", "--metric", "--inputs", "--state", "--pick", "--device", "--runs", "--save-plan",
                   "--times", "--provider", "--html"):  # fmt: skip
        assert option in text
