"""The walk from an input to the ops that read it, which shows whether it is a mask."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, FLOAT
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.masks.given import Given, carries_masks
from onnxamp._graph.numbers.known import is_known, stats_of
from onnxamp._graph.view import Node

_LARGE: Final = 1000.0
"""The smallest factor that turns zeros and ones into a mask. The operand of such a factor is not a mask yet."""

_SHAPES: Final = ("Shape", "Size")
"""Ops that read no element."""


class MaskSide(Enum):
    """What a value on the walk holds."""

    MASK = "mask"
    """The mask, before it is joined with scores."""
    SCORES = "scores"
    """Scores that the mask is joined with."""


@dataclass(slots=True)
class MaskWalk:
    """Follows an input to the ops that read it.

    Attributes:
        sinks: the nodes that end a Softmax.
        passed: value -> the values that control flow makes of it.
        others: what else is given; None if all that is not known may be scores.
        sides: the values on the walk.
        negated: value before the scores -> whether it is the mask times a negative number.
        arithmetic: the nodes that compute float32 masks.
        sums: the nodes that add scores to it, and those that subtract it.
        operands: values -> these nodes, and those whose attention takes the value as its mask.
        chosen: the values that are chosen in place of scores.
        signs: whether those that join it with scores subtract it.
        is_factor: whether it is a number by which a mask is multiplied.
        has_end: whether it arrives at a Softmax or an attention.
    """

    graph: Graph
    sinks: AbstractSet[int]
    passed: Mapping[int, list[int]]
    others: Given | None
    sides: dict[int, MaskSide] = field(default_factory=dict)
    negated: dict[int, bool] = field(default_factory=dict)
    arithmetic: set[int] = field(default_factory=set)
    sums: set[int] = field(default_factory=set)
    operands: dict[int, set[int]] = field(default_factory=dict)
    chosen: set[int] = field(default_factory=set)
    signs: set[bool] = field(default_factory=set)
    is_factor: bool = False
    has_end: bool = False

    @property
    def before(self) -> list[int]:
        """The values before they are joined with scores."""
        return [value for value, side in self.sides.items() if side is MaskSide.MASK]

    def subtracted(self) -> list[int]:
        """Return the values that mask by large numbers."""
        (is_subtracted,) = self.signs or {False}
        return [value for value in self.before if self.negated[value] != is_subtracted]

    def is_mask(self, value: int) -> bool:
        """Return whether all consumers of an input use it as a mask. Complexity: linear in the nodes downstream."""
        self.sides[value] = MaskSide.MASK
        self.negated[value] = False
        stack = [value]
        while stack:
            value = stack.pop()
            reached = self._after(value)
            if reached is None:
                return False
            for result, side in reached:
                if result not in self.sides:
                    self.sides[result] = side
                    self.negated.setdefault(result, self.negated[value])
                    stack.append(result)
        # An input that is both added and subtracted would need two bounds.
        return self.has_end and len(self.signs) < 2

    def _after(self, value: int) -> list[tuple[int, MaskSide]] | None:
        """Return what all that reads a value computes from it; None if anything uses it for more than a mask."""
        graph = self.graph
        facts = op_facts()
        side = self.sides[value]
        # Callers may use an output of the model for anything.
        if any(scope == 0 for scope, _ in graph.results[value]):
            return None
        reached = [(after, side) for after in self.passed.get(value, ())]
        for node, port in graph.consumers(value):
            if node.key in facts.control_flow or node.key in _SHAPES:
                continue
            is_attention = port in facts.score_masks.get(node.key, ())
            if is_attention or node.index in self.sinks:
                if side is MaskSide.MASK and not is_attention:
                    return None
                if side is MaskSide.MASK:
                    self._add_operand(value, node, is_subtracted=self.negated[value])
                self.has_end = True
                continue
            after = self._side_after(node, port)
            if after is None:
                return None
            reached += [(result, after) for result in node.writes]
            self._turn(node, port)
        return reached

    def _side_after(self, node: Node, port: int) -> MaskSide | None:
        """Return what a node computes from the walk's value; None if it uses the mask for anything else."""
        facts = op_facts()
        side = self.sides[node.inputs[port]]
        is_largest = node.key in facts.reduces_axes and node.index in self.graph.exact
        if is_largest and side is MaskSide.SCORES:
            # It reads the largest score, which a decomposed Softmax subtracts.
            return side
        if not self._passes(node, port):
            return None
        others = self._others(node, port)
        if side is MaskSide.SCORES:
            if node.key in facts.additive and not self.sides.keys() >= {*others}:
                self.sums.add(node.index)
            return side
        if not all(map(self._is_mask_side, others)):
            return self._join(node, port)
        is_negated = node.key == "Sub" and port == 1
        if self._makes_mask(node, others, is_negated=is_negated):
            return None
        if self.graph.types[node.outputs[0]] == FLOAT:
            self.arithmetic.add(node.index)
        return side

    def _passes(self, node: Node, port: int) -> bool:
        """Return whether a mask passes through a node."""
        types = self.graph.types
        # A comparison or a Cast to bool takes the input for zeros and ones.
        are_floats = all(
            types[value] in ANY_FLOAT_TENSORS
            for value in (node.inputs[port], *node.writes)
        )
        return are_floats and carries_masks(self.graph, node)

    def _join(self, node: Node, port: int) -> MaskSide | None:
        """Note how a node joins a mask with scores. Return their side; None if the mask is a factor of theirs."""
        value = node.inputs[port]
        if node.key in op_facts().additive:
            is_negated = node.key == "Sub" and port == 1
            is_subtracted = self.negated[value] != is_negated
            self._add_operand(value, node, is_subtracted=is_subtracted)
            self.sums.add(node.index)
        else:
            self.chosen.add(value)
        return None if node.key == "Mul" else MaskSide.SCORES

    def _add_operand(self, value: int, node: Node, *, is_subtracted: bool) -> None:
        """Note that a node adds a value to scores, or subtracts it."""
        self.operands.setdefault(value, set()).add(node.index)
        self.signs.add(is_subtracted)

    def _others(self, node: Node, port: int) -> list[int]:
        """Return the other floats that a node reads."""
        return [
            value
            for at, value in enumerate(node.inputs)
            if at != port and self.graph.types[value] in ANY_FLOAT_TENSORS
        ]

    def _is_mask_side(self, value: int) -> bool:
        """Return whether a value holds no scores."""
        if value in self.sides:
            return self.sides[value] is MaskSide.MASK
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
