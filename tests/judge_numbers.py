"""Running both models, and comparing what comes out."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, TypeProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_layer_normalization import LayerNormalization as EvaluatedLayerNorm
from onnx.reference.ops.op_reduce_sum import ReduceSum_13
from onnx.reference.ops.op_rms_normalization import RMSNormalization as EvaluatedRMSNorm

from onnxamp._facts.targets import older_installed
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.sessions.session import run

LOW_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LOW_ELEMS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
NO_KERNEL = "NOT_IMPLEMENTED"
HERE = older_installed("cpu") or "cpu"
"""The target that is the CPU of the installed ONNX Runtime, which runs results that are for it."""
Outputs = list[Any]


def session(model: ModelProto, *, optimized: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_original(model: ModelProto, feeds: Mapping[str, Any]) -> Outputs | None:
    """Outputs in float32, or None where ONNX Runtime cannot run the original."""
    return _run_original(model.SerializeToString(), freeze(feeds))


def freeze(feeds: Mapping[str, Any]) -> tuple:
    return tuple((name, _frozen(value)) for name, value in feeds.items())


def thaw(frozen: tuple) -> dict[str, Any]:
    return {name: _thawed(value) for name, value in frozen}


def _frozen(value: Any) -> tuple:
    if isinstance(value, list):
        return (list, *map(_frozen, value))
    array = np.asarray(value)
    return (array.dtype.name, array.shape, array.tobytes())


def _thawed(value: tuple) -> Any:
    if value[0] is list:
        return [_thawed(item) for item in value[1:]]
    name, shape, data = value
    return np.frombuffer(data, LOW_DTYPES.get(name) or np.dtype(name)).reshape(shape)


@lru_cache(maxsize=32)
def _run_original(serialized: bytes, frozen: tuple) -> Outputs | None:
    # The levels and the low types share one reference.
    try:
        return session(onnx.load_from_string(serialized)).run(None, thaw(frozen))
    except Exception:  # noqa: BLE001 - nothing to compare with
        return None


class ReduceSum(ReduceSum_13):
    """Kernels accumulate in float32; the evaluator adds bfloat16 numbers one by one, until they stop to count."""

    op_domain = ""

    def _run(self, data: np.ndarray, *axes: Any, **attributes: Any) -> tuple[np.ndarray]:
        (total,) = super()._run(as_single(data), *axes, **attributes)
        return (total.astype(data.dtype),)


class LayerNormalization(EvaluatedLayerNorm):
    """The schema computes in float32 (stash_type); the evaluator squares float16 numbers, which overflow."""

    op_domain = ""

    def _run(self, data: np.ndarray, *others: np.ndarray | None, **attributes: Any) -> tuple[np.ndarray, ...]:
        single = [None if other is None else as_single(other) for other in others]
        result, *statistics = super()._run(as_single(data), *single, **attributes)
        return (result.astype(data.dtype), *statistics)


class RMSNormalization(EvaluatedRMSNorm):
    """As LayerNormalization."""

    op_domain = ""

    def _run(self, data: np.ndarray, scale: np.ndarray, **attributes: Any) -> tuple[np.ndarray]:
        (result,) = super()._run(as_single(data), as_single(scale), **attributes)
        return (result.astype(data.dtype),)


@lru_cache(maxsize=32)
def optimizable(serialized: bytes) -> bool:
    """Whether ONNX Runtime's optimizations let the model live; at opset 21 they break some quantized ones."""
    try:
        session(onnx.load_from_string(serialized), optimized=True)
    except Exception:  # noqa: BLE001 - any error is a "no"
        return False
    return True


