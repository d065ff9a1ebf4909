"""What a command reads may be replaced while it reads: that is an error, and nothing is written.

Files are replaced before any of the accesses to files in turn, however the command makes them.
"""

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import is_one_sentence, run
from graphs.case import add_weights, parse
from onnx import ModelProto, numpy_helper
from stored import contents

import onnxamp
import onnxamp._numerics.comparison
from onnxamp._fleet.entries import ModelJob
from onnxamp._fleet.job import FolderOptions, run_job
from onnxamp._model import model
from onnxamp._model.model import Model
from onnxamp._runtime.fingerprints import SentModel

SIZE: Final = 64
TEXT: Final = f"""(float[1,{SIZE}] X) => (float[1,{SIZE}] Y) {{
    h = MatMul (X, first) s = Softmax (h) Y = MatMul (s, second)
}}"""
MOST: Final = 400
"""Accesses to files after which a command has ended for sure."""


def network(factor: float = 1.0) -> ModelProto:
    model = add_weights(parse(TEXT), {"first": (SIZE, SIZE), "second": (SIZE, SIZE)})
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor) * np.float32(factor)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


class Replacer:
    """Calls ``replace`` before access number ``at`` to a file of ``folder``, and ``restore`` before the next one."""

    def __init__(self) -> None:
        self.left, self.folder, self.calls = 0, "", list[Callable[[], None]]()
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.calls or event not in ("open", "os.rename", "os.link") or not isinstance(arguments[0], str | Path):
            return
        if os.path.abspath(arguments[0]).startswith(self.folder):  # noqa: PTH100 - Path.absolute would be slow
            self.left -= 1
            if self.left < 0:
                calls, self.calls = self.calls, []  # what they open does not count
                calls[0]()
                self.calls = calls[1:]

    @contextmanager
    def before(self, at: int, folder: Path, *calls: Callable[[], None]) -> Iterator[None]:
        self.left, self.folder, self.calls = at, str(folder), list(calls)
        try:
            yield
        finally:
            self.is_done, self.calls = len(self.calls) < len(calls), []


@pytest.fixture(scope="module")
def replacer() -> Replacer:
    return Replacer()


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in their file, as those of a model of more than 16 MB do."""
    monkeypatch.setattr(model, "_READ_WHOLE", 0)
    monkeypatch.setattr(model, "_LEFT_BEHIND", 1024)


def store(folder: Path, model: ModelProto, kind: str, name: str = "model") -> None:
    external = {"save_as_external_data": True, "size_threshold": 1024, "location": f"{name}.bin"}
    (folder / f"{name}.bin").unlink(missing_ok=True)
    onnx.save(model, folder / f"{name}.onnx", **(external if kind == "external" else {}))


def by_rename(new: Path, old: Path) -> None:
    spare = old.with_name(f".{old.name}.spare")
    shutil.copy(new, spare)
    spare.replace(old)


def in_its_place(new: Path, old: Path) -> None:
    data = new.read_bytes()
    with old.open("r+b") as file:
        file.write(data)
        file.truncate()
    os.utime(old, ns=(0, old.stat().st_mtime_ns + 10**7))  # clocks of file systems are coarse


COMMANDS: Final = {
    "convert": ("convert", "model.onnx", "-o", "low.onnx", "--save-plan", "plan.json", "--html", "page.html"),
    "unvalidated": ("convert", "model.onnx", "-o", "low.onnx", "--no-validate"),
    "in place": ("convert", "model.onnx", "--in-place"),
    "copied": ("convert", "model.onnx", "-o", "low.onnx", "--level", "O0"),
    "diff": ("diff", "model.onnx", "other.onnx", "--no-cure", "--tolerance", "10", "--save", "diff.json"),
    "layers": ("diff", "other.onnx", "model.onnx", "--no-cure", "--tolerance", "10", "--layers"),
    "check": ("check", "model.onnx", "--html", "page.html"),
    "bench": ("bench", "other.onnx", "model.onnx", "--seconds", "0.01", "--no-profile"),
    "view": ("view", "model.onnx", "-o", "page.html"),
    "inspect": ("inspect", "model.onnx"),
    "tune": (
        "tune", "model.onnx", "-o", "low.onnx", "--samples", "1", "--tolerance", "0.1", "--allow-slower",
        "--html", "page.html",
    ),
}  # fmt: skip
"""Commands that succeed."""


def at_every_access(
    replacer: Replacer, folder: Path, command: str, kind: str, replace: Callable[[Path, Path], None], step: int,
    start: int,
) -> tuple[int, int]:  # fmt: skip
    """How often the command failed and succeeded while its model was replaced, before each ``step``-th access."""
    new = folder / "new"
    home = folder / "home"
    new.mkdir()
    failed = passed = 0
    for at in range(start, MOST, step):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        os.chdir(home)
        store(new, network(3.0), kind)
        store(home, network(), kind)
        store(home, network(1.001), kind, "other")
        replaced = "model.bin" if kind == "external" else "model.onnx"
        before = contents(home) if command == "in place" else {}
        with replacer.before(at, home, lambda: replace(new / replaced, home / replaced)):  # noqa: B023
            result = run(*COMMANDS[command])
        if result.exit_code == 0:
            passed += 1
            if (home / "low.onnx").exists():
                same_as_one_of(home / "low.onnx", [network(), network(3.0)])
        else:
            failed += 1
            assert "changed while onnxamp read it" in result.output, (at, result.output)
            assert is_one_sentence(result), result.output
            written = {path.name for path in home.rglob("*.*")} & {
                "low.onnx",
                "page.html",
                "plan.json",
                "diff.json",
                "region.onnx",
            }
            assert not written, (at, written)
            if before:
                after = contents(home)
                assert {name: data for name, data in after.items() if name != replaced} == {
                    name: data for name, data in before.items() if name != replaced
                }
                assert after[replaced] == (new / replaced).read_bytes()
        if not replacer.is_done:
            return failed, passed
    raise AssertionError("The command does not end.")


def same_as_one_of(result: Path, models: list[ModelProto]) -> None:
    """The result is that of one whole model, and no mixture."""
    found = answers_of(onnx.load(result))
    wanted = [answers_of(onnxamp.convert_model(model)) for model in models]
    wanted += [answers_of(model) for model in models]
    assert any(np.allclose(found, one, rtol=1e-3, atol=1e-5) for one in wanted)


def answers_of(model: ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"X": np.linspace(-1, 1, SIZE, dtype=np.float32)[None]})[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inline", "external"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_replaced_while_it_is_read(
    replacer: Replacer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    failed, _ = at_every_access(replacer, tmp_path, command, kind, by_rename, step=3, start=1)
    assert failed


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "in place", "diff", "bench"])
def test_a_model_that_is_written_to_while_it_is_read(
    replacer: Replacer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    failed, _ = at_every_access(replacer, tmp_path, command, "inline", in_its_place, step=5, start=2)
    assert failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inline", "external"])
def test_a_model_that_is_replaced_for_a_moment(
    replacer: Replacer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its own file is back when the command ends; nothing of the other one gets into the result."""
    monkeypatch.chdir(tmp_path)
    home, name = tmp_path / "home", "model.bin" if kind == "external" else "model.onnx"
    (tmp_path / "new").mkdir()
    store(tmp_path / "new", network(3.0), kind)
    for at in range(1, MOST, 2):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        store(home, network(), kind)
        shutil.copy2(home / name, tmp_path / "own")
        os.link(home / name, home / ".own")
        with replacer.before(
            at,
            home,
            lambda: by_rename(tmp_path / "new" / name, home / name),
            lambda: os.replace(home / ".own", home / name),  # noqa: PTH105
        ):
            result = run("convert", home / "model.onnx", "-o", home / "low.onnx")
        if result.exit_code == 0:
            assert np.allclose(
                answers_of(onnx.load(home / "low.onnx")), answers_of(onnxamp.convert_model(network())), atol=1e-6
            )
        else:
            assert "changed while onnxamp read it" in result.output
        if not replacer.is_done:
            return


