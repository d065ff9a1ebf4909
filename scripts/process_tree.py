"""Run a command so that a signal ends it and everything that it started.

The tests start servers, worker processes and daemons of Ray, some of which outlive their parents or ignore Ctrl-C. On
Linux, this process adopts such orphans, and so finds and kills all of them. Elsewhere, it only kills the command.

Uses nothing but the standard library of Python 3.11 or later.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

GRACE = {signal.SIGINT: 1.0}
"""Seconds in which processes may clean up by themselves. A terminal sends Ctrl-C to all of them; other signals reach
this process alone."""
BEAT = 0.05
"""Seconds between two looks at the command."""
PR_SET_CHILD_SUBREAPER = 36
"""From prctl(2): orphaned descendants become children of this process."""
PROCESSES = Path("/proc")


def run_tree(command: list[str], folder: Path) -> int:
    """Run a command, and return its exit code.

    After SIGINT, SIGTERM or SIGHUP, all descendants end, and the exit code is 128 + the number of the signal.
    """
    if os.name != "posix":
        try:
            return subprocess.run(command, check=False, cwd=folder).returncode
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # by nohup
    handlers = {
        number: signal.signal(number, note) for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} - ignored
    }
    try:
        _adopt_orphans()
        child = subprocess.Popen(command, cwd=folder)
        code = None
        while code is None and not received:
            time.sleep(BEAT)
            code = _reap(child.pid)
        if received:
            number = signal.Signals(received[0])
            _end(child.pid, GRACE.get(number, 0.0))
            print(f"\nEnded by {number.name}.", file=sys.stderr)
            code = 128 + number
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    child.returncode = code  # Popen did not see it
    return code


def _adopt_orphans() -> None:
    """Let descendants whose parents ended become children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap(wanted: int) -> int | None:
    """Collect all children that ended, and return the exit code of the wanted one if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = ended
            if pid == wanted:
                code = os.waitstatus_to_exitcode(status)
                found = 128 - code if code < 0 else code
    return found


def _end(command: int, grace: float) -> None:
    """End a command and all of its descendants, after some seconds in which the command may end by itself."""
    is_over = _ends_within(command, grace)
    until = time.monotonic() + 2  # nothing outlives SIGKILL for long
    while (left := list(_descendants())) and time.monotonic() < until:
        _kill(left)
        time.sleep(BEAT)
        _reap(command)
    _kill([] if is_over else [command])  # where the system lists no processes


def _ends_within(command: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if _reap(command) is not None:
            return True
        time.sleep(BEAT)
    return False


def _kill(pids: Iterator[int] | list[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _descendants() -> Iterator[int]:
    """Yield the processes that descend from this one, as far as the system lists them."""
    children: dict[int, list[int]] = {}
    for entry in PROCESSES.glob("[0-9]*/stat"):
        with suppress(OSError):
            _, _, fields = entry.read_text(errors="replace").rpartition(")")
            state, parent = fields.split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    waiting = [os.getpid()]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting.extend(found)
