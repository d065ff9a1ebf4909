"""Level auto: measure sensitivities, solve the cut with errors as prices, and verify the converted model.

1. One forward and one backward pass per sample measure what rounding each value costs at the outputs
   (:mod:`onnxamp._gradients.sensitivity`). These errors add up (:mod:`onnxamp._tuning.errors.expected`).
2. The minimum cut with errors charged at every rate gives a list of choices that does not depend on the tolerance
   (:mod:`onnxamp._tuning.choices.candidates`).
3. The best one that is expected to pass is converted and compared on all samples, on CUDA if there is a device. Its
   ratio of measured to expected error applies to the others, and the next one is tried (:mod:`onnxamp._tuning.search`).
4. A state file stores the measurements, so that any candidate can be written later (:mod:`onnxamp._tuning.runs`).
"""

import logging
from dataclasses import replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from onnxamp._base.errors import InternalError, OnnxAmpError
from onnxamp._base.state import Facts
from onnxamp._base.temporary import temporary_folder
from onnxamp._convert.analysis import analyze, low_nodes
from onnxamp._convert.compensation import MADE_UP
from onnxamp._convert.convert import ATTEMPTS, all_unsound, around_fault, decide
from onnxamp._convert.estimate import Estimate, bound_shapes
from onnxamp._convert.plan import Plan
from onnxamp._convert.raising import reference_of
from onnxamp._facts.devices import Device, device_called, device_titled
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._facts.targets import AUTO, target_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import without_grids
from onnxamp._model.model import Model
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.differences.detections import listed_outputs
from onnxamp._numerics.limits import coarseness
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._runtime.engines import Engine
from onnxamp._runtime.fingerprints import model_print
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.plugins import device_name
from onnxamp._runtime.sessions.values import check_inputs
from onnxamp._tuning.choices.space import find_live, find_space
from onnxamp._tuning.errors.foreseen import judging_engine
from onnxamp._tuning.job import TuningJob, measure_times
from onnxamp._tuning.metric import Metric, make_metric
from onnxamp._tuning.ranges import with_ranges
from onnxamp._tuning.results import CompensationEffect, Exponents, Search, Tuned
from onnxamp._tuning.rounding import WeightRounder
from onnxamp._tuning.runs import (
    PARTS,
    TuningState,
    converted_error,
    given_prints,
    options_print,
    state_part,
)
from onnxamp._tuning.search import (
    CandidateSearch,
    TuningOutcome,
    timed_whole,
    verified,
)

_LOG: Final = logging.getLogger("onnxamp")
_LEAST: Final = 1 / 4
"""Share of the search time that a second tuning has at least."""

_FEWEST: Final = 4
"""The number of samples from which on compensation is tried without a request. Rounding leaves out the last quarter of
the rows, so at least one sample then judges weights that were not rounded for it.
"""
_RELATIVE: Final = ("rel-l2", "detections")
"""Metrics whose default tolerance allows for integers."""
_SHARE: Final = 1 / 4
"""The smallest possible share of the rounding of weights in the squared error for which compensation is tried."""


def tune(
    model: Model,
    options: Options,
    search: Search,
    run: Run,
    rounder: WeightRounder | None = None,
) -> Tuned:
    """Search for the lowest precision that meets a tolerance; the plan of the outcome converts the model.

    Args:
        model: the model; it is not changed.
        options: those of the conversion, at level auto.
        search: the tolerance, and how to search.
        run: the samples, and where and with whose help the model runs on them.
        rounder: rounds weights with compensation, if the options may ask for it.

    Raises:
        As :func:`onnxamp.tune_model`.
    """
    # Names were checked, and plans repeat the measurements.
    options = replace(options, strict_options=False)
    search = replace(search, device=_meant_device(search.device, options.target))
    engine = judging_engine(run.provider, options.target)
    listed = listed_outputs(model, search.metric)
    metric = make_metric(search.metric, search.tolerance, listed, search.accept)
    is_default = search.tolerance is None and metric.name in _RELATIVE
    coarse = _cost_of_integers(model, run, metric, engine) if is_default else 0.0
    if coarse:
        tolerance = metric.tolerance + coarse
        metric = make_metric(search.metric, tolerance, listed, search.accept)
    samples = run.samples
    state = run.state
    if samples.counted is None:
        for number in samples.numbers():  # each is run several times
            run.report("taking samples", number + 1, samples.expected)
    search.check_state(state)
    given = {} if state is None else given_prints(model, search, samples)
    if state is not None and not run.renews:
        for name in PARTS:
            state.check(name, given)  # before ranges are added to it
    with temporary_folder() as folder:
        device = device_called(search.device)
        tuning = _Tuning(
            model=model,
            device=device,
            engine=engine,
            metric=metric,
            rounder=rounder,
            run=run,
            given=given,
            folder=folder,
        )
        outcome = tuning.soundly(options, search)
        return replace(outcome.tuned, coarse=coarse)


def _cost_of_integers(model: Model, run: Run, metric: Metric, engine: Engine) -> float:
    """Return the allowance of the default tolerance for a model that rounds values to integers; 0 for others."""
    exact = without_grids(model)
    if exact is None:
        return 0.0
    cost = converted_error(model, exact, run.bare, metric, engine.reference)
    return coarseness(cost) if cost < inf else 0.0


