"""Checking a model on one sample: every float is measured.

Low precision is emulated, or computed by the engine. There each op of the model runs on the engine with the exact
values of the float32 model behind it, which the CPU computes: an op that goes wrong there, such as a sum that is kept
in float16, is named even where float32 accumulation would be right.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Final, TypeAlias

from onnx import TensorProto

from onnxamp._errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._numerics.measure import Measurement, measure
from onnxamp._numerics.rows import Pairing, pair
from onnxamp._numerics.walk import SideBySide
from onnxamp._numerics.watch import Watched, WatchedRun, watched_values
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.emulate import without_rounding
from onnxamp._runtime.engines import Engine, Executable, Progress
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.loop import Item, Opened, Probe, one_by_one, remembered
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.samples import Sample
from onnxamp._runtime.values import Feed, to_value
from onnxamp._workers.executor import Memory

Choices: TypeAlias = tuple[tuple[str, bool], ...]
"""The conditions that a sample meets."""


@dataclass(frozen=True, slots=True)
class CheckedSample:
    """What one sample shows: the branches that it takes, and what was measured of values and of inputs."""

    choices: Choices
    values: Mapping[str, Measurement]
    inputs: Mapping[str, Measurement]


Parts: TypeAlias = Iterator[CheckedSample | RuntimeFailure]
"""What each part of a model shows as soon as it has run; why the model does not run ends it."""

_CHECKED: Final = "checked model"
"""Where the memory of a process holds the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckProbe(Probe[CheckedSample | Parts]):
    """Measuring the values of an emulated model.

    Attributes:
        keep: nodes to compute in float32.
        in_parts: return what each part of the model shows, lazily.
        key: stands for the model in the memory of a process.
    """

    model: SentModel
    engine: Engine
    budget: int
    keep: frozenset[str]
    in_parts: bool = False
    key: str = field(default_factory=token_hex)

    def executable(self, memory: Memory) -> Executable:
        """Return the model as it is measured."""
        return remembered(
            memory,
            _CHECKED,
            self.key,
            lambda: Executable(self.model.opened(), self.engine, budget=self.budget),
        )

    def open(self, memory: Memory) -> Opened[CheckedSample | Parts]:
        """As :meth:`Probe.open`."""
        executable = self.executable(memory)
        last: tuple[Runner, WatchedRun] | None = None

        def parts(item: Item) -> Iterator[CheckedSample]:
            nonlocal last
            feeds = check_inputs(executable.model.proto, item.sample)
            runner = executable.prepare(feeds)
            if (
                last is None or last[0] is not runner
            ):  # the next sample that takes the same branches uses it
                last = runner, watched_run(runner, self.keep, self.budget)
            return _parts(
                replace(last[1], values={}, inputs={}), runner.flow.choices, feeds, item.progress
            )

        def lazily(item: Item) -> Parts:
            try:
                yield from parts(item)
            except RuntimeFailure as failure:
                yield failure

        def measure(item: Item) -> CheckedSample | Parts:
            return lazily(item) if self.in_parts else _together(list(parts(item)))

        return Opened(executable.prepare_sample, one_by_one(measure))


def _parts(
    watched: WatchedRun, choices: Choices, feeds: Mapping[str, Feed], progress: Progress
) -> Iterator[CheckedSample]:
    """Yield what each part of a model shows as soon as it has run.

    Raises:
        RuntimeFailure: a part does not run.
    """
    done = 0
    for part in watched.parts(feeds):
        done += len(part)
        progress(done, len(watched.runner.flow.nodes))
        yield CheckedSample(choices, watched.values, watched.inputs)
        watched.values, watched.inputs = {}, {}
    if not done:
        yield CheckedSample(choices, watched.values, watched.inputs)


def _together(parts: Sequence[CheckedSample]) -> CheckedSample:
    """Return what all parts of a model show."""
    values = {name: measured for part in parts for name, measured in part.values.items()}
    inputs = {name: measured for part in parts for name, measured in part.inputs.items()}
    return CheckedSample(parts[-1].choices, values, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProbe(Probe[CheckedSample]):
    """Measuring what the ops of a model make of exact values on an engine that computes low precision itself."""

    model: SentModel
    engine: Engine
    budget: int
    key: str = field(default_factory=token_hex)

    def side_by_side(self, memory: Memory) -> SideBySide:
        """Return the float32 model behind the model, and the model as it runs on the engine.

        Raises:
            ModelError, OpsetError: there is no float32 model behind it.
        """

        def opened() -> SideBySide:
            model = self.model.opened()
            exact = Model(without_rounding(model.embedded()))
            reference = Executable(exact, self.engine.reference, budget=self.budget)
            return SideBySide(
                reference, Executable(model, self.engine, budget=self.budget), _replayed
            )

        return remembered(memory, _CHECKED, self.key, opened)

    def open(self, memory: Memory) -> Opened[CheckedSample]:
        """As :meth:`Probe.open`."""
        walk = self.side_by_side(memory)

        def prepare(sample: Sample) -> None:
            feeds = check_inputs(walk.result.model.proto, sample)
            walk.reference.prepare(feeds)
            walk.result.prepare(feeds)

        return Opened(prepare, one_by_one(lambda item: _on_engine(walk, item)))


def _replayed(reference: Flow, result: Flow) -> Pairing:
    return pair(reference, result)._replace(accumulated=False)


def _on_engine(walk: SideBySide, item: Item) -> CheckedSample:
    """Return what a sample shows on an engine.

    Raises:
        RuntimeFailure: the model does not run in float32 on the CPU, or none of its ops runs on the engine.
    """
    feeds = check_inputs(walk.result.model.proto, item.sample)
    walked, flow = walk.run(feeds, item.progress), walk.result.prepare(feeds).flow
    values = {name: row.local for name, row in walked.compared.items() if row.local is not None}
    notes = (walked.failure, *(row.note for row in walked.compared.values()))
    note = next(filter(None, notes), None)
    if not values and note is not None:
        raise RuntimeFailure(f"None of its ops runs by itself. {note}")
    inputs = {name: to_value(feeds[name], flow.types.get(name)) for name in flow.inputs}
    floats = {
        name: value
        for name, value in inputs.items()
        if value.is_tensor() and "float" in value.data_type()
    }
    return CheckedSample(
        (), values, {name: measure(value, value) for name, value in floats.items()}
    )


def watched_run(runner: Runner, keep: frozenset[str], budget: int) -> WatchedRun:
    """Return a model that runs with its floats measured, and some of its nodes in float32."""
    flow, rows = keep_float32(runner.flow, watched_values(runner.flow), keep)
    return WatchedRun(Runner(flow, runner.provider), rows, budget)


def keep_float32(
    flow: Flow, rows: Sequence[Watched], names: Collection[str]
) -> tuple[Flow, list[Watched]]:
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
    casts = {row.node for row in rows if op_key(flow.nodes[row.node]) in op_facts().relabels}
    for row in reversed(rows):  # Casts between chosen nodes pass on exact results
        if row.node in casts and row.value in wanted:
            chosen.add(row.node)
            wanted.update(flow.reads[row.node])
    for row in rows:  # Casts to float32 behind chosen nodes have nothing to do
        if row.value not in flow.low and row.node in casts:
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
    kept = [
        row
        for row in rows
        if row.node not in chosen or not _is_rounded(flow, row) or row.value in read
    ]
    return flow._replace(nodes=tuple(nodes), reads=tuple(reads)), kept


def _is_rounded(flow: Flow, row: Watched) -> bool:
    """Whether the value is rounded from a float32 one, and not cast from integers."""
    return row.exact != row.value and flow.types.get(row.exact) == "tensor(float)"
