"""The way out of the command line: every error of a command is printed as one sentence, or as one JSON object."""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

import click

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    OnnxAmpError,
    OutputError,
    printable,
)
from onnxamp._base.paths import reason_of
from onnxamp._base.signals import is_ended

_INTERRUPTED: Final = 130
"""Exit code of a process that Ctrl-C ends: 128 and the number of the signal."""

_USAGE: Final = 2
"""Exit code of wrong usage."""

_TROUBLE: Final = {"diff": 2}
"""Command -> exit code of other errors, if not 1, which in ``diff`` means that the models differ."""

_WORDS: Final = "onnxamp words"
"""The key of the command line in a context."""

_REPORTED: Final = "onnxamp report"
"""The key in a context that marks a report on standard output."""


def note_words(context: click.Context, words: Sequence[str]) -> None:
    """Note the command line, whose format options apply even if it cannot be parsed."""
    context.meta[_WORDS] = tuple(words)


def note_report() -> None:
    """Note that a report was printed, so that a JSON error would not be the only object on standard output."""
    click.get_current_context().meta[_REPORTED] = True


@contextmanager
def printing() -> Iterator[None]:
    """Print a report.

    Raises:
        OutputError: it cannot be printed, as on a full disk. BrokenPipeError: its reader is gone.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"Cannot print the report: {error.strerror}.") from None


@contextmanager
def door() -> Iterator[None]:
    """Print any error: a sentence on standard error or, in formats for programs, on standard output.

    ``-v`` prints the traceback before it.

    Raises:
        click.exceptions.Exit: something was raised; it holds the exit code.
    """
    try:
        yield
    except (click.exceptions.Exit, click.Abort):
        raise
    except KeyboardInterrupt:
        click.echo("Aborted!", err=True)
        raise click.exceptions.Exit(_INTERRUPTED) from None
    except Exception as error:
        # A signal ends the process elsewhere, and nothing reads a closed pipe.
        is_unread = isinstance(error, OSError) and error.errno == errno.EPIPE
        if is_unread or is_ended(error):
            raise
        raise click.exceptions.Exit(_shown(error)) from None


def _shown(error: Exception) -> int:
    """Print an error, and return the exit code."""
    context = click.get_current_context()
    words: Sequence[str] = context.meta.get(_WORDS, ())
    is_clicks = isinstance(error, click.ClickException)
    is_usage = isinstance(error, (click.UsageError, ArgumentError, ArgumentTypeError))
    code = _USAGE if is_usage else _TROUBLE.get(words[0] if words else "", 1)
    # Short options may be joined, as in -qvo FILE. What follows one that takes a value is its value.
    is_verbose = any(re.fullmatch("--verbose|-q*v.*", word) for word in words)
    if is_verbose and not is_clicks:
        import traceback  # noqa: PLC0415 - help and completion need none

        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    text = _formatted(error, code, words, context)
    if text is not None:
        try:
            with printing():
                click.echo(text)
        except OutputError as unprinted:
            error = unprinted
        else:
            return code
    if isinstance(error, click.ClickException):
        error.show()
    else:
        text = _text(error, code, "")
        if is_usage:
            click.UsageError(text, context).show()  # with a hint at --help
        else:
            click.ClickException(text).show()
    return code


def _formatted(
    error: Exception, code: int, words: Sequence[str], context: click.Context
) -> str | None:
    """Return an error in the requested machine-readable format; None for people, or next to a report in JSON."""
    form = _format(words)
    if form not in ("json", "markdown"):
        return None
    if form == "json":
        if _REPORTED in context.meta:
            return None
        note_report()
    return _text(error, code, form)


def _text(error: Exception, code: int, form: str) -> str:
    """Return an error in a format; "" for people."""
    # They import rich and every report, and few commands fail.
    from onnxamp._report.console import fitted  # noqa: PLC0415
    from onnxamp._report.formats import document, error_markdown  # noqa: PLC0415

    sentence = _sentence(error)
    if form == "json":
        facts = {"kind": _kind(error), "message": sentence, "exit_code": code}
        return document("error", facts)
    if form == "markdown":
        return f"{error_markdown(sentence)}\n"
    return fitted(printable(sentence), "Error: ")


def _kind(error: Exception) -> str:
    """Return the kind of an error for programs: the name of our class, or a general one."""
    if isinstance(error, OnnxAmpError):
        return type(error).__name__
    if isinstance(error, click.ClickException):
        return "UsageError" if isinstance(error, click.UsageError) else "Failure"
    is_systems = isinstance(error, (OSError, MemoryError))
    return "SystemError" if is_systems else "UnexpectedError"


def _sentence(error: Exception) -> str:
    """Return the fault, its place, and what to do."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OnnxAmpError):
        return str(error)
    if isinstance(error, MemoryError):
        return (
            "There is not enough memory. Use smaller inputs (--dim), fewer worker processes (--jobs), or a machine"
            " with more."
        )
    if isinstance(error, OSError):
        file = "a file" if error.filename is None else repr(str(error.filename))
        return f"Cannot read or write {file}: {reason_of(error)}. Check free disk space and permissions."
    return (
        f"{type(error).__name__}{_place(error)}: {reason_of(error)}. This may be a bug in onnxamp: run the command again"
        " with -v to get a traceback, and report it."
    )


def _place(error: Exception) -> str:
    """Return the innermost place in onnxamp of a traceback."""
    import traceback  # noqa: PLC0415 - help and completion need none

    package = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    if not ours:
        return ""
    file = Path(ours[-1].filename).relative_to(package.parent)
    return f" in {file.as_posix()}:{ours[-1].lineno}"


def _format(words: Sequence[str]) -> str:
    """Return the last ``--format``."""
    formats = [
        after if word == "--format" else word.partition("=")[2]
        for word, after in pairwise([*words, ""])
        if word == "--format" or word.startswith("--format=")
    ]
    return formats[-1] if formats else ""
