"""What holds for every conversion of every model, as far as it held for the model itself.

Each property is a function that yields complaints; ``violations`` asks them all. Whatever can be checked exactly is:
where a model's numbers have few digits and it holds no low types of its own, taking the low types out of the result
again must give back the very outputs of the original, bit by bit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from judge import cast_waste, check_metadata, check_signature, checker_error, inference_error, scoped_casts
from judge_kernels import Typed, is_low, subgraphs, type_name, typed_nodes
from judge_numbers import HERE, LOW_ELEMS, emulated, low_feeds, run_original, session
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, TypeProto, helper, numpy_helper
from strategies.noise import LARGEST, beyond_noise, noise_outputs, peak

import onnxamp
from onnxamp._base.errors import OnnxAmpError, OpsetError
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import infer_types
from onnxamp._model.model import Model
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.loading import Loaded, load_file


@dataclass(frozen=True)
class Way:
    """How a model is converted."""

    level: str
    dtype: str
    keep_io: bool
    target: str

    @property
    def options(self) -> dict[str, Any]:
        options = {"level": self.level, "dtype": self.dtype, "keep_io_types": self.keep_io, "target": self.target}
        return options | {"freeze_defaults": False}


WAYS = tuple(
    Way(level, dtype, keep_io, target)
    for level in ("O1", "O2", "O3")
    for dtype in ("float16", "bfloat16")
    for keep_io in (True, False)
    for target in ("cuda", HERE, "any")
)


def frozen(model: ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def violations(model: ModelProto, feeds: Mapping[str, Any], way: Way, *, smooth: bool) -> list[str]:
    """Everything that is wrong with a conversion of the model; ``smooth``: its outputs are continuous in its floats."""
    before = frozen(model)
    try:
        source = Model.of(model)
        result = onnxamp.convert_model(source, **way.options)
    except OpsetError as error:
        too_old = way.dtype == "bfloat16" and opset(model) < 13
        return [] if too_old else [f"convert: {error}"]
    except OnnxAmpError as error:
        return [f"convert: {type(error).__name__}: {error}"]
    found = [] if frozen(model) == before else ["input: the caller's model was changed"]
    if frozen(result) == before:
        return found
    again = onnxamp.convert_model(result, **way.options)
    found += [] if frozen(again) == frozen(result) else ["idempotent: converting again changes the result"]
    if checker_error(model) is None:  # what it cannot type, nobody can judge
        found += [*check_onnx(model, result), *check_casts(model, result), *check_types(result)]
    return [
        *found,
        *check_signature(model, result, way.dtype, keep_io=way.keep_io),
        *check_metadata(model, result),
        *check_plan(source, result, way),
        *check_runs(model, result, feeds, way, smooth=smooth),
        *check_opens(model, result),
    ]


def check_onnx(model: ModelProto, result: ModelProto) -> Iterator[str]:
    """onnx's checker accepts the result, and strict inference does if it accepts the model."""
    for name, opinion in (("checker", checker_error), ("inference", inference_error)):
        found = opinion(result)
        if found is not None and opinion(model) is None:
            yield f"{name}: {found}"


def unchanged(model: ModelProto) -> Iterator[str]:
    """Level O0, and every op on the black list, give back the model bit by bit."""
    source = Model.of(model)
    if frozen(onnxamp.convert_model(source, "O0")) != frozen(model):
        yield "O0: the result differs from the model"
    ops = sorted({key for graph in graphs(model) for node in graph.node for key in [op_key(node)]})
    ops += [op_key(node) for function in model.functions for node in function.node]
    for level in ("O1", "O2"):
        if frozen(onnxamp.convert_model(source, level, black_list=ops)) != frozen(model):
            yield f"black: with every op black-listed, {level} differs from the model"


def op_key(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def graphs(model: ModelProto) -> Iterator[GraphProto]:
    stack = [model.graph]
    while stack:
        graph = stack.pop()
        yield graph
        stack += [body for node in graph.node for body in subgraphs(node)]


def opset(model: ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if not entry.domain), onnx.defs.onnx_opset_version())


# --- Casts and types ----------------------------------------------------------------------------------------


