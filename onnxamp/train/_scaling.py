"""Loss scaling in the graph: small gradients are lifted out of the range that low precision flushes to zero.

The three managers are called as those of MindSpore and Paddle. Their state is a scale and two counters; it moves in the
graph, so a step needs no decision in Python.
"""

from dataclasses import dataclass
from math import isfinite

from onnxamp._errors import ArgumentError
from onnxamp.train._gradients.writer import Tensor

_LARGEST = 2.0**126
"""The scale stays finite in float32."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the scale begins and moves.

    ``drops``: an update whose gradients hold NaN or Inf is skipped. ``grow_every`` clean updates in a row multiply the
    scale by ``grow``, ``shrink_every`` skipped ones by ``shrink``; 0 leaves it alone. It never falls below 1.
    """

    initial: float
    drops: bool = True
    grow: float = 1.0
    shrink: float = 1.0
    grow_every: int = 0
    shrink_every: int = 0


@dataclass(frozen=True, slots=True)
class FixedLossScaleManager:
    """A scale that never moves (``mindspore.amp.FixedLossScaleManager``).

    With ``drop_overflow_update`` False, updates with NaN or Inf are made, too.
    """

    loss_scale: float = 128.0
    drop_overflow_update: bool = True

    def __post_init__(self) -> None:
        _positive("loss_scale", self.loss_scale)

    def scaling(self) -> Scaling:
        """What the graph does."""
        return Scaling(self.loss_scale, drops=self.drop_overflow_update)


@dataclass(frozen=True, slots=True)
class DynamicLossScaleManager:
    """Divided at each overflow, multiplied after a window without any (``mindspore.amp.DynamicLossScaleManager``)."""

    init_loss_scale: float = 2.0**24
    scale_factor: float = 2
    scale_window: int = 2000

    def __post_init__(self) -> None:
        _positive("init_loss_scale", self.init_loss_scale)
        if self.scale_factor <= 1:
            raise ArgumentError(f"scale_factor must be greater than 1, not {self.scale_factor}.")
        _positive("scale_window", self.scale_window)

    def scaling(self) -> Scaling:
        """What the graph does."""
        factor = float(self.scale_factor)
        return Scaling(
            self.init_loss_scale, grow=factor, shrink=1 / factor, grow_every=self.scale_window, shrink_every=1
        )


@dataclass(frozen=True, slots=True)
class GradScaler:
    """``paddle.amp.GradScaler``; with ``enable`` False nothing is scaled."""

    enable: bool = True
    init_loss_scaling: float = 65536.0
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    incr_every_n_steps: int = 2000
    decr_every_n_nan_or_inf: int = 1
    use_dynamic_loss_scaling: bool = True

    def __post_init__(self) -> None:
        _positive("init_loss_scaling", self.init_loss_scaling)
        if self.incr_ratio <= 1 or not 0 < self.decr_ratio < 1:
            raise ArgumentError("incr_ratio must be greater than 1, and decr_ratio between 0 and 1.")
        _positive("incr_every_n_steps", self.incr_every_n_steps)
        _positive("decr_every_n_nan_or_inf", self.decr_every_n_nan_or_inf)

    def scaling(self) -> Scaling | None:
        """What the graph does; None where it is switched off."""
        if not self.enable:
            return None
        if not self.use_dynamic_loss_scaling:
            return Scaling(self.init_loss_scaling)
        return Scaling(
            self.init_loss_scaling,
            grow=self.incr_ratio,
            shrink=self.decr_ratio,
            grow_every=self.incr_every_n_steps,
            shrink_every=self.decr_every_n_nan_or_inf,
        )


LossScaleManager = FixedLossScaleManager | DynamicLossScaleManager | GradScaler


def move_scale(
    scaling: Scaling, scale: Tensor, good: Tensor, bad: Tensor, overflow: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the next scale and its counters.

    Args:
        scale: float32 scalar. good, bad: int64 scalars, updates without and with overflow in a row.
        overflow: bool scalar, whether this update is one with.
    """
    if not (scaling.grow_every or scaling.shrink_every):
        return scale, good, bad
    good, bad = overflow.where(0, good + 1), overflow.where(bad + 1, 0)
    grows, shrinks = good.equals(scaling.grow_every), bad.equals(scaling.shrink_every)
    writer = scale.writer
    larger = (scale * scaling.grow).op("Min", writer.number(_LARGEST, scale.elem))
    smaller = (scale * scaling.shrink).op("Max", writer.number(1.0, scale.elem))
    return grows.where(larger, shrinks.where(smaller, scale)), grows.where(0, good), shrinks.where(0, bad)


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
        raise ArgumentError(f"{name} must be a positive number, not {value!r}.")
