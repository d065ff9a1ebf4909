"""The public functions of conversion: each turns its arguments into a Model and Options, and runs the pipeline.

Those that convert warn of options that match nothing, cannot be obeyed or break something; a Plan holds these warnings.
"""

from collections.abc import Callable
from os import PathLike
from typing import Any, Protocol, TypeVar, Unpack, overload

from onnx import ModelProto

from onnxamp._convert.convert import CONVERSION, Conversion, Converted, Sink, begun, convert, convert_to_file
from onnxamp._convert.deciding import analyse_model, in_float32
from onnxamp._convert.misspelt import refuse_misspelt
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._errors import ArgumentTypeError, InternalError
from onnxamp._graph.collecting import no_collections
from onnxamp._model.graphsurgeon import is_graphsurgeon, to_graphsurgeon
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources, watched_sources
from onnxamp._numerics.ranges import RangeRun, with_ranges
from onnxamp._numerics.rounding import WeightRounder, rounder_of
from onnxamp._ops.custom import declared_ops
from onnxamp._options.auto import is_auto
from onnxamp._options.keywords import OptionKeywords
from onnxamp._options.levels import LevelName
from onnxamp._options.options import Options
from onnxamp._paths.paths import as_path
from onnxamp._runtime.samples import SamplesLike
from onnxamp._runtime.sampling import as_samples
from onnxamp._state.state import State, StateLike, opened
from onnxamp._tuning.arguments import Search, with_rounder
from onnxamp._tuning.metric import MetricLike
from onnxamp._tuning.tune import tune_warned
from onnxamp._warnings import warn
from onnxamp._workers.executor import Workers
from onnxamp._workers.place import Place


class SurgeonGraph(Protocol):
    """What makes an object an onnx-graphsurgeon Graph to type checkers."""

    nodes: Any

    def toposort(self) -> Any:
        """Sort the nodes."""


G = TypeVar("G", bound=SurgeonGraph)


@overload
def convert_model(
    model: ModelProto | str | PathLike[str], level: LevelName = "O2", *, tolerance: float = 1e-2,
    samples: SamplesLike | None = None, metric: MetricLike = "auto", **options: Unpack[OptionKeywords],
) -> ModelProto: ...  # fmt: skip
@overload
def convert_model(
    model: G, level: LevelName = "O2", *, tolerance: float = 1e-2, samples: SamplesLike | None = None,
    metric: MetricLike = "auto", **options: Unpack[OptionKeywords],
) -> G: ...  # fmt: skip
@unchanged_sources()
def convert_model(
    model: Any,
    level: LevelName = "O2",
    *,
    tolerance: float = 1e-2,
    samples: SamplesLike | None = None,
    metric: MetricLike = "auto",
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
        strict: at O2, lower every op that is not black-listed, whatever its Casts cost.
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
    settings = Options.of(level, options)
    with declared_ops(settings.custom_ops):
        if is_auto(level, tolerance, samples, metric, measures=settings.takes_samples):
            source = Model.of(model)
            search, rounder = with_rounder(source, settings, Search(tolerance, metric, samples))
            plan = tune_warned(source, settings, search, rounder).plan
            return _like(model, convert(source, plan.options, plan, rounder=rounder).embedded())
        return convert_as(model, settings, samples=samples)


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
    progress: Callable[[int, int], None] | None = None,
    tolerance: float = 1e-2,
    samples: SamplesLike | None = None,
    metric: MetricLike = "auto",
    jobs: int | None = None,
    cluster: str | None = None,
    state: StateLike = None,
    **options: Unpack[OptionKeywords],
) -> Conversion:
    """Convert a model file of any size, and write the result whole or not at all.

    Args:
        src: the model. Its external data are memory-mapped and streamed; at level "auto" the model is loaded and run.
        dst: the file to write; an existing one is replaced once the new one is complete.
        level, tolerance, samples, metric, options: as :func:`convert_model`.
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
        The plan, a summary of the result, and how many elements of each weight overflowed or underflowed.

    Raises:
        OutputError: the target cannot be written. ArgumentError: the state belongs to another conversion. Others as
            :func:`convert_model`.

    Example:
        >>> import onnxamp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     conversion = onnxamp.convert_file("models/encoder.onnx", f"{folder}/encoder_fp16.onnx")
        >>> conversion.bytes_after < conversion.bytes_before
        True
    """
    settings = plan.options if plan else Options.of(level, options)
    if plan is not None and options:
        warn([f"The plan replaces {', '.join(sorted(options))}: these arguments have no effect."])
    with declared_ops(settings.custom_ops), opened(state) as kept, Place(jobs, cluster).sharing() as workers:
        sink = Sink(as_path(dst), external_data, shard_bytes, progress, workers=workers, data_names=data_names)
        source = Model.of(as_path(src))
        sink, is_tuned = begun(kept, source, sink, settings, plan), False
        if plan is None and is_auto(level, tolerance, samples, metric, measures=settings.takes_samples):
            search, rounder = with_rounder(source, settings, Search(tolerance, metric, samples, state=kept))
            plan, is_tuned = tune_warned(source, settings, search, rounder).plan, True
            settings = plan.options
        else:
            settings, rounder = _measured(source, settings, samples, plan, kept, workers)
        conversion = convert_to_file(source, sink, settings, plan, rounder=rounder)
        if kept is not None:
            kept.drop(CONVERSION)
    if not is_tuned:
        warn(conversion.plan.warnings)
    return conversion


