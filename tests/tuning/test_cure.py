"""Cures: what the report tells to do is done, and seen to help."""

import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, NORM, report_of, run, saved
from graphs.case import add_weights, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxamp import convert_model
from onnxamp._model.model import Model
from onnxamp._numerics.check import check_run
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.diff_models import diff_models
from onnxamp._numerics.limits import Limits
from onnxamp._numerics.user_functions import Accept
from onnxamp._options.options import Options
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.run import Run
from onnxamp._tuning.cure import TRIALS, Recipe, cure_conversion, other_ways
from onnxamp._tuning.cure_check import CHECKS, cure_run

CARELESS = ("--level", "O3", "--no-hazards", "--no-validate", "-q")
ODD_NAMES = [
    "/layer.0/Mul[1](x)+$^*?{2}", "it's", 'a "quoted" name', "a b  c", "one|two", "$HOME `ls` \\d", "-leading", "ä/ö",
    "#", "a\\", "~",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def samples_of(*feeds):
    return Samples("given", [lambda feed=feed: feed for feed in feeds])


def cured(source, recipe, feeds, limits=None, *, output="out.onnx"):
    """Look for a fix of a conversion that was not tried before."""
    original = Model.of(source)
    comparison = Comparison.of(original, Run(inputs=samples_of(feeds)), limits)
    return cure_conversion(original, (str(source), output), recipe, comparison, tried=False)


def the_command(result):
    """The words of the command that a report ends with, as a shell would read them."""
    lines = [line for line in result.output.splitlines() if line.startswith("   ") and "--keep-fp32" in line]
    assert len(lines) == 1, result.output
    return shlex.split(lines[0])


def inputs(**arrays):
    np.savez("inputs.npz", **arrays)
    return ("--inputs", "inputs.npz")


NORM_X = np.float32([[1, -1, 0.5, 0.7]])


def chain(*names):
    """Squares that overflow float16, one behind the other, and their roots.

    The first square is not one of an input itself: a check warns of those before it runs the model.
    """
    nodes, value = [onnx.helper.make_node("Softplus", ["X"], ["p"], name="start")], "p"
    for number, name in enumerate(names):
        for op, out in (("Mul", f"s{number}"), ("Sqrt", f"r{number}")):
            inputs = [value, value] if op == "Mul" else [f"s{number}"]
            nodes.append(onnx.helper.make_node(op, inputs, [out], name=name if op == "Mul" else f"root {number}"))
        value = f"r{number}"
    nodes.append(onnx.helper.make_node("Relu", [value], ["Y"], name="last"))
    model = parse("(float[4] X) => (float[4] Y) { Y = Relu (X) }")
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


BIG = np.float32([300, 1, 2, 3])


# --- of comparisons ---------------------------------------------------------------------------------------------


def test_a_careless_conversion_is_cured_by_a_careful_one():
    source = saved(NORM)
    options = inputs(X=NORM_X)
    assert run("convert", source, "-o", "bad.onnx", *CARELESS).exit_code == 0
    result = run("diff", source, "bad.onnx", *options)
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line.startswith("   onnxamp ")]
    assert len(lines) == 1
    words = shlex.split(lines[0])
    assert words[:3] == ["onnxamp", "convert", "model.onnx"]
    assert run(*words[1:], "-q").exit_code == 0
    again = run("diff", source, words[words.index("-o") + 1], *options)
    assert again.exit_code == 0, again.output
    assert "onnxamp convert" not in again.output


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tight_limit_is_met_by_keeping_nodes(dtype):
    """The command is as it was tried: the same limit holds for what it writes."""
    options = ("--dtype", dtype, "--no-validate", "-q")
    assert run("convert", CLASSIFIER, "-o", "low.onnx", *options).exit_code == 0
    limit = 2e-4 if dtype == "float16" else 1e-3
    result = run("diff", CLASSIFIER, "low.onnx", "--tolerance", limit)
    assert result.exit_code == 1
    words = the_command(result)
    assert ("--dtype" in words) == (dtype == "bfloat16")
    assert run(*words[1:], "--no-validate", "-q").exit_code == 0
    assert run("diff", CLASSIFIER, words[words.index("-o") + 1], "--tolerance", limit).exit_code == 0


