"""The public functions of conversion: each turns its arguments into a Model and Options, and runs the pipeline.

Those that convert warn of options that match nothing, cannot be obeyed or break something; a Plan holds these warnings.
"""

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, Unpack, overload

from onnx import ModelProto

from onnxamp._convert.convert import Converted
from onnxamp._convert.plan import Plan
from onnxamp._errors import ArgumentTypeError
from onnxamp._job.pipeline import convert_in_memory, convert_to_file, decide
from onnxamp._job.request import Request, Validation
from onnxamp._model.model import Model, ModelSource, is_graphsurgeon, to_graphsurgeon
from onnxamp._model.sources import unchanged_sources, watched_sources
from onnxamp._options.keywords import OptionKeywords
from onnxamp._options.levels import TOLERANCE, Level, LevelName, is_auto
from onnxamp._options.options import Options
from onnxamp._paths.paths import as_path
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.run import Report, RunOptions, silent
from onnxamp._target.targets import AUTO
from onnxamp._tuning.arguments import RUNS, SECONDS, Search
from onnxamp._warnings import warn
from onnxamp._workers.place import Place

if TYPE_CHECKING:
    from onnxamp._job.writing import Conversion
    from onnxamp._numerics.limits import AcceptLike
    from onnxamp._runtime.engines import Progress
    from onnxamp._runtime.samples import SamplesLike
    from onnxamp._runtime.session import Provider
    from onnxamp._state import StateLike
    from onnxamp._tuning.metric import MetricLike
    from onnxamp._tuning.results import TunedModel

TUNING_SAMPLES: Final = 4
"""Random samples that level auto takes."""


class SurgeonGraph(Protocol):
    """What makes an object an onnx-graphsurgeon Graph to type checkers."""

    nodes: Any

    def toposort(self) -> Any:
        """Sort the nodes."""


G = TypeVar("G", bound=SurgeonGraph)


