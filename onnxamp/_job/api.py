"""The public conversion functions: each turns its arguments into a Model and Options, and runs the pipeline.

Functions that convert warn of options that match nothing, cannot be followed or break something; a Plan contains these
warnings.
"""

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, Unpack, overload

from onnx import ModelProto

from onnxamp._base.errors import ArgumentTypeError, warn
from onnxamp._base.paths import as_path
from onnxamp._base.place import Place
from onnxamp._convert.convert import Converted
from onnxamp._convert.plan import Plan
from onnxamp._facts.targets import AUTO
from onnxamp._job import Request, Validation, search_metric, validation_metric
from onnxamp._job.pipeline import convert_in_memory, convert_to_file, plan_in_memory
from onnxamp._model.model import Model, ModelSource, is_graphsurgeon, to_graphsurgeon
from onnxamp._model.sources import unchanged_sources, watched_sources
from onnxamp._options.options import OptionKeywords, Options
from onnxamp._options.values import TOLERANCE, Level, LevelName, is_auto
from onnxamp._runtime import BUDGET
from onnxamp._runtime.run import Report, RunOptions, silent
from onnxamp._tuning.results import RUNS, SECONDS, Search, TunedModel

if TYPE_CHECKING:
    from onnxamp._base.state import StateLike
    from onnxamp._job.writing import Conversion
    from onnxamp._numerics.limits import AcceptLike
    from onnxamp._runtime.engines import Progress
    from onnxamp._runtime.samples import SamplesLike
    from onnxamp._runtime.session import Provider
    from onnxamp._tuning.metric import MetricLike

TUNING_SAMPLES: Final = 4
"""The number of random samples that level auto uses by default, as the command line does."""


