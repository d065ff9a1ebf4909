"""Data files: their names and mark, the models that refer to them, and how workers measure and write their contents.

Models of a folder and of its parent may share a data file. So a file is removed only if onnxamp wrote it, which its
last bytes show, and if no other model there refers to it. A new data file never gets a name that another model refers
to, even if no such file exists: that model would read the wrong weights.

Worker processes measure and write the weights of a checkpoint. The graph is decided once, in the main process. It
needs statistics of all float32 weights, which workers read from their files. Then workers write the data files of the
result, one worker per file. No weight passes through the main process.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from onnxamp._base.errors import OutputError, SourceChangedError
from onnxamp._base.executor import Crash, Memory, Workers, run, run_in_order
from onnxamp._base.paths import is_remote, read_range
from onnxamp._base.public import active_within
from onnxamp._base.state import Part, as_data, fingerprint, from_data
from onnxamp._facts.tables import read_table
from onnxamp._model.blobs import Blob, Held, Stored, stream_blobs, write_blobs
from onnxamp._model.constant_stats import ConstantStats, constant_stats
from onnxamp._model.model import Model, parse_text, read_graph
from onnxamp._model.protos import stored_bytes, tensors_of
from onnxamp._model.sources import (
    DataFile,
    DataLocation,
    data_location,
    has_data_file,
    inside_tensor,
    location_entries,
    stamp_now,
)
from onnxamp._model.staging import sync
from onnxamp._model.weights import ConversionCounts, read_array

MARK: Final = b"\nwritten by onnxamp\n"
"""The last bytes of a data file of ours, after all weights."""

_MODELS: Final = frozenset(
    {
        ".onnx",
        ".onnxtxt",
        ".onnxtext",
        ".textproto",
        ".txtpb",
        ".prototxt",
        ".pbtxt",
        ".json",
    }
)
"""Suffixes of files that may contain a model."""
_TRIES: Final = 3
"""Times that a file is read again that was replaced while it was read."""
_MOST_ABOVE: Final = 500
"""Models in parent folders that are looked into."""
_LARGE: Final = 1 << 20
"""Bytes from which on workers measure a weight."""
_SHARE: Final = 1 << 30
"""Bytes that a worker measures at once."""

_Place: TypeAlias = tuple[Path, int]
"""A data file, and an offset in it."""
_MEASURED: Final[ContextVar[Mapping[_Place, ConstantStats] | None]] = ContextVar(
    "onnxamp measured weights", default=None
)


def data_names_of(base: str, count: int, style: str) -> list[str]:
    """Return the names of data files: ``model.onnx.data``, or ``model.onnx-00001-of-00003.data`` and so on if there are
    several; other styles have other names.
    """
    row = read_table("presets")[style]
    forms = [row["first"], *[row["other"]] * (count - 1)][:count]
    if count == 1:
        forms = [row["one"]]
    return [
        form.format(name=base, number=index + 1, index=index, count=count)
        for index, form in enumerate(forms)
    ]


def is_data_name(name: str, model: str) -> bool:
    """Return whether a data file of the model of that name could have this name, in any style."""
    form = (
        re.escape(model)
        + r"(\.[0-9a-f]{8})?((-[0-9]{5}-of-[0-9]{5})?\.data|_data(_[0-9]+)?)"
    )
    return re.fullmatch(form, name) is not None


def is_own(path: Path) -> bool:
    """Return whether onnxamp wrote a data file.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    return size >= len(MARK) and read_range(path, size - len(MARK), len(MARK)) == MARK


def data_files_of(path: Path) -> set[str]:
    """Return the names of data files that a model file refers to, relative to its folder; none if it is no model.

    Raises:
        OSError: it cannot be read. SourceChangedError: it is written to.
    """
    try:
        return _locations(read_graph(path)[0]) or set()
    except ValueError:  # it is larger than any model, or a folder
        return set()


