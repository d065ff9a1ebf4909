"""Properties of the error measures, and the alarms."""

import math
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxamp._numerics.differences.blocks import PART
from onnxamp._numerics.differences.compare import compare
from onnxamp._numerics.differences.merge import merge
from onnxamp._numerics.differences.metrics import Bad, PartError

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
FINITE = st.floats(-1e6, 1e6, width=32)
ANY = st.floats(width=32)
fixed = settings(derandomize=True, deadline=None, max_examples=60)


@st.composite
def pairs(draw, elements=FINITE, shapes=SHAPES):
    shape = draw(shapes)
    return tuple(draw(hnp.arrays(np.float32, shape, elements=elements)) for _ in "ab")


@fixed
@given(hnp.arrays(np.float32, SHAPES, elements=ANY))
def test_nothing_differs_from_itself(x):
    found = compare("x", x, x.copy())
    assert (found.mean_abs, found.max_abs, found.max_rel, found.rel_l2, found.rmse) == (0, 0, 0, 0, 0)
    assert found.required_tolerance == 0
    assert found.snr_db == math.inf
    assert found.cosine == pytest.approx(1)
    assert found.argmax_agreement in (None, 1)
    assert found.vanished == 0
    assert found.alarm is None


@fixed
@given(pairs(ANY))
def test_counts_and_errors_are_symmetric(pair):
    one, two = compare("x", *pair), compare("x", *pair[::-1])
    for kind in ("nan", "inf", "zero"):
        assert getattr(one, f"reference_{kind}") == getattr(two, f"result_{kind}")
    for measure in ("mean_abs", "max_abs", "rmse", "worst_index"):
        assert getattr(one, measure) == getattr(two, measure)
    if all(abs(x)[np.isfinite(x)].max(initial=0) < 1e30 for x in pair):  # sentinels of the reference are apart
        np.testing.assert_allclose(one.cosine, two.cosine)


@fixed
@given(pairs())
def test_order_of_the_measures(pair):
    found = compare("x", *pair)
    slack = 1 + 1e-9
    assert found.mean_abs <= found.rmse * slack <= found.max_abs * slack**2
    assert found.required_tolerance <= found.max_abs
    assert -1 <= found.cosine <= 1
    if found.max_abs:
        a, b = (np.asarray(x, np.float64) for x in pair)
        assert abs(a - b)[found.worst_index] == found.max_abs
        assert found.worst_reference == pair[0][found.worst_index]
        assert found.worst_result == pair[1][found.worst_index]
        tolerance = found.required_tolerance * slack
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)


@fixed
@given(pairs(), st.integers(-40, 40))
def test_relative_measures_do_not_see_a_common_scale(pair, exponent):
    one = compare("x", *pair)
    two = compare("x", *(x.astype(np.float64) * 2.0**exponent for x in pair))
    for measure in ("rel_l2", "max_rel", "cosine", "snr_db", "argmax_agreement", "vanished"):
        assert getattr(one, measure) == pytest.approx(getattr(two, measure), nan_ok=True), measure


@fixed
@given(pairs(), st.sampled_from([0.5, 3, 1e3]))
def test_cosine_does_not_see_the_scale_of_one_side(pair, factor):
    a, b = (x.astype(np.float64) for x in pair)
    assert compare("x", a, b).cosine == pytest.approx(compare("x", a, b * factor).cosine)


@pytest.mark.slow
@fixed
@given(pairs(shapes=st.just((3, 4))))
def test_formulas(pair):
    a, b = (x.astype(np.float64) for x in pair)
    assume(a.any() and not np.array_equal(a, b))
    found = compare("x", *pair)
    assert found.rel_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
    assert found.snr_db == pytest.approx(-20 * math.log10(found.rel_l2))
    assert found.rmse == pytest.approx(math.sqrt(np.mean((a - b) ** 2)))
    floor = np.maximum(abs(a), 1e-3 * abs(a).max())
    assert found.max_rel == pytest.approx((abs(a - b) / floor).max())
    vanished = np.sum((b == 0) & (abs(a) > 0.05 * abs(a).max()))
    is_mask = len({*a.flat} | {0.0}) == 2 and 0.0 in a
    assert found.vanished == (0 if is_mask and vanished < np.count_nonzero(a) else vanished)


