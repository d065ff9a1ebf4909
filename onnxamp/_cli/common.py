"""What every command does: check its outputs first, write a page, print a report, and end with an exit code."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
import numpy as np

from onnxamp._cli.door import door, note_report
from onnxamp._dtypes import FORMATS, dtype_name, low_type
from onnxamp._errors import (
    ArgumentError,
    MissingPackageError,
    OnnxAmpError,
    OutputError,
    printable,
)
from onnxamp._job.request import failed_name
from onnxamp._model.data_files import is_data_name, referring_models
from onnxamp._model.sources import watched_sources
from onnxamp._ops.targets import read_table
from onnxamp._options.checks import check_opset
from onnxamp._options.options import COMMAND_LINE
from onnxamp._paths.paths import as_path, is_remote, made_folder
from onnxamp._runtime.starting import custom_ops
from onnxamp._target.kernels import check_target

if TYPE_CHECKING:
    from onnxamp._job.writing import Conversion
    from onnxamp._model.model import Model
    from onnxamp._numerics.results import LayerDiff
    from onnxamp._report.html.page import Page
    from onnxamp._report.parts import Report
    from onnxamp._runtime.samples import Samples
    from onnxamp._tuning.results import Tuned


def told_of_other_tools(arguments: Sequence[str], unknown: str | None) -> str | None:
    """Return what takes the place of an option that is another tool's; None if it is none.

    Args:
        arguments: what was typed.
        unknown: the option that is unknown; None if something else is wrong, as where "-ope" was taken for "-o pe".
    """
    typed = [text.partition("=")[0] for text in arguments]
    known = [text for text in typed if _is_word(text) and any(_meanings(text))]
    name = (
        next(iter(known), unknown)
        if unknown is None or len(unknown) == len("-n")
        else unknown
    )
    meanings: dict[str, list[str]] = {}
    for tool, meaning in _meanings(name or ""):
        meanings.setdefault(meaning, []).append(tool)
    if not meanings:
        return None
    return " ".join(
        _sentence(name or "", meaning, tools) for meaning, tools in meanings.items()
    )


def _is_word(text: str) -> bool:
    """Return whether a text looks like "-ne", which click parses as two one-letter options."""
    return len(text) > len("-n") and text.startswith("-") and not text.startswith("--")


def _meanings(name: str) -> Iterator[tuple[str, str]]:
    for tool, row in read_table("other_tools").items():
        if name in row["options"]:
            yield tool, row["options"][name]


def _sentence(name: str, meaning: str, tools: Sequence[str]) -> str:
    *others, last = (f"{tool}'s" for tool in tools)
    owners = f"{', '.join(others)} and {last}" if others else last
    if meaning.startswith("nothing"):
        return (
            f"{owners} {name} has no counterpart here{meaning.removeprefix('nothing')}."
        )
    return f"{owners} {name} is onnxamp's {meaning}."


_FEW: Final = 15
"""Options that need no headings."""
_HEADINGS: Final = {
    "What becomes low precision": tuple(COMMAND_LINE),
    "Inputs and runs": (
        "inputs",
        "samples",
        "dims",
        "seed",
        "provider",
        "libraries",
        "jobs",
        "cluster",
        "budget",
    ),
    "Validation": ("metric", "accept", "no_validate", "no_cure", "cure_time", "retry"),
    "Files and report": (
        "save_plan",
        "external_data",
        "shard_size",
        "data_names",
        "html",
        "format",
        "quiet",
        "verbose",
        "help",
    ),
}
"""Heading -> the parameters below it; others are the command's own, and come first."""


class GroupedCommand(click.Command):
    """A command that lists its options by what they are for, and knows the names that other tools give them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what was typed.

        Raises:
            UsageError: an option is unknown; the message names what takes the place of other tools' options.
        """
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            unknown = (
                error.option_name if isinstance(error, click.NoSuchOption) else None
            )
            told = told_of_other_tools(typed, unknown)
            if told is None:
                raise
            raise click.UsageError(told, ctx) from None

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the options, under headings where there are many."""
        records = {}
        for item in self.get_params(ctx):
            if isinstance(item, click.Option) and (record := item.get_help_record(ctx)):
                records["help" if "--help" in item.opts else item.name] = record
        if len(records) <= _FEW:
            super().format_options(ctx, formatter)
            return
        below = set(chain.from_iterable(_HEADINGS.values()))
        own = [name for name in records if name not in below]
        for heading, names in {"Options": own, **_HEADINGS}.items():
            if rows := [record for name, record in records.items() if name in names]:
                with formatter.section(heading):
                    formatter.write_dl(rows)


Given: TypeAlias = SimpleNamespace
"""What a command was given: its arguments and options by name."""


Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(*names: str, **form: Any) -> Decorator:
    """As :func:`click.option`; the help shows the default where one is named."""
    return click.option(*names, **{"show_default": "default" in form, **form})


IN_FOLDER: Final = "*"
"""Stands for the name of a result that goes into a folder, under a name of its own."""


def new_command(name: str) -> Callable[[Callable[[Given], None]], click.Command]:
    """A command with the custom ops that its options name. Errors leave by :func:`onnxamp._cli.door.door`."""

    def decorate(function: Callable[[Given], None]) -> click.Command:
        @wraps(function)
        def guarded(**words: Any) -> None:
            custom = custom_ops(
                words.get("custom_ops"), library=words.get("libraries", ())
            )
            with door(), watched_sources(), custom:
                function(SimpleNamespace(**words))

        return click.command(name, cls=GroupedCommand)(guarded)

    return decorate


def tell(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, -q or not: a mistake in an option must not stay unseen."""
    for text in warnings:
        from onnxamp._report.terminal import fitted  # noqa: PLC0415 - quiet commands print nothing

        click.echo(f"Warning: {fitted(printable(text), 'Warning: ')}", err=True)


