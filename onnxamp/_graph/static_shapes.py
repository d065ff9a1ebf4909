"""Shapes of a model all of whose sizes are known, by one inference for each distinct form of a node.

Large models repeat few nodes: a node of the same op and attributes, on inputs of the same types, shapes and constants,
has outputs of the same shapes. So onnx is asked once for each of these forms, and not about the whole model, which
takes several times as long. Where a size is unknown, onnx tells more if it sees the whole model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import onnx.defs
import onnx.shape_inference
from onnx import AttributeProto, ModelProto, TensorProto, TypeProto, helper

from onnxamp._facts.dtypes import elem_of
from onnxamp._facts.ops import op_facts
from onnxamp._facts.signature import Signature
from onnxamp._graph.shapes import Dims, declared_dims, needs_data
from onnxamp._graph.types import declared_type, type_proto
from onnxamp._graph.view import ABSENT, Node, Origin, View, stored_tensors
from onnxamp._model.protos import copied, opset_imports

MANY: Final = 2_000
"""Nodes from which on a model repeats enough of them: of fewer, onnx infers all shapes at once in less time."""

_REPEATED: Final = 4
"""Nodes of each form, on average, below which one look at the whole model takes less time."""


def static_dims(
    view: View, types: Sequence[str | None]
) -> Sequence[Dims | None] | None:
    """Return the dimensions by value index, the same as :func:`onnxamp._graph.shapes.read_dims`.

    None for models with few nodes, with many forms, with bodies or functions, or with a size that is unknown.
    Complexity: linear in nodes, apart from one inference for each form.

    Args:
        view: the model.
        types: type by value index.
    """
    is_plain = len(view.scopes) == 1 and not view.model.functions
    return _known_dims(view, types) if is_plain and len(view.nodes) >= MANY else None


Sizes: TypeAlias = tuple[int, ...]

_NO_DATA: Final = b""
"""Stands for the data of a weight that inference does not need."""


class _Face(NamedTuple):
    """All that the shapes of a node's outputs depend on of an input; ``data`` is its tensor if it is a weight."""

    kind: str
    sizes: Sizes
    data: bytes | None = None


_WRITE: Final = AttributeProto.SerializeToString

_Form: TypeAlias = tuple[Signature | None, int, tuple[bytes, ...], tuple[int, ...]]
"""Of a node: its schema, the number of its outputs, its attributes and the faces of its inputs."""


@dataclass(slots=True)
class _Faces:
    """Numbers for the faces of values, equal ones for equal faces."""

    faces: list[_Face | None] = field(default_factory=lambda: [None])
    """The first one is that of omitted inputs."""
    numbers: dict[tuple[str, Sizes, bytes | None], int] = field(default_factory=dict)

    def number(self, kind: str, sizes: Sizes, data: bytes | None = None) -> int:
        """Return the number of a face."""
        face = kind, sizes, data
        number = self.numbers.get(face)
        if number is None:
            number = self.numbers[face] = len(self.faces)
            self.faces.append(_Face(*face))
        return number


def _known_dims(
    view: View, types: Sequence[str | None]
) -> Sequence[Dims | None] | None:
    """Return the dimensions by value index; None if onnx needs to see the whole model."""
    faces = _Faces()
    known = _given(view, types, faces)
    if known is None:
        return None
    results = dict[_Form, list[int]]()
    most = len(view.nodes) // _REPEATED
    for node in view.nodes:
        given = node.proto.attribute
        written = (*map(_WRITE, given[:]),) if given else ()
        read = (*map(known.__getitem__, node.inputs),)
        form = node.signature, len(node.outputs), written, read
        outputs = results.get(form)
        if outputs is None:
            inputs = [faces.faces[number] for number in read]
            outputs = _outputs(view, node, inputs, types, faces)
            if outputs is None or len(results) == most:
                return None
            results[form] = outputs
        for value, number in zip(node.outputs, outputs, strict=True):
            known[value] = number
    sizes = [None if face is None else face.sizes for face in faces.faces]
    dims = [sizes[number] for number in known]
    return dims if _agree(view, dims) else None


