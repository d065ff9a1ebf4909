"""The judge: what is wrong with a converted model, by means that share nothing with the engine.

``judge`` returns complaints; an empty list is the verdict "good". Every check is a function of its own that
compares with the original: an input may be untidy, and its conversion may then be as untidy, but not more.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx
from judge_kernels import KERNELS, by_content, missing_kernels, subgraphs, typed_nodes
from judge_numbers import LOW_ELEMS, check_loads, check_numbers, low_feeds, run_original
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

TOLERANCES = {"float16": 2e-2, "bfloat16": 1e-1}


def judge(
    original: ModelProto,
    converted: ModelProto,
    feeds: Mapping[str, Any],
    *,
    dtype: str,
    keep_io: bool,
    tolerance: float | None = None,
    loose_integers: bool = False,
    frozen: bool = False,
    opset: int | None = None,
    before: bytes | None = None,
    again: Callable[[ModelProto], ModelProto] | None = None,
) -> list[str]:
    """All complaints about ``converted``.

    Args:
        original: the model that was converted.
        converted: the result.
        feeds: float32 inputs of the original.
        dtype: the low type.
        keep_io: whether model inputs and outputs were to keep their types.
        tolerance: relative L2 error that is allowed; infinite for random outputs.
        loose_integers: integer outputs may differ.
        frozen: initializers that are inputs too were to become constants.
        opset: the opset that the result was to have instead of the original's.
        before: the original, serialized before the conversion.
        again: converts with the same options.
    """
    complaints: list[str] = []
    if before is not None and before != original.SerializeToString():
        complaints.append("input: the original was changed")
    complaints += [
        *check_checker(original, converted),
        *check_inference(original, converted),
        *check_signature(original, converted, dtype, keep_io=keep_io, frozen=frozen),
        *check_kernels(original, converted),
        *check_metadata(original if opset is None else relabelled(original, opset, converted), converted),
        *check_casts(original, converted),
    ]
    if again is not None and again(converted) != converted:
        complaints.append("idempotent: converting the result again changes it")
    reference = run_original(original, low_feeds(converted, feeds, as_float32=True))
    if reference is not None:
        allowed = TOLERANCES[dtype] if tolerance is None else tolerance
        complaints += check_loads(original, converted)
        complaints += check_numbers(original, converted, feeds, reference, allowed, loose_integers=loose_integers)
    return complaints


def at_least(original: ModelProto, converted: ModelProto) -> ModelProto:
    """The original at the opset of the result, if that is newer: models are upgraded where that pays."""
    found, given = (
        max((entry.version for entry in model.opset_import if not entry.domain), default=0)
        for model in (converted, original)
    )
    return relabelled(original, found, converted) if 0 < given < found else original


def relabelled(original: ModelProto, opset: int, converted: ModelProto) -> ModelProto:
    """The original with the versions that an upgrade was to give it."""
    result = ModelProto()
    result.CopyFrom(original)
    result.ir_version = max(original.ir_version, converted.ir_version)
    for entry in result.opset_import:
        entry.version = opset if not entry.domain else entry.version
    return result


# --- the checks of the file ---------------------------------------------------------------------------------


def normalized(error: str) -> str:
    """A complaint without the names and types in it that a conversion may change."""
    if "sparse_tensor(" in error or "Inferred=8 " in error:
        # Both say that onnx takes a sparse initializer for a sparse value, in words that depend on its consumer.
        return "sparse"
    text = re.sub(r"'[^']*'|name: ?\S*|input \S+|domain_version of \d+", "", error.splitlines()[0])
    return re.sub(r"b?float16", "float", text)


def check_checker(original: ModelProto, converted: ModelProto) -> Iterator[str]:
    """The checker has no complaint that the original did not have."""
    new = checker_error(converted)
    old = checker_error(original)
    if new and normalized(new) != normalized(old or " "):
        yield f"checker: {new}"


@by_content
def checker_error(model: ModelProto) -> str | None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # noqa: BLE001 - any error is the checker's opinion
        return str(error)
    return None


def check_inference(original: ModelProto, converted: ModelProto) -> Iterator[str]:
    """Strict type inference has no complaint that the original did not have."""
    new = inference_error(converted)
    old = inference_error(original)
    if new and normalized(new) != normalized(old or " "):
        yield f"inference: {new}"


@by_content
def inference_error(model: ModelProto) -> str | None:
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:  # noqa: BLE001 - any error is the inference's opinion
        return str(error)
    return None


def lowered(proto: TypeProto, elem: int) -> TypeProto:
    """The type with float32 replaced, in sequences and optionals too."""
    result = TypeProto()
    result.CopyFrom(proto)
    inner = result
    while inner.WhichOneof("value") in ("sequence_type", "optional_type"):
        inner = getattr(inner, inner.WhichOneof("value")).elem_type
    if inner.tensor_type.elem_type == TensorProto.FLOAT:
        inner.tensor_type.elem_type = elem
    return result


def check_signature(
    original: ModelProto, converted: ModelProto, dtype: str, *, keep_io: bool, frozen: bool = False
) -> Iterator[str]:
    """Model inputs and outputs: names, order, types and shapes."""
    weights = set()
    if frozen or original.ir_version < 4:
        # Listed as inputs because the format wants it, or not meant to be inputs any more.
        weights = {tensor.name for tensor in original.graph.initializer}
    elem = LOW_ELEMS[dtype]
    for kind in ("input", "output"):
        old, new = getattr(original.graph, kind), getattr(converted.graph, kind)
        if kind == "input" and weights:
            old, new = ([info for info in infos if info.name not in weights] for infos in (old, new))
        if [info.name for info in old] != [info.name for info in new]:
            yield f"signature: {kind}s are {[i.name for i in new]}, were {[i.name for i in old]}"
            continue
        for was, now in zip(old, new, strict=True):
            wanted = was.type if keep_io else lowered(was.type, elem)
            # There is no Cast for a sequence or an optional: it stays what something in the model needs it to be.
            container = was.type.WhichOneof("value") in ("sequence_type", "optional_type")
            stays = not keep_io and now.type == was.type and container
            if now.type != wanted and not stays:
                shown = " ".join(str(now.type).split())
                yield f"signature: {kind} {now.name} is {shown}, wanted {' '.join(str(wanted).split())}"


def check_kernels(original: ModelProto, converted: ModelProto) -> Iterator[str]:
    """CUDA has a kernel for every low node that the conversion made."""
    if not KERNELS.exists():
        return
    known = missing_kernels(original)
    for what, where in missing_kernels(converted).items():
        if what not in known:
            yield f"kernel: none for {what} (output {where})"


def check_metadata(original: ModelProto, converted: ModelProto) -> Iterator[str]:
    """What the model says about itself is kept."""
    original = at_least(original, converted)
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "ir_version"):
        if getattr(original, name) != getattr(converted, name):
            yield f"metadata: {name} was {getattr(original, name)!r}, is {getattr(converted, name)!r}"
    for name in ("name", "doc_string"):
        if getattr(original.graph, name) != getattr(converted.graph, name):
            yield f"metadata: graph {name} changed"
    for old, new in (
        (original.metadata_props, converted.metadata_props),
        (original.graph.metadata_props, converted.graph.metadata_props),
        (original.opset_import, converted.opset_import),
    ):
        if list(new)[: len(old)] != list(old):
            yield f"metadata: {type(old[0]).__name__} entries were lost or changed"
    kept = {node.name: node for node in converted.graph.node if node.name}
    for node in original.graph.node:
        twin = kept.get(node.name)
        if twin is not None and twin.op_type == node.op_type and notes(twin) != notes(node):
            yield f"metadata: node {node.name} lost its documentation"


def notes(node: NodeProto) -> tuple[str, list[tuple[str, str]]]:
    return node.doc_string, [(entry.key, entry.value) for entry in node.metadata_props]


# --- Casts --------------------------------------------------------------------------------------------------


def scoped_casts(model: ModelProto) -> Iterator[tuple[tuple[int, str], tuple[int, str], int]]:
    """Every Cast as (source, result, target type); a value is a name and the scope that defines it."""
    count = 0
    stack: list[tuple[GraphProto, dict[str, int]]] = [(model.graph, {})]
    while stack:
        scope, outer = stack.pop()
        made = [name for node in scope.node for name in node.output]
        made += [item.name for item in (*scope.input, *scope.initializer)]
        home = outer | dict.fromkeys(made, count)
        count += 1
        for node in scope.node:
            if node.op_type == "Cast" and not node.domain:
                target = next(attribute.i for attribute in node.attribute if attribute.name == "to")
                source, result = node.input[0], node.output[0]
                yield (home.get(source, 0), source), (home[result], result), target
            stack += [(body, home) for body in subgraphs(node)]


@by_content
def cast_waste(model: ModelProto) -> Counter[str]:
    """How many Casts say nothing new: "twice" (one value to one type) and "there and back"."""
    casts = list(scoped_casts(model))
    made = {result: (source, target) for source, result, target in casts}
    types = {}
    for typed in typed_nodes(model):
        if typed.node.op_type == "Cast":
            types[typed.node.output[0]] = typed.inputs[0]
    waste = Counter({"twice": len(casts) - len({(source, target) for source, _, target in casts})})
    for source, _, target in casts:
        if source not in made:
            continue
        first = made[source][1]
        if target == TensorProto.FLOAT and first in LOW_ELEMS.values():
            waste["there and back"] += 1
        elif target in LOW_ELEMS.values() and first == TensorProto.FLOAT:
            low = next(name for name, elem in LOW_ELEMS.items() if elem == target)
            waste["there and back"] += types.get(source[1]) == f"tensor({low})"
    return waste


def check_casts(original: ModelProto, converted: ModelProto) -> Iterator[str]:
    """No Cast pair and no duplicate Cast that the original did not have."""
    for kind, count in (cast_waste(converted) - cast_waste(original)).items():
        yield f"casts: {count} more {kind!r} than in the original"
