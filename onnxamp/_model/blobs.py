"""Streaming the bytes of weights from file to file, in pieces and by several threads, converting them on the way.

Each thread holds one piece of :data:`PIECE` bytes and its conversion, so memory depends neither on the size nor on the
number of tensors. Data are read, not memory-mapped: if somebody truncates a file meanwhile, that is an error and not a
crash.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any, BinaryIO, Final, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from onnxamp._base.errors import ExternalDataError
from onnxamp._base.paths import is_remote, read_range, writing
from onnxamp._base.records import record
from onnxamp._base.threads import core_count, thread_limit
from onnxamp._facts.dtypes import FLOAT32_BYTES, FORMATS, Format
from onnxamp._model.protos import bytes_of, tensors_of
from onnxamp._model.sources import (
    INSIDE,
    DataLocation,
    check_opened,
    data_location,
    forget_location,
    inside_tensor,
    location_entries,
)
from onnxamp._model.weights import (
    ConversionCounts,
    Scratch,
    convert,
    flat_array,
    lower,
    times_power,
)

PIECE: Final = 4 << 20
"""Bytes that a thread reads at once: enough to hide the overhead of Python, few enough to stay in the processor's cache
until they are written.
"""

# Only data that begin at a page of memory can be mapped; a line is what a processor's cache loads at once.
_PAGE: Final = 4096
_LINE: Final = 64
_LARGE: Final = 8 * _PAGE
"""Bytes from which on data are aligned to a page; aligning smaller data would waste space."""
_PAUSE: Final = 0.2
"""Seconds between two flushes."""
_LONG: Final = 32
"""Pieces from which on data are flushed to disk while more are written."""
_THREADS: Final = 4
"""Threads at most: more would wait for memory and disk."""

T = TypeVar("T")
Progress = Callable[[int], None]
Bits: TypeAlias = NDArray[Any]
"""The bit patterns of low-precision numbers."""
_STEP: Final = PIECE // FLOAT32_BYTES * min(low.bytes for low in FORMATS.values())
"""Fewest bytes that a piece of float32 becomes."""


@dataclass(slots=True)
class Desk:
    """The resources of one thread: memory for one piece, and the files that it reads, each opened once."""

    numbers: NDArray[np.float32] = field(
        default_factory=lambda: np.empty(PIECE // 4, np.float32)
    )
    scratch: Scratch = field(default_factory=lambda: Scratch(PIECE // 4))
    _stack: ExitStack = field(default_factory=ExitStack)
    _files: dict[Path, BinaryIO] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self, place: DataLocation, start: int, size: int) -> NDArray[np.float32]:
        """Read ``size`` bytes from byte ``start`` of some data, multiplied. The array is reused by the next call.

        Raises:
            ExternalDataError: the file is too short. SourceChangedError: it is another one than was read before.
        """
        numbers = self.numbers[: -(-size // 4)]
        view = numbers.data.cast("B")[:size]
        start = place.offset + start
        if is_remote(place.path):
            data = read_range(place.path, start, size)
            view[: len(data)] = data
            view = view[len(data) :]
        else:
            file = self._opened(place)
            file.seek(start)
            # A read may return less than is asked for; at the end of the file it returns nothing.
            while view and (count := file.readinto(view)):  # type: ignore[attr-defined]
                view = view[count:]
        if view:
            raise ExternalDataError(
                f"The file {str(place.path)!r} became shorter while its weights were read."
            )
        if place.exponent:
            return times_power(numbers, place.exponent, numbers)
        return numbers

    def _opened(self, place: DataLocation) -> BinaryIO:
        """Return the file of some data, which is opened and checked once."""
        path = place.path
        if path not in self._files:
            self._files[path] = self._stack.enter_context(path.open("rb", buffering=0))
            check_opened(self._files[path], path, place.stamp)
        return self._files[path]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Bytes that are written as they are. Compared by identity; ``lost`` counts earlier losses."""

    data: Any
    """A buffer: bytes, or an array, which may lie in a file."""
    lost: Sequence[ConversionCounts] = ()

    @property
    def view(self) -> memoryview:
        """All bytes."""
        return memoryview(self.data).cast("B")

    @property
    def size(self) -> int:
        """Bytes."""
        return self.view.nbytes

    def read(self, start: int, stop: int, _: Desk) -> Any:
        """Return the bytes from ``start`` to ``stop``."""
        return self.view[start:stop]


