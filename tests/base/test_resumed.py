"""Comparisons and checks that are killed in the middle: what was done is not done again, and nothing else differs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, MODELS, report_of, run
from graphs.case import parse
from states import samples_in

import onnxamp
from onnxamp._report.formats import diff_json
from onnxamp._runtime.inputs.samples import random_samples

pytestmark = pytest.mark.skipif(os.name == "nt", reason="kills as Unix does")

ARGUMENTS = ("diff", CLASSIFIER, "low.onnx", "--inputs", "samples", "--provider", "cpu", "--format", "json")
JUDGE = """
import os, signal

def judge(reference, result):
    with open("calls", "a") as calls:
        calls.write(".")
    if os.path.getsize("calls") == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getppid() if os.environ["KILLED"] == "parent" else os.getpid(), signal.SIGKILL)
    return True
"""


def model(stem: str) -> Path:
    return next(path for path in MODELS if path.stem == stem)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Samples of the classifier in files, a converted one, and a function that counts what is compared."""
    monkeypatch.chdir(tmp_path)
    Path("samples").mkdir()
    for number, sample in enumerate(random_samples(CLASSIFIER, 6, dims={"batch": 2})):
        np.savez(f"samples/{number}.npz", **sample)
    onnx.save(onnxamp.convert_model(CLASSIFIER), "low.onnx")
    Path("judge.py").write_text(JUDGE)
    return tmp_path


def command(*more: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "onnxamp", *map(str, (*ARGUMENTS, *more))], check=False, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def calls() -> int:
    """How many samples were compared since the last time."""
    count = Path("calls").stat().st_size
    Path("calls").unlink()
    return count


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [(), ("--jobs", 2)], ids=["here", "workers"])
def test_a_comparison_whose_process_is_killed_goes_on(jobs: tuple[object, ...]) -> None:
    judged = ("--accept", "judge.py:judge")
    killed = command("--state", "s", *judged, *jobs, KILL_AT="3", KILLED="parent" if jobs else "self")
    assert killed.returncode == -9
    known = samples_in(Path("s"))
    assert known <= 3
    if not jobs:
        assert (known, calls()) == (2, 3)
    Path("calls").unlink(missing_ok=True)
    resumed = command("--state", "s", *judged, *jobs)
    assert calls() == 6 - known
    whole = run(*ARGUMENTS, *judged)
    assert calls() == 6
    assert (resumed.returncode, resumed.stdout) == (0, whole.stdout)
    judged_again = run(*ARGUMENTS, "--state", "s", *judged, "--tolerance", "0.5")
    assert not Path("calls").exists()
    assert judged_again.exit_code == 0
    assert report_of(judged_again)["outputs"] == report_of(whole)["outputs"]


def stopping(after: int) -> Callable[[int, int], None]:
    """A progress function that stops a run when so many of seven samples are done."""

    def progress(done: int, total: int) -> None:
        if done > after * total // 7:
            raise KeyboardInterrupt

    return progress


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "layers"), [("encoder", True), ("detector", False), ("detector", True)])
def test_a_comparison_that_was_interrupted_is_the_same(stem: str, layers: bool) -> None:
    """To the last bit, of all values, of detections, and of the noise of the first sample."""
    broken = onnxamp.convert_model(model(stem), "O3", hazards=False)
    options: dict[str, Any] = {"samples": random_samples(model(stem), 7), "layers": layers, "provider": "cpu"}
    wanted = diff_json(onnxamp.diff_models(model(stem), broken, **options))
    for after in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            onnxamp.diff_models(model(stem), broken, **options, state="s", progress=stopping(after))
    first: list[float] = []
    report = onnxamp.diff_models(
        model(stem), broken, **options, state="s", progress=lambda done, total: first.append(done / total)
    )
    assert diff_json(report) == wanted
    # Where outputs miss their limits, layers are compared, too, for which nothing is known yet.
    assert first[0] > 5 / 7 or not layers


def test_a_sample_that_changed_is_compared_again() -> None:
    judged = ("--accept", "judge.py:judge", "--state", "s")
    run(*ARGUMENTS, *judged)
    assert calls() == 6
    np.savez("samples/3.npz", **random_samples(CLASSIFIER, 9, dims={"batch": 3})[8])
    np.savez("samples/6.npz", **random_samples(CLASSIFIER, 9, dims={"batch": 2})[7])
    resumed = run(*ARGUMENTS, *judged)
    assert calls() == 2
    assert resumed.output == run(*ARGUMENTS, "--accept", "judge.py:judge").output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: onnx.save(onnxamp.convert_model(CLASSIFIER, "O1"), "low.onnx"), "the result changed since then"),
        (lambda: Path("judge.py").write_text(JUDGE + "# other"), "the function that accepts changed since then"),
        (
            lambda: np.savez("samples/0.npz", **random_samples(CLASSIFIER, 1, dims={"batch": 5})[0]),
            "the first input changed since then",
        ),
    ],
    ids=["model", "function", "input"],
)
def test_the_state_of_another_comparison_is_refused(change: Callable[[], object], said: str) -> None:
    arguments = ("diff", CLASSIFIER, "low.onnx", "--inputs", "samples", "--accept", "judge.py:judge", "--state", "s")
    assert run(*arguments).exit_code == 0
    kept = Path("s").read_bytes()
    change()
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert f"'s' belongs to another comparison: {said}. Delete it" in " ".join(refused.output.split())
    assert Path("s").read_bytes() == kept


