"""How results show themselves: a screen of text, HTML for notebooks, and data frames."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pages
import pytest
from graphs.case import add_weights, parse

import onnxamp
from onnxamp import BenchReport, FolderReport
from onnxamp._fleet.outcome import ModelOutcome
from onnxamp._numerics.speed.bench_results import Bench, Latency, TimeRatio, Timing

LATENCY = Latency(0.1, 0.01, 0.011, 0.012, 100)
BENCH = BenchReport(
    "CPU", "onnxruntime", "made-up", (Bench("a.onnx", {}, "float32", 0.1, {"CPU": 3}),),
    (Timing("a.onnx", None, LATENCY, 100.0, None), Timing("b.onnx", None, LATENCY, 90.0, TimeRatio(0.9, 0.8, 1.0))),
    None, ("b.onnx",), (), (),
)  # fmt: skip
ROWS = (ModelOutcome("a.onnx", "converted"), ModelOutcome("b.onnx"))
RESULTS: dict[str, Any] = {
    "plan": pages.conversion(30).plan,
    "conversion": pages.conversion(30),
    "diff": pages.diff(30),
    "tuned": pages.tuned(),
    "bench": BENCH,
    "run": pages.run_check(30),
    "audit": pages.audit(30),
    "folder": FolderReport(Path("in"), Path("out"), 1, 1.0, ROWS),
}
EVERY = pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)


@EVERY
def test_a_result_is_a_screen_of_its_report(result: Any) -> None:
    lines = repr(result).splitlines()
    assert 3 <= len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert "onnxamp." not in repr(result)
    assert "-v shows" not in repr(result)


@EVERY
def test_a_result_in_a_notebook(result: Any) -> None:
    """It loads and runs nothing, its styles hold nowhere else, and its ids are its own."""
    formatter = pytest.importorskip("IPython.core.formatters", reason="IPython is not installed").DisplayFormatter()
    html = formatter.format(result)[0]["text/html"]
    assert html.lstrip().startswith('<div class="onnxamp-report">')
    assert not re.search(r"<script|<link|<img|<iframe|<body|\son\w+=|url\(|@import", html)
    style = re.search("<style>(.*?)</style>", html, re.DOTALL)[1]
    depth = [line.count("{") - line.count("}") for line in style.splitlines()]
    assert style.startswith(".onnxamp-report {\n")
    assert all(sum(depth[: number + 1]) > 0 for number in range(len(depth) - 1))
    assert sum(depth) == 0
    assert ":root" not in style
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("onnxamp-") for name in ids)


def test_two_results_in_a_notebook_share_no_ids() -> None:
    one, other = (set(re.findall(r'\bid="([^"]*)"', pages.diff(count)._repr_html_())) for count in (3, 4))
    assert one
    assert one.isdisjoint(other)


@pytest.mark.parametrize("name", pages.HOSTILE)
def test_names_are_text_in_notebooks(name: str) -> None:
    report = FolderReport(Path("in"), Path("out"), 1, 1.0, (ModelOutcome(name, message=name),))
    html = report._repr_html_()
    assert "<script" not in html
    assert "<img" not in html
    assert not set(html) & {"\x00", "\x1b", "\u202e"}


def test_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers alone are of what the bar is called; names are text."""
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    shown: list[str] = []

    class Handle:
        def update(self, html: Any) -> None:
            shown.append(html.data)

    monkeypatch.setattr(display, "display", lambda *_, **__: Handle())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    for step in ((1, 4), ("<b>", 1, 0)):
        with onnxamp.progress_bar("comparing") as progress:
            progress(*step)
    assert shown == ['<progress max="4" value="1"></progress> comparing', "", "<progress></progress> &lt;b&gt;", ""]


TABLES = {
    "plan": ("", "hazards"), "conversion": ("",), "diff": ("", "layers", "judgements"), "tuned": ("", "kept"),
    "bench": ("", "models"), "run": ("",), "audit": ("",), "folder": ("",),
}  # fmt: skip


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize(("name", "table"), [(name, table) for name in TABLES for table in TABLES[name]])
def test_a_result_as_a_data_frame(name: str, table: str) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = RESULTS[name].to_pandas(table)
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame)


def test_records_within_records() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    diff = pages.diff(6)
    layers = diff.to_pandas("layers")
    assert list(layers["value"]) == [row.value for row in diff.layers]
    assert list(layers["accumulated.rel_l2"]) == [row.accumulated.rel_l2 for row in diff.layers]
    assert RESULTS["bench"].to_pandas()["speedup.value"].tolist()[1] == 0.9
    with pytest.raises(onnxamp.ArgumentError, match="no table 'rows': choose one of outputs, layers"):
        diff.to_pandas("rows")


@pytest.mark.slow
def test_without_pandas_an_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["pandas"] = None
import onnxamp
try:
    onnxamp.plan_model("models/encoder.onnx").to_pandas()
except ImportError as error:
    print(type(error).__name__, error)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "MissingPackageError to_pandas needs pandas: install it with 'pip install pandas'.\n"


def test_which_nodes_stay_float32() -> None:
    """Nodes without a name are called by their output."""
    model = parse("""(float[2,4] X) => (float[2,4] Y) {
        h = MatMul (X, w) r = Relu (h) g = Gemm (r, v) Y = MatMul (g, u) }""")
    add_weights(model, {"w": (4, 4), "v": (4, 4), "u": (4, 4)})
    plan = onnxamp.plan_model(model, "O3", keep_high=["h", "r", "Y"])
    assert set(plan.float32_nodes) == {"h", "r", "Y"}
    _, tuned = onnxamp.tune_model(model, 1e-9, count=1, provider="cpu")
    assert tuned.float32_nodes == ("h", "r", "g", "Y")
