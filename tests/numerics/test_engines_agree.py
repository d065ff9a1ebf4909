"""Emulation held against a real engine: what passes by emulation passes on WebGPU, and errors are of one size."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import MODELS
from every import every
from graphs import CASES
from graphs.case import parse

import onnxamp
from onnxamp._runtime.inputs.samples import random_samples

NETWORKS = {path.stem for path in MODELS}
ZOO = {path.stem: lambda path=path: onnx.load(path) for path in MODELS} | {
    name: case.build for name, case in CASES.items() if case.tolerance != np.inf
}
"""Without those that draw random numbers, which agree by luck."""


@pytest.mark.slow
@pytest.mark.webgpu
@every(name=ZOO, parts=6)
def test_what_passes_by_emulation_passes_on_webgpu(name: str) -> None:
    """Networks over several samples: whether a detection is chosen on one is a matter of luck."""
    model, made = ZOO[name](), {}
    count = 3 if name in NETWORKS else 1
    for level in ("O1", "O2", "O3"):
        try:
            low = onnxamp.convert_model(model, level=level, target="webgpu")
        except onnxamp.OnnxAmpError:  # what cannot be converted is other tests' matter
            continue
        made[low.SerializeToString(deterministic=True)] = level, low
    for level, low in made.values():
        emulated = onnxamp.diff_models(model, low, provider="cpu", target="webgpu", layers=False, count=count)
        if emulated.passed and emulated.skipped is None:
            seen = onnxamp.diff_models(model, low, provider="webgpu", layers=False, count=count)
            assert seen.passed or seen.skipped, f"{level}: {seen.failure or seen.warnings}"


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.webgpu
@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_the_emulated_error_is_within_a_factor_of_two(path: Path) -> None:
    """Over several samples: that of a single number is a matter of luck."""
    model = onnx.load(path)
    low, samples = onnxamp.convert_model(model, level="O3", target="webgpu"), list(random_samples(model, 4))
    emulated, seen = (
        max(row.rel_l2 for row in found.outputs if row.is_float)
        for found in (
            onnxamp.diff_models(model, low, samples, provider="cpu", target="webgpu", layers=False),
            onnxamp.diff_models(model, low, samples, provider="webgpu", layers=False),
        )
    )
    assert seen / 2 < emulated < seen * 2


@pytest.mark.webgpu
def test_a_float32_result_is_held_to_what_float32_is_off_there() -> None:
    """WebGPU computes the variance as a difference of squares, and loses it beside a large mean."""
    model = parse("(float[2, 4] x) => (float[2, 4] y) <float[4] g = {1, 1, 1, 1}> { y = LayerNormalization (x, g) }")
    rows = np.float32([[0.1, 0.7, 1.3, 2.9], [2.3, 0.9, 1.7, 0.3]])
    found = onnxamp.diff_models(model, model, [{"x": rows}, {"x": rows + 100}], provider="webgpu")
    assert found.noise is not None
    assert found.noise > 1e-5
    assert found.passed
    assert found.judgements[0].limit == pytest.approx(2 * found.noise)
    lost = onnxamp.diff_models(model, model, {"x": rows + 1000}, provider="webgpu")
    assert not lost.passed


@pytest.mark.webgpu
def test_where_a_later_sample_is_beyond_float32_nothing_is_told() -> None:
    model = parse("(float[2, 4] x) => (float[2, 4] y) <float[4] g = {1, 1, 1, 1}>"
                  " { n = LayerNormalization (x, g) y = Mul (n, n) }")  # fmt: skip
    low = onnxamp.convert_model(model, "O3", target="webgpu", black_list=["LayerNormalization"])
    rows = np.float32([[0.1, 0.7, 1.3, 2.9], [2.3, 0.9, 1.7, 0.3]])
    first = onnxamp.diff_models(model, low, {"x": rows}, provider="webgpu")
    assert (first.lowest, first.passed, first.skipped) == ("float16", True, None)
    both = onnxamp.diff_models(model, low, [{"x": rows}, {"x": rows + 300}], provider="webgpu")
    assert both.skipped is not None
    assert "Float32 itself, on the same inputs, is off by" in both.skipped


@pytest.mark.parametrize(
    ("lowest", "noise", "limit"),
    [("float32", None, 1e-5), ("float32", 1e-7, 1e-5), ("float32", 1e-3, 2e-3), ("float32", 0.3, 1e-2),
     ("float16", 1e-2, 1e-2), ("bfloat16", 0.3, 5e-2)],
)  # fmt: skip
def test_noise_moves_the_limit_of_float32_alone(lowest: str, noise: float | None, limit: float) -> None:
    one = onnxamp.diff_models(MODELS[0], MODELS[0], provider="cpu").outputs
    assert {judgement.limit for judgement in onnxamp.Limits().judge(one, lowest, noise)} == {limit}
    fixed = onnxamp.make_limits({"rel_l2": 1e-6})
    assert {judgement.limit for judgement in fixed.judge(one, lowest, noise)} == {1e-6}


def test_other_limits_suffice_where_the_usual_one_is_missed() -> None:
    model = parse("(float[2, 4] x) => (float[2, 4] logits, float[2, 4] y) { logits = Neg (x) y = Identity (x) }")
    coarse = parse("(float[2, 4] x) => (float[2, 4] logits, float[2, 4] y) <float f = {1.02}>"
                   " { n = Neg (x) logits = Mul (n, f) y = Mul (x, f) }")  # fmt: skip
    rows = np.float32([[0.1, 0.7, 1.3, 2.9], [2.3, 0.9, 1.7, 0.3]])
    both = onnxamp.diff_models(model, coarse, {"x": rows}).outputs

    def judged(**otherwise: dict[str, float]) -> list[tuple[str, bool]]:
        found = onnxamp.Limits(tolerance=1e-2, otherwise=otherwise).judge(both, "float16")
        return [(judgement.metric, judgement.passed) for judgement in found]

    assert judged() == [("rel_l2", False), ("rel_l2", False)]
    assert judged(kl_divergence={"logits": 1e-3}) == [("kl_divergence", True), ("rel_l2", False)]
    assert judged(kl_divergence={"logits": 1e-6}, rel_l2={"y": 5e-2}) == [("kl_divergence", False), ("rel_l2", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "limit"), [(1, 2.5e-3), (8, 5e-3), (64, 1e-2), (100, 1e-2)])
def test_few_numbers_are_held_to_a_share_of_the_limit_where_errors_are_draws(count: int, limit: float) -> None:
    model = parse("(float[1, 9] x, float[9, 1] w) => (float[1, 1] y) { y = MatMul (x, w) }")
    low = onnxamp.convert_model(model, "O3", target="webgpu")
    rng = np.random.default_rng(count)
    made = random_samples(model, count)

    def limits(**how: Any) -> list[float]:
        return [judgement.limit for judgement in onnxamp.diff_models(model, low, provider="cpu", **how).judgements]

    assert limits(samples=made, target="webgpu") == [pytest.approx(limit)]
    assert limits(samples=made, target="cuda") == [1e-2]
    assert limits(samples=made, target="webgpu", limits=onnxamp.make_limits({"rel_l2": 0.02})) == [0.02]
    given = [{"x": rng.normal(size=(1, 9)).astype("f"), "w": rng.normal(size=(9, 1)).astype("f")}] * count
    assert limits(samples=given, target="webgpu") == [1e-2]
    one = onnxamp.diff_models(model, low, made, provider="cpu", target="webgpu").outputs
    assert {found.limit for found in onnxamp.Limits(tolerance=3e-3).judge(one, "float16", drawn=True)} == {3e-3}
    assert [found.limit for found in onnxamp.Limits(margin=0.2).judge(one, "float16", drawn=True)] == [
        pytest.approx(0.8 * limit)
    ]
    assert [found.limit for found in onnxamp.Limits(margin=0.2).judge(one, "float16")] == [1e-2]
    assert [found.limit for found in onnxamp.Limits().judge(one, "float16", noise=4e-3, drawn=True)] == [
        pytest.approx(max(limit, 8e-3))
    ]


@pytest.mark.parametrize(
    ("graph", "how", "count"),
    [
        ("(float[1, 1] x) => (float[1, 1] y) { y = Sign (x) }", {}, 16),
        ("(float[1, 7] x) => (float[1, 7] y) { y = Sign (x) }", {}, 10),
        ("(float[4, 40] x) => (float[4, 40] y) { y = Sign (x) }", {}, 4),
        ("(float[4, 40] x) => (float[4, 40] y) <float h = {100}> { s = Mul (x, h) y = Softmax (s) }", {}, 16),
        ("(float[4, 40] x, float[9] w) => (float[4, 40] y, float[9] z) { y = Sign (x) z = Sign (w) }", {}, 8),
        ("(float[1] x) => (int64[1] y) { s = Sign (x) y = Cast <to = 7> (s) }", {}, 4),
        ("(float[N, 1] x) => (float[N, 1] y) { y = Sign (x) }", {"dims": {"N": 8}}, 8),
        ("(float[1] x) => (float[1] y) { d = Sub (x, x) y = Sqrt (d) }", {}, 4),
        ("(float[1, 1] x) => (float[1, 1] y) { y = Sign (x) }", {"count": 3}, 3),
        ("(float[1, 1] x) => (float[1, 1] y) { y = Sign (x) }", {"target": "cuda"}, 1),
    ],
)
def test_as_many_inputs_are_made_up_as_show_the_error(graph: str, how: dict[str, Any], count: int) -> None:
    """As many as hold 64 numbers of each float output, from 4 to 16; of probabilities, the large ones count."""
    model = parse(graph)
    low = onnxamp.convert_model(model, "O3", white_list=["Sign", "Mul", "Sub"])
    assert onnxamp.diff_models(model, low, provider="cpu", **{"target": "webgpu", **how}).samples == count


def test_the_report_says_that_few_numbers_moved_the_limit() -> None:
    model = parse("(float[1] x) => (float[1] y) <float c = {100}> { a = Add (x, c) y = Sub (a, c) }")
    low = onnxamp.convert_model(model, "O3", target="webgpu", white_list=["Add", "Sub"])
    found = onnxamp.diff_models(model, low, count=2, provider="cpu", target="webgpu")
    assert found.warnings[0].endswith("the limit is 0.0031, as samples show few of its numbers (2).")
