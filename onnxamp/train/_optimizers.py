"""Optimizers as graphs: the state each keeps per weight, and how it updates the weight. All arithmetic is float32.

The formulas are those of ``torch.optim``. MindSpore's differ only in where AdamW applies its decay.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp.train._forward import Forward
from onnxamp.train._gradients.writer import Tensor, Writer
from onnxamp.train._scaling import update_scale

Schedule: TypeAlias = Callable[[int], float]
"""From the number of a step, counted from 0, to its learning rate."""


@dataclass(frozen=True, slots=True)
class Move:
    """A weight to update, with all that its update depends on."""

    weight: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    rate: Tensor
    decay: float
    shared: Sequence[Tensor]
    """What :meth:`Optimizer.shared` returned."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Base class of the optimizers, with the options that all of them have.

    Args:
        learning_rate: a number, or a function from the number of a step (from 0) to one.
        weight_decay: strength of the pull of the weights to zero.
        weight_decays: other decays for some weights, by regular expressions that match whole names; the first match
            counts.
        clip_norm: gradients are scaled down so that their common L2 norm is at most this.
        accumulate: update once in this many steps, with the mean of their gradients.
        weights: regular expressions that match the whole names of the weights to train; none for all.

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
        if (
            isinstance(self.accumulate, bool)
            or not isinstance(self.accumulate, int)
            or self.accumulate < 1
        ):
            raise ArgumentError(f"accumulate must be a positive integer, not {self.accumulate!r}.")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state kept per weight, in its shape; all start as zeros."""
        return ()

    def shared(self, updates: Tensor) -> Sequence[Tensor]:  # noqa: ARG002
        """Write what all weights share; ``updates`` is the number of this update, from 1, as a float32 scalar."""
        return ()

    @abstractmethod
    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and its new slots."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return float(
            self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate
        )

    def decay_of(self, name: str) -> float:
        """The weight decay of a weight."""
        decays = (
            decay for pattern, decay in self.weight_decays.items() if re.fullmatch(pattern, name)
        )
        return next(decays, self.weight_decay)

    def trains(self, name: str) -> bool:
        """Whether the weight is to be trained."""
        return not self.weights or any(re.fullmatch(pattern, name) for pattern in self.weights)


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent: w - rate * (g + decay * w).

    Takes the options of :class:`Optimizer`.

    Example:
        >>> from onnxamp.train import SGD
        >>> SGD(learning_rate=0.1).rate(0)
        0.1
    """

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight."""
        return move.weight - move.rate * _decayed(move), {}


@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """SGD with momentum: v = momentum * v + g + decay * w, then w - rate * v.

    With ``nesterov``, w - rate * (g + decay * w + momentum * v). Takes the options of :class:`Optimizer`, too.

    Example:
        >>> from onnxamp.train import Momentum
        >>> Momentum(learning_rate=0.1, nesterov=True).slots
        ('velocity',)
    """

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
    """Adam with bias correction; the weight decay is added to the gradient.

    Takes the options of :class:`Optimizer`, too.

    Example:
        >>> from onnxamp.train import Adam
        >>> Adam(beta2=0.99).slots
        ('mean', 'square')
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    @property
    def slots(self) -> tuple[str, ...]:
        """The first and the second moment."""
        return ("mean", "square")

    def shared(self, updates: Tensor) -> Sequence[Tensor]:
        """1 / (1 - beta1^t), and the square root of 1 - beta2^t."""
        first, second = (
            updates.writer.number(beta, updates.elem) ** updates
            for beta in (self.beta1, self.beta2)
        )
        return 1.0 / (1.0 - first), (1.0 - second).op("Sqrt")

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and moments."""
        return self._adam(move, move.weight, _decayed(move))

    def _adam(
        self, move: Move, weight: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        scale, root = move.shared
        mean = move.slots["mean"] * self.beta1 + gradient * (1 - self.beta1)
        square = move.slots["square"] * self.beta2 + gradient * gradient * (1 - self.beta2)
        deviation = square.op("Sqrt") / root + self.epsilon
        return weight - (move.rate * scale) * mean / deviation, {"mean": mean, "square": square}


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: w * (1 - rate * decay) before the update.

    Takes the options of :class:`Optimizer` and :class:`Adam`.

    Example:
        >>> from onnxamp.train import AdamW
        >>> AdamW(clip_norm=1.0).weight_decay
        0.01
    """

    weight_decay: float = 1e-2

    def move(self, move: Move) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Write the new weight and moments."""
        weight = move.weight * (1.0 - move.rate * move.decay) if move.decay else move.weight
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


def _check(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number, not {type(value).__name__}.")
    if not isfinite(value) or value < 0:
        raise ArgumentError(f"{name} must be a finite number, 0 or greater, not {value}.")


def _compiled(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ArgumentError(f"{pattern!r} is not a regular expression: {error}.") from None


Array = NDArray[np.generic]

OVERFLOW, NORM, RATE, APPLY = "train/overflow", "train/norm", "train/rate", "train/apply"
SCALE, GOOD, BAD, UPDATES = "train/scale", "train/good", "train/bad", "train/updates"
DIVISOR, FACTORS, WINDOWS = "train/divisor", "train/factors", "train/windows"
SCALE_STATE: Final = (SCALE, GOOD, BAD)
"""The fields of :class:`onnxamp.train._scaling.ScaleState` as inputs of the graph."""
SUM: Final = "train/sum/"
"""With the name of a weight behind it: the sum of its gradients since the last update."""
GRADIENT, STATISTIC, UNSCALED = "train/gradient/", "train/statistic/", "train/unscaled/"
"""With a name behind them: scaled gradients and successors of running statistics, in float32, where the halves meet;
and the unscaled gradients behind."""
_CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a step uses a loss scale: whether it skips updates whose gradients hold NaN or Inf, and moves the scale."""

    skips: bool
    moves: bool


