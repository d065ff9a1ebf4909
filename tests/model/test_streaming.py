"""Weights on their way from file to file: in pieces, each once, to one data file or several, and counted."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from onnx import TensorProto, helper, numpy_helper
from stored import SIZE, answers, contents, external, files, is_low, locations, normal

import onnxamp
from onnxamp import convert_file
from onnxamp._facts.dtypes import FORMATS
from onnxamp._job.writing import Sink
from onnxamp._model import blobs
from onnxamp._model.blobs import layout
from onnxamp._model.data_files import MARK
from onnxamp._model.model import StoredWeights
from onnxamp._model.weights import ConversionCounts, convert

pytestmark = pytest.mark.usefixtures("all_threads")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return external(tmp_path)


# --- pieces -----------------------------------------------------------------------------------------------------


def bytes_read() -> int:
    """What this process has read from files so far, as Linux counts it."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("wish", ["always", "never"])
def test_tensors_larger_than_a_piece(tmp_path: Path, wish: str) -> None:
    """Each byte is read once, and what comes out are the bits of the conversion in memory."""
    source, target = big(tmp_path, 16), tmp_path / "low.onnx"
    # The first conversion in a process also reads modules and tables.
    convert_file(source, tmp_path / "first.onnx", external_data=wish, validate=False)
    counted = Path("/proc/self/io").exists()
    before = bytes_read() if counted else 0
    convert_file(source, target, external_data=wish, validate=False)
    assert not counted or bytes_read() - before < 1.1 * source.stat().st_size
    assert normal(onnx.load(target)) == normal(onnxamp.convert_model(source))


def test_pieces_of_many_tensors_go_to_few_threads(tmp_path: Path) -> None:
    """No piece is larger than it should be, and no more threads work on them than there should be."""
    pieces, threads = [], set()

    class Noted(blobs.Held):
        def read(self, start: int, stop: int, desk: blobs.Desk) -> Any:
            pieces.append(stop - start)
            threads.add(threading.get_ident())
            return super().read(start, stop, desk)

    path, size = tmp_path / "data", 3 << 20
    path.touch()
    blobs.write_blobs(path, [(number * size, Noted(bytes([number + 1]) * size)) for number in range(7)])
    assert path.read_bytes() == b"".join(bytes([number + 1]) * size for number in range(7))
    assert (max(pieces), sum(pieces)) == (blobs.PIECE // 2, 7 * size)
    assert len(threads) <= 4


def test_a_source_that_shrinks_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut off when the file for its data is made."""
    before, touch = files(model.parent), Path.touch

    def cut(path: Path, *arguments: Any, **options: Any) -> None:
        touch(path, *arguments, **options)
        if path.suffix == ".data":
            os.truncate(model.with_name("weights.bin"), 100)

    monkeypatch.setattr(Path, "touch", cut)
    with pytest.raises(onnxamp.SourceChangedError, match="changed while onnxamp read it"):
        convert_file(model, model.with_name("low.onnx"), validate=False)
    assert files(model.parent) == before


def test_an_error_that_only_the_disk_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing goes on while pieces are written; it is told of a failed write once, and must pass that on."""
    synced = threading.Event()

    def failing(_: int) -> None:
        synced.set()
        raise OSError(5, "Input/output error")

    class Slow(blobs.Held):
        def read(self, start: int, stop: int, desk: blobs.Desk) -> Any:
            synced.wait(60)
            return super().read(start, stop, desk)

    size = 40 * blobs.PIECE // 2
    monkeypatch.setattr(os, "fsync", failing)
    (tmp_path / "data").touch()
    with pytest.raises(OSError, match="Input/output error"):
        blobs.write_blobs(tmp_path / "data", [(0, Slow(bytes(size)))])
    assert (tmp_path / "data").stat().st_size == size


def test_initializers_that_share_their_data_are_written_once(tmp_path: Path) -> None:
    path = external(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    first, second = proto.graph.initializer[0], proto.graph.initializer[1]
    del second.external_data[:]
    second.external_data.extend(first.external_data)
    onnx.save(proto, path)
    made = convert_file(path, tmp_path / "low.onnx", validate=False)
    assert (tmp_path / "low.onnx.data").stat().st_size == SIZE * SIZE * 2 + len(MARK)
    assert made.weights["first"] == made.weights["second"]
    assert made.weights["first"].elements == SIZE * SIZE
    np.testing.assert_allclose(answers(tmp_path / "low.onnx"), answers(path), rtol=2e-2, atol=2e-3)


def test_small_weights_of_a_data_file_do_not_stay_there(tmp_path: Path) -> None:
    """The result stands for itself, in another folder, too."""
    model = parse("(float[2,3] X) => (float[3,2] Y) { t = Relu (X) Y = Reshape (t, shape) }")
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 2]), "shape"))
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "other").mkdir()
    convert_file(tmp_path / "m.onnx", tmp_path / "other" / "low.onnx", "O3", validate=False)
    assert numpy_helper.to_array(onnx.load(tmp_path / "other" / "low.onnx").graph.initializer[0]).tolist() == [3, 2]


