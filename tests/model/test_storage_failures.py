"""Storage where things go wrong: data that lies, folders that refuse, disks that are full. Whole or not at all."""

import errno
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from stored import answers, contents, external, files, locations

import onnxamp
from onnxamp import convert_file

pytestmark = pytest.mark.usefixtures("all_threads")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return external(tmp_path)


# --- external data that is not where it should be ---------------------------------------------------------------


def relocated(model: Path, **entries: Any) -> Path:
    """The model with other entries for all its external tensors."""
    proto = onnx.load(model, load_external_data=False)
    for tensor in proto.graph.initializer:
        for item in tensor.external_data:
            item.value = str(entries.get(item.key, item.value))
    onnx.save(proto, model)
    return model


def outside(model: Path) -> dict[str, Path]:
    folder = model.parent.parent / f"{model.parent.name}-outside"
    folder.mkdir()
    secret = folder / "secret.bin"
    secret.write_bytes(bytes(1 << 16))
    (model.parent / "link.bin").symlink_to(secret)
    (model.parent / "linked").symlink_to(folder, target_is_directory=True)
    return {"up": Path("..") / folder.name / "secret.bin", "absolute": secret, "link": Path("link.bin"),
            "folder link": Path("linked/secret.bin"), "hidden up": Path("linked/../secret.bin")}  # fmt: skip


@pytest.mark.parametrize("way", ["up", "absolute", "link", "folder link", "hidden up"])
def test_nothing_outside_the_models_folder_is_read(model: Path, way: str) -> None:
    relocated(model, location=outside(model)[way])
    before = files(model.parent)
    for convert in (
        onnxamp.convert_model,
        onnxamp.plan_model,
        lambda path: convert_file(path, path.with_name("o.onnx"), validate=False),
    ):
        with pytest.raises(onnxamp.ExternalDataError, match=r"'first'.*(outside the model's folder|is missing)"):
            convert(model)
    assert files(model.parent) == before


BAD_ENTRIES = {
    "missing": ({"location": "nothing.bin"}, "missing"),
    "empty": ({"location": ""}, "outside"),
    "folder": ({"location": "."}, "not a regular file"),
    "beyond the end": ({"offset": 1 << 20}, "holds"),
    "negative": ({"offset": -1}, "unreadable"),
    "no number": ({"offset": "a few"}, "unreadable"),
    "length of another tensor": ({"length": 16}, "holds"),
}


