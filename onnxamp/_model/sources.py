"""The files that models come in must stay as they are while they are read.

Weights of a large model are read long after its graph, several times, and by other processes. So what identifies a file
is noted when it is first read. Whoever opens it later checks that it is the same one, and before anything is written or
reported, all files of the models that came in are looked at once more (:func:`confirm_sources`).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from onnxamp._errors import SourceChangedError
from onnxamp._public import active_within


class FileStamp(NamedTuple):
    """A fingerprint of the contents of a file that needs no reading.

    The device is not part of it: each machine of a cluster numbers its own.
    """

    inode: int
    size: int
    modified: int
    """Nanoseconds."""

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the stamp of a file with that status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a stamp that :func:`str` wrote."""
        return cls(*map(int, text.split()))

    def __str__(self) -> str:
        return " ".join(map(str, self))


def changed_error(path: Path) -> SourceChangedError:
    """Return the error to raise when a file is not the one that was read before."""
    return SourceChangedError(
        f"{str(path)!r} changed while onnxamp read it: run again when nothing else writes to it."
    )


def check_opened(file: BinaryIO, path: Path, stamp: FileStamp | None) -> None:
    """Check that an open file is the one that was stamped.

    Raises:
        SourceChangedError: it is another one, or was written to. OSError: its status cannot be read.
    """
    if stamp is not None and FileStamp.of(os.fstat(file.fileno())) != stamp:
        raise changed_error(path)


def check_same(before: Mapping[Path, FileStamp], now: Mapping[Path, FileStamp]) -> None:
    """Check that files that were read again are those that were read before.

    Raises:
        SourceChangedError: one of them is another one, or was written to.
    """
    for path, stamp in before.items():
        if now.get(path) != stamp:
            raise changed_error(path)


@contextmanager
def opened_as(path: Path, stamp: FileStamp | None) -> Iterator[BinaryIO]:
    """Open a file of this machine, and check that it is the one that was stamped.

    Raises:
        SourceChangedError: it is another one, was written to, or is gone. OSError: it cannot be opened.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        if stamp is None:
            raise
        raise changed_error(path) from None
    with file:
        check_opened(file, path, stamp)
        yield file


_SOURCES: Final[ContextVar[dict[Path, FileStamp] | None]] = ContextVar(
    "onnxamp sources", default=None
)
"""The files of the models that came in, as they were when they were first read."""


def stamp_now(path: Path) -> FileStamp | None:
    """Return the stamp of a file as it is; None if there is none."""
    try:
        return FileStamp.of(path.stat())
    except OSError:
        return None


def _changed() -> Path | None:
    """A watched file that is no longer the one that was read; None if all are."""
    watched = _SOURCES.get() or {}
    return next(
        (path for path, stamp in watched.items() if stamp_now(path) != stamp), None
    )


@contextmanager
def watched_sources(*, apart: bool = False) -> Iterator[None]:
    """Watch the files of models that come in within the block; a block inside another one belongs to it, unless it is
    ``apart``, as one job of several is.

    An error that is raised after one of them has changed says so, because that may be its cause.

    Raises:
        SourceChangedError: something else was raised, and a file has changed.
    """
    if _SOURCES.get() is not None and not apart:
        yield
        return
    with active_within(_SOURCES, {}):
        try:
            yield
        except SourceChangedError:
            raise
        except Exception as error:
            path = _changed()
            if path is not None:
                raise changed_error(path) from error
            raise


@contextmanager
def unchanged_sources() -> Iterator[None]:
    """As :func:`watched_sources`, for blocks that read but write nothing: at its end all files are looked at.

    Raises:
        SourceChangedError: a file has changed.
    """
    with watched_sources():
        yield
        confirm_sources()


def note_sources(stamps: Mapping[Path, FileStamp]) -> None:
    """Watch files from now on, if :func:`watched_sources` asks for it.

    Raises:
        SourceChangedError: one of them was read before, and was another one then.
    """
    watched = _SOURCES.get()
    if watched is not None:
        for path, stamp in stamps.items():
            if watched.setdefault(path, stamp) != stamp:
                raise changed_error(path)


def confirm_sources() -> None:
    """Check that all files that are watched are still those that were read.

    Raises:
        SourceChangedError: one of them has changed.
    """
    path = _changed()
    if path is not None:
        raise changed_error(path)


def release_sources(replaced: Iterable[Path] | None = None) -> None:
    """Watch files no more: those that onnxamp itself has replaced, or all."""
    watched = _SOURCES.get() or {}
    gone = None if replaced is None else {path.resolve() for path in replaced}
    for path in list(watched):
        if gone is None or path.resolve() in gone:
            del watched[path]
