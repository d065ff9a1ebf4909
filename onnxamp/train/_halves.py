"""A step in two halves: what they pass on to each other, and the sessions that run them.

The halves are cut out of the graph of the whole step as it was converted, so that they compute the same bits.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from onnxamp._errors import ArgumentError, CallOrderError
from onnxamp._graph.graph import Graph
from onnxamp._graph.wiring import wire
from onnxamp._model.protos import copy_without
from onnxamp._runtime.session import Provider, make_session, run_values
from onnxamp._runtime.values import from_value, to_value
from onnxamp.train._step import LOSS, Step
from onnxamp.train._update import DIVISOR, NORM, OVERFLOW, UNSCALED

if TYPE_CHECKING:
    import onnxruntime as ort

Values = dict[str, "ort.OrtValue"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step reports.

    Attributes:
        loss: unscaled.
        overflow: whether a gradient holds NaN or Inf; the update is then skipped, if the loss scale says so.
        scale: the loss scale of this step; 1 without loss scaling.
        grad_norm: L2 norm of all gradients together, unscaled and before clipping.

    Example:
        >>> from onnxamp.train import StepResult
        >>> StepResult(loss=0.25, overflow=False, scale=1024.0, grad_norm=0.5).loss
        0.25
    """

    loss: float
    overflow: bool
    scale: float
    grad_norm: float


