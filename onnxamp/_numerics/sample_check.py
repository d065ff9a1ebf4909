"""Checking a model on one sample: every float is measured.

Low precision is emulated, or computed by the engine. There each op of the model runs on the engine with the exact
values of the float32 model behind it, which the CPU computes: an op that goes wrong there, such as a sum that is kept
in float16, is named even where float32 accumulation would be right.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Final

from onnx import TensorProto

from onnxamp._errors import RuntimeFailure
from onnxamp._model.copying import copied
from onnxamp._model.model import Model
from onnxamp._numerics.measure import Measurement, measure
from onnxamp._numerics.pairing import Pairing, pair
from onnxamp._numerics.walk import SideBySide
from onnxamp._numerics.watch import Watched, WatchedRun, watched_values
from onnxamp._runtime.emulate import without_rounding
from onnxamp._runtime.engines import Engine, Executable
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.loop import Item, Opened, Probe, remembered
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.samples import Sample
from onnxamp._runtime.sent import SentModel
from onnxamp._runtime.values import to_value
from onnxamp._workers.executor import Memory


@dataclass(frozen=True, slots=True)
class CheckedSample:
    """What one sample shows: the branches that it takes, and what was measured of values and of inputs."""

    choices: tuple[tuple[str, bool], ...]
    values: Mapping[str, Measurement]
    inputs: Mapping[str, Measurement]


_CHECKED: Final = "checked model"
"""Where the memory of a process holds the model."""


@dataclass(frozen=True, slots=True)
class CheckProbe(Probe[CheckedSample]):
    """Measuring the values of an emulated model, whose nodes in ``keep`` are computed in float32."""

    model: SentModel
    engine: Engine
    budget: int
    keep: frozenset[str]
    key: str = field(default_factory=token_hex)

    def open(self, memory: Memory) -> "_OpenCheck":
        """As :meth:`Probe.open`."""
        return _OpenCheck(self.executable(memory), self.keep)

    def executable(self, memory: Memory) -> Executable:
        """Return the model as it is measured."""
        return remembered(memory, _CHECKED, self.key, self._executable)

    def _executable(self) -> Executable:
        return Executable(self.model.opened(), self.engine, budget=self.budget)


@dataclass(frozen=True, slots=True)
class PartsProbe(Probe[Iterator[CheckedSample | RuntimeFailure]]):
    """The same part by part, as soon as each has run; why the model does not run ends it."""

    whole: CheckProbe

    def open(self, memory: Memory) -> "_OpenParts":
        """As :meth:`Probe.open`."""
        return _OpenParts(self.whole.open(memory))


@dataclass(slots=True)
class _OpenCheck(Opened[CheckedSample]):
    executable: Executable
    keep: frozenset[str]
    _watched: tuple[Runner, WatchedRun] | None = None
    """What ran the last sample; the next one that takes the same branches uses it."""

    def prepare(self, sample: Sample) -> None:
        """As :meth:`Opened.prepare`."""
        self.executable.prepare(check_inputs(self.executable.model.proto, sample))

    def measure(self, item: Item) -> CheckedSample:
        """As :meth:`Opened.measure`."""
        parts = list(self.parts(item))
        values = {name: measured for part in parts for name, measured in part.values.items()}
        inputs = {name: measured for part in parts for name, measured in part.inputs.items()}
        return CheckedSample(parts[-1].choices, values, inputs)

    def parts(self, item: Item) -> Iterator[CheckedSample]:
        """Yield what each part of the model shows as soon as it has run; raises as :meth:`measure`."""
        one, done = self.executable, 0
        feeds = check_inputs(one.model.proto, item.sample)
        runner = one.prepare(feeds)
        choices = runner.flow.choices
        if self._watched is None or self._watched[0] is not runner:
            self._watched = runner, watched_run(runner, self.keep, one.budget)
        watched = replace(self._watched[1], values={}, inputs={})
        for part in watched.parts(feeds):
            done += len(part)
            item.progress(done, len(watched.runner.flow.nodes))
            yield CheckedSample(choices, watched.values, watched.inputs)
            watched.values, watched.inputs = {}, {}
        if not done:
            yield CheckedSample(choices, watched.values, watched.inputs)


@dataclass(slots=True)
class _OpenParts(Opened[Iterator[CheckedSample | RuntimeFailure]]):
    whole: _OpenCheck

    def prepare(self, sample: Sample) -> None:
        """As :meth:`Opened.prepare`."""
        self.whole.prepare(sample)

    def measure(self, item: Item) -> Iterator[CheckedSample | RuntimeFailure]:
        """As :meth:`Opened.measure`, lazily."""
        try:
            yield from self.whole.parts(item)
        except RuntimeFailure as failure:
            yield failure


@dataclass(frozen=True, slots=True)
class EngineProbe(Probe[CheckedSample]):
    """Measuring what the ops of a model make of exact values on an engine that computes low precision itself."""

    model: SentModel
    engine: Engine
    budget: int
    key: str = field(default_factory=token_hex)

    def open(self, memory: Memory) -> "_OpenEngine":
        """As :meth:`Probe.open`.

        Raises:
            ModelError, OpsetError: there is no float32 model behind the model.
        """
        return _OpenEngine(remembered(memory, _CHECKED, self.key, self._walk))

    def executable(self, memory: Memory) -> Executable:
        """Return the model as it runs on the engine; raises as :meth:`open`."""
        return remembered(memory, _CHECKED, self.key, self._walk).result

    def _walk(self) -> SideBySide:
        model = self.model.opened()
        exact = Model(without_rounding(model.embedded()))
        reference = Executable(exact, self.engine.reference, budget=self.budget)
        return SideBySide(reference, Executable(model, self.engine, budget=self.budget), _replayed)


def _replayed(reference: Flow, result: Flow) -> Pairing:
    return replace(pair(reference, result), accumulated=False)


@dataclass(slots=True)
class _OpenEngine(Opened[CheckedSample]):
    walk: SideBySide

    def prepare(self, sample: Sample) -> None:
        """As :meth:`Opened.prepare`."""
        feeds = check_inputs(self.walk.result.model.proto, sample)
        self.walk.reference.prepare(feeds)
        self.walk.result.prepare(feeds)

    def measure(self, item: Item) -> CheckedSample:
        """As :meth:`Opened.measure`; it fails, too, if no op runs on the engine."""
        result = self.walk.result
        feeds = check_inputs(result.model.proto, item.sample)
        walked, flow = self.walk.run(feeds, item.progress), result.prepare(feeds).flow
        values = {name: row.local for name, row in walked.compared.items() if row.local is not None}
        notes = (walked.failure, *(row.note for row in walked.compared.values()))
        note = next(filter(None, notes), None)
        if not values and note is not None:
            raise RuntimeFailure(f"None of its ops runs by itself. {note}")
        inputs = {name: to_value(feeds[name], flow.types.get(name)) for name in flow.inputs}
        floats = {name: value for name, value in inputs.items() if value.is_tensor() and "float" in value.data_type()}
        return CheckedSample((), values, {name: measure(value, value) for name, value in floats.items()})


def watched_run(runner: Runner, keep: frozenset[str], budget: int) -> WatchedRun:
    """Return a model that runs with its floats measured, and some of its nodes in float32."""
    flow, rows = keep_float32(runner.flow, watched_values(runner.flow), keep)
    return WatchedRun(Runner(flow, runner.provider), rows, budget)


_PASSING = frozenset({"Cast", "Identity"})
"""Ops of an emulated model that Casts of the model become."""


def keep_float32(flow: Flow, rows: Sequence[Watched], names: Collection[str]) -> tuple[Flow, list[Watched]]:
    """Emulate what ``--keep-fp32`` does: the named nodes read each other's exact results; others read rounded ones.

    Args:
        flow: an emulated model.
        rows: its watched values.
        names: nodes as reports call them: by name, or by their first value if they have none.

    Returns:
        The model, and the rows without those whose rounded value nobody reads any more.

    Complexity: linear in nodes.
    """
    chosen = {row.node for row in rows if (flow.nodes[row.node].name or row.value) in names}
    exact = {row.value: row.exact for row in rows if row.node in chosen and _is_rounded(flow, row)}
    wanted = {name for node in chosen for name in flow.reads[node]}
    for row in reversed(rows):  # Casts between chosen nodes pass on exact results
        node = flow.nodes[row.node]
        if node.op_type in _PASSING and row.value in wanted:
            chosen.add(row.node)
            wanted.update(flow.reads[row.node])
    for row in rows:  # Casts to float32 behind chosen nodes have nothing to do
        if row.value not in flow.low and flow.nodes[row.node].op_type in _PASSING:
            chosen |= {row.node} if any(name in exact for name in flow.reads[row.node]) else set()
    exact |= {row.value: row.exact for row in rows if row.node in chosen and row.exact in exact}
    nodes, reads = list(flow.nodes), list(flow.reads)
    for index in chosen:
        nodes[index] = copied(flow.nodes[index])
        nodes[index].input[:] = [exact.get(name, name) for name in flow.nodes[index].input]
        reads[index] = tuple(dict.fromkeys(exact.get(name, name) for name in reads[index]))
    for row in rows:  # integers are cast to float32 then, unless somebody else reads them rounded
        if row.node not in chosen or row.exact == row.value or _is_rounded(flow, row):
            continue
        if {index for index, names in enumerate(reads) if row.value in names} <= chosen:
            nodes[row.node] = copied(flow.nodes[row.node])
            for item in nodes[row.node].attribute:
                item.i = TensorProto.FLOAT if item.name == "to" else item.i
    read = {name for names in reads for name in names} | set(flow.outputs)
    kept = [row for row in rows if row.node not in chosen or not _is_rounded(flow, row) or row.value in read]
    return replace(flow, nodes=tuple(nodes), reads=tuple(reads)), kept


def _is_rounded(flow: Flow, row: Watched) -> bool:
    """Whether the value is rounded from a float32 one, and not cast from integers."""
    return row.exact != row.value and flow.types.get(row.exact) == "tensor(float)"
