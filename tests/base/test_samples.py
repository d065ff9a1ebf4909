"""Samples that several processes share: the report is that of one, and a sample that kills fails alone."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import MODELS, run
from states import samples_in

import onnxamp
from onnxamp._base.processes import Processes
from onnxamp._model.model import Model
from onnxamp._numerics.comparison import Comparison
from onnxamp._report.formats import diff_json
from onnxamp._runtime.inputs.samples import Samples, random_samples
from onnxamp._runtime.run import Run

pytestmark = pytest.mark.usefixtures("forked")


def model(stem: str) -> Path:
    return next(path for path in MODELS if path.stem == stem)


@pytest.fixture
def three() -> Iterator[Processes]:
    with closing(Processes(3, 1)) as workers:
        yield workers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Samples of the classifier in files, and the folder that they are in."""
    (tmp_path / "samples").mkdir()
    monkeypatch.chdir(tmp_path)
    for number, sample in enumerate(random_samples(model("classifier"), 6, dims={"batch": 2})):
        np.savez(tmp_path / "samples" / f"{number}.npz", **sample)
    return tmp_path


class Fatal(dict[str, Any]):
    """A sample that ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "layers"), [("encoder", True), ("detector", None), ("recurrent", None)])
def test_the_comparison_is_that_of_one_process(stem: str, layers: bool | None, three: Processes) -> None:
    """Of the detector, outputs miss their limits, so that layers are compared, too."""
    original, low = Model.read(model(stem)), Model.of(onnxamp.convert_model(model(stem), "O3", hazards=False))
    one = Comparison.of(original, Run(inputs=random_samples(original, 7), provider="cpu"))
    wanted = diff_json(one.compare(low, layers=layers))
    assert diff_json(replace(one, run=replace(one.run, workers=three)).compare(low, layers=layers)) == wanted


def test_workers_keep_the_reference_for_the_next_result(three: Processes) -> None:
    original = Model.read(model("classifier"))
    comparison = Comparison.of(original, Run(inputs=random_samples(original, 4), provider="cpu", workers=three))
    for level in ("O1", "O2"):
        low = onnxamp.convert_model(model("classifier"), level)
        wanted = onnxamp.diff_models(model("classifier"), low, random_samples(original, 4), provider="cpu")
        assert diff_json(comparison.compare(Model.of(low), layers=None)) == diff_json(wanted)


def test_a_model_in_memory_whose_weights_are_in_a_file(three: Processes, tmp_path: Path) -> None:
    onnx.save(onnx.load(model("encoder")), tmp_path / "e.onnx", save_as_external_data=True, location="w")
    read = Model.read(tmp_path / "e.onnx")
    memory = Model(read.proto, read.folder)
    comparison = Comparison.of(memory, Run(inputs=random_samples(memory, 3), provider="cpu", workers=three))
    assert comparison.compare(read, layers=False).passed


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["decoder", "recurrent"])
def test_the_check_is_that_of_one_process(stem: str) -> None:
    broken = onnxamp.convert_model(model(stem), "O3", hazards=False)
    runs = [onnxamp.check_run(broken, count=5, provider="cpu", jobs=jobs) for jobs in (None, 2)]
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.webgpu
def test_engines_are_those_of_the_workers() -> None:
    """Each opens the device for itself; what it left to the CPU is told, whoever ran it."""
    text = """
        <ir_version: 9, opset_import: ["": 17]>
        mixed (float16[2, 2] x) => (float16 y) {
          s = Mul (x, x) f = Cast <to = 1> (s) d = Det (f) y = Cast <to = 10> (d)
        }"""
    mixed, given = onnx.parser.parse_model(text), [{"x": np.full((2, 2), n, np.float16)} for n in (1, 2, 300)]
    runs = [onnxamp.check_run(mixed, given, provider="webgpu", jobs=jobs) for jobs in (None, 2)]
    assert runs[0] == runs[1]
    assert runs[0].first_bad is not None
    assert runs[0].first_bad.alarm.startswith("Inf in 4 of 12 elements")
    diffs = [onnxamp.diff_models(mixed, mixed, given[:2], provider="webgpu", jobs=jobs) for jobs in (None, 2)]
    assert diff_json(diffs[0]) == diff_json(diffs[1])
    assert any("nodes to the CPU: Det (1)" in note for note in diffs[0].notes)


@pytest.mark.slow
def test_the_check_stops_where_one_process_does() -> None:
    """With a small budget, so that the model runs in parts: what lies behind the first fault is not measured."""
    broken = onnxamp.convert_model(model("decoder"), "O3", hazards=False)
    given: dict[str, Any] = {"count": 2, "provider": "cpu", "budget": 1 << 15}
    one, shared = (onnxamp.check_run(broken, **given, jobs=jobs, stop=True) for jobs in (None, 2))
    assert one == shared
    assert one.first_bad is not None
    assert len(one.values) < len(onnxamp.check_run(broken, **given).values)
    fine = [onnxamp.check_run(model("classifier"), **given, jobs=jobs, stop=True) for jobs in (None, 2)]
    assert fine[0] == fine[1]
    assert fine[0].first_bad is None


@pytest.mark.slow
def test_the_tuning_is_that_of_one_process(folder: Path) -> None:
    how: dict[str, Any] = {"samples": "samples", "provider": "cpu", "allow_slower": True}
    wanted, one = onnxamp.tune_model(model("classifier"), 5e-4, **how)
    made, tuned = onnxamp.tune_model(model("classifier"), 5e-4, **how, jobs=2)
    assert tuned == one
    assert one.runs == one.samples > 1
    assert 0 < one.error < 5e-4
    assert made == wanted


@pytest.mark.slow
def test_ranges_are_those_of_one_process(folder: Path) -> None:
    """With exponents, which follow from the ranges of all samples."""
    found = []
    for options in ([], ["--jobs", "2"]):
        command = ["convert", model("decoder"), "-o", "low.onnx", "--level", "O3", "--rescale", "--samples", "5"]
        assert run(*command, "--save-plan", "plan.json", *options).exit_code == 0
        found.append((Path("low.onnx").read_bytes(), Path("plan.json").read_text()))
    assert found[0] == found[1]
    given = random_samples(model("decoder"), 5)
    onnxamp.convert_file(model("decoder"), "low.onnx", "O3", rescale=True, samples=list(given), jobs=2, validate=False)
    assert Path("low.onnx").read_bytes() == found[0][0]
    assert json.loads(found[0][1])["options"]["rescaling"]["made_up"]


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("rescale", [True, None])
def test_a_sample_that_kills_ends_a_tuning_with_a_sentence(folder: Path, rescale: bool | None) -> None:
    readers = list(onnxamp.load_samples("samples").readers)
    bad, what = Samples("six", [*readers[:4], Fatal, readers[5]]), "The ranges of sample 5" if rescale else "Sample 5"
    options: dict[str, Any] = {"provider": "cpu", "jobs": 2, "rescale": rescale, "allow_slower": True}
    with pytest.raises(onnxamp.RuntimeFailure, match=f"{what}.* cannot be measured. The worker process ended with"):
        onnxamp.tune_model(model("classifier"), 5e-4, samples=bad, **options)


@pytest.mark.slow
def test_a_sample_that_kills_fails_alone(folder: Path, three: Processes) -> None:
    """The others are compared, and the comparison fails with a sentence on it."""
    original = Model.read(model("classifier"))
    good = onnxamp.load_samples("samples")
    bad = Samples("six", [Fatal if number == 4 else reader for number, reader in enumerate(good.readers)])
    comparison = Comparison.of(original, Run(inputs=bad, provider="cpu", workers=three))
    report = comparison.compare(Model.of(onnxamp.convert_model(model("classifier"))), layers=False)
    assert report.failure is not None
    assert report.failure.startswith("Sample 4 could not be compared. The worker process ended with exit code 9")
    alone = Samples("five", [reader for number, reader in enumerate(good.readers) if number != 4])
    wanted = onnxamp.diff_models(model("classifier"), onnxamp.convert_model(model("classifier")), alone, provider="cpu")
    assert report.outputs == wanted.outputs


def test_a_sample_that_does_not_fit_is_the_error_of_one_process(folder: Path) -> None:
    np.savez("samples/3.npz", wrong=np.zeros(1, np.float32))
    messages = []
    for jobs in (None, 2):
        with pytest.raises(onnxamp.ArgumentError) as caught:
            onnxamp.diff_models(model("classifier"), model("classifier"), "samples", provider="cpu", jobs=jobs)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_a_tuning_goes_on_where_it_stopped(folder: Path) -> None:
    """What is done before an earlier sample is not measured again."""
    state, steps = Path("state.json"), list[int]()

    def told(text: str, done: int, total: int) -> None:
        if text == "measuring sensitivities":
            steps.append(done)
            if len(steps) == 3:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"samples": "samples", "provider": "cpu", "rounding": "nearest", "allow_slower": True}
    with pytest.raises(KeyboardInterrupt):
        onnxamp.tune_model(model("classifier"), 5e-4, **options, state=state, jobs=2, progress=told)
    assert samples_in(state) == 3
    made, tuned = onnxamp.tune_model(model("classifier"), 5e-4, **options, state=state, jobs=2, progress=told)
    assert steps == [1, 2, 3, 4, 5, 6]
    whole, one = onnxamp.tune_model(model("classifier"), 5e-4, **options)
    assert (made, tuned.candidates, tuned.recalled) == (whole, one.candidates, 3)


# --- samples that come out of an iterator ----------------------------------------------------------------------------


class Loader:
    """Yields samples of the classifier, and counts them."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for sample in random_samples(model("classifier"), self.count):
            self.taken += 1
            yield (*sample.values(), np.zeros(1))

    def __len__(self) -> int:
        return self.count


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [None, 2])
def test_no_more_samples_are_taken_than_are_needed(jobs: int | None) -> None:
    """And none is left out, however many there are."""
    loader, ahead = Loader(150), list[int]()
    low = onnxamp.convert_model(model("classifier"))

    def told(done: int, total: int) -> None:
        share = 1 if jobs else 1000
        assert total == loader.count * share
        ahead.append(loader.taken - done // share)

    found = onnxamp.diff_models(model("classifier"), low, loader, provider="cpu", jobs=jobs, progress=told)
    assert max(ahead) <= (2 if jobs is None else 16 * jobs + 1)
    assert (found.samples, found.inputs) == (150, "150 samples of a Loader, without the last 1 array of each")
    wanted = onnxamp.diff_models(model("classifier"), low, count=150, provider="cpu")
    assert found.outputs == wanted.outputs


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [None, 2])
def test_what_an_iterator_yields_can_be_needed_again(jobs: int | None) -> None:
    """For layers of a comparison that misses its limits, and for the passes of a tuning."""
    given = list(random_samples(model("classifier"), 6))
    low = onnxamp.convert_model(model("classifier"))
    limits = onnxamp.make_limits({"rel_l2": 1e-6})
    found, wanted = (
        onnxamp.diff_models(model("classifier"), low, samples, limits=limits, provider="cpu", jobs=jobs)
        for samples in (iter(given), given)
    )
    assert found.layers == wanted.layers != ()
    assert found.outputs == wanted.outputs
    results = [
        onnxamp.tune_model(model("classifier"), 5e-4, samples=samples, provider="cpu", jobs=jobs, rescale=rescale)
        for samples, rescale in ((iter(given), None), (given, None))
    ]
    assert results[0][0] == results[1][0]
    assert replace(results[0][1], inputs="") == replace(results[1][1], inputs="")
    assert results[0][1].inputs == "6 samples of a list_iterator"


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [None, 2])
def test_a_check_lets_go_of_what_has_run(jobs: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take more memory than is allowed, so that some would be in files."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    seen = list[int]()

    plain = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) {y = Relu(x)}'
    )

    def large() -> Iterator[dict[str, Any]]:
        for number in range(80):
            seen.append(len(list(folder.glob("onnxamp-*/*.sample"))))
            yield {"x": np.full(1 << 18, number, np.float32)}

    report = onnxamp.check_run(plain, large(), provider="cpu", jobs=jobs)
    assert (report.samples, report.values[0].measured.elements) == (80, 80 << 18)
    assert max(seen) == 0
    assert not list(folder.glob("onnxamp-*"))


@pytest.mark.slow
def test_commands_share_samples(folder: Path) -> None:
    for options in ([], ["--jobs", "2"]):
        diff = run("diff", model("classifier"), model("classifier"), "--inputs", "samples", *options)
        assert (diff.exit_code, "6 samples" in diff.output) == (0, True)
        assert run("check", model("classifier"), "--inputs", "samples", *options).exit_code == 0
        tune = ["tune", model("classifier"), "-o", "low.onnx", "--inputs", "samples", "--tolerance", "1e-2"]
        assert run(*tune, *options).exit_code == 0
