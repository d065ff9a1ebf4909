"""Samples of inputs: what is read, in which order, how lazily; and what hostile files cannot do."""

import base64
import json
import os
import signal
import sys
import tempfile
import tracemalloc
import zipfile
from io import BytesIO
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as graphsurgeon
import pytest
from graphs.case import parse
from onnx import parser

import onnxamp
from onnxamp._base.errors import ArgumentError, ArgumentTypeError, OutputError
from onnxamp._graph.graph import Graph
from onnxamp._runtime.inputs.domains import moved_into_range
from onnxamp._runtime.inputs.random_inputs import random_inputs
from onnxamp._runtime.inputs.sample_files import Spool, json_samples
from onnxamp._runtime.inputs.samples import Samples, as_samples, load_samples, random_samples
from onnxamp._runtime.sessions.values import check_inputs

ENCODER = Path(__file__).parents[2] / "models" / "encoder.onnx"
CLASSIFIER = ENCODER.with_name("classifier.onnx")


def npy(array):
    stream = BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def encoded(array):
    """As Polygraphy writes arrays since 0.34."""
    return {"array": base64.b64encode(npy(array)).decode(), "polygraphy_class": "ndarray"}


def marked(text):
    """As Polygraphy wrote them before."""
    return {"array": text, "__polygraphy_encoded_ndarray": "polygraphy_serialized_json_type"}


