"""Everything tuning runs: mask runs of one switched model, converted models, and profiles."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from onnx import ModelProto

from onnxamp._dtypes import LowType
from onnxamp._errors import RuntimeFailure
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import declared_type
from onnxamp._model.copying import copied
from onnxamp._model.model import Model
from onnxamp._runtime.engines import Executable, OutputCache, Outputs, WholeModel, engine_name
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.observe import settle
from onnxamp._runtime.profile import node_times
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.session import Provider, choose_provider, is_plugin, make_session, run
from onnxamp._runtime.switch import Ports, Switched, node_key, switched
from onnxamp._runtime.values import as_typed
from onnxamp._tuning.metric import Metric

if TYPE_CHECKING:
    import onnxruntime as ort

    from onnxamp._runtime.values import Feed

_ALL: Final = 1 << 62
"""Bytes of weights that stay in the graph: all."""


@dataclass(slots=True)
class MaskedModel:
    """A model in which every tunable node has a precision switch, in one session: a mask run computes any choice.

    There is one more session for each set of optional inputs that are empty. ``runs`` counts mask runs; a run of
    several samples with one choice counts once.
    """

    model: ModelProto
    ports: Mapping[str, Ports]
    low: LowType
    samples: Samples
    metric: Metric
    threads: int = 0
    """Threads per op; 0 for ONNX Runtime's default."""
    runs: int = 0
    _sessions: "dict[frozenset[str], tuple[Switched, ort.InferenceSession]]" = field(default_factory=dict)
    _feeds: "dict[int, dict[str, Feed]]" = field(default_factory=dict)
    _references: dict[int, Outputs] = field(default_factory=dict)

    def error(self, low: AbstractSet[str], samples: Sequence[int]) -> float:
        """The worst error of some samples with these nodes in low precision; infinite if the model does not run so.

        Raises:
            RuntimeFailure: the model does not run in float32.
        """
        if missing := [number for number in samples if number not in self._references]:
            self.runs += 1
            self._references |= {number: self._outputs(number, frozenset()) for number in missing}
        self.runs += 1
        try:
            return max(self.metric.error(self._references[n], self._outputs(n, low)) for n in samples)
        except RuntimeFailure:  # rounding leads to a branch or an index that does not run
            return inf

    def _outputs(self, number: int, low: AbstractSet[str]) -> dict[str, Any]:
        if number not in self._feeds:
            self._feeds[number] = check_inputs(self.model, self.samples[number])
        sample = self._feeds[number]
        graph, session = self._session(sample)
        names = {item.name for item in session.get_inputs()}
        feeds = {name: feed for name, feed in sample.items() if name in names}
        return run(session, {**feeds, graph.mask: graph.masked(low)})

    def _session(self, sample: "Mapping[str, Feed]") -> "tuple[Switched, ort.InferenceSession]":
        empty = frozenset(name for name, feed in sample.items() if feed is None)
        if empty not in self._sessions:
            graph = switched(_without_empty_inputs(self.model, sample, "cpu"), self.ports, self.low)
            # Switches prevent most fusions: optimising would take longer than all the runs.
            self._sessions[empty] = graph, make_session(graph.model, optimize=False, spin=False, threads=self.threads)
        return self._sessions[empty]


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

    @property
    def reference(self) -> Provider:
        """Where the float32 model runs that they are compared with."""
        return "cpu" if is_plugin(self.provider) else self.provider

    def name(self, low: str) -> str:
        """Its name in reports; ``low`` is the low-precision type."""
        return engine_name(self.provider, low if self.emulated else "float32")


def choose_backend(provider: Provider | None) -> Backend:
    """The backend on a provider; None for CUDA if it is available, else the CPU.

    Raises:
        ArgumentError: there is no such provider. RuntimeFailure: it cannot be used here.
    """
    chosen = choose_provider(provider)
    return Backend(chosen, emulated=chosen == "cpu")


def converted_error(
    original: ModelProto,
    result: ModelProto,
    samples: Samples,
    metric: Metric,
    backend: Backend,
    references: OutputCache | None = None,
) -> float:
    """The worst error of a converted model over all samples; infinite if it does not run.

    Args:
        references: outputs of the original from an earlier emulated run.

    Raises:
        RuntimeFailure: the original does not run.
    """
    known = references.kept if references is not None and backend.emulated else {}
    before, after = (
        Executable(Model(model), provider, backend.emulated, whole=not backend.emulated)
        for model, provider in ((original, backend.reference), (result, backend.provider))
    )
    worst = 0.0
    for number, sample in enumerate(samples):
        feeds = check_inputs(original, sample)
        reference = known[number] if number in known else before.run(feeds)
        try:
            outputs = after.run(feeds)
        except RuntimeFailure:
            return inf
        worst = max(worst, metric.error(reference, outputs))
    return worst


def device_noise(original: ModelProto, sample: Sample, metric: Metric, backend: Backend) -> float | None:
    """The error of the original on the device against itself on the CPU; None if either does not run whole."""
    try:
        feeds = check_inputs(original, sample)
        return metric.error(WholeModel(original, "cpu").run(feeds), WholeModel(original, backend.provider).run(feeds))
    except RuntimeFailure:
        return None


def profile_nodes(model: ModelProto, sample: Sample, provider: Provider) -> dict[str, float]:
    """Seconds per node, by its key, from ONNX Runtime's profiler.

    Raises:
        RuntimeFailure: the model does not run, or its kernels cannot be timed.
    """
    named = copied(_without_empty_inputs(model, sample, provider))
    for node in Graph.of(named).nodes:
        node.proto.name = node_key(node)
    kinds = {entry.name: declared_type(entry.type) for entry in named.graph.input}
    feeds = {name: as_typed(feed, kinds[name]) for name, feed in sample.items() if feed is not None}
    return node_times(named, feeds, provider, optimize=False)
