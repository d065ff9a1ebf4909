"""Running a model piece by piece with every float measured; :mod:`onnxamp._numerics.watch` defines what is a fault."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._graph.nearest import suggestion
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources
from onnxamp._model.statistics import SENTINEL
from onnxamp._numerics.results import FirstBad, RunCheck, ValueCheck
from onnxamp._numerics.sample_check import CheckedSample, CheckWork, SampleCheck, watched_run
from onnxamp._numerics.seen import SeenRun, SeenWork
from onnxamp._numerics.watch import WatchedRun
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.advice import input_failure
from onnxamp._runtime.custom_ops import active_libraries
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.engines import Executable, Progress, engine_name, part_of
from onnxamp._runtime.fingerprints import model_print, sample_print, versions
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.kept import KeptSamples, each_sample
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.samples import Samples, SamplesLike
from onnxamp._runtime.sampling import as_samples
from onnxamp._runtime.sent import SentModel, run_samples, sent_samples
from onnxamp._runtime.session import Provider, choose_provider, is_plugin
from onnxamp._state.state import Facts, StateLike, fingerprint, opened
from onnxamp._workers.executor import Crash, Workers
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
            text = f"No node of the model is of op type {', '.join(map(repr, unknown))}."
            raise ArgumentError(text + suggestion(seen, unknown[0]))


@unchanged_sources()
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
    state: StateLike = None,
) -> RunCheck:
    """Run a model and find the first op that goes wrong although its inputs are fine.

    Low precision is emulated, on CUDA too, so that each value can be compared with its exact result. A plugin provider
    computes each op itself, from the exact values of the float32 model.

    Args:
        model: a ModelProto with its weights loaded, a path, or an onnx-graphsurgeon Graph.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts, which are taken one by one.
            None for ``count`` random samples (with ``seed``, and sizes of named dimensions from ``dims``).
        provider: "cuda", "cpu", "webgpu", or the package of another plugin provider; None for CUDA if there is a
            device.
        ops: the op types to look at; None for all.
        stop: end with the first fault; what comes behind it is not measured.
        keep: names of nodes to compute in float32, as if the model had been converted so.
        budget: bytes of values and weights to hold at a time besides the model itself.
        progress: called with the work that is done and all there is to do.
        jobs: worker processes that share several samples; None for this process.
        cluster: the Ray cluster that they belong to: "local" for one on this machine, or an address.
        state: a file that keeps what each sample showed, so that an interrupted check goes on with the others. Not with
            ``stop``.

    Returns:
        What every float value was like, in execution order. ``first_bad`` is the first fault, None if there is none;
        ``skipped`` tells why the model does not run.

    Raises:
        ArgumentTypeError: the model or the samples are of another type.
        ArgumentError: the samples do not fit the model, no node is of an op type in ``ops``, or the state belongs to
            another check.
        ModelError: the model cannot be read. RuntimeFailure: CUDA is asked for and cannot be used.

    Example:
        >>> import onnxamp
        >>> broken = onnxamp.convert_model("models/decoder.onnx", level="O3", hazards=False)
        >>> report = onnxamp.check_run(broken, provider="cpu")
        >>> report.first_bad.op, report.first_bad.alarm.split(" in ")[0]
        ('Pow', 'Inf')
    """
    one, chosen = Model.of(model), choose_provider(provider)
    samples = as_samples(samples, one, count=count, seed=seed, dims=dims)
    if stop and state is not None:
        raise ArgumentError("To stop at the first fault, nothing is kept to go on with: leave out state.")
    with opened(state) as file:
        kept = None
        if file is not None:
            facts = _depends_on(one, chosen, keep, budget, samples)
            kept = KeptSamples(file.part("check", facts), samples, CheckedSample)
        ops = ops or OpFilter()
        report = RunCheck(engine_name(chosen, "float32"), samples.description, samples.taken, (), None)
        with Place(jobs, cluster).sharing(samples.counted, gpus=chosen == "cuda") as workers:
            if is_plugin(chosen):
                run = SeenRun.of(one, chosen, budget)
                report = _check_seen(report, run, workers, samples, ops, progress, kept)
            else:
                executable = Executable(one, chosen, emulated=True, whole=False, budget=budget)
                checked = _Checked(executable, ops, keep, stop=stop)
                report = _checked(report, checked, workers, samples, progress, kept)
        return replace(report, inputs=samples.summary, samples=samples.taken)


def _depends_on(model: Model, provider: Provider, keep: frozenset[str], budget: int, samples: Samples) -> Facts:
    """What the measurements depend on."""
    options = engine_name(provider, "float32"), sorted(keep), budget, active_libraries()
    return {
        "the model": model_print(model),
        "the first input": sample_print(samples, 0),
        "the options": fingerprint(repr(options)),
        "the version of onnxamp or ONNX Runtime": versions(),
    }


def _checked(
    report: RunCheck, checked: "_Checked", workers: Workers | None, samples: Samples, progress: Progress | None,
    kept: KeptSamples[CheckedSample] | None,
) -> RunCheck:  # fmt: skip
    """:func:`check_run` by emulation."""
    model, provider = checked.executable.model, checked.executable.provider
    for number, trouble in enumerate(checked.run(workers, samples, progress, kept)):
        if trouble is not None:
            return replace(report, skipped=_in_vain(trouble, samples, number, model))
        samples.forget(number)
    parts = checked.parts
    checked.ops.check({op_key(node) for part in parts for node in part.watched.runner.flow.nodes})
    parts.sort(key=lambda part: part.first_bad() is None)  # those with a fault first; the sort is stable
    values: dict[str, ValueCheck] = {}
    for row in (row for part in parts for row in part.values()):
        values.setdefault(row.value, row)
    lowest = parts[0].watched.runner.flow.lowest
    told = f", emulated {lowest}" if provider == "cuda" and lowest != "float32" else ""
    where = engine_name(provider, lowest) + told
    return replace(report, ran_on=where, values=tuple(values.values()), first_bad=parts[0].first_bad())


def _in_vain(trouble: RuntimeFailure | Crash, samples: Samples, number: int, model: Model) -> str:
    """A sentence about a sample on which the model does not run."""
    if isinstance(trouble, Crash):
        return f"The model does not run (sample {number + 1}): {trouble}"
    return input_failure("The model does not run", trouble, samples, number, model)


def _check_seen(
    report: RunCheck, run: SeenRun, workers: Workers | None, samples: Samples, ops: OpFilter,
    progress: Progress | None, kept: KeptSamples[CheckedSample] | None,
) -> RunCheck:  # fmt: skip
    """:func:`check_run` on an engine that computes low precision itself."""
    one, last = run.result, 0

    def measure(number: int) -> CheckedSample | RuntimeFailure:
        return run.check(samples[number], part_of(progress, number, samples.expected))

    if workers is None:
        found_all = each_sample(samples, kept, run.prepare, measure)
    else:
        work = SeenWork(SentModel.of(one.model), one.provider, one.budget, first=next(sent_samples(samples)))
        found_all = run_samples(workers, work, samples, progress, kept)
    for last, found in enumerate(found_all):
        if not isinstance(found, CheckedSample):
            return replace(report, skipped=_in_vain(found, samples, last, one.model))
        run.add(found)
        samples.forget(last)
    rows = run.checks(check_inputs(one.model.proto, samples[last]))
    ops.check({row.op for row in rows})
    rows = tuple(row for row in rows if ops.takes(row.op))
    return replace(report, values=rows, first_bad=next((_in_words(row) for row in rows if row.fault), None))


@dataclass(slots=True)
class _Part:
    """The runs of samples that take the same branches, and which ops of them are looked at."""

    watched: WatchedRun
    ops: OpFilter

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

    def run(
        self, workers: Workers | None, samples: Samples, progress: Progress | None,
        kept: KeptSamples[CheckedSample] | None,
    ) -> Iterator[RuntimeFailure | Crash | None]:  # fmt: skip
        """Measure one sample after the other, or up to the first fault, and yield what prevented it."""
        one, choices = self.executable, None
        for number, pieces in enumerate(self._pieces(workers, samples, progress, kept)):
            trouble = None
            for found in pieces:
                if not isinstance(found, CheckedSample):
                    trouble = found
                    break
                if choices != found.choices:  # samples that take other branches are measured apart
                    choices = found.choices
                    self.parts.append(self._part(one.prepare(check_inputs(one.model.proto, samples[number]))))
                self.parts[-1].watched.join(found.values, found.inputs)
                if self.stop and self.parts[-1].first_bad() is not None:
                    return
            yield trouble

    def _pieces(
        self, workers: Workers | None, samples: Samples, progress: Progress | None,
        kept: KeptSamples[CheckedSample] | None,
    ) -> Iterator[Iterable[CheckedSample | RuntimeFailure | Crash]]:  # fmt: skip
        """What each sample shows: all at once, or part by part where the first fault ends it."""
        one, inner = self.executable, SampleCheck(self.executable, self.keep)

        def told(number: int) -> Progress | None:
            return part_of(progress, number, samples.expected)

        if workers is not None:
            first = next(sent_samples(samples))
            work = CheckWork(SentModel.of(one.model), one.provider, self.keep, one.budget, self.stop, first=first)
            results = run_samples(workers, work, samples, progress, kept)
            return (found if isinstance(found, list) else [found] for found in results)
        if self.stop:
            return (inner.parts(samples[number], told(number)) for number in samples.numbers())
        measured = each_sample(samples, kept, inner.prepare, lambda number: inner.check(samples[number], told(number)))
        return ([found] for found in measured)

    def _part(self, runner: Runner) -> _Part:
        return _Part(watched_run(runner, self.executable.provider, self.keep, self.executable.budget), self.ops)


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