class SurgeonGraph(Protocol):
    """The attributes by which type checkers recognize an onnx-graphsurgeon Graph."""

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
            has a low-precision kernel, "auto" as much as measured errors allow (see :func:`tune_model`).
        dtype: the low-precision type, "float16" or "bfloat16"; also as a NumPy or ml_dtypes type, or as an ONNX
            element type such as ``onnx.TensorProto.BFLOAT16``.
        lists: the preset of white and black lists: "default", "conservative", "fast", "mindspore" or "paddle". The
            default lowers normalizations and softmax where the target's kernels accumulate them in float32;
            "conservative" keeps them in float32 everywhere. Level "auto" uses no preset.
        white_list: more op types to lower; "domain::OpType" outside ai.onnx, and the names of MindSpore and Paddle
            ("Conv2d", "matmul_v2"). Overrides the preset and the level, but not kernels, schemas,
            hazards or overrides of nodes.
        black_list: more op types to keep in float32. Overrides the preset.
        keep_high: regular expressions: nodes whose full name matches stay in float32.
        force_low: regular expressions: nodes whose full name matches are lowered despite lists and hazards;
            a warning names the nodes that are known to break.
        keep_nodes: literal names of nodes or of their outputs: these nodes stay in float32.
        low_weights: regular expressions: weights are stored in low precision if their full name, or that of a node that
            reads them, matches. A consumer in float32 gets them through a Cast.
        weights_only: store weights in low precision and compute everything in float32: the file is smaller, but nothing
            is faster. Small weights, and weights that low precision cannot represent, stay in float32.
        init_max: nodes that read a constant with an element beyond this magnitude stay in float32.
        data_max: nodes that read or write a float beyond this magnitude on the samples stay in float32. This runs the
            model. Nodes in bodies of loops and branches are ignored.
        input_ranges: the least and the largest number of float inputs by name. Random inputs are drawn from these
            ranges, and validation proves, or searches for the opposite, that no input within them overflows.
        keep_io_types: whether graph inputs and outputs stay in float32, or the names of those that do. Inputs with a
            default that low precision breaks always stay in float32.
        target: where the result will run: "cuda", "cpu", "webgpu", "openvino" or "tensorrt"; "cuda" and "cpu"
            optionally with a version of ONNX Runtime ("cuda@1.24"); "auto" for the installed one; "float16-only" for
            devices that ignore types; or "any" (everything that ONNX allows, with or without a kernel, unless a
            provider accepts it and then fails).
        strict: at O2, lower every op that is not black-listed, regardless of the cost of Casts, except exact
            ops (Reshape, Relu) among ops that have no low-precision kernel.
        hazards: keep nodes in float32 if they are known to break in low precision.
        freeze_defaults: whether initializers that are also graph inputs become plain weights, which callers can no
            longer override; None if nearly every float initializer is an input, as some exporters write them.
        from_dtype: first raise a model of this low-precision type to float32, without changing its inputs and outputs;
            "auto" raises any low-precision type.
        keep_functions: keep calls of model-local functions instead of inlining them.
        custom_ops: declarations of custom ops, which can then be lowered: a TOML file, a
            :class:`CustomOp`, or a list of them. :func:`custom_ops` also accepts the library that runs them.
        opset: the opset of the result: "auto" upgrades an old model op by op to the lowest opset that allows lowering
            more nodes, if that saves Casts or the type needs it, and only as far as results stay the same; "keep" never
            upgrades; a number is the opset to upgrade to first.
        fold: fold each decomposed LayerNorm, RMSNorm, Gelu and Softmax into its standard op, and batch normalizations
            into weights; upgrades the model if such an op needs a newer opset. None folds patterns that can be
            low precision only as a single op, if that makes the result faster; False folds nothing.
        folded: outputs of the patterns that ``fold=None`` has chosen, as recorded in plans.
        rescale: first multiply constants by powers of two, which is exact, so that values that overflow
            on ``samples`` fit the low-precision type; also folds patterns. None: only at level "auto", if that pays
            off. See :doc:`/how-to/rescale`.
        rescaling: exponents found earlier, as recorded in plans.
        split_k: split products that are too long for the target's float16 sums into sums of shorter
            ones, instead of keeping them in float32. See :doc:`/how-to/webgpu`.
        rounding: how to round weights: "nearest", or "compensated", which keeps products of matrices,
            convolutions and recurrent ops on ``samples`` close to the original; "auto" is "nearest", and at level
            "auto" whichever pays off. See :doc:`/how-to/rounding`.
        unsound: outputs of nodes that stay in float32 to avoid a bug of onnxamp, as recorded in plans.
        rule: called with each NodeProto; returns "low", "high", or None for no opinion.
        strict_options: raise an ArgumentError instead of warning for a name or a pattern that matches nothing in the
            model, as the command line does.
        tolerance: level "auto" only: the largest accepted error, in units of the metric.
        samples: level "auto", ``rescale``, ``data_max`` and ``rounding`` only: inputs for measuring errors,
            ranges and products; random ones by default, whose ranges differ from real ones.
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
        OptionWarning: an option matches nothing in the model, cannot be followed, or breaks something; or the
            result would have been wrong because of a bug, and the model stays in float32.

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
    """Return a callback that reports only the progress of writing."""

    def report(activity: str, done: int, total: int) -> None:
        if activity == "writing":
            progress(done, total)

    return report


