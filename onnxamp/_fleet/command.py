"""``onnxamp convert`` for a folder of models."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import click

from onnxamp._base.errors import ArgumentError, printable
from onnxamp._base.paths import as_path
from onnxamp._cli.common import (
    Given,
    chosen_options,
    flag_of,
    options_of,
    place_of,
    random_run_options,
    refuse_idle_options,
    show,
    validation_options,
)
from onnxamp._cli.options import IN_FOLDER
from onnxamp._convert.misspelled import refuse
from onnxamp._fleet.folder import Told, run_folder
from onnxamp._fleet.job import FolderOptions
from onnxamp._fleet.outcome import FolderProgress
from onnxamp._fleet.report import batch_report, row_line
from onnxamp._report.console import is_screen, make_console
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.sessions.starting import active_libraries

_SINGLE_MODEL: Final = (
    "plan_file",
    "save_plan",
    "in_place",
    "expected_error",
)
"""Options that apply to one model."""


def run(given: Given) -> None:
    """Convert a folder with the options of ``onnxamp convert``, and report.

    Raises:
        ArgumentError: an option does not apply to a folder, or is wrong. click.ClickException: a model failed.
    """
    output = _output_of(given)
    accept = given.accept.name if given.accept else None
    conversion = options_of(given)
    refuse_idle_options(given, None, conversion)
    folder_options = FolderOptions(
        conversion=conversion,
        external_data=given.external_data,
        shard_bytes=given.shard_bytes,
        data_names=given.data_names,
        validation=validation_options(given),
        metric=given.metric,
        validate=given.validate,
        run=random_run_options(given),
        declared=None if given.custom_ops is None else as_path(given.custom_ops),
        libraries=active_libraries(),
        accept=accept,
        prompts=given.prompts,
        given=chosen_options(),
    )
    with _progress(quiet=given.quiet) as progress:
        report = run_folder(
            options=folder_options,
            source=given.model,
            target=output,
            place=place_of(given),
            inputs=given.inputs,
            told=progress,
            retry=given.retry,
            html=given.html,
        )
    show(
        given,
        partial(batch_report, report),
        "convert folder",
        lambda: {"report": report},
    )
    if failed := [row for row in report.rows if row.has_failed]:
        if given.quiet:
            for row in failed:
                click.echo(printable(f"{row.name}: {row.message}"), err=True)
        raise click.ClickException(
            f"{len(failed)} of {len(report.rows)} models failed."
        )
    refuse(report.unmatched)


def _output_of(given: Given) -> Path:
    """Return the folder of the results.

    Raises:
        ArgumentError: there is none, or an option does not apply to a folder of models.
    """
    source = given.model
    if given.state is not None:
        raise ArgumentError(
            "For a folder of models, onnxamp keeps the state in the output folder: drop --state."
        )
    single = [name for name in _SINGLE_MODEL if getattr(given, name)]
    if single:
        raise ArgumentError(
            f"{flag_of(single[0])} is for a single model, but {str(source)!r} is a folder."
        )
    output: Path | None = given.output
    if output is None:
        raise ArgumentError(
            f"{str(source)!r} is a folder: name the folder for the results with -o OUTDIR."
        )
    # For a single model, "-o OUTDIR/" gets a placeholder for the name of the result.
    return output.parent if output.name == IN_FOLDER else output


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Told]:
    """Show a progress bar and failures as they happen; without a terminal, print one line per model."""
    is_terminal = is_screen(make_console(stderr=True))
    with progress_bar(quiet=quiet) as progress:

        def update(moment: FolderProgress) -> None:
            progress(moment)
            row = moment.row
            if row is None or quiet:
                return
            if row.has_failed or not is_terminal:
                line = f"[{moment.done}/{moment.total}] {row_line(row)}"
                click.echo(printable(line), err=True)

        yield update
