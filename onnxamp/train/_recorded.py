"""Steps in buffers that stay where they are: what a CUDA graph needs to be recorded once and replayed.

The state lies in two sets of buffers: a step reads one and writes the other, the next step goes back. So a graph is
recorded for each direction, and no buffer is written while a node may still read it. ONNX Runtime runs a step more than
once to record it, which does no harm either: what is read is not written. Its graphs want every node on CUDA, hence
fixed shapes: there is a session, and a pair of graphs, for each set of input shapes, for as long as the network lives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from onnxamp._errors import RuntimeFailure
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import symbolic_shapes
from onnxamp._runtime.bound import bind_values, empty_value
from onnxamp._runtime.session import EXACT, Provider, make_session

if TYPE_CHECKING:
    import onnxruntime as ort

Arrays = Mapping[str, NDArray[Any]]
Values = Mapping[str, "ort.OrtValue"]


@dataclass(frozen=True, slots=True)
class _Shaped:
    """What runs steps of one set of shapes: buffers of inputs and results, and a run from each side to the other."""

    inputs: Values
    results: Values
    runs: tuple[Callable[[], None], Callable[[], None]]


@dataclass(slots=True)
class Recorded:
    """Runs steps of a model on one provider; CUDA graphs are recorded where it is "cuda".

    ``successors``: state -> the output that replaces it; ``results``: other outputs that are wanted.
    """

    model: ModelProto
    provider: Provider
    successors: Mapping[str, str]
    results: Sequence[str]
    _sides: tuple[dict[str, "ort.OrtValue"], ...] = ()
    _turn: int = 0
    _shaped: dict[Any, _Shaped] = field(default_factory=dict)

    def hold(self, state: Arrays) -> Values:
        """Put a state into the buffers; what is returned is read until the next step or the next state."""
        if not self._sides:
            self._sides = tuple({name: empty_value(a, self.provider) for name, a in state.items()} for _ in range(2))
        self._turn = 0
        for name, array in state.items():
            _fill(self._sides[0][name], array)
        return self._sides[0]

    def step(self, feeds: Arrays) -> tuple[Values, Values]:
        """Run a step from the state that is held; returns the results and the next state, which is then held.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run or record the step; the state stays as it was.
        """
        key = tuple(sorted((name, array.shape) for name, array in feeds.items()))
        if key not in self._shaped:
            self._shaped[key] = self._prepared(feeds)
        shaped = self._shaped[key]
        for name, array in feeds.items():
            _fill(shaped.inputs[name], array)
        shaped.runs[self._turn]()
        self._turn = 1 - self._turn
        return shaped.results, self._sides[self._turn]

    def _prepared(self, feeds: Arrays) -> _Shaped:
        options = {**EXACT, "enable_cuda_graph": "1"} if self.provider == "cuda" else None
        model = with_shapes(self.model, {name: array.shape for name, array in feeds.items()})
        try:
            session = make_session(model, self.provider, cuda_options=options)
        except RuntimeFailure as error:
            raise RuntimeFailure(f"{error} A step that boost_level O2 cannot run may run at O1.") from error
        inputs = {name: empty_value(array, self.provider) for name, array in feeds.items()}
        kinds = {entry.name: entry.type.tensor_type.elem_type for entry in self.model.graph.output}
        scalars = {name: np.zeros((), helper.tensor_dtype_to_np_dtype(kinds[name])) for name in self.results}
        results = {name: empty_value(array, self.provider) for name, array in scalars.items()}
        first = 2 * len(self._shaped)
        runs = []
        for side, (old, new) in enumerate((self._sides, self._sides[::-1])):
            outputs = {**results, **{output: new[name] for name, output in self.successors.items()}}
            graph = first + side if self.provider == "cuda" else None
            runs.append(bind_values(session, {**inputs, **old}, outputs, graph))
        return _Shaped(inputs, results, (runs[0], runs[1]))


def with_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """The model for inputs of these shapes alone. Size becomes a constant where the shape is known: ONNX Runtime folds
    Shape by itself, but not Size, which would leave a copy from host to device in the graph.
    """
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.value_info[:]
    for entry in result.graph.input:
        if entry.name in shapes:
            kind = entry.type.tensor_type.elem_type
            entry.CopyFrom(helper.make_tensor_value_info(entry.name, kind, shapes[entry.name]))
    view = Graph.of(result)
    dims = symbolic_shapes(view)
    for node in (view.nodes[index] for index in view.scopes[0].nodes if view.nodes[index].key == "Size"):
        shape = dims[node.inputs[0]]
        known = [dim for dim in shape or () if isinstance(dim, int)]
        if shape is not None and len(known) == len(shape):
            count = helper.make_node("Constant", [], node.proto.output, name=node.proto.name, value_int=prod(known))
            node.proto.CopyFrom(count)
    return result


def _fill(value: "ort.OrtValue", array: NDArray[Any]) -> None:
    value.update_inplace(np.ascontiguousarray(array).reshape(array.shape))