def test_a_state_never_takes_the_place_of_a_model() -> None:
    before = Path("low.onnx").read_bytes()
    for command_line in (("diff", CLASSIFIER, "low.onnx"), ("check", "low.onnx")):
        assert run(*command_line, "--state", "low.onnx").exit_code == 2
    assert Path("low.onnx").read_bytes() == before


# --- checks -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_check_whose_process_is_killed_goes_on() -> None:
    broken = onnxamp.convert_model(model("decoder"), "O3", hazards=False)
    onnx.save(broken, "broken.onnx")
    code = (
        "import os, onnxamp\n"
        "def hear(done, total):\n"
        "    if done > total // 2: os.kill(os.getpid(), 9)\n"
        "onnxamp.check_run('broken.onnx', count=4, provider='cpu', state='s', progress=hear)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9
    assert samples_in(Path("s")) == 2
    heard: list[float] = []
    report = onnxamp.check_run(
        "broken.onnx", count=4, provider="cpu", state="s", progress=lambda done, total: heard.append(done / total)
    )
    assert heard[0] > 1 / 2
    assert report == onnxamp.check_run("broken.onnx", count=4, provider="cpu")
    assert report.first_bad is not None
    again = onnxamp.check_run("broken.onnx", count=4, provider="cpu", state="s", progress=stopping(0))
    assert again == report


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_workers_go_on_with_a_check_of_one_process() -> None:
    broken = onnxamp.convert_model(model("recurrent"), "O3", hazards=False)
    with pytest.raises(KeyboardInterrupt):
        onnxamp.check_run(broken, count=7, provider="cpu", state="s", progress=stopping(3))
    steps: list[int] = []
    report = onnxamp.check_run(
        broken, count=7, provider="cpu", state="s", jobs=2, progress=lambda done, _: steps.append(done)
    )
    assert steps == [4, 5, 6, 7]
    assert report == onnxamp.check_run(broken, count=7, provider="cpu")


def test_what_stops_at_a_fault_keeps_nothing() -> None:
    with pytest.raises(onnxamp.ArgumentError, match="leave out state"):
        onnxamp.check_run(CLASSIFIER, provider="cpu", stop=True, state="s")


@pytest.mark.slow
def test_a_check_of_what_runs_in_float16_everywhere() -> None:
    """It has a state of its own, and the conversions that may cure it have none."""
    arguments = ("check", model("decoder"), "--target", "webgpu", "--provider", "cpu", "--format", "json")
    wanted = run(*arguments)
    for _ in range(2):
        kept = run(*arguments, "--state", "s")
        assert report_of(kept) == report_of(wanted)


# --- ranges -----------------------------------------------------------------------------------------------------


OVERFLOWS = """(float[1,2] X) => (float[1,2] Y) <float[2,2] w = {300, 1, 2, 300}, float[2,2] v = {0.001, 0, 0, 0.001}> {
    [up] H = MatMul (X, w)
    [again] K = MatMul (H, w)
    [down] Y = MatMul (K, v)
}"""


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [None, 2], ids=["here", "workers"])
@pytest.mark.usefixtures("forked")
def test_ranges_are_measured_once(jobs: int | None) -> None:
    """Of all samples, however often the tuning is interrupted."""
    model, samples = parse(OVERFLOWS), [{"X": np.full((1, 2), number + 1, np.float32)} for number in range(4)]
    options: dict[str, Any] = {"samples": samples, "provider": "cpu", "allow_slower": True}
    wanted = onnxamp.tune_model(model, 1e-2, **options)

    def interrupt(text: str, *_: int) -> None:
        if text not in ("measuring sensitivities", "measuring ranges"):
            raise KeyboardInterrupt(text)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            onnxamp.tune_model(model, 1e-2, **options, state="s", jobs=jobs, progress=interrupt)
        assert Path("s").read_text().count('"key": "ranges ') == 4
    found = onnxamp.tune_model(model, 1e-2, **options, state="s", jobs=jobs)
    assert found[0] == wanted[0]
    assert found[1].candidates == wanted[1].candidates
    assert (found[1].runs, found[1].recalled) == (0, 4)
    assert found[1].exponents == wanted[1].exponents
    assert wanted[1].exponents is not None


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [None, 2], ids=["here", "workers"])
@pytest.mark.usefixtures("forked")
def test_a_converted_model_is_judged_once_on_each_sample(jobs: int | None) -> None:
    """What is killed while it judges the result of a tuning on many samples goes on with the next."""
    samples = random_samples(model("recurrent"), 20)
    options: dict[str, Any] = {"samples": samples, "provider": "cpu"}
    wanted = onnxamp.tune_model(model("recurrent"), 5e-4, **options)
    assert onnxamp.tune_model(model("recurrent"), 5e-4, **options, state="s", jobs=jobs) == wanted
    lines = Path("s").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if '"key": "judged ' in line)
    judged = [line for line in lines if '"key": "judged ' in line]
    assert len(judged) % 20 == 0
    Path("s").write_text("".join(lines[: first + 7]))  # as a process that was killed then leaves it
    made, tuned = onnxamp.tune_model(model("recurrent"), 5e-4, **options, state="s", jobs=jobs)
    assert (made, tuned.candidates, tuned.error) == (wanted[0], wanted[1].candidates, wanted[1].error)
    again = [line for line in Path("s").read_text().splitlines(keepends=True) if '"key": "judged ' in line]
    assert sorted(again) == sorted(judged)
