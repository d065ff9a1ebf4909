"""Two models beside each other: opened, made ready for a sample, and run; and what of their outputs is compared."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model, ModelSource
from onnxamp._numerics.metrics import TensorDiff, compare
from onnxamp._numerics.pairing import Pairing
from onnxamp._numerics.walk import Walk, Walked
from onnxamp._numerics.whole import Whole
from onnxamp._runtime.device import device_name
from onnxamp._runtime.flow import Flow, fitted
from onnxamp._runtime.observe import Observed, observe
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.session import Provider
from onnxamp._runtime.side import BUDGET
from onnxamp._runtime.values import Feed

Progress: TypeAlias = Callable[[int, int], None]
"""Called with what is done and what there is to do, in nodes times samples."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model to run: its proto, the folder of its external data, and how reports name it."""

    proto: ModelProto
    folder: Path | None
    label: str
    path: Path | None = None

    def whole(self, provider: Provider) -> Whole:
        """The model to be run in one session."""
        return Whole(self.path or self.proto, provider)


def open_model(source: ModelSource) -> Opened:
    """Read a model's graph where it is not read already.

    Raises:
        ModelError: the file cannot be read, or the model is not well formed.
    """
    model = Model.of(source)
    label = str(model.path) if model.path is not None else model.proto.graph.name or "model"
    return Opened(model.proto, model.folder, label, model.path)


@dataclass(frozen=True, slots=True)
class Ready:
    """Both models made ready for a sample, and for others that take the same branches."""

    seen: tuple[Observed, Observed]
    walk: Walk


def make_ready(
    one: Opened,
    other: Opened,
    feeds: Mapping[str, Feed],
    provider: Provider,
    *,
    paired: Callable[[Flow, Flow], Pairing],
    emulated: bool,
    budget: int = BUDGET,
    before: Ready | None = None,
) -> Ready:
    """Make two models ready for a sample.

    Args:
        paired: says which values are compared.
        emulated: see :func:`~onnxamp._runtime.flow.make_flow`.
        before: what an earlier sample led to; it is returned where the same branches are taken.

    Raises:
        As :func:`~onnxamp._runtime.observe.observe`.
    """
    olds = before.seen if before is not None else (None, None)
    first, second = (
        observe(model.proto, model.folder, feeds, emulated=emulated, provider=provider, before=old)
        for model, old in zip((one, other), olds, strict=True)
    )
    if before is not None and first is olds[0] and second is olds[1]:
        return before
    pairing = paired(first.flow, second.flow)
    walk = Walk(Runner(first.flow, provider), Runner(second.flow, provider), pairing, budget)
    return Ready((first, second), walk)


def nothing_paired(_reference: Flow, _result: Flow) -> Pairing:
    """Nothing but the outputs is compared."""
    return Pairing({})


def run_both(
    walk: Walk,
    wholes: tuple[Whole, Whole] | None,
    feeds: Mapping[str, Feed],
    told: Progress | None = None,
    *,
    layers: bool = False,
) -> Walked:
    """Run both models on one sample: in pieces; whole; or, where layers of whole ones are wanted, in both ways.

    Raises:
        RuntimeFailure: the reference does not run.
    """
    if wholes is not None and any(feed is None for feed in feeds.values()):
        wholes = None  # sessions cannot be fed optionals that hold nothing
    walked = Walked({}, {}, {})
    if layers or wholes is None:
        walked = walk.run(fitted(walk.reference.flow, feeds), fitted(walk.result.flow, feeds), told)
    if wholes is None:
        return walked
    reference = wholes[0].run(feeds)
    try:
        return Walked(reference, wholes[1].run(feeds), walked.compared)
    except RuntimeFailure as error:
        return Walked({}, {}, walked.compared, str(error))


def noise_floor(on_cpu: Whole, feeds: Mapping[str, Feed], outputs: Mapping[str, Any]) -> float | None:
    """What the order of sums alone does: relative L2 error of a float32 model's outputs against those of the CPU.

    Args:
        on_cpu: the model.
        outputs: what another device made of the same feeds.

    Returns:
        The worst of all float outputs; None where the model does not run on CPU.
    """
    try:
        found = on_cpu.run(feeds)
    except RuntimeFailure:
        return None
    diffs = (diff for name, value in found.items() for diff in compare_outputs(name, value, outputs[name]))
    return max((diff.rel_l2 for diff in diffs if diff.is_float), default=0.0)


def compare_outputs(name: str, reference: Any, found: Any) -> Iterator[TensorDiff]:
    """Compare an output of both models: an array, or the arrays of a sequence one by one."""
    if isinstance(reference, list) and isinstance(found, list):
        for position, (one, other) in enumerate(zip(reference, found, strict=False)):
            yield from compare_outputs(f"{name}[{position}]", one, other)
    elif isinstance(reference, np.ndarray) and isinstance(found, np.ndarray):
        yield compare(name, reference, found)


def at_least_one(samples: Samples) -> None:
    """Refuse to compare on nothing.

    Raises:
        ArgumentError: there is no sample.
    """
    if not len(samples):
        raise ArgumentError("There is no sample to run the model on.")


def ran_on(provider: Provider, lowest: str) -> str:
    """How reports name what computed."""
    if provider == "cuda":
        return f"CUDA ({device_name()})"
    return "CPU" if lowest == "float32" else f"CPU, emulated {lowest}"


def part_of(told: Progress | None, sample: int, samples: int) -> Progress | None:
    """Progress of one sample as a part of all."""
    return None if told is None else lambda done, total: told(sample * total + done, samples * total)
