"""Signals end every command at any moment, native code included, and nothing is left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import parse
from onnx import numpy_helper
from repository import MODELS

from onnxamp._base.signals import INTERRUPTED

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has other signals")

ENCODER = next(path for path in MODELS if path.stem == "encoder")
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANGS = 120
"""Seconds after which a process that should end will never do."""
ENDED = {INTERRUPTED + number for number in NUMBERS}
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores some
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from onnxamp.__main__ import main
{before}
main()
"""
TELLS = """
import sys, threading, time
main_thread, ENGINE = threading.get_ident(), ("run", "run_with_ort_values", "invoke")
def tell():
    frame = None
    while frame is None or "onnxruntime" not in frame.f_code.co_filename or frame.f_code.co_name not in ENGINE:
        time.sleep(0.05)
        frame = sys._current_frames()[main_thread]
    print("native", flush=True)
threading.Thread(target=tell, daemon=True).start()
"""
"""Tells when the main thread is in a run of ONNX Runtime."""
COMMANDS = {
    "convert": ("convert", "encoder.onnx", "-o", "out/low.onnx", "--external-data", "always"),
    "diff": ("diff", "encoder.onnx", "encoder.onnx", "--provider", "cpu"),
    "tune": ("tune", "encoder.onnx", "-o", "out/low.onnx", "--provider", "cpu"),
    "bench": ("bench", "encoder.onnx", "--provider", "cpu"),
    "folder": ("convert", "in", "-o", "out", "--jobs", "2"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with models, and folders for results and temporary files."""
    for name in ("in", "out", "tmp"):
        (tmp_path / name).mkdir()
    for target in ("encoder.onnx", *(f"in/{number}.onnx" for number in range(6))):
        (tmp_path / target).write_bytes(ENCODER.read_bytes())
    return tmp_path


@contextmanager
def started(place: Path, *arguments: str, before: str = "") -> Iterator["subprocess.Popen[str]"]:
    """A command in a process group of its own, of which nothing is left at the end."""
    command = [sys.executable, "-c", PROGRAM.format(before=before), *arguments]
    environment = os.environ | {"TMPDIR": str(place / "tmp"), "ONNXAMP_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        assert is_gone(process.pid), "a worker is left"


def is_gone(group: int) -> bool:
    """Whether all processes of a group end. What serves others notices their end a moment later."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return False


def left(place: Path) -> list[str]:
    """Half-written files, and temporary ones."""
    temporary = [path.name for path in (place / "tmp").glob("onnxamp-*")]  # ONNX Runtime leaves files of its own
    return temporary + [path.name for path in (place / "out").rglob("*") if ".tmp" in path.name]


def span(place: Path, command: str) -> float:
    begun = time.monotonic()
    with started(place, *COMMANDS[command]) as process:
        process.communicate()
        assert process.returncode == 0
    return time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_signals_at_any_moment(place: Path, command: str) -> None:
    rng, whole, ended = random.Random(command), span(place, command), 0
    for turn in range(9):
        for path in (place / "out").iterdir():
            path.unlink()
        number = NUMBERS[turn % 3]
        with started(place, *COMMANDS[command]) as process:
            begun = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.1, whole))
            if process.returncode == 0:  # a machine may be faster than it was a moment ago
                whole = min(whole, time.monotonic() - begun)
            process.send_signal(number)
            _, said = process.communicate(timeout=_HANGS)
        # a signal as such ends it before Python runs
        assert process.returncode in (0, INTERRUPTED + number, -number), said
        assert "Traceback" not in said or process.returncode == -number
        assert left(place) == []
        ended += process.returncode != 0
    assert ended > 1