def next_of(name: str) -> str:
    """The output that replaces a piece of state."""
    return f"train/next/{name}"


@dataclass(slots=True)
class Update:
    """Writes the successors of the state from the gradients; ``state`` grows by what the update keeps."""

    writer: Writer
    optimizer: Optimizer
    scaling: Scaling | None
    forward: Forward
    state: dict[str, Array]

    def keep(self, name: str, initial: Array) -> Tensor:
        """Add a piece of state; returns it as the graph reads it."""
        self.state[name] = initial
        return Tensor(
            self.writer, name, helper.np_dtype_to_tensor_dtype(initial.dtype), initial.shape
        )

    def write(self, raw: Mapping[str, Tensor]) -> dict[str, str]:
        """Write everything behind the gradients; returns their names where the halves meet, by weight.

        The division stands there without a loss scale, too: ONNX Runtime would fuse the last op of a gradient with the
        first of its update, and one half could not do that.
        """
        if self.scaling is not None:
            Tensor(self.writer, SCALE, TensorProto.FLOAT).op("Identity", into=DIVISOR)
        divisor = Tensor(self.writer, DIVISOR, TensorProto.FLOAT)
        met = {name: g.op("Identity", into=f"{GRADIENT}{name}") for name, g in raw.items()}
        gradients = {
            name: g.op("Div", divisor, into=f"{UNSCALED}{name}") for name, g in met.items()
        }
        successors: dict[str, Tensor] = {}
        apply = None
        if self.optimizer.accumulate > 1:
            apply = Tensor(self.writer, APPLY, TensorProto.BOOL)
            gradients = self._accumulated(gradients, apply, successors)
        overflow, norm = self._inspected(gradients)
        happens = self._happens(overflow, apply)
        updates = self.keep(UPDATES, np.zeros((), np.float32))
        following = updates + 1.0
        shared = self.optimizer.shared(following)
        clipped = self._clipped(gradients, norm)
        for name, gradient in clipped.items():
            for kept, (old, new) in self._moved(name, gradient, shared).items():
                successors[kept] = new if happens is None else happens.where(new, old)
        skips = self.scaling is not None and self.scaling.skips
        for name, output in self.forward.statistics.items():
            new = Tensor(self.writer, output, TensorProto.FLOAT).op(
                "Identity", into=f"{STATISTIC}{name}"
            )
            successors[name] = (
                overflow.where(Tensor(self.writer, name, TensorProto.FLOAT), new) if skips else new
            )
        successors[UPDATES] = following if happens is None else happens.where(following, updates)
        if self.scaling is not None and self.scaling.moves:
            successors |= self._next_scale(overflow, apply)
        for name, new in successors.items():
            new.op("Identity", into=next_of(name))
        return {name: gradient.name for name, gradient in met.items()}

    def _next_scale(self, overflow: Tensor, apply: Tensor | None) -> dict[str, Tensor]:
        kinds = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT64)
        scale, good, bad = (
            Tensor(self.writer, name, kind) for name, kind in zip(SCALE_STATE, kinds, strict=True)
        )
        factors = Tensor(self.writer, FACTORS, TensorProto.FLOAT)
        windows = Tensor(self.writer, WINDOWS, TensorProto.INT64)
        updated = update_scale((scale, good, bad), factors, windows, overflow)
        return {
            old.name: new if apply is None else apply.where(new, old)
            for old, new in zip((scale, good, bad), updated, strict=True)
        }

    def _accumulated(
        self, gradients: Mapping[str, Tensor], apply: Tensor, successors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The mean of the gradients since the last update."""
        sums = {}
        for name, gradient in gradients.items():
            held = self.keep(f"{SUM}{name}", np.zeros_like(self.state[name]))
            sums[name] = held + gradient * (1 / self.optimizer.accumulate)
            successors[held.name] = apply.where(0, sums[name])
        return sums

    def _inspected(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Whether any gradient holds NaN or Inf (multiplied by zero, only these are not zero), and the norm of all."""
        zeros = [(g * 0.0).op("ReduceSum", keepdims=0) for g in gradients.values()]
        squares = [g.op("ReduceSumSquare", keepdims=0) for g in gradients.values()]
        clean = zeros[0].op("Sum", *zeros[1:]).equals(0)
        overflow = clean.op("Not", into=OVERFLOW)
        norm = squares[0].op("Sum", *squares[1:]).op("Sqrt", into=NORM)
        return overflow, norm

    def _happens(self, overflow: Tensor, apply: Tensor | None) -> Tensor | None:
        """Whether the update happens; None for always."""
        if self.scaling is None or not self.scaling.skips:
            return apply
        clean = overflow.op("Not")
        return clean if apply is None else clean.op("And", apply)

    def _clipped(self, gradients: Mapping[str, Tensor], norm: Tensor) -> Mapping[str, Tensor]:
        if self.optimizer.clip_norm is None:
            return gradients
        factor = (self.optimizer.clip_norm / (norm + _CLIP_EPSILON)).op(
            "Min", self.writer.number(1.0, norm.elem)
        )
        return {name: gradient * factor for name, gradient in gradients.items()}

    def _moved(
        self, name: str, gradient: Tensor, shared: Sequence[Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """(before, after) of a weight and its slots, by name."""
        weight = self.keep(name, self.state[name])
        slots = {
            slot: self.keep(f"train/{slot}/{name}", np.zeros_like(self.state[name]))
            for slot in self.optimizer.slots
        }
        rate = Tensor(self.writer, RATE, TensorProto.FLOAT)
        move = Move(
            weight=weight,
            gradient=gradient,
            slots=slots,
            rate=rate,
            decay=self.optimizer.decay_of(name),
            shared=shared,
        )
        new, kept = self.optimizer.move(move)
        return {name: (weight, new)} | {
            slots[slot].name: (slots[slot], after) for slot, after in kept.items()
        }
