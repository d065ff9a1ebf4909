"""How much memory a comparison takes: the models, and a few times the budget, however many values there are."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse

from onnxamp import convert_model

SIZE, ROWS, BLOCKS = 2048, 256, 6
MB = 2**20
VALUE = 4 * SIZE * ROWS
BUDGET = 8 * MB
CHILD = """
import sys
from pathlib import Path
from onnxamp._cli.command import group
code = group.main(sys.argv[1:], standalone_mode=False)
status = Path("/proc/self/status").read_text()
peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
print("peak", int(peak.split()[1]) * 1024, code or 0)
"""


def peak(*arguments: object) -> int:
    """Bytes that a process of its own needs for a command, at most. It must succeed."""
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    word, size, code = done.stdout.split()[-3:]
    assert (word, code) == ("peak", "0"), done.stdout[-2000:]
    return int(size)


def blocks() -> onnx.ModelProto:
    """100 MB of weights, and values of 2 MB each, most of which are read by the next op alone."""
    body, value = [], "X"
    for i in range(BLOCKS):
        body.append(
            f"m{i} = MatMul ({value}, w{i}) n{i} = Neg (m{i}) t{i} = Tanh (n{i}) s{i} = Sigmoid (t{i}) "
            f"a{i} = Abs (s{i}) b{i} = Sub (a{i}, t{i}) c{i} = Mul (b{i}, s{i})"
        )
        value = f"c{i}"
    text = f"(float[{ROWS},{SIZE}] X) => (float[{ROWS},{SIZE}] Y) {{ {' '.join(body)} Y = Relu ({value}) }}"
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((SIZE, SIZE), np.float32) / SIZE**0.5 for i in range(BLOCKS)}
    return add_weights(parse(text), weights)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    model = blocks()
    paths = folder / "model.onnx", folder / "low.onnx"
    low = convert_model(model, "O3")
    for proto, path in zip((model, low), paths, strict=True):
        onnx.save(proto, path, save_as_external_data=True, location=f"{path.stem}.data")
    return paths


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What the process needs for two models that are nearly nothing."""
    path = tmp_path_factory.mktemp("small") / "model.onnx"
    onnx.save(parse("(float[2] X) => (float[2] Y) { Y = Neg (X) }"), path)
    return peak("diff", path, path, "--layers")


def weights_of(paths: tuple[Path, ...]) -> int:
    return sum(path.with_suffix(".data").stat().st_size for path in paths)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak")
def test_memory_follows_the_budget(models: tuple[Path, Path], baseline: int) -> None:
    values = 7 * BLOCKS * VALUE
    assert values > 8 * BUDGET
    arguments = ("diff", *models, "--layers", "-q", "--budget")
    bounded = peak(*arguments, BUDGET // MB) - baseline
    unbounded = peak(*arguments, 100_000) - baseline
    assert bounded < weights_of(models) + 6 * BUDGET
    assert unbounded > bounded + values / 2, "a budget without effect"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak")
def test_the_search_for_hard_inputs_keeps_no_values(tmp_path: Path) -> None:
    count, rows = 64, 512
    value, body = "X", []
    for i in range(count):
        body.append(f"a{i} = Mul ({value}, {'kh'[i % 2]})")
        value = f"a{i}"
    ports = f"(float[{rows},{SIZE}] X) => (float[{rows},{SIZE}] Y)"
    model = parse(f"{ports} <float k = {{2}}, float h = {{0.5}}> {{ {' '.join(body)} Y = Neg ({value}) }}")
    onnx.save(model, tmp_path / "model.onnx")
    arguments = ("convert", tmp_path / "model.onnx", "-o", tmp_path / "low.onnx", "-q", "--stress")
    without, searched = (peak(*arguments, steps) for steps in (0, 4))
    assert searched < without + count * rows * SIZE * 4 / 2
