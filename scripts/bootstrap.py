"""Make the virtual environment `.venv` that the other scripts run in, once, and again when pyproject.toml changes.

Uses nothing but the standard library of Python 3.11 or later.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")


def ensure(extra: str = "") -> None:
    """Make `.venv` hold onnxamp, editable, with the dependencies of ``extra`` ("dev" or none)."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this has not installed anything yet
        sys.exit(f"onnxamp needs Python 3.11 or later; this is {sys.version.split()[0]}.")
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamps = [VENV / f"onnxamp-{name}.stamp" for name in {extra, "dev"}]
    if any(stamp.is_file() and stamp.read_text() == wanted for stamp in stamps):
        return
    if not (BIN / ("python.exe" if os.name == "nt" else "python")).exists():
        print("Making .venv ...", file=sys.stderr)
        made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False, capture_output=True, text=True)
        if made.returncode:
            sys.exit(
                f"Cannot make a virtual environment (on Debian: apt install python3-venv).\n{made.stdout}{made.stderr}"
            )
    print("Installing onnxamp and what it needs into .venv (about 300 MB, once) ...", file=sys.stderr)
    target = f"{ROOT}[{extra}]" if extra else str(ROOT)
    run([str(BIN / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", target])
    (VENV / f"onnxamp-{extra}.stamp").write_text(wanted)


def run(command: list[str]) -> None:
    """Run a command in the repository's root; a failure ends the script with its exit code."""
    code = subprocess.run(command, check=False, cwd=ROOT).returncode
    if code:
        sys.exit(code)
