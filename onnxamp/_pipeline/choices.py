"""What a model of a pipeline can become: a level, a low type, and exponents; with estimated time and bytes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from onnxamp._convert.analysis import Analysis
from onnxamp._convert.deciding import analyse_safely
from onnxamp._convert.estimate import Estimate, low_nodes, shapes_at, time_of
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._convert.upgrades import Proof
from onnxamp._dtypes import Format, low_type
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._numerics.ranges import with_ranges
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._pipeline.manifest import Member
from onnxamp._pipeline.models import Calls
from onnxamp._runtime.run import Run
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.session import Provider
from onnxamp._target.roofline import Device
from onnxamp._tuning.worth import is_slower

_ORDER: Final = (Level.O2, Level.O3, Level.O1)
"""Levels that decide alike go by the first of these names."""

_MASKS: Final = 1e30
"""Where masks begin; a type that goes so far needs no exponents."""


@dataclass(frozen=True)
class Choice:
    """A model in some precision.

    ``time`` is in microseconds per run of the pipeline, estimated; ``weights`` are bytes. ``tolerance`` is that of a
    choice of level "auto", on the model's own outputs, and ``own_error`` its error there.
    """

    plan: Plan = field(repr=False)
    time: float
    weights: int
    nodes: int
    """Nodes in low precision, wholly or in part."""
    tolerance: float | None = None
    own_error: float | None = None

    @property
    def exponents(self) -> int:
        """Values that are stored with an exponent."""
        found = self.plan.options.rescaling
        return len(found.scaled) if found is not None else 0

    @property
    def is_float32(self) -> bool:
        """Whether nothing is low."""
        return self.plan.options.level == Level.O0

    @property
    def label(self) -> str:
        """How reports call it: "O2 float16", "auto bfloat16, rescaled"."""
        if self.is_float32:
            return "float32"
        return f"{self.plan.level} {self.plan.dtype}{', rescaled' if self.exponents else ''}"

    @property
    def key(self) -> str:
        """What it is in a state file."""
        low = "".join("1" if row.low else "0" for row in self.plan.rows)
        return f"{self.label} {self.plan.opset} {written(self.plan.options)} {low}"


def written(options: Options) -> str:
    """Options as text, the same in every process."""
    return json.dumps(options.as_json(), sort_keys=True)


@dataclass(frozen=True)
class Clock:
    """Estimates times of a model's conversions, for the shapes that the pipeline feeds to it."""

    calls: Calls
    device: Device

    def choice(
        self,
        analysis: Analysis,
        *,
        tolerance: float | None = None,
        error: float | None = None,
        plan: Plan | None = None,
    ) -> Choice:
        """An analysed conversion, with its plan and what it costs."""
        times, weights = 0.0, 0
        for estimate, count in self._estimates(analysis.graph, analysis.options.low):
            times += count * time_of(analysis, estimate)
            weights = estimate.weight_bytes(analysis.ports, analysis.decision)
        return Choice(
            plan=plan or make_plan(analysis),
            time=times,
            weights=weights,
            nodes=len(low_nodes(analysis)),
            tolerance=tolerance,
            own_error=error,
        )

    def _estimates(self, graph: Graph, low: Format) -> Iterator[tuple[Estimate, float]]:
        for shapes, count in self.calls.kinds():
            yield Estimate(graph, self.device, shapes_at(graph, dict(shapes)), low), count


def recorded(calls: Calls, name: str) -> Samples:
    """The inputs that a pipeline feeds to a model, as samples."""
    readers: list[Callable[[], Sample]] = [partial(dict, sample) for sample in calls.samples]
    return Samples(f"{len(readers)} of {calls.count} calls of {name} in the pipeline", readers)


def choices_of(
    member: Member,
    samples: Samples,
    clock: Clock,
    provider: Provider,
    proof: Proof,
    *,
    allow_slower: bool,
) -> tuple[Choice, list[Choice]]:
    """A model in float32, and what it can be otherwise, fastest first; level "auto" is not among these.

    What is slower than float32 is left out unless it is allowed.
    """
    model = member.model
    float32 = clock.choice(analyse_safely(model, Options(Level.O0))[1])
    found: dict[tuple[object, ...], Choice] = {}
    for options in _asked(member, model, samples, provider):
        choice = clock.choice(analyse_safely(model, options, proof=proof)[1])
        decided = (
            choice.plan.dtype,
            choice.plan.opset,
            choice.exponents,
            tuple(choice.plan.decisions().items()),
        )
        if choice.nodes:
            found.setdefault(decided, choice)
    able = [one for one in found.values() if allow_slower or not is_slower(one, float32)]
    return float32, sorted(able, key=rank)


def rank(choice: Choice) -> tuple[float, int, bool, int]:
    """Orders choices: the fastest first, then the one with the fewest bytes, float16 and no exponents."""
    return choice.time, choice.weights, choice.plan.dtype != "float16", choice.exponents


def _asked(member: Member, model: Model, samples: Samples, provider: Provider) -> Iterator[Options]:
    """The options to try: each level in each type, and with exponents where values leave the type's range."""
    levels = [level for level in _ORDER if level in member.levels]
    for dtype in member.dtypes:
        yield from (member.asked(level, dtype) for level in levels)
        rescaled = [level for level in levels if level != Level.O1]
        if not rescaled or low_type(dtype).max_finite > _MASKS:
            continue
        ranged = with_ranges(
            model,
            member.asked(Level.O2, dtype, rescale=True),
            Run(inputs=samples, provider=provider),
        )
        if ranged.rescaling is not None and ranged.rescaling.scaled:
            yield from (replace(ranged, level=level) for level in rescaled)
