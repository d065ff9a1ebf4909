"""Custom ops: declarations that let them be low precision, and libraries that run them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import ModelProto, TensorProto

import onnxamp
from onnxamp._cli.command import group
from onnxamp._facts.signature import custom_ops_of

DOMAIN = "ai.onnx.contrib"
TEXT = f"""<ir_version: 8, opset_import: ["" : 17, "{DOMAIN}" : 1]>
g (float[N,4] X) => (float[N,4] Y) <float[4,4] w = {{1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}}> {{
    [one] a = MatMul (X, w) [split] n, p = {DOMAIN}.NegPos (a) [plus] s = Sub (n, p) [two] Y = MatMul (s, w) }}"""
FIRST = f"""<ir_version: 8, opset_import: ["" : 17, "{DOMAIN}" : 1]>
g (float[N,4] X) => (float[N,4] Y) <float[4,4] w = {{1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}}, float[N,4] s> {{
    [split] n, p = {DOMAIN}.NegPos (X) [plus] s = Sub (n, p) [two] Y = MatMul (s, w) }}"""
NEG_POS: dict[str, Any] = {
    "domain": DOMAIN, "type": "NegPos", "inputs": ["T"], "outputs": ["T", "T"],
    "types": {"T": ["float", "float16"]},
}  # fmt: skip
TOML = f"""[[op]]
domain = "{DOMAIN}"
type = "NegPos"
inputs = ["T"]
outputs = ["T", "T"]
types = {{ T = ["float", "float16"] }}
"""


def model() -> ModelProto:
    return onnx.parser.parse_model(TEXT)


def low(**options: Any) -> set[str]:
    """Nodes with a low variable."""
    return {row.node for row in onnxamp.plan_model(model(), **options).rows if row.low and row.op != "initializer"}


def command(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(group, list(map(str, arguments)))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    onnx.save(model(), tmp_path / "m.onnx")
    (tmp_path / "ops.toml").write_text(TOML, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def library() -> str:
    """A library whose NegPos takes float32 alone: in float16 it runs emulated."""
    extensions = pytest.importorskip("onnxruntime_extensions", reason="onnxruntime-extensions is not installed")
    path: str = extensions.get_library_path()
    return path


# --- declarations -----------------------------------------------------------------------------------------------------


def test_an_op_is_low_where_it_is_declared_so() -> None:
    assert low() == {"one", "two"}
    assert low(custom_ops=NEG_POS) == {"one", "split", "plus", "two"}
    result = onnxamp.convert_model(model(), custom_ops=NEG_POS)
    assert sum(node.op_type == "Cast" for node in result.graph.node) == 2  # around the graph
    assert sum(node.op_type == "Cast" for node in onnxamp.convert_model(model()).graph.node) == 4


@pytest.mark.parametrize("change", [
    {"types": {"T": ["float", "bfloat16"]}}, {"types": {"T": ["float"]}}, {"inputs": ["float"], "outputs": ["T", "T"]},
    {"since": 2}, {"type": "PosNeg"},
])  # fmt: skip
def test_an_op_is_float32_where_it_is_not_declared_so(change: dict[str, Any]) -> None:
    assert "split" not in low(custom_ops=NEG_POS | change) or "inputs" in change


def test_ports_have_their_own_types() -> None:
    mixed = NEG_POS | {"inputs": ["float"], "outputs": ["T", "float"]}
    result = onnxamp.convert_model(model(), custom_ops=mixed, strict=True)
    casts = {node.input[0] for node in result.graph.node if node.op_type == "Cast"}
    assert casts >= {"a", "p"}  # input and second output stay in float32


def test_lists_and_names_apply_to_declared_ops() -> None:
    for level in ("O2", "O3"):
        assert "split" in low(custom_ops=NEG_POS, level=level)
        assert "split" not in low(custom_ops=NEG_POS, level=level, black_list=[f"{DOMAIN}::NegPos"])
    assert low(custom_ops=NEG_POS, black_list=[f"{DOMAIN}::NegPos"]) == {"one", "two"}
    assert "split" in low(custom_ops=NEG_POS, level="O1", white_list=[f"{DOMAIN}::NegPos"])
    assert "split" not in low(custom_ops=NEG_POS, keep_nodes=["split"])


def test_the_newest_version_counts_that_the_model_can_have() -> None:
    older = NEG_POS | {"types": {"T": ["float"]}}
    assert "split" in low(custom_ops=[older | {"since": 2}, NEG_POS])
    newer = onnx.parser.parse_model(TEXT.replace(f'"{DOMAIN}" : 1', f'"{DOMAIN}" : 2'))
    plan = onnxamp.plan_model(newer, custom_ops=[older | {"since": 2}, NEG_POS])
    assert not any(row.low for row in plan.rows if row.node == "split")


def test_all_forms_mean_the_same(files: Path) -> None:
    op = onnxamp.CustomOp(**NEG_POS)
    forms: list[Any] = [op, [op], NEG_POS, [NEG_POS], files / "ops.toml", str(files / "ops.toml")]
    assert all(custom_ops_of(form) == (op,) for form in forms)
    assert onnxamp.Options(custom_ops=forms[4]) == onnxamp.Options(custom_ops=[NEG_POS])
    assert custom_ops_of(None) == ()


def test_a_declaration_holds_in_a_block_alone() -> None:
    with onnxamp.custom_ops(NEG_POS):
        assert "split" in low()
        with onnxamp.custom_ops([]):
            assert "split" in low()
    assert "split" not in low()


def test_a_plan_holds_the_declaration(tmp_path: Path) -> None:
    plan = onnxamp.plan_model(model(), custom_ops=NEG_POS)
    plan.save(tmp_path / "plan.json")
    loaded = onnxamp.load_plan(tmp_path / "plan.json")
    assert loaded.options.custom_ops == custom_ops_of(NEG_POS)
    assert onnxamp.apply_plan(model(), loaded) == onnxamp.convert_model(model(), custom_ops=NEG_POS)


def test_variadic_and_optional_ports() -> None:
    text = TEXT.replace(f"n, p = {DOMAIN}.NegPos (a)", f"n = {DOMAIN}.Merge (a, , X, X) p = Neg (n)")
    merge = {"domain": DOMAIN, "type": "Merge", "inputs": ["T", "int64?", "T..."], "outputs": ["T"],
             "types": {"T": ["float", "float16"]}}  # fmt: skip
    plan = onnxamp.plan_model(onnx.parser.parse_model(text), custom_ops=merge)
    assert any(row.low for row in plan.rows if row.node == "split")


@pytest.mark.parametrize(("change", "said"), [
    ({"domain": "ai.onnx"}, "is declared for ai.onnx"),
    ({"domain": ""}, "needs a domain"),
    ({"inputs": "T"}, "inputs must be a list of types, not str"),
    ({"inputs": ["U"]}, "unknown element type 'U'"),
    ({"types": {"T": ["half"]}}, "unknown element type 'half'; known are float, "),
    ({"types": ["T"]}, "types must be lists"),
    ({"inputs": ["T...", "T"]}, "only the last of the inputs"),
    ({"since": 0}, "since must be a whole number"),
    ({"precision": "low"}, "has no 'precision': choose from domain, type, inputs"),
])  # fmt: skip
def test_wrong_declarations(change: dict[str, Any], said: str) -> None:
    with pytest.raises((onnxamp.ArgumentError, onnxamp.ArgumentTypeError), match=said):
        onnxamp.Options(custom_ops=NEG_POS | change)


@pytest.mark.parametrize(("text", "said"), [
    ("", "holds no custom ops"), ("op = 3", "holds no custom ops"), ("[[op]]\ntype = 'A'", "lacks 'domain'"),
    ("[[op]", "is not TOML"), (TOML.replace("float16", "f16"), "ops.toml.*unknown element type 'f16'"),
])  # fmt: skip
def test_wrong_files(text: str, said: str, files: Path) -> None:
    (files / "ops.toml").write_text(text, encoding="utf-8")
    with pytest.raises(onnxamp.ArgumentError, match=said):
        onnxamp.Options(custom_ops=files / "ops.toml")


def test_the_command_line_reads_a_declaration(files: Path) -> None:
    out = files / "out.onnx"
    done = command("convert", files / "m.onnx", "-o", out, "--custom-ops", files / "ops.toml", "--no-validate")
    assert done.exit_code == 0, done.output
    assert onnx.load(out) == onnxamp.convert_model(model(), custom_ops=NEG_POS)
    found = command("check", out, "--static", "--custom-ops", files / "ops.toml")
    assert found.exit_code == 0, found.output  # kernels are as declared
    assert "--custom-ops" in command("check", out, "--static", "-v").output
    assert command("convert", files / "m.onnx", "--custom-ops", files / "nosuch.toml").exit_code == 2


# --- libraries --------------------------------------------------------------------------------------------------------


def test_what_is_no_library(files: Path) -> None:
    for path, said in (("nosuch.so", "There is no library"), ("ops.toml", "cannot load custom ops from")):
        with pytest.raises(onnxamp.ArgumentError, match=said), onnxamp.custom_ops(library=files / path):
            pass
        done = command("diff", files / "m.onnx", files / "m.onnx", "--custom-ops-library", files / path)
        assert done.exit_code == 2
        assert said in " ".join(done.output.split())
    with pytest.raises(onnxamp.ArgumentTypeError, match="library must be a path"), onnxamp.custom_ops(library=3):  # type: ignore[arg-type]
        pass


def test_without_its_library_the_model_does_not_run() -> None:
    assert "NegPos" in (onnxamp.diff_models(model(), model(), provider="cpu").skipped or "")


def test_everything_runs_with_the_library(library: str) -> None:
    with onnxamp.custom_ops(NEG_POS, library=library):
        result = onnxamp.convert_model(model())
        report = onnxamp.diff_models(model(), result, layers=True, provider="cpu")
        assert report.passed
        assert {row.node for row in report.layers if row.dtype == "float16"} >= {"one", "split", "plus"}
        assert onnxamp.check_run(result, provider="cpu").first_bad is None
        tuned = onnxamp.tune_model(model(), 1e-2, count=1, provider="cpu")[1]
        assert tuned.held
        feeds = {"X": np.arange(4, dtype=np.float32).reshape(1, 4)}
        assert onnxamp.InferenceSession(model()).run(None, feeds)[0].shape == (1, 4)
    assert any(item.data_type == TensorProto.FLOAT16 for item in result.graph.initializer)


def test_a_range_is_measured_with_the_library(library: str) -> None:
    with onnxamp.custom_ops(library=library):
        plan = onnxamp.plan_model(model(), custom_ops=NEG_POS, data_max=1e-3)
    assert not any(row.low for row in plan.rows if row.op != "initializer")


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("arguments", [
    ["convert", "m.onnx", "-o", "out.onnx"],
    ["tune", "m.onnx", "-o", "out.onnx", "--samples", "1"],
    ["diff", "m.onnx", "m.onnx"],
    ["check", "m.onnx"],
    ["bench", "m.onnx", "--seconds", "0.01", "--provider", "cpu"],
    ["convert", "folder", "-o", "out", "--jobs", "1"],
    ["train", "first.onnx", "--data", "data.npz", "-o", "out.onnx", "--loss", "mean-squared-error", "--level", "O1"],
    ["inspect", "m.onnx"],
    ["view", "m.onnx"],
], ids=lambda words: " ".join(words[:2]))  # fmt: skip
def test_commands_run_with_the_library(
    arguments: list[str], files: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    (files / "folder").mkdir()
    onnx.save(model(), "folder/m.onnx")
    onnx.save(onnx.parser.parse_model(FIRST), "first.onnx")  # training has no gradient for it
    np.savez("data.npz", X=np.eye(4, dtype=np.float32), label=np.ones((4, 4), np.float32))
    done = command(*arguments, "--custom-ops", "ops.toml", "--custom-ops-library", library)
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    for printed in re.findall(r"onnxamp (?:check|convert|inspect) \w+\.onnx.*?(?= →|$)", told):
        assert ("--custom-ops ops.toml" in printed, f"--custom-ops-library {library}" in printed) == (True, True)
    assert "not compared" not in done.output
    assert "not validated" not in done.output.lower()
