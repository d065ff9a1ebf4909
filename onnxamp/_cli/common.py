"""Steps that all commands share: check the outputs first, write a page, print a report, and end with an exit code."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import numpy as np

from onnxamp._cli.door import door, note_report, printing
from onnxamp._cli.options import IN_FOLDER
from onnxamp._dtypes import low_type
from onnxamp._errors import ArgumentError, OnnxAmpError, OutputError, printable
from onnxamp._job.request import failed_name
from onnxamp._model.data_files import is_data_name, referring_models
from onnxamp._model.sources import watched_sources
from onnxamp._paths.paths import is_remote, made_folder
from onnxamp._runtime.starting import custom_ops

if TYPE_CHECKING:
    from onnxamp._job.writing import Conversion
    from onnxamp._model.model import Model
    from onnxamp._numerics.results import DiffReport
    from onnxamp._report.html.page import Page
    from onnxamp._report.parts import Report
    from onnxamp._runtime.samples import Samples
    from onnxamp._tuning.results import Tuned


Given: TypeAlias = SimpleNamespace
"""The arguments and options of a command, by name."""


def run_command(body: Callable[[Given], None], words: dict[str, Any]) -> None:
    """Run a command with the custom ops that its options name. Errors leave by :func:`onnxamp._cli.door.door`."""
    custom = custom_ops(words.get("custom_ops"), library=words.get("libraries", ()))
    with door(), watched_sources(), custom:
        body(SimpleNamespace(**words))


def tell(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, -q or not: a mistake in an option must not stay unseen."""
    for text in warnings:
        from onnxamp._report.terminal import fitted  # noqa: PLC0415 - quiet commands print nothing

        click.echo(f"Warning: {fitted(printable(text), 'Warning: ')}", err=True)


def show(
    given: Given, report: Callable[[], "Report"], as_json: Callable[[], str]
) -> None:
    """Print the requested format: nothing, JSON, Markdown, or the report.

    Raises:
        OutputError: standard output cannot be written. BrokenPipeError: its reader is gone.
    """
    if getattr(given, "quiet", None):
        return
    from onnxamp._report.terminal import print_report  # noqa: PLC0415 - quiet commands print nothing

    verbose = getattr(given, "verbose", False)
    with printing():
        if given.format == "json":
            text = as_json()
            note_report()
            click.echo(text)
        elif given.format == "markdown":
            from onnxamp._report.markdown import as_markdown  # noqa: PLC0415

            click.echo(f"{as_markdown(report(), verbose=verbose)}\n")
        else:
            brief = given.format == "line"
            print_report(report(), verbose=verbose, brief=brief)


def write_page(page: "Page", path: Path) -> None:
    """Write an HTML page."""
    from onnxamp._report.html.render import write  # noqa: PLC0415 - only pages need jinja2

    write(page, path)


def write_conversion_page(
    made: "Conversion",
    result: "Model",
    tuned: "Tuned | None",
    path: Path,
    compared: "DiffReport | None" = None,
    samples: "Samples | None" = None,
) -> None:
    """Write the HTML page of a conversion, which includes an audit of the result.

    ``compared`` is the result against the original if there is no validation to show; ``samples`` are what ran.
    """
    from onnxamp._audit.audit import audit_model  # noqa: PLC0415 - only the page shows it
    from onnxamp._report.html.page import conversion_page  # noqa: PLC0415

    shapes = {name: feed.shape for name, feed in first_arrays(samples).items()}
    audit = audit_model(result, made.plan.target, shapes=shapes)
    write_page(conversion_page(made, made.validation, audit, tuned, compared), path)


def first_arrays(samples: "Samples | None") -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of the first sample, if any, for whose shapes volumes are estimated and engines built."""
    try:
        feeds = samples[0] if samples is not None else {}
    except OnnxAmpError:  # running the model reports it
        return {}
    return {name: feed for name, feed in feeds.items() if isinstance(feed, np.ndarray)}


def target_of(
    model: "Model", given: Given, dtype: str, *, may_fail: bool = False
) -> Path:
    """Return the path of the converted model. It may replace the original only on request, and no other file that is
    read.

    With ``may_fail``, a result that fails its validation gets another name, which is also checked.

    Raises:
        ArgumentError: it would replace the original without ``--in-place``, or with it, it is another file. Others as
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
            f"{str(target)!r} is the model itself: choose another output, or use --in-place to replace it."
        )
    if given.in_place and not is_same:
        raise ArgumentError(
            f"--in-place replaces {str(path)!r}, but -o names {str(target)!r}: drop one of the two."
        )
    files = [file for file in model.files if not (file == path and is_same)]
    failed = failed_name(target) if may_fail else None
    outputs = [target, given.save_plan, given.html, given.state, failed]
    check_outputs(given, outputs, *files)
    return target


def _given_files(given: Given) -> list[Path]:
    """Return the files other than models that the options of a command read."""
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
    """Check, before anything runs, that outputs can be written and replace neither inputs nor each other, and create
    their folders. Files that options read are inputs as well.

    Raises:
        ArgumentError: an output is an input, another output or its data file, the data file of a model, a standard
            stream or no regular file.
        OutputError: its folder is read-only, or cannot be created.
    """
    taken = {path.resolve() for path in (*inputs, *_given_files(given))}
    wanted = [path for path in outputs if path is not None]
    here = [path for path in wanted if not is_remote(path)]
    for path in wanted:
        target, name, fault = path.resolve(), repr(str(path)), ""
        if target in taken:
            fault = f"{name} is already read or written by this command: choose another name for the output."
        elif target.is_dir():
            fault = f"The output {name} is a folder: name a file."
        elif path in here and _is_printed_to(path):
            fault = f"{name} receives reports and warnings: name another file."
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
    """Check that no output replaces a data file of another one, or a data file that a model refers to.

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
    """Return whether a path leads to a standard stream, as /dev/stdout does, and FILE in "-o FILE > FILE"."""
    no_such = (OSError, ValueError, AttributeError)  # a file, or a stream
    for stream in (sys.stdout, sys.stderr):
        with suppress(*no_such):
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return True
    return False