def _locations(data: bytes) -> set[str] | None:
    """Return the names of data files in the bytes of a model; None if they are no model."""
    if b"location" not in data:
        return set()
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        text = parse_text(data)
        if text is None:
            return None
        model = text
    external = (tensor for tensor in tensors_of(model) if has_data_file(tensor))
    entries = chain.from_iterable(map(location_entries, external))
    names = (entry.value for entry in entries)
    return {os.path.normpath(name) for name in names if isinstance(name, str)}


def referring_models(
    folder: Path, names: Iterable[str], *but: Path
) -> dict[str, Path]:
    """Find the models that refer to files of a folder: those in it, and those in its parent, which may name a file
    ``folder/name``.

    Args:
        folder: the folder of the files.
        names: of the files.
        but: models that do not count, since they are replaced.

    Returns:
        For each name that any model refers to, such a model. One that cannot be read may refer to all of them, and so
        may those of a parent with more than :data:`_MOST_ABOVE`.

    Complexity: linear in the graphs of both folders; bytes of large weights are not read.
    """
    wanted = {name: _place(folder, name) for name in sorted(set(names))}
    referring: dict[str, Path] = {}
    if not wanted:
        return referring
    own = {path.resolve() for path in but}
    above = [*chain.from_iterable(map(_models_in, _parents(folder)))]
    for path in (*_models_in(folder), *above[:_MOST_ABOVE]):
        if path.resolve() not in own:
            for name in _referred(path, wanted):
                referring.setdefault(name, path)
    if len(above) > _MOST_ABOVE:  # the rest is not read, and may refer to any file
        return dict.fromkeys(wanted, above[_MOST_ABOVE]) | referring
    return referring


def label_beside(model: Path, folder: Path) -> str:
    """Return the name of a model for readers who are in the folder: ``model.onnx`` or ``../model.onnx``."""
    if model.parent == folder:
        return model.name
    return os.path.relpath(_place(model.parent, model.name), folder.resolve())


def _place(folder: Path, location: str) -> Path:
    """Return where a model in the folder looks for a data file, whether it exists or not."""
    path = folder / location
    try:
        return path.parent.resolve() / path.name
    except (OSError, ValueError, RuntimeError):  # no file can have that name
        return path


def _parents(folder: Path) -> set[Path]:
    """Return the folders from which models refer to this one: two if it is a symbolic link, none at a URL."""
    if is_remote(folder):
        return set()
    parents = {folder.absolute().parent.resolve(), folder.resolve().parent}
    return parents - {folder.resolve()}  # the root is its own parent


def _models_in(folder: Path) -> list[Path]:
    """Return the files of a folder that may contain a model, in order; none if it cannot be listed."""
    try:
        models = filter(_may_be_model, folder.iterdir())
        return [path for path in sorted(models) if path.is_file()]
    except OSError:
        return []


