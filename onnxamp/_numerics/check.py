"""Running a model piece by piece with every float measured; :mod:`onnxamp._numerics.watch` defines what is a fault."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import field, replace
from itertools import chain
from typing import Any, NamedTuple

from onnxamp._base.errors import (
    ArgumentError,
    OnnxAmpError,
    RuntimeFailure,
    suggestion,
)
from onnxamp._base.place import Place
from onnxamp._base.records import record
from onnxamp._base.state import StateLike, opened
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import nodes_of_model
from onnxamp._model.sources import unchanged_sources
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.results import FirstBad, RunCheck, ValueCheck
from onnxamp._numerics.unseen.beyond import find_beyond
from onnxamp._numerics.watch import (
    CheckedSample,
    CheckProbe,
    EngineProbe,
    ValueMeasurements,
)
from onnxamp._runtime import BUDGET
from onnxamp._runtime.engines import Engine, Progress, choose_engine, on_cpu
from onnxamp._runtime.fingerprints import SentModel, print_facts
from onnxamp._runtime.inputs.samples import SamplesLike, as_samples
from onnxamp._runtime.loop import KeptSamples, input_failure, observe
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.run import Run, reported_to
from onnxamp._runtime.sessions.session import Provider
from onnxamp._runtime.sessions.starting import active_libraries
from onnxamp._runtime.sessions.values import check_inputs


class OpFilter(NamedTuple):
    """The op types to check: those in ``only`` (all if it is empty) but not in ``skip``."""

    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()

    def takes(self, op: str) -> bool:
        """Return whether nodes of this op type are checked."""
        return op not in self.skip and (not self.only or op in self.only)

    def check(self, seen: Collection[str], others: Collection[str]) -> None:
        """Check that the op types are those of nodes.

        Args:
            seen: the op types of nodes whose values were examined.
            others: those of all nodes, in bodies and functions as well.

        Raises:
            ArgumentError: no node is of one of the op types, or none that was examined is of one of ``only``.
        """
        known = {*seen, *others}
        if unknown := sorted((self.only | self.skip) - known):
            text = (
                f"No node of the model is of op type {', '.join(map(repr, unknown))}."
            )
            raise ArgumentError(text + suggestion(known, unknown[0]))
        if unseen := sorted(self.only.difference(seen)):
            raise ArgumentError(
                f"No node of op type {', '.join(map(repr, unseen))} was examined: check does not look into bodies, nor"
                " into branches that no sample takes."
            )


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

    Low precision is emulated, even on CUDA, so that each value can be compared with its exact result. A plugin provider
    computes each op itself, from the exact values of the float32 model.

    Args:
        model: a ModelProto with its weights loaded, a path, or an onnx-graphsurgeon Graph.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts, which is read one by one.
            None for ``count`` random samples (with ``seed``, and sizes of named dimensions from ``dims``).
        provider: "cuda", "cpu", "webgpu", or the package of another plugin provider; None for CUDA if there is a
            device.
        ops: the op types to check; None for all.
        stop: stop at the first fault, without measuring anything after it.
        keep: names of nodes to compute in float32, as if the model had been converted that way.
        budget: bytes of values and weights to hold at a time, in addition to the model.
        progress: called with (work done, work in all).
        jobs: worker processes that share several samples; None for this process.
        cluster: the Ray cluster that they belong to: "local" for one on this machine, or an address.
        state: a file that records the results of each sample, so that an interrupted check can resume.
            Excludes ``stop``.

    Returns:
        A report with the measurements of every float value, in execution order. ``first_bad`` is the first fault, None
        if there is none; ``skipped`` says why the model does not run.

    Raises:
        ArgumentTypeError: the model or the samples are of another type.
        ArgumentError: the samples do not fit the model, no node is of an op type in ``ops``, or the state belongs to
            another check.
        ModelError: the model cannot be read. RuntimeFailure: CUDA is requested and cannot be used.

    Example:
        >>> import onnxamp
        >>> broken = onnxamp.convert_model("models/decoder.onnx", level="O3", hazards=False)
        >>> report = onnxamp.check_run(broken, provider="cpu")
        >>> report.first_bad.op, report.first_bad.alarm.split(" in ")[0]
        ('Pow', 'Inf')
    """
    one = Model.of(model)
    engine = choose_engine(provider)
    samples = as_samples(samples, one, count=count, seed=seed, dims=dims)
    if stop and state is not None:
        raise ArgumentError(
            "A check that stops at the first fault saves no progress: leave out state, or stop (--stop)."
        )
    run = Run(
        inputs=samples,
        provider=engine.provider,
        report=reported_to(progress),
        budget=budget,
    )
    with opened(state) as kept:
        check = Check(
            one, replace(run, state=kept), ops or OpFilter(), keep, stop=stop
        )
        kept_samples = check.kept_samples()
        with Place(jobs, cluster).sharing(
            samples.counted, gpus=engine.gpus
        ) as workers:
            check = replace(check, run=replace(check.run, workers=workers))
            return check.report(kept_samples)


