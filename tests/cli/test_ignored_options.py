"""Options that would have no effect are refused, or told."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from repository import ROOT

ENCODER = ROOT / "models" / "encoder.onnx"


@pytest.mark.parametrize("command", [
    ("check", "MODEL", "--static", "--samples", 2), ("check", "MODEL", "--static", "--stop"),
    ("check", "MODEL", "--static", "--inputs", "nothing.npz"),
    ("inspect", "MODEL", "--cast", "pooled", "--inputs", "nothing.npz"),
    ("inspect", "MODEL", "--cast", "pooled", "--expected-error"),
    ("bench", "MODEL", "--batch", "2,4", "--dim", "batch=3", "--seconds", 0.01),
    *(("convert", "MODEL", "-o", "low.onnx", "--no-validate", *options) for options in (
        ("--samples", 3), ("--dim", "batch=3"), ("--seed", 1), ("--inputs", "nothing.npz"), ("--no-cure",),
        ("--prompts", "nothing.txt"), ("--cure-time", 3), ("--stress", 0), ("--provider", "cpu"),
        ("--metric", "elements"), ("--tolerance", 0.1), ("--level", "O0", "--rescale", "--samples", 2),
    )),
])  # fmt: skip
def test_options_of_what_does_not_run(command: tuple[object, ...]) -> None:
    done = run(*(ENCODER if word == "MODEL" else word for word in command))
    assert done.exit_code == 2
    assert "drop one" in done.stderr


@pytest.mark.parametrize("options", [("--rescale", "--samples", 2), ("--expected-error", "--dim", "batch=2")])
def test_options_of_what_runs_without_a_validation(tmp_path: Path, options: tuple[object, ...]) -> None:
    done = run("convert", ENCODER, "-o", tmp_path / "low.onnx", "-q", "--no-validate", *options)
    assert (done.exit_code, done.output) == (0, "")


@pytest.mark.parametrize("options", [("--samples", 7), ("--dim", "batch=3"), ("--inputs", "x.npz")])
def test_prompts_replace_other_inputs(tmp_path: Path, options: tuple[object, ...]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b\n", encoding="utf-8")
    done = run("diff", ENCODER, ENCODER, "--prompts", prompts, *options)
    assert done.exit_code == 2
    assert "--prompts" in done.stderr


@pytest.mark.parametrize(("given", "told"), [
    (("--dim", "batch=1", "--dim", "batch=2"), "'batch' has two sizes"),
    (("--input-range", "x=0:1", "--input-range", "x=0:2"), "An input has two ranges"),
    (("--cure-time", "nan"), "'nan' is no number"),
])  # fmt: skip
def test_values_that_say_nothing(given: tuple[str, ...], told: str) -> None:
    done = run("convert", ENCODER, "-o", "low.onnx", *given)
    assert done.exit_code == 2
    assert told in done.stderr


@pytest.mark.parametrize("option", ["--original", "--prompts"])
def test_no_output_replaces_what_an_option_reads(tmp_path: Path, option: str) -> None:
    read = tmp_path / "read.onnx"
    shutil.copy(ENCODER, read)
    done = run("diff", ENCODER, ENCODER, option, read, "--save", read)
    assert done.exit_code == 2
    assert "is already read" in done.stderr
    assert read.read_bytes() == ENCODER.read_bytes()


def test_a_view_names_what_its_plan_overrides(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    made = run("convert", ENCODER, "-o", tmp_path / "low.onnx", "-q", "--no-validate", "--save-plan", plan)
    assert made.exit_code == 0
    done = run("view", ENCODER, "-o", tmp_path / "page.html", "-q", "--plan", plan, "--level", "O1")
    assert done.stderr == "Warning: The plan overrides --level.\n"


def test_ops_in_bodies_are_known_to_check(tmp_path: Path) -> None:
    text = """(int64 n, bool go, float[4] x) => (float[4] y) { y = Loop (n, go, x) <body: graph =
        b (int64 i, bool c, float[4] s) => (bool d, float[4] t) { d = Identity (c) t = Neg (s) }> }"""
    onnx.save(parse(text, 17), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", n=np.array(2), go=np.array(True), x=np.ones(4, np.float32))
    given = ("check", tmp_path / "m.onnx", "--inputs", tmp_path / "x.npz")
    assert run(*given, "--skip-op", "Neg").exit_code == 0
    assert "was examined: check does not look into bodies" in run(*given, "--op", "Neg").stderr
    assert "No node of the model is of op type 'Ned'" in run(*given, "--skip-op", "Ned").stderr


@pytest.mark.parametrize(("kind", "ends", "told"), [
    ("float16", "70000:80000", "No float16 is between 70000 and 80000"), ("double", "-1.7e308:1.7e308", None),
])  # fmt: skip
def test_ranges_of_other_types(tmp_path: Path, kind: str, ends: str, told: str | None) -> None:
    text = f"({kind}[4] x) => ({kind}[4] y) {{ y = Identity (x) }}"
    onnx.save(parse(text, 17), tmp_path / "m.onnx")
    done = run("convert", tmp_path / "m.onnx", "-o", tmp_path / "low.onnx", "--input-range", f"x={ends}")
    assert done.exit_code == (2 if told else 0), done.output
    assert told is None or told in done.stderr


def test_whole_numbers_of_json_that_do_not_fit(tmp_path: Path) -> None:
    onnx.save(parse("(float16[2] x) => (float16[2] y) { y = Identity (x) }", 17), tmp_path / "m.onnx")
    (tmp_path / "x.json").write_text('{"x": [1, 70000]}')
    done = run("check", tmp_path / "m.onnx", "--inputs", tmp_path / "x.json")
    assert "numbers that float16 cannot hold" in done.stderr
