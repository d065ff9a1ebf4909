"""click's arguments and options, made from the rows of ``_data/options.toml``.

Slow imports happen only when a value is converted. Help and completion convert none.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from onnxamp._base.errors import MissingPackageError, OnnxAmpError, suggestion
from onnxamp._base.extensions import extensions
from onnxamp._base.paths import as_path, is_remote
from onnxamp._facts.tables import read_table, target_names
from onnxamp._options.command_line import OptionRow

IN_FOLDER: Final = "*"
"""Placeholder for the name of a result in a folder."""


class _File(click.Path):
    """A path of a local file, or a URL. Errors about it are raised when it is read."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path. "-" is refused: a result is validated before it is put in its place, unlike a stream."""
        if value == "-":
            self.fail(
                "'-' usually means a stream, but onnxamp reads and writes files: name a file ('./-' for this name)."
            )
        try:
            path = as_path(value)
        except MissingPackageError as error:
            raise click.ClickException(str(error)) from None
        except OnnxAmpError as error:
            self.fail(str(error), param, ctx)
        return (
            path if is_remote(path) else super().convert(os.fspath(path), param, ctx)
        )


class _FileOrFolder(_File):
    """A file, or a folder. A path that ends with a separator is a folder even if it does not exist."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; that of a folder with a placeholder for the name of the file."""
        is_folder = isinstance(value, str) and value.endswith(("/", os.sep))
        path: Path = super().convert(value, param, ctx)
        return path / IN_FOLDER if is_folder else path


class _Integer(click.IntRange):
    name = "integer"


class _Number(click.types.FloatParamType):
    # click's errors end with it: "'x' is not a valid number (...)".
    name = "number (write it like 0.01 or 1e-3)"


class _Positive(click.FloatRange):
    name = _Number.name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the number; NaN is neither below a bound nor above one."""
        number = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is no number.") if isnan(number) else number


class _Choice(click.Choice[str]):
    """Words whose error proposes the nearest one."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the word as it is listed."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = suggestion(self.choices, str(value))
            self.fail(f"{error.message}{near}", param, ctx)


class _Words(_Choice):
    """Words in upper or lower case, and the usual short names of types."""

    def __init__(self, words: Sequence[str], named: str) -> None:
        super().__init__(words, case_sensitive=False)
        self.named = named

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the word as it is listed; a word with names after it stays as it is."""
        if self.named and str(value).startswith(f"{self.named}:"):
            return value
        # An option for types also accepts their usual short names.
        if "bfloat16" in self.choices:
            value = _checked("dtype")(value)
        if self.named and str(value).lower() not in self.choices:
            self.fail(
                f"{value!r} is not one of {', '.join(self.choices)} and {self.named}:NAME,...."
                f"{suggestion(self.choices, str(value))}",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class _Level(click.Choice[str]):
    """Levels in upper or lower case; 0 to 3 also mean O0 to O3."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the level as it is listed."""
        words = {word.lower(): word for word in self.choices}
        text = str(value).lower()
        level = words.get(text) or words.get(f"o{text}")
        return level or self.fail(
            f"{value!r} is not a level: choose one of {', '.join(self.choices)}.{suggestion(self.choices, text)}",
            param,
            ctx,
        )


def _provider(text: str) -> str | None:
    """Return the requested provider; None for "auto"."""
    return None if text.lower() == "auto" else text.lower()


def _bytes(value: str) -> int:
    """Return a size in bytes, given with or without a unit: 500MB, 2GB, 1.5GiB."""
    size = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?) *(?:([kmgt])(i?)b?|b)?", value.strip().lower()
    )
    if size is None or not float(size[1]):
        raise click.BadParameter(
            f"{value!r} is not a size: write it like 500MB or 2GB."
        )
    # 1 kB is 1000 bytes, and 1 KiB is 1024.
    unit: int = (1024 if size[3] else 1000) ** " kmgt".index(size[2] or " ")
    return round(float(size[1]) * unit)


