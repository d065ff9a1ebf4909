"""Jobs of a folder and what is remembered of them, so that a later run skips the models that are up to date.

The state of a results folder lets a later run skip the models that are up to date. A result is up to date if its entry
in ``.onnxamp.json`` was made by this version of onnxamp with the same options, and every file that was read for it (the
model, its data files, its inputs) and every file that was written still has the same size and modification time.
Comparing times alone, as make does, would miss other options and older files that were moved here.

Failures are remembered in the same way if the same files would fail again. They are not retried until a file that was
read, an option, or the version of onnxamp or ONNX Runtime changes. Cures are remembered as well: if a result must be
converted again under the same options, because it is gone or its weights go elsewhere, its cure is reused.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from onnxamp._base import state
from onnxamp._base.paths import as_path, is_remote
from onnxamp._base.records import record
from onnxamp._base.state import Part, from_data
from onnxamp._fleet.kinds import Package
from onnxamp._fleet.outcome import ModelOutcome
from onnxamp._model.data_files import data_files_of
from onnxamp._model.sources import stamp_now

NAME: Final = ".onnxamp.json"
"""Name of the state file in the folder of the results."""

Stamp = tuple[int, int]
"""Size in bytes, and modification time in nanoseconds."""


@record(kw_only=True)
class Entry:
    """The outcome for a model.

    Attributes:
        row: the outcome in readable form.
        read: stamps of the files that were read, by path relative to :attr:`ModelJob.home`.
        written: stamps of the files that were written, by their final paths; empty if it failed.
        page: stamp of its page; None if none was written.
        cured: the options that passed, as JSON, if those of the call did not; None if those passed, or none did.
        may_pass: whether a retry may succeed, because the failure is due to the machine or to a missing file.
        made_with: a hash of everything that determines the result.
        searched_with: a hash of everything that determines its cure.
    """

    row: ModelOutcome
    read: Mapping[str, Stamp] = field(default_factory=dict)
    written: Mapping[str, Stamp] = field(default_factory=dict)
    page: Stamp | None = None
    cured: Mapping[str, Any] | None = None
    may_pass: bool = False
    made_with: str = ""
    searched_with: str = ""

    def is_current(self, job: "ModelJob", fingerprint: str) -> bool:
        """Return whether nothing has changed since the job was done."""
        if self.made_with != fingerprint or not self._is_read(job):
            return False
        written = self.written.items()
        return all(stamp_of(job.current(name)) == stamp for name, stamp in written)

    def is_paged(self, job: "ModelJob") -> bool:
        """Return whether the job has its page, or needs none."""
        if job.page is None or not self.row.has_result:
            return True
        # Sharing weights may have changed the result after its page was written, but not what the page says.
        return self.page is not None and self.page == stamp_of(job.page)

    def is_cure(self, job: "ModelJob", fingerprint: str) -> bool:
        """Return whether the options that passed are known and would pass again."""
        is_same = self.searched_with == fingerprint
        return self.cured is not None and is_same and self._is_read(job)

    @property
    def stays_float32(self) -> bool:
        """Whether the model stays in float32 because no conversion passed."""
        return self.cured is not None and self.cured["level"] == "O0"

    def data_of(self, job: "ModelJob") -> set[Path]:
        """Return the data files of the model that was read."""
        others = read_before(job).keys()
        return {_place(name, job.home) for name in self.read.keys() - others}

    def _is_read(self, job: "ModelJob") -> bool:
        """Return whether all files that the job reads were read then, and have not changed since."""
        needed = (job.source, *_files(job.inputs))
        if not self.read.keys() >= {_relative(path, job.home) for path in needed}:
            return False
        read = self.read.items()
        return all(stamp_of(_place(name, job.home)) == stamp for name, stamp in read)


def remembered(part: Part) -> dict[str, Entry]:
    """Return the remembered entries by model name, without those in another version's format."""
    entries = {}
    for name in part:
        with suppress(KeyError, TypeError, ValueError):
            entries[name] = from_data(Entry, part[name])
    return entries


def _place(path: str, folder: Path) -> Path:
    """Return the path for a name that :func:`_relative` made."""
    named = as_path(path)
    return named if is_remote(named) or named.is_absolute() else folder / named


def stamps(paths: Iterable[Path], folder: Path) -> dict[str, Stamp]:
    """Return the stamp of each file that exists, by path relative to ``folder``."""
    known = dict[str, Stamp]()
    for path in paths:
        stamp = stamp_of(path)
        if stamp is not None:
            known[_relative(path, folder)] = stamp
    return known


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a hash of plain data, paths, sets and regular expressions, regardless of the order of keys and sets."""

    def plain(item: Any) -> Any:
        if isinstance(item, Path):
            return str(item)
        return item.pattern if isinstance(item, re.Pattern) else sorted(item)

    return state.fingerprint(json.dumps(facts, sort_keys=True, default=plain))


def _relative(path: Path, folder: Path) -> str:
    """Return a name for a file that stays valid if both folders move together."""
    if is_remote(path) or is_remote(folder):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
        return path.absolute().as_posix()
    try:
        return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()
    except ValueError:  # on another drive
        return path.absolute().as_posix()


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if there is none."""
    now = stamp_now(path)
    return None if now is None else (now.size, now.modified)


@record
class ModelJob:
    """One model of a folder.

    Attributes:
        name: path of the model below the folder, with slashes.
        source: the file of the model.
        target: the path of the result.
        failed: the path of a result that fails its validation.
        inputs: the file or the folder with its inputs; None for random ones.
        home: the folder of the results that belong together.
        stage: a hidden folder in ``home``, in which results wait until all results of the ``package`` are there (see
            :mod:`onnxamp._fleet.package`); None to write them at once.
        cure: the entry of an earlier run with the options that passed; None if none are known.
        page: the path of its report.
        search: the path of level auto's measurements.
        shared: files that all models depend on.
        package: the folder that it is part of, if its kind is known.
    """

    name: str
    source: Path
    target: Path
    failed: Path
    inputs: Path | None
    home: Path
    stage: Path | None = None
    cure: Entry | None = None
    page: Path | None = None
    search: Path | None = None
    shared: tuple[Path, ...] = ()
    package: Package | None = None

    @property
    def output(self) -> Path:
        """The path to which the result is written."""
        return self.staged(self.target)

    @property
    def result(self) -> Path:
        """The current path of the result."""
        return self.output if self.output.exists() else self.target

    def staged(self, path: Path) -> Path:
        """Return the path at which a file of the result waits."""
        return path if self.stage is None else self.stage / path.relative_to(self.home)

    def current(self, name: str) -> Path:
        """Return the current path of a file of the result, given the name of its final path."""
        place = _place(name, self.home)
        waiting = self.staged(place)
        return waiting if waiting.exists() else place


def read_before(job: ModelJob) -> Mapping[str, Stamp]:
    """Return the stamps of those files of a job that are known without reading the model."""
    return stamps({job.source, *_files(job.inputs), *job.shared}, job.home)


def _files(inputs: Path | None) -> list[Path]:
    """Return the files from which inputs are read."""
    if inputs is None:
        return []
    if not inputs.is_dir():
        return [inputs]
    return [path for path in inputs.iterdir() if path.is_file()]


def written_by(job: ModelJob) -> Mapping[str, Stamp]:
    """Return the stamps of the files that make up the result of a job."""
    result = job.result
    files = (result, *(result.parent / name for name in data_files_of(result)))
    home = job.home if job.stage is None or result == job.target else job.stage
    return stamps(files, home)
