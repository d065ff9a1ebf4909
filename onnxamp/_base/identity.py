"""The identity of a file: links, mounts, and letters in the other case give one file many names.

Paths are compared by what they lead to before anything is written. A file that exists is identified by its device and
inode. One that does not exist yet is identified by the folder that it will be created in, and by its name there.
"""

import os
from collections.abc import Hashable
from pathlib import Path
from typing import TypeAlias

from onnxamp._base.paths import is_remote

Identity: TypeAlias = Hashable
"""Equal for two paths that lead to the same file."""


def identity(path: Path) -> Identity:
    """Return the identity of the file that a path leads to, which need not exist; links are followed.

    Raises:
        OSError: symbolic links form a circle.
    """
    if is_remote(path):
        return str(path)
    place = resolved(path)
    status = _status(place)
    if status is not None:
        return status.st_dev, status.st_ino
    missing = list[str]()
    while status is None and place != place.parent:
        missing.append(place.name)
        place = place.parent
        status = _status(place)
    names = tuple(reversed(missing))
    if _ignores_case(place):
        names = tuple(name.casefold() for name in names)
    folder = str(place) if status is None else (status.st_dev, status.st_ino)
    return folder, names


def resolved(path: Path) -> Path:
    """Return an absolute path without links, also of a file that does not exist.

    Raises:
        OSError: symbolic links form a circle.
    """
    try:
        place = path.resolve()
    except RuntimeError as error:  # Python 3.12 and older report a circle so
        raise OSError(str(error)) from None
    if place.is_symlink():  # later versions return the link that leads to itself
        raise OSError(f"Symlink loop from {str(path)!r}")
    return place


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path leads to a folder itself or to something below it.

    Raises:
        OSError: symbolic links form a circle.
    """
    if is_remote(path) or is_remote(folder):
        return path == folder or path.is_relative_to(folder)
    wanted = _status(folder)
    place = resolved(path)
    if wanted is None:
        return place.is_relative_to(resolved(folder))
    statuses = map(_status, (place, *place.parents))
    return any(
        os.path.samestat(status, wanted) for status in statuses if status is not None
    )


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file or folder; None if it does not exist."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _ignores_case(folder: Path) -> bool:
    """Return whether names in a folder mean the same file in either case, going by the folder's own name."""
    for here in (folder, *folder.parents):
        other = here.with_name(here.name.swapcase()) if here.name else here
        if other.name != here.name:
            return other.exists() and other.samefile(here)
    return False
