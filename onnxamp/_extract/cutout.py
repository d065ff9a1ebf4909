"""Choosing the nodes around a node, and where to cut them out of the main graph. Nothing is run, nothing is built.

==============================  ============================================================================
node                            in the region
==============================  ============================================================================
within reach of the middle      yes: ``before`` steps towards the inputs, ``after`` steps towards the outputs
Cast                            yes, behind and in front of all of these; it is no step
Constant, and what is computed  with those who read it: such nodes are weights in disguise
from constants alone
random (RandomNormal, ...)      only in the middle: elsewhere what it drew is recorded
maker of a sequence or an       with those who read it: files of arrays cannot hold what it makes
optional
==============================  ============================================================================
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from onnxamp._errors import ArgumentError, ModelError
from onnxamp._graph.types import Types
from onnxamp._graph.view import ABSENT, Node, Origin, View
from onnxamp._ops.facts import op_facts

_HELD: Final = frozenset({Origin.INITIALIZER, Origin.SPARSE, Origin.DEFAULT})
_SUGGESTIONS: Final = 5


@dataclass(frozen=True, slots=True)
class Wiring:
    """The main graph as nodes that need values, whether they read them themselves or in their bodies."""

    needs: Mapping[int, Sequence[int]]
    """Node -> values of the main graph that it needs."""
    readers: Mapping[int, Sequence[int]]
    """The same, by value."""
    outermost: Sequence[int]
    """Node of any scope -> the main-graph node that it belongs to, at any depth."""
    constant: Collection[int]
    """Nodes that compute from constants alone."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A region: indices of nodes in an order that runs, and of values that it takes in, gives back, and holds."""

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[int, ...]


def find_nodes(view: View, around: Iterable[str]) -> list[Node]:
    """The nodes of all scopes that are meant, in the file's order.

    Args:
        around: for each a node's name, or the name of one of its outputs; where there is no such name, a regular
            expression that matches whole names.

    Raises:
        ArgumentError: one names nothing; the message lists names that are like it.

    Complexity: linear in names for each, and slower only on the way to the error.
    """
    found: dict[int, Node] = {}
    for text in around:
        matches, reason = _compiled(text)
        nodes = _named(view, text.__eq__) or _named(view, matches)
        if not nodes:
            raise ArgumentError(_unknown(view, text, reason))
        found |= {node.index: node for node in nodes}
    return [found[index] for index in sorted(found)]


def _named(view: View, fits: Callable[[str], object]) -> list[Node]:
    return [node for node in view.nodes if any(fits(name) for name in (node.proto.name, *node.proto.output) if name)]


def _compiled(text: str) -> tuple[Callable[[str], object], str]:
    """What the text matches as a regular expression; or nothing, and why it is none: names may hold brackets."""
    try:
        return re.compile(text).fullmatch, ""
    except re.error as error:
        return lambda _: None, str(error)


def _unknown(view: View, text: str, reason: str) -> str:
    """``reason``: why the text is no regular expression, if it is none."""
    head = f"No node or node output is called {text!r}, "
    head += f"and it is no regular expression ({reason})" if reason else "or matches it as a regular expression"
    for value in view.values:
        if value.name == text and value.producer == ABSENT:
            readers = list(dict.fromkeys(node.label for node, _ in view.consumers(value.index)))[:_SUGGESTIONS]
            article = "an" if value.origin.value[0] in "aeiou" else "a"
            return (
                f"{head}: it is {article} {value.origin.value}, read by {', '.join(map(repr, readers)) or 'nothing'}."
            )
    labels = list(dict.fromkeys(node.label for node in view.nodes))
    names = list(dict.fromkeys([*labels, *(name for node in view.nodes for name in node.proto.output if name)]))
    close = [name for name in labels if text and text.lower() in name.lower()][:_SUGGESTIONS]
    close = close or get_close_matches(text, names, _SUGGESTIONS, 0.5)
    hint = f"like it are {', '.join(map(repr, close))}" if close else "'onnxamp inspect -v' lists the nodes"
    return f"{head}; {hint}."


def wire(view: View) -> Wiring:
    """Resolve the main graph. Complexity: linear in nodes and reads of all scopes."""
    top: list[int] = [ABSENT] * len(view.scopes)
    for scope in view.scopes[1:]:  # a scope stands behind the one around it
        top[scope.index] = scope.owner if scope.parent == 0 else top[scope.parent]
    outermost = [node.index if node.scope == 0 else top[node.scope] for node in view.nodes]
    needs: dict[int, dict[int, None]] = {index: {} for index in view.scopes[0].nodes}
    readers: dict[int, dict[int, None]] = {}
    for value in view.values:
        if value.scope == 0:
            inner = (top[scope] for scope, _ in view.results[value.index] if scope != 0)
            for node in (*(outermost[node] for node, _ in view.uses[value.index]), *inner):
                needs[node][value.index] = None
                readers.setdefault(value.index, {})[node] = None
    lists = {node: tuple(values) for node, values in needs.items()}
    return Wiring(lists, {v: tuple(nodes) for v, nodes in readers.items()}, outermost, _constant(view, lists))


def _constant(view: View, needs: Mapping[int, Sequence[int]]) -> set[int]:
    found = set[int]()
    for index in view.order:
        node = view.nodes[index]
        if node.scope != 0 or node.key in op_facts().random:
            continue
        values = [view.values[value] for value in needs[index]]
        draws_on = values and not node.bodies and all(v.origin in _HELD or v.producer in found for v in values)
        if node.key == "Constant" or draws_on:
            found.add(index)
    return found