def show(
    given: Given, report: Callable[[], "Report"], as_json: Callable[[], str]
) -> None:
    """Print what the options ask for: nothing, JSON, or the report.

    Raises:
        OutputError: standard output takes no more. BrokenPipeError: nobody reads it.
    """
    if getattr(given, "quiet", None):
        return
    from onnxamp._report.terminal import print_report  # noqa: PLC0415 - quiet commands print nothing

    try:
        if given.format == "json":
            text = as_json()
            note_report()
            click.echo(text)
        else:
            print_report(
                report(),
                verbose=getattr(given, "verbose", False),
                brief=given.format == "line",
            )
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - it is flushed again at the end
        raise OutputError(f"Cannot print the report: {error.strerror}.") from None


def write_page(page: "Page", path: Path) -> None:
    """Write an HTML page."""
    from onnxamp._report.html.render import write  # noqa: PLC0415 - only pages need jinja2

    write(page, path)


def write_conversion_page(
    made: "Conversion",
    result: "Model",
    tuned: "Tuned | None",
    path: Path,
    layers: "Iterable[LayerDiff]" = (),
    samples: "Samples | None" = None,
) -> None:
    """Write the HTML page of a conversion, which includes an audit of the result.

    ``layers`` are the values of the result where there is no validation to show; ``samples`` are what ran.
    """
    from onnxamp._audit.audit import audit_model  # noqa: PLC0415 - only the page shows it
    from onnxamp._report.html.page import conversion_page  # noqa: PLC0415

    shapes = {name: feed.shape for name, feed in first_arrays(samples).items()}
    audit = audit_model(result, made.plan.target, shapes=shapes)
    write_page(conversion_page(made, made.validation, audit, tuned, layers), path)


