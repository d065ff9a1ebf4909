"""Measuring pairs of tensors in blocks, against the same definitions written down for whole arrays."""

import math
from dataclasses import fields

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxamp._base.errors import RuntimeFailure
from onnxamp._numerics.differences.measure import _BLOCK as BLOCK
from onnxamp._numerics.differences.measure import measure
from onnxamp._numerics.differences.metrics import Measurement
from onnxamp._runtime.sessions.session import cuda_available
from onnxamp._runtime.sessions.values import to_value

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.bool_]
ODD = [
    0.0, -0.0, 1.0, -2.5, 1e-7, 1e-14, 2e-25, 3e-39, 6e4, 7e4, 2e14, 3e19, 1e29, 1e30, -3.4e38, math.inf, -math.inf,
    math.nan,
]  # fmt: skip
"""Numbers at the borders of what is usual, and some whose squares float32 cannot hold."""
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
COUNTS = {
    "elements", "reference_nan", "found_nan", "reference_inf", "found_inf", "reference_zero", "found_zero", "broken",
    "flushed", "vanished",
}  # fmt: skip
SUMS = {"error_sum", "error_energy", "reference_energy", "found_energy"}
fixed = settings(derandomize=True, deadline=None, max_examples=80)


def oracle(reference, found):
    """What every field is by its docstring."""
    r, f = (np.asarray(x).astype(np.float64).reshape(-1) for x in (reference, found))
    usual, finite = np.abs(r) < 1e30, np.isfinite(f)
    common = usual & finite
    largest = max(np.abs(r[usual]), default=0.0)
    some = np.abs(r[usual & (r != 0)])
    flushed = (f == 0) & (r != 0) & ~np.isnan(r)
    return Measurement(
        elements=r.size,
        error_sum=float(np.abs(f - r, where=common, out=np.zeros_like(r)).sum()) if r.size else 0.0,
        error_energy=float(((f[common] - r[common]) ** 2).sum()),
        error_max=float(max(np.abs(f[common] - r[common]), default=0.0)),
        reference_energy=float((r[common] ** 2).sum()),
        found_energy=float((f[common] ** 2).sum()),
        reference_max=float(largest),
        found_max=float(max(np.abs(f[finite]), default=0.0)),
        reference_least=float(min(some, default=math.inf)),
        reference_nan=int(np.isnan(r).sum()),
        found_nan=int(np.isnan(f).sum()),
        reference_inf=int(np.isinf(r).sum()),
        found_inf=int(np.isinf(f).sum()),
        reference_zero=int((r == 0).sum()),
        found_zero=int((f == 0).sum()),
        broken=int(((np.isnan(f) & ~np.isnan(r)) | (np.isinf(f) & usual)).sum()),
        flushed=int(flushed.sum()),
        vanished=int((flushed & (np.abs(r) > 0.05 * largest)).sum()),
    )


def assert_equal(one, other):
    """Counts and extremes are exact; sums are to the order in which they are taken."""
    for field in fields(Measurement):
        mine, wanted = getattr(one, field.name), getattr(other, field.name)
        if field.name in COUNTS:
            assert mine == wanted, field.name
            assert isinstance(mine, int), field.name
        else:
            slack = 1e-12 if field.name in SUMS else 0
            assert mine == pytest.approx(wanted, rel=slack, abs=0, nan_ok=True), field.name


def check(reference, found):
    result = measure(to_value(reference), to_value(found))
    with np.errstate(invalid="ignore", over="ignore"):
        assert_equal(result, oracle(reference, found))
    return result


@st.composite
def pairs(draw):
    shape = draw(SHAPES)
    numbers = st.one_of(st.sampled_from(ODD), st.floats(-1e5, 1e5, width=32))
    drawn = [draw(hnp.arrays(np.float64, shape, elements=numbers)) for _ in range(2)]
    if draw(st.booleans()):  # mostly equal, as results are
        drawn[1] = np.where(draw(hnp.arrays(np.bool_, shape)), drawn[0], drawn[1])
    types = [draw(st.sampled_from(FLOATS)) for _ in range(2)]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return tuple(np.asarray(x).astype(kind) for x, kind in zip(drawn, types, strict=True))


@pytest.mark.slow
@fixed
@given(pairs())
def test_floats_of_every_width(pair):
    check(*pair)


@fixed
@given(st.sampled_from(INTEGERS), st.sampled_from([*INTEGERS, *FLOATS]), SHAPES, st.integers(0, 2**32 - 1))
def test_integers_and_booleans(one, other, shape, seed):
    rng = np.random.default_rng(seed)
    check(*(np.asarray(rng.integers(0, 100, shape)).astype(kind) for kind in (one, other)))


@pytest.mark.parametrize("elements", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17])
def test_more_than_one_block(elements):
    rng = np.random.default_rng(elements)
    reference = rng.standard_normal(elements).astype(np.float32)
    found = reference.astype(np.float16)
    found[::1000] = 0
    found[-1], found[7], reference[-2] = np.nan, np.inf, 0
    result = check(reference, found)
    assert result.broken == 2
    assert result.vanished > elements // 1400


def test_what_vanishes_is_judged_by_the_largest_of_all_blocks():
    reference = np.full(BLOCK + 5, 1.0, np.float32)
    found = reference.copy()
    found[0] = 0
    assert check(reference, found).vanished == 1
    reference[-1] = 30.0
    assert check(reference, found).vanished == 0
    found[-1] = 0
    assert check(reference, found).vanished == 1