@overload
def convert_model(
    model: ModelProto | str | PathLike[str],
    level: LevelName = "O2",
    *,
    tolerance: float = 1e-2,
    samples: "SamplesLike | None" = None,
    metric: "MetricLike" = "auto",
    **options: Unpack[OptionKeywords],
) -> ModelProto: ...
@overload
def convert_model(
    model: G,
    level: LevelName = "O2",
    *,
    tolerance: float = 1e-2,
    samples: "SamplesLike | None" = None,
    metric: "MetricLike" = "auto",
    **options: Unpack[OptionKeywords],
) -> G: ...
@unchanged_sources()
def convert_model(
    model: Any,
    level: LevelName = "O2",
    *,
    tolerance: float = 1e-2,
    samples: "SamplesLike | None" = None,
    metric: "MetricLike" = "auto",
    **options: Unpack[OptionKeywords],
) -> Any:
    """Convert a float32 ONNX model to mixed precision.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        level: what to lower: "O0" nothing, "O1" white-listed ops, "O2" all but black-listed ops, "O3" every op that
            has a low-precision kernel, "auto" what measured errors allow (see :func:`tune_model`).
        dtype: the low-precision type, "float16" or "bfloat16"; also as a NumPy or ml_dtypes type, or as an ONNX
            element type such as ``onnx.TensorProto.BFLOAT16``.
        lists: the preset of white and black lists: "default", "conservative", "fast", "mindspore" or "paddle". The
            default lowers normalisations and softmax where the target's kernels accumulate them in float32;
            "conservative" keeps them in float32 everywhere. Level "auto" uses none.
        white_list: more op types to lower; "domain::OpType" outside ai.onnx, and the names of MindSpore and Paddle
            ("Conv2d", "matmul_v2"). Overrides the preset and the level; only kernels, schemas, hazards and overrides of
            nodes stand against it.
        black_list: more op types to keep in float32. Overrides the preset.
        keep_high: regular expressions: nodes whose whole name matches stay float32.
        force_low: regular expressions: nodes whose whole name matches are lowered, whatever lists and hazards say; a
            warning names those that are known to break.
        keep_nodes: names of nodes, or of their outputs, taken literally: these nodes stay float32.
        low_weights: regular expressions: weights whose whole name matches, or that of a node that reads them, are
            stored in low precision. A reader that stays float32 gets them through a Cast.
        init_max: nodes that read a constant with an element beyond this magnitude stay float32.
        data_max: nodes that read or write a float beyond this magnitude on the samples stay float32; the model runs
            for that. Nodes in bodies of loops and branches are not looked at.
        keep_io_types: whether graph inputs and outputs stay float32, or the names of those that do. Inputs with a
            default that low precision breaks stay float32 in any case.
        target: where the result will run: "cuda", "cpu", "webgpu", "openvino" or "tensorrt"; "cuda" and "cpu" also of a
            version of ONNX Runtime ("cuda@1.24"); "auto" for the installed one; "float16-only" for devices that honour
            no types; or "any" (whatever ONNX allows, kernel or not, unless a provider takes it and then fails).
        strict: at O2, lower every op that is not black-listed, whatever its Casts cost; exact ops (Reshape, Relu) not
            where only ops without a low-precision kernel surround them.
        hazards: keep in float32 what is known to break in low precision.
        freeze_defaults: whether initializers that are also graph inputs become plain weights, which callers can no
            longer override; None if every float initializer is an input, as some exporters write them.
        from_dtype: raise a model of this low-precision type to float32 first, with its inputs and outputs as they are;
            "auto" raises whatever is low precision.
        keep_functions: keep calls of model-local functions instead of inlining them.
        custom_ops: declarations of custom ops, whose float32 may then be low precision: a TOML file, a
            :class:`CustomOp`, or a list of them. :func:`custom_ops` also takes the library that runs them.
        opset: the opset of the result: "auto" upgrades an old model to the least opset that lets more become low, where
            that saves Casts or the type needs it, op by op and as far as results stay the same; "keep" never upgrades;
            a number is the opset to upgrade to first.
        fold: fold each decomposed LayerNorm, RMSNorm, Gelu and Softmax into its standard op, and batch normalisations
            into weights; upgrades the model if such an op needs a newer opset. None folds the patterns that become low
            precision only as one op, where that makes the result faster; False leaves all of them alone.
        folded: outputs of the patterns that were found to pay with ``fold=None``, as plans hold them.
        rescale: first multiply constants by powers of two, exactly, so that values fit the low-precision type that
            overflow on ``samples``; folds patterns as ``fold`` does. None for level "auto" alone, where that pays. See
            :doc:`/how-to/rescale`.
        rescaling: exponents that were found before, as plans hold them.
        split_k: split products of so many terms that the target's float16 sum would lose digits into sums of shorter
            ones, instead of keeping them in float32. See :doc:`/how-to/webgpu`.
        rounding: how weights become low precision: "nearest", or "compensated", so that the products of matrices,
            convolutions and recurrent ops on ``samples`` stay near; "auto" is the former, and at level "auto" what
            pays. See :doc:`/how-to/rounding`.
        unsound: outputs of nodes that stay float32 since a bug of onnxamp shows there otherwise, as plans hold them.
        rule: called with each NodeProto; returns "low", "high", or None for no opinion.
        strict_options: raise an ArgumentError for a name or a pattern that matches nothing in the model, as the command
            line does, instead of a warning.
        tolerance: level "auto" only: the largest error to accept, in units of the metric.
        samples: level "auto", ``rescale``, ``data_max`` and ``rounding`` only: the inputs on which errors, ranges and
            products are measured; random ones by default, which reach other ranges than real ones.
        metric: level "auto" only: how errors are measured.

    Returns:
        The converted ModelProto (a Graph for a Graph), with all weights inside. It equals the input bit for bit if
        nothing is lowered.

    Raises:
        ArgumentError: an argument has an unknown or impossible value.
        ArgumentTypeError: an argument has the wrong type.
        ModelError: the model cannot be read or is invalid.
        RuntimeFailure: the level is "auto", or ``data_max`` is given, and the model does not run.

    Warns:
        OptionWarning: an option matches nothing in the model, cannot be obeyed, or breaks something; or the result
            would have been wrong, which is a bug, so that the model stays float32.

    Example:
        >>> import onnx, onnxamp
        >>> model16 = onnxamp.convert_model("models/encoder.onnx", "O2", dtype="float16")
        >>> onnx.TensorProto.FLOAT in {tensor.data_type for tensor in model16.graph.initializer}
        False
    """
    asked = Options.of(level, options)
    is_auto(level, tolerance, samples, metric, measures=asked.takes_samples)
    request = Request(
        model=Model.of(model),
        asked=asked,
        run=RunOptions(samples=samples, count=_count(asked)),
        search=Search(tolerance=tolerance, metric=metric),
    )
    converted, _ = convert_in_memory(request)
    return _like(model, converted.embedded())


