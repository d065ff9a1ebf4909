"""Files that somebody broke: no command ends but with a sentence and an exit code, and none calls it a bug."""

import json
import zipfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pytest
from commands import run, saved
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import onnxamp

MODEL: Final = """(float[1,4] X) => (float[1,4] Y) <float[4,4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2}> {
    [first] a = MatMul (X, w) [second] b = Softmax (a) [third] Y = Mul (b, a) }"""
SCALARS: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.just(10**30),
    st.floats(),
    st.sampled_from(["", "x", "O2", "\0", "é"]),
)
VALUES: Final = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "name"]), inner, max_size=2),
)
"""What may stand in place of any part of a JSON file."""


def fuzzed(count: int) -> Callable[[Any], Any]:
    """A few examples, the same in every run."""
    few = settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: seed(0)(few(test))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """One file of each kind, as it should be."""
    folder = tmp_path_factory.mktemp("whole")
    with chdir(folder):
        model = saved(MODEL)
        np.savez("inputs.npz", X=np.arange(4, dtype=np.float32).reshape(1, 4))
        Path("inputs.json").write_text(json.dumps([{"X": [[1.0, 2.0, 3.0, 4.0]]}]))
        onnxamp.plan_model(model).save("plan.json")
        assert run("diff", model, model, "--state", "state", "--save", "diff.json", "--layers").exit_code == 0
        assert run("tune", model, "-o", "tuned.onnx", "--state", "tuning", "--samples", 1).exit_code == 0
        Path("ops.toml").write_text('[[op]]\ndomain = "acme"\ntype = "Swish"\n')
        return {path.name: path.read_bytes() for path in folder.iterdir()}


COMMANDS: Final = {
    "model.onnx": (("inspect", "model.onnx"), ("convert", "model.onnx", "--no-cure")),
    "inputs.npz": (("check", "model.onnx", "--inputs", "inputs.npz"),),
    "inputs.json": (("check", "model.onnx", "--inputs", "inputs.json"),),
    "plan.json": (
        ("convert", "model.onnx", "--plan", "plan.json", "--no-validate"),
        ("view", "model.onnx", "--plan", "plan.json"),
    ),
    "diff.json": (("diff", "diff.json"), ("diff", "diff.json", "--tolerance", "1", "--format", "json")),
    "state": (("diff", "model.onnx", "model.onnx", "--state", "state", "--layers"),),
    "tuning": (("tune", "model.onnx", "-o", "tuned.onnx", "--state", "tuning", "--samples", 1),),
    "ops.toml": (("inspect", "model.onnx", "--custom-ops", "ops.toml"),),
}
"""By file: commands that read it."""


def survives(whole: dict[str, bytes], name: str, data: bytes) -> None:
    """Run all commands that read a file, in a folder where it holds this."""
    with TemporaryDirectory() as folder, chdir(folder):
        for other, content in whole.items():
            Path(other).write_bytes(data if other == name else content)
        for command in COMMANDS[name]:
            result = run(*command)
            told = (command, result.output, result.exception, data[:2000])
            assert result.exception is None or isinstance(result.exception, SystemExit), told
            assert result.exit_code in {0, 1, 2}, told
            assert "bug of onnxamp" not in result.output, told


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_bytes(made: dict[str, bytes], name: str) -> None:
    """Bytes that change, are cut off, or come from elsewhere."""
    whole = made[name]

    @fuzzed(12)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, min(start + 20, len(whole))) | st.just(len(whole)))
        survives(made, name, whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:])

    check()


def paths_of(item: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every part of a JSON value."""
    parts = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    return [path, *(found for key, part in parts for found in paths_of(part, (*path, key)))]


def replaced(item: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another part at the end of a path."""
    if not path:
        return value
    copy = dict(item) if isinstance(item, dict) else list(item)
    copy[path[0]] = replaced(item[path[0]], path[1:], value)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in sorted(COMMANDS) if name.endswith(".json")])
def test_values(made: dict[str, bytes], name: str) -> None:
    """JSON in which one part is another value."""
    whole = json.loads(made[name])

    @fuzzed(60)
    @given(path=st.sampled_from(paths_of(whole)), value=VALUES)
    def check(path: tuple[Any, ...], value: Any) -> None:
        survives(made, name, json.dumps(replaced(whole, path, value)).encode())

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state", "tuning"])
def test_lines(made: dict[str, bytes], name: str) -> None:
    """States in which a line holds another value, is missing, or is there twice."""
    lines = made[name].splitlines(keepends=True)

    @fuzzed(10)
    @given(number=st.integers(0, len(lines) - 1), value=VALUES, how=st.sampled_from(["value", "gone", "twice"]))
    def check(number: int, value: Any, how: str) -> None:
        line = json.loads(lines[number])
        other = json.dumps({**line, "is": value}).encode() + b"\n"
        changed = {"value": [other], "gone": [], "twice": [lines[number]] * 2}[how]
        survives(made, name, b"".join([*lines[:number], *changed, *lines[number + 1 :]]))

    check()


@pytest.mark.slow
@fuzzed(40)
@given(
    descr=st.sampled_from(
        ["<f4", ">f8", "<i8", "|O", "<U3", "|V4", "<M8[s]", "<f9", ["<f4"], [("a", "<f4")], None]
    ),
    order=st.sampled_from([True, False, 0, "x"]),
    shape=st.lists(SCALARS, max_size=3).map(tuple) | SCALARS,
    size=st.integers(0, 64),
)  # fmt: skip
def test_headers_of_arrays(made: dict[str, bytes], descr: Any, order: Any, shape: Any, size: int) -> None:
    header = repr({"descr": descr, "fortran_order": order, "shape": shape}).encode().ljust(200) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(size)
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.npz")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("X.npy", data)
        survives(made, "inputs.npz", path.read_bytes())


@pytest.mark.mostly_slow(fast=45)
@pytest.mark.parametrize("name", sorted(COMMANDS))
@pytest.mark.parametrize("data", [
    b"", b"null", b"NaN", b"[]", b"{}", b"1", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe",
    b"\0" * 1000, b"PK\x03\x04", b'{"format": Infinity}', b'{"onnxamp": "diff", "format": 1}',
    "\ufeff{}".encode(), b"1e999999",
], ids=lambda data: repr(data[:12]))  # fmt: skip
def test_files_of_another_kind(made: dict[str, bytes], name: str, data: bytes) -> None:
    survives(made, name, data)
