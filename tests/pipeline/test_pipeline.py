"""Tuning of several models under one budget: what is decided, in which order, what is said, and what is written."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import is_one_sentence, report_of, run
from cuda_double import CudaDouble
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto
from repository import ROOT

import onnxamp
from onnxamp import ArgumentError, ArgumentTypeError, RuntimeFailure, TunedPipeline, tune_pipeline
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.session import make_session

SPEECH = ROOT / "models" / "speech"
Spoken = tuple[Path, dict[str, Any], str]
"""The folder of results, the report as JSON, and the page."""
X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def product(gain: float = 1.0) -> ModelProto:
    """One MatMul: float16 costs it an error of about 3e-4, bfloat16 one of 2e-3."""
    model = parse("(float[N,64] x) => (float[N,64] y) { [product] y = MatMul (x, w) }")
    weights = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32) * gain / 8
    return add_weights(model, {"w": weights})


def cancelling() -> ModelProto:
    """A product, and a sum whose rounding costs far more than that of the product."""
    model = parse("""(float[N,64] x) => (float[N,64] y) <float big = {256}> {
        [product] p = MatMul (x, w)
        [add] s = Add (p, big)
        [sub] y = Sub (s, big)
    }""")
    return add_weights(model, {"w": (64, 64)})


def overflowing() -> ModelProto:
    """Values beyond 65504 between two products; exponents bring them into range."""
    model = parse("(float[N,64] x) => (float[N,64] y) { [up] h = MatMul (x, a)\n [down] y = MatMul (h, b) }")
    rng = np.random.default_rng(2)
    up, down = ((rng.standard_normal((64, 64)) * gain / 8).astype(np.float32) for gain in (1e5, 1e-3))
    return add_weights(model, {"a": up, "b": down})


def chain(models: Mapping[str, Any]) -> dict[str, Any]:
    """Each model behind the other."""
    x = X
    for model in models.values():
        (x,) = model.run(None, {"x": x})
    return {"y": x}


def tuned(models: Mapping[str, Any], tolerance: float, function: Any = chain, **more: Any) -> TunedPipeline:
    more = {"provider": "cpu", "allow_slower": True, **more}
    return tune_pipeline(models, function, tolerance, **more)


def choices(found: TunedPipeline) -> dict[str, str]:
    return {model.name: model.choice for model in found.models}


def pipeline(function: str, *names: str, **settings: str) -> Path:
    """A manifest of products, and the file of its function."""
    for name in names:
        onnx.save(product(), f"{name}.onnx")
    Path("run.py").write_text(function)
    said = [f"{key} = {value}" for key, value in {"function": '"run.py:run"', **settings}.items()]
    path = Path("pipeline.toml")
    path.write_text("\n".join([*said, "[models]", *(f'{name} = "{name}.onnx"' for name in names)]))
    return path


CHAIN = """
import numpy as np

def run(models):
    x = np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64)
    for model in models.values():
        (x,) = model.run(None, {"x": x})
    return {"y": x}