def _of_writing(progress: "Progress") -> Report:
    """Return a report that passes on how much is written, and nothing else."""

    def report(activity: str, done: int, total: int) -> None:
        if activity == "writing":
            progress(done, total)

    return report


def _count(options: Options) -> int:
    """Return how many random samples measurements take."""
    return TUNING_SAMPLES if options.level == Level.AUTO else 1


@watched_sources()
def convert_file(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    level: LevelName = "O2",
    *,
    plan: Plan | None = None,
    external_data: str = "auto",
    shard_bytes: int | None = None,
    data_names: str = "onnx",
    progress: "Progress | None" = None,
    tolerance: float | None = None,
    samples: "SamplesLike | None" = None,
    metric: "MetricLike" = "auto",
    validate: bool = True,
    provider: "Provider | None" = None,
    jobs: int | None = None,
    cluster: str | None = None,
    state: "StateLike" = None,
    **options: Unpack[OptionKeywords],
) -> "Conversion":
    """Convert a model file of any size, validate the result, and write it whole or not at all.

    As ``onnxamp convert`` does, this runs the result beside the original before it takes its place. If the result
    fails, onnxamp searches for nodes that must stay float32, tries level O1, and writes what passes: at last the
    float32 model. Where the original does not run on this machine, the result is written without validation.

    Args:
        src: the model. Its external data are memory-mapped and streamed.
        dst: the file to write; an existing one is replaced once the new one is complete.
        level, metric, options: as :func:`convert_model`.
        tolerance: the largest error to accept. It is the limit of the validation (None for 1e-2 in float16, 5e-2 in
            bfloat16), and what level "auto" tunes to (1e-2).
        samples: the inputs on which the models are compared and measured; random ones by default.
        validate: compare the result with the original. False writes it unseen, and runs no model that the options do
            not ask to measure.
        provider: where models run, "cuda", "cpu" or a plugin provider; None for CUDA if there is a device.
        plan: repeat the decisions of this plan; its level and options replace those of the call.
        external_data: "auto" (weights go to a data file if those of the source do, or if they exceed 1.9 GB),
            "always", or "never".
        shard_bytes: split the data file into several of about this many bytes.
        data_names: "onnx" (``NAME.data``) or "transformers.js" (``NAME_data``, ``NAME_data_1``, ...).
        progress: called with (bytes written, bytes in all) while weights are written.
        jobs: worker processes that read and write the data files of a large model, and measure ranges on samples; None
            for this process.
        cluster: the Ray cluster that they belong to: "local" for one on this machine, or an address.
        state: a file that keeps which data files are written, and what was measured, so that a conversion that is
            interrupted goes on with the others. Where it failed, they wait in a hidden folder beside ``dst``.

    Returns:
        The plan, a summary of the result, its validation, and how many elements of each weight overflowed or
        underflowed.

    Raises:
        OutputError: the target cannot be written. ArgumentError: the state belongs to another conversion. Others as
            :func:`convert_model`.

    Example:
        >>> import onnxamp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     conversion = onnxamp.convert_file("models/encoder.onnx", f"{folder}/encoder_fp16.onnx")
        >>> conversion.bytes_after < conversion.bytes_before, conversion.validation.passed
        (True, True)
    """
    asked = plan.options if plan else Options.of(level, options)
    if plan is not None and options:
        warn(
            [
                f"The plan replaces {', '.join(sorted(options))}: these arguments have no effect."
            ]
        )
    if plan is None:
        is_auto(
            level,
            tolerance,
            samples,
            metric,
            measures=asked.takes_samples or validate,
            validates=validate,
        )
    request = Request(
        model=Model.of(as_path(src)),
        asked=asked,
        plan=plan,
        run=RunOptions(
            samples=samples,
            count=None if validate else _count(asked),
            provider=provider,
            place=Place(jobs, cluster),
            state=state,
            report=silent if progress is None else _of_writing(progress),
        ),
        search=Search(
            tolerance=TOLERANCE if tolerance is None else tolerance, metric=metric
        ),
        validation=Validation(tolerance=tolerance) if validate else None,
    )
    from onnxamp._job.writing import Sink  # noqa: PLC0415 - only files need it

    sink = Sink(as_path(dst), external_data, shard_bytes, data_names)
    return convert_to_file(request, sink).conversion


