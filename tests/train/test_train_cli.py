"""``onnxamp train``: what is written, said and returned."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import is_one_sentence, run
from onnx import numpy_helper
from train_nets import Array, conv_net, feeds, mlp

from onnxamp._base.errors import ArgumentError
from onnxamp.train import Batches


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(conv_net(), "net.onnx")
    np.savez("data.npz", **feeds(10, (1, 8, 8), 10))


def weights(path: str) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.mark.slow
def test_trains_and_reports() -> None:
    arguments = ("net.onnx", "--data", "data.npz", "-o", "out.onnx", "--epochs", 2, "--batch-size", 4)
    skipped = run("train", *arguments)
    assert skipped.exit_code == 1
    assert "All 6 updates were skipped" in skipped.output
    assert not Path("out.onnx").exists()
    result = run("train", *arguments, "--loss-scale", "dynamic:1024")
    assert result.exit_code == 0, result.output
    for text in ("✔ Trained net.onnx at O2 float16 with adamw", "net.onnx → out.onnx", "epoch", "skipped updates"):
        assert text in result.output
    onnx.checker.check_model("out.onnx", full_check=True)
    before, after = weights("net.onnx"), weights("out.onnx")
    assert before.keys() == after.keys()
    assert not np.array_equal(before["c0.w"], after["c0.w"])


@pytest.mark.slow
def test_a_checkpoint_is_gone_on_from() -> None:
    more = ("--data", "data.npz", "--batch-size", 4, "--level", "O1", "-q", "--lr", "0.01")
    assert run("train", "net.onnx", "-o", "whole.onnx", "--epochs", 3, *more).output == ""
    for epochs in (1, 3):
        run("train", "net.onnx", "-o", "parts.onnx", "--epochs", epochs, "--checkpoint", "state", *more)
    whole, parts = weights("whole.onnx"), weights("parts.onnx")
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


def test_options_reach_the_optimizer() -> None:
    onnx.save(mlp(), "mlp.onnx")
    np.savez("mlp.npz", x=feeds()["x"], goal=np.ones((4, 3), np.float32))
    result = run(
        "train", "mlp.onnx", "--data", "mlp.npz", "-o", "out.onnx", "--loss", "mean-squared-error", "--label", "goal",
        "--optimizer", "momentum", "--level", "O0", "--weights", "w1", "--clip-norm", 1, "--accumulate", 2, "-q",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    before, after = weights("mlp.onnx"), weights("out.onnx")
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {"w1"}


@pytest.mark.parametrize(("change", "said", "code"), [
    (("--label", "class"), "'class' is missing or unknown", 2),
    (("--data", "missing.npz"), "missing.npz", 2),
    (("-o", "net.onnx"), "net.onnx", 2),
    (("--lr", "-1"), "learning_rate", 2),
    (("--data", "wrong.npz"), "'label' must be classes from 0 to 9, but 3 of 10 are not, such as", 2),
])  # fmt: skip
def test_failures_are_one_sentence(change: tuple[str, str], said: str, code: int) -> None:
    np.savez("wrong.npz", **feeds(10, (1, 8, 8), 10) | {"label": np.arange(3, 13)})
    arguments = {"--data": "data.npz", "-o": "out.onnx", **dict([change])}
    result = run("train", "net.onnx", *(text for pair in arguments.items() for text in pair))
    assert result.exit_code == code, result.output
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert is_one_sentence(result) or code == 2
    assert not Path("out.onnx").exists()


def test_batches_hold_each_sample_once() -> None:
    arrays = {"x": np.arange(7), "y": np.arange(7) * 2}
    batches = Batches(arrays, 3, seed=1)
    found = list(batches)
    assert len(batches) == len(found) == 3
    assert sorted(np.concatenate([batch["x"] for batch in found])) == list(range(7))
    assert all((batch["y"] == 2 * batch["x"]).all() for batch in found)
    assert any(not np.array_equal(a["x"], b["x"]) for a, b in zip(found, Batches(arrays, 3, 1, epoch=1), strict=True))
    with pytest.raises(ArgumentError, match="same number of samples"):
        Batches({"x": np.arange(3), "y": np.arange(2)}, 1)


SCALES = {"fixed:128": "128", "fixed": "128", "dynamic:1024": "1024", "dynamic": "16777216", "none": "1"}


@pytest.mark.parametrize("scale", SCALES)
def test_loss_scales(scale: str) -> None:
    result = run(
        "train", "net.onnx", "--data", "data.npz", "-o", "out.onnx", "--level", "O0", "--loss-scale", scale,
        "--epochs", 1, "--batch-size", 10,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if line.split()[:1] == ["1"])
    assert f"{float(SCALES[scale]):g}" in row.split()


@pytest.mark.slow
def test_precision_options_reach_the_network() -> None:
    arguments = (
        "train", "net.onnx", "--data", "data.npz", "--epochs", 3, "-q", "--loss-scale", "fixed:8", "--optimizer", "sgd",
        "--lr", 0.1,
    )  # fmt: skip
    runs = {
        "plain.onnx": ("--level", "O2"),
        "boosted.onnx": ("--level", "O2", "--boost-level", "O2"),
        "norms.onnx": ("--level", "O2", "--no-keep-batchnorm-fp32"),
        "kept.onnx": ("--level", "O3", "--keep-batchnorm-fp32"),
        "cast.onnx": ("--level", "O0", "--cast-model-type", "float16", "--keep-batchnorm-fp32"),
        "exact.onnx": ("--level", "O2", "--cast-model-type", "float32"),
        "o0.onnx": ("--level", "O0"),
    }
    for output, more in runs.items():
        result = run(*arguments, "-o", output, *more)
        assert result.exit_code == 0, result.output
    found = {output: weights(output)["c0.w"].tobytes() for output in runs}
    assert found["exact.onnx"] == found["o0.onnx"] != found["plain.onnx"]
    assert found["norms.onnx"] != found["plain.onnx"]
    assert found["kept.onnx"] == found["cast.onnx"]
    np.testing.assert_allclose(weights("boosted.onnx")["c0.w"], weights("plain.onnx")["c0.w"], atol=1e-4)


@pytest.mark.parametrize("scale", ["128", "fixed:0", "dynamic:x", "grow:2", "fixed:"])
def test_a_wrong_loss_scale_is_wrong_usage(scale: str) -> None:
    result = run("train", "net.onnx", "--data", "data.npz", "-o", "out.onnx", "--loss-scale", scale)
    assert result.exit_code == 2
    assert "write fixed:128, dynamic:65536 or none" in " ".join(result.output.split()).replace("│ ", "")


def test_weights_that_are_named_in_vain() -> None:
    arguments = ("train", "net.onnx", "--data", "data.npz", "-o", "out.onnx", "-q", "--weights", "c0.w")
    result = run(*arguments, "--weights", "c0.ww")
    assert result.exit_code == 2
    assert "--weights 'c0.ww' matches no weight that can be trained. Did you mean 'c0.w'?" in " ".join(
        result.stderr.split()
    )
    assert not Path("out.onnx").exists()


def test_the_bar_counts_all_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    @contextmanager
    def bar(**_: object) -> Iterator[Callable[..., None]]:
        yield lambda what, *_: shown.append(what.partition(",")[0])

    monkeypatch.setattr("onnxamp.train._network.progress_bar", bar)
    more = ("--data", "data.npz", "--batch-size", 8, "--level", "O0", "--checkpoint", "state")
    assert run("train", "net.onnx", "-o", "out.onnx", "--epochs", 1, *more).exit_code == 0
    assert run("train", "net.onnx", "-o", "out.onnx", "--epochs", 3, *more).exit_code == 0
    assert list(dict.fromkeys(shown)) == ["training: epoch 1/1", "training: epoch 2/3", "training: epoch 3/3"]


def test_a_checkpoint_without_its_package_fails_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = run("train", "missing.onnx", "--data", "data.npz", "-o", "out.onnx", "--checkpoint", "state")
    assert result.exit_code == 1
    assert "A checkpoint needs safetensors, which is not installed" in " ".join(result.output.split())
