"""Optimizers as graphs: what each keeps for a weight, and how it moves it. All arithmetic is float32.

Formulas are PyTorch's (``torch.optim``), which MindSpore's share but for where AdamW's decay stands.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeAlias

from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp.train._gradients.writer import Tensor

Schedule: TypeAlias = Callable[[int], float]
"""Number of the step, from 0 -> learning rate."""


@dataclass(frozen=True, slots=True)
class Move:
    """One weight about to be moved."""

    weight: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    rate: Tensor
    decay: float
    shared: Sequence[Tensor]
    """What :meth:`Optimizer.shared` wrote."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """What all optimizers share.

    Args:
        learning_rate: a number, or a function of the step's number.
        weight_decay: what pulls weights to zero.
        weight_decays: regular expression of weight names (whole names) -> another decay for these; the first that
            matches counts.
        clip_norm: gradients are scaled down so that their common L2 norm is at most this.
        accumulate: update once in so many steps, by the mean of their gradients.
        weights: regular expressions of the weights to train (whole names); none trains all.

    Raises:
        ArgumentError, ArgumentTypeError: a value is not one that it can have.
    """

    learning_rate: float | Schedule = 1e-3
    weight_decay: float = 0.0
    weight_decays: Mapping[str, float] = field(default_factory=dict)
    clip_norm: float | None = None
    accumulate: int = 1
    weights: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.weights, str):
            raise ArgumentTypeError("weights must be a list of regular expressions, not a string.")
        if not callable(self.learning_rate):
            _check("learning_rate", self.learning_rate)
        _check("weight_decay", self.weight_decay)
        for pattern, decay in self.weight_decays.items():
            _check(f"weight_decays[{pattern!r}]", decay)
        for pattern in (*self.weights, *self.weight_decays):
            _compiled(pattern)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ArgumentError(f"clip_norm must be positive, not {self.clip_norm}.")
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ArgumentError(f"accumulate must be a positive integer, not {self.accumulate!r}.")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of what is kept for each weight, in its shape; all begin as zeros."""
        return ()

    def shared(self, updates: Tensor) -> Sequence[Tensor]:  # noqa: ARG002
        """Write what all weights share; ``updates`` counts this update too, as a float32 scalar."""
        return ()

    @abstractmethod
    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and its new slots."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return float(self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate)

    def decay_of(self, name: str) -> float:
        """The weight decay of a weight."""
        found = (decay for pattern, decay in self.weight_decays.items() if re.fullmatch(pattern, name))
        return next(found, self.weight_decay)

    def trains(self, name: str) -> bool:
        """Whether the weight is to be trained."""
        return not self.weights or any(re.fullmatch(pattern, name) for pattern in self.weights)


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """w - rate * (g + decay * w)."""

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight."""
        return move.weight - move.rate * _decayed(move), {}


@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """v = momentum * v + g + decay * w, then w - rate * v; with nesterov, w - rate * (g + decay * w + momentum * v)."""

    momentum: float = 0.9
    nesterov: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The velocity."""
        return ("velocity",)

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and velocity."""
        gradient = _decayed(move)
        velocity = move.slots["velocity"] * self.momentum + gradient
        step = gradient + velocity * self.momentum if self.nesterov else velocity
        return move.weight - move.rate * step, {"velocity": velocity}


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam with bias correction; the decay is added to the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    @property
    def slots(self) -> tuple[str, ...]:
        """The first and the second moment."""
        return ("mean", "square")

    def shared(self, updates: Tensor) -> Sequence[Tensor]:
        """1 / (1 - beta1^t), and the square root of 1 - beta2^t."""
        first, second = (updates.writer.number(beta, updates.elem) ** updates for beta in (self.beta1, self.beta2))
        return 1.0 / (1.0 - first), (1.0 - second).op("Sqrt")

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and moments."""
        return self._adam(move, move.weight, _decayed(move))

    def _adam(self, move: Move, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        scale, root = move.shared
        mean = move.slots["mean"] * self.beta1 + gradient * (1 - self.beta1)
        square = move.slots["square"] * self.beta2 + gradient * gradient * (1 - self.beta2)
        deviation = square.op("Sqrt") / root + self.epsilon
        return weight - (move.rate * scale) * mean / deviation, {"mean": mean, "square": square}


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam whose decay is apart from the gradient: w * (1 - rate * decay) before the step."""

    weight_decay: float = 1e-2

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and moments."""
        weight = move.weight * (1.0 - move.rate * move.decay) if move.decay else move.weight
        return self._adam(move, weight, move.gradient)


OPTIMIZERS: Mapping[str, type[Optimizer]] = {"sgd": SGD, "momentum": Momentum, "adam": Adam, "adamw": AdamW}
"""By the names that the command line knows."""


def _decayed(move: Move) -> Tensor:
    return move.gradient + move.weight * move.decay if move.decay else move.gradient


def _check(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number, not {type(value).__name__}.")
    if not isfinite(value) or value < 0:
        raise ArgumentError(f"{name} must be a finite number of zero or more, not {value}.")


def _compiled(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"{pattern!r} is not a regular expression: {error}.") from None
