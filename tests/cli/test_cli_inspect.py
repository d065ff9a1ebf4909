"""Names from models do no harm on a terminal; ``onnxamp inspect`` and ``lists``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CLASSIFIER, NORM, report_of, run, saved, small
from graphs.case import add_weights, parse

import onnxamp


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- names ------------------------------------------------------------------------------------------------------

EVIL = ("[red]x[/red]", "\x1b[31mred", "line\nbreak", "back\\slash [/]", "\u202eright to left")


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("command", ["convert", "inspect"])
@pytest.mark.parametrize("name", EVIL, ids=["markup", "escape", "newline", "tag", "bidi"])
def test_names_are_shown_not_obeyed(name: str, command: str) -> None:
    model = parse(NORM)
    for node in model.graph.node:
        node.name = f"{name} {node.name}"
        for names in (node.input, node.output):
            names[:] = [name if value == "Y" else value for value in names]
    model.graph.output[0].name = name
    result = run(command, saved(model), "-v", "--no-fold")
    assert result.exit_code == 0, result.output
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)
    assert f"{shown} square" in result.output
    assert all(c.isprintable() or c == "\n" for c in result.output)


def test_file_names_are_shown_not_obeyed() -> None:
    path = saved("(float[1] X) => (float[1] Y) { Y = Tanh (X) }", "\x1b[31m[red]x.onnx")
    for result in (run("convert", path), run("convert", "\x1b[31mmissing.onnx")):
        assert "\x1b" not in result.output
        assert "\\x1b[31m" in result.output


# --- inspect, lists, and the rest -------------------------------------------------------------------------------


def test_inspect() -> None:
    result = run("inspect", CLASSIFIER)
    assert result.exit_code == 0
    for text in ("IR version  9", "ai.onnx 17", "BatchNormalization", "O1", "O2", "O3"):
        assert text in result.output
    assert "white list" not in result.output, "verdicts are for one level, or for -v"
    assert not list(Path().iterdir()), "nothing is written"


def test_inspect_one_level() -> None:
    path = small()
    result = run("inspect", path, "--level", "O2")
    assert re.search(r"first:T +MatMul +float16 +on the white list: MatMul", result.output)
    report = json.loads(run("inspect", path, "--format", "json").output)
    assert (report["onnxamp"], report["format"]) == ("inspect", 1)
    assert sorted(report["levels"]) == ["O1", "O2", "O3"]
    assert report["operators"] == {"MatMul float32": 1}


def test_inspect_of_a_model_too_old_for_bfloat16() -> None:
    path = saved(parse("(float[1] X) => (float[1] Y) { Y = Tanh (X) }", opset=12, ir=7))
    result = run("inspect", path, "--dtype", "bfloat16", "--opset", "keep")
    assert result.exit_code == 0
    assert "No level applies" in result.output
    assert "No level applies" not in run("inspect", path, "--dtype", "bfloat16").output


def test_view_writes_the_page_of_a_conversion_and_nothing_else() -> None:
    path = saved(NORM)
    result = run("view", path, "--level", "o3", "--no-fold")
    assert result.exit_code == 0, result.output
    assert sorted(found.name for found in Path().iterdir()) == ["model.html", "model.onnx"]
    page = Path("model.html").read_text(encoding="utf-8")
    assert "onnxamp convert model.onnx -o model_fp16.onnx --level O3 --no-fold" in page
    made = run("convert", path, "--level", "O3", "--no-fold", "--no-validate", "--format", "json")
    told = report_of(run("view", path, "--level", "O3", "--no-fold", "--format", "json"))
    assert told["summary"] == report_of(made)["summary"]
    nodes = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["nodes"]
    assert {"project", "square", "divide"} <= set(nodes["name"])
    assert len(nodes["casts"]) == told["plan"]["casts"] > 0


def test_view_says_what_only_a_run_can_tell() -> None:
    text = """(float[1,3,7,9] x) => (float[1,4,7,9] y) {
        a = Conv <pads = [1,1,1,1]> (x, v) b = Clip <min = 0.0, max = 6.0> (a)
        c = Conv <pads = [1,1,1,1]> (b, w) y = Clip <min = 0.0, max = 6.0> (c) }"""
    weights = {"v": (4, 3, 3, 3), "w": (4, 4, 3, 3)}
    path = saved(add_weights(parse(text, opset=9, ir=4), weights))
    said = "Nothing ran, so the upgrade to opset 12 was not verified: onnxamp convert first verifies that"
    assert said in " ".join(run("view", path).output.split())
    assert said in Path("model.html").read_text(encoding="utf-8")
    assert "trusted" not in run("view", path, "--opset", "keep").output
    assert "trusted" not in run("view", path, "--opset", "12").output


def test_view_shows_a_plan_with_its_reasons() -> None:
    path = saved(NORM)
    assert run("convert", path, "-q", "--rescale", "--save-plan", "plan.json").exit_code == 0
    result = run("view", path, "--plan", "plan.json", "-o", "page.html", "--format", "json")
    plan = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert report_of(result)["plan"]["rows"] == plan["rows"]
    assert "--plan plan.json" in Path("page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rescale",), "--rescale needs measured ranges"),
        (("-o", "model.onnx"), "choose another name"),
        (("--level", "auto"), "'auto' is not a level"),
    ],
)
def test_view_refuses(options: tuple[str, ...], said: str) -> None:
    result = run("view", small(), *options)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert [path.name for path in Path().iterdir()] == ["model.onnx"]


def test_lists() -> None:
    result = run("lists", "mindspore")
    assert result.exit_code == 0
    assert "mindspore.amp.get_black_list(): nn.LayerNorm" in result.output
    assert re.search(r"BatchNorm2d +BatchNormalization", result.output)
    report = json.loads(run("lists", "--format", "json").output)
    assert report["presets"]["paddle"]["names"]["matmul_v2"] == ["MatMul"]
    assert (report["onnxamp"], report["format"]) == ("lists", 1)
    assert sorted(report["presets"]) == ["conservative", "default", "fast", "mindspore", "paddle"]
    assert list(report["presets"]["paddle"]["white"]) == onnxamp.get_white_list("paddle")


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "onnxamp", "--version"], capture_output=True, text=True, check=True)
    assert onnxamp.__version__ in done.stdout
