"""Comparing two models on the same inputs, as a function and a command ask for it."""

from collections.abc import Mapping
from dataclasses import replace

from onnxamp._base.errors import ArgumentTypeError
from onnxamp._base.place import Place
from onnxamp._base.state import StateLike, opened
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.limits import LimitLike, Limits, with_tolerance
from onnxamp._numerics.results import DiffReport
from onnxamp._numerics.user_functions import Accept, AcceptLike
from onnxamp._options.values import DiffMetric
from onnxamp._runtime import BUDGET
from onnxamp._runtime.engines import Progress, Session, choose_engine
from onnxamp._runtime.inputs.samples import Samples, SamplesLike, as_samples
from onnxamp._runtime.run import Run, reported_to
from onnxamp._runtime.sessions.session import Provider


@unchanged_sources()
def diff_models(
    reference: ModelSource,
    result: ModelSource,
    samples: SamplesLike | None = None,
    *,
    layers: bool = False,
    limits: Limits | None = None,
    tolerance: LimitLike | None = None,
    provider: Provider | None = None,
    whole: bool | None = None,
    seed: int = 0,
    count: int | None = None,
    dims: Mapping[str, int] | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
    metric: DiffMetric = "auto",
    accept: AcceptLike | None = None,
    target: str = "cuda",
    jobs: int | None = None,
    cluster: str | None = None,
    state: StateLike = None,
    original: ModelSource | None = None,
) -> DiffReport:
    """Run two models on the same samples and compare their results.

    On the CPU, ONNX Runtime computes float16 in float32 and hides the errors of a GPU, so low precision is emulated. On
    CUDA, each model runs in one session with all fusions as in production, but without TF32; only layers are computed
    one op at a time. On a plugin provider, the result runs in the same way, while the reference is computed on the CPU:
    float32 itself may be inexact there, and the report says by how much.

    Args:
        reference: the model to compare with, usually the float32 original: a ModelProto, a path, or an
            onnx-graphsurgeon Graph.
        result: the model to judge, in the same forms. It may lack inputs of the reference, but not outputs.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts. None for ``count`` random
            samples of the reference (with ``seed``, and sizes of named dimensions from ``dims``): 1 if that is None; if
            the target accumulates float16 in float16, as webgpu does, 4 to 16, so that each output has at least 64
            numbers.
        layers: compare every value that both models share by name. If outputs miss their limits, this is done anyway,
            on the worst of several random samples.
        limits: the errors to accept; by default, a relative L2 error of 1e-5 if both models are float32 (or
            twice float32's own error on the device, if that is larger, up to 1e-2), 1e-2 if one holds float16, and 5e-2
            if one holds bfloat16.
        tolerance: the largest relative L2 error, in the forms of ``diff --tolerance``: a number, numbers by output, or
            texts such as "NAME=0.01". It is added to the ``limits`` of other metrics.
        provider: "cuda", "cpu", "webgpu", or the package of another plugin provider; None for CUDA if there is a
            device.
        whole: run each model in one session. None means True except on the CPU, where that is only possible for float32
            models.
        budget: bytes of values and weights to hold at a time, in addition to the models.
        progress: called with (work done, work in all).
        metric: "detections" matches the rows of outputs that list detections before it compares them, "elements"
            compares all outputs element by element; "auto" matches rows that an op selected by value
            (TopK, NonMaxSuppression, ...).
        accept: a function of the outputs of the reference and of the result, by name, that returns True or False; or
            "package:function". It judges each sample instead of the default limits; ``limits`` apply as well.
        target: the target whose arithmetic is emulated: "webgpu" accumulates float16 in float16, all others in float32.
        jobs: worker processes that compare several samples; None for this process.
        cluster: the Ray cluster that they belong to: "local" for one on this machine, or an address.
        state: a file that records the results of each sample, so that an interrupted comparison can resume,
            and new ``limits`` need no run.
        original: the float32 model that the reference was quantized from; the error of the result may be 1.1
            times that of the reference, plus 2e-3.

    Returns:
        The comparison. ``passed`` is the verdict, ``outputs`` are the measurements, ``first_bad`` is where the error
        starts, and ``skipped`` says why nothing could be compared.

    Raises:
        ArgumentTypeError: a model, the samples or the limits are of another type.
        ArgumentError: the samples do not fit the reference, the result takes inputs that the reference lacks, or it
            lacks outputs that the reference has, or the state belongs to another comparison.
        ModelError: a model cannot be read. RuntimeFailure: the provider is requested and cannot be used.

    Example:
        >>> import onnxamp
        >>> model = onnxamp.convert_model("models/encoder.onnx", level="O2")
        >>> report = onnxamp.diff_models("models/encoder.onnx", model, provider="cpu")
        >>> report.passed, report.lowest, [output.name for output in report.outputs]
        (True, 'float16', ['last_hidden_state', 'pooled'])
    """
    if not isinstance(limits, Limits | None):
        raise ArgumentTypeError(
            f"limits must be Limits, as make_limits returns, not {type(limits).__name__}."
        )
    limits = limits or Limits()
    if tolerance is not None:
        limits = with_tolerance(limits, tolerance)
    if accept is not None:
        limits = replace(limits, accept=Accept.of(accept))
    one = Model.of(reference)
    other = Model.of(result)

    def drawn(reference: Session) -> Samples:
        return as_samples(
            samples,
            one,
            count=count,
            seed=seed,
            dims=dims,
            reference=reference,
            engines=(target, provider),
        )

    engine = choose_engine(provider)
    run = Run(provider=engine.provider, report=reported_to(progress), budget=budget)
    comparison = Comparison.of(
        one,
        run,
        limits,
        whole=whole,
        metric=metric,
        target=target,
        draw=drawn,
        beyond="named",
    )
    place = Place(jobs, cluster)
    counted = comparison.run.samples.counted
    with opened(state) as kept, place.sharing(counted, gpus=engine.gpus) as workers:
        comparison.run = replace(comparison.run, state=kept, workers=workers)
        report = comparison.compare(other, layers=layers or None)
        if original is None:
            return report
        return comparison.with_original(report, Model.of(original), other)
