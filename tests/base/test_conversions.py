"""Conversions of a checkpoint in shards that are killed: what was written stays, and nothing else changes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from onnx import numpy_helper

import onnxamp
from onnxamp._base.state import opened
from onnxamp._job import Job
from onnxamp._job.writing import Sink, staged_conversion, unfinished
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._runtime.run import Run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="kills as Unix does, and needs its locks")

MB = 1 << 20
KILLED = """
import os, sys, onnxamp
calls = []
def hear(*_):
    calls.append(1)
    if len(calls) == int(sys.argv[2]): os.kill(os.getpid(), 9)
if __name__ == "__main__":
    jobs = int(sys.argv[3]) or None
    options = {"shard_bytes": 1 << 20, "state": "s", "jobs": jobs, "progress": hear, "validate": False}
    onnxamp.convert_file("big.onnx", sys.argv[1], **options)
"""


def checkpoint(seed: int = 0) -> None:
    """Ten weights of a megabyte each, in two data files, some of whose elements flush to zero."""
    names = [f"w{number}" for number in range(10)]
    nodes = "\n".join(f"[n{i}] x{i + 1} = MatMul (x{i}, {name})" for i, name in enumerate(names))
    model, random = parse(f"(float[1,512] x0) => (float[1,512] x10) {{ {nodes} }}"), np.random.default_rng(seed)
    for number, name in enumerate(names):
        array = random.standard_normal((512, 512)).astype(np.float32) / 512
        array[number] = 1e-9
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        onnx.external_data_helper.set_external_data(model.graph.initializer[-1], f"part{number // 5}")
    for path in Path().glob("part*"):
        path.unlink()
    onnx.save(model, "big.onnx")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint, what becomes of it, and an older result in the place of the new one."""
    monkeypatch.chdir(tmp_path)
    checkpoint()
    for name in ("wanted", "out"):
        Path(name).mkdir()
    onnxamp.convert_file("big.onnx", "wanted/low.onnx", shard_bytes=MB, validate=False)
    onnxamp.convert_file("big.onnx", "out/low.onnx", "O0", shard_bytes=3 * MB, validate=False)


def written(place: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(place).iterdir() if path.is_file()}


def left() -> dict[int, int]:
    """What waits beside the result: the time of each data file by its inode."""
    files = [path.stat() for path in Path("out").glob(".*.tmp/data/*")]
    return {file.st_ino: file.st_mtime_ns for file in files}


def kept(what: str) -> int:
    return Path("s").read_text().count(f'"key": "{what} ')


def killed(at: int, jobs: int = 0, target: str = "out/low.onnx") -> None:
    Path("killed.py").write_text(KILLED)
    done = subprocess.run([sys.executable, "killed.py", target, str(at), str(jobs)], check=False)
    assert done.returncode == -9


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "moments"), [(0, (4, 6)), (2, (3, 4))], ids=["here", "workers"])
def test_a_conversion_whose_process_is_killed_goes_on(jobs: int, moments: tuple[int, int]) -> None:
    before = written("out")
    for at in moments:
        killed(at, jobs)
        assert written("out") == before
    done, files = left(), kept("file")
    assert files >= 2
    conversion = onnxamp.convert_file(
        "big.onnx", "out/low.onnx", shard_bytes=MB, state="s", jobs=jobs or None, validate=False
    )
    assert written("out") == written("wanted")
    wanted = onnxamp.convert_file("big.onnx", "wanted/low.onnx", shard_bytes=MB, validate=False)
    assert replace(conversion, target=wanted.target) == wanted
    assert min(counts.flushed for counts in conversion.weights.values()) >= 512
    assert kept("weights") == 2, "each data file was measured once"
    assert kept("file") == 5, "each was written once"
    now = {path.stat().st_ino: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    assert sum(now.get(inode) == time for inode, time in done.items()) >= files
    assert not list(Path("out").glob(".*"))


@pytest.mark.slow
def test_the_next_run_without_the_state_leaves_nothing() -> None:
    killed(3)
    assert left()
    onnxamp.convert_file("big.onnx", "out/low.onnx", shard_bytes=MB, validate=False)
    assert written("out") == written("wanted")
    assert not list(Path("out").glob(".*"))
    onnxamp.convert_file("big.onnx", "out/low.onnx", shard_bytes=MB, state="s", validate=False)
    assert written("out") == written("wanted")


@contextmanager
def unchanged() -> Iterator[None]:
    before, waiting, state = written("out"), left(), Path("s").read_bytes()
    yield
    assert (written("out"), left(), Path("s").read_bytes()) == (before, waiting, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda: checkpoint(seed=1), (), "the model changed since then"),
        (lambda: None, ("--level", "O3"), "the options changed since then"),
        (lambda: None, ("--shard-size", "2MB"), "the options changed since then"),
        (lambda: None, ("-o", "out/other.onnx"), "the output changed since then"),
    ],
    ids=["model", "level", "shards", "output"],
)
def test_the_state_of_another_conversion_is_refused(
    change: Callable[[], object], options: tuple[str, ...], said: str
) -> None:
    killed(3)
    change()
    command = ("convert", "big.onnx", "-o", "out/low.onnx", "--shard-size", "1048576", "--no-validate", "--state", "s")
    with unchanged():
        refused = run(*command, *options)
    assert refused.exit_code == 2
    assert f"belongs to another conversion: {said}. Delete it" in " ".join(refused.output.split())