@unchanged_sources()
def plan_model(
    model: ModelSource,
    level: LevelName = "O2",
    *,
    tolerance: float = 1e-2,
    samples: "SamplesLike | None" = None,
    metric: "MetricLike" = "auto",
    **options: Unpack[OptionKeywords],
) -> Plan:
    """Decide the precision of every float without rewriting the model.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        level, tolerance, metric, options: as :func:`convert_model`.
        samples: as for :func:`convert_model`; with samples, the plan tells the error to expect on inputs like them.

    Returns:
        A :class:`Plan`: print it, save it as JSON, or apply it with :func:`apply_plan`.

    Raises:
        As :func:`convert_model`.

    Example:
        >>> import onnxamp
        >>> plan = onnxamp.plan_model("models/encoder.onnx", "O1")
        >>> plan.counts()["MatMul", True] > 0
        True
        >>> samples = onnxamp.random_samples("models/encoder.onnx", 1)
        >>> plan = onnxamp.plan_model("models/encoder.onnx", samples=samples)
        >>> 0 < plan.expected.error < plan.expected.bound
        True
    """
    asked = Options.of(level, options)
    is_auto(level, tolerance, samples, metric, measures=True)
    request = Request(
        model=Model.of(model),
        asked=asked,
        run=RunOptions(samples=samples, count=_count(asked)),
        search=Search(tolerance=tolerance, metric=metric),
        expects=samples is not None,
    )
    plan, _ = decide(request)
    return plan


@overload
def apply_plan(
    model: ModelProto | str | PathLike[str],
    plan: Plan,
    *,
    samples: "SamplesLike | None" = None,
) -> ModelProto: ...
@overload
def apply_plan(model: G, plan: Plan, *, samples: "SamplesLike | None" = None) -> G: ...
def apply_plan(model: Any, plan: Plan, *, samples: "SamplesLike | None" = None) -> Any:
    """Convert a model as a plan says.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph: the model that was planned, or a new export of it.
        plan: what to do, from :func:`plan_model` or :func:`load_plan`.
        samples: inputs of the model, which a plan with ``rounding="compensated"`` needs.

    Returns:
        The converted ModelProto (a Graph for a Graph), with all weights inside.

    Raises:
        ArgumentError: the plan belongs to another model, or needs samples. ArgumentTypeError: it is none. Others as
            :func:`convert_model`.

    Example:
        >>> import onnxamp
        >>> plan = onnxamp.plan_model("models/encoder.onnx")
        >>> onnxamp.apply_plan("models/encoder.onnx", plan) == onnxamp.convert_model("models/encoder.onnx")
        True
    """
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"plan must come from plan_model or load_plan, not be a {type(plan).__name__}."
        )
    return convert_as(model, plan.options, plan, samples)


