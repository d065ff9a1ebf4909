"""Ask ONNX Runtime's CUDA provider what it decides before anything runs, on a machine without a GPU.

python3 scripts/test_placement.py [arguments of pytest]

The tests marked "placement", with the stand-in for CUDA (tests/standin) in place of its libraries.
"""

import os
import sys
from tempfile import TemporaryDirectory

from bootstrap import BIN, ROOT, ensure, run

if __name__ == "__main__":
    ensure("dev")
    python = str(BIN / "python")
    with TemporaryDirectory() as folder:
        run([python, str(ROOT / "tests" / "standin" / "build.py"), folder])
        os.environ["LD_LIBRARY_PATH"] = folder
        workers = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal"]
        run([python, "-m", "pytest", "-q", *workers, "-m", "placement", *sys.argv[1:]])
