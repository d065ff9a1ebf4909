"""Static hazards: what is known to break in low precision before anything runs (design: hazards are pins).

Every rule is a function that reads the view and yields hazards; :func:`find_hazards` is their list. Limits are those
of the chosen low type. Matching looks through Casts and data movement.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from onnxamp.constants import Constants
from onnxamp.dtypes import FLOAT, LowType
from onnxamp.graph import ABSENT, Node, View
from onnxamp.infer import Types
from onnxamp.islands import cast_swallowing_norms, norm_islands, softmax_islands
from onnxamp.ops import is_exact, op_facts
from onnxamp.positions import index_paths, position_paths
from onnxamp.sizes import Shape
from onnxamp.verdicts import Hazard, Reason
from onnxamp.weights import SENTINEL


@dataclass(frozen=True, slots=True)
class Scene:
    """What the rules look at."""

    view: View
    types: Types
    shapes: Sequence[Shape | None]
    constants: Constants
    low: LowType

    def float_inputs(self, node: Node) -> Iterator[tuple[int, int]]:
        """(position, value) of the node's float32 tensor inputs."""
        for position, value in enumerate(node.inputs):
            if value != ABSENT and self.types[value] == FLOAT:
                yield position, value

    def is_float_output(self, node: Node) -> bool:
        """Whether output 0 is a float32 tensor."""
        return bool(node.outputs) and node.outputs[0] != ABSENT and self.types[node.outputs[0]] == FLOAT


Rule = Callable[[Scene], Iterator[Hazard]]


def find_hazards(scene: Scene) -> list[Hazard]:
    """All hazards of a model, in the order of its nodes; a node may have several."""
    found = [hazard for rule in RULES for hazard in rule(scene)]
    unique = {(hazard.node, hazard.reason): hazard for hazard in reversed(found)}
    return sorted(unique.values(), key=lambda hazard: (hazard.node, hazard.reason.value))


def constant_ranges(scene: Scene) -> Iterator[Hazard]:
    """Constants beyond the low range that are no sentinels keep their consumers in float32, and what these make."""
    for node in scene.view.nodes:
        for _, value in scene.float_inputs(node):
            beyond = _beyond(scene, node, value)
            if beyond is None or _carries(scene, node):
                continue
            name = scene.view.values[value].name
            why = f"{name!r} holds {beyond:.6g}; {scene.low.name} ends at {scene.low.max_finite:.6g}"
            yield Hazard(node.index, Reason.RANGE, why)
            for reader in _readers(scene, node):
                yield Hazard(reader.index, Reason.RANGE, f"reads what {node.label!r} made of a constant out of range")


def _beyond(scene: Scene, node: Node, value: int) -> float | None:
    """A number of the constant that is out of range, or a factor that brings values of a few units out of it."""
    stats = scene.constants.stats(value)
    if stats is None:
        return None
    grows = node.key == "Mul" and stats.uniform is not None and scene.low.max_finite / 8 < abs(stats.uniform) < SENTINEL
    return stats.uniform if grows else stats.out_of_range


def epsilons(scene: Scene) -> Iterator[Hazard]:
    """Tiny uniform constants keep their consumer in float32, and what they guard against zero with it."""
    for node in scene.view.nodes:
        if node.key not in op_facts().hazard["epsilon_ops"]:
            continue
        for position, value in scene.float_inputs(node):
            number = scene.constants.uniform(value)
            if number is None or not _is_lost(number, scene.low, node.key):
                continue
            name = scene.view.values[value].name
            yield Hazard(node.index, Reason.EPSILON, f"{name!r} is {number:.6g}, which {scene.low.name} cannot hold")
            if (node.key, position) != ("Div", 1) and node.key != "Mul":
                yield from _guarded(scene, node)


def _guarded(scene: Scene, node: Node) -> Iterator[Hazard]:
    """Ops behind an epsilon whose result explodes if the guarded value becomes zero on the way."""
    guarded, stack, seen = op_facts().guarded, list(node.outputs[:1]), set()
    while stack:
        value = stack.pop()
        for reader, port in scene.view.consumers(value):
            if reader.index in seen:
                continue
            seen.add(reader.index)
            if port in guarded.get(reader.key, ()):
                yield Hazard(reader.index, Reason.EPSILON, f"{node.label!r} guards its input with an epsilon")
            if (is_exact(reader.proto) or reader.key == "Sqrt") and scene.is_float_output(reader):
                stack.append(reader.outputs[0])


def _is_lost(number: float, low: LowType, key: str) -> bool:
    """Whether rounding a non-zero constant to the low type flushes it or leaves it subnormal (for Mul: inexact)."""
    if number == 0 or not np.isfinite(number) or abs(number) >= low.smallest_normal:
        return False
    if key != "Mul":
        return True
    rounded = round(abs(number) / low.smallest_subnormal) * low.smallest_subnormal
    return abs(rounded - abs(number)) > 4 * low.epsilon * abs(number)


