"""Kinds of folders: the form in which the software that loads a folder expects its models (``_data/folders.toml``)."""

import json
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, get_args

from onnx import TensorProto, ValueInfoProto

from onnxamp._base.errors import ArgumentError
from onnxamp._base.paths import cannot_read, is_remote
from onnxamp._base.records import record
from onnxamp._facts.dtypes import DtypeName
from onnxamp._facts.tables import read_table
from onnxamp._model.model import Model
from onnxamp._options.options import Options


class Name(NamedTuple):
    """The name of the result of a model whose own name without its suffix fits a pattern."""

    pattern: str
    becomes: str
    types: str
    """The software's name for the types of such a file; "" if it has none."""

    @property
    def is_left_out(self) -> bool:
        """Whether such a file holds, in other types, a network whose float32 file is there."""
        return not self.becomes


class Setting(NamedTuple):
    """A setting in a JSON file that results need; in the table, ``value`` is the name of its value."""

    file: str
    keys: Sequence[str]
    value: Any


SAME: Final = Name("*", "{stem}", "")


@record(kw_only=True)
class PackageKind:
    """A row of the table, whose comments define each column."""

    name: str
    marks: tuple[str, ...]
    models: str
    options: Mapping[str, Any] = field(default_factory=dict)
    low_io: tuple[str, ...] = ()
    high_io: tuple[str, ...] = ()
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = get_args(DtypeName)
    data_names: str = "onnx"
    names: tuple[Name, ...] = (SAME,)
    settings: tuple[Setting, ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return the kind that a row describes."""
        values = dict(row)
        for name, value in row.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        if "names" in row:
            values["names"] = tuple(Name(*name) for name in row["names"])
        values["settings"] = tuple(Setting(**one) for one in row.get("settings", ()))
        return cls(**values)

    def marks_in(self, folder: Path) -> bool:
        """Return whether a folder contains all files that mark the kind."""
        return all(any(folder.glob(mark)) for mark in self.marks)

    def is_mark(self, name: str) -> bool:
        """Return whether a file is one that marks the kind; ``name``: its path in the folder."""
        return _fits(name, self.marks)

    def name_of(self, path: Path) -> Name:
        """Return the name of the result of a model."""
        fitting = (name for name in self.names if fnmatchcase(path.stem, name.pattern))
        return next(fitting)

    def adapted(
        self, options: Options, given: Collection[str], model: Model
    ) -> Options:
        """Return the options for a model of such a folder.

        Args:
            options: the options of the call.
            given: the names of the options that the user chose, which are kept.
            model: the model.
        """
        usual = dict(self.options)
        if self.low_io:
            graph = model.proto.graph
            entries = (*graph.input, *graph.output)
            floats = (entry.name for entry in entries if _is_float32(entry))
            kept = frozenset(name for name in floats if not self.is_low(name))
            usual["keep_io_types"] = kept
        own = {name: value for name, value in usual.items() if name not in given}
        return replace(options, **own)

    def limits_of(self, model: Model) -> Mapping[str, Mapping[str, float]]:
        """Return the limits that suffice if a model's outputs miss the usual limits, by metric and output."""
        names = [entry.name for entry in model.proto.graph.output]
        by_metric: dict[str, dict[str, float]] = {}
        for metric, limits in self.limits.items():
            by_output = by_metric[metric] = {}
            for pattern, limit in limits.items():
                fitting = [name for name in names if fnmatchcase(name, pattern)]
                by_output |= dict.fromkeys(fitting, limit)
        return by_metric

    def is_low(self, name: str) -> bool:
        """Return whether the software takes an input or output in the low-precision type."""
        return _fits(name, self.low_io) and not _fits(name, self.high_io)


_table: Final = cache(partial(read_table, "folders"))


@cache
def kinds() -> tuple[PackageKind, ...]:
    """Return all kinds; the first one that fits a folder counts."""
    return tuple(map(PackageKind.of, _table()["kinds"]))


def is_companion(name: str) -> bool:
    """Return whether software that loads a folder of models reads a file of this name."""
    return _fits(name, _table()["companions"])


def stores_of(folder: Path) -> Iterator[Path]:
    """Yield the folders of a cache that the links in a folder lead to."""
    if is_remote(folder):
        return
    path = folder.absolute().as_posix()
    for store in _table()["stores"]:
        if fnmatchcase(path, store["folder"]):
            yield folder / store["files"]


def files_below(folder: Path, without: Container[Path] = ()) -> Iterator[Path]:
    """Yield the files below a folder, sorted, except hidden ones and those below symbolic links or ``without``.

    Args:
        folder: the folder; folders that may not be listed count as empty.
        without: resolved folders.
    """
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        below = list[Path]()
        with suppress(OSError):
            below = sorted(path for path in here.iterdir() if path.name[0] != ".")
        folders = [path for path in below if path.is_dir()]
        yield from (path for path in below if path not in folders)
        # Last in, first out: reversed, folders are visited in the order of their names.
        own = [path for path in reversed(folders) if not path.is_symlink()]
        waiting += [path for path in own if path.resolve() not in without]


class Package(NamedTuple):
    """A folder of a known kind, as some software loads it."""

    folder: Path
    kind: PackageKind

    @property
    def left_out(self) -> list[Path]:
        """The models that are variants, in other types, of a network that also exists in float32."""
        models = sorted(self.folder.glob(self.kind.models))
        return [path for path in models if self.kind.name_of(path).is_left_out]

    def check(self, dtype: str) -> None:
        """Check that the software supports a type, and that the JSON files can be read that may need settings.

        Raises:
            ArgumentError: it does not support the type, or a file cannot be read, or holds no settings.
        """
        kind = self.kind
        if dtype not in kind.dtypes:
            raise ArgumentError(
                f"{str(self.folder)!r} is a folder for {kind.name}, which does not support {dtype}: use"
                f" {' or '.join(kind.dtypes)}, or convert the file alone."
            )
        for name in {setting.file for setting in kind.settings}:
            path = self.folder / name
            try:
                config = json.loads(path.read_bytes())
            except (OSError, ValueError) as error:
                raise cannot_read(f"the config {str(path)!r}", error) from error
            if not isinstance(config, dict):
                raise ArgumentError(f"The config {str(path)!r} is not a JSON object.")


class Packages:
    """The packages at and below a folder; each folder is examined once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[Path, Package | None] = {}

    def of(self, model: Path) -> Package | None:
        """Return the package whose pattern of model paths matches this model; None if there is none.

        A component of a pipeline may look like a model of its own: of several kinds the first one counts, and of one
        kind the innermost package.
        """
        packages = list[Package]()
        folder = model.parent
        while not is_remote(folder):
            package = self._at(folder)
            path = model.relative_to(folder).as_posix()
            if package is not None and fnmatchcase(path, package.kind.models):
                packages.append(package)
            if folder == self._root:
                break
            folder = folder.parent
        order = [kind.name for kind in kinds()]
        return min(packages, key=lambda one: order.index(one.kind.name), default=None)

    def _at(self, folder: Path) -> Package | None:
        """Return the package in a folder; None if no kind has all its marks there."""
        if folder not in self._known:
            kind = next((kind for kind in kinds() if kind.marks_in(folder)), None)
            self._known[folder] = None if kind is None else Package(folder, kind)
        return self._known[folder]


def package_of(model: Path) -> Package | None:
    """Return the package that a model is in: its folder, or the folder above."""
    path = model.absolute()
    return Packages(path.parent.parent).of(path)


def _is_float32(entry: ValueInfoProto) -> bool:
    return bool(entry.type.tensor_type.elem_type == TensorProto.FLOAT)


def _fits(name: str, patterns: Collection[str]) -> bool:
    """Return whether a name matches one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