def header(shape, dtype="<f4"):
    """An ``.npy`` file that claims a shape and holds four bytes."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + b"\0" * 4


def archive(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=4), encoding="utf-8")
    return path


def swollen(data: bytes) -> bytes:
    """An archive whose directory says of its last member that it unpacks to 2 GB."""
    entry = data.rindex(b"PK\x01\x02")
    return data[: entry + 24] + (2**31).to_bytes(4, "little") + data[entry + 28 :]


def refusal(path):
    """The message with which a file is refused; it names the file in one line that a terminal can show."""
    with pytest.raises(ArgumentError) as caught:
        list(load_samples(path))
    text = str(caught.value)
    assert text.isprintable()
    assert path.name in text or repr(str(path)) in text
    return text


class TestFiles:
    def test_one_archive_is_one_sample(self, tmp_path):
        path = tmp_path / "in.npz"
        np.savez(path, a=np.arange(3), b=np.ones((1, 2), ml_dtypes.bfloat16), s=np.array(["x", "yz"]))
        samples = load_samples(path)
        assert len(samples) == 1
        assert samples.description == f"1 sample of {path}"
        assert samples[0]["a"].tolist() == [0, 1, 2]
        assert samples[0]["s"].tolist() == ["x", "yz"]
        model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (bfloat16[1,2] b) => () {}')
        assert check_inputs(model, {"b": samples[0]["b"]})["b"].dtype == ml_dtypes.bfloat16

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_archives_give_back_what_was_saved(self, save, tmp_path):
        arrays = {
            "scalar": np.array(2.5),
            "none": np.zeros((0, 3), np.float32),
            "fortran": np.asfortranarray(np.arange(6, dtype=np.int8).reshape(2, 3)),
            "big": np.arange(4, dtype=">i4"),
            "a/b": np.array([True]),
        }
        save(tmp_path / "in.npz", **arrays)
        (found,) = load_samples(tmp_path / "in.npz")
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)

    def test_an_archive_of_any_name(self, tmp_path):
        np.savez(tmp_path / "in.npz", a=np.arange(3))
        (tmp_path / "in.npz").rename(tmp_path / "in.data")
        assert load_samples(str(tmp_path / "in.data"))[0]["a"].tolist() == [0, 1, 2]

    def test_a_folder_in_natural_order(self, tmp_path):
        for name in ("s10", "s9", "s010", "t1", "S1"):
            np.savez(tmp_path / f"{name}.npz", name=np.array(name))
        write(tmp_path / "s11.json", {"name": "s11"})
        (tmp_path / "notes.txt").write_text("no sample")
        (tmp_path / "sub.npz").mkdir()
        samples = load_samples(tmp_path)
        assert [str(sample["name"]) for sample in samples] == ["S1", "s9", "s010", "s10", "s11", "t1"]
        assert len(samples) == 6
        assert samples.description == f"6 samples of {tmp_path}"

    def test_samples_are_read_when_they_are_asked_for(self, tmp_path):
        for index in range(3):
            np.savez(tmp_path / f"{index}.npz", x=np.full(2**20, index, np.float32))
        (tmp_path / "3.npz").write_bytes(b"broken")
        tracemalloc.start()
        samples = load_samples(tmp_path)
        firsts = []
        for _, sample in zip(range(3), samples, strict=False):
            firsts.append(sample["x"][0])
            del sample
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert firsts == [0, 1, 2]
        assert peak < 2.5 * 2**22
        assert samples[1]["x"][0] == 1
        with pytest.raises(ArgumentError, match=r"3\.npz"):
            list(samples)

    def test_samples_can_be_iterated_again(self, tmp_path):
        np.savez(tmp_path / "0.npz", x=np.arange(2))
        samples = load_samples(tmp_path)
        assert [sample["x"].tolist() for sample in samples] == [sample["x"].tolist() for sample in samples] == [[0, 1]]

    def test_nothing_there(self, tmp_path):
        assert "there is no such file" in refusal(tmp_path / "none.npz")
        assert "no .npz or .json file" in refusal(tmp_path)
        (tmp_path / "empty.npz").touch()
        refusal(tmp_path / "empty.npz")
        (tmp_path / "empty.json").touch()
        refusal(tmp_path / "empty.json")
        np.save(tmp_path / "one.npy", np.ones(2))
        assert "one array without a name" in refusal(tmp_path / "one.npy")

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
    def test_a_pipe_does_not_block(self, tmp_path):
        os.mkfifo(tmp_path / "in.npz")
        assert "neither a file nor a folder" in refusal(tmp_path / "in.npz")
        assert "no .npz or .json file" in refusal(tmp_path)


class TestJson:
    SAMPLES = (
        {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3)},
        {"x": np.ones((2, 3), np.float16), "n": np.array(4)},
    )

    def check(self, path):
        samples = load_samples(path)
        assert len(samples) == 2
        for found, wanted in zip(samples, self.SAMPLES, strict=True):
            assert list(found) == ["x", "n"]
            for name in found:
                assert found[name].dtype == wanted[name].dtype
                np.testing.assert_array_equal(found[name], wanted[name])

    def test_polygraphy(self, tmp_path):
        content = [{name: encoded(array) for name, array in sample.items()} for sample in self.SAMPLES]
        self.check(write(tmp_path / "in.json", content))
        self.check(write(tmp_path / "dense", json.dumps(content, separators=(",", ":"))))

    def test_a_file_that_polygraphy_wrote(self, tmp_path):
        """Byte by byte what polygraphy 0.53.6 saves for [{"x": float32 [[1, 2]]}]."""
        text = (
            '[\n    {\n        "x": {\n            "array": "k05VTVBZAQB2AHsnZGVzY3InOiAnPGY0JywgJ2ZvcnRyYW5fb3JkZXInO'
            "iBGYWxzZSwgJ3NoYXBlJzogKDEsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIC"
            'AgICAgIAoAAIA/AAAAQA==",\n            "polygraphy_class": "ndarray"\n        }\n    }\n]'
        )
        (found,) = load_samples(write(tmp_path / "in.json", text))
        assert found["x"].dtype == np.float32
        assert found["x"].tolist() == [[1, 2]]

    def test_older_polygraphy(self, tmp_path):
        zipped = BytesIO()
        np.savez(zipped, self.SAMPLES[1]["x"])
        content = [
            {"x": marked(npy(self.SAMPLES[0]["x"]).decode("latin-1")), "n": marked(encoded(np.array(3))["array"])},
            {"x": marked(zipped.getvalue().decode("latin-1")), "n": encoded(np.array(4))},
        ]
        self.check(write(tmp_path / "in.json", content))

    def test_a_folder_of_polygraphy(self, tmp_path):
        for index, sample in enumerate(self.SAMPLES):
            content = {name: encoded(array) for name, array in sample.items()}
            write(tmp_path / f"{index:010}.json", content if index else [content])
        self.check(tmp_path)
        write(tmp_path / "2.json", [content, content])
        assert "2.json holds 2 samples" in refusal(tmp_path)

    def test_nested_lists(self, tmp_path):
        content = {
            "f": [[1, 2.5], [-1, 0.1]],
            "i": [1, 2],
            "b": [True],
            "s": ["a", "]{"],
            "e": [],
            "one": 3,
            "d": [1e39],
        }
        (found,) = load_samples(write(tmp_path / "in.json", content))
        kinds = {"f": "f4", "i": "i8", "b": "?", "e": "f4", "one": "i8", "d": "f8"}
        assert {name: found[name].dtype for name in kinds} == {name: np.dtype(kind) for name, kind in kinds.items()}
        assert found["f"].tolist() == np.float32([[1, 2.5], [-1, 0.1]]).tolist()
        assert found["s"].tolist() == ["a", "]{"]
        assert found["one"].shape == ()
        model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[2,2] f) => () {}')
        assert check_inputs(model, {"f": found["f"]})["f"].dtype == np.float32

    def test_names_and_strings_of_any_kind(self, tmp_path):
        name = 'a"]}\\\n\u00e9\u4e16' + "\\" * 7
        text = "\ufeff " + json.dumps([{name: ["{", '"', "\\"]}] * 2, ensure_ascii=False) + "\n"
        samples = load_samples(write(tmp_path / "in.json", text))
        assert [list(sample) for sample in samples] == [[name], [name]]

    def test_only_one_sample_is_in_memory(self, tmp_path):
        with (tmp_path / "in.json").open("w") as file:
            for index in range(8):
                file.write(f"{',' if index else '['}{json.dumps({'x': encoded(np.full(2**18, index, np.float32))})}")
            file.write("]")
        samples = load_samples(tmp_path / "in.json")
        tracemalloc.start()
        assert [sample["x"][0] for sample in samples] == list(range(8))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 0.75 * (tmp_path / "in.json").stat().st_size

    @pytest.mark.parametrize(
        "text",
        [
            "", " ", "[]", "3", '"x"', "[[1, 2]]", '[{"x": [1]}', '{"x": [1]', '{"x": [1]} {"x": [2]}', '{"x": "a',
            '[{"x": [1]} {"x": [2]}]', '[1, {"x": [1]}]', '[{"x": [1]}] 2', '{"x": [1]}]', '["x": {}]', "}{", "][",
            '[{"x": [1]},]', '[{"x": [1}]]', '{"x" [1]}', "{'x': [1]}", '{"x": [1], "x": [2]}', '{"x": [01]}',
            '{"x": [1' + "0" * 5000 + "]}",
        ],
    )  # fmt: skip
    def test_what_is_no_list_of_objects(self, tmp_path, text):
        assert "Inputs are .npz files, or JSON: a list of objects" in refusal(write(tmp_path / "in.json", text))

    @pytest.mark.parametrize(
        "content",
        [[[1, 2], [3]], [1, None], None, [[1], 2], [{"a": 1}], {}, {"a": [1]}, [10**30], {"array": [1]},
         {"array": "", "polygraphy_class": "ndarray"}, {"array": "x", "polygraphy_class": "DeviceView"},
         {"array": "\u4e16", "polygraphy_class": "ndarray"}, {"array": "AAAA", "polygraphy_class": "ndarray"}],
    )  # fmt: skip
    def test_what_is_no_array(self, tmp_path, content):
        text = refusal(write(tmp_path / "in.json", [{"x": content}]))
        assert "Cannot read the array 'x'" in text
        assert text.endswith("Save it again as a plain array.")

    def test_other_files_of_polygraphy(self, tmp_path):
        results = {"lst": [["runner", []]], "polygraphy_class": "RunResults"}
        assert "'RunResults'" in refusal(write(tmp_path / "in.json", results))
        old = {"lst": [], "__polygraphy_encoded_RunResults": "polygraphy_serialized_json_type"}
        assert "'RunResults'" in refusal(write(tmp_path / "in.json", old))
        tensor = [{"x": {"tensor": "gAI=", "polygraphy_class": "Tensor"}}]
        assert "PyTorch" in refusal(write(tmp_path / "in.json", tensor))

    def test_bytes_that_are_no_text(self, tmp_path):
        (tmp_path / "in.json").write_bytes(b'{"x\xff": [1]}')
        refusal(tmp_path / "in.json")
        (tmp_path / "in.json").write_bytes('{"x": [1]}'.encode("utf-16"))
        refusal(tmp_path / "in.json")


class TestHostileFiles:
    def test_pickles_are_not_read(self, tmp_path):
        class Boom:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        pickled = np.array([Boom()], object)
        np.savez(tmp_path / "in.npz", good=np.ones(2), bad=pickled)
        assert "the array 'bad'" in refusal(tmp_path / "in.npz")
        assert "Python objects" in refusal(write(tmp_path / "in.json", {"bad": encoded(pickled)}))
        assert not (tmp_path / "executed").exists()

    @pytest.mark.slow
    def test_every_cut_is_noticed(self, tmp_path):
        np.savez_compressed(tmp_path / "full.npz", a=np.arange(40), b=np.ones(3))
        write(tmp_path / "full.json", [{"x": encoded(np.arange(3))}, {"y": [1, 2]}])
        for name in ("full.npz", "full.json"):
            data = (tmp_path / name).read_bytes()
            cut = tmp_path / f"cut{(tmp_path / name).suffix}"
            for length in range(len(data)):
                cut.write_bytes(data[:length])
                refusal(cut)

    def test_every_flipped_byte_is_refused_or_harmless(self, tmp_path):
        """zipfile, zlib and NumPy raise a dozen types of errors for them: all become ArgumentError."""
        np.savez_compressed(tmp_path / "in.npz", a=np.arange(20))
        data = (tmp_path / "in.npz").read_bytes()
        refused = 0
        for position in range(len(data)):
            broken = bytearray(data)
            broken[position] ^= 0xFF
            (tmp_path / "in.npz").write_bytes(broken)
            try:
                found = load_samples(tmp_path / "in.npz")[0]
            except ArgumentError:
                refused += 1
            else:
                assert all(array.tolist() == list(range(20)) for array in found.values())
        assert refused > len(data) / 2

    @pytest.mark.parametrize(
        "data",
        [
            header("(1000000000000,)"), header("(2,)"), header("(-1,)"), header("(99999999999999999999999, 0)"),
            header("(1,)", "<U999999999"), header("(1,)", "|O"), header("(" * 400 + ")" * 400), header("(True, 9)"),
            header("({},)"), header("(1,)", "x"), b"\x93NUMPY\x09\x00", b"\x93NUMPY", b"plain text", b"",
            b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535,
        ],
    )  # fmt: skip
    def test_claims_are_held_against_what_is_there(self, tmp_path, data):
        tracemalloc.start()
        assert "the array 'x'" in refusal(archive(tmp_path / "in.npz", [("x.npy", data)]))
        array = {"array": base64.b64encode(data).decode(), "polygraphy_class": "ndarray"}
        assert "the array 'x'" in refusal(write(tmp_path / "in.json", {"x": array}))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**24

    def test_headers_that_are_true(self, tmp_path):
        archive(tmp_path / "in.npz", [("x.npy", header("(1,)")), ("y", header("(0, 10)"))])
        (found,) = load_samples(tmp_path / "in.npz")
        assert found["x"].tolist() == [0]
        assert found["y"].shape == (0, 10)

    def test_bombs(self, tmp_path):
        """Archives that say that they grow to more than a gigabyte."""
        zeros = np.zeros(2**16, np.float32)
        np.savez_compressed(tmp_path / "in.npz", x=zeros)
        assert load_samples(tmp_path / "in.npz")[0]["x"].size == 2**16
        (tmp_path / "in.npz").write_bytes(swollen((tmp_path / "in.npz").read_bytes()))
        assert "hostile" in refusal(tmp_path / "in.npz")
        data = swollen(archive(tmp_path / "in.zip", [("x.npy", npy(zeros))], zipfile.ZIP_LZMA).read_bytes())
        array = {"array": base64.b64encode(data).decode(), "polygraphy_class": "ndarray"}
        assert "not of one plain array" in refusal(write(tmp_path / "in.json", {"x": array}))

    def test_two_arrays_of_one_name(self, tmp_path):
        refusal(archive(tmp_path / "in.npz", [("x.npy", header("(1,)")), ("x", header("(1,)"))]))

    @pytest.mark.parametrize("name", ["../../x", "\x1b[31mred", "/etc/passwd", "a\\b", "x\u202ey"])
    def test_names_are_only_names(self, tmp_path, name):
        archive(tmp_path / "in.npz", [(f"{name}.npy", header("(1,)"))])
        assert list(load_samples(tmp_path / "in.npz")[0]) == [name]
        refusal(archive(tmp_path / "in.npz", [(f"{name}.npy", b"bad")]))
        refusal(write(tmp_path / "in.json", {name: None}))
        refusal(write(tmp_path / "in.json", f'{{"\\ud800": [1], {json.dumps(name)}: [[1], 2]}}'))

    @pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
    def test_file_names_do_not_reach_the_terminal(self, tmp_path):
        (tmp_path / "\x1b[31m.npz").write_bytes(b"broken")
        with pytest.raises(ArgumentError) as caught:
            list(load_samples(tmp_path))
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("text", ["[" * 10_000 + "]" * 10_000, '{"x":' * 10_000 + "1" + "}" * 10_000, "[" * 10_000])
    def test_deep_nesting(self, tmp_path, text):
        refusal(write(tmp_path / "in.json", text))
        refusal(write(tmp_path / "in.json", f'[{{"x": {text}}}]'))

    def test_many_escapes_take_linear_time(self, tmp_path):
        write(tmp_path / "in.json", '{"' + '\\"' * 300_000 + '": [1], "' + "\\\\" * 300_000)
        with pytest.raises(ArgumentError, match="Unterminated string"):
            json_samples(tmp_path / "in.json")


class TestRandomSamples:
    @pytest.fixture
    def model(self):
        text = '<ir_version: 8, opset_import: ["": 18]> g (float[N, M] x, int64[N] i) => (float[N, M] y) { y = Neg(x) }'
        return parser.parse_model(text)

    @staticmethod
    def assert_equal(found, wanted):
        assert list(found) == list(wanted)
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])

    def test_the_first_is_what_it_always_was(self, model):
        for seed in (0, 7):
            samples = random_samples(model, 3, seed=seed, dims={"M": 5})
            self.assert_equal(samples[0], random_inputs(model, seed=seed, dims={"M": 5}))
            assert len(samples) == 3

    def test_all_differ_and_none_depends_on_the_count(self, model):
        few, many = random_samples(model, 2), random_samples(model, 5)
        for one, other in zip(few, many, strict=False):
            self.assert_equal(one, other)
        for one, other in zip(many, many, strict=True):
            self.assert_equal(one, other)
        found = [
            *(sample["x"].tobytes() for sample in many),
            *(s["x"].tobytes() for s in random_samples(model, 5, seed=1)),
        ]
        assert len(set(found)) == 10

    def test_the_model_is_looked_at_once(self, model, monkeypatch):
        looked, resolve = [], Graph.of
        monkeypatch.setattr(Graph, "of", lambda proto: looked.append(proto) or resolve(proto))
        assert len(list(random_samples(model, 4))) == 4
        assert len(looked) == 1

    def test_descriptions(self, model):
        assert random_samples(model).description == "random inputs (seed 0)"
        assert random_samples(model, 3, seed=2).description == "random inputs (3 samples, seed 2)"

    def test_what_cannot_be(self, model):
        with pytest.raises(ArgumentError, match="at least 1"):
            random_samples(model, 0)
        with pytest.raises(ArgumentError, match="negative"):
            random_samples(model, 2, seed=-1)
        with pytest.raises(ArgumentError, match="'Q'"):
            list(random_samples(model, 2, dims={"Q": 1}))


def one_sample():
    return dict(random_inputs(onnx.load(ENCODER), seed=0))


@pytest.mark.parametrize(
    ("given", "lengths"),
    {
        "nothing": (lambda folder: None, 3),
        "a dict of arrays": (lambda folder: one_sample(), 1),
        "a list of dicts": (lambda folder: [one_sample(), one_sample()], 2),
        "a generator": (lambda folder: (one_sample() for _ in range(2)), 2),
        "Samples": (lambda folder: random_samples(ENCODER, 2), 2),
        "a file": (lambda folder: folder / "0.npz", 1),
        "the name of a file": (lambda folder: str(folder / "0.npz"), 1),
        "a folder": (lambda folder: folder, 2),
        "a JSON file": (lambda folder: write(folder / "x.txt", {"x": [1]}), 1),
    }.values(),
)
def test_samples_are_whatever_holds_arrays_by_name(tmp_path, given, lengths):
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", **one_sample())
    assert len(as_samples(given(tmp_path), ENCODER, count=3)) == lengths


def test_given_arrays_come_back_as_they_are():
    sample = one_sample()
    for samples in (as_samples(sample, ENCODER), as_samples([sample], ENCODER)):
        for _ in range(2):
            assert all(found is sample[name] for name, found in samples[0].items())
        assert not samples.made_up


@pytest.mark.parametrize("wrong", [3, b"data.npz", np.zeros(3), [np.zeros(3)], [{}, "x"], object()])
def test_other_types_of_samples_are_refused_with_what_is_accepted(wrong):
    for use in (lambda: as_samples(wrong, ENCODER), lambda: onnxamp.check_run(ENCODER, wrong)):
        with pytest.raises(ArgumentTypeError, match=r"samples must be .*path.* dict of arrays .* iterable"):
            use()


class Tensor:
    """What frameworks have: one of PyTorch that needs a gradient has no array until it is detached."""

    def __init__(self, array, detached=False):
        self.array, self.detached = array, detached

    def detach(self):
        return Tensor(self.array, True)

    def cpu(self):
        return self

    def numpy(self):
        assert self.detached
        if self.array.dtype == np.float64:  # stands for a type that NumPy does not know
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array

    def float(self):
        return Tensor(self.array.astype(np.float32), True)


def two_inputs():
    """(inputs by name, a label)"""
    names = [entry.name for entry in onnx.load(ENCODER).graph.input]
    sample = one_sample()
    return {name: sample[name] for name in names}, np.zeros(1)


def loaders():
    """What people have: loaders yield batches in several forms, with labels behind them."""
    feeds, label = two_inputs()
    arrays = list(feeds.values())
    return {
        "dicts of tensors": [{name: Tensor(array) for name, array in feeds.items()}],
        "tuples": [tuple(arrays)],
        "lists of tensors": [[Tensor(array) for array in arrays]],
        "with labels": [(*arrays, label)],
        "a generator": (tuple(arrays) for _ in range(1)),
        "a loader": type("Loader", (), {"__iter__": lambda _: iter([[*map(Tensor, arrays), Tensor(label)]])})(),
    }


@pytest.mark.parametrize("form", list(loaders()))
def test_what_loaders_yield(form):
    samples = as_samples(loaders()[form], ENCODER)
    assert len(samples) == 1
    found, wanted = samples[0], two_inputs()[0]
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert ("without the last 1 array of each" in samples.description) == (form in ("with labels", "a loader"))


def test_arrays_for_a_model_with_one_input():
    x = np.ones((1, 3, 32, 32), np.float32)
    for given in (x, [x, x], iter([x]), [Tensor(x)], [Tensor(x.astype(np.float64))]):
        samples = as_samples(given, CLASSIFIER)
        (name,) = samples[0]
        assert np.array_equal(samples[0][name], x)
        assert samples[0][name].dtype == np.float32


def one_input(count, taken):
    """Samples of the classifier, which come out of one array one after another, as out of a ring of a loader."""
    x = np.zeros((1, 3, 32, 32), np.float32)
    for number in range(count):
        taken.append(number)
        x[:] = number
        yield x


def test_what_is_taken_is_what_is_asked_for():
    taken = []
    samples = as_samples((x for x in one_input(10, taken)), CLASSIFIER)
    assert (taken, samples.counted, samples.expected) == ([0, 1], None, 0), "two tell whether they are several"
    assert samples[3][next(iter(samples[3]))].max() == 3
    assert taken == [0, 1, 2, 3]
    assert [next(iter(sample.values())).max() for sample in samples] == list(range(10))
    assert (samples.counted, samples.summary) == (10, "10 samples of a generator")
    assert [next(iter(sample.values())).max() for sample in samples] == list(range(10)), "another pass sees the same"


def test_samples_beyond_the_memory_are_in_files_until_they_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    size = 3 * 32 * 32 * 4
    spool = Spool(({"x": x.copy(), "y": None, "z": [x]} for x in one_input(6, [])), "generator", room=2 * 2 * size)
    assert len(spool) == 6
    assert sorted(path.name for path in tmp_path.rglob("*.sample")) == ["2.sample", "3.sample", "4.sample", "5.sample"]
    read = spool[4]()
    assert (read["x"].max(), read["y"], read["z"][0].max()) == (4, None, 4), "as it was when it was taken"
    spool.forget(5)
    assert [path.name for path in tmp_path.rglob("*.sample")] == ["5.sample"]
    assert spool[0]()["x"].max() == 0, "the first prepares whoever comes later"
    assert spool[5]()["x"].max() == 5
    del spool, read
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="limits of Unix")
def test_a_full_folder_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    import resource

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut off, and break later imports
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[0][1]))
    try:
        with pytest.raises(OutputError, match=r"generator do not fit into .*: File too large. Take fewer \(itertools"):
            len(Spool(({"x": x} for x in one_input(3, [])), "generator", room=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])


def test_too_few_arrays_are_refused():
    first = next(iter(two_inputs()[0].values()))
    with pytest.raises(ArgumentError, match="A sample holds 1 array, but the inputs are input_ids, attention_mask"):
        as_samples([(first,)], ENCODER)


def test_no_samples_are_refused():
    for nothing in ([], iter(()), Samples("none", [])):
        with pytest.raises(ArgumentError, match="There is no sample"):
            as_samples(nothing, ENCODER)


def model_forms():
    model = onnx.load(ENCODER)
    return {"path": ENCODER, "name": str(ENCODER), "proto": model, "graph": graphsurgeon.import_onnx(model)}


USES = {
    "random_samples": lambda model: random_samples(model)[0]["input_ids"].tolist(),
    "check_run": lambda model: len(onnxamp.check_run(model, provider="cpu").values),
    "diff_models": lambda model: [
        (diff.name, diff.rel_l2) for diff in onnxamp.diff_models(model, model, one_sample(), provider="cpu").outputs
    ],
}


@pytest.mark.parametrize("use", USES)
def test_a_model_is_a_path_a_proto_or_a_graph(use):
    found = {form: USES[use](model) for form, model in model_forms().items()}
    assert found["path"] == found["name"] == found["proto"] == found["graph"]
    with pytest.raises(
        ArgumentTypeError, match=r"model must be an onnx.ModelProto, a path or an onnx-graphsurgeon Graph"
    ):
        USES[use](3)


@pytest.mark.parametrize(("declared", "given"), [
    ("int8", np.array([1, 200, 255], np.uint8)),
    ("uint64", np.array([1, 2, -1])),
])  # fmt: skip
def test_integers_that_another_type_cannot_hold_are_refused(declared, given):
    model = parse(f"({declared}[3] x) => (float[3] y) {{ y = Cast <to = 1> (x) }}")
    with pytest.raises(onnxamp.ArgumentError, match="cannot hold"):
        onnxamp.diff_models(model, model, {"x": given})


def test_a_low_precision_sample_may_hold_nan():
    model = parse("(float[2] x) => (float[2] y) { y = Neg (x) }")
    given = np.array([1, np.nan]).astype(ml_dtypes.bfloat16)
    assert onnxamp.diff_models(model, model, {"x": given}).outputs


@pytest.mark.parametrize("name", ["inputs", "x.json"])
def test_relative_paths_mean_the_folder_in_which_they_were_given(tmp_path, monkeypatch, name):
    """A script may go to another folder before the samples are read."""
    monkeypatch.chdir(tmp_path)
    Path("inputs").mkdir()
    np.savez("inputs/1.npz", x=[1.5])
    Path("x.json").write_text('[{"x": [1.5]}, {"x": [2.5]}]')
    samples = load_samples(name)
    assert samples.description.endswith(f" of {name}")
    monkeypatch.chdir("inputs")
    assert samples[0]["x"] == 1.5


def test_hidden_files_are_no_samples(tmp_path):
    np.savez(tmp_path / "1.npz", x=np.ones(2, np.float32))
    (tmp_path / "._1.npz").write_bytes(b"of another system")
    model = parse("(float[2] x) => (float[2] y) { y = Neg (x) }")
    assert onnxamp.diff_models(model, model, tmp_path).samples == 1


@pytest.mark.parametrize(("declared", "ends", "expected"), [
    ("uint8", (-5, 5), range(6)),
    ("uint8", (250, 300), range(250, 256)),
    ("int64", (0.5, 2.5), (1, 2)),
    ("bool", (0, 1), (False, True)),
])  # fmt: skip
def test_integers_lie_in_the_stated_range(declared, ends, expected):
    drawn = moved_into_range(np.random.default_rng(0), np.zeros(4096, declared), ends)
    assert (drawn.dtype, set(drawn.tolist())) == (np.dtype(declared), set(expected))


def test_a_range_without_a_number_of_the_type_is_refused():
    with pytest.raises(ArgumentError, match=r"No int64 is between 0\.2 and 0\.8"):
        moved_into_range(np.random.default_rng(0), np.zeros(2, np.int64), (0.2, 0.8))


def test_whole_numbers_in_json_are_floats_where_the_model_takes_floats(tmp_path):
    """As JavaScript writes 1.0."""
    (tmp_path / "x.json").write_text('{"x": [1, 2], "n": [3]}')
    model = parse("(float[2] x, int64[1] n) => (float[2] y) { f = Cast <to = 1> (n) y = Add (x, f) }")
    assert onnxamp.diff_models(model, model, tmp_path / "x.json").outputs
    other = parse("(float[2] x, int64[1] n) => (float[2] y) { f = Cast <to = 1> (n) y = Add (x, f) }")
    with pytest.raises(ArgumentError, match="must be float32, not int64"):
        onnxamp.diff_models(model, other, {"x": np.array([1, 2]), "n": np.array([3])})


def test_fractions_in_json_keep_the_digits_that_the_model_takes(tmp_path):
    (sample,) = load_samples(write(tmp_path / "x.json", [{"x": [0.1, 1e-30]}]))
    for kind, dtype in (("double", np.float64), ("float", np.float32)):
        model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({kind}[2] x) => () {{}}')
        assert check_inputs(model, sample)["x"].tolist() == np.array([0.1, 1e-30], dtype).tolist()
