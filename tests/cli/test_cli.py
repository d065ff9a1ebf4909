"""``onnxamp convert``: what it prints, what it writes, and how it ends."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, MODELS, NORM, is_one_sentence, report_of, run, saved, small
from graphs.case import parse
from onnx import TensorProto, numpy_helper

import onnxamp


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


# --- convert ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_converts_every_model(path: Path) -> None:
    shutil.copy(path, path.name)
    result = run("convert", path.name)
    assert result.exit_code == 0, result.output
    target = Path(f"{path.stem}_fp16.onnx")
    assert str(target) in result.output
    assert re.match("✔ Converted to float16; |! Converted to float16, but slower by the estimate", result.output)
    assert re.search(
        r"^  (CUDA.*|CPU, emulated float16), random inputs \(seed 0\), loads in ONNX Runtime \S+( on CUDA)?$",
        result.output,
        re.MULTILINE,
    )
    assert "✘" not in result.output
    assert onnx.load(target) == onnxamp.convert_model(path)
    assert names(".") == [path.name, target.name]


def test_where_the_result_goes() -> None:
    small()
    Path("deep").mkdir()
    shutil.move("model.onnx", "deep/model.onnx")
    assert run("convert", "deep/model.onnx", "-q").exit_code == 0
    assert run("convert", "deep/model.onnx", "-q", "--dtype", "bfloat16").exit_code == 0
    assert run("convert", "deep/model.onnx", "-q", "-o", "name.onnx").exit_code == 0
    assert names("deep") == ["model.onnx", "model_bf16.onnx", "model_fp16.onnx"]
    assert names(".") == ["deep", "name.onnx"]


def test_quiet() -> None:
    assert run("convert", small(), "-q").output == ""


def test_no_validation() -> None:
    result = run("convert", small(), "--no-validate")
    assert result.exit_code == 0
    assert "not validated" in result.output
    assert "Outputs" not in result.output


def test_level_0_says_that_nothing_changed() -> None:
    path = small()
    result = run("convert", path, "--level", "O0", "-o", "out.onnx")
    assert "Nothing was converted; the output matches the original." in result.output
    assert "Level O0 keeps every precision as it is." in result.output
    assert Path("out.onnx").read_bytes() == path.read_bytes()


def test_options_reach_the_engine() -> None:
    path = saved(NORM)
    options = ["--level", "O3", "--keep-fp32", "mean", "--force-low", "project", "--io-types", "low", "--lists", "fast",
               "--white", "Sqrt", "--black", "Add", "--target", "any", "--opset", "18"]  # fmt: skip
    assert run("convert", path, "-q", "--no-validate", "-o", "out.onnx", *options).exit_code == 0
    wanted = onnxamp.convert_model(
        path, "O3", keep_high=["mean"], force_low=["project"], keep_io_types=False, lists="fast", white_list=["Sqrt"],
        black_list=["Add"], target="any", opset=18,
    )  # fmt: skip
    assert onnx.load("out.onnx") == wanted


def test_json() -> None:
    result = run("convert", small(), "--format", "json")
    report = json.loads(result.output)
    assert (report["onnxamp"], report["format"]) == ("convert", 1)
    assert report["target"] == "model_fp16.onnx"
    assert report["plan"]["casts"] == report["summary"]["casts_added"] == 2
    assert report["validation"]["failure"] is None
    assert [output["name"] for output in report["validation"]["outputs"]] == ["Y"]
    assert report["bytes_after"] * 2 == report["bytes_before"]


@pytest.mark.parametrize(
    ("options", "count"),
    [((), 1), (("--target", "webgpu"), 16), (("--preset", "transformers.js"), 16),
     (("--target", "webgpu", "--samples", "2"), 2), (("--target", "cpu"), 1)],
)  # fmt: skip
def test_sums_that_are_rounded_on_their_way_are_judged_on_several_samples(options: tuple[str, ...], count: int) -> None:
    asked = (*options, "--provider", "cpu", "--format", "json")
    path = small()
    assert json.loads(run("convert", path, "-o", "low.onnx", *asked).output)["validation"]["samples"] == count
    if "--preset" not in options:
        assert report_of(run("diff", path, "low.onnx", *asked))["samples"] == count
        target = dict(zip(options[::2], options[1::2], strict=True)).get("--target", "cuda")
        given = 2 if "--samples" in options else None
        found = onnxamp.diff_models(path, "low.onnx", provider="cpu", target=target, count=given)
        assert found.samples == count


def test_verdicts() -> None:
    result = run("convert", small(), "-v")
    assert re.search(r"first:T +MatMul +float16 +on the white list: MatMul", result.output)


def test_plans_repeat_a_conversion() -> None:
    shutil.copy(CLASSIFIER, "model.onnx")
    options = ["--level", "O3", "--keep-fp32", ".*conv.*", "--no-validate", "-q"]
    assert run("convert", "model.onnx", "-o", "first.onnx", "--save-plan", "plan.json", *options).exit_code == 0
    assert run("convert", "model.onnx", "-o", "second.onnx", "--plan", "plan.json", "-q").exit_code == 0
    assert Path("first.onnx").read_bytes() == Path("second.onnx").read_bytes()
    assert onnxamp.load_plan("plan.json").level == "O3"


def named() -> Path:
    """Names with slashes, as PyTorch gives them."""
    text = "<float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> { h = MatMul (X, w) Y = Softmax (h) }"
    model = parse(f"(float[N,4] X) => (float[N,4] Y) {text}")
    for node in model.graph.node:
        node.name = f"layer/attention/{node.op_type}_1"
    return saved(model)


MISTAKES = {
    "part": (("--keep-fp32", "MatMul_1"), "It matches only part of 'layer/attention/MatMul_1': write '.*MatMul_1.*'."),
    "spelling": (("--force-low", "layer/atention/Softmax_1"), "Did you mean 'layer/attention/Softmax_1'?"),
    "nothing": (("--keep-fp32", "nosuchnode"), "The pattern 'nosuchnode' matches no node name."),
    "op type": (("--black", "softmaxx"), "Did you mean 'Softmax'?"),
    "white op type": (("--white", "Sofmax"), "Did you mean 'Softmax'?"),
    "node": (("--keep-node", "layer/attention/MatMul"), "Did you mean 'layer/attention/MatMul_1'?"),
    "weight": (("--low-weight", "v"), "The pattern 'v' matches no float32 weight, and no node that reads one."),
    "end": (("--io-types", "keep:Z"), "the model has no input or output 'Z'. It has 'X', 'Y'."),
    "near end": (("--io-types", "keep:X,y"), "the model has no input or output 'y'."),
}


@pytest.mark.parametrize(("options", "said"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("command", ["convert", "inspect", "tune", "view"])
def test_names_that_match_nothing_are_wrong_usage(command: str, options: tuple[str, str], said: str) -> None:
    """Told before what takes time: here that would end with another error."""
    named()
    if command in ("inspect", "view"):
        result = run(command, "model.onnx", *options)
    else:
        np.savez("bad.npz", X=np.full((1, 4), np.nan, np.float32))
        result = run(command, "model.onnx", *options, "-q", "--inputs", "bad.npz")
    assert result.exit_code == 2
    assert " ".join(result.stderr.split()).count(said) == 1
    assert not Path("model_fp16.onnx").exists()


def test_op_types_that_the_model_lacks_are_no_mistake() -> None:
    result = run("convert", named(), "--no-validate", "-q", "--white", "LSTM", "--black", "com.example::Own")
    assert (result.exit_code, result.stderr) == (0, "")


def test_names_that_folding_removes_are_no_mistake() -> None:
    shutil.copy(CLASSIFIER.parent / "encoder.onnx", "encoder.onnx")
    square = ("--keep-node", "embeddings/norm/square")
    assert run("convert", "encoder.onnx", "--no-validate", "-q", *square, "--fold").exit_code == 0
    assert run("convert", "encoder.onnx", "--no-validate", "-q", *square).exit_code == 0


@pytest.mark.parametrize("command", [
    ("convert", "model.onnx"), ("convert", "model.onnx", "--no-validate", "--rescale"), ("check", "model.onnx"),
    ("diff", "model.onnx", "model.onnx"), ("tune", "model.onnx"), ("bench", "model.onnx"),
])  # fmt: skip
def test_dimensions_that_the_inputs_lack_are_wrong_usage(command: tuple[str, ...]) -> None:
    named()
    result = run(*command, "--dim", "M=3")
    assert result.exit_code == 2
    assert "The model's inputs have no dimension 'M'; they have 'N'." in " ".join(result.stderr.split())


def test_other_names_that_match_nothing_are_wrong_usage() -> None:
    shutil.copy(CLASSIFIER, "model.onnx")
    for arguments, said in {
        ("diff", "model.onnx", "model.onnx", "--atol", "logit=1"): "Did you mean 'logits'?",
        ("check", "model.onnx", "--skip-op", "Convv"): "Did you mean 'Conv'?",
    }.items():
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert said in " ".join(result.stderr.split())


def test_names_that_match_nothing_in_python() -> None:
    model = onnx.load(named())
    wrong = {"keep_nodes": ["layer/attention/MatMul"]}
    with pytest.warns(onnxamp.OptionWarning, match="Did you mean 'layer/attention/MatMul_1'"):
        onnxamp.convert_model(model, **wrong)
    for function in (onnxamp.convert_model, onnxamp.plan_model, onnxamp.tune_model):
        with pytest.raises(onnxamp.ArgumentError, match="Did you mean 'layer/attention/MatMul_1'"):
            function(model, **wrong, strict_options=True)
    with pytest.raises(onnxamp.ArgumentError, match="Did you mean 'layer/attention/MatMul_1'"):
        onnxamp.convert_file("model.onnx", "low.onnx", **wrong, strict_options=True)


def test_plans_with_keys_that_match_nothing() -> None:
    """Entries of nodes that the model lacks, options and keys that are misspelled."""
    named()
    assert run("convert", "model.onnx", "-q", "--save-plan", "plan.json").exit_code == 0
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    more = data["rows"][0] | {"key": "layer/attention/Gone:T", "node": "layer/attention/Gone", "op": "MatMul"}
    for changed, said in (
        (data | {"rows": [*data["rows"], more]}, "The plan decides 'layer/attention/Gone:T', which the model lacks"),
        (data | {"options": data["options"] | {"keep_nods": []}}, "did you mean 'keep_nodes'?"),
        (data | {"row": []}, "did you mean 'rows'?"),
    ):
        Path("wrong.json").write_text(json.dumps(changed), encoding="utf-8")
        for command in ("convert", "view"):
            result = run(command, "model.onnx", "--plan", "wrong.json", "-q")
            assert result.exit_code == 2, result.output
            assert said in " ".join(result.stderr.split())
    Path("wrong.json").write_text(json.dumps(data | {"rows": [*data["rows"], more]}), encoding="utf-8")
    with pytest.warns(onnxamp.OptionWarning, match="which the model lacks"):
        onnxamp.apply_plan("model.onnx", onnxamp.load_plan("wrong.json"))


def test_mistakes_are_told_at_once_in_python() -> None:
    """Level auto runs the model for as long as it takes; here it cannot."""
    model = onnx.load(named())
    wrong = {"keep_high": ["layer/atention/Softmax_1"]}
    with pytest.warns(onnxamp.OptionWarning) as early, pytest.raises(onnxamp.ArgumentError):
        onnxamp.tune_model(model, samples={"nothing": np.zeros(1)}, **wrong)
    with pytest.warns(onnxamp.OptionWarning) as once:
        onnxamp.convert_model(model, "auto", **wrong)
    assert [str(warning.message) for warning in early] == [str(warning.message) for warning in once]
    assert [str(warning.message).split("name. ")[1] for warning in once] == [
        "Did you mean 'layer/attention/Softmax_1'?"
    ]


def test_options_that_a_plan_replaces() -> None:
    path = named()
    assert run("convert", path, "-q", "--save-plan", "plan.json").stderr == ""
    result = run("convert", path, "-q", "--plan", "plan.json", "--level", "O3", "--black", "Softmax", "--samples", "2")
    assert result.stderr == "Warning: The plan overrides --level, --black.\n"
    plan = onnxamp.load_plan("plan.json")
    with pytest.warns(onnxamp.OptionWarning, match="The plan replaces black_list: these arguments have no effect"):
        onnxamp.convert_file(path, "low.onnx", plan=plan, black_list=["Softmax"])


@pytest.mark.parametrize(
    "command", [("convert", "-o", "low.onnx"), ("check",), ("inspect",), ("bench", "--seconds", 0.01)]
)
def test_one_line(command: tuple[str, ...]) -> None:
    path, rest = small(), command[1:]
    result = run(command[0], path, *rest, "--format", "line")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1


def test_lists_that_cannot_be_obeyed_are_mentioned() -> None:
    shutil.copy(CLASSIFIER.parent / "encoder.onnx", "encoder.onnx")
    result = run("convert", "encoder.onnx", "--no-validate", "--no-fold", "--white", "Pow", "--white", "conv2d", "-v")
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert (
        "Pow of your white list stays in float32 at 'embeddings/norm/square' and 4 more: part of a decomposed op whose"
        in said
    )
    assert "Your white list removes Pow from the black list of 'default'." in said
    assert "The op type 'conv2d' in your lists does not occur in the model." in said


def test_an_upgrade_that_would_help_is_mentioned() -> None:
    text = """(float[1,2] X) => (float[1,2] Y) <float[2,2] w = {1, 2, 3, 4}, float high = {6}> {
        h = MatMul (X, w) c = Clip (h, , high) Y = MatMul (c, w) }"""
    path = saved(parse(text, opset=11, ir=7))
    kept = run("convert", path, "--opset", "keep", "-v").output
    assert "2 of 4 new Casts vanish with --opset 12, which brings low-precision kernels for Clip." in kept
    assert "vanish" not in run("convert", path, "--opset", "12").output
    assert (
        "Upgraded from opset 11 to 12, which saves 2 of 4 new Casts and brings float16 kernels for Clip."
        in run("convert", path, "-v").output
    )


def test_level_auto() -> None:
    path = saved(NORM)
    result = run("convert", path, "--level", "auto", "--tolerance", "0.005", "--samples", "2")
    assert result.exit_code == 0, result.output
    assert "auto float16 for cuda" in result.output


@pytest.mark.slow
def test_a_tolerance_is_the_limit_of_the_validation() -> None:
    """At any level: what misses it is cured, or kept apart; and there is none without a validation."""
    plain = report_of(run("convert", CLASSIFIER, "-o", "a.onnx", "--samples", "2", "--format", "json"))["validation"]
    reached = max(row["rel_l2"] for row in plain["outputs"])
    for factor, code in ((1.1, 0), (0.9, 1)):
        options = ("--samples", "2", "--no-cure", "--tolerance", reached * factor, "--format", "json")
        done = run("convert", CLASSIFIER, "-o", "b.onnx", *options)
        judged = json.loads(done.stdout)["validation"]["judgements"]
        assert (done.exit_code, {row["limit"] for row in judged}) == (code, {reached * factor})
    cured = run(
        "convert", CLASSIFIER, "-o", "c.onnx", "--samples", "2", "--tolerance", reached * 0.9, "--format", "json"
    )
    assert cured.exit_code == 0
    assert max(row["rel_l2"] for row in report_of(cured)["validation"]["outputs"]) <= reached * 0.9
    refused = run("convert", CLASSIFIER, "-o", "d.onnx", "--no-validate", "--tolerance", "0.005")
    assert (refused.exit_code, "--tolerance would have no effect" in refused.output) == (2, True)
    assert run("convert", CLASSIFIER, "-o", "d.onnx", "--tolerance", "-1").exit_code == 2


# --- what goes wrong --------------------------------------------------------------------------------------------


def test_a_broken_result_is_explained_and_kept_apart() -> None:
    path = saved(NORM)
    Path("model_fp16.onnx").write_text("a good one")
    result = run("convert", path, "--level", "O3", "--no-hazards", "--no-cure")
    assert result.exit_code == 1
    assert "The first bad value is 'q' (output of Pow node 'square'): Inf in " in result.output
    assert "Values vanished" in result.output
    assert "failed validation and was written to model_fp16.failed.onnx" in result.output
    assert onnx.load("model_fp16.failed.onnx").graph.initializer[0].data_type == TensorProto.FLOAT16
    assert Path("model_fp16.onnx").read_text() == "a good one"
    assert run("convert", path, "--level", "O3").exit_code == 0, "the hazards are there for this"


def test_a_broken_result_is_healed() -> None:
    """What was seen to pass is what is written."""
    path = saved(NORM)
    result = run("convert", path, "--level", "O3", "--no-hazards", "-v")
    assert result.exit_code == 0, result.output
    assert "with known hazards in float32 to pass validation" in result.output
    assert "The first result failed: Output 'Y': Values vanished" in result.output
    assert "The first bad value is 'q' (output of Pow node 'square'): Inf in " in result.output
    assert "The inputs are random." in result.output
    assert onnx.load("model_fp16.onnx") == onnxamp.convert_model(str(path), "O3")
    assert sorted(file.name for file in Path().iterdir()) == ["model.onnx", "model_fp16.onnx"]


def test_nodes_that_keep_a_result_from_passing_stay_float32() -> None:
    path = saved("""(float[4] X) => (float[4] Y) {
        [first] a = LeakyRelu (X) [square] s = Mul (a, a) [root] r = Sqrt (s) [last] Y = Relu (r)
    }""")
    np.savez("x.npz", X=np.float32([300, 1, 2, 3]))
    result = run("convert", path, "--level", "O3", "--inputs", "x.npz", "--format", "json")
    assert result.exit_code == 0, result.output
    cure = report_of(result)["validation"]["cure"]
    assert (cure["applied"], cure["confirmed"]) == (True, True)
    assert "square" in cure["nodes"]
    literal = onnxamp.convert_model(str(path), "O3")
    assert cure["casts"] == [casts_of(literal), casts_of(onnx.load("model_fp16.onnx"))]
    assert cure["level"] == ""
    assert "random" not in result.output
    kept = onnxamp.convert_model(str(path), "O3", keep_high=cure["nodes"])
    assert onnx.load("model_fp16.onnx") == kept
    assert run("diff", path, "model_fp16.onnx", "--inputs", "x.npz").exit_code == 0


def casts_of(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Cast" for node in model.graph.node)


def test_the_price_of_a_cure_is_said_in_casts() -> None:
    path = saved("""(float[4] X) => (float[4] Y) {
        [first] a = LeakyRelu (X) [square] s = Mul (a, a) [root] r = Sqrt (s) [last] Y = Relu (r)
    }""")
    np.savez("x.npz", X=np.float32([300, 1, 2, 3]))
    result = run("convert", path, "--level", "O3", "--inputs", "x.npz", "-v")
    assert result.exit_code == 0, result.output
    before, after = casts_of(onnxamp.convert_model(str(path), "O3")), casts_of(onnx.load("model_fp16.onnx"))
    told = "as many as without" if after == before else f"instead of {before}"
    assert re.search(rf"with {after} Casts?,? {told}", " ".join(result.output.split()))


def many(there: str, back: str, by: int, more: str = "", outputs: str = "", of: str = "X") -> str:
    """A product beside more pairs of ops than a cure may name, which only O2 lowers, and what else is asked for."""
    pairs = "".join(f"[to_{i}] a{i} = {there} ({of}, c) [from_{i}] Y{i} = {back} (a{i}, c) " for i in range(14))
    outputs += ", ".join(f"float[4,4] Y{i}" for i in range(14))
    return saved(
        f"(float[4,4] X) => (float[4,4] Z, {outputs}) <float c = {{{by}}}> {{ Z = MatMul (X, X) {pairs} {more} }}"
    )


@pytest.mark.slow
def test_where_errors_add_up_measurements_tell_what_may_be_low() -> None:
    path = many("Add", "Sub", 1000)  # the sums lose small terms
    result = run("convert", path, "--strict", "-v")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "Converted to float16, at level auto to pass validation" in text
    assert "Level auto, which measures the error of each op, passes" in text
    written = onnx.load("model_fp16.onnx")
    assert [tensor.data_type for tensor in written.graph.initializer] == [onnx.TensorProto.FLOAT], "sums are float32"
    found = report_of(run("convert", path, "--strict", "--format", "json"))["validation"]
    assert found["cure"]["level"] == "auto"
    again = shlex.split(found["cure"]["command"])
    assert run(*again[1:]).exit_code == 0
    assert onnx.load("model_fp16.onnx") == written
    assert "The model stays in float32" in run("convert", path, "--strict", "--cure-time", "0", "-o", "b.onnx").output


@pytest.mark.slow
def test_measurements_do_not_lower_what_an_epsilon_guards() -> None:
    """No sample divides by zero, but other inputs may."""
    guarded = """[e] small = Constant <value = float {1e-9}> () [v] v = ReduceMean <axes = [-1]> (X)
        [sum] s = Add (v, small) [root] r = Sqrt (s) [quotient] N = Div (Z, r)"""
    path = many("Add", "Sub", 1000, guarded, "float[4,4] N, ")
    np.savez("x.npz", X=np.random.default_rng(0).uniform(1, 2, (4, 4)).astype(np.float32))
    result = run("convert", path, "--strict", "--inputs", "x.npz", "--format", "json")
    assert result.exit_code == 0, result.output
    cure = report_of(result)["validation"]["cure"]
    assert cure["level"] == "auto"
    graph = onnx.shape_inference.infer_shapes(onnx.load("model_fp16.onnx")).graph
    types = {entry.name: entry.type.tensor_type.elem_type for entry in (*graph.value_info, *graph.output)}
    made = {node.name: types[node.output[0]] for node in graph.node}
    assert made["sum"] == made["root"] == made["quotient"] == TensorProto.FLOAT
    assert TensorProto.FLOAT16 in made.values()


@pytest.mark.slow
def test_level_o1_is_tried_where_ops_break() -> None:
    path = many("Mul", "Div", 1000, of="Z")  # products overflow
    np.savez("x.npz", X=np.full((4, 4), 100, "f"))
    result = run("convert", path, "--strict", "--inputs", "x.npz", "-v")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "Converted to float16, at level O1 to pass validation" in text
    assert "Level O1 passes" in text
    assert onnx.load("model_fp16.onnx") == onnxamp.convert_model(str(path), "O1", strict=True)


@pytest.mark.webgpu
def test_where_float32_itself_breaks_there_the_result_is_not_validated() -> None:
    """WebGPU computes the variance as a difference of squares, of which nothing is left beside a large mean."""
    path = saved("(float[2, 4] X) => (float[2, 4] Y) <float[4] g = {1, 1, 1, 1}> { Y = LayerNormalization (X, g) }")
    np.savez("x.npz", X=np.float32([[0.1, 0.7, 1.3, 2.9], [2.3, 0.9, 1.7, 0.3]]) + 1e5)
    result = run("convert", path, "--target", "webgpu", "--provider", "webgpu", "--inputs", "x.npz")
    assert result.exit_code == 0, result.output
    assert "The float32 model is wrong there as well" in result.output


def test_the_float32_model_is_the_last_resort() -> None:
    path = small()
    np.savez("x.npz", X=np.float32([[1e30, 1e30]]))
    result = run("convert", path, "--inputs", "x.npz", "--io-types", "low", "--cure-time", "0")
    assert result.exit_code == 0, result.output
    assert "The model stays in float32: no conversion passed validation." in result.output
    assert "No fix was found in 0 s" in " ".join(result.output.split())
    assert Path("model_fp16.onnx").read_bytes() == Path(path).read_bytes()


def test_a_plan_is_repeated_to_the_letter() -> None:
    path = saved(NORM)
    run("convert", path, "--level", "O3", "--no-hazards", "--no-validate", "--save-plan", "plan.json", "-o", "a.onnx")
    result = run("convert", path, "--plan", "plan.json", "-o", "b.onnx")
    assert result.exit_code == 1
    assert "written to b.failed.onnx" in result.output
    assert onnx.load("b.failed.onnx") == onnx.load("a.onnx")
    assert not Path("b.onnx").exists()


def test_a_broken_result_as_json() -> None:
    result = run("convert", saved(NORM), "--level", "O3", "--no-hazards", "--format", "json", "--no-cure")
    assert result.exit_code == 1
    assert report_of(result)["validation"]["first_bad"]["value"] == "q"


NO_MODELS = {
    "empty": b"",
    "text": b"x",
    "truncated": CLASSIFIER.read_bytes()[:5000],
    "other": b"\x08\x07",
    "missing": None,
}


@pytest.mark.parametrize("command", ["convert", "inspect"])
@pytest.mark.parametrize("content", NO_MODELS.values(), ids=NO_MODELS)
def test_what_is_no_model(content: bytes | None, command: str) -> None:
    if content is not None:
        Path("model.onnx").write_bytes(content)
    result = run(command, "model.onnx")
    assert result.exit_code == 1
    assert is_one_sentence(result)
    assert "model.onnx" in result.output
    assert not Path("model_fp16.onnx").exists()


def test_a_folder_is_no_model() -> None:
    result = run("inspect", ".")
    assert result.exit_code == 1
    assert is_one_sentence(result)


def test_an_output_in_no_folder() -> None:
    """It is made, as those of other outputs are."""
    model = small()
    made = run("convert", model, "-o", "a/b/low.onnx", "--html", "c/page.html", "--save-plan", "d/plan.json")
    assert made.exit_code == 0, made.output
    tuned = run("tune", model, "-o", "e/low.onnx", "--state", "f/state.json", "--samples", 1)
    assert tuned.exit_code == 0, tuned.output
    assert run("diff", model, "a/b/low.onnx", "--save", "g/diff.json", "--html", "h/page.html").exit_code == 0
    assert run("check", model, "--html", "i/page.html", "--state", "j/state").exit_code == 0
    assert run("view", model, "-o", "k/page.html").exit_code == 0
    written = (
        "a/b/low.onnx c/page.html d/plan.json e/low.onnx f/state.json g/diff.json h/page.html i/page.html j/state"
        " k/page.html"
    )
    assert [name for name in written.split() if not Path(name).is_file()] == []


def test_an_output_in_what_is_no_folder() -> None:
    result = run("convert", small(), "-o", "model.onnx/low.onnx")
    assert result.exit_code == 1
    assert is_one_sentence(result)
    assert "Cannot make the folder" in result.output
    assert [path.name for path in Path().iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "-o", "o.onnx", "--save-plan", "o.onnx.data"),
        ("convert", "-o", "o.onnx", "--html", "o.onnx-00001-of-00002.data"),
        ("convert", "-o", "o.onnx", "--state", "o.onnx_data"),
        ("convert", "-o", "o.onnx", "--html", "o.failed.onnx"),
        ("convert", "-o", "o.onnx", "--html", "p", "--save-plan", "./p"),
        ("convert", "-o", "o.onnx", "--custom-ops", "ops.toml", "--save-plan", "ops.toml"),
        ("convert", "-o", "o.onnx", "--accept", "judge.py:takes", "--html", "judge.py"),
        ("convert", "-o", "others.data"),
        ("tune", "-o", "o.onnx", "--save-plan", "o.onnx.data"),
        ("tune", "-o", "o.onnx", "--state", "others.data"),
        ("check", "--html", "inputs/1.npz", "--inputs", "inputs"),
        ("check", "--html", "others.data"),
        ("diff", "other.onnx", "--save", "others.data"),
        ("view", "-o", "others.data"),
    ],
    ids=" ".join,
)
def test_each_output_has_a_file_of_its_own(command: tuple[str, ...], tmp_path: Path) -> None:
    """Neither that of an input, nor the data file of another output, nor of any model beside it."""
    small()
    weight = np.eye(2, dtype=np.float32)
    other = parse("(float[1,2] X) => (float[1,2] Y) { [first] Y = MatMul (X, w) }")
    other.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(other, "other.onnx", save_as_external_data=True, location="others.data", size_threshold=0)
    Path("ops.toml").write_text("")
    Path("judge.py").write_text("def takes(reference, result):\n    return True\n")
    Path("inputs").mkdir()
    np.savez("inputs/1.npz", X=np.ones((1, 2), np.float32))
    before = {path: path.read_bytes() for path in Path().rglob("*.*") if path.is_file()}
    result = run(command[0], "model.onnx", *command[1:])
    assert result.exit_code == 2, result.output
    after = {path: path.read_bytes() for path in Path().rglob("*.*") if path.is_file()}
    assert {path: data for path, data in after.items() if "pycache" not in str(path)} == before


def test_a_result_that_could_fail_over_its_model(tmp_path: Path) -> None:
    small().rename("m.failed.onnx")
    result = run("convert", "m.failed.onnx", "-o", "m.onnx")
    assert (result.exit_code, "'m.failed.onnx' is already read or written" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("convert", ["-o", "out.onnx", "--html", "model.onnx"]),
        ("convert", ["-o", "out.onnx", "--save-plan", "out.onnx"]),
        ("diff", ["model.onnx", "--save", "model.onnx"]),
        ("check", ["--html", "model.onnx"]),
    ],
)
def test_nothing_that_is_read_is_written_over(command: str, options: list[str]) -> None:
    path = small()
    before = Path(path).read_bytes()
    result = run(command, path, *options)
    assert result.exit_code == 2
    assert "is already read or written" in " ".join(result.output.split())
    assert Path(path).read_bytes() == before
    assert not Path("out.onnx").exists()


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ([(1, 2, 2)], "must have the shape [N, 2], not [1, 2, 2]"),
        ([(3, 2)], "The model does not run"),
        ([(2, 2), (3, 2)], "The model does not run (sample 2 of 2)"),
    ],
)
def test_nothing_is_written_for_inputs_that_do_not_fit(inputs: list[tuple[int, ...]], told: str) -> None:
    path = saved("(float[N,2] X) => (float[N,2] Y) { Y = MatMul (X, X) }")
    Path("inputs").mkdir()
    for number, shape in enumerate(inputs):
        np.savez(f"inputs/{number}.npz", X=np.ones(shape, np.float32))
    result = run("convert", path, "-o", "out.onnx", "--inputs", "inputs")
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert not Path("out.onnx").exists()


def test_converting_in_place_is_validated_against_what_was_there() -> None:
    path = saved(NORM)
    before = path.read_bytes()
    result = run("convert", path, "-o", path, "--in-place", "--level", "O3", "--no-hazards", "--no-cure")
    assert result.exit_code == 1
    assert "Values vanished" in result.output
    assert path.read_bytes() == before
    refused = run("convert", path, "-o", path, "--level", "O3")
    assert refused.exit_code == 2
    assert "--in-place" in refused.output
    assert path.read_bytes() == before
    assert run("convert", path, "-o", path, "--level", "O3", "--in-place").exit_code == 0
    assert path.read_bytes() != before


@pytest.mark.parametrize("words", [("--level", "o2"), ("--dtype", "fp16"), ("--dtype", "HALF"), ("--lists", "Default")])
def test_usual_spellings_are_understood(words: tuple[str, str]) -> None:
    path = small()
    assert run("convert", path, *words).exit_code == 0
    assert onnx.load("model_fp16.onnx") == onnxamp.convert_model(str(path))
    assert run("convert", path, "-o", "bf", "--dtype", "bf16").exit_code == 0
    assert onnx.load("bf") == onnxamp.convert_model(str(path), "o2", dtype="BF16")


def test_a_folder_for_the_result() -> None:
    path = small()
    for output in ("new/deep/", "new/deep"):
        assert run("convert", path, "-o", output).exit_code == 0
        assert [file.name for file in Path("new/deep").iterdir()] == ["model_fp16.onnx"]
    assert run("view", path, "-o", "pages/").exit_code == 0
    assert [file.name for file in Path("pages").iterdir()] == ["model.html"]
    Path("file").touch()
    result = run("convert", path, "-o", "file/")
    assert result.exit_code == 1
    assert "Cannot make the folder 'file'" in result.output


def test_a_result_beyond_its_limits_fails() -> None:
    """Errors that no NaN and no zero gives away fail, too."""
    path = saved("""(float[1,64] X) => (float[1,64] Y) <float one = {1.0}, float near = {1.001}> {
        a = Mul (X, one) b = Mul (X, near) Y = Sub (b, a)
    }""")
    np.savez("inputs.npz", X=np.linspace(30, 31, 64, dtype=np.float32)[None])
    result = run("convert", path, "--level", "O3", "--no-hazards", "--no-cure", "--inputs", "inputs.npz")
    assert result.exit_code == 1, result.output
    assert "relative L2 error is" in result.output


WRONG_OPTIONS = {
    "pattern": ["--keep-fp32", "("],
    "contradiction": ["--keep-fp32", "first", "--force-low", "first"],
    "op in both lists": ["--white", "Conv", "--black", "Conv"],
    "opset": ["--opset", "9999"],
    "no such plan": ["--plan", "nothing.json"],
    "no plan": ["--plan", "model.onnx"],
    "no inputs": ["--inputs", "nothing.npz"],
}


@pytest.mark.parametrize("options", WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options_end_with_2_and_a_sentence(options: list[str]) -> None:
    result = run("convert", small(), *options)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    (error,) = (line for line in result.output.splitlines() if line.startswith("Error: "))
    assert error.endswith(".")
    assert result.output.rstrip().endswith(error)


USAGE = {
    "no model": ["convert"],
    "level": ["convert", "model.onnx", "--level", "O4"],
    "dtype": ["convert", "model.onnx", "--dtype", "int8"],
    "dimension": ["convert", "model.onnx", "--dim", "batch=two"],
    "option": ["convert", "model.onnx", "--fast"],
    "command": ["convret", "model.onnx"],
    "preset": ["lists", "pytorch"],
}


@pytest.mark.parametrize("arguments", USAGE.values(), ids=USAGE)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    small()
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("content", [b"", CLASSIFIER.read_bytes()[:5000]], ids=["empty", "truncated"])
def test_a_good_output_survives_a_failure(content: bytes) -> None:
    Path("model.onnx").write_bytes(content)
    Path("model_fp16.onnx").write_bytes(b"a good model")
    assert run("convert", "model.onnx").exit_code == 1
    assert Path("model_fp16.onnx").read_bytes() == b"a good model"


def test_verbose_shows_tracebacks() -> None:
    result = run("convert", "nothing.onnx", "-v")
    assert result.exit_code == 1
    trace, _, sentence = result.output.partition("\nError: ")
    assert trace.startswith("Traceback (most recent call last):")
    assert "onnxamp.MissingModelError: " in trace
    assert sentence == "Cannot read 'nothing.onnx': No such file or directory. Check the path.\n"


def test_a_name_that_no_system_takes_is_one_sentence() -> None:
    """It is looked at before the command's own modules are there."""
    result = run("convert", f"{'a' * 300}.onnx", "-o", "low.onnx")
    assert (result.exit_code, is_one_sentence(result)) == (1, True)
    assert "File name too long" in result.output


