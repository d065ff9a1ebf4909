"""Steps in fixed buffers, so that a CUDA graph can be recorded once and replayed.

The state has two sets of buffers: a step reads one and writes the other, and the next step does the reverse. So one
graph is recorded per direction, no buffer is written while a node may still read it, and ONNX Runtime may run a step
more than once to record it. CUDA graphs require every node on CUDA and thus fixed shapes: each set of input shapes has
its own session and pair of graphs, which live as long as the network.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from onnxamp._errors import RuntimeFailure
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import symbolic_shapes
from onnxamp._model.protos import copy_without
from onnxamp._runtime.session import (
    EXACT,
    Provider,
    bind_values,
    empty_value,
    make_session,
    run,
    run_values,
)
from onnxamp._runtime.values import from_value, to_value
from onnxamp.train._feeds import Feeds
from onnxamp.train._optimizers import NORM, OVERFLOW
from onnxamp.train._step import LOSS

if TYPE_CHECKING:
    import onnxruntime as ort

Arrays = Mapping[str, NDArray[Any]]
Values = Mapping[str, "ort.OrtValue"]


@dataclass(frozen=True, slots=True)
class _Shaped:
    """Buffers for one set of input shapes, and a function that runs a step for each direction."""

    inputs: Values
    results: Values
    runs: tuple[Callable[[], None], Callable[[], None]]


@dataclass(slots=True)
class Recorded:
    """Runs the steps of a model on one provider, with CUDA graphs on "cuda".

    ``successors``: the output that replaces each piece of state; ``results``: other outputs, all scalars.
    """

    model: ModelProto
    provider: Provider
    successors: Mapping[str, str]
    results: Sequence[str]
    _sides: tuple[dict[str, "ort.OrtValue"], ...] = ()
    _turn: int = 0
    _shaped: dict[Any, _Shaped] = field(default_factory=dict)

    def hold(self, state: Arrays) -> Values:
        """Copy a state into the buffers; the values returned are valid until the next step or state."""
        if not self._sides:
            self._sides = tuple(
                {name: empty_value(a, self.provider) for name, a in state.items()} for _ in range(2)
            )
        self._turn = 0
        for name, array in state.items():
            _fill(self._sides[0][name], array)
        return self._sides[0]

    def put(self, arrays: Arrays) -> None:
        """Copy a part of a state into the buffers that the next step reads."""
        for name, array in arrays.items():
            _fill(self._sides[self._turn][name], array)

    def step(self, feeds: Arrays) -> tuple[Values, Values]:
        """Run a step; returns its results and the next state.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run or record the step; the state does not change.
        """
        key = tuple(sorted((name, array.shape) for name, array in feeds.items()))
        if key not in self._shaped:
            self._shaped[key] = self._prepare(feeds)
        shaped = self._shaped[key]
        for name, array in feeds.items():
            _fill(shaped.inputs[name], array)
        shaped.runs[self._turn]()
        self._turn = 1 - self._turn
        return shaped.results, self._sides[self._turn]

    def _prepare(self, feeds: Arrays) -> _Shaped:
        options = {**EXACT, "enable_cuda_graph": "1"} if self.provider == "cuda" else None
        model = with_shapes(self.model, {name: array.shape for name, array in feeds.items()})
        try:
            session = make_session(model, self.provider, cuda_options=options)
        except RuntimeFailure as error:
            raise RuntimeFailure(
                f"{error} The step may run at O1: boost_level O1 records no CUDA graphs."
            ) from error
        inputs = {name: empty_value(array, self.provider) for name, array in feeds.items()}
        kinds = {entry.name: entry.type.tensor_type.elem_type for entry in self.model.graph.output}
        scalars = {
            name: np.zeros((), helper.tensor_dtype_to_np_dtype(kinds[name]))
            for name in self.results
        }
        results = {name: empty_value(array, self.provider) for name, array in scalars.items()}
        first = 2 * len(self._shaped)
        runs = []
        for side, (old, new) in enumerate((self._sides, self._sides[::-1])):
            outputs = {**results, **{output: new[name] for name, output in self.successors.items()}}
            graph = first + side if self.provider == "cuda" else None
            runs.append(bind_values(session, {**inputs, **old}, outputs, graph))
        return _Shaped(inputs, results, (runs[0], runs[1]))


def with_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """The model for inputs of these shapes alone.

    Size becomes a constant where the shape is known: unlike Shape, ONNX Runtime does not fold it, and it would leave a
    copy from host to device in the graph.
    """
    result = copy_without(model, "value_info")
    for entry in result.graph.input:
        if entry.name in shapes:
            kind = entry.type.tensor_type.elem_type
            entry.CopyFrom(helper.make_tensor_value_info(entry.name, kind, shapes[entry.name]))
    graph = Graph.of(result)
    dims = graph.ask(symbolic_shapes)
    for node in (
        graph.nodes[index] for index in graph.scopes[0].nodes if graph.nodes[index].key == "Size"
    ):
        shape = dims[node.inputs[0]]
        known = [dim for dim in shape or () if isinstance(dim, int)]
        if shape is not None and len(known) == len(shape):
            count = helper.make_node(
                "Constant", [], node.proto.output, name=node.proto.name, value_int=prod(known)
            )
            node.proto.CopyFrom(count)
    return result


def _fill(value: "ort.OrtValue", array: NDArray[Any]) -> None:
    value.update_inplace(np.ascontiguousarray(array).reshape(array.shape))


RESULTS: Final = (LOSS, OVERFLOW, NORM)
"""Outputs of a step besides the state."""


@dataclass(slots=True)
class Held:
    """A state by name: arrays, values on the device if ``on_device``, or the buffers of recorded steps."""

    on_device: bool
    recorded: Recorded | None
    items: dict[str, Any] = field(default_factory=dict)

    def hold(self, state: Feeds) -> None:
        """Hold these arrays, and no others."""
        if self.recorded is not None:
            self.items = dict(self.recorded.hold(state))
        else:
            self.items = dict(values_of(state) if self.on_device else state)

    def put(self, part: Feeds) -> None:
        """Replace a part of the state."""
        if self.recorded is not None:
            self.recorded.put(part)
        else:
            self.items |= values_of(part) if self.on_device else part

    def keep(self, values: "Mapping[str, ort.OrtValue]") -> None:
        """Hold these values, which a session left on the device, and no others."""
        if self.on_device and self.recorded is None:
            self.items = dict(values)
        else:
            self.hold({name: np.asarray(from_value(value)) for name, value in values.items()})

    def array(self, name: str) -> NDArray[Any]:
        """An array; what it shows may change with the next step."""
        held = self.items[name]
        return np.asarray(from_value(held)) if self.on_device else held

    def copies(self) -> dict[str, NDArray[Any]]:
        """Copies of all arrays."""
        return {name: np.array(self.array(name)) for name in self.items}

    def values(self) -> "dict[str, ort.OrtValue]":
        """The state as ONNX Runtime's values."""
        return self.items if self.on_device else values_of(self.items)

    def run(
        self, session: "ort.InferenceSession", feeds: Feeds, successors: Mapping[str, str]
    ) -> Feeds:
        """Run a whole step and hold the next state; returns the :data:`RESULTS`.

        Args:
            session: of the step; recorded steps have their own.
            feeds: all inputs that are not state.
            successors: the output that replaces each piece of state.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run the step; the state does not change.
        """
        if self.recorded is not None:
            made, state = self.recorded.step(feeds)
            self.items = dict(state)
            return {name: from_value(value) for name, value in made.items()}
        wanted = [*RESULTS, *successors.values()]
        if self.on_device:
            outputs = run_values(session, {**values_of(feeds), **self.items}, wanted)
            results = {name: from_value(outputs[name]) for name in RESULTS}
        else:
            outputs = run(session, {**feeds, **self.items}, wanted)
            results = {name: outputs[name] for name in RESULTS}
        self.items = {name: outputs[output] for name, output in successors.items()}
        return results


def values_of(arrays: Feeds) -> "dict[str, ort.OrtValue]":
    """Arrays as ONNX Runtime's values."""
    return {name: to_value(array) for name, array in arrays.items()}