class StepArrays(MutableMapping[str, NDArray[np.float32]]):
    """Float32 arrays by name that stay on the device until they are read; those read can be changed in place.

    Setting one checks its shape, and rounds it to float32.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import SGD, build_train_network
        >>> net = build_train_network("models/classifier.onnx", SGD(), "cross-entropy")
        >>> step = net.gradients({"image": np.ones((2, 3, 32, 32), np.float32), "label": np.array([0, 1])})
        >>> for name in step.gradients:
        ...     step.gradients[name] *= 0.5
        >>> result = net.apply(step)
    """

    def __init__(self, values: "Mapping[str, ort.OrtValue]") -> None:
        self._values: dict[str, NDArray[np.float32] | ort.OrtValue] = dict(values)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        held = self._values[name]
        if not isinstance(held, np.ndarray):
            held = self._values[name] = np.array(from_value(held))
        return held

    def __setitem__(self, name: str, array: Any) -> None:
        held = self._values.get(name)
        if held is None:
            raise ArgumentError(f"There is no {name!r}: the names are {', '.join(self._values)}.")
        given, shape = (
            np.array(array),
            tuple(held.shape if isinstance(held, np.ndarray) else held.shape()),
        )
        if given.shape != shape or not np.can_cast(given.dtype, np.float32, "same_kind"):
            raise ArgumentError(
                f"{name!r} takes floats of shape {shape}, not {given.dtype} of shape {given.shape}."
            )
        self._values[name] = given.astype(np.float32, copy=False)

    def __delitem__(self, name: str) -> None:
        raise ArgumentError(
            f"{name!r} cannot be left out; to freeze a weight, build the network without it."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def values_for(self, names: Mapping[str, str]) -> Values:
        """As ONNX Runtime's values, by the inputs that ``names`` gives for them."""
        held = ((names[name], value) for name, value in self._values.items())
        return {
            name: to_value(value) if isinstance(value, np.ndarray) else value
            for name, value in held
        }


@dataclass(slots=True, eq=False)
class StepGradients:
    """The first half of a step: what :meth:`TrainNetwork.gradients` returns and :meth:`TrainNetwork.apply` takes.

    Attributes:
        loss: unscaled.
        scale: what the gradients are multiplied by: the loss scale, or 1 once they are unscaled.
        gradients: a :class:`StepArrays` by weight. What is set or changed in it is what the update uses.
        statistics: a :class:`StepArrays`: what the running statistics of batch normalisations become.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import SGD, build_train_network
        >>> net = build_train_network("models/classifier.onnx", SGD(), "cross-entropy")
        >>> step = net.gradients({"image": np.ones((2, 3, 32, 32), np.float32), "label": np.array([0, 1])})
        >>> step.loss > 0, step.scale, len(step.gradients) > 0
        (True, 1.0, True)
    """

    loss: float
    scale: float
    gradients: StepArrays
    statistics: StepArrays
    loss_scale: float
    """The loss scale of the step, also after the gradients are unscaled."""
    is_unscaled: bool = False
    is_current: bool = True

    def backward(self) -> None:
        """Check that these are gradients that an update can take; they were computed together with the loss.

        Raises:
            CallOrderError: an update was made since, or other gradients were computed.
        """
        if not self.is_current:
            raise CallOrderError(
                "These gradients are out of date: use what the last gradients() returned, once."
            )


@dataclass(slots=True)
class Halves:
    """The sessions of the halves, made when they are first used.

    ``model`` is the step, ready to run on ``provider``.
    """

    step: Step
    model: ModelProto
    provider: Provider
    _sessions: "dict[str, ort.InferenceSession]" = field(default_factory=dict)

    def gradients(self, values: Values) -> tuple[float, StepArrays, StepArrays]:
        """The loss, the scaled gradients, and what the running statistics become."""
        wanted = [LOSS, *self.step.gradients.values(), *self.step.statistics.values()]
        outputs = self._run("gradients", values, wanted)
        parts = (self.step.gradients, self.step.statistics)
        gradients, statistics = (
            StepArrays({name: outputs[met] for name, met in part.items()}) for part in parts
        )
        return float(from_value(outputs[LOSS])), gradients, statistics

    def unscaled(self, first: StepGradients) -> StepArrays:
        """The gradients, divided by their scale."""
        wanted = [f"{UNSCALED}{name}" for name in self.step.gradients]
        outputs = self._run("unscale", self._met(first), wanted)
        return StepArrays(dict(zip(self.step.gradients, outputs.values(), strict=True)))

    def update(self, values: Values, first: StepGradients) -> Values:
        """Whether a gradient overflows, their norm, and the successors of the state."""
        return self._run(
            "update",
            {**values, **self._met(first)},
            [OVERFLOW, NORM, *self.step.successors.values()],
        )

    def _met(self, first: StepGradients) -> Values:
        met = first.gradients.values_for(self.step.gradients) | first.statistics.values_for(
            self.step.statistics
        )
        return met | {DIVISOR: to_value(np.array(first.scale, np.float32))}

    def _run(self, half: str, values: Values, wanted: Sequence[str]) -> Values:
        if half not in self._sessions:
            self._sessions[half] = make_session(
                part_of(self.model, self._boundary(half), wanted), self.provider
            )
        taken = {item.name for item in self._sessions[half].get_inputs()}
        return run_values(
            self._sessions[half], {name: v for name, v in values.items() if name in taken}, wanted
        )

    def _boundary(self, half: str) -> dict[str, tuple[int, ...]]:
        """The values that a half is fed although the whole step computes them, with their shapes."""
        if half == "gradients":
            return {}
        pairs = [*self.step.gradients.items(), *self.step.statistics.items()]
        return {DIVISOR: (), **{met: self.step.state[name].shape for name, met in pairs}}


def part_of(
    model: ModelProto, fed: Mapping[str, Sequence[int]], outputs: Sequence[str]
) -> ModelProto:
    """The part of a model that computes some values of its main graph, given others.

    Args:
        model: any model; it is not changed.
        fed: the shapes of float32 values to feed, in addition to those inputs of the model that are needed.
        outputs: the values to compute.

    Complexity: linear.
    """
    graph = Graph.of(model)
    names, needs = graph.scopes[0].names, wire(graph).needs
    kept = _needed(
        graph,
        needs,
        {names[name] for name in outputs},
        {names[name] for name in fed if name in names},
    )
    result = copy_without(model, "node", "initializer", "input", "output", "value_info")
    read = {graph.values[value].name for index in kept for value in needs[index]}
    result.graph.node.extend(
        graph.nodes[index].proto for index in graph.scopes[0].nodes if index in kept
    )
    result.graph.initializer.extend(
        tensor for tensor in model.graph.initializer if tensor.name in read
    )
    result.graph.input.extend(
        entry for entry in model.graph.input if entry.name in read and entry.name not in fed
    )
    result.graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in fed.items()
        if name in read
    )
    result.graph.output.extend(map(helper.make_empty_tensor_value_info, outputs))
    return result


def _needed(
    graph: Graph, needs: Mapping[int, Sequence[int]], wanted: set[int], fed: set[int]
) -> set[int]:
    """The nodes of the main graph that compute the wanted values from the fed ones."""
    kept, stack = set[int](), list(wanted - fed)
    while stack:
        node = graph.producer(stack.pop())
        if node is not None and node.index not in kept:
            kept.add(node.index)
            stack += [value for value in needs[node.index] if value not in fed]
    return kept
