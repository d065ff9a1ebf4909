"""Times of nodes on the engine that runs the converted models, and a last look at the clock before one is written.

An engine that compiles a graph times its own kernels. One that has the name of a node, perhaps with a suffix behind a
slash ("Conv_0/WithoutBiases"), counts for that node: what was fused into it costs nothing by itself. One with a name of
its own stands for nodes that lie between its neighbours, as several became one: its time is apportioned among those
that have none, by their estimates.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Final

from onnxamp._bench.bench import BenchOptions, bench_models
from onnxamp._convert.analysis import analyse
from onnxamp._convert.estimate import Estimate, low_nodes
from onnxamp._errors import RuntimeFailure
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._options.levels import Level
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.session import is_plugin
from onnxamp._runtime.switch import node_key
from onnxamp._tuning.fusions import find_fusions
from onnxamp._tuning.job import Job, converted_model
from onnxamp._tuning.results import Candidate, Tuned
from onnxamp._tuning.runs import profile_nodes
from onnxamp._tuning.search import CandidateSearch

_CHEAPEST: Final = 0.1
"""The least that a Cast counts, over its estimate: one that is fused costs nothing, but many are not worth it."""
_CLOSE: Final = 1.02
"""Models whose times differ by less are equally fast."""
_SECONDS: Final = 0.5


def apportioned(graph: Graph, seconds: Mapping[str, float], estimate: Estimate) -> dict[str, float]:
    """Seconds of every node by its key, from those of kernels in the order in which they ran.

    Complexity: linear in nodes and kernels, but for kernels without a node, which look at the nodes between their
    neighbours.
    """
    at = {node_key(graph.nodes[index]): place for place, index in enumerate(graph.order)}
    seconds = _of_nodes(seconds, at)
    found = dict.fromkeys(at, 0.0) | {key: time for key, time in seconds.items() if key in at}
    kernels = list(seconds)
    after = [len(at)] * (len(kernels) + 1)
    for number in reversed(range(len(kernels))):
        after[number] = at.get(kernels[number], after[number + 1])
    before = -1
    for number, kernel in enumerate(kernels):
        if kernel in at:
            before = at[kernel]
            continue
        nodes = [graph.nodes[graph.order[place]] for place in range(before + 1, after[number])]
        free = [node for node in nodes if node_key(node) not in seconds and estimate.launches(node)]
        shares = [estimate.work(node).time(estimate.device, low=False) or 1e-9 for node in free]
        for node, share in zip(free, shares, strict=True):
            found[node_key(node)] += seconds[kernel] * share / sum(shares)
    return found


def _of_nodes(seconds: Mapping[str, float], known: Container[str]) -> dict[str, float]:
    """The times under the names of nodes, where kernels have one with a suffix."""
    found: dict[str, float] = {}
    for name, time in seconds.items():
        node = name.rpartition("/")[0]
        name = node if name not in known and node in known else name  # noqa: PLW2901
        found[name] = found.get(name, 0.0) + time
    return found


def measure_times(job: Job, device: str) -> str:
    """Replace estimated times by those of the first sample; returns a description of them.

    On CUDA and on plugin providers both the float32 model and the lowered one are profiled, and the Casts of the latter
    say what a Cast costs. A CPU computes low precision in float32: there the estimates for the device say how much of
    the measured time low precision saves.

    Raises:
        RuntimeFailure: the model does not run, or its kernels cannot be timed.
    """
    provider, space = job.backend.provider, job.space
    sample = check_inputs(job.prepared.proto, job.samples[0])
    high = profile_nodes(job.prepared, sample, provider)
    if provider == "cpu":
        job.space = space.retimed({key: (time, None) for key, time in high.items()})
        return f"measured in float32 on the CPU, node by node; what low precision saves is estimated for {device}"
    lowered = job.made(space.all_low)
    low = profile_nodes(lowered, sample, provider)
    if is_plugin(provider):
        high = apportioned(space.all_low.graph, high, space.estimate)
    graph = Graph.of(lowered.proto)
    own = {node_key(node) for node in space.all_low.graph.nodes}
    inserted = {node_key(node) for node in graph.nodes if node.key == "Cast"} - own
    casts = sum(low.get(key, 0.0) for key in inserted) * 1e6
    if is_plugin(provider):
        estimate = replace(space.estimate, graph=graph, shapes=graph.shapes)
        low = apportioned(graph, low, estimate)
    estimated = sum(map(space.estimate.cast_time, space.estimate.casts(space.all_low.ports, space.all_low.decision)))
    price = max(casts / estimated, _CHEAPEST) if estimated else None
    fusions = find_fusions(space.all_low.graph, space.estimate, high, low) if is_plugin(provider) else ()
    job.space = space.retimed({key: (time, low.get(key)) for key, time in high.items()}, price, fusions)
    return f"measured on {job.backend.name(job.low.name)}, kernel by kernel, Casts included"


def confirmed(job: Job, search: CandidateSearch, tuned: Tuned, *, allow_slower: bool) -> Tuned:
    """The fastest of what was chosen, of level O2 if it is within the tolerance, and of float32.

    They are timed whole, in turns, on the first sample. What cannot be timed like that stays as it is.
    """
    feeds = check_inputs(job.prepared.proto, job.samples[0])
    chosen, nothing = tuned.candidates[tuned.chosen], tuned.candidates[-1]
    if any(feed is None for feed in feeds.values()):
        return tuned
    usual = low_nodes(analyse(job.space.all_low.graph, replace(job.space.all_low.options, level=Level.O2)))
    units = (*job.space.tunable, *job.space.followers)
    low = frozenset(unit.key for unit in units if unit.node in usual and unit.node not in job.pins)
    own = "result" if chosen.low else "float32"
    rivals = {"float32": (nothing, tuned.noise or 0.0, job.prepared)}
    if chosen.low:
        rivals[own] = _rival(job, tuned, chosen, own)
    if low not in (chosen.low, frozenset()):
        candidate = search.solver.candidate(low, [0.0] * len(job.space.tunable), None)
        rivals["level O2"] = _rival(job, tuned, candidate, "o2")
    if len(rivals) == 1:
        return tuned
    models = (model.path or model.embedded() for _, _, model in rivals.values())
    how = BenchOptions(seconds=_SECONDS, profile=False)
    try:
        report = bench_models(*models, provider=job.backend.provider, feeds=feeds, options=how)
    except RuntimeFailure:
        return tuned
    times = {name: timing.latency.median for name, timing in zip(rivals, report.timings, strict=True)}
    tuned = replace(tuned, timed=tuple(times.items()))
    able = [name for name, (_, error, _) in rivals.items() if job.metric.holds(error)]
    able = [name for name in able if name == own or not (name == "float32" and allow_slower)]
    best = min(able, key=lambda name: times[name] / (_CLOSE if name == own else 1), default=own)
    if best == own:
        return tuned
    candidate, error, _ = rivals[best]
    candidate = candidate if best == "float32" else replace(candidate, predicted=error, error=error)
    others = tuned.candidates if best == "float32" else (candidate, *tuned.candidates)
    plan = job.plan(candidate, tuned.kept)
    return replace(tuned, plan=plan, candidates=others, chosen=others.index(candidate), error=error)


def _rival(job: Job, tuned: Tuned, candidate: Candidate, name: str) -> tuple[Candidate, float, Model]:
    """A candidate, its error on all samples, and its model, in a place of its own."""
    plan = job.plan(candidate, tuned.kept)
    error = job.error(candidate, plan)
    analysis = job.rounded(job.planned(plan))
    return candidate, error, converted_model(analysis, job.prepared.stock.size, job.folder / f"{name}.onnx")
