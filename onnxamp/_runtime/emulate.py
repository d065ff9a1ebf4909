"""Float32 emulation of low-precision models: compute on any device what a device with float32 accumulators would.

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
float16 that is quantized       the same numbers, with minus infinity in place of infinity
call of a model-local function  its body, inlined
==============================  ============================================================================

It reproduces neither the order of accumulation nor fusions that skip a rounding. For targets that accumulate in low
precision, :mod:`onnxamp._runtime.accumulate` adds to it. Model inputs that are model outputs as well, and inputs of
sequence type, pass through as they are fed.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import numpy as np
from onnx import (
    AttributeProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from onnxamp._base.errors import ModelError, OpsetError
from onnxamp._facts.dtypes import FLOAT16, FORMATS, LOW_ELEMS, LOW_TENSORS
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.providers import Profile
from onnxamp._graph.editor import GraphEditor, NewNames, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import ABSENT, Node, Origin, Scope, View, inline_functions
from onnxamp._model.protos import (
    BaseDir,
    copied,
    copy_fields,
    copy_without,
    opset_imports,
)
from onnxamp._model.weights import embed
from onnxamp._runtime.accumulate import Accumulator

_CLIP_HAS_INPUTS: Final = 11
"""The opset from which on the bounds of a Clip are inputs."""


def cast(names: NewNames, source: str, target: str, elem: int) -> NodeProto:
    """Return ``target = Cast (source)``; ``elem`` is the number of the element type."""
    name = names.fresh(f"{target}/cast")
    return helper.make_node("Cast", [source], [target], name, to=elem)


def rounding(names: NewNames, source: str, target: str, elem: int) -> list[NodeProto]:
    """Return the pair ``Cast(to=elem) -> Cast(to=float)`` from ``source`` to ``target``."""
    low = names.fresh(f"{target}/low")
    return [
        cast(names, source, low, elem),
        cast(names, low, target, TensorProto.FLOAT),
    ]


def upcast_type(proto: TypeProto) -> None:
    """Replace low element types by float32 inside a type, at any depth, in place."""
    kind = proto.WhichOneof("value")
    while kind in ("sequence_type", "optional_type", "map_type"):
        held = getattr(proto, kind)
        proto = held.value_type if kind == "map_type" else held.elem_type
        kind = proto.WhichOneof("value")
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return  # opaque, or not said
    leaf = getattr(proto, kind)
    if leaf.elem_type in LOW_ELEMS:
        leaf.elem_type = TensorProto.FLOAT


def upcast_tensor(source: TensorProto, base_dir: BaseDir) -> TensorProto:
    """Return a tensor whose low values are the float32 numbers that they are; the same if there is nothing to do.

    Args:
        source: any tensor; it is not changed.
        base_dir: where external data lies. If None, external tensors of other types stay references.

    Raises:
        ExternalDataError: the data of an external tensor are needed and cannot be read.
        ModelError: the number of elements in a low-precision tensor does not match its shape.
    """
    is_low = source.data_type in LOW_ELEMS
    if source.data_location == TensorProto.EXTERNAL and (
        is_low or base_dir is not None
    ):
        source = copied(source)
        embed(source, base_dir)
    if not is_low:
        return source
    result = TensorProto()
    copy_fields(source, result, but=_PAYLOAD)
    result.data_type = TensorProto.FLOAT
    try:
        numbers = numpy_helper.to_array(source)
    except ValueError as error:
        raise ModelError(
            f"The tensor {source.name!r} does not hold what its shape requires: {error}."
        ) from error
    result.raw_data = numbers.astype("<f4").tobytes()
    return result


_PAYLOAD = frozenset(
    {"data_type", "raw_data", "int32_data", "external_data", "data_location"}
)


def upcast_attribute(item: AttributeProto, base_dir: BaseDir) -> None:
    """Replace low element types in the tensors and types of an attribute by float32, in place; graphs are left."""
    # Reading a field that is not set would set it.
    tensors = [*item.tensors]
    tensors += [sparse.values for sparse in item.sparse_tensors]
    types = [*item.type_protos]
    if item.HasField("t"):
        tensors.append(item.t)
    if item.HasField("sparse_tensor"):
        tensors.append(item.sparse_tensor.values)
    if item.HasField("tp"):
        types.append(item.tp)
    for tensor in tensors:
        tensor.CopyFrom(upcast_tensor(tensor, base_dir))
    for proto in types:
        upcast_type(proto)


def emulate(model: ModelProto, *, base_dir: BaseDir = None) -> ModelProto:
    """Return a float32 model that computes what a model with float16 or bfloat16 values computes.

    Args:
        model: any model; it is not changed.
        base_dir: folder of external data, if the model has any that is not loaded; the result embeds what is read.

    Returns:
        A new model with the same names of inputs and outputs, all floats of which are float32.

    Raises:
        ModelError: the model cannot be resolved, or holds a function that cannot be inlined.
        OpsetError: its opset has no Cast to the low-precision type.
        ExternalDataError: low-precision weights are not loaded and cannot be read.

    Complexity: one sweep per scope, linear in nodes and weight bytes.
    """
    return emulate_graph(Graph.of(inline_functions(model)), base_dir=base_dir)


def without_rounding(model: ModelProto) -> ModelProto:
    """Return the float32 model that a low-precision model stands for. As :func:`emulate`, but only weights are rounded.

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
    """Return :func:`emulate`, or :func:`without_rounding`, of a model without functions that is resolved already.

    Without rounding, the inputs and outputs that ``keeps`` names have the types of the model, with Casts after or
    before them; but not sequences and optionals, of which there is no Cast.

    With ``arithmetic``, float16 sums have the errors of that target (:mod:`onnxamp._runtime.accumulate`); ``shapes``,
    by value, give their lengths. ``hollow`` are initializers of the main graph without data.
    """
    elems = [
        LOW_TENSORS[kind].elem if kind in LOW_TENSORS else None for kind in view.types
    ]
    _check_opset(view, elems)
    model = copy_without(view.model, "initializer")
    del model.functions[:]
    editor = GraphEditor(view, model)
    accumulator = None
    if arithmetic is not None:
        accumulator = Accumulator(arithmetic, editor, shapes)
    emulation = _Emulation(
        editor=editor,
        elems=elems,
        types=view.types,
        base_dir=base_dir,
        rounds=rounds,
        accumulator=accumulator,
        kept=frozenset() if rounds else _signature(view, elems, keeps),
    )
    emulation.weights(hollow)
    for scope in view.scopes:
        emulation.scope(scope)
    return editor.finish()


