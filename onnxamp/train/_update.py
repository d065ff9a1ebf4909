"""The second half of a step's graph: from scaled gradients to the successors of the state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp.train._forward import Forward
from onnxamp.train._gradients.writer import Tensor, Writer
from onnxamp.train._optimizers import Move, Optimizer
from onnxamp.train._scaling import update_scale

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
