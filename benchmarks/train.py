"""A training step beside PyTorch's eager mode: same networks, same batches, AdamW, float32, on the CPU.

python benchmarks/train.py [--steps N] [--batch N] [--cores N]

The networks are two of the zoo, written again for PyTorch (``pip install .[torch]``). Each side warms up, and all
take turns on the same core or cores, so that a busy machine slows down each; the median of a step is reported. Also
reported is the step at level O2, emulated: it rounds every low-precision value, and says nothing about a GPU. Writes
benchmarks/results/train.json.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from onnxamp.train import AdamW, CrossEntropyLoss, build_train_network

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3
HIDDEN, INNER, HEADS, WORDS = 64, 128, 4, 128


class Residual(nn.Module):
    """The residual block of classifier.onnx."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*block(16, 16), *block(16, 16)[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two convolutions beside nothing."""
        return torch.relu(self.body(x) + x)


def block(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    """Convolution, batch normalization, Relu."""
    return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def classifier() -> nn.Module:
    """classifier.onnx."""
    layers = [*block(3, 16), nn.MaxPool2d(2), Residual(), *block(16, 32, 2), *block(32, 64, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Encoder(nn.Module):
    """encoder.onnx without its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(64, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The pooled state."""
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        return torch.tanh(self.pooler(self.layers(x)[:, 0]))


def theirs(network: nn.Module, data: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    """A step of PyTorch."""
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    x, y = torch.tensor(data), torch.tensor(labels)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


def ours(name: str, feeds: dict[str, np.ndarray], level: str) -> Callable[[], None]:
    """A step of onnxamp."""
    output = "pooled" if name == "encoder" else None
    loss = replace(CrossEntropyLoss(), output=output)
    net = build_train_network(ROOT / f"models/{name}.onnx", AdamW(), loss, level, boost_level="O1")
    return lambda: net.step(feeds)


def timed(sides: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Median seconds of a step of each side; they take turns."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(steps + WARM_UP):
        for side, step in sides.items():
            start = time.perf_counter()
            step()
            if number >= WARM_UP:
                found[side].append(time.perf_counter() - start)
    return {side: median(times) for side, times in found.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    torch.set_num_threads(options.cores)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, options.batch)
    images = rng.standard_normal((options.batch, 3, 32, 32)).astype(np.float32)
    ids = rng.integers(0, WORDS, (options.batch, 64))
    inputs = {"classifier": {"image": images}, "encoder": {"input_ids": ids, "attention_mask": np.ones_like(ids)}}
    rows: list[dict[str, Any]] = []
    for name, network in (("classifier", classifier()), ("encoder", Encoder())):
        feeds = {**inputs[name], "label": labels}
        sides = {
            "pytorch": theirs(network, next(iter(inputs[name].values())), labels),
            "onnxamp O0": ours(name, feeds, "O0"),
            "onnxamp O2, emulated": ours(name, feeds, "O2"),
        }
        rows.append({"network": name, "batch": options.batch, "seconds": timed(sides, options.steps)})
        sys.stdout.write(
            f"{name} " + str({side: f"{1000 * seconds:.1f} ms" for side, seconds in rows[-1]["seconds"].items()}) + "\n"
        )
    machine = {"processor": platform.processor() or platform.machine(), "cores": options.cores}
    versions = {name: version(name) for name in ("torch", "onnxruntime-gpu", "onnx")}
    text = json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1)
    (ROOT / "benchmarks/results/train.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
