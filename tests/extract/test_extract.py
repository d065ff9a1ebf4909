"""Regions: which nodes are taken, that they give the same bits alone as in the whole, and what is written."""

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from commands import MODELS, NORM, is_one_sentence
from graphs.case import parse
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper, parser
from real_models import needs, real_model

import onnxamp
from onnxamp._cli.command import group
from onnxamp._errors import ArgumentError, ArgumentTypeError, ExternalDataError
from onnxamp._extract import save_region
from onnxamp._extract.around import differences, extract_region, same
from onnxamp._numerics.diff import diff_models
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.flow import make_flow
from onnxamp._runtime.random_inputs import random_inputs
from onnxamp._runtime.run import Run
from onnxamp._runtime.samples import Samples, load_samples
from onnxamp._runtime.session import make_session
from onnxamp._runtime.session import run as run_session
from onnxamp._runtime.values import check_inputs

CHAIN = """(float[2,3] X) => (float[2,3] Y) {
    [one] a = Relu (X)
    [two] b = Sigmoid (a)
    [three] c = Tanh (b)
    [four] d = Neg (c)
    [five] e = Exp (d)
    [six] Y = Abs (e)
}"""


def model_of(text: str, *, opset: int = 17, ir: int = 8, more: str = "") -> ModelProto:
    return parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}{more}]> g {text}')


def loaded(path: Path | str) -> dict[str, np.ndarray]:
    return load_samples(path)[0]


def save_external(path: Path) -> None:
    """A model whose weights lie in w.bin beside it."""
    model = parse(NORM)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="w.bin")


def samples_of(*feeds: dict) -> Samples:
    return Samples("given", [lambda f=f: f for f in feeds])


def whole_values(model: ModelProto, feeds: dict, names: list[str]) -> dict[str, np.ndarray]:
    """Values of a model's main graph, by one session on the emulation of the whole."""
    flat = emulate(model)
    del flat.graph.output[:]
    for name in names:
        flat.graph.output.add(name=name)
    return run_session(make_session(flat, optimize=False), feeds, names)


def assert_same_as_whole(region, model: ModelProto, feeds: dict) -> None:
    """What was recorded are the bits of the whole model, and the region makes the same of them."""
    raised = {name: a.astype(np.float32) if a.dtype == np.float16 else a for name, a in feeds.items()}
    made = {name for node in model.graph.node for name in node.output}
    names = [name for name in (*region.inputs, *region.expected) if name in made]
    whole = whole_values(model, raised, names)
    for name in names:
        recorded = region.inputs[name] if name in region.inputs else region.expected[name]
        assert same(recorded, whole[name].astype(recorded.dtype)), name
    fed = {name: a.astype(np.float32) if a.dtype == np.float16 else a for name, a in region.inputs.items()}
    alone = whole_values(region.model, fed, list(region.expected))
    assert all(same(region.expected[name], value.astype(region.expected[name].dtype)) for name, value in alone.items())
    assert region.differing == {}


