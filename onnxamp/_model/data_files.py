"""The data files of results: their names, the mark by which onnxamp recognizes its own, and the models that refer to
them.

Models of a folder and of its parent may share a data file. So a file is removed only if onnxamp wrote it, which its
last bytes show, and if no other model there refers to it. A new data file never gets a name that another model refers
to, even if no such file exists: that model would read the wrong weights.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError
from onnx import ModelProto

from onnxamp._errors import SourceChangedError
from onnxamp._model.model import parse_text, read_graph
from onnxamp._model.protos import tensors_of
from onnxamp._model.sources import has_data_file
from onnxamp._ops import read_table
from onnxamp._paths import is_remote, read_range

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


def data_names_of(base: str, count: int, style: str) -> list[str]:
    """``model.onnx.data`` if one is enough, else ``model.onnx-00001-of-00003.data`` and so on; or in another style."""
    row = read_table("presets")[style]
    forms = (
        [row["one"]]
        if count == 1
        else [row["first"], *[row["other"]] * (count - 1)][:count]
    )
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
    entries = (
        entry
        for tensor in external
        for entry in tensor.external_data
        if entry.key == "location"
    )
    return {
        os.path.normpath(entry.value)
        for entry in entries
        if isinstance(entry.value, str)
    }


def referring_models(folder: Path, names: Iterable[str], *but: Path) -> dict[str, Path]:
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
    found: dict[str, Path] = {}
    if not wanted:
        return found
    own = {path.resolve() for path in but}
    above = [path for parent in _parents(folder) for path in _models_in(parent)]
    for path in (*_models_in(folder), *above[:_MOST_ABOVE]):
        if path.resolve() not in own:
            found |= {
                name: path for name in _referred(path, wanted) if name not in found
            }
    return (
        dict.fromkeys(wanted, above[_MOST_ABOVE]) | found
        if len(above) > _MOST_ABOVE
        else found
    )


def label_beside(model: Path, folder: Path) -> str:
    """Return the name of a model for readers who are in the folder: ``model.onnx`` or ``../model.onnx``."""
    return (
        model.name
        if model.parent == folder
        else os.path.relpath(_place(model.parent, model.name), folder.resolve())
    )


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
    return {folder.absolute().parent.resolve(), folder.resolve().parent} - {
        folder.resolve()
    }


def _models_in(folder: Path) -> list[Path]:
    """Return the files of a folder that may contain a model, in order; none if it cannot be listed."""
    try:
        models = (path for path in folder.iterdir() if path.suffix.lower() in _MODELS)
        return [path for path in sorted(models) if path.is_file()]
    except OSError:
        return []


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
