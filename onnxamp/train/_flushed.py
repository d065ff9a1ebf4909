"""Gradients that low precision flushes to zero, found by comparing with the same step in float32."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, nan
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from onnxamp._decide.exponents.relations import ExponentProblem, Window
from onnxamp._decide.exponents.solve import solve
from onnxamp._facts.dtypes import FLOAT, FLOAT16
from onnxamp._gradients.writer import Tensor, Writer
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.protos import copy_without
from onnxamp._numerics.differences.compare import compare
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.sessions.session import Provider, make_session, run
from onnxamp.train._step import LOSS, SCALE, TrainStep

_HEADROOM: Final = 4
"""The factor by which a gradient may grow before it overflows."""

_DIGITS: Final = 8
"""The desired ratio of a gradient's root mean square to the smallest normal number."""


def layers_of(graph: Graph, gradients: Sequence[str]) -> dict[str, int]:
    """Map each float32 value that is linear in the loss scale to the last layer whose gradient depends on it.

    Args:
        graph: a step in float32.
        gradients: names of the values that hold the weights' gradients, in layer order.

    Complexity: linear in the number of reads.
    """
    names = graph.scopes[0].names
    reached = {names[SCALE]} if SCALE in names else set(_seeds(graph))
    for node in graph.order:
        if reached.intersection(node.inputs):
            reached.update(node.outputs)
    layers = {names[name]: layer for layer, name in enumerate(gradients)}
    for node in reversed(graph.order):
        leads = max(
            (layers[value] for value in node.outputs if value in layers),
            default=ABSENT,
        )
        if leads == ABSENT:
            continue
        for value in reached.intersection(node.inputs):
            layers[value] = max(leads, layers.get(value, leads))
    floats = (
        value
        for value in layers
        if graph.types[value] == FLOAT and value != names.get(SCALE)
    )
    return {graph.values[value].name: layers[value] for value in floats}


def _seeds(graph: Graph) -> Iterator[int]:
    """Yield the values of one that gradients start from if the loss is not scaled: values computed from constants after
    it.
    """
    loss = graph.values[graph.scopes[0].names[LOSS]].producer
    for node in graph.nodes[loss + 1 :]:
        if all(
            value == ABSENT or graph.constants.is_constant(value)
            for value in node.inputs
        ):
            yield from node.outputs


def layer_scales(
    layers: Mapping[str, int], sizes: Sequence[Any], count: int, scale: float
) -> list[float]:
    """Return the loss scale of each layer.

    Args:
        layers: as :func:`layers_of` returns.
        sizes: largest magnitude and mean square of each value of ``layers`` in turn, at the loss scale ``scale``.
        count: number of layers.
    """
    problem = ExponentProblem()
    exponents = [problem.variable() for _ in range(count)]
    for layer, exponent in enumerate(exponents):  # the loss follows the last layer
        change = problem.variable()
        behind = [(exponents[layer + 1], -1)] if layer + 1 < count else []
        problem.relations.append(((exponent, 1), *behind, (change, -1)))
        problem.costs[change] = 1
    for layer, window in _windows(layers, sizes):
        known = problem.windows.get(exponents[layer], window)
        least = max(known.least, window.least)
        problem.windows[exponents[layer]] = Window(
            least, max(min(known.most, window.most), least)
        )
    exponents_of = solve(problem).exponents
    return [scale * 2.0 ** -exponents_of[exponent] for exponent in exponents]


def _windows(
    layers: Mapping[str, int], sizes: Sequence[Any]
) -> Iterator[tuple[int, Window]]:
    for number, layer in enumerate(layers.values()):
        largest = float(sizes[2 * number])
        mean = float(sizes[2 * number + 1])
        if np.isfinite(largest) and np.isfinite(mean) and mean:
            least = ceil(log2(largest * _HEADROOM / FLOAT16.max_finite))
            most = floor(log2(mean**0.5 / (_DIGITS * FLOAT16.smallest_normal)))
            yield layer, Window(least, max(least, most))


@dataclass(frozen=True, slots=True)
class FlushedGradient:
    """The gradient of one weight in low precision, compared with float32. Shares of elements are from 0 to 1.

    Attributes:
        elements: number of elements.
        zeros: share that is exactly zero in low precision.
        exact_zeros: share that is exactly zero in float32.
        flushed: share that is exactly zero only in low precision.
        error: L2 norm of the difference divided by that of the float32 gradient; NaN if that is zero. Rounding alone
            makes it 1e-3 to 1e-1 in float16; more means that values were flushed on the way to the weight.
        loss_scale: the power of two that makes the gradients around this weight fit float16, with as
            few changes from layer to layer as possible. If it differs between weights, no single loss scale is enough.
            In bfloat16, it is the current scale.

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
    step: TrainStep,
    feeds: Mapping[str, NDArray[Any]],
    provider: Provider,
) -> dict[str, FlushedGradient]:
    """Compute the gradients of a step in low precision and in float32, and compare them by weight.

    Args:
        low, step: the step in mixed precision (emulated on "cpu") and in float32.
    """
    names = list(step.gradients.values())
    scale = float(feeds[SCALE]) if SCALE in feeds else 1.0
    ready = _with_outputs(low, names)
    if provider == "cpu":
        ready = emulate(ready)
    mine = run(make_session(ready, provider), feeds, names)
    graph = Graph.of(step.model)
    types = Graph.of(low).types  # those other than float16 have float32's range
    layers = layers_of(graph, names) if FLOAT16.tensor in types else {}
    writer = Writer(GraphEditor(graph))
    sizes = list[str]()
    for value in (Tensor(writer, name, TensorProto.FLOAT) for name in layers):
        largest = value.op("Abs").op("ReduceMax", keepdims=0)
        square = (value * value).op("ReduceMean", keepdims=0)
        sizes += [largest.name, square.name]
    wanted = [*names, *sizes]
    exact = _with_outputs(writer.finish(), wanted)
    theirs = run(make_session(exact, provider), feeds, wanted)
    scales = layer_scales(layers, [theirs[name] for name in sizes], len(names), scale)
    return {
        weight: _compared(weight, mine[name], theirs[name], own)
        for (weight, name), own in zip(step.gradients.items(), scales, strict=True)
    }


def _with_outputs(model: ModelProto, names: list[str]) -> ModelProto:
    """Return the model with these values as its outputs."""
    result = copy_without(model, "output")
    result.graph.output.extend(map(helper.make_empty_tensor_value_info, names))
    return result


def _compared(
    weight: str, mine: NDArray[Any], theirs: NDArray[Any], scale: float
) -> FlushedGradient:
    zeros = mine == 0
    exact = theirs == 0
    error = nan if exact.all() else compare(weight, theirs, mine).rel_l2
    flushed = zeros & ~exact
    return FlushedGradient(
        elements=zeros.size,
        zeros=float(zeros.mean()),
        exact_zeros=float(exact.mean()),
        flushed=float(flushed.mean()),
        error=error,
        loss_scale=scale,
    )
