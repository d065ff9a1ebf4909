"""A signal ends scripts at once, with everything that they started."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")

SCRIPT = """
import sys
from bootstrap import run
run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""
STUBBORN = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0 and os.fork() == 0:  # an orphan in a session of its own, as Ray's daemons are
    os.setsid()
    name = "orphan"
else:
    name = str(os.getpid())
Path(sys.argv[1], f".{name}").write_text(str(os.getpid()))
Path(sys.argv[1], f".{name}").rename(Path(sys.argv[1], name))
time.sleep(600)
"""
PROCESSES = 3


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("to", ["script", "group"])
def test_a_signal_ends_all_processes(number: signal.Signals, to: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, STUBBORN, str(tmp_path)],
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as script:
        while len(pids := [int(file.read_text()) for file in tmp_path.glob("[!.]*")]) < PROCESSES:
            assert script.poll() is None
            time.sleep(0.01)
        (os.kill if to == "script" else os.killpg)(script.pid, number)
        assert script.wait(60) == 128 + number
        assert script.stderr is not None
        assert script.stderr.read() == f"\nEnded by {number.name}.\n"
    assert [pid for pid in pids if is_running(pid)] == []


def test_other_ends_keep_their_exit_code(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    for end, code in ("sys.exit(3)", 3), ("pass", 0), ("os.kill(os.getpid(), 9)", 137):
        program = f"import os, sys; {end}"
        done = subprocess.run([sys.executable, "-c", SCRIPT, program], env=environment, check=False)
        assert done.returncode == code
