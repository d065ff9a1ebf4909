"""The bar that :meth:`onnxamp.train._network.TrainNetwork.fit` shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def training_bar(total: int | None, *, shown: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar of so many steps on standard error, where that is a terminal; yields what takes a text and a loss."""
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True)
    if not (shown and console.is_terminal):  # some versions of rich print an empty line for a bar that is switched off
        yield lambda _text, _loss: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("training", total=total, loss="")

        def advance(text: str, loss: float) -> None:
            bar.update(task, advance=1, description=text, loss=f"loss {loss:.4f}")

        yield advance