"""


# --- the toy pipeline ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    base = tmp_path_factory.mktemp("speech")
    page, state = base / "page.html", base / "state.json"
    arguments = ("tune", SPEECH / "pipeline.toml", "-o", base / "out", "--provider", "cpu", "--state", state,
                 "--device", "T4")  # fmt: skip
    result = run(*arguments, "--html", page, "--save-plan", base / "plans", "--format", "json")
    assert result.exit_code == 0, result.output
    return base / "out", report_of(result), page.read_text(encoding="utf-8")


def test_only_the_last_model_of_the_toy_pipeline_stays_float32(spoken: Spoken) -> None:
    out, report, _ = spoken
    assert (report["onnxamp"], report["verdict"], report["held"]) == ("tune pipeline", "passed", True)
    found = {model["name"]: model["choice"] for model in report["models"]}
    assert found.pop("vocoder") == "float32"
    assert all(choice.endswith("float16") for choice in found.values())
    assert (out / "vocoder.onnx").read_bytes() == (SPEECH / "vocoder.onnx").read_bytes()
    for name in found:
        types = {tensor.data_type for tensor in onnx.load(out / f"{name}.onnx").graph.initializer}
        assert TensorProto.FLOAT16 in types
        plan = onnxamp.load_plan(out.parent / "plans" / f"{name}.json")
        assert onnxamp.apply_plan(SPEECH / f"{name}.onnx", plan) == onnx.load(out / f"{name}.onnx")


def test_the_error_of_the_toy_pipeline_is_what_a_plain_emulation_shows(
    spoken: Spoken,
) -> None:
    out, report, _ = spoken
    sys.path.insert(0, str(SPEECH))
    try:
        import speech
    finally:
        sys.path.pop(0)
    names = [path.stem for path in SPEECH.glob("*.onnx")]
    before = speech.synthesize({name: make_session(onnx.load(SPEECH / f"{name}.onnx")) for name in names})["audio"]
    after = speech.synthesize({name: make_session(emulate(onnx.load(out / f"{name}.onnx"))) for name in names})["audio"]
    error = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert error <= report["tolerance"]
    assert error == pytest.approx(report["error"], rel=0.05)
    assert report["written_error"] <= report["error"]


def test_the_page_of_the_toy_pipeline(spoken: Spoken) -> None:
    page = spoken[2]
    for text in ("2 of 3 models in low precision", "vocoder", "the nearest choice", "Tried", "acoustic"):
        assert text in page


def test_a_finished_tuning_resumes_with_one_run(spoken: Spoken) -> None:
    out, report, _ = spoken
    arguments = ("tune", SPEECH / "pipeline.toml", "-o", "again", "--provider", "cpu", "--device", "T4")
    result = run(*arguments, "--state", out.parent / "state.json", "--format", "json")
    assert result.exit_code == 0, result.output
    again = report_of(result)
    assert (again["runs"], again["recalled"]) == (0, report["runs"])
    assert again["trials"] == report["trials"]
    for path in out.iterdir():
        assert Path("again", path.name).read_bytes() == path.read_bytes()


def test_slower_models_are_written_only_if_that_is_allowed() -> None:
    """A product as small as this is smaller in float16, and slower by the Casts around it."""
    found = tuned({"one": product()}, 1e-2, dtypes=["float16"], allow_slower=False)
    assert choices(found) == {"one": "float32"}
    assert "--allow-slower accepts slower ones." in " ".join(str(found).split())
    assert choices(tuned({"one": product()}, 1e-2, dtypes=["float16"])) != {"one": "float32"}


# --- what is decided ----------------------------------------------------------------------------------------------


def test_one_budget_for_all() -> None:
    """Each model holds alone in float16; together they miss by a little, so one of them stays as it is."""
    models = {"one": product(), "two": product()}
    each = tuned({"one": product()}, 1, dtypes=["float16"]).error
    found = tuned(models, 1.2 * each, dtypes=["float16"])
    assert sorted(choices(found).values())[1] == "float32"
    assert found.held
    assert [trial.held for trial in found.trials if not trial.others] == [True, True]
    assert [trial.held for trial in found.trials if trial.others] == [False]
    assert set(choices(tuned(models, 2 * each, dtypes=["float16"])).values()) == {"O2 float16"}


def test_the_order_is_the_least_error_per_time_first() -> None:
    """The same model, but what the second one makes counts a hundredth of the number."""

    def weighed(models: Mapping[str, Any]) -> dict[str, Any]:
        one, two = (models[name].run(None, {"x": X})[0] for name in ("one", "two"))
        return {"y": one + 0.01 * two}

    found = tuned({"one": product(), "two": product()}, 0.01, weighed)
    assert found.order == ("two", "one")
    alone = {model.name: model.alone for model in found.models}
    assert alone["two"] is not None
    assert alone["one"] is not None
    assert 0 < 50 * alone["two"] < alone["one"]


def test_the_type_with_the_smaller_error_is_taken_where_it_matters() -> None:
    each = {dtype: tuned({"m": product()}, 1, dtypes=[dtype]).error for dtype in ("float16", "bfloat16")}
    assert 4 * each["float16"] < each["bfloat16"]
    middle = (each["float16"] * each["bfloat16"]) ** 0.5
    assert choices(tuned({"m": product()}, middle, dtypes=["bfloat16", "float16"])) == {"m": "O2 float16"}


def test_exponents_are_found_where_values_overflow() -> None:
    found = tuned({"m": overflowing()}, 1e-3, dtypes=["float16"])
    assert choices(found) == {"m": "O2 float16, rescaled"}
    assert found["m"].exponents > 0
    assert [trial.choice for trial in found.trials if trial.error > 1]
    assert found["m"].plan.options.rescaling is not None


def test_level_auto_finds_what_lies_between() -> None:
    found = tuned({"m": cancelling()}, 1e-3, dtypes=["float16"], levels=["O3", "auto"])
    assert choices(found) == {"m": "auto float16"}
    assert found.error <= 1e-3
    low = {row.node for row in found["m"].plan.rows if row.low}
    assert "product" in low
    assert not {"add", "sub"} & low
    assert any("squared error" in row.detail or "its own" in row.detail for row in found["m"].plan.rows)


def test_a_model_without_types_stays_as_it_is() -> None:
    onnx.save(product(), "a.onnx")
    Path("run.py").write_text(CHAIN)
    Path("p.toml").write_text(
        'function = "run.py:run"\n[models]\na = { path = "a.onnx", dtypes = [] }\nb = { path = "sub/b.onnx",'
        ' dtypes = ["float16"], options = { keep_high = ["product"] } }'
    )
    Path("sub").mkdir()
    onnx.save(product(), "sub/b.onnx")
    result = run("tune", "p.toml", "-o", "out", "--provider", "cpu", "--allow-slower")
    assert result.exit_code == 0, result.output
    assert "Nothing was converted" in result.output
    for file in ("a.onnx", "sub/b.onnx"):
        assert Path("out", file).read_bytes() == Path(file).read_bytes()


# --- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("better", "sign"), [("lower", 1), ("higher", -1)])
def test_a_number_is_compared_with_that_of_float32(better: str, sign: int) -> None:
    """The budget is by how much it gets worse, wherever it starts."""
    (true,) = make_session(product()).run(None, {"x": X})

    def score(models: Mapping[str, Any]) -> float:
        (y,) = models["m"].run(["y"], {"x": X})
        return 7 + sign * float(np.linalg.norm(y - true) / np.linalg.norm(true))

    found = tuned({"m": product()}, 1e-3, score, better=better)
    assert (found.metric, found.held, choices(found)) == ("", True, {"m": "O2 float16"})
    assert found.reference == pytest.approx(7, abs=1e-5)
    assert found.value is not None
    assert sign * (found.value - found.reference) == pytest.approx(found.error)
    assert f"({better} is better)" in " ".join(repr(found).split())
    assert choices(tuned({"m": product()}, 1e-5, score, better=better)) == {"m": "float32"}
    other = "higher" if better == "lower" else "lower"
    assert tuned({"m": product()}, 1e-5, score, better=other).error == 0


def test_what_is_said_when_nothing_holds() -> None:
    found = tuned({"one": product(), "two": product()}, 1e-6)
    assert set(choices(found).values()) == {"float32"}
    assert (found.held, found.error) == (True, 0.0)
    text = repr(found)
    assert "Nothing was converted: no model can be in low precision within the tolerance." in text
    assert "The nearest is" in text
    nearest = float(text.partition("--tolerance ")[2].split()[0])
    again = tuned({"one": product(), "two": product()}, nearest)
    assert max(choices(again).values()) == "float32"
    assert "float16" in "".join(choices(again).values())


def test_a_break_in_low_precision_is_told() -> None:
    def picky(models: Mapping[str, Any]) -> dict[str, Any]:
        y = chain(models)["y"]
        if not np.isfinite(y).all():
            raise ValueError("the sound is silent")
        return {"y": y}

    found = tuned({"m": overflowing()}, 1e-2, picky, dtypes=["float16"], levels=["O3"], hazards=False)
    assert any("the sound is silent" in trial.failure for trial in found.trials)


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_function_that_differs_from_itself() -> None:
    noise = np.random.default_rng(0)

    def noisy(models: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": chain(models)["y"] + noise.standard_normal((4, 64))}

    with pytest.raises(RuntimeFailure, match=r"returns different results each time: .*Seed everything random"):
        tuned({"m": product()}, 1e-2, noisy)


def test_a_function_that_fails_or_forgets_a_model() -> None:
    with pytest.raises(RuntimeFailure, match="failed in float32: KeyError: 'other'"):
        tuned({"m": product()}, 1e-2, lambda models: models["other"])
    with pytest.raises(ArgumentError, match="never runs the model 'two'"):
        tuned({"one": product(), "two": product()}, 1e-2, lambda models: chain({"one": models["one"]}))
    with pytest.raises(ArgumentError, match="must return a number, or a dict of arrays by name"):
        tuned({"m": product()}, 1e-2, lambda models: "good")
    with pytest.raises(
        RuntimeFailure, match=r"The model 'm' is called with unexpected inputs\. The model's input 'x' is"
    ):
        tuned({"m": product()}, 1e-2, lambda models: models["m"].run(None, {}))
    with pytest.raises(RuntimeFailure, match="The model 'm' has no output 'z'; it has y"):
        tuned({"m": product()}, 1e-2, lambda models: models["m"].run(["z"], {"x": X}))


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="pass function"):
        tune_pipeline({"m": product()})
    with pytest.raises(ArgumentTypeError, match="a dict of models by name"):
        tune_pipeline(5, chain)
    with pytest.raises(ArgumentError, match="'lower' or 'higher'"):
        tuned({"m": product()}, 1e-2, better="more")
    with pytest.raises(ArgumentError, match="the search decides rescale"):
        tuned({"m": product()}, 1e-2, rescale=True)
    with pytest.raises(ArgumentError, match="needs a function with a name"):
        tuned({"m": product()}, 1e-2, state="state.json")
    with pytest.raises(ArgumentError, match="cannot be a file in the folder for results"):
        tuned({"../m": product()}, 1e-2)
    with pytest.raises(ArgumentError, match="at least one model"):
        tuned({}, 1e-2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("function = 3", "names no models"),
        ('[models]\nm = "m.onnx"', "names no function"),
        ('function = "run.py:run"\ntolerence = 1\n[models]\nm = "m.onnx"', "did you mean 'tolerance'?"),
        ('function = "run.py:run"\n[models]\nm = {paht = "m.onnx"}', "did you mean 'path'?"),
        ('function = "run.py:run"\n[models]\nm = {}', "has no path"),
        ('function = "run.py:no"\n[models]\nm = "m.onnx"', "has no attribute 'no'"),
        ('function = "run.py:run"\ndtypes = "float16"\n[models]\nm = "m.onnx"', "dtypes must be a list"),
        ('function = "run.py:run"\n[models]\nm = "m.onnx"\nn = "m.onnx"', "are the same file"),
        ('function = "run.py:run"\n[options]\ndtype = "float16"\n[models]\nm = "m.onnx"', "the search decides dtype"),
        ("function = ", "is not TOML"),
    ],
)
def test_manifests_that_are_wrong(text: str, said: str) -> None:
    pipeline(CHAIN, "m")
    Path("pipeline.toml").write_text(text)
    result = run("tune", "pipeline.toml", "-o", "out")
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--inputs", "x.npz"), "--inputs is for a single model"),
        (("--pick", 1), "--pick is for a single model"),
        (("--dim", "N=3"), "--dim is for a single model"),
        (("--rescale",), "--rescale is for a single model"),
        (("--times", "measured"), "--times is for a single model"),
        (("-o", "run.py"), "go to a folder"),
        (("-o", "."), "already read or written"),
    ],
)
def test_options_that_are_for_a_single_model(arguments: tuple[object, ...], said: str) -> None:
    result = run("tune", pipeline(CHAIN, "m"), *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_a_result_that_is_refused_harms_nothing() -> None:
    """What runs last are the written files: there this function breaks."""
    breaking = CHAIN.replace("def run", "CALLS = [0]\n\ndef run").replace(
        'return {"y": x}', 'CALLS[0] += 1\n    return {"y": x if CALLS[0] < LAST else x * 2}'
    )
    manifest = pipeline(breaking.replace("LAST", "1000"), "one", "two")
    arguments = ("tune", manifest, "-o", "out", "--provider", "cpu", "--allow-slower")
    first = run(*arguments, "--format", "json")
    assert first.exit_code == 0, first.output
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    Path("run.py").write_text(breaking.replace("LAST", str(report_of(first)["runs"] + 2)))
    onnx.save(product(2.0), "one.onnx")
    result = run(*arguments)
    assert result.exit_code == 1
    assert "As written, the pipeline is" in result.output
    assert "were not put in place" in result.output
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before


def test_results_do_not_replace_models() -> None:
    onnx.save(product(), "m.onnx")
    with pytest.raises(ArgumentError, match=r"'m\.onnx' is a model of the pipeline: name another folder"):
        tuned({"m": "m.onnx"}, 1e-2, output=".")
    assert onnx.load("m.onnx") == product()


def test_an_interrupted_tuning_resumes() -> None:
    counting = CHAIN.replace(
        'return {"y"', 'with open("calls", "a") as calls:\n        calls.write(".")\n    return {"y"'
    )
    manifest = pipeline(counting, "one", "two", dtypes='["float16"]')
    arguments = ("tune", manifest, "--provider", "cpu", "--allow-slower", "--state", "state.json", "--format", "json")
    stopped = report_of(run(*arguments, "-o", "a", "--runs", 1))
    assert stopped["stopped"]
    done = len(Path("calls").read_text())
    whole = report_of(run(*arguments, "-o", "b"))
    assert not whole["stopped"]
    assert whole["recalled"] == 2
    assert len(Path("calls").read_text()) - done == whole["runs"] + 2  # in float32, and as written
    Path("calls").unlink()
    again = report_of(run(*arguments, "-o", "c"))
    assert (again["runs"], len(Path("calls").read_text())) == (0, 2)
    assert Path("b/one.onnx").read_bytes() == Path("c/one.onnx").read_bytes()
    Path("run.py").write_text(counting + "# another function")
    refused = run(*arguments, "-o", "d")
    assert refused.exit_code == 2
    assert "belongs to another tuning of a pipeline: the function changed since" in " ".join(refused.output.split())


def test_a_state_is_that_of_another_process_as_well() -> None:
    """Sets have another order there."""
    manifest = pipeline(CHAIN.replace("(x,) =", "x, *_ ="), "one", dtypes='["float16"]')
    model = onnx.load("one.onnx")
    for name in "abcd":
        model.graph.node.add(op_type="Identity", input=["y"], output=[name])
        model.graph.output.add().CopyFrom(model.graph.output[0])
        model.graph.output[-1].name = name
    onnx.save(model, "one.onnx")
    arguments = ["tune", str(manifest), "--provider", "cpu", "--allow-slower", "--state", "state.json"]
    arguments += ["--io-types", "keep:x,y,a,b,c,d", "--format", "json"]
    runs = []
    for seed in "12":
        done = subprocess.run(
            [sys.executable, "-m", "onnxamp", *arguments, "-o", f"out{seed}"], check=True, capture_output=True,
            text=True, env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        runs.append(json.loads(done.stdout)["runs"])
    assert runs[0] > 0
    assert runs[1] == 0


def test_a_state_of_something_else() -> None:
    Path("state.json").write_text(json.dumps({"onnxamp": "tune"}))
    result = run("tune", pipeline(CHAIN, "m"), "--state", "state.json")
    assert result.exit_code == 2
    assert "is not a state that this version of onnxamp reads" in " ".join(result.output.split())


def test_time_that_is_over() -> None:
    manifest = pipeline(CHAIN, "m")
    result = run("tune", manifest, "--provider", "cpu", "--search-time", 0)
    assert result.exit_code == 0, result.output
    assert "the search was over" in result.output
    assert "--search-time and --runs raise it" in result.output
    assert Path("pipeline_low/m.onnx").read_bytes() == Path("m.onnx").read_bytes()


def test_models_look_like_sessions_to_the_function() -> None:
    seen: list[Any] = []

    def looking(models: Mapping[str, Any]) -> dict[str, Any]:
        model = models["m"]
        seen.append([(item.name, item.type, item.shape) for item in (*model.get_inputs(), *model.get_outputs())])
        return chain(models)

    tuned({"m": product()}, 1e-2, looking)
    session = make_session(product())
    wanted = [(item.name, item.type, item.shape) for item in (*session.get_inputs(), *session.get_outputs())]
    assert seen[0] == wanted
    assert all(one == wanted for one in seen)


def test_with_a_device_converted_models_run_as_they_are(cuda_double: CudaDouble) -> None:
    """As on CUDA, with the CPU in its place, which computes float16 in float32."""
    emulated = tuned({"m": product()}, 1e-2, dtypes=["float16"])
    cuda_double.models.clear()
    found = tuned({"m": product()}, 1e-2, dtypes=["float16"], provider="cuda", output="out")
    assert found.ran_on == "CUDA (CUDA device)"
    assert emulated.ran_on.startswith("CPU, emulated float16")
    ran = [ModelProto.FromString(model) for model in cuda_double.models if isinstance(model, bytes)]
    assert any(tensor.data_type == TensorProto.FLOAT16 for model in ran for tensor in model.graph.initializer)
    assert any(str(model).startswith("out") for model in cuda_double.models if isinstance(model, str)), "as written"
    assert found.written_error == found.error != emulated.error


def test_the_sums_of_the_target_are_emulated() -> None:
    """Each model's own: WebGPU sums up float16 in float16."""
    shown = {target: tuned({"m": product()}, 1e-1, dtypes=["float16"], target=target) for target in ("any", "webgpu")}
    assert shown["webgpu"].ran_on == "CPU, emulated float16 of webgpu"
    assert shown["any"].ran_on == "CPU, emulated float16"
    assert shown["webgpu"].error > 1.2 * shown["any"].error > 0