def evaluate(model: ModelProto, feeds: Mapping[str, Any]) -> Outputs | None:
    """Outputs under real low-precision arithmetic, or None where onnx's evaluator cannot run the model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opset = default_opset(model)
            own = [ReduceSum] if opset >= 13 else []
            own += [LayerNormalization] if opset >= 17 else []
            own += [RMSNormalization] if opset >= 23 else []
            return ReferenceEvaluator(model, new_ops=own).run(None, dict(feeds))
    except Exception:  # noqa: BLE001 - the evaluator lacks many ops; emulation takes over
        return None


def default_opset(model: ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if not entry.domain), 1)


def emulated(model: ModelProto, feeds: Mapping[str, Any]) -> Outputs:
    single = {name: _map(value, as_single) for name, value in feeds.items()}
    return [*run(session(emulate(model)), single).values()]


def as_single(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype in LOW_DTYPES.values() else array


def _map(value: Any, function: Callable[[np.ndarray], np.ndarray]) -> Any:
    return [_map(item, function) for item in value] if isinstance(value, list) else function(np.asarray(value))


def low_feeds(model: ModelProto, feeds: Mapping[str, Any], *, as_float32: bool = False) -> dict[str, Any]:
    """The feeds in the types that ``model`` takes; ``as_float32``: the rounded numbers, for the original."""
    lows = {
        info.name: LOW_DTYPES[name]
        for info in model.graph.input
        for name, elem in LOW_ELEMS.items()
        if f"elem_type: {elem}\n" in str(info.type)
    }

    def cast(name: str) -> Callable[[np.ndarray], np.ndarray]:
        def function(array: np.ndarray) -> np.ndarray:
            if name not in lows or array.dtype != np.float32:
                return array
            with np.errstate(over="ignore"):  # the range of the inputs is the user's choice
                low = array.astype(lows[name])
            return low.astype(np.float32) if as_float32 else low

        return function

    return {name: _map(value, cast(name)) for name, value in feeds.items()}


def check_loads(original: ModelProto, converted: ModelProto) -> Iterator[str]:
    """ONNX Runtime loads the model, or where it has no kernel on the CPU, its emulation."""
    try:
        session(converted, optimized=optimizable(original.SerializeToString()))
    except Exception as error:  # noqa: BLE001 - any error is a complaint
        if NO_KERNEL not in str(error):
            yield f"load: {error}"
            return
    else:
        return
    try:
        session(emulate(converted))
    except Exception as error:  # noqa: BLE001 - any error is a complaint
        yield f"load, emulated: {error}"


def check_numbers(
    original: ModelProto,
    converted: ModelProto,
    feeds: Mapping[str, Any],
    reference: Outputs,
    tolerance: float,
    *,
    loose_integers: bool,
) -> Iterator[str]:
    """The outputs agree, under the arithmetic of the low type."""
    given = low_feeds(converted, feeds)
    outputs = None
    if trusted(original, low_feeds(converted, feeds, as_float32=True), reference):
        outputs = evaluate(converted, given)
    if outputs is None:
        try:
            outputs = emulated(converted, given)
        except Exception as error:  # noqa: BLE001 - any error is a complaint
            yield f"run: {error}"
            return
    for info, want, have in zip(converted.graph.output, reference, outputs, strict=True):
        # A low model output saturates: compare with what the wanted number becomes there.
        bound = limit(info.type)
        for one, other in zip(_flat(want), _flat(have), strict=True):
            found = compare(one, other, tolerance, bound, loose_integers=loose_integers)
            if found:
                yield f"numbers: output {info.name} {found}"


def trusted(original: ModelProto, feeds: Mapping[str, Any], reference: Outputs) -> bool:
    """Whether onnx's evaluator computes the original as ONNX Runtime does; it has bugs of its own."""
    outputs = _evaluate_original(original.SerializeToString(), freeze(feeds))
    if outputs is None:
        return False
    pairs = zip(_flat(reference), _flat(outputs), strict=True)
    return all(not compare(one, other, 1e-3, math.inf, loose_integers=False) for one, other in pairs)


@lru_cache(maxsize=32)
def _evaluate_original(serialized: bytes, frozen: tuple) -> Outputs | None:
    return evaluate(onnx.load_from_string(serialized), thaw(frozen))


def limit(proto: TypeProto) -> float:
    text = str(proto)
    for name, elem in LOW_ELEMS.items():
        if f"elem_type: {elem}\n" in text:
            return float(ml_dtypes.finfo(LOW_DTYPES[name]).max)
    return math.inf


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, list):
        return [array for item in value for array in _flat(item)]
    return [np.asarray(value)]


def compare(want: np.ndarray, have: np.ndarray, tolerance: float, bound: float, *, loose_integers: bool) -> str | None:
    """What is wrong with ``have``, or None."""
    if want.shape != have.shape:
        return f"has shape {have.shape}, wanted {want.shape}"
    if want.dtype.kind in "biuOSU":
        equal = loose_integers or math.isinf(tolerance) or np.array_equal(want, have)
        return None if equal else f"differs: {have.ravel()[:4]}, wanted {want.ravel()[:4]}"
    want, have = want.astype(np.float64), have.astype(np.float64)
    inside = np.isfinite(want) & (np.abs(want) < bound)
    if not np.isfinite(have[inside]).all():
        return f"is not finite where the original is, {np.count_nonzero(~np.isfinite(have[inside]))} times"
    if math.isinf(tolerance):
        return None
    infinite = np.isinf(want)
    if not np.array_equal(want[infinite], have[infinite]):
        return "lost infinities of the original"
    return compare_finite(want[inside], have[inside], tolerance)


def compare_finite(want: np.ndarray, have: np.ndarray, tolerance: float) -> str | None:
    size, error = float(np.linalg.norm(want)), float(np.linalg.norm(have - want))
    if error > tolerance * size + 1e-7:
        return f"has relative error {error / (size or 1.0):.3g}, allowed {tolerance}"
    typical = size / max(1, want.size) ** 0.5
    vanished = np.count_nonzero((have == 0) & (np.abs(want) > tolerance * typical))
    return f"is zero where the original is not, {vanished} times" if vanished else None
