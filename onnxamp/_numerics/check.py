"""Running a model piece by piece with every float measured; :mod:`onnxamp._numerics.watch` defines what is a fault."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import TensorProto

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.copying import copied
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.results import FirstBad, RunCheck, ValueCheck
from onnxamp._numerics.seen import SeenRun
from onnxamp._numerics.watch import Watched, WatchedRun, watched_values
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.advice import input_failure
from onnxamp._runtime.engines import Executable, Progress, engine_name, part_of
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.samples import Samples, SamplesLike, as_samples
from onnxamp._runtime.session import Provider, choose_provider, is_plugin
from onnxamp._runtime.side import BUDGET
from onnxamp._runtime.values import Feed


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
    jobs: list[_Job] = []
    runner: Runner | None = None
    for number, sample in enumerate(samples):
        feeds = check_inputs(opened.proto, sample)
        try:
            now = executable.prepare(feeds)
            if now is not runner:  # samples that take other branches are measured apart
                runner = now
                flow, rows = keep_float32(now.flow, watched_values(now.flow), keep)
                jobs.append(_Job(WatchedRun(Runner(flow, chosen), rows, budget), ops or OpFilter(), stop=stop))
            jobs[-1].run(feeds, part_of(progress, number, len(samples)))
        except RuntimeFailure as error:
            return replace(report, skipped=input_failure("The model does not run", error, samples, number, opened))
        if stop and jobs[-1].first_bad() is not None:
            break
    seen = {op_key(node) for job in jobs for node in job.watched.runner.flow.nodes}
    (ops or OpFilter()).check(seen)
    jobs.sort(key=lambda job: job.first_bad() is None)  # those with a fault first; the sort is stable
    values: dict[str, ValueCheck] = {}
    for row in (row for job in jobs for row in job.values()):
        values.setdefault(row.value, row)
    lowest = jobs[0].watched.runner.flow.lowest
    where = engine_name(chosen, lowest) + (f", emulated {lowest}" if chosen == "cuda" and lowest != "float32" else "")
    return replace(report, ran_on=where, values=tuple(values.values()), first_bad=jobs[0].first_bad())


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
class _Job:
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
        "flushed": f"{m.flushed} of {m.elements} elements became zero, which changes the value by {m.rel_l2:.0%}",
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
