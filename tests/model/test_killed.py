"""Processes that are killed while they write, that write to one place at once, and disks that are really full."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest
from graphs.case import add_weights, parse
from stored import contents, files, normal

from onnxamp import convert_file

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals and locks"),
    pytest.mark.usefixtures("all_threads"),
]

SIZE = 96
NAMES = ("one", "two")
KILLS = 200

SERVER = """
import os, sys, time, traceback
from pathlib import Path
from onnxamp import convert_file

os.fsync = lambda handle: None  # for machines that stop
for way in ("never", "always"):  # imports and tables, or most processes would be killed while they read those
    convert_file(Path("two.onnx"), Path("warm") / "low.onnx", external_data=way, validate=False)

def work(first, rounds, way):
    for number in range(first, first + rounds):
        source = ("one", "two")[number % 2]
        convert_file(Path(f"{source}.onnx"), Path("out") / "low.onnx", external_data=way, validate=False)
    os._exit(0)

for line in sys.stdin:
    first, rounds, way = line.split()
    child = os.fork()
    if child == 0:
        try:
            work(int(first), int(rounds), way)
        finally:
            traceback.print_exc()
            os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Forks a process for each line; it converts so many times, in turn from two models, to one place."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models that have other weights, one of them in a data file, and a folder for the output."""
    folder = tmp_path_factory.mktemp("killed")
    for number, name in enumerate(NAMES):
        model = parse(f"(float[N,{SIZE}] X) => (float[N,{SIZE}] Y) {{ h = MatMul (X, w) Y = MatMul (h, v) }}")
        add_weights(model, {"w": (SIZE, SIZE), "v": (SIZE, SIZE)})
        model.graph.initializer[0].raw_data = bytes([number]) * len(model.graph.initializer[0].raw_data)
        onnx.save(model, folder / f"{name}.onnx", save_as_external_data=number > 0, location="two.bin")
    for name in ("out", "warm"):
        (folder / name).mkdir()
    return folder


@contextmanager
def server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=folder, **pipes) as process:
        yield process
        process.stdin.close()


def ask(process: subprocess.Popen[str], first: int, rounds: int, way: str) -> int:
    """Start conversions; returns the process that does them."""
    process.stdin.write(f"{first} {rounds} {way}\n")
    return int(process.stdout.readline())


def answer(process: subprocess.Popen[str]) -> int:
    return int(process.stdout.readline())


def inputs(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("one.onnx", "two.onnx", "two.bin")]


def whole(folder: Path) -> list[bytes]:
    """What the output may be, loaded."""
    found = []
    for name in NAMES:
        target = folder / "whole" / f"{name}.onnx"
        target.parent.mkdir(exist_ok=True)
        convert_file(folder / f"{name}.onnx", target, validate=False)
        found.append(normal(onnx.load(target)).SerializeToString(deterministic=True))
    return found


def found(folder: Path) -> bytes:
    return normal(onnx.load(folder / "out" / "low.onnx")).SerializeToString(deterministic=True)


def data_of(folder: Path) -> set[str]:
    model = onnx.load(folder / "out" / "low.onnx", load_external_data=False)
    return {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["never", "always"])
