"""One training step as one ONNX graph: forward, loss, gradients, loss scaling, clipping and the optimizer.

======================  ==============================================================================================
input                   meaning
======================  ==============================================================================================
data, labels            the inputs of the model, and the labels of the loss
dropout masks           see :class:`onnxamp.train._forward.Mask`
``train/rate``          learning rate, float32 scalar
``train/apply``         bool scalar: whether this step updates the weights; only with accumulation
``train/divisor``       float32 scalar: 1; only without a loss scale
``train/scale``         loss scale, float32 scalar
``train/factors``       the factors by which the graph changes the scale and the least scale, and the numbers of updates
                        after which it does (``train/windows``); see :meth:`_Update._move_scale`
state                   weights, running statistics, optimizer slots, counters, by name
======================  ==============================================================================================

Its outputs are ``train/loss`` (unscaled; if it is not a scalar, its sum is differentiated), ``train/overflow``,
``train/norm`` (of all gradients, unscaled, before clipping) and the successor of each piece of state. Where nodes skip
an update whose gradients hold NaN or Inf. The state, including running statistics, then stays the same, except for the
scale and its counters.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from onnxamp._base.errors import ArgumentError, ModelError
from onnxamp._base.records import record
from onnxamp._facts.dtypes import FLOAT_ELEMS, elem_of
from onnxamp._gradients.walk import differentiate
from onnxamp._gradients.writer import Tensor, Writer
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims
from onnxamp.train._batches import LabelClasses
from onnxamp.train._forward import Mask, TrainingModel
from onnxamp.train._loss import Loss
from onnxamp.train._optimizers import Move, Optimizer
from onnxamp.train._weights import as_inputs, find_weights

LOSS = "train/loss"
OVERFLOW = "train/overflow"
NORM = "train/norm"
RESULTS: Final = (LOSS, OVERFLOW, NORM)
"""Outputs of a step other than the state."""
OWN: Final = "train"
"""The prefix of nodes that belong neither to the model nor to its gradients; they stay in float32."""
RATE = "train/rate"
APPLY = "train/apply"
UPDATES = "train/updates"
SCALE = "train/scale"
GOOD = "train/good"
BAD = "train/bad"
SCALE_STATE: Final = (SCALE, GOOD, BAD)
"""The fields of :class:`onnxamp.train._scaling.ScaleState` as inputs of the graph."""
DIVISOR = "train/divisor"
FACTORS = "train/factors"
WINDOWS = "train/windows"
SUM: Final = "train/sum/"
"""Prefix of the name of a weight, for the sum of its gradients since the last update."""
GRADIENT = "train/gradient/"
STATISTIC = "train/statistic/"
UNSCALED = "train/unscaled/"
"""Prefixes of names, for float32 values: scaled gradients and successors of running statistics at the boundary of the
halves, and unscaled gradients after it."""
NEXT: Final = "train/next/"
"""Prefix of the name of a piece of state, for the output that replaces it."""
LARGEST: Final = 2.0**126
"""The largest loss scale. It and its reciprocal are normal numbers in float32."""
_CLIP_EPSILON: Final = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""
_FLOAT = TensorProto.FLOAT
_BOOL = TensorProto.BOOL
_INT64 = TensorProto.INT64

Array = NDArray[Any]


class Scaling(NamedTuple):
    """The use of a loss scale in a step: whether the step skips updates whose gradients hold NaN or Inf, and whether it
    changes the scale.
    """

    skips: bool
    moves: bool


@record
class TrainStep:
    """The graph of a step, in float32.

    ``state``: initial arrays, by input; ``successors``: the output that replaces each piece of state, and each part of
    the loss scale that the graph changes; ``gradients``: the value that holds the gradient of each trained weight,
    scaled like the loss; ``statistics``: the values that replace the running statistics; ``data``: the inputs that the
    caller feeds; ``classes``: the valid labels; None if any label is valid.
    """

    model: ModelProto
    state: Mapping[str, Array]
    successors: Mapping[str, str]
    gradients: Mapping[str, str]
    statistics: Mapping[str, str]
    data: Sequence[str]
    masks: Sequence[Mask]
    scaling: Scaling | None
    classes: LabelClasses | None

    @property
    def weights(self) -> tuple[str, ...]:
        """The trained weights."""
        return tuple(self.gradients)

    @property
    def scaled(self) -> frozenset[str]:
        """The inputs that hold the loss scale, or sums of gradients that were scaled."""
        return frozenset(
            (SCALE, *(name for name in self.state if name.startswith(SUM)))
        )


def build_step(
    forward: TrainingModel,
    optimizer: Optimizer,
    loss: Loss | None,
    scaling: Scaling | None,
    lacks: Container[str] = (),
) -> TrainStep:
    """Write the graph of a step.

    Args:
        forward: the model in training mode; it is not changed.
        loss: the loss; None if the first output of the model is the loss.
        scaling: how the loss is scaled; None for no scaling, in which case no update is skipped.
        lacks: the features that the engine cannot run, as in the ``engine.toml`` of a target.

    Raises:
        GradientError: an op has no rule, or there is nothing to train.
        ModelError: the model has no output that could be a loss.
        ArgumentError: no loss is given and the first output is not one, or a value has the name of the labels.
    """
    # Before the loss is written, whose constants are not to be trained.
    own = {tensor.name for tensor in forward.model.graph.initializer}
    judged = _with_loss(Graph.of(forward.model), loss, scaled=scaling is not None)
    graph = Graph.of(judged.model)
    weights = list(filter(optimizer.trains, find_weights(graph, judged.target, own)))
    if not weights:
        raise ModelError("No weight of the model matches the optimizer's 'weights'.")
    apart = {SCALE, *(mask.name for mask in forward.masks)}
    data = [entry.name for entry in graph.model.graph.input if entry.name not in apart]
    model, state = as_inputs(graph, dict.fromkeys((*weights, *forward.statistics)))
    differentiated = differentiate(model, judged.target, weights, lacks)
    writer = Writer(GraphEditor(Graph.of(differentiated.model)), "train/update")
    del writer.editor.model.graph.output[:]
    update = _Update(writer, optimizer, scaling, judged.dims, state)
    gradients = update.write(differentiated.outputs, forward.statistics)
    return TrainStep(
        model=writer.finish(),
        state=state,
        successors={name: f"{NEXT}{name}" for name in update.successors},
        gradients=gradients,
        statistics={name: f"{STATISTIC}{name}" for name in forward.statistics},
        data=data,
        masks=forward.masks,
        scaling=scaling,
        classes=judged.classes,
    )


class _Judged(NamedTuple):
    """A model with its loss.

    ``target``: the value to differentiate, which is scaled; ``dims``: the shape of the loss, which is a scalar if it
    has one element; ``classes``: the valid labels.
    """

    model: ModelProto
    target: str
    dims: Dims
    classes: LabelClasses | None


def _with_loss(graph: Graph, loss: Loss | None, *, scaled: bool) -> _Judged:
    """Write the loss after a model."""
    output = _judged_output(graph, loss)
    name = graph.values[output].name
    elem = elem_of(graph.types[output])
    dims = graph.dims[output]
    classes = None
    writer = Writer(GraphEditor(graph), "train/loss")
    value = Tensor(writer, name, elem).cast(_FLOAT)
    if loss is None:
        _check_loss(name, dims)
    else:
        if any(known.name == loss.label for known in graph.values):
            raise ArgumentError(
                f"The model already has a value named {loss.label!r}: give the labels another name."
            )
        labels = writer.input(loss.label, loss.label_type, loss.label_shape(dims))
        classes = loss.classes(dims)
        value = loss.write(replace(value, dims=dims), labels)
        graph = Graph.of(writer.finish())
        writer = Writer(GraphEditor(graph), "train/loss")
        dims = graph.dims[graph.scopes[0].names[value.name]]
        value = Tensor(writer, value.name, value.elem)
    if dims is None or all(dim == 1 for dim in dims):
        dims = ()
        value = value.op("Reshape", [], into=LOSS)
    else:
        value = value.op("Identity", into=LOSS).op("ReduceSum", keepdims=0)
    if scaled:  # after the output LOSS, which stays unscaled
        value = value * writer.input(SCALE, _FLOAT)
    return _Judged(writer.finish(), value.name, dims, classes)


def _judged_output(graph: Graph, loss: Loss | None) -> int:
    """Return the output that is the loss, or that the loss is computed from.

    Raises:
        ModelError: there is no such output.
    """
    wanted = loss.output if loss else None
    for value in graph.scopes[0].outputs:
        is_meant = wanted in (None, graph.values[value].name)
        if is_meant and elem_of(graph.types[value]) in FLOAT_ELEMS:
            return value
    what = "float output" if wanted is None else f"float output {wanted!r}"
    raise ModelError(f"The model has no {what} for the loss.")


def _check_loss(name: str, dims: Dims | None) -> None:
    """Check that an output can be a loss: a scalar, or a vector with one loss per sample, whose sum is minimized.

    Raises:
        ArgumentError: it cannot be a loss.
    """
    if dims is not None and sum(dim != 1 for dim in dims) > 1:
        shape = ", ".join("?" if dim is None else str(dim) for dim in dims)
        raise ArgumentError(
            f"The output {name!r} of the model has the shape [{shape}] and is no loss: pass loss_fn, such as"
            ' "cross-entropy", or a model whose first output is a scalar, or a vector with a loss for each sample.'
        )


@dataclass(slots=True)
class _Update:
    """Writes the successors of the state from the gradients, and adds the state of the optimizer to ``state``."""

    writer: Writer
    optimizer: Optimizer
    scaling: Scaling | None
    loss_dims: Dims
    state: dict[str, Array]
    successors: dict[str, Tensor] = field(default_factory=dict)

    def write(
        self, gradients: Mapping[str, str], statistics: Mapping[str, str]
    ) -> dict[str, str]:
        """Write everything after the gradients, and return their names at the boundary of the halves, by weight.

        The division is written even without a loss scale. Otherwise, ONNX Runtime would fuse the last op of a gradient
        with the first op of its update, which is impossible when the halves are separate.
        """
        # Under the name of an input, so that the second half can be cut off here and fed.
        if self.scaling is None:
            divisor = self.writer.input(DIVISOR, _FLOAT)
        else:
            divisor = self.writer.input(SCALE, _FLOAT).op("Identity", into=DIVISOR)
        scaled = {
            name: self._at_boundary(output, GRADIENT, name)
            for name, output in gradients.items()
        }
        unscaled = {
            name: gradient.op("Div", divisor, into=f"{UNSCALED}{name}")
            for name, gradient in scaled.items()
        }
        apply = None
        if self.optimizer.accumulate > 1:
            apply = self.writer.input(APPLY, _BOOL)
            unscaled = self._accumulated(unscaled, apply)
        overflow, norm = self._inspected(unscaled.values())
        happens = self._happens(overflow, apply)
        updates = self._keep(UPDATES, np.zeros((), np.float32))
        following = updates + 1.0
        shared = self.optimizer.shared(following)
        clip = self._clip(norm)
        for name, gradient in unscaled.items():
            clipped = gradient if clip is None else gradient * clip
            self._move(name, clipped, shared, happens)
        skips = self.scaling is not None and self.scaling.skips
        for name, output in statistics.items():
            new = self._at_boundary(output, STATISTIC, name)
            old = self._keep(name, self.state[name])
            self.successors[name] = overflow.where(old, new) if skips else new
        self._replace(updates, following, happens)
        if self.scaling is not None and self.scaling.moves:
            self._move_scale(overflow, apply)
        self.writer.output(Tensor(self.writer, LOSS, _FLOAT), self.loss_dims)
        for result in (overflow, norm):
            self.writer.output(result, ())
        for name, new in self.successors.items():
            shape = self.state[name].shape if name in self.state else ()
            self.writer.output(new.op("Identity", into=f"{NEXT}{name}"), shape)
        return {name: gradient.name for name, gradient in scaled.items()}

    def _at_boundary(self, output: str, where: str, name: str) -> Tensor:
        """Return a value at the boundary of the halves."""
        return Tensor(self.writer, output, _FLOAT).op(
            "Identity", into=f"{where}{name}"
        )

    def _keep(self, name: str, initial: Array) -> Tensor:
        """Add a piece of state, and return the value that the graph reads."""
        self.state[name] = initial
        elem = helper.np_dtype_to_tensor_dtype(initial.dtype)
        return self.writer.input(name, elem, initial.shape)

    def _replace(self, old: Tensor, new: Tensor, happens: Tensor | None) -> None:
        """Record the value that replaces a piece of state if the update happens."""
        self.successors[old.name] = new if happens is None else happens.where(new, old)

    def _accumulated(
        self, gradients: Mapping[str, Tensor], apply: Tensor
    ) -> dict[str, Tensor]:
        """Return the mean of the gradients since the last update."""
        sums = {}
        for name, gradient in gradients.items():
            held = self._keep(f"{SUM}{name}", np.zeros_like(self.state[name]))
            sums[name] = held + gradient * (1 / self.optimizer.accumulate)
            self.successors[held.name] = apply.where(0, sums[name])
        return sums

    def _inspected(self, gradients: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Write whether any gradient holds NaN or Inf (only these are not zero when multiplied by zero), and the norm
        of all.
        """
        gradients = list(gradients)
        zeros = [
            (gradient * 0.0).op("ReduceSum", keepdims=0) for gradient in gradients
        ]
        squares = [
            gradient.op("ReduceSumSquare", keepdims=0) for gradient in gradients
        ]
        zero = zeros[0].op("Sum", *zeros[1:])
        overflow = zero.equals(0).op("Not", into=OVERFLOW)
        square = squares[0].op("Sum", *squares[1:])
        return overflow, square.op("Sqrt", into=NORM)

    def _happens(self, overflow: Tensor, apply: Tensor | None) -> Tensor | None:
        """Return whether the update happens; None for always."""
        if self.scaling is None or not self.scaling.skips:
            return apply
        clean = overflow.op("Not")
        return clean if apply is None else clean.op("And", apply)

    def _clip(self, norm: Tensor) -> Tensor | None:
        """Return the factor that reduces the norm of the gradients to its limit."""
        most = self.optimizer.clip_norm
        if most is None:
            return None
        return (most / (norm + _CLIP_EPSILON)).op("Min", norm.like(1.0))

    def _move(
        self,
        name: str,
        gradient: Tensor,
        shared: Sequence[Tensor],
        happens: Tensor | None,
    ) -> None:
        """Write the successors of a weight and its slots."""
        weight = self._keep(name, self.state[name])
        slots = {
            slot: self._keep(f"train/{slot}/{name}", np.zeros_like(self.state[name]))
            for slot in self.optimizer.slots
        }
        move = Move(
            weight=weight,
            gradient=gradient,
            slots=slots,
            rate=self.writer.input(RATE, _FLOAT),
            decay=self.optimizer.decay_of(name),
            shared=shared,
        )
        new, kept = self.optimizer.move(move)
        self._replace(weight, new, happens)
        for slot, after in kept.items():
            self._replace(slots[slot], after, happens)

    def _move_scale(self, overflow: Tensor, apply: Tensor | None) -> None:
        """Write the next scale (float32) and its counters (int64); :meth:`ScaleState.after` computes the same.

        The factors are ``grow``, ``shrink`` and ``least`` of :class:`ScaleUpdate`; the windows are ``grow_every`` and
        ``shrink_every``.
        """
        kinds = zip(SCALE_STATE, (_FLOAT, _INT64, _INT64), strict=True)
        state = [self.writer.input(name, kind) for name, kind in kinds]
        scale, good, bad = state
        factors = self.writer.input(FACTORS, _FLOAT, (3,))
        windows = self.writer.input(WINDOWS, _INT64, (2,))
        first = self.writer.ints(0)
        second = self.writer.ints(1)
        good = overflow.where(0, good + 1)
        bad = overflow.where(bad + 1, 0)
        grows = good.equals(windows.op("Gather", first))
        shrinks = bad.equals(windows.op("Gather", second))
        larger = (scale * factors.op("Gather", first)).op("Min", scale.like(LARGEST))
        least = factors.op("Gather", self.writer.ints(2))
        smaller = (scale * factors.op("Gather", second)).op("Max", least)
        following = [
            grows.where(larger, shrinks.where(smaller, scale)),
            grows.where(0, good),
            shrinks.where(0, bad),
        ]
        for old, new in zip(state, following, strict=True):
            self._replace(old, new, apply)
