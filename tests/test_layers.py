"""The shape of the code: which module may import which, and how long anything may get. Proved from the source alone."""

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnxamp

MAX_MODULE_LINES = 360
MAX_FUNCTION_LINES = 50
"""Without signature and docstring, which are there to be read."""

PACKAGE = Path(onnxamp.__file__).parent
FILES = {
    ".".join(("onnxamp", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in FILES.items()}

FACTS = frozenset(
    {
        "collecting",
        "dtypes",
        "errors",
        "kernels",
        "names",
        "ops",
        "policy",
        "refusals",
        "signature",
        "threads",
        "verdicts",
    }
)
"""What is known before a model is seen. ``kernels`` reads graphs, too: it looks into an op's function body."""
READERS = frozenset({"graph", "resolve", "infer", "sizes", "weights", "wellformed"})
"""What reads a model, and decides nothing: ``kernels`` may use it."""
FRONT = frozenset(
    {
        "amp",
        "benching",
        "convert",
        "debugging",
        "extract",
        "front",
        "numerics",
        "report",
        "runtime",
        "train",
        "tuning",
        "zoo",
    }
)
"""What puts passes together, or works on whole models."""
TOP = frozenset({"cli"})


def imports(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """(module, imported name) of every import, inside functions, too; the name is "" for ``import module``."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((module, alias.name) for alias in node.names)


def own_imports(name: str) -> set[str]:
    """Modules of onnxamp that a module imports; ``from package import module`` counts as the module."""
    found = set()
    for module, item in imports(TREES[name], name):
        if module.split(".")[0] == "onnxamp":
            found.add(f"{module}.{item}" if f"{module}.{item}" in FILES else module)
    return found


IMPORTS = {name: own_imports(name) for name in FILES}


def room(name: str) -> str:
    """The part of the package that a module belongs to: "cli" for ``onnxamp._cli.convert``."""
    return [*name.split("."), ""][1]


def of_room(*rooms: str) -> list[str]:
    return [name for name in FILES if room(name) in rooms]


PASSES = sorted({room(name) for name in FILES} - FACTS - READERS - FRONT - TOP - {"", "__main__"})


def test_every_import_is_of_a_module_that_exists() -> None:
    assert {target for found in IMPORTS.values() for target in found} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_only_the_command_line_imports_the_command_line(name: str) -> None:
    if room(name) not in ("cli", "__main__"):
        assert "cli" not in map(room, IMPORTS[name])


@pytest.mark.parametrize("name", of_room(*FACTS))
def test_facts_import_facts_alone(name: str) -> None:
    allowed = FACTS | READERS if room(name) == "kernels" else FACTS
    assert {room(target) for target in IMPORTS[name]} <= allowed


@pytest.mark.parametrize("name", of_room(*READERS))
def test_readers_import_facts_and_readers(name: str) -> None:
    assert {room(target) for target in IMPORTS[name]} <= FACTS | READERS


@pytest.mark.parametrize("name", of_room(*PASSES))
def test_passes_do_not_look_up(name: str) -> None:
    assert not {room(target) for target in IMPORTS[name]} & (FRONT | TOP | {""})


@pytest.mark.parametrize("name", of_room("runtime"))
def test_the_runtime_knows_nothing_of_decisions(name: str) -> None:
    """Emulation and comparison must be able to contradict the engine."""
    assert {room(target) for target in IMPORTS[name]} <= {"runtime", "storage", *FACTS, *READERS}


@pytest.mark.parametrize("name", of_room("numerics"))
def test_numerics_do_not_report(name: str) -> None:
    assert not {room(target) for target in IMPORTS[name]} & {"report", *TOP}


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions count, too: they hide circles from Python, not from readers."""
    edges = {name: found - {name} for name, found in IMPORTS.items()}
    waiting = dict(edges)
    while ready := [name for name, found in waiting.items() if not found & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting, f"circles among {sorted(waiting)}"


def test_heavy_libraries_wait_until_they_are_needed() -> None:
    code = "import onnxamp, sys; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"onnxruntime", "onnx_ir", "onnx_graphsurgeon", "click", "rich", "openpyxl"} & set(loaded)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, node


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring and its signature: both are there to be read."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("name", FILES)
def test_no_module_is_too_long(name: str) -> None:
    assert len(FILES[name].read_text(encoding="utf-8").splitlines()) <= MAX_MODULE_LINES


def test_no_function_is_too_long() -> None:
    assert [f"{name}.{node.name}" for name, node in functions() if lines_of(node) > MAX_FUNCTION_LINES] == []


def test_no_mutable_defaults() -> None:
    def is_mutable(node: ast.expr | None) -> bool:
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        kinds = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
        return isinstance(node, kinds) or (called and node.func.id in ("list", "dict", "set"))

    found = [
        f"{name}.{node.name}"
        for name, node in functions()
        if any(map(is_mutable, (*node.args.defaults, *node.args.kw_defaults)))
    ]
    assert found == []


def calls(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_printed_or_configured(name: str) -> None:
    """A library speaks through return values and errors; the command line through click and rich."""
    banned = {"print", "breakpoint", "sys.exit", "exit", "warnings.filterwarnings", "warnings.simplefilter"}
    configures = {"logging.basicConfig", "logging.disable", "logging.getLogger().setLevel"}
    assert not (banned | configures) & set(calls(TREES[name]))


def test_importing_leaves_logging_alone() -> None:
    assert not [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "onnxamp"]


@pytest.mark.parametrize("name", FILES)
def test_no_module_state(name: str) -> None:
    """Nothing is rebound or grown at run time: module-level names are constants."""
    assert not [node for node in ast.walk(TREES[name]) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("name", FILES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(TREES[name])


def test_public_names() -> None:
    assert list(onnxamp.__all__) == sorted(onnxamp.__all__)
    assert len(set(onnxamp.__all__)) == len(onnxamp.__all__)
    for name in onnxamp.__all__:
        assert hasattr(onnxamp, name)
        assert name == "__version__" or (getattr(onnxamp, name).__doc__ or "").strip(), f"{name} is not documented"


def test_what_the_package_imports_is_public() -> None:
    assigned = {item for module, item in imports(TREES["onnxamp"], "onnxamp") if module.startswith("onnxamp.")}
    assert assigned == set(onnxamp.__all__) - {"__version__"}


def test_every_error_is_public() -> None:
    tree = {node.name for node in TREES["onnxamp._errors"].body if isinstance(node, ast.ClassDef)}
    assert tree <= set(onnxamp.__all__)
    for name in tree:
        assert issubclass(getattr(onnxamp, name), onnxamp.OnnxAmpError)
