"""Writing models: weights are converted while they are copied from file to file, and output is whole or not at all.

:mod:`onnxamp._model.staging` explains what happens to files when a process is killed.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from onnx import ModelProto, StringStringEntryProto, TensorProto, numpy_helper

from onnxamp._base.errors import (
    ArgumentError,
    InternalError,
    ModelError,
    SourceChangedError,
)
from onnxamp._base.executor import Workers
from onnxamp._base.paths import is_remote, writing
from onnxamp._base.state import Part
from onnxamp._model.blobs import (
    EXTERNAL_MIN,
    PIECE,
    Blob,
    Held,
    Stored,
    WeightConverter,
    layout,
    stream_blobs,
    write_blobs,
)
from onnxamp._model.data_files import (
    MARK,
    FileToWrite,
    data_files_of,
    data_names_of,
    is_data_name,
    is_own,
    label_beside,
    referring_models,
    write_data_files,
)
from onnxamp._model.protos import (
    DATA_FIELDS,
    find_data,
    raw_data_head,
    replaced,
    stored_bytes,
    tensors_of,
)
from onnxamp._model.sources import (
    confirm_sources,
    data_location,
    external_tensor,
    forget_location,
    location_entries,
    release_sources,
)
from onnxamp._model.staging import (
    Stage,
    identity_of,
    remote_staging,
    staging,
    unwritable,
)
from onnxamp._model.weights import embed

_PIECE: Final = 1 << 26
"""Bytes that are copied at once."""


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


_TOKEN: Final = 16
"""Length of the random bytes that, with a number, replace the data of a weight until they are written."""


@dataclass(slots=True)
class Saved:
    """A written model, which is put in its place at the end of a block.

    Attributes:
        stage: where it is until then.
        size: the bytes of all its weights.
        notes: sentences about data files that are in use, complete after the block.
    """

    stage: Stage
    size: int = 0
    notes: list[str] = field(default_factory=list)


P = ParamSpec("P")
T = TypeVar("T")


def completely(begin: Callable[P, AbstractContextManager[T]]) -> Callable[P, T]:
    """Return the function that puts what another one stages in its place at once."""

    @wraps(begin)
    def complete(*args: P.args, **keywords: P.kwargs) -> T:
        with begin(*args, **keywords) as staged:
            return staged

    return complete


@contextmanager
def saving(
    model: ModelProto,
    path: Path,
    converter: WeightConverter,
    *,
    external: bool,
    shard_bytes: int | None = None,
    data_names: str = "onnx",
    keep: AbstractSet[Path] = frozenset(),
    stay: AbstractSet[Path] = frozenset(),
    progress: Callable[[int, int], None] | None = None,
    workers: Workers | None = None,
    kept: Part | None = None,
) -> Iterator[Saved]:
    """Write a model beside its place, and put it there at the end of the block, unless that raises: then nothing
    changes. ``model`` is changed: it refers to what was written afterwards.

    Args:
        model: the model; its weights may be placeholders of ``converter``.
        path: where it goes.
        converter: holds the weights that are still to be converted, and knows the model's folder.
        external: put weights of at least EXTERNAL_MIN bytes into a data file beside the model ...
        shard_bytes: ... or into several, each of about this size.
        data_names: whose names data files get; see ``_data/presets.toml``.
        keep: data files that are still needed. Other files from an earlier save to ``path`` are removed, unless another
            model beside it refers to them.
        stay: data files beside ``path``, in which weights stay that are there.
        progress: called with (bytes written, bytes in all) while large weights are written.
        workers: who writes data files if there are several; None for this process.
        kept: keeps what is written until all is, for a run that is interrupted to go on.

    Raises:
        OutputError: the folder is missing or read-only, or the disk is full. Nothing was changed then.
        ExternalDataError: a weight cannot be read.
    """
    needed = set(keep)
    with _replacing(path, needed, kept) as saved:
        stage = saved.stage
        blobs, saved.size = _blobs(model, converter, held=external, stay=stay)
        report = _adding_up(progress, saved.size) if progress else None
        if external:
            # If its data are gone, the model to replace may refer to a file that is new.
            written = _write_data(
                blobs=blobs,
                stage=stage,
                shard_bytes=shard_bytes,
                data_names=data_names,
                progress=report,
                workers=workers,
                kept=kept,
            )
            needed.update((path.parent / name).resolve() for name in written)
            stage.main.write_bytes(model.SerializeToString())
        else:
            _write_inline(model, blobs, stage.main, report)
        identity = stage.identity()
        yield saved
    if external and blobs:
        saved.notes += _named_as_usual(
            model, path, identity, [tensor for tensor, _ in blobs], data_names
        )


save_model = completely(saving)
"""Write a model whole or not at all; arguments and errors as :func:`saving`."""


def _named_as_usual(
    model: ModelProto,
    path: Path,
    identity: str,
    tensors: Sequence[TensorProto],
    data_names: str,
) -> list[str]:
    """Rename the data files of a published result if its predecessor's files had the usual names.

    Returns:
        A sentence about names that are not free.
    """
    places = [*chain.from_iterable(map(location_entries, tensors))]
    # By length first, so that a file without a number comes before those with one.
    used = sorted({item.value for item in places}, key=lambda name: (len(name), name))
    usual = data_names_of(path.name, len(used), data_names)
    if used == usual:
        return []
    names = dict(zip(used, usual, strict=True))
    referring = {} if is_remote(path) else referring_models(path.parent, usual, path)
    can_rename = not is_remote(path) and not referring
    if can_rename and _renamed(model, path, identity, places, names):
        return []
    if referring:
        blocked, user = next(iter(referring.items()))
        why = f"{label_beside(user, path.parent)} refers to {blocked}"
    else:
        existing = (name for name in usual if (path.parent / name).exists())
        why = f"{next(existing, usual[0])} could not be replaced"
    return [f"The weights are in {', '.join(used)}: {why}."]


def _renamed(
    model: ModelProto,
    path: Path,
    identity: str,
    places: Sequence[StringStringEntryProto],
    names: Mapping[str, str],
) -> bool:
    """Give the data files of a result other names, and put a model in its place that refers to these.

    The data are copied, which costs neither time nor room where the file system can share them.

    Args:
        model: what was written; it refers to the new names afterwards, if it is renamed.
        path: the result.
        identity: of the result; see :meth:`Stage.identity`.
        places: where the model refers to its data files.
        names: name of a data file beside the result -> its new name.

    Returns:
        Whether the files have the wanted names. The result stays intact if a name is taken, if the result was replaced
        in the meantime, or if a file cannot be written.
    """
    beside = path.parent
    wanted = list(names.values())

    def published() -> list[Path]:
        if identity_of(path) != identity or stage.publish(wanted) != wanted:
            raise FileExistsError
        return [beside / name for name in names]

    _refer(places, names)
    with suppress(OSError), staging(path) as stage:
        # Without links every data file has the token in its name.
        if stage.has_links() and not any((beside / name).exists() for name in wanted):
            for old, new in names.items():
                _copy(beside / old, stage.data / new)
            stage.main.write_bytes(model.SerializeToString())
            stage.commit(published)
            return True
    _refer(places, {new: old for old, new in names.items()})
    return False


def _refer(places: Sequence[StringStringEntryProto], names: Mapping[str, str]) -> None:
    """Let a model refer to data files by other names."""
    for item in places:
        item.value = names[item.value]


def _adding_up(
    progress: Callable[[int, int], None], total: int
) -> Callable[[int], None]:
    """Return a function that is called with the bytes of each piece and reports their sum."""
    done = 0

    def report(written: int) -> None:
        nonlocal done
        done += written
        progress(min(done, total), total)  # marks of data files are no weights

    return report


def _blobs(
    model: ModelProto,
    converter: WeightConverter,
    *,
    held: bool,
    stay: AbstractSet[Path],
) -> tuple[list[tuple[TensorProto, Blob]], int]:
    """Return the weights whose data are to be streamed, and the bytes of all weights. Small weights are embedded.

    Args:
        model: its tensors are changed.
        converter: see :func:`save_model`.
        held: also stream data that are in memory.
        stay: as for :func:`save_model`.
    """
    blobs: list[tuple[TensorProto, Blob]] = []
    known: dict[Blob, Blob] = {}
    total = 0
    for tensor in tensors_of(model):
        total += stored_bytes(tensor)
        blob = _blob(tensor, converter, held=held, stay=stay)
        if blob is not None:
            blobs.append((tensor, known.setdefault(blob, blob)))
    converter.share(known)
    return blobs, total


def _blob(
    tensor: TensorProto,
    converter: WeightConverter,
    *,
    held: bool,
    stay: AbstractSet[Path],
) -> Blob | None:
    pending = converter.pending(tensor)
    if pending is not None:
        return pending
    if stored_bytes(tensor) < EXTERNAL_MIN:
        embed(tensor, converter.base_dir)
        return None
    place = data_location(tensor, converter.base_dir)
    if place is not None:
        return None if place.path in stay else Stored(place)
    if not held:
        return None
    if not tensor.HasField("raw_data"):
        tensor = numpy_helper.from_array(numpy_helper.to_array(tensor))
    return Held(tensor.raw_data)


def _write_data(
    blobs: list[tuple[TensorProto, Blob]],
    stage: Stage,
    shard_bytes: int | None,
    data_names: str,
    progress: Callable[[int], None] | None,
    workers: Workers | None,
    kept: Part | None,
) -> list[str]:
    """Write all blobs to new data files, each once, and point the tensors to them; returns the names of the files."""
    unique = list(dict.fromkeys(blob for _, blob in blobs))
    offsets = layout([blob.size for blob in unique], shard_bytes)
    places = dict(zip(unique, offsets, strict=True))
    count = offsets[-1][0] + 1 if offsets else 0
    path = stage.path
    names = data_names_of(path.name, count, data_names)
    files: list[FileToWrite] = [(stage.place(name), []) for name in names]
    for blob, (number, offset) in places.items():
        files[number][1].append((offset, blob))
    for _, placed in files:
        end = max(offset + blob.size for offset, blob in placed)
        placed.append((end, Held(MARK)))
    write_data_files(files, progress, workers, kept)
    avoid = {} if is_remote(path) else referring_models(path.parent, names, path)
    names = stage.publish(names, avoid)
    for tensor, blob in blobs:
        number, offset = places[blob]
        for name in (*DATA_FIELDS, "raw_data", "external_data"):
            tensor.ClearField(name)
        tensor.MergeFrom(external_tensor(names[number], offset, blob.size))
    return names


def _write_inline(
    model: ModelProto,
    blobs: list[tuple[TensorProto, Blob]],
    path: Path,
    progress: Callable[[int], None] | None,
) -> None:
    """Write a model with all its weights to an existing file. Random marks replace blobs while it is serialized."""
    token = os.urandom(_TOKEN)
    for number, (tensor, _) in enumerate(blobs):
        forget_location(tensor)
        tensor.raw_data = token + number.to_bytes(8, "big")
    data = model.SerializeToString()
    spans = find_data(data, lambda start, stop: data.find(token, start, stop) >= 0)
    # The marks say which blob goes where, since the order of tensors in the bytes is protobuf's.
    order = [int.from_bytes(data[span.end - 8 : span.end], "big") for span in spans]
    if sorted(order) != list(range(len(blobs))):
        raise InternalError("A weight is in a part of the model that is not searched.")
    sizes = [blobs[number][1].size for number in order]
    heads = [(raw_data_head(size), size) for size in sizes]
    filled = list[tuple[int, Blob]]()
    for position, piece in replaced(data, spans, heads):
        if isinstance(piece, int):
            filled.append((position, blobs[order[piece]][1]))
        else:
            filled.append((position, Held(piece)))
    write = stream_blobs if is_remote(path) else write_blobs
    write(path, filled, progress)


@contextmanager
def _replacing(
    path: Path, keep: AbstractSet[Path], kept: Part | None = None
) -> Iterator[Saved]:
    """Yield a result, here or at a URL, which is put in its place at the end of the block; arguments as for
    :func:`saving`.
    """
    try:
        with (remote_staging if is_remote(path) else staging)(path, kept) as stage:
            saved = Saved(stage)
            yield saved
            stage.commit(lambda: _outdated(path, keep, saved.notes))
    except (OSError, ValueError) as error:
        if isinstance(error, (ArgumentError, ModelError)):
            raise
        raise unwritable(path, error) from None


@contextmanager
def copying(
    source: Path, target: Path, keep: AbstractSet[Path], size: int
) -> Iterator[Saved]:
    """Write a model file as it is, with weights of ``size`` bytes, as :func:`saving` writes a model.

    Raises:
        OutputError: the target cannot be written.
    """
    with _replacing(target, keep) as saved:
        saved.size = size
        with source.open("rb") as read, writing(saved.stage.main) as written:
            shutil.copyfileobj(read, written, PIECE)
        yield saved


def _outdated(path: Path, keep: AbstractSet[Path], left: list[str]) -> list[Path]:
    """Return the files to remove once ``path`` is replaced, which happens next: it is the last moment to look at
    sources.

    Args:
        path: the file that is replaced.
        keep: files that are still needed.
        left: receives a sentence about each data file of the present model that stays although the new one does not
            need it.

    Raises:
        SourceChangedError: a file that was read is gone.
    """
    confirm_sources()
    data = _data_of(path, keep)
    referring = referring_models(path.parent, data, path)
    removed = []
    for name, file in data.items():
        if name in referring:
            left.append(
                f"{name} stays: {label_beside(referring[name], path.parent)} refers to it."
            )
        elif is_data_name(name, path.name) and is_own(file):
            removed.append(file)
        else:
            left.append(
                f"{name}, with the weights of the model that was replaced, stays, because onnxamp did not write it."
            )
    release_sources([path, *removed])
    return removed


def _data_of(path: Path, keep: AbstractSet[Path]) -> dict[str, Path]:
    """Return the data files of the present model at ``path`` that are not kept, by name."""
    try:
        names = data_files_of(path) if path.exists() else set[str]()
    except (OSError, SourceChangedError):
        return {}
    files = {name: path.parent / name for name in sorted(names)}
    return {
        name: file
        for name, file in files.items()
        if file.is_file() and file.resolve() not in keep
    }
