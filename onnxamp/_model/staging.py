"""Writing files whole or not at all, even if the writing process is killed.

Everything a result consists of is first written to a hidden folder beside it, which the process keeps locked:

==============  =====================================================================================================
``main``        the file itself. While it is here, nothing refers to the data files: renaming it is the commit.
``data/NAME``   data files, until :meth:`Stage.publish` moves them beside the result without replacing anything
``new/NAME``    a note: which file beside the result is such a data file
``old/NAME``    a note: which file beside the result is obsolete once the new result is in its place
``kept``        is there if the next run may go on with the data files, as its state file says
==============  =====================================================================================================

With a part of a state file, the folder stays where the result is not finished, and the next run goes on with the data
files in it: see :func:`staging`.

A process that is killed leaves an unlocked folder, which says what else to remove: new data files if ``main`` is still
here, old ones if it is gone. The next run to the same output cleans up.

No data file has a second hard link while a model refers to it: onnx refuses to read such files. So if the data file of
an earlier result has the name for the new one, the new one is published under a name with the token. Then a copy gets
the usual name, and a model that refers to it replaces the result (:mod:`onnxamp._model.saving`). At every moment, the
file at ``path`` refers to complete data.
"""

import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from onnxamp._base.errors import OutputError
from onnxamp._base.paths import CAN_LOCK, is_remote, lock, reason_of
from onnxamp._base.signals import cleaned_up
from onnxamp._base.state import Part

_KEPT: Final = "kept"
"""A file in the folder of a stage that an interrupted run leaves to the next one."""
_DIGITS: Final = "([0-9a-f]{8})"


@dataclass(slots=True)
class Stage:
    """A result that is being written in ``folder``, and will become ``path``."""

    path: Path
    token: str

    @property
    def folder(self) -> Path:
        """Its path until then; hidden and locked."""
        return self.path.parent / f".{self.path.name}.{self.token}.tmp"

    @property
    def main(self) -> Path:
        """The new file; it exists, empty, from the beginning."""
        return self.folder / "main"

    @property
    def data(self) -> Path:
        """Folder for data files, each under its future name beside the result."""
        return self.folder / "data"

    def place(self, name: str) -> Path:
        """Return the path at which a data file is written."""
        return self.data / name

    def publish(self, names: Sequence[str], avoid: Container[str] = ()) -> list[str]:
        """Move data files beside the result, under their names or, if one is taken or to be avoided, under names with
        the token.

        Returns:
            The final names, in order. Existing files are never replaced.

        Raises:
            OSError: the files cannot be written there.
        """
        for name in names:
            sync(self.data / name)
            (self.data / name).chmod(self._mode())
        with_token = [self.with_token(name) for name in names]
        if not self.has_links() or any(name in avoid for name in names):
            # Renaming replaces what has that name already; with the token, nothing has.
            for name, target in zip(names, with_token, strict=True):
                (self.data / name).rename(target)
            return [target.name for target in with_token]
        try:
            return self._named([self.path.parent / name for name in names], names)
        except FileExistsError:
            self.withdraw()
            return self._named(with_token, names)

    def _named(self, targets: Sequence[Path], names: Sequence[str]) -> list[str]:
        """Publish data files as ``targets``, all or none; raises FileExistsError if a name is taken."""
        # Links first: unlike renaming, linking fails where a file has that name.
        for target, name in zip(targets, names, strict=True):
            target.hardlink_to(self.data / name)
        for target, name in zip(targets, names, strict=True):
            self._note("new", target)
            (self.data / name).unlink()
        return [target.name for target in targets]

    def _note(self, kind: str, file: Path) -> None:
        """Note a file by name and identity: by the time the note is read, another file may have that name."""
        (self.folder / kind / file.name).write_text(identity_of(file))

    def _is_noted(self, kind: str, file: Path) -> bool:
        """Return whether a note refers to a file that exists."""
        note = self.folder / kind / file.name
        try:
            return note.read_text() == identity_of(file)
        except FileNotFoundError:
            return False

    @contextmanager
    def shown(self) -> Iterator[Path]:
        """Yield the new file under another name beside its data files; all are discarded if the block raises."""
        shown = self._shown
        try:
            shown.hardlink_to(self.main)
        except OSError:
            shutil.copyfile(self.main, shown)
        try:
            yield shown
        except Exception:
            self.discard()
            raise
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
        sync(self.main)
        self.main.chmod(self._mode())
        with _locked(self.path.parent, wait=True):
            files = list(outdated())
            # Notes first: if this process dies after the replacement, the next one removes what they name.
            for file in files:
                self._note("old", file)
            self.main.replace(self.path)
            for file in files:
                file.unlink(missing_ok=True)
                # Another process may give its own file this name from now on.
                (self.folder / "old" / file.name).unlink()
        sync(self.path.parent)

    def identity(self) -> str:
        """Return the identity of the new file, which it keeps in its place."""
        return identity_of(self.main)

    def withdraw(self) -> None:
        """Remove obsolete files beside the result: new data files before the commit, old ones after it."""
        beside = self.path.parent
        is_open = self.main.exists()
        kind = "new" if is_open else "old"
        for note in _listed(self.folder / kind):
            if self._is_noted(kind, beside / note.name):
                (beside / note.name).unlink()
        if not is_open:
            return
        for data in _listed(self.data):
            for file in (beside / data.name, self.with_token(data.name)):
                if _is_same(file, data):
                    file.unlink()
        for file in _listed(beside):
            if self._moved(file):
                file.unlink()

    def recall(self) -> None:
        """Move data files back from beside the result, so that they can be published again."""
        for file in _listed(self.path.parent):
            moved = self._moved(file)
            here = self.data / (moved or file.name)
            is_twice = _is_same(file, here)
            if is_twice or file == self._shown:
                file.unlink()
            elif moved or self._is_noted("new", file):
                file.replace(here)
            else:
                continue
            (self.folder / "new" / file.name).unlink(missing_ok=True)

    def _moved(self, file: Path) -> str:
        """Return the intended name of a data file that was published under a name with the token; "" for
        other files.
        """
        rest = file.name.removeprefix(f"{self.path.name}.{self.token}")
        # Data files have ".data", "-00001-of-00003.data" or "_data" there, depending on the style of their names.
        is_data = rest != file.name and rest[:1] in tuple("-._")
        return f"{self.path.name}{rest}" if is_data else ""

    @property
    def is_kept(self) -> bool:
        """Whether the next run may continue with the files that were written."""
        return self.main.exists() and (self.folder / _KEPT).exists()

    def discard(self) -> None:
        """Discard the written files, so that no later run continues with them."""
        (self.folder / _KEPT).unlink(missing_ok=True)

    def has_links(self) -> bool:
        """Return whether hard links work here."""
        try:
            (self.folder / "link").hardlink_to(self.main)
            (self.folder / "link").unlink()
        except OSError:
            return False
        return True

    @property
    def _shown(self) -> Path:
        return self.with_token(f"{self.path.name}.onnx")

    def with_token(self, name: str) -> Path:
        """Return the path with the token: ``model.onnx.0f1e2d3c.data`` for ``model.onnx.data``."""
        base = self.path.name
        return self.path.with_name(f"{base}.{self.token}{name.removeprefix(base)}")

    def _mode(self) -> int:
        """Return the permissions of the file to be replaced; if there is none, the default for new files."""
        return (self.path if self.path.exists() else self.main).stat().st_mode & 0o777


