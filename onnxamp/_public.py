"""Public names: the modules that users import them from."""

import sys
from collections.abc import Iterable


def export(module: str, names: Iterable[str]) -> None:
    """Set ``__module__`` of private classes and functions to the public module that first exports them.

    Tracebacks, ``repr``, pickle and documentation show it.
    """
    members = vars(sys.modules[module])
    for name in names:
        home = getattr(members[name], "__module__", None)
        if isinstance(home, str) and home.startswith("onnxamp") and "._" in home:
            members[name].__module__ = module
