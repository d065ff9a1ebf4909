"""The progress bar of every command, on standard error; nothing where that is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from onnxamp._report.terminal import make_console
from onnxamp._report.text import printable

Told: TypeAlias = Callable[[str, int, int], None]
"""Takes what is being done ("measuring: sample 1 of 4"), how much of it is done, and how much there is (0: unknown)."""


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Told]:
    """A bar that is gone at the end. What changes before a colon starts anew, with a time left of its own."""
    console = make_console(stderr=True)
    if quiet or not console.is_terminal:  # some versions of rich print an empty line for a bar that is switched off
        yield lambda _text, _done, _total: None
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
