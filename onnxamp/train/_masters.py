"""Float32 masters for models that were converted before they are trained.

Everything in low precision becomes float32: weights, which are then the masters, and what is computed. Which nodes were
low is remembered, and the step is converted so that they are low again. So a converted model is trained as any other,
with the gradients, kernels and guards of a conversion.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import FLOAT, FORMATS, Format
from onnxamp._errors import ArgumentError, CallOrderError, ModelError
from onnxamp._graph.bodies import inline_functions
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._graph.wiring import wire
from onnxamp._model.lowering import convert
from onnxamp._model.protos import copy_without
from onnxamp._ops.facts import op_facts
from onnxamp._rewrite.casts import remove_redundant_casts
from onnxamp._runtime.emulate import without_rounding
from onnxamp._runtime.session import Provider, make_session, run_values
from onnxamp._runtime.values import from_value, to_value
from onnxamp.train._optimizers import DIVISOR, NORM, OVERFLOW, UNSCALED
from onnxamp.train._step import LOSS, Step

if TYPE_CHECKING:
    import onnxruntime as ort

_LOW: Final = {low.elem: low for low in FORMATS.values()}


@dataclass(frozen=True, slots=True)
class Masters:
    """A model whose floats are float32.

    Attributes:
        model: the model.
        dtype: the low-precision type that it had; None if it had none.
        copies: low-precision initializers of the original that are copies of a float32 one, with its name: they share
            one master.
        lowered: whether a node was in low precision, by label. Nodes that took both are left out, and so are Casts and
            Constants.
    """

    model: ModelProto
    dtype: str | None
    copies: Mapping[str, str]
    lowered: Mapping[str, bool]


def find_masters(model: ModelProto) -> Masters:
    """The float32 model behind a converted one; a model without low-precision values is returned as it is.

    Raises:
        ModelError: float16 and bfloat16 values are mixed.
    """
    inlined = inline_functions(model)
    graph = Graph.of(inlined)
    names = {low.tensor: low.name for low in FORMATS.values()}
    dtypes = {names[kind] for kind in graph.types if kind in names}
    if not dtypes:
        return Masters(model, None, {}, {})
    if len(dtypes) > 1:
        raise ModelError(
            "The model holds float16 and bfloat16 values: training takes one low-precision type."
        )
    copies = _copies(inlined)
    masters = remove_redundant_casts(without_rounding(_prepared(graph, copies)))
    return Masters(masters, dtypes.pop(), copies, _lowered(graph))


def _copies(model: ModelProto) -> dict[str, str]:
    """Low-precision initializers whose names and numbers say that a conversion copied them from float32 ones."""
    listed = {entry.name for entry in model.graph.input}
    exact = {
        t.name: t
        for t in model.graph.initializer
        if t.data_type == TensorProto.FLOAT and t.name not in listed
    }
    copies = {}
    for tensor in model.graph.initializer:
        low = _LOW.get(tensor.data_type)
        stem = tensor.name.rpartition(f"_{low.suffix}")[0] if low is not None else ""
        if (
            low is not None
            and stem in exact
            and exact[stem].dims == tensor.dims
            and tensor.name not in listed
        ):
            ((rounded, _),) = convert([(numpy_helper.to_array(exact[stem]), low.max_finite)], low)
            if rounded == numpy_helper.to_array(tensor).tobytes():
                copies[tensor.name] = stem
    return copies


def _prepared(graph: Graph, copies: Mapping[str, str]) -> ModelProto:
    """A copy with its nodes named by their labels, which Casts that go would change, and casts in place of copies."""
    result = copy_without(graph.model, "initializer", "node")
    result.graph.node.extend(
        helper.make_node("Cast", [exact], [low], f"{low}/copy", to=TensorProto.FLOAT)
        for low, exact in copies.items()
    )
    for index in graph.scopes[0].nodes:
        proto = result.graph.node.add()
        proto.CopyFrom(graph.nodes[index].proto)
        proto.name = graph.nodes[index].label
    result.graph.initializer.extend(
        t for t in graph.model.graph.initializer if t.name not in copies
    )
    return result


def _lowered(graph: Graph) -> dict[str, bool]:
    found: dict[str, set[bool]] = {}
    floats = {FLOAT: False, **{low.tensor: True for low in FORMATS.values()}}
    for node in graph.nodes:
        kinds = {graph.types[value] for value in (*node.inputs, *node.outputs) if value != ABSENT}
        if node.scope == 0 and node.key not in op_facts().idle:
            found.setdefault(node.label, set()).update(
                floats[kind] for kind in kinds if kind in floats
            )
    return {label: sides.pop() for label, sides in found.items() if len(sides) == 1}


def with_arrays(model: ModelProto, arrays: Mapping[str, NDArray[np.float32]]) -> ModelProto:
    """A copy of the model whose initializers hold these numbers, each in the type that it has.

    Finite numbers that a low-precision type cannot hold become its largest.
    """
    result = ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(_tensor(arrays[tensor.name], tensor.name, _LOW.get(tensor.data_type)))
    return result


def _tensor(array: NDArray[np.float32], name: str, low: Format | None) -> TensorProto:
    if low is None:
        return numpy_helper.from_array(array, name)
    ((raw, _),) = convert([(array, low.max_finite)], low)
    return TensorProto(name=name, data_type=low.elem, dims=array.shape, raw_data=raw)


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
