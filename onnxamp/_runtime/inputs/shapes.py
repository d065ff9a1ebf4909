"""Shapes of a model's inputs, for given sizes of their open dimensions."""

from collections.abc import Iterable, Iterator, Mapping

from onnx import TensorProto, TensorShapeProto, TypeProto, ValueInfoProto

from onnxamp._runtime.sizes import dim_name, is_open, shape_within


def has_shape(kind: TypeProto) -> bool:
    """Return whether a type is that of a tensor of known rank."""
    return kind.HasField("tensor_type") and kind.tensor_type.HasField("shape")


def dims_of(name: str, shape: TensorShapeProto) -> tuple[int | str, ...]:
    """Return the dimensions of an input: sizes, and names of those that are open."""
    return tuple(
        dim_name(name, axis, dim) if is_open(dim) else dim.dim_value
        for axis, dim in enumerate(shape.dim)
    )


def shape_at(name: str, kind: TypeProto, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an input of a type whose open dimensions have these sizes."""
    shape = shape_within(kind)
    dims = () if shape is None else dims_of(name, shape)
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)


def shape_of(entry: ValueInfoProto, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an input whose open dimensions have these sizes."""
    return shape_at(entry.name, entry.type, sizes)


def inner_dims(entries: Iterable[ValueInfoProto]) -> Iterator[str]:
    """Yield the names of the open dimensions of tensors, apart from leading ones."""
    for entry in entries:
        for axis, dim in enumerate(entry.type.tensor_type.shape.dim):
            if axis and is_open(dim):
                yield dim_name(entry.name, axis, dim)


def image_extent(
    entries: Mapping[int, ValueInfoProto], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the height and width of the images among the inputs."""
    shapes = (
        shape_of(entry, sizes)
        for entry in entries.values()
        if entry.type.tensor_type.elem_type == TensorProto.FLOAT
    )
    return next((shape[-2:] for shape in shapes if len(shape) > 3), (1, 1))
