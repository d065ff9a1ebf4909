"""Folders that software loads are converted as a whole or not at all, whatever fails, and whenever the process ends."""

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import decoders
import onnx
import pytest
from commands import run
from onnx import ModelProto

import onnxamp
from onnxamp import FolderReport

pytestmark = pytest.mark.usefixtures("forked")

CONFIG = "config.json"
"""The file by which transformers.js knows a folder."""
MINE = {"notes.md": b"mine", "onnx/model.onnx.data": b"weights of mine"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(source: str = "in", target: str = "out", **options: object) -> FolderReport:
    return onnxamp.convert_folder(source, target, jobs=1, validate=False, **options)  # type: ignore[arg-type] # of every option


def contents(root: Path) -> dict[str, bytes]:
    """All files that are not ours alone."""
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".onnxamp")}


def hidden(root: Path) -> set[str]:
    return {path.name for path in root.rglob(".*")}


def outcomes(report: FolderReport) -> list[str]:
    return [row.outcome for row in report.rows]


def two_models(kind: str = "transformers.js") -> Path:
    model = decoders.plain() if kind == "transformers.js" else decoders.grouped()
    home = decoders.folder(Path("in"), kind, model)
    path = next(home.rglob("model.onnx")).with_name("decoder.onnx")
    onnx.save(model, path)
    return path


def broken(path: Path) -> ModelProto:
    """Put something else in the place of a model, which is returned."""
    model = onnx.load(path)
    path.write_bytes(b"no model")
    return model


@pytest.mark.slow
def test_no_folder_without_all_its_models_and_no_work_done_twice() -> None:
    model = broken(path := two_models())
    report = convert()
    assert sorted(outcomes(report)) == ["converted", "failed"]
    assert contents(Path("out")) == {}
    (shipped,) = report.shipped
    assert (shipped.failed, shipped.copied) == (("onnx/decoder.onnx",), ())
    printed = " ".join(run("convert", "in", "-o", "out", "--jobs", "1", "--no-validate").output.split())
    assert "is unchanged, because these models have no result: onnx/decoder.onnx." in printed
    onnx.save(model, path)
    assert outcomes(convert()) == ["converted", "up to date"]
    whole = contents(Path("out"))
    assert {CONFIG, "tokenizer.json", "onnx/model_fp16.onnx", "onnx/decoder_fp16.onnx"} <= whole.keys()
    assert hidden(Path("out")) == {".onnxamp.json"}
    convert(target="at once")
    assert contents(Path("at once")) == whole


@pytest.mark.slow
def test_an_earlier_folder_stays_whole() -> None:
    path = two_models()
    convert(keep_io_types=True)
    before = contents(Path("out"))
    broken(path)
    assert sorted(outcomes(convert())) == ["converted", "failed"]
    assert contents(Path("out")) == before


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_and_the_next_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fills up with results, or with what is beside them."""
    two_models()
    write = onnxamp._fleet.package.write_file

    def full(path: Path, data: bytes) -> None:
        if path.name == "tokenizer.json":
            raise onnxamp.OutputError(f"Cannot write {str(path)!r}: No space left on device.")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("onnxamp._fleet.package.write_file", full)
        with pytest.raises(onnxamp.OutputError, match="No space left"):
            convert()
    assert contents(Path("out")) == {}
    assert outcomes(convert()) == ["up to date", "up to date"]
    assert CONFIG in contents(Path("out"))


def prepared() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Put results beside files of others, with newer ones that wait; return what is there, and what will be."""
    two_models()
    convert(external_data="always", shard_bytes=1 << 12, keep_io_types=True)
    for name, data in MINE.items():
        Path("out", name).write_bytes(data)
    before = contents(Path("out"))
    assert len(before) > 10
    with stopping(0, refuse), pytest.raises(onnxamp.OutputError, match="refused"):
        convert(external_data="always")
    assert contents(Path("out")) == before
    convert(target="new", external_data="always")
    after = contents(Path("new")) | MINE
    assert after.keys() < before.keys(), "some data files are obsolete"
    assert all(after[name] != before[name] for name in (CONFIG, "onnx/model_fp16.onnx", "onnx/decoder_fp16.onnx"))
    return before, after


