"""Run the test suite. Sets up its own environment.

python3 scripts/test.py [arguments of pytest]
"""

import os
import sys

from bootstrap import BIN, ensure, run

if __name__ == "__main__":
    ensure("dev")
    workers = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal"]
    run([str(BIN / "python"), "-m", "pytest", "-q", *workers, *sys.argv[1:]])
