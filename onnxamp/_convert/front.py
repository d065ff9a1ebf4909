"""The public door to conversion: level "auto" goes to :mod:`onnxamp._tuning`, all others to :mod:`onnxamp._convert.convert`."""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any, Final

from onnxamp._convert import convert
from onnxamp._convert.convert import Conversion
from onnxamp._convert.plan import Plan
from onnxamp._decide.policy import Level, Rule, make_policy
from onnxamp._errors import ArgumentError
from onnxamp._model.graphsurgeon import from_graphsurgeon, is_graphsurgeon, to_graphsurgeon
from onnxamp._runtime.samples import Samples
from onnxamp._tuning.results import Tuned
from onnxamp._tuning.tune import tune_model

_DEFAULTS: Final = {"tolerance": 1e-2, "samples": None, "metric": "rel-l2"}
"""What level "auto" takes besides wishes."""


def convert_model(
    model: Any,
    level: str = "O2",
    *,
    dtype: str = "float16",
    keep_io_types: bool | Iterable[str] = True,
    white_list: Iterable[str] | None = None,
    black_list: Iterable[str] | None = None,
    lists: str = "default",
    keep_high: Iterable[str] = (),
    force_low: Iterable[str] = (),
    rule: Rule | None = None,
    target: str = "cuda",
    opset: int | None = None,
    strict: bool = False,
    hazards: bool = True,
    freeze_defaults: bool = False,
    keep_functions: bool = False,
    fold: bool = False,
    tolerance: float = 1e-2,
    samples: Samples | None = None,
    metric: str = "rel-l2",
) -> Any:
    """Convert a float32 ONNX model to mixed precision.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        level: "O0" nothing, "O1" white-listed ops, "O2" all but black-listed ops, "O3" everything that can be; "auto"
            what measured errors allow, see :func:`tune_model`.
        dtype: the low type, "float16" or "bfloat16".
        keep_io_types: whether graph inputs and outputs stay float32; or the names of those that do.
        white_list: op types to lower, added to those of ``lists``; "domain::OpType" outside ai.onnx.
        black_list: op types to keep in float32, likewise. Both win over the preset.
        lists: the preset: "default", "fast", "mindspore" or "paddle"; level "auto" heeds none.
        keep_high: regular expressions of node names (whole names) to keep in float32.
        force_low: likewise, to lower whatever lists and hazards say.
        rule: called with each NodeProto; returns "low", "high", or None for no opinion.
        target: where the result will run: "cuda", "cpu", or "any" (what ONNX allows, no kernels asked).
        opset: upgrade the model to this opset first.
        strict: at O2, lower every op that is not black-listed, whatever its Casts cost.
        hazards: keep what static knowledge expects to break in float32.
        freeze_defaults: treat initializers that are graph inputs, too, as weights.
        keep_functions: leave calls of model-local functions alone instead of inlining them.
        fold: first make one standard op of each LayerNorm, RMSNorm, Gelu and Softmax that is written out as single ops,
            and fold batch normalisations into weights; upgrades the model where the op needs that.
        tolerance, samples, metric: for level "auto" alone: the largest error that is accepted, the inputs that it is
            measured on (four made-up ones by default), and what it is.

    Returns:
        The converted ModelProto (a Graph for a Graph). Where nothing becomes low it equals the input bit by bit.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is wrong (also ValueError, TypeError).
        ModelError: the model cannot be read or is invalid. RuntimeFailure: at level "auto", it does not run.
        OnnxAmpError: root of all of them.
    """
    wishes: dict[str, Any] = {
        "dtype": dtype, "keep_io_types": keep_io_types, "white_list": white_list, "black_list": black_list,
        "lists": lists, "keep_high": keep_high, "force_low": force_low, "rule": rule, "target": target,
        "strict": strict, "hazards": hazards, "freeze_defaults": freeze_defaults, "keep_functions": keep_functions,
        "fold": fold,
    }  # fmt: skip
    data: dict[str, Any] = {"tolerance": tolerance, "samples": samples, "metric": metric}
    if not is_auto(level, data):
        return convert.convert_with(model, make_policy(level, **wishes), opset)
    if is_graphsurgeon(model):
        return to_graphsurgeon(tune_model(from_graphsurgeon(model), opset=opset, **data, **wishes)[0])
    return tune_model(model, opset=opset, **data, **wishes)[0]


def convert_file(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    level: str = "O2",
    *,
    opset: int | None = None,
    plan: Plan | None = None,
    external_data: str = "auto",
    shard_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    tolerance: float = 1e-2,
    samples: Samples | None = None,
    metric: str = "rel-l2",
    **wishes: Any,
) -> Conversion:
    """Convert a model file, whatever its size, and write the result whole or not at all.

    Args:
        src: the model; its external data is memory-mapped and streamed. (At level "auto" it is run, in memory.)
        dst: where the result goes; an existing file is replaced once the new one is complete.
        level, opset, tolerance, samples, metric, wishes: as :func:`convert_model`.
        plan: repeat the decisions of this plan instead of deciding; level and wishes do not count then.
        external_data: "auto" (a data file beside the model where the input has one or the result is over 1.9 GB),
            "always", or "never".
        shard_bytes: split the data file into several of about this size.
        progress: called with (bytes written, bytes in all) while weights are written.

    Raises:
        As :func:`convert_model`, and OutputError: the target cannot be written.
    """
    data: dict[str, Any] = {"tolerance": tolerance, "samples": samples, "metric": metric}
    if plan is None and is_auto(level, data):
        plan = _tuned(src, data, opset, wishes).plan
    return convert.convert_file(
        src, dst, level, opset=opset, plan=plan, external_data=external_data, shard_bytes=shard_bytes,
        progress=progress, **wishes,
    )  # fmt: skip


def plan_model(model: Any, level: str = "O2", *, opset: int | None = None, **wishes: Any) -> Plan:
    """Decide without rewriting; takes the arguments of :func:`convert_model`.

    Returns:
        A :class:`Plan`: print it, save it as JSON, or apply it with :func:`apply_plan`.

    Raises:
        As :func:`convert_model`.
    """
    data = {name: wishes.pop(name, default) for name, default in _DEFAULTS.items()}
    if not is_auto(level, data):
        return convert.plan_model(model, level, opset=opset, **wishes)
    return _tuned(from_graphsurgeon(model) if is_graphsurgeon(model) else model, data, opset, wishes).plan


def _tuned(model: Any, data: dict[str, Any], opset: int | None, wishes: dict[str, Any]) -> Tuned:
    return tune_model(model, opset=opset, **data, **wishes)[1]


def is_auto(level: str, data: dict[str, Any]) -> bool:
    """Whether data decide.

    Raises:
        ArgumentError: they do not, but are given.
    """
    given = [name for name, default in _DEFAULTS.items() if data[name] is not default and data[name] != default]
    if level != Level.AUTO and given:
        raise ArgumentError(f"{given[0]} is for level 'auto' alone, not for {level!r}.")
    return level == Level.AUTO
