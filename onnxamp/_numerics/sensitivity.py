"""The effect on outputs of rounding each value, from one forward and one backward pass per sample.

Rounding errors are small and nearly independent, so to first order the squared error of an output is a sum over the
values that are rounded. Let r be a vector of random signs over an output, and g = J^T r its gradient at a value: the
expectation of g_e^2 is the squared norm of the effect of element e on the output. A value that is off by d, which is
known, costs the sum of g_e^2 d_e^2; its many elements average out the choice of r. Outputs of few elements use several
r.

The passes run piece by piece. The backward pass recomputes each piece from the values at its borders, so that only
these and one piece are in memory. For a node without a gradient rule, each input is moved a little, and the effect on
its outputs becomes a gradient of the same energy, spread over the input.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import inf, isnan
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from onnx import TensorProto
from onnx.helper import make_tensor_value_info

from onnxamp._dtypes import FLOAT, Format
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.graph import Graph
from onnxamp._model.statistics import SENTINEL
from onnxamp._numerics.backward import (
    SUMMED,
    WrittenPiece,
    expanded,
    moved_integers,
)
from onnxamp._numerics.matrices import Floats, Moved, matrix_readers, stepped_back
from onnxamp._numerics.turns import counted_turns, without_loops
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.engines import Engine, Session
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.flow import DataflowGraph
from onnxamp._runtime.loop import Opened, Probe, in_groups
from onnxamp._runtime.pieces import (
    Execution,
    Executor,
    Piece,
    batched,
    declare_dims,
    parts_of,
    piece_inputs,
    piece_model,
    start,
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

_GROUPS: Final = 8
"""Groups of outputs whose errors are measured separately. If there are more outputs, some share a group, and their sum
counts.
"""

_PROBES: Final = 4
"""Vectors of signs for an output of few elements."""

_MANY: Final = 256
"""Elements from which on one vector is enough."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """The effect of rounding a value.

    Attributes:
        largest: the largest magnitude of its elements, apart from sentinels such as those of attention masks; 0 for
            weights.
        costs: by group of outputs: the squared relative error that rounding this value alone causes; the last one is
            that of values that decide what is selected, and which branches are taken.
        summed: the same where its node sums up as the target does; empty where that makes no difference.
        read: by first output of a node that reads it, where several do: the same where it is rounded for that node.
    """

    largest: float
    costs: tuple[float, ...]
    summed: tuple[float, ...]
    read: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """The measurements of one sample.

    Attributes:
        values: by name of the value.
        spread: labels of nodes without a gradient rule, whose inputs were moved instead.
    """

    values: Mapping[str, Rounded]
    spread: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityProbe(Probe[Sensitivities]):
    """Measuring the sensitivities of a model of opset :data:`~onnxamp._gradients.writer.MIN_OPSET` or later."""

    has_steps = False

    model: SentModel
    engine: Engine
    low: Format
    budget: int
    arithmetic: Profile | None = None

    def open(self, memory: Memory) -> Opened[Sensitivities]:
        """As :meth:`Probe.open`."""
        del memory
        model = self.engine.open(self.model.opened(), budget=self.budget)
        walk = GradientWalk(model, self.low, self.arithmetic)

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
    """

    session: "ort.InferenceSession"
    reads: tuple[str, ...]
    seeds: Mapping[str, str]
    gradients: Mapping[str, str]
    costs: Mapping[tuple[str, str], str]
    spread: tuple[str, ...]


