"""Optimizers as graphs: their state per weight, and their updates of weights. All arithmetic is float32.

The formulas are those of ``torch.optim``. MindSpore's formulas differ only in where AdamW applies its decay.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import (
    Any,
    ClassVar,
    Final,
    NamedTuple,
    TypeAlias,
    TypeVar,
    cast,
    dataclass_transform,
)

from onnx import TensorProto

from onnxamp._base.errors import ArgumentTypeError
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._gradients.writer import Tensor
from onnxamp._options.doors import door
from onnxamp._options.values import checked_flag, checked_texts, compiled

Schedule: TypeAlias = Callable[[int], float]
"""A function that maps the number of a step, counted from 0, to its learning rate."""


class Move(NamedTuple):
    """A weight to update, with everything that its update depends on."""

    weight: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    rate: Tensor
    decay: float
    shared: Sequence[Tensor]
    """The result of :meth:`Optimizer.shared`."""


C = TypeVar("C", bound=type)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def _settings(cls: C) -> C:
    """Make a frozen keyword-only dataclass that also takes settings by the names of other frameworks."""
    decorated: Any = dataclass(frozen=True, kw_only=True)(cls)
    return cast(C, door(decorated))


@_settings
class Optimizer(ABC):
    """Base class of the optimizers, with their common options.

    Args:
        learning_rate: a number, or a function that maps the number of a step (from 0) to one.
        weight_decay: how strongly weights are pulled toward zero.
        weight_decays: other decays for some weights, by regular expressions for full names; the first
            match counts.
        clip_norm: the largest common L2 norm of the gradients; they are scaled down to it if it is exceeded.
        accumulate: update once in this many steps, with the mean of their gradients.
        weights: regular expressions for the full names of the weights to train; none for all.
        loss_scale: the loss scale that MindSpore's optimizers divide gradients by. Here the step does so itself; the
            setting must be 1, or the scale of a :class:`FixedLossScaleManager` with ``drop_overflow_update=False``,
            where MindSpore requires it.

    Settings may have their names in ``torch.optim``, ``mindspore.nn`` and ``paddle.optimizer``: ``lr``, ``eps``,
    ``betas``, ``use_nesterov``.

    Raises:
        ArgumentError, ArgumentTypeError: a value is out of range, or has the wrong type.

    Example:
        >>> from onnxamp.train import SGD
        >>> optimizer = SGD(learning_rate=lambda step: 0.1 / (1 + step), weight_decays={".*bias": 0.0})
        >>> optimizer.rate(3)
        0.025
    """

    learning_rate: float | Schedule = 1e-3
    weight_decay: float = 0.0
    weight_decays: Mapping[str, float] = field(default_factory=dict)
    clip_norm: float | None = None
    accumulate: int = 1
    weights: Sequence[str] = ()
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.weights, str):
            raise ArgumentTypeError(
                "weights must be a list of regular expressions, not a string."
            )
        checked_texts("weights", self.weights)
        if not isinstance(self.weight_decays, Mapping):
            raise ArgumentTypeError(
                "weight_decays must be a dict from regular expressions to numbers, not"
                f" {type(self.weight_decays).__name__}."
            )
        checked_texts("weight_decays", self.weight_decays)
        if not callable(self.learning_rate):
            _check("learning_rate", self.learning_rate)
        _check("weight_decay", self.weight_decay)
        for pattern, decay in self.weight_decays.items():
            _check(f"weight_decays[{pattern!r}]", decay)
        compiled("weights", self.weights)
        compiled("weight_decays", self.weight_decays)
        if self.clip_norm is not None:
            checked_number(
                "clip_norm", self.clip_norm, "a positive number", lambda n: n > 0
            )
        checked_number(
            "accumulate", self.accumulate, "a positive integer", lambda n: n > 0, WHOLE
        )
        checked_number(
            "loss_scale", self.loss_scale, "a positive number", lambda n: n > 0
        )

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the state kept per weight, in the shape of the weight; all start as zeros."""

    def shared(self, updates: Tensor) -> Sequence[Tensor]:  # noqa: ARG002
        """Write the values that all weights share; ``updates`` is the number of this update, from 1, as a float32
        scalar.
        """
        return ()

    @abstractmethod
    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and its new slots."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        Raises:
            ArgumentError, ArgumentTypeError: a function returned something else.
        """
        if callable(self.learning_rate):
            rate: Any = self.learning_rate(step)
            # Schedules of NumPy and PyTorch return arrays without axes.
            if getattr(rate, "shape", None) == ():
                rate = rate.item()
            return _check(f"learning_rate({step})", rate)
        return float(self.learning_rate)

    def decay_of(self, name: str) -> float:
        """Return the weight decay of a weight."""
        for pattern, decay in self.weight_decays.items():
            if re.fullmatch(pattern, name):
                return decay
        return self.weight_decay

    def clear_grad(self, set_to_zero: bool = True) -> None:  # noqa: B027
        """Do nothing: an update consumes its gradients, and new gradients replace old ones."""

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: B027
        """Do nothing: :meth:`clear_grad` by its name in PyTorch."""

    def trains(self, name: str) -> bool:
        """Return whether the weight is to be trained."""
        return not self.weights or any(
            re.fullmatch(pattern, name) for pattern in self.weights
        )


@_settings
class SGD(Optimizer):
    """Stochastic gradient descent: w - rate * (g + decay * w).

    Accepts the options of :class:`Optimizer`.

    Example:
        >>> from onnxamp.train import SGD
        >>> SGD(learning_rate=0.1).rate(0)
        0.1
    """

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight."""
        return move.weight - move.rate * _decayed(move), {}


