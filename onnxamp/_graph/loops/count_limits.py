"""How large integers get that count: limits of counters, and of the coordinates computed from them."""

from collections.abc import Mapping, Sequence
from math import inf, prod

from onnxamp._facts.ops import Count, attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.loops.fading import clip_bounds
from onnxamp._graph.numbers.index_paths import INTEGERS
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import ABSENT, Node


class CountLimits:
    """Computes limits. ``known`` are those so far, by value."""

    def __init__(self, graph: Graph, known: Mapping[int, float]) -> None:
        self.graph = graph
        self.known = known

    def of_count(self, node: Node, count: Count) -> float:
        """Return the largest magnitude that the integers of an op that counts may reach."""
        graph = self.graph
        if count.up_to == "limits":
            return max((self.reach(value) for value in node.reads[:2]), default=inf)
        sizes = graph.shapes[node.input(0)]
        if not count.up_to or sizes is None:
            return inf
        if count.up_to == "axis":
            axis = attribute(node.proto, "axis")
            axis = count.default if axis is None else int(axis)
            sizes = sizes[axis : axis + 1 or None]
        numbers = [_or_endless(size) for size in sizes]
        if count.up_to == "elements":
            return prod(numbers)
        return max(numbers, default=1.0)

    def reach(self, value: int) -> float:
        """Return the largest magnitude of integers, or of a constant."""
        constants = self.graph.constants
        if not constants.is_constant(value):
            return self.known.get(value, inf)
        stats = constants.stats(value)
        if stats is not None:
            return abs(stats.largest_number)
        is_integer = self.graph.types[value] in INTEGERS
        integers = constants.integers(value) if is_integer else None
        if integers is None:
            return inf
        return float(max(map(abs, integers), default=0))

    def of_result(self, node: Node, sources: Sequence[int]) -> float:
        """Return the largest magnitude of the results of coordinate arithmetic on these integers, but for divisions."""
        facts = op_facts()
        graph = self.graph
        own = [self.known.get(value, 0.0) for value in sources]
        others = [value for value in node.reads if value not in sources]
        if node.key in facts.moved_inputs:
            return self._of_moved(node, max(own))
        if node.key in facts.reduces_axes and node.index not in graph.exact:
            return inf
        if node.key in facts.rounding and len(node.reads) > 1:
            return min(max(own), self.reach(node.reads[1]))
        if node.key in facts.multiplies:
            # A factor of 0 counts as 1: that it is 0 on a sample says nothing.
            return prod((*own, *(self.reach(value) or 1.0 for value in others)))
        if node.key in facts.adds:
            constants = filter(graph.constants.is_constant, others)
            return sum((*own, *map(self.reach, constants)))
        return self._of_clipped(node, max(own))

    def of_quotient(self, node: Node) -> float:
        """Return the largest magnitude of integers divided by a constant, or by something unknown."""
        largest = self.known.get(node.input(0), 0.0)
        number = self.graph.constants.uniform(node.input(1))
        return largest / max(abs(number or 1.0), 1e-30)

    def _of_clipped(self, node: Node, largest: float) -> float:
        """Return the limit of integers that pass through a node, which may clip them on both sides."""
        bounds = [one for one in clip_bounds(self.graph, node) if one is not None]
        if len(bounds) < 2:
            return largest
        return min(largest, max(map(abs, bounds)))

    def _of_moved(self, node: Node, largest: float) -> float:
        """Return the limit of moved integers: the size itself if they are sizes of a known axis."""
        for port in op_facts().moved_inputs[node.key][:1]:
            maker = self.graph.producer(node.input(port), "Shape")
            if maker is None or maker.proto.attribute:
                continue
            sizes = self.graph.shapes[maker.input(0)]
            chosen = [] if sizes is None else self._chosen(node, sizes)
            if chosen:
                return max(map(_or_endless, chosen))
        return largest

    def _chosen(self, node: Node, sizes: Shape) -> list[int | None]:
        """Return the sizes that a look-up or a Slice takes from a shape; none if that is not known."""
        integers = self.graph.constants.integers
        lookup = op_facts().lookups.get(node.key, ())
        if lookup:
            indices = integers(node.input(lookup[0].indices)) or []
            rank = len(sizes)
            return [sizes[index] for index in indices if -rank <= index < rank]
        starts, ends = integers(node.input(1)), integers(node.input(2))
        is_plain = node.key == "Slice" and node.input(4) == ABSENT
        if not (is_plain and starts and ends):
            return []
        return list(sizes[starts[0] : ends[0]])


def _or_endless(size: int | None) -> float:
    """Return a size; an unknown one has no limit."""
    return inf if size is None else float(size)