class TestWhichNodes:
    @pytest.mark.parametrize(
        ("before", "after", "nodes"),
        [(0, 0, "three"), (1, 0, "two three"), (0, 1, "three four"), (2, 1, "one two three four"), (9, 9, None)],
    )
    def test_steps_are_counted_in_nodes(self, before, after, nodes):
        region = extract_region(parse(CHAIN), "three", before=before, after=after)
        assert list(region.nodes) == (nodes or "one two three four five six").split()
        assert region.around == ("three",)
        assert region.total == 6

    def test_outputs_name_nodes_too(self):
        assert extract_region(parse(CHAIN), "c").around == ("three",)

    def test_several_are_taken_together(self):
        region = extract_region(parse(CHAIN), ["two", "five"], before=0, after=0)
        assert region.nodes == ("two", "five")
        assert list(region.inputs) == ["a", "d"]
        assert list(region.expected) == ["b", "e"]

    def test_a_pattern_matches_whole_names_only(self):
        assert extract_region(parse(CHAIN), "t.*", before=0, after=0).around == ("two", "three")
        with pytest.raises(ArgumentError, match="No node"):
            extract_region(parse(CHAIN), "thr")

    def test_what_is_no_pattern_is_told_so(self):
        with pytest.raises(ArgumentError, match=r"called '\(', and it is not a regular expression \(missing \)"):
            extract_region(parse(CHAIN), "(")
        with pytest.raises(ArgumentError, match="or matches it as a regular expression"):
            extract_region(parse(CHAIN), "seven")

    def test_an_exact_name_is_no_pattern(self):
        model = model_of("(float[2] x) => (float[2] y) { [later] h = Neg (x) [axb] y = Abs (h) }")
        model.graph.node[0].name = "a.b"
        assert extract_region(model, "a.b", before=0, after=0).around == ("a.b",)
        model.graph.node[0].name = "a(b"  # no regular expression at all
        assert extract_region(model, "a(b", before=0, after=0).around == ("a(b",)

    def test_the_shortest_way_counts(self):
        model = model_of(
            "(float[2] x) => (float[2] y) { [p] a = Neg (x) [q] b = Neg (a) [r] c = Neg (b) [s] y = Add (a, c) }"
        )
        region = extract_region(model, "s", before=1, after=0)
        assert region.nodes == ("p", "r", "s")
        assert list(region.inputs) == ["x", "b"]

    def test_casts_and_constants_are_no_steps(self):
        model = model_of(
            """(float[2] x) => (float[2] y) {
            [far] a = Neg (x)  [near] b = Exp (a)  [cast] h = Cast <to = 10> (b)
            [half] k = Constant <value = float16 {1}> ()  [mid] m = Mul (h, k)
            [up] u = Cast <to = 1> (m)  [next] v = Abs (u)  [last] y = Relu (v) }"""
        )
        region = extract_region(model, "mid", before=1, after=1)
        assert region.nodes == ("near", "cast", "half", "mid", "up", "next")
        only = extract_region(model, "mid", before=0, after=0)
        assert only.nodes == ("cast", "half", "mid", "up")
        assert list(only.inputs) == ["b"]
        assert only.expected["m"].dtype == np.float16

    def test_weights_in_disguise_come_along(self):
        model = model_of(
            """(float[1,2] x) => (float[1,2] y)
            <int8[2,2] w = {1,2,3,4}, float s = {0.5}, int8 z = {0}, float[2] other = {1,2}> {
            [dq] f = DequantizeLinear (w, s, z)  [t] g = Transpose (f)  [use] h = MatMul (x, g)
            [rest] y = Add (h, other) }"""
        )
        region = extract_region(model, "use", before=0, after=0)
        assert region.nodes == ("dq", "t", "use")
        assert list(region.inputs) == ["x"]
        assert {tensor.name for tensor in region.model.graph.initializer} == {"w", "s", "z"}
        assert list(region.expected) == ["h"], "what constants make is no output"

    def test_random_numbers_are_recorded(self):
        model = model_of("(float[4] x) => (float[4] y) { [dice] r = RandomNormalLike (x) [use] y = Add (x, r) }")
        region = extract_region(model, "use")
        assert region.nodes == ("use",)
        assert region.differing == {}
        assert extract_region(model, "dice", after=0).nodes == ("dice",), "unless it is what was asked for"

    def test_values_that_skip_the_region_are_recorded(self):
        """A node outside lies between two inside: what it makes enters."""
        model = model_of(
            "(float[2] x) => (float[2] y) { [p] a = Exp (x) [out] b = Neg (a) [q] c = Abs (b) [r] y = Add (a, c) }"
        )
        region = extract_region(model, ["p", "q"], before=0, after=0)
        assert region.nodes == ("p", "q")
        assert list(region.inputs) == ["x", "b"]


