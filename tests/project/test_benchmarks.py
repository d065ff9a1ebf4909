"""The benchmark of conversions: the whole of its machinery on small models, and what it makes of figures."""

import json
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from repository import ROOT

import onnxamp

FOLDER = ROOT / "benchmarks"
CLASSIFIER = ROOT / "models" / "classifier.onnx"


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.slow
def test_small_models_with_what_this_python_has(tmp_path: Path) -> None:
    """The one with a black list, and the one with a data file: each tool and each verdict is a process of its own."""
    out = tmp_path / "results.json"
    command = [sys.executable, str(FOLDER / "convert.py"), "--quick", "--check", "--cache", str(tmp_path)]
    done = subprocess.run([*command, "--out", str(out), "--models", "stack-5k", "large"], capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    facts = json.loads(out.read_text())
    assert [row["model"] for row in facts["models"]] == ["stack-5k", "large"]
    for row in facts["models"]:
        ours = row["tools"]["onnxamp"]
        assert (ours["loads"], ours["verdict"]) == (True, "within limits")
        assert ours["error"] < 1e-2
        assert ours["bytes"] < 0.6 * row["bytes"]
        assert "times_onnxamp" in row["tools"]["onnxruntime"]
    assert "cp" in facts["models"][-1]["tools"]
    assert facts["versions"]["onnxamp"]["onnx"]


@pytest.mark.slow
def test_every_small_model_is_converted_well(tmp_path: Path) -> None:
    """What the processes above do, in this one."""
    import subjects

    judge = runpy.run_path(str(FOLDER / "judge.py"))["judge"]  # the tests have a module of that name
    assert [spec.name for spec in subjects.QUICK] == [spec.name for spec in subjects.FULL]
    for spec in subjects.QUICK:
        source, target = spec.file(tmp_path), tmp_path / "low.onnx"
        onnxamp.convert_file(source, target, validate=False)
        verdict = judge(source, target)
        assert (verdict["loads"], verdict["verdict"]) == (True, "within limits"), spec.name
        assert verdict["error"] < 1e-2
        assert verdict["bytes"] < 0.6 * sum(path.stat().st_size for path in source.parent.iterdir())


def results(**changes: Any) -> dict[str, Any]:
    """Figures that keep every promise, but for the changes: (model, tool, figure) joined by "__"."""
    good = {"seconds": 1.0, "seconds_spread": [0.9, 1.1], "process": 2.0, "runs": 3, "peak": 2e8, "anonymous": 1e8,
            "casts_added": 3, "bytes": 5e7, "loads": True, "error": 1e-3, "verdict": "within limits"}  # fmt: skip
    peer = good | {"seconds": 6.0, "times_onnxamp": 6.0, "casts_added": 4}
    names = ("bert", "stack-5k", "stack-50k", "large")
    models = [
        {
            "model": name,
            "title": f"<{name}>",
            "nodes": 10,
            "bytes": 1e8,
            "tools": {"onnxamp": dict(good), "peer": dict(peer)},
        }
        for name in names
    ]
    models[-1]["tools"]["cp"] = {
        "seconds": 1.5,
        "seconds_spread": [1.5, 1.5],
        "process": 1.5,
        "runs": 3,
        "times_onnxamp": 1.5,
    }
    for key, value in changes.items():
        model, tool, figure = key.replace("_50k", "-50k").split("__")
        models[names.index(model)]["tools"][tool][figure] = value
    tools = {name: {"title": f"the {name}"} for name in ("onnxamp", "peer", "gone")}
    machine = {"cores": 2, "processor": "a processor", "memory": 2**33}
    return {"models": models, "tools": tools, "machine": machine, "limit": 120.0, "not_available": {"gone": "no wheel"}}


def test_promises_that_are_kept() -> None:
    import checks

    assert checks.broken(results(), whole=True) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bert__peer__seconds": 4.9}, "4.9 times as long"),
        ({"bert__onnxamp__peak": 2.6e8}, "2.60 times the file"),
        ({"stack_50k__onnxamp__seconds": 12.1}, "12.1 times as long"),
        ({"stack_50k__peer__seconds": 0.9}, "peer is faster"),
        ({"stack_50k__peer__casts_added": 2}, "fewer Casts"),
        ({"large__onnxamp__seconds": 1.6}, "1.07 times as long as cp"),
        ({"large__onnxamp__anonymous": 513e6}, "513 MB of anonymous memory"),
        ({"large__onnxamp__failure": "it broke"}, "no result: it broke"),
        ({"bert__onnxamp__loads": False}, "does not load"),
        ({"bert__onnxamp__verdict": "NaN"}, "not within its limits: NaN"),
    ],
)
def test_promises_that_are_broken(change: dict[str, Any], text: str) -> None:
    import checks

    found = checks.broken(results(**change), whole=True)
    assert any(text in sentence for sentence in found), found


