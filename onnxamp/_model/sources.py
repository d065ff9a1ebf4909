"""The files that a model comes in: where its tensors' data is, and that no file changes while they are read.

Weights of a large model are read long after its graph, several times, and by other processes. So what identifies a file
is noted when it is first read. Whoever opens it later checks that it is the same one, and before anything is written or
reported, all files of the models that came in are looked at once more (:func:`confirm_sources`).

Data outside the proto is in a data file beside the model (ONNX external data), or still in the model file, where
:func:`onnxamp._model.model.load_model` left it because it is large. :func:`data_location` answers for both, with one
record.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from onnx import StringStringEntryProto, TensorProto

from onnxamp._base.errors import (
    ExternalDataError,
    MissingDataError,
    SourceChangedError,
)
from onnxamp._base.paths import as_path, is_remote, read_range
from onnxamp._base.public import active_within
from onnxamp._base.records import record
from onnxamp._model.protos import stored_bytes

INSIDE: Final = f"onnxamp:{os.urandom(8).hex()}:"
"""Prefix of the location of a weight that lies inside a model file; a :class:`DataLocation` as JSON follows. It is
random, so that no file can contain such an entry and name an arbitrary path.
"""
_WAS_DEFAULT: Final = "onnxamp:default"
"""Key of an entry that says: ``data_location`` was set to DEFAULT explicitly before the weight was left in its file."""


class FileStamp(NamedTuple):
    """A fingerprint of the contents of a file that needs no reading.

    The device is not part of it: each machine of a cluster numbers its own.
    """

    inode: int
    size: int
    modified: int
    """Nanoseconds."""

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the stamp of a file with that status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


def changed_error(path: Path) -> SourceChangedError:
    """Return the error to raise when a file is not the one that was read before."""
    return SourceChangedError(
        f"{str(path)!r} changed while onnxamp read it: run again when nothing else writes to it."
    )


def check_opened(file: BinaryIO, path: Path, stamp: FileStamp | None) -> None:
    """Check that an open file is the one that was stamped.

    Raises:
        SourceChangedError: it is another one, or was written to. OSError: its status cannot be read.
    """
    if stamp is not None and FileStamp.of(os.fstat(file.fileno())) != stamp:
        raise changed_error(path)


def check_same(
    before: Mapping[Path, FileStamp], now: Mapping[Path, FileStamp]
) -> None:
    """Check that files that were read again are those that were read before.

    Raises:
        SourceChangedError: one of them is another one, or was written to.
    """
    for path, stamp in before.items():
        if now.get(path) != stamp:
            raise changed_error(path)


_SOURCES: Final[ContextVar[dict[Path, FileStamp] | None]] = ContextVar(
    "onnxamp sources", default=None
)
"""The files of the models that came in, as they were when they were first read."""


def stamp_now(path: Path) -> FileStamp | None:
    """Return the stamp of a file as it is; None if there is none."""
    try:
        return FileStamp.of(path.stat())
    except OSError:
        return None


def _changed() -> Path | None:
    """Return a watched file that is no longer the one that was read; None if all are."""
    watched = _SOURCES.get() or {}
    for path, stamp in watched.items():
        if stamp_now(path) != stamp:
            return path
    return None


@contextmanager
def watched_sources(*, apart: bool = False) -> Iterator[None]:
    """Watch the files of models that come in within the block; a block inside another one belongs to it, unless it is
    ``apart``, as one job of several is.

    An error that is raised after one of them has changed says so, because that may be its cause.

    Raises:
        SourceChangedError: something else was raised, and a file has changed.
    """
    if _SOURCES.get() is not None and not apart:
        yield
        return
    with active_within(_SOURCES, {}):
        try:
            yield
        except SourceChangedError:
            raise
        except Exception as error:
            path = _changed()
            if path is not None:
                raise changed_error(path) from error
            raise


@contextmanager
def unchanged_sources() -> Iterator[None]:
    """Watch as :func:`watched_sources` in a block that reads but writes nothing: at its end all files are looked at.

    Raises:
        SourceChangedError: a file has changed.
    """
    with watched_sources():
        yield
        confirm_sources()


def note_sources(stamps: Mapping[Path, FileStamp]) -> None:
    """Watch files from now on, if :func:`watched_sources` asks for it.

    Raises:
        SourceChangedError: one of them was read before, and was another one then.
    """
    watched = _SOURCES.get()
    if watched is not None:
        for path, stamp in stamps.items():
            if watched.setdefault(path, stamp) != stamp:
                raise changed_error(path)


def confirm_sources() -> None:
    """Check that all files that are watched are still those that were read.

    Raises:
        SourceChangedError: one of them has changed.
    """
    path = _changed()
    if path is not None:
        raise changed_error(path)


def release_sources(replaced: Iterable[Path] | None = None) -> None:
    """Watch files no more: those that onnxamp itself has replaced, or all."""
    watched = _SOURCES.get() or {}
    gone = None if replaced is None else {path.resolve() for path in replaced}
    for path in list(watched):
        if gone is None or path.resolve() in gone:
            del watched[path]


class DataFile(NamedTuple):
    """A data file that was looked up, with symbolic links resolved, and the identity of its contents."""

    path: Path
    stamp: FileStamp


@record
class DataLocation:
    """The location of a tensor's data in a file: ``length`` bytes from byte ``offset``.

    With an exponent they are float32, and the tensor's numbers are theirs multiplied by ``2**-exponent``; with
    ``saturate_at``, the tensor is in low precision, and is to be converted from them. The ``stamp`` is that of the file
    when it was first read; None if it was not checked.
    """

    path: Path
    offset: int
    length: int
    exponent: int = 0
    saturate_at: float | None = None
    stamp: FileStamp | None = field(default=None, compare=False, repr=False)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file, which is on this machine, at the first byte of the data.

        Raises:
            SourceChangedError: it is not the file that was stamped. OSError: it cannot be opened.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            if self.stamp is None:
                raise
            raise changed_error(self.path) from None
        with file:
            check_opened(file, self.path, self.stamp)
            file.seek(self.offset)
            yield file

    def read(self) -> bytes:
        """Return the bytes of the data; fewer if the file ends early.

        Raises:
            SourceChangedError, OSError: as :meth:`opened`. ExternalDataError: a file at a URL cannot be read.
        """
        if is_remote(self.path):
            return read_range(self.path, self.offset, self.length)
        with self.opened() as file:
            return file.read(self.length)


def data_location(
    tensor: TensorProto,
    base_dir: Path | None,
    known: dict[str, DataFile] | None = None,
    linked: Path | None = None,
) -> DataLocation | None:
    """Return the location of a tensor's data, checked against the file; None if the proto itself holds them.

    Args:
        tensor: any tensor.
        base_dir: folder of the model's data files.
        known: location -> data files that were already looked up; filled here. Pass one dict for all tensors of a
            model, since looking up files is slow.
        linked: another folder in which data files may lie, to which links in ``base_dir`` lead.

    Raises:
        ExternalDataError: the folder is unknown, the file is missing or too short, or it lies outside the model's
            folder (absolute paths, ``..`` and symbolic links included).
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {item.key: item.value for item in tensor.external_data}
    is_text = all(isinstance(text, str) for text in entries.values())
    if len(entries) < len(tensor.external_data) or not is_text:
        raise ExternalDataError(
            f"The weight {tensor.name!r} gives the location of its data twice, or not in UTF-8."
        )
    location = entries.get("location", "")
    if location.startswith(INSIDE):
        row = json.loads(location.removeprefix(INSIDE))
        path, offset, length, exponent, saturate_at, stamp = row
        return DataLocation(
            path=as_path(path),
            offset=offset,
            length=length,
            exponent=exponent,
            saturate_at=saturate_at,
            stamp=None if stamp is None else FileStamp(*stamp),
        )
    known = {} if known is None else known
    if location not in known:
        known[location] = _data_file(tensor.name, location, base_dir, linked)
    file = known[location].path
    size = known[location].stamp.size
    expected = stored_bytes(tensor)
    offset = _number(entries.get("offset", "0"))
    length = _number(entries.get("length", str(expected)))
    if offset is None or length is None:
        raise ExternalDataError(
            f"The weight {tensor.name!r} has an unreadable offset or length."
        )
    if length != expected or offset + length > size:
        raise ExternalDataError(
            f"The weight {tensor.name!r} takes {expected} bytes; the model says {length}, at offset {offset} of"
            f" {str(file)!r}, which holds {size} bytes: copy or export both files again."
        )
    return DataLocation(file, offset, length, stamp=known[location].stamp)


