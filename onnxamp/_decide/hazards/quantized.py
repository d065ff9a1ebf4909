"""Quantized ops that a target fuses into integer kernels."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Effect, Fault, Harm, Hazard, HazardKind
from onnxamp._decide.patterns.quantized_units import between_integers, fused_blindly
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._facts.targets import target_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node


def quantized_units(graph: Graph, target: str) -> Iterator[Hazard]:
    """Yield quantize and dequantize nodes and the nodes between them, if the target fuses them into integer kernels.

    Complexity: linear in nodes.
    """
    quantizing = op_facts().quantize | op_facts().dequantize
    if not target_of(target).fuses_quantized or not graph.nodes_of(quantizing):
        return
    for node in graph.nodes:
        if node.key in quantizing:
            yield Hazard(node.index, KIND, "quantizes or dequantizes")
            continue
        fed, feeds = between_integers(graph, node)
        if fed or (feeds and node.key not in op_facts().kernel_free):
            yield Hazard(node.index, KIND, "is between dequantize and quantize nodes")


def integer_products(graph: Graph) -> Iterator[Hazard]:
    """Yield ops that scale the sums of an integer product: the sums are out of range, and ONNX Runtime fuses both."""
    # Products may share the ops after them, of which one hazard each is enough.
    seen: set[int] = set()
    for node in graph.nodes_of(op_facts().integer_products):
        stack = [node]
        while stack:
            for reader, _ in graph.readers(stack.pop()):
                scales = reader.key == "Mul" or (
                    reader.key == "Add" and _adds_constant(graph, reader)
                )
                if reader.index in seen or not (scales or reader.key == "Cast"):
                    continue
                seen.add(reader.index)
                stack.append(reader)
                yield Hazard(
                    reader.index,
                    KIND,
                    f"scales the integer sums of {node.label!r}",
                )
                makers = [
                    graph.producer(value, "Mul")
                    for value in graph.float_inputs(reader)
                ]
                for maker in makers if reader.key == "Mul" else ():
                    if maker is not None:
                        yield Hazard(
                            maker.index, KIND, f"computes the scale of {node.label!r}"
                        )


def _adds_constant(graph: Graph, node: Node) -> bool:
    """Return whether a node reads a float constant, such as the bias of a product."""
    return any(
        graph.constants.is_constant(value) for value in graph.float_inputs(node)
    )


class _QuantizedUnits(HazardKind):
    value = "quantized unit"
    title = "fused into integer kernels by the runtime"
    looks_at = ("quantize", "dequantize", "fused_blindly", "integer_products")
    harm = Harm.FUSION
    fault = Fault(
        Effect.SCALES_SUMS,
        "scales integer sums in LOW, which exceed its range",
        ": it ends at {end:.6g}",
    )

    def find(self, graph: Graph, _low: Format, /) -> Iterator[Hazard]:
        for node in fused_blindly(graph):
            yield Hazard(node.index, KIND, "ONNX Runtime loads it only in float32")
        yield from integer_products(graph)

    def find_on(self, graph: Graph, _low: Format, target: str, /) -> Iterator[Hazard]:
        return quantized_units(graph, target)

    def find_in_low(self, graph: Graph, _low: Format, /) -> Iterator[Hazard]:
        """Return the nodes whose values leave the range."""
        return integer_products(graph)


KIND: Final = _QuantizedUnits()
