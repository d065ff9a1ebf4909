"""Data files that several models of a folder refer to: nothing is removed or taken that another one needs."""

import os
import random
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from commands import run
from graphs.case import add_weights, parse
from onnx import ModelProto
from stored import SIZE, answers, contents, external, files, inline, is_low, locations

import onnxamp
from onnxamp import SourceChangedError, convert_file
from onnxamp._model import data_files
from onnxamp._model.data_files import MARK, is_own, referring_models
from onnxamp._model.model import read_graph
from onnxamp._model.sources import FileStamp


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A decoder in two forms, as exporters write it: both refer to the data file of the first."""
    first = external(tmp_path, "decoder.onnx.data")
    first.rename(tmp_path / "decoder.onnx")
    shutil.copy(tmp_path / "decoder.onnx", tmp_path / "decoder_with_past.onnx")
    return tmp_path


def told(result: Result) -> str:
    return " ".join(result.output.split())


def test_in_place_leaves_the_other_model_alone(shared: Path) -> None:
    wanted, sibling = answers(shared / "decoder.onnx"), shared / "decoder_with_past.onnx"
    result = run("convert", shared / "decoder.onnx", "--in-place", "-v")
    assert result.exit_code == 0, result.output
    assert is_low(shared / "decoder.onnx")
    np.testing.assert_array_equal(answers(sibling), wanted)
    (name,) = set(locations(shared / "decoder.onnx").values())
    assert sorted(files(shared)) == sorted(["decoder.onnx", "decoder.onnx.data", name, "decoder_with_past.onnx"])
    assert "decoder.onnx.data stays: decoder_with_past.onnx refers to it." in told(result)
    assert f"The weights are in {name}: decoder_with_past.onnx refers to decoder.onnx.data." in told(result)


def test_both_in_place_one_after_the_other(shared: Path) -> None:
    """Nobody refers to the old data then, but onnxamp did not write them."""
    data = (shared / "decoder.onnx.data").read_bytes()
    for name in ("decoder.onnx", "decoder_with_past.onnx"):
        notes = convert_file(shared / name, shared / name, validate=False).notes
        assert is_low(shared / name)
    assert (shared / "decoder.onnx.data").read_bytes() == data
    assert (
        "decoder.onnx.data, with the weights of the model that was replaced, stays, because onnxamp did not"
        in " ".join(notes)
    )
    for name in ("decoder.onnx", "decoder_with_past.onnx"):
        convert_file(shared / name, shared / name, dtype="bfloat16", validate=False)
    assert len(files(shared)) == 5


def test_an_output_over_a_model_whose_data_others_need(shared: Path) -> None:
    source = shared / "source.onnx"
    onnx.save(inline(), source)
    wanted = answers(shared / "decoder_with_past.onnx")
    made = convert_file(source, shared / "decoder.onnx", external_data="always", validate=False)
    assert is_low(shared / "decoder.onnx")
    np.testing.assert_array_equal(answers(shared / "decoder_with_past.onnx"), wanted)
    assert any("decoder_with_past.onnx refers to" in note for note in made.notes)


def test_a_result_of_ours_that_a_copy_refers_to(shared: Path) -> None:
    """Our own data file goes with the result, unless somebody else has come to need it."""
    low = shared / "low.onnx"
    convert_file(shared / "decoder.onnx", low, validate=False)
    shutil.copy(low, shared / "copy.onnx")
    for dtype in ("bfloat16", "float16"):
        convert_file(shared / "decoder.onnx", low, dtype=dtype, validate=False)
        assert is_low(low, dtype=dtype)
        assert is_low(shared / "copy.onnx")
    (shared / "copy.onnx").unlink()
    (name,) = set(locations(low).values())
    assert files(shared) == sorted(
        ["decoder.onnx", "decoder.onnx.data", "decoder_with_past.onnx", "low.onnx", "low.onnx.data", name]
    )


def test_a_name_that_another_model_expects_is_not_taken(shared: Path) -> None:
    """The file is missing: the other model must not find the weights of a stranger there."""
    (shared / "decoder.onnx.data").rename(shared / "elsewhere")
    onnx.save(inline(), shared / "source.onnx")
    convert_file(shared / "source.onnx", shared / "decoder.onnx", external_data="always", validate=False)
    assert not (shared / "decoder.onnx.data").exists()
    assert is_low(shared / "decoder.onnx")


@pytest.mark.parametrize("text", ["onnxtxt", "textproto", "json"])
def test_models_in_text_count(shared: Path, text: str) -> None:
    sibling = onnx.load(shared / "decoder_with_past.onnx", load_external_data=False)
    (shared / "decoder_with_past.onnx").unlink()
    onnx.save(sibling, shared / f"other.{text}", format=text)
    assert set(referring_models(shared, ["decoder.onnx.data"], shared / "decoder.onnx")) == {"decoder.onnx.data"}


def test_names_that_are_part_of_others_and_broken_models(tmp_path: Path) -> None:
    external(tmp_path, "my_model.onnx.data").rename(tmp_path / "my_model.onnx")
    assert referring_models(tmp_path, ["model.onnx.data"]) == {}
    broken = tmp_path / "broken.onnx"
    broken.write_bytes((tmp_path / "my_model.onnx").read_bytes()[:-1])
    assert referring_models(tmp_path, ["my_model.onnx.data", "nothing.data"], tmp_path / "my_model.onnx") == {
        "my_model.onnx.data": broken
    }
    broken.write_bytes(b"a note on model.onnx.data and its location")
    assert referring_models(tmp_path, ["model.onnx.data"]) == {"model.onnx.data": broken}


@pytest.mark.parametrize("times", [2, 9])
def test_files_that_are_replaced_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As others do that convert the same folder: what is there then counts, if it ever holds still."""
    other = tmp_path / "other.json"
    other.write_text("{}")
    left = [SourceChangedError("It changed.")] * times

    def read(path: Path) -> tuple[bytes, FileStamp]:
        if left:
            raise left.pop()
        return read_graph(path)

    monkeypatch.setattr(data_files, "read_graph", read)
    assert referring_models(tmp_path, ["x.data"]) == ({} if times == 2 else {"x.data": other})


