"""A tuned model where it will run: whole, on CUDA, held to the metric that it was tuned by."""

from dataclasses import dataclass

from onnxamp.errors import RuntimeFailure
from onnxamp.numerics.diff import Model, open_model, ran_on
from onnxamp.runtime.inputs import check_inputs
from onnxamp.runtime.samples import Samples
from onnxamp.runtime.session import Provider
from onnxamp.tuning.metric import Metric


@dataclass(frozen=True, slots=True)
class Confirmed:
    """``error`` is the worst over all samples, by the metric; ``held`` whether it is within the tolerance; ``noise`` is
    that of the original on the device against itself on CPU, on the first sample (None: it does not run there).
    """

    ran_on: str
    error: float
    noise: float | None
    held: bool


def confirm(original: Model, result: Model, samples: Samples, metric: Metric, provider: Provider = "cuda") -> Confirmed:
    """Run both models whole, with all fusions, TF32 off.

    Raises:
        RuntimeFailure: one of them does not run on the provider.
    """
    one, other = open_model(original), open_model(result)
    reference, found, on_cpu = one.whole(provider), other.whole(provider), one.whole("cpu")
    worst, noise = 0.0, None
    for number, sample in enumerate(samples):
        feeds = check_inputs(one.proto, sample)
        right = reference.run(feeds)
        worst = max(worst, metric.error(right, found.run(feeds)))
        if number == 0:
            try:
                noise = metric.error(on_cpu.run(feeds), right)
            except RuntimeFailure:
                noise = None
    return Confirmed(ran_on(provider, "float32"), worst, noise, metric.holds(worst))
