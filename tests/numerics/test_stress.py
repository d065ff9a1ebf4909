"""What validation proves for every input, and the inputs that it makes to be hard."""

import json
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from commands import run, saved
from graphs.case import add_weights, parse
from onnx import helper
from strategies.model import random_model

import onnxamp
from onnxamp import convert_model
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._graph.graph import graph_of
from onnxamp._graph.view import inline_functions
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.climb import Climb, Watched
from onnxamp._numerics.unseen.flattened import flattened
from onnxamp._numerics.unseen.stress import Effort, Stress
from onnxamp._rewrite.passes.upgrade import plan_upgrade
from onnxamp._runtime.inputs.samples import given_samples
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.sessions.session import make_session
from onnxamp._runtime.sessions.session import run as run_session

WIDTH = 64


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planted(seed=1, opset=17, largest=19_000):
    """A network whose values stay below 20,000 on 1,000 random inputs, and whose worst input is beyond float16."""
    draw = np.random.default_rng(seed)
    weights = {f"w{number}": draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for number in range(4)}
    rows = draw.standard_normal((1000, WIDTH)).astype(np.float32)
    for name in list(weights)[:-1]:
        rows = np.maximum(rows @ weights[name], 0)
    weights["w3"] *= largest / np.abs(rows @ weights["w3"]).max()
    assert np.abs(rows @ weights["w3"]).max() < 20_000
    weights["v"] = draw.standard_normal((WIDTH, 8)).astype(np.float32) / 10_000
    model = parse(
        """(float[N,64] x) => (float[N,8] y) {
            a = MatMul (x, w0) b = Relu (a) c = MatMul (b, w1) d = Relu (c) e = MatMul (d, w2) f = Relu (e)
            [last] h = MatMul (f, w3) g = Relu (h) y = MatMul (g, v) }""",
        opset,
    )
    return add_weights(model, weights)


def converted(model, *arguments, code=0):
    result = run("convert", saved(model), "-o", "low.onnx", "--format", "json", *arguments)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "opset"), [(0, 17), (1, 11), (2, 21), (6, 13), (4, 18)])
def test_an_overflow_that_no_random_input_shows_is_found_and_healed(seed, opset):
    found = converted(planted(seed, opset))["validation"]
    assert "made to be hard: Output 'y': Inf" in found["cure"]["failure"]
    assert "last" in found["cure"]["nodes"]
    assert found["headroom"]["stressed"] < 65504
    assert converted(planted(seed, opset), "--stress", "0")["validation"]["cure"] is None


@pytest.mark.parametrize("seed", [1, 3, 11])
def test_an_ascent_begins_at_the_best_of_several_inputs(seed):
    """From the sample alone, four steps end below 60,000."""
    model = planted(seed, 18, 15_000)
    stress = Stress(FLOAT16, 4)
    found = stress.of(Model.of(model), Model.of(convert_model(model)), onnxamp.random_samples(model))
    assert found.headroom is not None
    assert found.headroom.stressed > 65504


@pytest.mark.parametrize("seed", [1, 3])
def test_an_ascent_that_ends_close_to_the_end_of_the_range_goes_on(seed):
    """Four steps end below 65504."""
    model = planted(seed, 18, 13_500)
    stress = Stress(FLOAT16, 4)
    found = stress.of(Model.of(model), Model.of(convert_model(model)), onnxamp.random_samples(model))
    assert found.headroom is not None
    assert found.headroom.stressed > 65504


def test_a_range_of_the_input_rules_the_overflow_out():
    found = converted(planted(), "--input-range", "x=-0.25:0.25")["validation"]
    assert found["cure"] is None
    assert found["proof"]["assumed"] == ["x"]
    assert found["headroom"]["stressed"] < 65504 / 2


def test_the_range_of_given_samples_counts():
    samples = np.random.default_rng(0).uniform(-0.1, 0.1, (4, WIDTH)).astype(np.float32)
    np.savez("inputs.npz", x=samples)
    found = converted(planted(), "--inputs", "inputs.npz")["validation"]
    assert found["cure"] is None
    assert found["proof"]["assumed"] == ["x"]


