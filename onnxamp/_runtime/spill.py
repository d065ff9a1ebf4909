"""Writing a model that is too large for one protobuf message: the graph in one file, its weights in another."""

from pathlib import Path
from typing import BinaryIO, Final

from onnx import ModelProto, TensorProto, numpy_helper

from onnxamp._model.external_data import external_tensor
from onnxamp._model.model import Model
from onnxamp._model.protos import copied, copy_without, stored_bytes, tensors_of
from onnxamp._model.weights import embed

_ALIGNMENT: Final = 4096
"""Page size: ONNX Runtime can map tensors that start at a page."""

_KEEP_BELOW: Final = 1024
"""Bytes below which tensors (shapes, axes) stay in the graph, where graph optimisers see them."""

_WEIGHTS: Final = "weights.bin"
"""Name of the file with the weights."""

_LIMIT: Final = 2**31 - 2**24
"""Bytes of weights in one message, which must be smaller than 2 GiB; the rest is for nodes."""


def unfolded(path: Path) -> ModelProto:
    """The model of a file, whose weights are found without its folder.

    Raises:
        ModelError: as :meth:`~onnxamp._model.model.Model.read`. ExternalDataError: weights are not where they may be.
    """
    opened = Model.read(path)
    _ = opened.stock  # looks them up
    return opened.proto


def is_large(model: ModelProto) -> bool:
    """Whether the model cannot be one message: weights above 2 GB, or weights that are not loaded.

    Complexity: linear in the model's initializers; no data are touched.
    """
    tensors = model.graph.initializer
    return any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors) or (
        sum(map(stored_bytes, tensors)) > _LIMIT
    )


def save_spilled(model: ModelProto, folder: Path) -> Path:
    """Write the model into an empty folder, one weight at a time, and return the path of the graph's file.

    Args:
        model: it is not changed. Only initializers of its main graph are moved out.
        folder: an existing folder.

    Raises:
        ExternalDataError: a weight is in a data file.
    """
    shell = copy_without(model, "initializer")
    for tensor in tensors_of(shell):  # those of nodes and bodies
        embed(tensor, None)
    with (folder / _WEIGHTS).open("wb") as file:
        for tensor in model.graph.initializer:
            _spill(tensor, shell.graph.initializer.add(), file)
    path = folder / "model.onnx"
    path.write_bytes(shell.SerializeToString())
    return path


def _spill(source: TensorProto, target: TensorProto, file: BinaryIO) -> None:
    if source.data_location == TensorProto.EXTERNAL:
        source = copied(source)
        embed(source, None)
    if source.data_type == TensorProto.STRING or stored_bytes(source) < _KEEP_BELOW:
        target.CopyFrom(source)
        return
    raw = source.raw_data if source.HasField("raw_data") else _raw(source)
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    target.name, target.data_type = source.name, source.data_type
    target.dims.extend(source.dims)
    target.MergeFrom(external_tensor(_WEIGHTS, file.tell(), len(raw)))
    file.write(raw)


def _raw(tensor: TensorProto) -> bytes:
    return numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