@pytest.mark.slow
def test_a_data_file_that_was_touched_is_written_again() -> None:
    killed(4)
    file = min(Path("out").glob(".*.tmp/data/*"))
    file.write_bytes(b"\1" * file.stat().st_size)
    onnxamp.convert_file("big.onnx", "out/low.onnx", shard_bytes=MB, state="s", validate=False)
    assert written("out") == written("wanted")


def test_interrupted_while_the_result_is_validated() -> None:
    """Its data files are beside the old result then; they wait in the hidden folder until they are needed again."""
    before, model = written("out"), Model.read(Path("big.onnx"))

    def convert(judge: Callable[[Path], None]) -> None:
        with opened("s") as state:
            sink = Sink(Path("out/low.onnx"), shard_bytes=MB)
            job = Job(model=model, options=Options(), run=Run(state=state))
            with staged_conversion(job, sink, kept=unfinished(job, sink)) as made, made.saved.stage.shown() as path:
                judge(path)

    def interrupt(path: Path) -> None:
        assert Model.read(path).stock.files
        raise KeyboardInterrupt

    def refuse(_: Path) -> None:
        raise onnxamp.RuntimeFailure("no good")

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            convert(interrupt)
        assert written("out") == before
        assert (len(left()), kept("file")) == (5, 5)
    done = left()
    with pytest.raises(onnxamp.RuntimeFailure):
        convert(refuse)
    assert written("out") == before
    assert not list(Path("out").glob(".*")), "nobody goes on with what is no good"
    with pytest.raises(KeyboardInterrupt):
        convert(interrupt)
    assert left() != done
    convert(lambda _: None)
    assert written("out") == written("wanted")


@pytest.mark.slow
@pytest.mark.parametrize("point", ["publish", "link", "shown", "commit"])
def test_killed_at_the_end(point: str) -> None:
    """While data files are moved beside the result, while it is validated, and when it is in its place."""
    code = """
import os, sys, pathlib
from pathlib import Path
import onnxamp
from onnxamp._model import staging
def die(*_): os.kill(os.getpid(), 9)
point, link, replace = sys.argv[1], Path.hardlink_to, Path.replace
def linked(self, target):
    if point == "link" and "-00003-" in self.name: die()
    link(self, target)
    if point == "publish" and "-00005-" in self.name: die()
    if point == "shown" and self.name.endswith(".onnx"): die()
def replaced(self, target):
    replace(self, target)
    if point == "commit" and self.name == "main" and Path(target).name == "low.onnx": die()
Path.hardlink_to, Path.replace = linked, replaced
from onnxamp._job import Job
from onnxamp._job.writing import Sink, staged_conversion, unfinished
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._runtime.run import Run
from onnxamp._base.state import opened
with opened("s") as state:
    model = Model.read(Path("big.onnx"))
    sink = Sink(Path("out/low.onnx"), shard_bytes=1 << 20)
    job = Job(model=model, options=Options(), run=Run(state=state))
    with staged_conversion(job, sink, kept=unfinished(job, sink)) as made, made.saved.stage.shown():
        pass
"""
    before = Model.read(Path("out/low.onnx")).embedded()
    assert subprocess.run([sys.executable, "-c", code, point], check=False).returncode == -9
    now = Model.read(Path("out/low.onnx")).embedded()
    assert now == (Model.read(Path("wanted/low.onnx")).embedded() if point == "commit" else before)
    onnxamp.convert_file("big.onnx", "out/low.onnx", shard_bytes=MB, state="s", validate=False)
    assert written("out") == written("wanted")
    assert kept("file") == (10 if point == "commit" else 5)


@pytest.mark.slow
def test_behind_a_url() -> None:
    """Data files are in their places at once, though nothing refers to them."""
    target = f"local://{Path.cwd()}/out/low.onnx"
    before = written("out")
    killed(3, target=target)
    after = written("out")
    assert before.items() <= after.items()
    assert len(after) > len(before)
    onnxamp.convert_file("big.onnx", target, shard_bytes=MB, state="s", validate=False)
    assert kept("file") == 5
    assert Model.read(Path("out/low.onnx")).embedded() == Model.read(Path("wanted/low.onnx")).embedded()
    assert len(written("out")) == 6


def test_a_state_that_is_done_serves_another_model() -> None:
    onnxamp.convert_file("big.onnx", "out/low.onnx", shard_bytes=MB, state="s", validate=False)
    checkpoint(seed=1)
    command = ("convert", "big.onnx", "-o", "out/low.onnx", "--shard-size", "1048576", "--no-validate", "--state", "s")
    assert run(*command).exit_code == 0
    onnxamp.convert_file("big.onnx", "wanted/low.onnx", shard_bytes=MB, validate=False)
    assert written("out") == written("wanted")


@pytest.mark.slow
def test_measurements_of_level_auto_are_kept_as_well() -> None:
    command = ("convert", "big.onnx", "-o", "out/low.onnx", "--level", "auto", "--state", "s")
    command += ("--io-types", "low", "--no-validate")  # without Casts, low precision is faster
    assert run(*command).exit_code == 0
    state = Path("s").read_text()
    assert '"key": "sample with both passes 0 ' in state
    assert run(*command).exit_code == 0
    assert Path("s").read_text().count('"key": "sample with both passes 0 ') == 1


def test_a_folder_has_a_state_of_its_own() -> None:
    refused = run("convert", "wanted", "-o", "low", "--state", "s")
    assert refused.exit_code == 2
    assert "drop --state" in refused.output