def test_what_is_proven_for_every_input_is_not_stressed():
    model = add_weights(
        parse("(float[N,64] x) => (float[N,64] y) { n = LayerNormalization (x, s) m = MatMul (n, w) y = Tanh (m) }"),
        {"s": (64,), "w": (64, 64)},
    )
    low = convert_model(model, keep_io_types=True, white_list=["LayerNormalization"])
    stressed = Stress(FLOAT16, 4).of(Model.of(model), Model.of(low), onnxamp.random_samples(model))
    assert stressed.proof.is_complete
    assert stressed.samples is None


def test_a_model_without_gradients_says_so():
    text = "(float[N,4,8,8] x) => (float[N,4,8,8] y) { n = LRN <size = 3> (x) y = MatMul (n, w) }"
    model = add_weights(parse(text), {"w": (8, 8)})
    found = converted(model, "--target", "any")["validation"]
    assert [clause for clause in found["not_run"] if clause.startswith("inputs made to overflow")]


def test_ranges_are_checked():
    for text, why in (("x=1:0", "smaller one first"), ("x=1", "NAME=LOW:HIGH"), ("z=0:1", "no input 'z'")):
        result = run("convert", saved(planted()), "-o", "low.onnx", "--input-range", text)
        assert result.exit_code == 2
        assert why in " ".join(result.output.split())


def test_random_inputs_stay_in_the_range_that_is_stated():
    options = onnxamp.Options(input_ranges={"x": (2, 3)})
    assert options.input_ranges == (("x", (2.0, 3.0)),)
    assert onnxamp.Options.from_json(options.as_json()) == options
    assert options.written() == ("--input-range", "x=2:3")
    drawn = requested_samples(RunOptions(), Model.of(planted()), ranges={"x": (2, 3)})
    x = drawn[0]["x"]
    assert 2 <= x.min() < 2.2
    assert 2.8 < x.max() <= 3


def test_samples_of_other_sizes_are_left_out():
    draw = np.random.default_rng(0)
    samples = [{"x": draw.standard_normal((rows, WIDTH)).astype(np.float32)} for rows in (2, 3, 2)]
    model = planted()
    found = Stress(FLOAT16, 1).of(Model.of(model), Model.of(convert_model(model)), given_samples(samples, model))
    assert found.samples is not None
    assert {sample["x"].shape for sample in found.samples} == {(2, WIDTH)}


def test_integers_are_not_moved():
    model = parse("(int64[N,4] ids) => (float[N,4] y) { f = Cast <to = 1> (ids) g = Mul (f, f) y = Sqrt (g) }")
    stress = Stress(FLOAT16, 2, (("ids", (0.0, 10.0)),))
    found = stress.of(Model.of(model), Model.of(convert_model(model, "O3")), onnxamp.random_samples(model))
    assert found.samples is None
    assert found.proof.is_complete


def test_ids_that_arrive_as_floats_are_not_moved():
    model = parse(
        """(float[N,4] x) => (float[N,4,64] y) {
            ids = Cast <to = 7> (x) e = Gather (table, ids) f = MatMul (e, w) g = Mul (f, f) y = Mul (g, g) }"""
    )
    draw = np.random.default_rng(0)
    weights = {"table": draw.standard_normal((16, WIDTH)), "w": 0.3 * draw.standard_normal((WIDTH, WIDTH))}
    add_weights(model, {name: array.astype(np.float32) for name, array in weights.items()})
    found = converted(model, "--input-range", "x=0:15")["validation"]
    assert found["proof"]["proven"] < found["proof"]["values"]
    assert found["headroom"] is None
    assert not found["not_run"]


