"""Comparing two models: what is accepted, what is said, what is saved; and ``onnxamp diff``."""

import json
import math
import shutil
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, MODELS, NORM, report_of, run, saved
from graphs.case import add_weights, parse
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import feeds as model_feeds

from onnxamp import convert_model
from onnxamp._base.errors import ArgumentError, ArgumentTypeError, ModelError
from onnxamp._numerics.diff_models import diff_models
from onnxamp._numerics.differences.metrics import AT_LEAST, AT_MOST, BOUNDS
from onnxamp._numerics.judging import apply_limits
from onnxamp._numerics.limits import Limits, make_limits
from onnxamp._numerics.results import DiffReport
from onnxamp._report.comparison import diff_report
from onnxamp._report.console import make_console
from onnxamp._report.formats import diff_json, load_diff
from onnxamp._report.terminal import as_text
from onnxamp._runtime.inputs.samples import Samples

fixed = settings(derandomize=True, deadline=None, max_examples=100)
EXP = "(float[4] X) => (float[4] Y, float[4] Z) { Y = Exp (X) Z = Neg (X) }"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def samples_of(*feeds):
    return Samples("given", [lambda feed=feed: feed for feed in feeds])


def x_of(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_layers_are_compared_on_the_worst_of_several_random_samples() -> None:
    """Only the sample with the largest number shows the limit."""
    one = parse("(float[4] X) => (float[4] Y) <float k = {3}> { a = Mul (X, k) Y = Neg (a) }")
    other = parse(
        "(float[4] X) => (float[4] Y) <float k = {3}, float t = {5}> { b = Mul (X, k) a = Min (b, t) Y = Neg (a) }"
    )
    report = diff_models(one, other, count=8)
    errors = [row.accumulated.rel_l2 for row in report.layers if row.accumulated is not None]
    assert errors == pytest.approx([report.outputs[0].rel_l2] * 2)
    number = report.outputs[0].worst_sample
    assert number == report.worst_sample
    assert number > 0
    assert f"Layers were compared on sample {number}, the worst of 8." in report.notes
    assert report.first_bad is not None
    assert report.first_bad.value == "a"
    every = diff_models(one, other, count=8, layers=True)
    assert every.worst_sample == number
    assert len(every.layers) == 2
    assert every.layers[0].accumulated is not None
    assert every.layers[0].accumulated.elements == 8 * 4


def shifted(by):
    """EXP with an error in Y alone."""
    text = "(float[4] X) => (float[4] Y, float[4] Z) { e = Exp (X) Y = Add (e, d) Z = Neg (X) }"
    return add_weights(parse(text), {"d": np.float32([by])})


# --- whole models ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_conversions_of_the_models(path, level, dtype):
    low = convert_model(path, level, dtype=dtype)
    report = diff_models(path, low, samples_of(*model_feeds(path.stem)), layers=True)
    assert report.skipped is None
    assert report.failure is None
    assert report.first_bad is None
    lowest = "float32" if low == onnx.load(path) else dtype  # some models hold nothing that CUDA has in bfloat16
    assert report.lowest == lowest
    assert report.ran_on == ("CPU" if lowest == "float32" else f"CPU, emulated {dtype}")
    assert [diff.name for diff in report.outputs] == [entry.name for entry in onnx.load(path).graph.output]
    assert [row.position for row in report.layers] == sorted(row.position for row in report.layers)
    assert dtype == "bfloat16" or any(row.dtype == dtype for row in report.layers)
    for row in report.layers:
        assert row.local is not None or row.note, row.value


@pytest.mark.slow
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_budget_changes_nothing(path):
    low, samples = convert_model(path), samples_of(model_feeds(path.stem)[0])
    one, other = (diff_models(path, low, samples, layers=True, budget=size) for size in (1, 2**40))
    assert one == other


def test_a_model_equals_itself():
    report = diff_models(CLASSIFIER, CLASSIFIER)
    assert report.passed
    assert (report.ran_on, report.lowest, report.layers) == ("CPU", "float32", ())
    assert report.outputs[0].max_abs == 0
    assert report.reference == report.result == str(CLASSIFIER)


def test_protos_are_called_by_their_graph():
    report = diff_models(parse(EXP), shifted(1))
    assert (report.reference, report.result) == ("g", "g")


def test_first_bad_is_looked_for_only_where_something_fails():
    model = parse(NORM)
    low = convert_model(model, "O3", hazards=False)
    report = diff_models(model, low, samples_of({"X": np.float32([[1, -1, 0.5, 0.7]])}))
    assert not report.passed
    assert report.failure.startswith("Output 'Y': Values vanished: 4 of 4 elements")
    assert report.first_bad.node == "square"
    assert report.first_bad.alarm.startswith("Inf in 4 of 4 elements")
    assert report.layers, "what shows the cause is in the report"
    good = diff_models(model, convert_model(model), samples_of({"X": np.float32([[1, -1, 0.5, 0.7]])}))
    assert (good.passed, good.first_bad, good.layers) == (True, None, ())


def test_progress():
    told = []
    diff_models(parse(EXP), shifted(0), count=3, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


# --- models that do not fit or do not run -----------------------------------------------------------------------


def test_a_reference_that_does_not_run():
    model = parse("(float[2,3] X) => (float[a,b] Y) { Y = MatMul (X, X) }")
    report = diff_models(model, model)
    assert report.skipped.startswith("The reference does not run: ")
    assert "--inputs" in report.skipped
    assert not report.passed
    with pytest.raises(ArgumentError, match=r"The reference does not run: .* Check the inputs"):
        diff_models(model, model, samples_of({"X": x_of(2, 3)}))


def test_a_result_that_does_not_run():
    one = parse("(float[2,3] X) => (float[a,b] Y) { Y = Exp (X) }")
    other = parse("(float[2,3] X) => (float[a,b] Y) { Y = MatMul (X, X) }")
    for layers in (False, True):
        report = diff_models(one, other, layers=layers)
        assert report.skipped is None
        assert report.failure.startswith("The result does not run: ")
        assert not report.passed


def test_a_result_that_does_not_load():
    one = parse("(float[2] X) => (float[2] Y) { Y = Exp (X) }")
    other = parse("(float[2] X) => (float[2] Y) { Y = acme.Nothing (X) }", domains={"acme": 1})
    assert diff_models(one, other).failure.startswith("The result does not run: ")
    assert diff_models(other, one).skipped.startswith("The reference does not run: ")


def test_other_inputs():
    one = parse("(float[2] X) => (float[2] Y) { Y = Exp (X) }")
    two = parse("(float[2] X, float[2] Z) => (float[2] Y) { Y = Mul (X, Z) }")
    with pytest.raises(ArgumentError, match=r"different inputs.*'Z'"):
        diff_models(one, two)
    assert diff_models(two, one).notes == ("Only the reference takes the input 'Z'.",)
    with pytest.raises(ArgumentError, match="'Q'"):
        diff_models(one, one, samples_of({"Q": x_of(2)}))


def test_other_outputs():
    one = parse("(float[2] X) => (float[2] Y) { Y = Exp (X) }")
    two = parse("(float[2] X) => (float[2] Y, float[2] Z) { Y = Exp (X) Z = Neg (X) }")
    with pytest.raises(ArgumentError, match=r"different outputs.*'Z'"):
        diff_models(two, one)
    found = diff_models(one, two)
    assert found.passed
    assert found.notes == ("Only the result has the output 'Z'; it is not compared.",)


def test_a_file_that_is_no_model():
    Path("bad.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelError):
        diff_models("bad.onnx", CLASSIFIER)


def test_outputs_of_another_kind():
    one = parse("(float[2] X) => (float[2] Y) { Y = Exp (X) }")
    sequence = parse("(float[2] X) => (seq(float[2]) Y) { Y = SequenceConstruct (X) }")
    assert diff_models(one, sequence).failure == "Output 'Y': It is list instead of ndarray."
    longer = parse("(float[2] X) => (seq(float[2]) Y) { Y = SequenceConstruct (X, X) }")
    assert diff_models(sequence, longer).failure == "Output 'Y': The sequence has 2 elements instead of 1."
    assert diff_models(longer, longer).passed


# --- limits ---------------------------------------------------------------------------------------------------


def judged(report):
    return {(j.output, j.metric): (j.limit, j.passed) for j in report.judgements}


def test_usual_tolerances():
    for dtype, tolerance in (("float16", 1e-2), ("bfloat16", 5e-2)):
        report = diff_models(parse(EXP), convert_model(parse(EXP), "O3", dtype=dtype))
        assert judged(report) == {(name, "rel_l2"): (tolerance, True) for name in "YZ"}
    assert judged(diff_models(parse(EXP), shifted(1e-7)))["Y", "rel_l2"] == (1e-5, True)
    report = diff_models(parse(EXP), shifted(1e-3))
    assert judged(report) == {("Y", "rel_l2"): (1e-5, False), ("Z", "rel_l2"): (1e-5, True)}
    assert not report.passed
    assert report.failure is None
    assert len(report.warnings) == 1
    assert report.warnings[0].startswith("Output 'Y': relative L2 error is ")


def test_a_tolerance_is_a_limit_of_the_relative_error():
    """As on the command line: a number, numbers by output, or texts; and other metrics beside it."""
    model, result = CLASSIFIER, convert_model(CLASSIFIER)
    reached = diff_models(model, result, provider="cpu").outputs[0].rel_l2
    for tolerance in (reached * 1.01, {"": reached * 1.01}, [f"{reached * 1.01}"]):
        assert diff_models(model, result, tolerance=tolerance, provider="cpu").passed
    missed = diff_models(model, result, tolerance=reached * 0.99, provider="cpu")
    assert not missed.passed
    onnx.save(result, "low.onnx")
    asked = run("diff", model, "low.onnx", "--tolerance", reached * 0.99, "--provider", "cpu", "--no-cure", "--format",
                "json")  # fmt: skip
    assert [row["limit"] for row in json.loads(asked.stdout)["judgements"]] == [one.limit for one in missed.judgements]
    both = diff_models(model, result, limits=make_limits({"cosine": 0.9}), tolerance=1.0, provider="cpu")
    assert {one.metric for one in both.judgements} == {"cosine", "rel_l2"}
    with pytest.raises(ArgumentError, match="tolerance and limits both set the limit of rel_l2"):
        diff_models(model, result, limits=make_limits({"rel_l2": 1.0}), tolerance=1.0)
    with pytest.raises(ArgumentError, match="out of range: it must be 0 or more"):
        diff_models(model, result, tolerance=-1.0)


def test_limits_for_one_output_and_for_the_others():
    report = diff_models(parse(EXP), shifted(0.5))
    limits = make_limits({"max_abs": ["0.1", "Y=1"]})
    assert judged(apply_limits(report, limits)) == {("Y", "max_abs"): (1, True), ("Z", "max_abs"): (0.1, True)}
    assert apply_limits(report, limits).passed
    limits = make_limits({"max_abs": ["Y=0.1"], "cosine": ["0.5"]})
    assert judged(apply_limits(report, limits)) == {
        ("Y", "max_abs"): (0.1, False), ("Y", "cosine"): (0.5, True), ("Z", "cosine"): (0.5, True),
    }  # fmt: skip
    only_y = apply_limits(report, make_limits({"max_abs": ["Y=1"]}))
    assert judged(only_y)["Z", "rel_l2"] == (1e-5, True), "the other output is held to the usual tolerance"


@pytest.mark.parametrize("metric", sorted({*AT_MOST, *AT_LEAST} - {"detections"}))
def test_every_metric_holds_from_its_side(metric):
    text = "(float[4,12] X) => (float[4,12] logits) { e = Exp (X) logits = Add (e, d) }"
    one, other = (add_weights(parse(text), {"d": np.float32([d])}) for d in (0, 0.25))
    report = diff_models(one, other)
    found = getattr(report.outputs[0], metric)
    least, largest = BOUNDS[metric]
    limits = ((found, True), (found + 0.01, metric in AT_MOST), (found - 0.01, metric in AT_LEAST))
    for limit, passes in ((limit, passes) for limit, passes in limits if least <= limit <= largest):
        held = apply_limits(report, make_limits({metric: [repr(float(limit))]}))
        assert judged(held) == {("logits", metric): (pytest.approx(limit), passes)}
        assert held.passed is passes


def test_metrics_that_an_output_has_not_are_no_limit():
    report = diff_models(parse(EXP), shifted(1e-7))
    assert judged(apply_limits(report, make_limits({"top5_agreement": ["1"]}))) == {
        (name, "rel_l2"): (1e-5, True) for name in "YZ"
    }


def test_integer_outputs_are_held_to_the_share_that_differs():
    one = parse("(int64[1000] X) => (int64[1000] Y) { Y = Neg (X) }")
    text = "(int64[1000] X) => (int64[1000] Y) { n = Neg (X) Y = Add (n, d) }"
    d = np.zeros(1000, np.int64)
    d[7] = 1000
    other = add_weights(parse(text), {"d": d})
    report = diff_models(one, other, samples_of({"X": np.ones(1000, np.int64)}))
    assert judged(report) == {("Y", "differing"): (1e-5, False)}
    assert judged(apply_limits(report, make_limits({"differing": ["0.001"]}))) == {("Y", "differing"): (0.001, True)}


def test_elements_of_sequences_are_held_to_the_limits_of_the_sequence():
    model = parse("(float[2] X) => (seq(float[2]) Y) { Y = SequenceConstruct (X, X) }")
    report = diff_models(model, model, limits=make_limits({"max_abs": ["Y=0.5", "Y[1]=0.25"]}))
    assert judged(report) == {("Y[0]", "max_abs"): (0.5, True), ("Y[1]", "max_abs"): (0.25, True)}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"max_abs": ["Q=1"]}, r"max_abs names 'Q'; the outputs are Y, Z"),
        ({"max_abs": ["Y=one"]}, "'Y=one' is neither a number"),
        ({"max_abs": [""]}, "neither a number"),
        ({"speed": ["1"]}, "Unknown metric 'speed'"),
    ],
)
def test_wrong_limits(said, told):
    with pytest.raises(ArgumentError, match=told):
        diff_models(parse(EXP), shifted(0), limits=make_limits(said))