def test_a_peer_without_a_result_breaks_no_promise() -> None:
    import checks

    facts = results()
    for row in facts["models"]:
        row["tools"]["peer"] = {"failure": "stopped after 120 s"}
    assert checks.broken(facts, whole=True) == []


def test_the_table_and_the_picture_show_all_of_it() -> None:
    import picture

    facts = results(bert__peer__loads=False)
    facts["models"][1]["tools"]["peer"] = {"failure": "stopped after 120 s"}
    facts["models"][2]["tools"]["peer"] = {"failure": "ValueError: <too large>"}
    table, drawn = picture.table(facts), picture.draw(facts)
    ET.fromstring(drawn)
    assert "bert       peer 6.0" in table
    for text in ("stopped after 120 s", "does not load"):
        assert text in table
        assert text in drawn
    assert "ValueError: &lt;too large&gt;" in drawn
    assert "&lt;bert&gt;: 10 nodes, 100 MB" in drawn
    assert "gone is not available: no wheel" in table
    assert "the gone is not available: no wheel" in drawn
    assert "×6.0" in drawn


def test_what_takes_too_long_is_stopped() -> None:
    import measure

    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    found = measure.watched(command, limit=0.2, memory=10**12, environment={})
    assert found["failure"] == "stopped after 0.2 s"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_is_seen_and_limited() -> None:
    import measure

    code = "import time, json; kept = bytearray(200_000_000); time.sleep({}); print(json.dumps({{'seconds': 1}}))"
    found = measure.watched([sys.executable, "-c", code.format(0.3)], limit=60, memory=10**12, environment={})
    assert found["seconds"] == 1
    assert 200e6 < found["anonymous"] < 300e6
    found = measure.watched([sys.executable, "-c", code.format(600)], limit=60, memory=10**8, environment={})
    assert found["failure"].startswith("stopped at 0.")


def test_the_last_words_of_a_failure_are_kept() -> None:
    import measure

    found = measure.watched([sys.executable, "-c", "raise ValueError('no')"], limit=60, memory=10**12, environment={})
    assert found["failure"] == "ValueError: no"
    assert found["process"] > 0


def test_kept_results_are_drawn() -> None:
    import picture

    facts = json.loads((FOLDER / "results" / "convert.json").read_text(encoding="utf-8"))
    assert (FOLDER.parent / "docs" / "benchmark.svg").read_text(encoding="utf-8") == picture.draw(facts)


def test_the_scoreboard_shows_the_kept_results() -> None:
    import scoreboard

    facts = json.loads(scoreboard.RESULTS.read_text(encoding="utf-8"))
    assert scoreboard.PAGE.read_text(encoding="utf-8") == scoreboard.page(facts)
    assert [row["model"] for row in facts["models"]] == list(scoreboard.subjects())


def test_the_page_of_the_verdict_shows_the_kept_results() -> None:
    import verdict
    import verdict_page
    import verdict_sums

    facts = json.loads(verdict.RESULTS.read_text(encoding="utf-8"))
    assert facts["summary"] == json.loads(json.dumps(verdict_sums.summary(facts["rows"])))
    assert verdict_page.tables(facts) in verdict_page.PAGE.read_text(encoding="utf-8")


def test_a_planted_network_overflows_on_no_random_input_but_on_a_hard_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import planted

    monkeypatch.setattr(planted, "INPUTS", 50)
    monkeypatch.setattr(planted, "STARTS", 4)

    name, make = next(made for made in planted.planted_networks(tmp_path) if made[0].startswith("planted bilinear"))
    found = make()
    assert found.name == name
    assert found.random < planted.LARGEST < planted.OVERFLOW < found.hardest
    low = onnxamp.convert_model(found.path)
    assert onnxamp.diff_models(found.path, low, provider="cpu").passed
    assert not onnxamp.diff_models(found.path, low, [found.worst], provider="cpu").passed


