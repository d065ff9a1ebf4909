"""The node tests of the onnx package, every op in many forms, converted as far as O3 goes and run.

They come in chunks, since loading them all takes seconds that a mere collection should not pay.
"""

import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from judge import check_metadata, check_signature, checker_error
from judge_numbers import LOW_DTYPES, compare, emulated, session
from onnx import GraphProto, ModelProto, TensorProto, TypeProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

import onnxamp

pytestmark = pytest.mark.slow

CHUNKS = 24
TOLERANCE = 5e-3

UNLOADABLE = {
    # ONNX Runtime wraps a float16 node without a CPU kernel in Casts, but only if the node reads float16 (EyeLike),
    # and it cannot wrap an output whose type an attribute fixes (MelWeightMatrix).
    "test_eyelike_populate_off_main_diagonal": "no float16 EyeLike on CPU, and its int32 input asks for no Casts",
    "test_melweightmatrix": "no float16 MelWeightMatrix on CPU, and its output type is fixed by an attribute",
    # Expanded before Casts are inserted; the function's own constants are float32.
    "test_mvn": "the function body of MeanVarianceNormalization is valid for float32 alone",
}
"""Cases that ONNX allows in float16 and ONNX Runtime's CPU provider cannot load: under target "any" alone."""

INEXACT_INTEGERS = {
    "test_dynamicquantizelinear_expanded": "a rounded scale moves numbers across a rounding border",
}
"""Cases whose integer outputs depend on the last bits of float inputs."""


class NodeCase(NamedTuple):
    name: str
    model: ModelProto
    feeds: Mapping[str, Any]


@cache
def node_cases() -> list[NodeCase]:
    """All cases that hold float32 values; many differ in nothing but attributes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators divide by zero on purpose
        found = load_model_tests(kind="node")
    return [NodeCase(case.name, case.model, feeds(case)) for case in found if holds_float(case.model.graph)]


def feeds(case: Any) -> dict[str, Any]:
    """The first data set's inputs, rounded to float16 so that nothing but arithmetic differs."""
    inputs, _ = case.data_sets[0]
    return {info.name: rounded(value) for info, value in zip(case.model.graph.input, inputs, strict=False)}


def rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    if isinstance(value, TensorProto):
        value = numpy_helper.to_array(value)
    if value is None or np.asarray(value).dtype != np.float32:
        return value
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(np.float16).astype(np.float32)


def holds_float(graph: GraphProto) -> bool:
    if any(is_float(info.type) for info in (*graph.input, *graph.output, *graph.value_info)):
        return True
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    tensors = [*graph.initializer, *(attribute.t for attribute in attributes)]
    return any(tensor.data_type == TensorProto.FLOAT for tensor in tensors) or any(
        holds_float(attribute.g) for attribute in attributes if attribute.HasField("g")
    )


def is_float(proto: TypeProto) -> bool:
    while (kind := proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        proto = getattr(proto, kind).elem_type
    return kind == "tensor_type" and proto.tensor_type.elem_type == TensorProto.FLOAT


def original_outputs(case: NodeCase) -> list[Any] | None:
    """What ONNX Runtime computes in float32; None where it takes no such inputs from numpy, or its kernel refuses."""
    try:
        return session(case.model).run(None, dict(case.feeds))
    except Exception:  # noqa: BLE001 - ONNX Runtime raises untyped errors; the case then has no numbers to compare
        return None


def loads(model: ModelProto) -> str | None:
    """ONNX Runtime's complaint about a model, None if it loads."""
    try:
        session(model, optimized=True)
    except Exception as error:  # noqa: BLE001 - any error is a complaint
        return str(error)
    return None


def complaints(case: NodeCase, target: str) -> Iterator[str]:
    options: dict[str, Any] = {"level": "O3", "target": target, "keep_io_types": True}
    before = case.model.SerializeToString(deterministic=True)
    try:
        result = onnxamp.convert_model(case.model, **options)
        again = onnxamp.convert_model(result, **options)
    except Exception as error:  # noqa: BLE001 - no node test is worth an error
        yield f"convert: {type(error).__name__}: {error}"
        return
    if case.model.SerializeToString(deterministic=True) != before:
        yield "input: the original was changed"
    if again != result:
        yield "idempotent: converting the result again changes it"
    if result == case.model:
        return
    found = checker_error(result)
    if found is not None and checker_error(case.model) is None:
        yield f"checker: {found}"
    yield from check_signature(case.model, result, "float16", keep_io=True)
    yield from check_metadata(case.model, result)
    if not (target == "any" and case.name in UNLOADABLE):
        found = loads(result)
        if found is not None:
            yield f"load: {found}"
    yield from numbers(case, result)


def numbers(case: NodeCase, result: ModelProto) -> Iterator[str]:
    """The outputs agree with those of the original, as far as low-precision inputs allow."""
    reference = original_outputs(case)
    if reference is None:
        return
    try:
        outputs = emulated(result, case.feeds)
    except Exception as error:  # noqa: BLE001 - any error is a complaint
        yield f"run: {error}"
        return
    limit = float(np.finfo(LOW_DTYPES["float16"]).max)
    for info, want, have in zip(result.graph.output, reference, outputs, strict=True):
        loose = case.name in INEXACT_INTEGERS
        for one, other in zip(arrays(want), arrays(have), strict=True):
            found = compare(one, other, TOLERANCE, limit, loose_integers=loose)
            if found:
                yield f"numbers: output {info.name} {found}"


def arrays(value: Any) -> list[np.ndarray]:
    if value is None:
        return []
    return [array for item in value for array in arrays(item)] if isinstance(value, list) else [np.asarray(value)]


@pytest.mark.parametrize("target", ["cpu", "any"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_node_cases(chunk, target):
    found = [
        f"{case.name}: {complaint}"
        for case in node_cases()[chunk::CHUNKS]
        if loads(case.model) is None
        for complaint in complaints(case, target)
    ]
    assert not found, "\n".join(found)


def test_there_are_many_cases():
    names = [case.name for case in node_cases()]
    assert len(names) > 1000
    assert set(names) >= {*UNLOADABLE, *INEXACT_INTEGERS}


@pytest.mark.parametrize("name", UNLOADABLE)
def test_known_limits_are_still_there(name):
    case = next(case for case in node_cases() if case.name == name)
    result = onnxamp.convert_model(case.model, "O3", target="any")
    assert result == case.model or loads(result) is not None, f"{name} loads now: take it off the list"