@contextmanager
def staging(path: Path, kept: Part | None = None) -> Iterator[Stage]:
    """Yield a stage for what will become ``path``. Unless :meth:`Stage.commit` is reached, nothing changes.

    With ``kept``, which remembers the stage, data files stay in it unless :meth:`Stage.commit` or :meth:`Stage.discard`
    is reached, until the next stage of ``path``: that with the same ``kept`` is the same one.

    Raises:
        OutputError: ``path`` is something other than a file. OSError: nothing can be written there.
    """
    if path.exists() and not path.is_file():
        raise OutputError(
            f"Cannot write {str(path)!r}: it exists, and is not a regular file."
        )
    while True:
        stage = _left(path, kept) or Stage(path, os.urandom(4).hex())
        with cleaned_up(partial(_leave, stage, kept)):
            stage.folder.mkdir(mode=0o700, exist_ok=kept is not None)
            with _locked(stage.folder, wait=True):
                # Another process may have removed it before it was locked.
                if not stage.folder.exists():
                    continue
                sweep(path)
                stage.main.touch()
                for kind in ("data", "new", "old"):
                    (stage.folder / kind).mkdir(exist_ok=kept is not None)
                if kept is not None:
                    (stage.folder / _KEPT).touch()
                    kept[_key(path)] = stage.token
                    stage.recall()
                yield stage
                return


def _leave(stage: Stage, kept: Part | None) -> None:
    """Remove all remaining files except those that the next stage continues with."""
    if kept is not None and stage.is_kept:
        stage.recall()
    else:
        _clear(stage)


def _key(path: Path) -> str:
    """Return the key of a result's stage in a state."""
    return f"stage of {path.name}"


def _left(path: Path, kept: Part | None) -> Stage | None:
    """Return the stage that an interrupted run left; None if there is none, or it is finished."""
    token = None if kept is None else kept.get(_key(path))
    stage = Stage(path, token or "")
    return stage if token and stage.is_kept else None


def sweep(path: Path) -> None:
    """Clean up after processes that were killed while they wrote to ``path``."""
    pattern = re.compile(re.escape(f".{path.name}.") + _DIGITS + re.escape(".tmp"))
    if not CAN_LOCK:  # nothing shows that the process is dead
        return
    for entry in _listed(path.parent):
        match = pattern.fullmatch(entry.name)
        if match is not None and entry.is_dir() and not entry.is_symlink():
            with suppress(OSError), _locked(entry, wait=False):
                _clear(Stage(path, match[1]))


