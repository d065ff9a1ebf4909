"""Optional rooms: what needs packages of its own, and is loaded when it is first used.

``_data/optional.toml`` lists them. Each stands behind an interface of the core, which knows only its name in that list.
"""

import tomllib
from functools import cache
from importlib import import_module, resources
from importlib.util import find_spec
from typing import Any

from onnxamp._errors import MissingPackageError


@cache
def rooms() -> dict[str, dict[str, str]]:
    """Return the list of optional rooms by name."""
    data = resources.files("onnxamp").joinpath("_data/optional.toml").read_text(encoding="utf-8")
    return tomllib.loads(data)


def optional(name: str, needs: str = "") -> Any:
    """Return the module of an optional room.

    Args:
        name: its name in the list.
        needs: the beginning of the message where its package is missing, as in "--cluster needs".

    Raises:
        MissingPackageError: its package is not installed.
    """
    room = rooms()[name]
    if "package" in room and find_spec(room["package"]) is None:
        raise MissingPackageError(
            f"{needs} {room['title']}, which is not installed: pip install 'onnxamp[{room['extra']}]'."
        )
    return import_module(room["module"])
