"""Models without the data of their large weights, which are fed instead."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper

from onnxamp._base.paths import as_path
from onnxamp._facts.dtypes import FLOAT_ELEMS, LOW_ELEMS
from onnxamp._facts.ops import attribute, op_key
from onnxamp._model import weights
from onnxamp._model.protos import (
    copied,
    copy_without,
    drop_named,
    stored_bytes,
    tensors_of,
)
from onnxamp._model.sources import external_tensor
from onnxamp._model.weights import embed, read_array

WEIGHTS_IN_GRAPH: Final = 8 * 2**20
"""Bytes up to which all weights stay in the graph, where kernels see that they are constant. They then take several
times their size: in copies of the graph, and in the session.
"""

LARGE: Final = 64 * 2**10
"""Bytes from which on a weight is large."""


class Shell(NamedTuple):
    """A model in which the initializers in ``weights`` have a name, a type and dims, but no data."""

    model: ModelProto
    weights: Mapping[str, TensorProto]
    base_dir: Path | None

    def array(self, name: str, *, raised: bool) -> npt.NDArray[Any]:
        """Return a weight as an array, memory-mapped where its data are external.

        Args:
            raised: convert low precision to float32.

        Raises:
            ExternalDataError: external data cannot be read. ModelError: the data do not match the shape.
        """
        tensor = self.weights[name]
        array = read_array(tensor, self.base_dir)
        if raised and tensor.data_type in LOW_ELEMS:
            return weights.in_float32(array, tensor.data_type)
        return array

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all weights as they are stored; errors as :meth:`array`."""
        return {name: self.array(name, raised=False) for name in self.weights}

    def fed(self) -> ModelProto:
        """Return the model with its weights as inputs, which sessions do not copy."""
        model = copied(self.model)
        given = {entry.name for entry in model.graph.input}
        for tensor in self.model.graph.initializer:
            if tensor.name in self.weights and tensor.name not in given:
                entry = helper.make_tensor_value_info(
                    tensor.name, tensor.data_type, tensor.dims
                )
                model.graph.input.append(entry)
        drop_named(model.graph.initializer, self.weights)
        return model

    def elsewhere(self) -> ModelProto:
        """Return the model with its weights declared to be in a file that there is not."""
        model = copied(self.model)
        for tensor in model.graph.initializer:
            if tensor.name in self.weights:
                tensor.MergeFrom(external_tensor("nowhere", 0, stored_bytes(tensor)))
        return model


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
    nodes = [node for node in model.graph.node if op_key(node) == "Constant"]
    constants: dict[str, TensorProto] = {
        node.output[0]: tensor
        for node in nodes
        if (tensor := attribute(node, "value")) is not None
    }
    named = {tensor.name: tensor for tensor in model.graph.initializer} | constants
    taken = {
        name: tensor
        for name, tensor in named.items()
        if tensor.data_type in FLOAT_ELEMS and stored_bytes(tensor) >= large
    }
    # Constants let kernels prepare and optimizers fold, which is worth more than memory in a small model.
    if sum(map(stored_bytes, taken.values())) <= keep:
        taken = {}
    graph = result.graph
    for tensor in model.graph.initializer:
        graph.initializer.append(
            _hollow(tensor.name, tensor) if tensor.name in taken else tensor
        )
    for node in model.graph.node:
        is_constant = op_key(node) == "Constant"
        if is_constant and node.output[0] in taken:
            graph.initializer.append(
                _hollow(node.output[0], constants[node.output[0]])
            )
        elif is_constant and (sparse := attribute(node, "sparse_value")) is not None:
            # ONNX Runtime cannot return the output of a Constant that is sparse.
            graph.sparse_initializer.append(sparse)
            graph.sparse_initializer[-1].values.name = node.output[0]
        else:
            graph.node.append(node)
    # Tensors of nodes, bodies and functions as well: ONNX Runtime loads the model from bytes, and finds no files.
    for tensor in tensors_of(result):
        embed(tensor, folder)
    return Shell(result, taken, folder)


def _hollow(name: str, tensor: TensorProto) -> TensorProto:
    return TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
