"""Forms of ops to ask an engine about: models of one node, for ask_types.py.

They come from onnx's node tests, at every version of the op whose schema admits them, and from the generator of random
models in tests/strategies, which knows old versions. The tests have all outputs, inputs and attributes: each is also
asked with fewer of them, as exporters write it.
"""

import itertools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import onnx
from make_kernel_tables import ROOT
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.backend.test.loader import load_model_tests

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from strategies.builder import Builder  # noqa: E402 - behind the path that it is found on
from strategies.table import CONTROL_FLOW, all_ops, schemas  # noqa: E402

from onnxamp._facts.dtypes import ELEM_NUMBERS  # noqa: E402
from onnxamp._facts.ops import op_facts, op_key  # noqa: E402
from onnxamp._facts.signature import Signature, lookup  # noqa: E402
from onnxamp._graph.graph import Graph  # noqa: E402
from onnxamp._graph.types import bind  # noqa: E402

FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
ASKED = (*FLOATS, "tensor(double)")
"""Types whose mixtures are asked: an engine may take double for float32."""
SEEDS = range(4)
Types = Mapping[str, str]


@dataclass(frozen=True)
class Form:
    """A model of one node.

    Attributes:
        name: where it is from.
        node: the node.
        opset: the opset of the model.
        inputs: name -> its type, shape, and its numbers where it is a constant.
        lean: what was left out of another form, "" if nothing was.
    """

    name: str
    node: NodeProto
    opset: int
    inputs: Mapping[str, tuple[str, Sequence[int], Any]]
    lean: str = ""

    @property
    def op(self) -> str:
        return op_key(self.node)

    @property
    def signature(self) -> Signature:
        found = lookup(self.node.domain, self.node.op_type, 1 if self.op in runtime_ops() else self.opset)
        assert found is not None
        return found

    def bound(self) -> dict[str, str]:
        """Type by type parameter, those of outputs that an attribute fixes included."""
        if self.op in CONTROL_FLOW:
            return {"V": FLOATS[0]}
        graph, signature = Graph.of(self.model({})), self.signature
        kinds = [graph.types[graph.visible(name, 0)] if name else None for name in self.node.input]
        bound = dict(bind(signature, kinds))
        for position, name in enumerate(self.node.output):
            port = signature.output(position)
            if name and port is not None and port.type in signature.params:
                kind = graph.types[graph.visible(name, 0)]
                if kind is not None:
                    bound.setdefault(signature.param(port, position), kind)
        return bound

    def param(self, name: str) -> str:
        """The type parameter of an input; "V" for floats that bodies pass on, or read from outside."""
        if self.op in CONTROL_FLOW:
            return "V" if self.inputs[name][0] in FLOATS else ""
        position = list(self.node.input).index(name)
        port = self.signature.input(position)
        assert port is not None
        return self.signature.param(port, position)

    def model(self, types: Types) -> ModelProto:
        """The model with other types of parameters."""
        signature, node = self.signature, NodeProto()
        node.CopyFrom(self.node)
        inputs, initializers = [], []
        for name, (given, shape, data) in self.inputs.items():
            kind = types.get(self.param(name), given)
            if data is not None:
                initializers.append(stored(name, kind, np.asarray(data)))
            else:
                inputs.append(helper.make_tensor_value_info(name, ELEM_NUMBERS[elem(kind)], shape))
        if self.op not in runtime_ops():
            _set_attributes(node, signature, types, onnx.defs.get_schema(self.op, self.opset))
        for item in node.attribute:
            for info in (*item.g.input, *item.g.output):
                if info.type.tensor_type.elem_type == TensorProto.FLOAT and "V" in types:
                    info.type.tensor_type.elem_type = ELEM_NUMBERS[elem(types["V"])]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = helper.make_graph([node], "form", inputs, outputs, initializers)
        opsets = [helper.make_opsetid("", self.opset)]
        if self.node.domain:
            opsets.append(helper.make_opsetid(self.node.domain, 1))
        made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        inferred = Graph.of(made)
        for info in made.graph.output:
            kind = inferred.types[inferred.visible(info.name, 0)]
            if kind is not None and elem(kind) in ELEM_NUMBERS:
                info.type.tensor_type.elem_type = ELEM_NUMBERS[elem(kind)]
        return made