def test_names_with_equals_signs():
    assert make_limits({"max_abs": ["a=b=0.5", "=2"]}) == Limits({"max_abs": {"a=b": 0.5, "": 2.0}})


def test_a_failure_fails_whatever_the_limits_are():
    model = parse("(float[2] X) => (float[2] Y) { Y = Exp (X) }")
    low = convert_model(model, "O3", hazards=False)
    report = diff_models(model, low, samples_of({"X": np.float32([12, 1])}), limits=make_limits({"max_abs": ["inf"]}))
    assert all(judgement.passed for judgement in report.judgements)
    assert report.failure.startswith("Output 'Y': Inf where the reference is finite: 1 of 2")
    assert not report.passed


# --- what is saved --------------------------------------------------------------------------------------------


def a_report(**changes):
    model = parse(NORM)
    low = convert_model(model, "O3", hazards=False)
    return replace(diff_models(model, low, samples_of({"X": np.float32([[1, -1, 0.5, 0.7]])}), layers=True), **changes)


def reports():
    yield a_report()
    yield a_report(layers=())
    yield diff_models(CLASSIFIER, convert_model(CLASSIFIER), layers=True)
    yield diff_models(parse(EXP), shifted(1e-3))
    strings = parse("(string[2] X) => (string[2] Y) { Y = Identity (X) }")
    yield diff_models(strings, strings, samples_of({"X": np.array(["a", "1.5"], object)}))
    empty = parse("(float[N] X) => (float[N] Y) { Y = Exp (X) }")
    yield diff_models(empty, empty, samples_of({"X": x_of(0)}))
    yield DiffReport("a", "b", "CPU", "given", 1, "float32", skipped="It does not run.")


