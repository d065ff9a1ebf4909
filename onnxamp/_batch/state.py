"""The state of a folder of results, which saves converting what is up to date.

A result is up to date if its entry in ``.onnxamp.json`` was made by this version of onnxamp with the same options, and
every file that was read for it (the model, its data files, its inputs) and every file that was written still has the
same size and modification time. Comparing times alone, as make does, would miss other options and older files that
were moved here.

A failure is remembered likewise, if the same files would fail again: it is not tried again until a file that was
read, an option, or the version of onnxamp or ONNX Runtime changes. So are cures: where a result is made anew under the
same options, because it is gone or its weights go elsewhere, nobody looks for its cure again.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from onnxamp._decide.overrides import Unmatched
from onnxamp._job.folder import Row
from onnxamp._model.storage import write_file
from onnxamp._paths.paths import as_path, is_remote

NAME: Final = ".onnxamp.json"
"""Name of the state file in the folder of the results."""
_FORMAT: Final = 1
_KIND: Final = "zoo state"
"""Marks the file as ours; older versions wrote the same."""

Stamp = tuple[int, int]
"""Size in bytes, and modification time in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of a model: fingerprints of its options, and stamps by path relative to the folder of the results.

    Attributes:
        made_with: all that determines the result.
        searched_with: all that determines its cure.
        read: the files that were read.
        written: the files that were written; none if it failed.
        row: what became of it.
        cured: the options that passed, as JSON, where those of the call did not; None if they did, or failed.
    """

    made_with: str
    searched_with: str
    read: Mapping[str, Stamp]
    written: Mapping[str, Stamp]
    row: Row
    cured: Mapping[str, Any] | None = None

    def is_current(self, folder: Path, fingerprint: str, needed: Iterable[Path]) -> bool:
        """Whether nothing has changed since, and all files that are ``needed`` were read then."""
        return (
            self.made_with == fingerprint
            and self._read(folder, needed)
            and _unchanged(self.written, folder)
        )

    def is_cure(self, folder: Path, fingerprint: str, needed: Iterable[Path]) -> bool:
        """Whether what passed is known, and would pass again."""
        return (
            self.cured is not None
            and self.searched_with == fingerprint
            and self._read(folder, needed)
        )

    @property
    def stays_float32(self) -> bool:
        """Whether no conversion passed."""
        return self.cured is not None and self.cured["level"] == "O0"

    def _read(self, folder: Path, needed: Iterable[Path]) -> bool:
        return {_relative(path, folder) for path in needed} <= self.read.keys() and _unchanged(
            self.read, folder
        )


def _unchanged(known: Mapping[str, Stamp], folder: Path) -> bool:
    return all(_stamp(_found(path, folder)) == tuple(stamp) for path, stamp in known.items())


def _found(path: str, folder: Path) -> Path:
    """The path of a name that :func:`_relative` made."""
    named = as_path(path)
    return named if is_remote(named) else folder / named


def stamps(paths: Iterable[Path], folder: Path) -> dict[str, Stamp]:
    """The stamp of each file that exists, by path relative to ``folder``."""
    every = {_relative(path, folder): _stamp(path) for path in paths}
    return {path: stamp for path, stamp in every.items() if stamp is not None}


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A hash of plain data, sets and regular expressions, whatever the order of keys and sets."""

    def plain(item: Any) -> Any:
        return item.pattern if isinstance(item, re.Pattern) else sorted(item)

    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=plain).encode()).hexdigest()


def load_state(folder: Path) -> dict[str, Entry]:
    """The entries by name of the model; empty if there is no state file, or one of another form."""
    try:
        data = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if (data["onnxamp"], data["format"]) != (_KIND, _FORMAT):
            return {}
        return {
            name: Entry(
                made_with=entry["made_with"],
                searched_with=entry.get("searched_with", ""),
                read=dict(entry["read"]),
                written=dict(entry["written"]),
                row=_row(entry["row"]),
                cured=entry.get("cured"),
            )
            for name, entry in data["models"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _row(data: Mapping[str, Any]) -> Row:
    unmatched = data.get("unmatched")
    return Row(
        **{
            **data,
            **{name: tuple(data.get(name, ())) for name in ("warnings", "kept")},
            "unmatched": None
            if unmatched is None
            else tuple(Unmatched(**one) for one in unmatched),
        }
    )


def save_state(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the state file, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    data = {
        "onnxamp": _KIND,
        "format": _FORMAT,
        "models": {name: asdict(entry) for name, entry in entries.items()},
    }
    write_file(folder / NAME, json.dumps(data, indent=1).encode())


def _relative(path: Path, folder: Path) -> str:
    try:
        if is_remote(path) or is_remote(folder):
            inside = path.is_relative_to(folder)
            return path.relative_to(folder).as_posix() if inside else path.absolute().as_posix()
        return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()
    except ValueError:  # on another drive
        return path.absolute().as_posix()


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
