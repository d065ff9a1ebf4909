"""The runs of a tuning, of converted models and profiles, and the part of the state file that stores their results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import inf, isfinite
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.executor import Memory
from onnxamp._base.records import record
from onnxamp._base.state import Facts, Part, as_data, fingerprint
from onnxamp._gradients.passes import Sensitivities
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import declared_type
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._numerics.user_functions import imported, source_print
from onnxamp._options.options import Options
from onnxamp._runtime.engines import Engine, SampleCache, Session, engine_on
from onnxamp._runtime.fingerprints import SentModel, model_print, samples_print
from onnxamp._runtime.inputs.samples import Sample, Samples
from onnxamp._runtime.loop import (
    KeptSamples,
    Opened,
    Probe,
    in_groups,
    observe_all,
    remembered,
)
from onnxamp._runtime.piecewise.branches import settle
from onnxamp._runtime.profile import node_times
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.session import Provider
from onnxamp._runtime.sessions.values import as_typed, check_inputs
from onnxamp._runtime.sessions.versions import versions
from onnxamp._tuning.choices.space import SearchSpace
from onnxamp._tuning.metric import Metric, MetricLike
from onnxamp._tuning.results import Search

if TYPE_CHECKING:
    from onnxamp._runtime.sessions.values import Feed

PARTS: Final = (
    "tuning",
    "tuning with exponents",
    "tuning with compensation",
    "tuning with exponents and compensation",
)
"""Parts of the state file."""
_TOGETHER: Final = 8
"""The number of samples whose outputs are in memory at once."""

_ALL: Final = 1 << 62
"""Bytes of weights that stay in the graph: all of them."""


def state_part(options: Options) -> str:
    """Return the part of a tuning with these options."""
    return PARTS[2 * options.compensates + (options.rescaling is not None)]


class TuningState:
    """Measurements of the tuning of a model, by key.

    Attributes:
        part: where they are stored; None if they are not.
        recalled: number of samples whose sensitivities were stored before.
    """

    def __init__(self, part: Part | None) -> None:
        self.part = part
        self._known: Any = {} if part is None else part
        self.recalled = sum(key.startswith("sample ") for key in self._known)

    def known(self, key: str, measure: Callable[[], object]) -> Any:
        """Return the measurement of a key, made now if it is missing, as JSON types."""
        if key not in self._known:
            self._known[key] = as_data(measure(), named=False)
        return self._known[key]

    def error(
        self, low: Iterable[str], how: str, measure: Callable[[], float]
    ) -> float:
        """Return the known error of a choice, or a new measurement; ``how`` names it."""
        return float(self.known(f"error {_choice_print(low, how)}", measure))

    def judged(
        self, low: Iterable[str], how: str, samples: Samples
    ) -> KeptSamples[float] | None:
        """Return the store of a choice's error on each sample; None if nothing is stored."""
        if self.part is None:
            return None
        key = f"judged {_choice_print(low, how)}"
        return KeptSamples(self.part, samples, float, key, isfinite)

    def measured(self, samples: Samples) -> KeptSamples[Sensitivities] | None:
        """Return the store of the sensitivities of each sample; None if nothing is stored."""
        if self.part is None:
            return None
        what = "sample with both passes"
        return KeptSamples(self.part, samples, Sensitivities, what)

    def node_times(
        self, name: str, measure: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Return the known seconds of the nodes of a model, or a new measurement."""
        return dict(self.known(f"time {name}", measure))

    def times_of(
        self,
        choices: Sequence[frozenset[str]],
        where: str,
        measure: Callable[[], Sequence[float]],
    ) -> list[float]:
        """Return the known seconds of float32 and of some choices, or a new measurement, in turns."""
        key = fingerprint(*(_choice_print(low, where) for low in choices))
        return list(self.known(f"time {key}", measure))


def _choice_print(low: Iterable[str], how: str) -> str:
    return fingerprint(*sorted(low), "", how)


def given_prints(model: Model, search: Search, samples: Samples) -> Facts:
    """Return the facts, besides the options, on which stored measurements depend."""
    return {
        "the model": model_print(model),
        "the inputs": samples_print(samples),
        "the metric": fingerprint(
            *_metric_print(search.metric),
            search.accept.print if search.accept else "",
        ),
        "the version of onnxamp or ONNX Runtime": versions(),
    }


def _metric_print(metric: MetricLike) -> Iterator[str]:
    """Yield the name of a metric and, for a function of the user, the fingerprint of the file that it is in."""
    yield str(metric)
    if isinstance(metric, str) and ":" in metric:
        yield source_print(imported("metric", metric))


def options_print(
    changed: str, space: SearchSpace, options: Options, engine: Engine
) -> str:
    """Return the fingerprint of the prepared model; ``changed`` is that of its graph, "" for its own."""
    units = (f"{unit.key} {unit.op} {unit.ports}" for unit in space.units)
    arithmetic = engine.arithmetic.name if engine.arithmetic else ""
    rounding = ["compensated"] * options.compensates
    # What else changes a result of the same choices.
    ends = repr((options.keep_io_types, options.low_weights, options.weights_only))
    return fingerprint(options.low.name, arithmetic, changed, *units, *rounding, ends)


def converted_error(
    original: Model,
    result: Model,
    run: Run,
    metric: Metric,
    engine: Engine,
    *,
    references: SampleCache | None = None,
    kept: KeptSamples[float] | None = None,
) -> float:
    """Return the worst error of a converted model over all samples; infinite if it does not run.

    Args:
        original: the float32 model.
        result: the converted model.
        run: the samples, and the processes that measure them.
        metric: measures the error.
        engine: runs the result.
        references: outputs of the original from an earlier emulated run.
        kept: keeps the error of each sample.

    Raises:
        RuntimeFailure: the original does not run, or a sample ends the processes that run it.
    """
    probe = ErrorProbe(
        key=original.ask(_token),
        original=SentModel.of(original),
        result=SentModel.of(result),
        engine=engine,
        metric=metric,
        budget=run.budget,
    )
    before = probe.open_original()
    if references is not None and engine.emulates:
        before.outputs = references
    memory = {_REFERENCE: (probe.key, before)}
    crashed = "Sample {sample} cannot be run. {crash} Leave it out of the inputs."
    worst = 0.0
    with closing(
        observe_all(run, probe, kept=kept, memory=memory, crashed=crashed)
    ) as errors:
        for error in errors:
            worst = max(worst, error)
            if worst == inf:  # other samples cannot reduce it
                break
    return worst


def _token(model: Model) -> str:
    """Return the key of a model in the memory of workers."""
    del model
    return token_hex()


_REFERENCE: Final = "tuning reference"
"""The key of the original in the memory of a process, for the next candidate."""


@record(kw_only=True)
class ErrorProbe(Probe[float]):
    """Measures the error of a converted model; it is infinite if the model does not run.

    Attributes:
        key: identifies the original and how it runs.
    """

    has_steps = False

    key: str
    original: SentModel
    result: SentModel
    engine: Engine
    metric: Metric
    budget: int

    def open(self, memory: Memory) -> Opened[float]:
        """As :meth:`Probe.open`."""
        original = remembered(memory, _REFERENCE, self.key, self.open_original)
        result = session_on(self.engine, self.result.opened(), self.budget)

        def prepare(sample: Sample) -> None:
            feeds = check_inputs(original.model.proto, sample)
            for executable in (original, result):
                if not executable.runs_whole(feeds):
                    executable.prepare(feeds)

        def measure(feeds: Mapping[int, Sample]) -> list[float]:
            return _errors(original, result, feeds, self.metric)

        return Opened(prepare, in_groups(_TOGETHER, original.model, measure))

    def open_original(self) -> Session:
        """Return the original as it is run."""
        engine = replace(self.engine.reference, emulates=self.engine.emulates)
        return session_on(engine, self.original.opened(), self.budget)


def session_on(engine: Engine, model: Model, budget: int) -> Session:
    """Return a model on an engine, whole unless low precision is emulated."""
    return engine.open(model, whole=not engine.emulates, budget=budget)


def _errors(
    original: Session,
    result: Session,
    feeds: "Mapping[int, Mapping[str, Feed]]",
    metric: Metric,
) -> list[float]:
    """Return the errors of a converted model on a few numbered samples; infinite if it does not run.

    Raises:
        RuntimeFailure: the original does not run.
    """
    known = original.outputs.kept
    references = {number: known[number] for number in feeds if number in known}
    missing = [number for number in feeds if number not in known]
    computed = original.run_together([feeds[number] for number in missing])
    for number, outputs in zip(missing, computed, strict=True):
        references[number] = outputs
        original.outputs.keep(number, outputs)
    try:
        results = result.run_together(list(feeds.values()))
    except RuntimeFailure:
        return [inf] * len(feeds)
    return [
        float(metric.error(references[number], one))
        for number, one in zip(feeds, results, strict=True)
    ]


def run_noise(
    original: Model, sample: Sample, metric: Metric, engine: Engine
) -> float:
    """Return the error of the original against itself in a second session: in one, random ops draw further numbers.

    Raises:
        RuntimeFailure: it does not run.
    """
    feeds = check_inputs(original.proto, sample)
    first, second = (engine.open(original).run(feeds) for _ in range(2))
    return metric.error(first, second)


def device_noise(
    original: Model, sample: Sample, metric: Metric, engine: Engine
) -> float | None:
    """Return the error of the original on an engine against itself on the CPU; None if either does not run whole."""
    try:
        feeds = check_inputs(original.proto, sample)
        return metric.error(
            engine_on("cpu").open(original, whole=True).run(feeds),
            engine.open(original, whole=True).run(feeds),
        )
    except RuntimeFailure:
        return None


def profile_nodes(
    model: Model, sample: Sample, provider: Provider
) -> dict[str, float]:
    """Return the seconds per node, by its key, from ONNX Runtime's profiler.

    Raises:
        RuntimeFailure: the model does not run, or its kernels cannot be timed.
    """
    named = copied(model.embedded())
    if any(feed is None for feed in sample.values()):
        # Empty optional inputs cannot be fed, and are created inside.
        how: Any = {"emulated": False, "provider": provider, "keep": _ALL}
        named = copied(settle(named, None, sample, **how).shell.model)
    # Profiles name nodes, whose own names may be missing or ambiguous.
    for node in Graph.of(named).nodes:
        node.proto.name = node.first_output
    kinds = {entry.name: declared_type(entry.type) for entry in named.graph.input}
    feeds = {
        name: as_typed(feed, kinds[name])
        for name, feed in sample.items()
        if feed is not None
    }
    return node_times(named, feeds, provider, optimize=False)
