"""Whatever a user asks for, the result is a valid model with the signature that was asked for."""

import itertools
import re
import warnings
from contextlib import suppress
from random import Random
from typing import Any

import onnx
import onnxruntime
import pytest
from graphs.case import parse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judge import check_signature
from judge_numbers import HERE
from properties import Way, check_onnx, check_runs, graphs, op_key
from strategies import random_model

import onnxamp
from onnxamp._base.errors import OpsetError
from onnxamp._decide.mincut import Cut, Network

CASTS = {
    "a Constant": "(float[2] X) => (float16[2] Y, float[2] Z) { k Y = Cast <to = 10> (c) Z = Add (X, c) }",
    "a Constant alone": "(float[2] X) => (float16[2] Y, float[2] Z) { k Y = Cast <to = 10> (c) Z = Relu (X) }",
    "a Constant that is read": "(float16[2] X) => (float16[2] Z) { k Y = Cast <to = 10> (c) Z = Add (X, Y) }",
    "a Constant that is returned": "(float[2] X) => (float16[2] Y, float[2] c) { k Y = Cast <to = 10> (c) }",
    "two of a Constant": """(float[2] X) => (float16[2] Y, float16[2] Z, float[2] W) {
        k Y = Cast <to = 10> (c) Z = Cast <to = 10> (c) W = Add (X, c) }""",
    "a Constant in a body": """(float[2] X, bool b) => (float16[2] Y, float[2] Z) { k Z = Add (X, c)
        Y = If (b) <then_branch = t () => (float16[2] p) { p = Cast <to = 10> (c) },
                    else_branch = e () => (float16[2] q) {
                        d = Constant <value = float[2] {1, 2}> () q = Cast <to = 10> (d) }> }""",
    "a Constant in a sequence": """(float[2] X) => (float16[2] Y, seq(float[2]) S) {
        k S = SequenceConstruct (c, X) Y = Cast <to = 10> (c) }""",
    "an activation": "(float[2] X) => (float16[2] Y) { c = Relu (X) Y = Cast <to = 10> (c) }",
    "a made constant": """(int64[1] X) => (float16[N] Y, float[N] Z) {
        c = ConstantOfShape <value = float[1] {1}> (X) Y = Cast <to = 10> (c) Z = Relu (c) }""",
    "integers": "(bool[2] X) => (float16[2] Y, float[2] c) { c = Cast <to = 1> (X) Y = Cast <to = 10> (c) }",
    "what was low": """(float16[2] X) => (float16[2] Y, float[2] Z) {
        c = Cast <to = 1> (X) Z = Identity (c) Y = Cast <to = 10> (Z) }""",
}
"""A Cast of c to float16 that the model returns; k stands for a Constant c."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASTS)
def test_the_types_of_casts_that_are_returned_stay(name: str) -> None:
    model = parse(CASTS[name].replace(" k ", " c = Constant <value = float[2] {1, 2}> () "))
    ops = sorted({node.op_type for node in model.graph.node} | {"Constant"})
    whites = ([], *([op] for op in ops), ops)
    for level, white, keep, low in itertools.product(("O1", "O2", "O3"), whites, (True, False), ([], [".*"])):
        with warnings.catch_warnings(action="ignore", category=onnxamp.OptionWarning):
            result = onnxamp.convert_model(model, level, white_list=white, keep_io_types=keep, force_low=low)
        onnx.checker.check_model(result, full_check=True)
        assert list(check_signature(model, result, "float16", keep_io=keep)) == []
        onnxruntime.InferenceSession(result.SerializeToString())


@pytest.mark.slow
@settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.integers(0, 2**64 - 1), st.sampled_from((4, 8, 12)))
def test_random_wishes_of_random_models(seed: int, size: int) -> None:
    rng = Random(seed)
    generated = random_model(rng, size=size)
    model = generated.model
    way = Way(rng.choice(("O1", "O2", "O3")), "float16", rng.random() < 0.5, rng.choice(("cuda", HERE, "any")))
    with suppress(OpsetError), warnings.catch_warnings(action="ignore", category=onnxamp.OptionWarning):
        result = onnxamp.convert_model(model, **way.options, **wishes(model, rng))
        assert list(check_onnx(model, result)) == []
        assert list(check_signature(model, result, way.dtype, keep_io=way.keep_io)) == []
        assert list(check_runs(model, result, generated.feeds, way, smooth=False)) == []


def wishes(model: onnx.ModelProto, rng: Random) -> dict[str, Any]:
    """Op types and nodes to lower, and ops to keep in float32, none of them twice."""
    nodes = [node for graph in graphs(model) for node in graph.node]
    ops = sorted({op_key(node) for node in nodes} | {"Constant"})
    rng.shuffle(ops)
    first, second = sorted(rng.randint(0, len(ops)) for _ in range(2))
    names = [name for node in nodes for name in node.output if name]
    low = rng.sample(names, rng.randint(0, min(3, len(names))))
    return {
        "white_list": ops[:first],
        "black_list": ops[first:second] if rng.random() < 0.3 else [],
        "force_low": [re.escape(name) for name in low],
        "hazards": rng.random() < 0.7,
        "strict": rng.random() < 0.3,
    }


# --- bugs ---------------------------------------------------------------------------------------------------


PRODUCT = """(float[2,2] X) => (float[2,2] Y) <float[2,2] w = {1, 2, 3, 4}> { h = MatMul (X, w) Y = Relu (h) }"""
WRONG = "The converted model would be wrong: here. This is a bug: please report the model."


@pytest.mark.parametrize("options", [{}, {"keep_io_types": False}, {"opset": 18}, {"dtype": "bfloat16", "fold": True}])
def test_a_result_that_would_be_wrong_stays_float32(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> None:
        raise onnxamp.InternalError(WRONG)

    model = parse(PRODUCT)
    plan = onnxamp.plan_model(model, **options)
    monkeypatch.setattr("onnxamp._convert.convert.verify", wrong)
    with pytest.warns(onnxamp.OptionWarning, match=f"The whole model stays in float32: {WRONG}"):
        result = onnxamp.convert_model(model, **options)
    assert list(result.graph.node) == list(model.graph.node)
    assert {info.type.tensor_type.elem_type for info in (*result.graph.input, *result.graph.output)} == {1}
    with pytest.warns(onnxamp.OptionWarning, match="The whole model stays in float32"):
        assert onnxamp.apply_plan(model, plan) == result


def test_a_problem_that_cannot_be_solved_stays_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, failed = Network.solve, list[bool]()

    def once(network: Network, *rest: int) -> Cut:
        if failed:
            return solve(network, *rest)
        failed.append(True)
        raise onnxamp.InternalError("The precision problem has no solution.")

    monkeypatch.setattr(Network, "solve", once)
    plan = onnxamp.plan_model(parse(PRODUCT))
    assert plan.level == "O0"
    assert plan.warnings == ("The whole model stays in float32: The precision problem has no solution.",)
