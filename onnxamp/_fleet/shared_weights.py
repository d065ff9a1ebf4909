"""Results of a folder share a data file if their models do, such as a decoder with and without caches.

Each is first written by itself, with all its weights. Then weights with equal bytes are dropped from all results but
one. A result to whose weights another one refers is never overwritten; see :mod:`onnxamp._model.data_files`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path

from onnx import ModelProto, TensorProto

from onnxamp._base.paths import is_remote, made_folder
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._fleet.entries import Entry, ModelJob
from onnxamp._fleet.job import FolderOptions, naming_of, sink_of
from onnxamp._job.writing import Sink
from onnxamp._model.blobs import PIECE, WeightConverter
from onnxamp._model.data_files import (
    is_data_name,
    is_own,
    referring_models,
)
from onnxamp._model.model import folder_of, load_model, weight_bytes
from onnxamp._model.protos import tensors_of
from onnxamp._model.saving import save_model
from onnxamp._model.sources import (
    DataFile,
    DataLocation,
    data_location,
    external_tensor,
    has_data_file,
)


def share_weights(
    jobs: Iterable[ModelJob],
    entries: Mapping[str, Entry],
    options: FolderOptions,
) -> Iterator[tuple[ModelJob, int]]:
    """Let results share the weights that their originals share.

    Args:
        jobs: models that have results.
        entries: the remembered entries of these models, by name.
        options: how results are written.

    Yields:
        The models whose results were written anew, each with the bytes of weights that it shares with no earlier one.

    Raises:
        OutputError: a result cannot be written.

    Complexity: the weights of models that share a data file are read once, and written once if they differ.
    """
    for group in _groups(jobs, entries, options):
        if not any(_is_new(job, entries[job.name]) for job in group):
            continue
        sinks = {job.name: sink_of(options, job) for job in group}
        # Files that are in place are never overwritten, so results there are copied first.
        copied = dict[str, int]()
        for job in group:
            if job.result != job.output:
                external = len(entries[job.name].written) > 1
                copied[job.name] = _copied(job, sinks[job.name], external)
        stored: dict[bytes, DataLocation] = {}
        for job in group:
            size = _refer(sinks[job.name], stored)
            if size is None:
                size = copied.get(job.name)
            if size is not None:
                yield job, size
        _remove_unused(group)


def _is_new(job: ModelJob, entry: Entry) -> bool:
    """Return whether a result was written by this run, or waits since an earlier one."""
    return entry.row.outcome == "converted" or job.result != job.target


def bytes_read_again(jobs: Iterable[ModelJob], entries: Mapping[str, Entry]) -> int:
    """Return the bytes of weights that models on this machine read although models before them read them too."""
    files = {
        job.source: entries[job.name].data_of(job)
        for job in jobs
        if not is_remote(job.source)
    }
    readers = Counter(chain.from_iterable(files.values()))
    again = 0
    seen = set[DataLocation]()
    for source, read in files.items():
        if all(readers[file] == 1 for file in read):
            continue  # it shares no data file, so it need not be read
        placed = _placed(load_model(source), folder_of(source))
        places = {place for _, _, place in placed}
        again += sum(place.length for place in places & seen)
        seen |= places
    return again


def _copied(job: ModelJob, sink: Sink, external: bool) -> int:
    """Copy a result that is in place to the waiting files, with all its weights; return the bytes of the weights."""
    made_folder(job.output.parent)
    return save_model(
        load_model(job.result),
        job.output,
        WeightConverter(FLOAT16, folder_of(job.result)),
        external=external,
        shard_bytes=sink.shard_bytes,
        data_names=sink.data_names,
    ).size


def _groups(
    jobs: Iterable[ModelJob], entries: Mapping[str, Entry], options: FolderOptions
) -> list[list[ModelJob]]:
    """Return the groups of models in one folder on this machine that have results and share data files."""
    by_file: dict[tuple[Path, Path], list[ModelJob]] = {}
    for job in jobs:
        if naming_of(options, job) != "onnx":
            continue  # software that gives such names finds a data file by the name of its own model
        if not is_remote(job.source) and not is_remote(job.target):
            entry = entries[job.name]
            # Results may share data files that their originals no longer share.
            results = {job.home / name for name in entry.written}
            for file in entry.data_of(job) | results:
                by_file.setdefault((file, job.target.parent), []).append(job)
    # Models that share several files are one group.
    groups: dict[tuple[str, ...], list[ModelJob]] = {}
    for group in by_file.values():
        if len(group) > 1:
            groups[tuple(job.name for job in group)] = group
    return list(groups.values())


def _refer(sink: Sink, stored: dict[bytes, DataLocation]) -> int | None:
    """Let a result refer to weights that are already ``stored``, and add its other weights to these.

    Returns:
        The bytes that are left in it; None if nothing changed.
    """
    path = sink.stage or sink.target
    model = load_model(path)
    folder = folder_of(path)
    others = set[Path]()
    own = dict[bytes, DataLocation]()
    digests = dict[int, bytes]()
    for number, tensor, place in _placed(model, folder):
        digest = digests[number] = _digest(place)
        known = stored.get(digest, place)
        own[digest] = place
        if known.path != place.path:
            others.add(known.path)
            _point(tensor, known, folder)
    size = None
    if others:
        elsewhere = {place.path for place in stored.values()}
        converter = WeightConverter(FLOAT16, folder)
        save_model(
            model,
            path,
            converter,
            external=True,
            shard_bytes=sink.shard_bytes,
            data_names=sink.data_names,
            keep=others,
            stay=elsewhere,
        )
        own = {}
        size = weight_bytes(model)
        for number, _, place in _placed(model, folder):
            # Weights that were inside the model have no digest yet.
            own[digests.get(number) or _digest(place)] = place
            if place.path in elsewhere:
                size -= place.length
    for digest, place in own.items():
        stored.setdefault(digest, place)
    return size


def _remove_unused(group: Sequence[ModelJob]) -> None:
    """Remove the data files of earlier results to which no model refers anymore."""
    folder = group[0].output.parent
    models = [job.target.name for job in group]
    own = set[str]()
    for path in folder.iterdir():
        is_named = any(is_data_name(path.name, model) for model in models)
        if is_named and is_own(path):
            own.add(path.name)
    for name in sorted(own - referring_models(folder, own).keys()):
        (folder / name).unlink()


def _placed(
    model: ModelProto, folder: Path
) -> Iterator[tuple[int, TensorProto, DataLocation]]:
    """Yield the weights in data files, with their indices among all weights and their places."""
    known = dict[str, DataFile]()
    for number, tensor in enumerate(tensors_of(model)):
        if not has_data_file(tensor):
            continue
        place = data_location(tensor, folder, known)
        if place is not None:
            yield number, tensor, place


def _point(tensor: TensorProto, place: DataLocation, folder: Path) -> None:
    """Make a weight refer to a place."""
    name = place.path.relative_to(folder.resolve()).as_posix()
    tensor.ClearField("external_data")
    tensor.MergeFrom(external_tensor(name, place.offset, place.length))


def _digest(place: DataLocation) -> bytes:
    """Return the digest that identifies a weight."""
    digest = sha256()
    left = place.length
    with place.opened() as file:
        while left:
            piece = file.read(min(left, PIECE))
            left -= len(piece)
            digest.update(piece)
    return digest.digest()
