"""Loss scaling: gradients are scaled up so that low precision does not flush small ones to zero.

A manager owns the scale. Managers of this module that change it let the graph of the step compute the next scale from
their counters and settings, so that no step waits for Python; others, a user's own among them, are asked for the scale
before each step and told about overflows after it.
"""

from dataclasses import dataclass
from enum import Enum
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._runtime.values import from_value
from onnxamp.train._gradients.writer import Tensor

if TYPE_CHECKING:
    import onnxruntime as ort

LARGEST: Final = 2.0**126
"""Keeps the scale finite in float32."""
NEVER: Final = 2**62
"""A window that no counter reaches."""


def checked_scale(name: str, value: float) -> float:
    """A scale.

    Raises:
        ArgumentError: it is none.
    """
    if not _is_number(value) or not 1 <= value <= LARGEST:
        raise ArgumentError(f"{name} must be a number from 1 to 2^126, not {value!r}.")
    return float(value)


def checked_factor(name: str, value: float) -> float:
    """A factor by which a scale rises.

    Raises:
        ArgumentError: it is none.
    """
    if not _is_number(value) or not 1 < value < float("inf"):
        raise ArgumentError(f"{name} must be a finite number greater than 1, not {value!r}.")
    return float(value)


def checked_fraction(name: str, value: float) -> float:
    """A factor by which a scale falls.

    Raises:
        ArgumentError: it is none.
    """
    if not _is_number(value) or not 0 < value < 1:
        raise ArgumentError(f"{name} must be a number between 0 and 1, not {value!r}.")
    return float(value)


def checked_count(name: str, value: int) -> int:
    """A number of updates.

    Raises:
        ArgumentError: it is none.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not 1 <= value < NEVER
    ):
        raise ArgumentError(f"{name} must be a positive whole number, not {value!r}.")
    return int(value)


def checked_flag(name: str, value: bool) -> bool:
    """A bool.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a bool, not {type(value).__name__}.")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


class FromLevel(Enum):
    """The type of :data:`FROM_LEVEL`."""

    FROM_LEVEL = "FROM_LEVEL"

    def __repr__(self) -> str:
        return self.value


FROM_LEVEL: Final = FromLevel.FROM_LEVEL
"""The default of ``loss_scale_manager``: scale the loss as the level says. None turns scaling off."""


@dataclass(frozen=True, slots=True)
class ScaleUpdate:
    """How a graph changes the scale.

    ``grow_every`` updates in a row without overflow multiply it by ``grow``, ``shrink_every`` updates in a row with
    overflow by ``shrink``. It stays at least 1.

    Example:
        >>> from onnxamp.train import DynamicLossScaleManager
        >>> DynamicLossScaleManager(scale_window=100).get_update_cell()
        ScaleUpdate(grow=2.0, shrink=0.5, grow_every=100, shrink_every=1)
    """

    grow: float
    shrink: float
    grow_every: int
    shrink_every: int


class LossScaleManager:
    """Base class of what :func:`build_train_network` takes as ``loss_scale_manager``.

    The counterpart of ``mindspore.amp.LossScaleManager``. A subclass of your own needs :meth:`get_loss_scale`, which is
    asked before each step, and :meth:`update_loss_scale`, which is called after each update that was made or skipped.

    Example:
        >>> from onnxamp.train import LossScaleManager, SGD, build_train_network
        >>> class Halving(LossScaleManager):
        ...     scale = 1024.0
        ...     def get_loss_scale(self):
        ...         return self.scale
        ...     def update_loss_scale(self, overflow):
        ...         self.scale = max(1.0, self.scale / 2)
        >>> manager = Halving()
        >>> net = build_train_network("models/classifier.onnx", SGD(), "cross-entropy", loss_scale_manager=manager)
        >>> import numpy as np
        >>> batch = {"image": np.ones((2, 3, 32, 32), np.float32), "label": np.array([0, 1])}
        >>> net.step(batch).scale, manager.scale
        (1024.0, 512.0)
    """

    def get_loss_scale(self) -> float:
        """The scale of the next step."""
        raise NotImplementedError(f"{type(self).__name__} must define get_loss_scale().")

    def update_loss_scale(self, overflow: bool) -> None:
        """Take note of whether a gradient held NaN or Inf."""
        raise NotImplementedError(f"{type(self).__name__} must define update_loss_scale(overflow).")

    def get_drop_overflow_update(self) -> bool:
        """Whether updates whose gradients hold NaN or Inf are skipped."""
        return True

    def get_update_cell(self) -> ScaleUpdate | None:
        """How the graph of a step changes the scale; None if it does not."""
        return None


