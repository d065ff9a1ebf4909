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
``train/factors``       by which the graph changes the scale, and after how many updates (``train/windows``); see
                        :func:`onnxamp.train._scaling.update_scale`
state                   weights, running statistics, optimizer slots, counters, by name
======================  ==============================================================================================

Its outputs are ``train/loss`` (unscaled), ``train/overflow``, ``train/norm`` (of all gradients, unscaled, before
clipping) and the successor of each piece of state. Where nodes skip an update whose gradients hold NaN or Inf: then all
state except for the scale and its counters stays, including running statistics.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxamp._dtypes import FLOAT_ELEMS
from onnxamp._errors import ArgumentError, ModelError
from onnxamp._graph.editor import NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import symbolic_shapes
from onnxamp.train._feeds import Classes, Loss
from onnxamp.train._forward import Forward, Mask, as_inputs, find_weights
from onnxamp.train._gradients import differentiate
from onnxamp.train._gradients.writer import Tensor, Writer
from onnxamp.train._optimizers import (
    APPLY,
    DIVISOR,
    FACTORS,
    NORM,
    OVERFLOW,
    RATE,
    SCALE,
    SCALE_STATE,
    STATISTIC,
    SUM,
    WINDOWS,
    Array,
    Optimizer,
    Scaling,
    Update,
    next_of,
)

LOSS: Final = "train/loss"
OWN: Final = "train"
"""What the names of nodes begin with that belong neither to the model nor to its gradients: they stay float32."""


@dataclass(frozen=True, slots=True)
class Step:
    """The graph of a step, in float32.

    ``state``: initial arrays, by input; ``successors``: the output that replaces each, and each part of the loss scale
    that the graph moves; ``weights``: the trained ones among them; ``gradients``: the value that holds the gradient of
    each, scaled as the loss is; ``statistics``: the values that the running statistics become; ``data``: the inputs
    that the caller feeds; ``classes``: what labels may be, if not anything.
    """

    model: ModelProto
    state: Mapping[str, Array]
    successors: Mapping[str, str]
    weights: tuple[str, ...]
    gradients: Mapping[str, str]
    statistics: Mapping[str, str]
    data: tuple[str, ...]
    masks: tuple[Mask, ...]
    scaling: Scaling | None
    classes: Classes | None

    @property
    def scaled(self) -> frozenset[str]:
        """The inputs that hold the loss scale, or sums of gradients that were scaled."""
        return frozenset((SCALE, *(name for name in self.state if name.startswith(SUM))))


def build_step(
    forward: Forward,
    optimizer: Optimizer,
    loss: Loss | None,
    scaling: Scaling | None,
    lacks: Container[str] = (),
) -> Step:
    """Write the graph of a step.

    Args:
        forward: the model in training mode; it is not changed.
        loss: None where the first output of the model is the loss.
        scaling: how the loss is scaled; None for not at all, and then no update is skipped.
        lacks: what the engine cannot run, as in the ``engine.toml`` of a target.

    Raises:
        GradientError: an op has no rule, or there is nothing to train.
        ModelError: the model has no output that could be a loss.
        ArgumentError: the model has a value with the name of the labels.
    """
    model = ModelProto()
    model.CopyFrom(forward.model)
    state: dict[str, Array] = {}
    writer = _writer(model)
    target, classes = _write_loss(model, writer, loss, scaling is not None)
    writer.add_to(model.graph)
    own = {tensor.name for tensor in forward.model.graph.initializer}
    weights = [name for name in find_weights(model, target, own) if optimizer.trains(name)]
    if not weights:
        raise ModelError("No weight of the model matches the optimizer's 'weights'.")
    data = [
        entry.name
        for entry in model.graph.input
        if entry.name not in (SCALE, *(m.name for m in forward.masks))
    ]
    state |= as_inputs(model, weights)
    state |= as_inputs(model, [name for name in forward.statistics if name not in weights])
    gradients = differentiate(model, target, weights, lacks)
    return _with_update(
        model=gradients.model,
        gradients=gradients.outputs,
        forward=forward,
        optimizer=optimizer,
        scaling=scaling,
        state=state,
        data=data,
        classes=classes,
    )


