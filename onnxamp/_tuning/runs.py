"""Everything tuning runs: mask runs of one switched model, converted models, and profiles."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

from onnx import ModelProto

from onnxamp._dtypes import Format
from onnxamp._errors import RuntimeFailure
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import declared_type
from onnxamp._model.blobs import Bits
from onnxamp._model.copying import copied
from onnxamp._model.model import Model
from onnxamp._ops.profiles import Profile, emulated_arithmetic
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.engines import Executable, OutputCache, Outputs, WholeModel, engine_name
from onnxamp._runtime.flow import flow_of
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.kept import KeptSamples
from onnxamp._runtime.observe import settle, shapes_of
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.profile import node_times
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.session import Provider, choose_provider, is_plugin
from onnxamp._runtime.shell import Shell, take_weights
from onnxamp._runtime.side import batched, run_together
from onnxamp._runtime.switch import Ports, Switched, node_key, switched
from onnxamp._runtime.values import as_typed
from onnxamp._tuning.metric import Metric

if TYPE_CHECKING:
    from onnxamp._runtime.values import Feed

_TOGETHER: Final = 8
"""Samples of which outputs are held at a time."""

_ALL: Final = 1 << 62
"""Bytes of weights that stay in the graph: all."""

_SESSIONS: Final = 256
"""Sessions of pieces that are kept for further mask runs. They hold no large weights."""


@dataclass(slots=True)
class MaskedModel:
    """A model in which every tunable node has a precision switch: a mask run computes any choice.

    It runs in pieces that fit the budget, whose sessions serve all runs; large weights are read, and rounded where the
    choice says so, once for all samples. ``runs`` counts mask runs; a run of several samples with one choice counts
    once.
    """

    model: Model
    ports: Mapping[str, Ports]
    low: Format
    samples: Samples
    metric: Metric
    budget: int = BUDGET
    threads: int = 0
    """Threads per op; 0 for ONNX Runtime's default."""
    arithmetic: Profile | None = None
    """The target whose float16 sums are emulated; None for float32 sums."""
    rounded: Mapping[str, Bits] = field(default_factory=dict)
    """Weights whose low-precision numbers are not the nearest."""
    runs: int = 0
    _switched: dict[frozenset[str], tuple[Switched, Runner]] = field(default_factory=dict)
    """By optional inputs that are empty."""
    _feeds: "dict[int, dict[str, Feed]]" = field(default_factory=dict)
    _references: dict[int, Outputs] = field(default_factory=dict)

    def errors(self, choices: Sequence[AbstractSet[str]], samples: Sequence[int]) -> Iterator[float]:
        """:meth:`error` of one choice after another."""
        return (self.error(low, samples) for low in choices)

    def error(self, low: AbstractSet[str], samples: Sequence[int]) -> float:
        """The worst error of some samples with these nodes in low precision; infinite if the model does not run so.

        Raises:
            RuntimeFailure: the model does not run in float32.
        """
        if missing := [number for number in samples if number not in self._references]:
            self.runs += 1
            self._references |= zip(missing, self._outputs(missing, frozenset()), strict=True)
        self.runs += 1
        try:
            found = self._outputs(samples, low)
        except RuntimeFailure:  # rounding leads to a branch or an index that does not run
            return inf
        return max(self.metric.error(self._references[n], one) for n, one in zip(samples, found, strict=True))

    def prepare(self, samples: Sequence[int]) -> None:
        """Read these samples, and prepare the switches for the first of them, as for the first run of them all.

        Raises:
            ArgumentError: one does not fit the model.
        """
        for number in samples:
            if number not in self._feeds:
                self._feeds[number] = check_inputs(self.model.proto, self.samples[number])
        for _ in self._by_runner(samples):
            pass

    def _outputs(self, samples: Sequence[int], low: AbstractSet[str]) -> list[Outputs]:
        """The outputs of each sample with this choice."""
        self.prepare(samples)
        found: dict[int, Outputs] = {}
        for (graph, runner), numbers in self._by_runner(samples):
            feeds = [{**self._feeds[number], graph.mask: graph.masked(low)} for number in numbers]
            fed = dict.fromkeys(graph.rounded(low), self.low)
            outputs = runner.flow.outputs
            sides = run_together(runner, feeds, outputs, self.budget, low=[fed] * len(feeds))
            found |= zip(numbers, ({name: side.output(name) for name in outputs} for side in sides), strict=True)
        return [found[number] for number in samples]

    def _by_runner(self, samples: Iterable[int]) -> "Iterator[tuple[tuple[Switched, Runner], list[int]]]":
        """The samples that leave the same inputs empty, with what runs them."""
        groups: dict[frozenset[str], list[int]] = {}
        for number in samples:
            empty = frozenset(name for name, feed in self._feeds[number].items() if feed is None)
            groups.setdefault(empty, []).append(number)
        for empty, numbers in groups.items():
            if empty not in self._switched:
                self._switched[empty] = self._prepared(self._feeds[numbers[0]])
            yield self._switched[empty], numbers

    def _prepared(self, sample: "Mapping[str, Feed]") -> tuple[Switched, Runner]:
        shell = take_weights(self.model.proto, self.model.folder)
        if any(feed is None for feed in sample.values()):
            shell, _ = settle(self.model.proto, self.model.folder, sample, emulated=False, provider="cpu")
        graph = switched(
            shell.model, self.ports, self.low, hollow=shell.weights, arithmetic=self.arithmetic,
            shapes=shapes_of(sample), given=self.rounded,
        )  # fmt: skip
        weights = {**shell.weights, **{name: shell.weights[weight] for name, (weight, _) in graph.fed.items()}}
        flow = flow_of(Shell(graph.model, weights, shell.base_dir), emulated=False, shapes=shapes_of(sample))
        fed = {name: self.rounded[weight] for name, (weight, _) in graph.fed.items() if weight in self.rounded}
        return graph, Runner(flow, "cpu", self.threads, spin=False, kept=_SESSIONS, given=fed)


