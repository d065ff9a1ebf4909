"""Times of nodes on the engine that runs the converted models.

An engine that compiles a graph times its own kernels. A kernel with the name of a node, optionally with a suffix after
a slash ("Conv_0/WithoutBiases"), counts for that node: nodes that were fused into it cost nothing by themselves. A
kernel with another name replaces several nodes between its neighbors: its time is divided among those that have none,
by their estimates.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._bench.bench import BenchOptions, bench_models
from onnxamp._convert.estimate import Estimate
from onnxamp._graph.graph import Graph
from onnxamp._runtime.values import check_inputs
from onnxamp._tuning.job import Job, converted_model
from onnxamp._tuning.runs import profile_nodes
from onnxamp._tuning.space import Fusion, find_fusions

_CHEAPEST: Final = 0.1
"""Lower bound for the cost of a Cast over its estimate: a fused one costs nothing, but many are not worth it."""


def apportioned(
    graph: Graph, seconds: Mapping[str, float], estimate: Estimate
) -> dict[str, float]:
    """Seconds of every node by its key, from those of kernels in the order in which they ran.

    Complexity: linear in nodes and kernels, but for kernels without a node, which look at the nodes between their
    neighbors.
    """
    at = {node.first_output: place for place, node in enumerate(graph.order)}
    seconds = _of_nodes(seconds, at)
    found = dict.fromkeys(at, 0.0) | {
        key: time for key, time in seconds.items() if key in at
    }
    kernels = list(seconds)
    after = [len(at)] * (len(kernels) + 1)
    for number in reversed(range(len(kernels))):
        after[number] = at.get(kernels[number], after[number + 1])
    before = -1
    for number, kernel in enumerate(kernels):
        if kernel in at:
            before = at[kernel]
            continue
        nodes = graph.order[before + 1 : after[number]]
        free = [
            node
            for node in nodes
            if node.first_output not in seconds and estimate.launches(node)
        ]
        shares = [
            estimate.work(node).time(estimate.device, low=None) or 1e-9 for node in free
        ]
        for node, share in zip(free, shares, strict=True):
            found[node.first_output] += seconds[kernel] * share / sum(shares)
    return found


def _of_nodes(seconds: Mapping[str, float], known: Container[str]) -> dict[str, float]:
    """Return the times by name of node, for kernels with a suffix."""
    found: dict[str, float] = {}
    for name, time in seconds.items():
        node = name.rpartition("/")[0]
        name = node if name not in known and node in known else name  # noqa: PLW2901
        found[name] = found.get(name, 0.0) + time
    return found


def measure_times(job: Job, device: str) -> str:
    """Replace estimated times by those of the first sample; returns a description of them.

    On CUDA and on plugin providers, both the float32 model and the lowered one are profiled, and the Casts of the
    latter give the cost of a Cast. A CPU computes low precision in float32, so the share of the measured time that low
    precision saves is estimated for the device. For an engine that does not report the times of its kernels, the
    estimates stay.

    Raises:
        RuntimeFailure: the model does not run, or its kernels cannot be timed.
    """
    provider, space, where = (
        job.engine.provider,
        job.space,
        job.engine.name(job.low.name),
    )
    sample = check_inputs(job.prepared.proto, job.samples[0])
    high = job.state.node_times(
        f"{where} float32", lambda: profile_nodes(job.prepared, sample, provider)
    )
    if job.engine.emulates:
        job.space = space.retimed({key: (time, None) for key, time in high.items()})
        return f"measured in float32 on the CPU, node by node; what low precision saves is estimated for {device}"
    if not high:
        return f"estimates for {device}, because {where} does not report kernel times"
    lowered = job.made(space.all_low)
    low = job.state.node_times(
        f"{where} low", lambda: profile_nodes(lowered, sample, provider)
    )
    if not job.engine.is_reference:
        high = apportioned(space.all_low.graph, high, space.estimate)
    graph = Graph.of(lowered.proto)
    own = {node.first_output for node in space.all_low.graph.nodes}
    inserted = {node.first_output for node in graph.nodes if node.key == "Cast"} - own
    casts = sum(low.get(key, 0.0) for key in inserted) * 1e6
    if not job.engine.is_reference:
        estimate = replace(space.estimate, graph=graph, shapes=graph.shapes)
        low = apportioned(graph, low, estimate)
    cast = space.estimate.casts(space.all_low.ports, space.all_low.decision)
    estimated = sum(map(space.estimate.cast_time, cast))
    price = max(casts / estimated, _CHEAPEST) if estimated else None
    fusions: Sequence[Fusion] = ()
    if not job.engine.is_reference:
        fusions = find_fusions(space.all_low.graph, space.estimate, high, low)
    seconds = {key: (time, low.get(key)) for key, time in high.items()}
    job.space = space.retimed(seconds, price, fusions)
    return f"measured on {where}, kernel by kernel, Casts included"


_SECONDS: Final = 0.5


def whole_times(job: Job, *choices: frozenset[str]) -> Sequence[float] | None:
    """Seconds of the float32 model and of models with these choices, whole and in turns, on the first sample.

    None if one of its inputs is empty.

    Raises:
        RuntimeFailure: a model does not run.
    """
    feeds = check_inputs(job.prepared.proto, job.samples[0])
    if any(feed is None for feed in feeds.values()):
        return None
    where = job.engine.name(job.low.name)

    def model(low: frozenset[str], number: int) -> ModelProto | Path:
        made = converted_model(
            job.lowering(low),
            job.prepared.stock.size,
            job.folder / f"timed{number}.onnx",
        )
        return made.path or made.embedded()

    def run(choices: Sequence[frozenset[str]]) -> Sequence[float]:
        models = [
            job.prepared.path or job.prepared.embedded(),
            *(model(low, n) for n, low in enumerate(choices)),
        ]
        how = BenchOptions(seconds=_SECONDS, profile=False)
        report = bench_models(
            *models, provider=job.engine.provider, feeds=feeds, options=how
        )
        return [timing.latency.median for timing in report.timings]

    return job.state.times_of(choices, where, run)
