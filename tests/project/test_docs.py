"""Every command and every Python block of the documentation does what the page says."""

import contextlib
import io
import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import click
import decoders
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from doc_pages import COMMANDS, PAGES, blocks, spans
from graphs.case import add_weights
from repository import ROOT

import onnxamp
from onnxamp._cli.command import group
from onnxamp._decide.kinds import kinds
from onnxamp._options.command_line import option_rows, spelled_fields

GRAPHS = ROOT / "docs" / "explain" / "graphs"
REGENERATE = "ONNXAMP_REGENERATE" in os.environ
SCRIPT = re.compile(r"(?:[A-Z_]+=\S+ )?python3? (?:scripts|benchmarks)/.+")
EXTRAS = re.compile(r"pip install [\"']?(?:\.|onnxamp)\[([\w,]+)\]")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
PRIVATE = re.compile(r"onnxamp(?:\.\w+)*\._\w+(?:\.\w+)*")
DOCTEST = re.compile(r"^ *(?:>>>|\.\.\.) .*", re.MULTILINE)
VERSION = re.compile(r"ONNX Runtime [\d.]+")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b")
FOREIGN = {
    "CONTRIBUTING": {"--dist"},  # pytest
    "README": {"--fp16"},  # trtexec
    "faq": {"--fp16"},
    "encoder-decoders": {"--task"},  # optimum-cli
    "transformers-js": {"--task"},
    "index": {"--fp16"},
    "new-runtime": {"--minutes"},  # scripts/refresh_runtime.py
    "int8": {"--int8", "--fp16"},
    "tensorrt": {"--fp16", "--stronglyTyped"},
    "webgpu": {"--check"},  # scripts/ask_engine.py
}
"""Options of other programs, by page."""

PROGRAM = re.compile(r"\.ci/run|(?:[A-Z_]+=\S+ )?(?:apt-get|eval|mpiexec|npm|olive|pip|python3?|ray|trtexec) .+")
UNRUN = {
    "apt-get install": "changes the system",
    "npm install": "downloads packages",
    "pip install": "downloads packages; scripts/test_install.py installs extras, and all named ones exist",
    "trtexec": "needs a GPU",
    "python -m onnxruntime_genai.models.builder": "downloads a model; benchmarks/language_models.py runs it",
    "python -m onnxruntime.quantization": "another tool's",
    "optimum-cli": "downloads a model; benchmarks/language_models.py calls Optimum",
    "mkdir web/onnx": "moves what Optimum writes",
    "onnxamp convert whisper": "needs what Optimum writes; tests/fleet/test_kinds.py converts such folders",
    "ray start": "starts daemons; tests/workers start Ray in the test's own process",
    "mpiexec": "tests/train/test_average.py runs it",
    "python -m onnxamp.olive": "tests/olive runs it",
    "olive run": "tests/olive runs it",
    "onnxamp convert s3://": "tests/fleet/test_remote.py runs it with a bucket",
    'eval "$(_ONNXAMP_COMPLETE=': "tests/cli/test_completion.py runs it in shells",
    "source ~/.onnxamp-complete.bash": "tests/cli/test_completion.py runs it in shells",
    "_ONNXAMP_COMPLETE=": "tests/cli/test_completion.py runs it in shells",
    "python -m modelopt": "another tool's",
    "python -m scripts.convert": "another tool's",
    "python benchmarks/": "takes minutes; tests/project/test_benchmarks.py runs what is quick",
    "python scripts/": "takes minutes, and an environment of its own",
    "python3 scripts/": "takes minutes, and an environment of its own; .ci/run runs it",
    "ONNXAMP_REGENERATE=": "rewrites files of the repository",
    ".ci/run": "runs these tests",
    "python -m build": "scripts/test_install.py runs it",
    "python -m onnxamp": "a form; see test_the_module_is_the_command",
}
"""Beginnings of all commands on pages that test_page does not run -> the reason."""
MARKS: dict[str, list[pytest.MarkDecorator]] = {
    name: [getattr(pytest.mark, name)] for name in ("openvino", "tensorrt", "webgpu")
}
"""Engines that the page of the same name needs."""
SLOW = {
    "accuracy", "bench", "cluster", "coming-from", "coming-from-pytorch", "convert", "cuda", "float16-only", "genai",
    "int8", "language-models", "large-models", "nan", "openvino", "report", "rescale", "rounding", "rules", "tensorrt",
    "train", "transformers-js", "tune", "tutorial", "webgpu",
}  # fmt: skip
"""Pages whose commands take seconds."""
RUNNABLE = [page for page in PAGES if any(block.kind in (*COMMANDS, "python", "text") for block in blocks(page))]


