"""The examples in docstrings of public names, run from the root of the repository."""

import doctest
from pathlib import Path

import pytest

import onnxamp
import onnxamp.amp
import onnxamp.debugging
import onnxamp.train

ROOT = Path(__file__).parents[1]
MODULES = (onnxamp, onnxamp.amp, onnxamp.debugging, onnxamp.train)
EXAMPLES = {
    test.name: test
    for module in MODULES
    for name in getattr(module, "__all__", ())
    for test in doctest.DocTestFinder(exclude_empty=True, recurse=False).find(
        getattr(module, name), f"{module.__name__}.{name}", module=False, globs={}
    )
    if test.examples
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_public_names_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(EXAMPLES[name], out=said.append)
    assert result.failed == 0, "".join(said)
