"""Quantized networks: nodes that compute with numbers of few bits, the types of these, and the same in floats.

A node on integers dequantizes its inputs, computes with floats and quantizes the result, all in one kernel. It can be
rewritten as the equivalent float ops. The float network that a whole model stands for shows the effect of rounding to
integers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from onnx import ModelProto, NodeProto, TensorProto, defs

from onnxamp._facts.dtypes import FLOAT_TENSORS, element_name
from onnxamp._facts.ops import attribute_of, op_facts, op_key
from onnxamp._facts.tables import read_table
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes, copied, opset_imports

SCALES: Final = "scales"
PRODUCTS: Final = "products"
INTEGERS: Final = "integers"
"""Roles: a node that quantizes or dequantizes; a product of dequantized floats; one whose kernel reads integers."""

_FACTORS: Final = 2
"""Inputs of a product that are multiplied: the third one of some is a bias."""
_TERM: Final = 3
"""Inputs of a term that may be repeated: its integers, their scale and their zero point."""
_BITS: Final = ("bits", "expert_weight_bits")
"""Attributes of ONNX Runtime's own ops: the bits of weights that are packed into bytes."""
_NARROW: Final = (
    "int2",
    "int4",
    "int8",
    "uint2",
    "uint4",
    "uint8",
    "float4",
    "float8",
)
"""Prefixes of the names of types with at most eight bits."""
_PER_AXIS: Final = 13
"""The first opset at which nodes that quantize and dequantize have an axis; ONNX Runtime's own always have one."""
_OWN: Final = "com.microsoft"


class Quantized(NamedTuple):
    """The quantized type and role of a node.

    Attributes:
        type: "int8", "float8e4m3fn", "int4", ...; of a product whose factors differ "int8 and int4".
        role: :data:`SCALES`, :data:`PRODUCTS` or :data:`INTEGERS`.
    """

    type: str
    role: str

    def __str__(self) -> str:
        return f"{self.type} {self.role}"


def quantized_nodes(graph: Graph) -> Mapping[int, Quantized]:
    """Return the nodes of a quantized network that hold its integers, by index. Complexity: linear in nodes."""
    facts = op_facts()
    types = graph.types
    quantized = dict[int, Quantized]()
    grids = dict[int, str]()
    """Values of few bits, and their types."""
    waiting = list[int]()

    def note(value: int) -> None:
        name = element_name(types[value])
        if is_grid(name) and value not in grids:
            grids[value] = name
            waiting.append(value)

    for node in graph.nodes_of(facts.quantize | facts.dequantize):
        value = node.input(0) if node.key in facts.dequantize else node.outputs[0]
        if name := element_name(types[value]):
            quantized[node.index] = Quantized(name, SCALES)
            note(value)
    for node in graph.nodes_of(facts.integer_products):
        note(node.input(0))
    for node in graph.nodes_of(facts.scales):
        quantized[node.index] = Quantized(_stored(graph, node), INTEGERS)
    while waiting:
        value = waiting.pop()
        for node in graph.around(value):
            if node.key == "Constant" or node.bodies:
                continue
            quantized.setdefault(node.index, Quantized(grids[value], INTEGERS))
            for other in (*node.inputs, *node.outputs):
                note(other)
    quantized |= {
        node.index: Quantized(name, PRODUCTS)
        for node in graph.nodes_of(facts.contractions)
        if (name := _factors(graph, node, quantized))
    }
    return quantized


def units_between(graph: Graph) -> Iterator[tuple[Sequence[Node], Sequence[Node]]]:
    """Yield (nodes that compute with floats of each other, nodes that dequantize and quantize around them).

    Complexity: linear in nodes.
    """
    quantized = graph.ask(quantized_nodes)
    seen = set[int]()
    scales = {index for index, one in quantized.items() if one.role == SCALES}
    for first in graph.nodes if scales else ():
        stack = [first.index]
        inside = set[int]()
        ends = set[int]()
        while stack:
            index = stack.pop()
            if index in scales:
                ends.add(index)
            elif index not in seen:
                seen.add(index)
                inside.add(index)
                node = graph.nodes[index]
                for value in (*node.inputs, *node.outputs):
                    stack += _on_float(graph, value)
        if inside and ends:
            yield graph.at(inside), graph.at(ends)


def _on_float(graph: Graph, value: int) -> Iterator[int]:
    """Yield the producers and consumers of a computed float."""
    maker = graph.producer(value)
    if (
        maker is None
        or maker.key == "Constant"
        or graph.types[value] not in FLOAT_TENSORS
    ):
        return
    yield maker.index
    yield from (index for index, _ in graph.uses[value])


def is_grid(name: str) -> bool:
    """Return whether an element type has at most eight bits."""
    return name.startswith(_NARROW)


def _stored(graph: Graph, node: Node) -> str:
    """Return the internal integer type of an op with its own scales; packed types by their bits."""
    bits = (attribute_of(node.proto, name, 0) for name in _BITS)
    if number := next(filter(None, bits), 0):
        return f"int{number}"
    names = (element_name(graph.types[value]) for value in node.inputs)
    return next(filter(is_grid, names), "int8")