def _set_attributes(node: NodeProto, signature: Signature, types: Types, schema: onnx.defs.OpSchema) -> None:
    """Set the attributes that fix types of outputs, those that are left out included."""
    facts = op_facts()
    port = signature.output(0)
    for rule, param in (
        (facts.dtype_attribute.get(node.op_type), signature.param(port, 0) if port else ""),
        (facts.output_parameter.get(node.op_type), getattr(facts.output_parameter.get(node.op_type), "parameter", "")),
    ):
        if rule is None or param not in types or rule.attribute not in schema.attributes:
            continue
        if rule.attribute not in {item.name for item in node.attribute}:
            is_tensor = schema.attributes[rule.attribute].type == onnx.defs.OpSchema.AttrType.TENSOR
            default = numpy_helper.from_array(np.zeros(1, np.float32)) if is_tensor else 0
            node.attribute.append(helper.make_attribute(rule.attribute, default))
        for item in node.attribute:
            if item.name == rule.attribute and item.type == onnx.AttributeProto.INT:
                item.i = ELEM_NUMBERS[elem(types[param])]
            elif item.name == rule.attribute and item.type == onnx.AttributeProto.TENSOR:
                item.t.CopyFrom(stored(item.t.name, types[param], numpy_helper.to_array(item.t)))


def elem(kind: str) -> str:
    return kind.removeprefix("tensor(").removesuffix(")")


def stored(name: str, kind: str, data: Any) -> TensorProto:
    return numpy_helper.from_array(data.astype(helper.tensor_dtype_to_np_dtype(ELEM_NUMBERS[elem(kind)])), name)


def node_forms() -> Iterator[Form]:
    """Those of onnx's node tests: without constants, with constants behind the first input, with constant integers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = load_model_tests(kind="node")
    for case in cases:
        model = case.model
        if model is None or len(model.graph.node) != 1 or model.graph.node[0].domain not in ("", "ai.onnx"):
            continue
        if any(item.HasField("g") for item in model.graph.node[0].attribute) or not case.data_sets:
            continue
        kinds = [info.type.WhichOneof("value") for info in model.graph.input]
        data = case.data_sets[0][0]
        if set(kinds) - {"tensor_type"} or not all(isinstance(item, (TensorProto, np.ndarray)) for item in data):
            continue
        opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        arrays = {info.name: array(item) for info, item in zip(model.graph.input, data, strict=False)}
        inputs = {
            info.name: (kind_of(info.type.tensor_type.elem_type),
                        [dim.dim_value for dim in info.type.tensor_type.shape.dim], arrays.get(info.name))
            for info in model.graph.input
        }  # fmt: skip
        if any(elem(kind) not in ELEM_NUMBERS for kind, _, _ in inputs.values()):
            continue
        yield from variants(case.name, model.graph.node[0], opset, inputs)


def kind_of(number: int) -> str:
    """The type of tensors of an element type, as schemas spell it."""
    return f"tensor({TensorProto.DataType.Name(number).lower()})"


def array(item: Any) -> Any:
    return numpy_helper.to_array(item) if isinstance(item, TensorProto) else item


def variants(name: str, node: NodeProto, opset: int, inputs: Mapping[str, Any]) -> Iterator[Form]:
    """A form for each choice of what is constant and left out, at each version of the op that admits it."""
    yield from constant_choices(name, node, opset, inputs)
    seen = {node.SerializeToString(deterministic=True)}
    for label, lean in leaner(node, opset):
        serialized = lean.SerializeToString(deterministic=True)
        if serialized not in seen:
            seen.add(serialized)
            for form in constant_choices(f"{name}{label}", lean, opset, inputs):
                yield replace(form, lean=label)


def leaner(node: NodeProto, opset: int) -> Iterator[tuple[str, NodeProto]]:
    """The node with what is optional left out, as exporters do: outputs, inputs, and attributes at their default."""
    schema = onnx.defs.get_schema(node.op_type, opset)
    outputs, inputs = list(node.output), list(node.input)
    for count in range(max(1, schema.min_output), len(outputs)):
        yield f", {count} of {len(outputs)} outputs", _changed(node, output=outputs[:count])
    if schema.min_output == 0:  # any output alone
        for position in range(1, len(outputs)):
            yield f", output {position} alone", _changed(node, output=[""] * position + [outputs[position]])
    for count in range(max(1, schema.min_input), len(inputs)):
        yield f", {count} of {len(inputs)} inputs", _changed(node, input=inputs[:count])
    if schema.inputs and schema.inputs[-1].option != onnx.defs.OpSchema.FormalParameterOption.Variadic:
        for position in range(schema.min_input, len(inputs) - 1):
            left = [*inputs[:position], "", *inputs[position + 1 :]]
            yield f", without input {position}", _changed(node, input=left)
    if any(not schema.attributes[item.name].required for item in node.attribute if item.name in schema.attributes):
        bare = _changed(node)
        del bare.attribute[:]
        bare.attribute.extend(
            item for item in node.attribute
            if item.name not in schema.attributes or schema.attributes[item.name].required
        )  # fmt: skip
        yield ", attributes at their default", bare


def _changed(node: NodeProto, **fields: Sequence[str]) -> NodeProto:
    """A copy of the node with other inputs or outputs."""
    made = NodeProto()
    made.CopyFrom(node)
    for name, values in fields.items():
        made.ClearField(name)
        getattr(made, name).extend(values)
    return made


def constant_choices(name: str, node: NodeProto, opset: int, inputs: Mapping[str, Any]) -> Iterator[Form]:
    """A form for each choice of what is constant, at each version of the op that admits it."""
    order = list(dict.fromkeys(filter(None, node.input)))
    choices = {
        "": frozenset(order[:0]),
        ", constants behind the first": frozenset(order[1:]),
        ", constant integers": frozenset(key for key in order if inputs[key][0] not in FLOATS),
    }
    seen = set()
    for label, constant in choices.items():
        if constant in seen or any(inputs[key][2] is None for key in constant):
            continue
        seen.add(constant)
        given = {key: (*inputs[key][:2], inputs[key][2] if key in constant else None) for key in order}
        for since in versions(node.op_type):
            at = min(opset, newest_of(node.op_type, since))
            if since <= opset and is_valid(node, at, given):
                yield Form(f"{name}{label}, opset {at}", node, at, given)


@cache
def versions(op: str) -> tuple[int, ...]:
    if op in runtime_ops():
        return (1,)
    return tuple(row.since_version for row in schemas()[op] if not row.deprecated)


def newest_of(op: str, since: int) -> Any:
    """The newest opset with this version of the op; that of ONNX Runtime's own ops has no end."""
    if op in runtime_ops():
        return None
    later = [row.since_version - 1 for row in schemas()[op] if row.since_version > since]
    return min(later, default=onnx.defs.onnx_opset_version())


