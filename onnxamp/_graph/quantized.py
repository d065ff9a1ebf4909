"""Nodes of a quantized network that compute with numbers of few bits, and the types of these."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from onnxamp._dtypes import FLOAT_TENSORS, element_name
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._ops.facts import attribute_of, op_facts

SCALES: Final = "scales"
PRODUCTS: Final = "products"
INTEGERS: Final = "integers"
"""Roles: a node that quantizes or dequantizes; a product of dequantized floats; one whose kernel reads integers."""

_FACTORS: Final = 2
"""Inputs of a product that are multiplied."""
_BITS: Final = ("bits", "expert_weight_bits")
"""Attributes of ONNX Runtime's own ops: the bits of weights that are packed into bytes."""
_NARROW: Final = ("int2", "int4", "int8", "uint2", "uint4", "uint8", "float4", "float8")
"""Prefixes of the names of types with at most eight bits."""


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
    facts, types = op_facts(), graph.types
    found = dict[int, Quantized]()
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
            found[node.index] = Quantized(name, SCALES)
            note(value)
    for node in graph.nodes_of(facts.integer_products):
        note(node.input(0))
    for node in graph.nodes_of(facts.scales):
        found[node.index] = Quantized(_stored(graph, node), INTEGERS)
    while waiting:
        value = waiting.pop()
        for node in graph.around(value):
            if node.key == "Constant" or node.bodies:
                continue
            found.setdefault(node.index, Quantized(grids[value], INTEGERS))
            for other in (*node.inputs, *node.outputs):
                note(other)
    found |= {
        node.index: Quantized(name, PRODUCTS)
        for node in graph.nodes_of(facts.contractions)
        if (name := _factors(graph, node, found))
    }
    return found


def units_between(graph: Graph) -> Iterator[tuple[Sequence[Node], Sequence[Node]]]:
    """Yield (nodes that compute with floats of each other, nodes that dequantize and quantize around them).

    Complexity: linear in nodes.
    """
    quantized, seen = graph.ask(quantized_nodes), set[int]()
    scales = {index for index, one in quantized.items() if one.role == SCALES}
    for first in graph.nodes if scales else ():
        stack, inside, ends = [first.index], set[int](), set[int]()
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
            yield (
                graph.at(inside),
                graph.at(ends),
            )


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


def _factors(graph: Graph, node: Node, found: Mapping[int, Quantized]) -> str:
    """Return the types that the factors of a product were dequantized from; "" if none was."""
    names = dict[str, None]()
    for value in node.inputs[:_FACTORS]:
        maker = graph.producer(value)
        while maker is not None and maker.key in op_facts().carriers:
            maker = graph.producer(maker.input(0))
        if maker is None or maker.key not in op_facts().dequantize:
            continue
        if maker.index in found:  # the integers of a broken model may have no type
            names[found[maker.index].type] = None
    return " and ".join(names)
