"""A ladder of tolerances: a wider one writes nothing worse, all that is shown is so, and every row can be written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import report_of, run
from graphs.case import parse
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper
from repository import ROOT

import onnxamp
from onnxamp import Tuned, tune_model
from onnxamp._tuning.choices.candidates import room
from onnxamp._tuning.metric import make_metric
from onnxamp._tuning.results import Candidate

TOLERANCES = (1e-4, 3e-4, 6e-4, 1e-3, 3e-3, 1e-2)
ENCODER = ROOT / "models" / "encoder.onnx"
SIZE = 256
HOW: dict[str, Any] = {"provider": "cpu", "device": "Xeon-8480", "target": "any", "count": 1}


def network(seed: int, size: int = SIZE) -> ModelProto:
    """Layers of products between ops of one input, of which some read what came before, and some cancel."""
    random = np.random.default_rng(seed)
    body, values, weights = [], ["x"], dict[str, Any]()
    for number in range(int(random.integers(4, 12))):
        one, other = (values[-int(random.integers(1, min(3, len(values)) + 1))] for _ in range(2))
        kind, made = random.integers(6), f"v{number}"
        if kind <= 2:
            weights[f"w{number}"] = random.standard_normal((size, size)) / np.sqrt(size)
            body.append(f"{made} = MatMul ({one}, w{number})")
        elif kind == 3:
            body.append(f"{made} = {random.choice(['Tanh', 'Sigmoid', 'Softmax', 'Gelu'])} ({one})")
        elif kind == 4:
            body.append(f"{made} = {random.choice(['Add', 'Mul', 'Sub'])} ({one}, {other})")
        else:
            weights[f"w{number}"] = np.full(1, 2.0 ** random.integers(0, 6))
            body.append(f"far{number} = Add ({one}, w{number}) {made} = Sub (far{number}, w{number})")
        values.append(made)
    body.append(f"y = Add ({values[-1]}, {values[-2]})")
    model = parse(f"(float[4,{size}] x) => (float[4,{size}] y) {{ {' '.join(body)} }}", 20)
    tensors = (numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items())
    model.graph.initializer.extend(tensors)
    return model


def check_shown(tuned: Tuned) -> None:
    """What is written holds, and nothing better is shown to hold."""
    assert tuned.held
    assert tuned.error <= tuned.tolerance
    written = tuned.candidates[tuned.chosen]
    assert (written.verified, written.error) == (True, tuned.error)
    for number, one in enumerate(tuned.candidates):
        if one.verified and number != tuned.chosen and one.error is not None and one.error <= tuned.tolerance:
            assert merit(tuned, number) >= merit(tuned, tuned.chosen)
        if one.best_known_error <= tuned.tolerance and one.nodes:
            assert merit(tuned, number) >= merit(tuned, tuned.chosen), "what is shown to hold and is faster"


def merit(tuned: Tuned, number: int) -> float:
    return tuned.candidates[number].time


def check_times(found: Sequence[Tuned]) -> None:
    """Check that no tolerance finds what is slower than what a narrower one found, or than float32."""
    times = [merit(tuned, tuned.chosen) for tuned in found]
    assert times == sorted(times, reverse=True)
    assert not any(tuned.is_slower for tuned in found)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(["float16", "bfloat16"]))
def test_a_wider_tolerance_is_never_worse(seed: int, dtype: str) -> None:
    model = network(seed, size=2 * SIZE)  # of 256, nothing is faster in low precision
    found = [tune_model(model, limit, dtype=dtype, **HOW)[1] for limit in TOLERANCES]
    for tuned in found:
        check_shown(tuned)
        assert tuned.conversions <= 12
    check_times(found)


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize(("seed", "limit", "runs"), [(1, 3e-3, 1), (22, 8e-3, 1), (20, 5e-3, 1), (66, 8e-3, 2)])
def test_a_search_that_ends_early_writes_the_best_that_holds(seed: int, limit: float, runs: int) -> None:
    """Also where it ends while it looks between that and the next better candidate, which misses."""
    _, tuned = tune_model(network(seed, size=2 * SIZE), limit, dtype="bfloat16", runs=runs, **HOW)
    assert tuned.stopped
    assert tuned.held
    assert tuned.conversions == runs
    written = tuned.candidates[tuned.chosen]
    assert written.verified
    assert written.nodes
    for one in tuned.candidates:
        assert not one.verified or one.best_known_error > limit or one.time >= written.time


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_a_wider_tolerance_never_lowers_less(seed: int) -> None:
    model = network(seed)
    shares = []
    for limit in TOLERANCES[:-1]:
        _, tuned = tune_model(model, limit, allow_slower=True, dtype="bfloat16", **HOW)
        assert tuned.error <= limit
        chosen = tuned.candidates[tuned.chosen]
        shares.append(chosen.flops + chosen.bytes)
    assert shares == sorted(shares)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "classifier", "encoder"])
def test_models_of_the_repository_get_no_slower(name: str) -> None:
    """Smaller weights of candidates that are slower than float32 are offered, and do not count."""
    found = [tune_model(ROOT / "models" / f"{name}.onnx", limit, **HOW)[1] for limit in TOLERANCES[1:]]
    for tuned in found:
        check_shown(tuned)
    check_times(found)


# --- what is picked ---------------------------------------------------------------------------------------------


class Sessions:
    """Counts what ONNX Runtime is asked to run, whatever it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, outer = 0, self

        class Session(ort.InferenceSession):
            def run(self, *arguments: Any, **given: Any) -> Any:
                outer.runs += 1
                return super().run(*arguments, **given)

            def run_with_ort_values(self, *arguments: Any, **given: Any) -> Any:
                outer.runs += 1
                return super().run_with_ort_values(*arguments, **given)

        monkeypatch.setattr(ort, "InferenceSession", Session)


