"""The node tests of the onnx package, every op in many forms, converted as far as O3 goes, against onnx's answers.

They come in chunks, since loading them all takes seconds that a mere collection should not pay.
"""

import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from judge import check_metadata, check_signature, checker_error
from judge_kernels import by_content
from judge_numbers import HERE, LOW_DTYPES, compare, emulated, session
from onnx import GraphProto, ModelProto, TensorProto, TypeProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

import onnxamp
from onnxamp._model.model import Model
from onnxamp._runtime.sessions.session import run

pytestmark = pytest.mark.slow

CHUNKS = 24
TOLERANCE = 5e-3

NOT_LOADED = {
    "NOT_IMPLEMENTED": "no float32 kernel, as for what onnx expands to bfloat16",
    "model.cc": "an IR version that ONNX Runtime does not know yet",
    "model_load_utils.h": "an opset that ONNX Runtime does not know yet",
    "is not a registered function/op": "a preview op",
    "INVALID_GRAPH": "a newer form of the op than ONNX Runtime knows",
    "core/providers/cpu/rnn/": "layout = 1, which the kernel refuses",
}
"""What ONNX Runtime says of a case that it does not load -> why it does not. No other case may be left out."""

NOT_RUN = {
    "can't be converted to MLDataType": "an input of a type that numpy does not have",
    "inconsistent total_sequence_length": "a mask that the kernel refuses",
}
"""Likewise of a case that it loads, but does not run: there are no numbers to compare, all else is checked."""

UNLOADABLE = {
    # ONNX Runtime wraps a float16 node without a CPU kernel in Casts, but only if the node reads float16 (EyeLike),
    # and it cannot wrap an output whose type an attribute fixes (MelWeightMatrix).
    "test_eyelike_populate_off_main_diagonal": "no float16 EyeLike on CPU, and its int32 input asks for no Casts",
    "test_melweightmatrix": "no float16 MelWeightMatrix on CPU, and its output type is fixed by an attribute",
}
"""Cases that ONNX allows in float16 and ONNX Runtime's CPU provider cannot load: under target "any" alone."""

INEXACT = {
    "test_dynamicquantizelinear_expanded": "a rounded scale moves numbers across a rounding border",
    "test_logsoftmax_large_number": "its inputs are 10000 and more, where float16 holds every eighth number",
    "test_softmax_large_number": "likewise",
    **{
        f"test_{op}_large_number_expanded{version}": "likewise, once its nodes are folded into one"
        for op in ("logsoftmax", "softmax")
        for version in ("", "_ver18")
    },
    "test_tan": "it comes near a pole",
}
"""Cases that float16 cannot compute within the tolerance from rounded inputs."""

NOT_BY_RUNTIME = {
    "test_maxunpool_export_with_output_shape": "ONNX Runtime ignores output_shape",
    "test_resize_downsample_scales_cubic_align_corners": "ONNX Runtime takes the size before rounding",
    "test_resize_downsample_scales_linear_align_corners": "likewise",
    "test_training_dropout": "ONNX Runtime draws other random numbers",
    "test_training_dropout_default": "likewise",
    "test_training_dropout_default_mask": "likewise",
    "test_training_dropout_mask": "likewise",
}
"""Cases of which ONNX Runtime computes something else than onnx expects, in float32, too."""


class NodeCase(NamedTuple):
    name: str
    model: ModelProto
    feeds: Mapping[str, Any]
    expected: list[Any]


@cache
def node_cases() -> list[NodeCase]:
    """All cases that hold float32 values; many differ in nothing but attributes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators divide by zero on purpose
        found = load_model_tests(kind="node")
    if found[0].model is None:
        pytest.skip("this onnx keeps its node tests in files")
    return [node_case(case) for case in found if holds_float(case.model.graph)]


def node_case(case: Any) -> NodeCase:
    """A case with its first data set."""
    inputs, outputs = case.data_sets[0]
    feeds = {info.name: plain(value) for info, value in zip(case.model.graph.input, inputs, strict=False)}
    return NodeCase(case.name, case.model, feeds, [plain(value) for value in outputs])


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return value if value is None else np.asarray(value)


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


def not_run(case: NodeCase) -> str | None:
    """ONNX Runtime's complaint about the inputs of a case, None if it runs."""
    try:
        run(session(case.model), case.feeds)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises untyped errors
        return str(error)
    return None


