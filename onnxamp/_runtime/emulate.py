"""Float32 emulation of low-precision models: what a device that accumulates in float32 computes, on any device.

ONNX Runtime's CPU provider runs float16 nodes in float32 without rounding between them, and has hardly any bfloat16
kernels. So the emulated model is float32 throughout, and a pair of Casts, ``Cast(to=low) -> Cast(to=float)``, rounds
every value that was low precision:

==============================  ============================================================================
in the model                    in the emulated model
==============================  ============================================================================
output of an arithmetic node    the node in float32, then a pair
output of data movement         the node alone: its input is rounded already
weight (initializer, Constant)  float32 tensor that holds the rounded numbers
``Cast(to=low)``                itself, then ``Cast(to=float)``
``Cast(to=float)`` of low       ``Identity``
low-precision model input       float32 input, then a pair
low-precision model output      float32 output with the rounded numbers
low sequence or optional        the same of float32, without a pair: its elements are rounded already
call of a model-local function  its body, inlined
==============================  ============================================================================

It cannot show the order of accumulation, and fusions that skip a rounding. For targets that accumulate in low
precision, :mod:`onnxamp._runtime.accumulate` adds to it.
Model inputs that are model outputs as well, and inputs of sequence type, pass through as they are fed.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from onnxamp._dtypes import FLOAT16, FORMATS, LOW_ELEMS
from onnxamp._errors import ModelError, OpsetError
from onnxamp._graph.bodies import inline_functions
from onnxamp._graph.editor import NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import ABSENT, Node, Origin, Scope, View
from onnxamp._model.protos import BaseDir, copied, copy_fields, opset_imports
from onnxamp._model.weights import embed
from onnxamp._ops.facts import attribute, op_facts
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.accumulate import Accumulator


@dataclass(frozen=True, slots=True)
class Rounder:
    """Appends rounding to graphs; ``names`` gives new values and nodes names of their own."""

    names: NewNames

    def cast(self, graph: GraphProto, source: str, target: str, elem: int) -> None:
        """Append ``target = Cast (source)``; ``elem`` is the number of the element type."""
        name = self.names.fresh(f"{target}/cast")
        graph.node.append(helper.make_node("Cast", [source], [target], name, to=elem))

    def round(self, graph: GraphProto, source: str, target: str, elem: int) -> None:
        """Append the pair ``Cast(to=elem) -> Cast(to=float)`` from ``source`` to ``target``."""
        low = self.names.fresh(f"{target}/low")
        self.cast(graph, source, low, elem)
        self.cast(graph, low, target, TensorProto.FLOAT)


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


def emulate(
    model: ModelProto, *, base_dir: BaseDir = None, hollow: Container[str] = ()
) -> ModelProto:
    """A float32 model that computes what a model with float16 or bfloat16 values computes.

    Args:
        model: any model; it is not changed.
        base_dir: folder of external data, if the model has any that is not loaded; the result embeds what is read.
        hollow: main-graph initializers without data (:mod:`onnxamp._runtime.shell`), which become float32 as well.

    Returns:
        A new model with the same names of inputs and outputs, all floats of which are float32.

    Raises:
        ModelError: the model cannot be resolved, or holds a function that cannot be inlined.
        OpsetError: its opset has no Cast to the low-precision type.
        ExternalDataError: low-precision weights are not loaded and cannot be read.

    Complexity: one sweep per scope, linear in nodes and weight bytes.
    """
    return emulate_graph(Graph.of(inline_functions(model)), base_dir=base_dir, hollow=hollow)


def without_rounding(model: ModelProto) -> ModelProto:
    """:func:`emulate` without its rounding, but for weights: the float32 model behind a low-precision one.

    Casts to low precision become Casts to float32. Functions are inlined.

    Raises:
        ModelError, OpsetError: as :func:`emulate`.
    """
    return emulate_graph(Graph.of(inline_functions(model)), rounds=False)


def emulate_graph(
    view: Graph,
    *,
    base_dir: BaseDir = None,
    hollow: Container[str] = (),
    rounds: bool = True,
    keeps: Container[str] = (),
    arithmetic: Profile | None = None,
    shapes: Sequence[Shape | None] = (),
) -> ModelProto:
    """:func:`emulate` of a model without functions that is resolved already; :func:`without_rounding` if asked.

    Without rounding, the inputs and outputs that ``keeps`` names have the types of the model, with Casts behind or in
    front of them; but not sequences and optionals, of which there is no Cast.

    With ``arithmetic``, float16 sums are off as they are on that target (:mod:`onnxamp._runtime.accumulate`);
    ``shapes``, by value, tell how long they are.
    """
    low = {low.tensor: low.elem for low in FORMATS.values()}
    elems = [None if type_name is None else low.get(type_name) for type_name in view.types]
    _check_opset(view, elems)
    result = ModelProto()
    copy_fields(view.model, result, but={"graph", "functions"})
    names = NewNames(view.all_names())
    accumulator = None
    if arithmetic is not None:
        accumulator = Accumulator(arithmetic, names, opset_imports(view.model).get("", 1), shapes)
    job = _Job(
        view=view,
        elems=elems,
        names=names,
        rounder=Rounder(names),
        base_dir=base_dir,
        hollow=hollow,
        rounds=rounds,
        accumulator=accumulator,
    )
    job.kept = frozenset() if rounds else _signature(view, elems, keeps)
    job.targets[0] = result.graph
    for scope in view.scopes:  # a scope stands behind the one around it
        _emulate_scope(job, scope, job.targets[scope.index])
    return result


def _signature(view: View, elems: Sequence[int | None], keeps: Container[str]) -> frozenset[int]:
    """Low-precision inputs and outputs of the model with these names; nodes that make bits have none."""
    main = view.scopes[0]
    able = {
        value
        for value in main.inputs
        if view.values[value].origin in (Origin.INPUT, Origin.DEFAULT)
    }
    able |= {
        v
        for v in main.outputs
        if view.values[v].origin is Origin.INITIALIZER or _computes(view.producer(v))
    }
    return frozenset(
        value for value in able if elems[value] is not None and view.values[value].name in keeps
    )


def _computes(node: Node | None) -> bool:
    """Whether a node makes numbers, not bits."""
    return node is not None and node.key not in op_facts().reads_bits


def _check_opset(view: View, elems: Sequence[int | None]) -> None:
    version = opset_imports(view.model).get("")
    for low in FORMATS.values():
        if version is not None and version < low.min_opset and low.elem in elems:
            raise OpsetError(
                f"The model holds {low.name} values, but its opset {version} cannot cast to {low.name}:"
                f" opset {low.min_opset} or newer is needed."
            )


@dataclass(slots=True)
class _Job:
    """The emulation of one model, scope by scope."""

    view: View
    elems: Sequence[int | None]
    names: NewNames
    rounder: Rounder
    base_dir: BaseDir
    hollow: Container[str]
    rounds: bool
    accumulator: Accumulator | None
    targets: dict[int, GraphProto] = field(default_factory=dict)
    """Scope index -> the graph to fill."""
    renamed: dict[int, str] = field(default_factory=dict)
    """Value index of a low-precision model input -> name of its rounded version; of a kept value -> that in float32."""
    kept: frozenset[int] = frozenset()
    """Inputs and outputs that keep their types."""

    def low(self, value: int) -> int | None:
        return None if value == ABSENT else self.elems[value]

    def name(self, value: int, written: str) -> str:
        return self.renamed.get(value, written)


def _emulate_scope(job: _Job, scope: Scope, target: GraphProto) -> None:
    source = scope.proto
    copy_fields(source, target, but={"node", "initializer", "sparse_initializer"})
    kept = {job.view.values[value].name for value in job.kept} if scope.index == 0 else ()
    for entry in (*target.input, *target.output, *target.value_info):
        if entry.name not in kept:
            upcast_type(entry.type)
    _initializers(job, scope, target, kept)
    for sparse in source.sparse_initializer:
        upcast_sparse(sparse, target.sparse_initializer.add(), job.base_dir)
    if scope.index == 0 and job.rounds:
        _round_inputs(job, scope, target)
    elif scope.index == 0:
        for value in sorted(value for value in job.kept if job.view.producer(value) is None):
            job.rounder.cast(
                target, job.view.values[value].name, _raised_name(job, value), TensorProto.FLOAT
            )
    else:
        for value, entry in zip(scope.outputs, target.output, strict=True):
            entry.name = job.name(value, entry.name)
    for index in scope.nodes:
        _emulate_node(job, job.view.nodes[index], target)


def _initializers(job: _Job, scope: Scope, target: GraphProto, kept: Container[str]) -> None:
    """Add the scope's initializers to its copy, in float32 but for those that keep their types."""
    for tensor in scope.proto.initializer:
        if scope.index == 0 and tensor.name in job.hollow:
            elem = TensorProto.FLOAT if tensor.data_type in LOW_ELEMS else tensor.data_type
            target.initializer.add(name=tensor.name, data_type=elem, dims=tensor.dims)
        elif tensor.name in kept:
            target.initializer.append(tensor)
            embed(target.initializer[-1], job.base_dir)
        else:
            upcast_tensor(tensor, target.initializer.add(), job.base_dir)