@pytest.mark.slow
def test_every_candidate_is_written_from_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, how = network(3, 2 * SIZE), {**HOW, "state": tmp_path / "state", "dtype": "bfloat16"}
    sessions = Sessions(monkeypatch)
    written, shown = tune_model(model, 2e-3, **how)
    assert len(shown.candidates) > 1
    for number, row in enumerate(shown.candidates):
        sessions.runs = 0
        result, picked = tune_model(model, 2e-3, pick=number, **how)
        assert (picked.chosen, picked.runs) == (number, 0)
        assert [one.low for one in picked.candidates] == [one.low for one in shown.candidates]
        assert sessions.runs == 0 or not row.verified, "what was measured is not run again"
        assert picked.plan.options == shown.plan.options
        assert onnxamp.apply_plan(model, picked.plan) == result
        low = {entry.node for entry in picked.plan.rows if entry.low and entry.op not in ("initializer", "Constant")}
        assert (not low) == (not row.nodes)
        if number == shown.chosen:
            assert (result, picked.plan, picked.kept) == (written, shown.plan, shown.kept)


@pytest.mark.slow
def test_a_picked_candidate_has_about_the_error_that_was_shown(tmp_path: Path) -> None:
    model = network(3, 2 * SIZE)
    samples = onnxamp.random_samples(model, 2)
    how: dict[str, Any] = {**HOW, "samples": samples, "state": tmp_path / "state", "dtype": "bfloat16"}
    _, shown = tune_model(model, 2e-3, **how)
    assert any(not row.verified for row in shown.candidates)
    for number, row in enumerate(shown.candidates):
        result, _ = tune_model(model, 2e-3, pick=number, **how)
        report = onnxamp.diff_models(model, result, samples, provider="cpu")
        reached = max(output.rel_l2 for output in report.outputs)
        assert reached == pytest.approx(row.best_known_error, rel=1e-6 if row.verified else 0.3)


@pytest.mark.slow
def test_the_command_picks_from_what_it_showed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("inputs.npz", **onnxamp.random_samples(onnx.load(ENCODER), 1)[0])
    arguments = ("tune", ENCODER, "--inputs", "inputs.npz", "--tolerance", "5e-4", "--state", "s.json", "--provider",
                 "cpu", "--format", "json")  # fmt: skip
    first = report_of(run(*arguments, "-o", "a.onnx"))["tuning"]
    assert first["candidates"][first["chosen"]]["verified"]
    for number, row in enumerate(first["candidates"]):
        done = run(*arguments, "-o", f"{number}.onnx", "--pick", number)
        again = json.loads(done.stdout)["tuning"]
        assert (again["candidates"][number]["low"], again["chosen"]) == (row["low"], number)
        assert done.exit_code == (0 if again["error"] <= 5e-4 else 1)
    assert Path(f"{first['chosen']}.onnx").read_bytes() == Path("a.onnx").read_bytes()