def _data_file(
    name: str, location: str, base_dir: Path | None, linked: Path | None
) -> DataFile:
    """Return the data file of a location."""
    if base_dir is None:
        raise ExternalDataError(
            f"The weight {name!r} is stored in {location!r}, which onnxamp can locate only from the model's"
            " path: pass the path, or load the data first (onnx.load does)."
        )
    path = _resolved(base_dir, location)
    is_inside = path is not None and path.is_relative_to(base_dir.resolve())
    is_linked = path is not None and path.parent == linked
    if path is None or not (is_inside or is_linked):
        raise ExternalDataError(
            f"The weight {name!r} points to {location!r}, outside the model's folder {str(base_dir)!r}: refused."
        )
    if not path.is_file():
        file = f"The data file {str(path)!r} of the weight {name!r}"
        if path.exists() or path.is_symlink():  # a link that leads to itself
            raise ExternalDataError(f"{file} is not a regular file.")
        raise MissingDataError(f"{file} is missing: copy it there under that name.")
    return DataFile(path, FileStamp.of(path.stat()))


def _resolved(base_dir: Path, location: str) -> Path | None:
    """Return the path of a location with symbolic links resolved; None if it can name no file."""
    if not location:
        return None
    # Names that are too long, hold a zero byte, or lead through a circle of links raise errors of three kinds.
    try:
        path = (base_dir / location).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError):
        return None
    return path


