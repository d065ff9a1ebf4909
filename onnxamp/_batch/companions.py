"""The files beside the models of a folder: configs and tokenizers, without which nobody can load the results.

They are written last, and only where every model of their folder has a result: before that, software does not take the
results for a folder that it can load.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from onnxamp._batch.job import Job
from onnxamp._batch.kinds import Package, is_companion
from onnxamp._dtypes import ELEM_NAMES, LOW_ELEMS
from onnxamp._job.folder import Shipped
from onnxamp._model.data_files import data_files_of
from onnxamp._model.storage import load_model, write_file
from onnxamp._paths.paths import made_folder
from onnxamp._state import Part, fingerprint

PART: Final = "companions"
"""Part of the state of a results folder: fingerprints of the files that were written beside results, by path."""


def ship(
    package: Package, jobs: Iterable[Job], source: Path, target: Path, part: Part
) -> Shipped:
    """Copy the files beside the models of a folder, with the settings that their results need.

    A file that is there and was not written by an earlier run, or was changed since, stays as it is.

    Args:
        package: the folder.
        jobs: its models, all of which have results.
        source: the folder that is converted, which it is or lies in.
        target: the folder of the results.
        part: what earlier runs wrote.

    Raises:
        OutputError: a file cannot be written.
    """
    needed = list(_needed_settings(package, jobs))
    written, kept = list[str](), list[str]()
    for path in _companions(package.folder, target):
        name = path.relative_to(source).as_posix()
        changes = [
            one
            for one in needed
            if one.file == path.relative_to(package.folder).as_posix()
        ]
        data = _changed(path, changes)
        place = target / name
        known = fingerprint(place.read_bytes()) if place.is_file() else None
        if known is None or known == part.get(name):
            if known != fingerprint(data):
                made_folder(place.parent)
                write_file(place, data)
                part[name] = fingerprint(data)
            written.append(name)
        elif known != fingerprint(data):
            kept.append(name)
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
    keys: tuple[str, ...]
    value: Any


def _companions(folder: Path, target: Path) -> Iterator[Path]:
    """The files below a folder that are to be copied, without hidden ones and those below ``target``."""
    waiting, without = [folder], target.resolve()
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            if path.name.startswith(".") or path.resolve() == without:
                continue
            if path.is_dir() and not path.is_symlink():
                waiting.append(path)
            elif path.is_file() and is_companion(path.name):
                yield path


def _needed_settings(package: Package, jobs: Iterable[Job]) -> Iterator[_Change]:
    """The settings that results need."""
    if not package.kind.settings:
        return
    for job in jobs:
        causes = {
            "caches": _dtype_of_caches(package, job.target),
            "data": _data_files(job.target),
        }
        texts = {"types": job.types, "file": job.target.name, "dtype": causes["caches"]}
        for file, settings in package.kind.settings.items():
            for cause, setting in settings.items():
                if causes[cause]:
                    keys = tuple(key.format(**texts) for key in setting.keys)
                    value = (
                        causes["data"]
                        if cause == "data"
                        else setting.value.format(**texts)
                    )
                    yield _Change(file=file, keys=keys, value=value)


def _dtype_of_caches(package: Package, result: Path) -> str:
    """The low-precision type of the inputs that the software takes in one; "" where there are none."""
    elems = {
        entry.type.tensor_type.elem_type
        for entry in load_model(result).graph.input
        if package.kind.is_low(entry.name)
    }
    return next((ELEM_NAMES[elem] for elem in sorted(elems) if elem in LOW_ELEMS), "")


def _data_files(result: Path) -> int:
    return len(data_files_of(result))


def _changed(path: Path, changes: Iterable[_Change]) -> bytes:
    """The bytes of a file with settings changed; the same bytes where all have their values already."""
    data = path.read_bytes()
    config = None
    for change in changes:
        config = json.loads(data) if config is None else config
        inner = config
        for key in change.keys[:-1]:
            held = inner.get(key)
            inner[key] = held if isinstance(held, Mapping) else {}
            inner = inner[key]
        inner[change.keys[-1]] = change.value
    if config is None or config == json.loads(data):
        return data
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
