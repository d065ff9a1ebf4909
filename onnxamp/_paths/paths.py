"""Paths of files, here and elsewhere: ``s3://bucket/model.onnx`` is as good as a path.

:func:`as_path` turns what users name into a :class:`~pathlib.Path`: a URL of fsspec's file systems becomes one whose
methods ask the file system (:mod:`onnxamp._paths.remote`). Whoever opens files by their methods needs no other code for
it. What is large is read by ranges (:func:`read_range`) and written as a stream (:func:`writing`), never copied as a
whole.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from onnxamp._errors import OutputError
from onnxamp._paths.remote import URL, RemotePath


def as_path(given: str | PathLike[str]) -> Path:
    """The path that an argument means, of a file here or of one behind a URL.

    Raises:
        ArgumentError: no file system knows the URL. MissingPackageError: the package for it is not installed.
    """
    if isinstance(given, Path):
        return given
    text = os.fspath(given)
    found = URL.fullmatch(text)
    if found is None:
        return Path(text)
    if found[1].lower() == "file":
        from urllib.request import url2pathname  # noqa: PLC0415 - imports http and ssl

        return Path(url2pathname(urlsplit(text).path)) if "%" in text else Path(found[2])
    return RemotePath.of(text)


def is_remote(path: Path | None) -> bool:
    """Whether a path is one of another file system."""
    return isinstance(path, RemotePath)


def made_folder(folder: Path) -> Path:
    """The folder, which is there from now on, with those above it.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"Cannot make the folder {str(folder)!r}: {error.strerror}. Choose another."
        ) from None
    return folder


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """As :func:`os.walk`, with paths: each folder, the names of those in it, which may be changed, and of its files."""
    if not is_remote(folder):
        yield from ((Path(here), below, files) for here, below, files in os.walk(folder))
        return
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        entries = list(here.iterdir())
        below = [entry.name for entry in entries if entry.is_dir()]
        yield here, below, [entry.name for entry in entries if entry.name not in below]
        waiting += [here / name for name in reversed(below)]


def read_range(path: Path, start: int, size: int) -> bytes:
    """``size`` bytes of a file from byte ``start``; fewer where it ends before.

    Raises:
        OSError: a file here cannot be read. ExternalDataError: one behind a URL cannot.
    """
    if isinstance(path, RemotePath):
        return path.read_range(start, size)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def writing(path: Path) -> AbstractContextManager[IO[bytes]]:
    """A file to be written from its start to its end; behind a URL nothing is there until all is written.

    Raises:
        OSError: it cannot be written.
    """
    return path.writing() if isinstance(path, RemotePath) else path.open("wb")


try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None  # type: ignore[assignment]

CAN_LOCK = fcntl is not None
"""Whether the system has such locks."""


def lock(handle: int, *, wait: bool) -> None:
    """Lock what a file descriptor stands for, until it is closed.

    Raises:
        BlockingIOError: without ``wait``: another process holds the lock. OSError: locks do not work there.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
