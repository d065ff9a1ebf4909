"""A path on another file system, which fsspec opens."""

import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from errno import EACCES, EINVAL, EIO, EISDIR, ENOENT
from functools import cache, partial
from io import TextIOWrapper
from os import PathLike
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, Final, Self, TypeVar, cast

import fsspec

from onnxamp._base.errors import ArgumentError, ExternalDataError, MissingPackageError
from onnxamp._base.paths import URL, Remote, reason_of

_LOCAL: Final[type[Path]] = type(Path())
if TYPE_CHECKING:
    _Base = Path
else:
    _Base = _LOCAL

_BUCKETS: Final = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"))
"""Schemes of object storage."""

_COMMITS: Final = _BUCKETS | {"local"}
"""Schemes whose files stay invisible until they are committed: uploads in parts, and temporary files. With other
schemes, a file is first written under another name.
"""

_NUMBERS: Final = {
    FileNotFoundError: ENOENT,
    PermissionError: EACCES,
    IsADirectoryError: EISDIR,
}
"""Errors of file systems that have no error number."""

_PACKAGES: Final = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hdfs": "pyarrow",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "oci": "ocifs",
    "hf": "huggingface_hub",
}
"""Scheme -> the package that provides its file system (fsspec, "Other Known Implementations")."""

_TIMES: Final = ("mtime", "LastModified", "updated", "created")
"""Names of the time of the last change in different file systems."""

T = TypeVar("T")