class _Tuning(NamedTuple):
    """Tunes one model, with one set of options after the other.

    Each method calls the one below it, and adds one thing: float32 where a bug is (``soundly``), the candidate that the
    user picked (``picked``), rounded weights (``rounded``), exponents (``both``).
    """

    model: Model
    device: Device
    engine: Engine
    metric: Metric
    rounder: WeightRounder | None
    run: Run
    given: Facts
    folder: Path

    def soundly(self, options: Options, search: Search) -> TuningOutcome:
        """Tune as the options say. If a bug makes a result wrong, the nodes around the fault stay in float32."""
        attempt: Options | None = options
        for _ in range(ATTEMPTS):
            if attempt is None:
                break
            try:
                return self.picked(attempt, search)
            except InternalError as error:
                attempt = around_fault(attempt, error)
        return self.picked(all_unsound(self.model, options), search)

    def picked(self, options: Options, search: Search) -> TuningOutcome:
        """Return the outcome with the requested exponents, and with the candidate that the user picked."""
        outcome = self.rounded(self.measured(options, search.stress), search)
        return outcome if search.pick is None else outcome.picked(search.pick)

    def measured(self, options: Options, steps: int) -> Options:
        """Return the options with the exponents that they ask for.

        Args:
            options: the options.
            steps: steps toward inputs that are hard, on which exponents have to suit as well.
        """
        return with_ranges(self.model, options, self.run, steps)

    def rounded(self, options: Options, search: Search) -> TuningOutcome:
        """Tune as the options say; if they leave it open and the fastest candidate misses, also with compensation.

        Rounding to nearest stays, unless a faster candidate meets the tolerance with compensation.
        """
        begin = monotonic()
        best = self.both(options, search)
        nearest = best.tuned
        if options.rounding != "auto" or self.rounder is None:
            return replace(best, tuned=replace(nearest, compensation=None))
        facts = _untried(nearest, self.run.samples, search)
        if facts is not None and not facts.why:
            # The exponents of the first tuning hold for the second one.
            settled = nearest.plan.options
            compensated = replace(
                options,
                rounding="compensated",
                rescale=settled.rescale,
                rescaling=settled.rescaling,
            )
            job = replace(self.job(compensated, search), before=best.job)
            other = _tuned(job, _shortened(search, begin))
            used = _rank(other.tuned, search)[:-1] < _rank(nearest, search)[:-1]
            left = nearest if used else other.tuned
            best = other if used else best
            facts = replace(
                facts, used=used, other=left.candidates[left.chosen], error=left.error
            )
            _LOG.info(
                "weights are rounded %s", "with compensation" if used else "to nearest"
            )
        tuned = replace(best.tuned, exponents=nearest.exponents, compensation=facts)
        return replace(best, tuned=tuned)

    def both(self, options: Options, search: Search) -> TuningOutcome:
        """Tune as the options say; if they leave it open and exponents bring values into range, also with exponents.

        Exponents are tried first: if all nodes can then be low, nothing without them can be faster. Otherwise, meeting
        the tolerance comes first, then less time, then a smaller error.
        """
        job = self.job(options, search)
        job.check_noise()  # before anything takes time
        rescaled = self._rescaled(options, job)
        if rescaled is None or rescaled.rescaling is None:
            return _tuned(job, search)
        values = len(rescaled.rescaling.scaled)
        begin = monotonic()
        best = _tuned(self.job(rescaled, search), search)
        other = None
        first = best.tuned
        is_all_low = first.candidates[first.chosen].nodes == first.units
        used = first.held and is_all_low and not rescaled.rescaling.unfit
        if not used:
            other = _tuned(job, _shortened(search, begin))
            used = _rank(first, search) < _rank(other.tuned, search)
            best, other = (best, other) if used else (other, best)
        _LOG.info(
            "exponents of %d values are %s", values, "used" if used else "not used"
        )
        facts = Exponents(values, used, None, None)
        if other is not None:
            left = other.tuned
            facts = replace(
                facts, other=left.candidates[left.chosen], error=left.error
            )
        return replace(best, tuned=replace(best.tuned, exponents=facts))

    def _rescaled(self, options: Options, job: TuningJob) -> Options | None:
        """Return the options with exponents; None if that is settled, or if no overflowing value can have one."""
        is_open = options.rescale is None and options.low.is_narrow
        if not is_open or not job.may_overflow:
            return None
        rescaled = self.measured(replace(options, rescale=True), job.stress)
        scaled = rescaled.rescaling.scaled if rescaled.rescaling is not None else ()
        is_used = any((row.largest or 0.0) > FLOAT16.max_finite for row in scaled)
        return rescaled if is_used else None

    def job(self, options: Options, search: Search) -> TuningJob:
        """Return the prepared model with the nodes that can be low in it."""
        model = self.model
        engine = self.engine
        run = self.run
        # The state belongs to the tuning that could lower these nodes as well.
        if options.unsound:
            run = replace(run, state=None)
        samples = run.samples
        usual = replace(options, level=Level.O2)
        reference = reference_of(model, options)
        judged = Comparison.of(reference, replace(run.bare, provider=engine.provider))
        proof = UpgradeProof(judged)
        decided = decide(model, usual, proof=proof)
        graph = decided.graph
        options = replace(options, folded=decided.analysis.options.folded)
        feeds = check_inputs(graph.model, samples[0]) if samples.has(0) else {}
        shapes = bound_shapes(graph, feeds)
        estimate = Estimate(graph, self.device, shapes, options.low)
        space = find_space(graph, options, estimate)
        live = find_live(graph, samples, model)
        facts = len(space.tunable), len(samples), self.metric.name
        _LOG.info("tuning %d nodes on %d samples, metric %s", *facts)
        seen = frozenset[int]().union(*live)
        space = space.known(seen, lambda: low_nodes(analyze(graph, usual)))
        ready = self._ready(graph)
        part = None
        if run.state is not None:
            changed = "" if graph.model is model.proto else model_print(ready)
            asked = {"the options": options_print(changed, space, options, engine)}
            given = {**self.given, **asked}
            part = run.state.part(state_part(options), given, renew=run.renews)
        is_made_up = options.compensates and samples.made_up
        return TuningJob(
            prepared=ready,
            space=space,
            run=run,
            metric=self.metric,
            state=TuningState(part),
            engine=engine,
            folder=self.folder,
            rounder=self.rounder,
            is_eager=search.allow_slower or search.times == "measured",
            stress=search.stress,
            only=search.only,
            told=(*decided.prepared.refused, *([MADE_UP] if is_made_up else ())),
        )

    def _ready(self, graph: Graph) -> Model:
        """Return the prepared model as the engine opens it."""
        is_given = graph.model is self.model.proto
        ready = self.model if is_given else Model(graph.model, graph.folder)
        # A session finds weights beside a file, or in the model.
        is_found = self.engine.emulates or ready.path is not None
        return ready if is_found else Model(ready.embedded())


