"""Every public class and function has an example in its docstring, and the examples do what they show."""

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import onnxamp

ROOT = Path(__file__).parents[2]
MODULES = ("onnxamp", "onnxamp.amp", "onnxamp.debugging", "onnxamp.train")


def public() -> dict[str, Any]:
    """Public classes and functions by full name; errors need no example."""
    members = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module in MODULES
        for name in importlib.import_module(module).__all__
    }
    return {
        f"{member.__module__}.{member.__qualname__}": member
        for member in members.values()
        if inspect.isfunction(member) or (inspect.isclass(member) and not issubclass(member, onnxamp.OnnxAmpError))
    }


PUBLIC = public()


def examples(name: str) -> list[doctest.DocTest]:
    """The examples of a class or function and its methods, which import all that they use."""
    found = doctest.DocTestFinder(exclude_empty=True).find(PUBLIC[name], name, module=False, globs={})
    return [test for test in found if test.examples]


@pytest.mark.mostly_slow(fast=10)
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_examples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples run beside the models, in a folder where they may write."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    found = examples(name)
    assert found, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in found:
        runner.run(test)
    assert not runner.failures, capsys.readouterr().out


@pytest.mark.parametrize("module", MODULES)
def test_public_names_say_where_they_live(module: str) -> None:
    names = importlib.import_module(module).__all__
    assert len(names) == len(set(names))
    homes = {name: getattr(getattr(importlib.import_module(module), name), "__module__", module) for name in names}
    assert {name: home for name, home in homes.items() if home not in MODULES} == {}
