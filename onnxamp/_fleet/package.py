"""The files of a package take their places together, all of them or none: the results, the data files that they share,
and the files beside them, such as configs and tokenizers.

Results and the files beside them wait in a hidden folder inside the target folder until every model of the package has
a result. Then the files that they replace move into another hidden folder, starting with the files by which software
recognizes the package. The new files then move to their places, with those files last. At any moment, the folder
contains the earlier files, the new ones, or a state that no software recognizes as a package.

If anything fails, all moves are undone. If the process is killed between two moves, the next run makes the remaining
ones, because it finds results in either place (:meth:`onnxamp._fleet.entries.ModelJob.current`).
"""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Final

from onnxamp._base.errors import OutputError
from onnxamp._base.identity import is_within
from onnxamp._base.paths import made_folder
from onnxamp._base.state import Part, fingerprint
from onnxamp._facts.dtypes import ELEM_NAMES, LOW_ELEMS
from onnxamp._fleet.entries import Entry, ModelJob
from onnxamp._fleet.kinds import (
    Package,
    PackageKind,
    Setting,
    files_below,
    is_companion,
    stores_of,
)
from onnxamp._fleet.outcome import Shipped
from onnxamp._model.data_files import (
    data_files_of,
    is_data_name,
    is_own,
    referring_models,
)
from onnxamp._model.model import load_model
from onnxamp._model.staging import sync, unwritable, write_file

STAGE: Final = ".onnxamp.new"
"""The folder in which files wait."""

REPLACED: Final = ".onnxamp.old"
"""The folder of replaced files while others take their places."""

_Move = tuple[Path, Path]
"""The current path of a file, and its destination."""

PART: Final = "companions"
"""Part of a results folder's state: the possible fingerprints of each file beside results that onnxamp wrote."""