IN_A_LAUNCH = """
import multiprocessing.util as util, os
launch = util.spawnv_passfds
def interrupted(*arguments):
    child = launch(*arguments)
    if "spawn_main" in str(arguments[1]):
        os.kill(os.getpid(), {number})
    return child
util.spawnv_passfds = interrupted
"""
"""Interrupts this process when a worker has been started, and waits for what it has to do."""


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_worker_gets_its_instructions(place: Path, number: signal.Signals) -> None:
    """It would print an error of its own if its parent ended before."""
    with started(place, *COMMANDS["folder"], before=IN_A_LAUNCH.format(number=int(number))) as process:
        _, said = process.communicate(timeout=_HANGS)
    assert process.returncode == INTERRUPTED + number, said
    assert said == "Aborted!\n"
    assert left(place) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_native_code_ends(place: Path, number: signal.Signals) -> None:
    """A product that takes minutes, in the middle of a conversion with its files and its temporary ones."""
    text = "(float[8,4000] X) => (float[8,4000] Y) { Y = Loop (M, go, X) <body = b (int64 i, bool c, float[8,4000] p)"
    text += " => (bool d, float[8,4000] q) { d = Identity (c) q = MatMul (p, w) }> }"
    model = parse(text)
    weights = {"M": np.array(10**6), "go": np.array(True), "w": np.eye(4000, dtype=np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, place / "long.onnx")
    with started(place, "convert", "long.onnx", "-o", "out/low.onnx", before=TELLS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "native\n"
        process.send_signal(number)
        process.communicate(timeout=_HANGS)
    assert process.returncode == INTERRUPTED + number
    assert left(place) == []


ABORTS = """
import ctypes
library = ctypes.CDLL(None)
library.on_exit(library.abort, None)
from onnxamp._runtime.piecewise import pieces
def make_session(*_, **__):
    signal.raise_signal({number})
pieces.make_session = make_session
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="on_exit is of glibc")
@pytest.mark.parametrize("number", NUMBERS)
def test_native_libraries_are_not_torn_down(place: Path, number: signal.Signals) -> None:
    """One that aborts when the process exits does not get to it, and nothing is left to do by then."""
    with started(place, *COMMANDS["convert"], before=ABORTS.format(number=int(number))) as process:
        output, said = process.communicate(timeout=_HANGS)
    assert (process.returncode, output, said) == (INTERRUPTED + number, "", "Aborted!\n")
    assert left(place) == []


BETWEEN = """
import os
made = os.{call}
def make(path, *arguments, **keywords):
    done = made(path, *arguments, **keywords)
    if {part!r} in str(path):
        os.{call} = made
        signal.raise_signal({number})
    return done
os.{call} = make
"""
"""Sends a signal once the system has made or removed a folder, before Python goes on."""
MOMENTS = {
    "a stage is made": ("convert", "mkdir", ".low.onnx."),
    "a stage is removed": ("convert", "rmdir", "new"),
    "a temporary folder is made": ("tune", "mkdir", "onnxamp-"),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_signals_between_two_instructions(place: Path, moment: str) -> None:
    command, call, part = MOMENTS[moment]
    before = BETWEEN.format(call=call, part=part, number=int(signal.SIGTERM))
    with started(place, *COMMANDS[command], before=before) as process:
        _, said = process.communicate(timeout=_HANGS)
    assert (process.returncode, said) == (INTERRUPTED + signal.SIGTERM, "Aborted!\n")
    assert left(place) == []


NAMES = """
from onnxamp._runtime.piecewise import pieces
class Field:
    def __set_name__(self, owner, name):  # of which Python makes a RuntimeError, before 3.12
        signal.raise_signal(signal.SIGHUP)
def make_session(*_, **__):
    try:
        type("Owner", (), {{"name": Field()}})
    except BaseException as error:
        raise ValueError("What a library makes of it.") from error
pieces.make_session = make_session
"""


@pytest.mark.slow
def test_what_follows_from_a_signal_is_no_error(place: Path) -> None:
    with started(place, *COMMANDS["convert"], before=NAMES.format()) as process:
        output, said = process.communicate(timeout=_HANGS)
    assert (process.returncode, output, said) == (INTERRUPTED + signal.SIGHUP, "", "Aborted!\n")


UNRAISABLE = """
import threading, time
from onnxamp._runtime.piecewise import pieces
class Gone:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
start = threading.Timer.start
def start_after_signal(timer):
    threading.Timer.start = start
    signal.raise_signal(signal.SIGTERM)
    start(timer)
def make_session(*_, **__):
    threading.Timer.start = start_after_signal
    Gone()
    time.sleep(1000)
pieces.make_session = make_session
"""
"""What Python cannot raise in a destructor is raised again, but not while Python reports that it could not."""


@pytest.mark.slow
def test_signals_in_a_destructor(place: Path) -> None:
    with started(place, *COMMANDS["convert"], before=UNRAISABLE) as process:
        output, said = process.communicate(timeout=_HANGS)
    assert (process.returncode, output, said) == (INTERRUPTED + signal.SIGTERM, "", "Aborted!\n")


LOADS = """
from importlib.machinery import ExtensionFileLoader
load = ExtensionFileLoader.exec_module
def exec_module(self, module):
    signal.raise_signal(signal.SIGTERM)
    load(self, module)
    print("loaded", flush=True)
    ExtensionFileLoader.exec_module = load
ExtensionFileLoader.exec_module = exec_module
"""


def test_libraries_are_loaded_to_the_end(place: Path) -> None:
    with started(place, "inspect", "encoder.onnx", before=LOADS) as process:
        output, said = process.communicate()
    assert (process.returncode, output, said) == (INTERRUPTED + signal.SIGTERM, "loaded\n", "Aborted!\n")


# --- the process of a command that loads its results ---------------------------------------------------------------

STAND_IN = {
    "__init__.py": """
__version__ = "0"
class SessionOptions:
    def add_session_config_entry(self, *_): pass
""",
    "capi/__init__.py": "",
    "capi/onnxruntime_pybind11_state.py": """
import os, time
from pathlib import Path
class InferenceSession:
    def __init__(self, options, path, *_):
        Path("loading").touch()
        {act}
    def initialize_session(self, *_): pass
""",
}
"""An ONNX Runtime for the process that loads."""


def acting(place: Path, act: str) -> str:
    """What a command does before so that the process that loads its results acts."""
    for name, text in STAND_IN.items():
        path = place / "there" / "onnxruntime" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(act=act))
    return f"import sys, onnxruntime; sys.path.insert(0, {str(place / 'there')!r})"


def loading(place: Path) -> bool:
    """Whether the process comes to load the result."""
    begun = time.monotonic()
    while not (place / "loading").exists() and time.monotonic() - begun < _HANGS:
        time.sleep(0.02)
    return (place / "loading").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("to_all", [False, True], ids=["sent", "typed"])
def test_what_loads_ends_with_the_command(place: Path, number: signal.Signals, *, to_all: bool) -> None:
    """A terminal sends signals to both. One is in the midst of loading, which takes longer than anybody waits."""
    before = acting(place, f"time.sleep({10 * _HANGS})")
    with started(place, *COMMANDS["convert"], before=before) as process:
        assert loading(place)
        (os.killpg if to_all else os.kill)(process.pid, number)
        output, said = process.communicate(timeout=_HANGS)
    assert (process.returncode, output, said) == (INTERRUPTED + number, "", "Aborted!\n")
    assert left(place) == []


WAITS = """
import time
from onnxamp._runtime.sessions import session
def choose_provider(*_):
    print("there", flush=True)
    time.sleep(1000)
session.choose_provider = choose_provider
"""


@pytest.mark.slow
def test_what_loads_ends_when_the_command_is_killed(place: Path) -> None:
    with started(place, *COMMANDS["convert"], before=WAITS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        process.kill()
        assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_crash_of_what_loads_is_a_fault_of_the_result(place: Path) -> None:
    before = acting(place, "'encoder.onnx' in path or os.abort()")
    with started(place, *COMMANDS["convert"], "--no-cure", before=before) as process:
        output, said = process.communicate(timeout=_HANGS)
    assert process.returncode == 1, said
    fault = "ONNX Runtime does not load the result: the process that loads it was ended by SIGABRT."
    assert fault in " ".join(output.split()), output
    assert not (place / "out" / "low.onnx").exists()


@pytest.mark.slow
def test_what_is_printed_while_loading_is_no_answer(place: Path) -> None:
    before = acting(place, "print('noise', flush=True); os.write(2, b'noise')")
    with started(place, *COMMANDS["convert"], before=before) as process:
        output, said = process.communicate(timeout=_HANGS)
    assert (process.returncode, "noise" in output, said) == (0, False, "")
    assert (place / "out" / "low.onnx").exists()
