"""Tuning of models with large weights, which are read piece by piece: the same numbers, in little memory."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from engine import space_of
from graphs.case import add_weights, parse
from onnx import ModelProto, numpy_helper

from onnxamp import Samples, random_samples, tune_model
from onnxamp._convert.analysis import decided
from onnxamp._convert.convert import rewritten
from onnxamp._dtypes import low_type
from onnxamp._model.lowering import raised, rounded
from onnxamp._model.model import Model
from onnxamp._numerics.walk import SideBySide
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.flow import make_flow
from onnxamp._runtime.pieces import fitting, parts_of
from onnxamp._runtime.run import Run
from onnxamp._runtime.values import check_inputs
from onnxamp._tuning.metric import make_metric
from onnxamp._tuning.runs import MaskedModel, Masking, converted_error, tuning_engine
from onnxamp._tuning.space import exactly

SIZE, LAYERS = 900, 4
MB = 2**20
EXACT = make_metric("rel-l2", 1.0)


@pytest.fixture(scope="module")
def model() -> ModelProto:
    """13 MB of weights, more than what stays in a graph; the first is read by two ops."""
    body = " ".join(f"m{i} = MatMul (t{i}, w{i}) t{i + 1} = Tanh (m{i})" for i in range(LAYERS))
    text = (
        f"(float[2,{SIZE}] t0) => (float[2,{SIZE}] y) {{ {body} again = MatMul (t{LAYERS}, w0) y = Softmax (again) }}"
    )
    return add_weights(parse(text), {f"w{i}": (SIZE, SIZE) for i in range(LAYERS)})


@pytest.fixture(scope="module")
def samples(model: ModelProto) -> Samples:
    return random_samples(model, 3)


@pytest.mark.parametrize(("low", "budget"), [("float16", 1), ("bfloat16", 2 * MB)])
def test_a_mask_run_is_the_conversion(model: ModelProto, samples: Samples, low: str, budget: int) -> None:
    space = space_of(model, dtype=low)
    how = Masking(space.ports(), low_type(low), EXACT, budget, threads=0, arithmetic=None, rounded={})
    masked = MaskedModel(Model(model), samples, how)
    everything = frozenset(unit.key for unit in (*space.tunable, *space.followers))
    assert masked.error(frozenset(), range(2)) == 0
    for chosen in (everything, everything - {"m2", "t3", "y"}):
        analysis = decided(space.all_low.problem, prices=exactly(space, chosen, {}))
        wanted = converted_error(
            Model(model), Model(rewritten(analysis)), Run(inputs=samples), EXACT, tuning_engine("cpu")
        )
        assert masked.error(chosen, range(3)) == pytest.approx(wanted, rel=0.02)


def test_samples_together_are_samples_alone(model: ModelProto, samples: Samples) -> None:
    low = rewritten(space_of(model).all_low)
    one, other = (engine_on("cpu").open(proto, budget=8 * MB) for proto in (model, low))
    feeds = [check_inputs(model, sample) for sample in samples]
    walk = SideBySide(one, other)
    group = walk.together(feeds[0], iter(feeds[1:]))
    assert len(group) == 3
    for alone, together in zip(map(walk.run, feeds), walk.run_together(feeds), strict=True):
        assert alone.compared == together.compared
        for name in alone.reference:
            np.testing.assert_array_equal(alone.reference[name], together.reference[name])
            np.testing.assert_array_equal(alone.result[name], together.result[name])
    for alone, found in zip(map(other.run, feeds), other.run_together(feeds), strict=True):
        np.testing.assert_array_equal(alone["y"], found["y"])


def test_no_more_samples_run_together_than_fit(model: ModelProto) -> None:
    """Between pieces a sample holds one value of 7,200 bytes."""
    flow = make_flow(model, emulated=True)
    parts = list(parts_of(flow, range(len(flow.nodes)), 1))
    assert [fitting(flow, parts, flow.outputs, 7200 * n) for n in (0, 1, 5)] == [1, 1, 5]
    assert fitting(flow, parts[:1], flow.outputs, 10**9) == 1, "one piece has nothing to share"


def test_weights_in_a_file_stay_there(model: ModelProto, samples: Samples, tmp_path: Path) -> None:
    onnx.save(onnx.ModelProto.FromString(model.SerializeToString()), tmp_path / "m.onnx", save_as_external_data=True,
              location="m.data")  # fmt: skip
    result, tuned = tune_model(tmp_path / "m.onnx", 2e-4, samples=samples, runs=8)
    expected, other = tune_model(model, 2e-4, samples=samples, runs=8)
    assert (tuned.error, tuned.candidates, tuned.plan) == (other.error, other.candidates, other.plan)
    assert tuned.held
    assert tuned.runs > 8
    weights = [
        {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
        for proto in (result, expected)
    ]
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_of_weights(name: str) -> None:
    low = low_type(name)
    numbers = np.random.default_rng(0).standard_normal((700, 801)).astype(np.float32)
    numbers[0, :6] = np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-7
    found = rounded(numbers, low, 2.0)
    kind = onnx.helper.tensor_dtype_to_np_dtype(low.elem)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = numbers.astype(kind)
    np.testing.assert_array_equal(raised(expected, low.elem), expected.astype(np.float32))
    beyond = np.isinf(expected) & np.isfinite(numbers)
    np.testing.assert_array_equal(
        found, np.where(beyond, np.copysign(np.float32(2), numbers), expected.astype(np.float32))
    )
