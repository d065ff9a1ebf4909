"""One model being tuned: its measurements, the times of its nodes, the plans of candidates, and the models converted by
them.

An engine that compiles a graph times its own kernels. A kernel with the name of a node, optionally with a suffix after
a slash ("Conv_0/WithoutBiases"), counts for that node: nodes that were fused into it cost nothing by themselves. A
kernel with another name replaces several nodes between its neighbors: its time is divided among those that have none,
by their estimates.
"""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._base.errors import RuntimeFailure
from onnxamp._convert.analysis import Analysis, solve
from onnxamp._convert.compensation import with_rounding
from onnxamp._convert.convert import rewritten
from onnxamp._convert.estimate import Estimate
from onnxamp._convert.plan import Plan, PlanRow, make_plan
from onnxamp._decide.precision import Prices
from onnxamp._decide.verdicts import reason_text
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._gradients.passes import Sensitivities
from onnxamp._graph.graph import Graph
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import Model
from onnxamp._model.saving import save_model
from onnxamp._numerics.speed.bench import BenchOptions, bench_models
from onnxamp._numerics.unseen.stress import Stress
from onnxamp._runtime.engines import Engine, SampleCache
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.values import check_inputs
from onnxamp._tuning.arrangement import product_weights
from onnxamp._tuning.choices.candidates import Aim, Frontier
from onnxamp._tuning.choices.solver import CandidateSolver
from onnxamp._tuning.choices.space import (
    UNSEEN,
    Fusion,
    SearchSpace,
    exactly,
    find_fusions,
)
from onnxamp._tuning.errors.expected import ExpectedErrors
from onnxamp._tuning.errors.foreseen import measured_sensitivities
from onnxamp._tuning.errors.lowered import Settled
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.results import CompensationEffect, KeptNode
from onnxamp._tuning.rounding import WeightRounder, rounding_seconds
from onnxamp._tuning.runs import (
    TuningState,
    converted_error,
    device_noise,
    profile_nodes,
    run_noise,
)

_IN_MEMORY: Final = 256 << 20
"""Bytes of weights up to which converted models are kept in memory."""

_NEGLIGIBLE: Final = 5e-4
"""Share of the squared tolerance below which an error is negligible."""
_CHEAPEST: Final = 0.1
"""Lower bound for the cost of a Cast over its estimate: engines fuse some at no cost, but not any number of them."""


