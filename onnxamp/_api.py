"""The public functions of conversion: arguments become a model and options, which go through the one pipeline."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeVar, Unpack, overload

from onnx import ModelProto

from onnxamp._convert.analysis import analyse
from onnxamp._convert.convert import Conversion, Sink, check_decided, convert, convert_to_file
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._model.graphsurgeon import is_graphsurgeon, to_graphsurgeon
from onnxamp._model.model import Model, ModelSource
from onnxamp._options.keywords import OptionKeywords
from onnxamp._options.options import LevelName, Options, is_auto
from onnxamp._rewrite.prepare import prepare
from onnxamp._runtime.samples import SamplesLike
from onnxamp._tuning.tune import Search, tune


class SurgeonGraph(Protocol):
    """An onnx-graphsurgeon Graph, as far as type checkers need to know it."""

    nodes: Any

    def toposort(self) -> Any:
        """Its own."""


G = TypeVar("G", bound=SurgeonGraph)


@overload
def convert_model(
    model: ModelProto | str | PathLike[str], level: LevelName = "O2", *, tolerance: float = 1e-2,
    samples: SamplesLike | None = None, metric: str = "rel-l2", **options: Unpack[OptionKeywords],
) -> ModelProto: ...  # fmt: skip
@overload
def convert_model(
    model: G, level: LevelName = "O2", *, tolerance: float = 1e-2, samples: SamplesLike | None = None,
    metric: str = "rel-l2", **options: Unpack[OptionKeywords],
) -> G: ...  # fmt: skip
def convert_model(
    model: Any,
    level: LevelName = "O2",
    *,
    tolerance: float = 1e-2,
    samples: SamplesLike | None = None,
    metric: str = "rel-l2",
    **options: Unpack[OptionKeywords],
) -> Any:
    """Convert a float32 ONNX model to mixed precision.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        level: "O0" nothing, "O1" white-listed ops, "O2" all but black-listed ops, "O3" everything that can be low
            precision; "auto" what measured errors allow, see :func:`tune_model`.
        dtype: the low-precision type, "float16" or "bfloat16".
        lists: the preset of white and black lists: "default", "fast", "mindspore" or "paddle". Level "auto" uses none.
        white_list: op types to lower besides the preset's; "domain::OpType" outside ai.onnx.
        black_list: op types to keep in float32 besides the preset's. Both win over the preset.
        keep_high: regular expressions; nodes whose whole name matches stay float32.
        force_low: likewise; matching nodes are lowered whatever lists and hazards say.
        keep_io_types: whether graph inputs and outputs stay float32, or the names of those that do.
        target: where the result will run: "cuda", "cpu", or "any" (what ONNX allows, whatever kernels there are).
        strict: at O2, lower every op that is not black-listed, whatever its Casts cost.
        hazards: keep in float32 what is known to break in low precision.
        freeze_defaults: treat initializers that are also graph inputs as weights.
        keep_functions: leave calls of model-local functions alone instead of inlining them.
        opset: upgrade the model to this opset first.
        fold: first fold each decomposed LayerNorm, RMSNorm, Gelu and Softmax into its standard op, and batch
            normalisations into weights; upgrades the model where the op needs it.
        rule: called with each NodeProto; returns "low", "high", or None for no opinion.
        tolerance, samples, metric: for level "auto" only: the largest accepted error, the inputs that it is measured on
            (four made-up ones by default), and how it is measured.

    Returns:
        The converted ModelProto (a Graph for a Graph), with all weights inside. Where nothing becomes low precision it
        equals the input bit by bit.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is wrong (also ValueError, TypeError).
        ModelError: the model cannot be read or is invalid. RuntimeFailure: at level "auto", it does not run.

    Example:
        >>> import onnxamp
        >>> model16 = onnxamp.convert_model("models/encoder.onnx", "O2", dtype="float16")
        >>> sorted({tensor.data_type for tensor in model16.graph.initializer if tensor.data_type in (1, 10)})
        [1, 10]
    """
    asked = Options.of(level, options)
    if is_auto(level, tolerance, samples, metric):
        proto = tune(Model.of(model), asked, Search(tolerance, metric, samples))[0]
        return to_graphsurgeon(proto) if is_graphsurgeon(model) else proto
    return convert_as(model, asked)


def convert_file(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    level: LevelName = "O2",
    *,
    plan: Plan | None = None,
    external_data: str = "auto",
    shard_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    tolerance: float = 1e-2,
    samples: SamplesLike | None = None,
    metric: str = "rel-l2",
    **options: Unpack[OptionKeywords],
) -> Conversion:
    """Convert a model file of any size, and write the result whole or not at all.

    Args:
        src: the model; its external data are memory-mapped and streamed. (At level "auto" it is run, in memory.)
        dst: where the result goes; an existing file is replaced once the new one is complete.
        level, tolerance, samples, metric, options: as :func:`convert_model`.
        plan: repeat the decisions of this plan; level and options are the plan's then.
        external_data: "auto" (a data file beside the model where the input has one or the result is over 1.9 GB),
            "always", or "never".
        shard_bytes: split the data file into several of about this many bytes.
        progress: called with (bytes written, bytes in all) while weights are written.

    Returns:
        The plan, a summary of the result, and what each weight lost.

    Raises:
        OutputError: the target cannot be written. Others as :func:`convert_model`.

    Example:
        >>> import onnxamp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = onnxamp.convert_file("models/encoder.onnx", f"{folder}/encoder_fp16.onnx")
        >>> made.bytes_after < made.bytes_before
        True
    """
    asked = plan.options if plan else Options.of(level, options)
    source, sink = Model.read(Path(src)), Sink(Path(dst), external_data, shard_bytes, progress)
    if plan is None and is_auto(level, tolerance, samples, metric):
        plan = tune(source, asked, Search(tolerance, metric, samples))[1].plan
        asked = plan.options
    return convert_to_file(source, sink, asked, plan)


def plan_model(
    model: ModelSource,
    level: LevelName = "O2",
    *,
    tolerance: float = 1e-2,
    samples: SamplesLike | None = None,
    metric: str = "rel-l2",
    **options: Unpack[OptionKeywords],
) -> Plan:
    """Decide without rewriting; takes the arguments of :func:`convert_model`.

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
    asked, source = Options.of(level, options), Model.of(model)
    if is_auto(level, tolerance, samples, metric):
        return tune(source, asked, Search(tolerance, metric, samples))[1].plan
    check_decided(asked, None)
    return make_plan(analyse(prepare(source, asked).graph, asked))


@overload
def apply_plan(model: ModelProto | str | PathLike[str], plan: Plan) -> ModelProto: ...
@overload
def apply_plan(model: G, plan: Plan) -> G: ...
def apply_plan(model: Any, plan: Plan) -> Any:
    """Convert a model as a plan says, which may come from a file (:func:`load_plan`).

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph: the model that was planned, or one exported again.

    Raises:
        ArgumentError: the plan was made for another model. Others as :func:`convert_model`.

    Example:
        >>> import onnxamp
        >>> plan = onnxamp.plan_model("models/encoder.onnx")
        >>> onnxamp.apply_plan("models/encoder.onnx", plan) == onnxamp.convert_model("models/encoder.onnx")
        True
    """
    return convert_as(model, plan.options, plan)


def convert_as(model: Any, options: Options, plan: Plan | None = None) -> Any:
    """:func:`convert_model` with options that are made already, or as a plan says."""
    proto = convert(Model.of(model), options, plan).embedded()
    return to_graphsurgeon(proto) if is_graphsurgeon(model) else proto
