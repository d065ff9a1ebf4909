"""Running one model piece by piece: which values are still needed, and which nodes come next."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxamp._dtypes import Format
from onnxamp._errors import RuntimeFailure
from onnxamp._model.protos import stored_bytes
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.flow import Flow, fitted
from onnxamp._runtime.pieces import Piece, Runner
from onnxamp._runtime.values import Feed, from_value, to_value

if TYPE_CHECKING:
    import onnxruntime as ort

T = TypeVar("T")

_NODES: Final = 1024
"""Nodes that a piece may have: ONNX Runtime 1.31 loads in time that grows much faster than their number."""


@dataclass(slots=True)
class Side:
    """One model being run: the values that are still needed, and the number of their future uses.

    ``low`` are weights that are rounded on their way in.
    """

    flow: Flow
    runner: Runner
    values: "dict[str, ort.OrtValue]"
    uses: Counter[str]
    low: Mapping[str, Format] = field(default_factory=dict)

    def run(self, nodes: Sequence[int]) -> None:
        """Run nodes, keep the outputs that are needed, and drop values that have no more readers."""
        reads = [name for node in nodes for name in self.flow.reads[node]]
        self.uses.subtract(reads)
        made = [name for node in nodes for name in self.flow.nodes[node].output if name]
        wanted = tuple(name for name in made if self.uses[name] > 0)
        if wanted:
            self.values |= self.runner.run(Piece(tuple(nodes), wanted), self.values, self.low)
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
            return (
                output.copy()
                if isinstance(output, np.ndarray) and name not in self.flow.maker
                else output
            )
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
    values = {
        name: to_value(feed, flow.types.get(name)) for name, feed in fitted(flow, feeds).items()
    }
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
    return run_together(runner, [feeds], wanted, budget, progress)[0]


def run_together(
    runner: Runner,
    samples: Sequence[Mapping[str, Feed]],
    wanted: Sequence[str],
    budget: int = BUDGET,
    progress: Callable[[int, int], None] | None = None,
    low: Sequence[Mapping[str, Format]] = (),
) -> list[Side]:
    """:func:`run_alone` of several samples, which share each weight that is read.

    Args:
        low: by sample: weights that are rounded on their way in.
    """
    flow = runner.flow
    nodes = ancestors(flow, wanted, set())
    parts = list(parts_of(flow, nodes, budget))
    uses = Counter([*wanted, *(name for node in nodes for name in flow.reads[node])])
    sides = []
    for number, feeds in enumerate(samples):
        given = {name: feed for name, feed in fitted(flow, feeds).items() if uses[name]}
        values = {name: to_value(feed, flow.types.get(name)) for name, feed in given.items()}
        sides.append(Side(flow, runner, values, Counter(uses), low[number] if low else {}))
    total, done = len(nodes) * len(sides), 0
    for group in batched(sides, fitting(flow, parts, wanted, budget)):
        for part in parts:
            for side in group:
                side.run(part)
            runner.forget()
            done += len(part) * len(group)
            if progress is not None:
                progress(done, total)
    return sides


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in runs of that size; the last may be shorter."""
    return (items[start : start + size] for start in range(0, len(items), size))


def fitting(flow: Flow, parts: Sequence[Sequence[int]], wanted: Iterable[str], budget: int) -> int:
    """How many samples can be run together, part by part, so that what they hold between parts fits the budget.

    It is 1 for a model without large weights, which would gain nothing. Complexity: linear in what nodes read.
    """
    if not flow.large or len(parts) < 2:
        return 1
    uses = Counter(
        [*wanted, *(name for part in parts for node in part for name in flow.reads[node])]
    )
    held = {name for name in (*flow.inputs, *flow.defaults) if uses[name]}
    size = most = sum(flow.sizes.get(name, 0) for name in held)
    for part in parts:
        made = [name for node in part for name in flow.nodes[node].output if uses[name]]
        reads = [name for node in part for name in flow.reads[node]]
        uses.subtract(reads)
        held.update(made)
        gone = {name for name in reads if uses[name] <= 0} & held
        held -= gone
        size += sum(flow.sizes.get(name, 0) for name in made) - sum(
            flow.sizes.get(name, 0) for name in gone
        )
        most = max(most, size)
    return max(1, budget // max(most, 1))