# --- where data lie ---------------------------------------------------------------------------------------------


def test_layout() -> None:
    assert layout([100, 100_000, 10, 50_000]) == [(0, 0), (0, 4096), (0, 104_128), (0, 106_496)]
    assert layout([60, 60, 200, 10], 150) == [(0, 0), (0, 64), (1, 0), (2, 0)]
    assert layout([]) == []


def shards(folder: Path, name: str = "low.onnx") -> list[str]:
    return [file for file in files(folder) if file.startswith(f"{name}-")]


def test_shards(model: Path) -> None:
    target = model.with_name("low.onnx")
    convert_file(model, target, shard_bytes=10_000, validate=False)
    names = ["low.onnx-00001-of-00002.data", "low.onnx-00002-of-00002.data"]
    assert shards(model.parent) == names
    assert sorted(locations(target).values()) == names
    assert is_low(target)
    convert_file(model, target, shard_bytes=100_000, validate=False)
    assert files(model.parent) == ["low.onnx", "low.onnx.data", "model.onnx", "weights.bin"]
    convert_file(model, target, shard_bytes=1, validate=False)
    assert shards(model.parent) == names
    convert_file(model, target, shard_bytes=1, validate=False)
    assert shards(model.parent) == names
    assert len(files(model.parent)) == 5
    assert is_low(target)
    convert_file(model, target, external_data="never", validate=False)
    assert files(model.parent) == ["low.onnx", "model.onnx", "weights.bin"]