ZEROS = ",".join(["0"] * WIDTH)
LAYERS = "a = MatMul (SOURCE, w0) b = Relu (a) [last] h = MatMul (b, w1) g = Relu (h)"
BODIES = {
    "If": """(float[N,64] x) => (float[N,8] y) <float zero = {0}> {
        m = ReduceMax <keepdims = 0> (x) is_any = Greater (m, zero)
        r = If (is_any) <then_branch = one () => (float[N,64] g) { LAYERS },
                         else_branch = two () => (float[N,64] n) { n = Neg (x) }> y = MatMul (r, v) }""",
    "Loop": """(float[N,64] x) => (float[N,8] y) <int64 turns = {3}, bool go = {1}, int64[1] first = {0}> {
        s, all = Loop (turns, go, x) <
            body = b (int64 i, bool c, float[N,64] z) => (bool d, float[N,64] t, float[N,8] o) {
                d = Identity (c) LAYERS t = Tanh (a) o = MatMul (g, v) }>
        y = ReduceSum <keepdims = 0> (all, first) }""",
    "Scan": f"""(float[3,64] x) => (float[3,8] y) <float[64] none = {{{ZEROS}}}> {{
        s, y = Scan <num_scan_inputs = 1, body = b (float[64] z0, float[64] e) => (float[64] t, float[8] o) {{
            z = Add (z0, e) LAYERS t = Tanh (a) o = MatMul (g, v) }}> (none, x) }}""",
    "nested": """(float[N,64] x) => (float[N,8] y) <int64 turns = {3}, bool go = {1}> {
        s = Loop (turns, go, x) <body = b (int64 i, bool c, float[N,64] z) => (bool d, float[N,64] t) {
            d = Identity (c) k = If (c) <then_branch = one () => (float[N,64] p) { LAYERS p = Tanh (g) },
                                         else_branch = two () => (float[N,64] q) { q = Neg (z) }>
            t = Add (z, k) }> y = MatMul (s, v) }""",
}  # fmt: skip


def with_bodies(kind, scale):
    draw = np.random.default_rng(1)
    source = "x" if kind == "If" else "z"
    model = parse(BODIES[kind].replace("LAYERS", LAYERS.replace("SOURCE", source)), 17)
    weights = {name: draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for name in ("w0", "w1")}
    weights["w1"] *= scale
    weights["v"] = draw.standard_normal((WIDTH, 8)).astype(np.float32) / 10_000
    return add_weights(model, weights)


@pytest.mark.parametrize("kind", BODIES)
def test_values_in_bodies_are_stressed(kind):
    model = with_bodies(kind, 1000)
    one, low = Model.of(model), Model.of(convert_model(model))
    found = Stress(FLOAT16, 4).of(one, low, requested_samples(RunOptions(), one))
    assert found.headroom is not None
    assert found.headroom.value == "h"
    assert found.headroom.stressed > 2 * found.headroom.seen
    assert found.headroom.stressed in [room.stressed for room in found.rooms if room.value == "h"]


