"""Level auto: measure sensitivities, solve the cut with errors as prices, and verify the converted model.

1. One instrumented pass per sample measures every op's local error, and the error with everything lowered
   (:mod:`onnxamp._tuning.sensitivity`). If that is within the tolerance, the search is over.
2. Mask runs of one session lower blocks of ops, and measure what they do to the outputs.
3. The minimum cut with errors charged at every rate gives a list of choices that does not depend on the tolerance
   (:mod:`onnxamp._tuning.frontier`). Mask runs bisect it (:mod:`onnxamp._tuning.search`).
4. The best candidate is converted and compared on all samples, on CUDA if there is a device
   (:mod:`onnxamp._tuning.race`). If it misses, the bisection is repeated with larger errors expected.
5. A state file keeps the candidates with their plans, so that any of them can be written later
   (:mod:`onnxamp._tuning.table`).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from onnxamp._convert.analysis import analyse
from onnxamp._convert.convert import all_unsound, analyse_model, soundly
from onnxamp._convert.estimate import Estimate, bound_shapes, low_nodes
from onnxamp._convert.misspelt import reference_of
from onnxamp._convert.rounding import MADE_UP
from onnxamp._errors import InternalError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._numerics.detections import listed_outputs
from onnxamp._numerics.diff import Comparison, UpgradeProof
from onnxamp._numerics.ranges import with_ranges
from onnxamp._numerics.rounding import WeightRounder
from onnxamp._ops.facts import op_facts
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._runtime.engines import Engine
from onnxamp._runtime.fingerprints import model_print
from onnxamp._runtime.run import Report, Run
from onnxamp._runtime.switch import WHERE_OPSET
from onnxamp._runtime.values import check_inputs
from onnxamp._state.state import Facts
from onnxamp._target.roofline import Device, device_called
from onnxamp._tuning.arguments import Search, meant_device
from onnxamp._tuning.engine_times import measure_times, whole_times
from onnxamp._tuning.frontier import Aim
from onnxamp._tuning.job import Job
from onnxamp._tuning.metric import Metric, MetricLike, make_metric
from onnxamp._tuning.race import Outcome, Race, verified
from onnxamp._tuning.results import Tuned, given_prints, options_print
from onnxamp._tuning.rounded import tune_both, tune_rounded
from onnxamp._tuning.runs import MaskedModel, tuning_engine
from onnxamp._tuning.search import CandidateSearch, SharedMasks
from onnxamp._tuning.space import choose_samples, find_live, find_space
from onnxamp._tuning.state import PARTS, TuningState, part_of
from onnxamp._tuning.table import TABLES, table_of
from onnxamp._workers.executor import temporary_folder

_LOG: Final = logging.getLogger("onnxamp")
_SUBSET: Final = 4
"""Samples of a mask run, if they run all nodes; verification takes all samples."""

_SINGLE_THREAD_BELOW: Final = 10**8
"""Floating-point operations of a run below which several threads per op do not pay off."""


def tune(
    model: Model, options: Options, search: Search, run: Run, rounder: WeightRounder | None = None
) -> Tuned:
    """Search the lowest precision that holds a tolerance; the plan of the outcome converts the model.

    Args:
        model: the model; it is not changed.
        options: those of the conversion, at level auto.
        search: the tolerance, and how to search.
        run: the samples, and where and with whose help the model runs on them.
        rounder: rounds weights with compensation, if the options may ask for it.

    Raises:
        As :func:`onnxamp.tune_model`.
    """
    options = replace(
        options, strict_options=False
    )  # names were checked, and plans repeat what was measured
    search = replace(search, device=meant_device(search.device, options.target))
    engine = tuning_engine(run.provider, options.target)
    metric = make_metric(
        search.metric, search.tolerance, _listed(model, search.metric), search.accept
    )
    samples = run.samples
    if samples.counted is None:
        for number in samples.numbers():  # each is run several times
            run.report("taking samples", number + 1, samples.expected)
    search.check_state(run.state)
    state = run.state
    given = {} if state is None else given_prints(model, search, samples)
    if state is not None and not run.renews:
        for name in (*PARTS, TABLES):
            state.check(name, given)  # before ranges are added to it
    table = None if state is None or run.renews else table_of(state, given, options, search, engine)
    if (
        table is not None
        and search.pick is not None
        and (known := table.picked(search.pick)) is not None
    ):
        return known
    with temporary_folder() as folder:
        measured = partial(with_ranges, model, run=run)

        def attempt(options: Options) -> Outcome:
            kept = (
                replace(run, state=None) if options.unsound else run
            )  # measured with more nodes to lower
            once = partial(_tune_once, model, engine, metric, rounder, kept, given, folder)
            both = partial(tune_both, once=once, measured=measured)
            found = tune_rounded(
                measured(options), search, samples, both, once, is_free=rounder is not None
            )
            return found if search.pick is None else found.picked(search.pick)

        try:
            found = soundly(options, attempt)
        except InternalError:
            found = attempt(all_unsound(model, options))
        if table is not None:
            table.keep(found)
        return found.tuned


def _tune_once(
    model: Model,
    engine: Engine,
    metric: Metric,
    rounder: WeightRounder | None,
    run: Run,
    given: Facts,
    folder: Path,
    options: Options,
    search: Search,
) -> Outcome:
    """:func:`tune` with the exponents of the options."""
    device, samples = device_called(search.device), run.samples
    usual = replace(options, level=Level.O2)
    reference = reference_of(model, options)
    proof = UpgradeProof(Comparison.of(reference, replace(run.bare, provider=engine.provider)))
    upgraded, analysis = analyse_model(model, usual, proof=proof, least=WHERE_OPSET)
    graph, options = upgraded.graph, replace(options, folded=analysis.options.folded)
    estimate = Estimate(
        graph,
        device,
        bound_shapes(graph, check_inputs(graph.model, samples[0]) if samples.has(0) else {}),
        options.low,
    )
    space = find_space(graph, options, estimate)
    live = find_live(graph, samples, model)
    _LOG.info(
        "tuning %d nodes on %d samples, metric %s", len(space.tunable), len(samples), metric.name
    )
    space = space.known(frozenset().union(*live), lambda: low_nodes(analyse(graph, usual)))
    ready = model if graph.model is model.proto else Model(graph.model, graph.folder)
    if not engine.emulates and ready.path is None:
        ready = Model(ready.embedded())  # a session finds weights beside a file, or in the model
    part = None
    if run.state is not None:
        changed = "" if graph.model is model.proto else model_print(ready)
        facts = {**given, "the options": options_print(changed, space, options, engine)}
        part = run.state.part(part_of(options), facts, renew=run.renews)
    job = Job(
        prepared=ready,
        space=space,
        run=run,
        metric=metric,
        state=TuningState.of(part),
        engine=engine,
        folder=folder,
        rounder=rounder,
    )
    told = (*upgraded.refused, *([MADE_UP] if options.compensates and samples.made_up else ()))
    tuned, prices = _tuned(job, search, run.report, live, device)
    plan = replace(tuned.plan, warnings=(*tuned.plan.warnings, *told))
    return Outcome(replace(tuned, plan=plan), job, prices, told)


def _tuned(
    job: Job, search: Search, progress: Report, live: Sequence[frozenset[int]], device: Device
) -> tuple[Tuned, list[float]]:
    """Measure, search, and verify; returns the error prices, too."""
    space, judge = job.space, job.metric
    work = sum(unit.work.flops for unit in space.tunable)
    threads = 1 if work < _SINGLE_THREAD_BELOW else 0
    subset, workers = choose_samples(live, _SUBSET), job.run.sample_workers
    alone = MaskedModel(
        model=job.prepared,
        ports=space.ports(),
        low=job.low,
        samples=job.samples,
        metric=judge,
        budget=job.run.budget,
        threads=threads,
        arithmetic=job.engine.arithmetic,
        rounded=job.rounded_weights(),
    )
    masked = alone if workers is None else SharedMasks.of(alone, subset, workers)
    random = any(node.key in op_facts().random for node in space.all_low.graph.nodes)
    noise = _noise(job, masked, subset) if random else None  # before anything takes time
    job.measure_locally()
    if noise is None and not judge.holds(job.state.local.worst):
        noise = _noise(job, masked, subset)
    timing = (
        f"estimates for {device.name} and the shapes of the first sample, with launches and Casts"
    )
    if search.times == "measured":
        timing = measure_times(job, device.name)
    solver = job.solver()
    aim = Aim(
        solver.candidate(frozenset(), [0.0] * len(job.space.tunable), 0.0), search.allow_slower
    )
    candidates = CandidateSearch(
        solver=solver,
        masked=masked,
        state=job.state,
        metric=judge,
        locals=job.locals,
        subset=subset,
        runs=search.runs,
        progress=progress,
        aim=aim,
        known=job.everything_error(),
        seconds=search.seconds,
    )
    tuned = verified(job, candidates, noise, search, timing)
    is_timed = search.times == "measured" and not job.engine.emulates and bool(space.tunable)
    if is_timed and (times := whole_times(job)) is not None:
        progress("timing converted models", 0, 1)
        tuned = Race(job, candidates, times).confirmed(tuned, allow_slower=search.allow_slower)
    return tuned, candidates.latest


def _listed(model: Model, metric: MetricLike) -> frozenset[str]:
    """Outputs whose rows are matched; a function of the user does that itself."""
    return listed_outputs(model, metric) if isinstance(metric, str) else frozenset()


def _noise(job: Job, masked: MaskedModel | SharedMasks, subset: Sequence[int]) -> float:
    """The error of the float32 model against itself in a second run.

    Raises:
        RuntimeFailure: it misses the tolerance.
    """
    noise = job.state.error((), subset, lambda: next(masked.errors([frozenset()], subset)))
    if not job.metric.holds(noise):
        raise RuntimeFailure(
            f"The float32 model is not deterministic: two runs on the same inputs differ by {noise:.2g}, more than the"
            f" tolerance of {job.metric.tolerance:g}. No choice of precision can fix that."
        )
    return noise
