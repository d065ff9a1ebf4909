"""Ops on integers, rewritten as the equivalent float ops.

A node on integers dequantizes its inputs, computes with floats and quantizes the result, all in one kernel.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from onnx import ModelProto, NodeProto, defs

from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied, opset_imports
from onnxamp._ops.facts import attribute_of
from onnxamp._ops.targets import read_table

_PER_AXIS: Final = 13
"""The first opset at which nodes that quantize and dequantize have an axis; ONNX Runtime's own always have one."""
_OWN: Final = "com.microsoft"


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
    scale, zero = (node.input(at) != ABSENT for at in OPERATORS[node.key].result)
    return scale == zero and not attribute_of(node.proto, "channels_last", 0)


class _Form:
    """The nodes that replace one node on integers."""

    def __init__(self, editor: GraphEditor, node: Node) -> None:
        self._editor, self._node = editor, node
        self._inputs = node.proto.input
        versions = opset_imports(editor.view.model)
        self._domain = "" if versions[""] >= _PER_AXIS else _OWN
        self._made: list[NodeProto] = []

    def nodes(self) -> list[NodeProto]:
        """Return them in order."""
        operator = OPERATORS[self._node.key]
        axis = (operator.axis + attribute_of(self._node.proto, "transB", 0)) % 2
        inputs = [self._name(at) for at in operator.plain]
        inputs += [
            self._dequantized([self._name(at) for at in term], axis)
            for term in self._terms(operator)
        ]
        if bias := self._name(operator.bias):
            scales = [self._name(term[1]) for term in operator.terms]
            product = self._add("Mul", scales, f"{bias}_scale")
            inputs.append(self._dequantized([bias, product], axis=0))
        output = self._node.proto.output[0]
        scale, zero = (self._name(at) for at in operator.result)
        made = self._editor.names.fresh(f"{output}_float") if scale else output
        self._made.append(self._editor.make(operator.op, inputs, [made]))
        known = defs.get_schema(operator.op).attributes
        self._made[-1].attribute.extend(
            copied(item) for item in self._node.proto.attribute if item.name in known
        )
        if scale:
            quantize = self._editor.make(
                "QuantizeLinear", [made, scale, zero], [output]
            )
            quantize.domain = self._domain
            self._made.append(quantize)
        return self._made

    def _name(self, position: int) -> str:
        return self._inputs[position] if 0 <= position < len(self._inputs) else ""

    def _terms(self, operator: Operator) -> Iterator[Sequence[int]]:
        yield from operator.terms
        first, *_, last = operator.terms[-1]
        for start in range(last + 1, len(self._inputs) if operator.repeats else 0, 3):
            yield range(start, start + last - first + 1)

    def _dequantized(self, names: Sequence[str], axis: int) -> str:
        given = [name for name in names if name]
        output = self._add("DequantizeLinear", given, f"{names[0]}_float", axis=axis)
        self._made[-1].domain = self._domain
        return output

    def _add(self, op: str, inputs: Sequence[str], base: str, **attributes: Any) -> str:
        output = self._editor.names.fresh(base)
        self._made.append(self._editor.make(op, inputs, [output], **attributes))
        return output
