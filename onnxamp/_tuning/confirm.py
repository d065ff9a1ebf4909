"""The last word on a candidate: the converted model itself beside the original, on all samples."""

from dataclasses import dataclass
from math import inf

from onnx import ModelProto

from onnxamp._errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._runtime.engines import Executable, OutputCache, WholeModel, engine_name
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.session import Provider, choose_provider
from onnxamp._tuning.metric import Metric


@dataclass(frozen=True, slots=True)
class Place:
    """Where converted models run: on CUDA as they are, whole and fused, TF32 off; on the CPU emulated."""

    provider: Provider
    emulated: bool

    def called(self, low: str) -> str:
        """How reports name it; ``low`` is the low type."""
        return engine_name(self.provider, low if self.emulated else "float32")


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
    references: OutputCache | None = None,
) -> float:
    """The worst error of a converted model over all samples; infinite where it does not run.

    Args:
        references: what an earlier run of the original gave.

    Raises:
        RuntimeFailure: the original does not run.
    """
    kept = references.kept if references is not None and place.emulated else {}
    one, other = (
        Executable(Model(model), place.provider, place.emulated, whole=not place.emulated)
        for model in (original, result)
    )
    worst = 0.0
    for number, sample in enumerate(samples):
        feeds = check_inputs(original, sample)
        reference = kept[number] if number in kept else one.run(feeds)
        try:
            found = other.run(feeds)
        except RuntimeFailure:
            return inf
        worst = max(worst, metric.error(reference, found))
    return worst


def device_noise(original: ModelProto, sample: Sample, metric: Metric, place: Place) -> float | None:
    """The error of the original on the device against itself on the CPU; None where either does not run whole."""
    try:
        feeds = check_inputs(original, sample)
        return metric.error(WholeModel(original, "cpu").run(feeds), WholeModel(original, place.provider).run(feeds))
    except RuntimeFailure:
        return None