def _round_inputs(job: _Job, scope: Scope, target: GraphProto) -> None:
    """Round inputs as they are fed. Those that are model outputs keep their public names and numbers."""
    for value in dict.fromkeys(scope.inputs):
        fed, elem = job.view.values[value], job.low(value)
        if elem is not None and fed.origin in (Origin.INPUT, Origin.DEFAULT):
            job.renamed[value] = job.names.fresh(f"{fed.name}/rounded")
            job.rounder.round(target, fed.name, job.renamed[value], elem)


def _raised_name(job: _Job, value: int) -> str:
    """A name for a kept value in float32, which all read in its place."""
    return job.renamed.setdefault(value, job.names.fresh(f"{job.view.values[value].name}_fp32"))


def _emulate_node(job: _Job, node: Node, target: GraphProto) -> None:
    casts = node.key == "Cast" and job.rounds
    bits = node.key in op_facts().reads_bits
    proto = NodeProto()
    copy_fields(node.proto, proto, but={"input", "output", "attribute"})
    for value, name in zip(node.inputs, node.proto.input, strict=True):
        proto.input.append(_bits(job, target, value, name) if bits else job.name(value, name))
    # The node must be in the graph before its bodies are filled in place and its Casts are appended.
    added = target.node.add()
    added.CopyFrom(proto)
    if (
        casts
        and job.low(node.inputs[0]) is not None
        and attribute(node.proto, "to") == TensorProto.FLOAT
    ):
        added.op_type = "Identity"
    else:
        _copy_attributes(job, node, added, keep_low=casts or bits)
    for value, name in zip(node.outputs, node.proto.output, strict=True):
        elem = job.low(value)
        if elem is not None and value in job.kept:
            added.output.append(_raised_name(job, value))
            job.rounder.cast(target, job.renamed[value], name, elem)
            continue
        if elem is None or not (job.rounds or bits) or node.key in op_facts().unrounded:
            added.output.append(name)
            continue
        raw = job.names.fresh(f"{name}/{'low' if casts or bits else 'exact'}")
        added.output.append(raw)
        if casts or bits:
            job.rounder.cast(target, raw, name, TensorProto.FLOAT)
        else:
            job.rounder.round(
                target,
                _accumulated(job=job, node=node, target=target, added=added, raw=raw, elem=elem),
                name,
                elem,
            )