def same(one, other):
    """Equality, where NaN equals NaN."""
    if is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


def test_round_trip():
    for report in reports():
        Path("saved.json").write_text(diff_json(report))
        loaded = load_diff(Path("saved.json"))
        assert same(loaded, report)
        assert loaded.passed == report.passed
        assert json.loads(Path("saved.json").read_text())["passed"] == report.passed


def test_judged_anew():
    report = diff_models(parse(EXP), shifted(0.5), layers=True)
    Path("saved.json").write_text(diff_json(report))
    loaded = load_diff(Path("saved.json"))
    assert not loaded.passed
    assert loaded.first_bad is not None
    assert (loaded.first_bad.value, loaded.first_bad.alarm) == ("Y", "its own error is 0.2")
    assert apply_limits(loaded, make_limits({"max_abs": ["0.6"]})).passed
    assert apply_limits(loaded, make_limits({"max_abs": ["0.6"]})).warnings == ()
    assert same(apply_limits(loaded, Limits()), report)


NO_COMPARISONS = [
    "", "{", "[]", "null", "3", '"diff"', "{}", '{"onnxamp": "check", "format": 1}', '{"onnxamp": "diff", "format": 2}',
    '{"onnxamp": "diff", "format": 1}', "[" * 100_000, "\x00", '{"onnxamp": "diff", "format": 1, "outputs": 3}',
]  # fmt: skip


