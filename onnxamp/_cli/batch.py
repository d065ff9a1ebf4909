"""``onnxamp convert`` for a folder of models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from onnxamp._batch.folder import FolderProgress, FolderReport, Told, run_folder
from onnxamp._batch.job import FolderOptions
from onnxamp._cli.common import parse_dims, provider_of
from onnxamp._cli.options import options_of
from onnxamp._errors import ArgumentError
from onnxamp._report.batch import batch_report, row_line
from onnxamp._report.machine import document
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import make_console, print_report
from onnxamp._report.text import printable

_OF_ONE_MODEL: Final = {"plan_file": "--plan", "save_plan": "--save-plan", "html": "--html"}
"""Options that mean one model."""


def convert_all(source: Path, options: dict[str, Any]) -> None:
    """Convert a folder as the options of ``onnxamp convert`` say, and report.

    Raises:
        ArgumentError: an option makes no sense for a folder, or is wrong. click.ClickException: a model failed.
    """
    given = [text for name, text in _OF_ONE_MODEL.items() if options[name]]
    if given:
        raise ArgumentError(f"{given[0]} is for a single model, and {str(source)!r} is a folder.")
    if options["output"] is None:
        raise ArgumentError(f"{str(source)!r} is a folder: say with -o OUTDIR where the results go.")
    folder_options, quiet = _folder_options(options), options["quiet"]
    inputs = Path(options["inputs"]) if options["inputs"] else None
    with _progress(quiet=quiet) as told:
        report = run_folder(folder_options, source, options["output"], options["jobs"], inputs, told)
    if options["as_json"] and not quiet:
        click.echo(document("convert folder", {"report": report}))
    elif not quiet:
        print_report(batch_report(report), verbose=options["verbose"])
    _finish(report, quiet=quiet)


def _folder_options(options: dict[str, Any]) -> FolderOptions:
    return FolderOptions(
        options_of(options), options["external_data"], options["shard_size"], options["tolerance"], "rel-l2",
        not options["no_validate"], options["samples"], options["seed"], parse_dims(options["dims"]),
        provider_of(options), not options["no_cure"],
    )  # fmt: skip


def _finish(report: FolderReport, *, quiet: bool) -> None:
    failed = [row for row in report.rows if row.outcome == "failed"]
    if failed:
        for row in failed if quiet else ():
            click.echo(printable(f"{row.name}: {row.message}"), err=True)
        raise click.ClickException(f"{len(failed)} of {len(report.rows)} models failed.")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Told]:
    """How far the folder is: a bar and failures as they come, or, where that is no terminal, a line for each model."""
    is_terminal = make_console(stderr=True).is_terminal
    with progress_bar(quiet=quiet) as told:

        def update(moment: FolderProgress) -> None:
            names = ", ".join(name.rpartition("/")[2] for name in moment.running)
            told(f"converting: {names}", moment.done, moment.total)
            row = moment.row
            if row is not None and not quiet and (row.outcome == "failed" or not is_terminal):
                click.echo(printable(f"[{moment.done}/{moment.total}] {row_line(row)}"), err=True)

        yield update
