"""Sessions, files of inputs, checks of inputs, and random inputs."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, load_model, numpy_helper, parser, save_model

from onnxamp._base.errors import ArgumentError, ExternalDataError, ModelError, RuntimeFailure
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.inputs.random_inputs import random_inputs
from onnxamp._runtime.sessions.session import cuda_available, cuda_trouble, make_session, run, run_values
from onnxamp._runtime.sessions.starting import is_large, save_spilled
from onnxamp._runtime.sessions.values import check_inputs, to_value


def graph(inputs, outputs, body, *, defaults="", extra="", opset=21):
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}{extra}]> g ({inputs}) => ({outputs}) {defaults} {{ {body} }}'
    )


@pytest.fixture
def double():
    return graph("float[N] x", "float[N] y", "y = Add(x, x)")


class TestSession:
    @pytest.mark.slow
    def test_onnxruntime_is_imported_late(self):
        code = "import onnxamp._runtime.sessions.values, sys; sys.exit('onnxruntime' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_runs_protos_and_files(self, double, tmp_path):
        save_model(double, tmp_path / "m.onnx")
        for model in (double, tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
            for optimize in (True, False):
                found = run(make_session(model, optimize=optimize, threads=1), {"x": np.ones(2, np.float32)})
                np.testing.assert_array_equal(found["y"], [2, 2])

    def test_outputs_in_the_order_asked_for(self):
        model = graph("float x", "float a, float b, float c", "a = Neg(x) b = Abs(x) c = Sqrt(b)")
        found = run(make_session(model), {"x": np.float32(-4)}, ["c", "a"])
        assert list(found.items()) == [("c", 2), ("a", 4)]

    def test_bfloat16_goes_in_and_out(self):
        model = graph(
            "bfloat16[M, N] x, float s, bfloat16 z", "bfloat16[N, M] y, float t, bfloat16 w",
            "y = Transpose(x) t = Neg(s) w = Identity(z)",
        )  # fmt: skip
        x = np.arange(12).astype(ml_dtypes.bfloat16).reshape(3, 4)[:, ::2]
        feeds = {"x": x, "s": np.float32(3), "z": np.array(7, ml_dtypes.bfloat16)}
        found = run(make_session(model), feeds)
        np.testing.assert_array_equal(found["y"], x.T)
        assert (found["y"].dtype, found["w"].shape, found["w"], found["t"]) == (x.dtype, (), 7, -3)
        found["y"][0] = 0  # the caller owns it
        assert run(make_session(model), feeds, ["t"])["t"] == -3

    def test_numbers_that_share_bytes_go_in_and_out(self):
        model = graph("float[N] x, int4[N] z", "uint4[N] y, float[N] w", "y = Cast <to = 21> (x) w = Cast <to = 1> (z)")
        z = np.array([-8, 7, 3]).astype(ml_dtypes.int4)
        found = run(make_session(model), {"x": np.array([1, 15, 2], np.float32), "z": z})
        assert (found["y"].dtype, found["y"].tolist()) == (ml_dtypes.uint4, [1, 15, 2])
        assert found["w"].tolist() == [-8, 7, 3]

    def test_sequences_optionals_and_strings(self):
        model = graph(
            "seq(float[N]) s, optional(float[N]) o, string[N] t", "seq(float[N]) a, bool b, string[N] c",
            "a = Identity(s) b = OptionalHasElement(o) c = Identity(t)",
        )  # fmt: skip
        session = make_session(model)
        feeds = {"s": [np.ones(2, np.float32)] * 2, "o": None, "t": np.array(["p", "q"], object)}
        found = run(session, feeds)
        assert [part.tolist() for part in found["a"]] == [[1, 1], [1, 1]]
        assert not found["b"]
        assert found["c"].tolist() == ["p", "q"]
        assert run(session, feeds | {"o": np.ones(1, np.float32)})["b"]

    @pytest.mark.parametrize(("rows", "large"), [(530, False), (540, True)])
    def test_more_than_two_gigabytes_are_no_message(self, rows, large):
        model = graph("float[N] x", "float[N] y", "y = Neg(x)")
        model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[rows, 1_000_000])
        assert is_large(model) == large

    def test_large_models_and_external_data_go_through_a_folder(self, tmp_path):
        weight, scale = np.random.default_rng(0).random((30, 40)).astype(np.float16), np.arange(40) / 40
        model = graph("float[N, 30] x", "float[N, 40] y", "c = Cast <to = 1>(w) m = MatMul(x, c) y = Mul(m, s)")
        small = helper.make_tensor("s", TensorProto.FLOAT, [40], scale)
        model.graph.initializer.extend([numpy_helper.from_array(weight, "w"), small])
        many = helper.make_tensor("unused", TensorProto.INT64, [300], range(300))
        model.graph.initializer.append(many)
        x = np.ones((2, 30), np.float32)
        wanted = x @ weight.astype(np.float32) * scale
        (tmp_path / "spilled").mkdir()
        for source in (model, save_spilled(model, tmp_path / "spilled")):
            np.testing.assert_allclose(run(make_session(source), {"x": x})["y"], wanted, rtol=1e-5)
        save_model(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="w.bin")
        loose = load_model(tmp_path / "m.onnx", load_external_data=False)
        before = loose.SerializeToString()
        assert is_large(loose)
        for source in (emulate(loose, base_dir=tmp_path), tmp_path / "m.onnx"):
            np.testing.assert_allclose(run(make_session(source), {"x": x})["y"], wanted, rtol=1e-5)
        assert loose.SerializeToString() == before
        with pytest.raises(ExternalDataError, match="'w'"):
            make_session(loose)

    def test_failures_are_one_sentence(self, double, tmp_path):
        with pytest.raises(ArgumentError, match=r"'tpu'.*cuda, cpu"):
            make_session(double, "tpu")
        with pytest.raises(ModelError, match=r"Cannot read .*none\.onnx.*\.$"):
            make_session(tmp_path / "none.onnx")
        (tmp_path / "bad.onnx").write_bytes(b"no model")
        with pytest.raises(ModelError, match=r"bad\.onnx.* is not an ONNX model"):
            make_session(tmp_path / "bad.onnx")
        custom = graph("float[N] x", "float[N] y", "y = acme.Op(x)", extra=', "acme": 1')
        with pytest.raises(RuntimeFailure, match=r"load model 'g' on cpu: .*acme") as failure:
            make_session(custom)
        assert "ONNXRuntimeError" not in str(failure.value)
        assert "\n" not in str(failure.value)
        session = make_session(double)
        for feeds in ({}, {"x": np.ones(2)}, {"z": np.ones(2, np.float32)}):
            with pytest.raises(RuntimeFailure, match=r"could not run the model \(y\): "):
                run(session, feeds)
        with pytest.raises(RuntimeFailure):
            run(session, {"x": np.ones(2, np.float32)}, ["nothing"])

    def test_cuda_is_refused_where_it_cannot_run(self, double, no_cuda):
        with pytest.raises(RuntimeFailure, match="CUDA cannot be used"):
            make_session(double, "cuda")

    def test_silent_fallback_is_a_failure(self, double, cuda_double):
        assert cuda_available()
        cuda_double.falls_back = True
        with pytest.raises(RuntimeFailure, match="on the CPU, although"):
            make_session(double, "cuda")

    def test_one_output_for_two_who_ask(self, double, cuda_double):
        session = make_session(double, "cuda")
        found = run_values(session, {"x": to_value(np.ones(2, np.float32))}, ["y", "y"])
        assert {name: value.numpy().tolist() for name, value in found.items()} == {"y": [2, 2]}

    def test_without_a_driver_no_cuda_session_is_tried(self, no_cuda, monkeypatch):
        monkeypatch.setattr(onnxruntime, "InferenceSession", None)
        assert "no NVIDIA device" in cuda_trouble()

    def test_libraries_are_looked_for_wherever_packages_are(self, cuda_double, monkeypatch, tmp_path):
        for part in ("cu13", "cudnn"):
            (tmp_path / "nvidia" / part / "lib").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path)
        asked = []

        def preload(directory=None):
            asked.append(directory)
            missing = [name for name in ("cu13", "cudnn") if f"{tmp_path}/nvidia/{name}/lib" not in asked]
            sys.stdout.write("".join(f"Failed to load lib{name}.so\n" for name in missing))

        cuda_double.preload, cuda_double.falls_back = preload, True
        assert cuda_trouble().endswith("installs its libraries")
        assert asked == [None, f"{tmp_path}/nvidia/cu13/lib", f"{tmp_path}/nvidia/cudnn/lib"]

    def test_the_first_missing_library_is_named(self, cuda_double):
        cuda_double.preload = lambda directory: sys.stdout.write("Failed to load a.so\nb")
        cuda_double.falls_back = True
        assert cuda_trouble().endswith("installs its libraries (Failed to load a.so)")

    def test_profile(self, double, tmp_path):
        session = make_session(double, profile_to=tmp_path / "profile")
        run(session, {"x": np.ones(2, np.float32)})
        assert session.end_profiling().startswith(str(tmp_path / "profile"))

    @pytest.mark.cuda
    @pytest.mark.skipif(not cuda_available(), reason="no CUDA device")
    def test_cuda(self, double):
        low = graph("bfloat16[N] x", "bfloat16[N] y", "y = Add(x, x)")
        assert run(make_session(double, "cuda"), {"x": np.ones(2, np.float32)})["y"].tolist() == [2, 2]
        assert run(make_session(low, "cuda"), {"x": np.ones(2, ml_dtypes.bfloat16)})["y"].tolist() == [2, 2]


class TestCheckInputs:
    model = graph(
        "float[N] x, int64 n, bool b, float16[N] h", "float[N] y", "y = Mul(x, w)", defaults="<float w = {2.0}>"
    )
    feeds = {  # noqa: RUF012 - read only
        "x": np.ones(2, np.float32),
        "n": np.array(3),
        "b": np.array(True),
        "h": np.ones(2, np.float16),
    }

    def test_lossless_casts_are_silent(self):
        found = check_inputs(
            self.model,
            {"x": np.array([0.5, np.nan]), "n": np.int32(3), "b": np.uint8(1), "h": np.array([0.25, 2], np.float32)},
        )
        assert [found[name].dtype for name in "xnbh"] == [np.float32, np.int64, bool, np.float16]
        np.testing.assert_array_equal(found["x"], np.array([0.5, np.nan], np.float32))
        assert check_inputs(self.model, self.feeds)["x"] is self.feeds["x"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x": np.array([0.1])}, "'x' must be float32; the given float64"),
            ({"x": np.array([1])}, "'x' must be float32, not int64"),
            ({"n": np.array(3.0)}, "'n' must be int64, not float64"),
            ({"b": np.array(2)}, "'b' must be bool; the given int64"),
            ({"h": np.array([70000.0])}, "'h' must be float16; the given float64"),
            ({"x": np.array(["a"])}, "'x' must be float32, not <U1"),
            ({"z": np.ones(1)}, "no input 'z'; it has 'x', 'n', 'b', 'h'"),
        ],
    )
    def test_other_arrays_are_refused(self, change, message):
        with pytest.raises(ArgumentError, match=message):
            check_inputs(self.model, self.feeds | change)

    def test_missing_inputs(self):
        with pytest.raises(ArgumentError, match="inputs 'b', 'h' are missing; given: 'x', 'n'"):
            check_inputs(self.model, {name: self.feeds[name] for name in "xn"})

    def test_defaults_sequences_and_optionals(self):
        model = graph(
            "float x, seq(float[N]) s, optional(int64[N]) o", "float y", "y = Mul(x, w)", defaults="<float w = {2.0}>"
        )
        model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, []))
        found = check_inputs(model, {"x": 1.5, "s": [np.ones(2), np.ones(1, np.float32)]})
        assert [part.dtype for part in found["s"]] == [np.float32] * 2
        assert found["o"] is None
        assert "w" not in found
        found = check_inputs(model, {"x": 1.5, "s": (), "o": np.arange(2, dtype=np.int32), "w": np.float32(1)})
        assert found["o"].dtype == np.int64
        assert check_inputs(model, {"x": 1.5, "s": [], "o": None})["o"] is None
        with pytest.raises(ArgumentError, match=r"'s' is a sequence \(seq\(tensor\(float\)\)\)"):
            check_inputs(model, {"x": 1.5, "s": np.ones((2, 2))})
        with pytest.raises(ArgumentError, match=r"'s\[1\]' must be float32"):
            check_inputs(model, {"x": 1.5, "s": [np.ones(1), np.array([1])]})


class TestRandomInputs:
    def test_same_seed_same_numbers_and_independent_of_other_inputs(self):
        two = graph("float[B, 4] x, float[B, 4] y", "float[B, 4] z", "z = Add(x, y)")
        one = graph("float[B, 4] y", "float[B, 4] z", "z = Neg(y)")
        first, again, other = random_inputs(two), random_inputs(two), random_inputs(two, seed=1)
        np.testing.assert_array_equal(first["x"], again["x"])
        assert not np.array_equal(first["x"], first["y"])
        assert not np.array_equal(first["x"], other["x"])
        np.testing.assert_array_equal(random_inputs(one)["y"], first["y"])
        with pytest.raises(ArgumentError, match="seed"):
            random_inputs(one, seed=-1)

    @pytest.mark.parametrize("one", ["value = float {1.0}", "value_float = 1.0", "value_floats = [1.0]"])
    def test_what_is_subtracted_from_one_is_a_mask(self, one):
        body = f"one = Constant <{one}> () c = Cast <to = 1> (a) k = Sub (one, c) y = Mul (x, k)"
        mask = random_inputs(graph("float16[64] a, float[64] x", "float[64] y", body))["a"]
        assert set(mask.tolist()) == {0.0, 1.0}

    def test_names_tell_lengths_and_factors(self):
        model = graph(
            "float[B, 80, T] x, int64[B] x_lens, int64[B, T] text_length, float[3] scales, float length_scale",
            "float[B, 80, T] y", "y = Neg(x)",
        )  # fmt: skip
        found = random_inputs(model, dims={"B": 2, "T": 5})
        np.testing.assert_array_equal(found["x_lens"], [5, 5])
        assert set(found["text_length"].ravel().tolist()) <= {0, 1}  # a matrix of something else
        factors = np.append(found["scales"], found["length_scale"])
        assert (np.abs(factors - 1) <= 0.5).all()
        assert len(set(factors.tolist())) == 4

    def test_names_tell_sizes_of_images_timesteps_and_padding(self):
        model = graph(
            "float[N, 3, 32, 64] images, int64[N, 2] orig_target_sizes, float[N, 2] im_shape, int64[N] timestep,"
            "bool[N, 8] src_key_padding_mask", "float[N, 3, 32, 64] y", "y = Neg(images)",
        )  # fmt: skip
        found = random_inputs(model, dims={"N": 16})
        for name in ("orig_target_sizes", "im_shape"):
            assert (found[name] == [32, 64]).all()
        assert 500 < found["timestep"].max() < 1000
        padded = found["src_key_padding_mask"]
        assert padded.any()
        assert not padded.all(axis=1).any()  # PyTorch masks where it is True

    def test_dimensions(self):
        model = graph(
            "float[batch, 3, h, w] x, float[2, batch, k] state, float[seq] flat, float[h] row, float s,"
            "float[A, 1] mix, float[batch, past] p, float[2, B] q", "float[K] y", "y = Neg(flat)",
        )  # fmt: skip
        model.graph.input[5].type.tensor_type.shape.dim[0].dim_param = "past + seq"
        model.graph.input[7].type.tensor_type.shape.dim[1].dim_param = "past + 1"
        model.graph.input.append(helper.make_tensor_value_info("rankless", TensorProto.FLOAT, None))
        model.graph.input.append(helper.make_tensor_value_info("nameless", TensorProto.FLOAT, [None, None, -1]))
        shapes = {name: x.shape for name, x in random_inputs(model).items()}
        assert shapes == {
            "x": (1, 3, 8, 8), "state": (2, 1, 8), "flat": (1,), "row": (8,), "s": (), "mix": (9, 1), "p": (1, 8),
            "q": (2, 9), "rankless": (1, 8), "nameless": (1, 8, 8),
        }  # fmt: skip
        shapes = {name: x.shape for name, x in random_inputs(model, dims={"batch": 3, "past": 0}).items()}
        assert (shapes["state"], shapes["mix"], shapes["p"]) == ((2, 3, 8), (1, 1), (3, 0))
        with pytest.raises(ArgumentError, match=r"no dimension 'n'; they have 'batch', 'h', 'k', 'nameless\[0\]'"):
            random_inputs(model, dims={"n": 3})
        for size in (-1, 1.5, True):
            with pytest.raises(ArgumentError, match="'batch' cannot have the size"):
                random_inputs(model, dims={"batch": size})

    def test_indices_stay_in_their_tables(self):
        model = graph(
            "int64[B, S] ids, int32[B, S] kinds, float[B, S] rough, int64[B, 2] nd, int64[B, S] el, int64[N] free,"
            "bool c",
            "float[B, S, 4] y, float[B] z, float[B, S] e, float[N] f, float[B, S, 4] r",
            """u = Unsqueeze(ids, one) q = Squeeze(u, one)
               a = If (c) <then_branch = t () => (float[B, S, 4] g) { g = Gather(table, q) },
                           else_branch = e () => (float[B, S, 4] k) { k = Gather(table, ids) }>
               w = Cast <to = 7>(kinds) b = Gather(few, w) y = Add(a, b)
               h = Cast <to = 1>(half) i = Cast <to = 7>(rough) r = Gather(h, i) z = GatherND(square, nd)
               e = GatherElements <axis = 1>(square, el) f = Gather(any, free) any = acme.Op(c)""",
            defaults="<int64[1] one = {1}>", extra=', "acme": 1',
        )  # fmt: skip
        tables = {"table": (50, 4), "few": (3, 4), "half": (7, 4), "square": (9, 6)}
        for name, shape in tables.items():
            table = np.zeros(shape, np.float16 if name == "half" else np.float32)
            model.graph.initializer.append(numpy_helper.from_array(table, name))
        found = random_inputs(model, dims={"B": 40, "S": 20})
        largest = {name: int(x.max()) for name, x in found.items()}
        assert largest == {"ids": 49, "kinds": 2, "rough": 6, "nd": 5, "el": 5, "free": 0, "c": found["c"]}
        assert found["rough"].dtype == np.float32
        assert np.array_equal(found["rough"], np.floor(found["rough"]))
        assert all(x.min() == 0 for name, x in found.items() if name != "c")

    def test_places_and_divisors_fit(self):
        model = graph(
            "float[3, 4, 8, 8] x, float[40, 4] boxes, int64[40] image, float[5, 6] s, int64[5, 40] el, float[5, 40] u,"
            "int64[40, 2] nd, float[40] v, int64[40] by, float[1, 64, 1] wave, int64 step",
            "float[40, 4, 1, 1] y, float[5, 6] e, float[5, 6] f, int64[40] q, float[1, F, T, 2] t",
            """y = RoiAlign (x, boxes, image) e = ScatterElements <axis = 1> (s, el, u) f = ScatterND (s, nd, v)
               q = Div (by, by) t = STFT (wave, step, , sixteen)""",
            defaults="<int64 sixteen = {16}>", opset=17,
        )  # fmt: skip
        found = random_inputs(model)
        largest = {name: int(found[name].max()) for name in ("image", "el", "nd")}
        assert largest == {"image": 2, "el": 5, "nd": 4}
        assert (found["by"].min(), found["by"].max(), found["step"] > 0) == (1, 4, True)

    @pytest.mark.parametrize(("kind", "lowest"), [("float", -3.4028234663852886e38), ("float16", -65504)])
    def test_masks_that_are_added_to_scores(self, kind, lowest):
        """Of three rows, one is masked in part, one not at all, and one as a whole."""
        body = "t = Add (s, m) y = Softmax (t)"
        found = random_inputs(graph(f"{kind}[2, 4, 8] s, {kind}[4, 8] m", f"{kind}[2, 4, 8] y", body))["m"]
        assert set(found.ravel().tolist()) == {0, lowest}
        assert [len(set(row.tolist())) for row in found[:3]] == [2, 1, 1]
        assert (found[1, 0], found[2, 0]) == (0, lowest)

    def test_no_row_is_masked_as_a_whole_by_infinity(self):
        """It would be NaN, and so would all that reads it."""
        body = "c = Cast <to = 9> (mask) t = Where (c, s, low) y = Softmax (t)"
        model = graph("int64[4, 8] mask, float[4, 8] s", "float[4, 8] y", body, defaults="<float low = {-inf}>")
        assert (random_inputs(model)["mask"][:, 0] == 1).all()

    def test_masks_positions_and_sizes(self):
        model = graph(
            "int64[B, S] attention_mask, int64[B, S] hidden, float[B, S] keep, int64[B, S] position_ids,"
            "int64[B, S] position_plain, int64[2] shape, int64 trips, int64 limit, int64[B, S] other,"
            "uint8[B, S] image, bool[B, S] flags, int64 mask_scalar",
            "float[B, S] y, int64[N] r",
            """one = Constant <value = float {1.0}>() m = Cast <to = 1>(hidden) y = Sub(one, m)
               k = Cast <to = 9>(keep) p = Gather(table, position_ids)
               e = Expand(one, shape) start = Constant <value_int = 0>() step = Constant <value_int = 1>()
               r = Range(start, limit, step) go = Constant <value = bool {1}>()
               s = Loop (trips, go, one) <body = b (int64 i, bool c, float v) => (bool d, float w)
                   { d = Identity(c) w = Neg(v) }>""",
            defaults="<float[4] table = {0, 0, 0, 0}>",
        )  # fmt: skip
        found = random_inputs(model, dims={"B": 20, "S": 10})
        for name in ("attention_mask", "hidden", "keep"):
            rows = found[name]
            assert set(rows.ravel().tolist()) == {0, 1}
            assert (rows[1] == 1).all(), "a row of which nothing is masked"
            assert (rows[:, 0] == 1).all(), "and none of which all is: rows are those of sequences"
            assert (np.diff(rows.astype(int), axis=1) <= 0).all(), "ones come first"
        assert found["mask_scalar"] == 1
        assert found["position_ids"][3].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
        assert found["position_plain"][3].tolist() == list(range(10))
        for name in ("shape", "trips", "limit"):
            assert 1 <= found[name].min() <= found[name].max() <= 4
        assert set(found["other"].ravel().tolist()) == {0, 1}
        assert found["image"].max() > 100
        assert set(found["flags"].ravel().tolist()) == {False, True}

    def test_indices_through_loops_and_scans(self):
        model = graph(
            "int64[S] rows, int64[S] state, int64 n", "int64[S] last, float[K, S] all, float[S] z, float[S] w",
            """go = Constant <value = bool {1}>()
               last, all = Loop (n, go, state) <body = b (int64 i, bool c, int64[S] v)
                   => (bool d, int64[S] x, float[S] g) { d = Identity(c) x = Identity(v) g = Gather(table, v) }>
               z = Scan (rows) <num_scan_inputs = 1, body = s (int64 r) => (float t) { t = Gather(wide, r) }>
               w = Gather(narrow, last)""",
            defaults="<float[5] table = {0, 0, 0, 0, 0},"
            " float[6] wide = {0, 0, 0, 0, 0, 0}, float[3] narrow = {0, 0, 0}>",
        )  # fmt: skip
        found = random_inputs(model, dims={"S": 100})
        assert (found["rows"].max(), found["state"].max()) == (5, 2), "the carried state comes out and is used again"
        assert run(make_session(model), found)["w"].shape == (100,)

    def test_a_mask_with_a_row_for_each_query_keeps_nothing_of_one(self):
        text = "float[1, Q, 8] scores, int64[1, Q, 8] mask", "bool[1, Q, 8] y", "y = Cast <to = 9> (mask)"
        found = random_inputs(graph(*text), dims={"Q": 20})
        assert np.flatnonzero(found["mask"][0, :, 0] == 0).tolist() == [2]

    def test_contrib_embedding(self):
        model = graph(
            "int32[B, S] ids, int32[B, S] segments, int32[B, S] m", "float[B, S, 4] y, int32[B] i",
            "y, i = com.microsoft.EmbedLayerNormalization(ids, segments, words, places, kinds, gamma, beta, m)",
            extra=', "com.microsoft": 1',
        )  # fmt: skip
        for name, shape in {"words": (30, 4), "places": (12, 4), "kinds": (2, 4), "gamma": (4,), "beta": (4,)}.items():
            model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
        found = random_inputs(model, dims={"B": 20, "S": 10})
        assert (found["ids"].max(), found["segments"].max(), found["m"].max()) == (29, 1, 1)
        assert (found["m"][:, 0] == 1).all(), "no sequence is padding alone"
        assert run(make_session(model), found)["y"].shape == (20, 10, 4)

    def test_types(self):
        model = graph(
            "string[2] t, bfloat16[B, 3] l, double d, seq(float[B, 3]) s, optional(int64[B]) o, float w",
            "double y", "y = Neg(d)", defaults="<float w = {1.0}>",
        )  # fmt: skip
        found = random_inputs(model)
        assert found["t"].tolist() == ["a", "a"]
        assert (found["l"].dtype, found["d"].dtype, found["d"].shape) == (ml_dtypes.bfloat16, np.float64, ())
        assert [part.shape for part in found["s"]] == [(1, 3), (1, 3)]
        assert not np.array_equal(*found["s"])
        assert found["o"].tolist() in ([0], [1])
        assert "w" not in found, "it has a default"
        sparse = helper.make_sparse_tensor_value_info("q", TensorProto.FLOAT, [2])
        model.graph.input.append(sparse)
        with pytest.raises(ArgumentError, match="Cannot generate input 'q'"):
            random_inputs(model)


SAID = {
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Reshape node. Name:'r' Status Message:"
    " /onnxruntime_src/onnxruntime/core/providers/cpu/tensor/reshape_helper.h:91 onnxruntime::ReshapeHelper::"
    "ReshapeHelper(const onnxruntime::TensorShape&, onnxruntime::TensorShapeVector&, bool) a == b was false. "
    "The input tensor cannot be reshaped. Input shape:{2,3}":
    "Non-zero status code returned while running Reshape node. Name:'r' Status Message: The input tensor cannot be"
    " reshaped. Input shape:{2,3}",
    "/onnxruntime_src/onnxruntime/core/providers/common.h:31 int64_t onnxruntime::HandleNegativeAxis(int64_t, int64_t)"
    " IsAxisInRange(axis, rank) was false.": "IsAxisInRange(axis, rank) was false",
    "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:359 void* onnxruntime::BFCArena::AllocateRawInternal("
    "size_t, bool, onnxruntime::Stream*, bool, onnxruntime::WaitNotificationFn) Failed to allocate memory":
    "Failed to allocate memory",
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:129 std::conditional_t<THRW, void, onnxruntime::"
    "common::Status> onnxruntime::CudaCall(ERRTYPE, const char*, int) [with ERRTYPE = cudaError; bool THRW = true]"
    " CUDA failure 2: out of memory": "CUDA failure 2: out of memory",
    "[ONNXRuntimeError] : 1 : FAIL : Status Message: matmul_helper.h:59 Compute MatMul dimension mismatch":
    "Status Message: MatMul dimension mismatch",
    "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : invalid expand shape": "invalid expand shape",
}  # fmt: skip


class Failing:
    """A session that fails with a message of ONNX Runtime's."""

    def __init__(self, said):
        self.said = said

    def get_outputs(self):
        return []

    def run(self, names, feeds, options):
        raise RuntimeError(self.said)


@pytest.mark.parametrize(("said", "told"), SAID.items(), ids=range(len(SAID)))
def test_where_in_its_sources_the_runtime_failed_is_left_out(said, told):
    with pytest.raises(RuntimeFailure) as caught:
        run(Failing(said), {})
    assert str(caught.value) == f"ONNX Runtime could not run the model (): {told}."


def test_no_source_is_named_where_a_reshape_fails():
    model = graph("float[2,3] x, int64[k] s", "float[a,b] y", "y = Reshape(x, s)")
    with pytest.raises(RuntimeFailure, match=r"Input shape:\{2,3\}") as caught:
        run(make_session(model), {"x": np.ones((2, 3), np.float32), "s": np.array([4, 4])})
    assert "onnxruntime::" not in str(caught.value)
    assert ".h:" not in str(caught.value)
