"""Numbers that strain arithmetic: a random model with some constants and inputs of extreme size."""

from collections.abc import Container, Iterable, Iterator
from random import Random

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from .model import Generated

FACTORS = (1e-38, 1e-30, 1e-8, 1e-4, 0.0, 1.0, 1.0, -1.0, 3e3, 1e5, 1e15, 1e30)
SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 65504.0, 3.4028235e38, 1e-45)
FARTHEST = 1e5
"""The largest factor for the ends of a Range, so that it has no more than some million numbers."""


def wild(made: Generated, rng: Random) -> Generated:
    """The model with other numbers: constants and inputs times a factor, some of them with a special number."""
    model = ModelProto()
    model.CopyFrom(made.model)
    # Sizes may follow from numbers, so that what was declared of them is no longer true.
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    numbers = _Numbers(model, rng)
    feeds = {name: numbers.strained(name, value, special=False) for name, value in made.feeds.items()}
    for name, tensor in _tensors(model):
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(numbers.strained(name, array, special=True), tensor.name))
    return Generated(model, feeds, smooth=False, tidy=made.tidy)


class _Numbers:
    """Strains numbers. Those that a Range depends on get no factor that would make it endless."""

    def __init__(self, model: ModelProto, rng: Random) -> None:
        self.rng = rng
        ranges = [node for node in _nodes(model) if node.op_type == "Range"]
        self.steps = _upstream(model, (node.input[2] for node in ranges))
        self.ends = _upstream(model, (name for node in ranges for name in node.input[:2]))

    def strained(self, name: str, value: object, *, special: bool) -> object:
        """The numbers of an input or a constant, most of them times a factor."""
        rng = self.rng
        is_float = isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float64)
        if not is_float or rng.random() < 0.4:
            return value
        factor = rng.choice(FACTORS)
        is_endless = name in self.steps and 0 < abs(factor) < 1
        is_endless |= name in self.ends and factor > FARTHEST
        with np.errstate(over="ignore"):
            array = np.array(value if is_endless else value * factor, value.dtype)
            if rng.random() < 0.2:
                array = np.rint(array)
        if not special:
            array = np.nan_to_num(array)
        elif array.size and rng.random() < 0.15:
            array.reshape(-1)[rng.randrange(array.size)] = rng.choice(SPECIAL)
        return array


def _upstream(model: ModelProto, names: Iterable[str]) -> Container[str]:
    """Values, and all that they are computed from."""
    makers = {}
    for node in _nodes(model):
        makers |= dict.fromkeys(node.output, node)
        # The inputs of a body are computed by its owner.
        makers |= {entry.name: node for body in _bodies(node) for entry in body.input}
    seen = set(names)
    stack = [*seen]
    while stack:
        node = makers.get(stack.pop())
        if node is not None:
            results = [output.name for body in _bodies(node) for output in body.output]
            found = {*node.input, *results} - seen
            seen |= found
            stack += found
    return seen


def _bodies(node: NodeProto) -> list[GraphProto]:
    return [item.g for item in node.attribute if item.HasField("g")]


def _graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The main graph and all bodies."""
    stack = [model.graph]
    while stack:
        graph = stack.pop()
        yield graph
        for node in graph.node:
            stack += _bodies(node)


def _nodes(model: ModelProto) -> list[NodeProto]:
    return [node for graph in _graphs(model) for node in graph.node]


def _tensors(model: ModelProto) -> list[tuple[str, TensorProto]]:
    """The float constants of a model with the names of their values, also those in bodies."""
    found = list[tuple[str, TensorProto]]()
    for graph in _graphs(model):
        found += [(tensor.name, tensor) for tensor in graph.initializer]
        for node in graph.node:
            if node.op_type == "Constant":
                found += [(node.output[0], item.t) for item in node.attribute if item.HasField("t")]
    return [(name, tensor) for name, tensor in found if tensor.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE)]