@pytest.mark.parametrize("scale", [1e-25, 1e-19, 1.0, 1e14, 1e25])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_scales_whose_squares_float32_cannot_hold(scale, kind):
    reference = (np.array([1.0, 2.0, -3.0]) * scale).astype(kind)
    result = check(reference, (reference.astype(np.float64) * 1.25).astype(kind))
    assert result.rel_l2 == pytest.approx(0.25, rel=0.02)
    assert result.cosine == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (1, 1, 1, 1, 1)])
def test_shapes(shape):
    for kind in FLOATS:
        check(np.ones(shape, kind), np.zeros(shape, kind))


def test_an_empty_tensor_is_no_error():
    nothing = measure(to_value(np.zeros((0, 2), np.float32)), to_value(np.zeros((0, 2), np.float32)))
    assert (nothing.rel_l2, nothing.snr_db, nothing.mean_abs, nothing.alarm) == (0, math.inf, 0, None)
    assert math.isnan(nothing.cosine)
    something = measure(*(to_value(np.array([1, 2], np.float32)) for _ in range(2)))
    assert nothing + something == something


def test_strided_and_read_only_arrays():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    base.setflags(write=False)
    check(base[:, ::2], base.T.reshape(4, 6)[:, ::2])
    check(base.astype(ml_dtypes.bfloat16)[::2, ::-1], base[::2])


def test_strings_cannot_be_measured():
    import onnxruntime as ort
    from onnx import helper

    node = helper.make_node("Constant", [], ["y"], value_strings=["a"])
    graph = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("y", 8, [1])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    value = session.run_with_ort_values(["y"], {})[0]
    with pytest.raises(RuntimeFailure, match="not tensors of numbers"):
        measure(value, value)


# --- what is derived from the numbers ------------------------------------------------------------------------


@pytest.mark.slow
@fixed
@given(pairs())
def test_derived_measures(pair):
    with np.errstate(all="ignore"):
        m = measure(*map(to_value, pair))
        r, f = (x.astype(np.float64).reshape(-1) for x in pair)
        common = (np.abs(r) < 1e30) & np.isfinite(f)
        r, f = r[common], f[common]
        noise, signal, other = (float(np.linalg.norm(x)) for x in (f - r, r, f))
    if m.broken:
        assert (m.rel_l2, m.snr_db) == (math.inf, -math.inf)
    elif noise == 0:
        assert (m.rel_l2, m.snr_db) == (0, math.inf)
    elif signal == 0:
        assert (m.rel_l2, m.snr_db) == (math.inf, -math.inf)
    else:
        assert m.rel_l2 == pytest.approx(noise / signal, rel=1e-5)
        assert m.snr_db == pytest.approx(-20 * math.log10(noise / signal), abs=1e-4)
    if signal and other and 1e-2 < signal / other < 1e2:
        assert m.cosine == pytest.approx(float(r @ f) / signal / other, abs=1e-3)


def measured(reference, found):
    return measure(to_value(np.array(reference, np.float32)), to_value(np.array(found, np.float32)))


@pytest.mark.slow
@fixed
@given(st.lists(pairs(), min_size=2, max_size=4))
def test_sums_are_over_all_elements(drawn):
    """All but what vanishes: that is judged by the largest of its sample."""
    with np.errstate(all="ignore"):
        parts = [measure(*map(to_value, pair)) for pair in drawn]
        total = parts[0]
        for part in parts[1:]:
            total += part
        whole = oracle(*(np.concatenate([pair[i].astype(np.float64).reshape(-1) for pair in drawn]) for i in (0, 1)))
    for field in fields(Measurement):
        if field.name == "vanished":
            assert total.vanished == sum(part.vanished for part in parts)
        else:
            slack = 1e-12 if field.name in SUMS else 0
            assert getattr(total, field.name) == pytest.approx(getattr(whole, field.name), rel=slack, abs=0), field.name


def test_alarms_in_their_order():
    assert measured([1, 2, 3], [1, 2, 2.9]).alarm is None
    assert measured([1, 2, 3], [math.nan, math.inf, 0]).alarm == "NaN in 1 of 3 elements"
    assert measured([1, 2, 3], [1, math.inf, 0]).alarm == "Inf in 1 of 3 elements, where the largest is 3"
    vanished = measured([1, 2, 3], [1, 2, 0]).alarm
    assert vanished == "1 of 3 elements vanished: they are zero where the reference is not small"


def test_what_is_no_alarm():
    inf, nan = math.inf, math.nan
    assert measured([nan, inf, 1], [nan, inf, 1]).alarm is None, "the reference has them, too"
    assert measured([-3.4e38, 1], [-inf, 1]).alarm is None, "a sentinel may saturate"
    assert measured([1, 0.04], [1, 0]).alarm is None, "small values flush"
    assert measured([0, 1], [0, 1]).alarm is None
    assert measured([inf, 1], [5, 1]).alarm is None, "the reference breaks, not the result"


def test_a_nan_at_another_place_is_a_nan():
    assert measured([math.nan, 1], [1, math.nan]).alarm.startswith("NaN in 1 of 2 elements")


@pytest.mark.cuda
@pytest.mark.skipif(not cuda_available(), reason="no CUDA device")
@fixed
@given(pairs())
def test_values_on_a_device_measure_the_same(pair):
    import onnxruntime as ort

    values = [
        to_value(x) if x.dtype == ml_dtypes.bfloat16 else ort.OrtValue.ortvalue_from_numpy(x, "cuda", 0) for x in pair
    ]
    with np.errstate(all="ignore"):
        assert_equal(measure(*values), oracle(*pair))