def first_arrays(samples: "Samples | None") -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of the first sample, if any, for whose shapes volumes are estimated and engines built."""
    try:
        feeds = samples[0] if samples is not None else {}
    except OnnxAmpError:  # running the model reports it
        return {}
    return {name: feed for name, feed in feeds.items() if isinstance(feed, np.ndarray)}


def target_of(
    model: "Model", given: Given, dtype: str, *, may_fail: bool = False
) -> Path:
    """Where the converted model goes. It may replace the original if that is said, and nothing else that is read.

    With ``may_fail``, a result that fails its validation gets another name, which is checked, too.

    Raises:
        ArgumentError: it would replace the original, and nothing says so, or it should, and is another file. Others as
            :func:`check_outputs`.
        OutputError: as :func:`check_outputs`.
    """
    path = model.path or Path("model.onnx")
    name = f"{path.stem}_{low_type(dtype).suffix}.onnx"
    output: Path | None = given.output
    if output is None:
        target = path if given.in_place else path.parent / name
    elif output.name == IN_FOLDER:
        target = output.parent / name
    else:
        target = output / name if output.is_dir() else output
    if not target.suffix:
        note = "becomes a file without a suffix"
        tell(
            [
                f"{str(target)!r} {note}: '{target}.onnx' names a model, '{target}/' a folder."
            ]
        )
    is_same = target.exists() and path.exists() and target.samefile(path)
    if is_same and not given.in_place:
        raise ArgumentError(
            f"{str(target)!r} is the model itself: name another output, or replace it with --in-place."
        )
    if given.in_place and not is_same:
        raise ArgumentError(
            f"--in-place replaces {str(path)!r}, and -o names {str(target)!r}: drop one of the two."
        )
    files = [file for file in model.files if not (file == path and is_same)]
    failed = failed_name(target) if may_fail else None
    outputs = [target, given.save_plan, given.html, given.state, failed]
    check_outputs(given, outputs, *files)
    return target


def _given_files(given: Given) -> list[Path]:
    """The files besides models that the options of a command name to be read."""
    names = [
        getattr(given, name, None)
        for name in ("inputs", "plan_file", "data", "custom_ops")
    ]
    files = [
        Path(name)
        for name in (*names, *getattr(given, "libraries", ()))
        if name is not None
    ]
    folders = [file for file in files if not is_remote(file) and file.is_dir()]
    code = getattr(getattr(given, "accept", None), "name", "").rpartition(":")[0]
    files += [Path(code)] if code else []
    return [*files, *(file for folder in folders for file in folder.iterdir())]


def check_outputs(given: Given, outputs: Iterable[Path | None], *inputs: Path) -> None:
    """Before anything runs, check that outputs can be written, and replace neither an input nor each other, and make
    their folders. Files that options name are inputs, too.

    Raises:
        ArgumentError: an output is an input, another output or its data file, the data file of a model, a standard
            stream or no regular file.
        OutputError: its folder is read-only, or cannot be made.
    """
    taken = {path.resolve() for path in (*inputs, *_given_files(given))}
    wanted = [path for path in outputs if path is not None]
    here = [path for path in wanted if not is_remote(path)]
    for path in wanted:
        target, name, fault = path.resolve(), repr(str(path)), ""
        if target in taken:
            fault = f"{name} is read or written already: choose another name for the output."
        elif target.is_dir():
            fault = f"The output {name} is a folder: name a file."
        elif path in here and _is_printed_to(path):
            fault = f"{name} is where reports and warnings go: name another file."
        elif path.exists() and not path.is_file():
            fault = f"The output {name} is not a regular file: choose another name."
        if fault:
            raise ArgumentError(fault)
        taken.add(target)
    _check_data_files([path.resolve() for path in here])
    for path in here:
        folder = made_folder(path.parent)
        if not os.access(folder, os.W_OK):
            raise OutputError(
                f"Cannot write {str(path)!r}: the folder {str(folder)!r} is read-only."
            )


def _check_data_files(outputs: Sequence[Path]) -> None:
    """Check that no output takes the place of a data file that another one may get, or that a model refers to.

    Raises:
        ArgumentError: one does.
    """
    for path in outputs:
        for other in outputs:
            if path.parent == other.parent and is_data_name(path.name, other.name):
                raise ArgumentError(
                    f"{str(path)!r} may be the data file of {str(other)!r}: choose another name."
                )
        if path.exists() and (
            user := referring_models(path.parent, [path.name], path).get(path.name)
        ):
            raise ArgumentError(
                f"{str(path)!r} holds weights of {str(user)!r}: choose another name for the output."
            )


def _is_printed_to(path: Path) -> bool:
    """Whether a path leads to a standard stream, as /dev/stdout does, and FILE in "-o FILE > FILE"."""
    no_such = (OSError, ValueError, AttributeError)  # a file, or a stream
    for stream in (sys.stdout, sys.stderr):
        with suppress(*no_such):
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return True
    return False


class _File(click.Path):
    """A path of a file here, or a URL. Whoever reads it says what is wrong with it."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """The path. "-" is none: results are validated and then put in their place, which streams are not."""
        if value == "-":
            self.fail(
                "'-' would be a stream, and onnxamp reads and writes files: name one ('./-' for this name)."
            )
        try:
            path = as_path(value)
        except MissingPackageError as error:
            raise click.ClickException(str(error)) from None
        except OnnxAmpError as error:
            self.fail(str(error), param, ctx)
        return path if is_remote(path) else super().convert(os.fspath(path), param, ctx)


FILE: Final = _File(path_type=Path, readable=False)
"""The type of every option that names a file."""


class OutputPath(_File):
    """A file, or a folder, which a path that ends with a separator means even if it does not exist."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """The path; that of a folder with a placeholder for the name of the file."""
        is_folder = isinstance(value, str) and value.endswith(("/", os.sep))
        path: Path = super().convert(value, param, ctx)
        return path / IN_FOLDER if is_folder else path


class Words(click.Choice[str]):
    """Words in either case, and the usual short names of types."""

    def __init__(self, words: Iterable[str], named: str | None = None) -> None:
        super().__init__(list(words), case_sensitive=False)
        self.named = named

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """The word as it is listed; one that names follow as it stands."""
        if (
            self.named is not None
            and isinstance(value, str)
            and value.startswith(f"{self.named}:")
        ):
            return value
        if not FORMATS.keys().isdisjoint(self.choices) and isinstance(value, str):
            value = dtype_name(value)
        if self.named is not None and str(value).lower() not in self.choices:
            self.fail(
                f"{value!r} is not one of {', '.join(self.choices)} and {self.named}:NAME,....",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class LevelChoice(click.Choice[str]):
    """Accept levels in upper or lower case; 0 to 3 also stand for O0 to O3."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """The level as it is listed."""
        words = {word.lower(): word for word in self.choices}
        text = str(value).lower()
        found = words.get(text) or words.get(f"o{text}")
        return found or self.fail(
            f"{value!r} is not a level: choose one of {', '.join(self.choices)}.",
            param,
            ctx,
        )


@contextmanager
def refused() -> Iterator[None]:
    """Say of what is wrong with a value that it is wrong usage of an option."""
    try:
        yield
    except OnnxAmpError as error:
        raise click.BadParameter(str(error)) from None


def to_opset(text: str) -> int | str:
    """A number, or one of the words that an opset can be."""
    with refused():
        return check_opset(int(text) if text.isdecimal() else text.lower())


def to_target(text: str) -> str:
    """A target, perhaps with a version of ONNX Runtime."""
    with refused(), warnings.catch_warnings(record=True, action="always") as caught:
        found = check_target(text.lower())
    for warning in caught:
        click.echo(f"Warning: {printable(str(warning.message))}", err=True)
    return found
