"""How many made-up samples a verdict takes, and what is kept of the run that tells."""

import numpy as np
import pytest
from onnx import parser

from onnxamp._errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._runtime.draws import LEAST, MOST, usual_count
from onnxamp._runtime.engines import on_cpu
from onnxamp._runtime.samples import random_samples


def absolute(size: int) -> Model:
    return Model.of(
        parser.parse_model(
            f'<ir_version: 9, opset_import: ["": 17]> g (float[{size}] x) => (float[{size}] y) {{ y = Abs(x) }}'
        )
    )


@pytest.mark.parametrize(("size", "count"), [(1, MOST), (1000, LEAST)])
def test_few_numbers_take_more_samples(size, count):
    model = absolute(size)
    assert usual_count(on_cpu(model), model, "webgpu", None) == count


def test_one_sample_is_enough_where_sums_are_float32():
    model = absolute(1)
    reference = on_cpu(model)
    assert usual_count(reference, model, "cuda", "cpu") == 1
    assert not reference.outputs.kept  # nothing ran


def test_the_reference_keeps_what_it_computed_of_the_first_sample():
    model = absolute(16)
    reference = on_cpu(model)
    usual_count(reference, model, "webgpu", None)
    feeds = random_samples(model)[0]
    kept = reference.run_sample(0, {"x": np.full(16, np.nan, np.float32)})  # does not run again
    np.testing.assert_array_equal(kept["y"], np.abs(feeds["x"]))
    np.testing.assert_array_equal(reference.run_sample(1, {"x": np.ones(16, np.float32)})["y"], np.ones(16))


def test_a_reference_that_does_not_run_takes_the_least():
    model = Model.of(
        parser.parse_model(
            '<ir_version: 9, opset_import: ["": 17]> g (float[N] x, float[M] z) => (float[K] y) { y = Add(x, z) }'
        )
    )
    reference, dims = on_cpu(model), {"N": 2, "M": 3}
    assert usual_count(reference, model, "webgpu", dims=dims) == LEAST
    with pytest.raises(RuntimeFailure):
        reference.run(random_samples(model, dims=dims)[0])
