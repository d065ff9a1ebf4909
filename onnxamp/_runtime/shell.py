"""A model without its large weights, so that copies of its graph are cheap, and the weights one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto

from onnxamp._dtypes import FLOAT_ELEMS, LOW_ELEMS
from onnxamp._model import lowering
from onnxamp._model.protos import copy_without, stored_bytes, tensors_of
from onnxamp._model.weights import embed, read_array
from onnxamp._paths.paths import as_path

WEIGHTS_IN_GRAPH: Final = 8 * 2**20
"""Bytes of weights up to which they stay in the graph, where kernels see that they are constant. There they take their
size several times: in copies of the graph, and in the session.
"""

LARGE: Final = 64 * 2**10
"""Bytes from which on a weight is large."""


@dataclass(frozen=True, slots=True)
class Shell:
    """A model in which the initializers in ``weights`` have a name, a type and dims, but no data."""

    model: ModelProto
    weights: Mapping[str, TensorProto] = field(default_factory=dict)
    base_dir: Path | None = None

    def array(self, name: str, *, raised: bool) -> npt.NDArray[Any]:
        """A weight as an array, memory-mapped where its data are external.

        Args:
            raised: convert low precision to float32.

        Raises:
            ExternalDataError: external data cannot be read. ModelError: the data do not match the shape.
        """
        tensor = self.weights[name]
        array = read_array(tensor, self.base_dir)
        return (
            lowering.raised(array, tensor.data_type)
            if raised and tensor.data_type in LOW_ELEMS
            else array
        )


def take_weights(
    model: ModelProto,
    base_dir: str | PathLike[str] | None,
    *,
    keep: int = WEIGHTS_IN_GRAPH,
    large: int = LARGE,
) -> Shell:
    """Separate a model from its large float weights, initializers as well as Constant nodes of the main graph.

    Args:
        model: it is not changed, and its weights are not copied.
        base_dir: folder of external data, if the model has any that is not loaded.
        keep: bytes of large weights up to which all of them stay in the graph.
        large: bytes from which on a weight is large.

    Raises:
        ExternalDataError: external data cannot be read.
    """
    folder = None if base_dir is None else as_path(base_dir)
    result = copy_without(model, "initializer", "node")
    constants = {
        node.output[0]: tensor
        for node in model.graph.node
        if (tensor := _constant(node)) is not None
    }
    named = {tensor.name: tensor for tensor in model.graph.initializer} | constants
    taken = {
        name: tensor
        for name, tensor in named.items()
        if tensor.data_type in FLOAT_ELEMS and stored_bytes(tensor) >= large
    }
    if sum(map(stored_bytes, taken.values())) <= keep:
        taken = {}
    for tensor in model.graph.initializer:
        if tensor.name in taken:
            _add_hollow(result.graph, tensor.name, tensor)
        else:
            result.graph.initializer.append(tensor)
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] in taken:
            _add_hollow(result.graph, node.output[0], constants[node.output[0]])
        elif (
            sparse := _sparse_constant(node)
        ) is not None:  # ONNX Runtime cannot return such a node's output
            added = result.graph.sparse_initializer.add()
            added.CopyFrom(sparse)
            added.values.name = node.output[0]
        else:
            result.graph.node.append(node)
    for tensor in tensors_of(
        result
    ):  # of nodes, bodies and functions, too: ONNX Runtime sees no path outside
        embed(tensor, folder)
    return Shell(result, taken, folder)


def _constant(node: NodeProto) -> TensorProto | None:
    """The tensor of a Constant node; None for sparse tensors, numbers, strings and lists."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return next((item.t for item in node.attribute if item.name == "value"), None)


def _sparse_constant(node: NodeProto) -> SparseTensorProto | None:
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return next(
        (item.sparse_tensor for item in node.attribute if item.name == "sparse_value"), None
    )


def _add_hollow(graph: GraphProto, name: str, tensor: TensorProto) -> None:
    graph.initializer.add(name=name, data_type=tensor.data_type, dims=tensor.dims)