def _may_be_model(path: Path) -> bool:
    """Return whether a file has the name of a model, or of a copy such as ``model.onnx.bak``; data files have not."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return not _MODELS.isdisjoint(suffixes) and suffixes[-1] != ".data"


def _settled(path: Path) -> bytes:
    """Read a model file that another process may replace, as the conversion of a folder does with its results."""
    for _ in range(_TRIES):
        with suppress(SourceChangedError):
            return read_graph(path)[0]
    return read_graph(path)[0]


def _referred(path: Path, wanted: Mapping[str, Path]) -> Sequence[str]:
    """Return those of the names that a model file refers to; ``wanted`` holds their places."""
    try:
        data = _settled(path)
    except (ValueError, FileNotFoundError):  # larger than any model; removed meanwhile
        return ()
    except (OSError, SourceChangedError):
        return list(wanted)
    # Searching the bytes for the names is much faster than parsing them, and most models mention none.
    mentioned = {
        name: place for name, place in wanted.items() if place.name.encode() in data
    }
    used = _locations(data) if mentioned else set()
    if used is None:  # unknown, for example, for a model that is being written
        return list(mentioned) if path.suffix.lower() == ".onnx" else ()
    names = {place.name for place in mentioned.values()}
    places = {
        _place(path.parent, location)
        for location in used
        if Path(location).name in names
    }
    return [name for name, place in mentioned.items() if place in places]


class _Stored(NamedTuple):
    """A float32 weight in a data file."""

    place: DataLocation
    dims: tuple[int, ...]


@contextmanager
def measured(
    model: Model, workers: Workers | None, kept: Part | None = None
) -> Iterator[None]:
    """Let workers measure the large float32 weights of a model; decisions in the block read them no more.

    Measurements are stored; those in ``kept`` are not repeated.

    Raises:
        ExternalDataError: a weight cannot be found. OutputError: workers die of reading them.
    """
    stored = [] if workers is None and kept is None else list(_large(model))
    if len(stored) < 2:
        yield
        return
    with active_within(_MEASURED, _all_measured(list(_shares(stored)), workers, kept)):
        yield


def _all_measured(
    shares: Sequence[list[_Stored]], workers: Workers | None, kept: Part | None
) -> dict[_Place, ConstantStats]:
    keys = [f"weights {fingerprint(repr(share))}" for share in shares]
    known = {} if kept is None else {key: kept[key] for key in keys if key in kept}
    missing = [number for number, key in enumerate(keys) if key not in known]

    def done(position: int, rows: Any) -> None:
        if kept is not None and isinstance(rows, list):
            kept[keys[missing[position]]] = as_data(rows, named=False)

    waiting = [shares[number] for number in missing]
    results = (
        _measured_here(waiting, done)
        if workers is None
        else run_in_order(workers, _measuring, waiting, done=done)
    )
    measured = dict(zip(missing, results, strict=True))
    stats: dict[_Place, ConstantStats] = {}
    for number, (key, share) in enumerate(zip(keys, shares, strict=True)):
        rows = measured.get(number)
        if isinstance(rows, Crash):
            where = str(share[0].place.path)
            raise OutputError(f"The weights in {where!r} cannot be measured. {rows}")
        if rows is None:
            rows = [from_data(ConstantStats, row) for row in known[key]]
        for weight, row in zip(share, rows, strict=True):
            stats[weight.place.path, weight.place.offset] = row
    return stats


def _measured_here(
    shares: Sequence[list[_Stored]], done: Callable[[int, Any], None]
) -> Iterator[list[ConstantStats]]:
    for position, share in enumerate(shares):
        rows = _measured(share)
        done(position, rows)
        yield rows


def known_stats(tensor: TensorProto, folder: Path | None) -> ConstantStats | None:
    """Return the measurements of a weight by workers; None if there are none."""
    known = _MEASURED.get()
    is_external = tensor.data_location == TensorProto.EXTERNAL
    if not known or not is_external or tensor.data_type != TensorProto.FLOAT:
        return None
    place = data_location(tensor, folder)
    if place is None:
        return None
    stats = known.get((place.path, place.offset))
    # Workers measure the file; a weight that is a multiple of it has multiples of its statistics.
    if stats is None or not place.exponent:
        return stats
    return stats.scaled(place.exponent)


def _large(model: Model) -> Iterator[_Stored]:
    files: dict[str, DataFile] = {}
    for tensor in tensors_of(model.proto):
        if tensor.data_type == TensorProto.FLOAT and stored_bytes(tensor) >= _LARGE:
            place = data_location(tensor, model.folder, files)
            if place is not None:
                yield _Stored(place, tuple(tensor.dims))


def _shares(stored: Sequence[_Stored]) -> Iterator[list[_Stored]]:
    """Yield weights that lie next to each other, of about the same bytes."""
    share: list[_Stored] = []
    size = 0
    for weight in sorted(stored, key=_order):
        place = weight.place
        is_elsewhere = bool(share) and place.path != share[0].place.path
        if share and (is_elsewhere or size + place.length > _SHARE):
            yield share
            share = []
            size = 0
        share.append(weight)
        size += place.length
    if share:
        yield share


def _order(weight: _Stored) -> tuple[str, int]:
    """Return a key that sorts weights as they lie in their files."""
    return str(weight.place.path), weight.place.offset


def _measuring(_: Memory) -> Callable[[list[_Stored]], list[ConstantStats]]:
    return _measured


def _measured(share: list[_Stored]) -> list[ConstantStats]:
    rows = []
    for weight in share:
        tensor = inside_tensor(weight.place, was_default=False)
        tensor.data_type = TensorProto.FLOAT
        tensor.dims[:] = weight.dims
        rows.append(constant_stats(read_array(tensor, None)))
    return rows


_Blobs: TypeAlias = list[tuple[int, Blob]]
FileToWrite: TypeAlias = tuple[Path, _Blobs]
"""A data file to write, and its contents by offset."""


def write_data_files(
    files: Sequence[FileToWrite],
    progress: Callable[[int], None] | None = None,
    workers: Workers | None = None,
    kept: Part | None = None,
) -> None:
    """Write data files, by workers if there are several of both.

    ``progress`` is called with bytes that are written. Written files are recorded; those in ``kept`` that still exist
    are not written again.

    Raises:
        OSError: a file cannot be written. ExternalDataError: a weight cannot be read. OutputError: workers die of it.
    """
    missing = list(files)
    if kept is not None:
        missing = [file for file in files if not _is_kept(file, kept, progress)]
    if workers is None or len(files) < 2:
        for file in missing:
            _write(*file, progress)
            _keep(file, kept)
        return
    with closing(run(workers, _writing, missing)) as results:
        for position, result in results:
            path, blobs = missing[position]
            if isinstance(result, Crash):
                raise OutputError(f"Cannot write {str(path)!r}. {result}")
            if not isinstance(result, list):
                raise result.error
            _count(blobs, result)
            _keep(missing[position], kept)
            if progress is not None:
                progress(_size(blobs))


def _size(blobs: _Blobs) -> int:
    return sum(blob.size for _, blob in blobs)


def _count(blobs: _Blobs, lost: Sequence[ConversionCounts]) -> None:
    """Record the losses of each weight on other workers."""
    for (_, blob), counts in zip(blobs, lost, strict=True):
        if isinstance(blob, Stored):
            blob.lost.append(counts)


def _is_kept(
    file: FileToWrite, kept: Part, progress: Callable[[int], None] | None
) -> bool:
    """Return whether a file of an interrupted run exists."""
    path, blobs = file
    known = kept.get(_contents(file))
    if known is None or known["stamp"] != as_data(stamp_now(path)):
        return False
    _count(blobs, [from_data(ConversionCounts, row) for row in known["lost"]])
    if progress is not None:
        progress(_size(blobs))
    return True


def _keep(file: FileToWrite, kept: Part | None) -> None:
    """Record that a file was written, for a run that goes on after this one is interrupted."""
    if kept is not None:
        path, blobs = file
        if not is_remote(path):
            sync(path)  # before anything says that it exists
        kept[_contents(file)] = {
            "stamp": as_data(stamp_now(path)),
            "lost": as_data(_lost(blobs), named=False),
        }


def _contents(file: FileToWrite) -> str:
    """Return the key of a file with these weights at these offsets."""
    path, blobs = file
    words = (
        f"{offset} {fingerprint(blob.view) if isinstance(blob, Held) else blob}"
        for offset, blob in blobs
    )
    return f"file {fingerprint(path.name, *words)}"


def _writing(_: Memory) -> Callable[[FileToWrite], list[ConversionCounts]]:
    return _written


def _written(file: FileToWrite) -> list[ConversionCounts]:
    """Return the losses of each weight of a file, once it is written."""
    path, blobs = file
    for _, blob in blobs:
        if isinstance(blob, Stored):
            blob.lost.clear()  # an earlier worker died of it
    _write(path, blobs, None)
    return _lost(blobs)


def _lost(blobs: _Blobs) -> list[ConversionCounts]:
    """Return the losses of each weight; those of data in memory were counted before."""
    lost = []
    for _, blob in blobs:
        counts = blob.lost if isinstance(blob, Stored) else []
        lost.append(sum(counts, ConversionCounts()))
    return lost


def _write(path: Path, blobs: _Blobs, progress: Any) -> None:
    if is_remote(path):
        stream_blobs(path, blobs, progress)
    else:
        # A new file, because a worker of a killed process may still be writing to the old one.
        path.unlink(missing_ok=True)
        path.touch()
        write_blobs(path, blobs, progress)