class FixedLossScaleManager(LossScaleManager):
    """A constant loss scale, as ``mindspore.amp.FixedLossScaleManager``.

    Args:
        loss_scale: factor of the loss, at least 1.
        drop_overflow_update: skip updates whose gradients hold NaN or Inf.

    Raises:
        ArgumentError: ``loss_scale`` is not a number, or less than 1.
        ArgumentTypeError: ``drop_overflow_update`` is not a bool.

    Example:
        >>> from onnxamp.train import FixedLossScaleManager
        >>> FixedLossScaleManager(1024).get_loss_scale()
        1024.0
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        self._scale = checked_scale("loss_scale", loss_scale)
        self._drops = checked_flag("drop_overflow_update", drop_overflow_update)

    def __repr__(self) -> str:
        return (
            f"FixedLossScaleManager(loss_scale={self._scale:g}, drop_overflow_update={self._drops})"
        )

    def get_loss_scale(self) -> float:
        """The scale."""
        return self._scale

    def update_loss_scale(self, overflow: bool) -> None:
        """Change nothing."""

    def get_drop_overflow_update(self) -> bool:
        """Whether updates whose gradients hold NaN or Inf are skipped."""
        return self._drops


@dataclass(slots=True)
class ScaleState:
    """A scale that changes, with its counters: arrays, or the values that a network left on its device.

    ``scale`` is a float32 scalar; ``good`` and ``bad`` are int64 scalars: updates in a row without and with overflow.
    """

    scale: "NDArray[Any] | ort.OrtValue"
    good: "NDArray[Any] | ort.OrtValue"
    bad: "NDArray[Any] | ort.OrtValue"

    @classmethod
    def of(cls, scale: float, good: int = 0, bad: int = 0) -> "ScaleState":
        """The state with these numbers."""
        return cls(np.array(scale, np.float32), np.array(good, np.int64), np.array(bad, np.int64))

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Scale, good and bad as arrays."""
        held = (self.scale, self.good, self.bad)
        scale, good, bad = (
            np.array(item if isinstance(item, np.ndarray) else from_value(item)) for item in held
        )
        return scale, good, bad

    def after(self, update: ScaleUpdate, overflow: bool) -> "ScaleState":
        """The next state; :func:`update_scale` writes the same as a graph."""
        scale, counted, missed = self.arrays()
        good, bad = (0, int(missed) + 1) if overflow else (int(counted) + 1, 0)
        if good == update.grow_every:
            with np.errstate(over="ignore"):
                return self.of(min(float(scale * np.float32(update.grow)), LARGEST))
        if bad == update.shrink_every:
            return self.of(max(float(scale * np.float32(update.shrink)), 1.0))
        return self.of(float(scale), good, bad)


class MovingLossScaleManager(LossScaleManager):
    """A manager whose scale the graph of the step changes. The manager holds it: all its networks share it."""

    def __init__(self, scale: float) -> None:
        self.scale_state = ScaleState.of(scale)

    def get_loss_scale(self) -> float:
        """The scale of the next step, also while a network is being trained with it."""
        return float(self.scale_state.arrays()[0])

    def update_loss_scale(self, overflow: bool) -> None:
        """Change the scale as a step with or without overflow does; networks do so by themselves."""
        update = self.get_update_cell()
        if update is not None:
            self.scale_state = self.scale_state.after(update, overflow)


class DynamicLossScaleManager(MovingLossScaleManager):
    """A loss scale that falls at each overflow and rises after a window without any.

    The counterpart of ``mindspore.amp.DynamicLossScaleManager``.

    Args:
        init_loss_scale: the first scale, at least 1.
        scale_factor: by which the scale is divided or multiplied, greater than 1.
        scale_window: updates in a row without overflow before the scale rises.

    Raises:
        ArgumentError: a value is out of range.

    Example:
        >>> from onnxamp.train import DynamicLossScaleManager
        >>> manager = DynamicLossScaleManager(2**16, scale_window=100)
        >>> manager.update_loss_scale(overflow=True)
        >>> manager.get_loss_scale()
        32768.0
    """

    def __init__(
        self, init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000
    ) -> None:
        super().__init__(checked_scale("init_loss_scale", init_loss_scale))
        self._factor = checked_factor("scale_factor", scale_factor)
        self._window = checked_count("scale_window", scale_window)

    def __repr__(self) -> str:
        return (
            f"DynamicLossScaleManager(loss_scale={self.get_loss_scale():g}, scale_factor={self._factor:g},"
            f" scale_window={self._window})"
        )

    def get_update_cell(self) -> ScaleUpdate:
        """How the graph of a step changes the scale."""
        return ScaleUpdate(self._factor, 1 / self._factor, self._window, 1)


def is_moved_by_graph(manager: LossScaleManager | None) -> TypeGuard[MovingLossScaleManager]:
    """Whether the graph changes the scale: not if a subclass says in methods of its own what it is or becomes."""
    if not isinstance(manager, MovingLossScaleManager):
        return False
    own, base = type(manager), MovingLossScaleManager
    return (
        own.get_loss_scale is base.get_loss_scale
        and own.update_loss_scale is base.update_loss_scale
    )


def update_scale(
    state: tuple[Tensor, Tensor, Tensor], factors: Tensor, windows: Tensor, overflow: Tensor
) -> list[Tensor]:
    """Write the next scale and its counters.

    Args:
        state: scale (float32), good and bad (int64), scalars as in :class:`ScaleState`.
        factors: float32 vector: grow and shrink of :class:`ScaleUpdate`.
        windows: int64 vector: grow_every and shrink_every.
        overflow: bool scalar: whether this update overflows.
    """
    scale, good, bad = state
    writer = scale.writer
    first, second = (writer.constant(np.array(index, np.int64)) for index in (0, 1))
    good, bad = overflow.where(0, good + 1), overflow.where(bad + 1, 0)
    grows, shrinks = (
        good.equals(windows.op("Gather", first)),
        bad.equals(windows.op("Gather", second)),
    )
    larger = (scale * factors.op("Gather", first)).op("Min", writer.number(LARGEST, scale.elem))
    smaller = (scale * factors.op("Gather", second)).op("Max", writer.number(1.0, scale.elem))
    return [
        grows.where(larger, shrinks.where(smaller, scale)),
        grows.where(0, good),
        shrinks.where(0, bad),
    ]


def scale_of(manager: LossScaleManager) -> float:
    """The scale that a manager of any class asks for.

    Raises:
        ArgumentError: it is not a positive finite number.
    """
    scale = manager.get_loss_scale()
    array = np.asarray(scale)
    number = float(array.item()) if array.size == 1 and array.dtype.kind in "iuf" else nan
    if not isfinite(number) or not 0 < number <= LARGEST:
        raise ArgumentError(
            f"get_loss_scale() of {type(manager).__name__} must return a number above 0, not {scale!r}."
        )
    return number
