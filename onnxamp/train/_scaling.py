"""Loss scaling: scaling gradients up so that low precision does not flush small ones to zero.

A manager owns the scale. For dynamic managers of this module, the graph of the step computes the next scale from their
counters and settings, so that no step waits for Python. Other managers, including those that users write, are asked for
the scale before each step and told about overflows after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import isfinite, nan
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxamp._base.errors import ArgumentError, NumericsError
from onnxamp._options.doors import door
from onnxamp._options.values import checked_flag
from onnxamp._runtime.sessions.values import from_value
from onnxamp.train._scale_values import (
    SMALLEST,
    checked_count,
    checked_factor,
    checked_scale,
)
from onnxamp.train._step import FACTORS, LARGEST, SCALE, SCALE_STATE, WINDOWS, Scaling

_MOST_OVERFLOWS: Final = 1000
"""The number of updates in a row whose gradients may overflow, as in MindSpore."""


class FromLevel(Enum):
    """The type of :data:`FROM_LEVEL`."""

    FROM_LEVEL = "FROM_LEVEL"

    def __repr__(self) -> str:
        return self.value


FROM_LEVEL: Final = FromLevel.FROM_LEVEL
"""The default of ``loss_scale_manager``: scale the loss as the level requires. None turns scaling off."""


@dataclass(frozen=True, slots=True)
class ScaleUpdate:
    """The rule by which a graph changes the scale.

    ``grow_every`` updates in a row without overflow multiply the scale by ``grow``, and ``shrink_every`` updates in a
    row with overflow multiply it by ``shrink``, but the scale never falls below ``least``.

    Example:
        >>> from onnxamp.train import DynamicLossScaleManager
        >>> DynamicLossScaleManager(scale_window=100).get_update_cell()
        ScaleUpdate(grow=2.0, shrink=0.5, grow_every=100, shrink_every=1, least=1.0)
    """

    grow: float
    shrink: float
    grow_every: int
    shrink_every: int
    least: float = 1.0


STILL: Final = ScaleUpdate(1.0, 1.0, 1, 1, SMALLEST)
"""A rule that changes neither the scale nor its counters, for scalers that are disabled or not dynamic."""


class LossScaleManager:
    """Base class of the managers that :func:`build_train_network` accepts as ``loss_scale_manager``.

    The counterpart of ``mindspore.amp.LossScaleManager``. A subclass of your own needs :meth:`get_loss_scale`, which
    is called before each step, and :meth:`update_loss_scale`, which is called after each update, even a skipped one.

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
        """Return the scale of the next step."""
        raise NotImplementedError(
            f"{type(self).__name__} must define get_loss_scale()."
        )

    def update_loss_scale(self, overflow: bool) -> None:
        """Adjust the scale, depending on whether a gradient held NaN or Inf."""
        raise NotImplementedError(
            f"{type(self).__name__} must define update_loss_scale(overflow)."
        )

    def get_drop_overflow_update(self) -> bool:
        """Return whether updates whose gradients hold NaN or Inf are skipped."""
        return True

    def get_update_cell(self) -> ScaleUpdate | None:
        """Return how the graph of a step changes the scale; None if it does not."""
        return None

    def _scales(self, dtype: str) -> bool:  # noqa: ARG002
        """Return whether the loss of a network that computes in this type is scaled."""
        return True

    def _mover(self) -> "ScaleMover | None":
        """Return the manager if the graph of a step can change its scale."""
        return None


@door
class FixedLossScaleManager(LossScaleManager):
    """A constant loss scale, like ``mindspore.amp.FixedLossScaleManager``.

    Args:
        loss_scale: the factor of the loss, at least 1.
        drop_overflow_update: skip updates whose gradients hold NaN or Inf.

    Raises:
        ArgumentError: ``loss_scale`` is less than 1.
        ArgumentTypeError: ``loss_scale`` is not a number, or ``drop_overflow_update`` is not a bool.

    Example:
        >>> from onnxamp.train import FixedLossScaleManager
        >>> FixedLossScaleManager(1024).get_loss_scale()
        1024.0
    """

    def __init__(
        self, loss_scale: float = 128.0, drop_overflow_update: bool = True
    ) -> None:
        self._scale = checked_scale("loss_scale", loss_scale)
        self._drops = checked_flag("drop_overflow_update", drop_overflow_update)

    def __repr__(self) -> str:
        return f"FixedLossScaleManager(loss_scale={self._scale:g}, drop_overflow_update={self._drops})"

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self._scale

    def update_loss_scale(self, overflow: bool) -> None:
        """Change nothing."""

    def get_drop_overflow_update(self) -> bool:
        """Return whether updates whose gradients hold NaN or Inf are skipped."""
        return self._drops


