"""Run a command in a process of its own, watched from outside: wall time, memory, and a limit on both."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INTERVAL = 0.005
"""Seconds between two looks at the process's memory."""


def watched(command: Sequence[str], *, limit: float, memory: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the command's last line of JSON says, and what the run took.

    Args:
        limit: seconds after which it is stopped.
        memory: bytes of anonymous memory beyond which it is stopped.

    Returns:
        "process" (wall seconds of the process), "anonymous" (most bytes of RssAnon that were seen; None where the
        system does not tell), what the command printed, and "failure" where it printed nothing.
    """
    start, most = time.perf_counter(), 0
    failure = None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, start_new_session=True)
        while process.poll() is None:
            most = max(most, _anonymous(process.pid))
            if time.perf_counter() - start > limit:
                failure = f"stopped after {limit:g} s"
            elif most > memory:
                failure = f"stopped at {most / 1e9:.1f} GB"
            if failure:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(INTERVAL)
        facts: dict[str, Any] = {"process": time.perf_counter() - start, "anonymous": most or None}
        out.seek(0)
        errors.seek(0)
        if failure is None and process.returncode == 0:
            lines = [line for line in out.read().splitlines() if line.startswith("{")]  # tools print, too
            return facts | json.loads(lines[-1])
        said = [line for line in errors.read().splitlines() if line.strip()]
        return facts | {"failure": failure or (said[-1][:300] if said else f"ended with {process.returncode}")}


def _anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0)


def warm(path: Path) -> None:
    """Read a file, so that every tool finds it in the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def engine_commit() -> str:
    """The last commit that changed the package, with "+" if there are changes since; "" without git."""
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words, "--", "onnxamp"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("log", "-1", "--format=%h", "--abbrev=8") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"processor": name, "cores": os.cpu_count(), "memory": pages, "system": " ".join(os.uname()[::2])}
