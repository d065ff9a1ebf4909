"""Best-effort shapes and element counts of values, which weigh costs and never decide legality."""

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from math import inf, prod

import onnx.shape_inference
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
)

from onnxamp._facts.dtypes import elem_of
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._graph.view import ABSENT, Origin, View, scope_graphs, stored_tensors
from onnxamp._model.protos import (
    all_nodes,
    copy_fields,
    node_bodies,
    nodes_of_model,
    opset_imports,
)

DEFAULT_DIMENSION = 64
"""Assumed size of an unknown dimension."""
DEFAULT_ELEMENTS = 65_536
"""Assumed number of elements of a value of unknown rank."""

_UNKNOWN_DOMAIN = "onnxamp.unknown"
"""A domain of which onnx knows no op, so that it infers nothing about nodes in it."""
_LARGEST_SIZE = 2**40
"""Largest credible size of a dimension."""
_KEPT_ELEMENTS = 256
"""Integer initializers up to this size may be shapes and axes that inference needs."""
_KEPT_FLOATS = 8
"""Float initializers up to this size may be the scales of a Resize."""
_KEPT: Mapping[int, int] = {
    TensorProto.INT64: _KEPT_ELEMENTS,
    TensorProto.INT32: _KEPT_ELEMENTS,
    TensorProto.FLOAT: _KEPT_FLOATS,
}

Shape = tuple[int | None, ...]
Dims = tuple[int | str | None, ...]
"""A shape whose symbolic dimensions keep their names: equal names are equal sizes."""


def with_shapes(
    view: View,
    types: Sequence[str | None],
    given: Mapping[str, Sequence[int]] | None = None,
) -> ModelProto:
    """Return a skeleton of the model without weights, to which onnx's shape inference has added its results.

    If inference fails, the declared shapes remain. Nodes of the main graph that read a value of unknown type are hidden
    from onnx, because some of its rules crash the process on them (EyeLike after an op of another domain).

    Args:
        types: type by value index.
        given: shapes of model inputs.
    """
    skeleton = _skeleton(view)
    _hide_untyped(skeleton, view, types)
    _declare_before_casts(skeleton, view, types)
    if given:
        _fix(skeleton.graph, given)
    return _inferred(skeleton)


def read_shapes(view: View, skeleton: ModelProto) -> Sequence[Shape | None]:
    """Return the shapes by value index: None for an unknown rank, and None within a shape for an unknown dimension.

    Args:
        skeleton: of :func:`with_shapes`.
    """
    return sized_shapes(view, read_dims(view, skeleton), {})


def sized_shapes(
    view: View, dims: Sequence[Dims | None], sizes: Mapping[str, int]
) -> Sequence[Shape | None]:
    """Return the shapes as :func:`read_shapes` does, from dimensions that were read and sizes of those with names."""
    # Large models repeat few shapes, and share one tuple for each.
    known: dict[Dims | None, Shape | None] = {None: None}
    shapes = list[Shape | None]()
    for one in dims:
        if one is not None and one not in known:
            known[one] = tuple(
                dim if dim is None or isinstance(dim, int) else sizes.get(dim)
                for dim in one
            )
        shapes.append(known[one])
    _share_through_casts(view, shapes)
    return shapes


def read_dims(view: View, skeleton: ModelProto) -> list[Dims | None]:
    """Return the dimensions by value index, as :func:`with_shapes` has inferred them; None for an unknown rank."""
    return _dims_in(view, scope_graphs(view, skeleton))


def _dims_in(view: View, graphs: Sequence[GraphProto]) -> list[Dims | None]:
    """Return the dimensions by value index that the graphs of the first scopes declare; None for all others."""
    shapes: list[Dims | None] = [None] * (len(view.values) + 1)
    read: dict[bytes, Dims | None] = {}
    """Declarations that were read already: a model repeats few."""
    for scope, graph in zip(view.scopes, graphs, strict=False):
        for entry in (*graph.value_info, *graph.output, *graph.input):
            value = scope.names.get(entry.name)
            if value is not None:
                kind = entry.type
                written = kind.SerializeToString()
                if written not in read:
                    read[written] = declared_dims(kind)
                shapes[value] = read[written]
        for tensor in graph.initializer:
            shapes[scope.names[tensor.name]] = tuple(tensor.dims[:])
    return shapes


