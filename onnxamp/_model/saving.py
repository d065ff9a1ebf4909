"""Writing models: weights are converted while they are copied from file to file, and output is whole or not at all.

:mod:`onnxamp._model.staging` says what becomes of files when a process is killed.
"""

import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from onnx import ModelProto, TensorProto, numpy_helper

from onnxamp._errors import ArgumentError, ModelError
from onnxamp._model.blobs import PIECE, Blob, Copied, Held, layout, stream_blobs, write_blobs
from onnxamp._model.converter import EXTERNAL_MIN, WeightConverter
from onnxamp._model.external_data import data_location, external_tensor, forget_location
from onnxamp._model.protos import stored_bytes, tensors_of
from onnxamp._model.remote_stage import RemoteStage, remote_staging
from onnxamp._model.renaming import rename_data
from onnxamp._model.shards import DataFile, write_data_files
from onnxamp._model.sources import confirm_sources, release_sources
from onnxamp._model.staging import Stage, staging
from onnxamp._model.storage import load_model, unwritable
from onnxamp._model.weights import embed
from onnxamp._model.wire import find_data, raw_data_head, replaced
from onnxamp._ops.tables import read_table
from onnxamp._paths.paths import is_remote, writing
from onnxamp._state.state import Part
from onnxamp._workers.executor import Workers

_TOKEN: Final = 16
"""Length of the random bytes that, with a number, stand for the data of a weight until they are written."""
_DATA_FIELDS: Final = (
    "raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data",
)  # fmt: skip


def save_model(
    model: ModelProto,
    path: Path,
    converter: WeightConverter,
    *,
    external: bool,
    shard_bytes: int | None = None,
    data_names: str = "onnx",
    keep: frozenset[Path] = frozenset(),
    progress: Callable[[int, int], None] | None = None,
    approve: Callable[[Path], None] | None = None,
    workers: Workers | None = None,
    kept: Part | None = None,
) -> int:
    """Write a model whole or not at all. ``model`` is changed: it refers to what was written afterwards.

    Args:
        model: the model; its weights may be placeholders of ``converter``.
        path: where it goes.
        converter: holds the weights that are still to be converted, and knows the model's folder.
        external: put weights of at least EXTERNAL_MIN bytes into a data file beside the model ...
        shard_bytes: ... or into several, each of about this size.
        data_names: whose names data files get; see ``_data/presets.toml``.
        keep: data files that are still needed. Others that an earlier save to ``path`` wrote are removed.
        progress: called with (bytes written, bytes in all) while large weights are written.
        approve: called with the new model under another name; if it raises, nothing changes.
        workers: who writes data files if there are several; None for this process.
        kept: keeps what is written until all is, for a run that is interrupted to go on.

    Returns:
        Bytes of all weights that were written.

    Raises:
        OutputError: the folder is missing or read-only, or the disk is full. Nothing was changed then.
        ExternalDataError: a weight cannot be read.
    """
    try:
        with _staging(path, kept) as stage:
            blobs, total = _blobs(model, converter, held=external)
            report = _adding_up(progress, total) if progress else None
            if external:
                # Where its data are gone, the model to replace may refer to a file that is new.
                written = _write_data(blobs, stage, shard_bytes, data_names, report, workers, kept)
                keep |= {(path.parent / name).resolve() for name in written}
                stage.main.write_bytes(model.SerializeToString())
            else:
                _write_inline(model, blobs, stage.main, report)
            _approved(stage, approve)
            identity = stage.identity()
            stage.commit(lambda: _outdated(path, keep))
    except (OSError, ValueError) as error:
        if isinstance(error, (ArgumentError, ModelError)):
            raise
        raise unwritable(path, error) from None
    if external and blobs and not is_remote(path):
        _name_as_usual(model, path, identity, [tensor for tensor, _ in blobs], data_names)
    return total


def _name_as_usual(
    model: ModelProto, path: Path, identity: str, tensors: Sequence[TensorProto], data_names: str
) -> None:
    """Rename the data files of a result that is in its place, where those of its predecessor had the usual names."""
    places = [item for tensor in tensors for item in tensor.external_data if item.key == "location"]
    used = sorted({item.value for item in places}, key=lambda name: (len(name), name))
    names = dict(zip(used, _data_names(path.name, len(used), data_names), strict=True))
    if used == list(names.values()):
        return
    for item in places:
        item.value = names[item.value]
    renamed = False
    with suppress(OSError):  # the disk is full, say: the result is whole as it is
        renamed = rename_data(path, identity, names, model.SerializeToString())
    if not renamed:
        before = {new: old for old, new in names.items()}
        for item in places:
            item.value = before[item.value]


