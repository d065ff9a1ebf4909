"""Lets the results of models share a data file if the models do, such as a decoder with and without caches.

Each result is first written by itself, with all its weights. Then weights with equal bytes are dropped from all results
but one. A result to whose weights another one refers is never overwritten; see :mod:`onnxamp._model.data_files`.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto, TensorProto

from onnxamp._batch.job import Entry, FolderOptions, Job, sink_of
from onnxamp._dtypes import FLOAT16
from onnxamp._job.writing import Sink
from onnxamp._model.blobs import PIECE, WeightConverter
from onnxamp._model.data_files import is_data_name, is_own, referring_models
from onnxamp._model.external_data import (
    DataFile,
    DataLocation,
    data_location,
    external_tensor,
    has_data_file,
)
from onnxamp._model.protos import tensors_of
from onnxamp._model.saving import save_model
from onnxamp._model.storage import folder_of, load_model, weight_bytes
from onnxamp._paths.paths import is_remote, made_folder


class Shared(NamedTuple):
    """A result that refers to the weights of others, and the bytes of its own weights that are left."""

    job: Job
    size: int


def share_weights(
    jobs: Iterable[Job],
    entries: Mapping[str, Entry],
    fresh: Container[str],
    options: FolderOptions,
) -> Iterator[Shared]:
    """Let results share the weights that their originals share.

    Args:
        jobs: models that have results.
        entries: the remembered entries of these models, by name.
        fresh: names of the models whose results are new.
        options: how results are written.

    Returns:
        The models whose results were written anew.

    Raises:
        OutputError: a result cannot be written.

    Complexity: the weights of models that share a data file are read once, and written once if they differ.
    """
    for group in _groups(jobs, entries):
        if not any(job.name in fresh or job.result != job.target for job in group):
            continue
        sinks = {job.name: sink_of(options, job) for job in group}
        copied = {
            job.name: _copied(job, sinks[job.name], len(entries[job.name].written) > 1)
            for job in group
            if job.result != job.output
        }
        stored: dict[bytes, DataLocation] = {}
        for job in group:
            size = _refer(sinks[job.name], stored)
            if size is None:
                size = copied.get(job.name)
            if size is not None:
                yield Shared(job, size)
        _remove_unused(group)


def _copied(job: Job, sink: Sink, external: bool) -> int:
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


def _groups(jobs: Iterable[Job], entries: Mapping[str, Entry]) -> list[list[Job]]:
    """Return the groups of models in one folder on this machine that have results and share data files."""
    by_file: dict[tuple[Path, Path], list[Job]] = {}
    for job in jobs:
        if job.package is not None and job.package.kind.data_names != "onnx":
            continue  # the software of such a folder finds a data file by the name of its own model
        if not is_remote(job.source) and not is_remote(job.target):
            entry = entries[job.name]
            # Results may share data files that their originals no longer share.
            results = {job.home / name for name in entry.written}
            for file in entry.data_of(job) | results:
                by_file.setdefault((file, job.target.parent), []).append(job)
    shared = (group for group in by_file.values() if len(group) > 1)
    # Models that share several files are one group.
    return [*{tuple(job.name for job in group): group for group in shared}.values()]


def _refer(sink: Sink, stored: dict[bytes, DataLocation]) -> int | None:
    """Let a result refer to weights that are already ``stored``, and add its other weights to these.

    Returns:
        The bytes that are left in it; None if nothing changed.
    """
    path = sink.stage or sink.target
    model, folder = load_model(path), folder_of(path)
    others, own = set[Path](), dict[bytes, DataLocation]()
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
        placed = list(
            _placed(model, folder)
        )  # weights that were inside the model have no digest yet
        own = {
            digests.get(number) or _digest(place): place for number, _, place in placed
        }
        size = weight_bytes(model) - sum(
            place.length for *_, place in placed if place.path in elsewhere
        )
    for digest, place in own.items():
        stored.setdefault(digest, place)
    return size


def _remove_unused(group: Sequence[Job]) -> None:
    """Remove the data files of earlier results to which no model refers anymore."""
    folder = group[0].output.parent
    own = {
        path.name
        for path in folder.iterdir()
        if any(is_data_name(path.name, job.target.name) for job in group)
        and is_own(path)
    }
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
    digest, left = sha256(), place.length
    with place.opened() as file:
        while left:
            piece = file.read(min(left, PIECE))
            left -= len(piece)
            digest.update(piece)
    return digest.digest()