class TestErrors:
    def test_close_names_are_listed(self):
        with pytest.raises(ArgumentError, match=r"'tree'.*similar names are 'three'"):
            extract_region(parse(CHAIN), "tree")
        with pytest.raises(ArgumentError, match="similar names are 'three'"):
            extract_region(parse(CHAIN), "HRE")
        with pytest.raises(ArgumentError, match="'onnxamp inspect -v' lists"):
            extract_region(parse(CHAIN), "0123456789")

    def test_inputs_and_weights_are_no_nodes(self):
        with pytest.raises(ArgumentError, match="it is a graph input, read by 'one'"):
            extract_region(parse(CHAIN), "X")
        with pytest.raises(ArgumentError, match="it is an initializer, read by 'project'"):
            extract_region(parse(NORM), "w")

    @pytest.mark.parametrize("wrong", [{"before": -1}, {"after": -1}, {"around": []}])
    def test_impossible_wishes(self, wrong):
        with pytest.raises(ArgumentError, match="around must name"):
            extract_region(parse(CHAIN), **({"around": "three"} | wrong))

    def test_a_model_that_does_not_run_that_far(self):
        text = "(float[n] x, float[m] z) => (float[k] y) { [a] h = Neg (x) [b] i = Add (h, z) [c] y = Neg (i) }"
        feeds = {"x": np.ones(2, np.float32), "z": np.ones(3, np.float32)}
        with pytest.raises(ArgumentError, match="before it reaches the region"):
            extract_region(model_of(text), "c", samples=samples_of(feeds))
        assert extract_region(model_of(text), "a", after=0, samples=samples_of(feeds)).nodes == ("a",)

    def test_missing_weights(self, tmp_path):
        save_external(tmp_path / "m.onnx")
        (tmp_path / "w.bin").unlink()
        with pytest.raises(ExternalDataError):
            extract_region(tmp_path / "m.onnx", "project")