def marks(page: str) -> list[pytest.MarkDecorator]:
    return [*MARKS.get(page, ()), *([pytest.mark.slow] if page in SLOW else ())]


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that pages name."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "models", folder / "models")
    shutil.copytree(GRAPHS, folder / "graphs")
    shutil.copy(folder / "models" / "classifier.onnx", folder / "model.onnx")
    model = onnx.load(folder / "model.onnx")
    onnx.save(onnxamp.convert_model(model), folder / "model_fp16.onnx")
    np.savez(folder / "samples.npz", **onnxamp.random_samples(model)[0])
    decoders.folder(folder / "llama", "genai", decoders.grouped())
    decoders.folder(folder / "web", "transformers.js", decoders.plain())
    (folder / "prompts.txt").write_text("w3 w14 w15\nw9 w26 w5 w35 w8\n")
    encoder = onnx.load(folder / "models" / "encoder.onnx")
    onnx.save(encoder, folder / "big.onnx", save_as_external_data=True, location="big.onnx.data", size_threshold=1024)
    return folder


def tutorial_network() -> onnx.ModelProto:
    """What PyTorch exports of the tutorial's module, with weights as PyTorch draws them: the page runs without it."""
    text = """(float[batch,3,32,32] image) => (float[batch,10] scores) {
        c0 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (image, w0, b0) r0 = Relu (c0)
        c3 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (r0, w3, b3) r3 = Relu (c3)
        pooled = GlobalAveragePool (r3) flat = Flatten (pooled) scores = Gemm <transB = 1> (flat, w7, b7) }"""
    shapes = {"0": (64, 3, 3, 3), "3": (64, 64, 3, 3), "7": (10, 64)}
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes.items():
        bound = 1 / np.sqrt(np.prod(shape[1:]))
        weights["w" + name] = random.uniform(-bound, bound, shape).astype(np.float32)
        weights["b" + name] = random.uniform(-bound, bound, shape[:1]).astype(np.float32)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> tutorial {text}')
    return add_weights(model, weights)