def test_killed_at_any_moment(sources: Path, way: str) -> None:
    """Whatever was there is whole; nothing that is read changes; the next run leaves nothing of the killed one."""
    rng, wanted, before = random.Random(0), whole(sources), inputs(sources)
    with server(sources) as process:
        ask(process, 0, 1, way)
        assert answer(process) == 0
        start = time.monotonic()
        ask(process, 0, 2, way)
        assert answer(process) == 0
        span = time.monotonic() - start
        for number in range(KILLS // 2):
            child = ask(process, number, 1000, way)
            time.sleep(rng.uniform(0, span))
            os.kill(child, signal.SIGKILL)
            assert answer(process) == -signal.SIGKILL
            assert found(sources) in wanted
        ask(process, 0, 1, way)
        assert answer(process) == 0
    assert found(sources) == wanted[0]
    assert set(files(sources / "out")) == {"low.onnx", *data_of(sources)}
    assert inputs(sources) == before


STEPS = """
import os, sys
from pathlib import Path
import onnx
from onnxamp import convert_file

CHANGES = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod"}
left = None

def ends(event, arguments):
    global left
    if left is not None and event in CHANGES and (event != "open" or arguments[2] & os.O_ACCMODE):
        if left == 0:
            os._exit(9)
        left -= 1

sys.addaudithook(ends)
os.fsync = lambda handle: None
target = Path("steps") / "low.onnx"
for source in ("one", "two"):
    convert_file(Path(f"{source}.onnx"), target, external_data="always", validate=False)
step, code = 0, 9
while code == 9:
    child = os.fork()
    if child == 0:
        left = step
        convert_file(Path(("one.onnx", "two.onnx")[step % 2]), target, external_data="always", validate=False)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    onnx.load(target)
    step += 1
print(code, step)
"""
"""Converts to one place again and again, and dies one step later each time: before the n-th change to any file."""


@pytest.mark.slow
def test_killed_before_any_step(sources: Path) -> None:
    """Also while a data file gets the usual name again. onnx refuses data files that have several names."""
    (sources / "steps").mkdir()
    quiet = ["-W", "ignore:This process:DeprecationWarning"]  # Python 3.12 warns of forks where there are threads
    command = [sys.executable, *quiet, "-c", STEPS]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    code, steps = map(int, done.stdout.split())
    assert (code, steps > 30) == (0, True)
    assert files(sources / "steps") == ["low.onnx", "low.onnx.data"]


@pytest.mark.slow
def test_two_at_once(sources: Path) -> None:
    """The output is one of both, with its own data, and nothing of the other is left."""
    wanted = whole(sources)
    with server(sources) as one, server(sources) as other:
        for number in range(8):
            ask(one, number, 8, "always")
            ask(other, number + 1, 8, "always")
            assert (answer(one), answer(other)) == (0, 0)
            assert found(sources) in wanted
            assert set(files(sources / "out")) == {"low.onnx", *data_of(sources)}


TERMINATED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores it
from onnxamp.__main__ import main
def stuck(handle):
    print("here", flush=True)
    time.sleep(60)
os.fsync = stuck
sys.argv = ["onnxamp", "convert", "one.onnx", "-o", "out/low.onnx", "--external-data", "always", "--no-validate"]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_told_to_end_cleans_up(sources: Path, number: signal.Signals) -> None:
    before = contents(sources / "out")
    with subprocess.Popen([sys.executable, "-c", TERMINATED], cwd=sources, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        assert set(files(sources / "out")) > set(before)
        process.send_signal(number)
        assert process.wait(30) != 0
    assert contents(sources / "out") == before


FULL = """
import sys
from pathlib import Path
from onnxamp import OutputError, convert_file
disk, source = Path(sys.argv[1]), Path(sys.argv[2])
target, filler, failed = disk / "low.onnx", disk / "filler", 0
convert_file(source, target, external_data="always", validate=False)
def content():
    return {path.name: path.read_bytes() for path in disk.iterdir()}
size = 256 << 10
for way in ("always", "never"):
    for left in range(0, 120, 4):
        filler.write_bytes(b"")
        before = content()
        used = sum(-(-len(data) // 4096) * 4096 for data in before.values())
        with filler.open("wb") as file:
            try:
                file.write(bytes(max(0, size - used - (left << 10))))
            except OSError:
                pass
        before = content()
        try:
            convert_file(source, target, "O3", external_data=way, validate=False)
        except OutputError as error:
            assert "No space left" in str(error) or "requested and" in str(error), error
            assert content() == before
            failed += 1
        names = sorted(content())
        assert names[:2] == ["filler", "low.onnx"] and len(names) <= 3 and names[-1].endswith(("onnx", ".data")), names
print("failed", failed)
"""


@pytest.mark.slow
def test_a_disk_that_is_full(sources: Path, tmp_path: Path) -> None:
    """A file system of its own, with less and less room."""
    script = 'mount -t tmpfs -o size=256k none "$1" && exec "$2" -c "$3" "$1" "$4"'
    arguments = [tmp_path, sys.executable, FULL, sources / "one.onnx"]
    try:
        done = subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", *map(str, arguments)], capture_output=True,
                              text=True, check=False)  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("this user may mount nothing")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 10
