"""Lists of detections: which outputs are some, how rows are matched, and what counts as an error."""

import json

import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, report_of, run
from graphs.case import add_weights, parse
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import onnxamp
from onnxamp import ArgumentError

PICK = """(float[1,N,5] x) => ({kind}[1,K,4] boxes, {kind}[1,K] scores, int64[1,K] labels)
    <int64[1] k = {{{count}}}, int64[1] last = {{-1}}, int64[2] parts = {{4, 1}},
     int64[4] wide = {{1, {count}, 4, 1}}> {{
    b, s1 = Split <axis = 2> (x, parts)
    s = Squeeze (s1, last)
    scores, labels = TopK <axis = 1> (s, k)
    index = Unsqueeze (labels, last)
    target = Slice (wide, zero, three)
    indices = Expand (index, target)
    boxes = GatherElements <axis = 1> (b, indices)
}}"""
ROWS = 6


def picking(count=ROWS):
    """A model that selects the boxes with the highest scores; the label is the number of the input row."""
    model = parse(PICK.format(kind="float", count=count))
    add_weights(model, {"zero": np.array([0]), "three": np.array([3])})
    return model


def boxes_of(count, seed=0):
    rng = np.random.default_rng(seed)
    low = rng.random((1, count, 2))
    return np.concatenate([low, low + 0.1 + rng.random((1, count, 2))], -1).astype(np.float32)


def detect(boxes, scores):
    """Feeds of the model."""
    return {"x": np.concatenate([boxes, np.asarray(scores, np.float32)[None, :, None]], -1)}


def shown(one, other, metric, **options):
    """What a comparison says of two lists of detections: a model that gives one, and a model of constants."""
    fed = [name for name in ("boxes", "scores", "labels") if name in one]
    kinds = {"boxes": "float[1,N,4]", "scores": "float[1,N]", "labels": "int64[1,N]"}
    text = f"({', '.join(f'{kinds[n]} in_{n}' for n in fed)}) => ({', '.join(f'{kinds[n]} {n}' for n in fed)}) {{"
    text += " ".join(f"{n} = Identity (in_{n})" for n in fed) + "}"
    reference, result = parse(text), parse(text)
    del result.graph.node[:]
    result.graph.node.extend(
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(other[name]))) for name in fed
    )
    feeds = {f"in_{name}": one[name] for name in fed}
    return onnxamp.diff_models(reference, result, feeds, metric=metric, provider="cpu", **options)


def lists(count=20, seed=0):
    rng = np.random.default_rng(seed)
    scores = np.sort(rng.uniform(0.1, 0.9, (1, count)).astype(np.float32))[:, ::-1].copy()
    return {"boxes": boxes_of(count, seed), "scores": scores, "labels": rng.integers(0, 5, (1, count))}


def reordered(rows, order):
    return {name: array[:, order] for name, array in rows.items()}


class TestWhichOutputs:
    def test_what_an_op_selected_is_matched_by_itself(self):
        scores = [0.9, 0.5001, 0.5, 0.3, 0.2, 0.1, 0.05]
        boxes = boxes_of(7)
        model = picking()
        low = onnxamp.convert_model(model, "O3", dtype="bfloat16", target="any", hazards=False)
        report = onnxamp.diff_models(model, low, detect(boxes, scores), provider="cpu")
        (found,) = report.detections
        assert found.outputs == ("boxes", "scores", "labels")
        assert (found.rows, found.matched, found.lost, found.new) == (6, 6, 0, 0)
        assert report.passed, report.warnings

    def test_other_models_are_compared_in_place(self):
        report = onnxamp.diff_models(CLASSIFIER, CLASSIFIER, provider="cpu")
        assert report.detections == ()

    def test_experts_that_are_chosen_are_no_detections(self):
        """TopK may route tokens to experts; the outputs behind it are no lists."""
        model = parse("""(float[2,3,64] x) => (float[2,3,64] y) <int64[1] k = {2}> {
            top, index = TopK (x, k)
            most = ReduceMax <keepdims = 1> (top)
            y = Mul (x, most)
        }""")
        _, tuned = onnxamp.tune_model(model, 1e-1, count=1, provider="cpu")
        assert tuned.metric == "rel-l2"

    def test_metrics_are_named(self):
        with pytest.raises(ArgumentError, match="Unknown metric 'boxes': choose one of auto, detections, elements"):
            onnxamp.diff_models(picking(), picking(), metric="boxes")

    @pytest.mark.parametrize("packed", [5, 6, 7])
    def test_rows_that_hold_all(self, packed):
        rows = lists()
        parts = {
            5: [rows["boxes"], rows["scores"][..., None]],
            6: [rows["boxes"], rows["scores"][..., None], rows["labels"][..., None]],
            7: [np.zeros((1, 20, 1)), rows["boxes"], rows["labels"][..., None], rows["scores"][..., None]],
        }
        table = np.concatenate(parts[packed], -1).astype(np.float32)
        text = f"(float[N,{packed}] x, int64[M] order) => (float[M,{packed}] y) {{ y = Gather (x, order) }}"
        one, other = parse(text), parse(text)
        other.graph.node[0].input[1] = "turned"
        other.graph.node.insert(0, helper.make_node("Neg", ["order"], ["turned"]))
        feeds = {"x": table[0], "order": np.arange(20)}
        report = onnxamp.diff_models(one, other, feeds, metric="detections", provider="cpu")
        (found,) = report.detections
        assert (found.rows, found.matched, found.error) == (20, 20, 0)
        assert report.passed


