"""A folder of models: workers that die, what is up to date, the table, and how a run ends."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import decoders
import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, MODELS, NORM, run, saved, small
from repository import ROOT
from states import samples_in
from stored import inline

import onnxamp
from onnxamp._base.state import opened
from onnxamp._fleet.entries import NAME

UNIX = pytest.mark.skipif(os.name == "nt", reason="signals of Unix")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


FAULTS = """
import ctypes, os, signal

sync = os.fsync

def fsync(handle):
    path = os.readlink(f"/proc/self/fd/{handle}")
    if path.endswith("/main") and ".crash.onnx." in path:
        ctypes.string_at(0)
    if path.endswith("/main") and ".killed.onnx." in path:
        os.kill(os.getpid(), signal.SIGKILL)
    assert ".bug.onnx." not in path, "a bug"
    sync(handle)

os.fsync = fsync
"""
"""What every Python process does that finds it as "sitecustomize": results of some names end it, or fail, when they are
flushed, which is before they are put in their place.
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes fail at models called "crash", "killed" and "bug"."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("asks Linux which file is flushed")
    site = tmp_path / "site" / "sitecustomize.py"
    site.parent.mkdir()
    site.write_text(FAULTS)
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.parent), *([before] if before else [])]))


def models(*names: str) -> Path:
    """A folder "in" of small models."""
    for name in names:
        path = Path("in", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        small().rename(path)
    return Path("in")


def outcomes(report: onnxamp.FolderReport) -> dict[str, str]:
    return {row.name: row.outcome for row in report.rows}


def files(root: str) -> set[str]:
    return {path.relative_to(root).as_posix() for path in Path(root).rglob("*") if path.is_file()}


def convert(**options: object) -> onnxamp.FolderReport:
    return onnxamp.convert_folder("in", "out", jobs=1, **options)


# --- the folder -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_layout_is_kept_and_results_are_those_of_single_conversions() -> None:
    models("b.onnx", "deep/er/a.onnx", ".hidden/x.onnx", "deep/._a.onnx")
    for path in MODELS:
        shutil.copy(path, "in")
    Path("in/notes.txt").write_text("no model")
    report = onnxamp.convert_folder("in", "out", "O1", black_list=["Conv"])
    assert report.count("converted") == len(report.rows) == 2 + len(MODELS)
    assert files("out") == {NAME, "b.onnx", "deep/er/a.onnx", *(path.name for path in MODELS)}
    for path in MODELS:
        assert onnx.load(f"out/{path.name}") == onnxamp.convert_model(path, "O1", black_list=["Conv"])
    row = next(row for row in report.rows if row.name == "classifier.onnx")
    assert row.error is not None
    assert row.error < 1e-2
    assert (row.casts, row.low < row.nodes, row.bytes_after < row.bytes_before) == (2, True, True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_weights_in_data_files() -> None:
    Path("in").mkdir()
    onnx.save(onnx.load(CLASSIFIER), "in/model.onnx", save_as_external_data=True, location="weights", size_threshold=64)
    assert outcomes(convert()) == {"model.onnx": "converted"}
    assert outcomes(convert()) == {"model.onnx": "up to date"}
    os.utime("in/weights")
    assert outcomes(convert()) == {"model.onnx": "converted"}
    (data,) = files("out") - {NAME, "model.onnx"}
    Path("out", data).unlink()
    assert outcomes(convert()) == {"model.onnx": "converted"}


@pytest.mark.slow
@pytest.mark.usefixtures("faulty")
def test_crashes_fail_their_own_model_and_leave_nothing(request: pytest.FixtureRequest) -> None:
    models("a.onnx", "z.onnx")
    for name in ("crash", "killed"):  # large enough for data files
        onnx.save(inline(), f"in/{name}.onnx")
    Path("out").mkdir()
    Path("out/killed.onnx.data").write_bytes(b"of somebody else")
    result = run("convert", "in", "-o", "out", "--jobs", "2", "--external-data", "always")
    assert result.exit_code == 1
    assert "2 converted, 2 failed" in result.output
    assert "crash.onnx: The worker process was ended by SIGSEGV." in result.output
    assert "killed.onnx: The worker process was ended by SIGKILL: perhaps it ran out of memory" in result.output
    assert files("out") == {NAME, "a.onnx", "z.onnx", "killed.onnx.data"}
    Path("site/sitecustomize.py").unlink()
    request.getfixturevalue("forked")  # off a process in which nothing crashes
    again = convert(external_data="always")
    assert again.count("up to date") == 2
    assert {row.name: (row.outcome, row.message) for row in again.rows if row.outcome != "up to date"} == {
        "crash.onnx": ("failed before", "The worker process was ended by SIGSEGV."),
        "killed.onnx": ("converted", ""),  # for want of memory, of which there may be more now
    }
    assert convert(external_data="always", retry=True).count("converted") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_failure_is_not_tried_again_and_its_old_result_stays() -> None:
    models("good.onnx", "broken.onnx")
    convert()
    Path("in/broken.onnx").write_bytes(b"x")
    before = convert()
    assert outcomes(before) == {"broken.onnx": "failed", "good.onnx": "up to date"}
    again = convert()
    assert outcomes(again) == {"broken.onnx": "failed before", "good.onnx": "up to date"}
    assert again.rows[0].message == before.rows[0].message
    assert outcomes(convert(retry=True)) == {"broken.onnx": "failed", "good.onnx": "up to date"}
    assert outcomes(convert(seed=1)) == {"broken.onnx": "failed", "good.onnx": "converted"}
    assert onnx.load("out/broken.onnx").graph.node
    models("broken.onnx")
    assert outcomes(convert(seed=1)) == {"broken.onnx": "converted", "good.onnx": "up to date"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_failure_that_may_pass_is_tried_again() -> None:
    """The data file is missing; it is no file that was read, so nobody would see it come."""
    Path("in").mkdir()
    onnx.save(onnx.load(CLASSIFIER), "in/model.onnx", save_as_external_data=True, location="weights", size_threshold=64)
    shutil.move("in/weights", "weights")
    for _ in range(2):
        assert outcomes(convert()) == {"model.onnx": "failed"}
    shutil.move("weights", "in/weights")
    assert outcomes(convert()) == {"model.onnx": "converted"}


@pytest.mark.slow
@pytest.mark.usefixtures("faulty")
def test_what_nobody_foresaw_fails_its_own_model() -> None:
    models("a.onnx", "bug.onnx")
    result = run("convert", "in", "-o", "out", "-v")
    assert result.exit_code == 1
    assert "bug.onnx: AssertionError: a bug" in result.stdout
    assert "Traceback (most recent call last):" in result.stdout
    assert "Traceback" not in run("convert", "in", "-o", "out").stdout
    assert files("out") == {NAME, "a.onnx"}


CHANGES: dict[str, Callable[[], dict[str, object]]] = {
    "a level": lambda: {"level": "O3"},
    "a wish": lambda: {"black_list": ["MatMul"]},
    "the seed": lambda: {"seed": 1},
    "no validation": lambda: {"validate": False},
    "the model's time": lambda: os.utime("in/a.onnx") or {},
    "the model": lambda: shutil.copy2(saved(NORM), "in/a.onnx") and {},
    "the result": lambda: Path("out/a.onnx").write_bytes(b"x") and {},
    "the result is gone": lambda: Path("out/a.onnx").unlink() or {},
    "what is remembered": lambda: Path("out", NAME).write_text("{") and {},
    "another tool's file": lambda: Path("out", NAME).write_text('{"models": {"a.onnx": 1}}') and {},
}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_makes_a_result_out_of_date(change: Callable[[], dict[str, object]]) -> None:
    models("a.onnx")
    assert outcomes(convert()) == {"a.onnx": "converted"}
    assert outcomes(convert()) == {"a.onnx": "up to date"}
    assert outcomes(convert(**change())) == {"a.onnx": "converted"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_another_version_makes_results_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    models("a.onnx")
    convert()
    Path("onnxamp-2.0.dist-info").mkdir()
    Path("onnxamp-2.0.dist-info/METADATA").write_text("Name: onnxamp\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(Path.cwd())
    assert outcomes(convert()) == {"a.onnx": "converted"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_is_up_to_date_tells_what_it_was() -> None:
    models("a.onnx")
    (first,), (second,) = convert().rows, convert().rows
    assert (first.low, first.nodes, first.casts, first.error) == (second.low, second.nodes, second.casts, second.error)
    assert first.error is not None


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_folders_may_move_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models("a.onnx")
    convert()
    Path("moved").mkdir()
    for name in ("in", "out"):
        shutil.move(name, "moved")
    monkeypatch.chdir(folder / "moved")
    assert outcomes(convert()) == {"a.onnx": "up to date"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_results_inside_the_folder_are_no_models() -> None:
    models("a.onnx", "low/b.onnx")
    for outcome in ("converted", "up to date"):
        report = onnxamp.convert_folder("in", "in/low/fp16", jobs=1)
        assert outcomes(report) == {"a.onnx": outcome, "low/b.onnx": outcome}
    assert files("in/low/fp16") == {NAME, "a.onnx", "low/b.onnx"}


# --- inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_inputs_by_name() -> None:
    models("a.onnx", "deep/b.onnx", "c.onnx", "d.onnx")
    Path("data/deep").mkdir(parents=True)
    Path("data/c").mkdir()
    for name in ("data/a.npz", "data/deep/b.npz", "data/c/1.npz", "data/c/2.npz"):
        np.savez(name, X=np.ones((1, 2), np.float32))
    found = {row.name: row.inputs for row in convert(inputs="data").rows}
    assert found["a.onnx"] == f"1 sample of {Path('data/a.npz')}"
    assert found["c.onnx"] == f"2 samples of {Path('data/c')}"
    assert found["d.onnx"] == "random inputs (seed 0)"
    np.savez("data/d.npz", X=np.ones((1, 2), np.float32))
    np.savez("data/c/3.npz", X=np.ones((1, 2), np.float32))
    assert outcomes(convert(inputs="data")) == {
        "a.onnx": "up to date", "c.onnx": "converted", "d.onnx": "converted", "deep/b.onnx": "up to date"
    }  # fmt: skip
    np.savez("data/a.npz", Y=np.ones((1, 2), np.float32))
    assert outcomes(convert(inputs="data"))["a.onnx"] == "failed"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_dimension_counts_for_models_that_have_it() -> None:
    Path("in").mkdir()
    for name, dim in (("a", "batch"), ("b", "rows")):
        text = f"(float[{dim},2] X) => (float[{dim},2] Y) <float[2,2] w = {{1, 2, 3, 4}}> {{ Y = MatMul (X, w) }}"
        saved(text, f"in/{name}.onnx")
    assert outcomes(convert(dims={"batch": 3})) == {"a.onnx": "converted", "b.onnx": "converted"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_name_has_to_match_in_one_of_the_models() -> None:
    """Else it is a mistake, told at the end: the results are there. Results that are up to date count, too."""
    Path("in").mkdir()
    for name in ("a", "b"):
        text = f"(float[{name},2] X) => (float[{name},2] Y) <float[2,2] w = {{1, 2, 3, 4}}>"
        saved(f"{text} {{ [in_{name}] Y = MatMul (X, w) }}", f"in/{name}.onnx")
    arguments = ("convert", "in", "-o", "out", "-q", "--dim", "a=3", "--keep-node")
    for _ in range(2):
        result = run(*arguments, "in_b")
        assert (result.exit_code, result.stderr) == (0, "")
    for _ in range(2):
        result = run(*arguments, "in_c", "--dim", "c=3", "--black", "MatMull")
        assert result.exit_code == 2
        said = " ".join(result.stderr.split())
        for text in (
            "No node and no output of a node is called 'in_c'.",
            "The inputs have no dimension 'c'.",
            "Did you mean 'MatMul'?",
        ):
            assert said.count(text) == 1
        assert files("out") == {"a.onnx", "b.onnx", NAME}
    with pytest.warns(onnxamp.OptionWarning, match="^No node and no output of a node is called 'in_c'"):
        assert convert(keep_nodes=["in_c"]).count("converted") == 2
    with pytest.raises(onnxamp.ArgumentError, match="No node and no output of a node is called 'in_c'"):
        convert(keep_nodes=["in_c"], strict_options=True)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_level_auto() -> None:
    Path("in").mkdir()
    saved(NORM, "in/norm.onnx")
    (row,) = convert(level="auto", tolerance=5e-3, samples=2).rows
    assert row.outcome == "converted"
    assert row.error is not None
    assert row.error <= 5e-3


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_tolerance_is_the_limit_of_the_validation() -> None:
    Path("in").mkdir()
    saved(NORM, "in/norm.onnx")
    (plain,) = convert(samples=2).rows
    assert plain.error
    (row,) = convert(samples=2, tolerance=plain.error * 0.9).rows
    assert (row.outcome, row.healed != "") == ("converted", True)
    assert row.error is not None
    assert row.error <= plain.error * 0.9


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_no_search_of_level_auto_is_repeated() -> None:
    """Where a result is gone, what was measured makes it again."""
    Path("in").mkdir()
    saved(NORM, "in/norm.onnx")
    asked = {"level": "auto", "tolerance": 5e-3, "samples": 2, "keep_io_types": False}  # without Casts, it is faster
    convert(**asked)
    (measured,) = Path("out/.onnxamp").glob("norm.onnx-*.json")
    before, result = measured.stat().st_mtime_ns, Path("out/norm.onnx").read_bytes()
    assert samples_in(measured) == 2
    Path("out/norm.onnx").unlink()
    assert outcomes(convert(**asked)) == {"norm.onnx": "converted"}
    assert Path("out/norm.onnx").read_bytes() == result
    assert measured.stat().st_mtime_ns == before, "nothing was measured again"
    measured.write_text("{", encoding="utf-8")
    assert outcomes(convert(**asked, external_data="always")) == {"norm.onnx": "converted"}, "it is measured again"
    assert samples_in(measured) == 2


JUDGE = "def judge(reference, result):\n    return {}\n"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_function_judges_all_models() -> None:
    """It is imported in the workers; where its file changes, results are judged again."""
    Path("judge.py").write_text(JUDGE.format("abs(reference['Y'] - result['Y']).max() == 0"), encoding="utf-8")
    Path("in").mkdir()
    saved("(float[1,2] X) => (float[1,2] Y) <float[2,2] w = {1.0001, 2, 3, 4}> { Y = MatMul (X, w) }", "in/a.onnx")
    ops = '[[op]]\ndomain = "a"\ntype = "A"\ninputs = ["float"]\noutputs = ["float"]\n'
    Path("ops.toml").write_text(ops, encoding="utf-8")
    (row,) = convert(accept="judge.py:judge", custom_ops="ops.toml", retry=True).rows
    assert "'judge.py:judge' rejects" in row.healed
    assert "--accept judge.py:judge --custom-ops ops.toml" in row.cure
    convert(accept="judge.py:judge")
    assert outcomes(convert(accept="judge.py:judge")) == {"a.onnx": "up to date"}
    assert run("convert", "in", "-o", "out", "--accept", "judge.py:judge", "--no-cure", "-q").exit_code == 1
    Path("judge.py").write_text(JUDGE.format(True), encoding="utf-8")
    (row,) = convert(accept="judge.py:judge").rows
    assert (row.outcome, row.healed) == ("converted", "")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_gains_nothing_has_no_tick() -> None:
    Path("in").mkdir()
    saved("(float[1,2] X) => (float[1,2] Y) { Y = Log (X) }", "in/log.onnx")
    shutil.copy(ROOT / "models/encoder.onnx", "in/a.onnx")
    lines = run("convert", "in", "-o", "out", "--jobs", "1").stdout.splitlines()
    assert "✔ 2 models: 1 converted, 1 nothing lowered." in lines
    assert any(line.startswith("  ! log.onnx") for line in map(unspaced, lines))
    stored = run("convert", "in", "-o", "stored", "--jobs", "1", "--weights-only").stdout
    assert "2 models: 1 converted, 1 nothing lowered." in stored, "one has weights"
    low = run("convert", "out", "-o", "low", "--jobs", "1").stdout.splitlines()
    assert "✔ 2 models: 1 converted, 1 nothing lowered." in low, "what is float16 already has nothing to gain"
    assert run("convert", "in", "-o", "same", "--jobs", "1", "--level", "O0").stdout.startswith(
        "✔ 2 models: 2 converted."
    )


def unspaced(line: str) -> str:
    return re.sub(r"(?<=\S) +", " ", line)


@pytest.mark.parametrize(("options", "error", "said"), [
    ({"accept": print}, onnxamp.ArgumentTypeError, "which worker processes can import"),
    ({"accept": "judge.py:none"}, onnxamp.ArgumentError, "cannot be imported"),
    ({"accept": "math:fabs", "validate": False}, onnxamp.ArgumentError, "judges the validation"),
    ({"html": "in/a.onnx/index.html"}, onnxamp.ArgumentError, "is a file"),
])  # fmt: skip
def test_wrong_arguments(options: dict[str, object], error: type[Exception], said: str) -> None:
    models("a.onnx")
    with pytest.raises(error, match=said):
        convert(**options)
    assert not Path("out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_pages_in_python() -> None:
    models("a.onnx")
    assert outcomes(convert(html="pages")) == {"a.onnx": "converted"}
    assert files("pages") == {"a.onnx.html", "index.html"}
    assert outcomes(convert(html=Path("pages/index.html"))) == {"a.onnx": "up to date"}


# --- the command line -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_table() -> None:
    models("sub/fine.onnx")
    saved(NORM, "in/norm.onnx")
    Path("in/text.onnx").write_text("x")
    result = run("convert", "in", "-o", "out", "--level", "O3", "--no-hazards", "--jobs", "1", "--no-cure")
    assert result.exit_code == 1
    rows = [line.strip(" ✔✘!").split() for line in result.stdout.splitlines() if line.strip()]
    table = {row[0]: row for row in rows}
    assert table["sub/fine.onnx"][1:7] == ["converted", "1", "of", "1", "+2", table["sub/fine.onnx"][6]]
    assert table["norm.onnx"][1] == table["text.onnx"][1] == "failed"
    assert "norm.onnx: It failed validation and was written to out/failed/norm.onnx: " in " ".join(
        result.stdout.split()
    )
    assert sorted(path.relative_to("out").as_posix() for path in Path("out").rglob("*.onnx")) == [
        "failed/norm.onnx", "sub/fine.onnx",
    ]  # fmt: skip
    assert "text.onnx: 'in/text.onnx' is not an ONNX model" in result.stdout.replace("\\", "/")
    assert "✘ 3 models: 1 converted, 2 failed." in result.stdout
    assert result.stderr.count("[3/3] ") == 1
    assert result.stderr.endswith("Error: 2 of 3 models failed.\n")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_failing_results_are_healed_once() -> None:
    Path("in").mkdir()
    saved(NORM, "in/norm.onnx")
    result = run("convert", "in", "-o", "out", "--level", "O3", "--no-hazards", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert "Kept in float32 to pass validation" in result.stdout
    assert "Values vanished" in " ".join(result.stdout.split())
    assert run("diff", "in/norm.onnx", "out/norm.onnx").exit_code == 0
    again = run("convert", "in", "-o", "out", "--level", "O3", "--no-hazards", "--jobs", "1")
    assert "1 up to date" in again.stdout
    assert "Kept in float32 to pass validation" in again.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_metric_decides_how_models_are_validated() -> None:
    """Two scores are equal in bfloat16, so their rows change places, and only matched rows are still close."""
    Path("in").mkdir()
    text = """<int64[1] k = {3}, int64[2] parts = {4, 1}, int64[1] last = {-1}> {
        boxes, columns = Split <axis = 1> (x, parts)
        scores = Squeeze (columns, last)
        top, index = TopK <axis = 0> (scores, k)
        best = Gather <axis = 0> (boxes, index)
    }"""
    saved(f"(float[3,5] x) => (float[3,4] best, float[3] top) {text}", "in/boxes.onnx")
    boxes = [[0, 0, 1, 1, 0.5], [4, 4, 6, 6, 0.5001], [8, 0, 9, 2, 0.9]]
    Path("inputs").mkdir()
    np.savez("inputs/boxes.npz", x=np.array(boxes, np.float32))
    lowered = ("--level", "O3", "--dtype", "bfloat16", "--target", "any", "--no-hazards")
    asked = ("convert", "in", "-o", "out", "--inputs", "inputs", "--no-cure", "--jobs", "1", *lowered)
    assert run(*asked, "--metric", "detections").exit_code == 0
    result = run(*asked, "--metric", "elements")
    assert result.exit_code == 1
    assert "It failed validation" in " ".join(result.output.split())
    with pytest.raises(onnxamp.ArgumentError, match=r"metric ('cosine' )?is only for level 'auto'"):
        convert(metric="cosine")


@pytest.mark.slow
@pytest.mark.mostly_slow(fast=1)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("gone", [True, False])
def test_no_cure_is_looked_for_twice(gone: bool) -> None:
    """A search would find other words for it than those that are remembered."""
    Path("in").mkdir()
    saved(NORM, "in/norm.onnx")
    wrong = {"level": "O3", "hazards": False, "black_list": ["Exp"]}
    (first,) = convert(**wrong).rows
    assert first.cure.startswith("onnxamp convert in")
    assert first.healed.startswith("Tried: a conversion with onnxamp's lists and hazards passes")
    result = Path("out/norm.onnx").read_bytes()
    with opened(Path("out", NAME)) as state:
        assert state is not None
        kept = state.part("folder", {})
        entry = kept["norm.onnx"]
        entry["row"]["healed"] = first.healed.replace("Tried:", "Remembered:")
        kept["norm.onnx"] = entry
    if gone:
        Path("out/norm.onnx").unlink()
    (second,) = convert(**wrong, external_data="auto" if gone else "never").rows
    assert (first.outcome, second.outcome) == ("converted", "converted")
    assert second.healed == first.healed.replace("Tried:", "Remembered:")
    assert (second.kept, second.cure) == (first.kept, first.cure)
    assert Path("out/norm.onnx").read_bytes() == result


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_measurements_decided_is_measured_again() -> None:
    Path("in").mkdir()
    text = "<float c = {1000}> { Z = MatMul (X, X) a = Add (X, c) Y = Sub (a, c) }"
    saved(f"(float[4,4] X) => (float[4,4] Z, float[4,4] Y) {text}", "in/sums.onnx")
    (first,) = convert(strict=True).rows
    assert "Level auto, which measures the error of each op, passes." in first.healed
    assert first.cure.startswith("onnxamp tune in")
    result = Path("out/sums.onnx").read_bytes()
    Path("out/sums.onnx").unlink()
    (second,) = convert(strict=True).rows
    assert (second.outcome, second.healed, second.cure) == ("converted", first.healed, first.cure)
    assert Path("out/sums.onnx").read_bytes() == result


@pytest.mark.slow
@pytest.mark.webgpu
def test_an_engine_that_mixes_up_models_sees_one_at_a_time() -> None:
    """And's kernel serves, compiled for one broadcast, all others of the process (onnxruntime-ep-webgpu 0.4.0)."""
    Path("in").mkdir()
    for name, one, other in ("a", "1, 1, 16, 16", "2, 1, 1, 16"), ("b", "2, 1, 16, 1", "2, 1, 1, 16"):
        text = f"(bool[{one}] A, bool[{other}] B, float[2, 1, 16, 16] X) => (float[2, 1, 16, 16] Y)"
        saved(f"{text} {{ c = And (A, B) Z = Mul (X, X) W = Neg (X) Y = Where (c, Z, W) }}", f"in/{name}.onnx")
    report = convert(provider="webgpu", target="webgpu", level="O3")
    assert [(row.outcome, row.message) for row in report.rows] == [("converted", "")] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_json() -> None:
    models("a.onnx")
    Path("in/text.onnx").write_text("x")
    result = run("convert", "in", "-o", "out", "--format", "json")
    assert result.exit_code == 1
    assert list(json.loads(result.stdout)) == ["onnxamp", "format", "report"]
    rows = json.loads(result.stdout)["report"]["rows"]
    assert [(row["name"], row["outcome"], row["casts"]) for row in rows] == [
        ("a.onnx", "converted", 2), ("text.onnx", "failed", 0)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_quiet_prints_failures_alone() -> None:
    models("a.onnx")
    assert run("convert", "in", "-o", "out", "-q").output == ""
    Path("in/text.onnx").write_text("x")
    lines = run("convert", "in", "-o", "out", "-q").output.splitlines()
    assert lines[0].startswith("text.onnx: ")
    assert lines[1:] == ["Error: 1 of 2 models failed."]


def index_of(path: str) -> list[tuple[str, str | None]]:
    """The models of an index, and where it leads from each."""
    text = Path(path).read_text(encoding="utf-8")
    rows = re.findall(r'<th scope="row".*?</th>', text, re.DOTALL)
    found = [(re.search(r'class="name">([^<]*)<', row), re.search(r'href="([^"]*)"', row)) for row in rows]
    return [(name[1], link[1] if link else None) for name, link in found if name]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_pages_and_their_index() -> None:
    models("a.onnx", "deep/b c#.onnx")
    Path("in/text.onnx").write_text("<b>x")
    assert run("convert", "in", "-o", "out", "--html", "out").exit_code == 1
    assert files("out") == {
        ".onnxamp.json", "a.onnx", "a.onnx.html", "deep/b c#.onnx", "deep/b c#.onnx.html", "index.html",
    }  # fmt: skip
    links = [("a.onnx", "a.onnx.html"), ("text.onnx", None), ("deep/b c#.onnx", "deep/b%20c%23.onnx.html")]
    assert index_of("out/index.html") == links
    page = Path("out/a.onnx.html").read_text(encoding="utf-8")
    assert '"accumulated"' in page
    assert "<b>x" not in Path("out/index.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_pages_are_made_once() -> None:
    """Results without one are made again, and the others are up to date."""
    models("a.onnx", "b.onnx")

    def outcomes() -> list[str]:
        result = run("convert", "in", "-o", "out", "--html", "pages", "--format", "json")
        return [row["outcome"] for row in json.loads(result.stdout)["report"]["rows"]]

    assert run("convert", "in", "-o", "out", "-q").exit_code == 0
    assert outcomes() == ["converted", "converted"]
    assert files("pages") == {"a.onnx.html", "b.onnx.html", "index.html"}
    assert outcomes() == ["up to date", "up to date"]
    Path("pages/b.onnx.html").unlink()
    assert outcomes() == ["up to date", "converted"]
    assert index_of("pages/index.html") == [("a.onnx", "a.onnx.html"), ("b.onnx", "b.onnx.html")]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_results_that_failed_get_a_page_when_one_is_asked_for() -> None:
    models("a.onnx")
    command = ("convert", "in", "-o", "out", "--no-cure", "--tolerance", 1e-9, "--format", "json")

    def outcome(*options: object) -> str:
        return json.loads(run(*command, *options).stdout)["report"]["rows"][0]["outcome"]

    assert outcome() == "failed"
    assert outcome() == "failed before"
    assert outcome("--html", "pages") == "failed"
    assert outcome("--html", "pages") == "failed before"
    assert index_of("pages/index.html") == [("a.onnx", "a.onnx.html")]


@pytest.mark.usefixtures("forked")
def test_a_file_is_the_only_page() -> None:
    """Whoever names a file asks for one page."""
    models("a.onnx")
    assert outcomes(convert(html="pages/all.html", validate=False)) == {"a.onnx": "converted"}
    assert files("pages") == {"all.html"}


WRONG = {
    "no output": ([], "name the folder for the results with -o OUTDIR"),
    "same folder": (["-o", "in"], "could replace originals"),
    "same folder by another name": (["-o", "in/../in"], "could replace originals"),
    "folder around it": (["-o", "."], "could replace originals"),
    "a file": (["-o", "in/a.onnx"], "is a file"),
    "pages in a file": (["-o", "out", "--html", "in/a.onnx/index.html"], "is a file"),
    "plan": (["-o", "out", "--plan", "x.json"], "--plan is for a single model"),
    "saved plan": (["-o", "out", "--save-plan", "x.json"], "--save-plan is for a single model"),
    "pattern": (["-o", "out", "--keep-fp32", "("], "is not a regular expression"),
    "tolerance": (["-o", "out", "--no-validate", "--tolerance", "0.1"], "--tolerance would have no effect"),
    "tolerance that never holds": (["-o", "out", "--tolerance", "-1"], "out of range"),
    "inputs": (["-o", "out", "--inputs", "in/a.onnx"], "are not a folder"),
    "inputs of others": (["-o", "out", "--inputs", "in"], "inputs for a.onnx belong in a.npz"),
    "jobs": (["-o", "out", "--jobs", "0"], "0 is not in the range"),
}


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_wrong_usage_ends_with_2_before_anything_is_read(options: list[str], text: str) -> None:
    models("a.onnx")
    result = run("convert", "in", *options)
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.split())
    assert files(".") == {"in/a.onnx"}


def test_an_empty_folder() -> None:
    Path("in").mkdir()
    result = run("convert", "in", "-o", "out")
    assert result.exit_code == 2
    assert "There is no *.onnx file below 'in'." in result.output


def test_retry_of_a_single_model() -> None:
    assert run("convert", small(), "--retry").exit_code == 2


@pytest.mark.slow
@UNIX
@pytest.mark.usefixtures("forked")
def test_ctrl_c_ends_workers_and_leaves_what_is_done() -> None:
    Path("in").mkdir()
    encoder = next(path for path in MODELS if path.stem == "encoder")
    for number in range(10):
        shutil.copy(encoder, f"in/{number}.onnx")
    # whoever runs tests in the background ignores SIGINT, and children would, too
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from onnxamp.__main__ import main; main()"
    command = [sys.executable, "-c", program, "convert", "in", "-o", "out", "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("[1/10] ") for line in process.stderr)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
        rest = process.stderr.read()  # to its end: no worker is left that could write there
        assert process.wait() == 130
    assert rest.endswith("Aborted!\n")
    assert "Traceback" not in rest
    assert not [name for name in files("out") if name.endswith((".tmp", ".data"))]
    report = onnxamp.convert_folder("in", "out", jobs=2)
    assert 0 < report.count("up to date") < 10
    assert report.count("converted") == 10 - report.count("up to date")


@pytest.mark.slow
def test_a_second_run_to_the_same_folder_is_refused() -> None:
    Path("in").mkdir()
    Path("out").mkdir()
    saved(NORM, "in/norm.onnx")
    with opened(Path("out", NAME)), pytest.raises(onnxamp.ArgumentError, match="Another process is using the state"):
        convert(validate=False)
    assert convert(validate=False).count("converted") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_read_only_folder_that_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written there; models that would have to be are refused before they are converted."""
    models("a.onnx")
    decoders.folder(Path("in/llm"), "genai", decoders.grouped())
    convert(validate=False)
    everything = [*Path("out").rglob("*"), Path("out")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.access("out", os.W_OK):  # permissions mean nothing for this user
        refuse_writing_below(monkeypatch, "out")
    before = {path: path.stat().st_mtime_ns for path in everything}
    assert set(outcomes(convert(validate=False)).values()) == {"up to date"}
    models("b.onnx")
    with pytest.raises(onnxamp.OutputError, match=r"out/\.onnxamp\.json': (Permission denied|Read-only file system)\."):
        convert(validate=False)
    assert {path: path.stat().st_mtime_ns for path in everything} == before
    for path in everything:
        path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_nodes_that_rightly_stay_float32_are_counted_apart() -> None:
    Path("in").mkdir()
    shutil.copy(ROOT / "docs" / "explain" / "graphs" / "position.onnxtxt", "in/position.onnx")
    (row,) = convert(validate=False).rows
    assert row.hazards == {"position": 4}
    printed = run("convert", "in", "-o", "out", "--jobs", "1", "--no-validate").output
    assert "4 nodes in 1 model: positions, or angles that grow with them." in printed


def refuse_writing_below(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    opening = os.open

    def refuse(path: str | Path, flags: int, *rest: int) -> int:
        if str(path).startswith(folder) and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opening(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