def test_a_disk_that_fills_up_at_the_second_shard(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = model.with_name("low.onnx")
    convert_file(model, target, shard_bytes=1, validate=False)
    before = contents(model.parent)
    touch = Path.touch

    def full(path: Path, *arguments: Any, **options: Any) -> None:
        if "-00002-of-" in path.name:
            raise OSError(28, "No space left on device")
        touch(path, *arguments, **options)

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(onnxamp.OutputError, match="No space left"):
        convert_file(model, target, shard_bytes=1, validate=False)
    assert contents(model.parent) == before


def test_shards_need_a_size_and_data_files(model: Path) -> None:
    for wishes in ({"shard_bytes": 0}, {"shard_bytes": 10, "external_data": "never"}):
        with pytest.raises(onnxamp.ArgumentError, match="shard_bytes"):
            convert_file(model, model.with_name("low.onnx"), **wishes, validate=False)


@pytest.mark.parametrize(("size", "count"), [("9kB", 2), ("9KiB", 2), ("0.1 MB", 0), ("8191", 2), ("1g", 0)])
def test_shards_from_the_command_line(model: Path, size: str, count: int) -> None:
    result = run("convert", model, "-o", model.with_name("low.onnx"), "--shard-size", size, "--no-validate")
    assert result.exit_code == 0, result.output
    assert len(shards(model.parent)) == count


def test_a_size_that_is_none(model: Path) -> None:
    for nothing in ("0", "0GB"):
        assert f"'{nothing}' is not a size" in run("convert", model, "--shard-size", nothing).output
    result = run("convert", model, "--shard-size", "large")
    assert result.exit_code == 2
    assert "write it like 500MB or 2GB" in result.output


def test_a_result_over_the_limit_goes_to_a_data_file_by_itself(tmp_path: Path) -> None:
    """Weights of 3 GB fit into one file if half of them are halved, and then some."""
    stored, file = StoredWeights(3 * 10**9, frozenset()), tmp_path / "low.onnx"
    assert Sink(file).is_external(stored, 2 * 10**9)
    assert not Sink(file).is_external(stored, 3 * 10**9)
    assert not Sink(file, "never").is_external(stored, 3 * 10**9)
    with pytest.raises(onnxamp.ArgumentError, match="2000000000 bytes of weights do not fit into one file"):
        Sink(file, "never").is_external(stored, 2 * 10**9)


# --- safetensors ------------------------------------------------------------------------------------------------


def as_safetensors(path: Path, groups: list[list[int]], odd: bytes = b"") -> None:
    """Move weights into .safetensors files as onnx-ir's save_safetensors does: a header, then data without gaps."""
    proto = onnx.load(path)
    for number, group in enumerate(groups):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        data, entries, places = odd, {}, []
        for index in group:
            tensor = proto.graph.initializer[index]
            raw = tensor.raw_data
            entries[tensor.name] = {
                "dtype": "F32",
                "shape": list(tensor.dims),
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            places.append((tensor, len(data), len(raw)))
            data += raw
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        path.with_name(name).write_bytes(struct.pack("<Q", len(header)) + header + data)
        for tensor, offset, length in places:
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", name), ("offset", 8 + len(header) + offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    onnx.save(proto, path)


@pytest.mark.parametrize("odd", [b"", b"x"], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("groups", [[[0, 1]], [[0], [1]]], ids=["one", "shards"])
def test_safetensors_as_a_source(tmp_path: Path, groups: list[list[int]], odd: bytes) -> None:
    path = external(tmp_path)
    expected = answers(path)
    as_safetensors(path, groups, odd)
    (tmp_path / "weights.bin").unlink()
    convert_file(path, tmp_path / "low.onnx", validate=False)
    assert is_low(tmp_path / "low.onnx")
    np.testing.assert_allclose(answers(tmp_path / "low.onnx"), expected, rtol=2e-2, atol=2e-3)
    assert onnxamp.convert_model(path).graph.initializer[0].data_type == TensorProto.FLOAT16
    assert onnxamp.diff_models(path, tmp_path / "low.onnx").passed


# --- what is lost -----------------------------------------------------------------------------------------------


def numbers(low: Any) -> np.ndarray:
    """All that can happen to a number, with both signs: ties at both ends, subnormals, infinities, NaN."""
    ends = [0, low.smallest_subnormal / 2, np.nextafter(np.float32(low.smallest_subnormal / 2), np.float32(1)),
            low.smallest_subnormal, low.smallest_normal * 0.75, low.smallest_normal, 1, low.max_finite,
            np.nextafter(np.float32(low.overflow), np.float32(0)), low.overflow, np.float32(3.4e38), np.inf,
            np.nan]  # fmt: skip
    array = np.array([*ends, *(-end for end in ends)], np.float32)
    return np.random.default_rng(0).choice(array, 5000)


@pytest.mark.parametrize("low", FORMATS.values(), ids=FORMATS)
def test_counts_and_bits(low: Any) -> None:
    import ml_dtypes

    given = numbers(low)
    [(raw, counts)] = convert([(given, low.max_finite)], low)
    kind = np.float16 if low.name == "float16" else ml_dtypes.bfloat16
    with np.errstate(over="ignore"):
        plain = given.astype(kind)
    saturated = np.isinf(plain.astype(np.float32)) & np.isfinite(given)
    expected = np.where(saturated, np.copysign(np.float32(low.max_finite), given).astype(kind), plain)
    found, wide = np.frombuffer(raw, kind), np.abs(plain.astype(np.float32))
    assert np.array_equal(found.view(np.uint16)[~np.isnan(given)], expected.view(np.uint16)[~np.isnan(given)])
    assert np.isnan(found[np.isnan(given)].astype(np.float32)).all()
    assert counts == ConversionCounts(
        given.size,
        int(saturated.sum()),
        int(((wide == 0) & (given != 0)).sum()),
        int(((wide > 0) & (wide < low.smallest_normal)).sum()),
    )


@pytest.mark.parametrize("share", [0, 0.001, 0.9], ids="{} of the elements become zero".format)
def test_arrays_come_out_together_as_they_do_alone(share: float) -> None:
    low, generator = FORMATS["float16"], np.random.default_rng(0)
    sizes = [3, 0, 1, 5, 9000, 1, 8192, 8193, *[7] * 70]
    arrays = [
        (generator.standard_normal(size, np.float32) * np.float32(1e5), float(n + 1)) for n, size in enumerate(sizes)
    ]
    for array, _ in arrays:
        array[generator.random(array.size) < share] *= np.float32(1e-30)
    arrays[5][0][0], arrays[6][0][7] = np.nan, np.inf
    together = list(convert(arrays, low))
    assert together == [next(convert([array], low)) for array in arrays]
    flushed = sum(counts.flushed for _, counts in together)
    assert abs(flushed / sum(sizes) - share) < 0.02
    if share < 0.5:
        assert len({raw for raw, counts in together if counts.overflowed}) > 70, "each saturates to a number of its own"


def lossy(folder: Path, size: int = 64) -> Path:
    """A weight that loses elements in every way, in a data file, and one in a Constant node; at both ends of each."""
    proto = parse(
        f"(float[N,{size}] X) => (float[N,{size}] Y) {{"
        " h = MatMul (X, w) k = Constant <value = float {1}> () Y = MatMul (h, k) }"
    )
    weight = np.ones((size, size), np.float32)
    weight[0, :3], weight[1, :5], weight[-1, :7] = 1e30, 1e-12, 1e-6
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    proto.graph.node[1].attribute[0].t.CopyFrom(numpy_helper.from_array(weight))
    path = folder / "model.onnx"
    wishes = {"save_as_external_data": True, "size_threshold": 0, "convert_attribute": True}
    onnx.save(proto, path, location="weights.bin", **wishes)
    return path


@pytest.mark.parametrize("wish", ["always", "never"])
def test_losses_are_counted_while_weights_are_written(tmp_path: Path, wish: str) -> None:
    """Of each weight, which is larger than a piece, in sum."""
    size = 1100
    made = convert_file(
        lossy(tmp_path, size), tmp_path / "low.onnx", "O3", external_data=wish, hazards=False, validate=False
    )
    assert made.weights == dict.fromkeys(("w", "k"), ConversionCounts(size * size, 3, 5, 7))


def test_losses_are_reported(tmp_path: Path) -> None:
    arguments = ("convert", lossy(tmp_path), "-o", tmp_path / "low.onnx", "--no-hazards", "--no-validate")
    text = run(*arguments, "-v").output
    assert "Weights that lost elements\n  2 of 2 converted tensors." in text
    assert [line.split() for line in text.splitlines() if line.startswith("  w ")] == [["w", "4,096", "3", "5", "7"]]
    report = json.loads(run(*arguments, "--format", "json").output)
    assert report["weights"]["k"] == {"elements": 4096, "overflowed": 3, "flushed": 5, "subnormal": 7}
    run(*arguments, "--html", tmp_path / "page.html")
    assert "subnormal" in (tmp_path / "page.html").read_text(encoding="utf-8")


# --- killed, and bounded ----------------------------------------------------------------------------------------

KILLED = """
import os, sys
from onnxamp import convert_file
convert_file(sys.argv[1], sys.argv[2], validate=False)
for _ in sys.stdin:
    child = os.fork()
    while child == 0:
        for dtype in ("float16", "bfloat16"):
            options = {"external_data": "always", "shard_bytes": 1 << 20, "validate": False}
            convert_file(sys.argv[1], sys.argv[2], dtype=dtype, **options)
            print(os.getpid(), "converted", flush=True)
    print(child, "began", flush=True)
    os.waitpid(child, 0)
"""
"""Forks a process for each line; it converts until it is killed."""


def that_converted_twice(server: subprocess.Popen[str]) -> int:
    """Return the process that has just been forked; what those before it told is still to be read."""
    counts, child = Counter[str](), ""
    while counts[child] < 2:
        process, word = server.stdout.readline().split()
        if word == "began":
            child = process
        else:
            counts[process] += 1
    return int(child)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_killed_at_any_moment_the_result_is_whole(tmp_path: Path) -> None:
    source, target = big(tmp_path), tmp_path / "low.onnx"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", KILLED, source, target], **pipes) as server:
        for delay in (0.0, 0.03, 0.06, 0.1):
            server.stdin.write("\n")
            child = that_converted_twice(server)
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            (weight,) = onnx.load(target).graph.initializer
            low = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}[weight.data_type]
            given = onnx.load(source).graph.initializer[0]
            assert weight.raw_data == next(convert([(numpy_helper.to_array(given), 1)], FORMATS[low]))[0]
        server.stdin.close()


def big(folder: Path, megabytes: int = 8) -> Path:
    rows, few = megabytes << 8, np.random.default_rng(0).standard_normal((256, 1024), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "w"], ["Y"])], "big",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [1, rows])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [1, 1024])],
        [numpy_helper.from_array(np.resize(few, (rows, 1024)), "w")],
    )  # fmt: skip
    path = folder / "big.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


