"""Running one model piece by piece: which values are still needed, and which nodes come next."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxamp._errors import RuntimeFailure
from onnxamp._model.weights import stored_bytes
from onnxamp._runtime.flow import Flow, fitted
from onnxamp._runtime.pieces import Piece, Runner
from onnxamp._runtime.values import Feed, from_value, to_value

if TYPE_CHECKING:
    import onnxruntime as ort

BUDGET: Final = 128 * 2**20
"""Default number of bytes of values and weights that a piece may hold."""

_NODES: Final = 1024
"""Nodes that a piece may have: ONNX Runtime 1.31 loads in time that grows much faster than their number."""


@dataclass(slots=True)
class Side:
    """One model being run: the values that are still needed, and the number of their future uses."""

    flow: Flow
    runner: Runner
    values: "dict[str, ort.OrtValue]"
    uses: Counter[str]

    def run(self, nodes: Sequence[int]) -> None:
        """Run nodes, keep the outputs that are needed, and drop values that have no more readers."""
        reads = [name for node in nodes for name in self.flow.reads[node]]
        self.uses.subtract(reads)
        made = [name for node in nodes for name in self.flow.nodes[node].output if name]
        wanted = tuple(name for name in made if self.uses[name] > 0)
        if wanted:
            self.values |= self.runner.run(Piece(tuple(nodes), wanted), self.values)
        self._drop(reads)

    def used(self, names: Iterable[str]) -> None:
        """Note that values were read outside of the model."""
        names = list(names)
        self.uses.subtract(names)
        self._drop(names)

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            if self.uses[name] <= 0:
                self.values.pop(name, None)

    def output(self, name: str) -> Any:
        """An output as an array (a list of arrays, None), wherever it comes from.

        Raises:
            RuntimeFailure: it is a sparse constant.
        """
        if name in self.values:
            output = from_value(self.values[name])
            # An input shares the feed's memory, which need not live as long as the output.
            return output.copy() if isinstance(output, np.ndarray) and name not in self.flow.maker else output
        if name in self.flow.shell.weights:
            return self.flow.shell.array(name, raised=self.flow.emulated)
        constant = self.flow.constants[name]
        if not isinstance(constant, TensorProto):
            raise RuntimeFailure(f"The sparse constant {name!r} cannot leave the model.")
        return numpy_helper.to_array(constant)


def start(runner: Runner, feeds: Mapping[str, Feed], others: Counter[str]) -> Side:
    """A model before its first node; ``others`` counts reads from outside. Feeds may be of any float types.

    Raises:
        ArgumentError: an input is not fed.
    """
    flow = runner.flow
    uses = Counter(name for reads in flow.reads for name in reads) + others + Counter(flow.outputs)
    values = {name: to_value(feed, flow.types.get(name)) for name, feed in fitted(flow, feeds).items()}
    return Side(flow, runner, values, uses)


def ancestors(flow: Flow, targets: Iterable[str], done: set[int]) -> list[int]:
    """Nodes that the targets need and that are not in ``done``, in order; they are added to it."""
    nodes = []
    waiting = [flow.maker[name] for name in targets if name in flow.maker]
    while waiting:
        node = waiting.pop()
        if node not in done:
            done.add(node)
            nodes.append(node)
            waiting += [flow.maker[name] for name in flow.reads[node] if name in flow.maker]
    return sorted(nodes)


def parts_of(flow: Flow, nodes: Iterable[int], budget: int) -> Iterator[tuple[int, ...]]:
    """Groups of consecutive nodes whose values and weights fit the budget; a node that exceeds it is alone.

    A model with optionals stays in one piece, as ONNX Runtime cannot be fed empty ones.
    """
    if any((kind or "").startswith("optional") for kind in flow.types.values()):
        yield from filter(None, [tuple(nodes)])
        return
    part: list[int] = []
    weights: set[str] = set()
    held = 0
    for node in nodes:
        new = {name for name in flow.reads[node] if name in flow.shell.weights} - weights
        cost = sum(flow.sizes.get(name, 0) for name in flow.nodes[node].output)
        cost += sum(stored_bytes(flow.shell.weights[name]) for name in new)
        if len(part) == _NODES or (part and held + cost > budget):
            yield tuple(part)
            part, weights, held = [], set(), 0
        part.append(node)
        weights |= new
        held += cost
    if part:
        yield tuple(part)


def run_alone(
    runner: Runner,
    feeds: Mapping[str, Feed],
    wanted: Sequence[str],
    budget: int = BUDGET,
    progress: Callable[[int, int], None] | None = None,
) -> Side:
    """Run a model as far as some of its values need; the result holds them.

    Args:
        feeds: a sample, in any float types.
        progress: called with the nodes that have run, and their number.

    Raises:
        RuntimeFailure: one of these nodes does not load or run. ArgumentError: an input is not fed.
    """
    flow = runner.flow
    nodes = ancestors(flow, wanted, set())
    uses = Counter([*wanted, *(name for node in nodes for name in flow.reads[node])])
    given = {name: feed for name, feed in fitted(flow, feeds).items() if uses[name]}
    values = {name: to_value(feed, flow.types.get(name)) for name, feed in given.items()}
    side, done = Side(flow, runner, values, uses), 0
    for part in parts_of(flow, nodes, budget):
        side.run(part)
        runner.forget()
        done += len(part)
        if progress is not None:
            progress(done, len(nodes))
    return side
