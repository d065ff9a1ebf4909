"""Weights in files take up exponents while they are read: none enters the rescaled model, and all readers agree."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto, helper, numpy_helper
from stored import normal

import onnxamp
from onnxamp._convert.convert import convert
from onnxamp._model.constant_stats import constant_stats, stats_of_all, tensor_stats
from onnxamp._model.model import Model
from onnxamp._model.sources import data_location, scaled_tensor
from onnxamp._model.weights import SENTINEL, embed, read_array, times_power

LAYERS, WIDTH = 6, 64
X = {"X": np.random.default_rng(1).standard_normal((5, WIDTH)).astype(np.float32)}


def stream() -> ModelProto:
    """A residual stream that leaves float16's range: what adds to it takes up the exponent."""
    body, value, weights = [], "X", {}
    rng = np.random.default_rng(0)
    for i in range(LAYERS):
        body.append(
            f"n{i} = RMSNormalization <epsilon: float = 1e-6> ({value}, gain) u{i} = MatMul (n{i}, up{i}) "
            f"r{i} = Relu (u{i}) d{i} = MatMul (r{i}, down{i}) h{i} = Add ({value if i else 'd0'}, d{i})"
        )
        value = f"h{i}"
        for name, size in (("up", 0.1), ("down", 3e4)):
            weights[f"{name}{i}"] = (rng.standard_normal((WIDTH, WIDTH)) * size).astype(np.float32)
    text = f"(float[N,{WIDTH}] X) => (float[N,{WIDTH}] Y) {{ {' '.join(body)} Y = RMSNormalization ({value}, gain) }}"
    model = add_weights(parse(text), weights | {"gain": np.ones(WIDTH, np.float32)})
    model.opset_import[0].version, model.ir_version = 23, 10
    return model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(stream(), path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("wish", ["always", "never"])
@pytest.mark.parametrize("level", ["O3", "O1"])
def test_a_file_becomes_what_the_model_in_memory_becomes(source: Path, wish: str, level: str) -> None:
    """Whether weights are lowered on their way, or only multiplied."""
    options = {"rescale": True, "samples": X} | ({"black_list": ["MatMul", "Add"]} if level == "O1" else {})
    expected = onnxamp.convert_model(stream(), level, **options)
    target = source.with_name("low.onnx")
    made = onnxamp.convert_file(source, target, level, external_data=wish, **options, validate=False)
    assert made.plan.options.rescaling.scaled
    assert normal(onnx.load(target)) == normal(expected)
    down = {t.name: numpy_helper.to_array(t).astype(np.float32) for t in expected.graph.initializer}["down3"]
    given = {t.name: numpy_helper.to_array(t) for t in stream().graph.initializer}["down3"]
    factors = np.unique(np.round(np.log2(given / down)))
    assert factors.size == 1
    assert factors[0] > 0


def test_no_weight_enters_the_rescaled_model(source: Path) -> None:
    """However large the weights are, the graph holds where they lie, and by how much they are multiplied."""
    plan = onnxamp.plan_model(source, "O3", rescale=True, samples=X)
    model = Model.read(source)
    made = convert(model, plan.options, deferred=True)
    weights = sum(4 * WIDTH * WIDTH for _ in range(2 * LAYERS))
    assert made.prepared.graph.model.ByteSize() < weights / 10
    assert made.proto.ByteSize() < weights / 10
    place = data_location({t.name: t for t in made.prepared.graph.model.graph.initializer}["down0"], model.folder)
    assert place is not None
    assert place.exponent == {row.value: row.exponent for row in plan.options.rescaling.scaled}["d0"]


def test_what_leaves_the_range_is_told_of_files_too(source: Path, tmp_path: Path) -> None:
    model = stream()
    (down,) = (tensor for tensor in model.graph.initializer if tensor.name == "down2")
    array = numpy_helper.to_array(down).copy()
    array[3, :4] = 1e-45, 3e-45, np.nan, 0
    down.CopyFrom(numpy_helper.from_array(array, "down2"))
    onnx.save(model, source, save_as_external_data=True, location="other.bin", size_threshold=1024)
    plan = onnxamp.plan_model(stream(), "O3", rescale=True, samples=X)
    made = onnxamp.convert_file(source, tmp_path / "low.onnx", plan=plan, validate=False)
    assert any("2 elements of 'down2' left float32's range" in note for note in made.notes), made.notes


# --- numbers --------------------------------------------------------------------------------------------------------

ODD = np.array(
    [0, -0.0, 1, -3.7, 6e4, 1e-38, -2e-40, 1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan, SENTINEL, 9e29, -2e30],
    np.float32,
)


@pytest.mark.parametrize("exponent", [-200, -127, -30, -1, 1, 7, 30, 126, 127, 149, 200])
def test_powers_multiply_as_ldexp_does(exponent: int) -> None:
    with np.errstate(all="ignore"):
        expected = np.ldexp(ODD.astype(np.float64), -exponent).astype(np.float32)
    assert times_power(ODD, exponent).tobytes() == expected.tobytes()
    into = ODD.copy()
    assert times_power(into, exponent, into) is into
    assert into.tobytes() == expected.tobytes()


def test_statistics_of_many_tensors_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size).astype(np.float32) for size in (0, 1, 5, 8192, 8193, *[3000] * 100)]
    arrays += [np.full(4, number, np.float32) for number in (0, -2, 1e-5, SENTINEL, -3e38, np.inf, np.nan)]
    arrays += [rng.choice(ODD, 30) for _ in range(30)]
    tensors = [numpy_helper.from_array(array) for array in arrays]
    tensors += [helper.make_tensor("t", TensorProto.FLOAT, [3], [1, -7, 2]), numpy_helper.from_array(np.float32(0.5))]
    found = [*stats_of_all(tensors, None)]
    assert [*map(repr, found)] == [repr(tensor_stats(tensor, None)) for tensor in tensors]


@pytest.mark.parametrize("seed", range(24))
def test_readers_agree_about_multiples(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-30, 30)
    numbers = (rng.standard_normal(300) * scale).astype(np.float32)
    if seed % 3:
        numbers[:] = numbers[0] if seed % 3 == 1 else rng.choice(ODD, 300)
    tmp_path.joinpath("data").write_bytes(b"pad!" + numbers.tobytes())
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[20, 15], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "data", "offset": "4", "length": "1200"}.items():
        tensor.external_data.add(key=key, value=value)
    exponent = int(rng.integers(-60, 60))
    scaled = scaled_tensor(tensor, tmp_path, exponent)
    assert scaled is not None
    expected = times_power(numbers, exponent).reshape(20, 15)
    assert read_array(scaled, None).tobytes() == expected.tobytes()
    assert repr(tensor_stats(scaled, None)) == repr(constant_stats(expected))
    embed(scaled, None)
    assert scaled.raw_data == expected.tobytes()
    assert not scaled.external_data
    assert scaled_tensor(scaled, None, 3) is None


def test_a_file_cannot_ask_for_multiples(source: Path) -> None:
    """The entry that says so counts where we wrote it, and nowhere else."""
    before = onnxamp.convert_model(source)
    model = onnx.load(source, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.external_data:
            tensor.external_data.add(key="onnxamp:exponent", value="4")
    source.write_bytes(model.SerializeToString())
    assert normal(onnxamp.convert_model(source)) == normal(before)