def is_valid(node: NodeProto, opset: int, inputs: Mapping[str, Any]) -> bool:
    """Whether the op's version at an opset has these inputs and attributes."""
    schema = onnx.defs.get_schema(node.op_type, opset)
    if any(item.name not in schema.attributes for item in node.attribute) or len(node.input) > schema.max_input:
        return False
    given = {item.name for item in node.attribute}
    if any(item.required and name not in given for name, item in schema.attributes.items()):
        return False
    signature = lookup("", node.op_type, opset)
    assert signature is not None
    kinds = [inputs[name][0] if name else None for name in node.input]
    for position, kind in enumerate(kinds):
        port = signature.input(position)
        if kind and (port is None or kind not in signature.params.get(port.type, {port.type})):
            return False
    return len([name for name in node.input if name]) >= schema.min_input and len(node.output) <= schema.max_output


BODIES = {
    "If": """<opset_import: ["" : 13]> agraph (bool c, float[2,3] x) => (float[2,3] y) {
        y = If (c) <then_branch = a () => (float[2,3] p) { p = Relu (x) },
                    else_branch = b () => (float[2,3] q) { q = Neg (x) }>
    }""",
    "Loop": """<opset_import: ["" : 13]> agraph (float[2,3] x) => (float[2,3] y) {
        m = Constant <value = int64 {3}> ()
        k = Constant <value = bool {1}> ()
        y = Loop (m, k, x) <body = a (int64 i, bool c, float[2,3] p) => (bool d, float[2,3] q)
            { d = Identity (c) q = Relu (p) }>
    }""",
    "Scan": """<opset_import: ["" : 13]> agraph (float[2] s, float[3,2] x) => (float[2] t, float[3,2] y) {
        t, y = Scan (s, x) <num_scan_inputs = 1, body = a (float[2] p, float[2] q) => (float[2] r, float[2] z)
            { r = Add (p, q) z = Relu (r) }>
    }""",
}
"""A model for each op with bodies: what these pass on has one type."""


def body_forms() -> Iterator[Form]:
    """Control flow that passes on floats, at each version."""
    for op, text in BODIES.items():
        graph = onnx.parser.parse_model(text).graph
        node = next(node for node in graph.node if node.op_type == op)
        for since in versions(op):
            if since >= 11:
                yield Form(f"body {op}, opset {newest_of(op, since)}", node, newest_of(op, since), _read(graph))


def _read(graph: onnx.GraphProto) -> dict[str, Any]:
    """The inputs and constants of a graph, as forms have them."""
    inputs = {
        info.name: (kind_of(info.type.tensor_type.elem_type),
                    [dim.dim_value for dim in info.type.tensor_type.shape.dim], None)
        for info in graph.input
    }  # fmt: skip
    constants = {
        made.output[0]: (kind_of(made.attribute[0].t.data_type), list(made.attribute[0].t.dims),
                         array(made.attribute[0].t))
        for made in graph.node if made.op_type == "Constant"
    }  # fmt: skip
    return inputs | constants


