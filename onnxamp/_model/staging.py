"""Writing files whole or not at all, even if the writing process is killed.

Everything a result consists of is first written to a hidden folder beside it, which the process keeps locked:

==============  =====================================================================================================
``main``        the file itself. While it is here, nothing refers to the data files: renaming it is the commit.
``data/NAME``   data files, until :meth:`Stage.publish` moves them beside the result without replacing anything
``new/NAME``    a note: which file beside the result is such a data file
``old/NAME``    a note: which file beside the result is obsolete once the new result is in its place
==============  =====================================================================================================

A process that is killed leaves an unlocked folder, which says what else to remove: new data files if ``main`` is still
here, old ones if it is gone. The next run to the same output cleans up.

No data file has a second hard link while a model refers to it: onnx refuses to read such files. So where the data file
of an earlier result has the name that a new one should get, the new one is put in place under a name with the token.
Then a copy gets the usual name, and a model that refers to it takes the place (:func:`rename_data`): at every moment
the file at ``path`` refers to data that are whole.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Final

from onnxamp._errors import OutputError
from onnxamp._paths.locks import CAN_LOCK, lock

_DIGITS: Final = "([0-9a-f]{8})"
_PIECE: Final = 1 << 26
"""Bytes that are copied at a time."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A result that is being written in ``folder``, and will become ``path``."""

    path: Path
    folder: Path
    token: str

    @property
    def main(self) -> Path:
        """The new file; it exists, empty, from the beginning."""
        return self.folder / "main"

    @property
    def data(self) -> Path:
        """Folder for data files, each under the name it should get beside the result."""
        return self.folder / "data"

    def place(self, name: str) -> Path:
        """Where a data file is written."""
        return self.data / name

    def publish(self, names: Sequence[str]) -> list[str]:
        """Move data files beside the result, under their names or, if one is taken, under names with the token.

        Returns:
            The final names, in order. Existing files are never replaced.

        Raises:
            OSError: the files cannot be written there.
        """
        for name in names:
            _sync(self.data / name)
            (self.data / name).chmod(self._mode())
        if not self.has_links():  # the token makes sure that nothing is replaced
            return [(self.data / name).rename(self._with_token(name)).name for name in names]
        try:
            return self._named([self.path.parent / name for name in names], names)
        except FileExistsError:
            self.withdraw()
            return self._named([self._with_token(name) for name in names], names)

    def _named(self, targets: Sequence[Path], names: Sequence[str]) -> list[str]:
        for target, name in zip(targets, names, strict=True):
            target.hardlink_to(self.data / name)
        for target, name in zip(targets, names, strict=True):
            self._note("new", target)
            (self.data / name).unlink()
        return [target.name for target in targets]

    def _note(self, kind: str, file: Path) -> None:
        """Note a file by name and identity: by the time the note is read, another file may have that name."""
        (self.folder / kind / file.name).write_text(_identity(file))

    @contextmanager
    def shown(self) -> Iterator[Path]:
        """The new file under another name beside the result, where its data files are."""
        shown = self._with_token(f"{self.path.name}.onnx")
        try:
            shown.hardlink_to(self.main)
        except OSError:
            shutil.copyfile(self.main, shown)
        try:
            yield shown
        finally:
            shown.unlink(missing_ok=True)

    def commit(self, outdated: Callable[[], Iterable[Path]] = tuple) -> None:
        """Put the new file in its place.

        Args:
            outdated: returns the files to remove, which only the present result refers to. It is called while no other
                process can replace that.

        Raises:
            OSError: the file cannot be put there.
        """
        _sync(self.main)
        self.main.chmod(self._mode())
        with _locked(self.path.parent, wait=True):
            files = list(outdated())
            for file in files:
                self._note("old", file)
            self.main.replace(self.path)
            for file in files:
                file.unlink(missing_ok=True)
        _sync(self.path.parent)

    def identity(self) -> str:
        """The identity of the new file, which it keeps in its place."""
        return _identity(self.main)

    def withdraw(self) -> None:
        """Remove obsolete files beside the result: new data files before the commit, old ones after it."""
        beside, is_open = self.path.parent, self.main.exists()
        for note in _listed(self.folder / ("new" if is_open else "old")):
            file = beside / note.name
            if file.exists() and _identity(file) == note.read_text():
                file.unlink()
        if not is_open:
            return
        for data in _listed(self.data):
            for file in (beside / data.name, self._with_token(data.name)):
                if file.exists() and file.samefile(data):
                    file.unlink()
        moved = re.compile(re.escape(f"{self.path.name}.{self.token}") + "[-._].*")
        for file in _listed(beside):
            if moved.fullmatch(file.name):
                file.unlink()

    def has_links(self) -> bool:
        """Whether files can have several names here."""
        try:
            (self.folder / "link").hardlink_to(self.main)
            (self.folder / "link").unlink()
        except OSError:
            return False
        return True

    def _with_token(self, name: str) -> Path:
        """``model.onnx.0f1e2d3c.data`` for ``model.onnx.data``."""
        return self.path.parent / f"{self.path.name}.{self.token}{name.removeprefix(self.path.name)}"

    def _mode(self) -> int:
        """Permissions of the file to be replaced; if there is none, the default for new files."""
        return (self.path if self.path.exists() else self.main).stat().st_mode & 0o777