BOUNDED = """
import os, sys, threading, time
from pathlib import Path
import onnxamp
from onnxamp._cli.command import group

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

def work(code):
    peak, done = held(), threading.Event()
    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, held())
    watcher = threading.Thread(target=watch)
    watcher.start()
    exec(code)
    done.set()
    watcher.join()
    print(peak, flush=True)

for code in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            work(code)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
"""
"""Forks a process for each line, which is run; it prints the most bytes that were held."""
WAYS = {
    "library": "onnxamp.convert_file({source!r}, {target!r}, validate=False)",
    "data file": "onnxamp.convert_file({source!r}, {target!r}, external_data='always', validate=False)",
    "in memory": "onnxamp.convert_model({source!r})",
    "command": "group.main(['convert', {source!r}, '-o', {target!r}, '--no-validate', '-q'], standalone_mode=False)",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("large")
    small = folder / "small"
    small.mkdir()
    yield big(folder, 128), big(small, 1)
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()


@pytest.fixture(scope="module")
def peaks(large: tuple[Path, Path]) -> dict[str, list[int]]:
    """For each way, the peaks with the large model and with the small one."""
    asked = [way.format(source=str(path), target=str(path.with_name("low.onnx"))) for way in WAYS.values()
             for path in large]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", BOUNDED], input="\n".join(asked), capture_output=True, text=True,
                          check=False)  # fmt: skip
    found = list(map(int, done.stdout.split()))
    assert len(found) == len(asked), done.stderr[-2000:]
    return {way: found[2 * number : 2 * number + 2] for number, way in enumerate(WAYS)}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak")
@pytest.mark.parametrize("way", WAYS)
def test_memory_does_not_follow_the_weights(peaks: dict[str, list[int]], way: str) -> None:
    """One tensor of 128 MB: what is converted in memory is held once, and what is written not at all."""
    large, small = peaks[way]
    assert large - small < (2.5 * 128 if way == "in memory" else 64) * 2**20