def _factors(graph: Graph, node: Node, quantized: Mapping[int, Quantized]) -> str:
    """Return the types that the factors of a product were dequantized from; "" if none was."""
    names = dict[str, None]()
    for value in node.inputs[:_FACTORS]:
        maker = graph.producer(value)
        while maker is not None and maker.key in op_facts().carriers:
            maker = graph.producer(maker.input(0))
        if maker is None or maker.key not in op_facts().dequantize:
            continue
        # The integers of an invalid model may have no type.
        if maker.index in quantized:
            names[quantized[maker.index].type] = None
    return " and ".join(names)


class Operator(NamedTuple):
    """The computation of an op on integers.

    Attributes:
        op: the op on floats.
        plain: positions of the inputs before its terms, which are not quantized.
        terms: for each input, the positions of its integers, scale and zero point.
        result: positions of the scale and the zero point of the output.
        bias: position of the bias, whose scale is the product of the first two terms' scales; -1 if there is none.
        axis: the axis of a term along which scales vary.
        repeats: whether more terms of the last term's kind follow.
    """

    op: str
    terms: Sequence[Sequence[int]]
    result: Sequence[int]
    bias: int = -1
    axis: int = 0
    plain: Sequence[int] = ()
    repeats: bool = False


OPERATORS: Final[Mapping[str, Operator]] = {
    key: Operator(**row) for key, row in read_table("operators").items()
}


def as_floats(model: ModelProto) -> ModelProto:
    """Return a model with these nodes rewritten as dequantize nodes, a float op and a quantize node.

    Nodes are kept if their channels are last, or if their result has no zero point. If no node changes, return the
    model itself. Complexity: linear in nodes.
    """
    if not any(op_key(node) in OPERATORS for node in all_nodes(model.graph.node)):
        return model
    graph = Graph.of(model)
    nodes = [node for node in graph.nodes_of(OPERATORS) if _has_form(node)]
    if not nodes:
        return model
    editor = GraphEditor(graph)
    for node in nodes:
        editor.replace(node.index, _Form(editor, node).nodes())
    result = editor.finish()
    versions = opset_imports(model)
    if versions[""] < _PER_AXIS and _OWN not in versions:
        result.opset_import.add(domain=_OWN, version=1)
    return result


def _has_form(node: Node) -> bool:
    """Return whether float ops can replace a node, see :func:`as_floats`."""
    scale, zero = (node.input(at) != ABSENT for at in OPERATORS[node.key].result)
    return scale == zero and not attribute_of(node.proto, "channels_last", 0)


class _Form:
    """The nodes that replace one node on integers."""

    def __init__(self, editor: GraphEditor, node: Node) -> None:
        self._editor = editor
        self._node = node
        self._inputs = node.proto.input
        versions = opset_imports(editor.view.model)
        self._domain = "" if versions[""] >= _PER_AXIS else _OWN
        self._made: list[NodeProto] = []

    def nodes(self) -> list[NodeProto]:
        """Return them in order."""
        operator = OPERATORS[self._node.key]
        # A transposed weight has its two axes swapped.
        axis = (operator.axis + attribute_of(self._node.proto, "transB", 0)) % 2
        inputs = [self._name(at) for at in operator.plain]
        for term in self._terms(operator):
            names = [self._name(at) for at in term]
            inputs.append(self._dequantized(names, axis))
        # The integers of a bias have the scale of the sums that they are added to.
        if bias := self._name(operator.bias):
            scales = [self._name(term[1]) for term in operator.terms]
            product = self._add("Mul", scales, f"{bias}_scale")
            inputs.append(self._dequantized([bias, product], axis=0))
        output = self._node.proto.output[0]
        scale, zero = (self._name(at) for at in operator.result)
        name = self._editor.names.fresh(f"{output}_float") if scale else output
        self._made.append(self._editor.make(operator.op, inputs, [name]))
        known = defs.get_schema(operator.op).attributes
        self._made[-1].attribute.extend(
            copied(item) for item in self._node.proto.attribute if item.name in known
        )
        if scale:
            quantize = self._editor.make(
                "QuantizeLinear", [name, scale, zero], [output]
            )
            quantize.domain = self._domain
            self._made.append(quantize)
        return self._made

    def _name(self, position: int) -> str:
        return self._inputs[position] if 0 <= position < len(self._inputs) else ""

    def _terms(self, operator: Operator) -> Iterator[Sequence[int]]:
        yield from operator.terms
        first, *_, last = operator.terms[-1]
        end = len(self._inputs) if operator.repeats else 0
        for start in range(last + 1, end, _TERM):
            yield range(start, start + last - first + 1)

    def _dequantized(self, names: Sequence[str], axis: int) -> str:
        given = [name for name in names if name]
        output = self._add("DequantizeLinear", given, f"{names[0]}_float", axis=axis)
        self._made[-1].domain = self._domain
        return output

    def _add(
        self, op: str, inputs: Sequence[str], base: str, **attributes: Any
    ) -> str:
        output = self._editor.names.fresh(base)
        self._made.append(self._editor.make(op, inputs, [output], **attributes))
        return output


