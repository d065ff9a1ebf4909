"""Samples that come out of an iterator: each is taken when it is needed, and kept for as long as it may be again.

What fits stays in memory, and what does not goes to files of a temporary folder, so that any number of samples takes as
much memory as a few.
"""

import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, overload

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from onnxamp._errors import OutputError
from onnxamp._model.external_data import external_tensor
from onnxamp._model.model import Model
from onnxamp._model.protos import copied, copy_without, stored_bytes, tensors_of
from onnxamp._model.weights import embed
from onnxamp._workers.signals import when_gone

if TYPE_CHECKING:
    from onnxamp._runtime.values import Feed

ROOM: Final = 64 << 20
"""Bytes of samples that are kept in memory."""


class Spool(Sequence[Callable[[], "Mapping[str, Feed]"]]):
    """What reads each sample of an iterator. To ask for one takes those before it out of the iterator, too; to ask for
    their number takes all.

    Args:
        source: makes the samples, once.
        origin: where they come from.
        expected: how many there may be; 0 if nothing is known.
        room: bytes that are kept in memory.
    """

    def __init__(
        self,
        source: "Iterator[Mapping[str, Feed]]",
        origin: str,
        expected: int = 0,
        room: int = ROOM,
    ) -> None:
        self.origin, self.expected = origin, expected
        self._source: Iterator[Mapping[str, Feed]] | None = source
        self._room = room
        self._readers: list[Callable[[], Mapping[str, Feed]]] = []
        self._first = 1
        """The first sample that is not forgotten, besides that of number 0."""
        self._folder: Path | None = None

    @property
    def is_ended(self) -> bool:
        """Whether all samples were taken, so that their number is known."""
        return self._source is None

    @property
    def taken(self) -> int:
        """How many were."""
        return len(self._readers)

    def has(self, number: int) -> bool:
        """Whether there is a sample of that number.

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
    def __getitem__(self, index: int) -> "Callable[[], Mapping[str, Feed]]": ...
    @overload
    def __getitem__(self, index: slice) -> "Sequence[Callable[[], Mapping[str, Feed]]]": ...
    def __getitem__(
        self, index: int | slice
    ) -> "Callable[[], Mapping[str, Feed]] | Sequence[Callable[[], Mapping[str, Feed]]]":
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
        """Let go of the samples before a number, but for the first one; they cannot be read again."""
        for at in range(self._first, min(number, len(self._readers))):
            reader, self._readers[at] = self._readers[at], _forgotten
            if isinstance(reader, partial) and reader.func is read_spooled:
                reader.args[0].unlink(missing_ok=True)
            else:
                self._room += _size(reader())
        self._first = max(self._first, min(number, len(self._readers)))

    def _kept(self, sample: "Mapping[str, Feed]") -> "Callable[[], Mapping[str, Feed]]":
        """What reads a sample; arrays are copied, as the iterator may use their memory again."""
        size = _size(sample)
        if size <= self._room:
            self._room -= size
            return partial(dict, {name: _copied(feed) for name, feed in sample.items()})
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="onnxamp-"))
            when_gone(self, partial(shutil.rmtree, self._folder, ignore_errors=True))
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


def read_spooled(path: Path) -> "Mapping[str, Feed]":
    """A sample of a spool of any process of this machine."""
    with path.open("rb") as stream:
        sample: Mapping[str, Feed] = pickle.load(stream)  # noqa: S301 - the file is our own
    return sample


def _forgotten() -> "Mapping[str, Feed]":
    raise AssertionError("A sample was forgotten, but is needed.")


def _size(sample: "Mapping[str, Feed]") -> int:
    parts = (
        part for feed in sample.values() for part in (feed if isinstance(feed, list) else [feed])
    )
    return sum(part.nbytes for part in parts if isinstance(part, np.ndarray))


def _copied(feed: "Feed") -> "Feed":
    if isinstance(feed, list):
        return [_copied(part) for part in feed]
    return feed.copy() if isinstance(feed, np.ndarray) else feed


_ALIGNMENT: Final = 4096
"""Page size: ONNX Runtime can map tensors that start at a page."""

_KEEP_BELOW: Final = 1024
"""Bytes below which tensors (shapes, axes) stay in the graph, where graph optimisers see them."""

_WEIGHTS: Final = "weights.bin"
"""Name of the file with the weights."""

_LIMIT: Final = 2**31 - 2**24
"""Bytes of weights in one message, which must be smaller than 2 GiB; the rest is for nodes."""


def unfolded(path: Path) -> ModelProto:
    """The model of a file, whose weights are found without its folder.

    Raises:
        ModelError: as :meth:`~onnxamp._model.model.Model.read`. ExternalDataError: weights are not where they may be.
    """
    opened = Model.read(path)
    _ = opened.stock  # looks them up
    return opened.proto


def is_large(model: ModelProto) -> bool:
    """Whether the model cannot be one message: weights above 2 GB, or weights that are not loaded.

    Complexity: linear in the model's initializers; no data are touched.
    """
    tensors = model.graph.initializer
    return any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors) or (
        sum(map(stored_bytes, tensors)) > _LIMIT
    )


def save_spilled(model: ModelProto, folder: Path) -> Path:
    """Write the model into an empty folder, one weight at a time, and return the path of the graph's file.

    Args:
        model: it is not changed. Only initializers of its main graph are moved out.
        folder: an existing folder.

    Raises:
        ExternalDataError: a weight is in a data file.
    """
    shell = copy_without(model, "initializer")
    for tensor in tensors_of(shell):  # those of nodes and bodies
        embed(tensor, None)
    with (folder / _WEIGHTS).open("wb") as file:
        for tensor in model.graph.initializer:
            _spill(tensor, shell.graph.initializer.add(), file)
    path = folder / "model.onnx"
    path.write_bytes(shell.SerializeToString())
    return path


def _spill(source: TensorProto, target: TensorProto, file: BinaryIO) -> None:
    if source.data_location == TensorProto.EXTERNAL:
        source = copied(source)
        embed(source, None)
    if source.data_type == TensorProto.STRING or stored_bytes(source) < _KEEP_BELOW:
        target.CopyFrom(source)
        return
    raw = source.raw_data if source.HasField("raw_data") else _raw(source)
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    target.name, target.data_type = source.name, source.data_type
    target.dims.extend(source.dims)
    target.MergeFrom(external_tensor(_WEIGHTS, file.tell(), len(raw)))
    file.write(raw)


def _raw(tensor: TensorProto) -> bytes:
    return numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