def masks(scene: Scene) -> Iterator[Hazard]:
    """Large constants that are no sentinels on their way to a Softmax: the whole way stays float32.

    Large means that the low type steps by more than 1 there, so that score + mask forgets the score: a row that is
    masked as a whole would lose the differences that float32 keeps.
    """
    for node in scene.view.nodes:
        if node.key not in op_facts().hazard["mask_arithmetic"]:
            continue
        for _, value in scene.float_inputs(node):
            stats = scene.constants.stats(value)
            if stats is None:
                continue
            large = stats.uniform if stats.uniform is not None and abs(stats.uniform) * scene.low.epsilon >= 1 else None
            found = large if large is not None and abs(large) < SENTINEL else stats.out_of_range
            for index in mask_path(scene, node) if found is not None else ():
                yield Hazard(index, Reason.MASK, f"carries the mask value {found:.6g} to its Softmax")


def sentinel_paths(scene: Scene) -> list[list[int]]:
    """Node groups that take one precision: the ops between a sentinel constant and its Softmax, with the Softmax."""
    groups = []
    for node in scene.view.nodes:
        if node.key in op_facts().hazard["mask_arithmetic"]:
            stats = [scene.constants.stats(value) for _, value in scene.float_inputs(node)]
            if any(found is not None and found.has_sentinel and found.largest >= SENTINEL for found in stats):
                path = mask_path(scene, node)
                groups += [path] if path else []
    return groups


def mask_path(scene: Scene, start: Node) -> list[int]:
    """Nodes from ``start`` through mask arithmetic to each Softmax that it reaches, both ends included."""
    walk, sinks = op_facts().hazard["mask_arithmetic"], op_facts().hazard["mask_sinks"]
    previous: dict[int, list[int]] = {start.index: []}
    stack, found = [start], []
    while stack:
        node = stack.pop()
        if node.key in sinks:
            found.append(node.index)
            continue
        if node.key not in walk or not scene.is_float_output(node):
            continue
        for reader, _ in scene.view.consumers(node.outputs[0]):
            if reader.index not in previous and len(previous) < _MASK_REACH:
                previous[reader.index] = []
                stack.append(reader)
            previous.get(reader.index, []).append(node.index)
    path: set[int] = set()
    while found:
        index = found.pop()
        if index not in path:
            path.add(index)
            found += previous[index]
    return sorted(path)


_MASK_REACH = 4096
"""Nodes that one mask's walk may visit; deep models share one mask among all layers."""


def large_reductions(scene: Scene) -> Iterator[Hazard]:
    """Sums over so many elements that terms of magnitude 1 come within a factor of 8 of the largest finite number."""
    limit = scene.low.max_finite / 8
    for node in scene.view.nodes:
        if node.key not in op_facts().hazard["growing_reductions"] or node.input(0) == ABSENT:
            continue
        before, after = scene.shapes[node.inputs[0]], scene.shapes[node.outputs[0]]
        if before is None or after is None or None in before or None in after or prod(after) == 0:  # type: ignore[arg-type]
            continue
        count = prod(before) // max(prod(after), 1)  # type: ignore[arg-type]
        if count > limit:
            yield Hazard(node.index, Reason.REDUCTION, f"sums {count} elements at a time")


def quantized_units(scene: Scene) -> Iterator[Hazard]:
    """Quantize and dequantize nodes, and what stands between them: ONNX Runtime fuses these into integer kernels."""
    view, facts = scene.view, op_facts()
    for node in view.nodes:
        if node.key in facts.quantize | facts.dequantize:
            yield Hazard(node.index, Reason.QDQ, "quantizes or dequantizes")
            continue
        producers = [view.producer(value) for _, value in scene.float_inputs(node)]
        fed = [p is not None and p.key in facts.dequantize for p in producers]
        feeds = any(
            reader.key in facts.quantize and port == 0
            for value in node.outputs
            if value != ABSENT
            for reader, port in view.consumers(value)
        )
        if (fed and all(fed)) or (feeds and node.key not in facts.kernel_free):
            yield Hazard(node.index, Reason.QDQ, "stands between dequantize and quantize nodes")


def index_hazards(scene: Scene) -> Iterator[Hazard]:
    """Integers, positions and sizes carried in floats; see :mod:`onnxamp.positions`."""
    yield from index_paths(scene.view, scene.types)
    yield from position_paths(scene.view, scene.types, scene.constants)


def islands(scene: Scene) -> Iterator[Hazard]:
    """Normalisations and softmaxes written out as single ops; see :mod:`onnxamp.islands`."""
    yield from norm_islands(scene.view, scene.types, scene.constants)
    yield from softmax_islands(scene.view, scene.types)
    yield from cast_swallowing_norms(scene.view, scene.types)


RULES: tuple[Rule, ...] = (
    constant_ranges, epsilons, masks, large_reductions, quantized_units, index_hazards, islands,
)  # fmt: skip


def _carries(scene: Scene, node: Node) -> bool:
    """Whether the node only hands the constant on: then its consumers are judged instead."""
    return bool(node.outputs) and scene.constants.stats(node.outputs[0]) is not None


def _readers(scene: Scene, node: Node) -> Iterator[Node]:
    """Nodes that read the node's outputs, directly or through exact ops (which are among them)."""
    stack, seen = [value for value in node.outputs if value != ABSENT], set()
    while stack:
        for reader, _ in scene.view.consumers(stack.pop()):
            if reader.index in seen:
                continue
            seen.add(reader.index)
            yield reader
            if is_exact(reader.proto) and scene.is_float_output(reader):
                stack.append(reader.outputs[0])