def test_a_branch_that_does_not_suit_the_sizes_of_the_samples_stands_in_no_way():
    model = with_bodies("If", 1000)
    branch = next(node for node in model.graph.node if node.op_type == "If").attribute[1].g
    branch.node[0].CopyFrom(helper.make_node("MatMul", ["x", "narrow"], ["n"]))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "M"
    add_weights(model, {"narrow": np.zeros((WIDTH // 2, WIDTH), np.float32)})
    one, low = Model.of(model), Model.of(convert_model(model))
    found = Stress(FLOAT16, 4).of(one, low, requested_samples(RunOptions(dims={"M": WIDTH}), one))
    assert found.headroom is not None, found.why
    assert found.headroom.value == "h"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["If", "Loop", "Scan"])
def test_an_overflow_in_a_body_is_found_and_healed(kind):
    found = converted(with_bodies(kind, 8000))["validation"]
    assert "made to be hard" in found["cure"]["failure"]
    assert "last" in found["cure"]["nodes"]


def test_values_of_functions_are_stressed():
    model = with_bodies("If", 1000)
    inner = parse(
        "(float[N,64] x) => (float[N,64] g) { " + LAYERS.replace("SOURCE", "x").replace("[last]", "") + " }", 17
    )
    function = helper.make_function(
        "own", "Layers", ["x", "w0", "w1"], ["g"], inner.graph.node, [helper.make_opsetid("", 17)]
    )
    del model.graph.node[:]
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node.append(helper.make_node("Layers", ["x", "w0", "w1"], ["r"], domain="own"))
    model.graph.node.append(helper.make_node("MatMul", ["r", "v"], ["y"]))
    one, low = Model.of(model), Model.of(convert_model(model))
    found = Stress(FLOAT16, 4).of(one, low, requested_samples(RunOptions(), one))
    assert found.headroom is not None
    assert "h" in found.headroom.value
    assert found.headroom.stressed > 2 * found.headroom.seen


@pytest.mark.parametrize("op", ["If", "Loop", "Scan"])
def test_a_model_without_bodies_computes_the_same(op):
    compared = 0
    for seed in range(12):
        made = random_model(Random(f"{op}{seed}"), op, 8)
        names = [output.name for output in made.model.graph.output]
        try:
            newer = plan_upgrade(Model(inline_functions(made.model)).ask(graph_of), 18).result
            expected = run_session(make_session(newer.model, optimize=False), made.feeds, names)
        except onnxamp.OnnxAmpError:  # random models may run nowhere
            continue
        flat = flattened(Model(newer.model), made.feeds)
        if flat is None:
            continue
        results = run_session(make_session(flat.model, optimize=False), made.feeds, names)
        for name in names:
            if isinstance(expected[name], np.ndarray) and expected[name].dtype == np.float32:
                np.testing.assert_allclose(results[name], expected[name], rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared


def test_the_effort_is_counted_and_not_timed():
    assert Effort.within(4, 1 << 20) == Effort(starts=8, steps=4, rounds=3, has_lesser=True)
    efforts = [Effort.within(4, work << 20) for work in (1, 1 << 6, 1 << 10, 1 << 11, 1 << 12, 1 << 14, 1 << 20)]
    climbs = [1 + effort.has_lesser for effort in efforts]
    runs = [
        (effort.steps + 1) * (number + effort.rounds) + 4 * effort.starts
        for effort, number in zip(efforts, climbs, strict=True)
    ]
    assert runs == sorted(runs, reverse=True)
    assert efforts[-1] == Effort(starts=1, steps=1, rounds=0, has_lesser=False)
    assert Effort.within(16, 1 << 30).steps == 16 or Effort.within(16, 1 << 30).has_lesser
    assert Effort.within(1, 1 << 20).steps == 1


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_level_auto_keeps_what_hard_inputs_bring_out_of_range(seed):
    """On samples, values stay so small that level auto would lower everything."""
    model = planted(seed)
    settings = {"count": 1, "provider": "cpu", "allow_slower": True}
    low, tuned = onnxamp.tune_model(model, **settings)
    assert tuned.held
    kept = {row.node: row.detail for row in tuned.kept}
    assert "on inputs made to be hard; float16 ends at 65504" in kept["last"]
    assert set(kept) == {"last", "y"}
    samples = onnxamp.random_samples(model)
    one = Model.of(model)
    hard = Stress(FLOAT16, 4).of(one, one, samples).samples
    assert onnxamp.diff_models(model, low, list(hard), provider="cpu").passed


def test_the_expected_error_counts_what_hard_inputs_bring_out_of_range():
    model = planted()
    asked = ("--no-validate", "--expected-error")
    assert converted(model, *asked)["plan"]["expected"]["error"] > 1
    assert converted(model, *asked, "--keep-fp32", "last")["plan"]["expected"]["error"] > 1  # its result is cast
    assert converted(model, *asked, "--keep-fp32", "last|g|y")["plan"]["expected"]["error"] < 0.01
    assert converted(model, *asked, "--input-range", "x=-0.1:0.1")["plan"]["expected"]["error"] < 0.01


def test_inspect_shows_what_hard_inputs_reach():
    x = np.random.default_rng(0).standard_normal((4, WIDTH)).astype(np.float32)
    np.savez("x.npz", x=x)
    told = json.loads(run("inspect", saved(planted()), "--format", "json", "--inputs", "x.npz").stdout)
    rooms = {room["value"]: room for room in told["headroom"]}
    assert 1_000 < rooms["h"]["seen"] < 19_000
    assert rooms["h"]["stressed"] > 30_000


def gated(largest=10_000):
    """A product of a gate and a value that stays in range on random inputs, and not on the worst one."""
    draw = np.random.default_rng(0)
    weights = {f"w{number}": draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for number in range(4)}
    rows = np.maximum(draw.standard_normal((1000, WIDTH)).astype(np.float32) @ weights["w0"], 0)
    gate = rows @ weights["w1"]
    product = gate / (1 + np.exp(-gate)) * (rows @ weights["w2"])
    weights["w2"] *= largest / np.abs(product).max()
    weights["w3"] /= 10_000
    model = parse(
        """(float[4,64] x) => (float[4,64] y) {
            a = MatMul (x, w0) b = Relu (a) c = MatMul (b, w1) d = Sigmoid (c) e = Mul (c, d) f = MatMul (b, w2)
            g = Mul (e, f) y = MatMul (g, w3) }""",
        17,
    )
    return add_weights(model, weights)


@pytest.mark.parametrize(("make", "largest"), [(planted, 15_000), (gated, 10_000)])
def test_exponents_suit_inputs_that_are_made_to_be_hard(make, largest) -> None:
    model = make(largest=largest)
    asked = ("--level", "O3", "--rescale")
    unstressed = converted(model, *asked, "--stress", "0")
    assert unstressed["plan"]["options"]["rescaling"][0] == []
    found = converted(model, *asked)
    assert found["validation"]["cure"] is None
    assert found["summary"]["nodes"].keys() == {"low"}
    scaled = found["plan"]["options"]["rescaling"][0]
    assert max(reached for _, _, reached in scaled) > FLOAT16.overflow
    # Headroom is that of what the result stores.
    assert FLOAT16.max_finite / 32 < found["validation"]["headroom"]["stressed"] < FLOAT16.max_finite


@pytest.mark.parametrize("odd", [90_000.0, np.inf])
def test_a_proof_in_the_range_of_the_samples_is_one_for_all_samples(odd):
    """The last of six samples, of another shape, is far larger, or has no range."""
    model = parse("(float[N,4] x) => (float[N,4] y) { a = Add (x, x) y = Sub (a, x) }", 17)
    low = convert_model(model, "O3", target="any")
    small = [{"x": np.ones((2, 4), np.float32)} for _ in range(5)]
    large = {"x": np.full((3, 4), odd, np.float32)}
    for samples, is_proven in ((small, True), ([*small, large], False)):
        given = given_samples(samples, model)
        proof = Stress(FLOAT16, 0).of(Model(model), Model(low), given).proof
        assert proof.is_complete == is_proven


def test_level_auto_stresses_float32_values_of_mixed_models(tmp_path: Path) -> None:
    """A float16 value that the original has already does not hide that others may become float16, and overflow."""
    model = parse("""(float[1,16,64] x) => (float[1,16,64] y) <float two = {2}, float some = {0.1}> {
        h = MatMul (x, w) c = Cast <to = 10> (h) f = Cast <to = 1> (c) k = LogSoftmax (f) q = Pow (k, two)
        s = Add (q, some) r = Sqrt (s) y = MatMul (r, v) }""")
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    add_weights(model, {"w": w, "v": w / 64})
    onnx.save(model, tmp_path / "model.onnx")
    made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", "auto")
    assert made.validation is not None
    assert made.validation.passed
    assert any(extra.is_hard for extra in made.validation.extras)


def test_a_name_of_both_branches_stands_for_the_larger_value():
    branches = [f"{name} = {name} () => (float[2] o) {{ h = Mul (x, {factor}) o = Relu (h) }}"
                for name, factor in (("then_branch", "large"), ("else_branch", "small"))]  # fmt: skip
    model = Model.of(
        parse(f"""(float[2] x, bool c) => (float[2] y) <float large = {{100}}, float small = {{7}}> {{
        y = If (c) <{branches[0]}, {branches[1]}> }}""")
    )
    watched = Watched.of(model, ["h"])
    for takes, most in ((True, 100), (False, 7)):
        seen = watched.largest([{"x": np.ones(2, np.float32), "c": np.array(takes)}])
        assert [one.magnitude for one in seen["h"]] == [most, most]


def test_a_step_through_the_range_of_a_mask_stays_a_number():
    climb = Climb(None, {}, "", "", {}, {"x": (-3.4e38, 3.4e38)})
    slopes = {"x": np.array([0, 1, -1], np.float32)}
    moved = climb._moved({"x": np.zeros(3, np.float32)}, slopes, 1.0)
    np.testing.assert_array_equal(moved["x"], np.float32([0, 3.4e38, -3.4e38]))
