"""Attention masks: large constants on their way to a Softmax, and what low precision would make of them."""

from collections.abc import Iterator

from onnxamp.graph import Node
from onnxamp.ops import op_facts
from onnxamp.scene import Scene
from onnxamp.verdicts import Hazard, Reason
from onnxamp.weights import SENTINEL


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
            path = mask_path(scene, node) if found is not None or _holds_sentinel(scene, value) else []
            if found is None and any(_stays_high(scene, maker) for maker in _makers(scene, value, path)):
                found = stats.largest  # cast down as it is, it would be infinite
            for index in path if found is not None else ():
                yield Hazard(index, Reason.MASK, f"carries the mask value {found:.6g} to its Softmax")


def sentinel_paths(scene: Scene) -> list[list[int]]:
    """Node groups that take one precision: the ops between a sentinel constant and its Softmax, with the Softmax."""
    groups = []
    for node in scene.view.nodes:
        if node.key in op_facts().hazard["mask_arithmetic"]:
            values = [value for _, value in scene.float_inputs(node) if _holds_sentinel(scene, value)]
            path = mask_path(scene, node) if values else []
            # What makes the sentinel goes along: cast down from float32 it would be minus infinity.
            makers = [scene.view.producer(scene.constants.source(value)) for value in values]
            groups += [[*path, *(maker.index for maker in makers if maker is not None)]] if path else []
    return groups


def _holds_sentinel(scene: Scene, value: int) -> bool:
    stats = scene.constants.stats(value)
    return stats is not None and stats.has_sentinel and stats.largest >= SENTINEL


def _makers(scene: Scene, value: int, path: list[int]) -> Iterator[Node]:
    """What makes a constant, and what carries it on its way before the Softmax."""
    maker = scene.view.producer(scene.constants.source(value))
    if maker is not None:
        yield maker
    nodes = (scene.view.nodes[index] for index in path)
    yield from (node for node in nodes if node.key not in op_facts().hazard["mask_sinks"])


def _stays_high(scene: Scene, maker: Node) -> bool:
    """Whether the schema of a node does not admit the low type for its output."""
    port = maker.signature.output(0) if maker.signature is not None else None
    if port is None or maker.signature is None:
        return False
    return scene.low.tensor not in maker.signature.params.get(port.type, frozenset())


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