@dataclass
class TuningJob:
    """The model as given and as prepared, its search space, and how candidates are measured."""

    prepared: Model
    space: SearchSpace
    run: Run
    metric: Metric
    state: TuningState
    engine: Engine
    """The engine of converted models."""
    folder: Path
    """The folder of converted models whose weights are too large for memory."""
    rounder: WeightRounder | None = None
    errors: dict[frozenset[str], float] = field(default_factory=dict)
    """Low-precision nodes of a candidate -> error of the converted model."""
    references: SampleCache = field(default_factory=SampleCache)
    is_eager: bool = False
    """Whether sensitivities are measured even if float32 is estimated to be the fastest."""
    stress: int = 0
    """Steps toward inputs that are hard for a result."""
    only: int | None = None
    """The number of the one sample that sensitivities are measured on; None for all."""
    told: tuple[str, ...] = ()
    """Warnings beside those of plans."""
    before: "TuningJob | None" = None
    """An earlier tuning on the same samples, whose sensitivities count where the graph is the same."""
    _lowering: tuple[frozenset[str], Analysis] | None = None
    """The last choice that was converted or planned, and its analysis."""

    @property
    def samples(self) -> Samples:
        """The samples that models run on."""
        return self.run.samples

    @property
    def low(self) -> Format:
        """The low-precision type."""
        return self.space.all_low.options.low

    @cached_property
    def expected(self) -> ExpectedErrors:
        """The errors that choices may be expected to have, once the sensitivities are measured."""
        _, rounded = with_rounding(self.space.all_low, self.rounder)
        share = 1.0
        if rounded is not None and rounded.before:
            # Prices are squared errors, of which compensated rounding leaves this share.
            share = (rounded.after / rounded.before) ** 2
        samples = self.sensitivities
        stressed = self.stressed if samples else {}
        errors = self._free.errors
        return replace(errors, samples=samples, weights=share, stressed=stressed)

    @cached_property
    def broken(self) -> dict[str, str]:
        """Nodes that go wrong on their own, with the reason."""
        return self.expected.broken

    @cached_property
    def pins(self) -> dict[int, str]:
        """Nodes that must stay in float32: the broken ones, and those that cannot be measured."""
        pins = dict(self.space.pins)
        for unit in self.space.tunable:
            if unit.key in self.broken:
                pins[unit.node] = self.broken[unit.key]
        return pins

    @cached_property
    def base(self) -> Analysis:
        """The analysis with these pins."""
        if not self.broken and UNSEEN not in self.space.pins.values():
            return self.space.all_low  # its pins are the same
        return solve(self.space.all_low.problem, prices=Prices(self.pins))

    @cached_property
    def origin(self) -> "TuningJob":
        """The tuning that measures the sensitivities: an earlier one of the same graph, or this one."""
        model = self.space.all_low.graph.model
        before = self.before
        if before is not None and before.space.all_low.graph.model == model:
            return before.origin
        return self

    @cached_property
    def sensitivities(self) -> Sequence[Sensitivities]:
        """The sensitivities that each sample shows.

        Raises:
            RuntimeFailure: the model does not run, or a sample ends the processes that run it.
        """
        # If no choice is faster than float32, whatever its error, there is nothing to measure for.
        if not self.space.tunable or not (self.is_eager or self.pays):
            return ()
        if self.origin is not self:
            return self.origin.sensitivities
        known = self.state.measured(self.samples)
        return measured_sensitivities(
            self.space.all_low, self.run, self.engine, known, self.only
        )

    @cached_property
    def stressed(self) -> Mapping[str, float]:
        """The values that leave the range on inputs that are made to be hard, with their largest magnitudes there."""
        options = self.space.all_low.options
        if not self.stress or not options.low.is_narrow:
            return {}
        if self.origin is not self:
            return self.origin.stressed
        stress = Stress(options.low, self.stress, options.input_ranges)
        exponents = options.rescaling.exponents if options.rescaling else {}
        return stress.overflowing(self.prepared, self.samples, exponents)

    @property
    def may_overflow(self) -> bool:
        """Whether a value exceeds the low-precision type, or may, because values in loops are not measured."""
        if self.space.all_low.graph.nodes_of(op_facts().loops):
            return True
        sizes = self.expected.largest.values()
        return max(sizes, default=0.0) > self.low.max_finite

    def converted(self, analysis: Analysis) -> Model:
        """Return the model of :func:`converted_model`, which is valid until the next call."""
        return converted_model(
            self.rounded(analysis),
            self.prepared.stock.size,
            self.folder / "converted.onnx",
            is_emulated=self.engine.emulates,
        )

    def rounded(self, analysis: Analysis) -> Analysis:
        """Return the analysis with its rounded weights, if the options ask for other rounding than to nearest."""
        return with_rounding(analysis, self.rounder)[0]

    def error(self, low: frozenset[str]) -> float:
        """Return the error of the model converted with these nodes in low precision, on all samples."""
        where = self.engine.name(self.low.name)

        def measure() -> float:
            return converted_error(
                self.prepared,
                self.converted(self.lowering(low)),
                self.run,
                self.metric,
                self.engine,
                references=self.references,
                kept=self.state.judged(low, where, self.samples),
            )

        if low not in self.errors:
            self.errors[low] = self.state.error(low, where, measure)
        return self.errors[low]

    def check_noise(self) -> float | None:
        """Return :attr:`noise` of a model that is random; None for others."""
        is_random = self.space.all_low.graph.nodes_of(op_facts().random)
        return self.noise if is_random else None

    @cached_property
    def noise(self) -> float:
        """The error of the float32 model against itself in a second run.

        Raises:
            RuntimeFailure: it misses the tolerance.
        """

        def measure() -> float:
            engine = self.engine.reference
            sample = self.samples[0]
            return run_noise(self.prepared, sample, self.metric, engine)

        noise = self.state.error((), "noise", measure)
        if not self.metric.holds(noise):
            raise RuntimeFailure(
                f"The float32 model is not deterministic: two runs on the same inputs differ by {noise:.2g}, more than"
                f" the tolerance of {self.metric.tolerance:g}. No choice of precision can fix that."
            )
        return noise

    @cached_property
    def device_noise(self) -> float | None:
        """The error that the device alone causes in the float32 model, on the first sample."""
        if self.engine.emulates:
            return None
        return device_noise(self.prepared, self.samples[0], self.metric, self.engine)

    def lowering(self, low: frozenset[str]) -> Analysis:
        """Return the analysis that lowers exactly these nodes."""
        if self._lowering is None or self._lowering[0] != low:
            prices = exactly(self.space, low, self.pins)
            self._lowering = low, solve(self.space.all_low.problem, prices=prices)
        return self._lowering[1]

    def plan(self, low: frozenset[str], kept: Sequence[KeptNode] = ()) -> Plan:
        """Return the plan that lowers exactly these nodes, with the measured reasons of the others."""
        analysis = self.lowering(low)
        plan = make_plan(analysis)
        rows = list[PlanRow]()
        reasons = {
            row.node: ": ".join(filter(None, (row.why, row.detail))) for row in kept
        }
        why = {unit.node: reasons.get(unit.label) for unit in self.space.tunable}
        for row, variable in zip(plan.rows, analysis.ports.variables, strict=True):
            text = None if row.low else why.get(variable.node)
            rows.append(replace(row, reason="measured", detail=text) if text else row)
        return replace(plan, rows=tuple(rows))

    def kept(self, low: frozenset[str]) -> list[KeptNode]:
        """Return nodes that stay in float32 because of a measurement, with the reason."""
        nodes = self.space.all_low.graph.nodes
        kept = []
        for unit, cost in zip(self.space.tunable, self.expected.prices, strict=True):
            share = cost / self.metric.amplitude(self.metric.tolerance) ** 2
            if unit.key in low:
                continue
            if unit.key in self.broken:
                why = "breaks on its own", self.broken[unit.key]
            elif (tie := _tie(self.base, unit.node)) is not None:
                why = "goes with others", tie
            elif share < _NEGLIGIBLE:
                why = "not worth its Casts", ""
            else:
                text = f"it would use {100 * share:.1f} % of the squared error that is allowed"
                why = "costs accuracy", text
            kept.append(KeptNode(unit.label, unit.op, *why))
        for index, text in self.space.pins.items():
            kind = "never run" if text == UNSEEN else "not measured"
            kept.append(KeptNode(nodes[index].label, nodes[index].key, kind, text))
        return kept

    def compensation(self) -> CompensationEffect:
        """Return the largest benefit of compensated rounding: at most the whole cost of the nodes that read weights.

        Others that cost more than the tolerance stay in float32 in any case, so they do not count.
        """
        limit = self.metric.amplitude(self.metric.tolerance) ** 2
        weights, _ = product_weights(self.space.all_low)
        readers = set[int]()
        for weight in weights:
            readers.update(reader.node.index for reader in weight.readers)
        total = of_readers = 0.0
        for unit, cost in zip(self.space.tunable, self.expected.prices, strict=True):
            if unit.node in readers:
                of_readers += cost
            if unit.node in readers or cost <= limit:
                total += cost
        share = of_readers / total if total else 0.0
        return CompensationEffect(share, rounding_seconds(weights))

    @cached_property
    def _free(self) -> CandidateSolver:
        """The solver of the cut with errors at no cost."""
        space = self.space
        errors = ExpectedErrors(
            graph=space.all_low.graph,
            low=self.low,
            computing=space.tunable,
            exact=space.followers,
            samples=(),
            settled=Settled.of(space.all_low),
            is_joint=self.metric.is_joint,
        )
        return CandidateSolver(space, space.all_low, errors, space.pins)

    @cached_property
    def pays(self) -> bool:
        """Whether any choice is estimated to be faster than float32, whatever its error."""
        nothing = self._free.candidate(frozenset())
        frontier = Frontier(self._free, Aim(nothing, allow_slower=False))
        return any(map(frontier.aim.admits, frontier.unpriced))

    def solver(self) -> CandidateSolver:
        """Return the solver of the cut for error prices."""
        if self.base is self.space.all_low:
            return self._free.priced(self.expected, self.space)
        return CandidateSolver(self.space, self.base, self.expected, self.pins)