def _called(function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a function of a file system.

    Raises:
        OSError: the function failed; the message says why.
    """
    try:
        return function(*args, **keywords)
    except OSError as error:
        if error.strerror:
            raise
        numbers = [n for kind, n in _NUMBERS.items() if isinstance(error, kind)]
        number = numbers[0] if numbers else EIO
        message = " ".join(str(error).split())
        # Many file systems raise these errors with nothing but the path.
        is_path = bool(numbers) and " " not in message
        raise OSError(number, os.strerror(number) if is_path else message) from error
    except Exception as error:
        # Each file system is a package of its own, with errors of its own.
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise OSError(EIO, message) from error


def _question(name: str) -> Callable[..., bool]:
    """Return a method of paths that asks a yes/no question of the file system."""

    def ask(self: "RemotePath", *, follow_symlinks: bool = True) -> bool:
        del follow_symlinks
        return bool(self._look(name))

    return ask


class RemotePath(Remote, _Base):
    """A file or a folder at a URL of fsspec. Its text is the URL.

    Its parts are "/", the scheme (``s3:``, or ``memory::`` if nothing stands between its second and third slash), and
    the names. All operations of pure paths therefore work without the file system.
    """

    __slots__ = ()

    @classmethod
    def of(cls, url: str) -> Self:
        """Return the path of a URL.

        Raises:
            ArgumentError, MissingPackageError: as for :func:`as_path`.
        """
        match = URL.fullmatch(url)
        assert match is not None
        scheme = match[1].lower()
        rest = match[2]
        if "::" in url:
            raise ArgumentError(
                f"{url!r} is a chain of URLs: name a file on a single file system."
            )
        file_system(scheme)
        mark = "::" if rest.startswith("/") else ":"
        return cls("/", f"{scheme}{mark}", rest.lstrip("/"))

    @property
    def _scheme(self) -> str:
        return self.parts[1].rstrip(":") if len(self.parts) > 1 else ""

    def __str__(self) -> str:
        parts = self.parts
        if not self.root:
            return "/".join(parts)
        if len(parts) < 2 or not parts[1].endswith(":"):
            return "/" + "/".join(parts[1:])
        start = f"{self._scheme}://" + ("/" if parts[1].endswith("::") else "")
        return start + "/".join(parts[2:])

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def as_posix(self) -> str:
        """Return the URL."""
        return str(self)

    @property
    def file_system(self) -> Any:
        """The file system of the path."""
        return file_system(self._scheme)

    @property
    def key(self) -> str:
        """The name of the path in its file system."""
        key: str = self.file_system._strip_protocol(str(self))
        return key

    def _ask(self, name: str, *args: Any, **keywords: Any) -> Any:
        """Call the file system's method of that name with the key; raise the errors of :func:`_called`."""

        def ask() -> Any:
            return getattr(self.file_system, name)(self.key, *args, **keywords)

        return _called(ask)

    def _look(self, name: str, **keywords: Any) -> Any:
        """Call a method as :meth:`_ask` does, for questions that have an answer even if there is no file."""
        try:
            return self._ask(name, **keywords)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ArgumentError(
                f"Cannot look up {str(self)!r}: {str(error.strerror).rstrip('.')}. Check the address, the network and"
                " the credentials."
            ) from error

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size, kind and time.

        Raises:
            OSError: there is no file, or its status cannot be read.
        """
        del follow_symlinks
        return _called(_status, self._ask("info"))

    exists = _question("exists")
    is_file = _question("isfile")
    is_dir = _question("isdir")
    """Return whether it is a folder; on object storage, whether it contains anything."""

    def is_symlink(self) -> bool:
        """Return False: symbolic links are not supported."""
        return False

    def samefile(self, other_path: str | PathLike[str]) -> bool:
        """Return whether it is the same path."""
        return (
            isinstance(other_path, RemotePath)
            and self.resolve() == other_path.resolve()
        )

    def absolute(self) -> Self:
        """Return the path itself, which is absolute."""
        return self

    def resolve(self, strict: bool = False) -> Self:
        """Return the path without ".."; it does not leave the file system."""
        del strict
        return type(self)(posixpath.normpath("/" + "/".join(self.parts[1:])))

    def iterdir(self) -> Iterator[Self]:  # type: ignore[override] # a generator in Path
        """Yield the contents of a folder."""
        # Some file systems list a folder among its own contents.
        own = self.key.rstrip("/")
        names = self._look("ls", detail=False)
        within = [name.rstrip("/") for name in names]
        return iter([self / name.rpartition("/")[2] for name in within if name != own])

    def mkdir(
        self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False
    ) -> None:
        """Create a folder, except in object storage, which has none: there it would be a bucket."""
        del mode, parents
        if self._scheme not in _BUCKETS:
            self._ask("makedirs", exist_ok=exist_ok)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            self._ask("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def replace(self, target: str | PathLike[str]) -> Self:
        """Move a file to another path of the same file system."""
        assert isinstance(target, RemotePath)
        self._ask("mv", target.key)
        return type(self)(*target.parts)

    def open(  # type: ignore[override] # one signature for all modes
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """Open the file for reading; use :func:`writing` to write."""
        del buffering
        if not set(mode) <= set("rbt"):
            raise OSError(EINVAL, f"It cannot be opened with mode {mode!r}")
        file = self._ask("open", "rb")
        return file if "b" in mode else TextIOWrapper(file, encoding, errors, newline)

    def read_bytes(self) -> bytes:
        """Return all bytes."""
        data: bytes = self._ask("cat_file")
        return data

    def read_text(
        self,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> str:
        """Return all text, decoded as UTF-8 by default, with the ends of lines that Python's own files give."""
        text = self.read_bytes().decode(encoding or "utf-8", errors or "strict")
        if newline is None:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text

    def read_range(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from byte ``start``; fewer if the file ends before.

        Raises:
            ExternalDataError: they cannot be read.
        """
        if not size:
            return b""
        try:
            data: bytes = self._ask("cat_file", start=start, end=start + size)
        except OSError as error:
            raise ExternalDataError(
                f"Cannot read {size} bytes at {start} of {str(self)!r}: {str(error.strerror).rstrip('.')}."
            ) from error
        return data

    def write_bytes(self, data: Any) -> int:
        """Write a file completely or not at all."""
        with self.writing() as file:
            file.write(data)
        return len(data)

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """Open the file for sequential writing; it appears once it is complete.

        Raises:
            OSError: it cannot be written.
        """
        self.parent.mkdir(parents=True, exist_ok=True)
        commits = self._scheme in _COMMITS
        place = self if commits else self.with_name(f"{self.name}.{token_hex(4)}.tmp")
        file = place._ask("open", "wb", **({"autocommit": False} if commits else {}))
        try:
            yield cast(IO[bytes], SimpleNamespace(write=partial(_called, file.write)))
            # Closing sends the rest of the file; with autocommit=False, only the commit makes it visible.
            _called(file.close)
            if commits:
                _called(file.commit)
            else:
                place.replace(self)
        except BaseException:
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                file.discard() if commits else place.unlink()
            raise


def _status(info: Mapping[str, Any]) -> os.stat_result:
    """Return the status of a file from its description by the file system."""
    mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
    when: Any = next(filter(None, map(info.get, _TIMES)), 0)
    # Texts have no common form. Without a time, a changed file is recognized by its size.
    if isinstance(when, str):
        when = 0
    seconds = when.timestamp() if isinstance(when, datetime) else float(when)
    # st_mode, st_ino, st_dev, st_nlink, st_uid, st_gid and st_size, then the three times in three units.
    facts = (mode | 0o644, 0, 0, 1, 0, 0, int(info["size"] or 0))
    whole = [int(seconds)] * 3
    nanoseconds = [int(seconds * 1e9)] * 3
    return os.stat_result((*facts, *whole, *[seconds] * 3, *nanoseconds))


@cache
def file_system(scheme: str) -> Any:
    """Return the file system of a scheme, set up according to the configuration of fsspec and its package.

    Raises:
        ArgumentError: there is no such file system. MissingPackageError: its package is not installed.
    """
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        needed = str(error).rstrip(".")
        package = _PACKAGES.get(scheme)
        how = f"install it with 'pip install {package}'" if package else "install it"
        raise MissingPackageError(
            f"{scheme}://... needs a package that is not installed ({needed}): {how}."
        ) from None
    except ValueError as error:
        if scheme in fsspec.available_protocols():
            raise _unusable(scheme, error) from error
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise ArgumentError(
            f"No file system is known for {scheme}://...: choose one of {known}."
        ) from None
    except Exception as error:  # each file system is a package of its own
        raise _unusable(scheme, error) from error


def _unusable(scheme: str, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"The file system of {scheme}://... cannot be used with its present settings ({reason_of(error)}): set it up in"
        " fsspec's configuration, or copy the file here."
    )