def choose(view: View, types: Types, wiring: Wiring, middle: Collection[int], before: int, after: int) -> set[int]:
    """The nodes around those of ``middle``, as the module's table says; nodes of the main graph all.

    Raises:
        ArgumentError: the region would take in a model input that is no tensor.

    Complexity: linear in the region's nodes and their reads.
    """

    def makers(node: int) -> Iterator[int]:
        return (maker for v in wiring.needs[node] if (maker := view.values[v].producer) != ABSENT)

    def readers(node: int) -> Iterator[int]:
        return (reader for v in view.nodes[node].outputs if v != ABSENT for reader in wiring.readers.get(v, ()))

    found = _reached(view, middle, makers, before) | _reached(view, middle, readers, after)
    waiting = list(found)
    while waiting:
        for value in wiring.needs[waiting.pop()]:
            maker = view.values[value].producer
            if _comes_along(view, types, wiring, value) and maker not in found:
                found.add(maker)
                waiting.append(maker)
    return found


def _reached(view: View, start: Iterable[int], neighbours: Callable[[int], Iterable[int]], limit: int) -> set[int]:
    """Nodes within ``limit`` steps; those that are no step are followed first, so that each way is the shortest."""
    steps = dict.fromkeys(start, 0)
    waiting = deque(steps)
    while waiting:
        node = waiting.popleft()
        for other in neighbours(node):
            key = view.nodes[other].key
            is_free = key in op_facts().idle
            count = steps[node] + (not is_free)
            if count <= limit and count < steps.get(other, limit + 1) and key not in op_facts().random:
                steps[other] = count
                (waiting.appendleft if is_free else waiting.append)(other)
    return set(steps)


def _comes_along(view: View, types: Types, wiring: Wiring, value: int) -> bool:
    """Whether a value that enters cannot be recorded, or should not be."""
    found, maker = view.values[value], view.producer(value)
    kind = types[value]
    is_tensor = kind is None or kind.startswith("tensor(")
    if maker is not None:
        return maker.key in op_facts().idle or maker.index in wiring.constant or not is_tensor
    if not is_tensor and found.origin is Origin.INPUT:
        raise ArgumentError(
            f"The region would read the model input {found.name!r}, a {kind}, and files of arrays cannot hold that:"
            " choose a node further behind it, or take fewer nodes before (--before)."
        )
    return False


def cut_out(view: View, wiring: Wiring, nodes: Collection[int], middle: Collection[int]) -> Cut:
    """Cut nodes out of the main graph: what they read from others enters, what others read of them leaves.

    onnx-graphsurgeon cuts, on a drawing of the region and its neighbours without attributes, weights and bodies: it
    would be slow on all nodes, and lose what it cannot hold.

    Raises:
        ModelError: onnx-graphsurgeon cannot do it.
    """
    made = {value for node in nodes for value in view.nodes[node].outputs if value != ABSENT}
    reads = dict.fromkeys(value for node in sorted(nodes) for value in wiring.needs[node] if value not in made)
    enters = [value for value in reads if view.values[value].origin not in _HELD]
    leaves = list(_leaving(view, wiring, nodes, middle))
    neighbours = {view.values[value].producer for value in enters} - {ABSENT}
    drawn = [index for index in view.order if index in neighbours or index in nodes]
    kept, inputs = _drawing_cut(view, wiring, drawn, enters, leaves)
    weights = dict.fromkeys(v for node in kept for v in wiring.needs[node] if view.values[v].origin in _HELD)
    return Cut(tuple(kept), tuple(inputs), tuple(leaves), tuple(weights))


def _leaving(view: View, wiring: Wiring, nodes: Collection[int], middle: Collection[int]) -> Iterator[int]:
    """Values that somebody else reads, and those in the middle; in the file's order."""
    for node in sorted(nodes):
        outputs = [value for value in view.nodes[node].outputs if value != ABSENT]
        used = [value for value in outputs if wiring.readers.get(value) or view.results[value]]
        for value in (used or outputs) if node in middle else used:
            is_result = any(scope == 0 for scope, _ in view.results[value])
            is_read = node not in wiring.constant and any(n not in nodes for n in wiring.readers.get(value, ()))
            if node in middle or is_result or is_read:
                yield value


def _drawing_cut(
    view: View, wiring: Wiring, drawn: Sequence[int], enters: Sequence[int], leaves: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The nodes that remain between the values that enter and those that leave, and the former that are read."""
    import onnx_graphsurgeon as gs  # noqa: PLC0415

    tensors: dict[int, Any] = {}

    def tensors_of(values: Iterable[int]) -> list[Any]:
        present = [value for value in values if value != ABSENT and view.values[value].origin not in _HELD]
        return [tensors.setdefault(value, gs.Variable(view.values[value].name)) for value in present]

    try:
        graph = gs.Graph(
            [
                gs.Node("Node", str(i), inputs=tensors_of(wiring.needs[i]), outputs=tensors_of(view.nodes[i].outputs))
                for i in drawn
            ],
            tensors_of(enters),
            tensors_of(leaves),
        ).cleanup(remove_unused_graph_inputs=True)
    except Exception as error:
        raise ModelError(
            f"onnx-graphsurgeon cannot cut the region out of {view.model.graph.name!r}: {error}"
        ) from error
    names = view.scopes[0].names
    return [int(node.name) for node in graph.nodes], [names[tensor.name] for tensor in graph.inputs]