@pytest.mark.parametrize(("entries", "said"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_entries_that_lie(model: Path, entries: dict[str, Any], said: str) -> None:
    relocated(model, **entries)
    with pytest.raises(onnxamp.ExternalDataError, match=rf"'first'.*{said}") as caught:
        convert_file(model, model.with_name("low.onnx"), validate=False)
    assert isinstance(caught.value, onnxamp.ModelError)
    assert files(model.parent) == ["model.onnx", "weights.bin"]


def test_a_short_data_file(model: Path) -> None:
    data = model.with_name("weights.bin")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(onnxamp.ExternalDataError, match="which holds 100 bytes: copy or export both files again"):
        convert_file(model, model.with_name("low.onnx"), validate=False)


# --- whole or not at all ----------------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


PLACES = {"replace": (Path, "replace"), "fsync": (os, "fsync"), "data": (Path, "touch")}
STEPS = [("O0", "auto", "replace"), ("O2", "never", "replace"), ("O2", "never", "fsync"), ("O2", "always", "replace"),
         ("O2", "always", "fsync"), ("O2", "always", "data")]  # fmt: skip


@pytest.mark.parametrize(("level", "external_data", "step"), STEPS)
def test_a_full_disk_changes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, level: str, external_data: str, step: str
) -> None:
    target = model.with_name("low.onnx")
    convert_file(model, target, validate=False)
    before = contents(model.parent)
    monkeypatch.setattr(*PLACES[step], full)
    with pytest.raises(onnxamp.OutputError, match=r"low\.onnx.*No space left on device.*untouched") as caught:
        convert_file(model, target, level, external_data=external_data, validate=False)
    assert "\n" not in str(caught.value)
    assert contents(model.parent) == before


def test_a_read_only_folder(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fixed"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(onnxamp.OutputError, match="Permission denied"):
        convert_file(model, folder / "low.onnx", validate=False)
    assert files(folder) == []


def test_a_missing_folder(model: Path) -> None:
    with pytest.raises(onnxamp.OutputError, match=r"nowhere.*does not exist; create it"):
        convert_file(model, model.parent / "nowhere" / "low.onnx", validate=False)
    assert files(model.parent) == ["model.onnx", "weights.bin"]


def test_an_interruption_leaves_nothing_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    before = contents(model.parent)
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_file(model, model.with_name("low.onnx"), validate=False)
    assert contents(model.parent) == before


def test_no_output_takes_the_place_of_data_that_are_read(model: Path) -> None:
    data = model.with_name("weights.bin")
    inputs = model.with_name("inputs.npz")
    np.savez(inputs, X=np.zeros((1, 64), np.float32))
    before = contents(model.parent)
    with pytest.raises(onnxamp.ArgumentError, match=r"weights\.bin.*holds weights of the model"):
        convert_file(model, data, validate=False)
    for taken in (data, inputs, model):
        for command in (
            ("convert", model, "-o", model.with_name("o.onnx"), "--html", taken),
            ("convert", model, "-o", model.with_name("o.onnx"), "--save-plan", taken),
            ("check", model, "--html", taken),
            ("diff", model, model, "--save", taken),
            ("tune", model, "-o", model.with_name("o.onnx"), "--state", taken),
        ):
            result = run(*command, "--inputs", inputs)
            assert (result.exit_code, contents(model.parent)) == (2, before), result.output
            assert "is already read or written" in result.output


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="there are no devices with names")
def test_devices_and_pipes_are_not_replaced(model: Path) -> None:
    os.mkfifo(model.with_name("pipe"))
    for place in (Path("/dev/null"), model.with_name("pipe")):
        with pytest.raises(onnxamp.OutputError, match="not a regular file"):
            convert_file(model, place, validate=False)
        assert run("convert", model, "-o", place).exit_code == 2
        assert place.exists()
        assert not place.is_file()


CALLS = ("mkdir", "open", "fsync", "chmod", "link", "unlink", "replace", "stat")


@pytest.mark.slow
@pytest.mark.parametrize("external_data", ["always", "never"])
def test_a_disk_that_fails_at_each_call_in_turn(
    model: Path, monkeypatch: pytest.MonkeyPatch, external_data: str
) -> None:
    """Whichever call of the system fails, once: the old result is there, or the new one; and nothing else."""
    target = model.with_name("low.onnx")
    convert_file(model, target, external_data=external_data, validate=False)
    old, failed = answers(target), 0
    calls = {name: getattr(os, name) for name in CALLS}
    for number in range(200):
        count = -number

        def failing(name: str, *arguments: Any, **options: Any) -> Any:
            nonlocal count
            inside = ".tmp" in str(arguments[0]) or (name in ("replace", "unlink") and "low.onnx" in str(arguments[0]))
            count += inside
            if inside and count == 1:
                full()
            return calls[name](*arguments, **options)

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, partial(failing, name))
            with suppress(onnxamp.OutputError):
                convert_file(model, target, external_data=external_data, validate=False)
        if count <= 0:
            break
        failed += 1
        np.testing.assert_array_equal(answers(target), old)
        convert_file(model, target, external_data=external_data, validate=False)
        assert set(files(model.parent)) == {"model.onnx", "weights.bin", "low.onnx", *locations(target).values()}
    assert 8 < failed < 200


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not flushed there")
def test_the_file_of_another_process_gets_the_number_of_a_removed_one(
    model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of the file system that is free again belongs to whoever creates a file next."""
    target, data = model.with_name("low.onnx"), model.with_name("low.onnx.data")
    convert_file(model, target, external_data="always", validate=False)
    other = tmp_path_factory.mktemp("other") / "data"
    other.hardlink_to(data)
    flush = os.fsync

    def written_by_another(handle: int) -> None:
        flush(handle)
        if not data.exists():
            data.hardlink_to(other)
            monkeypatch.setattr(os, "fsync", flush)

    monkeypatch.setattr(os, "fsync", written_by_another)
    convert_file(model, target, external_data="always", validate=False)
    assert data.samefile(other)
    assert set(locations(target).values()).isdisjoint({data.name})
    assert np.isfinite(answers(target)).all()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such limits")
@pytest.mark.parametrize("external_data", ["always", "never"])
def test_files_that_may_not_grow(model: Path, external_data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the system, met in the first weight, between two, or in the second: nothing is injected here."""
    import resource

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut off, and break later imports
    target = model.with_name("low.onnx")
    convert_file(model, target, validate=False)
    before, limits = contents(model.parent), resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 1, 500, 4096, 10_000):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            with pytest.raises(onnxamp.OutputError, match=r"low\.onnx.*(File too large|requested and)"):
                convert_file(model, target, "O3", external_data=external_data, validate=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert contents(model.parent) == before
