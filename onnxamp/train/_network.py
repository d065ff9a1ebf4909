"""A model in training: its state, steps, checkpoints and the trained model."""

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

from onnxamp._api import convert_as
from onnxamp._errors import ArgumentError
from onnxamp._options.options import Options
from onnxamp._runtime.session import Provider, run, run_values
from onnxamp._runtime.values import from_value, to_value
from onnxamp.train._checkpoint import read_checkpoint, write_checkpoint
from onnxamp.train._data import Batches
from onnxamp.train._flushed import FlushedGradient, flushed_gradients
from onnxamp.train._forward import Mask
from onnxamp.train._optimizers import Optimizer
from onnxamp.train._recorded import Recorded
from onnxamp.train._step import APPLY, LOSS, NORM, OVERFLOW, RATE, SCALE, Step

if TYPE_CHECKING:
    import onnxruntime as ort

STEPS: Final = "train/steps"
"""In checkpoints: how many steps were made; rates, updates and dropout masks follow it."""

RESULTS: Final = (LOSS, OVERFLOW, NORM)
"""What a step tells, besides the state."""

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step reports; ``scale`` is the loss scale that it used (1 without), ``grad_norm`` is unscaled."""

    loss: float
    overflow: bool
    scale: float
    grad_norm: float


@dataclass(slots=True)
class TrainNetwork:
    """A network in training, made by :func:`onnxamp.train.build_train_network`.

    ``model`` is the step as it is meant to run, in mixed precision; ``runs_on`` says where, and whether low precision
    is emulated there: "CUDA", "CPU", or "CPU, emulated".
    """

    source: ModelProto
    model: ModelProto
    plan: Step
    optimizer: Optimizer
    session: "ort.InferenceSession"
    runs_on: str
    keeps_on_device: bool
    recorded: Recorded | None
    seed: int
    steps: int = 0
    _state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._state = self._held(self.plan.state)

    def step(self, feeds: Feeds) -> StepResult:
        """Make one step with the inputs of the model and the labels.

        Raises:
            ArgumentError: an input is missing, unknown or of another kind of type, or does not tell the shape of a
                dropout mask.
            RuntimeFailure: ONNX Runtime cannot run the step on these inputs; the state stays as it was.
        """
        arrays = self._inputs(feeds)
        scale = float(self._array(SCALE)) if SCALE in self._state else 1.0
        results, self._state = self._run(arrays)
        self.steps += 1
        return StepResult(float(results[LOSS]), bool(results[OVERFLOW]), scale, float(results[NORM]))

    def _inputs(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """All that a step takes but the state: see :meth:`step`."""
        if wrong := set(feeds) ^ set(self.plan.data):
            raise ArgumentError(f"A step takes {', '.join(self.plan.data)}: {min(wrong)!r} is missing or unknown.")
        own: dict[str, NDArray[Any]] = {RATE: np.asarray(self.optimizer.rate(self.steps), np.float32)}
        if self.optimizer.accumulate > 1:
            own[APPLY] = np.asarray((self.steps + 1) % self.optimizer.accumulate == 0)
        arrays = {**_typed(self.plan.model, feeds), **own}
        arrays |= self._masks(arrays)
        return arrays

    def _run(self, arrays: Feeds) -> tuple[Feeds, dict[str, Any]]:
        """The results of a step, and the next state."""
        if self.recorded is not None:
            values, state = self.recorded.step(arrays)
            return {name: from_value(value) for name, value in values.items()}, dict(state)
        wanted = [*RESULTS, *self.plan.successors.values()]
        if self.keeps_on_device:
            found = run_values(self.session, {**_values(arrays), **self._state}, wanted)
            results = {name: from_value(found[name]) for name in RESULTS}
        else:
            found = run(self.session, {**arrays, **self._state}, wanted)
            results = {name: found[name] for name in RESULTS}
        return results, {name: found[output] for name, output in self.plan.successors.items()}

    def fit(
        self,
        batches: Iterable[Feeds],
        epochs: int = 1,
        *,
        progress: bool = False,
        report: Callable[[int, StepResult], None] | None = None,
    ) -> list[float]:
        """Go over the batches so many times; returns the mean loss of each epoch.

        Args:
            batches: what :meth:`step` takes; anything that can be gone over again. :class:`Batches` come in another
                order in each epoch.
            epochs: how often.
            progress: show a bar with the loss on the terminal.
            report: called with the number of the step and its result.
        """
        from onnxamp._report.progress import progress_bar  # noqa: PLC0415 - only a terminal needs it

        means, done, total = [], 0, len(batches) * epochs if isinstance(batches, Sized) else 0
        with progress_bar(quiet=not progress) as told:
            for epoch in range(epochs):
                losses = []
                again = batches.after(epoch) if isinstance(batches, Batches) else batches
                for feeds in again:
                    result = self.step(feeds)
                    losses.append(result.loss)
                    done += 1
                    told(f"training: epoch {epoch + 1}/{epochs}, loss {result.loss:.4f}", done, total)
                    if report is not None:
                        report(self.steps, result)
                if not losses:
                    raise ArgumentError("There are no batches, or they could be gone over only once.")
                means.append(float(np.mean(losses)))
        return means

    def flushed(self, feeds: Feeds) -> dict[str, FlushedGradient]:
        """Which gradients the next step with these inputs flushes to zero, by weight, in low precision.

        Where many are, the loss wants a larger scale. Nothing is trained. Two sessions are made for each call.

        Raises:
            ArgumentError, RuntimeFailure: as :meth:`step`.
        """
        feeds = {**self._inputs(feeds), **{name: np.array(self._array(name)) for name in self._state}}
        where: Provider = "cuda" if self.runs_on == "CUDA" else "cpu"
        return flushed_gradients(self.model, self.plan.model, self.plan.gradients, feeds, where)

    def state(self) -> dict[str, NDArray[Any]]:
        """A copy of everything that a later step depends on: weights, slots, scale, counters."""
        found = {name: np.array(self._array(name)) for name in self._state}
        return found | {STEPS: np.asarray(self.steps, np.int64)}

    def load_state(self, state: Feeds) -> None:
        """Go on from what :meth:`state` returned, in this or in an equal network.

        Raises:
            ArgumentError: it belongs to another network.
        """
        wanted = {**{name: a.shape for name, a in self.plan.state.items()}, STEPS: ()}
        for name in sorted(wanted.keys() | state.keys()):
            if name not in wanted or name not in state or np.shape(state[name]) != wanted[name]:
                raise ArgumentError(f"The state is that of another network: {name!r} is missing, unknown or misshapen.")
        self.steps = int(state[STEPS])
        kinds = {name: array.dtype for name, array in self.plan.state.items()}
        self._state = self._held({name: np.array(state[name], kind) for name, kind in kinds.items()})

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state as a safetensors file; until it is complete, what was there stays.

        Raises:
            OutputError: it cannot be written.
        """
        write_checkpoint(Path(path), self.state())

    def load(self, path: str | PathLike[str]) -> None:
        """Go on from what :meth:`save` wrote.

        Raises:
            ModelError: the file cannot be read. ArgumentError: it belongs to another network.
        """
        self.load_state(read_checkpoint(Path(path)))

    def export(self, level: str = "O0", **wishes: Any) -> ModelProto:
        """The trained inference model: the model that training began with, with new weights and running statistics.

        Args:
            level, wishes: how to convert it, as :func:`onnxamp.convert_model`; O0 leaves it in float32.
        """
        result = ModelProto()
        result.CopyFrom(self.source)
        for tensor in result.graph.initializer:
            if tensor.name in self._state:
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(self._array(tensor.name)), tensor.name))
        return result if level == "O0" and not wishes else convert_as(result, Options.of(level, wishes))

    def _held(self, state: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        if self.recorded is not None:
            return dict(self.recorded.hold(state))
        return _values(state) if self.keeps_on_device else dict(state)

    def _array(self, name: str) -> NDArray[Any]:
        held = self._state[name]
        return np.asarray(from_value(held)) if self.keeps_on_device else held

    def _masks(self, feeds: Feeds) -> dict[str, NDArray[np.bool_]]:
        """Dropout masks from a counter-based generator keyed by seed and step: resuming draws the same ones."""
        if not self.plan.masks:
            return {}
        generator = np.random.Generator(np.random.Philox(key=[self.seed, self.steps]))
        sizes = _dimensions(self.plan.model, feeds)
        return {mask.name: generator.random(_shape(mask, sizes), np.float32) >= mask.ratio for mask in self.plan.masks}


def _values(arrays: Feeds) -> "dict[str, ort.OrtValue]":
    return {name: to_value(array) for name, array in arrays.items()}


def _typed(model: ModelProto, feeds: Feeds) -> dict[str, NDArray[Any]]:
    """The feeds in the types that the inputs have.

    Raises:
        ArgumentError: that would change what they say, as from floats to integers.
    """
    found = {}
    for entry in model.graph.input:
        if entry.name in feeds:
            array = np.asarray(feeds[entry.name])
            wanted = np.dtype(helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type))
            if array.dtype != wanted and not np.can_cast(array.dtype, wanted, "same_kind"):
                raise ArgumentError(f"The input {entry.name!r} takes {wanted} numbers, not {array.dtype}.")
            found[entry.name] = array.astype(wanted, copy=False)
    return found


def _dimensions(model: ModelProto, feeds: Feeds) -> dict[str, int]:
    """Sizes of the named dimensions of the inputs."""
    found: dict[str, int] = {}
    for entry in model.graph.input:
        if entry.name in feeds:
            dims = entry.type.tensor_type.shape.dim
            found |= {d.dim_param: n for d, n in zip(dims, feeds[entry.name].shape, strict=False) if d.dim_param}
    return found


def _shape(mask: Mask, sizes: Mapping[str, int]) -> tuple[int, ...]:
    unknown = [dim for dim in mask.dims if isinstance(dim, str) and dim not in sizes]
    if unknown:
        raise ArgumentError(f"The size {unknown[0]!r} of the dropout mask {mask.name!r} is that of no input.")
    return tuple(dim if isinstance(dim, int) else sizes[str(dim)] for dim in mask.dims)
