"""Pieces of a graph as models of their own, and how they are run.

A piece consists of some nodes in order. Its inputs are the values that they read from elsewhere, including large
weights, so that sessions hold no weights. Its outputs are the requested values. Pieces are not optimized: values are
those of the graph as written. What is constant stays constant: ONNX Runtime infers shapes from axes, sizes and empty
operands, and refuses nodes if it cannot.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

from onnxamp._base.errors import RuntimeFailure
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._graph.editor import NewNames
from onnxamp._model.protos import copy_fields
from onnxamp._runtime import BUDGET
from onnxamp._runtime.emulate import cast, rounding
from onnxamp._runtime.piecewise.flow import DataflowGraph, fitted
from onnxamp._runtime.piecewise.memory import free_bytes
from onnxamp._runtime.piecewise.parts import (
    ancestors,
    batched,
    fitting,
    parts_of,
    peak_together,
    weights_read,
)
from onnxamp._runtime.sessions.plugins import wants_ranks
from onnxamp._runtime.sessions.session import Provider, make_session, run_values
from onnxamp._runtime.sessions.values import (
    FOREIGN,
    Feeds,
    from_value,
    to_value,
    typed,
)

if TYPE_CHECKING:
    import onnxruntime as ort

_SMALL: Final = 1024
"""Elements up to which constants are part of the pieces that read them: sizes, axes and tables are."""
_SESSIONS: Final = 16
"""Sessions that an executor keeps. Small allocations of many sessions between large values fragment the heap."""


class Piece(NamedTuple):
    """Some nodes in order, and the values that are wanted of them.

    ``renamed`` gives outputs of these nodes other names, while the nodes read the values of the old names from outside.
    ``rounded`` are inputs that arrive in float32 and are rounded to the low precision that they have in the model.
    """

    nodes: tuple[int, ...]
    wanted: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    rounded: frozenset[str] = frozenset()

    def covers(self, other: "Piece") -> bool:
        """Return whether this piece computes all that another one does, in the same way."""
        same = self._replace(wanted=other.wanted) == other
        return same and set(self.wanted).issuperset(other.wanted)


class _LoadedPiece(NamedTuple):
    """A piece that is ready to run.

    Attributes:
        session: the piece.
        entries: values that it reads, each with its input.
        lengths: how many sizes there are in those that hold sizes.
    """

    session: "ort.InferenceSession"
    entries: list[tuple[str, str]]
    lengths: Mapping[str, list[int]]

    def fits(self, values: "Mapping[str, ort.OrtValue]") -> bool:
        """Return whether values hold as many sizes as those for which the piece was loaded."""
        return all(values[name].shape() == dims for name, dims in self.lengths.items())


def piece_inputs(flow: DataflowGraph, piece: Piece) -> list[str]:
    """Return values that a piece reads from outside."""
    inside = {*flow.outputs_of(piece.nodes)} - dict(piece.renamed).keys()
    reads = [name for name in flow.reads_of(piece.nodes) if name not in inside]
    return list(dict.fromkeys(reads))


def piece_model(
    flow: DataflowGraph,
    piece: Piece,
    kinds: Mapping[str, str],
    known: Iterable[TensorProto] = (),
) -> ModelProto:
    """Return a piece as a model of its own.

    Args:
        kinds: type by input of the piece.
        known: values from outside that are constants of the piece instead of inputs.

    Raises:
        RuntimeFailure: a value that cannot be fed (a map) would have to enter the piece.
    """
    model = ModelProto()
    copy_fields(flow.shell.model, model, but={"graph"})
    model.graph.name = flow.shell.model.graph.name or "piece"
    renamed = dict(piece.renamed)
    names = NewNames({*flow.names, *renamed.values()})
    # Under other names nodes may be fed with another model's values.
    ranks = {} if renamed else flow.ranks
    model.graph.initializer.extend(known)
    settled = {tensor.name for tensor in model.graph.initializer}
    for name in piece_inputs(flow, piece):
        if name in settled:
            continue
        entry = model.graph.input.add(name=name)
        entry.type.CopyFrom(typed(kinds[name]))
        if name in flow.shell.weights and name not in flow.defaults:
            declare_dims(entry, flow.shell.weights[name].dims)
        elif name in ranks and entry.type.HasField("tensor_type"):
            # Some kernels crash the process on other ranks.
            declare_dims(entry, [None] * ranks[name])
        if name in piece.rounded:
            entry.name = names.fresh(f"{name}/given")
            source = entry.name
            elem = flow.low[name]
            if flow.emulated:
                model.graph.node.extend(rounding(names, source, name, elem))
            else:
                model.graph.node.append(cast(names, source, name, elem))
    held = chain.from_iterable(flow.held[node] for node in piece.nodes)
    for name in dict.fromkeys(held):
        constant = flow.constants[name]
        if isinstance(constant, TensorProto):
            model.graph.initializer.append(constant)
        else:
            model.graph.sparse_initializer.append(constant)
    for node in piece.nodes:
        added = model.graph.node.add()
        added.CopyFrom(flow.nodes[node])
        added.output[:] = [renamed.get(name, name) for name in added.output]
    for name in piece.wanted:
        model.graph.output.add(name=name)
    return model


def declare_dims(entry: ValueInfoProto, dims: Iterable[int | None]) -> None:
    """Declare a shape: kernels may ask for the rank, and ONNX Runtime refuses inputs of a wrong one."""
    entry.type.tensor_type.shape.ClearField("dim")
    entry.type.tensor_type.shape.SetInParent()
    for dim in dims:
        entry.type.tensor_type.shape.dim.add(dim_value=dim)


def _known(
    flow: DataflowGraph,
    piece: Piece,
    names: Iterable[str],
    values: "Mapping[str, ort.OrtValue]",
) -> list[TensorProto]:
    """Return the small constants among the values that a piece reads."""
    known = []
    for name in names:
        if name not in flow.fixed or name not in values or name in piece.rounded:
            continue
        value = values[name]
        is_plain = value.is_tensor() and not FOREIGN.search(value.data_type())
        if is_plain and prod(value.shape()) <= _SMALL:
            array = np.asarray(from_value(value))
            known.append(numpy_helper.from_array(array, name))
    return known


def _declare_sizes(
    flow: DataflowGraph,
    piece: Piece,
    entries: Iterable[ValueInfoProto],
    values: "Mapping[str, ort.OrtValue]",
) -> dict[str, list[int]]:
    """Declare how many sizes there are in inputs that hold sizes: unknown ones would pass for none. Return what was
    declared.
    """
    sized = op_facts().size_inputs
    names = set[str]()
    for node in (flow.nodes[index] for index in piece.nodes):
        ports = sized.get(op_key(node), ())
        names.update(node.input[port] for port in ports if port < len(node.input))
    shapes = dict[str, list[int]]()
    for entry in entries:
        if entry.name in names and entry.name in values:
            shapes[entry.name] = values[entry.name].shape()
            declare_dims(entry, shapes[entry.name])
    return shapes


def _declare_ranks(
    names: Iterable[str],
    entries: Iterable[ValueInfoProto],
    values: "Mapping[str, ort.OrtValue]",
) -> None:
    """Declare the ranks that inputs have in this run, where none are known."""
    for name, entry in zip(names, entries, strict=True):
        declared = entry.type.tensor_type
        if (
            name in values
            and entry.type.HasField("tensor_type")
            and not declared.HasField("shape")
        ):
            declare_dims(entry, [None] * len(values[name].shape()))


@dataclass(slots=True)
class Executor:
    """Runs pieces. Some sessions are kept for further samples; until :meth:`forget` where weights are large, as these
    are. ``rewrite`` changes pieces before they are loaded. ``joined`` is why pieces do not run that run together.
    """

    flow: DataflowGraph
    provider: Provider
    rewrite: Callable[[ModelProto], ModelProto] | None = None
    joined: str = ""
    _sessions: "dict[Piece, _LoadedPiece]" = field(default_factory=dict)
    _weights: "dict[str, ort.OrtValue]" = field(default_factory=dict)

    def run(
        self, piece: Piece, values: "Mapping[str, ort.OrtValue]"
    ) -> "dict[str, ort.OrtValue]":
        """Run a piece.

        Args:
            values: at least those that the piece reads from outside, apart from weights.

        Returns:
            The wanted values by name.

        Raises:
            RuntimeFailure: ONNX Runtime cannot load or run the piece.
        """
        loaded = self._loaded(piece)
        if loaded is None or not loaded.fits(values):
            loaded = self._load(piece, values)
        # The first pieces stay. Replacing the oldest would never meet a piece again, as they run in a fixed order.
        if len(self._sessions) < _SESSIONS:
            self._sessions[piece] = loaded
        feeds = {
            entry: values[name] if name in values else self.weight(name)
            for name, entry in loaded.entries
        }
        return run_values(loaded.session, feeds, piece.wanted)

    def _loaded(self, piece: Piece) -> "_LoadedPiece | None":
        """Return what was loaded for a piece, or for one that returns more; None if nothing was."""
        if piece in self._sessions:
            return self._sessions[piece]
        others = self._sessions.items()
        return next((loaded for other, loaded in others if other.covers(piece)), None)

    def forget(self) -> None:
        """Drop the weights that were read for earlier pieces, and the sessions that would hold memory for each."""
        self._weights.clear()
        if self.flow.large:
            self._sessions.clear()

    def _load(
        self, piece: Piece, values: "Mapping[str, ort.OrtValue]"
    ) -> "_LoadedPiece":
        """Return a piece, ready to run."""
        names = piece_inputs(self.flow, piece)
        known = _known(self.flow, piece, names, values)
        settled = {tensor.name for tensor in known}
        names = [name for name in names if name not in settled]
        kinds = {name: self._kind(piece, name, values) for name in names}
        model = piece_model(self.flow, piece, kinds, known)
        lengths = _declare_sizes(self.flow, piece, model.graph.input, values)
        if self.rewrite is not None:
            model = self.rewrite(model)
        if wants_ranks(self.provider):
            _declare_ranks(names, model.graph.input, values)
        session = make_session(
            model,
            self.provider,
            optimize=False,
            lean=self.flow.large,
        )
        entries = (entry.name for entry in model.graph.input)
        return _LoadedPiece(session, list(zip(names, entries, strict=True)), lengths)

    def _kind(
        self, piece: Piece, name: str, values: "Mapping[str, ort.OrtValue]"
    ) -> str:
        declared = self.flow.types.get(name)
        if declared is not None and (name not in piece.rounded or name not in values):
            return declared
        return str(values[name].data_type())

    def weight(self, name: str) -> "ort.OrtValue":
        """Return a weight, read once until :meth:`forget`."""
        if name not in self._weights:
            array = self.flow.shell.array(name, raised=self.flow.emulated)
            self._weights[name] = to_value(array)
        return self._weights[name]


@dataclass(slots=True)
class Execution:
    """One model being run: the values that are still needed, and the number of their future uses."""

    executor: Executor
    values: "dict[str, ort.OrtValue]"
    uses: Counter[str]

    @property
    def flow(self) -> DataflowGraph:
        """The model that is run."""
        return self.executor.flow

    def parts(
        self, nodes: Iterable[int], budget: int = BUDGET
    ) -> Iterator[tuple[int, ...]]:
        """Run nodes part by part, lazily, and yield the nodes of each part after it has run.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run a part.
        """
        for part in parts_of(self.flow, list(nodes), budget):
            self.run(part)
            yield part
            self.executor.forget()

    def run(self, nodes: Sequence[int]) -> None:
        """Run nodes, keep the outputs that are needed, and drop values that have no more readers."""
        reads = self.flow.reads_of(nodes)
        self.uses.subtract(reads)
        outputs = self.flow.outputs_of(nodes)
        wanted = tuple(name for name in outputs if self.uses[name] > 0)
        if wanted:
            self.values |= self.executor.run(Piece(tuple(nodes), wanted), self.values)
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
        """Return an output as an array (a list of arrays, None), wherever it comes from.

        Raises:
            RuntimeFailure: it is a sparse constant.
        """
        if name in self.values:
            output = from_value(self.values[name])
            # An input shares the feed's memory, which need not live as long as the output.
            if isinstance(output, np.ndarray) and name not in self.flow.maker:
                return output.copy()
            return output
        if name in self.flow.shell.weights:
            return self.flow.shell.array(name, raised=self.flow.emulated)
        constant = self.flow.constants[name]
        if not isinstance(constant, TensorProto):
            raise RuntimeFailure(
                f"The sparse constant {name!r} cannot leave the model."
            )
        return numpy_helper.to_array(constant)


def start(
    executor: Executor,
    feeds: Feeds,
    others: Counter[str],
    nodes: Iterable[int] | None = None,
) -> Execution:
    """Return a model before its first node.

    Args:
        feeds: a sample, in any float types.
        others: counts reads from outside.
        nodes: those that will run; None for all, with all outputs to be read.

    Raises:
        ArgumentError: an input is not fed.
    """
    flow = executor.flow
    running = nodes
    if running is None:
        running = range(len(flow.nodes))
        others = others + Counter(flow.outputs)
    uses = others + Counter(flow.reads_of(running))
    values = {
        name: to_value(feed, flow.types.get(name))
        for name, feed in fitted(flow, feeds).items()
        if nodes is None or uses[name]
    }
    return Execution(executor, values, uses)


def observed_values(
    executor: Executor,
    feeds: Feeds,
    names: Sequence[str],
    nodes: Iterable[int] | None = None,
) -> "Iterator[tuple[str, ort.OrtValue]]":
    """Run a model part by part, and yield some of its values as soon as they are known: inputs, then those that nodes
    compute. Each is dropped after that, if no node needs it.

    Args:
        feeds: a sample, in any float types.
        names: the values to yield.
        nodes: those to run; None for all.

    Raises:
        RuntimeFailure: ONNX Runtime cannot run a part. ArgumentError: an input is not fed.
    """
    flow = executor.flow
    wanted = frozenset(names)
    execution = start(executor, feeds, Counter(names), nodes)
    known = [name for name in names if name not in flow.maker]
    running = range(len(flow.nodes)) if nodes is None else nodes
    for part in chain([()], execution.parts(running)):
        known += flow.outputs_of(part)
        for name in known:
            if name in wanted and name in execution.values:
                yield name, execution.values[name]
                execution.used([name])
        known = []


def run_alone(
    executor: Executor,
    feeds: Feeds,
    wanted: Sequence[str],
    budget: int = BUDGET,
) -> Execution:
    """Run only the nodes that the requested values need, and return a result with these values.

    Args:
        feeds: a sample, in any float types.

    Raises:
        RuntimeFailure: one of these nodes does not load or run. ArgumentError: an input is not fed.
    """
    return run_together(executor, [feeds], wanted, budget)[0]


def run_together(
    executor: Executor,
    samples: Sequence[Feeds],
    wanted: Sequence[str],
    budget: int = BUDGET,
    progress: Callable[[int, int], None] | None = None,
) -> list[Execution]:
    """Return :func:`run_alone` of several samples, which share each weight that is read.

    ``progress`` is called with the number of nodes that have run, and with that of all.

    If a piece does not run, although all of them do together, onnxamp cut the graph where it must not be cut.
    """
    flow = executor.flow
    nodes, parts, is_kept = flow.ask(_route_to, tuple(wanted), budget)

    def run(parts: Sequence[Sequence[int]]) -> list[Execution]:
        """Run parts of the graph one after the other, each on as many samples as fit."""
        executions = [
            start(executor, sample, Counter(wanted), nodes) for sample in samples
        ]
        total = len(nodes) * len(executions)
        done = 0
        for group in batched(executions, fitting(flow, parts, wanted, budget)):
            for part in parts:
                for execution in group:
                    execution.run(part)
                if not is_kept:
                    executor.forget()
                done += len(part) * len(group)
                if progress is not None:
                    progress(done, total)
        return executions

    if executor.joined:
        return run([nodes])
    try:
        return run(parts)
    except RuntimeFailure as error:
        # Half of the memory is left for what kernels and other processes allocate meanwhile.
        if len(parts) < 2 or peak_together(flow, nodes, wanted) > free_bytes() // 2:
            raise
        try:
            executions = run([nodes])
        except RuntimeFailure:
            raise error from None
        executor.joined = str(error)
        return executions


class _Route(NamedTuple):
    """How values are computed.

    Attributes:
        nodes: the nodes that they need, in order.
        parts: the same nodes in parts that fit the budget.
        is_kept: whether their weights do so together, and stay for the next sample.
    """

    nodes: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    is_kept: bool


def _route_to(flow: DataflowGraph, wanted: tuple[str, ...], budget: int) -> _Route:
    """Return how values are computed within a budget of memory."""
    nodes = tuple(ancestors(flow, wanted, set()))
    parts = tuple(parts_of(flow, nodes, budget, wanted))
    return _Route(nodes, parts, weights_read(flow, nodes) <= budget)
