"""Models that work together, the function that runs them, and the tolerance: a manifest in TOML, or arguments.

.. code-block:: toml

    function = "speech.py:synthesize"  # beside the manifest, or "package:function"
    tolerance = 0.01                   # what all models together may lose
    metric = "rel-l2"                  # where the function returns outputs: how they are compared
    better = "lower"                   # where it returns a number: whether lower or higher is better
    dtypes = ["float16", "bfloat16"]   # the low types to try
    levels = ["O3", "O2", "O1", "auto"]

    [options]                          # of all models, as onnxamp.convert_model takes them
    target = "cuda"

    [models]
    text_encoder = "text_encoder.onnx"
    vocoder = { path = "vocoder.onnx", dtypes = ["float16"], options = { keep_high = ["phases"] } }

A model with ``dtypes = []`` does not change.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, get_args

from onnxamp._dtypes import DtypeName, low_type
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._model.model import Model
from onnxamp._numerics.limits import imported, name_of
from onnxamp._options.options import Options
from onnxamp._options.values import Level, check_level, meant
from onnxamp._paths import as_path, cannot_read

BETTER: Final = ("lower", "higher")
"""Which of two numbers is better."""

LEVELS: Final = (Level.O3, Level.O2, Level.O1, Level.AUTO)
"""The levels to try."""

_DECIDED: Final = frozenset(
    {"level", "dtype", "rescale", "rescaling", "rounding", "rule"}
)
"""Options that the search sets, or that a manifest cannot contain."""

Function: TypeAlias = Callable[[Mapping[str, Any]], Any]
"""A function that runs the models, and returns a number or a dict of outputs."""


class Member(NamedTuple):
    """A model of a pipeline.

    ``file`` is the path of its result in the folder for results; ``options`` are keyword arguments of
    :func:`onnxamp.convert_model`.
    """

    name: str
    model: Model
    file: str
    dtypes: tuple[str, ...]
    levels: tuple[Level, ...]
    options: Mapping[str, Any]

    def asked(self, level: Level, dtype: str, **more: Any) -> Options:
        """Return the options for a conversion at this level in this type."""
        return Options.of(level, {**self.options, "dtype": dtype, **more})


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Models in the order of the manifest, and the function that runs them.

    ``path`` is the manifest; ``called`` is the name of the function.
    """

    members: tuple[Member, ...]
    run: Function
    called: str
    tolerance: float = 1e-2
    metric: Any = "auto"
    better: str = "lower"
    path: Path | None = None

    def __getitem__(self, name: str) -> Member:
        """Return the model of this name."""
        return next(member for member in self.members if member.name == name)

    def __post_init__(self) -> None:
        if self.better not in BETTER:
            raise ArgumentError(
                f"better must be 'lower' or 'higher', not {self.better!r}."
            )
        if not self.members:
            raise ArgumentError(
                "A pipeline needs at least one model: name some under [models]."
            )