def check_casts(model: ModelProto, result: ModelProto) -> Iterator[str]:
    """No Cast pair, no duplicate Cast and no Cast of a type to itself that the original did not have."""
    for kind, count in (cast_waste(result) - cast_waste(model)).items():
        yield f"casts: {count} more {kind!r} than in the original"
    if idle_casts(result, returned=False) > idle_casts(model, returned=True):
        yield "casts: more of them than in the original cast a type to itself"


def check_plan(model: Model, result: ModelProto, way: Way) -> Iterator[str]:
    """The result has the Casts that the plan promises besides the user's, and each is read."""
    options = way.options
    plan = onnxamp.plan_model(model, options.pop("level"), **options)
    theirs = {target[1] for _, target, _ in scoped_casts(model.proto)}
    ours = [target[1] for _, target, _ in scoped_casts(result) if target[1] not in theirs]
    if len(ours) != plan.casts:
        yield f"plan: it says {plan.casts} new Casts, the result has {len(ours)}"
    read = {name for graph in graphs(result) for node in graph.node for name in node.input}
    read |= {info.name for graph in graphs(result) for info in graph.output}
    yield from (f"casts: nobody reads {name}" for name in ours if name not in read)


def idle_casts(model: ModelProto, *, returned: bool) -> int:
    """How many Casts change no type; those that a graph returns may stand for a value of elsewhere."""
    results = set() if returned else {info.name for graph in graphs(model) for info in graph.output}
    idle = [one.node for one in typed_nodes(model) if one.node.op_type == "Cast" and one.inputs == one.outputs]
    return sum(node.output[0] not in results for node in idle)


def check_types(result: ModelProto) -> Iterator[str]:
    """onnxamp's types of the main graph's values are those that onnx infers."""
    try:
        inferred = onnx.shape_inference.infer_shapes(result, check_type=True, strict_mode=True).graph
    except onnx.shape_inference.InferenceError:
        return  # check_inference has its say on that
    view = Graph.of(result)
    types = infer_types(view)
    names = view.scopes[0].names
    for info in (*inferred.value_info, *inferred.output):
        mine, theirs = types[names[info.name]] if info.name in names else None, type_name(info.type)
        if mine and theirs and mine != theirs:
            yield f"types: {info.name} is {mine}, for onnx {theirs}"


# --- running ------------------------------------------------------------------------------------------------


def check_runs(
    model: ModelProto, result: ModelProto, feeds: Mapping[str, Any], way: Way, *, smooth: bool
) -> Iterator[str]:
    """The result loads where the original does, and its outputs are those of the original but for rounding."""
    try:
        session(model)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises untyped errors; there is nothing to compare with
        return
    try:
        session(result if way.target == HERE else loadable(result))
    except Exception as error:  # noqa: BLE001 - any error is a complaint
        yield f"load: {error}"
        return
    given, rounded = low_feeds(result, feeds), low_feeds(result, feeds, as_float32=True)
    reference = run_original(model, rounded)
    if reference is None:
        return
    if not holds_low(model):
        yield from same_without_rounding(result, rounded, reference)
        if smooth:
            yield from check_rounding(model, result, rounded, given, reference, way.dtype)


def check_opens(model: ModelProto, result: ModelProto) -> Iterator[str]:
    """ONNX Runtime opens the result with its default options, unless its CPU provider lacks a kernel."""
    opened = in_loader(result)
    wrong = opened.fault or ", ".join(opened.disabled)
    if wrong:
        before = in_loader(model)
        if not (before.fault or before.limit or before.disabled):
            yield f"opens: {wrong}"


