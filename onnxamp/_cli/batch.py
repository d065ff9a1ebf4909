"""``onnxamp convert`` for a folder of models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from onnxamp._batch.folder import FolderReport, Moment, Told, run_folder
from onnxamp._batch.job import Order
from onnxamp._cli.common import parse_dims, provider_of
from onnxamp._cli.options import options_of
from onnxamp._errors import ArgumentError
from onnxamp._report.batch import row_line, zoo_report
from onnxamp._report.machine import document
from onnxamp._report.parts import line, make_console, printable

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
    order, quiet = _order(options), options["quiet"]
    inputs = Path(options["inputs"]) if options["inputs"] else None
    with _progress(quiet=quiet) as told:
        report = run_folder(order, source, options["output"], options["jobs"], inputs, told)
    if options["as_json"] and not quiet:
        click.echo(document("convert folder", {"report": report}))
    elif not quiet:
        _show(report, verbose=options["verbose"])
    _finish(report, quiet=quiet)


def _order(options: dict[str, Any]) -> Order:
    return Order(
        options_of(options), options["external_data"], options["shard_size"], options["tolerance"], "rel-l2",
        not options["no_validate"], options["samples"], options["seed"], parse_dims(options["dims"]),
        provider_of(options), not options["no_cure"],
    )  # fmt: skip


def _show(report: FolderReport, *, verbose: bool) -> None:
    """Print the report and, last, what cures failures: each command on a line of its own that can be copied whole."""
    console = make_console()
    console.print(zoo_report(report, verbose=verbose))
    cures = [row.cure for row in report.rows if row.cure]
    if cures:
        console.print("", line(Text("→", style="bold cyan"), Text("Tried: these conversions hold.")))
    for cure in cures:
        console.print(Text(f"   {printable(cure)}", style="bold"), soft_wrap=True)


def _finish(report: FolderReport, *, quiet: bool) -> None:
    failed = [row for row in report.rows if row.outcome == "failed"]
    if failed:
        for row in failed if quiet else ():
            click.echo(printable(f"{row.name}: {row.message}"), err=True)
        raise click.ClickException(f"{len(failed)} of {len(report.rows)} models failed.")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Told]:
    """How far the folder is, on standard error: a bar, or, where that is no terminal, a line for each model."""
    console = make_console(stderr=True)
    if quiet:
        yield lambda _: None
        return
    if not console.is_terminal:

        def print_row(moment: Moment) -> None:
            if moment.row is not None:
                click.echo(f"[{moment.done}/{moment.total}] {row_line(moment.row)}", err=True)

        yield print_row
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(moment: Moment) -> None:
            names = printable(", ".join(name.rpartition("/")[2] for name in moment.running))
            bar.update(task, completed=moment.done, total=moment.total, description=names.replace("[", r"\["))
            if moment.row is not None and moment.row.outcome == "failed":
                bar.console.print(row_line(moment.row), markup=False)

        yield update
