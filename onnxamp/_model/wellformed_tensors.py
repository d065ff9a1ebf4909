"""Tensors, sparse tensors and declared types that would crash what reads them."""

from math import prod
from typing import Any, Final

import onnx
from onnx import SparseTensorProto, TensorProto, TypeProto, ValueInfoProto, helper

from onnxamp._base.errors import ModelError
from onnxamp._model.protos import DATA_FIELDS, bytes_of, stored_bytes

_ELEMS: Final = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
_MOST_BYTES: Final = 2**63
"""Bytes that no array can address, not even an empty one with other sizes that large."""


_PLAIN: Final = [
    TensorProto.DESCRIPTOR.fields_by_name[name]
    for name in ("dims", "data_type", "name", "raw_data")
]
"""The fields of nearly all weights."""
_FEW: Final = 1 << 16
"""Elements beyond which there are few weights of each form, and a second look at the data takes time."""


def plain_form(tensor: TensorProto) -> tuple[int, ...] | None:
    """Return all that :func:`check_tensor` asks of a tensor with a name, a shape and raw data; None for others."""
    if prod(tensor.dims[:]) > _FEW:
        return None
    listed = tensor.ListFields()
    # A scalar has no dimensions.
    if [field for field, _ in listed] not in (_PLAIN, _PLAIN[1:]):
        return None
    *dims, elem, name, data = (held for _, held in listed)
    shape = dims[0][:] if dims else ()
    return (elem, len(data), *shape) if type(name) is str else None


def check_tensor(tensor: TensorProto, where: str = "") -> None:
    """Refuse a tensor whose data do not match its type and shape. External data are not looked at.

    Raises:
        ModelError: they do not match; messages call an unnamed tensor ``where``.
    """
    name = utf8(tensor.name, "the name of a weight")
    what = f"The weight {name!r}" if name or not where else where
    utf8(tensor.doc_string, "the documentation of a weight")
    elem = tensor.data_type
    shape = tuple(tensor.dims[:])
    if elem not in _ELEMS:
        raise ModelError(
            f"{what} is of element type {elem}, which onnx {onnx.__version__} lacks."
        )
    if min(shape, default=0) < 0 or tensor.HasField("segment"):
        raise ModelError(
            f"{what} cannot be read: its shape {shape} has a negative size, or it is a segment of a tensor."
        )
    if 0 in shape and bytes_of(elem, [dim for dim in shape if dim]) >= _MOST_BYTES:
        raise ModelError(
            f"{what} has the shape {shape}, which is impossible: it is damaged."
        )
    if tensor.data_location == TensorProto.EXTERNAL:
        return
    held = [name for name in DATA_FIELDS if len(getattr(tensor, name))]
    if tensor.HasField("raw_data"):
        size = len(tensor.raw_data)
        wanted = bytes_of(elem, shape)
        unit = "bytes"
        fits = not held and size == wanted and elem != TensorProto.STRING
    else:
        own = helper.tensor_dtype_to_field(elem)
        size = len(getattr(tensor, own))
        wanted = _numbers(tensor)
        unit = "elements"
        fits = held in ([], [own]) and size == wanted
    if not fits:
        raise ModelError(
            f"{what} does not hold the {wanted} {unit} that its shape {shape} requires,"
            " or holds them in the wrong field for its type."
        )


def _numbers(tensor: TensorProto) -> int:
    """Return the entries of the typed data field: one per element, or one per byte for packed types."""
    count = prod(tensor.dims)
    if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return 2 * count  # real and imaginary part
    if tensor.data_type == TensorProto.STRING:  # which has no bytes
        return count
    return min(count, stored_bytes(tensor))


_INDICES: Final = (
    TensorProto.INT8,
    TensorProto.INT16,
    TensorProto.INT32,
    TensorProto.INT64,
)
"""Types of the indices of sparse tensors that ONNX Runtime reads."""


def check_sparse(sparse: SparseTensorProto) -> None:
    """Refuse a sparse tensor whose parts do not fit together or are outside the model file."""
    what = f"The sparse weight {utf8(sparse.values.name, 'the name of a weight')!r}"
    for tensor in (sparse.values, sparse.indices):
        if tensor.data_location == TensorProto.EXTERNAL:
            raise ModelError(
                f"{what} is stored outside the model file, where onnxamp reads only dense weights: load it first"
                " (onnx.external_data_helper.load_external_data_for_tensor), and save the model again."
            )
        check_tensor(tensor, what)
    if min(sparse.dims, default=0) < 0 or len(sparse.values.dims) != 1:
        raise ModelError(
            f"{what} is damaged: its shape is {tuple(sparse.dims)}, and that of its values {tuple(sparse.values.dims)}."
        )
    count = sparse.values.dims[0]
    rank = len(sparse.dims)
    # An index is a number, counted over all elements in order, or a row of one number for each axis.
    forms = ((count,), (count, rank))
    has_form = tuple(sparse.indices.dims) in forms
    if sparse.indices.data_type not in _INDICES or not has_form:
        raise ModelError(
            f"{what} has {count} values, but its indices have another type or shape."
        )


def check_entry(entry: ValueInfoProto) -> None:
    """Refuse a declaration whose name is no text, or whose type onnx does not define."""
    check_type(entry.type, f"{utf8(entry.name, 'the name of a value')!r}")


def check_type(kind: TypeProto, where: str) -> None:
    """Refuse a declared element type that onnx does not define; it may be unknown (0)."""
    while (form := kind.WhichOneof("value")) in (
        "sequence_type",
        "optional_type",
        "map_type",
    ):
        part: Any = getattr(kind, form)
        kind = part.value_type if form == "map_type" else part.elem_type
    if form not in ("tensor_type", "sparse_tensor_type"):
        return
    leaf = kind.tensor_type if form == "tensor_type" else kind.sparse_tensor_type
    if leaf.elem_type not in _ELEMS and leaf.elem_type != TensorProto.UNDEFINED:
        raise ModelError(
            f"{where} is of element type {leaf.elem_type}, which onnx {onnx.__version__} lacks."
        )
    for dim in leaf.shape.dim:
        utf8(dim.dim_param, f"the name of a dimension of {where}")


def utf8(text: Any, what: str) -> str:
    """Return the text, which protobuf returns as bytes if it is not UTF-8."""
    if not isinstance(text, str):
        raise ModelError(f"The model is damaged: {what} is not UTF-8: {text[:60]!r}.")
    return text
