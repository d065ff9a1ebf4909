"""Reports on narrow terminals: no line is too long, names lose their middle, and drawings are whole."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import saved
from repository import ROOT

from onnxamp._cli.command import group

LONG = "StatefulPartitionedCall_functional_1_transformer_block_with_relative_position_bias_" * 2
MODEL = f"""(float[batch,4] X) => (float[batch,4] {LONG}out)
    <float[4,4] w = {{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}}> {{
    [{LONG}first] {LONG}h = MatMul (X, w)
    [{LONG}second] {LONG}a = Relu ({LONG}h)
    [{LONG}third] {LONG}out = Softmax ({LONG}a)
}}"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines_of(columns: int, *arguments: object) -> list[str]:
    called = CliRunner(env={"COLUMNS": str(columns)}).invoke(group, list(map(str, arguments)))
    assert called.exit_code == 0, called.output
    return called.stdout.splitlines()


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", ["a.onnx", "a_rather_long_name_of_a_model_and_its_version.onnx"])
def test_short_reports(columns: int, name: str) -> None:
    model = saved(MODEL, name)
    for arguments in (("convert", model, "-o", "out.onnx"), ("diff", model, "out.onnx")):
        lines = lines_of(columns, *arguments)
        assert len(lines) <= 12
        assert max(map(len, lines)) <= columns
        assert not [line for line in lines if line.strip() == "…"]
        assert any("…" in line and line.endswith("_out") for line in lines), "names lose their middle"
        assert lines[-1] != lines[0]


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_short_lines_end_with_whole_clauses(columns: int) -> None:
    lines = lines_of(columns, "convert", ROOT / "models/encoder.onnx", "-o", "out.onnx")
    assert max(map(len, lines)) <= columns
    for line in lines[3:]:
        assert not line.endswith("…") or line.endswith(", …")


def test_the_name_of_the_result_is_whole() -> None:
    """The user may not have named it, so the name of the model is cut first."""
    Path("models").mkdir()
    model = saved(MODEL, "models/classifier.onnx")
    (line,) = [line for line in lines_of(80, "convert", model) if "→" in line]
    assert "…" in line
    assert "→ models/classifier_fp16.onnx   convert" in line


@pytest.mark.parametrize("columns", [60, 80])
def test_details(columns: int) -> None:
    model = saved(MODEL)
    lines = lines_of(columns, "convert", model, "-o", "out.onnx", "-v")
    assert max(map(len, lines)) <= columns
    drawn = [line for line in lines if "░" in line]
    assert drawn
    assert not [line for line in drawn if "…░" in line or "░…" in line]


def test_a_run_that_gains_nothing_says_what_to_change() -> None:
    lines = lines_of(60, "tune", saved(MODEL), "-o", "out.onnx", "--tolerance", "1e-9")
    assert len(lines) <= 4
    assert lines[0].startswith("! ")
    assert lines[-1].endswith((".", "…"))


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_reasons_are_never_folded_into_a_few_columns(columns: int) -> None:
    """They stand below their rows where the columns beside them leave no room."""
    lines = lines_of(columns, "inspect", saved(MODEL), "--level", "O1", "-v")
    assert max(map(len, lines)) <= columns
    rows = [at for at, line in enumerate(lines) if " Softmax " in f"{line} " and "float32" in line]
    assert rows
    for at in rows:
        reason = lines[at + 1].strip()
        assert len(lines[at + 1]) - len(lines[at + 1].lstrip()) < 8, "the reason begins at the left"
        assert len(reason) > 20


def test_all_prose_of_a_table_stands_below_its_rows() -> None:
    lines = lines_of(60, "lists", "--op", "Softmax")
    assert max(map(len, lines)) <= 60
    assert any(line.strip().startswith("fact: ") for line in lines)
    assert any(line.strip().startswith("source: ") for line in lines)


def test_reasons_stay_beside_their_rows_where_there_is_room() -> None:
    lines = lines_of(140, "inspect", saved(MODEL), "--level", "O1", "-v")
    assert any(line.split()[-1:] != ["float32"] and " Softmax " in line and "float32" in line for line in lines)