@_settings
class Momentum(Optimizer):
    """SGD with momentum: v = momentum * v + g + decay * w, then w - rate * v.

    With ``nesterov``, w - rate * (g + decay * w + momentum * v). Also accepts the options of :class:`Optimizer`.

    Example:
        >>> from onnxamp.train import Momentum
        >>> Momentum(learning_rate=0.1, nesterov=True).slots
        ('velocity',)
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("momentum", self.momentum)
        checked_flag("nesterov", self.nesterov)

    slots: ClassVar = ("velocity",)

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and velocity."""
        gradient = _decayed(move)
        velocity = move.slots["velocity"] * self.momentum + gradient
        step = gradient + velocity * self.momentum if self.nesterov else velocity
        return move.weight - move.rate * step, {"velocity": velocity}


@_settings
class Adam(Optimizer):
    """Adam with bias correction; the weight decay is added to the gradient.

    Also accepts the options of :class:`Optimizer`.

    Example:
        >>> from onnxamp.train import Adam
        >>> Adam(beta2=0.99).slots
        ('mean', 'square')
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    slots: ClassVar = ("mean", "square")
    """The first and the second moment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            beta = getattr(self, name)
            what = "a number from 0 up to, but not including, 1"
            checked_number(name, beta, what, lambda n: 0 <= n < 1)
        _check("epsilon", self.epsilon)

    def shared(self, updates: Tensor) -> Sequence[Tensor]:
        """Write 1 / (1 - beta1^t) and the square root of 1 - beta2^t."""
        # The moments begin at zero, and are too small by these factors in the first updates. In float32, 1 less a power
        # near 1 would have few digits.
        count = updates.cast(TensorProto.DOUBLE)
        first = count.like(self.beta1) ** count
        second = count.like(self.beta2) ** count
        scale = 1.0 / (1.0 - first)
        root = (1.0 - second).op("Sqrt")
        return scale.cast(updates.elem), root.cast(updates.elem)

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and moments."""
        return self._adam(move, move.weight, _decayed(move))

    def _adam(
        self, move: Move, weight: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        scale, root = move.shared
        mean = move.slots["mean"] * self.beta1 + gradient * (1 - self.beta1)
        past = move.slots["square"] * self.beta2
        square = past + gradient * gradient * (1 - self.beta2)
        deviation = square.op("Sqrt") / root + self.epsilon
        new = weight - (move.rate * scale) * mean / deviation
        return new, {"mean": mean, "square": square}


@_settings
class AdamW(Adam):
    """Adam with decoupled weight decay: w * (1 - rate * decay) before the update.

    Accepts the options of :class:`Optimizer` and :class:`Adam`.

    Example:
        >>> from onnxamp.train import AdamW
        >>> AdamW(clip_norm=1.0).weight_decay
        0.01
    """

    weight_decay: float = 1e-2

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and moments."""
        weight = move.weight
        if move.decay:
            weight = weight * (1.0 - move.rate * move.decay)
        return self._adam(move, weight, move.gradient)


OPTIMIZERS: Final[Mapping[str, type[Optimizer]]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adam": Adam,
    "adamw": AdamW,
}
"""Optimizers by their names on the command line."""


def _decayed(move: Move) -> Tensor:
    return move.gradient + move.weight * move.decay if move.decay else move.gradient


def _check(name: str, value: float) -> float:
    what = "a finite number, 0 or greater"
    holds = checked_number(name, value, what, lambda n: isfinite(n) and n >= 0)
    return float(holds)