def test_a_link_to_the_model_is_the_model(shared: Path) -> None:
    link = shared / "link.onnx"
    link.symlink_to("decoder.onnx")
    assert referring_models(shared, ["decoder.onnx.data"], shared / "decoder.onnx") == {
        "decoder.onnx.data": shared / "decoder_with_past.onnx"
    }
    (shared / "decoder_with_past.onnx").unlink()
    assert referring_models(shared, ["decoder.onnx.data"], shared / "decoder.onnx") == {}
    (shared / "hard.onnx").hardlink_to(shared / "decoder.onnx")  # keeps the old contents
    assert set(referring_models(shared, ["decoder.onnx.data"], shared / "decoder.onnx")) == {"decoder.onnx.data"}


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("place", ["sub", "link"])
def test_a_model_of_the_parent_folder_keeps_its_data(tmp_path: Path, place: str) -> None:
    """``main.onnx`` refers to ``sub/decoder.onnx.data``, which onnxamp wrote, and to nothing else there."""
    sub, main = tmp_path / "sub", tmp_path / "main.onnx"
    sub.mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link").symlink_to("../sub")
    source, folder = sub / "source.onnx", tmp_path / "links" / "link" if place == "link" else sub
    decoder = folder / "decoder.onnx"
    onnx.save(inline(), source)
    assert run("convert", source, "-o", decoder, "--external-data", "always").exit_code == 0
    proto = onnx.load(decoder, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = f".//sub/{entry.value}" if entry.key == "location" else entry.value
    onnx.save(proto, main)
    wanted, before = answers(main), contents(sub)["decoder.onnx.data"]
    for _ in range(2):
        result = run("convert", source, "-o", decoder, "--external-data", "always", "--dtype", "bfloat16", "-v")
        assert result.exit_code == 0, result.output
        assert is_low(decoder, dtype="bfloat16")
        np.testing.assert_array_equal(answers(main), wanted)
    assert contents(sub)["decoder.onnx.data"] == before
    (name,) = set(locations(decoder).values())
    assert files(sub) == sorted(["decoder.onnx", "decoder.onnx.data", name, "source.onnx"])
    assert f"The weights are in {name}: ../main.onnx refers to decoder.onnx.data." in told(result).replace(
        f"..{os.sep}", "../"
    )
    taken = run("convert", source, "-o", decoder.with_name("decoder.onnx.data"))
    assert (taken.exit_code, "main.onnx': choose another name for the output." in told(taken)) == (2, True)


def test_a_name_that_a_model_of_the_parent_folder_expects_is_not_taken(tmp_path: Path) -> None:
    sub = tmp_path / "sub"
    sub.mkdir()
    external(tmp_path, "low.onnx.data")
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = f"sub/{entry.value}" if entry.key == "location" else entry.value
    onnx.save(proto, tmp_path / "model.onnx")
    onnx.save(inline(), sub / "source.onnx")
    result = run("convert", sub / "source.onnx", "-o", sub / "low.onnx", "--external-data", "always")
    assert result.exit_code == 0, result.output
    assert is_low(sub / "low.onnx")
    assert "low.onnx.data" not in files(sub)


def test_only_so_many_models_of_the_parent_folder_are_read(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind them any may refer to anything."""
    monkeypatch.setattr(data_files, "_MOST_ABOVE", 1)
    sub = tmp_path / "sub"
    sub.mkdir()
    assert referring_models(sub, ["x.data"]) == {"x.data": tmp_path / "decoder_with_past.onnx"}
    (tmp_path / "decoder_with_past.onnx").unlink()
    assert referring_models(sub, ["x.data"]) == {}


def test_data_files_of_ours_are_marked(tmp_path: Path) -> None:
    model = external(tmp_path)
    made = convert_file(model, tmp_path / "low.onnx", shard_bytes=4096, validate=False)
    names = set(locations(made.target).values())
    assert len(names) > 1
    assert all(is_own(tmp_path / name) for name in names)
    assert not is_own(tmp_path / "weights.bin")
    (tmp_path / "short").write_bytes(MARK[1:])
    assert not is_own(tmp_path / "short")


@pytest.mark.slow
def test_a_folder_of_shared_models(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    out, before = tmp_path_factory.mktemp("out"), contents(shared)
    for dtype in ("float16", "bfloat16"):
        report = onnxamp.convert_folder(shared, out, dtype=dtype, validate=False, jobs=1)
        assert report.count("converted") == 2
        assert all(is_low(out / name, dtype=dtype) for name in ("decoder.onnx", "decoder_with_past.onnx"))
        assert len([name for name in files(out) if name != ".onnxamp.json"]) == 3  # results share weights, too
    assert contents(shared) == before


@pytest.mark.slow
def test_sharing_weights_does_not_outdate_pages(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Results are written again for that after their pages."""
    out = tmp_path_factory.mktemp("out")
    for outcome in ("converted", "up to date"):
        report = onnxamp.convert_folder(shared, out, html=out / "pages", validate=False, jobs=1)
        assert report.count(outcome) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_converted_in_a_folder_all_others_compute_the_same(tmp_path: Path, seed: int) -> None:
    """Models that share data files in any way are converted over each other, and copied."""
    rng = random.Random(seed)
    kinds: dict[str, tuple[float, str]] = {}
    for number in range(2):
        path = tmp_path / f"m{number}.onnx"
        onnx.save(
            scaled(number + 1), path, save_as_external_data=True, location=f"m{number}.onnx.data", size_threshold=0
        )
        kinds[path.name] = (number + 1, "float32")
    for _ in range(12):
        source, target = rng.choice(sorted(kinds)), f"m{rng.randrange(4)}.onnx"
        if rng.random() < 0.3 and source != target:
            shutil.copy(tmp_path / source, tmp_path / target)
            kinds[target] = kinds[source]
        else:
            options = {"shard_bytes": 9000} if rng.random() < 0.3 else {"external_data": rng.choice(["auto", "always"])}
            convert_file(tmp_path / source, tmp_path / target, **options, validate=False)
            kinds[target] = (kinds[source][0], "float16")
        for name, (scale, dtype) in kinds.items():
            wanted = scaled(scale) if dtype == "float32" else onnxamp.convert_model(scaled(scale))
            onnx.save(wanted, tmp_path / "wanted.bin")
            np.testing.assert_allclose(answers(tmp_path / name), answers(tmp_path / "wanted.bin"), rtol=1e-2, atol=1e-3)


def scaled(factor: float) -> ModelProto:
    model = add_weights(parse(TEXT), {"first": (SIZE, SIZE), "second": (SIZE, SIZE)})
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


TEXT = f"(float[N,{SIZE}] X) => (float[N,{SIZE}] Y) {{ h = MatMul (X, first) s = Softmax (h) Y = MatMul (s, second) }}"
