"""The weights of one checkpoint by data file, in worker processes: measured before the graph is decided, then written.

The graph is decided once, in the main process. It needs statistics of all float32 weights, which workers read where
they lie; then workers write the data files of the result, each whole. No weight passes through the main process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from onnx import TensorProto

from onnxamp._context import active_within
from onnxamp._errors import OutputError
from onnxamp._model.blobs import Blob, Lowered, stream_blobs, write_blobs
from onnxamp._model.lowering import ConversionCounts
from onnxamp._model.model import Model
from onnxamp._model.protos import tensors_of
from onnxamp._model.weights import (
    ConstantStats,
    DataLocation,
    constant_stats,
    data_location,
    inside_tensor,
    read_array,
    stored_bytes,
)
from onnxamp._paths.paths import is_remote
from onnxamp._workers.executor import Crash, Memory, Workers, run, run_in_order

_LARGE: Final = 1 << 20
"""Bytes from which on workers measure a weight."""
_SHARE: Final = 1 << 30
"""Bytes that a worker measures at a time."""

_Place: TypeAlias = tuple[Path, int]
"""A data file, and an offset in it."""
_MEASURED: Final[ContextVar[Mapping[_Place, ConstantStats] | None]] = ContextVar(
    "onnxamp measured weights", default=None
)


class _Stored(NamedTuple):
    """A float32 weight in a data file."""

    place: DataLocation
    dims: tuple[int, ...]


@contextmanager
def measured(model: Model, workers: Workers | None) -> Iterator[None]:
    """Let workers measure the large float32 weights of a model; decisions in the block read them no more.

    Raises:
        ExternalDataError: a weight cannot be found. OutputError: workers die of reading them.
    """
    stored = [] if workers is None else list(_large(model))
    if workers is None or len(stored) < 2:
        yield
        return
    shares, known = list(_shares(stored)), dict[_Place, ConstantStats]()
    for share, found in zip(shares, run_in_order(workers, _measuring, shares), strict=True):
        if isinstance(found, Crash):
            raise OutputError(f"The weights in {str(share[0].place.path)!r} cannot be measured. {found}")
        known |= {(weight.place.path, weight.place.offset): row for weight, row in zip(share, found, strict=True)}
    with active_within(_MEASURED, known):
        yield


def known_stats(tensor: TensorProto, folder: Path | None) -> ConstantStats | None:
    """What workers measured of a weight; None if they did not."""
    known = _MEASURED.get()
    if not known or tensor.data_type != TensorProto.FLOAT or tensor.data_location != TensorProto.EXTERNAL:
        return None
    place = data_location(tensor, folder)
    return None if place is None else known.get((place.path, place.offset))


def _large(model: Model) -> Iterator[_Stored]:
    files: dict[str, tuple[Path, int]] = {}
    for tensor in tensors_of(model.proto):
        if tensor.data_type == TensorProto.FLOAT and stored_bytes(tensor) >= _LARGE:
            place = data_location(tensor, model.folder, files)
            if place is not None:
                yield _Stored(place, tuple(tensor.dims))


def _shares(stored: Sequence[_Stored]) -> Iterator[list[_Stored]]:
    """Weights that lie behind each other, of about the same bytes."""
    share: list[_Stored] = []
    size = 0
    for weight in sorted(stored, key=lambda weight: (str(weight.place.path), weight.place.offset)):
        if share and (size + weight.place.length > _SHARE or weight.place.path != share[0].place.path):
            yield share
            share, size = [], 0
        share.append(weight)
        size += weight.place.length
    if share:
        yield share


def _measuring(_: Memory) -> Callable[[list[_Stored]], list[ConstantStats]]:
    return lambda share: [_stats(weight) for weight in share]


def _stats(weight: _Stored) -> ConstantStats:
    tensor = inside_tensor(weight.place, was_default=False)
    tensor.data_type = TensorProto.FLOAT
    tensor.dims[:] = weight.dims
    return constant_stats(read_array(tensor, None))


DataFile: TypeAlias = tuple[Path, list[tuple[int, Blob]]]
"""A file to write, and what comes at which offset."""


def write_data_files(
    files: Sequence[DataFile], progress: Callable[[int], None] | None = None, workers: Workers | None = None
) -> None:
    """Write data files, by workers if there are several of both.

    ``progress`` is called with bytes that are written.

    Raises:
        OSError: a file cannot be written. ExternalDataError: a weight cannot be read. OutputError: workers die of it.
    """
    if workers is None or len(files) < 2:
        for path, blobs in files:
            _write(path, blobs, progress)
        return
    with closing(run(workers, _writing, files)) as results:
        for position, result in results:
            path, blobs = files[position]
            if isinstance(result, Crash):
                raise OutputError(f"Cannot write {str(path)!r}. {result}")
            if not isinstance(result, list):
                raise result.error
            for (_, blob), lost in zip(blobs, result, strict=True):
                if isinstance(blob, Lowered):
                    blob.lost.append(lost)
            if progress is not None:
                progress(sum(blob.size for _, blob in blobs))


def _writing(_: Memory) -> Callable[[DataFile], list[ConversionCounts]]:
    return partial(_written)


def _written(file: DataFile) -> list[ConversionCounts]:
    """What each weight of a file lost, once it is written."""
    path, blobs = file
    for _, blob in blobs:
        if isinstance(blob, Lowered):
            blob.lost.clear()  # an earlier worker died of it
    _write(path, blobs, None)
    return [
        sum(blob.lost, ConversionCounts()) if isinstance(blob, Lowered) else ConversionCounts() for _, blob in blobs
    ]


def _write(path: Path, blobs: list[tuple[int, Blob]], progress: Any) -> None:
    if is_remote(path):
        stream_blobs(path, blobs, progress)
    else:
        path.touch()
        write_blobs(path, blobs, progress)