@contextmanager
def staging(path: Path) -> Iterator[Stage]:
    """A stage for what will become ``path``. Unless :meth:`Stage.commit` is reached, nothing changes.

    Raises:
        OutputError: ``path`` is something other than a file. OSError: nothing can be written there.
    """
    if path.exists() and not path.is_file():
        raise OutputError(f"Cannot write {str(path)!r}: it exists, and is not a regular file.")
    sweep(path)
    while True:
        token = token_hex(4)
        folder = path.parent / f".{path.name}.{token}.tmp"
        folder.mkdir(mode=0o700)
        try:
            with _locked(folder, wait=True):
                if not folder.exists():  # another process took it for a leftover before it was locked
                    continue
                stage = Stage(path, folder, token)
                stage.main.touch()
                for kind in ("data", "new", "old"):
                    (folder / kind).mkdir()
                yield stage
                return
        finally:
            _clear(Stage(path, folder, token))


def rename_data(path: Path, identity: str, names: Mapping[str, str], main: bytes) -> bool:
    """Give the data files of a result other names, and put a model in its place that refers to these.

    The data are copied, which costs neither time nor room where the file system can share them. Nothing is done where a
    name is taken, or the result was replaced meanwhile.

    Args:
        path: the result.
        identity: of the result; see :meth:`Stage.identity`.
        names: name of a data file beside the result -> its new name.
        main: the model that refers to the new names.

    Returns:
        Whether the names are as wished.

    Raises:
        OSError: something cannot be written. The result stays as it was.
    """
    beside, wanted = path.parent, list(names.values())

    def published() -> list[Path]:
        if _identity(path) != identity or stage.publish(wanted) != wanted:
            raise _SupersededError
        return [beside / name for name in names]

    if any((beside / name).exists() for name in wanted):
        return False
    try:
        with staging(path) as stage:
            if not stage.has_links():  # there every data file has the token in its name
                return False
            for old, new in names.items():
                _copy(beside / old, stage.data / new)
            stage.main.write_bytes(main)
            stage.commit(published)
    except (_SupersededError, FileNotFoundError):
        return False
    return True


class _SupersededError(Exception):
    """Another process replaced the result, or took a name."""


def _copy(source: Path, target: Path) -> None:
    """Copy a file, within the file system if that can."""
    with source.open("rb") as read, target.open("wb") as written:
        try:
            while os.copy_file_range(read.fileno(), written.fileno(), _PIECE):
                pass
        except (AttributeError, OSError):  # another system, or another file system
            read.seek(0)
            written.truncate(0)
            shutil.copyfileobj(read, written, _PIECE)


def sweep(path: Path) -> None:
    """Clean up after processes that were killed while they wrote to ``path``."""
    pattern = re.compile(re.escape(f".{path.name}.") + _DIGITS + re.escape(".tmp"))
    for entry in _listed(path.parent) if CAN_LOCK else []:  # else nobody can tell that the process is dead
        found = pattern.fullmatch(entry.name)
        if found is not None and entry.is_dir() and not entry.is_symlink():
            with suppress(OSError), _locked(entry, wait=False):
                _clear(Stage(path, entry, found[1]))


def _identity(file: Path) -> str:
    status = file.stat()
    return f"{status.st_dev} {status.st_ino}"


def _clear(stage: Stage) -> None:
    stage.withdraw()
    shutil.rmtree(stage.folder, ignore_errors=True)


def _listed(folder: Path) -> list[Path]:
    """The entries of a folder; none if it cannot be listed, though it may still be writable."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder; the lock dies with the process. File systems without locks: nothing is held.

    Args:
        folder: what to lock.
        wait: wait until the lock is free.

    Raises:
        OSError: without ``wait``: another process holds the lock, or locks do not work here.
    """
    handle = None
    try:
        try:
            if CAN_LOCK:
                handle = os.open(folder, os.O_RDONLY)
                lock(handle, wait=wait)
        except OSError:
            if not wait:
                raise
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _sync(path: Path) -> None:
    """Flush a file or, if the system can, a folder, so that it survives a crash of the machine."""
    is_folder = path.is_dir()
    if is_folder and not CAN_LOCK:  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