def explained(complaint: str, reasons: Mapping[str, str]) -> bool:
    return any(words in complaint for words in reasons)


@by_content
def loads(model: ModelProto) -> str | None:
    """ONNX Runtime's complaint about a model, None if it loads."""
    try:
        session(model, optimized=True)
    except Exception as error:  # noqa: BLE001 - any error is a complaint
        return str(error)
    return None


def complaints(case: NodeCase) -> Iterator[str]:
    """What is wrong with the conversions for each target; equal ones are looked at once."""
    seen: list[Model] = []
    source = Model.of(case.model)
    for target in (HERE, "any"):
        yield from (f"for {target}: {complaint}" for complaint in of_target(case, source, target, seen))


def of_target(case: NodeCase, source: Model, target: str, seen: list[Model]) -> Iterator[str]:
    options: dict[str, Any] = {"level": "O3", "target": target, "keep_io_types": True}
    before = case.model.SerializeToString(deterministic=True)
    try:
        result = onnxamp.convert_model(source, **options)
        known = next((model for model in seen if model.proto == result), None)
        read = known or (source if result == case.model else Model.of(result))
        again = result if read is source else onnxamp.convert_model(read, **options)
    except Exception as error:  # noqa: BLE001 - no node test is worth an error
        yield f"convert: {type(error).__name__}: {error}"
        return
    if case.model.SerializeToString(deterministic=True) != before:
        yield "input: the original was changed"
    if again != result:
        yield "idempotent: converting the result again changes it"
    if known:
        return
    seen.append(read)
    if result == case.model:
        yield from numbers(case, result)
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
    """The outputs are those that onnx expects, as far as float16 allows."""
    if case.name in NOT_BY_RUNTIME:
        return
    complaint = not_run(case)
    if complaint is not None:
        if not explained(complaint, NOT_RUN):
            yield f"run: {complaint}"
        return
    try:
        outputs = emulated(result, case.feeds)
    except Exception as error:  # noqa: BLE001 - any error is a complaint
        yield f"run, converted: {error}"
        return
    limit = float(np.finfo(LOW_DTYPES["float16"]).max)
    for info, want, have in zip(result.graph.output, case.expected, outputs, strict=True):
        for one, other in zip(arrays(want), arrays(have), strict=True):
            found = compare(one, other, TOLERANCE, limit, loose_integers=False)
            if found and case.name not in INEXACT:
                yield f"numbers: output {info.name} {found}"


def arrays(value: Any) -> list[np.ndarray]:
    if value is None:
        return []
    return [array for item in value for array in arrays(item)] if isinstance(value, list) else [np.asarray(value)]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_node_cases(chunk):
    found = [
        f"{case.name}: {complaint}"
        for case in node_cases()[chunk::CHUNKS]
        if loads(case.model) is None
        for complaint in complaints(case)
    ]
    assert not found, "\n".join(found)


def test_no_case_is_left_out_without_a_reason():
    """Of 1,400 cases with float32 values ONNX Runtime loads 1,200, and all but a few dozen take numpy's types."""
    refused = {case.name: loads(case.model) for case in node_cases()}
    unexplained = [f"{name}: {text}" for name, text in refused.items() if text and not explained(text, NOT_LOADED)]
    assert not unexplained, "\n".join(unexplained)
    assert len(refused) > 1000
    assert sum(text is None for text in refused.values()) > 0.8 * len(refused)
    silent = [case.name for case in node_cases() if refused[case.name] is None and not_run(case)]
    assert len(silent) < 0.05 * len(refused)
    assert refused.keys() >= {*UNLOADABLE, *INEXACT, *NOT_BY_RUNTIME}


@pytest.mark.parametrize("name", NOT_BY_RUNTIME)
def test_the_runtime_still_computes_something_else(name):
    case = next(case for case in node_cases() if case.name == name)
    want, have = case.expected[0], session(case.model).run(None, dict(case.feeds))[0]
    assert compare(want, have, 1e-3, np.inf, loose_integers=False), f"{name} is right now: take it off the list"


@pytest.mark.parametrize("name", UNLOADABLE)
def test_known_limits_are_still_there(name):
    case = next(case for case in node_cases() if case.name == name)
    result = onnxamp.convert_model(case.model, "O3", target="any")
    assert result == case.model or loads(result) is not None, f"{name} loads now: take it off the list"
