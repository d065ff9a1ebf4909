"""The headroom of values: one bar for what is proven, stressed and seen, on the terminal and on the page."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import run, saved
from graphs.case import add_weights, parse

from onnxamp._numerics.unseen.stressed import Room
from onnxamp._report.headroom import headroom_section
from onnxamp._report.parts import gauges_table


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def network():
    """A product that random inputs bring to a few units, of which only the second is bounded."""
    draw = np.random.default_rng(0)
    model = parse(
        """(float[4,16] x) => (float[4,16] y) {
            a = MatMul (x, w) b = LayerNormalization (a, s) y = MatMul (b, w) }""",
        17,
    )
    weights = {"w": draw.standard_normal((16, 16)).astype(np.float32), "s": np.ones(16, np.float32)}
    return add_weights(model, weights)


def bars(*rooms):
    _, gauges = headroom_section(rooms, "float16").parts
    return [row.cells[-1] for row in gauges_table(gauges).rows]


def test_a_bar_ends_where_magnitudes_do():
    full = "█" * 22
    assert bars(Room("v", proven=65504.0)) == ["░" * 22 + "│"]
    assert bars(Room("v", proven=None, seen=65504.0)) == [f"{full}│░░░░→"]
    assert bars(Room("v", proven=65504 / 4, stressed=65504 / 8, seen=65504 / 16)) == ["█" * 18 + "▓░  │"]
    assert bars(Room("v", proven=4.0 * 65504, seen=0.0)) == ["░" * 22 + "│░░"]


def test_each_part_is_at_least_as_long_as_the_one_before():
    """A bound allows for the rounding of the result, which the original does not have."""
    assert bars(Room("v", proven=64.0, stressed=65.0, seen=4096.0)) == bars(Room("v", proven=4096.0, seen=4096.0))


def test_inspect_shows_what_is_proven():
    result = run("inspect", saved(network()))
    lines = result.stdout.splitlines()
    assert any(line.split()[0] == "b" and line.endswith("│") for line in lines if "░ " in line), result.stdout
    # Nothing ran, so the range of a is unknown, and a bar beyond the end of the type would look like a fault.
    assert "→" not in result.stdout
    assert "Values without a proven bound are left out." in " ".join(result.stdout.split())
    told = json.loads(run("inspect", saved(network()), "--format", "json", "--input-range", "x=-1:1").stdout)
    rooms = {room["value"]: room for room in told["headroom"]}
    assert rooms["a"]["proven"] < 64
    assert rooms["a"]["seen"] is None


def test_nothing_proven_is_said_in_a_sentence():
    result = run("inspect", saved("(float[2,4] x) => (float[2,4] y) { y = Mul (x, x) }"))
    assert "have no proven bound, because inputs may be any number. --inputs shows" in " ".join(result.stdout.split())
    assert "unbounded" not in result.stdout


def test_inspect_shows_what_samples_reach():
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    np.savez("x.npz", x=x)
    told = json.loads(run("inspect", saved(network()), "--format", "json", "--inputs", "x.npz").stdout)
    rooms = {room["value"]: room for room in told["headroom"]}
    assert rooms["b"]["proven"] < 4.1
    assert rooms["a"]["proven"] is not None, "the range of the samples counts"


def test_the_page_and_the_json_of_a_conversion_show_the_same():
    result = run("convert", saved(network()), "-o", "low.onnx", "--html", "page.html", "--format", "json")
    rooms = json.loads(result.stdout)["validation"]["rooms"]
    (first, *_) = rooms
    assert first["value"] == "a"
    assert first["proven"] is None
    assert 0 < first["seen"] <= first["stressed"]
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.count('class="gauge"') == len(rooms)
    assert 'class="stressed"' in page
