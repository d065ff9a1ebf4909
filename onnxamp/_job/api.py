"""The public conversion functions: each turns its arguments into a Model and Options, and runs the pipeline.

Functions that convert warn of options that match nothing, cannot be followed or break something; a Plan contains these
warnings.
"""

from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

from onnx import ModelProto

from onnxamp._base.errors import ArgumentTypeError
from onnxamp._convert.convert import Converted
from onnxamp._convert.plan import Plan
from onnxamp._job import Request, samples_of_level
from onnxamp._job.in_memory import convert_in_memory, plan_in_memory
from onnxamp._model.model import Model, ModelSource, is_graphsurgeon, to_graphsurgeon
from onnxamp._model.sources import unchanged_sources
from onnxamp._options.options import OptionKeywords, Options
from onnxamp._options.values import LevelName, is_auto
from onnxamp._runtime.run import RunOptions
from onnxamp._tuning.results import Search

if TYPE_CHECKING:
    from onnxamp._runtime.inputs.samples import SamplesLike
    from onnxamp._tuning.metric import MetricLike


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
    tolerance: float | None = None,
    samples: "SamplesLike | None" = None,
    metric: "MetricLike" = "auto",
    **options: Unpack[OptionKeywords],
) -> ModelProto: ...
@overload
def convert_model(
    model: G,
    level: LevelName = "O2",
    *,
    tolerance: float | None = None,
    samples: "SamplesLike | None" = None,
    metric: "MetricLike" = "auto",
    **options: Unpack[OptionKeywords],
) -> G: ...
@unchanged_sources()
def convert_model(
    model: Any,
    level: LevelName = "O2",
    *,
    tolerance: float | None = None,
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
        tolerance: level "auto" only: the largest accepted error, in units of the metric; None for 1e-2.
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
        run=RunOptions(samples=samples, count=samples_of_level(asked)),
        search=Search(tolerance=tolerance, metric=metric),
    )
    converted, _ = convert_in_memory(request)
    return _like(model, converted.embedded())


@unchanged_sources()
def plan_model(
    model: ModelSource,
    level: LevelName = "O2",
    *,
    tolerance: float | None = None,
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
        run=RunOptions(samples=samples, count=samples_of_level(asked)),
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
    _, result = conversion_and_result(model, options, plan, samples)
    return result


@unchanged_sources()
def conversion_and_result(
    model: Any,
    options: Options,
    plan: Plan | None = None,
    samples: "SamplesLike | None" = None,
) -> tuple[Converted, Any]:
    """Convert as :func:`convert_as` does; return the conversion and the result."""
    request = Request(
        model=Model.of(model),
        asked=options,
        plan=plan,
        run=RunOptions(samples=samples),
    )
    converted, _ = convert_in_memory(request)
    return converted, _like(model, converted.embedded())


def _like(model: Any, proto: ModelProto) -> Any:
    """Return the result in the form in which the model was given."""
    return to_graphsurgeon(proto) if is_graphsurgeon(model) else proto
