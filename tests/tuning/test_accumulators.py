"""Tuning for a target that sums up float16 in float16: expected errors and conversions show its sums."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp

tune_model = partial(onnxamp.tune_model, allow_slower=True)
"""By the estimate, Casts outweigh what such small models gain."""

RANDOM = np.random.default_rng(0)
POOL = """(float[1, 8, 30, 30] x) => (float[1, 4] y) <float gain = {100}, float less = {0.01}> {
    scaled = Mul (x, gain)
    [pool] pooled = GlobalAveragePool (scaled)
    flat = Flatten (pooled)
    small = Mul (flat, less)
    [head] y = MatMul (small, w)
}"""
CHAIN = """(float[4, 3000] x) => (float[4, 4] y) {
    [long] h = MatMul (x, u)
    [bent] a = Tanh (h)
    [short] y = MatMul (a, w)
}"""
LOOP = """(float[2, 900] x) => (float[2, 900] y) {
    n = Constant <value = int64 {2}> ()
    yes = Constant <value = bool {1}> ()
    y = Loop (n, yes, x) <body = step (int64 i, bool go, float[2, 900] a) => (bool on, float[2, 900] b) {
        on = Identity (go)
        [inner] b = MatMul (a, u) }>
}"""


def with_weights(text: str, **weights: np.ndarray[Any, Any]) -> ModelProto:
    model = parse(text)
    model.graph.initializer.extend(numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items())
    return model


MODELS = {
    "pool": (with_weights(POOL, w=RANDOM.standard_normal((8, 4))), {"x": RANDOM.random((1, 8, 30, 30)) + 0.8}),
    "chain": (
        with_weights(CHAIN, u=RANDOM.random((3000, 64)) / 1500, w=RANDOM.standard_normal((64, 4))),
        {"x": RANDOM.random((4, 3000))},
    ),
    "loop": (with_weights(LOOP, u=RANDOM.standard_normal((900, 900)) / 30), {"x": RANDOM.standard_normal((2, 900))}),
}
MODELS = {name: (model, {"x": feeds["x"].astype(np.float32)}) for name, (model, feeds) in MODELS.items()}


def low_nodes(tuned: onnxamp.Tuned) -> set[str]:
    return {row.node for row in tuned.plan.rows if row.low}


def test_a_sum_that_overflows_there_only() -> None:
    """27,000 elements of 100 make a mean of 100; no static hazard sees it."""
    model, feeds = MODELS["pool"]
    made = {target: tune_model(model, 1e-2, samples=feeds, provider="cpu", target=target)[1]
            for target in ("cuda", "webgpu")}  # fmt: skip
    assert all(tuned.held for tuned in made.values())
    assert not made["webgpu"].plan.hazards
    assert "pool" in low_nodes(made["cuda"])
    assert "pool" not in low_nodes(made["webgpu"])
    assert {row.node: row.why for row in made["webgpu"].kept} == {"pool": "breaks on its own"}
    assert made["webgpu"].ran_on == "CPU, emulated float16 of webgpu"


@pytest.mark.slow
def test_long_products_are_measured() -> None:
    """At fixed levels they stay in float32 there, whatever they sum up; here the tolerance decides."""
    model, feeds = MODELS["chain"]
    plan = onnxamp.plan_model(model, level="O2", target="webgpu", split_k=False)
    assert {hazard.node for hazard in plan.hazards} == {"long"}
    found = {
        (target, tolerance, split): low_nodes(
            tune_model(model, tolerance, samples=feeds, provider="cpu", target=target, split_k=split)[1]
        ) & {"long", "short", "long/sum"}
        for target, tolerance, split in (
            ("cuda", 5e-3, True), ("webgpu", 5e-3, False), ("webgpu", 0.3, False), ("webgpu", 2e-2, True),
        )
    }  # fmt: skip
    assert found == {
        ("cuda", 5e-3, True): {"long", "short"}, ("webgpu", 5e-3, False): {"short"},
        ("webgpu", 0.3, False): {"long", "short"}, ("webgpu", 2e-2, True): {"long", "long/sum", "short"},
    }  # fmt: skip


def test_bfloat16_has_sums_as_before() -> None:
    model, feeds = MODELS["pool"]
    tuned = [tune_model(model, 5e-2, samples=feeds, provider="cpu", target=target, dtype="bfloat16")[1]
             for target in ("any", "webgpu")]  # fmt: skip
    assert tuned[0].error >= 0 == len(low_nodes(tuned[1])), "it has no bfloat16"


@pytest.mark.slow
@pytest.mark.webgpu
@pytest.mark.parametrize("name", MODELS)
def test_what_is_tuned_for_webgpu_holds_there(name: str) -> None:
    model, feeds = MODELS[name]
    result, tuned = tune_model(model, 1e-2, samples=feeds, provider="cpu", target="webgpu")
    assert tuned.held
    assert low_nodes(tuned)
    seen = onnxamp.diff_models(model, result, feeds, provider="webgpu", layers=False)
    assert max(row.rel_l2 for row in seen.outputs) < 1e-2
    directly = tune_model(model, 1e-2, samples=feeds, provider="webgpu", target="webgpu")[1]
    assert (directly.held, low_nodes(directly)) == (True, low_nodes(tuned))