def test_a_network_planted_by_its_error_is_right_on_random_inputs_and_wrong_on_another(tmp_path: Path) -> None:
    import planted_errors

    found = planted_errors.planted(planted_errors.direction, 1, tmp_path / "direction.onnx")
    assert found is not None
    assert found.random <= planted_errors.RIGHT < planted_errors.WRONG < found.hardest


def test_the_page_of_the_verdict_shows_the_kept_results_of_planted_errors() -> None:
    import planted_errors

    facts = json.loads(planted_errors.RESULTS.read_text(encoding="utf-8"))
    assert planted_errors.table(facts["rows"]) in planted_errors.PAGE.read_text(encoding="utf-8")


def test_what_no_sample_needs_in_float32_is_a_false_alarm(tmp_path: Path) -> None:
    import false_alarms

    model = FOLDER.parent / "models" / "decoder.onnx"
    onnx.save(onnxamp.convert_model(model, keep_high=["decoder/0/.*"]), tmp_path / "low.onnx")
    found = false_alarms.false_alarms(model, tmp_path / "low.onnx", 0.1, reason="stress")
    assert found["hazards"][0]["hazard"] == "position"
    kept = found["validation"]
    assert kept["reason"] == "stress"
    assert not kept["fails"]
    assert 0.1 < kept["share"] < found["low"] < 1


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("Output 'y': relative L2 error is 0.013; the limit is 0.01.", "samples"),
        ("With N=2048: Output 'y': relative L2 error is 0.016; the limit is 0.01.", "coverage"),
        ("With 2 inputs made to be hard: Output 'y': Inf where the reference is finite.", "stress"),
    ],
)
def test_failures_are_told_apart(failure: str, reason: str) -> None:
    import false_alarms

    assert false_alarms.reason_of(failure) == reason


def with_two_hazards() -> onnx.ModelProto:
    """A constant that is infinite in float16, and a guard against zero, which no random sample needs."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        two_hazards (float[4, 16] x) => (float[4, 16] y, float[4, 16] z)
        <float large = {1e6}, float tiny = {1e-9}, int64[1] last = {-1}> {
            m = MatMul(x, w)
            r = Relu(m)
            t = MatMul(r, w)
            raised = Mul(t, large)
            y = Div(raised, large)
            square = Mul(t, t)
            sum = ReduceSum(square, last)
            guarded = Add(sum, tiny)
            z = Div(t, guarded)
        }"""
    )
    weight = np.random.default_rng(0).standard_normal((16, 16), np.float32) / 4
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model


def test_hazards_that_samples_need_are_told_from_others(tmp_path: Path) -> None:
    import false_alarms

    onnx.save(with_two_hazards(), tmp_path / "model.onnx")
    onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx")
    found = false_alarms.false_alarms(tmp_path / "model.onnx", tmp_path / "low.onnx", 0.0)
    needed = {row["hazard"]: (row["fails"], row["samples"]) for row in found["hazards"] if row["share"] > 0}
    assert needed["constant range"] == (True, 1)
    assert needed["epsilon"] == (False, 1)


def test_samples_on_which_the_result_fails_as_well_say_nothing(tmp_path: Path) -> None:
    from false_alarms import Trials, Variant

    model = with_two_hazards()
    onnx.save(model, tmp_path / "model.onnx")
    good, bad = (onnxamp.convert_model(model, force_low=low, strict_options=False) for low in ([], ["raised", "y"]))
    trials = Trials(tmp_path / "model.onnx")
    assert trials.on(Variant(bad, {}, good), 0.0) == {"fails": True, "samples": 1}
    assert trials.on(Variant(bad, {}, bad), 0.0) == {"fails": False, "samples": 1}


def test_a_corpus_is_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import corpora

    monkeypatch.setattr(corpora, "ALARM_SECONDS", 0.0)
    onnx.save(with_two_hazards(), tmp_path / "offset.onnx")
    (tmp_path / "offset.json").write_text("[]")
    np.savez(tmp_path / "offset.npz", x=np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16))
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    (tmp_path / "broken.json").write_text('["--level", "O3"]')
    corpus = next(one for one in corpora.corpora(None, tmp_path) if one.name == "cases")
    said = list[str]()
    row = corpora.measured_corpus(corpus, tmp_path, said.append)
    assert [json.loads(line)["model"] for line in said] == ["broken", "offset"]
    assert (row["models"], row["compared"]) == (2, 1)
    assert row["verdicts"] == {"offset": "right"}
    assert row["values"] == row["proven"] + sum(row["headroom"])
    assert (row["false alarms"]["kept"], row["false alarms"]["needed"]) == (3, 1)
    assert 0 < row["false alarms"]["of all traffic"] < 1