class TestSameBits:
    @pytest.mark.mostly_slow(fast=3)
    @pytest.mark.parametrize("level", ["O2", "O3"])
    @pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
    def test_of_conversions(self, path, level):
        model = onnxamp.convert_model(onnx.load(path), level, hazards=level != "O3")
        feeds = random_inputs(model)
        nodes = [node for node in model.graph.node if node.op_type not in ("Cast", "Constant")]
        for node in nodes[:: max(1, len(nodes) // 4)]:
            region = extract_region(model, node.name, samples=samples_of(feeds))
            checker.check_model(region.model, full_check=True)
            assert_same_as_whole(region, model, feeds)

    def test_of_a_norm_that_overflows(self):
        model = onnxamp.convert_model(parse(NORM), "O3", hazards=False)
        region = extract_region(model, "mean", before=1)
        assert region.ran_on == "CPU, emulated float16"
        assert {array.dtype.name for array in region.inputs.values()} == {"float16"}
        assert any(np.isinf(array).any() for array in region.expected.values())
        assert_same_as_whole(region, model, random_inputs(model))

    def test_of_weights_that_stay_outside_of_graphs(self):
        """Where a whole is too large for its weights to be constants of the session, kernels round otherwise."""
        rng, size = np.random.default_rng(0), 3000
        weights = {name: (rng.standard_normal((size, size)) / 50).astype(np.float32) for name in ("v", "w")}
        text = "(float[2,S] x) => (float[2,S] y) { [a] h = MatMul (x, v) [b] i = Tanh (h) [c] y = MatMul (i, w) }"
        model = model_of(text.replace("S", str(size)))
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
        region = extract_region(model, "a", after=0)
        assert region.nodes == ("a",)
        assert region.differing == {}

    def test_bfloat16(self):
        model = onnxamp.convert_model(parse(NORM), "O3", dtype="bfloat16", hazards=False)
        region = extract_region(model, "root")
        assert {array.dtype.name for array in region.inputs.values()} == {"bfloat16"}
        assert region.differing == {}

    def test_float16_inputs_of_a_model(self):
        model = model_of("(float16[4] x) => (float16[4] y) { [sq] h = Mul (x, x) [root] y = Sqrt (h) }")
        feeds = {"x": np.array([300, 1e-4, 1.1, -2], np.float16)}
        region = extract_region(model, "sq", samples=samples_of(feeds))
        assert region.inputs["x"].dtype == np.float16
        assert np.isinf(region.expected["h"][0])
        assert region.expected["h"][1] == np.float16(1e-8)
        assert_same_as_whole(region, model, feeds)

    @needs("magika")
    def test_the_overflow_of_a_real_classifier(self, tmp_path):
        model = onnxamp.convert_model(str(real_model("magika")), "O3", hazards=False)
        samples = load_samples(real_model("magika").with_suffix(".npz"))
        fatal = "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/LayerNorm_1/Sum_1"
        region = extract_region(model, fatal, samples=samples)
        assert region.around == (fatal,)
        assert len(region.nodes) < 8
        assert np.isinf(region.expected[f"{fatal}:0"]).all()
        assert all(np.isfinite(array).all() for array in region.inputs.values())
        assert_same_as_whole(region, model, check_inputs(model, samples[0]))

    @needs("silero_vad")
    def test_the_branches_of_a_real_detector(self):
        samples = load_samples(real_model("silero_vad").with_suffix(".npz"))
        region = extract_region(real_model("silero_vad"), ".*/rnn/LSTM", samples=samples)
        assert [node.op_type for node in region.model.graph.node].count("LSTM") == 1
        assert region.differing == {}
        assert "branches that were taken" in region.notes[0]


IF = """(float[2] x, bool c) => (float[2] y) {
    [pre] h = Neg (x)
    [choose] y = If (c) <
        then_branch = t () => (float[2] t1) { [inner] i = Exp (h) [after] t1 = Abs (i) },
        else_branch = e () => (float[2] e1) { [other] e1 = Abs (h) }>
}"""
LOOP = """(float[2] x, int64 n) => (float[2] y) {
    [pre] h = Neg (x)
    [side] k = Exp (x)
    [true] c = Constant <value = bool {1}> ()
    [turn] l = Loop (n, c, h) <body = b (int64 i, bool d, float[2] s) => (bool d2, float[2] s2)
        { [same] d2 = Identity (d) [step] s2 = Add (s, k) }>
    [post] y = Abs (l)
}"""


class TestBodies:
    def feeds(self, taken):
        return samples_of({"x": np.array([1, -2], np.float32), "c": np.array(taken)})

    def test_the_branch_that_is_taken_stands_in_the_graph(self):
        region = extract_region(model_of(IF), "inner", samples=self.feeds(True))
        assert region.nodes == ("pre", "inner", "after")
        assert np.allclose(region.expected["y"], np.exp([-1, 2]))
        assert region.notes == ("The Ifs of the main graph are replaced by the branches that were taken.",)

    def test_a_branch_that_is_not_taken_brings_its_if(self):
        region = extract_region(model_of(IF), "inner", samples=self.feeds(False))
        assert region.around == ("choose",)
        assert region.nodes == ("pre", "choose")
        assert "not taken" in region.notes[0]
        assert "'inner' is inside 'choose' (If)" in region.notes[1]
        assert region.differing == {}

    def test_an_if_is_a_node_like_others(self):
        region = extract_region(model_of(IF), "choose", before=0, samples=self.feeds(True))
        assert region.nodes == ("choose",)
        assert set(region.inputs) == {"c", "h"}, "what the bodies read enters, too"
        assert region.notes == ()

    def test_a_loop_is_taken_as_a_whole(self):
        feeds = {"x": np.array([1, -2], np.float32), "n": np.array(3)}
        region = extract_region(model_of(LOOP), "step", before=0, after=0, samples=samples_of(feeds))
        assert region.nodes == ("true", "turn")
        assert set(region.inputs) == {"n", "h", "k"}
        assert "'step' is inside 'turn' (Loop)" in region.notes[0]
        assert_same_as_whole(region, model_of(LOOP), feeds)

    def test_a_body_that_is_low(self):
        model = onnxamp.convert_model(model_of(LOOP), "O3", hazards=False)
        feeds = {"x": np.array([1.0009, -2], np.float32), "n": np.array(3)}
        region = extract_region(model, "turn", samples=samples_of(feeds))
        assert region.ran_on == "CPU, emulated float16"
        assert region.differing == {}

    def test_functions_come_along(self):
        model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "own": 1]>
            g (float[2] x) => (float[2] y) { [first] h = Neg (x) [call] y = own.twice (h) }
            <domain: "own", opset_import: ["": 17, "own": 1]> twice (a) => (b) { c = own.once (a) b = Add (c, c) }
            <domain: "own", opset_import: ["": 17]> once (a) => (b) { b = Exp (a) }
            <domain: "own", opset_import: ["": 17]> unused (a) => (b) { b = Exp (a) }""")
        region = extract_region(model, "call", before=0)
        assert region.nodes == ("call",)
        assert {function.name for function in region.model.functions} == {"twice", "once"}
        assert region.differing == {}
        without = extract_region(model, "first", after=0)
        assert not without.model.functions

    def test_what_is_in_functions_can_be_named(self):
        model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "own": 1]>
            g (float[2] x) => (float[2] y) { [call] y = own.f (x) }
            <domain: "own", opset_import: ["": 17]> f (a) => (b) { [inside] c = Exp (a) b = Neg (c) }""")
        label = next(
            node.name for node in onnx.inliner.inline_local_functions(model).graph.node if node.op_type == "Exp"
        )
        region = extract_region(model, f".*{re.escape(label)}", after=0)
        assert [node.op_type for node in region.model.graph.node] == ["Exp"]


