"""The outputs of a model for any choice of low nodes, all from one session."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from onnx import ModelProto

from onnxamp._dtypes import LowType
from onnxamp._runtime.engines import Outputs
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.observe import settle
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.session import make_session, run
from onnxamp._runtime.switch import Ports, Switched, switched
from onnxamp._tuning.metric import Metric

if TYPE_CHECKING:
    import onnxruntime as ort

    from onnxamp._runtime.values import Feed

_ALL: Final = 1 << 62
"""Bytes of weights that stay in the switched graph: all."""


@dataclass(slots=True)
class Probe:
    """The switched model in one session (one more for each choice of optional inputs that are empty), and what it
    keeps of the few samples that it is asked for: inputs, and the reference's outputs. ``runs`` counts mask runs: a run
    of any number of samples with one choice of low nodes.
    """

    model: ModelProto
    ports: Mapping[str, Ports]
    low: LowType
    samples: Samples
    metric: Metric
    threads: int = 0
    """Threads that an op may use; 0 for the usual number."""
    runs: int = 0
    _sessions: "dict[frozenset[str], tuple[Switched, ort.InferenceSession]]" = field(default_factory=dict)
    _feeds: "dict[int, dict[str, Feed]]" = field(default_factory=dict)
    _references: dict[int, Outputs] = field(default_factory=dict)

    def error(self, low: AbstractSet[str], samples: Sequence[int]) -> float:
        """The worst error of some samples with these nodes low.

        Raises:
            RuntimeFailure: the model does not run.
        """
        if missing := [number for number in samples if number not in self._references]:
            self.runs += 1
            self._references |= {number: self._outputs(number, frozenset()) for number in missing}
        self.runs += 1
        return max(self.metric.error(self._references[n], self._outputs(n, low)) for n in samples)

    def _outputs(self, number: int, low: AbstractSet[str]) -> dict[str, Any]:
        if number not in self._feeds:
            self._feeds[number] = check_inputs(self.model, self.samples[number])
        sample = self._feeds[number]
        graph, session = self._session(sample)
        wanted = {item.name for item in session.get_inputs()}
        feeds = {name: feed for name, feed in sample.items() if name in wanted}
        return run(session, {**feeds, graph.mask: graph.masked(low)})

    def _session(self, sample: "Mapping[str, Feed]") -> "tuple[Switched, ort.InferenceSession]":
        empty = frozenset(name for name, feed in sample.items() if feed is None)
        if empty not in self._sessions:
            model = self.model
            if empty:  # such inputs cannot be fed: they are made inside
                model = settle(model, None, sample, emulated=False, keep=_ALL)[0].model
            graph = switched(model, self.ports, self.low)
            # Casts and choices are in the way of most fusions: optimising would take longer than all the runs.
            self._sessions[empty] = graph, make_session(graph.model, optimize=False, spin=False, threads=self.threads)
        return self._sessions[empty]
