"""A model in training: its state, steps, checkpoints, and the trained model."""

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from onnxamp._amp import CastWatch
from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    CallOrderError,
    MissingModelError,
    ModelError,
)
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._base.optional import require
from onnxamp._base.paths import as_path, reason_of
from onnxamp._job.api import convert_as
from onnxamp._model.staging import write_file
from onnxamp._options.doors import door
from onnxamp._options.options import Options
from onnxamp._options.values import checked_array, checked_flag
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.inputs.samples import SamplesLike, SampleSource, as_samples
from onnxamp._runtime.sessions.values import from_value, to_value
from onnxamp.debugging._checker import TensorChecker
from onnxamp.debugging._steps import StepWatch
from onnxamp.train._batches import Batches, Feeds, draw_masks, typed_feeds
from onnxamp.train._flushed import FlushedGradient, flushed_gradients
from onnxamp.train._optimizers import Optimizer
from onnxamp.train._scale_values import checked_small_scale, checked_updates
from onnxamp.train._scaling import LossScale, LossScaleManager
from onnxamp.train._sessions import (
    Halves,
    NetworkState,
    StepGradients,
    StepResult,
    loss_of,
    values_of,
)
from onnxamp.train._step import (
    APPLY,
    BAD,
    DIVISOR,
    GOOD,
    LOSS,
    NORM,
    OVERFLOW,
    RATE,
    RESULTS,
    SCALE,
    UPDATES,
    TrainStep,
)
from onnxamp.train._weights import Masters, trained_model, with_arrays

if TYPE_CHECKING:
    import onnxruntime as ort

STEPS: Final = "train/steps"
"""Key in checkpoints: the number of steps made, which determines rates, updates and dropout masks."""


