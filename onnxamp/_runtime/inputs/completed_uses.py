"""The uses of a model's inputs, completed with what follows from the sizes of other inputs and from its numbers."""

from collections.abc import Mapping
from math import isqrt

import numpy as np
from onnx import TensorProto, ValueInfoProto

from onnxamp._facts.ops import attribute
from onnxamp._graph.graph import Graph
from onnxamp._runtime.inputs.roles import Role, Use, input_use
from onnxamp._runtime.inputs.shapes import image_extent, inner_dims
from onnxamp._runtime.sizes import Sizes


def completed_uses(
    graph: Graph,
    entries: Mapping[int, ValueInfoProto],
    named: Sizes,
    sizes: Mapping[str, int],
) -> dict[int, Use]:
    """Return the use of each input.

    Args:
        graph: the model.
        entries: its inputs, by value.
        named: their dimensions.
        sizes: those of open dimensions.
    """
    shapes = graph.shapes_at(sizes)
    length = sizes.get(next(inner_dims(entries.values()), ""), 1)
    count = next((sizes[name] for name in named.counted), 0)
    extent = image_extent(entries, sizes)
    may_be_empty = not _has_infinite(graph)
    uses = dict[int, Use]()
    for value in entries:
        use = input_use(graph, value, shapes)
        completed = _completed(use, length, count, extent)
        uses[value] = completed._replace(may_be_empty=may_be_empty)
    return uses


def _completed(use: Use, length: int, count: int, extent: tuple[int, ...]) -> Use:
    """Return a use, completed with the numbers that follow from the sizes of other inputs.

    Args:
        use: the use.
        length: the size of the axis that lengths count along.
        count: the number of patches or features.
        extent: height and width of images.
    """
    match use.role:
        case Role.LENGTH:
            return use._replace(bound=length)
        case Role.GRID:
            # The divisor closest to the root makes the grid as square as it can be.
            rows = next(
                n for n in range(isqrt(max(count, 1)), 0, -1) if count % n == 0
            )
            return use._replace(row=(1, rows, count // rows))
        case Role.EXTENT:
            return use._replace(row=extent)
        case Role.INDEX if use.marker is not None:
            return use._replace(marked=count)
    return use


def _has_infinite(graph: Graph) -> bool:
    """Return whether a number of the model is infinite: a row that it masks as a whole is not a number."""
    held = (
        attribute(node.proto, "value_float") for node in graph.nodes_of({"Constant"})
    )
    tensors = graph.constants.tensors.items()
    stored = [
        value
        for value, tensor in tensors
        if tensor.data_location != TensorProto.EXTERNAL
    ]
    numbers = [graph.constants.scalar(value) for value in stored]
    return any(
        number is not None and not np.isfinite(number) for number in (*held, *numbers)
    )