class TestTheProof:
    """That a region which does not give the same is found out."""

    @pytest.mark.parametrize(
        ("change", "distance"),
        [
            (lambda a: a, None),
            (lambda a: a * 1.5, 0.5 / 1.5),
            (lambda a: a[:, :1], np.inf),
            (lambda a: a * np.nan, np.inf),
        ],
    )
    def test_differences(self, change, distance):
        region = extract_region(parse(CHAIN), "five")
        expected = {name: change(array).astype(array.dtype) for name, array in region.expected.items()}
        found = differences(
            make_flow(region.model, emulated=True), region.inputs, expected, Run(provider="cpu", budget=2**20)
        )
        assert found == ({} if distance is None else dict.fromkeys(expected, pytest.approx(distance)))

    @pytest.mark.parametrize(
        ("one", "other", "equal"),
        [
            (np.float32([0.0]), np.float32([-0.0]), False),
            (np.float32([np.nan, np.inf]), np.float32([-np.nan, np.inf]), True),
            (np.float32([1]), np.float32([1 + 2**-23]), False),
            (np.float32([1]), np.float16([1]), False),
            (np.int64([2**60]), np.int64([2**60 + 1]), False),
            (np.bool_([True]), np.bool_([True]), True),
        ],
    )
    def test_same_is_to_the_bit(self, one, other, equal):
        assert same(one, other) is equal


