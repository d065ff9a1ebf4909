"""``onnxamp.tune_model``: the search of level auto, with all of its settings."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

from onnxamp._base.place import Place
from onnxamp._facts.targets import AUTO
from onnxamp._job import Request
from onnxamp._job.in_memory import convert_in_memory
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources
from onnxamp._numerics.user_functions import Accept
from onnxamp._options.options import OptionKeywords, Options
from onnxamp._options.values import Level
from onnxamp._runtime import BUDGET
from onnxamp._runtime.run import Report, RunOptions, silent
from onnxamp._tuning.results import RUNS, SECONDS, Search, TunedModel

if TYPE_CHECKING:
    from onnxamp._base.state import StateLike
    from onnxamp._numerics.user_functions import AcceptLike
    from onnxamp._runtime.inputs.samples import SamplesLike
    from onnxamp._runtime.sessions.session import Provider
    from onnxamp._tuning.metric import MetricLike


@unchanged_sources()
def tune_model(
    model: ModelSource,
    tolerance: float | None = None,
    *,
    metric: "MetricLike" = "auto",
    samples: "SamplesLike | None" = None,
    count: int = 4,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    device: str = AUTO,
    times: str = "roofline",
    provider: "Provider | None" = None,
    runs: int = RUNS,
    state: "StateLike" = None,
    pick: int | None = None,
    progress: Report | None = None,
    budget: int = BUDGET,
    seconds: float = SECONDS,
    allow_slower: bool = False,
    accept: "AcceptLike | None" = None,
    jobs: int | None = None,
    cluster: str | None = None,
    **options: Unpack[OptionKeywords],
) -> TunedModel:
    """Convert as much of a model to low precision as its measured accuracy allows.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is not changed.
        tolerance: the largest accepted error; see ``metric``. None for 1e-2 (40 dB) and, for a quantized model, the
            error of its own rounding to integers as well.
        metric: how the error is measured: "rel-l2", "cosine", "snr", "top1", "detections", "package:function", or a
            function of the outputs of the float32 model and of the result, two dicts of arrays, that returns the
            error; the worst of several outputs counts. "auto" is "detections" for models whose outputs list items that
            an op selected by value (TopK, NonMaxSuppression, ...), and "rel-l2" for others.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts, of tuples of arrays in the
            order of the inputs, or of arrays, such as a PyTorch loader. None for ``count`` random samples (with
            ``seed``, and sizes of named dimensions from ``dims``).
        device: the device to estimate times for, such as "A100" or "H100"; "auto" for the one that the target is for,
            otherwise the installed GPU, or an A100 if none is known.
        times: "roofline" for estimates, or "measured" for times from ONNX Runtime's profiler. On CUDA and plugin
            providers, the best candidate, level O2 and float32 are also timed as whole models, and the fastest is
            returned.
        provider: where converted models are measured: "cuda", as they are, or "cpu", emulated. None for CUDA if there
            is a device.
        runs: the maximum number of candidates to convert and measure.
        state: a file that keeps measurements, so that an interrupted tuning resumes, and a run with another tolerance
            or ``pick`` measures only the converted model.
        pick: return this candidate instead of the best one, whatever its error.
        progress: called with the current activity, the steps done, and their number.
        budget: bytes of values and weights that a run on the CPU may keep in memory at a time, in addition to the
            model.
        seconds: time limit, after which no further candidate is converted and the best measured one is returned.
            With a state file, another tuning continues where this one stopped.
        allow_slower: choose the candidate within the tolerance that lowers the most, regardless of its time. By
            default, the fastest one is chosen, and candidates that are estimated to be slower than float32 are
            excluded.
        accept: a function of the outputs of the original and of a candidate, by name, that returns True or False; or
            "package:function". A candidate that it rejects misses the tolerance, regardless of its error.
        jobs: the number of worker processes that share the samples; None to use this process only.
        cluster: the Ray cluster that the workers belong to: "local" for one on this machine, or an address.
        options: those of :func:`onnxamp.convert_model`, except level and lists, which measurements replace.

    Returns:
        The converted model and the outcome of the search. If no candidate meets the tolerance, nothing
        is lowered.

    Raises:
        RuntimeFailure: the model does not run, or misses the tolerance even in float32.
        ArgumentError: an argument is wrong. ModelError: the model cannot be read.

    Example:
        >>> import onnxamp
        >>> model16, tuned = onnxamp.tune_model("models/classifier.onnx", 1e-2, count=1, provider="cpu")
        >>> tuned.error <= 1e-2
        True
    """
    asked = Options.of(Level.AUTO, options)
    search = Search(
        tolerance=tolerance,
        metric=metric,
        device=device,
        times=times,
        runs=runs,
        pick=pick,
        seconds=seconds,
        allow_slower=allow_slower,
        accept=None if accept is None else Accept.of(accept),
    )
    search.check_state(state)
    run = RunOptions(
        samples=samples,
        count=count,
        seed=seed,
        dims=dims or {},
        provider=provider,
        place=Place(jobs, cluster),
        state=state,
        report=progress or silent,
        budget=budget,
    )
    converted, tuned = convert_in_memory(
        Request(model=Model.of(model), asked=asked, run=run, search=search)
    )
    assert tuned is not None
    return TunedModel(converted.embedded(), tuned)
