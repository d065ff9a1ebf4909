"""Hazards stand above the user's white list, whatever is on it; what overrides of single nodes break is told."""

import warnings
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from every import every
from graphs import CASES, Case
from graphs.case import add_weights, parse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judge_numbers import low_feeds, run_original
from onnx import ModelProto
from properties import graphs, op_key
from strategies import random_model

import onnxamp
from onnxamp._base.errors import OpsetError
from onnxamp._runtime.emulate import emulate

COUNT = 5000
"""More than float16 counts one by one."""
COUNTED = {
    "arithmetic": "r = Range (zero, many, step) f = Cast <to = 1> (r) m = Mul (f, one) i = Cast <to = 7> (m)",
    "a constant": "i = Cast <to = 7> (all)",
    "a moved constant": "t = Reshape (all, flat) u = Identity (t) i = Cast <to = 7> (u)",
    "a look-up": "r = Range (zero, many, step) t = Gather (all, r) i = Cast <to = 7> (t)",
    "two Casts": "t = Identity (all) d = Cast <to = 11> (t) i = Cast <to = 7> (d)",
    "integers there and back": "r = Range (zero, many, step) f = Cast <to = 1> (r) i = Cast <to = 7> (f)",
    "an input": "i = Cast <to = 7> (P)",
    "a Constant": "c = Constant <value = float[2] {4999, 4997}> () i = Cast <to = 7> (c)",
    "a scaled Constant": "c = Constant <value = float[2] {4999, 4997}> () m = Mul (c, one) i = Cast <to = 7> (m)",
    "branches": """k = Constant <value = bool {1}> ()
        t = If (k) <then_branch = a () => (float[N] p) { p = Identity (all) },
                    else_branch = b () => (float[N] q) { q = Add (all, one) }>
        i = Cast <to = 7> (t)""",
    "a loop": """n = Constant <value = int64 {1}> ()
        t = Loop (n, , all) <body = b (int64 k, bool g, float[N] s) => (bool h, float[N] u) {
            h = Identity (g) u = Identity (s) }>
        i = Cast <to = 7> (t)""",
    "inside a loop": """n = Constant <value = int64 {1}> ()
        t, v = Loop (n, , all) <body = b (int64 k, bool g, float[N] s) => (bool h, float[N] u, int64[M] x) {
            h = Identity (g) u = Identity (s) x = Cast <to = 7> (s) }>
        i = Reshape (v, flat)""",
}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"level": "O1"},
    {"level": "O3"},
    {"strict": True},
    {"keep_io_types": frozenset({"P"})},
    {"dtype": "bfloat16"},
)


def looked_up(middle: str) -> ModelProto:
    """A product, and rows of a table at places that are counted in floats."""
    text = f"""(float[4,4] X, float[2] P) => (float[4,4] Y, float[N,4] Z)
        <int64 zero = {{0}}, int64 many = {{{COUNT}}}, int64 step = {{1}}, float one = {{1}}, int64[1] flat = {{-1}}> {{
        Y = MatMul (X, w)
        {middle}
        Z = Gather (rows, i)
    }}"""
    counted = np.tile(np.arange(COUNT, dtype=np.float32), 100)  # so many that a copy in half the memory would pay
    return add_weights(parse(text), {"w": (4, 4), "rows": (COUNT + 10, 4), "all": counted})


FEEDS = {"X": np.ones((4, 4), np.float32), "P": np.array([4999, 4997], np.float32)}


def ops_of(model: ModelProto) -> list[str]:
    return sorted({op_key(node) for graph in graphs(model) for node in graph.node})


def rows_are_found(model: ModelProto, result: ModelProto) -> bool:
    """Whether the result looks up the rows that the model does: other rows are not similar at all."""
    before = run_original(model, FEEDS)
    after = run_original(result, low_feeds(result, FEEDS))
    assert before is not None
    assert after is not None
    return np.allclose(before[1], after[1].astype(np.float32), rtol=0.02, atol=1e-3)


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", COUNTED)
def test_what_counts_is_not_rounded_whatever_the_white_list(name: str, way: dict[str, Any]) -> None:
    model = looked_up(COUNTED[name])
    ops = ops_of(model)
    for white in ([], *([op] for op in ops), ops):
        with warnings.catch_warnings(action="ignore", category=onnxamp.OptionWarning):  # that some stay in float32
            result = onnxamp.convert_model(model, **way, white_list=white)
        if way.get("dtype") == "bfloat16":
            result = emulate(result)  # the CPU provider lacks the kernels
        assert rows_are_found(model, result), white


# --- all hazards --------------------------------------------------------------------------------------------


def broken(model: ModelProto, white: list[str], **options: Any) -> Iterator[str]:
    """Hazards whose nodes are low precision all the same."""
    for row in onnxamp.plan_model(model, **options, white_list=white).hazards:
        if row.low and row.reason != "runtime fusion":  # a white-listed producer is low, its Cast shielded
            yield f"{row.node} ({row.op}), {row.reason}: {row.detail}, with {white}"


@pytest.mark.slow
@every(case=[case for name, case in CASES.items() if not name.startswith("external_")], parts=4)
def test_no_white_list_lowers_a_hazard(case: Case) -> None:
    model = case.build()
    ops = ops_of(model)
    for white in (*([op] for op in ops), ops):
        assert list(broken(model, white)) == []