class TestMatching:
    @pytest.mark.slow
    @settings(deadline=None, max_examples=25)
    @given(st.permutations(range(20)), st.booleans(), st.booleans())
    def test_the_order_does_not_matter(self, order, centered, logits):
        rows = lists()
        if centered:
            low, high = rows["boxes"][..., :2], rows["boxes"][..., 2:]
            rows["boxes"] = np.concatenate([(low + high) / 2, high - low], -1)
        if logits:
            rows["scores"] = np.log(rows["scores"] / (1 - rows["scores"]))
        report = shown(rows, reordered(rows, order), "detections")
        (found,) = report.detections
        assert (found.matched, found.lost, found.new, found.error) == (20, 0, 0, 0)
        assert found.worst_overlap == pytest.approx(1)
        assert report.passed
        assert all(diff.max_abs == 0 for diff in report.outputs)

    def test_errors_of_matches(self):
        rows = lists()
        worse = {**rows, "scores": rows["scores"].copy(), "boxes": rows["boxes"].copy()}
        worse["scores"][0, 3] += 0.05
        (found,) = shown(rows, worse, "detections").detections
        assert found.worst_score == pytest.approx(0.05, rel=1e-3)
        assert found.error == pytest.approx(0.05 / rows["scores"].max(), rel=1e-3)
        worse["scores"] = rows["scores"]
        width = rows["boxes"][0, 0, 2] - rows["boxes"][0, 0, 0]
        worse["boxes"][0, 0, 0] += 0.2 * width
        (found,) = shown(rows, worse, "detections").detections
        assert found.worst_overlap == pytest.approx(0.8, rel=1e-3)
        assert found.error == pytest.approx(0.04, rel=1e-3), "the first row has the largest score"

    def test_labels_must_agree(self):
        rows = lists()
        other = {**rows, "labels": rows["labels"].copy()}
        other["labels"][0, 0] = 9
        report = shown(rows, other, "detections")
        (found,) = report.detections
        assert (found.matched, found.lost, found.new) == (19, 1, 1)
        lowest = rows["scores"].min()
        assert found.error == pytest.approx((rows["scores"].max() - lowest) / rows["scores"].max(), rel=1e-3)
        assert not report.passed
        assert "error of the detections" in report.warnings[0]

    def test_boxes_that_hardly_overlap_are_others(self):
        rows = {name: array[:, :1] for name, array in lists().items()}
        moved = {**rows, "boxes": rows["boxes"] + 10}
        (found,) = shown(rows, moved, "detections").detections
        assert (found.matched, found.lost, found.new, found.worst_overlap) == (0, 1, 1, None)

    def test_a_row_more_or_less_at_the_end_costs_its_distance_from_the_end(self):
        rows = lists()
        fewer = {name: array[:, :-1] for name, array in rows.items()}
        for one, other in ((rows, fewer), (fewer, rows)):
            report = shown(one, other, "detections")
            (found,) = report.detections
            assert (found.lost, found.new) == ((1, 0) if one is rows else (0, 1))
            assert found.error == 0
            assert report.passed, report.warnings
        without_first = {name: array[:, 1:] for name, array in rows.items()}
        assert shown(rows, without_first, "detections").detections[0].error > 0.5

    def test_rows_that_fill_up_a_list_tell_nothing(self):
        """Plugins pad their lists with zeros."""
        rows = lists()
        padded = {name: np.concatenate([a, np.zeros_like(a[:, :5])], 1) for name, a in rows.items()}
        short = {name: a.copy() for name, a in padded.items()}
        for array in short.values():
            array[:, 19] = 0
        (found,) = shown(padded, short, "detections").detections
        assert (found.matched, found.lost, found.new) == (24, 1, 1)
        assert found.error == pytest.approx(0, abs=1e-6)

    def test_nothing_found(self):
        rows = lists()
        nothing = {name: array[:, :0] for name, array in rows.items()}
        assert shown(nothing, nothing, "detections").passed
        (found,) = shown(rows, nothing, "detections").detections
        assert (found.matched, found.lost) == (0, 20)
        assert found.error > 0.5

    def test_nan_is_an_infinite_error(self):
        rows = lists()
        broken = {**rows, "scores": rows["scores"].copy()}
        broken["scores"][0, 4] = np.nan
        report = shown(rows, broken, "detections")
        assert report.detections[0].error == np.inf
        assert not report.passed

    def test_classes_are_matched_by_their_best_score(self):
        rng = np.random.default_rng(1)
        rows = {"boxes": boxes_of(30), "scores": rng.random((1, 30, 5)).astype(np.float32)}
        text = "(float[1,N,4] b, float[1,N,5] s, int64[M] o) => (float[1,M,4] boxes, float[1,M,5] scores) {"
        text += " boxes = Gather <axis = 1> (b, o) scores = Gather <axis = 1> (s, o) }"
        one, other = parse(text), parse(text.replace("boxes = ", "p = Neg (o) boxes = ").replace(", o) }", ", p) }"))
        other.graph.node[1].input[1] = "p"
        feeds = {"b": rows["boxes"], "s": rows["scores"], "o": np.arange(30)}
        (found,) = onnxamp.diff_models(one, other, feeds, metric="detections", provider="cpu").detections
        assert (found.rows, found.matched, found.error) == (30, 30, 0)

    def test_images_are_apart(self):
        one, other = lists(seed=1), lists(seed=2)
        batch = {name: np.concatenate([one[name], other[name]]) for name in one}
        swapped = {name: np.concatenate([other[name], one[name]]) for name in one}
        kinds = "float[2,N,4] b, float[2,N] s, int64[2,N] l, int64[2] o"
        text = f"({kinds}) => (float[2,N,4] boxes, float[2,N] scores, int64[2,N] labels) {{"
        text += " boxes = Gather (b, o) scores = Gather (s, o) labels = Gather (l, o) }"
        feeds = {"b": batch["boxes"], "s": batch["scores"], "l": batch["labels"], "o": np.array([0, 1])}
        model = parse(text)
        (found,) = onnxamp.diff_models(model, model, feeds, metric="detections", provider="cpu").detections
        assert (found.rows, found.matched, found.error) == (40, 40, 0)
        assert not np.array_equal(batch["boxes"], swapped["boxes"])