def same_dims(
    view: View, was: Sequence[int], dims: Sequence[Dims | None]
) -> Sequence[Dims | None] | None:
    """Return the dimensions by value index as another view has them; those of weights are read.

    None if a size is unknown there, because inference may tell more or less here.

    Args:
        view: the view.
        was: value -> the value of the other view that has its dimensions, but for weights.
        dims: dimensions by value index of the other view.
    """
    shapes = [*map(dims.__getitem__, was)]
    for value, tensor in stored_tensors(view.scopes[0]):
        shapes[value] = tuple(tensor.dims[:])
    if any(map(_is_open, set(shapes))):
        return None
    return [*shapes, None]


def _is_open(dims: Dims | None) -> bool:
    """Return whether a size is unknown, or a name."""
    return dims is None or not all(isinstance(size, int) for size in dims)


def carried_shapes(
    view: View, like: View, shapes: Sequence[Shape | None]
) -> Sequence[Shape | None]:
    """Return the shapes of values of the main graph that another view has under the same names, and of their Casts.

    Args:
        view: the view.
        like: the other view.
        shapes: its shapes by value index.
    """
    carried: list[Shape | None] = [None] * (len(view.values) + 1)
    names = like.scopes[0].names
    for name, value in view.scopes[0].names.items():
        if name in names:
            carried[value] = shapes[names[name]]
    _share_through_casts(view, carried)
    return carried


def symbolic_shapes(
    view: View, known: Mapping[str, TensorProto]
) -> Sequence[Dims | None]:
    """Return the dimensions of the main graph's values, if the elements of some values are known.

    Args:
        view: the model.
        known: name -> value of the main graph whose elements are known; its producer is ignored.
    """
    skeleton = _skeleton(view)
    kept = [
        node for node in skeleton.graph.node if known.keys().isdisjoint(node.output)
    ]
    del skeleton.graph.node[:]
    skeleton.graph.node.extend(kept)
    skeleton.graph.initializer.extend(known.values())
    return _dims_in(view, [_inferred(skeleton).graph])


def named_shapes(
    view: View, types: Sequence[str | None], dims: Mapping[str, Sequence[int | str]]
) -> Sequence[Dims | None]:
    """Return the dimensions by value index, for these dimensions of inputs.

    Declarations of other values in the main graph are ignored.

    Args:
        view: the model.
        types: type by value index.
        dims: input -> its dimensions; names for unknown sizes.
    """
    skeleton = _skeleton(view)
    _hide_untyped(skeleton, view, types)
    _fix(skeleton.graph, dims)
    names = {dim for dim in chain.from_iterable(dims.values()) if isinstance(dim, str)}
    _forget_own_names(scope_graphs(view, skeleton)[1:], names)
    return read_dims(view, _inferred(skeleton))


def _forget_own_names(bodies: Sequence[GraphProto], names: Container[str]) -> None:
    """Clear the names of dimensions in bodies, except those of the model's inputs, which mean the same everywhere."""
    for body in bodies:
        for entry in (*body.value_info, *body.output, *body.input):
            if entry.type.HasField("tensor_type"):
                for dim in entry.type.tensor_type.shape.dim:
                    if dim.dim_param and dim.dim_param not in names:
                        dim.ClearField("dim_param")


def _inferred(skeleton: ModelProto) -> ModelProto:
    """Return the skeleton with onnx's shapes, also those that it computes; the skeleton itself if inference fails."""
    for data_prop in (True, False):
        # The C++ code raises unrelated types, and shapes are optional.
        with suppress(Exception):
            return onnx.shape_inference.infer_shapes(skeleton, data_prop=data_prop)
    return skeleton