def _number(text: str) -> int | None:
    """Return a number as ONNX Runtime writes it; Python's ``int`` would also accept signs, blanks and other digits."""
    # 2**63, beyond any file, has 19 digits; int() takes time quadratic in digits.
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if is_number else None


def location_entries(tensor: TensorProto) -> list[StringStringEntryProto]:
    """Return the entries that name the file of a tensor's data; there is more than one only if they are damaged."""
    return [item for item in tensor.external_data if item.key == "location"]


def lies_inside(tensor: TensorProto) -> bool:
    """Return whether the tensor's data were left in a model file."""
    # protobuf returns text that is not UTF-8 as bytes.
    texts = [item.value for item in location_entries(tensor)]
    return any(isinstance(text, str) and text.startswith(INSIDE) for text in texts)


def has_data_file(tensor: TensorProto) -> bool:
    """Return whether the tensor's data are in a file other than the model's."""
    return tensor.data_location == TensorProto.EXTERNAL and not lies_inside(tensor)


def external_tensor(location: str, offset: int, length: int) -> TensorProto:
    """Return a tensor with only an external location: a name relative to the model's folder."""
    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value=str(offset))
    tensor.external_data.add(key="length", value=str(length))
    return tensor


def inside_tensor(place: DataLocation, *, was_default: bool) -> TensorProto:
    """Return a tensor with only the location of data left in a file, which is trusted from then on.

    Args:
        place: where the data lie.
        was_default: whether the tensor said explicitly that it holds its data (``data_location`` DEFAULT).
    """
    row = (
        str(place.path),
        place.offset,
        place.length,
        place.exponent,
        place.saturate_at,
        place.stamp,
    )
    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=f"{INSIDE}{json.dumps(row)}")
    if was_default:
        tensor.external_data.add(key=_WAS_DEFAULT)
    return tensor


def scaled_tensor(
    tensor: TensorProto, base_dir: Path | None, exponent: int
) -> TensorProto | None:
    """Return a float32 tensor multiplied by ``2**-exponent``, which is done when it is read; None if it holds its data.

    Raises:
        ExternalDataError: see :func:`data_location`.
    """
    place = data_location(tensor, base_dir)
    if place is None:
        return None
    scaled = replace(place, exponent=place.exponent + exponent)
    result = inside_tensor(scaled, was_default=_was_default(tensor))
    result.data_type = tensor.data_type
    result.dims[:] = tensor.dims
    return result


def _was_default(tensor: TensorProto) -> bool:
    """Return whether the tensor says in its file that it holds its data, or will once they are embedded."""
    return has_data_file(tensor) or any(
        item.key == _WAS_DEFAULT for item in tensor.external_data
    )


def forget_location(tensor: TensorProto) -> None:
    """Remove the external location from the tensor, in place, and set ``data_location`` as it was in its file."""
    if _was_default(tensor):
        tensor.data_location = TensorProto.DEFAULT
    else:
        tensor.ClearField("data_location")
    tensor.ClearField("external_data")
