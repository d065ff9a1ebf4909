"""Paths of files, here and elsewhere: ``s3://bucket/model.onnx`` is as good as a path.

:func:`as_path` turns what users name into a :class:`~pathlib.Path`: a URL becomes one of an optional room whose methods
ask its file system (:class:`Remote`). Whoever opens files by their methods needs no other code for it. What is large is
read by ranges (:func:`read_range`) and written as a stream (:func:`writing`), never copied as a whole.
"""

import os
import re
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import IO, Final

from onnxamp._errors import ArgumentError, MissingFileError, OutputError
from onnxamp._optional import optional

URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://(.*)", re.DOTALL)
"""A scheme has two letters at least: one is a drive."""


class Remote(ABC):
    """Methods of paths on other file systems, beyond those of :class:`~pathlib.Path`."""

    __slots__ = ()

    @abstractmethod
    def read_range(self, start: int, size: int) -> bytes:
        """Return bytes from a start on; fewer where the file ends before."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[IO[bytes]]:
        """Open a file that is written from its start to its end, and is there when all is written."""


def as_path(given: str | PathLike[str]) -> Path:
    """Return the path that an argument means, of a file here or of one at a URL.

    Raises:
        ArgumentError: no file system knows the URL. MissingPackageError: the package for it is not installed.
    """
    if isinstance(given, Path):
        return given
    text = os.fspath(given)
    found = URL.fullmatch(text)
    if found is None:
        return Path(text)
    scheme = found[1].lower()
    if scheme == "file":
        from urllib.parse import urlsplit  # noqa: PLC0415 - few paths are URLs
        from urllib.request import url2pathname  # noqa: PLC0415 - imports http and ssl

        return (
            Path(url2pathname(urlsplit(text).path)) if "%" in text else Path(found[2])
        )
    path: Path = optional("remote", f"URLs such as {scheme}://... need").RemotePath.of(
        text
    )
    return path


def is_remote(path: Path | None) -> bool:
    """Return whether a path is one of another file system."""
    return isinstance(path, Remote)


def made_folder(folder: Path) -> Path:
    """Return the folder, which is there from now on, with those above it.

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


def read_range(path: Path, start: int, size: int) -> bytes:
    """``size`` bytes of a file from byte ``start``; fewer where it ends before.

    Raises:
        OSError: a file here cannot be read. ExternalDataError: one at a URL cannot.
    """
    if isinstance(path, Remote):
        return path.read_range(start, size)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def writing(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Return a file to be written from its start to its end; at a URL nothing is there until all is written.

    Raises:
        OSError: it cannot be written.
    """
    return path.writing() if isinstance(path, Remote) else path.open("wb")


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


def reason_of(error: BaseException) -> str:
    """Return the message of a library or the system in one line, without its full stop, to follow a colon."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__


def cannot_read(what: str, error: Exception, remedy: str = "") -> ArgumentError:
    """Return the error to raise where ``error`` kept a file from being read that an argument names.

    Args:
        what: names the file, as in "the plan 'plan.json'".
        error: what was raised.
        remedy: a sentence that follows, unless the file is just not there.
    """
    is_missing = isinstance(error, FileNotFoundError)
    kind = MissingFileError if is_missing else ArgumentError
    return kind(
        f"Cannot read {what}: {reason_of(error)}.{f' {remedy}' if remedy and not is_missing else ''}"
    )
