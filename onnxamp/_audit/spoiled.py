"""What a conversion did to the constants of a low model: epsilons that are zero, masks that are (almost) infinite."""

from collections.abc import Iterator
from math import isfinite
from typing import Final

from onnxamp._audit.findings import Finding
from onnxamp._audit.raised import LowRule, LowScene, low_hazard
from onnxamp._decide.masks import mask_path
from onnxamp._dtypes import FLOAT, FLOAT16
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import is_exact, op_facts


def _zero_epsilons(scene: LowScene) -> Iterator[Finding]:
    """An epsilon that the conversion flushed to zero, in front of what it guarded."""
    adds, bounds = op_facts().added_epsilons, op_facts().bounding_epsilons
    for node in scene.graph.nodes:
        # Clip and Max with 0 are common without any epsilon, as is a Sqrt of their result.
        ports = adds.get(node.key) or bounds.get(node.key)
        if ports is None or not scene.is_low(node):
            continue
        zeros = [node.inputs[port] for port, number in scene.low_constants(node) if number == 0 and port in ports]
        if any(_is_single(scene, zero) for zero in zeros) and _guards(scene, node, through_roots=node.key in adds):
            text = "its epsilon is 0 in LOW: what it guards divides by zero"
            yield low_hazard(scene, node, text)


def _is_single(scene: LowScene, value: int) -> bool:
    """Whether the constant is a single stored number, as epsilons are: biases of zeros and made-up zeros are none."""
    maker = scene.graph.producer(scene.constants.source(value))
    return elements(scene.graph.shapes[value]) == 1 and (maker is None or maker.key == "Constant")


def _guards(scene: LowScene, start: Node, *, through_roots: bool) -> bool:
    """Whether exact ops, and roots if wished, lead from the node to one that divides by its result."""
    view, stack, seen = scene.graph, [start], {start.index}
    while stack and len(seen) < _REACH:
        for reader, port in view.consumers(stack.pop().outputs[0]):
            if port in op_facts().divisors.get(reader.key, ()):
                return True
            onward = is_exact(reader.proto) or reader.key == "Cast" or (through_roots and reader.key == "Sqrt")
            if onward and reader.index not in seen and scene.graph.is_float_output(reader):
                seen.add(reader.index)
                stack.append(reader)
    return False


_REACH: Final = 32
"""Nodes that the walk from an epsilon may visit."""


def _infinite_constants(scene: LowScene) -> Iterator[Finding]:
    """Infinities that are multiplied (0 times infinity is NaN) or added as a mask, and constant divisors that are 0."""
    for node in scene.graph.nodes:
        if node.key == "Div" and (1, 0.0) in scene.low_constants(node):
            yield low_hazard(scene, node, "divides by a constant that is 0 in LOW", "error")
        if node.key not in op_facts().hazard["mask_arithmetic"] or not scene.is_low(node):
            continue
        values = (value for value in node.inputs if value != ABSENT and scene.types[value] == scene.low.tensor)
        if not any(scene.constants.is_constant(value) and scene.constants.has_infinite(value) for value in values):
            continue
        if node.key == "Mul":
            text = "multiplies by an infinite constant: 0 times that is NaN"
            action = (
                "Convert the original again: onnxamp convert saturates masks, and keeps other large numbers float32."
            )
            yield low_hazard(scene, node, text, "error", action)
        elif mask_path(scene.graph, node):
            text = "masks with infinities in LOW: a row that is masked as a whole becomes NaN"
            action = "Harmless if the original masks so, too; else convert it again (onnxamp convert saturates masks)."
            yield low_hazard(scene, node, text, "note", action)


def _saturated_masks(scene: LowScene) -> Iterator[Finding]:
    """Masks at the very end of the range: adding a score leaves it. Half of the range would do."""
    if scene.low is not FLOAT16:  # the end of the range of bfloat16 lies far beyond a score's last digit
        return
    for node in scene.graph.nodes:
        if node.key not in ("Add", "Sub", "Where", "Mul"):
            continue
        values = [v for v in node.inputs if v != ABSENT and scene.types[v] == scene.low.tensor]
        if any(scene.constants.largest(v) == scene.low.max_finite for v in values):
            path = [scene.graph.nodes[index] for index in mask_path(scene.graph, node)]
            if any(step.key in ("Add", "Sub") and scene.is_low(step) for step in path):
                text = "masks with the last number of LOW: with a score added it becomes infinite, a masked row NaN"
                action = "Convert the original again (onnxamp convert takes half of it), or add the mask in float32."
                yield low_hazard(scene, node, text, action=action)


def _cast_masks(scene: LowScene) -> Iterator[Finding]:
    """Masks that are made in float32, and become infinite in a Cast on their way to the Softmax."""
    view, walk = scene.graph, op_facts().hazard["mask_arithmetic"]
    for node in view.nodes:
        values = [v for v in node.inputs if v != ABSENT and scene.types[v] == FLOAT] if node.key in walk else []
        largest = max((scene.constants.largest(value) for value in values), default=0.0)
        if not (scene.low.overflow <= largest and isfinite(largest)) or node.key == "Cast":
            continue
        for index in mask_path(scene.graph, node):
            step = view.nodes[index]
            falls = step.key == "Cast" and scene.types[step.inputs[0]] == FLOAT
            if falls and scene.types[step.outputs[0]] == scene.low.tensor:
                text = f"casts a mask of {largest:.4g} to LOW, where it is infinite: a masked row becomes NaN"
                yield low_hazard(scene, step, text)


SPOILED: Final[tuple[LowRule, ...]] = (_zero_epsilons, _infinite_constants, _saturated_masks, _cast_masks)
"""The rules of this module."""
