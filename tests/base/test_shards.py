"""Data files of one checkpoint that several processes measure and write: the bytes and the report are those of one."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from onnx import numpy_helper

import onnxamp
from onnxamp._base.processes import Processes
from onnxamp._graph.graph import Graph
from onnxamp._job import Job
from onnxamp._job.writing import Sink, write_conversion
from onnxamp._model import data_files
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._runtime.run import Run

pytestmark = pytest.mark.usefixtures("forked")
MB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six weights of a megabyte each, in two data files: one does not fit float16, and one loses some elements."""
    monkeypatch.chdir(tmp_path)
    names = [f"w{number}" for number in range(6)]
    nodes = "\n".join(f"[n{i}] x{i + 1} = MatMul (x{i}, {name})" for i, name in enumerate(names))
    model = parse(f"(float[1,512] x0) => (float[1,512] x6) {{ {nodes} }}")
    random = np.random.default_rng(0)
    for number, name in enumerate(names):
        array = random.standard_normal((512, 512)).astype(np.float32) / 512
        if number == 2:
            array[3, 4] = 1e6
        if number == 4:
            array[:2] = 1e-9
        tensor = numpy_helper.from_array(array, name)
        model.graph.initializer.append(tensor)
        onnx.external_data_helper.set_external_data(tensor := model.graph.initializer[-1], f"part{number // 3}")
    onnx.save(model, "big.onnx")
    return Path("big.onnx")


@pytest.fixture
def pair() -> Iterator[Processes]:
    with closing(Processes(2, 1)) as workers:
        yield workers


def written(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def convert(folder: str, **options: object) -> onnxamp.Conversion:
    Path(folder).mkdir()
    return onnxamp.convert_file("big.onnx", f"{folder}/low.onnx", shard_bytes=MB, **options, validate=False)


def test_bytes_and_report_are_those_of_one_process(checkpoint: Path) -> None:
    one, several = convert("one"), convert("several", jobs=2)
    assert len(written("one")) >= 4
    assert written("several") == written("one")
    assert replace(several, target=one.target) == one
    assert sum(counts.flushed for counts in one.weights.values()) >= 2 * 512
    assert "constant range" in {row.reason for row in one.plan.rows if not row.low}


def test_the_main_process_reads_no_weight(checkpoint: Path, pair: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.read(checkpoint)
    wanted = Graph.of(model.proto, model.folder)
    stats = {value: wanted.constants.stats(value) for value in wanted.constants.floats()}
    with data_files.measured(model, pair):
        graph = Graph.of(model.proto, model.folder)
        for path in Path().glob("part*"):
            path.write_bytes(bytes(path.stat().st_size))
        assert {value: graph.constants.stats(value) for value in graph.constants.floats()} == stats
    assert Graph.of(model.proto, model.folder).constants.stats(next(iter(stats))).largest == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which file is flushed")
def test_a_worker_that_dies_leaves_the_old_result(
    checkpoint: Path, pair: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert("out")
    before = written("out")
    model = Model.read(checkpoint)
    sink = Sink(Path("out/low.onnx"), shard_bytes=MB)
    monkeypatch.setattr(data_files, "_writing", _dying)
    with pytest.raises(onnxamp.OutputError, match=r"Cannot write .*The worker process ended with exit code 5"):
        write_conversion(Job(model=model, options=Options(level="O1"), run=Run(workers=pair)), sink)
    assert written("out") == before


def _dying(_: object) -> object:
    return os._exit(5)


@pytest.mark.slow
def test_the_command(checkpoint: Path) -> None:
    arguments = ["convert", "big.onnx", "--no-validate", "--shard-size", "1MB"]
    Path("one").mkdir()
    Path("two").mkdir()
    assert run(*arguments, "-o", "one/low.onnx").exit_code == 0
    assert run(*arguments, "-o", "two/low.onnx", "--jobs", "2").exit_code == 0
    assert written("one") == written("two")
    assert run("convert", "big.onnx", "-o", "three.onnx", "--jobs", "2", "--samples", "3").exit_code == 0
