"""The progress of every command, on standard error: a bar on a terminal, and a line now and then elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final, TypeAlias

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from onnxamp._report.terminal import make_console
from onnxamp._report.text import percent, printable

Told: TypeAlias = Callable[[str, int, int], None]
"""Takes what is being done ("measuring: sample 1 of 4"), how much of it is done, and how much there is (0: unknown)."""


_EVERY: Final = 10.0
"""Seconds between two lines."""


def progress_lines(write: Callable[[str], object], every: float = _EVERY) -> Told:
    """Writes a line on what is being done, with its share and the time since the start, every so many seconds.

    What takes less time than that says nothing.
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
def progress_bar(*, quiet: bool = False) -> Iterator[Told]:
    """A bar that is gone at the end. What changes before a colon starts anew, with a time left of its own.

    Where standard error is no terminal: :func:`progress_lines`.
    """
    console = make_console(stderr=True)
    if quiet:  # some versions of rich print an empty line for a bar that is switched off
        yield lambda _text, _done, _total: None
        return
    if not console.is_terminal:
        yield progress_lines(console.file.write)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task, current = bar.add_task("starting", total=None), ""

        def told(text: str, done: int, total: int) -> None:
            nonlocal task, current
            kind = text.partition(":")[0]
            if kind != current:
                bar.remove_task(task)
                task, current = bar.add_task("", total=None), kind
            bar.update(task, description=printable(text), completed=done, total=total or None)

        yield told