def _accumulated(
    job: _Job, node: Node, target: GraphProto, added: NodeProto, raw: str, elem: int
) -> str:
    """What the target's accumulator makes of a node's float32 result."""
    if job.accumulator is None or elem != FLOAT16.elem or not job.accumulator.applies(added):
        return raw
    return job.accumulator.add(target, node, added, raw)


def _bits(job: _Job, target: GraphProto, value: int, name: str) -> str:
    """Name of an input in low precision, for a reader that looks at its bits."""
    elem = job.low(value)
    if elem is None:
        return job.name(value, name)
    low = job.names.fresh(f"{name}/low")
    job.rounder.cast(target, job.name(value, name), low, elem)
    return low


def _copy_attributes(job: _Job, node: Node, target: NodeProto, *, keep_low: bool) -> None:
    """Copy attributes: low-precision types in them become float32, and bodies are left to be filled."""
    rule = op_facts().dtype_attribute.get(node.key)
    # low precision inside the kernel becomes float32, too: no CPU kernel supports it
    dtype_names = {op_facts().computes_in.get(node.key), rule.attribute if rule else None}
    bodies = iter(node.bodies)
    for source in node.proto.attribute:
        copied = target.attribute.add()
        upcast_attribute(source, copied, job.base_dir)
        if (
            source.type == AttributeProto.INT
            and source.name in dtype_names
            and source.i in LOW_ELEMS
        ):
            copied.i = source.i if keep_low else TensorProto.FLOAT
        if source.type == AttributeProto.GRAPH or source.HasField("g"):
            copied.g.SetInParent()
            job.targets[next(bodies)[1]] = copied.g
        for _ in source.graphs:
            job.targets[next(bodies)[1]] = copied.graphs.add()
