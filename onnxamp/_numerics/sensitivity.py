"""The effect on outputs of rounding each value, from one forward and one backward pass per sample.

Rounding errors are small and nearly independent, so to first order the squared error of an output is a sum over the
values that are rounded. Let r be a vector of random signs over an output, and g = J^T r its gradient at a value: the
expectation of g_e^2 is the squared norm of the effect of element e on the output. A value that is off by d, which is
known, costs the sum of g_e^2 d_e^2; its many elements average out the choice of r. Outputs of few elements use several
r. What quantizers do to errors depends on all that arrives there (:mod:`onnxamp._numerics.quantizers`).

The passes run piece by piece. The backward pass recomputes each piece from the values at its borders, so that only
these and one piece are in memory. For a node without a gradient rule, each input is moved a little, and the effect on
its outputs becomes a gradient of the same energy, spread over the input.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from onnx import TensorProto
from onnx.helper import make_tensor_value_info

from onnxamp._dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import as_floats
from onnxamp._graph.view import Ports
from onnxamp._model.model import Model
from onnxamp._numerics.backward import (
    WrittenPiece,
    expanded,
    moved_integers,
)
from onnxamp._numerics.matrices import Floats, Moved, matrix_readers, stepped_back
from onnxamp._numerics.passes import Passes, Sensitivities
from onnxamp._numerics.quantizers import LowPass
from onnxamp._numerics.turns import TurnCounter, without_loops
from onnxamp._ops.providers import Profile
from onnxamp._public import no_collections
from onnxamp._runtime.engines import Engine, Session
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.flow import DataflowGraph
from onnxamp._runtime.loop import Opened, Probe, in_groups
from onnxamp._runtime.pieces import (
    Executor,
    Piece,
    batched,
    declare_dims,
    parts_of,
    piece_inputs,
    piece_model,
)
from onnxamp._runtime.session import make_session, run_values
from onnxamp._runtime.values import Feeds, to_value
from onnxamp._workers.executor import Memory

if TYPE_CHECKING:
    import onnxruntime as ort

_NODES: Final = 96
"""Nodes of a piece: its backward pass has some ten times as many, and ONNX Runtime loads those slowly."""

_TOGETHER: Final = 4
"""Samples that share the sessions of a piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


class _Backward(NamedTuple):
    """The backward pass of a piece.

    Attributes:
        session: computes it.
        reads: inputs of the piece.
        seeds: value -> the input that takes its gradient from later pieces.
        gradients: value of an earlier piece -> the output that holds its gradient.
        costs: value, and what of it -> the output that holds the cost: "" for that of rounding it, and else
            :data:`SUMMED`, or the first output of a node that reads it.
        spread: labels of nodes without a rule.
        gains: the result of a quantizer -> the input that takes its gain.
    """

    session: "ort.InferenceSession"
    reads: tuple[str, ...]
    seeds: Mapping[str, str]
    gradients: Mapping[str, str]
    costs: Mapping[tuple[str, str], str]
    spread: tuple[str, ...]
    gains: Mapping[str, str]


