"""Verdicts on results that are wrong where a norm or a rule once hid it, and on right ones that were once refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from onnx import ModelProto, helper, numpy_helper

import onnxamp
from onnxamp._job import Validation
from onnxamp._job.validation import limits_of
from onnxamp._numerics.differences.detections import compare_matched
from onnxamp._tuning.metric import make_metric

RNG = np.random.default_rng(0)
DETECTOR = """(float[1,N,4] b, float[1,N] s) => (float[1,ROWS,4] boxes, float[1,ROWS] scores)
    <int64[1] k = {ROWS}, float off = {OFF}, int64[1] last = {-1}, int64[3] wide = {1, ROWS, 4}> {
    moved = Add (b, off) scores, i = TopK <axis = 1> (s, k) iu = Unsqueeze (i, last) ie = Expand (iu, wide)
    boxes = GatherElements <axis = 1> (moved, ie) }"""

MASKED = """(float[8,50] x, bool[8,50] keep) => (float[8,50] y) CONSTANTS {
    z = Mul (x, sign) y = Where (keep, z, mask) }"""


def compared(one: ModelProto, other: ModelProto, feeds: Mapping[str, Any], **options: Any) -> onnxamp.DiffReport:
    return onnxamp.diff_models(one, other, feeds, provider="cpu", **options)


def with_constant(text: str, **constants: float) -> ModelProto:
    listed = ", ".join(f"float {name} = {{{value!r}}}" for name, value in constants.items())
    return parse(text.replace("CONSTANTS", f"<{listed}>"), 17)


@pytest.mark.parametrize("mask", [-3.4028235e38, -1e30, -1e9, -1e4])
def test_numbers_beside_a_mask(mask: float) -> None:
    """Whatever fills the other places, the logits that are left are compared."""
    one, other = (with_constant(MASKED, sign=sign, mask=mask) for sign in (1.0, -1.0))
    feeds = {"x": RNG.standard_normal((8, 50)).astype(np.float32), "keep": RNG.random((8, 50)) < 0.8}
    assert compared(one, one, feeds).passed
    assert not compared(one, other, feeds).passed


def test_numbers_that_vanish_beside_a_mask() -> None:
    one, other = (with_constant(MASKED, sign=sign, mask=-3e38) for sign in (1.0, 0.0))
    feeds = {"x": RNG.standard_normal((8, 50)).astype(np.float32), "keep": RNG.random((8, 50)) < 0.8}
    assert "Values vanished" in (compared(one, other, feeds).failure or "")


def test_numbers_that_are_not_above_zero_are_no_mask() -> None:
    """What is below zero, such as a bounded logarithm, may vanish as other numbers do."""
    start = "(float[64] x) => (float[64] y) CONSTANTS { r = Relu (x) n = Neg (r)"
    one = with_constant(f"{start} y = Mul (n, one) }}", one=1.0)
    other = with_constant(f"{start} lost = Greater (r, half) y = Where (lost, zero, n) }}", half=0.5, zero=0.0)
    feeds = {"x": np.linspace(-1, 1, 64, dtype=np.float32)}
    assert compared(one, one, feeds).passed
    assert "Values vanished" in (compared(one, other, feeds).failure or "")


def test_lists_that_are_padded_with_minus_one() -> None:
    """What pads a list is no detection, whether the other side pads it as well, or lists something tiny there."""
    boxes = np.float32([[[0, 0, 1, 1], [2, 2, 4, 4], [0, 0, 0, 0], [0, 0, 0, 0]]])
    wanted = {"boxes": boxes, "scores": np.float32([[0.9, 0.5, -1, -1]])}
    moved = boxes.copy()
    moved[0, 2] = [5, 5, 6, 6]
    found = {"boxes": moved, "scores": np.float32([[0.9, 0.5, 0.001, -1]])}
    listed = frozenset(wanted)
    assert [one.error for one in compare_matched(wanted, found, listed)[0]] == [0.0]
    labels = [{"scores": one["scores"], "labels": np.int64([[3, 4, *rest]])} for one, rest in
              ((wanted, (-1, -1)), (found, (7, 8)))]  # fmt: skip
    assert [one.error for one in compare_matched(*labels, frozenset(labels[0]))[0]] == [0.0]


def test_labels_may_be_floats() -> None:
    """The class of a pixel, as exporters cast it: some fall to another class, also to class 0."""
    text = """(float[4096] x) => (float[4096] y) CONSTANTS { s = Mul (x, five) h = Cast <to = TYPE> (s)
        f = Cast <to = 1> (h) y = Floor (f) }"""
    one, other = (with_constant(text.replace("TYPE", str(elem)), five=5.0) for elem in (1, 10))
    feeds = {"x": np.linspace(0, 1, 4096, dtype=np.float32)}
    report = compared(one, other, feeds)
    output = report.outputs[0]
    assert (output.are_whole, output.differing > 0, report.passed) == (True, True, True)
    assert not compared(one, with_constant(text.replace("TYPE", "10"), five=0.0), feeds).passed


@pytest.mark.parametrize(("end", "passes"), [(-65504.0, True), (-1000.0, False), (65504.0, False)])
def test_masks_may_end_at_the_largest_number(end: float, passes: bool) -> None:
    one, other = (with_constant(MASKED, sign=1.0, mask=mask) for mask in (-3.4028235e38, end))
    feeds = {"x": RNG.standard_normal((8, 50)).astype(np.float32), "keep": RNG.random((8, 50)) < 0.8}
    assert compared(one, other, feeds).passed == passes


@pytest.mark.parametrize("shape", [(1, 10, 5), (1, 10, 84), (10, 6)])
def test_rows_of_another_width_are_no_detections(shape: tuple[int, ...]) -> None:
    wanted = {"y": RNG.random((1, 10, 6)).astype(np.float32)}
    found = {"y": RNG.random(shape).astype(np.float32)}
    groups, (diff,) = compare_matched(wanted, found, frozenset(wanted))
    assert (groups, diff.alarm is not None) == ([], True)


def test_the_worst_failure_of_all_samples_is_told() -> None:
    text = """(float[8] x) => (float[8] y) CONSTANTS { p = Greater (x, zero) r = Sqrt (x) s = Where (p, r, zero)
        y = Mul (x, s) }"""
    one = with_constant(text, zero=0.0)
    other = with_constant(text.replace("Where (p, r, zero)", "Mul (r, zero)"), zero=0.0)
    samples = [{"x": np.full(8, 4, np.float32)}, {"x": np.full(8, -4, np.float32)}]
    report = compared(one, other, samples)
    assert (report.failure or "").startswith("Output 'y': NaN where the reference is finite: 8 of 16 elements")


def test_the_first_bad_value_if_samples_take_other_branches() -> None:
    text = """(float[4] z, bool c) => (float[4] y) CONSTANTS {
        y = If (c) <then_branch = t () => (float[4] a) { q = Mul (z, k) q2 = Mul (q, k) a = Mul (q2, tiny) },
        else_branch = e () => (float[4] b) { b = Mul (z, z) }> }"""
    one = with_constant(text, k=1000.0, tiny=1e-6)
    other = onnxamp.convert_model(one, "O3", hazards=False)
    z = np.ones(4, np.float32)
    for order in ((True, False), (False, True)):
        report = compared(one, other, [{"z": z, "c": np.array(taken)} for taken in order])
        assert report.first_bad is not None
        assert report.first_bad.value.startswith("q2")


def detector(rows: int, off: float) -> ModelProto:
    return parse(DETECTOR.replace("ROWS", str(rows)).replace("OFF", repr(off)), 17)


@pytest.mark.parametrize(("rows", "scores"), [(1, np.linspace(0.9, 0.1, 50)), (20, np.full(50, 0.875))])
@pytest.mark.parametrize("limits", [{"detections": 1e-2}, {"cosine": 0.999, "max_abs": 1e-3}, {"rel_l2": 5e-3}])
def test_boxes_that_are_all_elsewhere(rows: int, scores: Any, limits: dict[str, float]) -> None:
    low = RNG.random((1, 50, 2))
    boxes = np.concatenate([low, low + 0.1 + RNG.random((1, 50, 2))], -1).astype(np.float32)
    feeds = {"b": boxes, "s": scores[None].astype(np.float32)}
    options = {"limits": onnxamp.make_limits(limits)}
    assert compared(detector(rows, 0.0), detector(rows, 0.0), feeds, **options).passed
    assert not compared(detector(rows, 0.0), detector(rows, 100.0), feeds, **options).passed


@pytest.mark.parametrize("shift", [0.0, 10.0])
def test_scores_may_be_negative(shift: float) -> None:
    """A tie at the end excuses a row; ids that are lost elsewhere fail, whatever all scores are shifted by."""
    text = """(float[1,6] x) => (float[1,4] values, int64[1,4] ids) <int64[1] k = {4}, float[6] d = {D}> {
        y = Add (x, d) values, ids = TopK <axis = 1> (y, k) }"""

    def model(*moved: float) -> ModelProto:
        return parse(text.replace("{D}", f"{{{', '.join(map(str, moved))}}}"), 17)

    plain = model(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    tie = {"x": np.array([[-1, -2, -3, -4, -4.0001, -9]], np.float32) + np.float32(shift)}
    lost = {"x": np.array([[5, -0.5, -1, -2, -9, -9]], np.float32) + np.float32(shift)}
    limits = {"limits": onnxamp.make_limits({"detections": 1e-2})}
    assert compared(plain, model(0.0, 0.0, 0.0, -0.0002, 0.0, 0.0), tie, **limits).passed
    assert not compared(plain, model(0.0, -8.0, -8.0, 0.0, 6.0, 6.0), lost, **limits).passed


@pytest.mark.parametrize("original", [
    "(float[N,4] x) => (float[M,3] y) <int64[2] s = {-1, 3}> { y = Reshape (x, s) }",
    "(float[N,4] x) => (float[N,4] y) <float z = {-1.0}> { a = Abs (x) b = Mul (a, z) c = Add (b, z) y = Log (c) }",
    "(float[N,4] x) => (float[N,2] y) <int64[1] a = {0}, int64[1] b = {2}, int64[1] c = {1}> { y = Slice (x,a,b,c) }",
])  # fmt: skip
def test_an_original_that_cannot_be_compared_with_says_so(original: str) -> None:
    model = parse("(float[N,4] x) => (float[N,4] y) { y = Identity (x) }", 17)
    assert not onnxamp.diff_models(model, model, provider="cpu", original=parse(original, 17)).passed


def test_a_saved_comparison_keeps_what_it_allows_for_integers(tmp_path: Path) -> None:
    text = """(float[N,32] x) => (float[N,32] y) <float s = {0.04}, int8 zp = {0}> { q = QuantizeLinear (x, s, zp)
        d = DequantizeLinear (q, s, zp) m = MatMul (d, w) r = Relu (m) q2 = QuantizeLinear (r, s, zp)
        d2 = DequantizeLinear (q2, s, zp) y = MatMul (d2, w) }"""
    model = parse(text, 17)
    model.graph.initializer.append(numpy_helper.from_array((RNG.standard_normal((32, 32)) / 6).astype("f"), "w"))
    onnx.save(model, tmp_path / "q.onnx")
    onnx.save(onnxamp.convert_model(model, "O3"), tmp_path / "low.onnx")
    first = run("diff", tmp_path / "q.onnx", tmp_path / "low.onnx", "--save", tmp_path / "d.json", "--no-cure")
    assert run("diff", tmp_path / "d.json").exit_code == first.exit_code == 0


def test_groups_of_a_result_with_nan() -> None:
    """Its groups are not those of the reference."""
    scale = np.ones(34, np.float32)
    scale[32:] = 1e-3, 1e-6
    wrong = scale.copy()
    wrong[32:] = 3e-3, np.nan
    models = []
    for factors in (scale, wrong):
        model = parse("(float[N,34] x) => (float[N,34] y) { y = Mul (x, s) }", 17)
        model.graph.initializer.append(numpy_helper.from_array(factors, "s"))
        models.append(model)
    report = compared(*models, {"x": RNG.standard_normal((64, 34)).astype(np.float32)})
    assert (report.failure or "").startswith("Output 'y': NaN where the reference is finite")


def test_a_mask_that_loses_one_of_many() -> None:
    """It fails by its error, whichever way an element flips."""
    text = "(float[N] x) => (float[N] y) CONSTANTS { g = Greater (x, t) y = Cast <to = 1> (g) }"
    x = np.concatenate([np.linspace(-1, -0.1, 500), [0.0005], np.linspace(0.1, 1, 5000)]).astype(np.float32)
    one, other = with_constant(text, t=0.0), with_constant(text, t=0.001)
    for pair in ((one, other), (other, one)):
        assert compared(*pair, {"x": x}, tolerance=0.1).passed
        assert not compared(*pair, {"x": x}, tolerance=0.01).passed
    assert "vanished" in (compared(one, with_constant(text, t=2.0), {"x": x}, tolerance=0.1).failure or "")


@pytest.mark.parametrize("kind", ["tensor", "sequence", "map"])
def test_check_looks_into_sequences_and_maps(kind: str) -> None:
    text = "(float[N,3] x) => (float[N,3] y) <float n = {-1.0}> { a = Abs (x) b = Mul (a, n) y = Log (b) }"
    model = parse(text, 17)
    if kind != "tensor":
        del model.graph.output[:]
    if kind == "sequence":
        model.graph.node.append(helper.make_node("SequenceConstruct", ["y"], ["p"]))
        model.graph.output.append(helper.make_tensor_sequence_value_info("p", 1, None))
    if kind == "map":
        labels = {"classlabels_int64s": [0, 1, 2]}
        model.graph.node.append(helper.make_node("ZipMap", ["y"], ["p"], domain="ai.onnx.ml", **labels))
        table = helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, []))
        model.graph.output.append(helper.make_value_info("p", helper.make_sequence_type_proto(table)))
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    bad = onnxamp.check_run(model, provider="cpu").first_bad
    assert bad is not None
    assert bad.value == "y"


def test_integers_count_beside_a_float_that_is_infinite_throughout() -> None:
    text = """(int64[N] x) => (float[N] mask, int64[N] ids) <int64 k = {K}, float z = {0.0}> {
        f = Cast <to = 1> (x) y = Mul (f, z) mask = Log (y) ids = Add (x, k) }"""
    one, other = (parse(text.replace("K", str(k)), 17) for k in (0, 5))
    report = compared(one, other, {"x": np.arange(1, 9)})
    assert report.skipped is None
    assert not report.passed


def test_metrics_of_what_they_do_not_measure() -> None:
    """They are left out, so that the default limit holds."""
    single = "(float[N,1] x) => (float[N,1] logits) CONSTANTS { logits = Mul (x, k) }"
    x = {"x": RNG.standard_normal((8, 1)).astype(np.float32)}
    limits = onnxamp.make_limits({"kl_divergence": 1e-3})
    assert not compared(with_constant(single, k=1.0), with_constant(single, k=-7.0), x, limits=limits).passed
    ids = "(int64[N,5] x) => (int64[N,5] ids) <int64 k = {K}> { ids = Mul (x, k) }"
    one, other = (parse(ids.replace("K", str(k)), 17) for k in (1, 3))
    limits = onnxamp.make_limits({"argmax_agreement": 0.9})
    assert not compared(one, other, {"x": np.arange(1, 21).reshape(4, 5)}, limits=limits).passed


@pytest.mark.parametrize("limits", [{"kl_divergence": 1e-3}, {"top5_agreement": 0.99}])
def test_rows_of_nan_agree_with_themselves(limits: dict[str, float]) -> None:
    x = RNG.standard_normal((4, 12)).astype(np.float32)
    x[1], x[2], x[3, 3] = np.nan, -np.inf, np.nan
    model = parse("(float[N,12] x) => (float[N,12] logits) { logits = Identity (x) }", 17)
    assert compared(model, model, {"x": x}, limits=onnxamp.make_limits(limits)).passed


def test_large_integers_are_told_apart() -> None:
    text = "(int64[N] x) => (int64[N] h) <int64 k = {K}> { h = Add (x, k) }"
    one, other = (parse(text.replace("K", str(k)), 17) for k in (0, 1))
    report = compared(one, other, {"x": np.arange(8) + (1 << 60)}, limits=onnxamp.make_limits({"differing": 0.0}))
    assert not report.passed


def test_limits_of_outputs_with_brackets_and_of_empty_sequences() -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["out[0]"]), helper.make_node("SequenceEmpty", [], ["none"])],
        "g", [helper.make_tensor_value_info("x", 1, ["N"])],
        [helper.make_tensor_value_info("out[0]", 1, ["N"]), helper.make_tensor_sequence_value_info("none", 1, ["N"])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    limits = onnxamp.make_limits({"rel_l2": {"out[0]": 0.1, "none": 0.1}})
    assert compared(model, model, {"x": np.ones(4, np.float32)}, limits=limits).passed


def test_outputs_without_elements_say_nothing(tmp_path: Path) -> None:
    text = "(float[N,4] x) => (float[M,4] y) <int64[1] z = {0}, int64[1] one = {1}> { y = Slice (x, z, z, z) }"
    onnx.save(parse(text, 17), tmp_path / "model.onnx")
    done = run("diff", tmp_path / "model.onnx", tmp_path / "model.onnx")
    assert "no output holds numbers to compare with the reference" in done.output


def test_the_error_of_a_fix_is_that_of_its_command(tmp_path: Path) -> None:
    text = """(float[8,64] x) => (float[8,64] a, float[8,64] b, float[8,64] c) {
        a = MatMul (x, w) b = MatMul (x, v) c = MatMul (x, i) }"""
    model = parse(text, 17)
    weights = {name: RNG.standard_normal((64, 64)) / 8 for name in "wv"} | {"i": 2 * np.eye(64)}
    for name, weight in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), name))
    onnx.save(model, tmp_path / "m.onnx")
    onnx.save(onnxamp.convert_model(model, "O3"), tmp_path / "low.onnx")
    done = run("diff", tmp_path / "m.onnx", tmp_path / "low.onnx", "--tolerance", "3e-4")
    assert "relative L2 0.0002" in done.output


@pytest.mark.parametrize(("metric", "tolerance", "limit"), [
    ("snr", 30, 0.0316), ("snr", None, 0.01), ("snr", 1e-2, 0.9988), ("cosine", 5e-4, 0.0316), ("cosine", 0.9, 0.5),
    ("kl", 0.3, 0.3),
])  # fmt: skip
def test_tolerances_of_other_metrics(metric: str, tolerance: float | None, limit: float) -> None:
    found = limits_of(Validation(tolerance=tolerance), "float16", tuned_by=metric)
    assert found.tolerance == pytest.approx(limit, abs=1e-4)
    if metric == "snr" and tolerance is not None:
        assert make_metric(metric, tolerance).tolerance == found.tolerance