def converted_model(
    analysis: Analysis, size: int, path: Path, *, is_emulated: bool = False
) -> Model:
    """Return the model, converted according to an analysis.

    If its weights, of ``size`` bytes, are too large for memory, the model is written to ``path``. The weights of an
    emulated model are converted when they are read instead.
    """
    graph = analysis.graph
    low = analysis.options.low
    if graph.folder is None or size <= _IN_MEMORY:
        return Model(Model(rewritten(analysis), graph.folder).embedded())
    converter = WeightConverter(low, graph.folder, deferred=True)
    result = rewritten(analysis, converter)
    if is_emulated:
        converter.leave(result)
        return Model(result, graph.folder)
    save_model(result, path, converter, external=True)
    return Model.read(path)


def _tie(base: Analysis, node: int) -> str | None:
    """Return the pin to float32 that a node shares with others."""
    roots = map(base.ports.root, base.ports.of(node))
    for pin in map(base.pins.verdicts.get, roots):
        if pin is not None and not pin.low:
            return reason_text(pin.reason.value, pin.detail)
    return None


def apportioned(
    graph: Graph, seconds: Mapping[str, float], estimate: Estimate
) -> dict[str, float]:
    """Return the seconds of every node by key. ``seconds`` are those of kernels, in the order in which they ran.

    Complexity: linear in nodes and kernels, except for kernels without a node, each of which visits the nodes between
    its neighbors.
    """
    at = {node.first_output: place for place, node in enumerate(graph.order)}
    seconds = _of_nodes(seconds, at)
    times = dict.fromkeys(at, 0.0)
    times |= {key: time for key, time in seconds.items() if key in at}
    kernels = list(seconds)
    # The place of the next kernel that is named after a node, for each kernel.
    after = [len(at)] * (len(kernels) + 1)
    for number in reversed(range(len(kernels))):
        after[number] = at.get(kernels[number], after[number + 1])
    before = -1
    for number, kernel in enumerate(kernels):
        if kernel in at:
            before = at[kernel]
            continue
        nodes = graph.order[before + 1 : after[number]]
        untimed = [node for node in nodes if node.first_output not in seconds]
        free = [node for node in untimed if estimate.launches(node)]
        works = [estimate.work(node) for node in free]
        shares = [work.time(estimate.device, low=None) or 1e-9 for work in works]
        for node, share in zip(free, shares, strict=True):
            times[node.first_output] += seconds[kernel] * share / sum(shares)
    return times