def test_outcome_and_nodes():
    original = saved(NORM)
    recipe = Recipe(Options.of("O3", {"hazards": False}))
    samples = samples_of({"X": NORM_X})
    told = []
    cure = cure_conversion(
        Model.of(original),
        (str(original), "out.onnx"),
        recipe,
        Comparison.of(Model.of(original), Run(inputs=samples, report=lambda _, *args: told.append(args))),
        tried=False,
    )
    assert cure.confirmed
    assert cure.nodes
    assert cure.trials == len(told) <= TRIALS + 4
    assert {total for _, total in told} == {TRIALS + 4}, "no share is beyond 100 %"
    assert cure.outcome.startswith(f"Tried: with {len(cure.nodes)} ")
    words = shlex.split(cure.command)
    assert words[:8] == ["onnxamp", "convert", "model.onnx", "-o", "out.onnx", "--level", "O3", "--no-hazards"]
    assert run(*words[1:], "--no-validate", "-q").exit_code == 0
    assert diff_models(original, "out.onnx", samples).passed


def test_fewer_nodes_than_are_tried():
    """What turns out not to be needed is not told."""
    model = saved(chain("a", "b"), "model.onnx")
    recipe = Recipe(Options.of("O3", {"hazards": False}))
    cure = cured(model, recipe, {"X": BIG})
    assert cure.confirmed
    assert {"a", "b"} <= set(cure.nodes) <= {"a", "b", "root 0", "root 1"}


def test_no_cure_is_said():
    source = saved(NORM)
    options = inputs(X=NORM_X)
    assert run("convert", source, "-o", "low.onnx", "--no-validate", "-q").exit_code == 0
    judge = "def same(one, other):\n    return all(one[name] is other[name] for name in one)\n"
    Path("judge.py").write_text(judge)  # takes nothing but the original's own arrays
    result = run("diff", source, "low.onnx", *options, "--accept", "judge.py:same")
    assert result.exit_code == 1
    assert "! No fix was found" in " ".join(result.output.split())
    assert "--keep-fp32" not in result.output
    cure = cured(source, Recipe(), {"X": NORM_X}, Limits(accept=Accept.of("judge.py:same")))
    assert (cure.confirmed, cure.command) == (False, "")
    assert 1 <= cure.trials <= TRIALS


@pytest.mark.parametrize("option", [["--no-cure"], ["-q"]])
def test_no_cure_is_looked_for_unasked(option):
    source = saved(NORM)
    assert run("convert", source, "-o", "bad.onnx", *CARELESS).exit_code == 0
    output = run("diff", source, "bad.onnx", *inputs(X=NORM_X), *option).output
    assert "Tried" not in output
    assert "onnxamp convert" not in output


def test_float32_models_have_no_cure():
    one = saved("(float[4] X) => (float[4] Y) { Y = Exp (X) }", "one.onnx")
    other = saved("(float[4] X) => (float[4] Y) { e = Exp (X) Y = Mul (e, e) }", "other.onnx")
    result = run("diff", one, other)
    assert result.exit_code == 1
    assert "ured" not in result.output
    assert "cure" not in result.output
    assert "onnxamp convert" not in result.output
    assert report_of(run("diff", one, other, "--format", "json"))["cure"] is None


def test_the_cure_is_in_the_json():
    source = saved(NORM)
    assert run("convert", source, "-o", "bad.onnx", *CARELESS).exit_code == 0
    cure = report_of(run("diff", source, "bad.onnx", *inputs(X=NORM_X), "--format", "json"))["cure"]
    assert cure["confirmed"] is True
    assert cure["command"].startswith("onnxamp convert model.onnx -o bad_cured.onnx")


# --- of models alone ----------------------------------------------------------------------------------------------


def test_a_check_tells_what_to_keep():
    source = saved(chain("first", "second", "third"))
    options = inputs(X=BIG)
    assert run("convert", source, "-o", "bad.onnx", *CARELESS).exit_code == 0
    result = run("check", "bad.onnx", *options)
    assert result.exit_code == 1
    assert "The first bad value is 's0' (output of Mul node 'first')" in result.output
    words = the_command(result)
    assert words[0] == "--keep-fp32"
    assert run("convert", source, "-o", "good.onnx", *CARELESS, *words).exit_code == 0
    assert report_of(run("check", "good.onnx", *options, "--format", "json"))["run"]["first_bad"] is None
    assert diff_models(source, "good.onnx", samples_of({"X": BIG})).passed