def _fix(graph: GraphProto, given: Mapping[str, Sequence[int | str]]) -> None:
    """Give the inputs, or their elements, these shapes, and drop the declared shapes of all other values."""
    for entry in graph.input:
        kind = entry.type
        while (held := kind.WhichOneof("value")) in ("optional_type", "sequence_type"):
            kind = getattr(kind, held).elem_type
        if entry.name in given and kind.HasField("tensor_type"):
            del kind.tensor_type.shape.dim[:]
            # A scalar has a shape without dimensions, which must be there all the same.
            kind.tensor_type.shape.SetInParent()
            for size in given[entry.name]:
                known = isinstance(size, int)
                kind.tensor_type.shape.dim.add(
                    **{"dim_value" if known else "dim_param": size}
                )
    del graph.value_info[:]


def _share_through_casts(view: View, shapes: list[Shape | None]) -> None:
    """Copy shapes through Casts, along whole chains in both directions."""
    among = view.order if "Cast" in view.by_key else ()
    nodes = (node for node in among if node.key == "Cast")
    casts = [node for node in nodes if ABSENT not in (node.input(0), *node.outputs)]
    # Forward, then back: the shape of a chain may be known at either of its ends.
    for node in (*casts, *reversed(casts)):
        ends = (node.inputs[0], node.outputs[0])
        one, other = (shapes[value] for value in ends)
        if one == other:
            continue
        known = sorted(
            (shape for shape in (one, other) if shape is not None),
            key=lambda shape: shape.count(None),
        )
        for value in ends:
            shapes[value] = _merged(known[0], known[-1])


def _merged(shape: Shape, other: Shape) -> Shape:
    """Return the first shape, completed by the dimensions of the second."""
    if len(shape) != len(other):
        return shape
    return tuple(
        mine if mine is not None else theirs
        for mine, theirs in zip(shape, other, strict=True)
    )


@lru_cache(maxsize=1 << 12)
def elements(shape: Shape | None) -> int:
    """Return the element count of a shape, with defaults for unknown dimensions and ranks."""
    if shape is None:
        return DEFAULT_ELEMENTS
    return prod([DEFAULT_DIMENSION if dim is None else dim for dim in shape])


def width(shape: Shape | None) -> int | None:
    """Return the size of the last axis; None if it is unknown, 1 for a scalar."""
    if shape is None:
        return None
    return shape[-1] if shape else 1


def height(shape: Shape | None) -> int | None:
    """Return the size of the axis before the last one; None if it is unknown, 1 if there is none."""
    if shape is None:
        return None
    return shape[-2] if len(shape) > 1 else 1


def elements_along(shape: Shape | None, axes: Iterable[int]) -> float:
    """Return the number of elements along some axes; infinite if any size is unknown, or there is no such axis."""
    if shape is None:
        return inf
    result = 1.0
    for axis in axes:
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if size is None:
            return inf
        result *= size
    return result


def declared_dims(proto: TypeProto) -> Dims | None:
    """Return the declared dimensions of a tensor; None for an unknown rank and for other types."""
    if not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    shape: list[int | str | None] = []
    for dim in proto.tensor_type.shape.dim[:]:
        # Some exporters write -1 for "dynamic".
        size = dim.dim_value
        is_known = 0 < size <= _LARGEST_SIZE or (
            size == 0 and dim.HasField("dim_value")
        )
        shape.append(size if is_known else dim.dim_param or None)
    return tuple(shape)


def _hide_untyped(
    skeleton: ModelProto, view: View, types: Sequence[str | None]
) -> None:
    """Move nodes of the main graph that read values of unknown type to an unknown domain, and declare the element
    types that onnx does not infer.
    """
    graph = skeleton.graph
    declared = {entry.name for entry in (*graph.value_info, *graph.output)}
    untyped = {value.index for value in view.values if types[value.index] is None}
    foreign = {
        key for key in view.by_key if "::" in key or key in op_facts().uninferable
    }
    among = view.nodes if untyped else view.nodes_of(foreign)
    for node in among:
        if node.scope != 0:
            continue
        if not untyped.isdisjoint(node.inputs):
            graph.node[node.index].domain = _UNKNOWN_DOMAIN
        elif node.key not in foreign:
            continue
        for value in node.outputs:
            elem = elem_of(types[value])
            if elem and view.values[value].name not in declared:
                entry = graph.value_info.add(name=view.values[value].name)
                entry.type.tensor_type.elem_type = elem
    skeleton.opset_import.add(domain=_UNKNOWN_DOMAIN, version=1)


