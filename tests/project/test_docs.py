"""Every command and every Python block of the documentation does what the page says."""

import logging
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from repository import ROOT

import onnxamp
from onnxamp._cli import group
from onnxamp._decide.hazards import kinds

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"])
WITH_README = [*PAGES, ROOT / "README.md"]
GRAPHS = ROOT / "docs" / "explain" / "graphs"
BLOCK = re.compile(r"^( *)```([^`\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"`((?:[A-Z_]+=\S+ )?python3 scripts/[^`]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
PRIVATE = re.compile(r"onnxamp(?:\.\w+)*\._\w+(?:\.\w+)*")
DOCTEST = re.compile(r"^ *(?:>>>|\.\.\.) .*", re.MULTILINE)


class Block(NamedTuple):
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All blocks but directives of Sphinx."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(kind, text) for _, kind, text in found if not kind.startswith("{")]


RUNNABLE = [page for page in PAGES if any(block.kind in ("", "python") for block in blocks(page))]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """What the pages name, in a place where they may write."""
    monkeypatch.setattr(logging.getLogger("onnxamp"), "level", logging.NOTSET)  # pages may set it
    shutil.copytree(ROOT / "models", tmp_path / "models")
    shutil.copytree(GRAPHS, tmp_path / "graphs")
    monkeypatch.chdir(tmp_path)
    shutil.copy("models/classifier.onnx", "model.onnx")
    model = onnx.load("models/encoder.onnx")
    np.savez("samples.npz", **onnxamp.random_samples(onnx.load("model.onnx"))[0])
    onnx.save(model, "big.onnx", save_as_external_data=True, location="big.onnx.data", size_threshold=1024)
    return tmp_path


MARKS = {name: [getattr(pytest.mark, name)] for name in ("browser", "openvino", "tensorrt", "webgpu")}
"""What pages need."""


def test_there_are_pages_to_run():
    folders = (ROOT / "docs" / folder for folder in ("how-to", "reference/commands"))
    pages = {page.stem for folder in folders for page in folder.glob("*.md")}
    others = {"coming-from", "coming-from-converters", "tutorial", "hazards"}
    assert {page.stem for page in RUNNABLE} >= (pages - {"train"}) | others


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=MARKS.get(page.stem, ())) for page in RUNNABLE],
)
def test_page(page, checkout):
    """Commands and programs run from top to bottom, as a reader would run them."""
    if page.stem == "object-storage":
        pytest.importorskip("fsspec", reason="fsspec is not installed: pip install onnxamp[remote]")
    for block in blocks(page):
        if block.text.startswith("import torch") and not find_spec("torch"):
            continue  # what it exports is there: a model of the same inputs
        if "--cluster" in block.text and not find_spec("ray"):
            continue
        if block.kind == "python":
            exec(compile(block.text, str(page), "exec"), {"__name__": "__main__"})
        else:
            assert block.kind == "", f"{page.name}: a block of {block.kind!r} is not run"
            for line in block.text.splitlines():
                run(line.strip())


def run(line: str) -> None:
    command, _, comment = line.partition("  # ")
    name, *arguments = shlex.split(command)
    assert name == "onnxamp", line
    result = CliRunner(env={"COLUMNS": None}).invoke(group, arguments)
    assert result.exit_code == (int(comment.removeprefix("exits with ")) if comment else 0), f"{line}\n{result.output}"
    assert "Traceback" not in result.output
    assert result.output.strip()


def test_every_command_has_a_page():
    pages = (ROOT / "docs" / "reference" / "commands").glob("*.md")
    assert {page.stem for page in pages} == set(group.list_commands(click.Context(group)))


def test_every_hazard_has_a_section_and_a_graph():
    """A graph shows the hazard of the section that it stands in."""
    page = (ROOT / "docs" / "explain" / "hazards.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)\n\n!\[.*\]\(graphs/(\w+)\.svg\)", page, re.MULTILINE)
    for title, name in sections:
        target = {"product": "webgpu", "accumulator": "webgpu", "attention": "cuda@1.26"}.get(name, "cuda")
        plan = onnxamp.plan_model(str(GRAPHS / f"{name}.onnxtxt"), "O2", target=target, fold=False)
        assert title.lower() in {hazard.reason for hazard in plan.hazards if not hazard.low}
    assert {title.lower() for title, _ in sections} == {kind.value for kind in kinds()}
    assert {name for _, name in sections} == {path.stem for path in GRAPHS.glob("*.onnxtxt")}


def test_pictures_of_graphs_are_current(tmp_path):
    script = ROOT / "scripts" / "draw_graphs.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True)
    stale = [path.name for path in GRAPHS.glob("*.svg") if (tmp_path / path.name).read_bytes() != path.read_bytes()]
    assert stale == [], "python scripts/draw_graphs.py draws them"
    assert len(list(tmp_path.iterdir())) == len(list(GRAPHS.glob("*.svg")))


def test_scripts_exist():
    found = [command for page in PAGES for command in SCRIPT.findall(page.read_text(encoding="utf-8"))]
    named = [word for command in found for word in command.split() if word.endswith(".py")]
    assert named
    assert all((ROOT / word).is_file() for word in named)


@pytest.mark.parametrize("page", WITH_README, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_examples_import_nothing_private():
    """In Python blocks of pages, and in the examples of docstrings."""
    examples = {page.name: [block.text for block in blocks(page) if block.kind == "python"] for page in WITH_README}
    for path in (ROOT / "onnxamp").rglob("*.py"):
        examples[str(path.relative_to(ROOT))] = DOCTEST.findall(path.read_text(encoding="utf-8"))
    private = {name: PRIVATE.findall("\n".join(texts)) for name, texts in examples.items()}
    assert {name: found for name, found in private.items() if found} == {}


def test_reference_describes_public_names():
    directive = re.compile(r"auto\w+:: (\S+)")
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert [name for name in directive.findall(text) if PRIVATE.match(name)] == []


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (onnxamp.DiffReport, "outputs"),
        (onnxamp.DiffReport, "layers"),
        (onnxamp.DiffReport, "detections"),
        (onnxamp.DiffReport, "tokens"),
        (onnxamp.BenchReport, "timings"),
        (onnxamp.BenchReport, "models"),
        (onnxamp.BenchReport, "causes"),
    ],
)
def test_tables_of_results_name_all_attributes(report, field):
    page = (ROOT / "docs" / "reference" / "results.md").read_text(encoding="utf-8")
    table = page.partition(f"| attribute of `{field}` |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    item = get_args(get_type_hints(report)[field])[0]
    assert sorted(named) == sorted(attribute.name for attribute in fields(item))


def test_reference_names_all_that_is_public():
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = {name.rpartition(".")[2] for name in re.findall(r"auto(?:function|class):: (\S+)", text)}
    errors = {name for name in onnxamp.__all__ if is_error(getattr(onnxamp, name))}
    assert set(onnxamp.__all__) - named - errors == {"__version__", "amp", "compat", "debugging", "train"}


def is_error(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, (onnxamp.OnnxAmpError, onnxamp.OnnxAmpWarning))


def test_documentation_builds(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path / "html")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reference = tmp_path / "html" / "reference"
    assert "convert_model" in (reference / "python.html").read_text(encoding="utf-8")
    options = (reference / "options.html").read_text(encoding="utf-8")
    assert [item.name for item in fields(onnxamp.Options) if item.name not in options] == []
    flags = [item.metadata["cli"].flag for item in fields(onnxamp.Options) if "cli" in item.metadata]
    assert [flag for flag in flags if flag.removeprefix("--") not in options] == []
