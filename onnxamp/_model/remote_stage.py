"""Writing models behind URLs, whole or not at all: what :mod:`onnxamp._model.staging` is for files here.

Object storage knows neither folders nor locks nor renaming, but a file is there only when its upload is complete.
So data files go to their place at once, under names that nothing refers to: the usual ones where they are free, else
others with a token. The model is written under another name, and moved over the old one at last: that is the commit.
Where it is not reached, what was written is removed; a process that is killed leaves files with its token, which
nothing refers to.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from onnxamp._errors import OutputError
from onnxamp._state.state import Part


@dataclass(slots=True)
class RemoteStage:
    """A result that is being written, and will become ``path``."""

    path: Path
    token: str = field(default_factory=lambda: token_hex(4))
    places: dict[str, Path] = field(default_factory=dict)
    """Data file -> where it is written."""
    kept: Part | None = None
    """What remembers where data files are written, so that the next run goes on with them."""
    is_committed: bool = False

    @property
    def main(self) -> Path:
        """The new model, until it is in its place."""
        return self._with_token(f"{self.path.name}.onnx")

    def place(self, name: str) -> Path:
        """Where a data file is written: under its name, or if that is taken with the token in it."""
        if name not in self.places:
            usual, key = self.path.parent / name, f"place of {name}"
            known = None if self.kept is None else self.kept.get(key)
            taken = usual.exists() if known is None else known != usual.name
            self.places[name] = self._with_token(name) if taken else usual
            if self.kept is not None and known is None:
                self.kept[key] = self.places[name].name
        return self.places[name]

    def publish(self, names: Sequence[str], avoid: Container[str] = ()) -> list[str]:
        """The names that data files got; nobody looks there for models that refer to files that do not exist."""
        del avoid
        return [self.place(name).name for name in names]

    @contextmanager
    def shown(self) -> Iterator[Path]:
        """The new model, where its data files are."""
        yield self.main

    def commit(self, outdated: Callable[[], Iterable[Path]] = tuple) -> None:
        """Put the new model in its place, and remove what only the present one refers to.

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
        """Let nobody go on with what was written: it is no good, or in its place at once."""
        if self.kept is not None:
            for key in [f"stage of {self.path.name}", *(f"place of {name}" for name in self.places)]:
                self.kept[key] = None
        self.kept = None

    def identity(self) -> str:
        """Nothing: nobody renames data files here."""
        return ""

    def clear(self) -> None:
        """Remove what was written, unless it is in its place, or the next run goes on with it."""
        if not self.is_committed:
            for file in (self.main, *(self.places.values() if self.kept is None else ())):
                with suppress(OSError):
                    file.unlink(missing_ok=True)

    def _with_token(self, name: str) -> Path:
        return self.path.parent / f"{self.path.name}.{self.token}{name.removeprefix(self.path.name)}"


@contextmanager
def remote_staging(path: Path, kept: Part | None = None) -> Iterator[RemoteStage]:
    """A stage for what will become ``path``. Unless :meth:`RemoteStage.commit` is reached, nothing changes.

    With ``kept``, data files stay until that or :meth:`RemoteStage.discard` is reached; the next stage has them again.

    Raises:
        OutputError: ``path`` is a folder.
    """
    if path.is_dir():
        raise OutputError(f"Cannot write {str(path)!r}: it is a folder.")
    stage = RemoteStage(path, kept=kept)
    if kept is not None:
        stage.token = kept.get(f"stage of {path.name}") or stage.token
        kept[f"stage of {path.name}"] = stage.token
    try:
        yield stage
    finally:
        stage.clear()
