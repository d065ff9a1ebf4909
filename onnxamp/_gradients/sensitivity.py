"""The effect on outputs of rounding each value, from one forward and one backward pass per sample.

Rounding errors are small and nearly independent, so to first order the squared error of an output is a sum over the
values that are rounded. Let r be a vector of random signs over an output, and g = J^T r its gradient at a value: the
expectation of g_e^2 is the squared norm of the effect of element e on the output. A value that is off by d, which is
known, costs the sum of g_e^2 d_e^2; its many elements average out the choice of r. Outputs of few elements use several
r. What quantizers do to errors depends on all that arrives there (:mod:`onnxamp._gradients.quantizers`).

The passes run piece by piece. The backward pass recomputes each piece from the values at its borders, so that only
these and one piece are in memory. For a node without a gradient rule, each input is moved a little, and the effect on
its outputs becomes a gradient of the same energy, spread over the input.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from onnx import TensorProto
from onnx.helper import make_tensor_value_info

from onnxamp._base.executor import Memory
from onnxamp._base.public import no_collections
from onnxamp._base.records import record
from onnxamp._facts.dtypes import Format
from onnxamp._facts.providers import Profile
from onnxamp._gradients.backward import Backward, WrittenPiece
from onnxamp._gradients.expansion import expanded, moved_integers
from onnxamp._gradients.loops import counting, without_loops
from onnxamp._gradients.passes import (
    Passes,
    Sensitivities,
    matrix_readers,
    stepped_back,
)
from onnxamp._gradients.quantizers import LowPass
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import as_floats
from onnxamp._graph.view import Ports
from onnxamp._model.model import Model
from onnxamp._model.weights import rounded
from onnxamp._runtime.engines import Engine, Session
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.loop import Opened, Probe, in_groups
from onnxamp._runtime.piecewise.parts import batched, parts_of
from onnxamp._runtime.piecewise.pieces import (
    Executor,
    Piece,
    declare_dims,
    piece_inputs,
    piece_model,
)
from onnxamp._runtime.sessions.session import make_session, run_values
from onnxamp._runtime.sessions.values import Feeds, to_value

if TYPE_CHECKING:
    import onnxruntime as ort

_NODES: Final = 96
"""Nodes of a piece: its backward pass has some ten times as many, and ONNX Runtime loads those slowly."""

_TOGETHER: Final = 4
"""Samples that share the sessions of a piece."""


@record(kw_only=True)
class SensitivityProbe(Probe[Sensitivities]):
    """Measuring the sensitivities of a model of opset :data:`~onnxamp._gradients.writer.MIN_OPSET` or later."""

    has_steps = False

    model: SentModel
    engine: Engine
    low: Format
    budget: int
    arithmetic: Profile | None = None
    lowered: Mapping[str, Ports] = field(default_factory=dict)

    def open(self, memory: Memory) -> Opened[Sensitivities]:
        """As :meth:`Probe.open`."""
        del memory
        given = self.model.opened()
        floats = as_floats(given.proto)
        if floats is not given.proto:
            given = Model(floats, given.folder)
        model = self.engine.open(given, budget=self.budget)
        walk = GradientWalk(model, self.low, self.arithmetic, self.lowered)

        measure = in_groups(_TOGETHER, model.model, walk.run_together)
        return Opened(model.prepare_sample, measure)


@dataclass(slots=True)
class GradientWalk:
    """The passes through one model.

    Attributes:
        model: the model.
        low: the type that values are rounded to.
        arithmetic: the target whose float16 sums count as well; None if sums do not.
        lowered: the ports in low precision of a plan, by first output of their node, which decide what arrives at
            quantizers.
    """

    model: Session
    low: Format
    arithmetic: Profile | None = None
    lowered: Mapping[str, Ports] = field(default_factory=dict)
    _branches: "_Branches | None" = None
    """Those that the last sample took."""

    def run_together(self, samples: Mapping[int, Feeds]) -> Iterator[Sensitivities]:
        """Measure numbered samples; those that take the same branches share sessions. Numbers seed the signs.

        Raises:
            RuntimeFailure: the model does not run.
        """
        for runner, group in groupby(
            samples.items(), lambda item: self.model.prepare(item[1])
        ):
            if self._branches is None or self._branches.runner is not runner:
                self._branches = _Branches(self, runner)
            yield from self._branches.measured(dict(group))


_Sizes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


class _PieceFacts(NamedTuple):
    """The facts that determine the session of a piece's backward pass.

    Attributes:
        part: the nodes of the piece.
        inputs: the shapes of its inputs.
        seeded: the shapes of values with gradients from later pieces.
        seen: the shapes of floats that its nodes make.
        turns: how often each of its Loops turns, by its first output.
        partial: values that hold sentinels or NaN.
        quantizers: their results, of those whose gains are known.
    """

    part: tuple[int, ...]
    inputs: _Sizes
    seeded: _Sizes
    seen: _Sizes
    turns: tuple[tuple[str, int], ...]
    partial: frozenset[str]
    quantizers: tuple[str, ...]


class _Branches:
    """The passes through a model with certain branches. Sessions of its pieces serve all samples of the same shapes."""

    def __init__(self, walk: GradientWalk, runner: Executor) -> None:
        self.walk = walk
        self.runner = runner
        flow = runner.flow
        self.flow = flow
        self.integers = moved_integers(flow.nodes, flow.types)
        """Values that have gradients although they are not float32."""
        self.lowering = LowPass(flow, runner.provider, walk.low, walk.lowered)
        """The forward pass in low precision."""
        reads = Counter[str]()
        for names in (*flow.reads, flow.outputs):
            reads.update({*names})  # once for a node that reads a value twice
        self.shared = {name for name, count in reads.items() if count > 1}
        """Values that several nodes read."""
        readers = set() if walk.arithmetic is not None else matrix_readers(flow)
        self.products = {
            reader for reader in readers if flow.nodes[reader].op_type == "MatMul"
        }
        """Nodes that multiply by a large matrix, each a piece."""
        self.gathers = readers - self.products
        """Nodes that gather rows of a large matrix."""
        nodes = range(len(flow.nodes))
        self.whole = list(parts_of(flow, nodes, walk.model.budget // 4))
        self.parts = list(_divided(self.whole, readers))
        self.again = Counter[str]()
        """How often the backward pass reads values."""
        for part in self.parts:
            self.again.update(piece_inputs(flow, Piece(part, ())))
        self.again.update(flow.nodes[product].output[0] for product in self.products)
        self.again.update(self.lowering.compared)
        self.sessions: dict[_PieceFacts, tuple[ort.InferenceSession, Backward]] = {}
        self.counters: dict[
            tuple[object, ...], tuple[ort.InferenceSession, Mapping[str, str]]
        ] = {}

    def measured(self, samples: Mapping[int, Feeds]) -> Iterator[Sensitivities]:
        """Measure samples that take these branches."""
        runner = self.runner
        lowering = self.lowering
        passes = [
            Passes(runner, feeds, self.again, lowering) for feeds in samples.values()
        ]
        for part in self.whole:
            for one in passes:
                one.forward(part)
            runner.forget()
            lowering.executor.forget()
        # The number of the sample is the seed, so that results do not depend on which samples run together.
        for number, one in zip(samples, passes, strict=True):
            one.turn(np.random.default_rng(number))
        for part in reversed(self.parts):
            if part[0] in self.products:
                self._step_together(passes, part[0])
                continue
            for one in passes:
                self._step(one, part)
            runner.forget()
            if self.flow.large:  # otherwise, sessions would hold memory for each piece
                self.sessions.clear()
                self.counters.clear()
        for one in passes:
            yield one.sensitivities()

    def _step(self, one: Passes, part: tuple[int, ...]) -> None:
        """Run the backward pass of one piece from each vector of signs."""
        reads = piece_inputs(self.flow, Piece(part, ()))
        values = self._values_of(one, part, reads)
        facts = self._facts_of(one, part, values)
        if facts not in self.sessions:
            self.sessions[facts] = self._load(facts, values)
        session, backward = self.sessions[facts]
        wanted = [*backward.gradients.values(), *backward.costs.values()]
        zeros = {name: np.zeros(dims, np.float32) for name, dims in facts.seeded}
        for seed, rest in zip(one.seeds, one.waiting, strict=True):
            if zeros.keys().isdisjoint(rest):
                continue
            arrays = {  # whose memory the feeds share
                entry: rest.pop(name, zeros[name])
                for name, entry in backward.seeds.items()
            }
            arrays |= {
                entry: np.asarray(one.gains[name], np.float32)
                for name, entry in backward.gains.items()
            }
            given = {entry: to_value(array) for entry, array in arrays.items()}
            results = run_values(session, {**values, **given}, wanted)
            for name, output in backward.gradients.items():
                gradient = results[output].numpy().copy()
                before = rest.get(name)
                rest[name] = (
                    gradient if before is None else np.asarray(before + gradient)
                )
            for what, output in backward.costs.items():
                one.add(what, seed, float(results[output].numpy()))
        one.spread |= backward.spread
        one.side.used(reads)

    def _values_of(
        self, one: Passes, part: tuple[int, ...], reads: Iterable[str]
    ) -> dict[str, "ort.OrtValue"]:
        """Return the inputs of a piece, by name."""
        side = one.side
        values = dict[str, "ort.OrtValue"]()
        for name in reads:
            known = side.values.get(name)
            values[name] = self.runner.weight(name) if known is None else known
        if part[0] in self.gathers:  # only the rows that are gathered cost anything
            table, places = self.flow.nodes[part[0]].input
            used, new = np.unique(side.output(places), return_inverse=True)
            values[table] = to_value(values[table].numpy()[used])
            values[places] = to_value(new.reshape(values[places].shape()))
        return values

    def _facts_of(
        self,
        one: Passes,
        part: tuple[int, ...],
        values: Mapping[str, "ort.OrtValue"],
    ) -> _PieceFacts:
        """Return the facts that determine the session of a piece's backward pass."""
        outputs = self.flow.outputs_of(part)
        seeded = dict[str, tuple[int, ...]]()
        for name in outputs:
            for rest in one.waiting:
                if name in rest:
                    seeded[name] = rest[name].shape
        known = [name for name in outputs if name in one.shapes]
        partial = (
            name for name in (*values, *outputs) if not one.largest.get(name, 1.0) > 0
        )
        return _PieceFacts(
            part=part,
            inputs=tuple((name, _shape(value)) for name, value in values.items()),
            seeded=tuple(seeded.items()),
            seen=tuple((name, one.shapes[name]) for name in known),
            turns=self._turns(part, values),
            partial=frozenset(partial),
            quantizers=tuple(name for name in outputs if name in one.gains),
        )

    @np.errstate(over="ignore", invalid="ignore")
    def _step_together(self, passes: Sequence[Passes], number: int) -> None:
        """Run the backward pass of a product with a large matrix."""
        flow = self.flow
        low = self.walk.low
        x, name = flow.nodes[number].input
        (y,) = flow.nodes[number].output
        xs = [np.asarray(one.side.output(x)) for one in passes]
        ys = [np.asarray(one.side.output(y)) for one in passes]
        for one in passes:
            one.side.used([x, y])
        waiting = chain.from_iterable(one.waiting for one in passes)
        dys = [rest[y] for rest in waiting if y in rest]
        if not dys:
            return
        matrix = flow.shell.array(name, raised=flow.emulated)
        moved, dxs = stepped_back(matrix, xs, dys, low, self.runner.provider)
        steps = iter(dxs)
        for one, own, products, rows in zip(passes, xs, ys, moved, strict=True):
            x_error = rounded(own, low, inf) - own
            y_error = rounded(products, low, inf) - products
            are_numbers = np.isfinite(products).reshape(rows.shape)
            for seed, rest in zip(one.seeds, one.waiting, strict=True):
                if y not in rest:
                    continue
                dy = rest.pop(y)
                dx = next(steps).reshape(own.shape)
                effects = dy.reshape(rows.shape) * rows
                columns = np.sum(effects, axis=0, where=are_numbers)
                costs = {(y, ""): dy * y_error, (name, ""): columns}
                if name in self.shared:
                    costs[name, y] = columns
                if x in self.shared:
                    costs[x, y] = dx * x_error
                for what, effect in costs.items():
                    # As in a piece, some elements of a partial value are undefined.
                    counts = one.largest.get(what[0], 1.0) > 0 or np.isfinite(effect)
                    squares = np.square(effect)
                    cost = np.sum(squares, dtype=np.float64, where=counts)
                    one.add(what, seed, float(cost))
                rest[x] = rest[x] + dx if x in rest else dx

    def _turns(
        self, part: tuple[int, ...], values: "Mapping[str, ort.OrtValue]"
    ) -> tuple[tuple[str, int], ...]:
        """Return how often each Loop of a piece turns, by its first output."""
        if not any(self.flow.nodes[node].op_type == "Loop" for node in part):
            return ()
        kinds = {name: str(value.data_type()) for name, value in values.items()}
        key = (*part, *kinds.items())
        if key not in self.counters:
            model, rows = counting(piece_model(self.flow, Piece(part, ()), kinds))
            provider = self.runner.provider
            session = make_session(model, provider, optimize=False, lean=True)
            self.counters[key] = session, rows
        session, rows = self.counters[key]
        results = run_values(session, dict(values), list(rows.values()))
        return tuple((name, results[row].shape()[0]) for name, row in rows.items())

    @no_collections()
    def _load(
        self, facts: _PieceFacts, values: "Mapping[str, ort.OrtValue]"
    ) -> "tuple[ort.InferenceSession, Backward]":
        """Write the backward pass of a piece, and load it."""
        kinds = {name: str(value.data_type()) for name, value in values.items()}
        model = piece_model(self.flow, Piece(facts.part, ()), kinds)
        for entry in model.graph.input:
            if entry.type.HasField("tensor_type"):
                declare_dims(entry, values[entry.name].shape())
        model.graph.value_info.extend(
            make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in facts.seen
        )
        model, turns = without_loops(model, dict(facts.turns))
        written = WrittenPiece(
            graph=Graph.of(expanded(model)),
            low=self.walk.low,
            flow=self.flow,
            arithmetic=self.walk.arithmetic,
            turns=turns,
            integers=self.integers,
            quantizers=facts.quantizers,
            shared=self.shared,
            partial=facts.partial,
        )
        model = written.finish(dict(facts.seeded))
        # From sizes, ONNX Runtime infers shapes and numbers of attention ops that their kernels do not keep to.
        for entry in model.graph.input:
            if entry.type.HasField("tensor_type"):
                declare_dims(entry, [None] * len(entry.type.tensor_type.shape.dim))
        del model.graph.value_info[:]
        provider = self.runner.provider
        is_large = self.flow.large
        session = make_session(model, provider, optimize=False, lean=is_large)
        return session, written.ports


def _divided(
    parts: Iterable[Sequence[int]], readers: Container[int]
) -> Iterator[tuple[int, ...]]:
    """Yield the pieces of the backward pass: each reader of a large matrix alone, and other nodes together."""
    for part in parts:
        for _, alike in groupby(part, lambda node: node if node in readers else -1):
            for nodes in batched(tuple(alike), _NODES):
                yield tuple(nodes)


def _shape(value: "ort.OrtValue") -> tuple[int, ...]:
    return tuple(value.shape()) if value.is_tensor() else ()
