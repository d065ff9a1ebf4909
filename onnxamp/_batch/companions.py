"""The files beside the models of a folder, such as configs and tokenizers: software needs them to load the results.

They are written last, and only if every model of their folder has a result. Until then, software does not recognise the
results as a folder that it can load.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

from onnxamp._batch.job import Job
from onnxamp._batch.kinds import Package, files_below, is_companion
from onnxamp._dtypes import ELEM_NAMES, LOW_ELEMS
from onnxamp._job.folder import Shipped
from onnxamp._model.data_files import data_files_of
from onnxamp._model.storage import load_model, write_file
from onnxamp._paths.paths import made_folder
from onnxamp._state import Part, fingerprint

PART: Final = "companions"
"""Part of the state of a results folder: fingerprints of the files that were written beside results, by path."""


def ship(
    package: Package,
    jobs: Iterable[Job],
    source: Path,
    target: Path,
    part: Part,
    others: Iterable[Path] = (),
) -> Shipped:
    """Copy the files beside the models of a folder, with the settings that their results need.

    A file that is there and was not written by an earlier run, or was changed since, stays as it is.

    Args:
        package: the folder.
        jobs: its models, all of which have results.
        source: the folder that is converted, which it is or lies in.
        target: the folder of the results.
        part: what earlier runs wrote.
        others: folders of other packages, whose files are theirs.

    Raises:
        OutputError: a file cannot be written.
    """
    needed = list(_needed(package, jobs))
    without = {path.resolve() for path in (target, *others)}
    written, kept = list[str](), list[str]()
    for path in files_below(package.folder, without):
        if not path.is_file() or not is_companion(path.name):
            continue
        name = path.relative_to(source).as_posix()
        inside = path.relative_to(package.folder).as_posix()
        data = _changed(
            path.read_bytes(), [one for one in needed if one.file == inside]
        )
        place, new = target / name, fingerprint(data)
        known = fingerprint(place.read_bytes()) if place.is_file() else None
        if known not in (None, new, part.get(name)):
            kept.append(name)
            continue
        if known != new:
            made_folder(place.parent)
            write_file(place, data)
            part[name] = new
        written.append(name)
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


def _needed(package: Package, jobs: Iterable[Job]) -> Iterator[_Change]:
    """Yield the settings that results need."""
    settings = package.kind.settings
    for job in jobs if settings else ():
        found = {
            "dtype": _dtype_of_caches(package, job.target),
            "files": len(data_files_of(job.target)),
        }
        for setting in settings:
            if value := found[setting.value]:
                names = {"types": job.types, "file": job.target.name}
                keys = [key.format(**names) for key in setting.keys]
                yield _Change(file=setting.file, keys=keys, value=value)


def _dtype_of_caches(package: Package, result: Path) -> str:
    """Return the low-precision type of the inputs that the software takes in one; "" where there are none."""
    elems = {
        entry.type.tensor_type.elem_type
        for entry in load_model(result).graph.input
        if package.kind.is_low(entry.name)
    }
    return next((ELEM_NAMES[elem] for elem in sorted(elems) if elem in LOW_ELEMS), "")


def _changed(data: bytes, changes: Sequence[_Change]) -> bytes:
    """Return the bytes of a JSON file with settings changed; the same bytes where all have their values already."""
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
