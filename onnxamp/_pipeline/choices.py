"""Choices for a model of a pipeline: a level, a low type and exponents, with estimated time and bytes."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from onnx import ModelProto, ValueInfoProto

from onnxamp._convert.analysis import Analysis, Estimate, low_nodes, shapes_at, time_of
from onnxamp._convert.convert import analyse_safely
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._convert.upgrades import Proof
from onnxamp._dtypes import low_type
from onnxamp._errors import ArgumentError
from onnxamp._graph.types import declared_type
from onnxamp._model.model import Model
from onnxamp._numerics.ranges import with_ranges
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._pipeline.manifest import Member
from onnxamp._runtime.engines import Outputs
from onnxamp._runtime.run import Run
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.session import Provider
from onnxamp._runtime.values import Feed, check_inputs, shapes_of
from onnxamp._target import Device
from onnxamp._tuning.results import is_slower

SAMPLES: Final = 4
"""The minimum number of calls to keep of each model, if there are that many; at most twice as many are kept."""

_KINDS: Final = 8
"""The number of combinations of input shapes for which times are estimated."""

Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The shapes of a call's arrays, by input."""


class Entry(NamedTuple):
    """An input or an output, as ONNX Runtime describes it."""

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(slots=True)
class Calls:
    """The calls of a model by a function: their number and shapes, and some of the feeds, spread over all calls."""

    count: int = 0
    shapes: Counter[Shapes] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    stride: int = 1
    """Calls whose number is a multiple of this are kept."""

    def note(self, feeds: Mapping[str, Feed]) -> None:
        """Record a call. Complexity: linear in the bytes of calls that are kept."""
        self.shapes[tuple(sorted(shapes_of(feeds).items()))] += 1
        if self.count % self.stride == 0:
            self.samples.append({name: _copied(feed) for name, feed in feeds.items()})
        if len(self.samples) > 2 * SAMPLES:
            self.samples = self.samples[::2]
            self.stride = 2 * self.stride
        self.count += 1

    def kinds(self) -> list[tuple[Shapes, float]]:
        """Return representative shapes, with the number of calls that have similar ones."""
        found = sorted(self.shapes.items())
        step = -(-len(found) // _KINDS) or 1
        groups = [found[start : start + step] for start in range(0, len(found), step)]
        return [
            (group[len(group) // 2][0], float(sum(count for _, count in group)))
            for group in groups
        ]


def _copied(feed: Feed) -> Any:
    """Return a copy of a feed, which does not change when the caller reuses its arrays."""
    if isinstance(feed, list):
        return [_copied(item) for item in feed]
    return feed.copy() if isinstance(feed, np.ndarray) else feed


@dataclass(slots=True)
class PipelineModel:
    """A model of a pipeline, for its function. It accepts the same arguments as ``onnxruntime.InferenceSession``."""

    name: str
    proto: ModelProto
    """The type and the shape that feeds must match."""
    runs: Callable[[Mapping[str, Feed]], Outputs]
    calls: Calls | None = None

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: Any = None,
    ) -> list[Any]:
        """Return the outputs with these names (None or empty: all) for arrays by input; run options are ignored.

        Raises:
            ArgumentError: the inputs do not fit the model, or it has no such output. RuntimeFailure: it does not run.
        """
        del run_options
        known = [entry.name for entry in self.proto.graph.output]
        names = list(output_names or known)
        if unknown := [name for name in names if name not in known]:
            raise ArgumentError(
                f"The model {self.name!r} has no output {unknown[0]!r}; it has {', '.join(known)}."
            )
        try:
            feeds = check_inputs(self.proto, input_feed)
        except ArgumentError as error:
            raise ArgumentError(
                f"The model {self.name!r} is called with unexpected inputs. {error}"
            ) from None
        if self.calls is not None:
            self.calls.note(feeds)
        outputs = self.runs(feeds)
        return [outputs[name] for name in names]

    def get_inputs(self) -> list[Entry]:
        """Return name, type and shape of each input that must be fed."""
        weights = {tensor.name for tensor in self.proto.graph.initializer}
        return [
            _entry(item) for item in self.proto.graph.input if item.name not in weights
        ]

    def get_outputs(self) -> list[Entry]:
        """Return name, type and shape of each output."""
        return list(map(_entry, self.proto.graph.output))


def _entry(item: ValueInfoProto) -> Entry:
    dims = item.type.tensor_type.shape.dim
    shape: list[int | str | None] = [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in dims
    ]
    return Entry(item.name, declared_type(item.type) or "", shape)


_ORDER: Final = (Level.O2, Level.O3, Level.O1)
"""Levels in order of preference: if several make the same decisions, the first name is used."""

_MASKS: Final = 1e30
"""The magnitude from which values count as masks; a type with this range needs no exponents."""


class Choice(NamedTuple):
    """A model in some precision.

    ``time`` is the estimated time in microseconds per run of the pipeline; ``weights`` are in bytes. For level "auto",
    ``tolerance`` is the tolerance for the model's own outputs, and ``own_error`` is their error.
    """

    plan: Plan
    time: float
    weights: int
    nodes: int
    """The number of nodes in low precision, wholly or in part."""
    tolerance: float | None = None
    own_error: float | None = None

    @property
    def exponents(self) -> int:
        """The number of values that are stored with an exponent."""
        found = self.plan.options.rescaling
        return len(found.scaled) if found is not None else 0

    @property
    def is_float32(self) -> bool:
        """Whether nothing is low."""
        return self.plan.options.level == Level.O0

    @property
    def label(self) -> str:
        """The name in reports: "O2 float16", "auto bfloat16, rescaled"."""
        if self.is_float32:
            return "float32"
        return f"{self.plan.level} {self.plan.dtype}{', rescaled' if self.exponents else ''}"

    @property
    def key(self) -> str:
        """The key in a state file."""
        low = "".join("1" if row.low else "0" for row in self.plan.rows)
        return f"{self.label} {self.plan.opset} {written(self.plan.options)} {low}"


def written(options: Options) -> str:
    """Return options as text, which is the same in every process."""
    return json.dumps(options.as_json(), sort_keys=True)


class Clock(NamedTuple):
    """Estimates the times of conversions of a model, for the shapes that the pipeline feeds to it."""

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
        """Return an analyzed conversion, with its plan and its cost."""
        times = 0.0
        weights = 0
        graph = analysis.graph
        for sizes, count in self.calls.kinds():
            shapes = shapes_at(graph, dict(sizes))
            estimate = Estimate(graph, self.device, shapes, analysis.options.low)
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


def choices_of(
    member: Member,
    samples: Samples,
    clock: Clock,
    provider: Provider,
    proof: Proof,
    *,
    allow_slower: bool,
) -> tuple[Choice, list[Choice]]:
    """Return the float32 choice of a model and its other choices, fastest first, without level "auto".

    Choices that are slower than float32 are left out unless they are allowed.
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
    able = [
        one for one in found.values() if allow_slower or not is_slower(one, float32)
    ]
    return float32, sorted(able, key=rank)


def rank(choice: Choice) -> tuple[float, int, bool, int]:
    """Return the sort key of a choice: by time, then by bytes, then float16 first, then no exponents first."""
    return (
        choice.time,
        choice.weights,
        choice.plan.dtype != "float16",
        choice.exponents,
    )


def _asked(
    member: Member, model: Model, samples: Samples, provider: Provider
) -> Iterator[Options]:
    """Yield the options to try: each level in each type, and with exponents if values exceed the type's range."""
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