def in_loader(model: ModelProto) -> Loaded:
    """What comes of opening a model in the process that may die of it."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        onnx.save(model, path)
        return load_file(Model.read(path), None)


def loadable(model: ModelProto) -> ModelProto:
    """The model, or its emulation where the CPU provider lacks the kernels of the target that it is for."""
    try:
        session(model)
    except Exception:  # noqa: BLE001 - it has many words for that, as where it expands an op's function for want of one
        return emulate(model)
    return model


def holds_low(model: ModelProto) -> bool:
    """Whether the model has float16 or bfloat16 values of its own."""
    return any(is_low(text) for one in typed_nodes(model) for text in one.inputs + one.outputs) or any(
        is_low_value(model, elem) for elem in LOW_ELEMS.values()
    )


def is_low_value(model: ModelProto, elem: int) -> bool:
    tensors = [tensor for graph in graphs(model) for tensor in graph.initializer]
    infos = [info for graph in graphs(model) for info in (*graph.input, *graph.output)]
    return any(t.data_type == elem for t in tensors) or any(f"elem_type: {elem}\n" in str(i.type) for i in infos)


def same_without_rounding(result: ModelProto, feeds: Mapping[str, Any], reference: list[Any]) -> Iterator[str]:
    """With its low types turned back into float32, the result computes bit by bit what the original does."""
    try:
        outputs = session(raised(result)).run(None, dict(feeds))
    except Exception as error:  # noqa: BLE001 - any error is a complaint
        yield f"raised: {error}"
        return
    for info, want, have in zip(result.graph.output, reference, outputs, strict=True):
        for one, other in zip(flat(want), flat(have), strict=True):
            same = one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()
            if one.dtype != other.dtype or one.shape != other.shape or not same:
                yield f"raised: output {info.name} is another without any rounding"


def raised(model: ModelProto) -> ModelProto:
    """The model with float32 wherever it says float16 or bfloat16.

    Casts that are void then become Identity: ONNX Runtime removes such Casts whatever the level of optimization, and
    forgets that bodies read them.
    """
    result = ModelProto()
    result.CopyFrom(model)
    void = {one.node.output[0] for one in typed_nodes(model) if one.node.op_type == "Cast" and is_float(one)}
    for graph in graphs(result):
        for info in (*graph.input, *graph.output, *graph.value_info):
            raise_type(info.type)
        for tensor in graph.initializer:
            raise_tensor(tensor)
        for node in graph.node:
            if node.op_type == "Cast" and node.output[0] in void:
                node.CopyFrom(helper.make_node("Identity", node.input, node.output, node.name))
            for attribute in node.attribute:
                low = attribute.i in LOW_ELEMS.values()
                if attribute.name in ("to", "dtype", "output_datatype", "output_dtype") and low:
                    attribute.i = TensorProto.FLOAT
                if attribute.type == AttributeProto.TENSOR:
                    raise_tensor(attribute.t)
                if attribute.type == AttributeProto.TYPE_PROTO:
                    raise_type(attribute.tp)
    return result


def is_float(one: Typed) -> bool:
    """Whether a node's input and output are float32, or low types that stand for it."""
    return all(text in ("tensor(float)", "tensor(float16)", "tensor(bfloat16)") for text in one.inputs + one.outputs)


def raise_type(proto: TypeProto) -> None:
    while (kind := proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        proto = getattr(proto, kind).elem_type
    if proto.tensor_type.elem_type in LOW_ELEMS.values():
        proto.tensor_type.elem_type = TensorProto.FLOAT


def raise_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in LOW_ELEMS.values():
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, list):
        return [array for item in value for array in flat(item)]
    return [] if value is None else [np.asarray(value)]


def check_rounding(
    model: ModelProto,
    result: ModelProto,
    feeds: Mapping[str, Any],
    given: Mapping[str, Any],
    reference: list[Any],
    dtype: str,
) -> Iterator[str]:
    """Under emulation, the outputs differ from the original's by no more than rounding every value explains."""
    if not all(np.isfinite(a).all() for value in reference for a in flat(value) if a.dtype.kind == "f"):
        return
    if peak(model, feeds) > LARGEST[dtype] / 2:
        return  # overflow is no rounding
    outputs = emulated(result, given)
    moved = [[flat(value) for value in values] for values in noise_outputs(model, feeds, dtype)]
    for position, info in enumerate(result.graph.output):
        wants, haves = flat(reference[position]), flat(outputs[position])
        for k, (want, have) in enumerate(zip(wants, haves, strict=True)):
            others = [values[position][k] for values in moved]
            if any(other.shape != want.shape for other in others):
                continue
            complaint = beyond_noise(want, have, others)
            if complaint:
                yield f"rounding: output {info.name} {complaint}"
