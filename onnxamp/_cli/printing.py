"""What a command prints: its report in the requested format, warnings, and errors. It imports rich."""

from collections.abc import Callable, Mapping
from typing import Any

import click

from onnxamp._base.errors import printable
from onnxamp._cli.door import note_report, printing
from onnxamp._report.formats import as_markdown, document
from onnxamp._report.parts import Report
from onnxamp._report.terminal import fitted, print_report


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
) -> None:
    """Print the facts as JSON of a kind, or the report, in Markdown or as it is.

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
            print_report(report(), verbose=verbose, brief=form == "line")