@pytest.fixture
def checkout(materials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it holds what pages name, and they may write there."""
    monkeypatch.setattr(logging.getLogger("onnxamp"), "level", logging.NOTSET)  # pages may set it
    shutil.copytree(materials, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_pages_to_run() -> None:
    folders = (ROOT / "docs" / folder for folder in ("how-to", "reference/commands"))
    pages = {page.stem for folder in folders for page in folder.glob("*.md")}
    others = {"README", "coming-from", "coming-from-converters", "tutorial", "hazards"}
    assert {page.stem for page in RUNNABLE} >= (pages - {"train"}) | others


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem, marks=marks(page.stem)) for page in RUNNABLE])
def test_page(page: Path, materials: Path, checkout: Path) -> None:
    """Commands and programs run from top to bottom, as a reader would run them, and print what the page shows."""
    if page.stem == "tutorial":
        onnx.save(tutorial_network(), "model.onnx")  # with PyTorch, the page replaces it
    printed = ""
    shown: list[tuple[int, str, str]] = []
    for block in blocks(page):
        if block.obstacle:
            continue
        if block.kind == "text":
            shown.append((block.start, block.text, "".join(printed.splitlines(True)[: block.text.count("\n")])))
        elif block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                exec(compile(block.text, str(page), "exec"), {"__name__": "__main__"})
            printed = stream.getvalue()
        else:
            assert block.kind in COMMANDS, f"{page.name}: a block of {block.kind!r} is neither run nor compared"
            for line in block.commands:
                printed = run(line)
    if REGENERATE:
        rewrite(page, shown)
    assert [VERSION.sub("", text) for _, text, _ in shown] == [VERSION.sub("", found) for *_, found in shown]
    if page.stem == "README":
        assert not_ignored(file.name for file in checkout.iterdir() if not (materials / file.name).exists()) == []


def not_ignored(names: Iterable[str]) -> list[str]:
    """Return the files that git would show as new if they lay in the repository's root."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return []
    text = "".join(f"{name}\n" for name in names)
    command = ["git", "check-ignore", "--no-index", "--stdin", "--verbose", "--non-matching"]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    return [line.removeprefix("::\t") for line in done.stdout.splitlines() if line.startswith("::")]


def unrun(page: Path) -> list[str]:
    """Commands that test_page does not run."""
    lines = [line for block in blocks(page) for line in block.commands if block.obstacle or SCRIPT.fullmatch(line)]
    programs = [span for span in spans(page) if PROGRAM.fullmatch(span)]
    return lines + programs


def test_commands_that_do_not_run_have_a_reason() -> None:
    commands = {command for page in PAGES for command in unrun(page)}
    assert [command for command in commands if not command.startswith((*UNRUN,))] == []
    assert [begun for begun in UNRUN if not any(command.startswith(begun) for command in commands)] == []


def run(line: str) -> str:
    """Run one command in this process, and return what it prints."""
    command, _, comment = line.partition("  # ")
    program, *arguments = shlex.split(command)
    if SCRIPT.fullmatch(command):
        return ""  # that it exists is another test; scripts set up environments of their own
    assert program == "onnxamp", line
    result = CliRunner(env={"COLUMNS": "100"}).invoke(group, arguments)
    assert result.exit_code == (int(comment.removeprefix("exits with ")) if comment else 0), f"{line}\n{result.output}"
    assert "Traceback" not in result.output
    assert result.output.strip()
    return result.stdout


def rewrite(page: Path, shown: list[tuple[int, str, str]]) -> None:
    """Put what commands print today in place of what the page shows."""
    text = page.read_text(encoding="utf-8")
    for start, old, new in reversed(shown):
        text = text[:start] + new + text[start + len(old) :]
    page.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_exist(page: Path) -> None:
    """Those of blocks that do not run here, and those in running text."""
    lines = [line for block in blocks(page) for line in block.commands]
    for line in lines:
        if line.startswith("onnxamp "):
            parse(line.partition("  # ")[0], whole=True)
    code = [] if page.stem in ("changelog", "coming-from", "coming-from-converters") else spans(page)
    for span in code:
        if re.match(r"onnxamp [a-z]+( |$)", span):
            parse(span, whole=False)
        if span.startswith("--"):
            flags = {word.partition("=")[0] for word in span.split() if word.startswith("--")}
            assert flags <= OPTIONS | FOREIGN.get(page.stem, set()), span
    extras = {extra for line in (*lines, *code) for names in EXTRAS.findall(line) for extra in names.split(",")}
    assert extras <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    scripts = [line for line in (*lines, *code) if SCRIPT.fullmatch(line)]
    files = [word for line in scripts for word in line.split() if word.endswith(".py")]
    assert [word for word in files if not (ROOT / word).is_file()] == []


CONTEXT = click.Context(group, **group.context_settings)  # click keeps what help is called at first
SUBCOMMANDS = {name: group.get_command(CONTEXT, name) for name in group.list_commands(CONTEXT)}
OPTIONS = {
    flag
    for command in (group, *SUBCOMMANDS.values())
    for parameter in command.get_params(CONTEXT)
    for flag in (*parameter.opts, *parameter.secondary_opts)
}


def parse(line: str, *, whole: bool) -> None:
    """Parse a command as the program does; one that is not ``whole`` may lack arguments or have placeholders."""
    name, *arguments = shlex.split(line)[1:]
    try:
        with contextlib.suppress(click.exceptions.Exit):  # --help, --version
            if name.startswith("-"):
                group.make_context("onnxamp", [name, *arguments])
            else:
                SUBCOMMANDS[name].make_context(name, list(arguments), parent=CONTEXT)
    except click.MissingParameter:
        assert not whole, line
    except click.BadParameter:
        assert not whole, line
        assert PLACEHOLDER.search(line), line
    except click.ClickException as error:
        if "needs a package that is not installed" not in error.message:  # it does for a URL, which parses
            raise


def is_complete(line: str) -> bool:
    try:
        parse(line, whole=True)
    except (AssertionError, click.UsageError):
        return False
    return not PLACEHOLDER.search(line)


COMPLETE = {
    span
    for page in PAGES
    for span in spans(page)
    if page.stem != "CHANGELOG" and span.startswith("onnxamp ") and is_complete(span)
}


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("command", sorted(COMPLETE))
def test_complete_commands_in_running_text(command: str, checkout: Path) -> None:
    run(f"onnxamp diff model.onnx model_fp16.onnx --save {checkout / 'diff.json'}")
    run(command)


def test_a_command_with_an_unknown_option_fails() -> None:
    with pytest.raises(click.NoSuchOption):
        parse("onnxamp convert MODEL --no-such-option", whole=False)
    with pytest.raises(AssertionError):
        parse("onnxamp convert model.onnx --level O7", whole=True)


def test_the_readme_is_read_in_a_few_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"<!--.*?-->|```text\n.*?```", "", text, flags=re.DOTALL)  # what commands print is glanced at
    assert len(prose.split()) <= 950


