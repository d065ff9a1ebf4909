"""Model files in and out: external data streamed, unchanged models copied, earlier results replaced."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import parse
from onnx import TensorProto
from stored import DATA_BYTES, SIZE, answers, external, files, inline, is_low, locations, normal

import onnxamp
from onnxamp import convert_file

pytestmark = pytest.mark.usefixtures("all_threads")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return external(tmp_path)


# --- external data in and out -----------------------------------------------------------------------------------


def test_external_data_in_and_out(model: Path) -> None:
    target = model.with_name("low.onnx")
    made = convert_file(model, target, validate=False)
    assert locations(target) == dict.fromkeys(("first", "second"), "low.onnx.data")
    assert files(model.parent) == ["low.onnx", "low.onnx.data", "model.onnx", "weights.bin"]
    assert is_low(target)
    np.testing.assert_allclose(answers(target), answers(model), rtol=2e-2, atol=2e-3)
    assert made.bytes_before - made.bytes_after >= DATA_BYTES // 2
    assert set(made.weights) >= {"first", "second"}


def test_result_in_another_folder(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "other" / "low.onnx"
    target.parent.mkdir()
    convert_file(model, target, validate=False)
    assert files(target.parent) == ["low.onnx", "low.onnx.data"]
    assert is_low(target)


def test_a_path_is_read_with_its_data(model: Path) -> None:
    assert normal(onnxamp.convert_model(model)) == normal(onnxamp.convert_model(inline()))
    assert onnxamp.plan_model(model) == onnxamp.plan_model(inline())


def test_a_model_without_its_data_says_so(model: Path) -> None:
    with pytest.raises(onnxamp.ExternalDataError, match="pass the path, or load the data"):
        onnxamp.convert_model(onnx.load(model, load_external_data=False))


@pytest.mark.parametrize("wish", ["always", "never", "auto"])
@pytest.mark.parametrize("source", ["inline", "external"])
def test_where_the_weights_go(model: Path, source: str, wish: str) -> None:
    if source == "inline":
        onnx.save(inline(), model)
        model.with_name("weights.bin").unlink()
    target = model.with_name("low.onnx")
    convert_file(model, target, external_data=wish, validate=False)
    wanted = wish == "always" or (wish == "auto" and source == "external")
    assert target.with_name("low.onnx.data").exists() == wanted
    assert set(locations(target)) == ({"first", "second"} if wanted else set())
    assert is_low(target)


def test_unknown_wish(model: Path) -> None:
    with pytest.raises(onnxamp.ArgumentError, match="'auto', 'always' or 'never', not 'sometimes'"):
        convert_file(model, model.with_name("low.onnx"), external_data="sometimes", validate=False)


def test_weights_that_stay_float32_are_streamed_too(model: Path) -> None:
    target = model.with_name("low.onnx")
    convert_file(model, target, keep_high=["t", "Y"], validate=False)
    types = {tensor.name: tensor.data_type for tensor in onnx.load(target).graph.initializer}
    assert types == {"first": TensorProto.FLOAT16, "second": TensorProto.FLOAT, "scale": TensorProto.FLOAT}
    np.testing.assert_allclose(answers(target), answers(model), rtol=2e-2, atol=2e-3)


def test_bfloat16_data(model: Path) -> None:
    target = model.with_name("low.onnx")
    convert_file(model, target, dtype="bfloat16", validate=False)
    assert is_low(target, dtype="bfloat16")


def test_constants_of_nodes_may_be_external(tmp_path: Path) -> None:
    proto = parse(
        f"(float[N,{SIZE}] X) => (float[N,{SIZE}] Y) {{ w = Constant <value = float {{1}}> () Y = MatMul (X, w) }}"
    )
    proto.graph.node[0].attribute[0].t.CopyFrom(inline().graph.initializer[0])
    source, target = tmp_path / "model.onnx", tmp_path / "low.onnx"
    wishes = {"save_as_external_data": True, "size_threshold": 0, "convert_attribute": True}
    onnx.save(proto, source, location="weights.bin", **wishes)
    convert_file(source, target, external_data="never", validate=False)
    made = [node for node in onnx.load(target).graph.node if node.op_type == "Constant"]
    assert [node.attribute[0].t.data_type for node in made] == [TensorProto.FLOAT16]
    np.testing.assert_allclose(answers(target), answers(source), rtol=2e-2, atol=2e-3)


def test_progress_reaches_the_end(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    made = convert_file(
        model, model.with_name("low.onnx"), progress=lambda done, total: seen.append((done, total)), validate=False
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {made.bytes_after}
    assert seen[-1][0] <= made.bytes_after


# --- models that do not change ----------------------------------------------------------------------------------


def test_an_unchanged_model_is_copied(model: Path, tmp_path: Path) -> None:
    target = model.with_name("same.onnx")
    convert_file(model, target, "O0", validate=False)
    assert target.read_bytes() == model.read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    convert_file(model, other / "same.onnx", "O0", validate=False)
    assert onnx.load(other / "same.onnx") == onnx.load(model)
    assert files(other) == ["same.onnx", "same.onnx.data"]


@pytest.mark.parametrize("source", ["inline", "external"])
@pytest.mark.parametrize("wish", ["always", "never"])
def test_an_unchanged_model_is_stored_as_asked(model: Path, source: str, wish: str) -> None:
    if source == "inline":
        onnx.save(inline(), model)
    target = model.with_name("same.onnx")
    convert_file(model, target, "O0", external_data=wish, validate=False)
    assert bool(locations(target)) == (wish == "always")


def test_an_unchanged_model_becomes_one_file_elsewhere(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "other" / "same.onnx"
    target.parent.mkdir()
    convert_file(model, target, "O0", external_data="never", validate=False)
    np.testing.assert_array_equal(answers(target), answers(model))


def test_converting_twice_copies(model: Path) -> None:
    convert_file(model, model.with_name("low.onnx"), validate=False)
    convert_file(model.with_name("low.onnx"), model.with_name("again.onnx"), validate=False)
    assert onnx.load(model.with_name("again.onnx")) == onnx.load(model.with_name("low.onnx"))


# --- over what is there -----------------------------------------------------------------------------------------


def test_over_an_earlier_result(model: Path) -> None:
    """The data file of the earlier result goes with it."""
    target = model.with_name("low.onnx")
    for _ in range(3):
        convert_file(model, target, validate=False)
        assert len(files(model.parent)) == 4
        assert is_low(target)
    convert_file(model, target, external_data="never", validate=False)
    assert files(model.parent) == ["low.onnx", "model.onnx", "weights.bin"]


def test_over_the_source(model: Path) -> None:
    convert_file(model, model, validate=False)
    assert is_low(model)


def test_over_the_source_with_its_data(tmp_path: Path) -> None:
    """What an exporter wrote stays; what onnxamp wrote goes with the model that referred to it."""
    model = external(tmp_path, "model.onnx.data")
    data = (tmp_path / "model.onnx.data").read_bytes()
    for dtype in ("float16", "bfloat16"):
        convert_file(model, model, dtype=dtype, validate=False)
        assert len(files(tmp_path)) == 3
    assert (tmp_path / "model.onnx.data").read_bytes() == data
    convert_file(model, tmp_path / "low.onnx", external_data="always", validate=False)
    convert_file(tmp_path / "low.onnx", tmp_path / "low.onnx", external_data="never", validate=False)
    assert "low.onnx.data" not in files(tmp_path)


def test_a_copy_over_an_earlier_result(model: Path) -> None:
    target = model.with_name("low.onnx")
    convert_file(model, target, validate=False)
    convert_file(model, target, "O0", validate=False)
    assert files(model.parent) == ["low.onnx", "model.onnx", "weights.bin"]


def test_data_that_the_source_shares_with_an_earlier_result(tmp_path: Path) -> None:
    proto = parse("""(float[2,2] X, float[2,2] Z, int64[1] i) => (float[2,2] Y, int64[1] k) {
        Y = MatMul (X, Z) k = Gather (table, i) }""")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(4096), "table"))
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    onnx.save(proto, target, save_as_external_data=True, location="target.onnx.data", size_threshold=1024)
    shutil.copy(target, source)
    convert_file(source, target, validate=False)
    assert onnx.load(source).graph.initializer[0].raw_data


def test_no_data_file_without_data(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(parse("(float[2] X) => (float[2] Y) <float w = {2}> { Y = Mul (X, w) }"), model)
    convert_file(model, model.with_name("low.onnx"), "O3", external_data="always", validate=False)
    assert files(tmp_path) == ["low.onnx", "model.onnx"]


def test_over_something_else(model: Path) -> None:
    target = model.with_name("low.onnx")
    target.write_bytes(b"no model at all")
    target.with_name("low.onnx.data").write_bytes(b"somebody else's")
    convert_file(model, target, validate=False)
    assert is_low(target)
    assert target.with_name("low.onnx.data").read_bytes() == b"somebody else's"


@pytest.mark.parametrize("shard_bytes", [None, 10_000])
def test_data_files_have_the_same_names_after_every_run(model: Path, shard_bytes: int | None) -> None:
    """Each run writes other data."""
    target = model.with_name("low.onnx")
    convert_file(model, target, shard_bytes=shard_bytes, validate=False)
    before = files(model.parent)
    for dtype in ("bfloat16", "float16", "bfloat16"):
        convert_file(model, target, dtype=dtype, shard_bytes=shard_bytes, validate=False)
        assert files(model.parent) == before
        assert is_low(target, dtype=dtype)
        assert all(path.stat().st_nlink == 1 for path in model.parent.iterdir())


def test_over_a_result_whose_data_are_gone(model: Path) -> None:
    """It refers to a file of the name that the new data get."""
    target = model.with_name("low.onnx")
    convert_file(model, target, validate=False)
    target.with_name("low.onnx.data").unlink()
    convert_file(model, target, validate=False)
    assert is_low(target)


def test_a_data_file_of_another_number_of_shards(model: Path) -> None:
    """The usual name is free, unless an earlier result of as many files has it."""
    target = model.with_name("low.onnx")
    for shard_bytes in (None, 10_000, None):
        convert_file(model, target, shard_bytes=shard_bytes, validate=False)
        named = "low.onnx-0000{}-of-00002.data" if shard_bytes else "low.onnx.data"
        assert set(locations(target).values()) == {named.format(1), named.format(2)}


def test_without_hard_links_every_data_file_has_a_name_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on FAT, where only the name of a new file tells that it replaces nothing."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    target = model.with_name("low.onnx")
    for _ in range(2):
        convert_file(model, target, validate=False)
        assert is_low(target)
        assert len(files(model.parent)) == 4


def test_permissions_of_an_existing_result_are_kept(model: Path) -> None:
    target = model.with_name("low.onnx")
    target.write_bytes(b"")
    target.chmod(0o640)
    convert_file(model, target, validate=False)
    assert target.stat().st_mode & 0o777 == 0o640


def test_weights_that_become_too_small_for_a_data_file(tmp_path: Path) -> None:
    """In float32 they are large enough to be written to one, in float16 they are not."""
    model = parse("(float[1,16] X) => (float[1,24] Y) { Y = MatMul (X, w) }")
    weight = np.arange(384, dtype=np.float32).reshape(16, 24)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    convert_file(tmp_path / "m.onnx", tmp_path / "low.onnx", validate=False)
    (found,) = onnx.load(tmp_path / "low.onnx").graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(found), weight.astype(np.float16))
