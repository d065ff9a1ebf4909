"""Inputs that are added to the scores of an attention, as masks are: 0, or a number near float32's lowest.

They may be subtracted as well, and hold its largest one then.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, FLOAT
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.known import is_known, stats_of
from onnxamp._graph.masks.rows import row_axis, softmaxes
from onnxamp._graph.view import Node, Origin, passed_values

_LARGE: Final = 1000.0
"""The smallest factor that turns zeros and ones into a mask. The operand of such a factor is not a mask yet."""


class AddedMasks(NamedTuple):
    """The masks among a model's inputs.

    Attributes:
        inputs: the inputs that are only joined with scores before a Softmax.
        factors: those of a single number, by which a mask is multiplied.
        values: these, and the values that they pass through on their way to the scores.
        subtracted: those of them that mask by large numbers, because they are subtracted.
        arithmetic: the nodes that compute one of these values from another. Masks are small beside the scores.
        shifts: the values that are added to scores, or subtracted, with the axis along which the Softmax sums up,
            counted from the end.
        sums: the nodes that add them to scores.
        emptying: the values that only ops read that return 0 for a row of which a mask leaves nothing.
        unaligned: those sums for whose operands no such axis is known, or that add several masks to the same scores.
    """

    inputs: frozenset[int] = frozenset()
    factors: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()
    subtracted: frozenset[int] = frozenset()
    arithmetic: frozenset[int] = frozenset()
    shifts: Mapping[int, int] = {}
    sums: frozenset[int] = frozenset()
    emptying: frozenset[int] = frozenset()
    unaligned: frozenset[int] = frozenset()


def added_masks(graph: Graph) -> AddedMasks:
    """Find the float inputs that are masks.

    Such an input is moved, scaled, and computed with constants and other inputs. Then it is added to scores,
    subtracted from them, or chosen in their place, and all of it ends in a Softmax or in an op that contains one. An
    input that is subtracted from a constant, or multiplied by a large number, holds zeros and ones instead.

    Complexity: linear in nodes for each input that leads to a Softmax alone.
    """
    sinks = softmaxes(graph)
    if not sinks and not graph.nodes_of(op_facts().score_masks):
        return AddedMasks()
    given = Given(graph)
    walks = dict[int, _MaskWalk]()
    for value in graph.scopes[0].inputs:
        if not _is_float_input(graph, value):
            continue
        # Scores may be an input as well. Then nothing but another input is there to tell them from a mask.
        for others in (given, None):
            walk = _MaskWalk(graph, sinks, given.passed, others)
            if walk.is_mask(value):
                walks[value] = walk
                break
    return _gathered(graph, sinks, given, walks)


def _is_float_input(graph: Graph, value: int) -> bool:
    """Return whether a value is an input of the model that holds floats."""
    is_given = graph.values[value].origin is Origin.INPUT
    return is_given and graph.types[value] in ANY_FLOAT_TENSORS


def _gathered(
    graph: Graph,
    sinks: AbstractSet[int],
    given: "Given",
    walks: "Mapping[int, _MaskWalk]",
) -> AddedMasks:
    """Return what the walks from all masks found."""
    found = walks.values()
    masks = _all(walk.before for walk in found)
    sums = _all(walk.sums for walk in found)
    chosen = _all(walk.chosen for walk in found)
    axes = dict[int, int]()
    unaligned = set[int]()
    for value, nodes in _operands(found).items():
        axis = None if value in chosen else _axis(graph, sinks, value, nodes)
        if axis is None:
            unaligned |= nodes & sums
        else:
            axes[value] = axis
    unaligned |= _repeated(found)
    # A Cast may come before the control flow that passes a mask on.
    for value in [*axes]:
        for source in given.origins(value):
            axes.setdefault(source, axes[value])
    return AddedMasks(
        inputs=frozenset(walks),
        factors=frozenset(value for value, walk in walks.items() if walk.is_factor),
        values=_all(walk.joined for walk in found),
        subtracted=_all(walk.subtracted() for walk in found),
        arithmetic=_all(walk.arithmetic for walk in found),
        shifts=axes,
        sums=_last_sums(graph, sums, masks),
        emptying=frozenset(filter(partial(_is_emptying, graph), axes)),
        unaligned=frozenset(unaligned),
    )


def _all(indices: Iterable[Iterable[int]]) -> frozenset[int]:
    """Return the indices that several walks found, together."""
    return frozenset(chain.from_iterable(indices))


def _axis(
    graph: Graph, sinks: AbstractSet[int], value: int, nodes: Iterable[int]
) -> int | None:
    """Return the axis of a mask along which the Softmaxes after all nodes that add it sum up; None if unknown."""
    axes = {row_axis(graph, sinks, node, value) for node in graph.at(nodes)}
    axis = axes.pop() if len(axes) == 1 else None
    shape = graph.shapes[value]
    return None if axis is None or shape is None or len(shape) < -axis else axis


def _is_emptying(graph: Graph, value: int) -> bool:
    """Return whether all that reads a mask returns 0 for a row of which the mask leaves nothing."""
    readers = graph.consumers(value)
    empties = op_facts().empties_rows
    return bool(readers) and all(reader.key in empties for reader, _ in readers)


def _operands(walks: "Iterable[_MaskWalk]") -> dict[int, set[int]]:
    """Return the masks that are added to scores, each with the nodes that do so."""
    operands = dict[int, set[int]]()
    for walk in walks:
        for value, nodes in walk.operands.items():
            operands.setdefault(value, set()).update(nodes)
    return operands


def _repeated(walks: "Iterable[_MaskWalk]") -> set[int]:
    """Return the sums that add several masks to the same scores, and those that add the first of them.

    Only all masks together tell which rows are masked as a whole.
    """
    # Of two inputs that are added to each other alone, one holds the scores.
    told = [walk for walk in walks if walk.others is not None]
    count = Counter(chain.from_iterable(_operands(told).values()))
    repeated = {index for index, masks in count.items() if masks > 1}
    for walk in told:
        own = _all(walk.operands.values())
        # A sum that adds another mask to what this one is joined with.
        if (walk.sums - own) & count.keys():
            repeated |= walk.sums
    return repeated


def _last_sums(
    graph: Graph, sums: AbstractSet[int], masks: AbstractSet[int]
) -> frozenset[int]:
    """Return the sums, without those to which only one other is added that adds no mask.

    A bound of the second sum is one of both, and a bounded first one would show the traces of what the second adds.
    """
    last = set(sums)
    for node in graph.at(sums):
        reader = graph.only_reader(node.outputs[0])
        if reader is None or reader.index not in sums:
            continue
        if not any(value in masks for value in reader.inputs):
            last.discard(node.index)
    return frozenset(last)


class Given:
    """Tells what is computed from inputs of the model, constants and shapes, without products of matrices."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.passed = graph.ask(passed_values)
        self._sources = dict[int, list[int]]()
        for source, results in self.passed.items():
            for result in results:
                self._sources.setdefault(result, []).append(source)
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
                unseen = [one for one in sources or () if one not in self._known]
                stack += [one for one in unseen if one not in opened]
            else:
                stack.pop()
                # A value that depends on itself is the state of a loop, which counts as given here.
                is_given = sources is not None and all(
                    self._known.get(one, one in opened) for one in sources
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
        if is_known(graph, value) or _is_float_input(graph, value):
            return []
        maker = graph.producer(value)
        if maker is None or maker.key in op_facts().control_flow:
            return self._sources.get(value)
        if maker.key in op_facts().elementwise or _carries_masks(graph, maker):
            return [value for value in maker.reads if graph.types[value] in _FLOATS]
        return None


def _carries_masks(graph: Graph, node: Node) -> bool:
    """Return whether a mask may pass through a node."""
    return node.key in op_facts().mask_arithmetic or node.index in graph.exact


@dataclass(slots=True)
class _MaskWalk:
    """Follows an input to the ops that read it.

    Attributes:
        others: what else is given; None if all that is not known may be scores.
        joined: value -> whether it is joined with scores already.
        negated: value that is not -> whether it is the mask times a negative number.
        arithmetic: the nodes that compute float32 masks.
        sums: the nodes that add scores to it, and those that subtract it.
        operands: values -> these nodes, and those whose attention takes the value as its mask.
        chosen: the values that are chosen in place of scores.
        signs: whether those that join it with scores subtract it.
        is_factor: whether it is a number by which a mask is multiplied.
    """

    graph: Graph
    sinks: AbstractSet[int]
    passed: Mapping[int, list[int]]
    others: Given | None
    joined: dict[int, bool] = field(default_factory=dict)
    negated: dict[int, bool] = field(default_factory=dict)
    arithmetic: set[int] = field(default_factory=set)
    sums: set[int] = field(default_factory=set)
    operands: dict[int, set[int]] = field(default_factory=dict)
    chosen: set[int] = field(default_factory=set)
    signs: set[bool] = field(default_factory=set)
    is_factor: bool = False

    @property
    def before(self) -> list[int]:
        """The values before they are joined with scores."""
        return [value for value, is_joined in self.joined.items() if not is_joined]

    def subtracted(self) -> list[int]:
        """Return the values that mask by large numbers."""
        (is_subtracted,) = self.signs or {False}
        return [value for value in self.before if self.negated[value] != is_subtracted]

    def is_mask(self, value: int) -> bool:
        """Return whether all consumers of an input use it as a mask."""
        graph = self.graph
        self.joined[value] = self.negated[value] = False
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
                    if not is_joined:
                        self.operands.setdefault(value, set()).add(node.index)
                        self.signs.add(self.negated[value])
                elif node.index in self.sinks:
                    if not is_joined:
                        return False
                    ends = True
                else:
                    after = self.after(node, port, is_joined=is_joined)
                    if after is None:
                        return False
                    reached += [(result, after) for result in node.writes]
                    self._turn(node, port)
            for result, after in reached:
                if result not in self.joined:
                    self.joined[result] = after
                    self.negated.setdefault(result, self.negated[value])
                    stack.append(result)
        # An input that is both added and subtracted would need two bounds.
        return ends and len(self.signs) < 2

    def after(self, node: Node, port: int, *, is_joined: bool) -> bool | None:
        """Return whether a mask is joined after a node that reads it; None if the node uses it for anything else."""
        facts = op_facts()
        is_largest = node.key in facts.reduces_axes and node.index in self.graph.exact
        if is_largest and is_joined:
            # It reads the largest score, which a decomposed Softmax subtracts.
            return True
        if not self._passes(node, port):
            return None
        others = self._others(node, port)
        if is_joined:
            if node.key in facts.additive and not self.joined.keys() >= {*others}:
                self.sums.add(node.index)
            return True
        if not all(map(self._is_mask_side, others)):
            return self._join(node, port)
        is_negated = node.key == "Sub" and port == 1
        if self._makes_mask(node, others, is_negated=is_negated):
            return None
        if self.graph.types[node.outputs[0]] == FLOAT:
            self.arithmetic.add(node.index)
        return False

    def _passes(self, node: Node, port: int) -> bool:
        """Return whether a mask passes through a node."""
        types = self.graph.types
        # A comparison or a Cast to bool takes the input for zeros and ones.
        are_floats = all(
            types[value] in _FLOATS for value in (node.inputs[port], *node.writes)
        )
        return are_floats and _carries_masks(self.graph, node)

    def _join(self, node: Node, port: int) -> bool | None:
        """Note how a node joins a mask with scores. Return True, or None if the mask is a factor of theirs."""
        value = node.inputs[port]
        if node.key in op_facts().additive:
            is_negated = node.key == "Sub" and port == 1
            self.sums.add(node.index)
            self.operands.setdefault(value, set()).add(node.index)
            self.signs.add(self.negated[value] != is_negated)
        else:
            self.chosen.add(value)
        return None if node.key == "Mul" else True

    def _others(self, node: Node, port: int) -> list[int]:
        """Return the other floats that a node reads."""
        return [
            value
            for at, value in enumerate(node.inputs)
            if at != port and self.graph.types[value] in _FLOATS
        ]

    def _is_mask_side(self, value: int) -> bool:
        """Return whether a value holds no scores."""
        if value in self.joined:
            return not self.joined[value]
        if is_known(self.graph, value):
            return True
        return self.others is not None and value in self.others

    def _makes_mask(
        self, node: Node, others: Iterable[int], *, is_negated: bool
    ) -> bool:
        """Return whether a constant turns 0 and 1 into a mask: 1 - x, or x times a large number."""
        known = [value for value in others if is_known(self.graph, value)]
        if is_negated:
            return any(self._largest(value) > 0 for value in known)
        if node.key != "Mul":
            return False
        if others and not known:
            shape = self.graph.shapes[node.inputs[0]]
            self.is_factor |= shape is not None and not shape
        return any(self._largest(value) >= _LARGE for value in known)

    def _turn(self, node: Node, port: int) -> None:
        """Note which results of a node are its operand times a negative number."""
        is_negated = node.key == "Neg" or (node.key == "Sub" and port == 1)
        before = self.negated[node.inputs[port]]
        for result in node.writes:
            self.negated.setdefault(result, before != is_negated)

    def _largest(self, value: int) -> float:
        """Return the largest magnitude of a constant, 0 if it is unknown."""
        try:
            each = stats_of(self.graph, value)
        except OnnxAmpError:
            # Its data file is missing. The code that needs the weight reports that.
            return 0.0
        return max((stats.largest for stats in each), default=0.0)


_FLOATS: Final = ANY_FLOAT_TENSORS
_SHAPES: Final = ("Shape", "Size")
"""Ops that read no element."""


def may_be_bounded(graph: Graph) -> bool:
    """Return whether a node can bound masks: Max and Min broadcast since opset 8 (onnx/defs/math/defs.cc)."""
    return graph.book.opsets[""] >= 8
