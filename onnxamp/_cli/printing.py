"""What a command prints: its report in the requested format, warnings, and errors. It imports rich."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from onnxamp._base.errors import printable
from onnxamp._cli.door import note_report, printing
from onnxamp._report.console import fitted, is_screen, make_console
from onnxamp._report.formats import as_markdown, document
from onnxamp._report.parts import Report
from onnxamp._report.terminal import print_report
from onnxamp._runtime.sessions.session import idle_gpu


def print_warning(text: str) -> None:
    """Print a warning on standard error."""
    click.echo(f"Warning: {fitted(printable(text), 'Warning: ')}", err=True)


def print_in(
    form: str,
    report: Callable[[], Report],
    kind: str,
    facts: Callable[[], Mapping[str, Any]],
    *,
    verbose: bool,
    is_asked: bool,
) -> None:
    """Print the facts as JSON of a kind, or the report, in Markdown or as it is.

    Args:
        form: the format.
        report, kind, facts: what is printed.
        verbose: with all details.
        is_asked: whether the user chose the provider that models ran on.

    Raises:
        OutputError: standard output cannot be written. BrokenPipeError: its reader is gone.
    """
    with printing():
        if form == "json":
            text = document(kind, facts())
            note_report()
            click.echo(text)
        elif form == "markdown":
            click.echo(f"{as_markdown(report(), verbose=verbose)}\n")
        else:
            shown = report()
            print_report(shown, verbose=verbose, brief=form == "line")
            if not is_asked:
                _note_idle_gpu(shown)


def _note_idle_gpu(report: Report) -> None:
    """Say on a terminal that models ran on the CPU although a package for GPUs is installed.

    Logs and other programs read the engine in the report, which names the CPU.
    """
    on_cpu = report.ran and report.ran[0].startswith("CPU")
    if not on_cpu or not is_screen(make_console(stderr=True)):
        return
    if text := idle_gpu():
        click.echo(f"Note: {fitted(text, 'Note: ')}", err=True)
