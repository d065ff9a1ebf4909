"""Make the virtual environment `.venv` that the other scripts run in, once, and again when pyproject.toml changes.

Uses nothing but the standard library of Python 3.11 or later.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from process_tree import run_tree

ROOT = Path(__file__).resolve().parent.parent


class Environment(NamedTuple):
    """A virtual environment."""

    path: Path

    @property
    def bin(self) -> Path:
        """Where its commands are."""
        return self.path / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.bin / ("python.exe" if os.name == "nt" else "python")

    def ensure(self, extra: str = "", pinned: Sequence[str] = ()) -> None:
        """Make it hold onnxamp, editable, with the dependencies of an extra, if any, at ``pinned`` versions."""
        if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this has not installed anything yet
            sys.exit(f"onnxamp needs Python 3.11 or later; this is {sys.version.split()[0]}.")
        wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
        stamps = [self.path / f"onnxamp-{name}.stamp" for name in {extra, "dev"}]
        if any(stamp.is_file() and stamp.read_text() == wanted for stamp in stamps):
            return
        if not self.python.exists():
            self.create()
        told = f"Installing onnxamp and what it needs into {self.path.name} (about 640 MB, some minutes, once) ..."
        print(told, file=sys.stderr)
        target = f"{ROOT}[{extra}]" if extra else str(ROOT)
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        if not sys.stderr.isatty():  # a log needs no progress; someone who waits does
            pip.append("--quiet")
        run([*pip, "-e", target, *pinned])
        (self.path / f"onnxamp-{extra}.stamp").write_text(wanted)

    def create(self) -> None:
        """Make it, without packages."""
        print(f"Making {self.path.name} ...", file=sys.stderr)
        code = run_tree([sys.executable, "-m", "venv", str(self.path)], ROOT)
        if code:
            print("Cannot make a virtual environment (on Debian: apt install python3-venv).", file=sys.stderr)
            sys.exit(code)


USUAL = Environment(ROOT / ".venv")
BIN = USUAL.bin
ensure = USUAL.ensure


def run(command: list[str]) -> None:
    """Run a command in the repository's root; a failure or a signal ends the script with its exit code."""
    code = run_tree(command, ROOT)
    if code:
        sys.exit(code)


def run_tests(environment: Environment, arguments: Sequence[str]) -> None:
    """Run pytest on all cores, without the slow tests unless the arguments select by marker."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # dozens of processes would compile the package, each for itself
    # Neighbors share a worker, and with it what is made once for a file, until another worker has nothing left to do.
    count = min(os.cpu_count() or 1, 8)
    print(f"Running the tests in {count} processes, which first collect them ...", file=sys.stderr)
    workers = ["-n", str(count), "--dist", "worksteal"]
    selected = [] if any(argument.startswith("-m") for argument in arguments) else ["-m", "not slow"]
    run([str(environment.python), "-m", "pytest", "-q", *workers, *selected, *arguments])
