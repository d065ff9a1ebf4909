"""Numbers that strain arithmetic: a random model with some constants and inputs of extreme size."""

from random import Random

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from .model import Generated

FACTORS = (1e-38, 1e-30, 1e-8, 1e-4, 0.0, 1.0, 1.0, -1.0, 3e3, 1e5, 1e15, 1e30)
SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 65504.0, 3.4028235e38, 1e-45)


def wild(made: Generated, rng: Random) -> Generated:
    """The model with other numbers: constants and inputs times a factor, some of them with a special number."""
    model = ModelProto()
    model.CopyFrom(made.model)
    # Sizes may follow from numbers, so that what was declared of them is no longer true.
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    feeds = {name: _strained(value, rng, special=False) for name, value in made.feeds.items()}
    for tensor in _tensors(model):
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(_strained(array, rng, special=True), tensor.name))
    return Generated(model, feeds, smooth=False, tidy=made.tidy)


def _strained(value: object, rng: Random, *, special: bool) -> object:
    is_float = isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float64)
    if not is_float or rng.random() < 0.4:
        return value
    with np.errstate(over="ignore"):
        array = np.array(value * rng.choice(FACTORS), value.dtype)
        if rng.random() < 0.2:
            array = np.rint(array)
    if not special:
        array = np.nan_to_num(array)
    elif array.size and rng.random() < 0.15:
        array.reshape(-1)[rng.randrange(array.size)] = rng.choice(SPECIAL)
    return array


def _tensors(model: ModelProto) -> list[TensorProto]:
    """The float constants of a model, also those in bodies."""
    found = list[TensorProto]()
    stack = [model.graph]
    while stack:
        graph = stack.pop()
        found += graph.initializer
        for node in graph.node:
            for item in node.attribute:
                if item.HasField("g"):
                    stack.append(item.g)
                if node.op_type == "Constant" and item.HasField("t"):
                    found.append(item.t)
    return [tensor for tensor in found if tensor.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE)]
