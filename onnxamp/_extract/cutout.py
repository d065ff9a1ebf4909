"""Choosing the nodes around a node, and where to cut them out of the main graph; nothing is run or built here.

==============================  ============================================================================
node                            in the region
==============================  ============================================================================
within reach of the centre      yes: ``before`` steps towards the inputs, ``after`` steps towards the outputs
Cast                            yes, next to all of these; it does not count as a step
Constant, and what is computed  with its readers: it is a weight in disguise
from constants alone
random (RandomNormal, ...)      only in the centre: elsewhere the numbers it drew are recorded
producer of a sequence or an    with its readers: files of arrays cannot hold its output
optional
==============================  ============================================================================
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from onnxamp._errors import ArgumentError, ModelError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin, View
from onnxamp._graph.wiring import Wiring, wire
from onnxamp._ops.facts import op_facts

_HELD: Final = frozenset({Origin.INITIALIZER, Origin.SPARSE, Origin.DEFAULT})
_SUGGESTIONS: Final = 5


@dataclass(frozen=True, slots=True)
class MainGraph:
    """A main graph with what choosing a region needs to know about it."""

    view: Graph
    wiring: Wiring
    constant: Collection[int]
    """Nodes that compute from constants alone."""

    @classmethod
    def of(cls, view: Graph) -> "MainGraph":
        """Analyse a model. Complexity: linear in nodes and reads of all scopes."""
        wiring = wire(view)
        return cls(view, wiring, _constant(view, wiring))

    def producers(self, node: int) -> Iterator[int]:
        """Nodes whose outputs a node needs."""
        values = (self.view.values[value] for value in self.wiring.needs[node])
        return (value.producer for value in values if value.producer != ABSENT)

    def consumers(self, node: int) -> Iterator[int]:
        """Nodes that need a node's outputs."""
        return (
            reader for value in self.outputs(node) for reader in self.wiring.readers.get(value, ())
        )

    def outputs(self, node: int) -> list[int]:
        """Values that a node computes."""
        return [value for value in self.view.nodes[node].outputs if value != ABSENT]


@dataclass(frozen=True, slots=True)
class Cut:
    """A region by index: nodes in topological order, and the values that enter it, leave it, and that it holds."""

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[int, ...]


def find_nodes(view: View, around: Iterable[str]) -> list[Node]:
    """The nodes of all scopes with these names, in the file's order.

    Args:
        around: names of nodes or of their outputs; a text that is no name is a regular expression for whole names.

    Raises:
        ArgumentError: one of them names nothing; the message suggests similar names.

    Complexity: linear in names for each, and slower only on the way to the error.
    """
    chosen: dict[int, Node] = {}
    for text in around:
        matches, reason = _compiled(text)
        nodes = _named(view, text.__eq__) or _named(view, matches)
        if not nodes:
            raise ArgumentError(_unknown(view, text, reason))
        chosen |= {node.index: node for node in nodes}
    return [chosen[index] for index in sorted(chosen)]


def _named(view: View, fits: Callable[[str], object]) -> list[Node]:
    return [
        node
        for node in view.nodes
        if any(fits(name) for name in (node.proto.name, *node.proto.output) if name)
    ]


def _compiled(text: str) -> tuple[Callable[[str], object], str]:
    """The text as a regular expression; or what matches nothing, and the reason: names may hold brackets."""
    try:
        return re.compile(text).fullmatch, ""
    except re.error as error:
        return lambda _: None, str(error)


def _unknown(view: View, text: str, reason: str) -> str:
    """The message about a name that does not exist; ``reason`` is why it is no regular expression, if so."""
    head = f"No node or node output is called {text!r}, "
    head += (
        f"and it is no regular expression ({reason})"
        if reason
        else "or matches it as a regular expression"
    )
    for value in view.values:
        if value.name == text and value.producer == ABSENT:
            readers = list(dict.fromkeys(node.label for node, _ in view.consumers(value.index)))[
                :_SUGGESTIONS
            ]
            article = "an" if value.origin.value[0] in "aeiou" else "a"
            return f"{head}: it is {article} {value.origin.value}, read by {', '.join(map(repr, readers)) or 'nothing'}."
    labels = list(dict.fromkeys(node.label for node in view.nodes))
    names = list(
        dict.fromkeys(
            [*labels, *(name for node in view.nodes for name in node.proto.output if name)]
        )
    )
    close = [name for name in labels if text and text.lower() in name.lower()][:_SUGGESTIONS]
    close = close or get_close_matches(text, names, _SUGGESTIONS, 0.5)
    hint = (
        f"similar names are {', '.join(map(repr, close))}"
        if close
        else "'onnxamp inspect -v' lists the nodes"
    )
    return f"{head}; {hint}."


def _constant(view: View, wiring: Wiring) -> set[int]:
    constant = set[int]()
    for index in view.order:
        node = view.nodes[index]
        if node.scope != 0 or node.key in op_facts().random:
            continue
        values = [view.values[value] for value in wiring.needs[index]]
        is_computed = (
            values
            and not node.bodies
            and all(v.origin in _HELD or v.producer in constant for v in values)
        )
        if node.key == "Constant" or is_computed:
            constant.add(index)
    return constant


