"""Quantized ops: what ONNX Runtime fuses into integer kernels."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.verdicts import Audit, Hazard, Kind
from onnxamp._dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._ops.facts import op_facts


def quantized_units(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Quantize and dequantize nodes and the nodes between them, which ONNX Runtime fuses into integer kernels."""
    facts = op_facts()
    for node in (
        graph.nodes if graph.nodes_of(facts.quantize | facts.dequantize) else ()
    ):
        if node.key in facts.quantize | facts.dequantize:
            yield Hazard(node.index, KIND, "quantizes or dequantizes")
            continue
        producers = [graph.producer(value) for _, value in graph.float_inputs(node)]
        fed = [p is not None and p.key in facts.dequantize for p in producers]
        feeds = any(
            reader.key in facts.quantize and port == 0
            for value in node.outputs
            for reader, port in graph.consumers(value)
        )
        if (fed and all(fed)) or (feeds and node.key not in facts.kernel_free):
            yield Hazard(
                node.index, KIND, "stands between dequantize and quantize nodes"
            )


def integer_products(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Ops that scale the sums of an integer product: the sums are out of range, and ONNX Runtime fuses both."""
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
                    graph.producer(value) for _, value in graph.float_inputs(reader)
                ]
                for maker in makers if reader.key == "Mul" else ():
                    if maker is not None and maker.key == "Mul":
                        yield Hazard(
                            maker.index, KIND, f"computes the scale of {node.label!r}"
                        )


def _adds_constant(graph: Graph, node: Node) -> bool:
    return any(
        graph.constants.is_constant(value) for _, value in graph.float_inputs(node)
    )


def _rule(graph: Graph, low: Format) -> Iterator[Hazard]:
    yield from quantized_units(graph, low)
    yield from integer_products(graph, low)


KIND: Final = Kind(
    "quantized unit",
    title="fused into integer kernels by the runtime",
    rule=_rule,
    breaks=False,
    audit=Audit(
        5,
        "scales integer sums in LOW, whose range they exceed",
        ": it ends at {end:.6g}",
        rule=integer_products,
    ),
)
