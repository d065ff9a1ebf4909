"""Run the test suite, without the slow tests, with the oldest versions that pyproject.toml allows.

Sets up an environment of its own, .venv-oldest.

python3 scripts/test_oldest.py [arguments of pytest]
"""

import re
import sys
import tomllib

from bootstrap import ROOT, Environment, run_tests

OLDEST = Environment(ROOT / ".venv-oldest")


def oldest(requirements: list[str]) -> list[str]:
    """``name>=1.2 ; marker`` as ``name==1.2 ; marker``. What has no lower bound is a mistake."""
    found = [re.sub(r"^([\w.-]+)\s*>=\s*([\w.]+)", r"\1==\2", requirement) for requirement in requirements]
    loose = [pinned for pinned in found if "==" not in pinned.split(";")[0]]
    if loose:
        sys.exit(f"pyproject.toml gives no oldest version of {', '.join(loose)}.")
    return found


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = (project["dependencies"], *(extras[name] for name in ("gpu", "ir", "safetensors", "xlsx")))
    OLDEST.ensure("dev", oldest([requirement for group in needed for requirement in group]))
    run_tests(OLDEST, sys.argv[1:])
