"""Facts about ops, known before any model is seen: tables and schemas.

The tables are read here, those of ``_data`` and those in the folders of targets, ``_data/targets/NAME``: each holds all
facts about a target. Their README explains them.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

_DATA: Final = Path(__file__).parents[1] / "_data"
_TARGETS: Final = _DATA / "targets"
_LAST: Final = 1 << 30
"""The order of a target that specifies none."""


def device_of(target: str) -> str:
    """Return the target without its version: "cuda" for "cuda@1.24"."""
    return target.partition("@")[0]


def is_older(version: str, other: str) -> bool:
    """Return whether a version of ONNX Runtime is older than another one."""
    return ordinal(version) < ordinal(other)


def holds_in(row: Mapping[str, Any], version: str) -> bool:
    """Return whether a row of a table is true of a version of ONNX Runtime; without a version, every row is.

    It is true from the version ``since`` on, and of older ones than ``before``, if it states them.
    """
    if not version:
        return True
    is_early = "since" in row and is_older(version, row["since"])
    is_late = "before" in row and not is_older(version, row["before"])
    return not (is_early or is_late)


def ordinal(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, which compare as versions do; a suffix such as ".dev1" does not count."""
    return tuple(int(part) for part in takewhile(str.isdecimal, version.split(".")))


@cache
def target_names() -> tuple[str, ...]:
    """Return the names of all targets, in the order in which help and messages list them."""
    # By name first, because folders are listed in any order, and sorting is stable.
    names = sorted(file.parent.name for file in _TARGETS.glob("*/target.toml"))
    orders = {name: _table(name, "target").get("order", _LAST) for name in names}
    return tuple(sorted(names, key=orders.__getitem__))


def target_table(target: str, name: str) -> dict[str, Any]:
    """Return a table of a target, of any version, by the name of its file ("costs"); empty if there is none."""
    device = device_of(target)
    return _table(device, name) if device in target_names() else {}


@cache
def target_json(device: str, name: str) -> dict[str, Any]:
    """Return the contents of a target's JSON file by its name ("kernels"); empty if there is none."""
    import json  # noqa: PLC0415 - help and completion need none

    text = _text(device, f"{name}.json") if device in target_names() else ""
    data: dict[str, Any] = json.loads(text) if text else {}
    return data


@cache
def _table(device: str, name: str) -> dict[str, Any]:
    return tomllib.loads(_text(device, f"{name}.toml"))


def _text(device: str, name: str) -> str:
    file = _TARGETS / device / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def read_table(name: str) -> dict[str, Any]:
    """Return the table in a file of ``_data``, given its path there without the suffix: "ops", "oplists/default"."""
    return tomllib.loads((_DATA / f"{name}.toml").read_text(encoding="utf-8"))