def choose(graph: MainGraph, centre: Collection[int], before: int, after: int) -> set[int]:
    """The main-graph nodes around those of ``centre``, as the module's table says.

    Raises:
        ArgumentError: the region would take in a model input that is not a tensor.

    Complexity: linear in the region's nodes and their reads.
    """
    region = _reached(graph, centre, graph.producers, before) | _reached(
        graph, centre, graph.consumers, after
    )
    waiting = list(region)
    while waiting:
        for value in graph.wiring.needs[waiting.pop()]:
            producer = graph.view.values[value].producer
            if _comes_along(graph, value) and producer not in region:
                region.add(producer)
                waiting.append(producer)
    return region


def _reached(
    graph: MainGraph, start: Iterable[int], neighbours: Callable[[int], Iterable[int]], limit: int
) -> set[int]:
    """Nodes within ``limit`` steps. Nodes that are no step are followed first, so that every path is the shortest."""
    steps = dict.fromkeys(start, 0)
    waiting = deque(steps)
    while waiting:
        node = waiting.popleft()
        for other in neighbours(node):
            key = graph.view.nodes[other].key
            is_free = key in op_facts().idle
            count = steps[node] + (not is_free)
            if (
                count <= limit
                and count < steps.get(other, limit + 1)
                and key not in op_facts().random
            ):
                steps[other] = count
                (waiting.appendleft if is_free else waiting.append)(other)
    return set(steps)


def _comes_along(graph: MainGraph, value: int) -> bool:
    """Whether the producer of a value that enters must be in the region, as the value cannot be recorded."""
    producer, type_name = graph.view.producer(value), graph.view.types[value]
    is_tensor = type_name is None or type_name.startswith("tensor(")
    if producer is not None:
        return producer.key in op_facts().idle or producer.index in graph.constant or not is_tensor
    entering = graph.view.values[value]
    if not is_tensor and entering.origin is Origin.INPUT:
        raise ArgumentError(
            f"The region would read the model input {entering.name!r}, a {type_name}, and files of arrays cannot hold"
            " that: choose a node further behind it, or take fewer nodes before (--before)."
        )
    return False


def cut_out(graph: MainGraph, nodes: Collection[int], centre: Collection[int]) -> Cut:
    """Cut nodes out of the main graph: what they read from other nodes enters, what others read of them leaves.

    onnx-graphsurgeon cuts, on a sketch of the region and its neighbours without attributes, weights and bodies: it
    would be slow on all nodes, and lose what it cannot hold.

    Raises:
        ModelError: onnx-graphsurgeon fails.
    """
    view, needs = graph.view, graph.wiring.needs
    made = {value for node in nodes for value in graph.outputs(node)}
    reads = dict.fromkeys(
        value for node in sorted(nodes) for value in needs[node] if value not in made
    )
    enters = [value for value in reads if view.values[value].origin not in _HELD]
    leaves = list(_leaving(graph, nodes, centre))
    neighbours = {view.values[value].producer for value in enters} - {ABSENT}
    sketched = [index for index in view.order if index in neighbours or index in nodes]
    kept, inputs = _cut_sketch(graph, sketched, enters, leaves)
    weights = dict.fromkeys(
        v for node in kept for v in needs[node] if view.values[v].origin in _HELD
    )
    return Cut(tuple(kept), tuple(inputs), tuple(leaves), tuple(weights))


def _leaving(graph: MainGraph, nodes: Collection[int], centre: Collection[int]) -> Iterator[int]:
    """Values that others read, and those of the centre, in the file's order."""
    readers, results = graph.wiring.readers, graph.view.results
    for node in sorted(nodes):
        outputs = graph.outputs(node)
        used = [value for value in outputs if readers.get(value) or results[value]]
        for value in (used or outputs) if node in centre else used:
            is_result = any(scope == 0 for scope, _ in results[value])
            is_read = node not in graph.constant and any(
                n not in nodes for n in readers.get(value, ())
            )
            if node in centre or is_result or is_read:
                yield value


def _cut_sketch(
    graph: MainGraph, sketched: Sequence[int], enters: Sequence[int], leaves: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The nodes between the values that enter and those that leave, and the entering values that they read."""
    import onnx_graphsurgeon as gs  # noqa: PLC0415

    values, tensors = graph.view.values, dict[int, Any]()

    def tensors_of(indices: Iterable[int]) -> list[Any]:
        present = [
            value for value in indices if value != ABSENT and values[value].origin not in _HELD
        ]
        return [tensors.setdefault(value, gs.Variable(values[value].name)) for value in present]

    try:
        nodes = [
            gs.Node(
                "Node",
                str(i),
                None,
                tensors_of(graph.wiring.needs[i]),
                tensors_of(graph.outputs(i)),
            )
            for i in sketched
        ]
        cut = gs.Graph(nodes, tensors_of(enters), tensors_of(leaves)).cleanup(
            remove_unused_graph_inputs=True
        )
    except Exception as error:
        name = graph.view.model.graph.name
        raise ModelError(
            f"onnx-graphsurgeon cannot cut the region out of {name!r}: {error}"
        ) from error
    names = graph.view.scopes[0].names
    return [int(node.name) for node in cut.nodes], [names[tensor.name] for tensor in cut.inputs]
