"""A model in training: its state, steps, checkpoints, and the trained model."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from onnxamp._api import convert_as
from onnxamp._errors import ArgumentError, ModelError
from onnxamp._model.storage import write_file
from onnxamp._options.options import Options
from onnxamp._runtime.samples import SamplesLike, as_samples
from onnxamp._runtime.session import Provider, run, run_values
from onnxamp._runtime.values import from_value, to_value
from onnxamp.debugging._checker import TensorChecker
from onnxamp.debugging._steps import StepWatch
from onnxamp.train._feeds import Batches, Feeds, draw_masks, typed_feeds
from onnxamp.train._flushed import FlushedGradient, flushed_gradients
from onnxamp.train._optimizers import Optimizer
from onnxamp.train._recorded import Recorded
from onnxamp.train._saved import store_weights
from onnxamp.train._step import APPLY, LOSS, NORM, OVERFLOW, RATE, SCALE, Step

if TYPE_CHECKING:
    import onnxruntime as ort

STEPS: Final = "train/steps"
"""In checkpoints: the number of steps made, which decides rates, updates and dropout masks."""

RESULTS: Final = (LOSS, OVERFLOW, NORM)
"""Outputs of a step besides the state."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step reports.

    Attributes:
        loss: unscaled.
        overflow: whether a gradient holds NaN or Inf; the update is then skipped, if the loss scale says so.
        scale: the loss scale of this step; 1 without loss scaling.
        grad_norm: L2 norm of all gradients together, unscaled and before clipping.

    Example:
        >>> from onnxamp.train import StepResult
        >>> StepResult(loss=0.25, overflow=False, scale=1024.0, grad_norm=0.5).loss
        0.25
    """

    loss: float
    overflow: bool
    scale: float
    grad_norm: float


@dataclass(slots=True)
class TrainNetwork:
    """A network in training, made by :func:`build_train_network`.

    Attributes:
        source: the inference model that training started from.
        model: the training step in mixed precision, an ordinary ONNX model.
        runs_on: "CUDA", "CPU", or "CPU, emulated" (low precision is emulated).
        steps: number of steps made.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import SGD, build_train_network
        >>> net = build_train_network("models/classifier.onnx", SGD(), "cross-entropy")
        >>> result = net.step({"image": np.zeros((2, 3, 32, 32), np.float32), "label": np.array([0, 1])})
        >>> net.steps, result.overflow
        (1, False)
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
    save_dtype: str | None = None
    steps: int = 0
    _state: dict[str, Any] = field(default_factory=dict)
    _watch: StepWatch = field(init=False)

    def __post_init__(self) -> None:
        provider: Provider = "cuda" if self.runs_on == "CUDA" else "cpu"
        self._watch = StepWatch(self.model, provider, self.runs_on.endswith("emulated"), self.plan.scaled)
        self._state = self._held(self.plan.state)

    def step(self, feeds: Mapping[str, Any]) -> StepResult:
        """Make one training step.

        Args:
            feeds: arrays for the inputs of the model and the labels, by name. Floats and integers of other widths are
                cast to the types of the inputs.

        Raises:
            ArgumentError: an input is missing, unknown or of the wrong kind of type, or the shape of a dropout mask
                cannot be derived.
            RuntimeFailure: ONNX Runtime cannot run the step on these inputs; the state does not change.
            NumericsError: an active tensor checker (:mod:`onnxamp.debugging`) aborts; the state does not change.
        """
        arrays = self._inputs(feeds)
        scale = float(self._array(SCALE)) if SCALE in self._state else 1.0
        results, self._state = self._run(arrays)
        self.steps += 1
        return StepResult(float(results[LOSS]), bool(results[OVERFLOW]), scale, float(results[NORM]))

    def _inputs(self, feeds: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """All inputs of a step other than the state."""
        if wrong := set(feeds) ^ set(self.plan.data):
            raise ArgumentError(f"A step takes {', '.join(self.plan.data)}: {min(wrong)!r} is missing or unknown.")
        arrays = typed_feeds(self.plan.model, feeds)
        arrays |= draw_masks(self.plan.masks, self.plan.model, arrays, self.seed, self.steps)
        arrays[RATE] = np.asarray(self.optimizer.rate(self.steps), np.float32)
        if self.optimizer.accumulate > 1:
            arrays[APPLY] = np.asarray((self.steps + 1) % self.optimizer.accumulate == 0)
        return arrays

    def _run(self, arrays: Feeds) -> tuple[Feeds, dict[str, Any]]:
        """The results of a step, and the next state."""
        wanted = [*RESULTS, *self.plan.successors.values()]
        check = self._watch.begin()
        if check is not None:
            return self._watched(check, arrays, wanted)
        if self.recorded is not None:
            values, state = self.recorded.step(arrays)
            return {name: from_value(value) for name, value in values.items()}, dict(state)
        if self.keeps_on_device:
            outputs = run_values(self.session, {**_values(arrays), **self._state}, wanted)
            results = {name: from_value(outputs[name]) for name in RESULTS}
        else:
            outputs = run(self.session, {**arrays, **self._state}, wanted)
            results = {name: outputs[name] for name in RESULTS}
        return results, {name: outputs[output] for name, output in self.plan.successors.items()}

    def _watched(
        self, check: tuple[TensorChecker, int], arrays: Feeds, wanted: Sequence[str]
    ) -> tuple[Feeds, dict[str, Any]]:
        """:meth:`_run` under a tensor checker."""
        state = self._state if self.keeps_on_device else _values(self._state)
        scale = float(self._array(SCALE)) if SCALE in self._state else 1.0
        expected = self.plan.skips and scale > 1
        outputs = self._watch.run(
            check, {**_values(arrays), **state}, wanted, lambda made: expected and bool(from_value(made[OVERFLOW]))
        )
        following = {name: from_value(outputs[output]) for name, output in self.plan.successors.items()}
        return {name: from_value(outputs[name]) for name in RESULTS}, self._held(following)

    def fit(
        self,
        batches: Iterable[Mapping[str, Any]] | SamplesLike,
        epochs: int = 1,
        *,
        progress: bool = False,
        report: Callable[[int, StepResult], None] | None = None,
    ) -> list[float]:
        """Train for some epochs.

        Args:
            batches: what :meth:`step` takes, as anything that can be iterated once per epoch, :class:`Batches` (which
                are shuffled anew in each epoch), :class:`onnxamp.Samples`, a path to such (.npz, .json or a folder),
                or a dict of arrays, which is a single batch.
            epochs: number of epochs.
            progress: show a progress bar with the loss on the terminal.
            report: called with the number of each step, from 1, and its result.

        Returns:
            The mean loss of each epoch.

        Raises:
            ArgumentError: there are no batches. Others as :meth:`step`.
        """
        if isinstance(batches, (str, PathLike, Mapping)):
            batches = as_samples(batches, self.source)
        from onnxamp._report.progress import progress_bar  # noqa: PLC0415 - only a terminal needs it

        means, total = [], len(batches) * epochs if isinstance(batches, Sized) else 0
        done = 0
        with progress_bar(quiet=not progress) as advance:
            for epoch in range(epochs):
                losses = []
                for feeds in batches.after(epoch) if isinstance(batches, Batches) else batches:
                    result = self.step(feeds)
                    losses.append(result.loss)
                    done += 1
                    advance(f"training: epoch {epoch + 1}/{epochs}, loss {result.loss:.4f}", done, total)
                    if report is not None:
                        report(self.steps, result)
                if not losses:
                    raise ArgumentError("There are no batches, or they cannot be iterated more than once.")
                means.append(float(np.mean(losses)))
        return means

    def flushed(self, feeds: Mapping[str, Any]) -> dict[str, FlushedGradient]:
        """Which gradients low precision would flush to zero in the next step, by weight.

        If many are, the loss needs a larger scale. Nothing is trained. Each call creates two sessions.

        Args:
            feeds: as for :meth:`step`.

        Raises:
            ArgumentError, RuntimeFailure: as :meth:`step`.
        """
        feeds = {**self._inputs(feeds), **{name: np.array(self._array(name)) for name in self._state}}
        provider: Provider = "cuda" if self.runs_on == "CUDA" else "cpu"
        return flushed_gradients(self.model, self.plan.model, self.plan.gradients, feeds, provider)

    def state(self) -> dict[str, NDArray[Any]]:
        """A copy of all that later steps depend on, by name: weights, optimizer slots, loss scale, counters."""
        state = {name: np.array(self._array(name)) for name in self._state}
        return state | {STEPS: np.asarray(self.steps, np.int64)}

    def load_state(self, state: Feeds) -> None:
        """Continue from what :meth:`state` returned, in this or in an equal network.

        Raises:
            ArgumentError: it is the state of another network.
        """
        shapes = {**{name: array.shape for name, array in self.plan.state.items()}, STEPS: ()}
        for name in sorted(shapes.keys() | state.keys()):
            if name not in shapes or name not in state or np.shape(state[name]) != shapes[name]:
                raise ArgumentError(
                    f"The state is that of another network: {name!r} is missing, unknown or of another shape."
                )
        self.steps = int(state[STEPS])
        self._state = self._held({name: np.array(state[name], a.dtype) for name, a in self.plan.state.items()})

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state as a safetensors file; an existing file is replaced once the new one is complete.

        Raises:
            OutputError: it cannot be written.
        """
        import safetensors.numpy  # noqa: PLC0415 - only checkpoints need it

        arrays = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in self.state().items()}
        write_file(Path(path), safetensors.numpy.save(arrays, metadata={"kind": "onnxamp training state"}))

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from what :meth:`save` wrote.

        Raises:
            ModelError: the file cannot be read.
            ArgumentError: it is the state of another network.
        """
        import safetensors.numpy  # noqa: PLC0415 - only checkpoints need it

        try:
            state = safetensors.numpy.load(Path(path).read_bytes())
        except OSError as error:
            raise ModelError(f"Cannot read {str(path)!r}: {error.strerror}.") from None
        except safetensors.SafetensorError as error:
            raise ModelError(f"{str(path)!r} is not a checkpoint, or is truncated: {error}.") from None
        self.load_state(state)

    def export(self, level: str = "O0", **options: Any) -> ModelProto:
        """The trained inference model: the original model with the trained weights and running statistics.

        With a ``save_dtype`` of :func:`decorate`, these are stored in that type, and a Cast behind each gives float32.

        Args:
            level, options: how to convert it, as for :func:`onnxamp.convert_model`; "O0" leaves it in float32.
        """
        result = ModelProto()
        result.CopyFrom(self.source)
        for tensor in result.graph.initializer:
            if tensor.name in self._state:
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(self._array(tensor.name)), tensor.name))
        if self.save_dtype not in (None, "float32"):
            store_weights(result, self._state, self.save_dtype)
        return result if level == "O0" and not options else convert_as(result, Options.of(level, options))

    def _held(self, state: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        if self.recorded is not None:
            return dict(self.recorded.hold(state))
        return _values(state) if self.keeps_on_device else dict(state)

    def _array(self, name: str) -> NDArray[Any]:
        held = self._state[name]
        return np.asarray(from_value(held)) if self.keeps_on_device else held


def _values(arrays: Feeds) -> "dict[str, ort.OrtValue]":
    return {name: to_value(array) for name, array in arrays.items()}