RUNTIME_OPSET = 21
RUNTIME = (
    "(float[2,8] x, float[8] s) => (float[2,8] y) { y = SimplifiedLayerNormalization <axis = -1> (x, s) }",
    """(float[1,2,8] x, float[1,2,8] z, float[8] s) => (float[1,2,8] y) {
        y = com.microsoft.SkipSimplifiedLayerNormalization (x, z, s)
    }""",
    """(float[1,2,8] x, float[1,2,8] z, float[8] s) => (float[1,2,8] y, float[1,2,8] t) {
        y, , , t = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-6> (x, z, s)
    }""",
    """(float[1,2,8] x, float[1,2,8] z, float[8] s, float[8] b) => (float[1,2,8] y) {
        y = com.microsoft.SkipSimplifiedLayerNormalization (x, z, s, b)
    }""",
    "(float[1,2,8] x) => (float[1,2,8] y) { y = com.microsoft.Gelu (x) }",
    """(float[1,2,8] q, float[1,2,8] k, float[1,2,8] v) => (float[1,2,8] y) {
        y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v)
    }""",
    """(float[1,2,8] q, float[1,2,8] k, float[1,2,8] v, float[1,2,2,2] m) => (float[1,2,8] y) {
        y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, , , m)
    }""",
    """(float[1,1,8] q, float[1,1,8] k, float[1,1,8] v, float[1,2,4,4] p, float[1,2,4,4] r)
        => (float[1,1,8] y, float[1,2,5,4] s, float[1,2,5,4] t) {
        y, s, t = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, , , , p, r)
    }""",
    """(float[1,2,64] q, float[1,2,32] k, float[1,2,32] v, float[1,1,8,32] p, float[1,1,8,32] r)
        => (float[1,2,64] y, float[1,1,8,32] s, float[1,1,8,32] t) {
        l = Constant <value = int32[1] {1}> ()
        n = Constant <value = int32 {2}> ()
        y, s, t = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, scale = 0.25> (
            q, k, v, p, r, l, n
        )
    }""",
    """(float[1,2,2,8] x) => (float[1,2,2,8] y) {
        i = Constant <value = int64[1,2] {0, 1}> ()
        c = Constant <value = float[4,4] {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}> ()
        s = Constant <value = float[4,4] {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}> ()
        y = com.microsoft.RotaryEmbedding (x, i, c, s)
    }""",
    """(float[1,2,32] x) => (float[1,2,2] y) {
        w = Constant <value = uint8[2,1,16] {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}> ()
        s = Constant <value = float[2] {1,1}> ()
        y = com.microsoft.MatMulNBits <K = 32, N = 2, bits = 4, block_size = 32> (x, w, s)
    }""",
)
"""Models of one op of ONNX Runtime's own that other engines may know."""


@cache
def runtime_ops() -> frozenset[str]:
    """The ops of ONNX Runtime's own that are asked about."""
    return frozenset(op_key(node) for _, node in _runtime_nodes())


def _runtime_nodes() -> Iterator[tuple[onnx.GraphProto, NodeProto]]:
    for text in RUNTIME:
        opsets = f'"" : {RUNTIME_OPSET}, "com.microsoft" : 1'
        graph = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{opsets}]> agraph {text}").graph
        yield graph, next(node for node in graph.node if node.op_type != "Constant")


def runtime_forms() -> Iterator[Form]:
    """ONNX Runtime's own ops."""
    for graph, node in _runtime_nodes():
        yield Form(f"runtime {op_key(node)}", node, RUNTIME_OPSET, _read(graph))


def random_forms() -> Iterator[Form]:
    """Nodes that the generator of random models makes, at each version of each op."""
    for op, seed in itertools.product(all_ops(), SEEDS):
        if op in CONTROL_FLOW:
            continue
        for since in versions(op):
            opset = newest_of(op, since)
            if opset >= 9:
                yield from random_form(op, opset, seed)


def random_form(op: str, opset: int, seed: int) -> Iterator[Form]:
    builder = Builder(Random(f"{op} {opset} {seed}"), opset)
    builder.exotic = 0.0
    try:
        builder.node(builder.main, op)
    except Exception:  # noqa: BLE001 - the generator is not made for every old version
        return
    node = next(node for node in reversed(builder.main.nodes) if node.op_type == op)
    values = {value.name: value for value in builder.main.values}
    if any(name and (name not in values or not values[name].static) for name in node.input):
        return
    inputs = {
        name: (values[name].kind, values[name].shape, array(values[name].data) if values[name].data else
               builder.feeds.get(name) if "int64" in values[name].kind else None)
        for name in node.input if name
    }  # fmt: skip
    if all(kind.startswith("tensor(") for kind, _, _ in inputs.values()) and is_valid(node, opset, inputs):
        yield Form(f"random {op} {seed}, opset {opset}", node, opset, inputs)
