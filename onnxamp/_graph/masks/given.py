"""Values that are computed from inputs of the model, constants and shapes alone, as masks are and scores are not."""

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.known import is_known
from onnxamp._graph.view import Node, Origin, passed_from, passed_values


class Given:
    """Tells what is computed from inputs of the model, constants and shapes, without products of matrices."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.passed = graph.ask(passed_values)
        self._sources = graph.ask(passed_from)
        self._known = dict[int, bool]()

    def __contains__(self, value: int) -> bool:
        """Return whether a value is given. Complexity: linear in what it depends on, once."""
        opened = set[int]()
        stack = [value]
        while stack:
            value = stack[-1]
            sources = self._needs(value)
            if value not in opened and value not in self._known:
                opened.add(value)
                unseen = [
                    source for source in sources or () if source not in self._known
                ]
                stack += [one for one in unseen if one not in opened]
            else:
                stack.pop()
                # A value that depends on itself is the state of a loop, which counts as given here.
                is_given = sources is not None and all(
                    self._known.get(source, source in opened) for source in sources
                )
                self._known.setdefault(value, is_given)
        return self._known[value]

    def origins(self, value: int) -> list[int]:
        """Return the values that control flow passes on as this one."""
        seen = dict.fromkeys(self._sources.get(value, ()))
        stack = [*seen]
        while stack:
            for source in self._sources.get(stack.pop(), ()):
                if source not in seen:
                    seen[source] = None
                    stack.append(source)
        return [*seen]

    def _needs(self, value: int) -> list[int] | None:
        """Return the values that must be given, so that a value is; None if it is not."""
        graph = self.graph
        if is_known(graph, value) or is_float_input(graph, value):
            return []
        maker = graph.producer(value)
        if maker is None or maker.key in op_facts().control_flow:
            return self._sources.get(value)
        if maker.key in op_facts().elementwise or carries_masks(graph, maker):
            return [
                value
                for value in maker.reads
                if graph.types[value] in ANY_FLOAT_TENSORS
            ]
        return None


def is_float_input(graph: Graph, value: int) -> bool:
    """Return whether a value is an input of the model that holds floats."""
    is_given = graph.values[value].origin is Origin.INPUT
    return is_given and graph.types[value] in ANY_FLOAT_TENSORS


def carries_masks(graph: Graph, node: Node) -> bool:
    """Return whether a mask may pass through a node."""
    return node.key in op_facts().mask_arithmetic or node.index in graph.exact