@dataclass(slots=True)
class GradientWalk:
    """The passes through one model. Sessions of its pieces serve all samples of the same shapes.

    Attributes:
        model: the model.
        low: the type that values are rounded to.
        arithmetic: the target whose float16 sums count, too.
    """

    model: Session
    low: Format
    arithmetic: Profile | None = None
    _sessions: dict[tuple[Any, ...], _Backward] = field(default_factory=dict)
    _flow: DataflowGraph | None = None
    """The model that the sessions belong to, with the branches that it takes."""
    _integers: Container[str] = ()
    """Values that have gradients although they are not float32."""
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
        self._integers = moved_integers(flow.nodes, flow.types)
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
        passes = [_Passes.begin(runner, feeds, again) for feeds in samples.values()]
        for part in whole:
            for one in passes:
                one.forward(part)
            runner.forget()
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
        for one in passes:
            yield one.found.sensitivities()

    def _step(self, one: "_Passes", part: Sequence[int]) -> None:
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
        )
        if key not in self._sessions:
            self._sessions[key] = self._load(
                flow, part, values, dims, runner, partial, seen, turns
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
            read = {name: values[name] for name in backward.reads}
            wanted = [*backward.gradients.values(), *backward.costs.values()]
            results = run_values(backward.session, {**read, **given}, wanted)
            for name, output in backward.gradients.items():
                gradient = results[output].numpy().copy()
                rest[name] = rest[name] + gradient if name in rest else gradient
            for what, output in backward.costs.items():
                cost = float(results[output].numpy())
                found.add(what, seed.group, cost / seed.probes)
        found.spread.update(dict.fromkeys(backward.spread))
        side.used(reads)

    @np.errstate(over="ignore", invalid="ignore")
    def _step_together(self, passes: "Sequence[_Passes]", number: int) -> None:
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
        model = piece_model(runner.flow, part, kinds)
        return counted_turns(model, values, runner.provider)

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
        )


@dataclass
class _Passes:
    """The passes of one sample.

    Attributes:
        side: the forward pass, and the values that the backward pass needs.
        groups: outputs whose errors are told apart, and last what decides about selections and branches.
        largest: the largest magnitudes of float values so far. Those of values that hold sentinels, which do not count,
            or what is no number, are negative.
        shapes: the shapes of these values.
    """

    side: Execution
    groups: list[list[str]]
    largest: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    seeds: "list[_Seed]" = field(default_factory=list)
    waiting: list[dict[str, Floats]] = field(default_factory=list)

    @classmethod
    def begin(cls, runner: Executor, feeds: Feeds, again: Counter[str]) -> "_Passes":
        """A sample before the first node; ``again`` counts what the backward pass reads."""
        flow = runner.flow
        ends, decisive = _ends(flow), _decisive(flow)
        names = (*flow.inputs, *flow.maker)
        seen = [name for name in names if flow.types.get(name) == FLOAT]
        side = start(runner, feeds, again + Counter([*ends, *decisive, *seen]))
        groups = [ends[at::_GROUPS] for at in range(min(_GROUPS, len(ends)))]
        passes = cls(side, [*groups, decisive])
        passes._see(seen)
        return passes

    def forward(self, part: Sequence[int]) -> None:
        """Run a piece."""
        self.side.run(part)
        nodes = self.side.flow.nodes
        self._see(name for node in part for name in nodes[node].output)

    def _see(self, names: Iterable[str]) -> None:
        """Note what is known of values that have just been computed."""
        side = self.side
        for name in names:
            if side.flow.types.get(name) == FLOAT and name in side.values:
                sizes = np.abs(side.values[name].numpy())
                most = float(sizes.max(initial=0.0))
                if not most < SENTINEL:
                    most = -float(sizes[sizes < SENTINEL].max(initial=0.0))
                self.largest[name], self.shapes[name] = most, sizes.shape
                side.used([name])

    def turn(self, random: np.random.Generator) -> None:
        """Draw the signs from which the backward pass begins."""
        self.seeds = list(_seeds(self.side, self.groups, random))
        self.waiting = [dict(seed.gradients) for seed in self.seeds]

    @cached_property
    def found(self) -> "_Found":
        """What the passes show."""
        return _Found(len(self.groups), self.largest)


class _Seed(NamedTuple):
    """A vector of signs over the outputs of a group, and how many the group has."""

    group: int
    probes: int
    gradients: dict[str, Floats]


