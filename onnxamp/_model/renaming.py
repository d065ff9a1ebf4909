"""Giving the data files of a result that is in its place the names that they would have had from the beginning."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from onnxamp._model.staging import identity_of, staging

_PIECE: Final = 1 << 26
"""Bytes that are copied at a time."""


def rename_data(path: Path, identity: str, names: Mapping[str, str], main: bytes) -> bool:
    """Give the data files of a result other names, and put a model in its place that refers to these.

    The data are copied, which costs neither time nor room where the file system can share them. Nothing is done where a
    name is taken, or the result was replaced meanwhile.

    Args:
        path: the result.
        identity: of the result; see :meth:`Stage.identity`.
        names: name of a data file beside the result -> its new name.
        main: the model that refers to the new names.

    Returns:
        Whether the names are as wished.

    Raises:
        OSError: something cannot be written. The result stays as it was.
    """
    beside, wanted = path.parent, list(names.values())

    def published() -> list[Path]:
        if identity_of(path) != identity or stage.publish(wanted) != wanted:
            raise _SupersededError
        return [beside / name for name in names]

    if any((beside / name).exists() for name in wanted):
        return False
    try:
        with staging(path) as stage:
            if not stage.has_links():  # there every data file has the token in its name
                return False
            for old, new in names.items():
                _copy(beside / old, stage.data / new)
            stage.main.write_bytes(main)
            stage.commit(published)
    except (_SupersededError, FileNotFoundError):
        return False
    return True


class _SupersededError(Exception):
    """Another process replaced the result, or took a name."""


def _copy(source: Path, target: Path) -> None:
    """Copy a file, within the file system if that can."""
    with source.open("rb") as read, target.open("wb") as written:
        try:
            while os.copy_file_range(read.fileno(), written.fileno(), _PIECE):
                pass
        except (AttributeError, OSError):  # another system, or another file system
            read.seek(0)
            written.truncate(0)
            shutil.copyfileobj(read, written, _PIECE)
