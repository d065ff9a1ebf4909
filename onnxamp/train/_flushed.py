"""Which gradients low precision flushes to zero: those of a step, beside those of the same step in float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto, helper

from onnxamp._graph.graph import Graph
from onnxamp._model.copying import copy_without
from onnxamp._numerics.compare import compare
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.session import Provider, make_session, run
from onnxamp.train._layer_scales import holds_float16, layer_scales, layers_of, with_sizes
from onnxamp.train._update import SCALE


@dataclass(frozen=True, slots=True)
class FlushedGradient:
    """The gradient of one weight in low precision, beside that in float32. Shares of elements are from 0 to 1.

    Attributes:
        elements: number of elements.
        zeros: share that is exactly zero in low precision.
        exact_zeros: share that is exactly zero in float32.
        flushed: share that is exactly zero in low precision alone.
        error: L2 norm of the difference by that of the float32 gradient; NaN where that is zero. Rounding alone makes
            it 1e-3 to 1e-1 in float16; more means that values were flushed on the way to the weight.
        loss_scale: the power of two with which the gradients around this weight alone would fit float16: changed as
            rarely from layer to layer as possible. Where one differs from the others, no single loss scale does for
            all. In bfloat16 it is the present one.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import SGD, build_train_network
        >>> net = build_train_network("models/classifier.onnx", SGD(), "cross-entropy", level="O2")
        >>> batch = {"image": np.ones((2, 3, 32, 32), np.float32), "label": np.array([0, 1])}
        >>> all(0 <= gradient.flushed <= gradient.zeros <= 1 for gradient in net.flushed(batch).values())
        True
    """

    elements: int
    zeros: float
    exact_zeros: float
    flushed: float
    error: float
    loss_scale: float = 1.0


def flushed_gradients(
    low: ModelProto,
    exact: ModelProto,
    gradients: Mapping[str, str],
    feeds: Mapping[str, NDArray[Any]],
    provider: Provider,
) -> dict[str, FlushedGradient]:
    """Compute the gradients of a step in low precision and in float32, and compare them by weight.

    Args:
        low, exact: the step in mixed precision (emulated on "cpu"), and in float32.
        gradients: the value that holds the gradient of each weight, scaled as the loss is.
    """
    names, scale = list(gradients.values()), float(feeds[SCALE]) if SCALE in feeds else 1.0
    ready = _with_outputs(low, names)
    mine = run(make_session(emulate(ready) if provider == "cpu" else ready, provider), feeds, names)
    layers = layers_of(Graph.of(exact), names) if holds_float16(low) else {}
    nodes, sizes = with_sizes(exact, list(layers))
    measured = _with_outputs(exact, [*names, *sizes])
    measured.graph.node.extend(nodes)
    theirs = run(make_session(measured, provider), feeds, [*names, *sizes])
    scales = layer_scales(layers, [theirs[name] for name in sizes], len(names), scale)
    return {
        weight: _compared(weight, mine[name], theirs[name], own)
        for (weight, name), own in zip(gradients.items(), scales, strict=True)
    }


def _with_outputs(model: ModelProto, names: list[str]) -> ModelProto:
    """The model with these values as its outputs."""
    result = copy_without(model, "output")
    result.graph.output.extend(map(helper.make_empty_tensor_value_info, names))
    return result


def _compared(weight: str, mine: NDArray[Any], theirs: NDArray[Any], scale: float) -> FlushedGradient:
    zeros, exact = mine == 0, theirs == 0
    error = nan if exact.all() else compare(weight, theirs, mine).rel_l2
    flushed = zeros & ~exact
    return FlushedGradient(zeros.size, float(zeros.mean()), float(exact.mean()), float(flushed.mean()), error, scale)