def test_calls_are_sampled_and_counted() -> None:
    """A model that runs many times keeps a few of its inputs, from first to last, and counts in times."""

    def looped(models: Mapping[str, Any]) -> dict[str, Any]:
        x = X
        for _ in range(20):
            (x,) = models["m"].run(None, {"x": x})
            x = x / np.abs(x).max()
        return {"y": x}

    found = tuned({"m": product()}, 1e-1, looped)
    once = tuned({"m": product()}, 1e-1)
    assert found["m"].calls == 20
    assert found["m"].time_before == pytest.approx(20 * once["m"].time_before)


def test_warnings_name_their_model() -> None:
    with pytest.warns(onnxamp.OptionWarning, match="m: Your white list removes Pow from"):
        tuned({"m": product()}, 1e-2, white_list=["Pow"])


def test_a_name_has_to_match_in_one_of_the_models_whose_options_hold_it() -> None:
    other = product()
    other.graph.node[0].name = "other"
    members = {"m": product(), "n": other}
    shared = {"keep_high": ["other"], "strict_options": True}
    assert not tuned(members, 1e-2, **shared).warnings
    with pytest.warns(onnxamp.OptionWarning, match="^The pattern 'nothing' matches no node name.$"):
        found = tuned(members, 1e-2, keep_high=["nothing"])
    assert found.warnings == ("The pattern 'nothing' matches no node name.",)
    with pytest.raises(onnxamp.ArgumentError, match="Did you mean 'other'"):
        tuned(members, 1e-2, keep_high=["othr"], strict_options=True)


def test_every_error_of_the_command_is_a_sentence() -> None:
    result = run("tune", pipeline("def run(models):\n    return models['x']", "m"))
    assert result.exit_code == 1
    assert is_one_sentence(result)


def test_frames() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    found = tuned({"m": product()}, 1e-2)
    assert list(found.to_pandas()["choice"]) == ["O2 float16"]
    assert len(found.to_pandas("trials")) == len(list(itertools.chain(found.trials)))
