"""The last word on a candidate: the converted model itself beside the original, on all samples."""

from dataclasses import dataclass
from math import inf

from onnx import ModelProto

from onnxamp.errors import RuntimeFailure
from onnxamp.numerics.beside import Opened, make_ready, nothing_paired, ran_on, run_both
from onnxamp.numerics.whole import Whole
from onnxamp.runtime.inputs import check_inputs
from onnxamp.runtime.observe import Observed
from onnxamp.runtime.samples import Sample, Samples
from onnxamp.runtime.session import Provider, choose_provider
from onnxamp.tuning.metric import Metric


@dataclass(frozen=True, slots=True)
class Place:
    """Where converted models run: on CUDA as they are, whole and fused, TF32 off; on the CPU emulated."""

    provider: Provider
    emulated: bool

    def called(self, low: str) -> str:
        """How reports name it; ``low`` is the low type."""
        return ran_on(self.provider, low if self.emulated else "float32")


def place_for(provider: Provider | None) -> Place:
    """On CUDA where it can be used, or where it is asked for; else, or where that is asked for, on the CPU.

    Raises:
        ArgumentError: there is no such provider. RuntimeFailure: CUDA is asked for, but cannot be used.
    """
    chosen = choose_provider(provider)
    return Place(chosen, emulated=chosen == "cpu")


def confirm(
    original: ModelProto,
    result: ModelProto,
    samples: Samples,
    metric: Metric,
    place: Place,
    seen: Observed | None = None,
) -> float:
    """The worst error of a converted model over all samples; infinite where it does not run.

    Args:
        seen: the original, emulated, as an earlier run made it ready.

    Raises:
        RuntimeFailure: the original does not run.
    """
    one, other, ready = Opened(original, None, "model"), Opened(result, None, "result"), None
    wholes = None if place.emulated else (one.whole(place.provider), other.whole(place.provider))
    worst = 0.0
    for sample in samples:
        feeds = check_inputs(original, sample)
        ready = make_ready(
            one,
            other,
            feeds,
            place.provider,
            paired=nothing_paired,
            emulated=place.emulated,
            before=ready,
            seen=seen if place.emulated else None,
        )
        walked = run_both(ready.walk, wholes, feeds)
        if walked.failure is not None:
            return inf
        worst = max(worst, metric.error(walked.reference, walked.result))
    return worst


def device_noise(original: ModelProto, sample: Sample, metric: Metric, place: Place) -> float | None:
    """The error of the original on the device against itself on the CPU; None where either does not run whole."""
    try:
        feeds = check_inputs(original, sample)
        return metric.error(Whole(original, "cpu").run(feeds), Whole(original, place.provider).run(feeds))
    except RuntimeFailure:
        return None