@pytest.mark.slow
def test_a_model_of_a_folder(replacer: Replacer, tmp_path: Path) -> None:
    """The others of the folder are not affected, and it is tried again in the next run."""
    home, outcomes = tmp_path / "home", set[tuple[str, bool]]()
    (tmp_path / "new").mkdir()
    store(tmp_path / "new", network(3.0), "inline")
    for at in range(1, MOST, 3):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        store(home, network(), "inline")
        job = ModelJob("model.onnx", home / "model.onnx", home / "out.onnx", home / "failed.onnx", None, home)
        with replacer.before(at, home, lambda: by_rename(tmp_path / "new" / "model.onnx", home / "model.onnx")):
            done = run_job(FolderOptions(), job)
        assert done.row.has_failed != (home / "out.onnx").exists()
        if done.row.has_failed:
            assert "changed while onnxamp read it" in done.row.message
            assert done.may_pass
        outcomes.add((done.row.outcome, replacer.is_done))
        if not replacer.is_done:
            break
    assert outcomes >= {("failed", True), ("converted", False)}


def test_workers_read_the_same_files(tmp_path: Path) -> None:
    store(tmp_path, network(), "external")
    sent = pickle.loads(pickle.dumps(SentModel.of(Model.of(tmp_path / "model.onnx"))))
    assert sent.opened().proto.graph.node
    (tmp_path / "new").mkdir()
    store(tmp_path / "new", network(), "external")
    by_rename(tmp_path / "new" / "model.bin", tmp_path / "model.bin")
    with pytest.raises(onnxamp.SourceChangedError, match=r"model\.bin' changed while"):
        sent.opened()


def test_inputs_are_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store(tmp_path, network(), "inline")
    np.savez("in.npz", X=np.ones((1, SIZE), np.float32))
    np.savez("others.npz", X=np.zeros((1, SIZE), np.float32))
    compare = onnxamp._numerics.comparison.Comparison.compare

    def late(*arguments: Any, **options: Any) -> Any:
        by_rename(Path("others.npz"), Path("in.npz"))
        return compare(*arguments, **options)

    monkeypatch.setattr(onnxamp._numerics.comparison.Comparison, "compare", late)
    result = run("convert", "model.onnx", "--inputs", "in.npz", "-o", "low.onnx")
    assert (result.exit_code, is_one_sentence(result)) == (1, True)
    assert "in.npz' changed while onnxamp read it" in result.output
    assert not Path("low.onnx").exists()


def test_functions_notice_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path, network(), "inline")
    read = model.find_data

    def late(*arguments: Any) -> Any:
        found = read(*arguments)
        os.utime(tmp_path / "model.onnx", ns=(0, 0))
        return found

    monkeypatch.setattr(model, "find_data", late)
    for function in (onnxamp.convert_model, onnxamp.audit_model, onnxamp.check_run, onnxamp.plan_model):
        store(tmp_path, network(), "inline")
        with pytest.raises(onnxamp.SourceChangedError, match="changed while onnxamp read it"):
            function(tmp_path / "model.onnx")
