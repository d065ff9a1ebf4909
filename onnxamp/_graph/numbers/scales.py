"""Scales of quantized numbers: their magnitudes, wherever they come from."""

import numpy as np
from numpy.typing import NDArray

from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.known import known_numbers
from onnxamp._model.weights import read_array


def magnitudes(graph: Graph, scale: int) -> NDArray[np.float32] | None:
    """Return the magnitudes of a scale, stored or known though computed; None if it is not known."""
    tensor = graph.constants.tensors.get(graph.constants.source(scale))
    if tensor is None:
        arrays = [
            one.array.reshape(-1)
            for one in graph.ask(known_numbers).numbers.get(scale, ())
        ]
        return np.abs(np.concatenate(arrays).astype(np.float32)) if arrays else None
    return np.abs(read_array(tensor, graph.folder).astype(np.float32))