def test_a_check_of_float32_tells_nothing():
    source = saved("(float[4] X) => (float[4] Y) { [root] Y = Sqrt (X) }")
    result = run("check", source, *inputs(X=-BIG))
    assert result.exit_code == 1
    assert "--keep-fp32" not in result.output
    samples = samples_of({"X": -BIG})
    assert cure_run(Model.of(source), check_run(source, samples), Run(inputs=samples)) is None


def test_a_fault_in_float32_that_a_low_model_shows_tells_nothing():
    model = convert_model(parse("(float[4] X) => (float[4] Y) { [root] r = Sqrt (X) [e] Y = Exp (r) }"), "O3")
    samples = samples_of({"X": -BIG})
    cure = cure_run(Model(model), check_run(model, samples), Run(inputs=samples))
    assert cure is None or not cure.confirmed


def test_what_no_node_in_float32_helps_is_said():
    """The input itself is too large for float16."""
    text = "(float16[2] X) => (float16[2] Y) { [double] d = Add (X, X) [half] Y = Add (d, d) }"
    samples = samples_of({"X": np.float16([6e4, 1])})
    cure = cure_run(Model(parse(text)), check_run(parse(text), samples), Run(inputs=samples))
    assert cure is not None
    assert not cure.confirmed
    assert cure.command == ""
    assert cure.outcome.startswith("No fix was found")
    assert cure.trials <= CHECKS


# --- names that mean something to regular expressions or to the shell ----------------------------------------------


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_survive_the_shell(name):
    source = saved(chain(name))
    options = inputs(X=BIG)
    assert run("convert", source, "-o", "bad.onnx", *CARELESS).exit_code == 0
    result = run("check", "bad.onnx", *options)
    assert result.exit_code == 1
    words = the_command(result)
    made = run("convert", source, "-o", "good.onnx", *CARELESS, *words)
    assert made.exit_code == 0, made.output
    assert report_of(run("check", "good.onnx", *options, "--format", "json"))["run"]["first_bad"] is None


@pytest.mark.parametrize("name", ["", *ODD_NAMES[:4]])
def test_odd_names_in_conversions(name):
    """A node without a name is called by the value that it makes."""
    Path("a folder").mkdir()
    source = saved(chain(name), "a folder/it's a model.onnx")
    recipe = Recipe(Options.of("O3", {"hazards": False}))
    cure = cured(source, recipe, {"X": BIG}, output="out put.onnx")
    assert cure.confirmed
    words = shlex.split(cure.command)
    assert words[2] == str(source)
    assert run(*words[1:], "--no-validate", "-q").exit_code == 0
    assert diff_models(source, "out put.onnx", samples_of({"X": BIG})).passed


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1), min_size=1, max_size=3)
)
def test_commands_name_exactly_these_nodes(names):
    import re

    words = shlex.split(Recipe().command("model.onnx", "out.onnx", names))
    pattern = words[words.index("--keep-fp32") + 1]
    assert all(re.fullmatch(pattern, name) for name in names)
    for other in (f"{names[0]}x", f"x{names[0]}", names[0][:-1], names[0] + names[-1]):
        assert bool(re.fullmatch(pattern, other)) == (other in names)


def test_a_model_with_two_kinds_of_faults():
    text = """(float[4] X) => (float[4] Y, float[4] Z) {
        [start] p = Softplus (X)
        [square] s = Mul (p, p) [root] Y = Sqrt (s) [cube] t = Pow (p, three) [back] Z = Pow (t, third)
    }"""
    source = saved(add_weights(parse(text), {"three": np.float32([3]), "third": np.float32([1 / 3])}))
    options = inputs(X=BIG)
    assert run("convert", source, "-o", "bad.onnx", *CARELESS).exit_code == 0
    words = the_command(run("check", "bad.onnx", *options))
    assert run("convert", source, "-o", "good.onnx", *CARELESS, *words).exit_code == 0
    assert report_of(run("check", "good.onnx", *options, "--format", "json"))["run"]["first_bad"] is None