def _given(view: View, types: Sequence[str | None], faces: _Faces) -> list[int] | None:
    """Return the numbers of faces by value index, 0 for outputs of nodes; None if an input or a weight has none."""
    known = [0] * (len(view.values) + 1)
    graph = view.model.graph
    names = view.scopes[0].names
    for value, tensor in stored_tensors(view.scopes[0]):
        kind = types[value]
        if kind is None:
            return None
        shape = tuple(tensor.dims[:])
        data = _data(tensor) if needs_data(tensor.data_type, shape) else _NO_DATA
        known[value] = faces.number(kind, shape, data)
    for entry in graph.input:
        value = names[entry.name]
        sizes = _sizes(entry.type)
        kind = types[value]
        # onnx compares the declaration of a weight with its tensor.
        is_fed = view.values[value].origin is Origin.INPUT
        if kind is None or not is_fed or sizes is None:
            return None
        known[value] = faces.number(kind, sizes)
    return None if graph.sparse_initializer else known


def _data(tensor: TensorProto) -> bytes:
    """Return a weight without its name."""
    unnamed = copied(tensor)
    unnamed.ClearField("name")
    return unnamed.SerializeToString()


def _sizes(declared: TypeProto) -> Sizes | None:
    """Return the sizes of a declared tensor; None if any is unknown."""
    dims = declared_dims(declared)
    if dims is None:
        return None
    sizes = tuple([size for size in dims if isinstance(size, int)])
    return sizes if len(sizes) == len(dims) else None


def _outputs(
    view: View,
    node: Node,
    inputs: Sequence[_Face | None],
    types: Sequence[str | None],
    faces: _Faces,
) -> list[int] | None:
    """Return the numbers of the faces of a node's outputs; None if onnx does not infer a type and a shape for each."""
    facts = op_facts()
    signature = node.signature
    is_known = signature is not None and signature.attributes is not None
    # Of these ops, the inference of the whole model gets other nodes than the model has.
    is_altered = node.key in facts.uninferable or node.key in facts.misread_defaults
    if signature is None or not is_known or is_altered or ABSENT in node.outputs:
        return None
    inferred = _inferred(view.model, node, signature, inputs)
    numbers = list[int]()
    for port, value in enumerate(node.outputs):
        kind = types[value]
        entry = inferred.get(f"out{port}")
        if kind is None or entry is None or declared_type(entry) != kind:
            return None
        sizes = _sizes(entry)
        if sizes is None:
            return None
        numbers.append(faces.number(kind, sizes))
    return numbers


def _inferred(
    model: ModelProto,
    node: Node,
    signature: Signature,
    inputs: Sequence[_Face | None],
) -> Mapping[str, TypeProto]:
    """Return the types that onnx infers for the outputs of a node, as far as it infers any."""
    proto = copied(node.proto)
    proto.input[:] = [
        "" if face is None else f"in{n}" for n, face in enumerate(inputs)
    ]
    proto.output[:] = [f"out{port}" for port in range(len(node.outputs))]
    given = dict[str, TypeProto]()
    data = dict[str, TensorProto]()
    for name, face in zip(proto.input, inputs, strict=True):
        if face is None:
            continue
        kind = type_proto(face.kind)
        if kind is None or not kind.HasField("tensor_type"):
            return {}
        # A scalar has a shape without dimensions, which must be there all the same.
        kind.tensor_type.shape.SetInParent()
        for size in face.sizes:
            kind.tensor_type.shape.dim.add(dim_value=size)
        given[name] = kind
        if face.data is not None:
            light = TensorProto(data_type=elem_of(face.kind), dims=face.sizes)
            stored = TensorProto.FromString(face.data)
            data[name] = light if face.data == _NO_DATA else stored
    schema = onnx.defs.get_schema(signature.op_type, signature.since, signature.domain)
    opsets = [helper.make_opsetid(*entry) for entry in opset_imports(model).items()]
    try:
        return onnx.shape_inference.infer_node_outputs(
            schema, proto, given, data, None, opsets, model.ir_version
        )
    except Exception:  # noqa: BLE001 - the C++ code raises unrelated types, and shapes are optional
        return {}


def _agree(view: View, dims: Sequence[Dims | None]) -> bool:
    """Return whether all declared shapes are those found."""
    graph = view.model.graph
    names = view.scopes[0].names
    read = dict[bytes, Dims | None]()
    """Declarations that were read already: a model repeats few."""
    for entry in (*graph.value_info, *graph.output):
        value = names.get(entry.name, ABSENT)
        written = entry.type.SerializeToString()
        if written not in read:
            read[written] = declared_dims(entry.type)
        declared = read[written]
        if value == ABSENT or declared not in (None, dims[value]):
            return False
    return True
