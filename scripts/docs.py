"""Build the documentation into build/docs. Sets up its own environment.

python3 scripts/docs.py [arguments of sphinx-build]
"""

import sys

from bootstrap import BIN, ensure, run

if __name__ == "__main__":
    ensure("dev")
    run([str(BIN / "python"), "-m", "sphinx", "-q", "-W", "--keep-going", *sys.argv[1:], "docs", "build/docs"])