@record
class Check:
    """A model that is checked on the samples of a run.

    Attributes:
        keep: names of nodes to compute in float32.
        stop: end with the first fault.
    """

    model: Model
    run: Run
    ops: OpFilter = field(default_factory=OpFilter)
    keep: frozenset[str] = frozenset()
    stop: bool = False

    def kept_samples(self) -> KeptSamples[CheckedSample] | None:
        """Return what an interrupted check has stored; None if nothing is kept.

        Raises:
            ArgumentError: the state belongs to another check.
        """
        run = self.run
        samples = self.run.samples
        if run.state is None:
            return None
        engine = choose_engine(run.provider)
        options = engine.name(), sorted(self.keep), run.budget, active_libraries()
        facts = print_facts({"the model": self.model}, samples, *options)
        return KeptSamples(run.state.part("check", facts), samples, CheckedSample)

    def report(self, kept: KeptSamples[CheckedSample] | None = None) -> RunCheck:
        """Return what :func:`check_run` does."""
        run = self.run
        engine = choose_engine(self.run.provider)
        samples = self.run.samples
        report = RunCheck(engine.name(), samples.description, samples.taken, (), None)
        groups = list[ValueMeasurements]()
        samples_read = 0
        memory = dict[str, Any]()
        kind = CheckProbe if engine.is_reference else EngineProbe
        probe = kind(
            model=SentModel.of(self.model),
            engine=replace(engine, emulates=engine.is_reference),
            budget=run.budget,
            keep=self.keep,
            stops=self.ops.takes if self.stop else None,
        )
        with closing(
            observe(run, probe, "running", kept=kept, memory=memory, once=True)
        ) as results:
            for number, checked, trouble in results:
                if checked is None:
                    what = "The model does not run"
                    text = f"{what} (sample {number + 1}): {trouble}"
                    if isinstance(trouble, RuntimeFailure):
                        text = input_failure(
                            what, trouble, samples, number, self.model
                        )
                    report = replace(report, skipped=text)
                    break
                # Samples that take other branches run another graph, whose values are measured apart.
                if not groups or groups[-1].flow.choices != checked.choices:
                    feeds = check_inputs(self.model.proto, samples[number])
                    watched = probe.watched(memory, feeds)
                    groups.append(ValueMeasurements(*watched))
                groups[-1].add(checked)
                samples_read += 1
                if self.stop and groups[-1].has_fault(self.ops.takes):
                    break
        if report.skipped is None:
            report = self._measured(report, groups, probe.engine)
            flows = [group.flow for group in groups]
            report = replace(report, not_run=self._not_run(flows))
        return replace(report, inputs=samples.summary, samples=samples_read)

    def _not_run(self, flows: Sequence[DataflowGraph]) -> tuple[str, ...]:
        """Return clauses about branches that no sample takes, and bodies of loops that none runs."""
        nodes = chain.from_iterable(flow.nodes for flow in flows)
        has_loops = any(op_key(node) in op_facts().repeats for node in nodes)
        has_branches = any(flow.conditions for flow in flows)
        if self.stop or not (has_loops or has_branches):
            return ()
        taken = chain.from_iterable(flow.taken for flow in flows)
        try:
            session = on_cpu(self.model)
            return find_beyond(session, self.run.samples, taken, runs=False).not_run
        except OnnxAmpError:
            return ()

    def _measured(
        self, report: RunCheck, groups: Sequence[ValueMeasurements], engine: Engine
    ) -> RunCheck:
        """Return the report with all measurements, and the first fault in words."""
        nodes = chain.from_iterable(group.flow.nodes for group in groups)
        every = nodes_of_model(self.model.proto)
        self.ops.check(set(map(op_key, nodes)), set(map(op_key, every)))
        checks = list[tuple[list[ValueCheck], str]]()
        for group in groups:
            checked = [row for row in group.checks() if self.ops.takes(row.op)]
            checks.append((checked, group.flow.lowest))
        # Branches with a fault come first, so that their measurements of a value count; the sort is stable.
        checks.sort(key=lambda pair: not any(row.fault for row in pair[0]))
        values: dict[str, ValueCheck] = {}
        for rows, _ in checks:
            for row in rows:
                values.setdefault(row.value, row)
        first = next((_in_words(row) for row in values.values() if row.fault), None)
        return replace(
            report,
            ran_on=engine.name(checks[0][1]),
            values=tuple(values.values()),
            first_bad=first,
        )


def _in_words(row: ValueCheck) -> FirstBad:
    """Return a fault in a sentence."""
    m = row.measured
    if m.broken:
        cause = f"; the exact result reaches {m.reference_max:.4g}"
    elif row.op in op_facts().control_flow:
        cause = ", in its body"
    elif m.reference_inf:
        cause = ", in float32 already"
    else:
        cause = f": numbers beyond {SENTINEL:g} do not fit"
    text = {
        "NaN": f"NaN in {m.found_nan} of {m.elements} elements",
        "Inf": f"Inf in {m.found_inf} of {m.elements} elements{cause}",
        "all zero": f"all {m.elements} elements are zero; the exact result reaches {m.reference_max:.4g}",
        "vanished": f"{m.vanished} of {m.elements} elements vanished: they are zero where the exact result is not small",
        "flushed": f"{m.flushed} of {m.elements} elements became zero, changing the value by {100 * m.rel_l2:.0f} %",
        "saturated": f"elements stay at {m.found_max:g}, the largest number of {row.dtype}",
    }
    return FirstBad(row.value, row.node, row.op, text[row.fault or "NaN"])