class TestWhereItShows:
    def test_samples_add_up(self):
        samples = [detect(boxes_of(8, seed), np.linspace(0.9, 0.2, 8)) for seed in range(3)]
        (found,) = onnxamp.diff_models(picking(), picking(), samples, provider="cpu").detections
        assert (found.rows, found.matched) == (3 * ROWS, 3 * ROWS)

    def test_limits(self):
        rows = lists()
        other = {**rows, "scores": rows["scores"] + np.float32(0.03)}
        assert not shown(rows, other, "detections").passed
        assert shown(rows, other, "detections", limits=onnxamp.make_limits({"detections": 0.1})).passed
        strict = onnxamp.make_limits({"rel_l2": {"scores": 1e-6}})
        assert not shown(rows, other, "detections", limits=strict).passed

    def test_tuning_holds_detections_to_the_tolerance(self):
        samples = [detect(boxes_of(40, 3), np.linspace(0.5, 0.5004, 40))]
        _, tuned = onnxamp.tune_model(picking(), 1e-2, samples=samples, provider="cpu")
        assert (tuned.metric, tuned.held) == ("detections", True)

    def test_on_the_command_line(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        onnx.save(picking(), "model.onnx")
        np.savez("x.npz", **detect(boxes_of(9), np.linspace(0.9, 0.1, 9)))
        result = run("convert", "model.onnx", "-o", "low.onnx", "--inputs", "x.npz", "--level", "O3", "-v")
        assert result.exit_code == 0, result.output
        assert "Detections" in result.output
        assert "boxes, scores, labels" in result.output
        result = run("diff", "model.onnx", "low.onnx", "--inputs", "x.npz", "--format", "json", "--metric", "elements")
        assert report_of(result)["detections"] == []
        result = run("diff", "model.onnx", "low.onnx", "--inputs", "x.npz", "--save", "diff.json", "-q")
        assert json.loads((tmp_path / "diff.json").read_text())["detections"][0]["rows"] == ROWS
        assert run("diff", "diff.json").exit_code == 0
        assert run("diff", "diff.json", "--detections", "0").exit_code in (0, 1)