def _of_nodes(seconds: Mapping[str, float], known: Container[str]) -> dict[str, float]:
    """Return the times by name of node, for kernels with a suffix."""
    times = defaultdict[str, float](float)
    for name, time in seconds.items():
        node = name.rpartition("/")[0]
        is_part = name not in known and node in known
        times[node if is_part else name] += time
    return dict(times)


def measure_times(job: TuningJob, device: str) -> str:
    """Replace estimated times by those of the first sample, and return a description of them.

    On CUDA and on plugin providers, both the float32 model and the lowered one are profiled, and the Casts of the
    latter give the cost of a Cast. A CPU computes low precision in float32, so the share of the measured time that low
    precision saves is estimated for the device. For an engine that does not report the times of its kernels, the
    estimates stay.

    Raises:
        RuntimeFailure: the model does not run, or its kernels cannot be timed.
    """
    provider = job.engine.provider
    space = job.space
    where = job.engine.name(job.low.name)
    sample = check_inputs(job.prepared.proto, job.samples[0])
    high = job.state.node_times(
        f"{where} float32", lambda: profile_nodes(job.prepared, sample, provider)
    )
    if job.engine.emulates:
        job.space = space.retimed({key: (time, None) for key, time in high.items()})
        return f"measured in float32 on the CPU, node by node; the savings of low precision are estimated for {device}"
    if not high:
        return f"estimates for {device}, because {where} does not report kernel times"
    lowered = job.converted(space.all_low)
    low = job.state.node_times(
        f"{where} low", lambda: profile_nodes(lowered, sample, provider)
    )
    if not job.engine.is_reference:
        high = apportioned(space.all_low.graph, high, space.estimate)
    graph = Graph.of(lowered.proto)
    # Casts that the float32 model lacks were inserted by the conversion.
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
"""Seconds for which each whole model is timed."""


def whole_times(job: TuningJob, *choices: frozenset[str]) -> Sequence[float] | None:
    """Return the seconds of the float32 model and of models with these choices, whole, in turns, on the first sample.

    Return None if one of its inputs is empty.

    Raises:
        RuntimeFailure: a model does not run.
    """
    feeds = check_inputs(job.prepared.proto, job.samples[0])
    if any(feed is None for feed in feeds.values()):
        return None
    where = job.engine.name(job.low.name)

    def model(low: frozenset[str], number: int) -> ModelProto | Path:
        path = job.folder / f"timed{number}.onnx"
        size = job.prepared.stock.size
        result = converted_model(job.lowering(low), size, path)
        return result.path or result.embedded()

    def run() -> list[float]:
        report = bench_models(
            job.prepared.path or job.prepared.embedded(),
            *(model(low, number) for number, low in enumerate(choices)),
            provider=job.engine.provider,
            feeds=feeds,
            options=BenchOptions(seconds=_SECONDS, profile=False),
        )
        return [timing.latency.median for timing in report.timings]

    return job.state.times_of(choices, where, run)