@record
class Stored:
    """Bytes of a file, multiplied if the place has an exponent; with ``low``, float32 numbers to convert.

    ``lost`` collects the counts of each piece. Equal ones have the same bytes.
    """

    place: DataLocation
    low: Format | None = None
    saturate_at: float = 0.0
    lost: list[ConversionCounts] = field(
        default_factory=list, compare=False, repr=False
    )

    @property
    def size(self) -> int:
        """Bytes."""
        length = self.place.length
        return length if self.low is None else length // FLOAT32_BYTES * self.low.bytes

    def read(self, start: int, stop: int, desk: Desk) -> Any:
        """Return a buffer with the bytes from ``start`` to ``stop``, both of which are even."""
        if self.low is None:
            numbers = desk.fill(self.place, start, stop - start)
            return numbers.data.cast("B")[: stop - start]
        first = FLOAT32_BYTES * (start // self.low.bytes)
        last = FLOAT32_BYTES * (stop // self.low.bytes)
        numbers = desk.fill(self.place, first, last - first)
        bits, counts = lower(numbers, self.low, self.saturate_at, desk.scratch)
        self.lost.append(counts)
        return bits


Blob: TypeAlias = Held | Stored
"""The data of one tensor as they will be written."""


class Chosen(NamedTuple):
    """The bits of a low-precision weight that are known in advance, in order, and the losses."""

    bits: Bits
    lost: ConversionCounts


class Weight(NamedTuple):
    """A float32 tensor to convert.

    Finite numbers out of range become plus or minus ``saturate_at``; losses are counted under ``name``. ``chosen`` are
    its bits if they are not those of the nearest numbers.
    """

    tensor: TensorProto
    saturate_at: float
    name: str
    chosen: Chosen | None = None


def stream_blobs(
    path: Path, blobs: Iterable[tuple[int, Blob]], progress: Progress | None = None
) -> None:
    """Write blobs to a file from its start to its end, as :func:`write_blobs`; it is there when all is written.

    Pieces in memory are no progress. Complexity: linear in bytes; memory is a PIECE, and what the file system holds.
    """
    with Desk() as desk, writing(path) as file:
        written = 0
        for position, blob in sorted(blobs, key=lambda pair: pair[0]):
            file.write(bytes(position - written))
            for start, stop in _steps(blob):
                file.write(memoryview(blob.read(start, stop, desk)).cast("B"))
                if progress is not None and not isinstance(blob, Held):
                    progress(stop - start)
            written = position + blob.size


def _steps(blob: Blob) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each piece of a blob, and the byte after its last."""
    for start in range(0, blob.size, _STEP):
        yield start, min(start + _STEP, blob.size)


def write_blobs(
    path: Path, blobs: Iterable[tuple[int, Blob]], progress: Progress | None = None
) -> None:
    """Write blobs to their positions in an existing file, in parallel.

    Args:
        path: the file.
        blobs: (position, blob) pairs; positions are byte offsets in the file.
        progress: called with the number of bytes of each piece, by one thread at a time.

    Raises:
        OSError: the file cannot be written or a source cannot be read. ExternalDataError: a source is too short.

    Complexity: linear in bytes; memory is a few PIECEs per thread.
    """
    pieces = deque[tuple[int, Blob, int, int]]()
    for position, blob in blobs:
        pieces += [(position, blob, start, stop) for start, stop in _steps(blob)]
    lock = Lock()

    def drain() -> None:
        try:
            with Desk() as desk, path.open("r+b", buffering=0) as file:
                for position, blob, start, stop in _taken(pieces):
                    _write_at(file, blob.read(start, stop, desk), position + start)
                    if progress is not None:
                        with lock:
                            progress(stop - start)
        except BaseException:
            pieces.clear()  # so that the other threads also stop
            raise

    if sum(stop - start for _, _, start, stop in pieces) < _STEP:
        drain()
        return
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - costs as much as writing a small model

    count = thread_limit() or min(_THREADS, core_count())
    finished = Event()
    with ThreadPoolExecutor(count + 1) as pool:
        tasks = [pool.submit(drain) for _ in range(min(count, len(pieces)))]
        syncing = None
        if len(pieces) > _LONG:
            syncing = pool.submit(_sync_meanwhile, path, finished)
        try:
            for task in tasks:
                task.result()
        finally:
            finished.set()
        if syncing is not None:
            syncing.result()


def _sync_meanwhile(path: Path, finished: Event) -> None:
    """Flush data to disk while more are written. Errors are raised: the final flush would not report them again."""
    with path.open("r+b") as file:
        while not finished.wait(_PAUSE):
            os.fsync(file.fileno())


def _taken(pieces: deque[T]) -> Iterator[T]:
    """Yield pieces until none is left; several threads may take from them at once."""
    # Asking whether there is one would leave time for others to take it.
    with suppress(IndexError):
        while True:
            yield pieces.popleft()


def _write_at(file: BinaryIO, data: Any, position: int) -> None:
    view = memoryview(data).cast("B")
    file.seek(position)
    while view:
        view = view[file.write(view) :]


def layout(sizes: Sequence[int], limit: int | None = None) -> list[tuple[int, int]]:
    """Return (file number, offset) for data of these sizes, in order. Large data begin at pages, to be mapped.

    Args:
        sizes: in bytes.
        limit: bytes per file; larger data get a file of their own. None for a single file.
    """
    places = []
    number = 0
    end = 0
    for size in sizes:
        alignment = _PAGE if size >= _LARGE else _LINE
        offset = -(-end // alignment) * alignment
        if limit is not None and end and offset + size > limit:
            number = number + 1
            offset = 0
        places.append((number, offset))
        end = offset + size
    return places


EXTERNAL_MIN: Final = 1024
"""Bytes; smaller tensors stay in the model file even if the others go to a data file."""

_PENDING: Final = f"{INSIDE}pending:"
"""Prefix of the location of a weight that is still to be converted; its number follows."""


@dataclass(slots=True)
class WeightConverter:
    """Makes low-precision versions of float32 tensors for :func:`onnxamp._rewrite.edits.apply.apply_edits`.

    If ``deferred``, large data that are not in memory are not touched: the result is a placeholder, and
    :func:`onnxamp._model.saving.save_model` converts each tensor while it writes.
    """

    low: Format
    base_dir: Path | None
    deferred: bool = False
    _pending: list[Blob] = field(default_factory=list)
    _counts: dict[str, ConversionCounts] = field(default_factory=dict)
    _numbers: dict[str, list[int]] = field(default_factory=dict)

    def __call__(self, weights: Sequence[Weight]) -> Iterator[TensorProto]:
        """Yield the weights in low precision, or their placeholders; losses are counted under their names."""
        places = [self._streamed(weight) for weight in weights]
        # Arrays are read one by one, while earlier ones are converted; small ones are converted together.
        nearest = (
            (flat_array(weight.tensor, self.base_dir), weight.saturate_at)
            for weight, place in zip(weights, places, strict=True)
            if place is None and weight.chosen is None
        )
        converted = convert(nearest, self.low)
        for weight, place in zip(weights, places, strict=True):
            if place is not None:
                yield self._placeholder(weight, place)
                continue
            data, lost = next(converted) if weight.chosen is None else weight.chosen
            tensor = self._empty(weight)
            tensor.raw_data = data if isinstance(data, bytes) else data.tobytes()
            known = self._counts.get(weight.name)
            self._counts[weight.name] = lost if known is None else known + lost
            yield tensor

    def _streamed(self, weight: Weight) -> DataLocation | None:
        """Return the place of a weight that is converted while it is written; None for others."""
        tensor = weight.tensor
        if not self.deferred or bytes_of(self.low.elem, tensor.dims[:]) < EXTERNAL_MIN:
            return None
        return data_location(tensor, self.base_dir)

    def _empty(self, weight: Weight) -> TensorProto:
        """Return the low-precision tensor without data."""
        tensor = weight.tensor
        # Field by field: the constructor takes twice as long, and this runs for each of many small weights.
        low = TensorProto()
        low.dims.MergeFrom(tensor.dims)
        low.data_type = self.low.elem
        low.name = tensor.name
        low.doc_string = tensor.doc_string
        if tensor.metadata_props:
            low.metadata_props.extend(tensor.metadata_props)
        return low

    def _placeholder(self, weight: Weight, place: DataLocation) -> TensorProto:
        """Return the low-precision tensor that stands for a weight until that is written."""
        low = self._empty(weight)
        number = len(self._pending)
        low.data_location = TensorProto.EXTERNAL
        low.external_data.add(key="location", value=f"{_PENDING}{number}")
        self._numbers.setdefault(weight.name, []).append(number)
        if weight.chosen is None:
            self._pending.append(Stored(place, self.low, weight.saturate_at))
        else:
            self._pending.append(Held(weight.chosen.bits, [weight.chosen.lost]))
        return low

    def pending(self, tensor: TensorProto) -> Blob | None:
        """Return the tensor that a placeholder stands for; None for any other tensor."""
        for entry in location_entries(tensor):
            if entry.value.startswith(_PENDING):
                return self._pending[int(entry.value.removeprefix(_PENDING))]
        return None

    def leave(self, model: ModelProto) -> None:
        """Have pending weights of a model converted whenever they are read, from the files that hold them."""
        for tensor in tensors_of(model):
            blob = self.pending(tensor)
            if isinstance(blob, Stored):
                place = replace(blob.place, saturate_at=blob.saturate_at)
                left = inside_tensor(place, was_default=False)
                del tensor.external_data[:]
                tensor.external_data.extend(left.external_data)
            elif blob is not None:
                tensor.raw_data = bytes(blob.view)
                forget_location(tensor)

    def share(self, known: Mapping[Blob, Blob]) -> None:
        """Replace pending blobs by the equal ones in ``known``, so that each is converted and counted once."""
        self._pending = [known.get(blob, blob) for blob in self._pending]

    def counts(self) -> dict[str, ConversionCounts]:
        """Return the lost elements by name of the weight; pending weights count once they are written."""
        counts = dict(self._counts)
        for name, numbers in self._numbers.items():
            total = counts.get(name, ConversionCounts())
            for number in numbers:
                total = sum(self._pending[number].lost, total)
            counts[name] = total
        return counts
