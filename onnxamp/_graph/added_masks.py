"""Inputs that are added to the scores of an attention, as masks are: 0, or a number near float32's lowest.

They may be subtracted as well, and hold its largest one then.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.known import is_known, stats_of
from onnxamp._graph.view import Node, Origin, passed_values

_LARGE = 1000.0
"""The smallest factor that turns zeros and ones into a mask. The operand of such a factor is not a mask yet."""


class AddedMasks(NamedTuple):
    """The masks among a model's inputs.

    Attributes:
        inputs: the inputs that are only joined with scores before a Softmax.
        values: these, and the values that they pass through on their way to the Softmax.
        sums: the nodes that add them to something else.
        subtracted: the inputs that are subtracted instead, and the values that they pass through before that.
    """

    inputs: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()
    subtracted: frozenset[int] = frozenset()


def added_masks(graph: Graph) -> AddedMasks:
    """Find the float inputs that are masks.

    Such an input, moved and scaled by constants, is added to something unknown, subtracted from it, or chosen in its
    place, and all of it ends in a Softmax or in an op that contains one. An input that is subtracted from a constant
    first, or multiplied by a large number, holds zeros and ones instead.

    Complexity: linear in nodes for each input that leads to a Softmax alone.
    """
    sinks = _sinks(graph)
    if not sinks and not graph.nodes_of(op_facts().score_masks):
        return AddedMasks()
    passed = graph.ask(passed_values)
    inputs, values, sums, subtracted = set[int](), set[int](), set[int](), set[int]()
    for value in graph.scopes[0].inputs:
        is_given = (
            graph.values[value].origin is Origin.INPUT
            and graph.types[value] in _FLOATS
        )
        walk = _MaskWalk(graph, sinks, passed) if is_given else None
        if walk is not None and walk.is_mask(value):
            inputs.add(value)
            values.update(walk.joined)
            sums.update(walk.sums)
            if True in walk.signs:
                subtracted.update(
                    one for one, is_joined in walk.joined.items() if not is_joined
                )
    return AddedMasks(
        frozenset(inputs), frozenset(values), frozenset(sums), frozenset(subtracted)
    )


_FLOATS = frozenset({*FLOAT_TENSORS, "tensor(double)"})


def _sinks(graph: Graph) -> frozenset[int]:
    """Return the nodes at which masks end: Softmaxes, and the exponentials of decomposed ones."""
    facts = op_facts()
    found = {node.index for node in graph.nodes_of(facts.mask_sinks)}
    cores = (op for op, parts in facts.core_of.items() if "softmax" in parts)
    for core in graph.nodes_of(cores):
        if any(reader.key in facts.reductions for reader, _ in graph.readers(core)):
            found.add(core.index)
    return frozenset(found)


@dataclass(slots=True)
class _MaskWalk:
    """Follows an input to the ops that read it.

    Attributes:
        joined: value -> whether it is joined with something unknown already.
        sums: the nodes that add something unknown to it, and those that subtract it.
        signs: whether those that join it with something unknown subtract it.
    """

    graph: Graph
    sinks: AbstractSet[int]
    passed: Mapping[int, list[int]]
    joined: dict[int, bool] = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)
    signs: set[bool] = field(default_factory=set)

    def is_mask(self, value: int) -> bool:
        """Return whether all consumers of an input use it as a mask."""
        graph = self.graph
        self.joined[value] = False
        stack = [value]
        ends = False
        while stack:
            value = stack.pop()
            is_joined = self.joined[value]
            # Callers may use an output of the model for anything.
            if any(scope == 0 for scope, _ in graph.results[value]):
                return False
            reached = [(after, is_joined) for after in self.passed.get(value, ())]
            for node, port in graph.consumers(value):
                if node.key in op_facts().control_flow or node.key in _SHAPES:
                    continue
                if port in op_facts().score_masks.get(node.key, ()):
                    ends = True
                elif node.index in self.sinks:
                    if not is_joined:
                        return False
                    ends = True
                else:
                    after = self.after(node, port, is_joined=is_joined)
                    if after is None:
                        return False
                    reached += [(result, after) for result in node.writes]
            for result, after in reached:
                if result not in self.joined:
                    self.joined[result] = after
                    stack.append(result)
        # An input that is both added and subtracted would need two bounds.
        return ends and len(self.signs) < 2

    def after(self, node: Node, port: int, *, is_joined: bool) -> bool | None:
        """Return whether a mask is joined after a node that reads it; None if the node uses it for anything else."""
        facts = op_facts()
        graph = self.graph
        if node.key in facts.reduces_axes and node.index in graph.exact:
            # It reads the largest score, which a decomposed Softmax subtracts.
            return is_joined
        if (
            node.key not in facts.mask_arithmetic
            or graph.types[node.inputs[port]] not in _FLOATS
        ):
            return None
        if any(graph.types[result] not in _FLOATS for result in node.writes):
            # A comparison or a Cast to bool takes the input for zeros and ones.
            return None
        others = [
            value
            for at, value in enumerate(node.inputs)
            if at != port and graph.types[value] in _FLOATS
        ]
        unknown = [
            value
            for value in others
            if not is_known(graph, value) and value not in self.joined
        ]
        is_negated = node.key == "Sub" and port == 1
        if unknown and node.key in facts.additive:
            self.sums.add(node.index)
            if not is_joined:
                self.signs.add(is_negated)
        if is_joined or node.index in graph.exact:
            return is_joined or bool(unknown)
        is_factor = node.key == "Mul" and (unknown or any(map(self.is_large, others)))
        is_changed = is_factor or (is_negated and not unknown)
        return None if is_changed else bool(unknown)

    def is_large(self, value: int) -> bool:
        """Return whether a constant turns 0 and 1 into a mask."""
        try:
            return any(
                stats.largest >= _LARGE for stats in stats_of(self.graph, value)
            )
        except OnnxAmpError:
            # Its data file is missing. The code that needs the weight reports that.
            return False


_SHAPES = ("Shape", "Size")
"""Ops that read no element."""


def may_be_bounded(graph: Graph) -> bool:
    """Return whether a node can bound masks: Max and Min broadcast since opset 8 (onnx/defs/math/defs.cc)."""
    return graph.book.opsets[""] >= 8


def casts_to_float(graph: Graph) -> Iterator[Node]:
    """Yield the Casts by which masks of another type become float32."""
    values = graph.ask(added_masks).values
    for node in graph.nodes_of({"Cast"}):
        if (
            node.outputs[0] in values
            and graph.types[node.input(0)] == "tensor(double)"
        ):
            yield node