def _with_update(
    model: ModelProto,
    gradients: Mapping[str, str],
    forward: Forward,
    optimizer: Optimizer,
    scaling: Scaling | None,
    state: dict[str, Array],
    data: Sequence[str],
    classes: Classes | None,
) -> Step:
    """Write the update after the gradients."""
    writer = _writer(model)
    writer.prefix = "train/update"
    update = Update(writer, optimizer, scaling, forward, state)
    met = update.write(
        {name: Tensor(writer, output, TensorProto.FLOAT) for name, output in gradients.items()}
    )
    del model.graph.output[:]
    writer.add_to(model.graph)
    kinds = {LOSS: TensorProto.FLOAT, OVERFLOW: TensorProto.BOOL, NORM: TensorProto.FLOAT}
    model.graph.output.extend(
        helper.make_tensor_value_info(name, kind, []) for name, kind in kinds.items()
    )
    settings, moved = _settings(optimizer, scaling)
    arrays = update.state | moved
    listed = {entry.name for entry in model.graph.input}
    for name, array in (arrays | settings).items():
        if name not in listed:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    for name, array in arrays.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.output.append(helper.make_tensor_value_info(next_of(name), kind, array.shape))
    successors = {name: next_of(name) for name in arrays}
    statistics = {name: f"{STATISTIC}{name}" for name in forward.statistics}
    return Step(
        model=model,
        state=update.state,
        successors=successors,
        weights=tuple(gradients),
        gradients=met,
        statistics=statistics,
        data=tuple(data),
        masks=forward.masks,
        scaling=scaling,
        classes=classes,
    )


def _settings(
    optimizer: Optimizer, scaling: Scaling | None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Arrays like the inputs that are fed in every step, and like the parts of a loss scale that the graph moves."""
    scalar = np.zeros((), np.float32)
    settings: dict[str, Array] = {RATE: scalar}
    if optimizer.accumulate > 1:
        settings[APPLY] = np.zeros((), np.bool_)
    if scaling is None:
        return settings | {DIVISOR: scalar}, {}
    if not scaling.moves:
        return settings, {}
    settings |= {FACTORS: np.zeros(2, np.float32), WINDOWS: np.zeros(2, np.int64)}
    count = np.zeros((), np.int64)
    return settings, dict(zip(SCALE_STATE, (scalar, count, count), strict=True))


def _writer(model: ModelProto) -> Writer:
    return Writer(NewNames(Graph.of(model).all_names()), prefix="train/loss")


def _write_loss(
    model: ModelProto, writer: Writer, loss: Loss | None, scaled: bool
) -> tuple[str, Classes | None]:
    """Write the loss, and its scaling; returns the value to differentiate, and what labels may be."""
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in model.graph.output}
    names = [name for name, kind in kinds.items() if kind in FLOAT_ELEMS]
    if loss is not None and loss.output is not None:
        names = [name for name in names if name == loss.output]
    if not names:
        wanted = (
            "float output"
            if loss is None or loss.output is None
            else f"float output {loss.output!r}"
        )
        raise ModelError(f"The model has no {wanted} for the loss.")
    value, classes = Tensor(writer, names[0], kinds[names[0]]).cast(TensorProto.FLOAT), None
    if loss is not None:
        graph = Graph.of(model)
        shapes = dict(
            zip((value.name for value in graph.values), graph.ask(symbolic_shapes), strict=True)
        )
        if loss.label in shapes:
            raise ArgumentError(
                f"The model already has a value named {loss.label!r}: give the labels another name."
            )
        shape, classes = loss.label_shape(shapes[names[0]]), loss.classes(shapes[names[0]])
        model.graph.input.append(helper.make_tensor_value_info(loss.label, loss.label_type, shape))
        value = loss.function(value, Tensor(writer, loss.label, loss.label_type))
    writer.op("Reshape", value, writer.constant(np.zeros(0, np.int64)), into=LOSS)
    if not scaled:
        return LOSS, classes
    model.graph.input.append(helper.make_tensor_value_info(SCALE, TensorProto.FLOAT, []))
    total, scale = Tensor(writer, LOSS, TensorProto.FLOAT), Tensor(writer, SCALE, TensorProto.FLOAT)
    return (total * scale).name, classes
