"""Training of ONNX models: a step is one ordinary ONNX graph, which ONNX Runtime runs, in mixed precision if asked.

It is no part of ``import onnxamp``: import :mod:`onnxamp.train`.
"""

from onnxamp.train._build import build_train_network
from onnxamp.train._data import Batches
from onnxamp.train._decorate import Decorated, decorate
from onnxamp.train._flushed import FlushedGradient
from onnxamp.train._losses import Loss
from onnxamp.train._network import StepResult, TrainNetwork
from onnxamp.train._optimizers import SGD, Adam, AdamW, Momentum, Optimizer
from onnxamp.train._scaling import DynamicLossScaleManager, FixedLossScaleManager, GradScaler

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