class TestBorders:
    def test_what_makes_a_sequence_comes_along(self):
        model = model_of(
            """(float[4] x, int64 i) => (float[2] y) <int64 two = {2}> { [pre] h = Neg (x)
            [split] s = SplitToSequence <axis = 0> (h, two)  [at] a = SequenceAt (s, i)  [post] y = Abs (a) }"""
        )
        feeds = {"x": np.arange(4, dtype=np.float32), "i": np.array(1)}
        region = extract_region(model, "at", before=0, after=0, samples=samples_of(feeds))
        assert region.nodes == ("split", "at")
        assert region.differing == {}
        made = extract_region(model, "split", before=0, after=0, samples=samples_of(feeds))
        assert made.expected == {}
        assert made.notes == ("The output 's' is not a tensor: its value is not saved.",)

    def test_a_sequence_from_outside_is_refused(self):
        model = model_of("(seq(float[2]) s, int64 i) => (float[2] y) { [at] a = SequenceAt (s, i) [post] y = Neg (a) }")
        feeds = {"s": [np.ones(2, np.float32)], "i": np.array(0)}
        with pytest.raises(ArgumentError, match=r"reads?.*'s'.*--before"):
            extract_region(model, "at", samples=samples_of(feeds))
        assert extract_region(model, "post", before=0, samples=samples_of(feeds)).nodes == ("post",)

    def test_overridden_weights_are_inputs(self):
        model = model_of("(float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { [mul] y = Mul (x, w) }")
        x, w = np.array([3, 4], np.float32), np.array([10, 20], np.float32)
        given = extract_region(model, "mul", samples=samples_of({"x": x, "w": w}))
        assert set(given.inputs) == {"x", "w"}
        assert given.expected["y"].tolist() == [30, 80]
        kept = extract_region(model, "mul", samples=samples_of({"x": x}))
        assert set(kept.inputs) == {"x"}
        assert kept.expected["y"].tolist() == [3, 8]

    def test_old_models_list_weights_as_inputs(self):
        model = model_of(
            "(float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { [mul] y = Mul (x, w) }", ir=3
        )
        region = extract_region(model, "mul")
        assert [entry.name for entry in region.model.graph.input] == ["x", "w"]
        assert list(region.inputs) == ["x"]
        checker.check_model(region.model)

    def test_sparse_weights(self):
        model = model_of("(float[2] x) => (float[2] y) { [mul] h = Mul (x, x) [neg] y = Neg (h) }")
        values = numpy_helper.from_array(np.array([5], np.float32), "w")
        indices = numpy_helper.from_array(np.array([1], np.int64))
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2]))
        model.graph.node[0].input[1] = "w"
        region = extract_region(model, "mul", samples=samples_of({"x": np.array([2, 3], np.float32)}))
        assert region.expected["h"].tolist() == [0, 15]

    def test_untidy_files(self):
        """Nodes out of order and without names, and an output that nobody reads."""
        model = model_of("(float[4] x) => (float[2] y) <int64[1] k = {2}> { y = Neg (h) h, i = TopK (x, k) }")
        region = extract_region(model, "h", samples=samples_of({"x": np.array([1, 4, 2, 3], np.float32)}))
        assert [node.op_type for node in region.model.graph.node] == ["TopK", "Neg"]
        assert region.expected["y"].tolist() == [-4, -3]
        assert "i" not in region.expected

    def test_shapes_are_declared_as_recorded(self):
        model = model_of("(float[n,m] x) => (float[n,k] y) { [a] h = Exp (x) [b] i = Neg (h) [c] y = Neg (i) }")
        model.graph.value_info.append(helper.make_tensor_value_info("i", TensorProto.FLOAT, ["m", "m"]))
        region = extract_region(model, "b", before=0, after=9, samples=samples_of({"x": np.ones((2, 5), np.float32)}))
        entry = region.model.graph.input[0].type.tensor_type
        assert [dim.dim_value for dim in entry.shape.dim] == [2, 5]
        assert entry.elem_type == TensorProto.FLOAT
        checker.check_model(region.model, full_check=True)  # declared shapes that do not hold are gone

    def test_types_that_only_the_model_knows_stay(self):
        model = model_of("(float[2] x) => (float[2] y) { [a] h = Exp (x) [b] i = Neg (h) [c] y = Neg (i) }")
        model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["m"]))
        (kept,) = extract_region(model, "b", after=0).model.graph.value_info
        assert kept.name == "h"
        assert kept.type.tensor_type.elem_type == TensorProto.FLOAT
        assert not kept.type.tensor_type.HasField("shape")

    def test_what_nobody_reads_is_left_out(self):
        model = model_of(
            "(float[2] x, float[2] z) => (float[2] y) { [a] y = Exp (x) [dead] d = Add (y, z) [more] e = Neg (d) }"
        )
        region = extract_region(model, "a", after=9)
        assert region.nodes == ("a",)
        assert list(region.inputs) == ["x"]
        assert extract_region(model, "dead", before=0).nodes == ("dead",), "unless it is asked for"

    def test_what_the_model_says_of_itself_stays(self):
        model = parse(CHAIN)
        model.producer_name, model.domain = "maker", "here"
        model.metadata_props.add(key="k", value="v")
        model.graph.node[2].doc_string = "the third"
        model.graph.node[2].metadata_props.add(key="n", value="m")
        region = extract_region(model, "three", before=0, after=0).model
        assert (region.producer_name, region.domain, region.metadata_props[0].value) == ("maker", "here", "v")
        assert (
            region.node[0] == model.graph.node[2]
            if hasattr(region, "node")
            else region.graph.node[0] == model.graph.node[2]
        )
        assert region.opset_import == model.opset_import
        assert region.ir_version == model.ir_version

    def test_the_model_is_not_changed(self):
        model = onnxamp.convert_model(parse(NORM), "O2", fold=False)
        before = model.SerializeToString(deterministic=True)
        extract_region(model, "mean")
        assert model.SerializeToString(deterministic=True) == before


