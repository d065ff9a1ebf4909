"""Where an error starts: the value that breaks, the op whose own error explains it, or errors that add up."""

import numpy as np
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

from onnxamp import diff_models
from onnxamp._numerics.judging import is_broken
from onnxamp._numerics.results import DiffReport

X = {"X": np.float32([1, 2, 3, 0.5])}


def chain(*factors: float, ends: str = "Identity") -> ModelProto:
    """A model that multiplies its input by one number after another: ``v0``, ``v1``, ..., and ``Y``."""
    steps = [f"v{index + 1} = Mul (v{index}, k{index})" for index in range(len(factors))]
    numbers = ", ".join(f"float k{index} = {{{factor}}}" for index, factor in enumerate(factors))
    text = "\n".join(["v0 = Identity (X)", *steps, f"Y = {ends} (v{len(factors)})"])
    return parse(f"(float[4] X) => (float[4] Y) <{numbers}> {{ {text} }}")


def compared(one: ModelProto, other: ModelProto) -> DiffReport:
    return diff_models(one, other, X, tolerance=0.01)


@pytest.mark.parametrize(
    ("factors", "value", "said", "is_cause"),
    [
        # One op is off by more than the limit.
        ((1.0, 1.02, 1.0, 1.0), "v2", "its own error is 0.02", True),
        # Another one is off as well, but by far less than the output.
        ((1.02, 1.0, 1.5, 1.0), "v3", "its own error is 0.5", True),
        # Each is off by less than the limit: the third is the first that is off by more than it with those before.
        ((1.004, 1.004, 1.004, 1.004), "v3", "the accumulated error is 0.012", False),
        # What is right again in between is no start.
        ((1.006, 1.006, 0.991, 1.006, 1.006), "v5", "the accumulated error is 0.015", False),
    ],
)
def test_the_start_of_an_error(factors: tuple[float, ...], value: str, said: str, is_cause: bool) -> None:
    report = compared(chain(*[1.0] * len(factors)), chain(*factors))
    found = report.first_bad
    assert found is not None
    assert (found.value, found.alarm, found.breaks) == (value, said, is_cause)
    assert not is_broken(report)


def test_what_breaks_comes_before_what_is_off() -> None:
    """The logarithm is right on the reference's inputs, but what it gets is negative."""
    report = compared(chain(1.0, 1.0, ends="Log"), chain(-1.0, 1.0, ends="Log"))
    assert report.first_bad is not None
    assert (report.first_bad.value, report.first_bad.op) == ("Y", "Log")
    assert report.first_bad.alarm == "NaN in 4 of 4 elements"
    assert is_broken(report)


def test_a_value_that_only_the_error_before_it_makes_vanish_does_not_break() -> None:
    """A Relu of nearly nothing is zero, but for the op that is off."""
    report = compared(chain(1.0, 1.0, ends="Relu"), chain(-1.0, 1.0, ends="Relu"))
    assert report.first_bad is not None
    assert (report.first_bad.value, report.first_bad.alarm) == ("v1", "its own error is 2")
    assert not is_broken(report)


def test_a_result_without_fault_has_none() -> None:
    report = compared(chain(1.0, 1.0), chain(1.0, 1.0))
    assert (report.first_bad, is_broken(report)) == (None, False)


def scaled(*factors: tuple[float, float]) -> ModelProto:
    """A model that multiplies two channels, the first of which is far larger, by one pair of numbers after another."""
    steps = [f"v{index + 1} = Mul (v{index}, k{index})" for index in range(len(factors))]
    text = "\n".join(["v0 = Identity (X)", *steps, f"Y = Identity (v{len(factors)})"])
    model = parse(f"(float[1,2,64] X) => (float[1,2,64] Y) {{ {text} }}")
    pairs = {f"k{index}": np.float32(pair).reshape(2, 1) for index, pair in enumerate(factors)}
    return add_weights(model, pairs)


@pytest.mark.parametrize(
    ("factors", "value", "said"),
    [
        ([1.0, 1.2, 1.0], "v2", "its own error is 0.2 in its small numbers"),
        ([1.008] * 16, "v1", "the accumulated error is 0.008 in its small numbers"),
    ],
)
def test_an_error_that_the_norm_of_a_value_hides(factors: list[float], value: str, said: str) -> None:
    one = scaled((1e5, 1.0), *[(1.0, 1.0)] * len(factors[1:]))
    other = scaled(*[(1e5 if at == 0 else 1.0, factor) for at, factor in enumerate(factors)])
    feeds = {"X": np.random.default_rng(0).standard_normal((1, 2, 64)).astype(np.float32)}
    report = diff_models(one, other, feeds)
    assert {judged.metric for judged in report.judgements if not judged.passed} == {"part_rel_l2"}
    assert report.first_bad is not None
    assert (report.first_bad.value, report.first_bad.alarm) == (value, said)