def make_pipeline(source: Any, given: Mapping[str, Any]) -> Pipeline:
    """Return the pipeline of a manifest, or of models by name.

    Args:
        source: a manifest's path, or models by name.
        given: keys that override those of the manifest, except the models. None overrides nothing.

    Raises:
        ArgumentError: the manifest cannot be read, or is invalid. ArgumentTypeError: ``source`` is neither.
        ModelError: a model cannot be read.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    path = None
    if isinstance(source, Mapping):
        models = dict(source)
    elif isinstance(source, (str, Path)) or hasattr(source, "__fspath__"):
        path = as_path(source)
        said = _read(path)
        models = said.pop("models")
        options = {**said.get("options", {}), **settings.get("options", {})}
        settings = {**said, **settings, "options": options}
    else:
        raise ArgumentTypeError(
            f"pipeline must be a manifest's path or a dict of models by name, not {type(source).__name__}."
        )
    beside = None if given.get("function") is not None else path
    run, called = _function(settings.get("function"), beside)
    folder = path.absolute().parent if path is not None else None
    members = tuple(
        _member(name, entry, settings, folder) for name, entry in models.items()
    )
    _check_files(members)
    return Pipeline(
        members=members,
        run=run,
        called=called,
        tolerance=settings.get("tolerance", 1e-2),
        metric=settings.get("metric") or "auto",
        better=settings.get("better") or "lower",
        path=path,
    )


def _read(path: Path) -> dict[str, Any]:
    where = f"The manifest {str(path)!r}"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot_read(f"the manifest {str(path)!r}", error) from None
    except ValueError as error:
        raise ArgumentError(f"{where} is not TOML: {error}.") from None
    _check_keys(where, data, ["function", *_KINDS, "models"])
    if not isinstance(data.get("models"), dict):
        raise ArgumentError(
            f'{where} names no models: write NAME = "FILE.onnx" under [models].'
        )
    if not isinstance(data.get("function"), str):
        raise ArgumentError(
            f'{where} names no function that runs the models: write function = "FILE.py:NAME".'
        )
    for name, (kinds, words) in _KINDS.items():
        if name in data and (
            isinstance(data[name], bool) or not isinstance(data[name], kinds)
        ):
            raise ArgumentError(
                f"{where}: {name} must be {words}, not {data[name]!r}."
            )
    return data


_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "tolerance": ((int, float), "a number"),
    "metric": ((str,), "a text"),
    "better": ((str,), "a text"),
    "dtypes": ((list,), "a list"),
    "levels": ((list,), "a list"),
    "options": ((dict,), "a table"),
}
"""Keys of a manifest other than its models and the function."""


def _check_keys(where: str, found: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in found:
        if name not in known:
            raise ArgumentError(f"{where} has no key {name!r}: {meant(name, known)}")


def _function(
    given: str | Function | None, manifest: Path | None
) -> tuple[Function, str]:
    """Return the function that runs the models, and its name. Files are relative to the manifest."""
    if given is None:
        raise ArgumentError(
            "A pipeline needs a function that runs its models: pass function."
        )
    if not isinstance(given, str):
        if not callable(given):
            raise ArgumentTypeError(
                f"function must be a function or its name, not {type(given).__name__}."
            )
        return given, name_of(given)
    if ":" not in given:
        raise ArgumentError(
            f"The function {given!r} is not of the form 'package:function' or 'file.py:function'."
        )
    file, _, name = given.rpartition(":")
    place = given
    if manifest is not None and file.endswith(".py"):
        place = f"{manifest.parent / file}:{name}"
    return imported("function", place), given


def _member(
    name: str, entry: Any, settings: Mapping[str, Any], folder: Path | None
) -> Member:
    where = f"Model {name!r} of the pipeline"
    own = entry if folder is not None and isinstance(entry, dict) else {"path": entry}
    _check_keys(where, own, ("path", "dtypes", "levels", "options"))
    if not isinstance(more := own.get("options", {}), Mapping):
        raise ArgumentError(f"{where}: options must be a table, not {more!r}.")
    options = {**settings.get("options", {}), **more}
    if decided := sorted(_DECIDED & options.keys()):
        raise ArgumentError(
            f"{where}: the search decides {', '.join(decided)}; dtypes and levels say what it tries."
        )
    Options.of("O2", options)  # raises errors that name the faults in them
    tried = {"dtypes": get_args(DtypeName), "levels": LEVELS, **settings, **own}
    source = own.get("path")
    if folder is not None:
        if not isinstance(source, str):
            raise ArgumentError(f'{where} has no path: write path = "FILE.onnx".')
        source = (
            folder / source if as_path(source) == Path(source) else as_path(source)
        )
    return Member(
        name=name,
        model=Model.of(source),
        file=_file(name, source, folder),
        dtypes=tuple(
            low_type(one).name for one in _list(where, "dtypes", tried["dtypes"])
        ),
        levels=tuple(map(check_level, _list(where, "levels", tried["levels"]))),
        options=options,
    )


def _list(where: str, what: str, found: Any) -> Iterable[str]:
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ArgumentError(f"{where}: {what} must be a list, not {found!r}.")
    return found


def _file(name: str, source: Any, folder: Path | None) -> str:
    """Return the name of a result: the path of the model relative to the manifest, or its name in the pipeline."""
    if folder is not None:
        relative = as_path(source).absolute()
        if relative.is_relative_to(folder) and ".." not in relative.parts:
            return relative.relative_to(folder).as_posix()
    return f"{name}.onnx"


def _check_files(members: Iterable[Member]) -> None:
    seen: dict[str, str] = {}
    for member in members:
        if Path(member.file).is_absolute() or ".." in Path(member.file).parts:
            raise ArgumentError(
                f"The model {member.name!r} cannot be a file in the folder for results: rename it."
            )
        other = seen.setdefault(member.file, member.name)
        if other != member.name:
            raise ArgumentError(
                f"The models {other!r} and {member.name!r} are the same file: name it once."
            )
