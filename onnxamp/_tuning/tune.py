"""Level auto: measure sensitivities, solve the cut with errors as prices, and verify the converted model.

1. One instrumented pass per sample measures every op's local error, and the error with everything lowered
   (:mod:`onnxamp._tuning.sensitivity`). If that is within the tolerance, the search is over.
2. Mask runs of one session lower blocks of ops, and measure what they do to the outputs.
3. The minimum cut with errors charged at every rate gives a list of choices that does not depend on the tolerance
   (:mod:`onnxamp._tuning.frontier`). Mask runs bisect it (:mod:`onnxamp._tuning.search`).
4. The best candidate is converted and compared on all samples, on CUDA if there is a device
   (:mod:`onnxamp._tuning.verified`). If it misses, the bisection is repeated with larger errors expected.
5. A state file keeps the candidates with their plans, so that any of them can be written later
   (:mod:`onnxamp._tuning.table`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Unpack

from onnxamp._convert.analysis import analyse
from onnxamp._convert.convert import convert
from onnxamp._convert.deciding import all_unsound, analyse_model, soundly
from onnxamp._convert.estimate import Estimate, bound_shapes, low_nodes
from onnxamp._convert.misspelt import early_warnings
from onnxamp._convert.raising import reference_of
from onnxamp._convert.rounding import MADE_UP
from onnxamp._errors import InternalError, RuntimeFailure
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources
from onnxamp._numerics.accept import Accept, AcceptLike
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._numerics.ranges import RangeRun, with_ranges
from onnxamp._numerics.rounding import WeightRounder
from onnxamp._numerics.rows import listed_outputs
from onnxamp._ops.custom import declared_ops
from onnxamp._ops.facts import op_facts
from onnxamp._options.keywords import OptionKeywords
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._runtime.fingerprints import model_print
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import SamplesLike
from onnxamp._runtime.sampling import as_samples
from onnxamp._runtime.session import Provider
from onnxamp._runtime.side import BUDGET
from onnxamp._runtime.switch import WHERE_OPSET
from onnxamp._state.state import Facts, State, StateLike, opened
from onnxamp._target.roofline import Device, device_called
from onnxamp._target.versions import AUTO
from onnxamp._tuning.arguments import Search, meant_device, with_rounder
from onnxamp._tuning.engine_times import measure_times
from onnxamp._tuning.exponents import tune_both
from onnxamp._tuning.frontier import Aim
from onnxamp._tuning.job import Job
from onnxamp._tuning.masks import SharedMasks
from onnxamp._tuning.metric import MetricLike
from onnxamp._tuning.prints import given_prints, options_print
from onnxamp._tuning.race import Race
from onnxamp._tuning.results import Tuned, TunedModel
from onnxamp._tuning.rounded import tune_rounded
from onnxamp._tuning.runs import Backend, MaskedModel, choose_backend
from onnxamp._tuning.search import SECONDS, SENSITIVITY_RUNS, CandidateSearch
from onnxamp._tuning.sensitivity import Progress
from onnxamp._tuning.shared import Judge, Shared
from onnxamp._tuning.space import choose_samples, find_live, find_space
from onnxamp._tuning.state import PARTS, TuningState, part_of
from onnxamp._tuning.table import TABLES, table_of
from onnxamp._tuning.timed import whole_times
from onnxamp._tuning.verified import Outcome, verified
from onnxamp._warnings import warn
from onnxamp._workers.folders import temporary_folder
from onnxamp._workers.place import Place

_LOG: Final = logging.getLogger("onnxamp")
_SUBSET: Final = 4
"""Samples of a mask run, if they run all nodes; verification takes all samples."""

_SINGLE_THREAD_BELOW: Final = 10**8
"""Floating-point operations of a run below which several threads per op do not pay off."""


@unchanged_sources()
def tune_model(
    model: ModelSource,
    tolerance: float = 1e-2,
    *,
    metric: MetricLike = "auto",
    samples: SamplesLike | None = None,
    count: int = 4,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    device: str = AUTO,
    times: str = "roofline",
    provider: Provider | None = None,
    runs: int = SENSITIVITY_RUNS,
    state: StateLike = None,
    pick: int | None = None,
    progress: Progress | None = None,
    budget: int = BUDGET,
    seconds: float = SECONDS,
    allow_slower: bool = False,
    accept: AcceptLike | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    **options: Unpack[OptionKeywords],
) -> TunedModel:
    """Convert as much of a model to low precision as its measured accuracy allows.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is not changed.
        tolerance: the largest accepted error; see ``metric``.
        metric: how the error is measured: "rel-l2", "cosine", "snr", "top1", "detections", "package:function", or a
            function of the outputs of the float32 model and of the result, two dicts of arrays, that returns the
            error; of several outputs the worst counts. "auto" is "detections" for models whose outputs list what an op
            selected by its values (TopK, NonMaxSuppression, ...), and "rel-l2" for others.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts, of tuples of arrays in the
            order of the inputs, or of arrays, such as a loader of PyTorch. None for ``count`` random samples (with
            ``seed``, and sizes of named dimensions from ``dims``).
        device: the device to estimate times for, such as "A100" or "H100"; "auto" for the one that the target is for,
            else the GPU that is installed, or an A100 where none is known.
        times: "roofline" for estimates, or "measured" for times from ONNX Runtime's profiler. On CUDA and on plugin
            providers some choices are timed whole, too, which corrects the times of nodes; the fastest is returned,
            be it level O2 or float32.
        provider: where converted models are measured: "cuda", as they are, or "cpu", emulated. None for CUDA if there
            is a device.
        runs: mask runs that may measure sensitivities; candidates take up to 18 more.
        state: a file that keeps measurements and candidates, so that an interrupted tuning resumes, another tolerance
            needs few runs, and ``pick`` needs none.
        pick: return this candidate instead of the best one, whatever its error. If the state holds the candidates of an
            earlier tuning with the same arguments, nothing is measured.
        progress: called with the current activity, the steps done, and their number.
        budget: bytes of values and weights that a run on the CPU holds at a time, besides the model itself.
        seconds: after so many, no further mask run is begun: candidates are those that were found until then. With a
            state file, another tuning goes on where this one stopped.
        allow_slower: choose the candidate with the most in low precision within the tolerance, whatever its time. Else
            the fastest is chosen, and none that is slower than float32 by the estimate, unless it saves a larger share
            of the bytes of weights than it takes more of the time.
        accept: a function of the outputs of the original and of a candidate, by name, that returns True or False; or
            "package:function". What it rejects misses the tolerance, whatever its error.
        jobs: worker processes that share the samples; None for this process.
        cluster: the Ray cluster that they belong to: "local" for one on this machine, or an address.
        options: those of :func:`onnxamp.convert_model`, except level and lists, which measurements replace.

    Returns:
        The converted model, and the outcome of the search, as a pair. If no candidate meets the tolerance, nothing is
        lowered.

    Raises:
        RuntimeFailure: the model does not run, or misses the tolerance in float32 already.
        ArgumentError: an argument is wrong. ModelError: the model cannot be read.

    Example:
        >>> import onnxamp
        >>> model16, tuned = onnxamp.tune_model("models/classifier.onnx", 1e-2, count=1, provider="cpu")
        >>> tuned.error <= 1e-2
        True
    """
    judge = None if accept is None else Accept.of(accept)
    search = Search(
        tolerance, metric, samples, count, seed, dims, device, times, provider, runs, state, pick, progress, budget,
        seconds, allow_slower, judge, Place(jobs, cluster),
    )  # fmt: skip
    settings, opened = Options.of("auto", options), Model.of(model)
    with declared_ops(settings.custom_ops):
        search, rounder = with_rounder(opened, settings, search)
        tuned = tune_warned(opened, settings, search, rounder)
        made = convert(opened, tuned.plan.options, tuned.plan, rounder=rounder)
        return TunedModel(made.embedded(), tuned)


def tune_warned(model: Model, options: Options, search: Search, rounder: WeightRounder | None = None) -> Tuned:
    """:func:`tune` that warns: of names that match nothing before anything runs, and of the rest at the end."""
    early = early_warnings(model, options)
    warn(early)
    tuned = tune(model, options, search, rounder)
    warn(text for text in tuned.plan.warnings if text not in early)
    return tuned


def tune(model: Model, options: Options, search: Search, rounder: WeightRounder | None = None) -> Tuned:
    """:func:`tune_model` for a model that is read, and arguments that are checked; the plan converts it.

    ``rounder`` is what :func:`with_rounder` gives.
    """
    options = replace(options, strict_options=False)  # names were checked, and plans repeat what was measured
    search = replace(search, device=meant_device(search.device, options.target))
    backend = choose_backend(search.provider, options.target)
    judge = Judge(search.metric, search.tolerance, _listed(model, search.metric), search.accept)
    judge.made()  # checks it, too
    samples = as_samples(search.samples, model, count=search.count, seed=search.seed, dims=search.dims)
    told = search.progress or (lambda *_: None)
    for number in samples.numbers() if samples.counted is None else ():  # each is run several times
        told("taking samples", number + 1, samples.expected)
    with (
        opened(search.state, renew=search.renews) as state,
        search.place.sharing(len(samples), gpus=backend.provider == "cuda") as workers,
        temporary_folder() as folder,
    ):
        given = {} if state is None else given_prints(model, search, samples)
        if state is not None and not search.renews:
            for name in (*PARTS, TABLES):
                state.check(name, given)  # before ranges are added to it
        table = None if state is None or search.renews else table_of(state, given, options, search, backend)
        if table is not None and search.pick is not None and (known := table.picked(search.pick)) is not None:
            return known
        shared = Shared(workers, judge, samples, rounder)
        ranges = RangeRun(samples, search.provider, None, workers, state)
        measured = partial(with_ranges, model, run=ranges)

        def attempt(options: Options) -> Outcome:
            kept = None if options.unsound else state  # which holds what was measured with more nodes to lower
            once = partial(_tune_once, model, backend, shared, kept, given, folder)
            both = partial(tune_both, once=once, measured=measured)
            found = tune_rounded(measured(options), search, samples, both, once, is_free=rounder is not None)
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
    backend: Backend,
    shared: Shared,
    state: State | None,
    given: Facts,
    folder: Path,
    options: Options,
    search: Search,
) -> Outcome:
    """:func:`tune` with the exponents of the options."""
    device, samples, judge = device_called(search.device), shared.samples, shared.judge.made()
    usual = replace(options, level=Level.O2)
    reference = reference_of(model, options)
    comparison = Comparison.of(reference, samples, None, backend.provider, budget=search.budget, workers=shared.workers)
    proof = UpgradeProof(comparison)
    upgraded, analysis = analyse_model(model, usual, proof=proof, least=WHERE_OPSET)
    graph, options = upgraded.graph, replace(options, folded=analysis.options.folded)
    estimate = Estimate(
        graph, device, bound_shapes(graph, check_inputs(graph.model, samples[0]) if samples.has(0) else {})
    )
    space = find_space(graph, options, estimate)
    live = find_live(graph, samples, model)
    _LOG.info("tuning %d nodes on %d samples, metric %s", len(space.tunable), len(samples), judge.name)
    space = space.known(frozenset().union(*live), lambda: low_nodes(analyse(graph, usual)))
    ready = model if graph.model is model.proto else Model(graph.model, graph.folder)
    if not backend.emulated and ready.path is None:
        ready = Model(ready.embedded())  # a session finds weights beside a file, or in the model
    part = None
    if state is not None:
        changed = "" if graph.model is model.proto else model_print(ready)
        facts = {**given, "the options": options_print(changed, space, options, backend)}
        part = state.part(part_of(options), facts, renew=search.renews)
    job = Job(ready, space, samples, judge, TuningState.of(part), backend, shared, folder, search.budget)
    told = (*upgraded.refused, *([MADE_UP] if options.compensates and samples.made_up else ()))
    tuned, prices = _tuned(job, search, live, device)
    plan = replace(tuned.plan, warnings=(*tuned.plan.warnings, *told))
    return Outcome(replace(tuned, plan=plan), job, prices, told)


def _tuned(job: Job, search: Search, live: Sequence[frozenset[int]], device: Device) -> tuple[Tuned, list[float]]:
    """Measure, search, and verify; returns the error prices, too."""
    space, judge, progress = job.space, job.metric, search.progress or (lambda *_: None)
    work = sum(unit.work.flops for unit in space.tunable)
    threads = 1 if work < _SINGLE_THREAD_BELOW else 0
    subset, workers = choose_samples(live, _SUBSET), job.shared.workers
    alone = MaskedModel(job.prepared, space.ports(), job.low, job.samples, judge, job.budget, threads,
                        job.backend.arithmetic, job.rounded_weights())  # fmt: skip
    masked = alone if workers is None else SharedMasks.of(alone, job.shared.judge, subset, workers)
    random = any(node.key in op_facts().random for node in space.all_low.graph.nodes)
    noise = _noise(job, masked, subset) if random else None  # before anything takes time
    job.measure_locally(progress)
    if noise is None and not judge.holds(job.state.local.worst):
        noise = _noise(job, masked, subset)
    timing = f"estimates for {device.name} and the shapes of the first sample, with launches and Casts"
    if search.times == "measured":
        timing = measure_times(job, device.name)
    solver = job.solver()
    aim = Aim(solver.candidate(frozenset(), [0.0] * len(job.space.tunable), 0.0), search.allow_slower)
    candidates = CandidateSearch(
        solver, masked, job.state, judge, job.locals, subset, search.runs, progress, aim, job.everything_error(),
        search.seconds,
    )  # fmt: skip
    tuned = verified(job, candidates, noise, search, timing)
    is_timed = search.times == "measured" and not job.backend.emulated and bool(space.tunable)
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