class ScaleState(NamedTuple):
    """A dynamic scale with its counters: arrays, or the values that a network left on its device.

    ``scale`` is a float32 scalar; ``good`` and ``bad`` are int64 scalars: updates in a row without and with overflow.
    """

    scale: Any
    good: Any
    bad: Any

    @classmethod
    def of(cls, scale: float, good: int = 0, bad: int = 0) -> "ScaleState":
        """Return the state with these values."""
        return cls(
            np.array(scale, np.float32),
            np.array(good, np.int64),
            np.array(bad, np.int64),
        )

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return scale, good and bad as arrays."""
        return tuple(
            np.array(item if isinstance(item, np.ndarray) else from_value(item))
            for item in self
        )

    def after(self, update: ScaleUpdate, overflow: bool) -> "ScaleState":
        """Return the next state, which the graph of a step computes in the same way."""
        scale, counted, missed = self.arrays()
        good, bad = (0, int(missed) + 1) if overflow else (int(counted) + 1, 0)
        # Products are float32, as in the graph, so that both have the same scale bit for bit.
        if good == update.grow_every:
            with np.errstate(over="ignore"):
                return self.of(min(float(scale * np.float32(update.grow)), LARGEST))
        if bad == update.shrink_every:
            return self.of(max(float(scale * np.float32(update.shrink)), update.least))
        return self.of(float(scale), good, bad)


class ScaleMover(Protocol):
    """A manager whose scale the graph of a step changes. All networks of the manager share the scale."""

    _scale_state: ScaleState

    def get_update_cell(self) -> ScaleUpdate | None:
        """Return how the graph changes the scale; None if it does not."""

    def _note(self, overflow: bool) -> None:
        """Record an update that was made or skipped."""


def keeps_methods(manager: LossScaleManager, base: type, *names: str) -> bool:
    """Return whether a manager inherits these methods of a class unchanged. Those of a subclass may compute any scale,
    which no graph can follow.
    """
    own = type(manager)
    return all(getattr(own, name) is getattr(base, name) for name in names)


class MovingLossScaleManager(LossScaleManager):
    """A manager whose scale is changed by the graph of the step."""

    def __init__(self, scale: float) -> None:
        self._scale_state = ScaleState.of(scale)

    def get_loss_scale(self) -> float:
        """Return the scale of the next step, even while a network is being trained with it."""
        return float(self._scale_state.arrays()[0])

    def update_loss_scale(self, overflow: bool) -> None:
        """Change the scale as a step with or without overflow does. Networks do this themselves."""
        update = self.get_update_cell()
        if update is not None:
            self._scale_state = self._scale_state.after(update, overflow)
        self._note(overflow)

    def _note(self, overflow: bool) -> None:
        """Record an update that was made or skipped."""

    def _mover(self) -> ScaleMover | None:
        names = ("get_loss_scale", "update_loss_scale")
        return self if keeps_methods(self, MovingLossScaleManager, *names) else None


@door
class DynamicLossScaleManager(MovingLossScaleManager):
    """A loss scale that falls at each overflow and rises after a window without overflows.

    The counterpart of ``mindspore.amp.DynamicLossScaleManager``.

    Args:
        init_loss_scale: the initial scale, at least 1.
        scale_factor: the factor by which the scale is divided or multiplied, greater than 1.
        scale_window: updates in a row without overflow before the scale rises.

    A step raises :class:`onnxamp.NumericsError` after more than 1,000 overflows in a row.

    Raises:
        ArgumentError, ArgumentTypeError: a value is out of range, or is not a number.

    Example:
        >>> from onnxamp.train import DynamicLossScaleManager
        >>> manager = DynamicLossScaleManager(2**16, scale_window=100)
        >>> manager.update_loss_scale(overflow=True)
        >>> manager.get_loss_scale()
        32768.0
    """

    def __init__(
        self,
        init_loss_scale: float = 2.0**24,
        scale_factor: float = 2,
        scale_window: int = 2000,
    ) -> None:
        super().__init__(checked_scale("init_loss_scale", init_loss_scale))
        self._factor = checked_factor("scale_factor", scale_factor)
        self._window = checked_count("scale_window", scale_window)
        self._overflows = 0
        """The number of overflows in a row."""

    def __repr__(self) -> str:
        return (
            f"DynamicLossScaleManager(loss_scale={self.get_loss_scale():g}, scale_factor={self._factor:g},"
            f" scale_window={self._window})"
        )

    def get_update_cell(self) -> ScaleUpdate:
        """Return how the graph of a step changes the scale."""
        return ScaleUpdate(self._factor, 1 / self._factor, self._window, 1)

    def _note(self, overflow: bool) -> None:
        self._overflows = self._overflows + 1 if overflow else 0
        if self._overflows > _MOST_OVERFLOWS:
            raise NumericsError(
                f"Gradients overflowed in {self._overflows} updates in a row, whatever the loss scale, which is"
                f" {self.get_loss_scale():g} now: the loss or the data hold NaN or Inf. Look for the first with"
                " onnxamp.debugging.enable_tensor_checker."
            )


class LossScale:
    """The loss scale of one network. It connects the manager, which owns the scale, and the graph, which may change it.

    Attributes:
        manager: the manager; None, or one that scales nothing, if the loss is not scaled.
        scaling: how the step uses the scale; None if the loss is not scaled.
    """

    def __init__(self, manager: LossScaleManager | None, dtype: str) -> None:
        self.manager = manager
        self.scaling: Scaling | None = None
        self._mover: ScaleMover | None = None
        """The manager, if the graph changes its scale; None if methods of a subclass determine or change the scale."""
        self._seen: ScaleState | None = None
        """The state of such a manager, as the network has it."""
        if manager is None or not manager._scales(dtype):
            return
        if manager.get_update_cell() is not None:
            self._mover = manager._mover()
        self.scaling = Scaling(
            manager.get_drop_overflow_update(), self._mover is not None
        )

    def now(self) -> float:
        """Return the scale of the next step; 1 without loss scaling.

        Raises:
            ArgumentError: a manager of the user's own class returned an invalid scale.
        """
        if self.manager is None or self.scaling is None:
            return 1.0
        scale = self.manager.get_loss_scale()
        if self._mover is not None:
            return float(scale)  # it was valid at first, and the graph keeps it valid
        array = np.asarray(scale)
        is_number = array.size == 1 and array.dtype.kind in "iuf"
        number = float(array.item()) if is_number else nan
        if not isfinite(number) or not 0 < number <= LARGEST:
            raise ArgumentError(
                f"get_loss_scale() of {type(self.manager).__name__} must return a number above 0, not {scale!r}."
            )
        return number

    def feeds(self, scale: float) -> dict[str, NDArray[Any]]:
        """Return the inputs of a step with this scale: the scale, or how the graph changes it."""
        if self.scaling is None:
            return {}
        if self._mover is None:
            return {SCALE: np.array(scale, np.float32)}
        update = self._mover.get_update_cell() or STILL
        return {
            FACTORS: np.array([update.grow, update.shrink, update.least], np.float32),
            WINDOWS: np.array([update.grow_every, update.shrink_every], np.int64),
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state that the graph changes, by input; empty if it changes none."""
        if self._mover is None:
            return {}
        return dict(zip(SCALE_STATE, self._mover._scale_state.arrays(), strict=True))

    def changed(self) -> dict[str, NDArray[Any]]:
        """Return :meth:`arrays` if they were changed outside this network since its last step."""
        if self._mover is None or self._mover._scale_state is self._seen:
            return {}
        self._seen = self._mover._scale_state
        return self.arrays()

    def keep(self, state: Mapping[str, Any], overflow: bool, *, is_due: bool) -> None:
        """Pass the scale after a step to its manager, or let the manager change it."""
        if self._mover is not None:
            self.load(state)
            if is_due:
                self._mover._note(overflow)
        elif self.manager is not None and self.scaling is not None and is_due:
            self.manager.update_loss_scale(overflow)

    def load(self, state: Mapping[str, Any]) -> None:
        """Pass the scale in the state of the network to its manager."""
        if self._mover is not None:
            self._seen = self._mover._scale_state = ScaleState(
                *map(state.get, SCALE_STATE)
            )