@pytest.mark.parametrize(("arguments", "said"), [
    (("convrt",), "No such command 'convrt'. Did you mean 'convert'?"),
    (("m y.onnx",), "No such command 'm y.onnx'. To convert it: onnxamp convert 'm y.onnx'"),
    (("convert", "model.onnx", "--level", "4"), "'4' is not a level: choose one of O0, O1, O2, O3, auto."),
    (("convert", "model.onnx", "--io-types", "float"), "'float' is not one of keep, low and keep:NAME,...."),
    (("check", "model.onnx", "--dim", "batch=0"), "'batch=0' would make inputs empty: give a size of at least 1."),
])  # fmt: skip
def test_what_is_meant_is_told(arguments: tuple[str, ...], said: str) -> None:
    small()
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("level", ["o1", "1", "O1"])
@pytest.mark.parametrize("command", ["convert", "view", "inspect"])
def test_levels_may_be_numbers(command: str, level: str) -> None:
    result = run(command, small(), "--level", level, "--format", "line")
    assert result.exit_code == 0, result.output


def test_providers_in_either_case() -> None:
    assert run("convert", small(), "--provider", "CPU", "-q").exit_code == 0


def test_an_output_without_a_suffix_is_told() -> None:
    result = run("convert", small(), "-o", "result", "-q")
    assert result.exit_code == 0
    assert "Warning: 'result' becomes a file without a suffix" in result.output
    assert Path("result").is_file()
    assert run("convert", small(), "-o", "folder/", "-q").output == ""