def identity_of(file: Path) -> str:
    """Return the identity of a file, which survives renaming.

    The time of the last change belongs to it, because a new file often gets the number of one that was just removed.
    """
    status = file.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_mtime_ns}"


def _is_same(one: Path, other: Path) -> bool:
    """Return whether both names belong to one file; False if a file is missing, as it may be from one moment to the
    next.
    """
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def _clear(stage: Stage) -> None:
    stage.withdraw()
    if stage.main.exists():
        # Without it, notes of old files would be mistaken for those of a finished result.
        shutil.rmtree(stage.folder / "old", ignore_errors=True)
    shutil.rmtree(stage.folder, ignore_errors=True)


def _listed(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if it cannot be listed, though it may still be writable."""
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


def sync(path: Path) -> None:
    """Flush a file or, if the system can, a folder, so that it survives a crash of the machine."""
    is_folder = path.is_dir()
    if is_folder and not CAN_LOCK:  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(slots=True)
class RemoteStage(Stage):
    """A result at a URL: data files are written directly, and the model under another name beside its own."""

    places: dict[str, Path] = field(default_factory=dict)
    """Data file -> where it is written."""
    kept: Part | None = None
    """The state that records where data files are written, so that the next run can continue."""
    is_committed: bool = False

    @property
    def main(self) -> Path:
        """The new model, until it is in its place."""
        return self._shown

    def place(self, name: str) -> Path:
        """Return the path at which a data file is written: its own name or, if that is taken, one with the token."""
        if name not in self.places:
            usual = self.path.parent / name
            key = f"place of {name}"
            known = None if self.kept is None else self.kept.get(key)
            is_taken = usual.exists() if known is None else known != usual.name
            self.places[name] = self.with_token(name) if is_taken else usual
            if self.kept is not None and known is None:
                self.kept[key] = self.places[name].name
        return self.places[name]

    def publish(self, names: Sequence[str], avoid: Container[str] = ()) -> list[str]:
        """Return the names of the data files. Models there that refer to missing files are not searched for."""
        del avoid
        return [self.place(name).name for name in names]

    @contextmanager
    def shown(self) -> Iterator[Path]:
        """Yield the new model, where its data files are; it is discarded if the block raises."""
        try:
            yield self.main
        except Exception:
            self.discard()
            raise

    def commit(self, outdated: Callable[[], Iterable[Path]] = tuple) -> None:
        """Publish the new model, and remove files that only the present one refers to.

        Raises:
            OSError: it cannot be put there.
        """
        files = list(outdated())
        self.discard()
        self.main.replace(self.path)
        self.is_committed = True
        for file in files:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def discard(self) -> None:
        """Discard the written files, so that no later run continues with them."""
        if self.kept is not None:
            self.kept[_key(self.path)] = None
            for name in self.places:
                self.kept[f"place of {name}"] = None
        self.kept = None

    def identity(self) -> str:
        """Do nothing, because data files are not renamed here."""
        return ""

    def clear(self) -> None:
        """Remove the files that were written, unless they are published or the next run continues with them."""
        if self.is_committed:
            return
        files = [self.main]
        if self.kept is None:
            files += self.places.values()
        for file in files:
            with suppress(OSError):
                file.unlink(missing_ok=True)


@contextmanager
def remote_staging(path: Path, kept: Part | None = None) -> Iterator[RemoteStage]:
    """Yield a stage for what will become ``path``. Unless :meth:`RemoteStage.commit` is reached, nothing changes.

    With ``kept``, data files stay until that or :meth:`RemoteStage.discard` is reached; the next stage has them again.

    Raises:
        OutputError: ``path`` is a folder.
    """
    if path.is_dir():
        raise OutputError(f"Cannot write {str(path)!r}: it is a folder.")
    known = None if kept is None else kept.get(_key(path))
    stage = RemoteStage(path, known or os.urandom(4).hex(), kept=kept)
    if kept is not None:
        kept[_key(path)] = stage.token
    with cleaned_up(stage.clear):
        yield stage


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; through a symbolic link, its target is replaced.

    Raises:
        OutputError: it cannot be written; the previous file is untouched.
    """
    try:
        if is_remote(path):
            path.write_bytes(data)
            return
        with staging(path.resolve() if path.is_symlink() else path) as stage:
            stage.main.write_bytes(data)
            stage.commit()
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: Exception) -> OutputError:
    """Return the error to raise when ``error`` kept a file from being written."""
    if not is_remote(path) and not path.parent.is_dir():
        return OutputError(
            f"Cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it."
        )
    return OutputError(
        f"Cannot write {str(path)!r}: {reason_of(error)}. The previous contents are untouched."
    )
