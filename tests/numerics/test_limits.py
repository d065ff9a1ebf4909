"""The limits that outputs have to meet: by type, number of samples, target, and what is beyond the samples."""

from dataclasses import replace

import numpy as np
import pytest
from graphs.case import parse

from onnxamp import Limits, diff_models
from onnxamp._numerics.differences.metrics import TensorDiff


def output(size: int) -> TensorDiff:
    model = parse(f"(float[{size}] X) => (float[{size}] Y) {{ Y = Exp (X) }}")
    (diff,) = diff_models(model, model, {"X": np.ones(size, np.float32)}).outputs
    return replace(diff, usual_rel_l2=0.0, typical_rel_l2=0.0)


def limits_of(limits: Limits, lowest: str = "float16", *, size: int = 64, **facts: object) -> dict[str, float]:
    judged = limits.judge([output(size)], lowest, **facts)  # type: ignore[arg-type] # keywords of judge
    return {one.metric: one.limit for one in judged}


@pytest.mark.parametrize(
    ("lowest", "noise", "limit"),
    [
        ("float16", None, 1e-2),
        ("bfloat16", None, 5e-2),
        ("float32", None, 1e-5),
        ("float32", 1e-6, 1e-5),
        ("float32", 1e-3, 2e-3),
        ("float32", 0.5, 1e-2),
        ("float16", 0.5, 1e-2),
    ],
)
def test_default_limits(lowest: str, noise: float | None, limit: float) -> None:
    """The error of float32 itself may count twice, up to the tolerance of float16."""
    assert limits_of(Limits(), lowest, noise=noise) == {"rel_l2": pytest.approx(limit)}


@pytest.mark.parametrize(
    ("limits", "lowest", "size", "limit"),
    [
        (Limits(), "float16", 64, 1e-2),
        (Limits(), "float16", 1000, 1e-2),
        (Limits(), "float16", 8, 0.5e-2),
        (Limits(), "float16", 1, 0.25e-2),
        (Limits(margin=0.1), "float16", 64, 0.9e-2),
        (Limits(), "bfloat16", 8, 5e-2),
        (Limits(tolerance=0.02), "float16", 8, 0.02),
        (Limits({"rel_l2": {"Y": 0.03}}), "float16", 8, 0.03),
    ],
)
def test_few_numbers_of_random_errors_have_to_meet_a_share(
    limits: Limits, lowest: str, size: int, limit: float
) -> None:
    """The share is the cube root of that of 64 numbers; it lowers no limit that was asked for."""
    assert limits_of(limits, lowest, size=size, drawn=True) == {"rel_l2": pytest.approx(limit)}
    if not limits.of and limits.tolerance is None:
        usual = {"float16": 1e-2, "bfloat16": 5e-2}[lowest]
        assert limits_of(limits, lowest, size=size) == {"rel_l2": pytest.approx(usual)}


@pytest.mark.parametrize(("asked", "scatter"), [(False, 3), (True, 2)])
def test_further_random_samples_may_scatter(asked: bool, scatter: float) -> None:
    limits = Limits(tolerance=0.01, asked=asked)
    assert limits_of(limits, redrawn=True) == {
        "usual_rel_l2": 0.01,
        "rel_l2": pytest.approx(scatter * 0.01),
        "typical_rel_l2": pytest.approx(0.015),
    }


@pytest.mark.parametrize(
    ("limits", "beyond", "hard"),
    [(Limits(), 0.01, 0.1), (Limits(tolerance=0.02), 0.04, 0.1), (Limits(tolerance=0.2), 0.4, 0.4)],
)
def test_inputs_beyond_the_samples_may_be_off_by_more(limits: Limits, beyond: float, hard: float) -> None:
    """Those that are made to be hard by ten times the default, or twice what was asked for."""
    assert limits_of(limits.beyond) == {"rel_l2": pytest.approx(beyond)}
    assert limits_of(limits.hard("float16")) == {"rel_l2": pytest.approx(hard)}
    assert limits_of(limits.finite) == {}


def test_what_rounding_to_integers_costs_is_allowed_for() -> None:
    """By the square root of two, since both forms round; by a tenth at most."""
    model = parse("(float[64] X) => (float[64] Y) { Y = Exp (X) }")
    other = parse("(float[64] X) => (float[64] Y) <float k = {1.05}> { e = Exp (X) Y = Mul (e, k) }")
    feeds = {"X": np.ones(64, np.float32)}
    rounded = Limits().allowing(diff_models(model, other, feeds, tolerance=1.0).outputs)
    assert limits_of(rounded) == {"rel_l2": pytest.approx(0.01 + 0.05 * np.sqrt(2), rel=1e-3)}
    assert limits_of(rounded, "float32") == {"rel_l2": pytest.approx(1e-5)}
    far = parse("(float[64] X) => (float[64] Y) { Y = Identity (X) }")
    lost = Limits().allowing(diff_models(model, far, feeds, tolerance=1.0).outputs)
    assert limits_of(lost) == {"rel_l2": pytest.approx(0.11)}