@door
@dataclass(slots=True, eq=False, weakref_slot=True)
class TrainNetwork:
    """A network in training, made by :func:`build_train_network`.

    Attributes:
        source: the inference model that training started from.
        model: the training step in mixed precision, an ordinary ONNX model.
        optimizer: the optimizer that the network was built with.
        loss_scale_manager: the manager of the loss scale; None for no scaling.
        runs_on: "CUDA", "CPU", "CPU, emulated" (low precision is emulated), or a plugin provider and its device.
        steps: the number of steps made.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import SGD, build_train_network
        >>> net = build_train_network("models/classifier.onnx", SGD(), "cross-entropy")
        >>> result = net.step({"image": np.zeros((2, 3, 32, 32), np.float32), "label": np.array([0, 1])})
        >>> net.steps, result.overflow
        (1, False)
    """

    source: ModelProto
    masters: Masters
    model: ModelProto
    plan: TrainStep
    optimizer: Optimizer
    scale: LossScale
    session: "ort.InferenceSession"
    halves: Halves
    held: NetworkState
    runs_on: str
    seed: int
    cast_watch: CastWatch
    has_low: bool
    """Whether the step computes in low precision."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """The type of each weight that :meth:`export` does not store in its original type."""
    steps: int = 0
    pending: StepGradients | None = None
    """The gradients that the next update uses."""
    _watch: StepWatch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = StepWatch(
            self.model,
            self.halves.provider,
            self.runs_on.endswith("emulated"),
            self.plan.scaled,
        )
        self.held.hold({**self.plan.state, **self.scale.arrays()})

    @property
    def loss_scale_manager(self) -> LossScaleManager | None:
        """The manager of the loss scale; None for no scaling."""
        return self.scale.manager

    def train(self, mode: bool = True) -> "TrainNetwork":
        """Return this network, which always trains. MindSpore calls this ``set_train``.

        Raises:
            ArgumentError: ``mode`` is False.
        """
        if not checked_flag("mode", mode):
            raise _no_evaluation()
        return self

    def eval(self) -> NoReturn:
        """Refuse: a network in training has no evaluation mode.

        Raises:
            ArgumentError: always; the message says what to run instead.
        """
        raise _no_evaluation()

    def set_train(self, mode: bool = True) -> "TrainNetwork":
        """Call :meth:`train`."""
        return self.train(mode)

    def step(self, feeds: Mapping[str, Any]) -> StepResult:
        """Make one training step: :meth:`gradients` and :meth:`apply` in one call.

        Args:
            feeds: arrays for the model inputs and the labels, by name. Floats and integers of other widths are cast to
                the types of the inputs.

        Raises:
            ArgumentError: an input is missing, unknown or of the wrong kind or shape, a label is not a class, or the
                shape of a dropout mask cannot be derived.
            RuntimeFailure: ONNX Runtime cannot run the step on these inputs; the state does not change.
            NumericsError: an active tensor checker (:mod:`onnxamp.debugging`) aborts; the state does not change.
        """
        arrays, scale = self._inputs(feeds)
        check = self._watch.begin()
        if check is None:
            results = self.held.run(self.session, arrays)
        else:
            outputs = self._watched(check, arrays, scale)
            self.held.keep(outputs)
            results = {name: from_value(outputs[name]) for name in RESULTS}
        return self._advance(
            loss_of(results[LOSS]),
            scale,
            results,
            is_due=self._is_due(),
            moves_scale=True,
        )

    def __call__(self, *arrays: Any) -> StepResult:
        """Make one training step: :meth:`step` with arrays in the order of the model's inputs, labels last.

        Raises:
            ArgumentError: the number of arrays is wrong. Others as :meth:`step`.
        """
        names = self.plan.data
        if len(arrays) != len(names):
            raise ArgumentError(
                f"A step takes {', '.join(names)}, in this order, not {len(arrays)} arrays."
            )
        return self.step(dict(zip(names, arrays, strict=True)))

    def gradients(self, feeds: Mapping[str, Any]) -> StepGradients:
        """Make the first half of a step: compute the loss and the gradients of the scaled loss. Nothing is trained.

        The gradients stay on the device until you read them, and you can change them before :meth:`apply`. Both halves
        together equal a :meth:`step`, bit for bit. They run in separate sessions, which are created on first use and
        not replayed as CUDA graphs.

        Args:
            feeds: as for :meth:`step`.

        Raises:
            ArgumentError, RuntimeFailure, NumericsError: as :meth:`step`.
        """
        arrays, scale = self._inputs(feeds)
        check = self._watch.begin()
        if check is not None:
            # Only a whole step shows all values that a checker asks for; its results are discarded.
            self._watched(check, arrays, scale)
        first = self.halves.gradients(values_of(arrays) | self.held.items, scale)
        self._forget()
        self.pending = first
        return first

    def apply(self, gradients: StepGradients | None = None) -> StepResult:
        """Make the second half of a step: unscale the gradients, check for NaN and Inf, clip, and update.

        Args:
            gradients: the result of the last :meth:`gradients`; None also means that.

        Raises:
            CallOrderError: there are no gradients, or others have been computed since.
            ArgumentTypeError: an argument has the wrong type.
        """
        first = self.pending if gradients is None else gradients
        if first is None:
            raise CallOrderError(
                "There are no gradients: call gradients(batch) before apply()."
            )
        if not isinstance(first, StepGradients):
            raise ArgumentTypeError(
                f"apply() takes what gradients() returned, not {type(first).__name__}."
            )
        return self.finish(first, moves_scale=True)[0]

    def unscale(self) -> None:
        """Divide the pending gradients by their scale.

        Raises:
            CallOrderError: there are no gradients, or they are already unscaled.
        """
        first = self.pending
        if first is None or first.is_unscaled:
            raise CallOrderError(
                "There are no gradients to unscale: call gradients(batch), and unscale them once."
            )
        first.gradients = self.halves.unscaled(first)
        first.scale = 1.0
        first.is_unscaled = True

    def finish(
        self, first: StepGradients, *, moves_scale: bool
    ) -> tuple[StepResult, bool]:
        """Call :meth:`apply`, and return whether the weights were due for an update; the loss scale may change only if
        ``moves_scale``.

        Raises:
            CallOrderError: as :meth:`apply`.
        """
        if first is not self.pending:
            raise CallOrderError(
                "These gradients are out of date: use what the last gradients() returned, once."
            )
        is_due = self._is_due()
        self._follow_scale()
        values = values_of(self._settings(first.loss_scale)) | self.held.items
        outputs = self.halves.update(values, first)
        if not moves_scale:
            # The graph has changed the scale with the weights; the old one takes its place again.
            for name, array in self.scale.arrays().items():
                outputs[self.plan.successors[name]] = to_value(array)
        self.held.keep(outputs)
        results = {name: from_value(outputs[name]) for name in (OVERFLOW, NORM)}
        result = self._advance(
            first.loss,
            first.loss_scale,
            results,
            is_due=is_due,
            moves_scale=moves_scale,
        )
        return result, is_due

    def _watched(
        self, check: tuple[TensorChecker, int], arrays: Feeds, scale: float
    ) -> "dict[str, ort.OrtValue]":
        """Return all outputs of a whole step under a tensor checker."""
        wanted = [*RESULTS, *self.plan.successors.values()]
        scaling = self.plan.scaling
        is_expected = scaling is not None and scaling.skips and scale > 1
        feeds = values_of(arrays) | self.held.items

        def skips(outputs: "Mapping[str, ort.OrtValue]") -> bool:
            return is_expected and bool(from_value(outputs[OVERFLOW]))

        return self._watch.run(check, feeds, wanted, skips)

    def _advance(
        self,
        loss: float | NDArray[Any],
        scale: float,
        results: Feeds,
        *,
        is_due: bool,
        moves_scale: bool,
    ) -> StepResult:
        """Count a step, and return its result; ``is_due`` is whether it was to update the weights."""
        result = StepResult(loss, bool(results[OVERFLOW]), scale, float(results[NORM]))
        self.steps += 1
        self._forget()
        if moves_scale:
            self.scale.keep(self.held.items, result.overflow, is_due=is_due)
        return result

    def _forget(self) -> None:
        """Discard the pending gradients."""
        if self.pending is not None:
            self.pending.is_current = False
        self.pending = None

    def _is_due(self) -> bool:
        """Return whether the next step updates the weights; without accumulation, every step does."""
        return (self.steps + 1) % self.optimizer.accumulate == 0

    def _inputs(
        self, feeds: Mapping[str, Any]
    ) -> tuple[dict[str, NDArray[Any]], float]:
        """Return all inputs of a step except the state, and its loss scale."""
        self.cast_watch.check(lambda: self.has_low)
        names = ", ".join(self.plan.data)
        if not isinstance(feeds, Mapping):
            raise ArgumentTypeError(
                f"A step takes a dict of arrays by name, {names}, not {type(feeds).__name__}."
            )
        if wrong := set(feeds) ^ set(self.plan.data):
            raise ArgumentError(
                f"A step takes {names}: {min(wrong, key=str)!r} is missing or unknown."
            )
        arrays = typed_feeds(self.plan.model, feeds, self.plan.classes)
        masks = draw_masks(
            self.plan.masks, self.plan.model, arrays, self.seed, self.steps
        )
        self._follow_scale()
        scale = self.scale.now()
        return arrays | masks | self._settings(scale), scale

    def _settings(self, scale: float) -> dict[str, NDArray[Any]]:
        """Return the inputs of a step with this loss scale, except the state and the feeds."""
        arrays = {
            RATE: np.asarray(self.optimizer.rate(self.steps), np.float32),
            **self.scale.feeds(scale),
        }
        if self.optimizer.accumulate > 1:
            arrays[APPLY] = np.asarray(self._is_due())
        if self.plan.scaling is None:
            arrays[DIVISOR] = np.ones((), np.float32)
        return arrays

    def _follow_scale(self) -> None:
        """Adopt a loss scale that was changed outside this network."""
        if arrays := self.scale.changed():
            self.held.put(arrays)

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
            batches: the feeds of :meth:`step`: any iterable that can be iterated once per epoch,
                :class:`Batches` (shuffled again in each epoch), :class:`onnxamp.Samples`, a path to samples (.npz,
                .json or a folder), or a dict of arrays, which is a single batch.
            epochs: the number of epochs.
            progress: show a progress bar with the loss on the terminal.
            report: called with the number of each step (from 1) and its result.

        Returns:
            The mean loss of each epoch, over batches and, if the loss is not a scalar, over its elements.

        Raises:
            ArgumentError: there are no batches. Others as :meth:`step`.
            ArgumentTypeError: an argument has the wrong type.
        """
        checked_number("epochs", epochs, "a whole number", lambda n: n >= 0, WHOLE)
        if not isinstance(batches, (Iterable, str, PathLike)):
            raise ArgumentTypeError(
                f"batches must be an iterable of dicts of arrays, not {type(batches).__name__}."
            )
        if report is not None and not callable(report):
            raise ArgumentTypeError(
                f"report must be a function, not {type(report).__name__}."
            )
        if isinstance(batches, (str, PathLike, Mapping, SampleSource)):
            batches = as_samples(batches, self.source)
        means = []
        total = len(batches) * epochs if isinstance(batches, Sized) else 0
        first = batches.epoch if isinstance(batches, Batches) else 0
        done = 0
        with progress_bar(quiet=not progress) as advance:
            for epoch in range(epochs):
                losses = []
                items: Iterable[Any] = batches
                if isinstance(batches, Batches):
                    items = batches.after(epoch)
                for feeds in items:
                    result = self.step(feeds)
                    losses.append(np.mean(result.loss))
                    done += 1
                    at = f"{first + epoch + 1}/{first + epochs}"
                    what = f"training: epoch {at}, loss {losses[-1]:.4f}"
                    advance(what, done, total)
                    if report is not None:
                        report(self.steps, result)
                if not losses:
                    raise ArgumentError(
                        "There are no batches, or they cannot be iterated more than once."
                    )
                means.append(float(np.mean(losses)))
        return means

    def flushed(self, feeds: Mapping[str, Any]) -> dict[str, FlushedGradient]:
        """Measure, by weight, which gradients low precision would flush to zero in the next step.

        If many are, the loss needs a larger scale. Nothing is trained. Each call creates two sessions.

        Args:
            feeds: as for :meth:`step`.

        Raises:
            ArgumentError, RuntimeFailure: as :meth:`step`.
        """
        arrays, _ = self._inputs(feeds)
        return flushed_gradients(
            self.model, self.plan, arrays | self.held.copies(), self.halves.provider
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of everything that later steps depend on, by name: weights, optimizer slots, loss scale,
        counters.

        The scale of a manager of your own class is not included.
        """
        self._follow_scale()
        return self.held.copies() | {STEPS: np.asarray(self.steps, np.int64)}

    def load_state(self, state: Feeds) -> None:
        """Continue from a state that :meth:`state` returned, in this network or an equal one.

        Raises:
            ArgumentError: the state belongs to another network, or holds a scale or counter that none can have; nothing
                changes.
            ArgumentTypeError: it is no state.
        """
        if not isinstance(state, Mapping):
            raise ArgumentTypeError(
                f"state must be a dict that state() returned, not {type(state).__name__}."
            )
        arrays = {**self.plan.state, **self.scale.arrays()}
        shapes = {**{name: array.shape for name, array in arrays.items()}, STEPS: ()}
        for name in sorted(shapes.keys() | state.keys(), key=str):
            if (
                name not in shapes
                or name not in state
                or checked_array(repr(name), state[name]).shape != shapes[name]
            ):
                raise ArgumentError(
                    f"The state is that of another network: {name!r} is missing, unknown or of another shape."
                )
        try:
            held = {name: np.array(state[name], a.dtype) for name, a in arrays.items()}
            counts = {
                name: int(state[name])
                for name in (STEPS, UPDATES, GOOD, BAD)
                if name in shapes
            }
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"The state holds no numbers: {error}.") from error
        for name, count in counts.items():
            checked_updates(f"{name!r} in the state", count)
        if SCALE in held:
            checked_small_scale(f"{SCALE!r} in the state", held[SCALE].item())
        # Nothing changes unless all of it can.
        self.steps = counts[STEPS]
        self.held.hold(held)
        self._forget()
        self.scale.load(self.held.items)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state as a safetensors file; an existing file is replaced once the new one is complete.

        Raises:
            OutputError: the file cannot be written.
        """
        require_safetensors()
        import safetensors.numpy  # noqa: PLC0415 - only checkpoints need it

        arrays = {
            name: np.ascontiguousarray(array).reshape(array.shape)
            for name, array in self.state().items()
        }
        data = safetensors.numpy.save(
            arrays, metadata={"kind": "onnxamp training state"}
        )
        write_file(as_path(path), data)

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a file that :meth:`save` wrote.

        Raises:
            ModelError: the file cannot be read.
            ArgumentError: the state belongs to another network.
        """
        require_safetensors()
        import safetensors.numpy  # noqa: PLC0415 - only checkpoints need it

        file = as_path(path)
        try:
            state = safetensors.numpy.load(file.read_bytes())
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            kind = MissingModelError if is_missing else ModelError
            raise kind(f"Cannot read {str(file)!r}: {reason_of(error)}.") from None
        except safetensors.SafetensorError as error:
            raise ModelError(
                f"{str(file)!r} is not a checkpoint, or is truncated: {error}."
            ) from None
        self.load_state(state)

    def export(self, level: str | None = None, **options: Any) -> ModelProto:
        """Return the trained inference model: the original model with the trained weights and running statistics.

        Weights of a decorated model are stored in its ``save_dtype`` or, without one, in their types in the decorated
        model; a Cast after each returns to float32.

        Args:
            level, options: how to convert the float32 model with these weights, as for :func:`onnxamp.convert_model`.
                By default, every weight keeps its original type; "O0" means float32 throughout.
        """
        names = self.held.items.keys() & {
            tensor.name for tensor in self.source.graph.initializer
        }
        arrays = {name: self.held.array(name) for name in names}
        if level is not None or options:
            model = with_arrays(self.masters.model, arrays)
            converted: ModelProto = convert_as(
                model, Options.of(level or "O2", options)
            )
            return converted
        return trained_model(self.source, self.masters, arrays, self.stored)


def require_safetensors() -> None:
    """Make sure that checkpoints can be read and written.

    Raises:
        MissingPackageError: safetensors is not installed.
    """
    require("safetensors", "A checkpoint needs safetensors", "safetensors")


def _no_evaluation() -> ArgumentError:
    return ArgumentError(
        "A network in training has no evaluation mode: run InferenceSession(net.export()) instead."
    )
