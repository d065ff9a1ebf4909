"""What every command does: check its outputs first, write a page, print a report, and end with an exit code."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

from onnxamp._cli.door import door, note_report
from onnxamp._cli.grouped import GroupedCommand
from onnxamp._dtypes import low_type
from onnxamp._errors import ArgumentError, OnnxAmpError, OutputError
from onnxamp._job.request import failed_name
from onnxamp._model.data_files import is_data_name, referring_models
from onnxamp._model.sources import watched_sources
from onnxamp._paths.paths import is_remote, made_folder
from onnxamp._printable import printable
from onnxamp._runtime.custom_ops import custom_ops

if TYPE_CHECKING:
    from onnxamp._job.writing import Conversion
    from onnxamp._model.model import Model
    from onnxamp._numerics.results import LayerDiff
    from onnxamp._report.html.page import Page
    from onnxamp._report.parts import Report
    from onnxamp._runtime.samples import Samples
    from onnxamp._tuning.results import Tuned


IN_FOLDER: Final = "*"
"""Stands for the name of a result that goes into a folder, under a name of its own."""


def new_command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command with the custom ops that its options name. Errors leave by :func:`onnxamp._cli.door.door`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def guarded(*arguments: Any, **options: Any) -> None:
            custom = custom_ops(options.get("custom_ops"), library=options.get("libraries", ()))
            with door(), watched_sources(), custom:
                function(*arguments, **options)

        return click.command(name, cls=GroupedCommand)(guarded)

    return decorate


def tell(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, -q or not: a mistake in an option must not stay unseen."""
    for text in warnings:
        from onnxamp._report.terminal import fitted  # noqa: PLC0415 - quiet commands print nothing

        click.echo(f"Warning: {fitted(printable(text), 'Warning: ')}", err=True)


def show(
    options: dict[str, Any], report: Callable[[], "Report"], as_json: Callable[[], str]
) -> None:
    """Print what the options ask for: nothing, JSON, or the report.

    Raises:
        OutputError: standard output takes no more. BrokenPipeError: nobody reads it.
    """
    if options.get("quiet"):
        return
    from onnxamp._report.terminal import print_report  # noqa: PLC0415 - quiet commands print nothing

    try:
        if options["format"] == "json":
            text = as_json()
            note_report()
            click.echo(text)
        else:
            print_report(
                report(), verbose=options.get("verbose", False), brief=options["format"] == "line"
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
    model: "Model", options: dict[str, Any], dtype: str, *, may_fail: bool = False
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
    output: Path | None = options["output"]
    if output is None:
        target = path if options["in_place"] else path.parent / name
    elif output.name == IN_FOLDER:
        target = output.parent / name
    else:
        target = output / name if output.is_dir() else output
    if not target.suffix:
        tell(
            [
                f"{str(target)!r} becomes a file without a suffix: '{target}.onnx' names a model, '{target}/' a folder."
            ]
        )
    if is_same_file(path, target) and not options["in_place"]:
        raise ArgumentError(
            f"{str(target)!r} is the model itself: name another output, or replace it with --in-place."
        )
    if options["in_place"] and not is_same_file(path, target):
        raise ArgumentError(
            f"--in-place replaces {str(path)!r}, and -o names {str(target)!r}: drop one of the two."
        )
    files = [file for file in files_of(model) if not (file == path and is_same_file(path, target))]
    outputs = [target, options["save_plan"], options["html"], options["state"]]
    check_outputs(
        [*files, *given_files(options)], [*outputs, *([failed_name(target)] if may_fail else [])]
    )
    return target


def is_same_file(model: Path, target: Path) -> bool:
    """Whether the result replaces the model."""
    return target.exists() and model.exists() and target.samefile(model)


def files_of(model: "Model") -> list[Path]:
    """The file of a model and those of its weights."""
    return [] if model.path is None else [model.path, *model.stock.files]


def given_files(options: dict[str, Any]) -> list[Path]:
    """The files besides models that the options of a command name to be read."""
    names = [options.get(name) for name in ("inputs", "plan_file", "data", "custom_ops")]
    files = [Path(name) for name in (*names, *options.get("libraries", ())) if name is not None]
    folders = [file for file in files if not is_remote(file) and file.is_dir()]
    code = getattr(options.get("accept"), "name", "").rpartition(":")[0]
    return [
        *files,
        *(file for folder in folders for file in folder.iterdir()),
        *([Path(code)] if code else []),
    ]


def check_outputs(inputs: Iterable[Path | None], outputs: Iterable[Path | None]) -> None:
    """Before anything runs, check that outputs can be written, and replace neither an input nor each other, and make
    their folders.

    Raises:
        ArgumentError: an output is an input, another output or its data file, the data file of a model, a standard
            stream or no regular file.
        OutputError: its folder is read-only, or cannot be made.
    """
    taken = {path.resolve() for path in inputs if path is not None}
    wanted = [path for path in outputs if path is not None]
    for path in wanted:
        target = path.resolve()
        if target in taken:
            raise ArgumentError(
                f"{str(path)!r} is read or written already: choose another name for the output."
            )
        if target.is_dir():
            raise ArgumentError(f"The output {str(path)!r} is a folder: name a file.")
        if not is_remote(path) and _is_printed_to(path):
            raise ArgumentError(
                f"{str(path)!r} is where reports and warnings go: name another file."
            )
        if path.exists() and not path.is_file():
            raise ArgumentError(
                f"The output {str(path)!r} is not a regular file: choose another name."
            )
        taken.add(target)
    _check_data_files([path.resolve() for path in wanted if not is_remote(path)])
    for path in (path for path in wanted if not is_remote(path)):
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
    for stream in (sys.stdout, sys.stderr):
        with suppress(
            OSError, ValueError, AttributeError
        ):  # there is no such file, or no such stream
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return True
    return False