def _count(options: Options) -> int:
    """Return how many random samples measurements use."""
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

    Like ``onnxamp convert``, this runs the result next to the original before it writes the file. If the result
    fails, onnxamp searches for nodes that must stay in float32, tries level O1, and writes what passes: in the worst
    case the float32 model. If the original does not run on this machine, onnxamp writes the result without validation.

    Args:
        src: the model. Its external data is memory-mapped and streamed.
        dst: the file to write; an existing file is replaced once the new one is complete.
        level, options: as :func:`convert_model`.
        metric: how the validation compares outputs: "auto", "detections" or "elements", see :func:`diff_models`; and
            how level "auto" measures errors, see :func:`tune_model`.
        tolerance: the largest accepted error. It is the limit of the validation (None for 1e-2 in float16, 5e-2 in
            bfloat16) and the goal of level "auto" (None for 1e-2).
        samples: the inputs on which the models are compared and measured; random ones by default.
        validate: compare the result with the original. False writes it without validation, and runs the model only
            if an option needs measurements.
        provider: where models run, "cuda", "cpu" or a plugin provider; None for CUDA if there is a device.
        plan: repeat the decisions of this plan; its level and options replace those of the call.
        external_data: "auto" (weights go to a data file if those of the source do, or if they exceed 1.9 GB), "always"
            or "never".
        shard_bytes: split the data file into several of about this many bytes.
        data_names: "onnx" (``NAME.data``) or "transformers.js" (``NAME_data``, ``NAME_data_1``, ...).
        progress: called with (bytes written, bytes in total) while weights are written.
        jobs: the number of worker processes that read and write the data files of a large model, and measure ranges on
            samples; None to use this process only.
        cluster: the Ray cluster that the workers belong to: "local" for one on this machine, or an address.
        state: a file that records finished data files and measurements, so that an interrupted
            conversion can resume. Until then, finished files wait in a hidden folder beside ``dst``.

    Returns:
        The plan, a summary of the result, its validation, and the number of elements of each weight that overflowed
        or underflowed.

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
        names = ", ".join(sorted(options))
        warn([f"The plan replaces {names}: these arguments have no effect."])
    if plan is None:
        is_auto(
            level,
            tolerance,
            samples,
            metric,
            measures=asked.takes_samples or validate,
            validates=validate,
        )
    validation = Validation(tolerance=tolerance, metric=validation_metric(metric))
    request = Request(
        model=Model.of(as_path(src)),
        asked=asked,
        plan=plan,
        run=RunOptions(
            samples=samples,
            # A validation draws as many inputs as its verdict takes.
            count=None if validate else _count(asked),
            provider=provider,
            place=Place(jobs, cluster),
            state=state,
            report=silent if progress is None else _of_writing(progress),
        ),
        search=Search(
            tolerance=TOLERANCE if tolerance is None else tolerance,
            metric=search_metric(metric),
        ),
        validation=validation if validate else None,
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
        samples: as for :func:`convert_model`; with samples, the plan contains the expected error on similar inputs.

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
    plan, _ = plan_in_memory(request)
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
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph: the model that the plan was made for, or a new
            export of it.
        plan: the plan, from :func:`plan_model` or :func:`load_plan`.
        samples: inputs of the model, which a plan with ``rounding="compensated"`` needs.

    Returns:
        The converted ModelProto (a Graph for a Graph), with all weights inside.

    Raises:
        ArgumentError: the plan belongs to another model, or needs samples. ArgumentTypeError: ``plan`` is not a plan.
            Others as :func:`convert_model`.

    Example:
        >>> import onnxamp
        >>> plan = onnxamp.plan_model("models/encoder.onnx")
        >>> onnxamp.apply_plan("models/encoder.onnx", plan) == onnxamp.convert_model("models/encoder.onnx")
        True
    """
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"plan must be one that plan_model or load_plan returns, not {type(plan).__name__}."
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
    """Convert as :func:`convert_as` does, and also return the conversion."""
    request = Request(
        model=Model.of(model),
        asked=options,
        plan=plan,
        run=RunOptions(samples=samples),
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
) -> TunedModel:
    """Convert as much of a model to low precision as its measured accuracy allows.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is not changed.
        tolerance: the largest accepted error; see ``metric``. For a quantized model, the default also allows for the
            error of its own rounding to integers.
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
    from onnxamp._numerics.limits import Accept  # noqa: PLC0415 - loads the code that runs models

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
    """Return the result in the form in which the model was given."""
    return to_graphsurgeon(proto) if is_graphsurgeon(model) else proto
