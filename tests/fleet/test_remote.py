"""Models, inputs and results behind URLs: what is read of them, what is written, and what stays when that fails."""

import io
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
import pytest
from commands import NORM, is_one_sentence, run
from doc_pages import blocks
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto, numpy_helper
from repository import ROOT

import onnxamp
from onnxamp import ArgumentError, MissingPackageError, ModelError, OutputError
from onnxamp._base.paths import as_path, is_remote, read_range, writing
from onnxamp._fleet.remote import RemotePath, file_system
from onnxamp._model.model import Model

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install onnxamp[remote]")

ENCODER = ROOT / "models" / "encoder.onnx"
BASE = "memory://zoo"


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty file system in memory, and a folder to work in."""
    monkeypatch.chdir(tmp_path)
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "local"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder of each file system that is there without a network."""
    return BASE if request.param == "memory" else f"local://{tmp_path.as_posix()}/zoo"


def put(url: str, data: bytes | ModelProto) -> str:
    with writing(as_path(url)) as file:
        file.write(data if isinstance(data, bytes) else data.SerializeToString())
    return url


def wide(rows: int = 64) -> ModelProto:
    """Two products with weights of some kilobytes."""
    model = parse("(float[N,64] x) => (float[N,64] y) { [one] h = MatMul (x, a)\n [two] y = MatMul (h, b) }")
    return add_weights(model, {"a": (64, rows), "b": (rows, 64)})


