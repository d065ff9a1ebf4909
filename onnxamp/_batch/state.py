"""The state of a results folder, which lets a later run skip the models that are up to date.

A result is up to date if its entry in ``.onnxamp.json`` was made by this version of onnxamp with the same options, and
every file that was read for it (the model, its data files, its inputs) and every file that was written still has the
same size and modification time. Comparing times alone, as make does, would miss other options and older files that
were moved here.

A failure is remembered likewise, if the same files would fail again: it is not tried again until a file that was
read, an option, or the version of onnxamp or ONNX Runtime changes. So are cures: where a result is made anew under the
same options, because it is gone or its weights go elsewhere, nobody looks for its cure again.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from onnxamp._job.folder import Row
from onnxamp._model.sources import stamp_now
from onnxamp._paths.paths import as_path, is_remote
from onnxamp._state import state
from onnxamp._state.state import Part, from_data

NAME: Final = ".onnxamp.json"
"""Name of the state file in the folder of the results."""

Stamp = tuple[int, int]
"""Size in bytes, and modification time in nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What became of a model.

    Attributes:
        row: the same for people.
        read: stamps of the files that were read, by path relative to the folder of the results.
        written: stamps of the files that were written; none if it failed.
        cured: the options that passed, as JSON, where those of the call did not; None if they did, or failed.
        may_pass: a failure need not happen again: it is one of the machine, or of a file that is missing.
        made_with: a hash of all that determines the result.
        searched_with: a hash of all that determines its cure.
    """

    row: Row
    read: Mapping[str, Stamp] = field(default_factory=dict)
    written: Mapping[str, Stamp] = field(default_factory=dict)
    cured: Mapping[str, Any] | None = None
    may_pass: bool = False
    made_with: str = ""
    searched_with: str = ""

    def is_current(
        self, folder: Path, fingerprint: str, needed: Iterable[Path]
    ) -> bool:
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
        names = {_relative(path, folder) for path in needed}
        return names <= self.read.keys() and _unchanged(self.read, folder)


def remembered(part: Part) -> dict[str, Entry]:
    """What is remembered by name of the model, but for what another version wrote in another form."""
    entries = {}
    for name in part:
        with suppress(KeyError, TypeError, ValueError):
            entries[name] = from_data(Entry, part[name])
    return entries


def _unchanged(known: Mapping[str, Stamp], folder: Path) -> bool:
    return all(_stamp(_found(path, folder)) == stamp for path, stamp in known.items())


def _found(path: str, folder: Path) -> Path:
    """The path of a name that :func:`_relative` made."""
    named = as_path(path)
    return named if is_remote(named) else folder / named


def stamps(paths: Iterable[Path], folder: Path) -> dict[str, Stamp]:
    """The stamp of each file that exists, by path relative to ``folder``."""
    every = {_relative(path, folder): _stamp(path) for path in paths}
    return {path: stamp for path, stamp in every.items() if stamp is not None}


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A hash of plain data, paths, sets and regular expressions, whatever the order of keys and sets."""

    def plain(item: Any) -> Any:
        if isinstance(item, Path):
            return str(item)
        return item.pattern if isinstance(item, re.Pattern) else sorted(item)

    return state.fingerprint(json.dumps(facts, sort_keys=True, default=plain))


def _relative(path: Path, folder: Path) -> str:
    try:
        if is_remote(path) or is_remote(folder):
            inside = path.is_relative_to(folder)
            return (
                path.relative_to(folder).as_posix()
                if inside
                else path.absolute().as_posix()
            )
        return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()
    except ValueError:  # on another drive
        return path.absolute().as_posix()


def _stamp(path: Path) -> Stamp | None:
    now = stamp_now(path)
    return None if now is None else (now.size, now.modified)
