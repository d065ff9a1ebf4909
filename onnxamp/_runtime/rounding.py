"""Writing the nodes that round values to low precision and keep them in float32."""

from dataclasses import dataclass

from onnx import GraphProto, TensorProto, helper

from onnxamp._graph.names import NewNames


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
