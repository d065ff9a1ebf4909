"""Inputs that fit a model: sizes of named dimensions that suit each other, and shapes that are checked."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import helper

import onnxamp
from onnxamp import ArgumentError

DECODER = """(int64[batch_size, sequence_length] ids, float[batch_size, 2, past_sequence_length, 4] past,
    float[batch_size, total_sequence_length] mask) => (float[batch_size, 2, total, 4] present, float[n, m] masked)
    <float[16,8] table, int64[4] heads = {0, -1, 2, 4}, int64[2] middle = {1, 2}> {
    rows = Gather (table, ids)
    split = Reshape (rows, heads)
    new = Transpose <perm = [0, 2, 1, 3]> (split)
    present = Concat <axis = 2> (past, new)
    sums = ReduceSum <keepdims = 0> (present, one)
    masked = Add (sums, mask)
}""".replace("int64[2] middle = {1, 2}", "int64[2] one = {1, 3}")
"""Loads with any sizes, and runs only if the mask is as long as past and new tokens together."""


def decoder(**names):
    """The decoder, with other names of dimensions."""
    text = DECODER.replace("float[16,8] table", f"float[16,8] table = {{{', '.join(['0.5'] * 128)}}}")
    model = parse(text)
    for entry in model.graph.input:
        for dim in entry.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]
    return model


def shapes(model, **dims):
    return {name: array.shape for name, array in onnxamp.random_samples(model, dims=dims)[0].items()}


def runs(model):
    return onnxamp.diff_models(model, model, onnxamp.random_samples(model), provider="cpu").skipped is None


class TestNames:
    def test_a_total_is_the_sum_of_past_and_new_tokens(self):
        assert shapes(decoder()) == {"ids": (1, 8), "past": (1, 2, 0, 4), "mask": (1, 8)}, "of a prompt"
        assert shapes(decoder(), past_sequence_length=8)["mask"] == (1, 16)
        assert shapes(decoder(), past_sequence_length=3, sequence_length=2)["mask"] == (1, 5)
        assert runs(decoder())

    def test_a_total_without_a_name_for_new_tokens_has_one_of_them(self):
        model = decoder()
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
        assert shapes(model)["mask"] == (1, 9)
        assert runs(model)

    @pytest.mark.parametrize(
        ("formula", "size"),
        [
            ("past_sequence_length + sequence_length", 16),
            ("past_sequence_length+sequence_length", 16),
            ("past_sequence_length + 1", 9),
            ("2*past_sequence_length - 3", 13),
            ("(sequence_length + 1) // 2", 4),
            ("past_sequence_length/4", 2),
            ("sequence_length // 0", 0),
            ("3 - sequence_length", 0),
            ("elsewhere + sequence_length", 16),
            ("batch * sequence_length", 8),
            ("batch_size x sequence_length", 8),
            ("input-length", 8),
            ("ids/length", 8),
            ("Max(1, s0)", 8),
            ("?", 8),
        ],
    )
    def test_formulas(self, formula, size):
        model = decoder(total_sequence_length=formula)
        assert shapes(model, past_sequence_length=8)["mask"] == (1, size)

    def test_a_size_within_a_formula_can_be_given(self):
        model = decoder(total_sequence_length="past_sequence_length + heads * 2")
        assert shapes(model, heads=5, past_sequence_length=8)["mask"] == (1, 18)
        with pytest.raises(ArgumentError, match=r"no dimension 'hats'; they have .*'heads'"):
            shapes(model, hats=5)

    def test_a_leading_product_is_that_of_batch_and_heads(self):
        model = decoder(batch_size="batch_size * num_heads")
        assert shapes(model)["ids"] == (8, 8)
        assert shapes(model, num_heads=2, batch_size=3)["ids"] == (6, 8)


class TestAdvice:
    def test_sizes_that_work_are_found_by_running(self):
        model = decoder(total_sequence_length="all", sequence_length="tokens")
        assert runs(model) is False
        report = onnxamp.diff_models(model, decoder(), provider="cpu")
        assert (report.passed, report.inputs) == (True, "random inputs (seed 0, all=16)")

    def test_sizes_of_samples_that_a_user_makes_up_are_named(self):
        model = decoder(total_sequence_length="all", sequence_length="tokens")
        report = onnxamp.diff_models(model, model, onnxamp.random_samples(model), provider="cpu")
        assert report.skipped.startswith("The reference does not run: ONNX Runtime could not run the model")
        assert report.skipped.endswith("their sizes do not suit the model, but these do: --dim all=16")
        samples = onnxamp.random_samples(model, dims={"all": 16})
        assert onnxamp.diff_models(model, model, samples, provider="cpu").passed

    def test_given_sizes_stay(self):
        model = decoder(total_sequence_length="all", sequence_length="tokens")
        samples = onnxamp.random_samples(model, dims={"past_sequence_length": 7})
        assert "past" not in onnxamp.diff_models(model, model, samples, provider="cpu").skipped.split("these do:")[1]
        samples = onnxamp.random_samples(model, dims={"all": 9})
        told = onnxamp.diff_models(model, model, samples, provider="cpu").skipped
        assert "--dim all" not in told
        assert told.endswith("these do: --dim tokens=1")

    def test_what_was_tried_is_told(self):
        model = decoder(total_sequence_length="all", sequence_length="tokens")
        given = {"all": 7, "past_sequence_length": 1, "tokens": 1}
        samples = onnxamp.random_samples(model, dims=given)
        told = onnxamp.diff_models(model, model, samples, provider="cpu").skipped
        assert told.endswith("Real inputs (--inputs data.npz) or sizes (--dim name=N) may help.")
        samples = onnxamp.random_samples(model, dims={"all": 7, "past_sequence_length": 10})
        told = onnxamp.diff_models(model, model, samples, provider="cpu").skipped
        assert "(tried without success: tokens=16; tokens=32;" in told
        report = onnxamp.diff_models(model, model, dims={"all": 7, "past_sequence_length": 10}, provider="cpu")
        assert report.skipped == told

    def test_sizes_that_a_later_sample_fails_with_are_not_recommended(self):
        """Rows of 32 numbers, or of 37 where a random number is 1: in the fourth sample."""
        model = parse("""(float[1,M] x, int64[1] k) => (float[K,L] y)
            <int64[1] rest = {-1}, int64[1] five = {5}, int64[1] wide = {32}> {
            a = Mul (k, five) b = Add (a, wide) c = Concat <axis = 0> (rest, b) y = Reshape (x, c) }""")
        report = onnxamp.diff_models(model, model, count=4, provider="cpu")
        assert report.inputs == "random inputs (4 samples, seed 0, M=32)"
        assert "(sample 4 of 4)" in report.skipped
        assert "--dim M" not in report.skipped

    @pytest.mark.slow
    def test_the_search_for_sizes_ends_after_a_number_of_them(self):
        names = [f"x{index}" for index in range(16)]
        inputs = ", ".join(f"float[1,N{name}] {name}" for name in names)
        model = parse(f"""({inputs}) => (float[4] y) <int64[1] four = {{4}}> {{
            c = Concat <axis = 1> ({", ".join(names)}) y = Reshape (c, four) }}""")
        told = onnxamp.diff_models(model, model, provider="cpu").skipped
        assert told.split("tried without success: ")[1].count(";") == 63

    def test_a_model_that_does_not_load_is_not_run_with_other_sizes(self):
        model = parse("(float[N] x) => (float[N] y) { y = com.example.Odd (x) }")
        model.opset_import.add(domain="com.example", version=1)
        told = onnxamp.diff_models(model, model, provider="cpu").skipped
        assert "could not load" in told
        assert "--dim" not in told

    @pytest.mark.parametrize("check", [lambda m, s: onnxamp.diff_models(m, m, s), onnxamp.check_run])
    def test_real_inputs_that_do_not_run_are_an_error(self, check):
        feeds = dict(onnxamp.random_samples(decoder())[0])
        feeds["mask"] = feeds["mask"][:, :-1]
        with pytest.raises(ArgumentError, match=r"(?s)sample 2 of 2.*Check the inputs \(2 given samples\)\.$"):
            check(decoder(), [onnxamp.random_samples(decoder())[0], feeds])


class TestShapes:
    MODEL = "(float[N,3,4,6] x) => (float[N,3,4,6] y) { y = Relu (x) }"

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ((1, 3, 4, 7), "Input 'x' must have the shape [N, 3, 4, 6], not [1, 3, 4, 7]."),
            ((1, 4, 6, 3), "not [1, 4, 6, 3]: its axes are in another order (numpy: x.transpose(0, 3, 1, 2))."),
            ((1, 6, 4, 3), "not [1, 6, 4, 3]: its axes are in another order (numpy: x.transpose(0, 3, 2, 1))."),
            ((3, 4, 6), "not [3, 4, 6]: the batch axis is missing (numpy: x[None])."),
            ((3, 4), "not [3, 4]."),
            ((1, 1, 3, 4, 6), "not [1, 1, 3, 4, 6]."),
            ((), "not []."),
        ],
    )
    def test_expected_and_given_are_named(self, given, told):
        with pytest.raises(ArgumentError) as caught:
            onnxamp.check_run(parse(self.MODEL), {"x": np.zeros(given, np.float32)}, provider="cpu")
        assert str(caught.value).endswith(told)

    def test_what_onnx_runtime_takes_is_taken(self):
        model = parse("(float[N,N] x, float[] s) => (float[] y) { z = Mul (x, s) y = ReduceSum <keepdims = 0> (z) }")
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
        feeds = {"x": np.zeros((2, 3), np.float32), "s": np.zeros((1,), np.float32)}
        assert onnxamp.check_run(model, feeds, provider="cpu").skipped is None

    def test_elements_of_a_sequence_are_checked(self):
        model = parse("(seq(float[2]) x) => (float[N] y) { y = ConcatFromSequence <axis = 0> (x) }")
        with pytest.raises(ArgumentError, match=r"'x\[1\]' must have the shape \[2\], not \[3\]"):
            onnxamp.check_run(model, {"x": [np.zeros(2, np.float32), np.zeros(3, np.float32)]}, provider="cpu")

    def test_nan_in_an_input_is_named(self):
        model = parse(self.MODEL)
        x = np.zeros((1, 3, 4, 6), np.float32)
        x[0, 0, 0, :2] = np.nan
        note = "Input 'x' holds NaN in 2 of 72 elements."
        assert note in onnxamp.diff_models(model, model, {"x": x}, provider="cpu").notes
        x[:] = np.nan
        skipped = onnxamp.diff_models(model, model, {"x": x}, provider="cpu").skipped
        assert skipped.endswith("Input 'x' holds NaN in 72 of 72 elements.")


@pytest.mark.parametrize("written", [False, True])
def test_sizes_are_tried_that_a_one_sided_spectrum_suits(written):
    """onnx infers both sides of a spectrum where nothing is said, which would contradict the matrix behind it."""
    text = """(float[1,N] X) => (float[1,frames,4] Y)
    <int64 hop = {4}, float[16] window = {WINDOW}, float[9,4] bands = {BANDS}> {
        spectrum = STFT (X, hop, window)
        power = ReduceSumSquare <axes = [-1], keepdims = 0> (spectrum)
        Y = MatMul (power, bands)
    }"""
    model = parse(text.replace("WINDOW", ", ".join(["1"] * 16)).replace("BANDS", ", ".join(["0.5"] * 36)))
    if written:
        model.graph.node[0].attribute.append(helper.make_attribute("onesided", 1))
    assert onnxamp.diff_models(model, model, provider="cpu").skipped is None


def test_a_mask_without_a_batch_is_as_long_as_a_cache_and_its_new_token():
    """The new tokens lead the mask, so that they count as a batch."""
    model = parse("""(float[B,2,S,8] q, bool[S,T] mask, float[B,2,P,8] past)
        => (float[B,2,S,8] y, float[B,2,T,8] k, float[B,2,T,8] v) {
        y, k, v = Attention (q, q, q, mask, past, past) }""")
    model.opset_import[0].version = 23
    report = onnxamp.diff_models(model, model, provider="cpu")
    assert report.passed
    assert report.inputs == "random inputs (seed 0, T=9)"
