"""Training of ONNX models in mixed precision: a training step is one ordinary ONNX graph, run by ONNX Runtime."""

from onnxamp._gradients.walk import Gradients, add_gradients
from onnxamp._public import export
from onnxamp.train._build import build_train_network
from onnxamp.train._feeds import Batches, Loss
from onnxamp.train._flushed import FlushedGradient
from onnxamp.train._grad_scaler import GradScaler
from onnxamp.train._levels import Decorated, decorate
from onnxamp.train._network import TrainNetwork
from onnxamp.train._optimizers import SGD, Adam, AdamW, Momentum, Optimizer
from onnxamp.train._scaling import (
    FROM_LEVEL,
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
    ScaleUpdate,
)
from onnxamp.train._sessions import StepArrays, StepGradients, StepResult

__all__ = [
    "FROM_LEVEL",
    "SGD",
    "Adam",
    "AdamW",
    "Batches",
    "Decorated",
    "DynamicLossScaleManager",
    "FixedLossScaleManager",
    "FlushedGradient",
    "GradScaler",
    "Gradients",
    "Loss",
    "LossScaleManager",
    "Momentum",
    "Optimizer",
    "ScaleUpdate",
    "StepArrays",
    "StepGradients",
    "StepResult",
    "TrainNetwork",
    "add_gradients",
    "build_train_network",
    "decorate",
]

export(__name__, __all__)