def examples(count: int) -> settings:
    """So many models, the same ones every time."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=slow)


def complaints(seed: int, level: str, dtype: str, *, keep_io: bool) -> list[str]:
    """What a random white list does to the hazards of a random model."""
    rng = Random(seed)
    model = random_model(rng, size=12).model
    ops = ops_of(model)
    white = rng.sample(ops, rng.randint(1, len(ops)))
    with suppress(OpsetError):  # too old for the type
        return list(broken(model, white, level=level, keep_io_types=keep_io, dtype=dtype))
    return []


SEEDS = st.integers(0, 2**64 - 1)
LEVELS = st.sampled_from(("O1", "O2", "O3"))
DTYPES = st.sampled_from(("float16", "bfloat16"))


@pytest.mark.slow
@examples(30)
@given(SEEDS, LEVELS, st.booleans(), DTYPES)
def test_no_white_list_lowers_a_hazard_of_a_random_model(seed: int, level: str, keep_io: bool, dtype: str) -> None:
    assert complaints(seed, level, dtype, keep_io=keep_io) == []


@pytest.mark.slow
@examples(100)
@given(SEEDS, LEVELS, st.booleans(), DTYPES)
def test_nor_of_many_models(seed: int, level: str, keep_io: bool, dtype: str) -> None:
    assert complaints(seed, level, dtype, keep_io=keep_io) == []


NUMBERS = {
    "epsilon": (1e-9, "e = {move} a = Mul (X, X) s = Add (a, e) Y = Div (X, s)"),
    "constant range": (1e6, "e = {move} a = Add (X, e) Y = Sub (a, e)"),
}
MOVES = ("Identity ({c})", "Reshape ({c}, shape)", "Expand ({c}, shape)", "Unsqueeze ({c}, axes)")


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("stored", ["initializer", "Constant", "ConstantOfShape"])
@pytest.mark.parametrize("reason", NUMBERS)
def test_numbers_that_hazards_need_are_not_rounded_on_their_way(reason: str, stored: str, move: str) -> None:
    """Neither where they are stored nor where they are moved, though the white list has these ops."""
    number, text = NUMBERS[reason]
    made = {
        "initializer": "",
        "Constant": f"c = Constant <value = float[1] {{{number}}}> ()",
        "ConstantOfShape": f"c = ConstantOfShape <value = float[1] {{{number}}}> (shape)",
    }[stored]
    model = parse(f"""(float[2,4] X) => (float[2,4] Y) <int64[1] shape = {{1}}, int64[1] axes = {{0}}> {{
        {made} {text.format(move=move.format(c="c"))} }}""")
    if stored == "initializer":
        add_weights(model, {"c": np.array([number], np.float32)})
    x = np.array([[0.0, 1.0, 2.0, 0.5], [0.0, -1.0, 0.25, 3.0]], np.float32)
    for white in ([op] for op in (*ops_of(model), "Constant")):
        with warnings.catch_warnings(action="ignore", category=onnxamp.OptionWarning):
            result = onnxamp.convert_model(model, "O2", white_list=white, opset="keep")
        before, after = (run_original(one, {"X": x}) for one in (model, result))
        assert before is not None
        assert after is not None
        np.testing.assert_allclose(after[0], before[0], rtol=2e-3, atol=1e-2, err_msg=str(white))


# --- what the user forces -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wish", [{"force_low": ["m"]}, {"rule": lambda node: "low" if node.output[0] == "m" else None}]
)
def test_a_node_that_is_forced_low_against_a_hazard_is_told(wish: dict[str, Any]) -> None:
    model = looked_up(COUNTED["arithmetic"])
    with pytest.warns(onnxamp.OptionWarning, match="lowers 'm' although that is known to break: index path: becomes"):
        onnxamp.convert_model(model, **wish)
    assert onnxamp.plan_model(model, **wish, hazards=False).warnings == ()


def test_nodes_that_are_forced_low_are_told_once_per_kind() -> None:
    plan = onnxamp.plan_model(looked_up(COUNTED["arithmetic"]), force_low=[".*"])
    assert len([text for text in plan.warnings if "and 2 more although that is known to break" in text]) == 1


def test_what_cannot_be_low_is_not_told_as_lowered() -> None:
    plan = onnxamp.plan_model(looked_up(COUNTED["an input"]), force_low=["w"], keep_io_types=False)
    assert [text for text in plan.warnings if "known to break" in text] == []


def test_inputs_that_become_integers_are_told() -> None:
    plan = onnxamp.plan_model(looked_up(COUNTED["an input"]), keep_io_types=False)
    (text,) = plan.warnings
    assert text == (
        "The input 'P' becomes float16, since keep_io_types (--io-types) is off for it, but it becomes integers at 'i',"
        " and float16 counts only up to 2048."
    )
    assert onnxamp.plan_model(looked_up(COUNTED["an input"]), keep_io_types=["P"]).warnings == ()


@pytest.mark.parametrize(
    ("number", "reader", "why"),
    [
        (4999.0, "i = Cast <to = 7> (d) Y = Gather (X, i)", "holds 4999 and becomes integers at 'i'"),
        (1e6, "Y = Add (X, d)", "holds 1e[+]06, and float16 ends at 65504"),
        (1e-9, "Y = Add (X, d)", "is 1e-09, which float16 cannot hold"),
    ],
)
def test_defaults_that_low_precision_breaks_stay_float32(number: float, reader: str, why: str) -> None:
    """They may be overridden, but whoever does not must get the same result."""
    model = parse(f"(float[5000] X, float[1] d) => (float[M] Y) {{ {reader} }}")
    add_weights(model, {"d": np.array([number], np.float32)})
    with pytest.warns(onnxamp.OptionWarning, match=f"'d' stays in float32, although .* its default {why}"):
        result = onnxamp.convert_model(model, keep_io_types=False, freeze_defaults=False)
    assert {info.name: info.type.tensor_type.elem_type for info in result.graph.input} == {"X": 10, "d": 1}
    assert onnxamp.plan_model(model, keep_io_types=["d"], freeze_defaults=False).warnings == ()