def test_the_last_op_overflows_though_the_output_is_float32():
    source = saved("(float[4] X) => (float[4] Y) { [before] r = Softplus (X) [square] Y = Mul (r, r) }")
    options = inputs(X=BIG)
    assert run("convert", source, "-o", "bad.onnx", *CARELESS).exit_code == 0
    words = the_command(run("check", "bad.onnx", *options))
    assert run("convert", source, "-o", "good.onnx", *CARELESS, *words).exit_code == 0
    assert report_of(run("check", "good.onnx", *options, "--format", "json"))["run"]["first_bad"] is None


INTEGERS = "(int64[2] I) => (float[2] Y) { [down] c = Cast <to = 1> (I) [root] r = Sqrt (c) [after] Y = Relu (r) }"


def test_integers_that_are_too_large_for_float16():
    """A trial that does not run is no cure."""
    source = saved(INTEGERS)
    samples = samples_of({"I": np.array([100_000, 4])})
    options = inputs(I=np.array([100_000, 4]))
    assert run("convert", source, "-o", "bad.onnx", *CARELESS, "--force-low", "down|root|after").exit_code == 0
    report = check_run("bad.onnx", samples)
    assert report.first_bad.node == "down"
    cure = cure_run(Model.of("bad.onnx"), report, Run(inputs=samples))
    kept = check_run("bad.onnx", samples, keep=frozenset(cure.nodes))
    assert kept.skipped is None
    assert cure.confirmed
    assert run("convert", source, "-o", "good.onnx", *CARELESS, *shlex.split(cure.command)).exit_code == 0
    assert report_of(run("check", "good.onnx", *options, "--format", "json"))["run"]["first_bad"] is None


def test_an_input_that_is_too_large_for_float16():
    """What is kept are the nodes that read it: the Cast is the conversion's own."""
    source = saved("(float[2] X) => (float[2] Y) { [root] r = Sqrt (X) [after] Y = Relu (r) }")
    options = inputs(X=np.float32([1e6, 4]))
    assert run("convert", source, "-o", "bad.onnx", *CARELESS).exit_code == 0
    diffed = run("diff", source, "bad.onnx", *options)
    assert diffed.exit_code == 1
    words = [shlex.split(line) for line in diffed.output.splitlines() if line.startswith("   onnxamp convert")]
    assert len(words) == 1
    words = the_command(run("check", "bad.onnx", *options))
    assert run("convert", source, "-o", "good.onnx", *CARELESS, *words).exit_code == 0
    assert run("diff", source, "good.onnx", *options).exit_code == 0


def test_a_careless_input_cast_is_cured_with_the_same_recipe():
    source = saved("(float[2] X) => (float[2] Y) { [root] r = Sqrt (X) [after] Y = Relu (r) }")
    cure = cured(source, Recipe(Options.of("O3", {"hazards": False})), {"X": np.float32([1e6, 4])})
    assert cure.confirmed
    assert "root" in cure.nodes


def test_the_time_for_a_search_ends_it_in_the_midst_of_a_run():
    source = saved(NORM)
    options = (*inputs(X=NORM_X), "--cure-time", "0")
    assert run("convert", source, "-o", "low.onnx", "--no-validate", "-q").exit_code == 0
    result = run("diff", source, "low.onnx", *options, "--cosine", "1")
    assert result.exit_code == 1
    assert "No fix was found in 0 s. Level O1, bfloat16 or wider limits may help." in " ".join(result.output.split())
    saved("(float16[2] X) => (float16[2] Y) { [double] d = Add (X, X) [half] Y = Exp (d) }", "fault.onnx")
    result = run("check", "fault.onnx", *inputs(X=np.float16([6e4, 1])), "--cure-time", "0")
    assert result.exit_code == 1
    assert "No fix was found in 0 s" in " ".join(result.output.split())


def test_other_ways_are_those_of_the_target():
    assert "bfloat16" in other_ways("cuda", "float16")
    assert "bfloat16" not in other_ways("cuda", "bfloat16")
    assert "bfloat16" not in other_ways("webgpu", "float16")
