"""Run the test suite. Sets up its own environment.

python3 scripts/test.py [arguments of pytest]
"""

import os
import sys

from bootstrap import BIN, ensure, run

if __name__ == "__main__":
    ensure("dev")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # dozens of processes would compile the package, each for itself
    # All tests of a file in one worker: what they share is made once.
    workers = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "loadfile"]
    run([str(BIN / "python"), "-m", "pytest", "-q", *workers, *sys.argv[1:]])
