"""The files beside the models of a folder, such as configs and tokenizers, that software needs to load the results."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

from onnxamp._batch.job import Entry, Job
from onnxamp._batch.kinds import Package, files_below, is_companion
from onnxamp._batch.placing import put_in_place
from onnxamp._dtypes import ELEM_NAMES, LOW_ELEMS
from onnxamp._job.folder import Shipped
from onnxamp._model.storage import load_model, write_file
from onnxamp._paths.paths import made_folder
from onnxamp._state import Part, fingerprint

PART: Final = "companions"
"""Part of a results folder's state: the possible fingerprints of each file beside results that onnxamp wrote."""


def ship(
    package: Package,
    jobs: Sequence[Job],
    entries: Mapping[str, Entry],
    source: Path,
    target: Path,
    part: Part,
    others: Iterable[Path] = (),
) -> Shipped:
    """Copy the files beside the models of a folder, with the settings that the results need, and put them all in place.

    An existing file that an earlier run did not write, or that was changed since, is left unchanged.

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
    without = {path.resolve() for path in (target, *others)}
    written, kept, new = list[str](), list[str](), list[str]()
    home, stage = jobs[0].home, jobs[0].stage
    waits = any(job.result != job.target for job in jobs)
    for path in files_below(package.folder, without):
        if not path.is_file() or not is_companion(path.name):
            continue
        name = path.relative_to(source).as_posix()
        inside = path.relative_to(package.folder).as_posix()
        data = _changed(
            path.read_bytes(), [one for one in needed if one.file == inside]
        )
        place, wanted = home / inside, fingerprint(data)
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
    return Shipped(
        name=package.folder.relative_to(source).as_posix(),
        kind=package.kind.name,
        copied=tuple(written),
        kept=tuple(kept),
        left=tuple(path.relative_to(source).as_posix() for path in package.left_out),
    )


class _Change(NamedTuple):
    """A setting of a JSON file."""

    file: str
    keys: Sequence[str]
    value: Any


def _needed(
    package: Package, jobs: Iterable[Job], entries: Mapping[str, Entry]
) -> Iterator[_Change]:
    """Yield the settings that results need."""
    settings = package.kind.settings
    for job in jobs if settings else ():
        found = {
            "dtype": _dtype_of_caches(package, job.result),
            "files": len(entries[job.name].written) - 1,
        }
        for setting in settings:
            if value := found[setting.value]:
                names = {"types": job.types, "file": job.target.name}
                keys = [key.format(**names) for key in setting.keys]
                yield _Change(file=setting.file, keys=keys, value=value)


def _dtype_of_caches(package: Package, result: Path) -> str:
    """Return the type of the inputs that the software accepts in low precision; "" if there are none."""
    elems = {
        entry.type.tensor_type.elem_type
        for entry in load_model(result).graph.input
        if package.kind.is_low(entry.name)
    }
    return next((ELEM_NAMES[elem] for elem in sorted(elems) if elem in LOW_ELEMS), "")


def _changed(data: bytes, changes: Sequence[_Change]) -> bytes:
    """Return the bytes of a JSON file with settings changed; the same bytes if all already have their values."""
    if not changes:
        return data
    before = json.loads(data)
    config = deepcopy(before)
    for change in changes:
        inner = config
        for key in change.keys[:-1]:
            held = inner.get(key)
            inner[key] = held if isinstance(held, Mapping) else {}
            inner = inner[key]
        inner[change.keys[-1]] = change.value
    if config == before:
        return data
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
