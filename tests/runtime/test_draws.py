"""How many random samples a verdict takes, and what is kept of the run that tells."""

import decoders
import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, parser

from onnxamp._base.errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._runtime import LEAST, MOST
from onnxamp._runtime.engines import on_cpu
from onnxamp._runtime.inputs.draws import Draw
from onnxamp._runtime.inputs.samples import as_samples, random_samples, usual_count


def absolute(size: int) -> Model:
    return Model.of(
        parser.parse_model(
            f'<ir_version: 9, opset_import: ["": 17]> g (float[{size}] x) => (float[{size}] y) {{ y = Abs(x) }}'
        )
    )


def draw_of(model: Model, **dims: int) -> Draw:
    draw = random_samples(model, dims=dims).draw
    assert draw is not None
    return draw


@pytest.mark.parametrize(("size", "count"), [(1, MOST), (1000, LEAST)])
def test_few_numbers_take_more_samples(size, count):
    model = absolute(size)
    assert usual_count(on_cpu(model), draw_of(model), "webgpu", None) == count


def test_one_sample_is_enough_where_sums_are_float32():
    model = absolute(1)
    reference = on_cpu(model)
    assert usual_count(reference, draw_of(model), "cuda", "cpu") == 1
    assert not reference.outputs.kept  # nothing ran


def test_the_reference_keeps_what_it_computed_of_the_first_sample():
    model = absolute(16)
    reference = on_cpu(model)
    usual_count(reference, draw_of(model), "webgpu", None)
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
    assert usual_count(reference, draw_of(model, **dims), "webgpu") == LEAST
    with pytest.raises(RuntimeFailure):
        reference.run(random_samples(model, dims=dims)[0])


def rows_of_32(shape: str) -> Model:
    return Model.of(
        parser.parse_model(
            f"""<ir_version: 9, opset_import: ["": 17]> g (float{shape} x) => (float[K,L] y)
            <int64[2] width = {{-1, 32}}> {{ y = Reshape(x, width) }}"""
        )
    )


def test_sizes_are_found_with_which_the_reference_runs():
    model = rows_of_32("[N,M]")
    reference = on_cpu(model)
    samples = as_samples(None, model, count=2, reference=reference)
    assert samples.description == "random inputs (2 samples, seed 0, M=32)"
    assert [sample["x"].shape for sample in samples] == [(1, 32), (1, 32)]
    np.testing.assert_array_equal(reference.outputs.kept[0]["y"], samples[0]["x"])
    assert as_samples(None, model, dims={"M": 64}).description == "random inputs (seed 0)"
    assert as_samples(None, model, dims={"N": 4}).description == "random inputs (seed 0)"  # 4 times 8


def test_dimensions_without_a_name_are_called_after_their_place():
    model = rows_of_32("[N,M]")
    for dim in model.proto.graph.input[0].type.tensor_type.shape.dim:
        dim.Clear()
    assert as_samples(None, model).description == "random inputs (seed 0, x[1]=32)"
    assert as_samples(None, model, dims={"x[0]": 2, "x[1]": 64})[0]["x"].shape == (2, 64)


def test_a_dimension_without_a_name_may_be_a_batch():
    """As that of the state of a recurrent network, whose first dimension counts layers."""
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[N,M] x, float[4,B] h) => (float[K,L] y, float[I,J] z)
        <int64[2] width = {-1, 32}> { y = Reshape(x, width) t = Transpose(h) z = Concat <axis = 1> (x, t) }"""
    proto = parser.parse_model(text)
    for entry, axis in zip([*proto.graph.input, proto.graph.input[0]], (1, 1, 0), strict=True):
        entry.type.tensor_type.shape.dim[axis].Clear()
    assert as_samples(None, Model.of(proto)).description == "random inputs (seed 0, h[1]=1, x[1]=32)"


@pytest.mark.parametrize("shape", ["[1,64]", "[N,64]"])
def test_no_reference_runs_where_nothing_is_open(shape):
    model = rows_of_32(shape)
    reference = on_cpu(model)
    as_samples(None, model, reference=reference)
    assert not reference.outputs.kept


# --- decoders ------------------------------------------------------------------------------------------------------


def test_prompts_and_steps_of_a_decoder_take_turns() -> None:
    model = Model.of(decoders.plain())
    samples = as_samples(None, model, count=None, reference=on_cpu(model))
    assert len(samples) == 2
    prompt, step = samples
    assert (prompt["input_ids"].shape, prompt["past_key_values.0.key"].shape) == ((1, 8), (1, 4, 0, 16))
    assert (step["input_ids"].shape, step["past_key_values.0.key"].shape) == ((1, 1), (1, 4, 8, 16))
    np.testing.assert_array_equal(prompt["position_ids"], [range(8)])
    np.testing.assert_array_equal(step["position_ids"], [[8]])
    for sample, length in ((prompt, 8), (step, 9)):
        np.testing.assert_array_equal(sample["attention_mask"], np.ones((1, length)))
        assert all(np.isfinite(output).all() for output in on_cpu(model).run(sample).values())


@pytest.mark.parametrize("model", [decoders.grouped(), decoders.grouped(int4=True)], ids=["float32", "int4"])
def test_grouped_attention_runs_on_its_inputs(model: ModelProto) -> None:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for sample in random_samples(model, 4):
        assert all(np.isfinite(output).all() for output in session.run(None, sample))


def test_lengths_that_are_given_stay_in_all_turns() -> None:
    model = decoders.plain()
    (sample, other) = random_samples(model, 2, dims={"past_sequence_length": 3, "sequence_length": 2})
    assert sample["attention_mask"].shape == other["attention_mask"].shape == (1, 5)
    (prompt, step) = random_samples(model, 2, dims={"sequence_length": 4})
    assert [one["attention_mask"].shape for one in (prompt, step)] == [(1, 4), (1, 12)]


def test_a_merged_decoder_reads_its_caches_in_steps_alone() -> None:
    model = decoders.plain()
    model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    assert [sample["use_cache_branch"].tolist() for sample in random_samples(model, 4)] == [[False], [True]] * 2


def test_caches_that_slide_are_full() -> None:
    model = decoders.grouped(window=24)
    draw = random_samples(model).draw
    assert draw is not None
    for sample, length in zip((draw.determined().make(number) for number in range(2)), (32, 25), strict=True):
        assert sample["past_key_values.0.key"].shape == sample["past_key_values.1.key"].shape == (1, 2, 24, 16)
        assert sample["attention_mask"].shape == (1, length)


def test_the_width_of_heads_follows_from_what_the_model_declares() -> None:
    """Onnx infers no shapes behind ops of ONNX Runtime, as most of a decoder is."""
    model = decoders.grouped()
    for entry in model.graph.input:
        if entry.name.startswith("past_key_values"):
            entry.type.tensor_type.shape.dim[3].dim_param = "head_dim"
    for part, width in (("q", 64), ("k", 32), ("v", 32)):
        declared = helper.make_tensor_value_info(
            f"layer.0.{part}/out", TensorProto.FLOAT, ["batch_size", "sequence_length", width]
        )
        model.graph.value_info.append(declared)
    samples = as_samples(None, model, count=None, reference=on_cpu(Model.of(model)))
    assert samples[1]["past_key_values.1.value"].shape == (1, 2, 8, 16)
    assert "head_dim=16" in samples.description
