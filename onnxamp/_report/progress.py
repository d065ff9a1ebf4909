"""The progress of every command: a bar on a terminal or in a notebook, and elsewhere a line now and then."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from onnxamp._base.errors import printable
from onnxamp._report import percent

if TYPE_CHECKING:
    from rich.console import Console

Told: TypeAlias = Callable[..., None]
"""Called with the activity ("measuring: sample 1 of 4"), the amount done, and the total (0: unknown)."""

_Bar: TypeAlias = Callable[[str, int, int], None]

_NOTEBOOK: Final = 0.1
"""Seconds between two updates of a notebook."""
_LINES: Final = 10.0
"""Seconds between two lines."""


def progress_lines(write: Callable[[str], object], every: float = _LINES) -> _Bar:
    """Return a callback that writes a line with the activity, its share and the time since the start.

    It writes one line per interval, given in seconds, so shorter jobs write nothing.
    """
    start = last = monotonic()

    def told(text: str, done: int, total: int) -> None:
        nonlocal last
        now = monotonic()
        if now - last >= every:
            share = f", {percent(done, total)}" if total else ""
            write(f"{printable(text)}{share} ({now - start:.0f} s)\n")
            last = now

    return told


@contextmanager
def progress_bar(label: str = "working", *, quiet: bool = False) -> Iterator[Told]:
    """Show a bar that disappears at the end or, if standard error is not a terminal, print a line now and then.

    Args:
        label: the activity to show for functions that report only numbers.
        quiet: show nothing.

    Yields:
        A function for ``progress`` or ``told`` of any function of onnxamp. Its arguments are the activity, the amount
        done and the total (0 if unknown), or only these two numbers.

    Example:
        >>> import onnxamp
        >>> with onnxamp.progress_bar() as progress:
        ...     _, tuned = onnxamp.tune_model("models/classifier.onnx", 1e-2, count=1, progress=progress)
        >>> tuned.held
        True
    """
    with nullcontext(_ignore) if quiet else _shown() as bar:

        def told(*step: Any) -> None:
            if len(step) == 1:  # a FolderProgress
                (moment,) = step
                step = _folder_text(moment.running), moment.done, moment.total
            text, done, total = step if len(step) == 3 else (label, *step)
            bar(printable(text), done, total)

        yield told


def _ignore(text: str, done: int, total: int) -> None:
    """Show nothing: some versions of rich print an empty line for a bar that is switched off."""
    del text, done, total


def _shown() -> AbstractContextManager[_Bar]:
    """Return how progress is shown here."""
    from onnxamp._report.console import is_screen, make_console  # noqa: PLC0415 - quiet commands print nothing

    console = make_console(stderr=True)
    if console.is_jupyter:
        return _notebook()
    if is_screen(console):
        return _terminal(console)
    return nullcontext(progress_lines(console.file.write))


def _folder_text(running: Sequence[str]) -> str:
    """Return the names of the models that are being converted; between two of them there are none."""
    names = ", ".join(name.rpartition("/")[2] for name in running)
    return f"converting: {names}" if names else "converting"


@contextmanager
def _terminal(console: "Console") -> Iterator[_Bar]:
    """Restart the bar, and its time left, when the text before the colon changes."""
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        current = ""

        def told(text: str, done: int, total: int) -> None:
            nonlocal task, current
            # The estimate of the time left must not mix the speeds of different activities.
            kind = text.partition(":")[0]
            if kind != current:
                bar.remove_task(task)
                task = bar.add_task("", total=None)
                current = kind
            bar.update(task, description=text, completed=done, total=total or None)

        yield told


@contextmanager
def _notebook() -> Iterator[_Bar]:
    """Show an HTML element that is updated in place, in every kind of notebook; rich's own bar needs ipywidgets."""
    ipython: Any = import_module("IPython.display")  # there is one in a notebook
    handle = ipython.display(ipython.HTML(""), display_id=True)
    last = 0.0
    from html import escape  # noqa: PLC0415 - only a notebook needs it

    def told(text: str, done: int, total: int) -> None:
        nonlocal last
        if monotonic() - last < _NOTEBOOK:
            return
        last = monotonic()
        amount = f' max="{total}" value="{done}"' if total else ""
        handle.update(ipython.HTML(f"<progress{amount}></progress> {escape(text)}"))

    try:
        yield told
    finally:
        handle.update(ipython.HTML(""))
