"""Training for some epochs."""

from collections.abc import Callable, Iterable, Mapping, Sized
from os import PathLike
from typing import Any, Protocol

import numpy as np
from onnx import ModelProto

from onnxamp._errors import ArgumentError
from onnxamp._runtime.samples import SamplesLike
from onnxamp._runtime.sampling import as_samples
from onnxamp.train._feeds import Batches
from onnxamp.train._halves import StepResult


class Trained(Protocol):
    """What :func:`train` needs of a network."""

    source: ModelProto
    steps: int

    def step(self, feeds: Mapping[str, Any]) -> StepResult:
        """Make one training step."""


def train(
    net: Trained,
    batches: Iterable[Mapping[str, Any]] | SamplesLike,
    epochs: int,
    *,
    progress: bool,
    report: Callable[[int, StepResult], None] | None,
) -> list[float]:
    """:meth:`onnxamp.train.TrainNetwork.fit`."""
    if isinstance(batches, (str, PathLike, Mapping)):
        batches = as_samples(batches, net.source)
    from onnxamp._report.progress import progress_bar  # noqa: PLC0415 - only a terminal needs it

    means, total = [], len(batches) * epochs if isinstance(batches, Sized) else 0
    done = 0
    with progress_bar(quiet=not progress) as advance:
        for epoch in range(epochs):
            losses = []
            items: Iterable[Any] = batches.after(epoch) if isinstance(batches, Batches) else batches
            for feeds in items:
                result = net.step(feeds)
                losses.append(result.loss)
                done += 1
                advance(f"training: epoch {epoch + 1}/{epochs}, loss {result.loss:.4f}", done, total)
                if report is not None:
                    report(net.steps, result)
            if not losses:
                raise ArgumentError("There are no batches, or they cannot be iterated more than once.")
            means.append(float(np.mean(losses)))
    return means