def without_grids(model: Model) -> Model | None:
    """Return the model without rounding computed values to integers. Weights are still rounded, because they are stored
    as integers.

    Returns:
        A model that reads the values from before they were quantized; None if nothing was quantized.
    """
    graph = model.ask(graph_of)
    quantizers = op_facts().quantize | OPERATORS.keys()
    if not graph.nodes_of(quantizers) and not any(_products(graph)):
        return None
    graph = Graph.of(as_floats(model.embedded()))
    editor = GraphEditor(graph)
    before = _before(graph, editor)
    products = [*_products(graph)]
    pairs = [
        (node, before[node.input(0)])
        for node in graph.nodes_of(op_facts().dequantize)
        if before.get(node.input(0), _NONE).type == graph.types[node.outputs[0]]
    ]
    for node, moved in pairs:
        name = node.proto.name
        outputs = node.proto.output[:1]
        identity = editor.make("Identity", [moved.name], outputs, name)
        editor.replace(node.index, [identity])
    for node, maker in products:
        editor.replace(node.index, _in_floats(editor, node, maker))
    return Model(editor.finish()) if pairs or products else None


class _Float(NamedTuple):
    """The name and type of a float that was quantized."""

    name: str
    type: str | None


_NONE: Final = _Float("", "")


def _before(graph: Graph, editor: GraphEditor) -> Mapping[int, _Float]:
    """Return the floats that integers were quantized from, by value.

    Nodes that move integers are repeated for their floats.
    """
    facts = op_facts()
    floats = dict[int, _Float]()
    movers = graph.nodes_of(facts.moves_data | facts.exact_when.keys())
    able = graph.exact & {node.index for node in movers}
    for node in graph.order:
        if node.key in facts.quantize and node.input(0) != ABSENT:
            name = graph.values[node.inputs[0]].name
            floats[node.outputs[0]] = _Float(name, graph.types[node.inputs[0]])
        elif node.index in able:
            numbers = _moved_numbers(node)
            if numbers and all(node.inputs[at] in floats for at in numbers):
                _repeat(editor, node, numbers, floats)
    return floats


def _moved_numbers(node: Node) -> list[int]:
    """Return the positions of the inputs with the numbers that a node moves, which share a type parameter; none if that
    is unknown.
    """
    signature = node.signature
    if signature is None:
        return []
    first = op_facts().moved_inputs.get(node.key, (0,))[0]
    moved = signature.input(first)
    formals = map(signature.input, range(len(node.inputs)))
    return [
        at
        for at, one in enumerate(formals)
        if one and moved and one.type == moved.type
    ]


def _repeat(
    editor: GraphEditor, node: Node, numbers: Sequence[int], floats: dict[int, _Float]
) -> None:
    """Let a node that moves integers move floats as well, which it reads from the input positions ``numbers``."""
    twin = copied(node.proto)
    label = f"{node.label}_float"
    twin.name = editor.names.fresh(label)
    for at in numbers:
        twin.input[at] = floats[node.inputs[at]].name
    for at, value in enumerate(node.outputs):
        if value != ABSENT:
            twin.output[at] = editor.names.fresh(label)
            floats[value] = _Float(
                twin.output[at], floats[node.inputs[numbers[0]]].type
            )
    editor.insert_after(node.index, twin)


_DYNAMIC = "DynamicQuantizeLinear"
"""The op that returns its scale together with its integers."""


def _products(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield (product of integers, node that quantizes its first factor)."""
    for node in graph.nodes_of(op_facts().integer_products):
        maker = graph.producer(node.input(0))
        if maker is not None and maker.key == _DYNAMIC:
            yield node, maker


def _in_floats(editor: GraphEditor, node: Node, maker: Node) -> list[NodeProto]:
    """Return the product of the numbers over their scale, and of the weight less its zero point."""
    fresh = editor.names.fresh
    proto = node.proto
    nodes = list[NodeProto]()

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(
            editor.make(op, inputs, [fresh(f"{proto.output[0]}/{op}")], **attributes)
        )
        return nodes[-1].output[0]

    numbers = add("Div", maker.proto.input[0], maker.proto.output[1])
    # The zero point of the numbers, input 2, has no part in their floats; that of the weight, input 3, has.
    factors = [
        add("Cast", name, to=TensorProto.FLOAT)
        for name in (proto.input[1], *proto.input[3:])
    ]
    weight = factors[0] if len(factors) == 1 else add("Sub", *factors)
    op = proto.op_type.removesuffix("Integer")
    product = editor.make(op, [numbers, weight], proto.output, proto.name)
    product.attribute.extend(proto.attribute)
    return [*nodes, product]
