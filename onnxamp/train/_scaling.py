"""Loss scaling: gradients are scaled up so that low precision does not flush small ones to zero.

The scale and its two counters are state of the graph, and the graph updates them: no step waits for Python.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite
from typing import Final

from onnxamp._errors import ArgumentError
from onnxamp.train._gradients.writer import Tensor

_LARGEST: Final = 2.0**126
"""Keeps the scale finite in float32."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the scale starts and changes.

    ``skips``: updates whose gradients hold NaN or Inf are skipped. ``grow_every`` updates in a row without skipping
    multiply the scale by ``grow``, ``shrink_every`` skipped ones by ``shrink``; 0 means never. It stays at least 1.
    """

    initial: float
    skips: bool = True
    grow: float = 1.0
    shrink: float = 1.0
    grow_every: int = 0
    shrink_every: int = 0


class LossScaleManager(ABC):
    """Base class of what :func:`build_train_network` takes as ``loss_scale_manager``.

    Example:
        >>> from onnxamp.train import GradScaler, LossScaleManager
        >>> isinstance(GradScaler(), LossScaleManager)
        True
    """

    __slots__ = ()

    @abstractmethod
    def scaling(self) -> Scaling | None:
        """How the graph scales the loss; None if it does not."""


@dataclass(frozen=True, slots=True)
class FixedLossScaleManager(LossScaleManager):
    """A constant loss scale, as ``mindspore.amp.FixedLossScaleManager``.

    Args:
        loss_scale: factor of the loss, greater than 0.
        drop_overflow_update: skip updates whose gradients hold NaN or Inf.

    Raises:
        ArgumentError: ``loss_scale`` is not a positive number.

    Example:
        >>> from onnxamp.train import FixedLossScaleManager
        >>> FixedLossScaleManager(1024)
        FixedLossScaleManager(loss_scale=1024, drop_overflow_update=True)
    """

    loss_scale: float = 128.0
    drop_overflow_update: bool = True

    def __post_init__(self) -> None:
        _check_positive("loss_scale", self.loss_scale)

    def scaling(self) -> Scaling:
        """How the graph scales the loss."""
        return Scaling(self.loss_scale, skips=self.drop_overflow_update)


@dataclass(frozen=True, slots=True)
class DynamicLossScaleManager(LossScaleManager):
    """A loss scale that falls at each overflow and rises after a window without any.

    The counterpart of ``mindspore.amp.DynamicLossScaleManager``.

    Args:
        init_loss_scale: the first scale, greater than 0.
        scale_factor: by which the scale is divided or multiplied, greater than 1.
        scale_window: updates in a row without overflow before the scale rises.

    Raises:
        ArgumentError: a value is out of range.

    Example:
        >>> from onnxamp.train import DynamicLossScaleManager
        >>> DynamicLossScaleManager(2**16, scale_window=100)
        DynamicLossScaleManager(init_loss_scale=65536, scale_factor=2, scale_window=100)
    """

    init_loss_scale: float = 2.0**24
    scale_factor: float = 2
    scale_window: int = 2000

    def __post_init__(self) -> None:
        _check_positive("init_loss_scale", self.init_loss_scale)
        if self.scale_factor <= 1:
            raise ArgumentError(f"scale_factor must be greater than 1, not {self.scale_factor}.")
        _check_positive("scale_window", self.scale_window)

    def scaling(self) -> Scaling:
        """How the graph scales the loss."""
        factor = float(self.scale_factor)
        return Scaling(self.init_loss_scale, True, factor, 1 / factor, self.scale_window, shrink_every=1)


@dataclass(frozen=True, slots=True)
class GradScaler(LossScaleManager):
    """The loss scale of ``paddle.amp.GradScaler``.

    Args:
        enable: False scales nothing.
        init_loss_scaling: the first scale, greater than 0.
        incr_ratio: factor by which the scale rises, greater than 1.
        decr_ratio: factor by which the scale falls, between 0 and 1.
        incr_every_n_steps: updates in a row without overflow before it rises.
        decr_every_n_nan_or_inf: updates in a row with overflow before it falls.
        use_dynamic_loss_scaling: False keeps the first scale.

    Raises:
        ArgumentError: a value is out of range.

    Example:
        >>> from onnxamp.train import GradScaler
        >>> GradScaler(init_loss_scaling=1024).decr_ratio
        0.5
    """

    enable: bool = True
    init_loss_scaling: float = 65536.0
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    incr_every_n_steps: int = 2000
    decr_every_n_nan_or_inf: int = 1
    use_dynamic_loss_scaling: bool = True

    def __post_init__(self) -> None:
        _check_positive("init_loss_scaling", self.init_loss_scaling)
        if self.incr_ratio <= 1 or not 0 < self.decr_ratio < 1:
            raise ArgumentError("incr_ratio must be greater than 1, and decr_ratio between 0 and 1.")
        _check_positive("incr_every_n_steps", self.incr_every_n_steps)
        _check_positive("decr_every_n_nan_or_inf", self.decr_every_n_nan_or_inf)

    def scaling(self) -> Scaling | None:
        """How the graph scales the loss; None if it does not."""
        if not self.enable:
            return None
        if not self.use_dynamic_loss_scaling:
            return Scaling(self.init_loss_scaling)
        return Scaling(
            self.init_loss_scaling, True, self.incr_ratio, self.decr_ratio, self.incr_every_n_steps,
            self.decr_every_n_nan_or_inf,
        )  # fmt: skip


def update_scale(
    scaling: Scaling, scale: Tensor, good: Tensor, bad: Tensor, overflow: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the next scale and its counters.

    Args:
        scale: float32 scalar.
        good, bad: int64 scalars: updates in a row without and with overflow.
        overflow: bool scalar: whether this update overflows.
    """
    if not (scaling.grow_every or scaling.shrink_every):
        return scale, good, bad
    good, bad = overflow.where(0, good + 1), overflow.where(bad + 1, 0)
    grows, shrinks = good.equals(scaling.grow_every), bad.equals(scaling.shrink_every)
    writer = scale.writer
    larger = (scale * scaling.grow).op("Min", writer.number(_LARGEST, scale.elem))
    smaller = (scale * scaling.shrink).op("Max", writer.number(1.0, scale.elem))
    return grows.where(larger, shrinks.where(smaller, scale)), grows.where(0, good), shrinks.where(0, bad)


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
        raise ArgumentError(f"{name} must be a positive number, not {value!r}.")
