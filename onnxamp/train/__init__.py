"""Training of ONNX models: a step is one ordinary ONNX graph, which ONNX Runtime runs, in mixed precision if asked.

It is no part of ``import onnxamp``: import :mod:`onnxamp.train`.
"""

from onnxamp.train.build import build_train_network
from onnxamp.train.data import Batches
from onnxamp.train.decorate import Decorated, decorate
from onnxamp.train.flushed import FlushedGradient
from onnxamp.train.losses import Loss
from onnxamp.train.network import StepResult, TrainNetwork
from onnxamp.train.optimizers import SGD, Adam, AdamW, Momentum, Optimizer
from onnxamp.train.scaling import DynamicLossScaleManager, FixedLossScaleManager, GradScaler

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Batches",
    "Decorated",
    "DynamicLossScaleManager",
    "FixedLossScaleManager",
    "FlushedGradient",
    "GradScaler",
    "Loss",
    "Momentum",
    "Optimizer",
    "StepResult",
    "TrainNetwork",
    "build_train_network",
    "decorate",
]
