"""Moves the files of a package to their places together: all of them, or none.

Results and the files beside them wait in a hidden folder inside the target folder until every model of the package has
a result. Then the files that they replace move into another hidden folder, starting with the files by which software
recognizes the package. The new files then move to their places, with those files last. At any moment, the folder
contains the earlier files, the new ones, or a state that no software recognizes as a package.

If anything fails, all moves are undone. If the process is killed between two moves, the next run makes the remaining
ones, because it finds results in either place (:meth:`onnxamp._batch.job.Job.found`).
"""

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from onnxamp._batch.job import Entry, Job
from onnxamp._batch.kinds import Kind
from onnxamp._errors import OutputError
from onnxamp._model.data_files import (
    data_files_of,
    is_data_name,
    is_own,
    referring_models,
)
from onnxamp._model.staging import sync
from onnxamp._model.storage import unwritable
from onnxamp._paths.paths import made_folder

STAGE: Final = ".onnxamp.new"
"""The folder in which files wait."""
_REPLACED: Final = ".onnxamp.old"
"""The folder of replaced files while others take their places."""

_Move = tuple[Path, Path]
"""The current path of a file, and its destination."""


def put_in_place(
    jobs: Sequence[Job],
    entries: Mapping[str, Entry],
    companions: Iterable[str],
    kind: Kind,
) -> None:
    """Move all waiting files of a package to their places.

    Args:
        jobs: the models of the package, all of which have results.
        entries: the remembered entries of these models, by name.
        companions: other waiting files, by path below the package.
        kind: the kind of the package.

    Raises:
        OutputError: a file cannot be moved, or would replace a data file that is not onnxamp's. Nothing has changed.
    """
    home, stage = jobs[0].home, jobs[0].stage
    assert stage is not None
    old = home / _REPLACED
    waiting = [job for job in jobs if job.result != job.target]
    models = [job.target.relative_to(home).as_posix() for job in waiting]
    written = {name for job in waiting for name in entries[job.name].written}
    data = sorted(
        name for name in written.difference(models) if (stage / name).exists()
    )
    marks = [name for name in companions if kind.is_mark(name)]
    others = [name for name in companions if name not in marks]
    try:
        outdated = sorted(_outdated(waiting, {home / name for name in data}))
        replaced = [*(home / name for name in others), *outdated]
        replaced += [job.target for job in waiting]
        _move(
            [
                _asides((home / name for name in marks), home, old),
                _asides(replaced, home, old)
                + [(stage / name, home / name) for name in (*data, *models, *others)],
                [(stage / name, home / name) for name in marks],
            ]
        )
    except (OSError, ValueError) as error:
        raise unwritable(home, error) from None
    for folder in (stage, old):
        shutil.rmtree(folder, ignore_errors=True)


def _asides(files: Iterable[Path], home: Path, old: Path) -> list[_Move]:
    """Return the moves that make room for other files. Folders stay, because they are not onnxamp's."""
    return [
        (file, old / file.relative_to(home))
        for file in files
        if file.is_file() or file.is_symlink()
    ]


def _outdated(jobs: Sequence[Job], coming: Collection[Path]) -> Iterator[Path]:
    """Yield the data files to which only results refer that are about to be replaced.

    Raises:
        OutputError: a new file would replace one that is not onnxamp's, or is in use.
    """
    for folder in {job.target.parent for job in jobs}:
        here = [job.target for job in jobs if job.target.parent == folder]
        new = {path.name for path in coming if path.parent == folder}
        known = {
            name for model in here if model.is_file() for name in data_files_of(model)
        }
        referring = referring_models(folder, new | known, *here)
        for name in new | known:
            file = folder / name
            is_ours = (
                any(is_data_name(name, model.name) for model in here)
                and file.is_file()
                and is_own(file)
            )
            if name in referring or not is_ours:
                if name in new and (name in referring or file.exists()):
                    user = str(referring.get(name, "")) or "another program"
                    raise OutputError(
                        f"{str(file)!r} belongs to {user}, and a result needs its name: move the file away, or choose"
                        f" another folder. The results wait in {str(jobs[0].stage)!r}."
                    )
            else:
                yield file


def _move(steps: Iterable[Sequence[_Move]]) -> None:
    """Move files; each step is on disk before the next one begins. If one fails, all are undone."""
    done = list[_Move]()
    try:
        for moves in steps:
            for source, target in moves:
                made_folder(target.parent)
                done.append((source, target))
                source.replace(target)
            for folder in {path.parent for move in moves for path in move}:
                sync(folder)
    except BaseException:
        for source, target in reversed(done):
            with suppress(OSError):
                if not source.exists():
                    target.replace(source)
        raise
