"""One training step as one ONNX graph: forward, loss, gradients, loss scaling, clipping and the optimizer.

======================  ==============================================================================================
input                   meaning
======================  ==============================================================================================
data, labels            the inputs of the model, and the labels of the loss
dropout masks           see :class:`onnxamp.train._forward.Mask`
``train/rate``          learning rate, float32 scalar
``train/apply``         bool scalar: whether this step updates the weights; only with accumulation
state                   weights, running statistics, optimizer slots, scale and counters, by name
======================  ==============================================================================================

Its outputs are ``train/loss`` (unscaled), ``train/overflow``, ``train/norm`` (of all gradients, unscaled, before
clipping) and the successor of each piece of state. Where nodes skip an update whose gradients hold NaN or Inf: then all
state except for the scale and its counters stays, including running statistics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from onnxamp._errors import ArgumentError, ModelError
from onnxamp._graph.graph import Graph
from onnxamp._graph.names import NewNames
from onnxamp._graph.shapes import symbolic_shapes
from onnxamp.train._forward import Forward, Mask, as_inputs, find_weights
from onnxamp.train._gradients import differentiate
from onnxamp.train._gradients.writer import FLOATS, Tensor, Writer
from onnxamp.train._losses import Loss
from onnxamp.train._optimizers import Move, Optimizer
from onnxamp.train._scaling import Scaling, update_scale

Array = NDArray[np.generic]

LOSS, OVERFLOW, NORM, RATE, APPLY = "train/loss", "train/overflow", "train/norm", "train/rate", "train/apply"
SCALE, _GOOD, _BAD, UPDATES = "train/scale", "train/good", "train/bad", "train/updates"
_SUM = "train/sum/"
OWN = "train/.*"
"""Names of nodes that belong neither to the model nor to its gradients: they stay float32."""
_CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True, slots=True)
class Step:
    """The graph of a step, in float32.

    ``state``: initial arrays, by input; ``successors``: the output that replaces each; ``weights``: the trained ones
    among them; ``gradients``: the value that holds the gradient of each, scaled as the loss is; ``data``: the inputs
    that the caller feeds; ``skips``: whether updates whose gradients hold NaN or Inf are skipped.
    """

    model: ModelProto
    state: Mapping[str, Array]
    successors: Mapping[str, str]
    weights: tuple[str, ...]
    gradients: Mapping[str, str]
    data: tuple[str, ...]
    masks: tuple[Mask, ...]
    skips: bool

    @property
    def scaled(self) -> frozenset[str]:
        """The state that holds the loss scale, or sums of gradients that were scaled."""
        return frozenset(name for name in self.state if name == SCALE or name.startswith(_SUM))


def build_step(forward: Forward, optimizer: Optimizer, loss: Loss | None, scaling: Scaling | None) -> Step:
    """Write the graph of a step.

    Args:
        forward: the model in training mode; it is not changed.
        loss: None where the first output of the model is the loss.
        scaling: how the loss is scaled; None for not at all, and then no update is skipped.

    Raises:
        GradientError: an op has no rule, or there is nothing to train.
        ModelError: the model has no output that could be a loss.
        ArgumentError: the model has a value with the name of the labels.
    """
    model = ModelProto()
    model.CopyFrom(forward.model)
    state: dict[str, Array] = {SCALE: np.array(scaling.initial, np.float32)} if scaling else {}
    writer = _writer(model)
    target = _write_loss(model, writer, loss, scaling is not None)
    writer.add_to(model.graph)
    own = {tensor.name for tensor in forward.model.graph.initializer}
    weights = [name for name in find_weights(model, target, own) if optimizer.trains(name)]
    if not weights:
        raise ModelError("No weight of the model matches the optimizer's 'weights'.")
    data = [entry.name for entry in model.graph.input if entry.name not in (SCALE, *(m.name for m in forward.masks))]
    state |= as_inputs(model, weights)
    state |= as_inputs(model, [name for name in forward.statistics if name not in weights])
    gradients = differentiate(model, target, weights)
    return _with_update(gradients.model, gradients.outputs, forward, optimizer, scaling, state, data)


def _with_update(
    model: ModelProto,
    gradients: Mapping[str, str],
    forward: Forward,
    optimizer: Optimizer,
    scaling: Scaling | None,
    state: dict[str, Array],
    data: Sequence[str],
) -> Step:
    """Write the update after the gradients."""
    writer = _writer(model)
    writer.prefix = "train/update"
    update = _Update(writer, optimizer, scaling, forward, state)
    raw = {name: Tensor(writer, output, TensorProto.FLOAT) for name, output in gradients.items()}
    successors = update.write(raw)
    del model.graph.output[:]
    writer.add_to(model.graph)
    kinds = {LOSS: TensorProto.FLOAT, OVERFLOW: TensorProto.BOOL, NORM: TensorProto.FLOAT}
    model.graph.output.extend(helper.make_tensor_value_info(name, kind, []) for name, kind in kinds.items())
    listed = {entry.name for entry in model.graph.input}
    for name, array in update.state.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        if name not in listed:
            model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
        model.graph.output.append(helper.make_tensor_value_info(successors[name], kind, array.shape))
    model.graph.input.append(helper.make_tensor_value_info(RATE, TensorProto.FLOAT, []))
    if optimizer.accumulate > 1:
        model.graph.input.append(helper.make_tensor_value_info(APPLY, TensorProto.BOOL, []))
    skips = scaling is not None and scaling.skips
    return Step(model, update.state, successors, tuple(gradients), gradients, tuple(data), forward.masks, skips)


def _writer(model: ModelProto) -> Writer:
    return Writer(NewNames(Graph.of(model).all_names()), prefix="train/loss")


def _write_loss(model: ModelProto, writer: Writer, loss: Loss | None, scaled: bool) -> str:
    """Write the loss, and its scaling; returns the value to differentiate."""
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in model.graph.output}
    names = [name for name, kind in kinds.items() if kind in FLOATS]
    if loss is not None and loss.output is not None:
        names = [name for name in names if name == loss.output]
    if not names:
        wanted = "float output" if loss is None or loss.output is None else f"float output {loss.output!r}"
        raise ModelError(f"The model has no {wanted} for the loss.")
    value = Tensor(writer, names[0], kinds[names[0]]).cast(TensorProto.FLOAT)
    if loss is not None:
        graph = Graph.of(model)
        shapes = dict(zip((value.name for value in graph.values), graph.ask(symbolic_shapes), strict=True))
        if loss.label in shapes:
            raise ArgumentError(f"The model already has a value named {loss.label!r}: give the labels another name.")
        shape = loss.label_shape(shapes[names[0]])
        model.graph.input.append(helper.make_tensor_value_info(loss.label, loss.label_type, shape))
        value = loss.function(value, Tensor(writer, loss.label, loss.label_type))
    writer.op("Reshape", value, writer.constant(np.zeros(0, np.int64)), into=LOSS)
    if not scaled:
        return LOSS
    model.graph.input.append(helper.make_tensor_value_info(SCALE, TensorProto.FLOAT, []))
    total, scale = Tensor(writer, LOSS, TensorProto.FLOAT), Tensor(writer, SCALE, TensorProto.FLOAT)
    return (total * scale).name


@dataclass(slots=True)
class _Update:
    """Writes the successors of the state from the gradients; ``state`` grows by what the update keeps."""

    writer: Writer
    optimizer: Optimizer
    scaling: Scaling | None
    forward: Forward
    state: dict[str, Array]

    def keep(self, name: str, initial: Array) -> Tensor:
        """Add a piece of state; returns it as the graph reads it."""
        self.state[name] = initial
        return Tensor(self.writer, name, helper.np_dtype_to_tensor_dtype(initial.dtype), initial.shape)

    def write(self, raw: Mapping[str, Tensor]) -> dict[str, str]:
        """Successor of each piece of state, by name."""
        scale = self.keep(SCALE, self.state[SCALE]) if self.scaling else None
        gradients = {name: g / scale if scale is not None else g for name, g in raw.items()}
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
        for name, output in self.forward.statistics.items():
            old, new = (Tensor(self.writer, n, TensorProto.FLOAT) for n in (name, output))
            skips = self.scaling is not None and self.scaling.skips
            successors[name] = overflow.where(old, new) if skips else new
        successors[UPDATES] = following if happens is None else happens.where(following, updates)
        if scale is not None and self.scaling is not None:
            counters = self.keep(_GOOD, np.zeros((), np.int64)), self.keep(_BAD, np.zeros((), np.int64))
            updated = update_scale(self.scaling, scale, *counters, overflow)
            for old, new in zip((scale, *counters), updated, strict=True):
                successors[old.name] = new if apply is None else apply.where(new, old)
        return {name: new.op("Identity", into=f"{name}/next").name for name, new in successors.items()}

    def _accumulated(
        self, gradients: Mapping[str, Tensor], apply: Tensor, successors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The mean of the gradients since the last update."""
        sums = {}
        for name, gradient in gradients.items():
            held = self.keep(f"{_SUM}{name}", np.zeros_like(self.state[name]))
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
        factor = (self.optimizer.clip_norm / (norm + _CLIP_EPSILON)).op("Min", self.writer.number(1.0, norm.elem))
        return {name: gradient * factor for name, gradient in gradients.items()}

    def _moved(self, name: str, gradient: Tensor, shared: Sequence[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """(before, after) of a weight and its slots, by name."""
        weight = self.keep(name, self.state[name])
        slots = {
            slot: self.keep(f"train/{slot}/{name}", np.zeros_like(self.state[name])) for slot in self.optimizer.slots
        }
        rate = Tensor(self.writer, RATE, TensorProto.FLOAT)
        move = Move(weight, gradient, slots, rate, self.optimizer.decay_of(name), shared)
        new, kept = self.optimizer.move(move)
        return {name: (weight, new)} | {slots[slot].name: (slots[slot], after) for slot, after in kept.items()}