def test_the_readme_names_the_command_that_ci_runs() -> None:
    (readme,) = (page for page in PAGES if page.stem == "README")
    demo, suite = (line for block in blocks(readme) for line in block.commands if line.startswith("python3"))
    assert suite in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert demo == "python3 scripts/demo.py"


def test_what_the_readme_names_is_ignored_by_git() -> None:
    """Results of its commands; the models that they read are the user's."""
    (readme,) = (page for page in PAGES if page.stem == "README")
    text = readme.read_text(encoding="utf-8")
    written = {*re.findall(r"(?:-o|--html) ([^\s`]+)", text), *re.findall(r"\.save\(\w+, \"(.+?)\"", text)}
    assert written >= {"encoder_fp16.onnx", "report.html", "tuned.onnx"}
    assert not_ignored(written) == []


@pytest.mark.slow
def test_the_module_is_the_command(checkout: Path) -> None:
    """``python -m onnxamp`` in a process of its own prints what ``onnxamp`` prints."""
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "onnxamp", "lists", "default"],
        cwd=checkout, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == run("onnxamp lists default")


def test_every_command_has_a_page():
    pages = (ROOT / "docs" / "reference" / "commands").glob("*.md")
    assert {page.stem for page in pages} == set(group.list_commands(click.Context(group)))


def test_every_hazard_has_a_section_and_a_graph():
    """A graph shows the hazard of the section that it stands in."""
    page = (ROOT / "docs" / "explain" / "hazards.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)\n\n!\[.*\]\(graphs/(\w+)\.svg\)", page, re.MULTILINE)
    targets = runpy.run_path(str(ROOT / "scripts" / "draw_graphs.py"))["TARGETS"]
    for title, name in sections:
        target = targets.get(name, "cuda")
        plan = onnxamp.plan_model(str(GRAPHS / f"{name}.onnxtxt"), "O2", target=target, fold=False)
        assert title.lower() in {hazard.reason for hazard in plan.hazards if not hazard.low}
    named = {title.lower() for title, _ in sections}
    assert named ^ {kind.value for kind in kinds()} == set(), "docs/explain/hazards.md has a section for each hazard"
    assert {name for _, name in sections} == {path.stem for path in GRAPHS.glob("*.onnxtxt")}


@pytest.mark.slow
def test_pictures_of_graphs_are_current(tmp_path):
    script = ROOT / "scripts" / "draw_graphs.py"
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True)
    stale = [path.name for path in GRAPHS.glob("*.svg") if (tmp_path / path.name).read_bytes() != path.read_bytes()]
    assert stale == [], "python scripts/draw_graphs.py draws them"
    assert len(list(tmp_path.iterdir())) == len(list(GRAPHS.glob("*.svg")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_examples_import_nothing_private():
    """In Python blocks of pages, and in the examples of docstrings."""
    examples = {page.name: [block.text for block in blocks(page) if block.kind == "python"] for page in PAGES}
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


@pytest.mark.slow
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
    assert [row.flags for row in spelled_fields().values() if row.flags.removeprefix("--") not in options] == []
    for name in group.list_commands(click.Context(group)):
        page = (reference / "commands" / f"{name}.html").read_text(encoding="utf-8")
        rows = (row for row in option_rows() if name in row.commands and not row.is_argument)
        assert [row.flags for row in rows if row.flags.rpartition("--")[2] not in page] == [], name
