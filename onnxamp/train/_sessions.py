"""Steps in sessions of ONNX Runtime, whole or in halves, with a state that is kept between them.

Recorded steps run in fixed buffers, so that a CUDA graph can be recorded once and replayed. The state has two sets of
buffers: a step reads one and writes the other, and the next step does the reverse. Therefore one graph is recorded per
direction, no buffer is written while a node may still read it, and ONNX Runtime may run a step more than once to record
it. CUDA graphs require every node to run on CUDA, and thus fixed shapes: each set of input shapes has its own session
and pair of graphs, which live as long as the network.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from onnxamp._base.errors import ArgumentError, CallOrderError, RuntimeFailure
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.wiring import wire
from onnxamp._model.protos import copy_without
from onnxamp._options.values import checked_array
from onnxamp._runtime.sessions.session import (
    EXACT,
    Provider,
    bind_values,
    empty_value,
    make_session,
    run_values,
)
from onnxamp._runtime.sessions.values import from_value, to_value
from onnxamp.train._batches import Feeds
from onnxamp.train._step import (
    DIVISOR,
    LOSS,
    NORM,
    OVERFLOW,
    RESULTS,
    UNSCALED,
    TrainStep,
)

if TYPE_CHECKING:
    import onnxruntime as ort

Values = dict[str, "ort.OrtValue"]


@dataclass(slots=True)
class NetworkState:
    """The state of a network by name, as ONNX Runtime values, on the device if ``on_device``."""

    successors: Mapping[str, str]
    """The output that replaces each piece of state."""
    on_device: bool
    items: Values = field(default_factory=dict)

    def hold(self, state: Feeds) -> None:
        """Replace the state with these arrays."""
        self.items = values_of(state)

    def put(self, part: Feeds) -> None:
        """Replace a part of the state."""
        self.items |= values_of(part)

    def keep(self, outputs: Values) -> None:
        """Keep the successors of the state among these outputs of a session, and nothing else."""
        following = {name: outputs[output] for name, output in self.successors.items()}
        if not self.on_device:
            # Copies, because values that share an array's memory do not own it.
            arrays = {name: np.array(from_value(v)) for name, v in following.items()}
            following = values_of(arrays)
        self.items = following

    def array(self, name: str) -> NDArray[Any]:
        """Return an array; its contents may change with the next step."""
        return np.asarray(from_value(self.items[name]))

    def copies(self) -> dict[str, NDArray[Any]]:
        """Return copies of all arrays."""
        return {name: self.array(name).copy() for name in self.items}

    def run(self, session: "ort.InferenceSession", feeds: Feeds) -> Feeds:
        """Run a whole step, keep the next state, and return the :data:`RESULTS`.

        Args:
            session: the session of the step; recorded steps have their own.
            feeds: all inputs except the state.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run the step; the state does not change.
        """
        wanted = [*RESULTS, *self.successors.values()]
        outputs = run_values(session, values_of(feeds) | self.items, wanted)
        self.keep(outputs)
        return {name: from_value(outputs[name]) for name in RESULTS}


class _Shaped(NamedTuple):
    """Buffers for one set of input shapes, and a function that runs a step for each direction."""

    inputs: Values
    results: Values
    runs: Sequence[Callable[[], None]]


@dataclass(slots=True)
class Recorded(NetworkState):
    """The state in the buffers of recorded steps of ``model``, with CUDA graphs on "cuda"."""

    model: ModelProto = field(kw_only=True)
    provider: Provider = field(kw_only=True)
    _sides: tuple[Values, ...] = ()
    _turn: int = 0
    _shaped: dict[Any, _Shaped] = field(default_factory=dict)

    def hold(self, state: Feeds) -> None:
        """Copy the state into the buffers."""
        if not self._sides:
            self._sides = (self._buffers(state), self._buffers(state))
        self._turn = 0
        self.items = self._sides[0]
        self.put(state)

    def _buffers(self, arrays: Feeds) -> Values:
        """Return buffers for arrays like these."""
        return {
            name: empty_value(array, self.provider) for name, array in arrays.items()
        }

    def put(self, part: Feeds) -> None:
        """Copy a part of the state into the buffers that the next step reads."""
        _fill(self.items, part)

    def keep(self, outputs: Values) -> None:
        """Copy the successors of the state among these outputs of a session into the buffers."""
        pairs = self.successors.items()
        self.hold(
            {name: np.asarray(from_value(outputs[output])) for name, output in pairs}
        )

    def run(self, session: "ort.InferenceSession", feeds: Feeds) -> Feeds:  # noqa: ARG002
        """Run a recorded step; see :meth:`NetworkState.run`.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run or record the step; the state does not change.
        """
        key = tuple(sorted((name, array.shape) for name, array in feeds.items()))
        if key not in self._shaped:
            self._shaped[key] = self._prepare(feeds)
        shaped = self._shaped[key]
        _fill(shaped.inputs, feeds)
        shaped.runs[self._turn]()
        self._turn = 1 - self._turn
        self.items = self._sides[self._turn]
        return {name: from_value(value) for name, value in shaped.results.items()}

    def _prepare(self, feeds: Feeds) -> _Shaped:
        options = None
        if self.provider == "cuda":
            options = {**EXACT, "enable_cuda_graph": "1"}
        shapes = {name: array.shape for name, array in feeds.items()}
        model = with_shapes(self.model, shapes)
        try:
            session = make_session(model, self.provider, cuda_options=options)
        except RuntimeFailure as error:
            raise RuntimeFailure(
                f"{error} The step may run at O1: boost_level O1 records no CUDA graphs."
            ) from error
        inputs = self._buffers(feeds)
        arrays = {
            LOSS: _loss_buffer(model),
            OVERFLOW: np.zeros((), np.bool_),
            NORM: np.zeros((), np.float32),
        }
        results = self._buffers(arrays)
        runs = []
        ways = (self._sides, self._sides[::-1])
        for side, (old, new) in enumerate(ways):
            following = {output: new[name] for name, output in self.successors.items()}
            # Numbers of CUDA graphs must differ within a session; these differ within the network.
            graph = 2 * len(self._shaped) + side if self.provider == "cuda" else None
            runs.append(bind_values(session, inputs | old, results | following, graph))
        return _Shaped(inputs, results, runs)


def _loss_buffer(model: ModelProto) -> NDArray[np.float32]:
    """Return an array for the loss of a step whose inputs have known shapes.

    Raises:
        RuntimeFailure: the input shapes do not determine the shape of the loss.
    """
    (entry,) = (output for output in model.graph.output if output.name == LOSS)
    declared = entry.type.tensor_type.shape.dim
    if not declared:
        return np.zeros((), np.float32)
    graph = Graph.of(model)
    dims = graph.dims[graph.scopes[0].names[LOSS]] or (None,)
    if not all(isinstance(dim, int) for dim in dims):
        raise RuntimeFailure(
            "The shape of the loss is unknown. The step may run at O1: boost_level O1 needs no buffers."
        )
    return np.zeros([int(str(dim)) for dim in dims], np.float32)


def with_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """Return the model specialized to inputs of these shapes.

    A Size of a known shape becomes a constant: ONNX Runtime folds Shape but not Size, which would leave a copy from
    host to device in the graph.
    """
    shaped = copy_without(model, "value_info")
    for entry in shaped.graph.input:
        if entry.name in shapes:
            kind = entry.type.tensor_type.elem_type
            entry.CopyFrom(
                helper.make_tensor_value_info(entry.name, kind, shapes[entry.name])
            )
    graph = Graph.of(shaped)
    editor = GraphEditor(graph, shaped)
    dims = graph.dims
    for node in graph.nodes_of(["Size"]):
        shape = dims[node.inputs[0]]
        known = [dim for dim in shape or () if isinstance(dim, int)]
        if shape is not None and len(known) == len(shape) and node.scope == 0:
            output = node.proto.output
            name = node.proto.name
            constant = editor.make("Constant", [], output, name, value_int=prod(known))
            editor.replace(node.index, [constant])
    return editor.finish()


def _fill(values: Values, arrays: Feeds) -> None:
    for name, array in arrays.items():
        values[name].update_inplace(np.ascontiguousarray(array).reshape(array.shape))


def values_of(arrays: Feeds) -> Values:
    """Return arrays as ONNX Runtime values."""
    return {name: to_value(array) for name, array in arrays.items()}


class HasLoss:
    """An object with a ``loss`` that can be read like a tensor of MindSpore or Paddle."""

    __slots__ = ()
    loss: float | NDArray[np.float32]

    def numpy(self) -> NDArray[np.float32]:
        """Return the loss as an array."""
        return np.asarray(self.loss, np.float32)

    asnumpy = numpy

    def item(self) -> float:
        """Return the loss as a number."""
        return float(self.numpy().item())

    __float__ = item


def loss_of(array: NDArray[np.float32]) -> float | NDArray[np.float32]:
    """Return the loss that a step reports: a number, or one for each sample."""
    return np.array(array) if array.ndim else float(array)


@dataclass(frozen=True, slots=True)
class StepResult(HasLoss):
    """The result of one step. ``loss, overflow, scale = result`` unpacks it.

    Attributes:
        loss: the unscaled loss: a number, or an array if the loss is not a scalar.
        overflow: whether a gradient holds NaN or Inf; the loss scale decides whether the update is then skipped.
        scale: the loss scale of this step; 1 without loss scaling.
        grad_norm: L2 norm of all gradients together, unscaled and before clipping.

    Example:
        >>> from onnxamp.train import StepResult
        >>> StepResult(loss=0.25, overflow=False, scale=1024.0, grad_norm=0.5).loss
        0.25
    """

    loss: float | NDArray[np.float32]
    overflow: bool
    scale: float
    grad_norm: float

    def __iter__(self) -> Iterator[Any]:
        return iter((self.loss, self.overflow, self.scale))


class StepArrays(MutableMapping[str, NDArray[np.float32]]):
    """Float32 arrays by name that stay on the device until they are read, and can then be changed in place.

    Setting an array checks its shape and rounds it to float32.

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
        if name not in self._values:
            raise ArgumentError(
                f"There is no {name!r}: the names are {', '.join(self._values)}."
            )
        given = checked_array(f"The array {name!r}", array)
        shape = self[name].shape
        is_float = np.can_cast(given.dtype, np.float32, "same_kind")
        if given.shape != shape or not is_float:
            raise ArgumentError(
                f"{name!r} takes floats of shape {shape}, not {given.dtype} of shape {given.shape}."
            )
        self._values[name] = given.astype(np.float32)

    def __delitem__(self, name: str) -> None:
        raise ArgumentError(
            f"{name!r} cannot be left out; to freeze a weight, build the network without it."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def values_for(self, names: Mapping[str, str]) -> Values:
        """Return the arrays as ONNX Runtime values, by the input names in ``names``."""
        return {
            names[name]: to_value(value) if isinstance(value, np.ndarray) else value
            for name, value in self._values.items()
        }


@dataclass(slots=True, eq=False)
class StepGradients(HasLoss):
    """The first half of a step: the result of :meth:`TrainNetwork.gradients` and the input of
    :meth:`TrainNetwork.apply`.

    Attributes:
        loss: the unscaled loss: a number, or an array if the loss is not a scalar.
        scale: the factor in the gradients: the loss scale, or 1 once they are unscaled.
        gradients: a :class:`StepArrays` by weight. The update uses any changes that you make to it.
        statistics: a :class:`StepArrays`: the new running statistics of batch normalizations.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import SGD, build_train_network
        >>> net = build_train_network("models/classifier.onnx", SGD(), "cross-entropy")
        >>> step = net.gradients({"image": np.ones((2, 3, 32, 32), np.float32), "label": np.array([0, 1])})
        >>> step.loss > 0, step.scale, len(step.gradients) > 0
        (True, 1.0, True)
    """

    loss: float | NDArray[np.float32]
    scale: float
    gradients: StepArrays
    statistics: StepArrays
    loss_scale: float
    """The loss scale of the step, even after the gradients are unscaled."""
    is_unscaled: bool = False
    is_current: bool = True

    def backward(self) -> None:
        """Check that an update can still use these gradients, which were computed together with the loss.

        Raises:
            CallOrderError: an update has been made since, or other gradients have been computed.
        """
        if not self.is_current:
            raise CallOrderError(
                "These gradients are out of date: use what the last gradients() returned, once."
            )


@dataclass(slots=True)
class Halves:
    """The sessions of the two halves of a step, created on first use.

    ``model`` is the step, ready to run on ``provider``.
    """

    step: TrainStep
    model: ModelProto
    provider: Provider
    _sessions: "dict[str, ort.InferenceSession]" = field(default_factory=dict)

    def gradients(self, values: Values, scale: float) -> StepGradients:
        """Return the loss, the gradients scaled by ``scale``, and the new running statistics."""
        gradients = self.step.gradients
        statistics = self.step.statistics
        wanted = [LOSS, *gradients.values(), *statistics.values()]
        outputs = self._run("gradients", values, wanted, {})
        return StepGradients(
            loss=loss_of(from_value(outputs[LOSS])),
            scale=scale,
            gradients=StepArrays({name: outputs[v] for name, v in gradients.items()}),
            statistics=StepArrays(
                {name: outputs[v] for name, v in statistics.items()}
            ),
            loss_scale=scale,
        )

    def unscaled(self, first: StepGradients) -> StepArrays:
        """Return the gradients, divided by their scale."""
        wanted = [f"{UNSCALED}{name}" for name in self.step.gradients]
        outputs = self._run("unscale", {}, wanted, self._fed(first))
        return StepArrays(
            dict(zip(self.step.gradients, outputs.values(), strict=True))
        )

    def update(self, values: Values, first: StepGradients) -> Values:
        """Return whether a gradient overflows, the norm of the gradients, and the successors of the state."""
        wanted = [OVERFLOW, NORM, *self.step.successors.values()]
        return self._run("update", values, wanted, self._fed(first))

    def _fed(self, first: StepGradients) -> Values:
        """Return the inputs of a half step that the whole step computes itself."""
        gradients = first.gradients.values_for(self.step.gradients)
        statistics = first.statistics.values_for(self.step.statistics)
        divisor = to_value(np.array(first.scale, np.float32))
        return gradients | statistics | {DIVISOR: divisor}

    def _run(
        self, half: str, values: Values, wanted: Sequence[str], fed: Values
    ) -> Values:
        if half not in self._sessions:
            shapes = {name: value.shape() for name, value in fed.items()}
            model = part_of(self.model, shapes, wanted)
            self._sessions[half] = make_session(model, self.provider)
        session = self._sessions[half]
        given = values | fed
        # A half needs only some of the inputs, and ONNX Runtime refuses others.
        feeds = {entry.name: given[entry.name] for entry in session.get_inputs()}
        return run_values(session, feeds, wanted)


def part_of(
    model: ModelProto, fed: Mapping[str, Sequence[int]], outputs: Sequence[str]
) -> ModelProto:
    """Return the part of a model that computes some values of its main graph, given others.

    Args:
        model: any model; it is not changed.
        fed: the shapes of the float32 values to feed, in addition to the model inputs that are needed.
        outputs: the values to compute.

    Complexity: linear.
    """
    graph = Graph.of(model)
    names = graph.scopes[0].names
    needs = wire(graph).needs
    given = {names[name] for name in fed if name in names}
    kept = set[int]()
    stack = [names[name] for name in outputs]
    read = set[str]()
    while stack:
        value = stack.pop()
        read.add(graph.values[value].name)
        node = None if value in given else graph.producer(value)
        if node is not None and node.index not in kept:
            kept.add(node.index)
            stack += needs[node.index]
    result = copy_without(
        model, "node", "initializer", "input", "output", "value_info"
    )
    part = result.graph
    part.node.extend(
        graph.nodes[index].proto for index in graph.scopes[0].nodes if index in kept
    )
    part.initializer.extend(
        tensor for tensor in model.graph.initializer if tensor.name in read
    )
    part.input.extend(
        entry
        for entry in model.graph.input
        if entry.name in read and entry.name not in fed
    )
    part.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in fed.items()
        if name in read
    )
    part.output.extend(map(helper.make_empty_tensor_value_info, outputs))
    return result