def test_values_are_counted_by_headroom() -> None:
    import verdict_sums

    assert verdict_sums.by_headroom([0.7, 0.2, 0.02, 0.0001, 0.0], 6) == [1, 1, 1, 1, 2]
    assert verdict_sums.by_headroom([0.7, 0.2], 1) == [0, 0, 0, 1, 0]


def test_bounds_of_a_decoder_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import large_bounds
    import tune

    monkeypatch.setattr(large_bounds, "LARGE", tune.SMALL)
    original, result = large_bounds.large_bounds(tmp_path)
    for row in (original, result):
        assert "failure" not in row
        assert 0 < row["proven"] <= row["values"]
    assert original["bytes"] > result["bytes"] > 1000


def test_the_scoreboard_gives_each_failure_its_reason() -> None:
    import scoreboard

    good = {"loads": True, "verdict": "within limits", "error": 1e-3, "casts_added": 2, "cpu": 1.0, "bytes": 50}
    cells = {
        "onnxamp": good,
        "stopped": {"failure": "stopped after 300 s"},
        "closed": good | {"loads": False, "verdict": "type mismatch"},
        "wrong": good | {"verdict": "y: relative error 0.5"},
        "kept": good | {"error": 0.0, "bytes": 100},
    }
    row = {"model": "m", "title": "a model", "from": "a wheel", "bytes": 100, "tools": cells}
    text = scoreboard.page({
        "tools": {name: {"title": f"the {name}"} for name in cells}, "models": [row], "versions": {}, "commit": "c0",
        "when": "2026-01-02T03:04", "machine": {"processor": "processor", "cores": 2},
    })  # fmt: skip
    assert "| [✔ 0.001, +2 Casts, 1.0 s, 50%](#m) | [✘ no result](#m) | [✘ does not open](#m) | [✘ wrong, " in text
    assert (
        "* the stopped: stopped after 300 s\n* the closed: type mismatch\n* the wrong: y: relative error 0.5\n" in text
    )
    assert "| [= stays in float32, 1.0 s](#m) |" in text
    assert "Converted and right, of 1: the onnxamp 1, the stopped 0, the closed 0, the wrong 0, the kept 0." in text


def test_the_readme_shows_the_kept_results() -> None:
    import comparison

    facts = json.loads((FOLDER / "results" / "convert.json").read_text(encoding="utf-8"))
    _, shown, _ = comparison.split((FOLDER.parent / "README.md").read_text(encoding="utf-8"))
    assert shown == comparison.comparison(facts)


def test_some_tools_are_measured_anew_among_the_others() -> None:
    import convert

    kept, now = results(), results(bert__onnxamp__seconds=2.0)
    kept |= {"versions": {"peer": 1, "onnxamp": 1}, "runs": [{"tool": "peer"}, {"tool": "onnxamp", "old": True}]}
    now |= {"versions": {"onnxamp": 2}, "runs": [{"tool": "onnxamp"}]}
    now["tools"] = {"onnxamp": {"title": "the onnxamp"}}
    for row in now["models"]:
        row["tools"] = {"onnxamp": row["tools"]["onnxamp"]}
    made = convert.updated(kept, now)
    bert = made["models"][0]["tools"]
    assert (bert["onnxamp"]["seconds"], bert["peer"]["times_onnxamp"]) == (2.0, 3.0)
    assert made["versions"] == {"peer": 1, "onnxamp": 2}
    assert made["runs"] == [{"tool": "peer"}, {"tool": "onnxamp"}]
    with pytest.raises(SystemExit, match="measure all of them here"):
        convert.updated(kept | {"machine": {"processor": "another"}}, now)


@pytest.mark.slow
def test_a_small_decoder_is_tuned(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(FOLDER / "tune.py"),
        "--quick",
        "--check",
        "--tolerance",
        "1e-2",
        "--cache",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)
    assert "failure" not in run
    assert run["low"] > 0.3
    assert run["peak"] >= run["anonymous"] > 0


