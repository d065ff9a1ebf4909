"""Groups of numbers far below the largest of an output: judged by their own norm, blamed, and healed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run, saved
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp
from onnxamp._numerics.differences.groups import groups_of, hidden_errors, hidden_groups

RNG = np.random.default_rng(0)
GATE = RNG.uniform(0.5, 1, (4, 128)).astype(np.float32)
ORDER = RNG.permutation(128)
JOINED = "j = Concat <axis = 1> (p, q) m = Mul (j, gate)"


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lossy(tail: str) -> ModelProto:
    """A network that loses the digits of ``q``, whose numbers are about 1, beside numbers in the thousands."""
    text = f"""(float[4,64] X) => (float[A,B] Y) <float k = {{4000}}, int64[2] flat = {{1, -1}}> {{
        h = MatMul (X, w) x = MatMul (h, w) p = Mul (x, k) b = Add (x, k) c = Relu (b) q = Sub (c, k) {tail}
    }}"""
    return add_weights(parse(text, 18, ir=10), {"w": (64, 64), "gate": GATE, "order": ORDER, "gates": GATE.T})


def validated(model: ModelProto, *arguments: str) -> dict[str, Any]:
    result = run("convert", saved(model), "-o", "low.onnx", "--format", "json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)["validation"]
    return found


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize(
    ("tail", "first"),
    [
        (f"{JOINED} Y = Identity (m)", "[0, 64]"),
        (f"{JOINED} Y = Transpose (m)", "[64, 0]"),
        (f"{JOINED} Y = Reshape (m, flat)", "[0, 64]"),
        (f"{JOINED} Y = Gather <axis = 1> (m, order)", f"[0, {next(i for i, at in enumerate(ORDER) if at >= 64)}]"),
        ("j = Concat <axis = 0> (p, q) m = Concat <axis = 1> (j, j) g = Concat <axis = 0> (gate, gate) Y = Mul (m, g)",
         "[4, 0]"),
    ],
    ids=["columns", "rows", "strung_together", "in_any_order", "samples_of_a_batch"],
)  # fmt: skip
def test_small_numbers_that_no_concat_shows_are_judged_blamed_and_healed(tail: str, first: str) -> None:
    found = validated(lossy(tail))
    failure = found["cure"]["failure"]
    assert failure.startswith("Output 'Y': relative L2 error of its small numbers ("), failure
    assert f"the first at {first}) is 0." in failure
    assert found["cure"]["first_bad"]["value"] == "q"
    assert found["cure"]["nodes"] == ["q"]
    assert found["outputs"][0]["part"]["rel_l2"] < 0.01


def test_what_is_lost_inside_a_tensor_is_blamed() -> None:
    """The norm of the whole difference hides the error of its own op."""
    shift = np.repeat(np.float32([0, 3000]), 64)
    scale = np.repeat(np.float32([1000, 1]), 64)
    text = """(float[4,64] X) => (float[4,128] Y) {
        x = MatMul (X, w) h = Mul (x, scale) a = Add (h, shift) Y = Sub (a, shift)
    }"""
    model = add_weights(parse(text, 18, ir=10), {"w": (64, 128), "shift": shift, "scale": scale})
    found = validated(model)
    assert found["cure"]["first_bad"]["value"] == "Y"
    assert "in its small numbers" in found["cure"]["first_bad"]["alarm"]
    assert found["cure"]["nodes"]


SCALES = {"a_thousandth": 1e-3, "subnormal": 1e-6, "lost": 1e-9}


@pytest.mark.parametrize("name", SCALES)
def test_a_result_is_judged_by_the_scale_of_its_columns(name: str) -> None:
    """What float16 holds passes, what it flushes fails, and what float32 itself would lose beside the rest is noise."""
    scale = np.repeat(np.float32([1, SCALES[name]]), 64)
    text = "(float[4,64] X) => (float[4,128] Y) { x = MatMul (X, w) Y = Mul (x, scale) }"
    original = add_weights(parse(text, 18, ir=10), {"w": (64, 128), "scale": scale})
    low = onnxamp.convert_model(original, "O3")
    found = onnxamp.diff_models(original, low, provider="cpu")
    part = found.outputs[0].part
    assert found.passed
    assert (part is None) == (name == "lost")
    if part is not None:
        assert part.rel_l2 < 0.1


SPREADS = {
    "one scale": lambda rng, shape: rng.standard_normal(shape),
    "columns": lambda rng, shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 2, shape[-1:]),
    "many zeros": lambda rng, shape: np.maximum(rng.standard_normal(shape), 0),
    "many scales": lambda rng, shape: np.exp(8 * rng.standard_normal(shape)),
    "two scales": lambda rng, shape: rng.standard_normal(shape) * np.where(rng.random(shape) < 0.3, 1e-3, 1),
    "masks": lambda rng, shape: np.where(rng.random(shape) < 0.1, -1e38, rng.standard_normal(shape)),
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-42, -30),
}
"""How numbers of a tensor may be spread."""


@pytest.mark.parametrize("spread", SPREADS)
def test_a_first_look_passes_no_hidden_error_over(spread: str) -> None:
    rng = np.random.default_rng(0)
    hidden = 0
    for trial in range(300):
        shape = tuple(rng.integers(1, 12, rng.integers(1, 5)))
        reference = SPREADS[spread](rng, shape).astype([np.float32, np.float64][trial % 2])
        result = reference * (1 + 0.01 * rng.standard_normal(shape)).astype(reference.dtype)
        if trial % 10 == 0:
            result.flat[0] = np.nan
        groups = hidden_groups(groups_of(reference, result))
        expected = max((group.error() for group in groups), default=0.0)
        assert hidden_errors(reference, [result, None]) == (expected, 0.0)
        hidden += expected > 0
    assert bool(hidden) == (spread in {"columns", "many scales", "two scales"})


@pytest.mark.parametrize("seed", range(40))
def test_planted_groups_are_found(seed: int) -> None:
    """Slices of any axis that are a thousandth to a millionth of the others, wherever they are."""
    rng = np.random.default_rng(seed)
    shape = rng.choice([1, 2, 3, 8, 17, 40], rng.integers(1, 5))
    axis = int(rng.integers(len(shape)))
    shape[axis] = rng.integers(2, 50)
    is_small = rng.permutation(shape[axis]) < max(1, shape[axis] // 2)
    along = [-1 if at == axis else 1 for at in range(len(shape))]
    small = np.broadcast_to(is_small.reshape(along), shape)
    reference = rng.uniform(0.5, 2, shape) * np.where(small, 10.0 ** -rng.uniform(3, 6), 1) * rng.choice([-1, 1], shape)
    result = reference * (1 + 0.2 * rng.standard_normal(shape))
    reference, result = (array.astype(np.float32) for array in (reference, result))
    found = [*hidden_groups(groups_of(reference, result))]
    if small.sum() < 16:
        assert not found
        return
    elements = max(group.elements for group in found)
    worst = np.linalg.norm((result - reference)[small]) / np.linalg.norm(reference[small])
    assert elements == small.sum()
    assert max(group.error() for group in found) == pytest.approx(worst, rel=1e-4)
    assert all(small[group.first] for group in found)


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_one_scale_make_no_groups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    draws = [rng.standard_normal, rng.random, lambda size: np.exp(rng.standard_normal(size))]
    shape = (*rng.choice([1, 2, 5, 16], 3), 200)
    for draw in draws:
        array = np.maximum(draw(shape), -1 if rng.random() < 0.5 else 0).astype(np.float32)
        assert not [*hidden_groups(groups_of(array, array * 2))]


def test_numbers_of_few_elements_count_over_all_samples() -> None:
    """Eight small numbers in each sample are judged together with those of other samples."""
    scale = np.ones((1, 16), np.float32)
    scale[:, 8:] = 1e-4
    text = "(float[1,4] X) => (float[1,16] Y) {{ x = MatMul (X, w) h = Mul (x, scale) Y = Mul (h, keep) }}"
    keep = np.where(scale == 1, 1, 0.5).astype(np.float32)
    models = [
        add_weights(parse(text.format(), 18, ir=10), {"w": (4, 16), "scale": scale, "keep": kept})
        for kept in (np.ones_like(scale), keep)
    ]
    limits = {"provider": "cpu", "tolerance": None}
    alone = onnxamp.diff_models(*models, count=1, **limits)
    assert alone.outputs[0].part is None
    together = onnxamp.diff_models(*models, count=4, **limits)
    part = together.outputs[0].part
    assert part is not None
    assert (part.value, part.numbers.split(" ")[0]) == ("Y", "32")
    assert part.rel_l2 == pytest.approx(0.5)
    assert not together.passed


def test_numbers_that_float32_itself_does_not_know_are_not_judged() -> None:
    """What is left of a constant without its mean is rounding noise, of another size in low precision."""
    text = """(float[7,64] X) => (float[7,128] Y) <int64[1] first = {0}> {
        k = ReduceMax <keepdims = 0, axes = [0, 1]> (X) c = Mul (ones, k) x = Concat <axis = 1> (X, c)
        m = ReduceMean <axes = [0]> (x) d = Sub (x, m) s = Mul (d, hundred) Y = Identity (s)
    }"""
    weights = {"ones": RNG.uniform(1, 2, (1, 64)).astype(np.float32).repeat(7, 0), "hundred": np.array(100, np.float32)}
    original = add_weights(parse(text, 17), weights)
    low = onnxamp.convert_model(original, "O3", hazards=False)
    found = onnxamp.diff_models(original, low, provider="cpu")
    assert found.outputs[0].part is None
    assert found.passed


SHARES = {
    "softmax": "Y = Softmax (k)",
    "sigmoid": "n = Neg (k) s = Sigmoid (n) t = Transpose (s) Y = Transpose (t)",
    "product": "s = Softmax (k) r = Relu (g) h = Sigmoid (r) Y = Mul (s, h)",
    "sum": "s = Softmax (k) n = Identity (k) t = Softmax (n) Y = Add (s, t)",
    "divided": "e = Exp (k) t = ReduceSum (e, rows) Y = Div (e, t)",
}


@pytest.mark.parametrize("name", SHARES)
def test_shares_of_one_are_judged_on_the_scale_of_one(name: str) -> None:
    """A classifier that is sure may flush the probabilities of all other classes."""
    text = f"""(float[2,64] X) => (float[2,1000] Y) <int64[1] rows = {{1}}> {{
        g = MatMul (X, w) k = Sub (g, off) {SHARES[name]}
    }}"""
    off = np.full(1000, 14, np.float32)
    off[:10] = 0
    original = add_weights(parse(text, 18, ir=10), {"w": (64, 1000), "off": off if name != "sigmoid" else -off})
    found = onnxamp.diff_models(original, onnxamp.convert_model(original, "O3", black_list=["Exp"]), provider="cpu")
    part = found.outputs[0].part
    assert part is not None
    assert part.rel_l2 < 0.01
    assert found.passed