def judged(a, b):
    """The measures that depend on all elements."""
    error, top = abs(a - b), abs(a).max()
    best = {k: np.argsort(-x, axis=-1, kind="stable")[:, :5] for k, x in (("a", a), ("b", b))}
    shared = [len({*one} & {*other}) / 5 for one, other in zip(best["a"], best["b"], strict=True)]
    return {
        "mean_abs": error.mean(),
        "max_abs": error.max(),
        "max_rel": (error / np.maximum(abs(a), 1e-3 * top)).max(),
        "required_tolerance": (error / (1 + abs(a))).max(),
        "rel_l2": np.linalg.norm(error) / np.linalg.norm(a),
        "rmse": math.sqrt(np.mean(error**2)),
        "cosine": np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b),
        "differing": np.mean(error > 0),
        "vanished": np.sum((b == 0) & (abs(a) > 0.05 * top)),
        "argmax_agreement": np.mean(best["a"][:, 0] == best["b"][:, 0]),
        "top5_agreement": np.mean(shared),
    }


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 400])
@pytest.mark.parametrize("size", [PART - 7, PART + 7, 2 * PART + 11])
def test_an_output_of_several_parts(rows, size):
    """Rows that are longer than a part, too; the largest error and the only broken element are in the last part."""
    rng = np.random.default_rng(size)
    a = rng.standard_normal((rows, size // rows))
    b = a + 1e-4 * rng.standard_normal(a.shape)
    b[:, 3], b[-1, -2] = 0, a[-1, -2] + 50
    found = compare("x", a, b)
    for measure, wanted in judged(a, b).items():
        assert getattr(found, measure) == pytest.approx(wanted, rel=1e-9), measure
    assert found.worst_index == (rows - 1, size // rows - 2)
    b[-1, -1] = np.nan
    broken = compare("x", a, b)
    assert broken.bad == Bad("NaN", (rows - 1, size // rows - 1), a[-1, -1], 1)
    assert (broken.result_nan, broken.rel_l2) == (1, math.inf)


@fixed
@given(st.data())
def test_one_broken_element_is_found(data):
    a = data.draw(hnp.arrays(np.float32, (2, 3), elements=st.floats(1, 10, width=32)))
    index = data.draw(st.tuples(st.integers(0, 1), st.integers(0, 2)))
    kind, value = data.draw(st.sampled_from([("NaN", np.nan), ("Inf", -np.inf), ("zero", -0.0)]))
    b = a.copy()
    b[index] = value
    assert compare("x", a, b).bad == Bad(kind, index, float(a[index]), 1)
    found = compare("x", a, b)
    assert found.worst_index == index or kind == "zero"
    assert f"the first at {list(index)}" in found.alarm
    assert "1 of 6 elements" in found.alarm
    assert math.isinf(found.max_abs) == (kind != "zero")


def test_alarms_in_their_order():
    a = np.array([1, 2, 3, np.nan, np.inf], np.float32)
    assert compare("x", a, a[:3]).alarm == "The shape is (3,) instead of (5,)."
    b = np.array([0, np.inf, np.nan, np.nan, np.inf], np.float32)
    assert compare("x", a, b).alarm.startswith("NaN where the reference is finite: 1 of 5 elements, the first at [2]")
    b[2] = 3
    assert compare("x", a, b).alarm.startswith("Inf where the reference is finite")
    b[1] = 2
    found = compare("x", a, b)
    assert found.alarm == (
        "Values vanished: 1 of 5 elements are exactly zero without cause, the first at [0], where the reference is 1."
    )
    assert found.max_abs == 1
    b[0] = 1
    assert compare("x", a, b).alarm is None


def test_infinities_of_opposite_sign_and_lost_infinities_are_errors():
    inf = np.array([np.inf, 1.0])
    for other in (np.array([-np.inf, 1.0]), np.array([5.0, 1.0]), np.array([np.nan, 1.0])):
        found = compare("x", inf, other)
        assert (found.max_abs, found.rel_l2, found.snr_db) == (np.inf, np.inf, -np.inf)
        assert found.alarm is None, "the reference is not finite there"
        assert found.cosine == pytest.approx(1)


def test_small_values_that_flush_are_no_alarm():
    a = np.array([1.0, 1e-9, 0.049], np.float32)
    found = compare("x", a, np.array([1.0, 0, 0], np.float32))
    assert (found.vanished, found.alarm, found.result_zero) == (0, None, 2)


def test_zero_reference():
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    found = compare("x", zero, one)
    assert (found.rel_l2, found.max_rel, found.snr_db, found.cosine) == (np.inf, np.inf, -np.inf, 0)
    assert compare("x", one, zero).vanished == 3


def test_types():
    low = np.array([[1, 2], [4, 3]], ml_dtypes.bfloat16)
    found = compare("x", low.astype(np.float32), low)
    assert (found.max_abs, found.result_dtype, found.reference_dtype) == (0, "bfloat16", "float32")
    assert compare("x", low, np.zeros_like(low)).vanished == 4
    assert compare("x", low, np.zeros_like(low)).bad == Bad("zero", (0, 0), 1.0, 4)
    labels = compare("x", np.array([3, 0]), np.array([0, 0]))
    assert (labels.max_abs, labels.vanished, labels.alarm) == (3, 0, None)
    flags = compare("x", np.array([True, False]), np.array([True, True]))
    assert (flags.mean_abs, flags.worst_index, flags.worst_result) == (0.5, (1,), 1.0)
    words = compare("x", np.array(["a", "b"], object), np.array(["a", "c"], object))
    assert (words.mean_abs, words.worst_reference, words.worst_result) == (0.5, "b", "c")
    assert (words.argmax_agreement, words.alarm) == (None, None)
    assert compare("x", np.array([b"a"]), np.array([b"a"])).max_abs == 0
    assert compare("x", np.array(["a"]), np.array(["b"])).bad is None


def test_arg_max_counts_ties_of_the_reference_as_agreement():
    a = np.array([[1, 1, 0], [0, 2, 3], [5, 4, 4], [0, 1, 0]], np.float32)
    b = np.array([[1, 2, 0], [0, 3, 2], [5, 4, 4], [0, 1, 0]], np.float32)
    assert compare("x", a, b).argmax_agreement == 0.75
    assert compare("x", a[:, :1], b[:, :1]).argmax_agreement is None
    assert compare("x", a[0, 0], b[0, 0]).argmax_agreement is None
    assert compare("x", np.zeros((0, 3)), np.zeros((0, 3))).argmax_agreement is None


def test_huge_and_tiny_numbers_do_not_overflow():
    a = np.array([1e200, -1e200])
    assert compare("x", a, a * 1.5).rel_l2 == pytest.approx(0.5)
    assert compare("x", a, a * 1.5).cosine == pytest.approx(1)
    assert compare("x", a * 1e-480, a * 1.5e-480).rel_l2 in (0, pytest.approx(0.5))
    assert compare("x", np.array([1e308]), np.array([-1e308])).max_abs == np.inf


# --- shares ---------------------------------------------------------------------------------------------------


def test_top_five_is_the_mean_share_of_common_elements():
    a = np.arange(20, dtype=np.float32).reshape(2, 10)
    assert compare("x", a, a).top5_agreement == 1
    b = a.copy()
    b[0, 0] = 100  # one of five is another
    assert compare("x", a, b).top5_agreement == pytest.approx(0.9)
    assert compare("x", a, -a).top5_agreement == 0
    assert compare("x", a[:, :9], a[:, :9]).top5_agreement is None
    assert compare("x", a[0, 0], a[0, 0]).top5_agreement is None
    assert compare("x", np.zeros((0, 10)), np.zeros((0, 10))).top5_agreement is None


def test_top_five_counts_ties_of_the_reference_as_agreement():
    a = np.float32([[9, 8, 7, 6, 5, 5, 5, 1, 1, 1]])
    b = np.float32([[9, 8, 7, 6, 1, 1, 5, 1, 1, 1]])
    assert compare("x", a, b).top5_agreement == 1
    assert compare("x", a, b[:, ::-1]).top5_agreement < 1


@pytest.mark.slow
@fixed
@given(hnp.arrays(np.float32, (3, 10), elements=FINITE, unique=True), st.randoms(use_true_random=False))
def test_top_five_is_a_set(a, random):
    b = a.copy()
    for row in b:
        largest = np.argsort(row)[-5:]
        order = list(row[largest])
        random.shuffle(order)
        row[largest] = order
    assert compare("x", a, b).top5_agreement == 1


@fixed
@given(pairs(ANY))
def test_differing_counts_what_is_not_equal(pair):
    a, b = pair
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    assert compare("x", a, b).differing == (np.mean(~equal) if a.size else 0)


def test_differing_of_labels_and_words():
    assert compare("x", np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])).differing == 0.25
    assert compare("x", np.array(["a", "b"], object), np.array(["a", "c"], object)).differing == 0.5
    assert compare("x", np.zeros((2, 3)), np.zeros((3, 2))).differing == 1


# --- several samples --------------------------------------------------------------------------------------------


@pytest.mark.slow
@fixed
@given(st.lists(pairs(ANY, st.just((3, 12))), min_size=1, max_size=4))
def test_merge_of_equal_shapes_is_one_tensor(drawn):
    """Sums, means, counts and largest errors are those of all rows together."""
    merged = merge([compare("x", *pair) for pair in drawn])
    whole = compare("x", *(np.concatenate([pair[i] for pair in drawn]) for i in (0, 1)))
    for name in ("size", "reference_nan", "result_nan", "reference_inf", "result_inf", "reference_zero", "result_zero",
                 "max_abs", "required_tolerance"):  # fmt: skip
        assert getattr(merged, name) == getattr(whole, name), name
    for name in ("mean_abs", "rmse", "differing", "argmax_agreement", "top5_agreement"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-6, nan_ok=True), name
    assert (merged.worst_reference, merged.worst_result) == pytest.approx(
        (whole.worst_reference, whole.worst_result), nan_ok=True
    )
    row, column = whole.worst_index
    assert (merged.worst_sample, *merged.worst_index) == (row // 3, row % 3, column)


@pytest.mark.slow
@fixed
@given(st.lists(pairs(shapes=hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=5)), min_size=2, max_size=4))
def test_merge_tells_the_worst_sample(drawn):
    diffs = [compare("x", *pair) for pair in drawn]
    merged = merge(diffs)
    for name in ("max_abs", "max_rel", "required_tolerance", "rel_l2"):
        assert getattr(merged, name) == max(getattr(diff, name) for diff in diffs)
    assert merged.snr_db == min(diff.snr_db for diff in diffs)
    assert merged.cosine == min(diff.cosine for diff in diffs)
    assert merged.max_abs == diffs[merged.worst_sample].max_abs
    assert merged.worst_index == diffs[merged.worst_sample].worst_index
    assert merged.size == sum(diff.size for diff in diffs)


def test_merge_of_one_changes_nothing():
    for a, b in (
        (np.arange(4.0), np.array([0, 1, 2, 5.0])), (np.zeros(0), np.zeros(0)), (np.zeros(2), np.zeros(3)),
        (np.array(["a"], object), np.array(["b"], object)), (np.array(1.0), np.array(np.nan)),
    ):  # fmt: skip
        one = compare("x", a, b)
        merged = merge([one])
        for field in fields(one):
            mine, wanted = getattr(merged, field.name), getattr(one, field.name)
            assert mine == pytest.approx(wanted, nan_ok=True) if isinstance(wanted, float) else mine == wanted, field


SAME_IN_ALL_SAMPLES = {"name", "reference_dtype", "result_dtype", "usual_rel_l2"}
"""``usual_rel_l2`` is known only after samples are merged."""
WORSE = {
    **dict.fromkeys(("reference_shape", "result_shape"), (3,)), "worst_index": (0,), "cosine": -1.0, "snr_db": -9.0,
    "bad": Bad("NaN", (1,), 0.0, 1), "part": PartError(9.0, "x"), "worst_sample": 1,
    "are_whole": False,
}  # fmt: skip


def test_merge_joins_every_field():
    """A field that onnxamp/_numerics/differences/merge.py does not know would be that of the first sample."""
    first = compare("x", np.float32([0, 2]), np.float32([0, 3]))
    for field in {item.name for item in fields(first)} - SAME_IN_ALL_SAMPLES:
        second = replace(first, **{"max_abs": 9.0, "rel_l2": 9.0, field: WORSE.get(field, 9.0)})
        assert getattr(merge([first, second]), field) != getattr(first, field), field


def test_merge_keeps_the_worst_failure_and_its_sample():
    good = compare("x", np.ones(4), np.ones(4))
    bad = compare("x", np.ones(4), np.array([1, 0, 1, 0.0]))
    worse = compare("x", np.ones(4), np.array([1, np.nan, 1, 1]))
    merged = merge([good, bad, worse, worse])
    assert merged.bad == replace(worse.bad, sample=2, count=2)
    assert merged.vanished == 2
    assert merged.worst_sample == 2
    assert (
        merged.alarm
        == "NaN where the reference is finite: 2 of 16 elements, the first at [1], where the reference is 1."
    )


def test_merge_with_one_other_shape_is_an_alarm():
    good = compare("x", np.ones(4), np.ones(4))
    odd = compare("x", np.ones(4), np.ones(3))
    assert merge([good, odd, good]).alarm == "The shape is (3,) instead of (4,)."
    assert merge([good, odd, good]).rel_l2 == math.inf


def test_merge_with_an_empty_sample():
    nothing, some = (
        compare("x", np.zeros((0, 3)), np.zeros((0, 3))),
        compare("x", np.ones((1, 3)), np.full((1, 3), 2.0)),
    )
    for merged in (merge([nothing, some]), merge([some, nothing])):
        assert (merged.mean_abs, merged.size, merged.argmax_agreement) == (1, 3, 1)
        assert merged.worst_reference == 1
    assert merge([nothing, nothing]).mean_abs == 0


def test_the_divergence_of_logits_is_that_of_their_distributions() -> None:
    a, b = np.random.default_rng(3).normal(size=(2, 2, 5, 40))
    found = compare("lm_logits", a, b).kl_divergence
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    assert found == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-12)
    assert compare("logits", a, a + 3).kl_divergence == pytest.approx(0, abs=1e-15)  # only differences count
    assert compare("scores", a, b).kl_divergence is None
    a[..., 3] = -np.inf  # tokens that are ruled out
    b[..., 3] = -np.inf
    assert np.isfinite(compare("logits", a, b).kl_divergence or np.nan)
    b[..., 4] = -np.inf
    assert compare("logits", a, b).kl_divergence == np.inf


def test_the_divergence_of_samples_is_the_mean_over_rows() -> None:
    a, b = np.random.default_rng(4).normal(size=(2, 6, 12))
    parts = [compare("logits", a[:2], b[:2]), compare("logits", a[2:], b[2:])]
    assert merge(parts).kl_divergence == pytest.approx(compare("logits", a, b).kl_divergence)