def with_data(model: ModelProto, url: str) -> str:
    """A model whose weights are in a data file beside it."""
    onnx.save(model, "data.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    put(url, Path("data.onnx").read_bytes())
    put(f"{url.rpartition('/')[0]}/model.onnx.data", Path("model.onnx.data").read_bytes())
    return url


def names(base: str) -> list[str]:
    return sorted(path.name for path in as_path(base).iterdir())


def loaded(url: str) -> ModelProto:
    """The model with its weights inside, as if they had never been elsewhere."""
    model = Model.read(as_path(url)).embedded()
    for tensor in model.graph.initializer:
        tensor.ClearField("data_location")
    return model


OBJECTS: dict[str, bytes] = {}
"""What is in the bucket."""


class Upload(io.BytesIO):
    """An upload in parts, which shows when it is committed."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.held = key, b""

    def close(self) -> None:
        self.held = self.held or self.getvalue()

    def commit(self) -> None:
        OBJECTS[self.key] = self.held

    def discard(self) -> None:
        self.held = b""


class Bucket(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Object storage in memory: files are there when they are committed, and folders cannot be made."""

    protocol = "s3"

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found = {key: {"name": key, "size": len(data), "type": "file"} for key, data in OBJECTS.items()}
        below = [key for key in found if key == path or key.startswith(f"{path.rstrip('/')}/")]
        if not below:
            raise FileNotFoundError(path)
        return [found[key] for key in below] if detail else below

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(OBJECTS[path])
        assert not autocommit, "the old object would be gone before the new one is complete"
        if not path.startswith("zoo/"):
            raise FileNotFoundError("The specified bucket does not exist")
        return Upload(path)

    def cat_file(
        self, path: str, version_id: str | None = None, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        assert version_id is None
        if path not in OBJECTS:
            raise FileNotFoundError(path)
        return OBJECTS[path][start:end]

    def mv(self, path1: str, path2: str, **_: Any) -> None:  # type: ignore[override]
        OBJECTS[path2] = OBJECTS.pop(path1)

    def rm_file(self, path: str) -> None:
        if OBJECTS.pop(path, None) is None:
            raise FileNotFoundError(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("a bucket would be made")


@pytest.fixture
def bucket() -> Iterator[dict[str, bytes]]:
    """What is in a bucket of S3, empty at first."""
    OBJECTS.clear()
    before = fsspec.registry.get("s3")
    fsspec.register_implementation("s3", Bucket, clobber=True)
    file_system.cache_clear()
    yield OBJECTS
    file_system.cache_clear()
    if before is not None:
        fsspec.register_implementation("s3", before, clobber=True)


def test_object_storage(bucket: dict[str, bytes]) -> None:
    bucket["zoo/in.onnx"] = wide().SerializeToString()
    for external in ("never", "always", "always"):
        onnxamp.convert_file("s3://zoo/in.onnx", "s3://zoo/deep/out.onnx", external_data=external, validate=False)
        assert len(bucket) == (2 if external == "never" else 3)
        assert loaded("s3://zoo/deep/out.onnx") == onnxamp.convert_model(wide())
    before = dict(bucket)
    with pytest.raises(KeyError), writing(as_path("s3://zoo/in.onnx")) as file:  # noqa: PT012
        file.write(b"x")
        raise KeyError
    with pytest.raises(OutputError, match=r"Cannot write 's3://other/out.onnx': The specified bucket does not exist"):
        onnxamp.convert_file("s3://zoo/in.onnx", "s3://other/out.onnx", validate=False)
    assert bucket == before


def test_the_command_of_the_page(bucket: dict[str, bytes]) -> None:
    (line,) = (line for block in blocks(ROOT / "docs" / "how-to" / "object-storage.md") for line in block.commands)
    bucket["zoo/encoder.onnx"] = ENCODER.read_bytes()
    (sample,) = onnxamp.random_samples(onnx.load_from_string(bucket["zoo/encoder.onnx"]))
    np.savez("sample.npz", **sample)
    bucket["zoo/samples/sample.npz"] = Path("sample.npz").read_bytes()
    result = run(*shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert "both outputs match the original" in result.output
    assert "s3://zoo/fp16/encoder_fp16.onnx" in result.output
    assert "zoo/fp16/encoder_fp16.onnx" in bucket


def test_storage_that_does_not_answer(bucket: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a file system raises, the message names the URL."""
    bucket["zoo/in.onnx"] = wide().SerializeToString()
    read = Model.read(as_path(put("s3://zoo/out.onnx", wide(128))))

    def silent(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no\ncredentials")

    monkeypatch.setattr(Bucket, "ls", silent)
    monkeypatch.setattr(Bucket, "cat_file", silent)
    for command in (("convert",), ("convert", "-o", "out"), ("check",), ("tune",)):
        result = run(command[0], "s3://zoo/in.onnx", *command[1:])
        assert is_one_sentence(result) or result.exit_code == 2
        assert "'s3://zoo/in.onnx': RuntimeError: no credentials." in " ".join(result.output.split())
    with pytest.raises(onnxamp.ExternalDataError, match=r"Cannot read 5 bytes at 3 of 's3://zoo/in.onnx': Runtime"):
        read_range(as_path("s3://zoo/in.onnx"), 3, 5)
    assert read.path is not None


class Traffic:
    """Counts the bytes that are fetched from memory, by path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: Counter[str] = Counter()
        kind = type(fsspec.filesystem("memory"))
        ask = kind.cat_file

        def cat_file(fs: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
            data = ask(fs, path, start, end, **more)
            self.read[path.rpartition("/")[2]] += len(data)
            return data

        monkeypatch.setattr(kind, "cat_file", cat_file)


# --- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["s3://bucket/a/model.onnx", "memory://a/b.onnx", "local:///a/b.onnx"])
def test_a_path_is_its_url(url: str) -> None:
    path = RemotePath("/", "s3:", "bucket/a/model.onnx") if url.startswith("s3") else as_path(url)
    assert (str(path), path.as_posix(), f"{path}") == (url, url, url)
    assert repr(path) == f"RemotePath({url!r})"
    assert is_remote(path.parent / "x")
    assert str(path.parent / path.name) == url
    assert str(path.with_suffix(".npz")) == url.replace(".onnx", ".npz")
    assert str(path.with_name("c")).endswith("/c")
    assert path.relative_to(path.parent).as_posix() == path.name
    assert Path("/out") / path.relative_to(path.parent) == Path("/out", path.name)
    assert not is_remote(Path("/out") / path.relative_to(path.parent))
    assert path.absolute() == path == path.resolve()
    assert {path: 1}[path.parent / path.name] == 1


def test_dots_do_not_leave_the_file_system() -> None:
    path = as_path("memory://a/b")
    assert str((path / "../c").resolve()) == "memory://a/c"
    assert not (path / "../../../../c").resolve().is_relative_to(path)
    assert not (path / "/etc/passwd").is_relative_to(path)


@pytest.mark.parametrize("text", ["model.onnx", "C:\\models\\a.onnx", "/a/b", "a:b", "x//y"])
def test_other_texts_are_paths_here(text: str) -> None:
    assert as_path(text) == Path(text)
    assert not is_remote(as_path(text))


def test_a_url_of_a_file_is_a_path_here(tmp_path: Path) -> None:
    assert as_path(f"file://{tmp_path.as_posix()}/m.onnx") == tmp_path / "m.onnx"
    assert as_path("file:///a%20b/c") == Path("/a b/c")
    result = run("convert", ENCODER, "-o", f"file://{tmp_path.as_posix()}/out.onnx", "--no-validate")
    assert result.exit_code == 0, result.output
    assert Path("out.onnx").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    file_system.cache_clear()
    with pytest.raises(MissingPackageError, match=r"gs://.* needs a package .*'pip install gcsfs'"):
        as_path("gs://bucket/model.onnx")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    file_system.cache_clear()
    with pytest.raises(MissingPackageError, match=r"need fsspec, .*pip install 'onnxamp\[remote\]'"):
        as_path("memory://model.onnx")
    result = run("convert", "memory://model.onnx")
    assert result.exit_code == 1, "as for packages of providers"
    assert is_one_sentence(result)
    assert "pip install 'onnxamp[remote]'" in result.output
    file_system.cache_clear()


def test_urls_that_name_nothing() -> None:
    with pytest.raises(ArgumentError, match="No file system is known for nowhere://"):
        as_path("nowhere://model.onnx")
    with pytest.raises(ArgumentError, match="a chain of URLs"):
        as_path("zip://a::memory://b")
    with pytest.raises(ModelError, match=r"Cannot read 'memory://zoo/none.onnx'"):
        onnxamp.convert_model(f"{BASE}/none.onnx")
    with pytest.raises(ArgumentError, match=r"Cannot read inputs from memory://zoo/x.npz: there is no such file"):
        onnxamp.load_samples(f"{BASE}/x.npz")
    assert is_one_sentence(run("convert", f"{BASE}/none.onnx"))


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_model_is_the_same_from_everywhere(base: str) -> None:
    url = put(f"{base}/encoder.onnx", ENCODER.read_bytes())
    assert onnxamp.convert_model(url) == onnxamp.convert_model(ENCODER)
    data = with_data(wide(), f"{base}/model.onnx")
    assert onnxamp.convert_model(data) == onnxamp.convert_model("data.onnx") == onnxamp.convert_model(wide())
    assert onnxamp.diff_models(data, onnxamp.convert_model(data), provider="cpu").passed


@pytest.mark.slow
def test_only_what_is_looked_at_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a large file without its weights; of these the one that is asked for."""
    model = parse("(float[N,64] x) => (float[N,64] y) { [one] h = MatMul (x, a)\n [two] y = MatMul (h, b) }")
    rng = np.random.default_rng(0)
    big = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in
           (("a", (64, 1 << 16)), ("b", (1 << 16, 64)))}  # fmt: skip
    put(f"{BASE}/big.onnx", add_weights(model, big))
    traffic = Traffic(monkeypatch)
    read = Model.read(as_path(f"{BASE}/big.onnx"))
    assert [len(tensor.raw_data) for tensor in read.proto.graph.initializer] == [0, 0]
    assert traffic.read["big.onnx"] < 4 << 20 < 32 << 20
    traffic.read.clear()
    made = onnxamp.convert_file(f"{BASE}/big.onnx", f"{BASE}/low.onnx", external_data="always", validate=False)
    assert made.bytes_after == made.bytes_before // 2
    assert traffic.read["big.onnx"] < 3 * (32 << 20), "graph, statistics of constants, and conversion"
    for tensor in loaded(f"{BASE}/low.onnx").graph.initializer:
        assert tensor.data_type == TensorProto.FLOAT16
        assert np.array_equal(numpy_helper.to_array(tensor), big[tensor.name].astype(np.float16))


def test_data_outside_of_the_folder_are_refused() -> None:
    url = with_data(wide(), f"{BASE}/models/model.onnx")
    model = onnx.load("data.onnx", load_external_data=False)
    put(f"{BASE}/secret", b"x" * (64 * 64 * 4))
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "../secret"
    put(url, model)
    with pytest.raises(onnxamp.ExternalDataError, match="outside the model's folder 'memory://zoo/models'"):
        onnxamp.convert_model(url)


def test_samples(base: str) -> None:
    held = io.BytesIO()
    np.savez(held, x=np.ones((2, 64), np.float32))
    for number in (1, 2, 10):
        put(f"{base}/samples/{number}.npz", held.getvalue())
    put(f"{base}/one.json", b'{"x": [[1, 2], [3, 4]]}')
    samples = onnxamp.load_samples(f"{base}/samples")
    assert (len(samples), samples[2]["x"].shape) == (3, (2, 64))
    assert samples.description.endswith(f"{base}/samples")
    assert onnxamp.load_samples(f"{base}/one.json")[0]["x"].tolist() == [[1, 2], [3, 4]]
    put(f"{base}/empty/x.txt", b"")
    with pytest.raises(ArgumentError, match=r"no \.npz or \.json file"):
        onnxamp.load_samples(f"{base}/empty")


# --- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("external", ["never", "always"])
def test_what_is_written_is_what_is_written_here(base: str, external: str) -> None:
    put(f"{base}/in.onnx", wide())
    onnx.save(wide(), "in.onnx")
    remote = onnxamp.convert_file(
        f"{base}/in.onnx", f"{base}/out.onnx", external_data=external, shard_bytes=None, validate=False
    )
    here = onnxamp.convert_file("in.onnx", "out.onnx", external_data=external, validate=False)
    assert (remote.bytes_after, remote.summary) == (here.bytes_after, here.summary)
    for path in Path().glob("out.onnx*"):
        assert as_path(f"{base}/{path.name}").read_bytes() == path.read_bytes()
    assert names(base) == sorted(["in.onnx", *(path.name for path in Path().glob("out.onnx*"))])


def test_shards(base: str) -> None:
    put(f"{base}/in.onnx", wide())
    onnxamp.convert_file(
        f"{base}/in.onnx", f"{base}/out.onnx", external_data="always", shard_bytes=8192, validate=False
    )
    assert [name for name in names(base) if ".data" in name] == [f"out.onnx-0000{i}-of-00002.data" for i in (1, 2)]
    assert loaded(f"{base}/out.onnx") == onnxamp.convert_model(wide())


def test_a_result_takes_the_place_of_an_earlier_one(base: str) -> None:
    put(f"{base}/in.onnx", wide())
    for _ in range(3):
        onnxamp.convert_file(f"{base}/in.onnx", f"{base}/out.onnx", external_data="always", validate=False)
        assert len(names(base)) == 3, "the model, the result and its data: what was there is gone"
    put(f"{base}/in.onnx", wide(128))
    onnxamp.convert_file(f"{base}/in.onnx", f"{base}/out.onnx", external_data="never", validate=False)
    assert names(base) == ["in.onnx", "out.onnx"]
    assert loaded(f"{base}/out.onnx") == onnxamp.convert_model(wide(128))


def test_what_changes_nothing_is_copied(base: str) -> None:
    put(f"{base}/in.onnx", wide())
    onnxamp.convert_file(f"{base}/in.onnx", f"{base}/out.onnx", "O0", validate=False)
    assert as_path(f"{base}/out.onnx").read_bytes() == as_path(f"{base}/in.onnx").read_bytes()


def test_a_model_goes_from_here_to_there_and_back(base: str) -> None:
    onnx.save(wide(), "in.onnx")
    onnxamp.convert_file("in.onnx", f"{base}/out.onnx", validate=False)
    onnxamp.convert_file(f"{base}/out.onnx", "back.onnx", "O0", validate=False)
    assert Path("back.onnx").read_bytes() == as_path(f"{base}/out.onnx").read_bytes()


@pytest.mark.parametrize("external", ["never", "always"])
def test_a_write_that_fails_harms_nothing(base: str, external: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(f"{base}/in.onnx", wide())
    onnxamp.convert_file(f"{base}/in.onnx", f"{base}/out.onnx", external_data=external, validate=False)
    before = {name: as_path(f"{base}/{name}").read_bytes() for name in names(base)}
    kind, most = type(as_path(base).file_system), 0
    ask = kind.open

    class Full:
        """A file system that is full after some bytes."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            self.file.write(bytes(data)[:10])
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    for last in range(3):
        seen = 0

        def opened(fs: Any, path: str, mode: str = "rb", *more: Any, last: int = last, **how: Any) -> Any:
            nonlocal seen, most
            file = ask(fs, path, mode, *more, **how)
            seen += mode == "wb"
            most = max(most, seen)
            return Full(file) if mode == "wb" and seen == last + 1 else file

        with monkeypatch.context() as patch:
            patch.setattr(kind, "open", opened)
            try:
                onnxamp.convert_file(
                    f"{base}/in.onnx", f"{base}/out.onnx", "O3", external_data=external, validate=False
                )
            except OutputError as error:
                assert f"Cannot write '{base}/out.onnx': No space left on device" in str(error)  # noqa: PT017
                assert {name: as_path(f"{base}/{name}").read_bytes() for name in names(base)} == before
    assert most == (2 if external == "always" else 1)


def test_a_result_that_fails_its_validation_harms_nothing(base: str) -> None:
    put(f"{base}/norm.onnx", parse(NORM))
    put(f"{base}/out.onnx", b"something else")
    arguments = ("convert", f"{base}/norm.onnx", "-o", f"{base}/out.onnx", "--provider", "cpu")
    result = run(*arguments, "--level", "O3", "--no-hazards", "--no-cure")
    assert result.exit_code == 1, result.output
    assert as_path(f"{base}/out.onnx").read_bytes() == b"something else"
    assert names(base) == ["norm.onnx", "out.failed.onnx", "out.onnx"]


# --- commands -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.mostly_slow(fast=1)
def test_commands_take_urls(base: str) -> None:
    put(f"{base}/in.onnx", wide())
    held = io.BytesIO()
    np.savez(held, x=np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32))
    put(f"{base}/x.npz", held.getvalue())
    given = ("--provider", "cpu", "--inputs", f"{base}/x.npz")
    commands: list[tuple[object, ...]] = [
        ("convert", f"{base}/in.onnx", *given, "--save-plan", f"{base}/plan.json", "--html", f"{base}/page.html"),
        ("convert", f"{base}/in.onnx", "-o", f"{base}/sub/", "--plan", f"{base}/plan.json", *given),
        ("diff", f"{base}/in.onnx", f"{base}/in_fp16.onnx", *given, "--save", f"{base}/diff.json"),
        ("diff", f"{base}/diff.json"),
        ("check", f"{base}/in_fp16.onnx", *given, "--html", f"{base}/check.html"),
        ("inspect", f"{base}/in.onnx"),
        ("view", f"{base}/in.onnx", "-o", f"{base}/view.html"),
        ("tune", f"{base}/in.onnx", "-o", f"{base}/tuned.onnx", *given, "--state", f"{base}/state.json"),
        ("bench", f"{base}/in.onnx", f"{base}/in_fp16.onnx", "--provider", "cpu", "--inputs", f"{base}/x.npz"),
    ]
    for command in commands:
        result = run(*command)
        assert result.exit_code == 0, (command, result.output)
        assert "Traceback" not in result.output
    written = {"in_fp16.onnx", "plan.json", "page.html", "sub", "diff.json", "check.html", "view.html",
               "tuned.onnx", "state.json"}  # fmt: skip
    assert written | {"in.onnx", "x.npz"} == set(names(base))
    assert loaded(f"{base}/sub/in_fp16.onnx") == loaded(f"{base}/in_fp16.onnx")
    assert onnxamp.load_plan(f"{base}/plan.json").level == "O2"


def test_a_result_does_not_replace_what_is_read(base: str) -> None:
    put(f"{base}/in.onnx", wide())
    result = run("convert", f"{base}/in.onnx", "-o", f"{base}/in.onnx")
    assert result.exit_code == 2
    assert "is the model itself" in result.output
    result = run("convert", f"{base}/in.onnx", "--save-plan", f"{base}/in.onnx")
    assert "is already read or written" in result.output


def report(*arguments: object) -> Any:
    """The report on standard output; progress goes to standard error."""
    return json.loads(run(*arguments).stdout)["report"]


@pytest.mark.slow
def test_a_folder(tmp_path: Path) -> None:
    base = f"local://{tmp_path.as_posix()}/models"
    for name in ("a.onnx", "deep/b.onnx", ".hidden/c.onnx", "deep/text.txt"):
        put(f"{base}/{name}", wide())
    out = f"local://{tmp_path.as_posix()}/out"
    arguments = ("convert", base, "-o", out, "--jobs", 1, "--no-validate", "--format", "json")
    first = report(*arguments)
    assert [(row["name"], row["outcome"]) for row in first["rows"]] == [
        ("a.onnx", "converted"), ("deep/b.onnx", "converted"),
    ]  # fmt: skip
    assert [row["outcome"] for row in report(*arguments)["rows"]] == ["up to date"] * 2
    put(f"{base}/a.onnx", wide(128))
    assert [row["outcome"] for row in report(*arguments)["rows"]] == ["converted", "up to date"]
    assert loaded(f"{out}/deep/b.onnx") == onnxamp.convert_model(wide())


def test_ranges_and_streams(base: str) -> None:
    path = as_path(put(f"{base}/numbers", bytes(range(100))))
    assert read_range(path, 10, 5) == bytes(range(10, 15))
    assert read_range(path, 98, 5) == bytes((98, 99))
    assert read_range(path, 5, 0) == b""
    assert (path.stat().st_size, path.is_file(), path.is_dir(), path.parent.is_dir()) == (100, True, False, True)
    with pytest.raises(OSError, match="cannot be opened with mode 'wb'"):
        path.open("wb")
    with pytest.raises(KeyError), writing(path) as file:  # noqa: PT012
        file.write(b"other")
        raise KeyError
    assert path.read_bytes() == bytes(range(100))
    assert names(base) == ["numbers"]


@pytest.mark.slow
def test_a_plain_path_needs_no_fsspec() -> None:
    code = (
        "import sys, onnxamp; onnxamp.plan_model(sys.argv[1]); print('fsspec' in sys.modules);"
        "from pathlib import Path; print(type(Path('a')).__name__)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(ENCODER)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert shown[0] == "False"
    assert PurePosixPath(str(ENCODER)).name == ENCODER.name