@dataclass(slots=True)
class GradientWalk:
    """The passes through one model. Sessions of its pieces serve all samples of the same shapes.

    Attributes:
        model: the model.
        low: the type that values are rounded to.
        arithmetic: the target whose float16 sums count, too.
        lowered: the ports in low precision of a plan, by first output of their node, which decide what arrives at
            quantizers.
    """

    model: Session
    low: Format
    arithmetic: Profile | None = None
    lowered: Mapping[str, Ports] = field(default_factory=dict)
    _sessions: dict[tuple[Any, ...], _Backward] = field(default_factory=dict)
    _counters: dict[tuple[Any, ...], TurnCounter] = field(default_factory=dict)
    _flow: DataflowGraph | None = None
    """The model that the sessions belong to, with the branches that it takes."""
    _integers: Container[str] = ()
    """Values that have gradients although they are not float32."""
    _lowering: LowPass | None = None
    """The forward pass of that model in low precision."""
    _shared: Container[str] = ()
    """Values that several nodes read."""
    _gathers: Container[int] = ()
    """Nodes that gather rows of a large matrix."""

    def run_together(self, samples: Mapping[int, Feeds]) -> Iterator[Sensitivities]:
        """Measure numbered samples; those that take the same branches share sessions. Numbers seed the signs.

        Raises:
            RuntimeFailure: the model does not run.
        """
        for runner, group in groupby(
            samples.items(), lambda item: self.model.prepare(item[1])
        ):
            yield from self._together(runner, dict(group))

    def _together(
        self, runner: Executor, samples: Mapping[int, Feeds]
    ) -> Iterator[Sensitivities]:
        """Measure samples that take the same branches."""
        flow = runner.flow
        if flow is not self._flow:  # in other branches, other nodes have these numbers
            self._flow = flow
            self._sessions.clear()
            self._counters.clear()
            self._integers = moved_integers(flow.nodes, flow.types)
            self._lowering = LowPass(flow, runner.provider, self.low, self.lowered)
        reads = Counter(
            name for names in (*flow.reads, flow.outputs) for name in set(names)
        )
        self._shared = {name for name, count in reads.items() if count > 1}
        readers = set() if self.arithmetic is not None else matrix_readers(flow)
        whole = list(parts_of(flow, range(len(flow.nodes)), self.model.budget // 4))
        parts = [
            tuple(nodes)
            for part in whole
            for _, alike in groupby(part, lambda node: node if node in readers else -1)
            for nodes in batched(tuple(alike), _NODES)
        ]
        again = Counter(
            name for part in parts for name in piece_inputs(flow, Piece(part, ()))
        )
        products = {one for one in readers if flow.nodes[one].op_type == "MatMul"}
        again.update(flow.nodes[one].output[0] for one in products)
        self._gathers = readers - products
        lowering = self._lowering
        assert lowering is not None
        again.update(lowering.compared)
        passes = [
            Passes.begin(runner, feeds, again, lowering) for feeds in samples.values()
        ]
        for part in whole:
            for one in passes:
                one.forward(part)
            runner.forget()
            lowering.executor.forget()
        for number, one in zip(samples, passes, strict=True):
            one.turn(np.random.default_rng(number))
        for part in reversed(parts):
            if part[0] in products:
                self._step_together(passes, part[0])
                continue
            for one in passes:
                self._step(one, part)
            runner.forget()
            if flow.large:  # otherwise, sessions would hold memory for each piece
                self._sessions.clear()
                self._counters.clear()
        for one in passes:
            yield one.found.sensitivities()

    def _step(self, one: Passes, part: Sequence[int]) -> None:
        """Run the backward pass of one piece from each vector of signs."""
        side, waiting, found = one.side, one.waiting, one.found
        runner, flow = side.executor, side.flow
        reads = piece_inputs(flow, Piece(tuple(part), ()))
        values = {
            name: side.values[name] if name in side.values else runner.weight(name)
            for name in reads
        }
        if part[0] in self._gathers:  # only the rows that are gathered cost anything
            table, places = flow.nodes[part[0]].input
            used, new = np.unique(side.output(places), return_inverse=True)
            values[table] = to_value(values[table].numpy()[used])
            values[places] = to_value(new.reshape(values[places].shape()))
        made = [name for node in part for name in flow.nodes[node].output if name]
        seeded = tuple(name for name in made if any(name in rest for rest in waiting))
        shapes = {name: _shape(value) for name, value in values.items()}
        dims = {name: _first(waiting, name).shape for name in seeded}
        turns = self._turns(runner, Piece(tuple(part), ()), values)
        partial = frozenset(
            name for name in (*reads, *made) if not one.largest.get(name, 1.0) > 0
        )
        seen = {name: one.shapes[name] for name in made if name in one.shapes}
        key = (
            *part,
            *map(tuple, (shapes.items(), dims.items(), seen.items(), turns.items())),
            partial,
            frozenset(name for name in made if name in one.gains),
        )
        if key not in self._sessions:
            self._sessions[key] = self._load(
                flow, part, values, dims, runner, partial, seen, turns, one.gains.keys()
            )
        backward = self._sessions[key]
        zeros = {name: np.zeros(dims[name], np.float32) for name in seeded}
        for seed, rest in zip(one.seeds, waiting, strict=True):
            if not any(name in rest for name in seeded):
                continue
            arrays = {  # whose memory the feeds share
                entry: rest.pop(name, zeros[name])
                for name, entry in backward.seeds.items()
            }
            given = {entry: to_value(array) for entry, array in arrays.items()}
            given |= {
                entry: to_value(np.asarray(one.gains[name], np.float32))
                for name, entry in backward.gains.items()
            }
            read = {name: values[name] for name in backward.reads}
            wanted = [*backward.gradients.values(), *backward.costs.values()]
            results = run_values(backward.session, {**read, **given}, wanted)
            for name, output in backward.gradients.items():
                gradient = results[output].numpy().copy()
                rest[name] = (
                    np.asarray(rest[name] + gradient) if name in rest else gradient
                )
            for what, output in backward.costs.items():
                cost = float(results[output].numpy())
                found.add(what, seed.group, cost / seed.probes)
        found.spread.update(dict.fromkeys(backward.spread))
        side.used(reads)

    @np.errstate(over="ignore", invalid="ignore")
    def _step_together(self, passes: Sequence[Passes], number: int) -> None:
        """Run the backward pass of a product with a large matrix."""
        runner = passes[0].side.executor
        flow, low = runner.flow, self.low
        (x, name), (y,) = flow.nodes[number].input, flow.nodes[number].output
        starts = [
            (one, seed, rest, rest.pop(y))
            for one in passes
            for seed, rest in zip(one.seeds, one.waiting, strict=True)
            if y in rest
        ]
        xs, ys = (
            [np.asarray(one.side.output(value)) for one in passes] for value in (x, y)
        )
        for one in passes:
            one.side.used([x, y])
        if not starts:
            return
        matrix = flow.shell.array(name, raised=flow.emulated)
        dys = [dy for *_, dy in starts]
        moved, dxs = stepped_back(matrix, xs, dys, low, runner.provider)
        rounding = {
            id(one): Moved.of(own, made, rows, low)
            for one, own, made, rows in zip(passes, xs, ys, moved, strict=True)
        }
        for (one, seed, rest, dy), rows in zip(starts, dxs, strict=True):
            dx = rows.reshape(rounding[id(one)].x.shape)
            of_x, of_y, columns = rounding[id(one)].along(dx, dy)
            costs = {(y, ""): of_y, (name, ""): columns}
            if name in self._shared:
                costs[name, y] = columns
            if x in self._shared:
                costs[x, y] = of_x
            for what, effect in costs.items():
                # As in a piece, some elements of a partial value are undefined.
                counts = one.largest.get(what[0], 1.0) > 0 or np.isfinite(effect)
                cost = float(np.sum(np.square(effect), dtype=np.float64, where=counts))
                one.found.add(what, seed.group, cost / seed.probes)
            rest[x] = rest[x] + dx if x in rest else dx

    def _turns(
        self, runner: Executor, part: Piece, values: "Mapping[str, ort.OrtValue]"
    ) -> Mapping[str, int]:
        """Return how often each Loop of a piece turns, by its first output."""
        if not any(runner.flow.nodes[node].op_type == "Loop" for node in part.nodes):
            return {}
        kinds = {name: str(value.data_type()) for name, value in values.items()}
        key = (*part.nodes, *kinds.items())
        if key not in self._counters:
            model = piece_model(runner.flow, part, kinds)
            self._counters[key] = TurnCounter.of(model, runner.provider)
        return self._counters[key].turns(values)

    @no_collections()
    def _load(
        self,
        flow: DataflowGraph,
        part: Sequence[int],
        values: "Mapping[str, ort.OrtValue]",
        seeded: Mapping[str, Sequence[int]],
        runner: Executor,
        partial: Container[str],
        seen: Mapping[str, Sequence[int]],
        counts: Mapping[str, int],
        quantizers: Container[str],
    ) -> _Backward:
        """Write the backward pass of a piece whose inputs have these shapes, and load it."""
        kinds = {name: str(value.data_type()) for name, value in values.items()}
        model = piece_model(flow, Piece(tuple(part), ()), kinds)
        for entry in model.graph.input:
            if entry.type.HasField("tensor_type"):
                declare_dims(entry, values[entry.name].shape())
        model.graph.value_info.extend(
            make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in seen.items()
        )
        model, turns = without_loops(model, counts)
        graph = Graph.of(expanded(model))
        written = WrittenPiece(
            graph=graph,
            low=self.low,
            flow=flow,
            arithmetic=self.arithmetic,
            turns=turns,
            integers=self._integers,
            quantizers=quantizers,
            shared=self._shared,
            partial=partial,
        )
        fed = written.finish(seeded)
        # From sizes, ONNX Runtime infers shapes and numbers of attention ops that their kernels do not keep to.
        for entry in written.model.graph.input:
            if entry.type.HasField("tensor_type"):
                declare_dims(entry, [None] * len(entry.type.tensor_type.shape.dim))
        del written.model.graph.value_info[:]
        return _Backward(
            session=make_session(
                written.model, runner.provider, optimize=False, lean=flow.large
            ),
            reads=tuple(values),
            seeds=fed,
            gradients=written.gradients,
            costs=written.costs,
            spread=tuple(written.spread),
            gains=written.gains,
        )


def _shape(value: "ort.OrtValue") -> tuple[int, ...]:
    return tuple(value.shape()) if value.is_tensor() else ()


def _first(waiting: Sequence[Mapping[str, Floats]], name: str) -> Floats:
    return next(one[name] for one in waiting if name in one)
