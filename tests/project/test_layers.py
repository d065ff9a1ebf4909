"""The shape of the code: which module may import which, and how long anything may get. Proved from the source alone."""

import ast
import importlib
import logging
import re
import subprocess
import symtable
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from rooms import APART, CORE, ROOMS

import onnxamp
from onnxamp._base.extensions import Extension, all_extensions

MAX_MODULE_LINES = 575
MAX_FOLDER_MODULES = 20
"""A folder that holds more has no one subject, unless each module is an example of it."""
EXAMPLES = {"_decide/hazards"}
MAX_FUNCTION_LINES = 70
"""Without signature and docstring, which are there to be read."""

PACKAGE = Path(onnxamp.__file__).parent
TESTS = Path(__file__).parents[1]
MODELS = TESTS.parent / "models"
FILES = {
    ".".join(("onnxamp", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

COMPAT = ("onnxamp.compat", *(f"onnxamp.compat.{name}" for name in onnxamp.compat.__all__))
THEIRS = {
    f"onnxamp.compat.onnxconverter_common.{name}"
    for name in ("float16", "auto_mixed_precision", "auto_mixed_precision_model_path")
} | {"onnxamp.compat.onnxruntime_transformers.float16", "onnxamp.amp.debugging"}
"""Modules as other packages have them, with names that are elsewhere here."""
PUBLIC = ("onnxamp", "onnxamp.amp", *COMPAT, "onnxamp.debugging", "onnxamp.ir", "onnxamp.olive", "onnxamp.train")
OFFERS = [offer for offers in all_extensions().values() for offer in offers.values()]
READERS = frozenset({"_base", "_facts", "_model", "_graph"})
"""What is known before a model is seen, and what reads one. Nothing of it decides."""
DECIDERS = frozenset({"_options", "_decide", "_rewrite"})
TAKEN = {"onnxamp._runtime.inputs.samples": {"ray"}}
"""Modules that take objects of an optional package, which their users have imported."""
HEAVY = {"onnxruntime", "onnx_ir", "onnx_graphsurgeon", "click", "rich", "openpyxl"}


@cache
def trees() -> dict[str, ast.Module]:
    """The modules, parsed; not as this file is collected, which every worker does."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in FILES.items()}


def imports(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """Yield (module, imported name) of every import, inside functions and by a module's name in a string.

    The name is "" for ``import module``.
    """
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((module, alias.name) for alias in node.names)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value and node.value in FILES
        ):
            yield node.value, ""  # for import_module, which hides it from readers of imports


def own_imports(name: str) -> set[str]:
    """Modules of onnxamp that a module imports; ``from package import module`` counts as the module."""
    found = set()
    for module, item in imports(trees()[name], name):
        if module.split(".")[0] == "onnxamp":
            found.add(f"{module}.{item}" if f"{module}.{item}" in FILES else module)
    return found


@cache
def all_imports() -> dict[str, set[str]]:
    return {name: own_imports(name) for name in FILES}


def has_package(offer: Extension) -> bool:
    """Whether the package that an offer needs is installed. A folder of tests with its name is none."""
    spec = find_spec(offer.package) if offer.package else None
    return not offer.package or (spec is not None and spec.origin is not None)


def room(name: str) -> str:
    """The part of the package that a module belongs to: "cli" for ``onnxamp._cli.convert``."""
    return [*name.split("."), ""][1]


def crossings() -> Iterator[tuple[str, str]]:
    """(module, room) of every import that leaves the module's own room."""
    for name, found in all_imports().items():
        yield from ((name, target) for target in sorted(set(map(room, found)) - {room(name)}))


@pytest.mark.slow
def test_every_import_is_of_a_module_that_exists() -> None:
    assert {target for found in all_imports().values() for target in found} <= set(FILES)


def test_rooms_are_in_the_order_of_their_imports() -> None:
    assert {room(name) for name in FILES} == set(ROOMS)
    floor = {name: number for number, name in enumerate(ROOMS)}
    assert {(name, target) for name, target in crossings() if floor[target] > floor[room(name)]} == set()


@pytest.mark.slow
def test_the_core_names_no_room_apart() -> None:
    """Neither in an import nor in a string: it asks for what they offer in ``_data/extensions.toml``."""
    mention = re.compile(rf"\bonnxamp[./](?:{'|'.join(APART)})\b")
    names = [name for name in FILES if room(name) in CORE]
    assert [(name, other) for name, other in crossings() if name in names and other in APART] == []
    found = [
        (name, text)
        for name in names
        for text in texts(trees()[name])
        if mention.search(text) or (text.partition(".")[0] in APART and text.count("."))
    ]
    assert found == []


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the strings of a module except docstrings, whose examples users run."""
    documents = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documents:
            yield node.value


def test_every_offer_is_of_a_room_apart() -> None:
    for offer in OFFERS:
        assert offer.module in FILES
        assert room(offer.module) in APART


ONE_MODEL = {
    "convert_model": "onnxamp.convert_model(model)",
    "convert": "main()",
    "convert without validation": "main()",
}


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("name", ONE_MODEL)
def test_converting_one_model_loads_no_room_apart(name: str, tmp_path: Path) -> None:
    """Its user waits for none of them, and needs none of the packages that they import."""
    model = str(MODELS / "encoder.onnx")
    words = ["onnxamp", "convert", model, "-o", str(tmp_path / "out.onnx"), "-q"]
    words += ["--no-validate"] if name == "convert without validation" else []
    code = f"""
import sys
import onnxamp
from onnxamp.__main__ import main
model, sys.argv = {model!r}, {words!r}
try:
    {ONE_MODEL[name]}
except SystemExit as end:
    assert not end.code
print(*(module for module in sys.modules if module.startswith("onnxamp.")))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {room(module) for module in run.stdout.split()}
    assert "_convert" in loaded
    assert not loaded & set(APART)


def test_the_runtime_knows_nothing_of_decisions() -> None:
    """Emulation and comparison must be able to contradict the engine."""
    assert [found for found in crossings() if room(found[0]) == "_runtime" and found[1] not in READERS] == []


def test_measurements_know_nothing_of_decisions() -> None:
    """Gradients and comparisons treat any models alike: why a node is in low precision is none of their business."""
    found = [(name, target) for name, target in crossings() if room(name) in ("_gradients", "_numerics")]
    assert [pair for pair in found if pair[1] in ("_decide", "_convert")] == []


def test_decisions_run_no_model() -> None:
    """What is decided follows from the graph, the options, and prices that come in from outside."""
    allowed = READERS | DECIDERS
    found = [(name, target) for name, target in crossings() if room(name) in DECIDERS and target not in allowed]
    assert found == []


def test_only_the_registry_names_hazards() -> None:
    """A hazard is one module: what it overrules, how it is cured and what audits say is asked through ``kinds()``."""
    room = "onnxamp._decide.hazards"
    found = [(name, target) for name, targets in all_imports().items() for target in targets if target.startswith(room)]
    assert [pair for pair in found if not pair[0].startswith(room)] == [("onnxamp._decide.kinds", room)]
    assert [pair for pair in found if pair[1] != room] == []


def test_optional_packages_are_imported_by_the_rooms_that_need_them() -> None:
    needed = {offer.package: offer.module for offer in OFFERS if offer.package}
    for name, tree in trees().items():
        packages = {module.split(".")[0] for module, _ in imports(tree, name)} - TAKEN.get(name, set())
        assert {package for package in packages & needed.keys() if needed[package] != name} == set(), name


def test_only_public_modules_have_public_names() -> None:
    modules = {module for module in FILES if not any(part.startswith("_") for part in module.split("."))}
    assert modules == {*PUBLIC, *THEIRS}


def in_circles(edges: Mapping[str, set[str]]) -> list[str]:
    """What imports itself, directly or through others, and what lies above it."""
    waiting = dict(edges)
    while ready := [name for name, found in waiting.items() if not found & waiting.keys()]:
        for name in ready:
            del waiting[name]
    return sorted(waiting)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions count, too: they hide circles from Python, not from readers."""
    assert in_circles({name: found - {name} for name, found in all_imports().items()}) == []


def part(name: str) -> str:
    """The folder of a room in which a module lies; the module itself if it lies in none."""
    return ".".join(name.split(".")[:3])


def test_no_folder_of_a_room_imports_itself_in_a_circle() -> None:
    """A folder can be read without what lies above it. Who names a folder itself lists its modules, and uses none."""
    edges: dict[str, set[str]] = {part(name): set() for name in FILES}
    for name, found in all_imports().items():
        used = {part(target) for target in found if FILES[target].name != "__init__.py"}
        edges[part(name)] |= used - {part(name)}
    assert in_circles(edges) == []


def test_no_folder_holds_too_many_modules() -> None:
    count = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in FILES.values() if path.stem != "__init__")
    many = {folder: modules for folder, modules in count.items() if modules > MAX_FOLDER_MODULES}
    assert many.keys() <= EXAMPLES, f"part them by subject: {many}"


def test_heavy_libraries_wait_until_they_are_needed() -> None:
    code = "import onnxamp, sys; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, node


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring and its signature: both are there to be read."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_module_is_too_long() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: count for name, count in lines.items() if count > MAX_MODULE_LINES} == {}


def test_no_function_is_too_long() -> None:
    assert [f"{name}.{node.name}" for name, node in functions() if lines_of(node) > MAX_FUNCTION_LINES] == []


def comprehensions(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield the scopes of the comprehensions in a function."""
    for inner in table.get_children():
        if inner.get_name() in ("listcomp", "setcomp", "dictcomp"):
            yield inner
            yield from comprehensions(inner)


def clashes(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the functions one of whose comprehensions names a variable like a global that another one reads."""
    symbols = [symbol for inner in comprehensions(table) for symbol in inner.get_symbols()]
    own = {symbol.get_name() for symbol in symbols if symbol.is_local()}
    if table.get_type() == "function" and own & {symbol.get_name() for symbol in symbols if symbol.is_global()}:
        yield table.get_name()
    for inner in table.get_children():
        yield from clashes(inner)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on, symtable shows no scopes of comprehensions")
def test_comprehensions_do_not_hide_what_others_read() -> None:
    """Python 3.12 takes the global for the variable, and raises an UnboundLocalError (3.11 and 3.13 do not)."""
    code = "def f(): return [len for len in 'a'], [len(a) for a in 'a']"
    assert list(clashes(symtable.symtable(code, "", "exec"))) == ["f"]
    tables = {name: symtable.symtable(path.read_text(encoding="utf-8"), name, "exec") for name, path in FILES.items()}
    assert {name: found for name, table in tables.items() if (found := [*clashes(table)])} == {}


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


def test_nothing_is_printed_or_configured() -> None:
    """A library speaks through return values and errors; the command line through click and rich."""
    banned = {"print", "breakpoint", "sys.exit", "exit", "warnings.filterwarnings", "warnings.simplefilter"}
    configures = {"logging.basicConfig", "logging.disable", "logging.getLogger().setLevel"}
    used = {name: (banned | configures) & set(calls(tree)) for name, tree in trees().items()}
    assert {name: found for name, found in used.items() if found} == {}


def test_logging_is_left_alone() -> None:
    """There is one logger, and what becomes of its records is up to the user."""
    absent = {offer.module for offer in OFFERS if not has_package(offer)}
    for name in FILES.keys() - absent - {"onnxamp.__main__"}:
        importlib.import_module(name)
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "onnxamp"]
    logger = logging.getLogger("onnxamp")
    assert names == ["onnxamp"]
    assert (logger.level, logger.handlers, logger.filters, logger.propagate) == (logging.NOTSET, [], [], True)


def test_no_module_state() -> None:
    """Nothing is rebound or grown at run time: module-level names are constants."""
    found = {name for name, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.Global)}
    assert found == set()


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name, tree in trees().items() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_modules_list_what_they_offer(name: str) -> None:
    for offer in OFFERS:
        if offer.module == name and not has_package(offer):
            pytest.skip(f"{offer.title} is not installed")
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert [item for item in module.__all__ if not hasattr(module, item)] == []
    silent = [item for item in module.__all__ if not (getattr(module, item).__doc__ or "").strip()]
    assert [item for item in silent if item != "__version__"] == []


@pytest.mark.parametrize("name", ["onnxamp", "onnxamp.debugging", "onnxamp.train"])
def test_what_a_public_package_imports_is_public(name: str) -> None:
    imported = {item for module, item in imports(trees()[name], name) if module.partition(".")[0] == "onnxamp"}
    assert imported - {"", "export", "Shown", "VERSION"} == set(importlib.import_module(name).__all__) - {"__version__"}


def test_every_error_and_warning_is_public() -> None:
    tree = {node.name for node in trees()["onnxamp._base.errors"].body if isinstance(node, ast.ClassDef)}
    assert tree <= set(onnxamp.__all__)
    for name in tree:
        assert issubclass(getattr(onnxamp, name), (onnxamp.OnnxAmpError, onnxamp.OnnxAmpWarning))


def test_lazy_names_are_where_the_package_says() -> None:
    """``onnxamp`` imports a name from where type checkers see it, and nothing before it is used."""
    found = imports(trees()["onnxamp"], "onnxamp")
    static = {
        item: module for module, item in found if module.startswith("onnxamp.") and item not in ("", "Shown", "VERSION")
    }
    for name, module in static.items():
        assert getattr(onnxamp, name) is getattr(importlib.import_module(module), name)
    code = "import onnxamp, sys; print('onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split() == [b"False"]


def test_the_tests_mirror_the_package() -> None:
    """A folder for each room, and one for what concerns the whole project; nothing lies beside them."""
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert folders <= {room.removeprefix("_") for room in ROOMS if room} | {"project"}