def _signature(
    view: View, elems: Sequence[int | None], keeps: Container[str]
) -> frozenset[int]:
    """Low-precision inputs and outputs of the model with these names; nodes that make bits have none."""
    main = view.scopes[0]
    able = {
        value
        for value in main.inputs
        if view.values[value].origin in (Origin.INPUT, Origin.DEFAULT)
    }
    for value in main.outputs:
        node = view.producer(value)
        is_weight = view.values[value].origin is Origin.INITIALIZER
        if is_weight or (node is not None and node.key not in op_facts().reads_bits):
            able.add(value)
    return frozenset(
        value
        for value in able
        if elems[value] is not None and view.values[value].name in keeps
    )


def _check_opset(view: View, elems: Sequence[int | None]) -> None:
    version = opset_imports(view.model).get("")
    for low in FORMATS.values():
        if version is not None and version < low.min_opset and low.elem in elems:
            raise OpsetError(
                f"The model holds {low.name} values, but its opset {version} cannot cast to {low.name}:"
                f" opset {low.min_opset} or newer is needed."
            )


@dataclass(slots=True)
class _Emulation:
    """The emulation of one model, scope by scope."""

    editor: GraphEditor
    elems: Sequence[int | None]
    types: Sequence[str | None]
    base_dir: BaseDir
    rounds: bool
    accumulator: Accumulator | None
    kept: frozenset[int]
    """Inputs and outputs that keep their types."""
    renamed: dict[int, str] = field(default_factory=dict)
    """Value index of a low-precision model input -> name of its rounded version; of a kept value -> that in float32."""

    def is_kept(self, scope: int, name: str) -> bool:
        """Return whether a value of a scope keeps its type."""
        return (
            scope == 0
            and self.editor.view.scopes[0].names.get(name, ABSENT) in self.kept
        )

    def weights(self, hollow: Container[str]) -> None:
        """Add the initializers of the main graph, in float32 but for those that keep their types."""
        view = self.editor.view
        target = self.editor.graphs[0].initializer
        for tensor in view.model.graph.initializer:
            if tensor.name in hollow:
                elem = tensor.data_type
                if elem in LOW_ELEMS:
                    elem = TensorProto.FLOAT
                target.add(name=tensor.name, data_type=elem, dims=tensor.dims)
            elif self.is_kept(0, tensor.name):
                target.append(tensor)
                embed(target[-1], self.base_dir)
            else:
                target.append(upcast_tensor(tensor, self.base_dir))

    def scope(self, scope: Scope) -> None:
        """Emulate the nodes of a scope, and what is declared in it."""
        graph = self.editor.graphs[scope.index]
        nodes = self.editor.view.nodes
        for entry in (*graph.input, *graph.output, *graph.value_info):
            if not self.is_kept(scope.index, entry.name):
                upcast_type(entry.type)
        sparse = [tensor.values for tensor in graph.sparse_initializer]
        for tensor in (*sparse, *(graph.initializer if scope.index else ())):
            tensor.CopyFrom(upcast_tensor(tensor, self.base_dir))
        if scope.index == 0:
            self.editor.insert(0, scope.nodes.start, *self.inputs(scope))
        else:
            for value, entry in zip(scope.outputs, graph.output, strict=True):
                entry.name = self.renamed.get(value, entry.name)
        for index in scope.nodes:
            self.node(nodes[index])

    def inputs(self, scope: Scope) -> Iterator[NodeProto]:
        """Round inputs as they are fed, and raise values that keep their types although no node computes them.

        Inputs that are model outputs keep their public names and numbers.
        """
        view = self.editor.view
        for value in sorted(
            value for value in self.kept if view.producer(value) is None
        ):
            source = view.values[value].name
            yield cast(
                self.editor.names, source, self.raised_name(value), TensorProto.FLOAT
            )
        if not self.rounds:
            return
        for value in dict.fromkeys(scope.inputs):
            fed = view.values[value]
            elem = self.elems[value]
            if elem is not None and fed.origin in (Origin.INPUT, Origin.DEFAULT):
                self.renamed[value] = self.editor.names.fresh(f"{fed.name}/rounded")
                yield from rounding(
                    self.editor.names, fed.name, self.renamed[value], elem
                )

    def raised_name(self, value: int) -> str:
        """Return the name under which all readers get a kept value in float32."""
        name = f"{self.editor.view.values[value].name}_fp32"
        return self.renamed.setdefault(value, self.editor.names.fresh(name))

    def node(self, node: Node) -> None:
        """Emulate a node."""
        facts = op_facts()
        names = self.editor.names
        proto = self.editor.node(node.index)
        casts = node.key == "Cast" and self.rounds
        bits = node.key in facts.reads_bits
        for port, value in enumerate(node.inputs):
            written = proto.input[port]
            elem = self.elems[value]
            proto.input[port] = self.renamed.get(value, written)
            if bits and elem is not None:  # it looks at the bits
                low = names.fresh(f"{written}/low")
                self.editor.insert(
                    node.scope, node.index, cast(names, proto.input[port], low, elem)
                )
                proto.input[port] = low
        if self.rounds and node.key in facts.quantize:
            self.quantized(node, proto)
        if self.rounds and node.key == "Clip":
            self.write_missing_bounds(node, proto)
        raises = casts and self.elems[node.inputs[0]] is not None
        if raises and attribute(node.proto, "to") == TensorProto.FLOAT:
            proto.op_type = "Identity"
            del proto.attribute[:]
        else:
            self.attributes(node, proto, keep_low=casts or bits)
        for port, value in enumerate(node.outputs):
            name = proto.output[port]
            elem = self.elems[value]
            if elem is not None and value in self.kept:
                proto.output[port] = self.raised_name(value)
                self.editor.insert_after(
                    node.index, cast(names, proto.output[port], name, elem)
                )
            elif (
                elem is not None
                and (self.rounds or bits)
                and node.key not in facts.unrounded
            ):
                is_low = casts or bits
                raw = names.fresh(f"{name}/{'low' if is_low else 'exact'}")
                proto.output[port] = raw
                if is_low:
                    after = [cast(names, raw, name, TensorProto.FLOAT)]
                else:
                    after = self.rounded(node, proto, raw, name, elem)
                self.editor.insert_after(node.index, *after)

    def quantized(self, node: Node, proto: NodeProto) -> None:
        """Let float16's infinity become the lowest integer, as kernels do: it does not saturate. Floats of 8 bits do.

        ONNX Runtime's CPU kernel returns the lowest integer (seen in 1.31.1). That of CUDA adds the zero point to the
        largest int32, which wraps around (onnxruntime/core/providers/cuda/tensor/quantize_linear.cu, RoundStd).
        """
        kind = self.types[node.outputs[0]] or ""
        if self.elems[node.inputs[0]] != FLOAT16.elem or "int" not in kind:
            return
        names = self.editor.names
        given = proto.input[0]
        end, least, is_beyond, source = (
            names.fresh(f"{given}/{part}")
            for part in ("end", "lowest", "beyond", "quantized")
        )
        self.editor.insert(
            node.scope,
            node.index,
            helper.make_node("Constant", [], [end], value_float=FLOAT16.max_finite),
            helper.make_node("Constant", [], [least], value_float=-inf),
            helper.make_node("Greater", [given, end], [is_beyond]),
            helper.make_node("Where", [is_beyond, least, given], [source]),
        )
        proto.input[0] = source

    def write_missing_bounds(self, node: Node, proto: NodeProto) -> None:
        """Write the bounds that a Clip lacks: kernels in low precision end at the largest numbers of the type.

        ONNX Runtime's CPU kernel does (onnxruntime/core/providers/cpu/math/clip.cc; seen in 1.31.1).
        """
        elem = self.elems[node.outputs[0]]
        if elem is None:
            return
        end = LOW_ELEMS[elem].max_finite
        if self.editor.view.book.opsets[""] < _CLIP_HAS_INPUTS:
            for name, bound in (("min", -end), ("max", end)):
                if attribute(node.proto, name) is None:
                    set_attribute(proto, name, bound)
            return
        proto.input.extend([""] * (3 - len(proto.input)))
        for port, bound in ((1, -end), (2, end)):
            if not proto.input[port]:
                base = f"{proto.input[0]}/bound"
                number = np.float32(bound)
                proto.input[port] = self.editor.constant(number, base)

    def rounded(
        self, node: Node, proto: NodeProto, raw: str, name: str, elem: int
    ) -> list[NodeProto]:
        """Return the nodes that add the error of the target's accumulator to a float32 result, and round it."""
        summed: list[NodeProto] = []
        if self.accumulator is not None and elem == FLOAT16.elem:
            summed = self.accumulator.nodes(node, proto, raw)
        source = summed[-1].output[0] if summed else raw
        return [*summed, *rounding(self.editor.names, source, name, elem)]

    def attributes(self, node: Node, proto: NodeProto, *, keep_low: bool) -> None:
        """Replace low-precision types in attributes by float32, except those of Casts."""
        rule = op_facts().dtype_attribute.get(node.key)
        # low precision inside the kernel also becomes float32: no CPU kernel supports it
        dtype_names = {
            op_facts().computes_in.get(node.key),
            rule.attribute if rule else None,
        }
        for item in proto.attribute:
            upcast_attribute(item, self.base_dir)
            is_type = item.type == AttributeProto.INT and item.name in dtype_names
            if is_type and item.i in LOW_ELEMS and not keep_low:
                item.i = TensorProto.FLOAT
