"""Copies of types, tensors and attributes in which low precision is float32."""

from onnx import AttributeProto, SparseTensorProto, TensorProto, TypeProto, numpy_helper

from onnxamp._dtypes import LOW_ELEMS
from onnxamp._errors import ModelError
from onnxamp._model.protos import BaseDir, copied, copy_fields
from onnxamp._model.weights import embed


def upcast_type(proto: TypeProto) -> None:
    """Replace low element types by float32 inside a type, at any depth, in place."""
    kind = proto.WhichOneof("value")
    while kind in ("sequence_type", "optional_type", "map_type"):
        if kind == "map_type":
            proto = proto.map_type.value_type
        else:
            proto = (
                proto.sequence_type.elem_type
                if kind == "sequence_type"
                else proto.optional_type.elem_type
            )
        kind = proto.WhichOneof("value")
    leaf = proto.sparse_tensor_type if kind == "sparse_tensor_type" else proto.tensor_type
    if kind is not None and leaf.elem_type in LOW_ELEMS:
        leaf.elem_type = TensorProto.FLOAT


def upcast_tensor(source: TensorProto, target: TensorProto, base_dir: BaseDir) -> None:
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
        source = copied(source)
        embed(source, base_dir)
    copy_fields(source, target, but=_PAYLOAD)
    target.data_type = TensorProto.FLOAT
    try:
        numbers = numpy_helper.to_array(source)
    except ValueError as error:
        raise ModelError(
            f"The tensor {source.name!r} does not hold what its shape says: {error}."
        ) from error
    target.raw_data = numbers.astype("<f4").tobytes()


_PAYLOAD = frozenset({"data_type", "raw_data", "int32_data", "external_data", "data_location"})


def upcast_sparse(source: SparseTensorProto, target: SparseTensorProto, base_dir: BaseDir) -> None:
    """Like :func:`upcast_tensor`, for the values of a sparse tensor."""
    copy_fields(source, target, but={"values"})
    upcast_tensor(source.values, target.values, base_dir)


def upcast_attribute(source: AttributeProto, target: AttributeProto, base_dir: BaseDir) -> None:
    """Copy an attribute without its graphs; tensors and types in it lose their low element types."""
    copy_fields(
        source, target, but={"t", "tensors", "sparse_tensor", "sparse_tensors", "g", "graphs"}
    )
    if source.HasField("t"):
        upcast_tensor(source.t, target.t, base_dir)
    for tensor in source.tensors:
        upcast_tensor(tensor, target.tensors.add(), base_dir)
    if source.HasField("sparse_tensor"):
        upcast_sparse(source.sparse_tensor, target.sparse_tensor, base_dir)
    for sparse in source.sparse_tensors:
        upcast_sparse(sparse, target.sparse_tensors.add(), base_dir)
    if source.HasField("tp"):
        upcast_type(target.tp)
    for proto in target.type_protos:
        upcast_type(proto)