def put_in_place(
    jobs: Sequence[ModelJob],
    entries: Mapping[str, Entry],
    companions: Iterable[str],
    kind: PackageKind,
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
    home = jobs[0].home
    stage = jobs[0].stage
    assert stage is not None
    old = home / REPLACED
    waiting = [job for job in jobs if job.result != job.target]
    models = [job.target.relative_to(home).as_posix() for job in waiting]
    written = set[str]().union(*(entries[job.name].written for job in waiting))
    others = written.difference(models)
    data = sorted(name for name in others if (stage / name).exists())
    marks = [name for name in companions if kind.is_mark(name)]
    plain = [name for name in companions if name not in marks]
    arriving = (*data, *models, *plain)
    try:
        outdated = sorted(_outdated(waiting, {home / name for name in data}))
        replaced = [*(home / name for name in plain), *outdated]
        replaced += [job.target for job in waiting]
        # No software recognizes the folder between the first step and the last one.
        first = _asides((home / name for name in marks), home, old)
        second = _asides(replaced, home, old)
        second += [(stage / name, home / name) for name in arriving]
        third = [(stage / name, home / name) for name in marks]
        _move([first, second, third])
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


def _outdated(jobs: Sequence[ModelJob], coming: Collection[Path]) -> Iterator[Path]:
    """Yield the data files to which only results refer that are about to be replaced.

    Raises:
        OutputError: a new file would replace one that is not onnxamp's, or is in use.
    """
    for folder in {job.target.parent for job in jobs}:
        here = [job.target for job in jobs if job.target.parent == folder]
        new = {path.name for path in coming if path.parent == folder}
        known = set[str]()
        for model in here:
            if model.is_file():
                known.update(data_files_of(model))
        referring = referring_models(folder, new | known, *here)
        for name in new | known:
            file = folder / name
            is_named = any(is_data_name(name, model.name) for model in here)
            is_ours = is_named and file.is_file() and is_own(file)
            if is_ours and name not in referring:
                yield file
            elif name in new and (name in referring or file.exists()):
                user = str(referring.get(name, "")) or "another program"
                raise OutputError(
                    f"{str(file)!r} belongs to {user}, and a result needs its name: move the file away, or choose"
                    f" another folder. The results wait in {str(jobs[0].stage)!r}."
                )


def _move(steps: Iterable[Sequence[_Move]]) -> None:
    """Move files; each step is on disk before the next one begins. If one fails, all are undone."""
    done = list[_Move]()
    try:
        for moves in steps:
            for source, target in moves:
                made_folder(target.parent)
                done.append((source, target))
                source.replace(target)
            for folder in {path.parent for path in chain.from_iterable(moves)}:
                sync(folder)
    except BaseException:
        for source, target in reversed(done):
            with suppress(OSError):
                if not source.exists():
                    target.replace(source)
        raise


def ship(
    package: Package,
    jobs: Sequence[ModelJob],
    entries: Mapping[str, Entry],
    source: Path,
    target: Path,
    part: Part,
    others: Iterable[Path],
) -> Shipped:
    """Copy the files beside the models of a folder, with the settings that the results need, and put them all in place.

    An existing file that an earlier run did not write, or that was changed since, is left unchanged. A link that leads
    out of the folder is not copied.

    Args:
        package: the folder.
        jobs: its models, all of which have results.
        entries: the remembered entries of these models, by name.
        source: the folder that is converted: the package itself, or a folder around it.
        target: the folder of the results.
        part: the state that earlier runs wrote.
        others: folders of other packages, which keep their own files.

    Raises:
        OutputError: a file cannot be written.
    """
    needed = list(_needed(package, jobs, entries))
    copied, linked = companions_of(package, source, target, others)
    written = list[str]()
    kept = list[str]()
    new = list[str]()
    home = jobs[0].home
    stage = jobs[0].stage
    waits = any(job.result != job.target for job in jobs)
    for path in copied:
        name = path.relative_to(source).as_posix()
        inside = path.relative_to(package.folder).as_posix()
        changes = [one for one in needed if one.file == inside]
        data = _changed(path.read_bytes(), changes)
        place = home / inside
        wanted = fingerprint(data)
        known = fingerprint(place.read_bytes()) if place.is_file() else None
        if known is not None and known != wanted and known not in part.get(name, ()):
            kept.append(name)
            continue
        # A mark moves with the models, even if it is unchanged.
        if known != wanted or (waits and package.kind.is_mark(inside)):
            place = (stage or home) / inside
            made_folder(place.parent)
            write_file(place, data)
            part[name] = [wanted, *filter(None, [known])]
            new.append(inside)
        written.append(name)
    if stage is not None:
        put_in_place(jobs, entries, new, package.kind)
    left = (path.relative_to(source) for path in package.left_out)
    links = (path.relative_to(source) for path in linked)
    return Shipped(
        name=package.folder.relative_to(source).as_posix(),
        kind=package.kind.name,
        copied=tuple(written),
        kept=tuple(kept),
        left=tuple(path.as_posix() for path in left),
        linked=tuple(path.as_posix() for path in links),
    )


def companions_of(
    package: Package, source: Path, target: Path, others: Iterable[Path]
) -> tuple[list[Path], list[Path]]:
    """Return the files beside the models of a package that software reads, and links to files outside the folder.

    Links are not copied, because a copy would hold data from outside the folder, which may be secret.

    Args:
        package: the folder.
        source: the folder that is converted.
        target: the folder of the results.
        others: folders of other packages, which keep their own files.
    """
    without = {path.resolve() for path in (target, *others)}
    here = [source, *stores_of(package.folder)]
    copied = list[Path]()
    linked = list[Path]()
    for path in files_below(package.folder, without):
        if not path.is_file() or not is_companion(path.name):
            continue
        is_inside = any(is_within(path, folder) for folder in here)
        if path.is_symlink() and not is_inside:
            linked.append(path)
        else:
            copied.append(path)
    return copied, linked


def _needed(
    package: Package, jobs: Iterable[ModelJob], entries: Mapping[str, Entry]
) -> Iterator[Setting]:
    """Yield the settings that results need, with their values in place of the names of these."""
    settings = package.kind.settings
    if not settings:
        return
    for job in jobs:
        values = {
            "dtype": _dtype_of_caches(package, job.result),
            "files": len(entries[job.name].written) - 1,  # without the model itself
        }
        types = package.kind.name_of(job.source).types
        names = {"types": types, "file": job.target.name}
        for setting in settings:
            if value := values[setting.value]:
                keys = [key.format(**names) for key in setting.keys]
                yield setting._replace(keys=keys, value=value)


def _dtype_of_caches(package: Package, result: Path) -> str:
    """Return the type of the inputs that the software accepts in low precision; "" if there are none."""
    entries = load_model(result).graph.input
    caches = [entry for entry in entries if package.kind.is_low(entry.name)]
    elems = sorted({entry.type.tensor_type.elem_type for entry in caches})
    return next((ELEM_NAMES[elem] for elem in elems if elem in LOW_ELEMS), "")


def _changed(data: bytes, changes: Sequence[Setting]) -> bytes:
    """Return the bytes of a JSON file with settings changed; the same bytes if all already have their values."""
    if not changes:
        return data
    before = json.loads(data)
    config = deepcopy(before)
    for change in changes:
        inner = config
        for key in change.keys[:-1]:
            if not isinstance(inner.get(key), Mapping):
                inner[key] = {}
            inner = inner[key]
        inner[change.keys[-1]] = change.value
    if config == before:
        return data
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
