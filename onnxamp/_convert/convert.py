"""The pipeline, readable on one screen: prepare, analyse, edit a copy, verify, write."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxamp._convert.analysis import Analysis, analyse
from onnxamp._convert.hints import opset_hint
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._convert.savings import fold_hint
from onnxamp._convert.summary import Summary, summarize
from onnxamp._decide.policy import Level, Policy, make_policy
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._graph.collecting import no_collections
from onnxamp._model.graphsurgeon import from_graphsurgeon, is_graphsurgeon, to_graphsurgeon
from onnxamp._model.saving import copy_file, save_model
from onnxamp._model.storage import (
    INLINE_LIMIT,
    Stock,
    WeightConverter,
    folder_of,
    load_external_data,
    load_model,
    take_stock,
)
from onnxamp._model.weights import ConversionCounts
from onnxamp._model.wellformed import check_wellformed
from onnxamp._rewrite.apply import apply_edits
from onnxamp._rewrite.prepare import prepare
from onnxamp._rewrite.verify import promise


@dataclass(frozen=True, slots=True)
class Conversion:
    """What :func:`convert_file` did: the plan, what is in the model now, and what was lost in the weights."""

    source: Path
    target: Path
    plan: Plan
    summary: Summary
    notes: tuple[str, ...]
    weights: Mapping[str, ConversionCounts]
    bytes_before: int
    bytes_after: int


@no_collections()
def convert_with(model: Any, policy: Policy, opset: int | None = None, plan: Plan | None = None) -> Any:
    """:func:`onnxamp.convert_model` under a policy that is made already, or as a plan says.

    Raises:
        ArgumentError: the policy's level is "auto", and no plan says what was measured. Others as there.
    """
    check_decided(policy, plan)
    if is_graphsurgeon(model):
        return to_graphsurgeon(convert_with(from_graphsurgeon(model), policy, opset, plan))
    proto, base_dir = _locate(model)
    prepared, _, wanted = prepare(proto, policy, opset, base_dir)
    analysis = analyse(prepared, policy, base_dir=base_dir, replay=plan.decisions() if plan else None)
    result = rewritten(prepared if analysis.edits or wanted else proto, analysis, base_dir)
    if base_dir is not None:
        load_external_data(result, base_dir)
    return result


def rewritten(prepared: ModelProto, analysis: Analysis, base_dir: Path | None = None) -> ModelProto:
    """A copy of the model that was analysed, as the analysis has it."""
    result = ModelProto()
    result.CopyFrom(prepared)
    if analysis.edits:
        kept = promise(analysis.view, analysis.types, analysis.policy)
        apply_edits(analysis.view, analysis.edits, result, WeightConverter(analysis.policy.low, base_dir))
        kept.check(result)
    return result


def check_decided(policy: Policy, plan: Plan | None) -> None:
    """Refuse level "auto" where nothing was measured: :mod:`onnxamp._tuning` makes its plans.

    Raises:
        ArgumentError: there is no plan.
    """
    if policy.level == Level.AUTO and plan is None:
        raise ArgumentError("Level 'auto' needs measurements: use onnxamp.convert_model or onnxamp tune.")


def plan_model(model: Any, level: str = "O2", *, opset: int | None = None, **wishes: Any) -> Plan:
    """:func:`onnxamp.plan_model` at a level that needs no measurements."""
    proto, base_dir = (from_graphsurgeon(model), None) if is_graphsurgeon(model) else _locate(model)
    policy = make_policy(level, **wishes)
    check_decided(policy, None)
    prepared = prepare(proto, policy, opset, base_dir).model
    return make_plan(analyse(prepared, policy, base_dir=base_dir), opset)


def apply_plan(model: Any, plan: Plan) -> Any:
    """Convert a model as a plan says, which may come from a file (:func:`load_plan`).

    Raises:
        ArgumentError: the plan was made for another model. Others as :func:`onnxamp.convert_model`.
    """
    return convert_with(model, plan_policy(plan), plan.opset, plan)


def plan_policy(plan: Plan) -> Policy:
    """The policy under which a plan is replayed."""
    return make_policy(
        plan.level, dtype=plan.dtype, target=plan.target, hazards=plan.heeded, keep_io_types=plan.keep_io_types,
        freeze_defaults=plan.freeze_defaults, keep_functions=plan.keep_functions, fold=plan.fold,
    )  # fmt: skip


@no_collections()
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
    **wishes: Any,
) -> Conversion:
    """:func:`onnxamp.convert_file` at a level that needs no measurements, or as a plan says."""
    if external_data not in ("auto", "always", "never"):
        raise ArgumentError(f"external_data must be 'auto', 'always' or 'never', not {external_data!r}.")
    if shard_bytes is not None and not (shard_bytes > 0 and external_data != "never"):
        raise ArgumentError(f"shard_bytes must be positive, and is for external data alone, not {shard_bytes!r}.")
    policy = plan_policy(plan) if plan else make_policy(level, **wishes)
    check_decided(policy, plan)
    source, target = Path(src), Path(dst)
    if target.is_dir():
        raise ArgumentError(f"The output {str(target)!r} is a folder: name a file.")
    proto, base_dir = load_model(source), folder_of(source)
    target = target.resolve() if target.is_symlink() else target
    is_same = target.exists() and target.samefile(source)
    stock = take_stock(proto, base_dir)
    if target.resolve() in stock.files:
        raise ArgumentError(f"{str(target)!r} holds weights of the model: give the output another name.")
    keep = frozenset() if is_same else stock.files
    opset = plan.opset if plan else opset
    prepared, notes, wanted = prepare(proto, policy, opset, base_dir)
    analysis = analyse(prepared, policy, base_dir=base_dir, replay=plan.decisions() if plan else None)
    made, summary = make_plan(analysis, opset), summarize(analysis)
    found = () if plan else (opset_hint(prepared, analysis, base_dir), fold_hint(prepared, analysis, base_dir))
    hints = tuple(filter(None, found))
    external = _wants_external(external_data, stock, summary)
    converter = WeightConverter(policy.low, base_dir, deferred=True)
    if analysis.edits:
        kept = promise(analysis.view, analysis.types, policy)
        apply_edits(analysis.view, analysis.edits, prepared, converter)
        kept.check(prepared)
    elif not wanted:
        prepared, notes = proto, []
        is_beside = base_dir.resolve() == target.resolve().parent
        if bool(stock.files) == external and shard_bytes is None and (not external or is_beside):
            copy_file(source, target, keep | stock.files)
            return Conversion(source, target, made, summary, hints, {}, stock.size, stock.size)
    total = save_model(prepared, target, converter, external=external, shard_bytes=shard_bytes, keep=keep,
               progress=progress)  # fmt: skip
    return Conversion(source, target, made, summary, (*notes, *hints), converter.counts(), stock.size, total)


def _wants_external(wish: str, stock: Stock, summary: Summary) -> bool:
    """Whether the result's weights go to a data file.

    Raises:
        ArgumentError: the user wants one file, which protobuf could not hold.
    """
    size = stock.size - summary.low_weight_bytes // 2
    if wish == "never" and size > INLINE_LIMIT:
        raise ArgumentError(
            f"{size} bytes of weights do not fit into one file: protobuf ends at 2 GiB; use external data."
        )
    return wish == "always" or (wish == "auto" and (size > INLINE_LIMIT or bool(stock.files)))


def load_any(model: Any) -> ModelProto:
    """A ModelProto from a ModelProto or a path; external data of a path is loaded.

    Raises:
        ArgumentTypeError: it is neither. ModelError: the file is no model.
    """
    proto, base_dir = _locate(model)
    if base_dir is not None:
        load_external_data(proto, base_dir)
    return proto


def _locate(model: Any) -> tuple[ModelProto, Path | None]:
    if isinstance(model, ModelProto):
        check_wellformed(model)
        return model, None
    if isinstance(model, (str, PathLike)):
        path = Path(model)
        return load_model(path), folder_of(path)
    raise ArgumentTypeError(
        f"model must be an onnx.ModelProto, a path or an onnx-graphsurgeon Graph, not {type(model).__name__}."
    )
