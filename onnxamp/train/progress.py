"""The bar that :meth:`onnxamp.train.network.TrainNetwork.fit` shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def training_bar(epochs: int, *, shown: bool) -> Iterator[Callable[[int, float], None]]:
    """A bar on stderr; yields what takes the epoch and the loss after each step."""
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn())
    steps = {"made": 0, "epoch": 0, "of_an_epoch": 0}
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("training", total=None, loss="")

        def advance(epoch: int, loss: float) -> None:
            if epoch == 1 and not steps["of_an_epoch"]:  # now one knows how many there are
                steps["of_an_epoch"] = steps["made"]
                bar.update(task, total=steps["made"] * epochs)
            steps["made"] += 1
            bar.update(task, advance=1, description=f"epoch {epoch + 1}/{epochs}", loss=f"loss {loss:.4f}")

        yield advance
