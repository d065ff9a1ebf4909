"""Checking a model on one sample, here or in a worker process: every float is measured."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from onnx import TensorProto

from onnxamp._errors import OnnxAmpError, RuntimeFailure
from onnxamp._model.protos import copied
from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.watch import Watched, WatchedRun, watched_values
from onnxamp._runtime.engines import Executable, Progress
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.samples import Sample
from onnxamp._runtime.sent import Made, SampleWork, SentModel
from onnxamp._runtime.session import Provider
from onnxamp._workers.executor import Memory


@dataclass(frozen=True, slots=True)
class CheckedSample:
    """What one sample shows: the branches that it takes, and what was measured of values and of inputs."""

    choices: tuple[tuple[str, bool], ...]
    values: Mapping[str, Measurement]
    inputs: Mapping[str, Measurement]


@dataclass(slots=True)
class SampleCheck:
    """A model, and how it is checked on a sample; ``keep`` are nodes to compute in float32."""

    executable: Executable
    keep: frozenset[str]
    _prepared: tuple[Runner, WatchedRun] | None = None
    """What ran the last sample; the next one that takes the same branches uses it."""

    def prepare(self, sample: Sample) -> None:
        """Prepare the model for a sample, as the first one does it for all; what is wrong with it, it tells itself."""
        with suppress(OnnxAmpError):
            self.executable.prepare(check_inputs(self.executable.model.proto, sample))

    def check(self, sample: Sample, progress: Progress | None = None) -> CheckedSample | RuntimeFailure:
        """What a sample shows, or why the model does not run on it; ``progress`` gets the nodes that have run.

        Raises:
            ArgumentError: the sample does not fit the model.
        """
        values, inputs = dict[str, Measurement](), dict[str, Measurement]()
        for found in self.parts(sample, progress):
            if isinstance(found, RuntimeFailure):
                return found
            values |= found.values
            inputs |= found.inputs
        return CheckedSample(self.executable.choices, values, inputs)

    def parts(self, sample: Sample, progress: Progress | None = None) -> Iterator[CheckedSample | RuntimeFailure]:
        """What each part of the model shows as soon as it has run; why the model does not run ends it.

        Raises:
            As :meth:`check`.
        """
        one, done = self.executable, 0
        feeds = check_inputs(one.model.proto, sample)
        try:
            runner = one.prepare(feeds)
            if self._prepared is None or self._prepared[0] is not runner:
                self._prepared = runner, watched_run(runner, one.provider, self.keep, one.budget)
            watched = replace(self._prepared[1], values={}, inputs={})
            for part in watched.parts(feeds):
                done += len(part)
                if progress is not None:
                    progress(done, len(watched.runner.flow.nodes))
                yield CheckedSample(one.choices, watched.values, watched.inputs)
                watched.values, watched.inputs = {}, {}
        except RuntimeFailure as error:
            yield error
            return
        if not done:
            yield CheckedSample(one.choices, watched.values, watched.inputs)


@dataclass(frozen=True, slots=True)
class CheckWork(SampleWork):
    """Measuring samples in worker processes."""

    model: SentModel
    provider: Provider
    keep: frozenset[str]
    budget: int
    apart: bool = False
    """Whether to tell what each part of the model shows, as :meth:`SampleCheck.parts`."""

    def made(self, _: Memory) -> Made:
        """As :meth:`SampleWork.made`."""
        executable = Executable(self.model.opened(), self.provider, emulated=True, whole=False, budget=self.budget)
        one = SampleCheck(executable, self.keep)
        return one.prepare, lambda item: list(one.parts(item.read())) if self.apart else one.check(item.read())


def watched_run(runner: Runner, provider: Provider, keep: frozenset[str], budget: int) -> WatchedRun:
    """A model to be run with its floats measured, and some of its nodes in float32."""
    flow, rows = keep_float32(runner.flow, watched_values(runner.flow), keep)
    return WatchedRun(Runner(flow, provider), rows, budget)


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
