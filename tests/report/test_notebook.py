"""Notebooks that are executed: results show themselves, a bar moves and goes, and nothing is printed besides."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

EXAMPLES = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
CELLS = (
    "import onnxamp, time\nmodel = 'models/classifier.onnx'",
    "onnxamp.plan_model(model)",
    """with onnxamp.progress_bar("comparing") as progress:
    report = onnxamp.diff_models(model, onnxamp.convert_model(model), provider="cpu", progress=progress)
    progress("<b>one</b>: of two", 1, 2)
    time.sleep(0.2)
    progress(3, 4)
report""",
)


def read(path: Path) -> Any:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    return nbformat.read(path, as_version=4)


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells of a notebook that lies in ``folder``, with this interpreter.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}})
    kernel = client.create_kernel_manager()
    kernel.kernel_spec.argv[0] = sys.executable
    client.execute()


@pytest.fixture(scope="module")
def outputs() -> list[list[dict]]:
    """The outputs of each cell."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    execute(notebook, ROOT)
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
def test_results_show_themselves(outputs: list[list[dict]]) -> None:
    for cell in outputs[1:]:
        (result,) = (output for output in cell if output["output_type"] == "execute_result")
        assert result["data"]["text/html"].lstrip().startswith('<div class="onnxamp-report">')
        assert len(result["data"]["text/plain"].splitlines()) <= 30


@pytest.mark.slow
def test_a_bar_is_gone_at_the_end_and_nothing_is_printed(outputs: list[list[dict]]) -> None:
    shown = [output for cell in outputs for output in cell if output["output_type"] != "execute_result"]
    assert [(output["output_type"], output["data"]["text/html"]) for output in shown] == [("display_data", "")]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    """Every cell that ends with a value shows it, and nothing is written or said on standard error."""
    before = sorted(path.parent.iterdir())
    notebook = read(path)
    execute(notebook, path.parent)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [output for cell in cells for output in cell.outputs if output.output_type == "execute_result"]
    assert len(shown) == len(cells) - 1, "the first cell imports"
    reports = [output.data for output in shown if "onnxamp-report" in output.data.get("text/html", "")]
    assert len(reports) >= 2
    assert not [output for cell in cells for output in cell.outputs if output.output_type in ("stream", "error")]
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_kept_without_outputs(path: Path) -> None:
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert not re.search(r"onnxamp(?:\.\w+)*\._", "\n".join(cell.source for cell in cells)), "examples use public names"


def test_all_examples_are_linked() -> None:
    page = (ROOT / "docs" / "how-to" / "report.md").read_text(encoding="utf-8")
    assert re.findall(r"\(\.\./notebooks/(\w+)\.ipynb\)", page) == ["convert", "tune", "find_nan"]
    assert {path.stem for path in EXAMPLES} == {"convert", "tune", "find_nan"}
