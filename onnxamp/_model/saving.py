"""Writing models: weights are converted on their way from file to file, and output is whole or not at all.

See :mod:`onnxamp._model.staging` for what becomes of files when a process is killed.
"""

import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from onnx import ModelProto, TensorProto, numpy_helper

from onnxamp._errors import ModelError
from onnxamp._model.blobs import Blob, Copied, Held, layout, write_blobs
from onnxamp._model.staging import Stage, staging
from onnxamp._model.storage import (
    EXTERNAL_MIN,
    PENDING,
    WeightConverter,
    load_model,
    place_of,
    tensors_of,
    unwritable,
)
from onnxamp._model.weights import embed, external_of, forget_place, stored_bytes
from onnxamp._model.wire import find_data, raw_data_head, replaced

_TOKEN: Final = 16
"""Length of the random bytes that, with a number, stand for a weight's data until they are written."""
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
    keep: frozenset[Path] = frozenset(),
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a model whole or not at all. ``model`` is changed: it then refers to what was written.

    Args:
        converter: holds the weights that are still to be converted.
        external: put weights of at least EXTERNAL_MIN bytes into a data file beside the model.
        shard_bytes: or into several of about this size.
        keep: data files that somebody else needs; those of an earlier result are removed otherwise.
        progress: called with (bytes written, bytes in all) while large weights are written.

    Returns:
        Bytes of all weights that were written.

    Raises:
        OutputError: the folder is missing or read-only, or the disk is full. Nothing was changed then.
        ExternalDataError: a weight cannot be read.
    """
    try:
        with staging(path) as stage:
            blobs, total = _blobs(model, converter, held=external)
            report = _adding_up(progress, total) if progress else None
            if external:
                _write_data(blobs, stage, shard_bytes, report)
                stage.main.write_bytes(model.SerializeToString())
            else:
                _write_inline(model, blobs, stage.main, report)
            stage.commit(lambda: _own_data_files(path, keep))
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise unwritable(path, error) from None
    return total


def _adding_up(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """A function that takes the bytes of each piece."""
    done = 0

    def report(written: int) -> None:
        nonlocal done
        done += written
        progress(done, total)

    return report


def _blobs(model: ModelProto, converter: WeightConverter, *, held: bool) -> tuple[list[tuple[TensorProto, Blob]], int]:
    """The weights whose data are to be streamed, and bytes of all; small ones are brought into the model.

    Args:
        held: also those that are in memory.
    """
    found: list[tuple[TensorProto, Blob]] = []
    known: dict[Blob, Blob] = {}
    total = 0
    for tensor in tensors_of(model):
        total += stored_bytes(tensor)
        blob = _blob(tensor, converter, held=held)
        if blob is not None:
            found.append((tensor, known.setdefault(blob, blob)))
    converter.share(known)
    return found, total


def _blob(tensor: TensorProto, converter: WeightConverter, *, held: bool) -> Blob | None:
    location = next((item.value for item in tensor.external_data if item.key == "location"), "")
    if location.startswith(PENDING):
        return converter.pending[int(location.removeprefix(PENDING))]
    size = stored_bytes(tensor)
    if size < EXTERNAL_MIN:
        embed(tensor, converter.base_dir)
        return None
    place = external_of(tensor, converter.base_dir)
    if place is not None:
        return Copied(place)
    if not held:
        return None
    is_raw = tensor.HasField("raw_data")
    return Held(tensor.raw_data if is_raw else numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def _write_data(
    blobs: list[tuple[TensorProto, Blob]], stage: Stage, shard_bytes: int | None, progress: Callable[[int], None] | None
) -> None:
    """Write all blobs to new data files, each once, and point the tensors to them; nothing where there are none."""
    unique = list(dict.fromkeys(blob for _, blob in blobs))
    places = dict(zip(unique, layout([blob.size for blob in unique], shard_bytes), strict=True))
    names = _data_names(stage.path.name, places[unique[-1]][0] + 1 if unique else 0)
    for number, name in enumerate(names):
        (stage.data / name).touch()
        here = [(offset, blob) for blob, (shard, offset) in places.items() if shard == number]
        write_blobs(stage.data / name, here, progress)
    names = stage.publish(names)
    for tensor, blob in blobs:
        number, offset = places[blob]
        for field in _DATA_FIELDS:
            tensor.ClearField(field)
        tensor.MergeFrom(place_of(names[number], offset, blob.size))


def _data_names(base: str, count: int) -> list[str]:
    """``model.onnx.data``, or ``model.onnx-00001-of-00003.data`` and so on."""
    if count == 1:
        return [f"{base}.data"]
    return [f"{base}-{number + 1:05d}-of-{count:05d}.data" for number in range(count)]


def _write_inline(
    model: ModelProto, blobs: list[tuple[TensorProto, Blob]], path: Path, progress: Callable[[int], None] | None
) -> None:
    """Write a model with all its weights in it to an existing file: marks stand for blobs where it is serialized."""
    token = secrets.token_bytes(_TOKEN)
    for number, (tensor, _) in enumerate(blobs):
        forget_place(tensor)
        tensor.raw_data = token + number.to_bytes(8, "big")
    data = model.SerializeToString()
    spans = find_data(data, lambda start, stop: data.find(token, start, stop) >= 0)
    order = [int.from_bytes(data[span.end - 8 : span.end], "big") for span in spans]
    sizes = [blobs[number][1].size for number in order]
    pieces, holes, _ = replaced(data, spans, [(raw_data_head(size), size) for size in sizes])
    with path.open("r+b") as file:
        for position, piece in pieces:
            file.seek(position)
            file.write(piece)
    write_blobs(path, [(hole.position, blobs[order[hole.index]][1]) for hole in holes], progress)


def copy_file(source: Path, target: Path, keep: frozenset[Path]) -> None:
    """Copy an unchanged model file, whole or not at all; ``keep`` as in :func:`save_model`.

    Raises:
        OutputError: the target cannot be written.
    """
    try:
        with staging(target) as stage:
            shutil.copyfile(source, stage.main)
            stage.commit(lambda: _own_data_files(target, keep))
    except OSError as error:
        raise unwritable(target, error) from None


def _own_data_files(path: Path, keep: frozenset[Path]) -> list[Path]:
    """Data files that an earlier save of this very output wrote: nobody needs them once it is replaced."""
    own = re.compile(re.escape(path.name) + r"(\.[0-9a-f]{8})?(-[0-9]{5}-of-[0-9]{5})?\.data")
    found = {}
    with suppress(OSError, ModelError):
        if not any(own.fullmatch(file.name) for file in path.parent.iterdir()):
            return []
        for tensor in tensors_of(load_model(path)):
            for item in tensor.external_data:
                if item.key == "location" and isinstance(item.value, str) and own.fullmatch(item.value):
                    found[item.value] = path.parent / item.value
    return [data for data in found.values() if data.is_file() and data.resolve() not in keep]
