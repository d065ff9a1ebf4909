"""Running a model piece by piece with every float measured; see :mod:`onnxamp._numerics.watch` for what is a fault."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import ModelSource
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.beside import Progress, at_least_one, open_model, part_of, ran_on
from onnxamp._numerics.measured import Measured
from onnxamp._numerics.results import FirstBad, RunCheck, ValueCheck
from onnxamp._numerics.spare import spare
from onnxamp._numerics.watch import watched_values
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.flow import fitted
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.observe import Observed, observe
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.samples import Samples, random_samples
from onnxamp._runtime.session import Provider, choose_provider
from onnxamp._runtime.side import BUDGET
from onnxamp._runtime.values import Feed


@dataclass(frozen=True, slots=True)
class OpFilter:
    """Which op types are looked at: those in ``only`` (all if it is empty) that are not in ``skip``."""

    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()

    def takes(self, op: str) -> bool:
        """Whether nodes of this op type are looked at."""
        return op not in self.skip and (not self.only or op in self.only)


def check_run(
    model: ModelSource,
    samples: Samples | None = None,
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
    """Run a model and find the first op that goes wrong although its inputs were fine.

    Low values are emulated (:mod:`onnxamp._runtime.emulate`), on CUDA too, so that each can be held against its exact
    result.

    Args:
        model: a proto with its weights loaded, or the path of a file.
        samples: inputs; made up (seeded, ``count`` of them, sizes from ``dims``) where None.
        provider: "cuda" or "cpu"; None for CUDA where there is one.
        ops: which op types are looked at.
        stop: end with the first fault; what comes behind it is not measured.
        keep: nodes to compute in float32, as if the model had been converted so.
        budget: bytes of values and weights that may be held at a time besides the model itself.
        progress: told how far the check is.

    Raises:
        ArgumentError: the samples do not fit the model. ModelError: it cannot be read.
    """
    opened = open_model(model)
    chosen = choose_provider(provider)
    samples = samples or random_samples(opened.proto, count, seed=seed, dims=dims)
    at_least_one(samples)
    report = RunCheck(ran_on(chosen, "float32"), samples.description, len(samples), (), None)
    jobs: list[_Job] = []
    observed: Observed | None = None
    for number, sample in enumerate(samples):
        feeds = check_inputs(opened.proto, sample)
        try:
            now = observe(opened.proto, opened.folder, feeds, emulated=True, provider=chosen, before=observed)
            if now is not observed:  # samples that take other branches are looked at apart
                observed = now
                flow, rows = spare(now.flow, watched_values(now.flow), keep)
                jobs.append(_Job(Measured(Runner(flow, chosen), rows, budget), ops or OpFilter(), stop=stop))
            jobs[-1].run(fitted(now.flow, feeds), part_of(progress, number, len(samples)))
        except RuntimeFailure as error:
            which = f" (sample {number + 1} of {len(samples)})" if len(samples) > 1 else ""
            return replace(report, skipped=f"The model does not run{which}: {error}{samples.hint(error)}")
        if stop and jobs[-1].first_bad() is not None:
            break
    seen = {op_key(node) for job in jobs for node in job.measured.runner.flow.nodes}
    unknown = sorted(((ops.only | ops.skip) if ops else frozenset()) - seen)
    if unknown:
        raise ArgumentError(f"No node of the model is of op type {', '.join(map(repr, unknown))}.")
    jobs.sort(key=lambda job: job.first_bad() is None)  # those with a fault first; the sort is stable
    values: dict[str, ValueCheck] = {}
    for row in (row for job in jobs for row in job.values()):
        values.setdefault(row.value, row)
    lowest = jobs[0].measured.runner.flow.lowest
    where = ran_on(chosen, lowest) + (f", emulated {lowest}" if chosen == "cuda" and lowest != "float32" else "")
    return replace(report, ran_on=where, values=tuple(values.values()), first_bad=jobs[0].first_bad())


@dataclass(slots=True)
class _Job:
    """A model that is run with its floats measured, and what of it is looked at."""

    measured: Measured
    ops: OpFilter
    stop: bool

    def run(self, feeds: Mapping[str, Feed], told: Progress | None) -> None:
        total, done = len(self.measured.runner.flow.nodes), 0
        for part in self.measured.parts(feeds):
            done += len(part)
            if told is not None:
                told(done, total)
            if self.stop and self.first_bad() is not None:
                return

    def values(self) -> tuple[ValueCheck, ...]:
        return tuple(row for row in self.measured.checks() if self.ops.takes(row.op))

    def first_bad(self) -> FirstBad | None:
        return next((_told(row) for row in self.values() if row.fault), None)


def _told(row: ValueCheck) -> FirstBad:
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
        "saturated": f"elements stand at {m.found_max:g}, the largest number of {row.dtype}",
    }
    return FirstBad(row.value, row.node, row.op, text[row.fault or "NaN"])
