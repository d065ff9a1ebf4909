"""Running a model piece by piece with every float measured; :mod:`onnxamp._numerics.watch` defines what is a fault."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from onnx import TensorProto

from onnxamp._errors import ArgumentError, OnnxAmpError, RuntimeFailure
from onnxamp._model.copying import copied
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.results import FirstBad, RunCheck, ValueCheck
from onnxamp._numerics.seen import SeenRun
from onnxamp._numerics.watch import Watched, WatchedRun, watched_values
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.advice import input_failure
from onnxamp._runtime.custom_ops import Surroundings
from onnxamp._runtime.engines import Executable, Progress, engine_name, part_of
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.samples import Samples, SamplesLike, as_samples
from onnxamp._runtime.sent import SentModel, SentSample, run_samples, sent_samples
from onnxamp._runtime.session import Provider, choose_provider, is_plugin
from onnxamp._runtime.side import BUDGET
from onnxamp._runtime.values import Feed
from onnxamp._workers.executor import Crash, Memory, Workers
from onnxamp._workers.place import Place


@dataclass(frozen=True, slots=True)
class OpFilter:
    """Which op types are looked at: those in ``only`` (all if it is empty) but not in ``skip``."""

    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()

    def takes(self, op: str) -> bool:
        """Whether nodes of this op type are looked at."""
        return op not in self.skip and (not self.only or op in self.only)

    def check(self, seen: Collection[str]) -> None:
        """Raise ArgumentError if no node of the model is of one of these op types."""
        if unknown := sorted((self.only | self.skip).difference(seen)):
            raise ArgumentError(f"No node of the model is of op type {', '.join(map(repr, unknown))}.")


def check_run(
    model: ModelSource,
    samples: SamplesLike | None = None,
    *,
    provider: Provider | None = None,
    ops: OpFilter | None = None,
    stop: bool = False,
    keep: frozenset[str] = frozenset(),
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
) -> RunCheck:
    """Run a model and find the first op that goes wrong although its inputs are fine.

    Low precision is emulated, on CUDA too, so that each value can be compared with its exact result. A plugin provider
    computes each op itself, from the exact values of the float32 model.

    Args:
        model: a ModelProto with its weights loaded, a path, or an onnx-graphsurgeon Graph.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts. None for ``count`` random
            samples (with ``seed``, and sizes of named dimensions from ``dims``).
        provider: "cuda", "cpu", "webgpu", or the package of another plugin provider; None for CUDA if there is a
            device.
        ops: the op types to look at; None for all.
        stop: end with the first fault; what comes behind it is not measured.
        keep: names of nodes to compute in float32, as if the model had been converted so.
        budget: bytes of values and weights to hold at a time besides the model itself.
        progress: called with the work that is done and all there is to do.
        jobs: worker processes that share several samples; None for this process, which a plugin provider and ``stop``
            need.
        cluster: the Ray cluster that they belong to: "local" for one on this machine, or an address.

    Returns:
        What every float value was like, in execution order. ``first_bad`` is the first fault, None if there is none;
        ``skipped`` tells why the model does not run.

    Raises:
        ArgumentTypeError: the model or the samples are of another type.
        ArgumentError: the samples do not fit the model, or no node is of an op type in ``ops``.
        ModelError: the model cannot be read. RuntimeFailure: CUDA is asked for and cannot be used.

    Example:
        >>> import onnxamp
        >>> broken = onnxamp.convert_model("models/decoder.onnx", level="O3", hazards=False)
        >>> report = onnxamp.check_run(broken, provider="cpu")
        >>> report.first_bad.op, report.first_bad.alarm.split(" in ")[0]
        ('Pow', 'Inf')
    """
    opened = Model.of(model)
    chosen = choose_provider(provider)
    samples = as_samples(samples, opened, count=count, seed=seed, dims=dims)
    report = RunCheck(engine_name(chosen, "float32"), samples.description, len(samples), (), None)
    if is_plugin(chosen):
        return _check_seen(report, opened, samples, SeenRun.of(opened, chosen, budget), ops or OpFilter(), progress)
    executable = Executable(opened, chosen, emulated=True, whole=False, budget=budget)
    checked = _Checked(executable, ops or OpFilter(), keep, stop=stop)
    with Place(jobs, cluster).sharing(len(samples), gpus=chosen == "cuda") as workers:
        run = checked.here(samples, progress) if workers is None else checked.elsewhere(workers, samples, progress)
        for number, trouble in enumerate(run):
            if isinstance(trouble, Crash):
                return replace(report, skipped=f"The model does not run (sample {number + 1}): {trouble}")
            if trouble is not None:
                text = input_failure("The model does not run", trouble, samples, number, opened)
                return replace(report, skipped=text)
    parts = checked.parts
    seen = {op_key(node) for part in parts for node in part.watched.runner.flow.nodes}
    (ops or OpFilter()).check(seen)
    parts.sort(key=lambda part: part.first_bad() is None)  # those with a fault first; the sort is stable
    values: dict[str, ValueCheck] = {}
    for row in (row for part in parts for row in part.values()):
        values.setdefault(row.value, row)
    lowest = parts[0].watched.runner.flow.lowest
    where = engine_name(chosen, lowest) + (f", emulated {lowest}" if chosen == "cuda" and lowest != "float32" else "")
    return replace(report, ran_on=where, values=tuple(values.values()), first_bad=parts[0].first_bad())


def _check_seen(
    report: RunCheck, model: Model, samples: Samples, run: SeenRun, ops: OpFilter, progress: Progress | None
) -> RunCheck:
    """:func:`check_run` on an engine that computes low precision itself."""
    for number, sample in enumerate(samples):
        try:
            run.run(check_inputs(model.proto, sample), part_of(progress, number, len(samples)))
        except RuntimeFailure as error:
            return replace(report, skipped=input_failure("The model does not run", error, samples, number, model))
    rows = run.checks()
    ops.check({row.op for row in rows})
    rows = tuple(row for row in rows if ops.takes(row.op))
    return replace(report, values=rows, first_bad=next((_in_words(row) for row in rows if row.fault), None))


@dataclass(slots=True)
class _Part:
    """The runs of samples that take the same branches, and which ops of them are looked at."""

    watched: WatchedRun
    ops: OpFilter
    stop: bool

    def run(self, feeds: Mapping[str, Feed], progress: Progress | None) -> None:
        total, done = len(self.watched.runner.flow.nodes), 0
        for part in self.watched.parts(feeds):
            done += len(part)
            if progress is not None:
                progress(done, total)
            if self.stop and self.first_bad() is not None:
                return

    def values(self) -> tuple[ValueCheck, ...]:
        return tuple(row for row in self.watched.checks() if self.ops.takes(row.op))

    def first_bad(self) -> FirstBad | None:
        return next((_in_words(row) for row in self.values() if row.fault), None)


@dataclass(slots=True)
class _Checked:
    """What the samples have shown so far: a part for each run of samples that take the same branches."""

    executable: Executable
    ops: OpFilter
    keep: frozenset[str]
    stop: bool
    parts: list[_Part] = field(default_factory=list)

    def here(self, samples: Samples, progress: Progress | None) -> Iterator[RuntimeFailure | None]:
        """Run one sample after the other, and yield what prevented it."""
        runner: Runner | None = None
        for number, sample in enumerate(samples):
            feeds = check_inputs(self.executable.model.proto, sample)
            try:
                now = self.executable.prepare(feeds)
                if now is not runner:  # samples that take other branches are measured apart
                    runner = now
                    self.parts.append(self._part(now))
                self.parts[-1].run(feeds, part_of(progress, number, len(samples)))
                yield None
            except RuntimeFailure as error:
                yield error
            if self.stop and self.parts[-1].first_bad() is not None:
                return

    def elsewhere(
        self, workers: Workers, samples: Samples, progress: Progress | None
    ) -> Iterator[RuntimeFailure | Crash | None]:
        """Let workers run them."""
        if self.stop:
            raise ArgumentError(
                "To stop at the first fault, samples run one after another: leave out jobs and cluster."
            )
        one, choices = self.executable, None
        work = CheckWork(SentModel.of(one.model), one.provider, self.keep, one.budget, next(sent_samples(samples)))
        for number, found in enumerate(run_samples(workers, work, samples, progress)):
            if isinstance(found, (RuntimeFailure, Crash)):
                yield found
                continue
            if choices != found.choices:
                choices = found.choices
                self.parts.append(self._part(one.prepare(check_inputs(one.model.proto, samples[number]))))
            self.parts[-1].watched.join(found.values, found.inputs)
            yield None

    def _part(self, runner: Runner) -> _Part:
        watched = watched_run(runner, self.executable.provider, self.keep, self.executable.budget)
        return _Part(watched, self.ops, stop=self.stop)


def watched_run(runner: Runner, provider: Provider, keep: frozenset[str], budget: int) -> WatchedRun:
    """A model to be run with its floats measured, and some of its nodes in float32."""
    flow, rows = keep_float32(runner.flow, watched_values(runner.flow), keep)
    return WatchedRun(Runner(flow, provider), rows, budget)


class CheckedSample(NamedTuple):
    """What one sample shows: the branches that it takes, and what was measured of values and of inputs."""

    choices: tuple[tuple[str, bool], ...]
    values: Mapping[str, Measurement]
    inputs: Mapping[str, Measurement]


@dataclass(frozen=True, slots=True)
class CheckWork:
    """Measuring samples in worker processes; ``first`` is the one for which the model is prepared."""

    model: SentModel
    provider: Provider
    keep: frozenset[str]
    budget: int
    first: SentSample
    surroundings: Surroundings = field(default_factory=Surroundings.here)

    def __call__(self, _: Memory) -> Callable[[SentSample], CheckedSample | RuntimeFailure]:
        """The model is read, and prepared for the first sample."""
        self.surroundings.enter()
        executable = Executable(self.model.opened(), self.provider, emulated=True, whole=False, budget=self.budget)
        prepared: list[tuple[Runner, WatchedRun]] = []

        def measured(item: SentSample) -> CheckedSample | RuntimeFailure:
            feeds = check_inputs(executable.model.proto, item.read())
            try:
                runner = executable.prepare(feeds)
                if not prepared or prepared[-1][0] is not runner:
                    prepared[:] = [(runner, watched_run(runner, self.provider, self.keep, self.budget))]
                watched = replace(prepared[-1][1], values={}, inputs={})
                for _ in watched.parts(feeds):
                    pass
            except RuntimeFailure as error:
                return error
            return CheckedSample(executable.choices, watched.values, watched.inputs)

        with suppress(OnnxAmpError):  # as its own item will tell
            executable.prepare(check_inputs(executable.model.proto, self.first.read()))
        return measured


def _in_words(row: ValueCheck) -> FirstBad:
    """A fault in a sentence."""
    m = row.measured
    born = ", in float32 already" if m.reference_inf else f": numbers beyond {SENTINEL:g} do not fit"
    if row.op in op_facts().control_flow:
        born = ", in its body"
    text = {
        "NaN": f"NaN in {m.found_nan} of {m.elements} elements",
        "Inf": f"Inf in {m.found_inf} of {m.elements} elements"
        + (f"; the exact result reaches {m.reference_max:.4g}" if m.broken else born),
        "all zero": f"all {m.elements} elements are zero; the exact result reaches {m.reference_max:.4g}",
        "vanished": f"{m.vanished} of {m.elements} elements vanished: zero, where the exact result is not small",
        "flushed": f"{m.flushed} of {m.elements} elements became zero, changing the value by {100 * m.rel_l2:.0f} %",
        "saturated": f"elements stay at {m.found_max:g}, the largest number of {row.dtype}",
    }
    return FirstBad(row.value, row.node, row.op, text[row.fault or "NaN"])


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
