"""A notebook that is executed: results show themselves, a bar moves and goes, and nothing is printed besides."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def outputs() -> list[list[dict]]:
    """The outputs of each cell."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}})
    kernel = client.create_kernel_manager()
    kernel.kernel_spec.argv[0] = sys.executable
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def test_results_show_themselves(outputs: list[list[dict]]) -> None:
    for cell in outputs[1:]:
        (result,) = (output for output in cell if output["output_type"] == "execute_result")
        assert result["data"]["text/html"].lstrip().startswith('<div class="onnxamp-report">')
        assert len(result["data"]["text/plain"].splitlines()) <= 30


def test_a_bar_is_gone_at_the_end_and_nothing_is_printed(outputs: list[list[dict]]) -> None:
    shown = [output for cell in outputs for output in cell if output["output_type"] != "execute_result"]
    assert [(output["output_type"], output["data"]["text/html"]) for output in shown] == [("display_data", "")]
