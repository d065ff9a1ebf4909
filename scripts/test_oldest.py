"""Run the test suite with the oldest versions that pyproject.toml allows, in an environment of its own: .venv-oldest.

python3 scripts/test_oldest.py [arguments of pytest]
"""

import os
import re
import sys
import tomllib

from bootstrap import ROOT, Environment, run

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
    needed = (project["dependencies"], *(extras[name] for name in ("gpu", "safetensors", "xlsx")))
    OLDEST.ensure("dev", oldest([requirement for group in needed for requirement in group]))
    workers = ["-n", str(min(os.cpu_count() or 1, 8)), "--dist", "loadfile"]
    run([str(OLDEST.python), "-m", "pytest", "-q", *workers, *sys.argv[1:]])