def _seeds(
    side: Execution, groups: Sequence[Sequence[str]], random: np.random.Generator
) -> Iterator[_Seed]:
    """Signs over values, divided by their norms."""
    for number, group in enumerate(groups):
        arrays = {
            name: np.asarray(side.output(name)) for name in group if name in side.values
        }
        arrays = {name: array for name, array in arrays.items() if array.size}
        few = any(1 < array.size < _MANY for array in arrays.values())
        probes = _PROBES if few else 1
        for _ in range(probes if arrays else 0):
            yield _Seed(
                number,
                probes,
                {name: _signs(array, random) for name, array in arrays.items()},
            )


def _signs(array: Floats, random: np.random.Generator) -> Floats:
    """Return random signs over the norm of an array, or zero if that is not finite."""
    finite = np.isfinite(array) & (np.abs(array) < SENTINEL)
    norm = float(np.linalg.norm(np.where(finite, array, 0.0).astype(np.float64)))
    signs = random.integers(0, 2, array.shape, np.int8) * 2 - 1
    return np.asarray(signs * finite / (norm or inf), np.float32)


def _ends(flow: DataflowGraph) -> list[str]:
    """Return the float outputs or, if there are none, the floats that the outputs depend on."""
    made = [name for name in dict.fromkeys(flow.outputs) if name in flow.maker]
    floats = [name for name in made if flow.types.get(name) == FLOAT]
    return floats or _floats_before(flow, made)


def _decisive(flow: DataflowGraph) -> list[str]:
    """Return the floats that decide selections and branches."""
    found = dict.fromkeys(
        name
        for node in flow.nodes
        if op_key(node) in op_facts().selections
        for name in node.input
        if name in flow.maker and flow.types.get(name) == FLOAT
    )
    conditions = [name for name, _ in flow.choices if name in flow.maker]
    return list(found | dict.fromkeys(_floats_before(flow, conditions)))


def _floats_before(flow: DataflowGraph, names: Iterable[str]) -> list[str]:
    """Return the nearest floats that other values are computed from, and not only from their shapes."""
    found, waiting, seen = dict[str, None](), list(names), set(names)
    while waiting:
        node = flow.maker[waiting.pop()]
        is_view = op_key(flow.nodes[node]) in op_facts().views
        for name in flow.reads[node]:
            if is_view and flow.types.get(name) == FLOAT:
                continue
            if flow.types.get(name) == FLOAT and name in flow.maker:
                found[name] = None
            elif name in flow.maker and name not in seen:
                seen.add(name)
                waiting.append(name)
    return list(found)


@dataclass(slots=True)
class _Found:
    """The measurements of a sample's passes so far."""

    groups: int
    largest: Mapping[str, float]
    costs: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    spread: dict[str, None] = field(default_factory=dict)

    def add(self, key: tuple[str, str], group: int, cost: float) -> None:
        """Add to a cost of a value."""
        name, what = key
        none = [0.0] * self.groups
        self.costs.setdefault(name, {}).setdefault(what, none)[group] += cost

    def sensitivities(self) -> Sensitivities:
        """Return all of it."""
        names = dict.fromkeys((*self.largest, *self.costs))
        return Sensitivities(
            {name: self._of(name) for name in names}, tuple(self.spread)
        )

    def _of(self, name: str) -> Rounded:
        largest = self.largest.get(name, 0.0)
        costs = {
            what: tuple(_known(cost, is_plain=largest > 0) for cost in row)
            for what, row in self.costs.get(name, {}).items()
        }
        return Rounded(
            largest=abs(largest),
            costs=costs.pop("", (0.0,) * self.groups),
            summed=costs.pop(SUMMED, ()),
            read=costs,
        )


def _known(cost: float, *, is_plain: bool) -> float:
    """Return a cost. NaN exceeds all bounds, unless it may come from a sentinel that met no gradient."""
    if isnan(cost):
        return inf if is_plain else 0.0
    return cost


def _shape(value: "ort.OrtValue") -> tuple[int, ...]:
    return tuple(value.shape()) if value.is_tensor() else ()


def _first(waiting: Sequence[Mapping[str, Floats]], name: str) -> Floats:
    return next(one[name] for one in waiting if name in one)
