"""Whole training runs beside PyTorch's, in float32. Skipped where there is none: ``pip install .[torch]``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from train_nets import conv_net, feeds, mlp

from onnxamp.train import SGD, Adam, AdamW, Momentum, Optimizer, build_train_network

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install .[torch]")

Weights = dict[str, Any]


def mlp_logits(w: Weights, x: Any) -> Any:
    return torch.tanh(x @ w["w0"] + w["b0"]) @ w["w1"] + w["b1"]


def conv_logits(w: Weights, x: Any) -> Any:
    for i in (0, 1):
        x = torch.nn.functional.conv2d(x, w[f"c{i}.w"], stride=i + 1, padding=1)
        x = torch.relu(torch.nn.functional.batch_norm(x, None, None, w[f"n{i}.s"], w[f"n{i}.b"], training=True))
    return x.mean((2, 3)) @ w["head.w"] + w["head.b"]


RUNS: list[tuple[Optimizer, Callable[[list[Any]], Any], float | None]] = [
    (SGD(learning_rate=0.1, weight_decay=0.01), lambda w: torch.optim.SGD(w, 0.1, weight_decay=0.01), None),
    (Momentum(learning_rate=0.1, weight_decay=0.01),
     lambda w: torch.optim.SGD(w, 0.1, momentum=0.9, weight_decay=0.01), None),
    (Momentum(learning_rate=0.05, nesterov=True), lambda w: torch.optim.SGD(w, 0.05, 0.9, nesterov=True), None),
    (Adam(learning_rate=0.01, weight_decay=0.1), lambda w: torch.optim.Adam(w, 0.01, weight_decay=0.1), None),
    (AdamW(learning_rate=0.01, weight_decay=0.1), lambda w: torch.optim.AdamW(w, 0.01, weight_decay=0.1), None),
    (SGD(learning_rate=0.1, clip_norm=0.3), lambda w: torch.optim.SGD(w, 0.1), 0.3),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "theirs", "clip"), RUNS, ids=[type(run[0]).__name__ for run in RUNS])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_training_goes_as_pytorchs(kind: str, optimizer: Optimizer, theirs: Any, clip: float | None) -> None:
    model, shape, classes = (mlp(), (6,), 3) if kind == "mlp" else (conv_net(), (1, 8, 8), 10)
    net = build_train_network(model, optimizer, "cross-entropy")
    weights = {name: torch.tensor(net.state()[name], requires_grad=True) for name in net.plan.weights}
    other = theirs(list(weights.values()))
    for seed in range(8):
        data = feeds(8, shape, classes, seed)
        result = net.step(data)
        other.zero_grad()
        logits = (mlp_logits if kind == "mlp" else conv_logits)(weights, torch.tensor(data["x"]))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(data["label"]))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), clip or 1e30)
        other.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-4)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-3)
    for name, weight in weights.items():
        np.testing.assert_allclose(net.state()[name], weight.detach().numpy(), rtol=2e-3, atol=2e-4)