def test_wider_tolerances_are_compared() -> None:
    import frontier

    samples = onnxamp.random_samples(CLASSIFIER, 1)
    rows = [frontier.tuned("classifier", onnx.load(CLASSIFIER), samples, tolerance, "T4") for tolerance in (1e-9, 1)]
    assert (frontier.is_monotone(rows), frontier.summary(rows)["models"]) == (True, 1)
    slower = [rows[0], {**rows[1], "time": rows[0]["time"] + 1, "held": False}]
    told = frontier.summary(slower)
    assert (told["not monotone"], told["missed"]) == (["classifier on T4"], ["classifier on T4 at 1"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "encoder-decoder", "vae-decoder", "mel front end"])
def test_overflow_is_removed(name: str) -> None:
    import rescale

    facts = rescale.facts_of(name)
    assert rescale.broken(facts) == []
    assert facts["plain"]["error"] is None
    assert facts["islands"]["device"] is None  # islands do not help where float32 is not honored
    assert facts["rescaled"]["device"] <= 3 * facts["small"]["error"]
    assert facts["rescaled"]["estimate_us"] < facts["islands"]["estimate_us"]
    picture = ET.fromstring(rescale.draw([facts]))
    kinds = [circle.get("class") for circle in picture.iter("{http://www.w3.org/2000/svg}circle")]
    assert {"before", "after"} == set(kinds)


def test_broken_promises_of_rescaling_are_named() -> None:
    import rescale

    seen = {"error": None}
    worse = {"casts": 9, "float32": ["n"], "error": 4e-3, "device": None, "webgpu": seen, "cuda": seen}
    facts = {"model": "m", "bits": False, "rescaled": worse, "islands": {"casts": 9}, "small": {"error": 1e-3}}
    assert len(rescale.broken(facts)) == 7


def test_what_rescaling_could_not_measure_is_named() -> None:
    """A conversion that takes too long takes the runs of that way along, and nothing else."""
    import rescale

    def by(folder: Path, name: str, cell: str) -> dict[str, Any]:
        return {"failure": "stopped after 9 s"} if cell == "convert webgpu islands" else {cell: folder.name and name}

    row = rescale.facts_of("decoder", ["cuda", "webgpu"], by, jobs=2)
    assert row["missing"] == {
        "convert webgpu islands": "stopped after 9 s", "run webgpu islands": "needs 'convert webgpu islands'",
    }  # fmt: skip
    assert {row[f"run {place}"] for place in ("cuda rescaled", "cuda float32", "webgpu small")} == {"decoder"}
    assert len(rescale.broken(row)) == 2
    late = rescale.facts_of("decoder", by=by, limit=-1)
    assert late["missing"]["make"] == "not started: -1 s were over"
    assert set(late["missing"]) >= {"convert cuda small", "bits", "emulated plain"}


def test_a_cell_of_rescaling_is_stopped(tmp_path: Path) -> None:
    """Results are written although nothing was measured."""
    import rescale

    out = tmp_path / "results.json"
    assert rescale.main(["decoder", "mel front end", "--cell", "0", "--jobs", "2", "--out", str(out), "--check"]) == 1
    row, _ = json.loads(out.read_text())["models"]
    assert row["missing"]["make"] == "stopped after 0 s"
    assert row["missing"]["bits"] == "needs 'make'"


def test_models_of_mixed_sizes_are_the_same_again(tmp_path: Path) -> None:
    import cluster

    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        cluster.make_models(folder, 3)
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == ["0000.onnx", "0001.onnx", "0002.onnx"]
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)
    assert onnxamp.convert_model(folders[0] / names[0]) != onnx.load(folders[0] / names[0])


def test_simulated_farms_obey_the_formula() -> None:
    import farm as machines

    farm = machines.Farm(2, workers=2, network=100.0, storage=100.0, latency=0.0, dispatch=0.0, start=5.0)
    assert farm.rate == 25.0, "what all read from is shared by four workers"
    even = [machines.Task(1.0, 25.0)] * 8
    assert machines.simulate(even, farm) == machines.bound(even, farm) == 5.0 + 2 * 2.0
    long = [*even, machines.Task(50.0, 0.0)]
    assert machines.bound(long, farm) == 5.0 + 50.0
    assert machines.simulate(long, farm) == 5.0 + 4.0 + 50.0, "the longest came last"
    slow = replace(farm, dispatch=1.0)
    none = [machines.Task(0.0, 0.0)] * 10
    assert machines.simulate(none, slow) == machines.bound(none, slow) == 5.0 + 10.0, "one process hands out all"