def _declare_before_casts(
    skeleton: ModelProto, view: View, types: Sequence[str | None]
) -> None:
    """Declare the input of a Cast with the declared shape of its output.

    A conversion renames a value and puts a Cast after it, which keeps the name and with it the declared shape.
    Otherwise, readers of the renamed value would have no shape, and a second conversion would see other sizes.
    """
    graphs = scope_graphs(view, skeleton)
    declared: dict[int, TypeProto] = {}
    for scope, graph in zip(view.scopes, graphs, strict=True):
        for entry in (*graph.value_info, *graph.output, *graph.input):
            if entry.name in scope.names and entry.type.tensor_type.HasField("shape"):
                declared[scope.names[entry.name]] = entry.type
    # Readers first, so that a declaration travels up a chain of Casts.
    for node in reversed(view.order):
        if node.key != "Cast" or ABSENT in (node.input(0), *node.outputs):
            continue
        value = node.inputs[0]
        output = node.outputs[0]
        elem = elem_of(types[value])
        if output not in declared or value in declared or not elem:
            continue
        if view.values[value].origin is not Origin.NODE:
            continue
        entry = graphs[view.values[value].scope].value_info.add(
            name=view.values[value].name
        )
        entry.type.CopyFrom(declared[output])
        entry.type.tensor_type.elem_type = elem
        declared[value] = entry.type


def _skeleton(view: View) -> ModelProto:
    """Return the model without the data of its weights: structure, shapes, and small integer constants."""
    model = view.model
    skeleton = ModelProto()
    skeleton.ir_version = model.ir_version
    skeleton.opset_import.extend(
        helper.make_opsetid(*entry) for entry in opset_imports(model).items()
    )
    skeleton.functions.extend(model.functions)
    _strip(model.graph, skeleton.graph)
    _hide_dangers(view, skeleton)
    return skeleton


def _hide_dangers(view: View, skeleton: ModelProto) -> None:
    """Move nodes that crash onnx's inference to an unknown domain, and clear impossible sizes, with which it computes
    and indexes; also in bodies and functions.
    """
    facts = op_facts()
    graphs = scope_graphs(view, skeleton)
    for function in skeleton.functions:
        for proto in all_nodes(function.node):
            graphs += [body for _, body in node_bodies(proto)]
    altered = facts.uninferable | facts.misread_defaults.keys()
    # Hardly any model has some, and a look at all nodes takes long.
    is_altered = bool(skeleton.functions) or not altered.isdisjoint(view.by_key)
    for proto in nodes_of_model(skeleton) if is_altered else ():
        _alter(proto, op_key(proto))
    for graph in graphs:
        for entry in (*graph.value_info, *graph.input, *graph.output):
            if not entry.type.HasField("tensor_type"):
                continue
            for dim in entry.type.tensor_type.shape.dim:
                if not 0 <= dim.dim_value <= _LARGEST_SIZE:
                    dim.ClearField("dim_value")


def _alter(proto: NodeProto, key: str) -> None:
    """Hide a node that crashes onnx's inference, and add attributes for which that assumes a wrong default."""
    if key in op_facts().uninferable:
        proto.domain = _UNKNOWN_DOMAIN
    written = {item.name for item in proto.attribute}
    for name, value in op_facts().misread_defaults.get(key, {}).items():
        if name not in written:
            proto.attribute.append(helper.make_attribute(name, value))


def _strip(graph: GraphProto, into: GraphProto) -> None:
    """Copy a graph, and leave out the data of its weights that shape inference does not need."""
    copy_fields(graph, into, {"initializer"})
    for tensor in graph.initializer[:]:
        elem = tensor.data_type
        dims = tensor.dims[:]
        if needs_data(elem, dims):
            into.initializer.append(tensor)
        else:
            into.initializer.add(name=tensor.name, data_type=elem, dims=dims)


def needs_data(elem: int, dims: Sequence[int]) -> bool:
    """Return whether shape inference may need the numbers of a weight of this element type and shape."""
    return prod(dims) <= _KEPT.get(elem, 0)
