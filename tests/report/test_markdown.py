"""Reports as Markdown: what GitHub renders is what the report says, whatever names the model has."""

import json
import re
from itertools import pairwise
from pathlib import Path

import onnx
import pytest
from commands import NORM, report_of, run, saved
from graphs.case import parse
from markdown_it import MarkdownIt

import onnxamp

GITHUB = MarkdownIt("commonmark").enable("table")
EVIL = "<b>x</b> | ![x](http://x) **x** @octocat `x` www.x.org [x](x) $x$ &amp;"
TAGS = {"<br>", "<!-- -->"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, as a reader sees them."""
    found: list[list[list[str]]] = []
    tokens = GITHUB.parse(text)
    for token, content in pairwise(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            shown = (child.content for child in content.children or [] if child.content not in TAGS)
            found[-1][-1].append("".join(shown))
    return found


def broken() -> onnx.ModelProto:
    return onnxamp.convert_model(parse(NORM), "O3", hazards=False)


def test_a_comparison_begins_with_its_verdict_and_ends_with_what_to_do() -> None:
    reference, result = saved(NORM, "a.onnx"), saved(broken(), "b.onnx")
    done = run("diff", reference, result, "--format", "markdown")
    assert done.exit_code == 1
    assert done.output.startswith("### ❌ The models differ.\n\n**a.onnx → b.onnx**")
    facts = report_of(run("diff", reference, result, "--format", "json"))
    (outputs,) = (table for table in tables(done.output) if table[0][1:3] == ["output", "shape"])
    assert [row[1] for row in outputs[1:]] == [output["name"] for output in facts["outputs"]]
    assert outputs[1][-1] == "0 → 4", "zeros on both sides"
    text, _, command = done.output.partition("#### What to do\n\n")[2].partition("```sh\n")
    assert text.startswith("Tried: ")
    assert command.splitlines()[0] == facts["cure"]["command"]


def test_findings_are_rows_with_what_to_do() -> None:
    model = saved("(float16[1,4] X) => (float[1,4] Y) <float[4] w = {1, 2, 3, 4}> { [add] Y = Add (X, w) }")
    done = run("check", "--static", model, "--format", "markdown")
    assert done.exit_code == 1
    found = report_of(run("check", "--static", model, "--format", "json"))["static"]["findings"]
    (rows,) = (table for table in tables(done.output) if "what to do" in table[0])
    assert [row[0] for row in rows[1:]] == ["❌"] * len(found)
    assert rows[1][1:] == [found[0]["kind"], f"Add: {found[0]['text']}", found[0]["node"], found[0]["action"]]


def test_an_action_stands_in_every_row_that_it_is_for() -> None:
    done = run("check", "--static", saved(broken()), "--format", "markdown")
    (rows,) = (table for table in tables(done.output) if "what to do" in table[0])
    assert len(rows) > 2
    assert len({row[-1] for row in rows[1:]}) == 1
    assert run("check", "--static", "model.onnx").output.count("→ Convert") == 1, "once where they are a list"


def test_names_of_the_model_have_no_effect() -> None:
    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Atan", [f"{EVIL} in"], [f"{EVIL} out"], f"{EVIL} node")
    infos = [value(f"{EVIL} {end}", onnx.TensorProto.FLOAT16, [1, 4]) for end in ("in", "out")]
    graph = onnx.helper.make_graph([node], "g", infos[:1], infos[1:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = saved(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))
    for command in (("check", model), ("diff", model, model)):
        done = run(*command, "--format", "markdown", "-v")
        assert done.exit_code == 0
        assert any(cell.startswith(EVIL) for table in tables(done.output) for row in table for cell in row)
        inlines = [token.children or [] for token in GITHUB.parse(done.output) if token.type == "inline"]
        kinds = {child.type for children in inlines for child in children}
        assert kinds <= {"text", "text_special", "html_inline", "strong_open", "strong_close", "softbreak"}
        markup = {child.content for children in inlines for child in children if child.type == "html_inline"}
        assert markup <= TAGS
        assert not re.search(r"@\w|www\.|http:/", done.output)


def test_rows_beyond_a_dozen_are_counted() -> None:
    outputs = ", ".join(f"float[2] Y{number}" for number in range(20))
    nodes = " ".join(f"Y{number} = Relu (X)" for number in range(20))
    model = saved(f"(float[2] X) => ({outputs}) {{ {nodes} }}")
    short, whole = (run("diff", model, model, "--format", "markdown", *more).output for more in ((), ("-v",)))
    assert "… and 8 more" in short
    counts = [
        len(table) - 1 for text in (short, whole) for table in tables(text) if table[0][1:3] == ["output", "shape"]
    ]
    assert counts == [12, 20]


@pytest.mark.parametrize("arguments", [("check", "nothing.onnx"), ("diff", "nothing.onnx", "nothing.onnx")])
def test_an_error_is_a_heading(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, "--format", "markdown")
    assert done.exit_code == run(*arguments).exit_code != 0
    assert done.stdout == "### ❌ Cannot read 'nothing.onnx': No such file or directory. Check the path.\n\n"


@pytest.mark.parametrize("command", ["convert", "inspect", "lists"])
def test_every_report_has_the_form(command: str) -> None:
    saved(NORM)
    done = run(command, *(["default"] if command == "lists" else ["model.onnx"]), "--format", "markdown")
    assert done.exit_code == 0
    assert tables(done.output)


def test_several_models_are_checked() -> None:
    good, bad = saved("(float[2] X) => (float[2] Y) { Y = Relu (X) }", "good.onnx"), saved(broken(), "bad.onnx")
    assert run("check", good, good).exit_code == 0
    done = run("check", bad, good, "--format", "line")
    assert done.exit_code == 1
    assert [line.partition(":")[0] for line in done.output.splitlines() if ".onnx: " in line] == [
        f"✘ {bad}",
        f"✔ {good}",
    ]
    told = json.loads(run("check", bad, good, "--format", "json").stdout)["models"]
    alone = report_of(run("check", good, "--format", "json"))
    assert {model: row["verdict"] for model, row in told.items()} == {str(bad): "failed", str(good): "passed"}
    assert told[str(good)] == {name: alone[name] for name in told[str(good)]}


def test_one_page_is_of_one_model() -> None:
    path = saved(NORM)
    done = run("check", path, path, "--html", "page.html")
    assert done.exit_code == 2
    assert "one by one" in done.output
    assert not Path("page.html").exists()
