"""Level auto: measure, price, cut, verify, and write down what was found.

1. One instrumented pass per sample: every op's own error, and that of everything low together
   (:mod:`onnxamp._tuning.local`). If that holds, nothing is left to do.
2. Runs with blocks of ops low, one session for all of them: what ops do to the outputs (:mod:`onnxamp._tuning.blocks`).
3. The minimum cut, errors charged at a rate: the most low precision that is predicted to stay within the tolerance
   (:mod:`onnxamp._tuning.search`). A run verifies it; a miss halves the block that dominates; a hit is pushed further
   (:mod:`onnxamp._tuning.hunt`).
4. The winner is converted for real, and compared on all samples, on CUDA where there is a device
   (:mod:`onnxamp._tuning.confirm`). A miss there asks for a tighter choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Final, Unpack

from onnx import ModelProto

from onnxamp._convert.analysis import analyse
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model, ModelSource
from onnxamp._ops.facts import op_facts
from onnxamp._options.keywords import OptionKeywords
from onnxamp._options.options import Level, Options
from onnxamp._rewrite.prepare import prepare
from onnxamp._runtime.samples import SamplesLike, as_samples
from onnxamp._runtime.session import Provider
from onnxamp._target.roofline import DEFAULT_DEVICE, device_called
from onnxamp._tuning.confirm import place_for
from onnxamp._tuning.hunt import PRICING, Hunt, pareto
from onnxamp._tuning.job import Job
from onnxamp._tuning.local import Told as Progress
from onnxamp._tuning.memory import Memory, fingerprint, recall
from onnxamp._tuning.metric import Metric, make_metric
from onnxamp._tuning.paths import choose_samples, find_live
from onnxamp._tuning.probe import Probe
from onnxamp._tuning.results import Tuned
from onnxamp._tuning.search import Candidate
from onnxamp._tuning.timing import TIMES, timed
from onnxamp._tuning.units import find_space, low_nodes

_SUBSET: Final = 4
"""Samples of a mask run, if they come by all nodes; verification takes all."""

_ATTEMPTS: Final = 4
"""Searches that a tuning may take: each asks for less error than the last, if converted models missed the tolerance."""

_STEP: Final = 0.3
"""At most so much smaller is the error that the next search asks for."""

_LITTLE: Final = 10**8
"""Floating-point operations of a run up to which handing parts of ops to other threads takes longer than it saves."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a tuning searches for, and on what; see :func:`tune_model` for each field.

    Raises:
        ArgumentError: a value is not known.
    """

    tolerance: float = 1e-2
    metric: str = "rel-l2"
    samples: SamplesLike | None = None
    count: int = 4
    seed: int = 0
    dims: Mapping[str, int] | None = None
    device: str = DEFAULT_DEVICE
    times: str = "roofline"
    provider: Provider | None = None
    runs: int = PRICING
    state: str | PathLike[str] | None = None
    pick: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if isinstance(self.runs, bool) or not isinstance(self.runs, int) or self.runs < 1:
            raise ArgumentError(f"runs must be a whole number of at least 1, not {self.runs!r}.")
        if self.times not in TIMES:
            raise ArgumentError(f"Unknown times {self.times!r}: choose one of {', '.join(TIMES)}.")


def tune_model(
    model: ModelSource,
    tolerance: float = 1e-2,
    *,
    metric: str = "rel-l2",
    samples: SamplesLike | None = None,
    count: int = 4,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    device: str = DEFAULT_DEVICE,
    times: str = "roofline",
    provider: Provider | None = None,
    runs: int = PRICING,
    state: str | PathLike[str] | None = None,
    pick: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[ModelProto, Tuned]:
    """Lower as much of a model as its accuracy allows.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is not changed.
        tolerance: the largest accepted error; see ``metric``.
        metric: how the error is measured, see :func:`~onnxamp._tuning.metric.make_metric`.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts; made up (``count`` of them,
            seeded, sizes of named dimensions from ``dims``) where None.
        device: whose speed the costs are of, as in ``_data/devices.toml``.
        times: "roofline", estimates for the device; or "measured", from ONNX Runtime's profile.
        provider: where converted models are judged: "cuda", as they are; "cpu", emulated. None for CUDA where there is
            a device.
        runs: mask runs that prices may take; candidates take up to 18 more.
        state: a file that keeps measurements: with it an interrupted tuning goes on where it was, and ``pick`` or
            another tolerance need few runs or none.
        pick: take this candidate instead of the one that would be chosen, whatever its error.
        progress: called with what is being done, how far it is, and how far it will go.
        options: as :func:`onnxamp.convert_model`, but for level and lists, which data replace.

    Returns:
        The converted model, and what the search found. Where no candidate holds the tolerance, nothing is lowered.

    Raises:
        RuntimeFailure: the model does not run, or misses the tolerance in float32 already.
        ArgumentError: an argument is wrong. ModelError: the model cannot be read.

    Example:
        >>> import onnxamp
        >>> model16, tuned = onnxamp.tune_model("models/classifier.onnx", 1e-2, count=1, provider="cpu")
        >>> tuned.error <= 1e-2
        True
    """
    search = Search(tolerance, metric, samples, count, seed, dims, device, times, provider, runs, state, pick, progress)
    return tune(Model.of(model), Options.of("auto", options), search)


def tune(model: Model, options: Options, search: Search) -> tuple[ModelProto, Tuned]:
    """:func:`tune_model` with arguments that are checked already."""
    proto, device, judge = model.embedded(), device_called(search.device), make_metric(search.metric, search.tolerance)
    model = model if proto is model.proto else Model(proto)
    place = place_for(search.provider)
    graph = prepare(model, options).graph
    prepared = graph.model
    samples = as_samples(search.samples, proto, count=search.count, seed=search.seed, dims=search.dims)
    space = find_space(graph, options, device)
    live = find_live(graph, samples)
    usual = replace(options, level=Level.O2)
    space = space.known(frozenset().union(*live), lambda: low_nodes(analyse(graph, usual)))
    memory = Memory("")
    if search.state is not None:
        units = (*space.units, *space.followers)
        words = [search.metric, options.low.name, *(f"{u.key} {u.op} {u.ports}" for u in units)]
        memory = recall(fingerprint(words, prepared, samples), Path(search.state))
    job = Job(model, prepared, space, samples, judge, memory, place)
    told = search.progress or (lambda *_: None)
    work = sum(unit.work.flops for unit in space.units)
    probe = Probe(prepared, space.ports(), options.low, samples, judge, threads=1 if work < _LITTLE else 0)
    subset = choose_samples(live, _SUBSET)
    random = any(node.key in op_facts().random for node in graph.nodes)
    noise = _noise(job, probe, subset) if random else None  # before anything takes time
    job.measure_locally(told)
    if noise is None and not judge.holds(memory.tally.worst):
        noise = _noise(job, probe, subset)
    timing = f"estimates for {device.name} from bytes and arithmetic, without launches"
    if search.times == "measured":
        job.space, timing = timed(job, device.name)
    hunt = Hunt(job.chooser(), probe, memory, judge, job.locals, subset, search.runs, told, job.whole())
    return _finish(job, hunt, noise, search.pick, device.name, timing)


def _noise(job: Job, probe: Probe, subset: Sequence[int]) -> float:
    """The error of the float32 model against itself, run again.

    Raises:
        RuntimeFailure: it misses the tolerance.
    """
    noise = job.memory.error((), subset, lambda: probe.error(frozenset(), subset))
    if not job.metric.holds(noise):
        raise RuntimeFailure(
            f"The float32 model misses the tolerance already: run twice on the same inputs it is off by {noise:.2g},"
            f" and {job.metric.tolerance:g} is wanted. It is not deterministic; no precision can cure that."
        )
    return noise


def _finish(
    job: Job, hunt: Hunt, noise: float | None, pick: int | None, device: str, times: str
) -> tuple[ModelProto, Tuned]:
    """Convert for real: the best candidate whose converted model holds the tolerance on all samples."""
    told, judge = hunt.told, job.metric
    tolerance = wanted = judge.amplitude(judge.tolerance)
    attempt = 0
    while True:
        attempt += 1
        prices = hunt.search(wanted)
        nothing = hunt.chooser.candidate(frozenset(), prices, judge.amplitude(noise or 0.0))
        front = [found for found in pareto([*hunt.found, nothing]) if found.low] + [nothing]
        order = [i for i, found in enumerate(front) if found.low and found.least <= wanted]
        last = attempt == _ATTEMPTS or not order or hunt.left <= 0
        if pick is not None:
            order, last = [_checked(pick, front)], True
        elif last:
            order.append(len(front) - 1)
        for number in order:
            kept = job.kept(front[number].low, prices)
            plan = job.plan(front[number], kept)
            told("verifying the converted model", len(job.judged) + 1, len(job.judged) + 1)
            error = job.error(front[number], plan)
            if judge.holds(error) or (last and number == order[-1]):
                return job.converted(plan), Tuned(
                    plan, judge.name, judge.tolerance, job.samples.description, len(job.samples), noise,
                    job.device_noise, error, job.place.called(job.low.name), hunt.probe.runs,
                    len(job.memory.recalled), len(job.judged), len(job.space.units),
                    tuple(unit.label for unit in job.space.units if not unit.seen),
                    tuple(_shown(judge, found) for found in front), number, tuple(kept), device, times,
                    judge.holds(error),
                )  # fmt: skip
        # What mask runs show of some samples must be lower by as much as the worst of all samples is too high.
        wanted = min(wanted, front[number].least) * max(_STEP, min(0.9, 0.9 * tolerance / judge.amplitude(error)))


def _shown(judge: Metric, found: Candidate) -> Candidate:
    """A candidate whose errors are no amplitudes any more."""
    error = None if found.error is None else judge.of_amplitude(found.error)
    return replace(found, predicted=judge.of_amplitude(found.predicted), error=error)


def _checked(pick: int, front: Sequence[Candidate]) -> int:
    if not 0 <= pick < len(front):
        raise ArgumentError(f"There is no candidate {pick}: there are {len(front)}, counted from 0.")
    return pick