@pytest.mark.slow
def test_without_a_state_the_pick_is_converted_and_judged() -> None:
    model = network(3, 2 * SIZE)
    _, shown = tune_model(model, 2e-3, dtype="bfloat16", **HOW)
    number = next(number for number, row in enumerate(shown.candidates) if not row.verified)
    _, picked = tune_model(model, 2e-3, dtype="bfloat16", pick=number, **HOW)
    assert picked.candidates[number].verified
    assert (picked.candidates[number].error, picked.chosen) == (picked.error, number)


# --- what is shown ----------------------------------------------------------------------------------------------


def test_what_is_not_verified_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(3, 2 * SIZE), "model.onnx")
    arguments = ("tune", "model.onnx", "-o", "out.onnx", "--dtype", "bfloat16", "--tolerance", "2e-3", "--samples", 2,
                 "--device", "Xeon-8480", "--target", "any", "--provider", "cpu", "--state", "s", "-v")  # fmt: skip
    told = run(*arguments).output
    rows = [line for line in told.splitlines() if line.strip().startswith(("✔ ", "✘ ")) and "×" in line]
    assert any("≈ " in row for row in rows)
    assert not any("≈ " in row for row in rows if "← written" in row)
    assert "≈ marks an expected error, from the sensitivities" in " ".join(told.split())


def test_room_is_that_of_a_knapsack_with_one_part_cut() -> None:
    def row(time: float, error: float) -> Candidate:
        return Candidate(frozenset({str(time)}), 1, error, error, time, 0.0, 0.0)

    metric = make_metric("rel-l2", 2.0)
    assert room(row(100, 1.0), [row(80, 3.0), row(60, 9.0)], metric) == pytest.approx(0.2 * 3 / 8)
    assert room(row(100, 1.0), [row(120, 3.0)], metric) == 0
    assert room(row(100, 1.0), [row(50, np.inf)], metric) == 0
    squares = make_metric("cosine", 2.0)
    assert room(row(100, 1.0), [row(80, 3.0)], squares) == pytest.approx(0.2 * 1 / 2), "these add up as they are"


@pytest.mark.slow
def test_a_tolerance_is_filled() -> None:
    """Equal products of one input: as many are low as the squared error has room for."""
    size, kinds, random = 512, "abcdefgh", np.random.default_rng(0)
    body = " ".join(f"{kind} = MatMul (x, w{kind})" for kind in kinds)
    ends = ", ".join(f"float[4,{2 * size}] {kind}" for kind in kinds)
    model = parse(f"(float[4,{size}] x) => ({ends}) {{ {body} }}", 20)
    for kind in kinds:
        weights = (random.standard_normal((size, 2 * size)) / np.sqrt(size)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weights, f"w{kind}"))
    _, all_low = tune_model(model, 1e-1, dtype="bfloat16", metric=f"{__name__}:whole", **HOW)
    assert all_low.candidates[all_low.chosen].nodes == len(kinds)
    for share in (0.3, 0.55, 0.8):
        limit = all_low.error * share**0.5
        _, tuned = tune_model(model, limit, dtype="bfloat16", metric=f"{__name__}:whole", **HOW)
        assert tuned.held
        assert tuned.candidates[tuned.chosen].nodes >= share * len(kinds) - 1
        assert tuned.room is not None
        assert tuned.room < 0.1


def whole(reference: dict[str, Any], result: dict[str, Any]) -> float:
    """The relative error of all outputs together."""
    squares = sum(float(np.sum((result[name] - value) ** 2)) for name, value in reference.items())
    return (squares / sum(float(np.sum(value**2)) for value in reference.values())) ** 0.5


def test_the_result_shows_itself() -> None:
    result = tune_model(ROOT / "models" / "classifier.onnx", 1e-2, **HOW)
    model, tuned = result
    assert (result.model, result.tuned) == (model, tuned)
    assert repr(result) == repr(tuned)
    assert result._repr_html_().lstrip().startswith('<div class="onnxamp-report">')
