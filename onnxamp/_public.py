"""The names that users import, and the modules they import them from."""

import sys
from collections.abc import Iterable


def export(module: str, names: Iterable[str]) -> None:
    """Make classes and functions of private modules report the public module that exports them first.

    ``__module__`` is what tracebacks, ``repr``, pickle and documentation show.
    """
    members = vars(sys.modules[module])
    for name in names:
        home = getattr(members[name], "__module__", None)
        if isinstance(home, str) and home.startswith("onnxamp") and "._" in home:
            members[name].__module__ = module
