"""Run the test suite, without the slow tests. Sets up its own environment.

python3 scripts/test.py [arguments of pytest]
python3 scripts/test.py -m slow
"""

import sys

from bootstrap import USUAL, run_tests

if __name__ == "__main__":
    USUAL.ensure("dev")
    run_tests(USUAL, sys.argv[1:])