@unchanged_sources()
def plan_model(
    model: ModelSource,
    level: LevelName = "O2",
    *,
    tolerance: float = 1e-2,
    samples: SamplesLike | None = None,
    metric: MetricLike = "auto",
    **options: Unpack[OptionKeywords],
) -> Plan:
    """Decide the precision of every float without rewriting the model.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        level, tolerance, samples, metric, options: as :func:`convert_model`.

    Returns:
        A :class:`Plan`: print it, save it as JSON, or apply it with :func:`apply_plan`.

    Raises:
        As :func:`convert_model`.

    Example:
        >>> import onnxamp
        >>> plan = onnxamp.plan_model("models/encoder.onnx", "O1")
        >>> plan.counts()["MatMul", True] > 0
        True
    """
    settings = Options.of(level, options)
    with declared_ops(settings.custom_ops):
        source = Model.of(model)
        if is_auto(level, tolerance, samples, metric, measures=settings.takes_samples):
            return tune_warned(source, settings, Search(tolerance, metric, samples)).plan
        settings, _ = _measured(source, settings, samples)
        try:
            return make_plan(analyse_model(source, settings)[1])
        except InternalError as error:
            return make_plan(in_float32(source, settings, error)[1])


@overload
def apply_plan(
    model: ModelProto | str | PathLike[str], plan: Plan, *, samples: SamplesLike | None = None
) -> ModelProto: ...
@overload
def apply_plan(model: G, plan: Plan, *, samples: SamplesLike | None = None) -> G: ...
def apply_plan(model: Any, plan: Plan, *, samples: SamplesLike | None = None) -> Any:
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
        raise ArgumentTypeError(f"plan must come from plan_model or load_plan, not be a {type(plan).__name__}.")
    return convert_as(model, plan.options, plan, samples)


@no_collections()
def convert_as(model: Any, options: Options, plan: Plan | None = None, samples: SamplesLike | None = None) -> Any:
    """:func:`convert_model` and :func:`apply_plan` behind their arguments; not for level "auto" without a plan."""
    return converted_as(model, options, plan, samples)[1]


@unchanged_sources()
def converted_as(
    model: Any, options: Options, plan: Plan | None = None, samples: SamplesLike | None = None
) -> tuple[Converted, Any]:
    """What :func:`convert_as` did, and its result."""
    with declared_ops(options.custom_ops):
        source = Model.of(model)
        settings, rounder = _measured(source, options, samples, plan)
        converted = convert(source, settings, plan, rounder=rounder)
    warn(converted.analysis.pins.warnings)
    return converted, _like(model, converted.embedded())


def _measured(
    model: Model,
    options: Options,
    samples: SamplesLike | None,
    plan: Plan | None = None,
    state: State | None = None,
    workers: Workers | None = None,
) -> tuple[Options, WeightRounder | None]:
    """The options with what follows from the ranges that they ask for, and what rounds weights as they ask.

    Samples are made up where none are given, but not to repeat a plan: it was made for others, perhaps.
    """
    if plan is None:
        refuse_misspelt(model, options)
    asks = options.compensates and (plan is None or samples is not None)
    if not options.lacks_ranges and not asks:
        return options, None
    found = as_samples(samples, model)
    options = with_ranges(model, options, RangeRun(found, workers=workers, state=state))
    return options, rounder_of(options, found) if asks else None


def _like(model: Any, proto: ModelProto) -> Any:
    """The result in the form in which the model came in."""
    return to_graphsurgeon(proto) if is_graphsurgeon(model) else proto
