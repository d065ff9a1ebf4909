"""``onnxamp convert`` for a folder of models."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from onnxamp._batch.folder import Told, run_folder
from onnxamp._batch.job import FolderOptions
from onnxamp._cli.common import IN_FOLDER, show
from onnxamp._cli.options import options_of, place_of, provider_of
from onnxamp._convert.misspelt import refuse
from onnxamp._errors import ArgumentError
from onnxamp._job.folder import FolderProgress
from onnxamp._printable import printable
from onnxamp._report.batch import batch_report, row_line
from onnxamp._report.machine import document
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import make_console
from onnxamp._runtime.custom_ops import active_libraries

_SINGLE_MODEL: Final = {
    "plan_file": "--plan",
    "save_plan": "--save-plan",
    "data_names": "--data-names",
    "in_place": "--in-place",
}
"""Options that apply to one model."""


def convert_all(source: Path, options: dict[str, Any]) -> None:
    """Convert a folder as the options of ``onnxamp convert`` say, and report.

    Raises:
        ArgumentError: an option does not apply to a folder, or is wrong. click.ClickException: a model failed.
    """
    if given := [flag for name, flag in _SINGLE_MODEL.items() if options[name]]:
        raise ArgumentError(f"{given[0]} is for a single model, and {str(source)!r} is a folder.")
    if options["metric"] != "auto":
        raise ArgumentError(f"--metric is for a single model, and {str(source)!r} is a folder.")
    if options["output"] is not None and options["output"].name == IN_FOLDER:
        options["output"] = options["output"].parent
    if options["output"] is None:
        raise ArgumentError(
            f"{str(source)!r} is a folder: name the folder for the results with -o OUTDIR."
        )
    accept = options["accept"].name if options["accept"] else None
    folder_options = FolderOptions(
        conversion=options_of(options),
        external_data=options["external_data"],
        shard_bytes=options["shard_size"],
        tolerance=options["tolerance"],
        metric=options["metric"],
        validate=not options["no_validate"],
        samples=options["samples"],
        seed=options["seed"],
        dims=options["dims"],
        provider=provider_of(options),
        cures=not options["no_cure"],
        cure_seconds=options["cure_time"],
        libraries=active_libraries(),
        accept=accept,
    )
    with _progress(quiet=options["quiet"]) as progress:
        report = run_folder(
            options=folder_options,
            source=source,
            target=options["output"],
            place=place_of(options),
            inputs=options["inputs"],
            told=progress,
            retry=options["retry"],
            html=options["html"],
        )
    show(
        options,
        partial(batch_report, report),
        lambda: document("convert folder", {"report": report}),
    )
    if failed := [row for row in report.rows if row.has_failed]:
        for row in failed if options["quiet"] else ():
            click.echo(printable(f"{row.name}: {row.message}"), err=True)
        raise click.ClickException(f"{len(failed)} of {len(report.rows)} models failed.")
    refuse(report.unmatched)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Told]:
    """A progress bar and failures as they happen; without a terminal, one line per model."""
    is_terminal = make_console(stderr=True).is_terminal
    with progress_bar(quiet=quiet) as progress:

        def update(moment: FolderProgress) -> None:
            progress(moment)
            row = moment.row
            if row is not None and not quiet and (row.has_failed or not is_terminal):
                click.echo(printable(f"[{moment.done}/{moment.total}] {row_line(row)}"), err=True)

        yield update