@pytest.mark.parametrize("text", NO_COMPARISONS)
def test_what_is_no_comparison(text):
    Path("saved.json").write_text(text)
    with pytest.raises(ArgumentError, match="--save"):
        load_diff(Path("saved.json"))


def test_files_that_cannot_be_read():
    with pytest.raises(ArgumentError, match=r"[Nn]o such file"):
        load_diff(Path("missing.json"))
    Path("folder.json").mkdir()
    with pytest.raises(ArgumentError, match=r"folder\.json"):
        load_diff(Path("folder.json"))
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="not a comparison"):
        load_diff(Path("bytes.json"))


DOCUMENT = []


def document():
    if not DOCUMENT:
        DOCUMENT.append(json.loads(diff_json(a_report())))
    return json.loads(json.dumps(DOCUMENT[0]))


def places(data, path=()):
    """Every path into a JSON document."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400), st.just(-1),
    st.sampled_from(["nan", "inf", "float8", "", []]), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@st.composite
def mutated(draw):
    data = document()
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([place for place in places(data) if place]))
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        if draw(st.booleans()) and isinstance(inner, dict):
            del inner[path[-1]]
        else:
            inner[path[-1]] = draw(ODD)
    return json.dumps(data)


@pytest.mark.slow
@fixed
@given(mutated())
def test_mutated_comparisons_are_read_or_refused(tmp_path_factory, text):
    """What is read can be judged and shown, whatever numbers stand in it."""
    path = tmp_path_factory.mktemp("mutated") / "saved.json"
    path.write_text(text)
    try:
        report = apply_limits(load_diff(path), Limits())
    except ArgumentError:
        return
    for verbose in (False, True):
        console = make_console()
        with console.capture():
            console.print(as_text(diff_report(report), verbose=verbose))
    assert isinstance(diff_json(report), str)


# --- the command ------------------------------------------------------------------------------------------------


def test_exit_codes():
    one, other = saved(parse(EXP), "one.onnx"), saved(shifted(1e-3), "other.onnx")
    assert run("diff", one, one).exit_code == 0
    assert run("diff", one, other).exit_code == 1
    assert run("diff", one, other, "--tolerance", "0.1").exit_code == 0
    assert run("diff", one, other, "--atol", "Y=1", "--rtol", "Y=1").exit_code == 0
    assert run("diff", one, other, "--atol", "Y=1", "--snr", "Y=200").exit_code == 1
    assert run("diff", one, "missing.onnx").exit_code == 2
    for wrong in (
        [one], [one, other, "--atol", "Q=1"], [one, other, "--atol", "much"], [one, other, "--inputs", "missing.npz"],
        [one, other, "--dim", "N"], [one, other, "--provider", "tpu"], [one, other, other], ["missing.json"],
        [one, other, "--samples", "0"], [one, other, "--budget", "0"],
    ):  # fmt: skip
        result = run("diff", *wrong)
        assert result.exit_code == 2, (wrong, result.output)
        assert "Traceback" not in result.output


def test_what_is_shown():
    one, other = saved(parse(EXP), "one.onnx"), saved(shifted(1e-3), "other.onnx")
    good = run("diff", one, one).output
    assert good.startswith("✔ The models agree: ")
    assert "one.onnx → one.onnx" in good
    assert "emulated" not in good
    bad = run("diff", one, other).output
    assert bad.startswith("✘ The models differ by more than the limits allow.\n  one.onnx → other.onnx")
    assert "Output 'Y': relative L2 error is" in bad
    assert "the limit is 1e-05" in bad
    assert "Layers" in bad, "where it comes from"
    verbose = run("diff", one, other, "-v").output
    for text in ("required tolerance", "RMS", "Worst at", "Limits", "differing"):
        assert text in verbose
    assert run("diff", one, other, "-q").output == ""


def test_options_of_sampling():
    one, other = saved(parse(EXP), "one.onnx"), saved(shifted(1e-7), "other.onnx")
    report = report_of(run("diff", one, other, "--format", "json", "--samples", 3, "--seed", 5))
    assert (report["samples"], report["inputs"]) == (3, "random inputs (3 samples, seed 5)")
    np.savez("data.npz", X=np.float32([1, 2, 3, 4]))
    report = report_of(run("diff", one, other, "--format", "json", "--inputs", "data.npz"))
    assert "data.npz" in report["inputs"]
    assert report["outputs"][1]["worst_reference"] == -1


def test_save_and_judge_anew():
    one, other = saved(parse(EXP), "one.onnx"), saved(shifted(1e-3), "other.onnx")
    assert run("diff", one, other, "--save", "saved.json", "--layers").exit_code == 1
    Path("one.onnx").unlink()
    assert run("diff", "saved.json").exit_code == 1
    assert run("diff", "saved.json", "--tolerance", "0.1").exit_code == 0
    assert run("diff", "saved.json", "--tolerance", "Q=0.1").exit_code == 2
    shown = run("diff", "saved.json", "--tolerance", "0.1", "--html", "page.html").output
    assert shown.startswith("✔")
    assert "other.onnx" in Path("page.html").read_text(encoding="utf-8")
    assert run("diff", "saved.json", "other.onnx").exit_code != 0, "one comparison, or two models"
    run("diff", "saved.json", "--save", "again.json")
    assert json.loads(Path("again.json").read_text()) == json.loads(Path("saved.json").read_text())


def test_low_models_and_their_noise():
    shutil.copy(CLASSIFIER, "model.onnx")
    assert run("convert", "model.onnx", "-q", "--no-validate").exit_code == 0
    result = run("diff", "model.onnx", "model_fp16.onnx", "--layers")
    assert result.exit_code == 0, result.output
    assert "  CPU, emulated float16, " in result.output
    assert "moves outputs by up to 0.35 %" in " ".join(result.output.split())


def test_an_error_is_one_sentence():
    one = saved(parse(EXP), "one.onnx")
    Path("bad.onnx").write_bytes(b"nothing")
    for arguments in ([one, "bad.onnx"], ["bad.onnx", one]):
        result = run("diff", *arguments)
        assert result.exit_code == 2
        assert result.output.startswith("Error: ")
        assert "Traceback" not in result.output


def test_a_result_that_does_not_run_is_a_failure_that_is_shown():
    one = saved(parse("(float[2,3] X) => (float[a,b] Y) { Y = Exp (X) }"), "one.onnx")
    other = saved(parse("(float[2,3] X) => (float[a,b] Y) { Y = MatMul (X, X) }"), "other.onnx")
    result = run("diff", one, other)
    assert result.exit_code == 2
    assert "The result does not run" in result.output
    result = run("diff", other, one)
    assert result.exit_code == 2
    assert "The reference does not run" in result.output


# --- limits in every form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit",
    {
        "a number": 0.5,
        "a text": "0.5",
        "texts": ["0.5"],
        "numbers by output": {"": 0.5},
    }.values(),
)
def test_limits_are_numbers_or_texts(limit):
    assert make_limits({"rel_l2": limit}) == Limits({"rel_l2": {"": 0.5}})
    assert make_limits({"rel_l2": {"Y": 1}, "cosine": ["0.9", "Y=1"]}).of == {
        "rel_l2": {"Y": 1.0}, "cosine": {"": 0.9, "Y": 1.0},
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [[("rel_l2", 1)], "rel_l2", 3, {"rel_l2": None}, {"rel_l2": object()}])
def test_other_types_of_limits_are_refused(wrong):
    with pytest.raises(ArgumentTypeError, match="limit"):
        make_limits(wrong)


def test_limits_that_are_none_are_refused():
    with pytest.raises(ArgumentTypeError, match="limits must be Limits"):
        diff_models(parse(EXP), parse(EXP), limits={"rel_l2": 1})


def test_options_of_runs_are_refused_beside_a_saved_comparison(folder):
    model = parse(EXP)
    path = saved(model)
    assert run("diff", path, path, "--save", "d.json").exit_code == 0
    assert run("diff", "d.json", "--tolerance", "0.1").exit_code == 0
    for words in (("--metric", "elements"), ("--target", "webgpu"), ("--jobs", "2"), ("--layers",)):
        done = run("diff", "d.json", *words)
        assert (done.exit_code, "only limits and output options apply" in done.output) == (2, True), words