class stopping:  # noqa: N801 - used as a function
    """Do something instead of one of the moves by which files take their places."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._number, self._act, self._replace = number, act, Path.replace

    def __enter__(self) -> None:
        count = itertools.count()

        def replace(path: Path, target: Path) -> Path:
            is_placing = ".onnxamp." in f"{path}{target}" and path.name != "main"
            if is_placing and next(count) == self._number:
                self._act()
            return self._replace(path, target)

        Path.replace = replace  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Path.replace = self._replace  # type: ignore[method-assign]


def refuse() -> None:
    raise OSError(errno.EIO, "refused")


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("act", [refuse, interrupt])
def test_whichever_move_fails_all_is_as_it_was(act: Callable[[], None]) -> None:
    before, after = prepared()
    for number in itertools.count():
        try:
            with stopping(number, act):
                report = convert(external_data="always")
        except (onnxamp.OutputError, KeyboardInterrupt):
            assert contents(Path("out")) == before
        else:
            break
    assert number > len(after), "each file that is replaced moves, and each new one"
    assert outcomes(report) == ["up to date", "up to date"]
    assert contents(Path("out")) == after
    assert hidden(Path("out")) == {".onnxamp.json"}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_whenever_the_process_is_killed_no_software_sees_a_mixture() -> None:
    """Children of one process are each killed before another move; then the next run completes the folder."""
    before, after = prepared()
    program = """
import itertools, os, shutil
import test_placing
for number in itertools.count():
    shutil.copytree("out", f"out{number}")
    child = os.fork()
    if not child:
        with test_placing.stopping(number, test_placing.kill):
            test_placing.convert(target=f"out{number}", external_data="always")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        raise SystemExit(status)
"""
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    stopped = sorted(Path().glob("out?*"))
    assert len(stopped) > len(after)
    assert contents(Path(f"out{len(stopped) - 1}")) == after
    mixtures = 0
    for folder in stopped:
        state = contents(folder)
        mixtures += state not in (before, after)
        assert CONFIG not in state or state in (before, after)
        assert MINE.items() <= state.items()
        assert outcomes(convert(target=folder.name, external_data="always")) == ["up to date", "up to date"]
        assert contents(folder) == after
        assert hidden(folder) == {".onnxamp.json"}
    assert mixtures, "there were moments at which software must not see the folder"


def test_a_data_file_of_others_stops_the_folder_and_stays() -> None:
    decoders.folder(Path("in"), "genai", decoders.grouped())
    Path("out").mkdir()
    Path("out/model.onnx.data").write_bytes(b"mine")
    with pytest.raises(onnxamp.OutputError, match="move the file away, or choose another folder"):
        convert(external_data="always")
    assert contents(Path("out")) == {"model.onnx.data": b"mine"}
    Path("out/model.onnx.data").rename("elsewhere")
    assert outcomes(convert(external_data="always")) == ["up to date"]
    assert "genai_config.json" in contents(Path("out"))


def test_a_collection_of_models_is_no_folder_of_a_kind() -> None:
    Path("in").mkdir()
    onnx.save(decoders.plain(), "in/a.onnx")
    Path("in/b.onnx").write_bytes(b"no model")
    report = convert()
    assert (sorted(outcomes(report)), report.shipped) == (["converted", "failed"], ())
    assert contents(Path("out")).keys() == {"a.onnx"}


@pytest.mark.slow
def test_a_config_leaves_first_and_comes_last_though_it_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    two_models("genai")
    convert(keep_io_types=True)
    before, states, replace = contents(Path("out")), list[dict[str, bytes]](), Path.replace

    def seen(path: Path, target: Path) -> Path:
        states.append(contents(Path("out")))
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", seen)
        convert()
    after = contents(Path("out"))
    assert after["genai_config.json"] == before["genai_config.json"]
    mixtures = [state for state in states if state not in (before, after)]
    assert len(mixtures) > 2
    assert not [state for state in mixtures if "genai_config.json" in state]