def test_plans_come_close_to_their_bounds() -> None:
    import farm as machines

    facts = {"services": [[0.1, 1e6], [0.5, 4e6]], "shard": {"measure": 1e9, "convert": 5e8}}
    rows = machines.plan(facts)
    assert [(row["machines"], row["gigabits"]) for row in rows[:2]] == [(1, 1), (1, 10)]
    for row in rows:
        assert row["models_bound"] <= row["models"] < 1.1 * row["models_bound"] + 5
        assert row["checkpoint_bound"] <= row["checkpoint"] < 1.5 * row["checkpoint_bound"]
    assert str(rows[0]["machines"]) in machines.shown(rows)


def test_goals_on_a_cpu_compare_with_the_engine_itself() -> None:
    import cpu

    def row(name: str, error: float, seconds: float) -> dict[str, Any]:
        return {"model": name, "error": error, "timings": [{"batch": 1, "latency": {"median": seconds}}]}

    def missed(error: float, seconds: float) -> list[str]:
        rows = [row(cpu.REFERENCE, 0, 0.1), row(cpu.OWN, 1e-2, 0.020), row(cpu.TUNED, error, seconds)]
        found = cpu.goals([{"name": "bert", "batches": [1], "variants": rows}])
        return [goal["goal"] for goal in found if not goal["holds"]]

    assert missed(5e-3, 0.0209) == []
    assert missed(6e-3, 0.0209) == ["bert: at most 0.5 of OpenVINO's own error"]
    assert missed(5e-3, 0.026) == [
        "bert, batch 1: OpenVINO's own time + 5 %", "bert, batch 1: 4 times ONNX Runtime, float32"
    ]  # fmt: skip
    assert len(cpu.goals([{"name": "gru", "batches": [1], "variants": []}])) == 2, "what is missing is no success"
    assert not any(goal["holds"] for goal in cpu.goals([{"name": "gru", "batches": [1], "variants": []}]))


def test_agreement_is_judged_over_samples() -> None:
    import agreement

    def report(name: str, *errors: float) -> onnxamp.DiffReport:
        one = onnxamp.diff_models(CLASSIFIER, CLASSIFIER, provider="cpu")
        outputs = [replace(one.outputs[0], name=f"{name}{index}", rel_l2=error) for index, error in enumerate(errors)]
        return replace(one, outputs=tuple(outputs))

    assert agreement.error([report("a", 0.3, 0.0), report("a", 0.4, 0.1)]) == pytest.approx((0.25 / 2) ** 0.5)
    assert agreement.error([report("a", float("inf")), report("a", 7.0)]) == 1
    row = {
        "model": "m", "level": "O2", "dtype": "float16", "lowest": "float16", "skipped": None, "noise": 0.0,
        "emulated": 1e-3, "emulated_passes": True, "real": 2e-3, "real_passes": True,
    }  # fmt: skip
    rows = [row, row | {"real": 2.1e-3}, row | {"emulated": 0.0, "real": 9e-6}, row | {"real": 3e-2, "noise": 2e-2}]
    assert [agreement.agrees(one) for one in rows] == [True, False, True, True]
    missed, same = row | {"real_passes": False, "model": "n"}, row | {"lowest": "float32", "real_passes": False}
    found = agreement.summary([*rows, missed, same, row | {"skipped": "why"}])
    assert (found["compared"], found["skipped"]) == (5, 1)
    assert found["float16"] == {"compared": 5, "within a factor of 2": 4, "models": 2, "models within a factor of 2": 1}
    assert found["pass emulated, fail there"] == ["n O2 float16"]
    assert found["float32"] == {"results": 1, "fail there": ["m O2 float16"]}


@pytest.mark.slow
def test_quantized_networks_are_judged_over_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    import int8

    int8.main(["--quick", "--samples", "5"])
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith('{"')]
    assert [row["model"] for row in rows] == ["classifier", "encoder", "unet"]
    assert all(0 < row["int8 and float16"] < 0.1 for row in rows)
    model = onnx.load(CLASSIFIER)
    same = int8.compared(model, model, onnxamp.random_samples(model, 3))
    assert (same["int8"], same["kind"], same["int8 is off by more"]) == (0, "inside", 0)
    assert int8.allowed(0.1) == pytest.approx(0.112)


def test_pages_on_language_models_say_what_was_measured() -> None:
    import language_tables

    facts = json.loads((FOLDER / "results" / "language_models.json").read_text(encoding="utf-8"))
    assert list(language_tables.broken(facts)) == []
    for page, table in language_tables.tables(facts):
        text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
        assert table in text, f"python benchmarks/language_tables.py writes the tables of {page}.md"
