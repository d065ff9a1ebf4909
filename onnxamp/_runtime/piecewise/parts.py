"""Parts of a graph whose nodes run together, and the memory that values take between them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

from onnx import TensorProto

from onnxamp._facts.dtypes import LOW_ELEMS
from onnxamp._model.protos import bytes_of
from onnxamp._runtime.piecewise.flow import DataflowGraph

T = TypeVar("T")

_NODES: Final = 1024
"""Nodes that a piece may have: ONNX Runtime 1.31 loads in time that grows much faster than their number."""


def ancestors(
    flow: DataflowGraph, targets: Iterable[str], done: set[int]
) -> list[int]:
    """Return nodes that the targets need and that are not in ``done``, in order; they are added to it."""
    nodes = []
    waiting = [flow.maker[name] for name in targets if name in flow.maker]
    while waiting:
        node = waiting.pop()
        if node not in done:
            done.add(node)
            nodes.append(node)
            waiting += [
                flow.maker[name] for name in flow.reads[node] if name in flow.maker
            ]
    return sorted(nodes)


def parts_of(
    flow: DataflowGraph,
    nodes: Sequence[int],
    budget: int,
    wanted: Iterable[str] | None = None,
) -> Iterator[tuple[int, ...]]:
    """Yield groups of consecutive nodes whose values and weights fit the budget; a node that exceeds it is alone.

    A model with optionals stays in one piece, as ONNX Runtime cannot be fed empty ones.

    Args:
        flow: the model.
        nodes: the nodes, in order.
        budget: bytes that may be held at a time.
        wanted: values that are needed in the end; None if all are. A session frees others after their last reader.
    """
    if any((kind or "").startswith("optional") for kind in flow.types.values()):
        yield from filter(None, [tuple(nodes)])
        return
    memory = _SessionMemory(flow, nodes, wanted)
    part: list[int] = []
    for node in nodes:
        cost = memory.cost_of(node)
        if len(part) == _NODES or (part and memory.size + cost > budget):
            yield tuple(part)
            part = []
            memory.begin()
            cost = memory.cost_of(node)
        part.append(node)
        memory.add(node, cost)
    if part:
        yield tuple(part)


class _SessionMemory:
    """The bytes that a session of some nodes holds: large weights, and values of its nodes that are still needed.

    Attributes:
        size: the bytes.
    """

    def __init__(
        self,
        flow: DataflowGraph,
        nodes: Sequence[int],
        wanted: Iterable[str] | None,
    ) -> None:
        self.flow = flow
        self.size = 0
        self.frees = wanted is not None
        self.uses = Counter(wanted or ())
        if self.frees:
            self.uses.update(flow.reads_of(nodes))
        self.weights = set[str]()
        self.values = set[str]()

    def begin(self) -> None:
        """Begin another session."""
        self.size = 0
        self.weights.clear()
        self.values.clear()

    def cost_of(self, node: int) -> int:
        """Return the bytes that a node adds while it runs."""
        weights = self.flow.shell.weights
        new = {name for name in self.flow.reads[node] if name in weights}
        size = sum(_read_bytes(self.flow, name) for name in new - self.weights)
        sizes = self.flow.sizes
        return size + sum(sizes.get(name, 0) for name in self.flow.nodes[node].output)

    def add(self, node: int, cost: int) -> None:
        """Add what a node costs, and take off what no further node needs."""
        self.size += cost
        reads = self.flow.reads[node]
        weights = self.flow.shell.weights
        self.weights.update(name for name in reads if name in weights)
        if not self.frees:
            return
        outputs = [name for name in self.flow.nodes[node].output if name]
        self.values.update(outputs)
        self.uses.subtract(reads)
        for name in (*outputs, *reads):
            if name in self.values and self.uses[name] <= 0:
                self.values.remove(name)
                self.size -= self.flow.sizes.get(name, 0)


def weights_read(flow: DataflowGraph, nodes: Iterable[int]) -> int:
    """Return the bytes of the large weights that nodes read, in the types in which they are computed with."""
    weights = flow.shell.weights
    read = {name for name in flow.reads_of(nodes) if name in weights}
    return sum(_read_bytes(flow, name) for name in read)


def _read_bytes(flow: DataflowGraph, name: str) -> int:
    """Return the bytes of a large weight in the type in which it is computed with."""
    tensor = flow.shell.weights[name]
    is_raised = flow.emulated and tensor.data_type in LOW_ELEMS
    elem = TensorProto.FLOAT if is_raised else tensor.data_type
    return bytes_of(elem, tensor.dims[:])


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return the items in runs of that size; the last may be shorter."""
    return (items[start : start + size] for start in range(0, len(items), size))


def fitting(
    flow: DataflowGraph,
    parts: Sequence[Sequence[int]],
    wanted: Iterable[str],
    budget: int,
) -> int:
    """Return how many samples can run together, part by part, with their values between parts within the budget.

    It is 1 for a model without large weights, which would gain nothing.
    """
    if not flow.large or len(parts) < 2:
        return 1
    return max(1, budget // max(peak_of(flow, parts, wanted), 1))


def peak_of(
    flow: DataflowGraph, parts: Sequence[Sequence[int]], wanted: Iterable[str]
) -> int:
    """Return the most bytes of values that are held between parts. Complexity: linear in what nodes read."""
    uses = Counter(wanted)
    for part in parts:
        uses.update(flow.reads_of(part))
    held = {name for name in (*flow.inputs, *flow.defaults) if uses[name]}
    size = most = sum(flow.sizes.get(name, 0) for name in held)
    for part in parts:
        new = [name for name in flow.outputs_of(part) if uses[name]]
        reads = flow.reads_of(part)
        uses.subtract(reads)
        held.update(new)
        gone = {name for name in reads if uses[name] <= 0} & held
        held -= gone
        size += sum(flow.sizes.get(name, 0) for name in new)
        size -= sum(flow.sizes.get(name, 0) for name in gone)
        most = max(most, size)
    return most


def peak_together(
    flow: DataflowGraph, nodes: Sequence[int], wanted: Iterable[str]
) -> int:
    """Return the bytes of weights and values while nodes run in one session."""
    values = peak_of(flow, [[node] for node in nodes], wanted)
    return weights_read(flow, nodes) + values
