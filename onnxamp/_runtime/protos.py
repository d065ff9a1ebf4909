"""Copying ONNX protos piece by piece, so that no step ever holds or serialises a whole model.

A model of more than 2 GB cannot be serialised as one message, so nothing here calls ``SerializeToString``.
"""

from collections.abc import Container
from os import PathLike
from typing import Final

from google.protobuf.message import Message
from onnx import AttributeProto, SparseTensorProto, TensorProto, TypeProto, numpy_helper

from onnxamp._dtypes import LOW_TYPES
from onnxamp._errors import ModelError
from onnxamp._model.weights import embed

LOW_ELEMS: Final = frozenset(low.elem for low in LOW_TYPES.values())
"""Element type numbers of the low-precision formats."""

BaseDir = str | PathLike[str] | None
"""Folder that external data lies in; None: tensors must hold their data."""


def copy_fields(source: Message, target: Message, but: Container[str] = ()) -> None:
    """Copy all set fields of a message except those named in ``but``. Unknown fields are not copied."""
    for field, value in source.ListFields():
        if field.name in but:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def raise_type(proto: TypeProto) -> None:
    """Replace low element types by float32 inside a type, at any depth, in place."""
    kind = proto.WhichOneof("value")
    while kind in ("sequence_type", "optional_type", "map_type"):
        if kind == "map_type":
            proto = proto.map_type.value_type
        else:
            proto = proto.sequence_type.elem_type if kind == "sequence_type" else proto.optional_type.elem_type
        kind = proto.WhichOneof("value")
    leaf = proto.sparse_tensor_type if kind == "sparse_tensor_type" else proto.tensor_type
    if kind is not None and leaf.elem_type in LOW_ELEMS:
        leaf.elem_type = TensorProto.FLOAT


def raise_tensor(source: TensorProto, target: TensorProto, base_dir: BaseDir) -> None:
    """Copy a tensor; low values become the float32 numbers that they are.

    Args:
        source: any tensor; it is not changed.
        target: an empty tensor to fill.
        base_dir: where external data lies. If None, external tensors of other types are copied as references.

    Raises:
        ExternalDataError: the data of an external tensor are needed and cannot be read.
        ModelError: a low tensor holds fewer or more numbers than its shape says.
    """
    if source.data_type not in LOW_ELEMS:
        target.CopyFrom(source)
        if base_dir is not None:
            embed(target, base_dir)
        return
    if source.data_location == TensorProto.EXTERNAL:
        loaded = TensorProto()
        loaded.CopyFrom(source)
        embed(loaded, base_dir)
        source = loaded
    copy_fields(source, target, but=_PAYLOAD)
    target.data_type = TensorProto.FLOAT
    try:
        numbers = numpy_helper.to_array(source)
    except ValueError as error:
        raise ModelError(f"The tensor {source.name!r} does not hold what its shape says: {error}.") from error
    target.raw_data = numbers.astype("<f4").tobytes()


_PAYLOAD = frozenset({"data_type", "raw_data", "int32_data", "external_data", "data_location"})


def raise_sparse(source: SparseTensorProto, target: SparseTensorProto, base_dir: BaseDir) -> None:
    """Like :func:`raise_tensor`, for the values of a sparse tensor."""
    copy_fields(source, target, but={"values"})
    raise_tensor(source.values, target.values, base_dir)


def raise_attribute(source: AttributeProto, target: AttributeProto, base_dir: BaseDir) -> None:
    """Copy an attribute without its graphs; tensors and types in it lose their low element types."""
    copy_fields(source, target, but={"t", "tensors", "sparse_tensor", "sparse_tensors", "g", "graphs"})
    if source.HasField("t"):
        raise_tensor(source.t, target.t, base_dir)
    for tensor in source.tensors:
        raise_tensor(tensor, target.tensors.add(), base_dir)
    if source.HasField("sparse_tensor"):
        raise_sparse(source.sparse_tensor, target.sparse_tensor, base_dir)
    for sparse in source.sparse_tensors:
        raise_sparse(sparse, target.sparse_tensors.add(), base_dir)
    if source.HasField("tp"):
        raise_type(target.tp)
    for proto in target.type_protos:
        raise_type(proto)
