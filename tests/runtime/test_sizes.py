"""Sizes of random inputs follow from what weights and ops say."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import towers
from commands import run, saved
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp
from onnxamp import ArgumentError
from onnxamp._graph.graph import Graph
from onnxamp._runtime.inputs import random_feeds, suited
from onnxamp._runtime.piecewise import memory
from onnxamp._runtime.piecewise.memory import free_bytes, peak_bytes
from onnxamp._runtime.sessions.session import make_session
from onnxamp._runtime.sessions.session import run as run_session

MS = {"com.microsoft": 1}


def model_of(text: str, weights: dict[str, tuple[int, ...]], opset: int = 17, **opsets: int) -> ModelProto:
    """A model whose weights have these shapes."""
    generator = np.random.default_rng(0)
    model = parse(text, opset=opset, domains=opsets) if opsets else parse(text, opset=opset)
    for name, shape in weights.items():
        array = generator.standard_normal(shape).astype(np.float32) / 8
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


DETERMINED = {
    "channels of a convolution": (
        "(float[N,C,H,W] x) => (float[a,b,c,d] y) { h = Relu (x) y = Conv (h, w) }",
        {"w": (4, 3, 3, 3)},
        {"C": 3},
    ),
    "channels of groups": (
        "(float[N,C,H,W] x) => (float[a,b,c,d] y) { y = Conv <group = 5> (x, w) }",
        {"w": (10, 3, 3, 3)},
        {"C": 15},
    ),
    "channels of a transposed convolution": (
        "(float[N,C,H] x) => (float[a,b,c] y) { y = ConvTranspose (x, w) }",
        {"w": (6, 2, 3)},
        {"C": 6},
    ),
    "channels behind a concatenation": (
        "(float[N,C,H,W] x, float[M,3,I,J] z) => (float[a,b,c,d] y) { h = Concat <axis = 1> (x, z) y = Relu (h) }",
        {},
        {},
    ),
    "features of a product": (
        "(float[B,S,D] x) => (float[a,b,c] y) { h = Sigmoid (x) y = MatMul (h, w) }",
        {"w": (12, 5)},
        {"D": 12},
    ),
    "features in front of a transposition": (
        "(float[B,D,S] x) => (float[a,b,c] y) { h = Transpose <perm = [0, 2, 1]> (x) y = MatMul (h, w) }",
        {"w": (12, 5)},
        {"D": 12},
    ),
    "features of a Gemm": (
        "(float[B,D] x) => (float[a,b] y) { y = Gemm <transB = 1> (x, w) }",
        {"w": (5, 12)},
        {"D": 12},
    ),
    "rows of a transposed Gemm": (
        "(float[D,B] x) => (float[a,b] y) { y = Gemm <transA = 1> (x, w) }",
        {"w": (12, 5)},
        {"D": 12},
    ),
    "letters of an Einsum": (
        '(float[B,D,S] x) => (float[a,b,c] y) { y = Einsum <equation = "bds,dk->bsk"> (x, w) }',
        {"w": (12, 5)},
        {"D": 12},
    ),
    "channels of a batch normalization": (
        "(float[N,C,H,W] x) => (float[a,b,c,d] y) { y = BatchNormalization (x, s, s, s, v) }",
        {"s": (5,), "v": (5,)},
        {"C": 5},
    ),
    "channels of an instance normalization": (
        "(float[N,C,H,W] x) => (float[a,b,c,d] y) { y = InstanceNormalization (x, s, s) }",
        {"s": (5,)},
        {"C": 5},
    ),
    "features of a layer normalization": (
        "(float[B,S,D] x) => (float[a,b,c] y) { y = LayerNormalization (x, s, s) }",
        {"s": (12,)},
        {"D": 12},
    ),
    "what a constant is added to": (
        "(float[B,S,D] x) => (float[a,b,c] y) { y = Add (x, w) }",
        {"w": (1, 9, 12)},
        {"S": 9, "D": 12},
    ),
    "what another input is added to": (
        "(float[B,S,D] x, float[F,E] z) => (float[a,b,c] y) { h = MatMul (x, w) y = Add (h, z) }",
        {"w": (12, 5)},
        {"D": 12, "E": 5},
    ),
    "a fixed width": (
        "(float[B,D] x) => (float[a,b] y) <int64[2] width = {-1, 12}> { y = Reshape (x, width) }",
        {},
        {"D": 12},
    ),
    "a flattened image": (
        "(float[B,C,4,5] x) => (float[a,b] y) { h = Flatten (x) y = Gemm (h, w) }",
        {"w": (60, 5)},
        {"C": 3},
    ),
    "blocks of pixels": (
        "(float[B,C,H,W] x) => (float[a,b,c,d] y) { y = SpaceToDepth <blocksize = 3> (x) }",
        {},
        {"H": 9, "W": 9},
    ),
    "blocks of channels": (
        "(float[B,C,H,W] x) => (float[a,b,c,d] y) { y = DepthToSpace <blocksize = 3> (x) }",
        {},
        {"C": 9},
    ),
    "the state of an LSTM": (
        """(float[S,B,I] x, float[D,C,H] h, float[E,G,K] c) => (float[a,b,e,f] y)
        { y = LSTM <hidden_size = 5> (x, w, r, "", "", h, c) }""",
        {"w": (1, 20, 3), "r": (1, 20, 5)},
        {"I": 3, "H": 5, "K": 5},
    ),
    "the state of a GRU in both directions": (
        """(float[S,B,I] x, float[D,C,H] h) => (float[a,b,e,f] y)
        { y = GRU <hidden_size = 5, direction = "bidirectional"> (x, w, r, "", "", h) }""",
        {"w": (2, 15, 3), "r": (2, 15, 5)},
        {"I": 3, "D": 2, "H": 5},
    ),
    "the state of an RNN": (
        '(float[S,B,I] x, float[1,C,H] h) => (float[a,b,e,f] y) { y = RNN <hidden_size = 5> (x, w, r, "", "", h) }',
        {"w": (1, 5, 3), "r": (1, 5, 5)},
        {"I": 3, "H": 5},
    ),
}


@pytest.mark.parametrize("what", DETERMINED)
def test_weights_determine_sizes(what: str) -> None:
    text, weights, wanted = DETERMINED[what]
    model = model_of(text, weights)
    samples = onnxamp.random_samples(model)
    shapes = {
        dim.dim_param: size
        for entry in model.graph.input
        for dim, size in zip(entry.type.tensor_type.shape.dim, samples[0][entry.name].shape, strict=True)
        if dim.dim_param
    }
    assert wanted.items() <= shapes.items()
    run_session(make_session(model), samples[0])


CONTRIB = {
    "keys and values of grouped heads": (
        """(float[B,S,Q] q, float[C,T,K] k, float[D,U,V] v, float[E,F,P,G] pk, float[H,I,O,J] pv, int32[L] n,
            int32[1] t) => (float[a,b,c] y)
            { h = MatMul (q, w) y, kk, vv = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
              (h, k, v, pk, pv, n, t) }""",
        {"w": (12, 32)},
        {"Q": 12, "K": 16, "V": 16, "F": 2, "I": 2, "G": 8, "J": 8},
    ),
    "the past of heads": (
        """(float[B,S,Q] q, float[B,T,K] k, float[B,T,V] v, float[B,F,P,G] pk, float[B,I,P,J] pv) => (float[a,b,c] y)
            { h = MatMul (q, w) y = com.microsoft.MultiHeadAttention <num_heads = 4> (h, k, v, "", "", "", pk, pv) }""",
        {"w": (12, 32)},
        {"Q": 12, "K": 32, "F": 4, "I": 4, "G": 8},
    ),
    "a sum that is normalized": (
        """(float[B,S,D] x, float[B,S,E] z) => (float[a,b,c] y)
            { y = com.microsoft.SkipLayerNormalization (x, z, w) }""",
        {"w": (12,)},
        {"D": 12, "E": 12},
    ),
}


@pytest.mark.parametrize("what", CONTRIB)
def test_ops_of_onnx_runtime_determine_sizes(what: str) -> None:
    text, weights, wanted = CONTRIB[what]
    model = model_of(text, weights, **MS)
    shapes = {
        dim.dim_param: size
        for entry in model.graph.input
        for dim, size in zip(
            entry.type.tensor_type.shape.dim, onnxamp.random_samples(model)[0][entry.name].shape, strict=True
        )
    }
    assert wanted.items() <= shapes.items()


def test_sizes_pass_through_functions() -> None:
    text = """<ir_version: 9, opset_import: ["": 17, "d": 1]> g (float[N,C] x) => (float[a,b] y) { y = d.f (x) }
        <domain: "d", opset_import: ["": 17]> f (x) => (y)
        { w = Constant <value = float[3,2] {1, 2, 3, 4, 5, 6}> () y = MatMul (x, w) }"""
    assert onnxamp.random_samples(onnx.parser.parse_model(text))[0]["x"].shape == (1, 3)


def test_given_sizes_stay() -> None:
    model = model_of("(float[N,C,H,W] x) => (float[a,b,c,d] y) { y = Conv (x, w) }", {"w": (4, 3, 3, 3)})
    assert onnxamp.random_samples(model, dims={"C": 5, "H": 4})[0]["x"].shape == (1, 5, 4, 8)


IMAGES = "(float[N,C,H,W] x) => (float[a,b] y) { h = Conv <strides = [32, 32]> (x, w) f = Flatten (h) y = Gemm (f, v) }"


def test_sizes_that_nothing_determines_are_tried_without_running_those_that_contradict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(IMAGES, {"w": (4, 3, 3, 3), "v": (196, 5)})
    ran = list[tuple[int, ...]]()
    checked = suited.check_inputs
    monkeypatch.setattr(
        suited, "check_inputs", lambda proto, feeds: ran.append(feeds["x"].shape) or checked(proto, feeds)
    )
    report = onnxamp.diff_models(model, model, provider="cpu")
    assert report.inputs == "random inputs (seed 0, C=3, H=224, W=224)"
    assert ran == [(1, 8, 8, 8), (1, 3, 224, 224)]


def test_sizes_that_take_too_much_memory_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(IMAGES, {"w": (4, 3, 3, 3), "v": (196, 5)})
    monkeypatch.setattr(suited, "_MOST_BYTES", 1 << 19)
    assert "H=224, W=224" not in onnxamp.diff_models(model, model, provider="cpu").skipped


SMALL_CNN = (
    "(float[N,C,H,W] X) => (float[a,b] Y) { a = Conv (X, w) b = Relu (a) c = GlobalAveragePool (b) Y = Flatten (c) }"
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is one of Linux")
def test_a_small_model_with_open_sizes_takes_little_memory(tmp_path: Path) -> None:
    onnx.save(model_of(SMALL_CNN, {"w": (4, 3, 3, 3)}), tmp_path / "m.onnx")
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30));"
        "from onnxamp.__main__ import main; sys.argv = ['onnxamp', 'convert', 'm.onnx', '-o', 'o.onnx']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"ONNXAMP_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "C=3" in done.stdout


def test_inputs_that_do_not_fit_into_memory_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(random_feeds, "_tensor", none_left)
    model = saved("(float[2] x) => (float[2] y) { y = Neg (x) }")
    with pytest.raises(ArgumentError, match="more memory than there is"):
        onnxamp.random_samples(model)[0]
    result = run("bench", model)
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert "more memory than there is" in " ".join(result.output.split())


def test_the_peak_of_a_row_is_two_values() -> None:
    text = "(float[1000] x) => (float[1000] y) { a = Neg (x) b = Neg (a) c = Neg (b) y = Neg (c) }"
    graph = Graph.of(parse(text))
    assert peak_bytes(graph, graph.shapes) == 8000
    wide = Graph.of(parse("(float[1000] x) => (float[1000] y) { a = Neg (x) b = Neg (x) y = Add (a, b) }"))
    assert peak_bytes(wide, wide.shapes) == 12000


def test_free_memory_is_what_the_least_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit, used = tmp_path / "limit", tmp_path / "used"
    limit.write_text("5000\n")
    used.write_text("2000\n")
    monkeypatch.setattr(memory, "_GROUPS", ((str(limit), str(used)),))
    assert free_bytes() == 3000
    limit.write_text("max\n")
    assert free_bytes() > 3000


def test_grids_markers_and_numbers_of_frames_fit_what_they_are_about() -> None:
    (seen,) = onnxamp.random_samples(towers.vision(), 1)
    assert seen["pixel_values"].shape == (16, towers.PATCH)
    assert seen["image_grid_thw"].tolist() == [[1, 4, 4]]
    (wider,) = onnxamp.random_samples(towers.vision(), 1, dims={"num_patches": 24, "num_images": 1})
    assert wider["image_grid_thw"].tolist() == [[1, 4, 6]]
    (heard,) = onnxamp.random_samples(towers.hearing(), 1, dims={"frames": 30})
    assert heard["audio_sizes"].tolist() == [30]
    for sample in onnxamp.random_samples(towers.embedding(), 5):
        assert sample["image_features"].shape[0] == (sample["input_ids"] == towers.IMAGE).sum() == 4


def test_images_have_sizes_of_their_own_beside_texts() -> None:
    text = """(int64[N,length] input_ids, float[N,3,height,width] pixel_values) => (float[a,b,c] y, float[d,e,f] z) {
        known = Gather (table, input_ids) y = Add (known, places)
        patched = Conv <kernel_shape = [16,16], strides = [16,16]> (pixel_values, w) z = Reshape (patched, sides) }"""
    model = model_of(text, {"table": (9, 4), "places": (8, 4), "w": (4, 3, 16, 16)})
    model.graph.initializer.append(numpy_helper.from_array(np.array([4, 24, 24]), "sides"))
    report = onnxamp.diff_models(model, model, provider="cpu")
    assert report.passed
    assert "height=384, width=384" in str(report)


def test_sizes_of_many_dimensions_that_nobody_knows_are_not_taken_for_large() -> None:
    text = """(float[N,length] x) => (float[a,b,c,d,e,f] z) {
        y = Reshape (x, rows) t = Cast <to = 7> (x) r = ReduceMax <keepdims = 0> (t) u = Mul (r, none)
        v = Add (u, shape) w = Expand (y, v) z = Neg (w) }"""
    model = model_of(text, {})
    numbers = {"rows": np.array([-1, 32]), "none": np.array([0]), "shape": np.array([1, 1, 1, 1, 1, 32])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in numbers.items())
    assert onnxamp.diff_models(model, model, provider="cpu").passed
