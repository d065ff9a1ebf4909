"""Figures that depend on open dimensions say at which sizes they hold."""

import json
from pathlib import Path

import onnx
import pytest
from commands import run, saved
from graphs.case import parse

import onnxamp
from onnxamp._audit.faults import sized
from onnxamp._graph.graph import Graph

CAST = """(float[batch,sequence,4] x) => (float[batch,sequence,4] y) {
    [down] a = Cast <to = 10> (x) [work] b = Relu (a) [up] y = Cast <to = 1> (b)
}"""
PER_ELEMENT = 2 * (4 + 2)
"""Bytes that both Casts read and write."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_assumed_sizes_are_those_of_made_up_inputs() -> None:
    casts = onnxamp.audit_model(parse(CAST)).casts
    assert casts.assumed == {"batch": 1, "sequence": 8}
    assert casts.bytes == PER_ELEMENT * 8 * 4
    shapes = {name: feed.shape for name, feed in onnxamp.random_samples(parse(CAST))[0].items()}
    assert onnxamp.audit_model(parse(CAST), shapes=shapes).casts.bytes == casts.bytes


def test_given_sizes_are_not_assumed() -> None:
    casts = onnxamp.audit_model(parse(CAST), shapes={"x": (3, 5, 4)}).casts
    assert (casts.assumed, casts.bytes) == ({}, PER_ELEMENT * 60)
    fixed = onnxamp.audit_model(parse(CAST.replace("batch", "2").replace("sequence", "3"))).casts
    assert (fixed.assumed, fixed.bytes) == ({}, PER_ELEMENT * 24)


def test_what_has_no_known_size_is_not_counted() -> None:
    model = parse("(float[N] x) => (float[M] y) { i = NonZero (x) f = Cast <to = 10> (i) [up] y = Cast <to = 1> (f) }")
    casts = onnxamp.audit_model(model).casts
    assert (casts.count, casts.unsized, casts.bytes) == (1, 1, 0)
    assert (
        "about 0 B moved per run at N=1 (assumed); 1 of unknown size" in run("check", "--static", saved(model)).output
    )


def test_iterations_of_loops_are_assumed_as_well() -> None:
    model = parse("""(float[2] x, int64 n, bool go) => (float[2] y) {
        y = Loop (n, go, x) <body = body (int64 i, bool c, float[2] s) => (bool d, float[2] t) {
            d = Identity (c) low = Cast <to = 10> (s) more = Add (low, low) t = Cast <to = 1> (more) }> }""")
    assert onnxamp.audit_model(model).casts.assumed == {"iterations of a loop": 10}


@pytest.mark.parametrize("command", [("check", "--static"), ("view",)])
def test_reports_say_so(command: tuple[str, ...]) -> None:
    path = saved(CAST)
    data = json.loads(run("check", "--static", path, "--format", "json").output)
    assert data["static"]["casts"]["assumed"] == {"batch": 1, "sequence": 8}
    run(*command, path)
    text = run("check", "--static", path).output
    assert "about 384 B moved per run at batch=1, sequence=8 (assumed)" in text
    ran = run("check", path, "--dim", "batch=3", "--dim", "sequence=5").output
    assert f"about {PER_ELEMENT * 60} B moved per run\n" in ran


def test_pages_hold_the_sizes_of_what_ran() -> None:
    onnx.save(
        parse("""(float[batch,4] x) => (float[batch,4] y) <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
        y = MatMul (x, w) }"""),
        "model.onnx",
    )
    result = run("convert", "model.onnx", "--html", "page.html", "--dim", "batch=5", "-q")
    assert result.exit_code == 0, result.output
    page = Path("page.html").read_text(encoding="utf-8").replace("&nbsp;", " ")
    assert f"about {PER_ELEMENT * 20} B moved per run" in page
    assert "(assumed)" not in page


def test_shapes_without_inputs() -> None:
    graph = Graph.of(parse("() => (float[2] y) <float[2] w = {1, 2}> { y = Relu (w) }"))
    assert sized(graph, None).told == ""
