"""Checks, before anything runs, that a run over a folder replaces nothing that it reads.

Links, mounts and names in the other case can lead from the results back to the originals, to the inputs, or from one
result to another one. Paths are therefore compared by the files that they lead to.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from onnxamp._base.errors import ArgumentError
from onnxamp._base.identity import Identity, identity, is_within
from onnxamp._base.paths import is_remote
from onnxamp._fleet.entries import NAME, ModelJob
from onnxamp._fleet.package import REPLACED, companions_of


class _WrittenFile(NamedTuple):
    """A file that a run may write.

    Attributes:
        path: where it is written.
        what: names it in a message.
        is_result: whether it belongs to the results, which may not lie among the originals.
    """

    path: Path
    what: str
    is_result: bool = True


_REMEDY: Final = "remove the link, or choose another folder for the results."


def check_outputs(
    jobs: Sequence[ModelJob],
    source: Path,
    target: Path,
    *,
    index: Path | None,
    folders: Iterable[Path],
    files: Iterable[Path],
) -> None:
    """Check that nothing that is written replaces a file that is read, or another result.

    Args:
        jobs: the models with their results.
        source: the folder of the originals.
        target: the folder of the results.
        index: the index of the pages, if they are requested.
        folders: other folders whose files are read.
        files: other files that are read.

    Raises:
        ArgumentError: something would be replaced, or links form a circle.
    """
    named = [*(job.source for job in jobs), *files]
    for folder in (source, *folders):
        named += _files_below(folder, target)
    read = dict(_identified(named))
    written = dict[Identity, _WrittenFile]()
    for output in _written(jobs, target, index):
        if not is_remote(output.path):
            _check(output, source, target, read, written)
    for folder in {path.parent for path in _moved(jobs, source, target)}:
        if not is_remote(folder) and _is_among(folder, source, target):
            raise ArgumentError(
                f"Files beside the results would be written among the originals in {str(source)!r}, to which"
                f" {str(folder)!r} leads: {_REMEDY}"
            )


def _check(
    output: _WrittenFile,
    source: Path,
    target: Path,
    read: Mapping[Identity, Path],
    written: dict[Identity, _WrittenFile],
) -> None:
    """Check one file that a run may write, and note it.

    Args:
        output: the file.
        source: the folder of the originals.
        target: the folder of the results.
        read: the files that are read.
        written: those that were checked before; it is added.
    """
    path = repr(str(output.path))
    try:
        own = identity(output.path)
    except OSError:
        raise ArgumentError(
            f"{output.what} cannot be written to {path}: it is a link that leads back to itself. Remove it."
        ) from None
    if own in read:
        raise ArgumentError(
            f"{output.what} would replace {str(read[own])!r}, to which {path} leads: {_REMEDY}"
        )
    if output.is_result and _is_among(output.path, source, target):
        raise ArgumentError(
            f"{output.what} would be written among the originals in {str(source)!r}, to which {path} leads: {_REMEDY}"
        )
    other = written.setdefault(own, output)
    if other is not output:
        raise ArgumentError(
            f"{output.what} would replace {str(other.path)!r}, to which {path} leads: {_REMEDY}"
        )


def _is_among(path: Path, source: Path, target: Path) -> bool:
    """Return whether a path leads to the originals; the folder of the results may lie among them."""
    return is_within(path, source) and not is_within(path, target)


def _written(
    jobs: Iterable[ModelJob], target: Path, index: Path | None
) -> Iterator[_WrittenFile]:
    """Yield the files that a run may write, through links if there are any."""
    yield _WrittenFile(target / NAME, "The state of the results")
    for job in jobs:
        result = f"The result of {job.name!r}"
        yield _WrittenFile(job.target, result)
        yield _WrittenFile(job.failed, f"The failed result of {job.name!r}")
        if job.stage is not None:
            yield _WrittenFile(job.output, result)
        if job.search is not None:
            yield _WrittenFile(job.search, f"The state of {job.name!r}")
        if job.page is not None:
            yield _WrittenFile(job.page, f"The page of {job.name!r}", is_result=False)
    if index is not None:
        yield _WrittenFile(index, "The index of the pages", is_result=False)


def _moved(jobs: Iterable[ModelJob], source: Path, target: Path) -> Iterator[Path]:
    """Yield the paths to which files of packages are moved. That replaces a link, and does not follow it."""
    packages = dict[Path, ModelJob]()
    for job in jobs:
        if job.package is not None and job.stage is not None:
            packages.setdefault(job.package.folder, job)
            yield job.home / REPLACED / job.target.relative_to(job.home)
    for folder, job in packages.items():
        assert job.package is not None
        others = packages.keys() - {folder}
        copied, _ = companions_of(job.package, source, target, others)
        for path in copied:
            inside = path.relative_to(folder)
            yield from (
                job.home / inside,
                job.staged(job.home / inside),
                job.home / REPLACED / inside,
            )


def _identified(files: Iterable[Path]) -> Iterator[tuple[Identity, Path]]:
    """Yield files with their identities."""
    for path in files:
        with suppress(OSError):  # a link that leads to itself can be read by nothing
            yield identity(path), path


def _files_below(folder: Path, without: Path) -> Iterator[Path]:
    """Yield all files below a folder, hidden ones and data files included, except those of the results."""
    if is_remote(folder):
        return
    for here, folders, files in os.walk(folder):
        # os.walk visits the folders that are left in its list.
        folders[:] = [
            name for name in folders if not is_within(Path(here, name), without)
        ]
        yield from (Path(here, name) for name in files)
