"""Paths of local and remote files: ``s3://bucket/model.onnx`` works wherever a path does.

:func:`as_path` turns users' arguments into a :class:`~pathlib.Path`. For a URL, this is a path from an optional room
whose methods query its file system (:class:`Remote`), so code that opens files by the methods of their paths needs no
special case. Large files are read by ranges (:func:`read_range`) and written as a stream (:func:`writing`); they are
never copied as a whole.
"""

import os
import re
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import IO, Final

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingFileError,
    OutputError,
    suggestion,
)
from onnxamp._base.extensions import extensions

URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://(.*)", re.DOTALL)
"""A URL. Its scheme has at least two letters, because a single letter is a drive."""


class Remote(ABC):
    """Methods of paths on other file systems, beyond those of :class:`~pathlib.Path`."""

    __slots__ = ()

    @abstractmethod
    def read_range(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from byte ``start``; fewer if the file ends before."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[IO[bytes]]:
        """Open a file for sequential writing; it appears once it is complete."""


def as_path(given: str | PathLike[str]) -> Path:
    """Return the path that an argument means, of a local file or of one at a URL.

    Raises:
        ArgumentError: no file system knows the URL, or a "file:" URL names no file of this machine.
        ArgumentTypeError: the argument is no path.
        MissingPackageError: the package for it is not installed.
    """
    if isinstance(given, Path):
        return given
    text = os.fspath(given) if isinstance(given, (str, PathLike)) else None
    if not isinstance(text, str):
        raise ArgumentTypeError(
            f"A path must be a string or a path, not {given!r:.80}."
        )
    if text[:5].lower() == "file:":
        return _local_file(text)
    match = URL.fullmatch(text)
    if match is None:
        return Path(text)
    scheme = match[1].lower()
    remote = extensions("paths")["remote"].load(f"URLs such as {scheme}://... need")
    path: Path = remote.RemotePath.of(text)
    return path


def _local_file(url: str) -> Path:
    """Return the path of a URL of a local file (RFC 8089): ``file:/path``, ``file:///path``, ``file://localhost/path``.

    "?" and "#" stand for themselves, because file systems have no queries.

    Raises:
        ArgumentError: it is relative, names another machine, or contains a zero byte.
    """
    from urllib.parse import unquote  # noqa: PLC0415 - few paths are URLs

    place = url[5:]
    host = ""
    if place.startswith("//"):
        host, slash, rest = place[2:].partition("/")
        place = slash + rest
    if host.lower() not in ("", "localhost"):
        raise ArgumentError(
            f"{url!r} names a file of the machine {host!r}: a local file is 'file:///path' with three slashes."
        )
    if not place.startswith("/"):
        raise ArgumentError(
            f"{url!r} is a URL without an absolute path: write 'file:///path', or './{url}' for a file of this name."
        )
    if "%00" in place or "\0" in place:
        raise ArgumentError(
            f"{url!r} contains a zero byte, which no file name can: remove it."
        )
    if os.name == "nt":
        from urllib.request import url2pathname  # noqa: PLC0415 - imports http and ssl

        return Path(url2pathname(place))
    # Two slashes at the beginning of a path would be kept.
    return Path("/" + unquote(place, errors="surrogateescape").lstrip("/"))


def is_remote(path: Path | None) -> bool:
    """Return whether a path is on another file system."""
    return isinstance(path, Remote)


def made_folder(folder: Path) -> Path:
    """Create a folder and its parents if they do not exist, and return it.

    Raises:
        OutputError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"Cannot make the folder {str(folder)!r}: {error.strerror}. Choose another."
        ) from None
    return folder


def read_range(path: Path, start: int, size: int) -> bytes:
    """Return ``size`` bytes of a file from byte ``start``; fewer if it ends before.

    Raises:
        OSError: a local file cannot be read. ExternalDataError: a file at a URL cannot be read.
    """
    if isinstance(path, Remote):
        return path.read_range(start, size)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def writing(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Return a file for sequential writing; at a URL, it appears once it is complete.

    Raises:
        OSError: it cannot be written.
    """
    return path.writing() if isinstance(path, Remote) else path.open("wb")


try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None  # type: ignore[assignment]

CAN_LOCK = fcntl is not None
"""Whether the system supports file locks."""


def lock(handle: int, *, wait: bool) -> None:
    """Lock the file of a file descriptor until the descriptor is closed.

    Raises:
        BlockingIOError: without ``wait``: another process holds the lock. OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def reason_of(error: BaseException) -> str:
    """Return the message of a library or the system on one line, without its period, to follow a colon."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__


def cannot_read(what: str, error: Exception, remedy: str = "") -> ArgumentError:
    """Return the error to raise if ``error`` prevented reading a file that an argument names.

    Args:
        what: names the file, as in "the plan 'plan.json'".
        error: the error that was raised.
        remedy: a sentence to append, unless the file just does not exist.
    """
    if isinstance(error, FileNotFoundError):
        return MissingFileError(
            f"Cannot read {what}: {reason_of(error)}.{near_file(error.filename)}"
        )
    sentence = f"Cannot read {what}: {reason_of(error)}."
    return ArgumentError(f"{sentence} {remedy}" if remedy else sentence)


def near_file(missing: str | PathLike[str] | None) -> str:
    """Return a sentence, to follow another, about the file that is probably meant by a path that does not exist."""
    if missing is None or isinstance(missing, Remote):
        return ""
    path = Path(missing)
    if path.is_symlink():
        return f" It is a link to {str(path.readlink())!r}, which is not there."
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except FileNotFoundError:
        return f" There is no folder {str(path.parent)!r}."
    except OSError:
        return ""
    return suggestion(names, path.name) or " Check the path."