def convert_as(
    model: Any,
    options: Options,
    plan: Plan | None = None,
    samples: "SamplesLike | None" = None,
) -> Any:
    """Convert a model by settled options or a plan; not for level "auto" without a plan."""
    return converted_as(model, options, plan, samples)[1]


@unchanged_sources()
def converted_as(
    model: Any,
    options: Options,
    plan: Plan | None = None,
    samples: "SamplesLike | None" = None,
) -> tuple[Converted, Any]:
    """Convert as :func:`convert_as`; return the conversion besides its result."""
    request = Request(
        model=Model.of(model), asked=options, plan=plan, run=RunOptions(samples=samples)
    )
    converted, _ = convert_in_memory(request)
    return converted, _like(model, converted.embedded())


@unchanged_sources()
def tune_model(
    model: ModelSource,
    tolerance: float = 1e-2,
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
) -> "TunedModel":
    """Convert as much of a model to low precision as its measured accuracy allows.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is not changed.
        tolerance: the largest accepted error; see ``metric``.
        metric: how the error is measured: "rel-l2", "cosine", "snr", "top1", "detections", "package:function", or a
            function of the outputs of the float32 model and of the result, two dicts of arrays, that returns the
            error; of several outputs the worst counts. "auto" is "detections" for models whose outputs list what an op
            selected by its values (TopK, NonMaxSuppression, ...), and "rel-l2" for others.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts, of tuples of arrays in the
            order of the inputs, or of arrays, such as a loader of PyTorch. None for ``count`` random samples (with
            ``seed``, and sizes of named dimensions from ``dims``).
        device: the device to estimate times for, such as "A100" or "H100"; "auto" for the one that the target is for,
            else the GPU that is installed, or an A100 where none is known.
        times: "roofline" for estimates, or "measured" for times from ONNX Runtime's profiler. On CUDA and on plugin
            providers the best candidate and level O2 are timed whole, too; the faster is returned, or float32.
        provider: where converted models are measured: "cuda", as they are, or "cpu", emulated. None for CUDA if there
            is a device.
        runs: candidates that may be converted and measured.
        state: a file that keeps measurements, so that an interrupted tuning resumes, and another tolerance or ``pick``
            measures the converted model alone.
        pick: return this candidate instead of the best one, whatever its error.
        progress: called with the current activity, the steps done, and their number.
        budget: bytes of values and weights that a run on the CPU holds at a time, besides the model itself.
        seconds: after so many, no further candidate is converted: the best of those that were measured is returned.
            With a state file, another tuning goes on where this one stopped.
        allow_slower: choose the candidate with the most in low precision within the tolerance, whatever its time. Else
            the fastest is chosen, and none that is slower than float32 by the estimate is a candidate.
        accept: a function of the outputs of the original and of a candidate, by name, that returns True or False; or
            "package:function". What it rejects misses the tolerance, whatever its error.
        jobs: worker processes that share the samples; None for this process.
        cluster: the Ray cluster that they belong to: "local" for one on this machine, or an address.
        options: those of :func:`onnxamp.convert_model`, except level and lists, which measurements replace.

    Returns:
        The converted model, and the outcome of the search, as a pair. If no candidate meets the tolerance, nothing is
        lowered.

    Raises:
        RuntimeFailure: the model does not run, or misses the tolerance in float32 already.
        ArgumentError: an argument is wrong. ModelError: the model cannot be read.

    Example:
        >>> import onnxamp
        >>> model16, tuned = onnxamp.tune_model("models/classifier.onnx", 1e-2, count=1, provider="cpu")
        >>> tuned.error <= 1e-2
        True
    """
    from onnxamp._numerics.limits import Accept  # noqa: PLC0415 - loads what runs models
    from onnxamp._tuning.results import TunedModel  # noqa: PLC0415

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


def _like(model: Any, proto: ModelProto) -> Any:
    """The result in the form in which the model came in."""
    return to_graphsurgeon(proto) if is_graphsurgeon(model) else proto
