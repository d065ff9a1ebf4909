"""Measuring a model for tuning: each op's own error in one pass, and the outputs for any choice of low nodes."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final

from onnx import ModelProto

from onnxamp.dtypes import LowType
from onnxamp.errors import RuntimeFailure
from onnxamp.numerics.diff import Progress, diff_models
from onnxamp.numerics.pairing import Pairing
from onnxamp.numerics.results import LayerDiff
from onnxamp.numerics.walk import Walk
from onnxamp.runtime.flow import fitted
from onnxamp.runtime.inputs import check_inputs
from onnxamp.runtime.observe import Observed, observe, settle
from onnxamp.runtime.pieces import Runner
from onnxamp.runtime.samples import Samples
from onnxamp.runtime.session import make_session, run
from onnxamp.runtime.switch import Ports, Switched, switched, switches_on
from onnxamp.tuning.metric import Metric, Outputs
from onnxamp.tuning.units import Unit

if TYPE_CHECKING:
    import onnxruntime as ort

    from onnxamp.runtime.values import Feed

_ALL: Final = 1 << 62
"""Bytes of weights that stay in the switched graph: all."""

_HEADROOM: Final = 4.0
"""Values of other samples may be that much larger than those that were measured."""

_BROKEN_ABOVE: Final = 0.1
"""Relative L2 error of an op on its own from which on it stays float32."""


@dataclass(frozen=True, slots=True)
class Local:
    """What one pass showed of a unit: its own relative error, the largest magnitude, and why it must stay float32."""

    error: float
    largest: float
    broken: str | None


def measure_locally(
    model: ModelProto,
    all_low: ModelProto,
    units: Sequence[Unit],
    samples: Samples,
    low: LowType,
    progress: Progress | None,
) -> list[Local]:
    """Replay every op of the lowered model on the float32 model's values.

    Raises:
        RuntimeFailure: the model does not run.
    """
    found = diff_models(model, all_low, samples, layers=True, provider="cpu", progress=progress)
    if found.skipped is not None:
        raise RuntimeFailure(found.skipped)
    rows: dict[str, list[LayerDiff]] = {}
    for row in found.layers:
        rows.setdefault(row.value, []).append(row)
    return [_local(unit, rows, low) for unit in units]


def _local(unit: Unit, rows: Mapping[str, Sequence[LayerDiff]], low: LowType) -> Local:
    mine = [row.local for name in unit.names for row in rows.get(name, ()) if row.local is not None]
    if not mine:  # in the body of a loop, or made of values that only the lowered model has
        return Local(low.epsilon / 2, 0.0, None)
    error, largest = max(m.rel_l2 for m in mine), max(m.reference_max for m in mine)
    alarm = next((m.alarm for m in mine if m.alarm), None)
    if alarm is not None:
        return Local(error, largest, alarm)
    if error > _BROKEN_ABOVE:
        return Local(error, largest, f"it is off by {error:.0%} on its own")
    if largest * _HEADROOM > low.max_finite:
        return Local(error, largest, f"it reaches {largest:.4g}: {low.name} ends at {low.max_finite:.6g}")
    return Local(max(error, low.epsilon / 64), largest, None)


@dataclass(slots=True)
class Probe:
    """The switched model in one session (one more for each choice of optional inputs that are empty), and the
    reference's outputs. ``runs`` counts mask runs: a run of any number of samples with one choice of low nodes.
    """

    model: ModelProto
    ports: Mapping[str, Ports]
    low: LowType
    samples: Samples
    metric: Metric
    runs: int = 0
    _sessions: "dict[frozenset[str], tuple[Switched, ort.InferenceSession]]" = field(default_factory=dict)
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
        sample = check_inputs(self.model, self.samples[number])
        graph, session = self._session(sample)
        wanted = {item.name for item in session.get_inputs()}
        feeds = {name: feed for name, feed in sample.items() if name in wanted}
        return run(session, {**feeds, graph.mask: switches_on(graph.nodes, low)})

    def _session(self, sample: "Mapping[str, Feed]") -> "tuple[Switched, ort.InferenceSession]":
        empty = frozenset(name for name, feed in sample.items() if feed is None)
        if empty not in self._sessions:
            model = self.model
            if empty:  # such inputs cannot be fed: they are made inside
                model = settle(model, None, sample, emulated=False, keep=_ALL)[0].model
            graph = switched(model, self.ports, self.low)
            self._sessions[empty] = graph, make_session(graph.model)
        return self._sessions[empty]


def verify(original: ModelProto, result: ModelProto, samples: Samples, metric: Metric) -> float:
    """The worst error of a converted model, emulated, over all samples; infinite where it does not run.

    Raises:
        RuntimeFailure: the original does not run.
    """
    before: tuple[Observed | None, Observed | None] = (None, None)
    worst = 0.0
    for sample in samples:
        feeds = check_inputs(original, sample)
        one = observe(original, None, feeds, emulated=True, before=before[0])
        other = observe(result, None, feeds, emulated=True, before=before[1])
        walk = Walk(Runner(one.flow, "cpu"), Runner(other.flow, "cpu"), Pairing({}))
        walked = walk.run(fitted(one.flow, feeds), fitted(other.flow, feeds))
        if walked.failure is not None:
            return inf
        worst, before = max(worst, metric.error(walked.reference, walked.result)), (one, other)
    return worst