def _adding_up(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """A function that takes the bytes of each piece and reports their sum."""
    done = 0

    def report(written: int) -> None:
        nonlocal done
        done += written
        progress(done, total)

    return report


def _blobs(model: ModelProto, converter: WeightConverter, *, held: bool) -> tuple[list[tuple[TensorProto, Blob]], int]:
    """The weights whose data are to be streamed, and the bytes of all weights. Small weights are embedded.

    Args:
        model: its tensors are changed.
        converter: see :func:`save_model`.
        held: stream data that are in memory, too.
    """
    blobs: list[tuple[TensorProto, Blob]] = []
    known: dict[Blob, Blob] = {}
    total = 0
    for tensor in tensors_of(model):
        total += stored_bytes(tensor)
        blob = _blob(tensor, converter, held=held)
        if blob is not None:
            blobs.append((tensor, known.setdefault(blob, blob)))
    converter.share(known)
    return blobs, total


def _blob(tensor: TensorProto, converter: WeightConverter, *, held: bool) -> Blob | None:
    pending = converter.pending(tensor)
    if pending is not None:
        return pending
    if stored_bytes(tensor) < EXTERNAL_MIN:
        embed(tensor, converter.base_dir)
        return None
    place = data_location(tensor, converter.base_dir)
    if place is not None:
        return Copied(place)
    if not held:
        return None
    is_raw = tensor.HasField("raw_data")
    return Held(tensor.raw_data if is_raw else numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def _write_data(
    blobs: list[tuple[TensorProto, Blob]],
    stage: Stage | RemoteStage,
    shard_bytes: int | None,
    data_names: str,
    progress: Callable[[int], None] | None,
    workers: Workers | None,
    kept: Part | None,
) -> list[str]:
    """Write all blobs to new data files, each once, and point the tensors to them; returns the names of the files."""
    unique = list(dict.fromkeys(blob for _, blob in blobs))
    places = dict(zip(unique, layout([blob.size for blob in unique], shard_bytes), strict=True))
    names = _data_names(stage.path.name, places[unique[-1]][0] + 1 if unique else 0, data_names)
    files: list[DataFile] = [(stage.place(name), []) for name in names]
    for blob, (number, offset) in places.items():
        files[number][1].append((offset, blob))
    write_data_files(files, progress, workers, kept)
    names = stage.publish(names)
    for tensor, blob in blobs:
        number, offset = places[blob]
        for name in _DATA_FIELDS:
            tensor.ClearField(name)
        tensor.MergeFrom(external_tensor(names[number], offset, blob.size))
    return names


def _data_names(base: str, count: int, style: str) -> list[str]:
    """``model.onnx.data`` if one is enough, else ``model.onnx-00001-of-00003.data`` and so on; or in another style."""
    row = read_table("presets")[style]
    forms = [row["one"]] if count == 1 else [row["first"], *[row["other"]] * (count - 1)][:count]
    return [form.format(name=base, number=index + 1, index=index, count=count) for index, form in enumerate(forms)]


def _write_inline(
    model: ModelProto, blobs: list[tuple[TensorProto, Blob]], path: Path, progress: Callable[[int], None] | None
) -> None:
    """Write a model with all its weights to an existing file. Random marks stand for blobs while it is serialised."""
    token = secrets.token_bytes(_TOKEN)
    for number, (tensor, _) in enumerate(blobs):
        forget_location(tensor)
        tensor.raw_data = token + number.to_bytes(8, "big")
    data = model.SerializeToString()
    spans = find_data(data, lambda start, stop: data.find(token, start, stop) >= 0)
    order = [int.from_bytes(data[span.end - 8 : span.end], "big") for span in spans]
    sizes = [blobs[number][1].size for number in order]
    pieces, holes, _ = replaced(data, spans, [(raw_data_head(size), size) for size in sizes])
    filled = [(hole.position, blobs[order[hole.index]][1]) for hole in holes]
    if is_remote(path):
        stream_blobs(path, [*((position, Held(bytes(piece))) for position, piece in pieces), *filled], progress)
        return
    with path.open("r+b") as file:
        for position, piece in pieces:
            file.seek(position)
            file.write(piece)
    write_blobs(path, filled, progress)


def _approved(stage: Stage | RemoteStage, approve: Callable[[Path], None] | None) -> None:
    if approve is not None:
        try:
            with stage.shown() as shown:
                approve(shown)
        except Exception:
            stage.discard()
            raise


def _staging(path: Path, kept: Part | None = None) -> AbstractContextManager[Stage | RemoteStage]:
    """A stage for a result, here or behind a URL."""
    return remote_staging(path, kept) if is_remote(path) else staging(path, kept)


def _copy_bytes(source: Path, target: Path) -> None:
    if is_remote(source) or is_remote(target):
        with source.open("rb") as read, writing(target) as written:
            shutil.copyfileobj(read, written, PIECE)
    else:
        shutil.copyfile(source, target)


def copy_file(source: Path, target: Path, keep: frozenset[Path], approve: Callable[[Path], None] | None = None) -> None:
    """Copy a model file whole or not at all; ``keep`` and ``approve`` as for :func:`save_model`.

    Raises:
        OutputError: the target cannot be written.
    """
    try:
        with _staging(target) as stage:
            _copy_bytes(source, stage.main)
            _approved(stage, approve)
            stage.commit(lambda: _outdated(target, keep))
    except OSError as error:
        if isinstance(error, ModelError):  # a data file is missing
            raise
        raise unwritable(target, error) from None


def _outdated(path: Path, keep: frozenset[Path]) -> list[Path]:
    """The files to remove once ``path`` is replaced, which happens next: it is the last moment to look at sources.

    Raises:
        SourceChangedError: what was read is no longer there.
    """
    confirm_sources()
    files = _own_data_files(path, keep)
    release_sources([path, *files])
    return files


def _own_data_files(path: Path, keep: frozenset[Path]) -> list[Path]:
    """Data files that an earlier save to ``path`` wrote: nothing refers to them once it is replaced."""
    own = re.compile(re.escape(path.name) + r"(\.[0-9a-f]{8})?((-[0-9]{5}-of-[0-9]{5})?\.data|_data(_[0-9]+)?)")
    files = {}
    with suppress(OSError, ModelError):
        if not any(own.fullmatch(file.name) for file in path.parent.iterdir()):
            return []
        for tensor in tensors_of(load_model(path)):
            for item in tensor.external_data:
                if item.key == "location" and isinstance(item.value, str) and own.fullmatch(item.value):
                    files[item.value] = path.parent / item.value
    return [data for data in files.values() if data.is_file() and data.resolve() not in keep]