def _batches(text: str) -> list[int]:
    """Return ``1,8,32`` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not of the form N,N,...")
    return [int(part) for part in parts]


def _checked(kind: str) -> Callable[[str], Any]:
    """Return a function that converts a value of a kind by facts. Help and completion do not load it."""

    def meaning(text: str) -> Any:
        from onnxamp._cli.values import VALUES  # noqa: PLC0415 - imports onnx

        return VALUES[kind](text)

    return meaning


def _offered(name: str) -> Callable[[str], Any]:
    """Return a function that converts a value of a type from a room apart. Help and completion do not load it."""

    def meaning(text: str) -> Any:
        offer = extensions("types")[name]
        return getattr(offer.load(), offer.function)(text)

    return meaning


TYPES: Final[Mapping[str, tuple[Any, str | None]]] = {
    "text": (str, None),
    "integer": (int, "N"),
    "count": (_Integer(1), "N"),
    "natural": (_Integer(0), "N"),
    "number": (_Number(), "X"),
    "seconds": (_Positive(0), "SECONDS"),
    "duration": (_Positive(0, min_open=True), "SECONDS"),
    "megabytes": (_Integer(1), "MB"),
    "file": (_File(path_type=Path, readable=False), "FILE"),
    "file name": (str, "FILE"),
    "output": (_FileOrFolder(path_type=Path, readable=False), "PATH"),
    "size": (_bytes, "SIZE"),
    "dims": (str, "NAME=N"),
    "ranges": (str, "NAME=LOW:HIGH"),
    "limit": (str, "[OUTPUT=]X"),
    "batches": (_batches, "N[,N...]"),
    "opset": (_checked("opset"), None),
    "target": (_checked("target"), "TARGET"),
    "provider": (_provider, "PROVIDER"),
    "accept": (_checked("accept"), "PACKAGE:FUNCTION"),
}
"""The type of a row -> click's type, and the placeholder for its value in help. Types of words are made
from the words.
"""


def _dims(
    _: click.Context, __: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, int]:
    """Return ``NAME=N`` options as a mapping."""
    dims = {}
    for pair in pairs:
        name, _equals, number = pair.rpartition("=")
        if not name or not number.isdecimal():
            raise click.BadParameter(f"{pair!r} is not of the form NAME=N.")
        if int(number) == 0:
            raise click.BadParameter(
                f"{pair!r} would make inputs empty: give a size of at least 1."
            )
        if name in dims:
            raise click.BadParameter(f"{name!r} has two sizes: drop one of them.")
        dims[name] = int(number)
    return dims


def _ranges(
    _: click.Context, __: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """Return ``NAME=LOW:HIGH`` options as a mapping."""
    ranges = {}
    for pair in pairs:
        name, _equals, ends = pair.rpartition("=")
        low, _colon, high = ends.partition(":")
        try:
            ranges[name] = float(low), float(high)
        except ValueError:
            name = ""
        if not name:
            raise click.BadParameter(f"{pair!r} is not of the form NAME=LOW:HIGH.")
    if len(ranges) < len(pairs):
        raise click.BadParameter("An input has two ranges: drop one of them.")
    return ranges


def _megabytes(_: click.Context, __: click.Parameter, megabytes: int) -> int:
    """Return a number of MB in bytes."""
    return megabytes << 20


def _preset(context: click.Context, _: click.Parameter, preset: str | None) -> None:
    """Make the options of a preset the defaults; the preset is parsed before the others."""
    if preset is not None:
        context.default_map = {
            **(context.default_map or {}),
            **read_table("presets")[preset]["options"],
        }


_CALLBACKS: Final[Mapping[str, Callable[..., Any]]] = {
    "dims": _dims,
    "ranges": _ranges,
    "megabytes": _megabytes,
    "preset": _preset,
}
"""The type of a row -> the final conversion of its value."""


def _software() -> list[str]:
    return [name for name, row in read_table("presets").items() if row["options"]]


SOURCES: Final[Mapping[str, Callable[[], Sequence[str]]]] = {
    "@devices": lambda: [*read_table("devices")],
    "@presets": lambda: [*read_table("presets")],
    "@software": _software,
    "@targets": target_names,
}
"""Words that another table lists."""


def words_of(row: OptionRow) -> list[str]:
    """Return the words that an option accepts or, if it accepts others as well, that completion offers."""
    words = list[str]()
    for choice in row.choices:
        words += SOURCES[choice]() if choice in SOURCES else [choice]
    return words


class DataOption(click.Option):
    """An option that a row describes."""

    def __init__(self, row: OptionRow, flags: Sequence[str], **form: Any) -> None:
        super().__init__(flags, **form)
        self.row = row

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Convert a value, unless the shell only asks for completions."""
        return value if ctx.resilient_parsing else super().type_cast_value(ctx, value)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the flags and the whole help of the option."""
        flags, text = super().get_help_record(ctx) or ("", "")
        return flags, full_help(self.row) + text.removeprefix(self.row.help)

    def line(self, ctx: click.Context) -> tuple[str, str]:
        """Return the flags and one line of help."""
        flags, _ = super().get_help_record(ctx) or ("", "")
        text = self.row.help.removesuffix(".")
        if self.required:
            text += " [required]"
        if self.show_default:
            text += f" [default: {self.default}]"
        return flags, text


def parameter_of(row: OptionRow) -> click.Parameter:
    """Return the argument or option that a row describes."""
    kind, metavar = _type_of(row)
    if row.is_argument:
        return click.Argument(
            [row.name],
            type=kind,
            metavar=row.metavar,
            required=row.required,
            nargs=-1 if row.repeats else 1,
        )
    form: dict[str, Any] = {"type": kind, "metavar": row.metavar or metavar}
    if row.type == "flag":
        form = _flag(row)
    elif row.default is not None:
        form.update(default=row.default, show_default=row.default != "")
    # click itself completes the words of a Choice, and paths.
    if not isinstance(kind, click.Choice | click.Path):
        form["shell_complete"] = partial(_suggested, row)
    # click parses eager options first, so that the values of a preset are defaults of the others.
    is_preset = row.type == "preset"
    return DataOption(
        row,
        [*row.flags.split(", "), row.name],
        help=row.help,
        multiple=row.repeats,
        required=row.required,
        callback=_CALLBACKS.get(row.type),
        is_eager=is_preset,
        expose_value=not is_preset,
        **form,
    )


def _type_of(row: OptionRow) -> tuple[Any, str | None]:
    """Return the type of an option, and the placeholder for its value in help."""
    match row.type:
        case "words":
            return _Words(words_of(row), row.named), None
        case "level":
            return _Level(words_of(row)), None
        case "choice" | "preset":
            return _Choice(words_of(row)), None
        case "flag":
            return None, None
        case name if name in extensions("types"):
            return _offered(name), None
    return TYPES[row.type]


def _flag(row: OptionRow) -> dict[str, Any]:
    """Return the arguments that make an option a flag, or a pair of flags for yes and no."""
    if "/" in row.flags:
        return {"default": row.default}
    if row.default is None:
        return {"is_flag": True}
    return {"default": row.default, "flag_value": not row.default}


def _suggested(
    row: OptionRow, _: click.Context, __: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Return the completion of an option whose type accepts more than its words."""
    if row.type == "file name":
        return [CompletionItem(begun, type="file")]
    return [CompletionItem(word) for word in words_of(row) if word.startswith(begun)]


def full_help(row: OptionRow) -> str:
    """Return the whole help of an option."""
    text = " ".join(filter(None, [row.help, row.more, "Repeatable." * row.repeats]))
    if "{software}" in text:
        table = read_table("presets")
        software = [f"{name}: {table[name]['summary']}" for name in _software()]
        text = text.replace("{software}", "; ".join(software))
    return text.replace("{choices}", ", ".join(words_of(row)))