class TestSamples:
    def test_the_first_that_breaks_something_counts(self):
        model = model_of("(float16[2] x) => (float16[2] y) { [sq] y = Mul (x, x) }")
        feeds = [{"x": np.full(2, value, np.float16)} for value in (1, 2, 300, 400)]
        region = extract_region(model, "sq", samples=samples_of(*feeds))
        assert region.inputs["x"].tolist() == [300, 300]
        assert region.sample == "given, number 3 of them"
        calm = extract_region(model, "sq", samples=samples_of(*feeds[:2]))
        assert calm.inputs["x"].tolist() == [1, 1]

    def test_branches_are_those_of_the_first(self):
        feeds = [{"x": np.array([1, value], np.float32), "c": np.array(value < 0)} for value in (-2, 3, -1000)]
        region = extract_region(model_of(IF), "inner", samples=samples_of(*feeds))
        assert region.inputs["x"].tolist() == [1, -2]
        assert region.sample == "given, number 1 of them"

    def test_made_up_inputs_depend_on_the_seed(self):
        one, other = (extract_region(parse(CHAIN), "two", seed=seed).inputs["X"] for seed in (1, 2))
        assert not np.array_equal(one, other)


class TestFiles:
    def test_three_files_that_feed_the_commands(self, tmp_path):
        model = onnxamp.convert_model(parse(NORM), "O3", hazards=False)
        region = extract_region(model, "mean", before=1)
        paths = save_region(region, tmp_path / "small.onnx")
        assert [path.name for path in paths] == ["small.onnx", "small.npz", "small.expected"]
        assert loaded(paths[1]).keys() == region.inputs.keys()
        assert all(same(loaded(paths[2])[name], array) for name, array in region.expected.items())
        assert len(load_samples(tmp_path)) == 1, "a folder of inputs may hold what is expected"
        report = diff_models(paths[0], paths[0], load_samples(paths[1]))
        assert {diff.name: diff.result_inf for diff in report.outputs} == {
            name: int(np.isinf(array).sum()) for name, array in region.expected.items()
        }

    def test_all_types_survive(self, tmp_path):
        model = onnxamp.convert_model(parse(NORM), "O3", dtype="bfloat16", hazards=False)
        region = extract_region(model, "root")
        _, inputs, _ = save_region(region, tmp_path / "small.onnx")
        fed = check_inputs(region.model, loaded(inputs))
        assert all(same(fed[name], array) for name, array in region.inputs.items())

    def test_odd_names(self, tmp_path):
        """Names that numpy.savez or a file system would take for something else."""
        model = model_of("(float[2] x) => (float[2] y) { [a] y = Neg (x) }")
        model.graph.input[0].name = model.graph.node[0].input[0] = "file"
        model.graph.output[0].name = model.graph.node[0].output[0] = "../up.npy"
        region = extract_region(model, "a", samples=samples_of({"file": np.ones(2, np.float32)}))
        _, inputs, expected = save_region(region, tmp_path / "small.onnx")
        assert loaded(inputs)["file"].tolist() == [1, 1]
        with np.load(expected) as arrays:
            assert {name: arrays[name].tolist() for name in arrays} == {"../up.npy": [-1, -1]}

    def test_a_region_of_constants(self, tmp_path):
        model = model_of("() => (float[2] y) <float[2] w = {1, 2}> { [a] y = Exp (w) }")
        paths = save_region(extract_region(model, "a"), tmp_path / "small.onnx")
        assert zipfile.ZipFile(paths[1]).namelist() == []
        assert diff_models(paths[0], paths[0], load_samples(paths[1])).passed

    def test_external_weights_are_read_in(self, tmp_path):
        save_external(tmp_path / "m.onnx")
        region = extract_region(tmp_path / "m.onnx", "project")
        assert numpy_helper.to_array(next(t for t in region.model.graph.initializer if t.name == "w"))[0, 0] == 700
        assert region.source == str(tmp_path / "m.onnx")
        (tmp_path / "w.bin").unlink()
        paths = save_region(region, tmp_path / "small.onnx")
        assert diff_models(paths[0], paths[0], load_samples(paths[1])).passed


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(onnxamp.convert_model(parse(NORM), "O3", hazards=False), "bad.onnx")
    return tmp_path


