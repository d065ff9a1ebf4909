"""Samples of an iterator, stored for another pass: in memory, and beyond some megabytes in files."""

import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, overload

import numpy as np

from onnxamp._errors import OutputError
from onnxamp._workers.executor import temporary_path
from onnxamp._workers.signals import when_gone

if TYPE_CHECKING:
    from onnxamp._runtime.values import Feed, Feeds


ROOM: Final = 64 << 20
"""Bytes of samples that are kept in memory."""


class Spool(Sequence[Callable[[], "Feeds"]]):
    """The readers of the samples of an iterator. Asking for a sample consumes those before it; asking for
    their number consumes all.

    Args:
        source: yields the samples, once.
        origin: where they come from.
        expected: their expected number; 0 if unknown.
        room: bytes to keep in memory.
    """

    def __init__(
        self,
        source: "Iterator[Feeds]",
        origin: str,
        expected: int = 0,
        room: int = ROOM,
    ) -> None:
        self.origin, self.expected = origin, expected
        self._source: Iterator[Feeds] | None = source
        self._room = room
        self._readers: list[Callable[[], Feeds]] = []
        self._first = 1
        """The first sample that is not forgotten, apart from sample 0."""
        self._folder: Path | None = None

    @property
    def is_ended(self) -> bool:
        """Whether all samples were read, so that their number is known."""
        return self._source is None

    @property
    def taken(self) -> int:
        """Their number."""
        return len(self._readers)

    def has(self, number: int) -> bool:
        """Return whether there is a sample of that number.

        Raises:
            OutputError: the temporary folder is full. Others as the iterator.
        """
        while self._source is not None and len(self._readers) <= number:
            sample = next(self._source, None)
            if sample is None:
                self._source = None
            else:
                self._readers.append(self._kept(sample))
        return number < len(self._readers)

    @overload
    def __getitem__(self, index: int) -> "Callable[[], Feeds]": ...
    @overload
    def __getitem__(self, index: slice) -> "Sequence[Callable[[], Feeds]]": ...
    def __getitem__(
        self, index: int | slice
    ) -> "Callable[[], Feeds] | Sequence[Callable[[], Feeds]]":
        if isinstance(index, slice) or index < 0:
            len(self)
        else:
            self.has(index)
        return self._readers[index]

    def __len__(self) -> int:
        while self.has(len(self._readers)):
            pass
        return len(self._readers)

    def forget(self, number: int) -> None:
        """Forget the samples before a number, except the first one; they cannot be read again."""
        for at in range(self._first, min(number, len(self._readers))):
            reader, self._readers[at] = self._readers[at], _forgotten
            if isinstance(reader, partial) and reader.func is read_spooled:
                reader.args[0].unlink(missing_ok=True)
            else:
                self._room += _size(reader())
        self._first = max(self._first, min(number, len(self._readers)))

    def _kept(self, sample: "Feeds") -> "Callable[[], Feeds]":
        """Return a reader of a sample; arrays are copied, because the iterator may reuse their memory."""
        size = _size(sample)
        if size <= self._room:
            self._room -= size
            return partial(dict, {name: _copied(feed) for name, feed in sample.items()})
        if self._folder is None:
            self._folder = temporary_path()
            when_gone(self, partial(shutil.rmtree, self._folder, ignore_errors=True))
            self._folder.mkdir(mode=0o700)
        path = self._folder / f"{len(self._readers)}.sample"
        try:
            with path.open("wb") as stream:
                pickle.dump(dict(sample), stream, protocol=5)
        except OSError as error:
            raise OutputError(
                f"Samples of a {self.origin} do not fit into {str(self._folder)!r}: {error.strerror or error}. Take"
                " fewer (itertools.islice), or set TMPDIR to a folder with more room."
            ) from error
        return partial(read_spooled, path)


def read_spooled(path: Path) -> "Feeds":
    """Return a sample of a spool of any process of this machine."""
    with path.open("rb") as stream:
        sample: Feeds = pickle.load(stream)  # noqa: S301 - the file is our own
    return sample


def _forgotten() -> "Feeds":
    raise AssertionError("A sample was forgotten, but is needed.")


def _size(sample: "Feeds") -> int:
    parts = (
        part
        for feed in sample.values()
        for part in (feed if isinstance(feed, list) else [feed])
    )
    return sum(part.nbytes for part in parts if isinstance(part, np.ndarray))


def _copied(feed: "Feed") -> "Feed":
    if isinstance(feed, list):
        return [_copied(part) for part in feed]
    return feed.copy() if isinstance(feed, np.ndarray) else feed