def _without_empty_inputs(model: ModelProto, sample: "Mapping[str, Feed]", provider: Provider) -> ModelProto:
    """The model with the optional inputs that a sample leaves empty, which cannot be fed, made inside."""
    if all(feed is not None for feed in sample.values()):
        return model
    return settle(model, None, sample, emulated=False, provider=provider, keep=_ALL)[0].model


@dataclass(frozen=True, slots=True)
class Backend:
    """What runs converted models: a device with all fusions (CUDA with TF32 off), or an emulation on the CPU."""

    provider: Provider
    emulated: bool
    arithmetic: Profile | None = None
    """The target whose float16 sums emulations show; None for float32 sums."""

    @property
    def reference(self) -> Provider:
        """Where the float32 model runs that they are compared with."""
        return "cpu" if is_plugin(self.provider) else self.provider

    def name(self, low: str) -> str:
        """Its name in reports; ``low`` is the low-precision type."""
        return engine_name(self.provider, low if self.emulated else "float32", self.arithmetic)


def choose_backend(provider: Provider | None, target: str = "cuda") -> Backend:
    """The backend on a provider; None for CUDA if it is available, else the CPU.

    ``target`` says whose sums are emulated, on the way to a plugin provider, too, unless that has a profile itself.

    Raises:
        ArgumentError: there is no such provider. RuntimeFailure: it cannot be used here.
    """
    chosen = choose_provider(provider)
    return Backend(chosen, chosen == "cpu", emulated_arithmetic(chosen if is_plugin(chosen) else target))


def converted_error(
    original: Model,
    result: Model,
    samples: Samples,
    metric: Metric,
    backend: Backend,
    references: OutputCache | None = None,
    budget: int = BUDGET,
    kept: KeptSamples[float] | None = None,
) -> float:
    """The worst error of a converted model over all samples; infinite if it does not run.

    Args:
        references: outputs of the original from an earlier emulated run.
        budget: bytes of values and weights that emulations hold at a time.
        kept: keeps the error of each sample.

    Raises:
        RuntimeFailure: the original does not run.
    """
    known = references.kept if references is not None and backend.emulated else {}
    before, after = (
        Executable(
            model, provider, backend.emulated, whole=not backend.emulated, budget=budget,
            arithmetic=backend.arithmetic if backend.emulated else None,
        )
        for model, provider in ((original, backend.reference), (result, backend.provider))
    )  # fmt: skip
    done = [] if kept is None else [number for number in range(len(samples)) if number in kept]
    worst = 0.0 if kept is None else max((kept[number] for number in done), default=0.0)
    for numbers in batched(sorted({*range(len(samples))}.difference(done)), _TOGETHER):
        feeds = [check_inputs(original.proto, samples[number]) for number in numbers]
        missing = [at for at, number in enumerate(numbers) if number not in known]
        ran = dict(zip(missing, before.run_together([feeds[at] for at in missing]), strict=True))
        try:
            found = after.run_together(feeds)
        except RuntimeFailure:
            return inf
        pairs = ((ran[at] if at in ran else known[number], found[at]) for at, number in enumerate(numbers))
        errors = [float(metric.error(reference, outputs)) for reference, outputs in pairs]
        if kept is not None:
            for number, error in zip(numbers, errors, strict=True):
                kept.keep(number, error)
        worst = max(worst, *errors)
    return worst


def device_noise(original: Model, sample: Sample, metric: Metric, backend: Backend) -> float | None:
    """The error of the original on the device against itself on the CPU; None if either does not run whole."""
    try:
        feeds, proto = check_inputs(original.proto, sample), original.path or original.embedded()
        return metric.error(WholeModel(proto, "cpu").run(feeds), WholeModel(proto, backend.provider).run(feeds))
    except RuntimeFailure:
        return None


def profile_nodes(model: Model, sample: Sample, provider: Provider) -> dict[str, float]:
    """Seconds per node, by its key, from ONNX Runtime's profiler.

    Raises:
        RuntimeFailure: the model does not run, or its kernels cannot be timed.
    """
    named = copied(_without_empty_inputs(model.embedded(), sample, provider))
    for node in Graph.of(named).nodes:
        node.proto.name = node_key(node)
    kinds = {entry.name: declared_type(entry.type) for entry in named.graph.input}
    feeds = {name: as_typed(feed, kinds[name]) for name, feed in sample.items() if feed is not None}
    return node_times(named, feeds, provider, optimize=False)