def _shortened(search: Search, begin: float) -> Search:
    """Return the search of another tuning, after one that began then."""
    left = max(search.seconds - (monotonic() - begin), search.seconds * _LEAST)
    return replace(search, seconds=left)


def _rank(tuned: Tuned, search: Search) -> tuple[bool, float, float, float]:
    """Return a key that orders outcomes like the candidates of one tuning."""
    chosen = tuned.candidates[tuned.chosen]
    lowered = chosen.flops + chosen.bytes if search.allow_slower else 0.0
    return not tuned.held, -lowered, chosen.time, tuned.error


def _untried(
    tuned: Tuned, samples: Samples, search: Search
) -> CompensationEffect | None:
    """Return the benefit known before compensation is tried, and the objections; None if there is nothing to gain."""
    known = tuned.compensation
    is_fastest = tuned.held and tuned.chosen == 0
    if known is None or not known.seconds or is_fastest:
        return None
    why = ""
    if known.share < _SHARE:
        why = f"the nodes that read weights cause only {known.share:.0%} of the squared error"
    elif samples.made_up:
        why = "the inputs are random"
    elif len(samples) < _FEWEST:
        why = f"that needs {_FEWEST} inputs or more"
    elif known.seconds > search.seconds:
        why = f"that takes about {known.seconds:.0f} s, more than --search-time"
    return replace(known, why=why)


def _tuned(job: TuningJob, search: Search) -> TuningOutcome:
    """Measure sensitivities, search, and verify."""
    space = job.space
    device = job.space.estimate.device.name
    noise = job.check_noise()  # before anything takes time
    timing = f"estimates for {device} and the shapes of the first sample, with launches and Casts"
    if search.times == "measured":
        timing = measure_times(job, device)
    candidates = CandidateSearch(job, search)
    tuned = verified(candidates, noise, timing)
    if search.times == "measured" and not job.engine.emulates and space.tunable:
        tuned = timed_whole(candidates, tuned)
    return TuningOutcome(tuned, job)


def measured_plan(
    model: Model,
    options: Options,
    search: Search,
    run: Run,
    rounder: WeightRounder | None,
) -> Plan | None:
    """Return the outcome of level auto; None if it lowers nothing, or if the model cannot be tuned.

    It lowers as much as it may, as the other levels do, even if the result is estimated to be slower than float32.

    Args:
        model: the original.
        options: those of the conversion, at level auto.
        search: the tolerance, and the time limit of the search.
        run: the samples, and where models run on them.
        rounder: rounds weights, if the options ask for it.
    """
    try:
        tuned = tune(model, options, replace(search, allow_slower=True), run, rounder)
    except OnnxAmpError as error:
        _LOG.info("level auto cannot be measured: %s", error)
        return None
    is_low = any(row.low for row in tuned.plan.rows)
    return tuned.plan if tuned.held and is_low else None


def _meant_device(name: str, target: str) -> str:
    """Return the device to estimate times for. "auto" is the target's device, else the installed GPU, else an A100.

    Raises:
        ArgumentError: there is no device of that name.
    """
    if name != AUTO:
        return device_called(name).name
    return target_of(target).device or device_titled(device_name())