def extract(*arguments: object):
    return CliRunner(env={"COLUMNS": None}).invoke(group, ["extract", *map(str, arguments)])


@pytest.mark.usefixtures("here")
class TestCommand:
    def test_it_says_what_was_cut_and_what_to_do_next(self):
        result = extract("bad.onnx", "--around", "mean", "-o", "small.onnx")
        assert result.exit_code == 0
        for text in (
            "mean",
            "ReduceMean",
            "Inf",
            "float16",
            "it computes the same, bit for bit",
            "emulated float16",
            "1×",
        ):
            assert text in result.output
        assert "onnxamp check small.onnx --inputs small.npz" in result.output
        assert {path.name for path in Path().iterdir()} == {"bad.onnx", "small.onnx", "small.npz", "small.expected"}

    def test_the_name_of_the_result(self):
        assert extract("bad.onnx", "--around", "mean", "-q").output == ""
        assert Path("bad_region.onnx").is_file()

    def test_json(self):
        result = extract("bad.onnx", "--around", "mean", "--before", 1, "--after", 0, "--format", "json")
        facts = json.loads(result.stdout)
        assert [node["op"] for node in facts["nodes"] if node["op"] != "Cast"] == ["Pow", "ReduceMean"]
        assert facts["around"] == ["mean"]
        assert facts["expected"][-1]["inf"] == 1
        assert facts["files"] == {
            "model": "bad_region.onnx",
            "inputs": "bad_region.npz",
            "expected": "bad_region.expected",
        }

    def test_wrong_usage_ends_with_two(self):
        for arguments in (
            ("bad.onnx",),
            ("bad.onnx", "--around", "main"),
            ("bad.onnx", "--around", "mean", "--before", -1),
        ):
            assert extract(*arguments).exit_code == 2
        assert "similar names are 'mean'" in extract("bad.onnx", "--around", "main").output

    def test_nothing_that_is_read_is_written_over(self):
        result = extract("bad.onnx", "--around", "mean", "-o", "bad.onnx")
        assert "'bad.onnx' is already read or written" in result.output
        np.savez("in.npz", X=np.ones((1, 4), np.float32))
        result = extract("bad.onnx", "--around", "mean", "-o", "in.onnx", "--inputs", "in.npz")
        assert result.exit_code == 2
        assert "in.npz" in result.output
        assert loaded("in.npz")["X"].shape == (1, 4)

    def test_failures_end_with_one(self):
        assert is_one_sentence(extract("none.onnx", "--around", "x"))
        assert extract("bad.onnx", "--around", "mean", "-o", "bad.onnx/where.onnx").exit_code == 1

    def test_names_cannot_confuse_the_terminal(self):
        model = parse(CHAIN)
        model.graph.node[2].name = "th\x1b[31mree[bold]"
        onnx.save(model, "odd.onnx")
        result = extract("odd.onnx", "--around", "c", "-o", "small.onnx")
        assert "\x1b" not in result.output
        assert "[bold]" in result.output

    def test_long_regions_are_shortened_unless_asked(self):
        lines = "".join(f"[n{i}] v{i + 1} = Neg (v{i}) " for i in range(40))
        onnx.save(model_of(f"(float[2] v0) => (float[2] v40) {{ {lines} }}"), "long.onnx")
        short, full = (
            extract("long.onnx", "--around", "n20", "--before", 40, "--after", 40, *more).output
            for more in ((), ("-v",))
        )
        assert "and 28 more (-v shows all)" in short
        assert "n20" in short
        assert "n0 " not in short
        assert "n0 " in full
        assert "more (-v" not in full


def test_wrong_types_are_refused_with_what_is_accepted(tmp_path):
    encoder = Path(__file__).parents[2] / "models" / "encoder.onnx"
    region = extract_region(encoder, "pooled", provider="cpu")
    for use, accepted in (
        (lambda: extract_region(encoder, 3), "around must be the name of a node"),
        (lambda: extract_region(encoder, ["pooled", None]), "around must be the name of a node"),
        (lambda: save_region("region", tmp_path / "x.onnx"), "region must be a Region"),
        (lambda: save_region(region, 3), "path must be a string or a path"),
    ):
        with pytest.raises(ArgumentTypeError, match=accepted):
            use()
