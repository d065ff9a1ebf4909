"""Mixed-precision training of ONNX models: a training step is one ordinary ONNX graph, run by ONNX Runtime."""

from onnxamp._base.public import export
from onnxamp._gradients.walk import Gradients, add_gradients
from onnxamp.train._batches import Batches
from onnxamp.train._build import build_train_network
from onnxamp.train._flushed import FlushedGradient
from onnxamp.train._grad_scaler import AmpScaler, GradScaler
from onnxamp.train._levels import Decorated, decorate
from onnxamp.train._loss import Loss
from onnxamp.train._losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SoftmaxCrossEntropyWithLogits,
)
from onnxamp.train._network import TrainNetwork
from onnxamp.train._optimizers import SGD, Adam, AdamW, Momentum, Optimizer
from onnxamp.train._scalers import (
    DynamicLossScaler,
    LossScaler,
    StaticLossScaler,
    all_finite,
    init_status,
)
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
    "AmpScaler",
    "BCELoss",
    "BCEWithLogitsLoss",
    "Batches",
    "CrossEntropyLoss",
    "Decorated",
    "DynamicLossScaleManager",
    "DynamicLossScaler",
    "FixedLossScaleManager",
    "FlushedGradient",
    "GradScaler",
    "Gradients",
    "L1Loss",
    "Loss",
    "LossScaleManager",
    "LossScaler",
    "MSELoss",
    "Momentum",
    "NLLLoss",
    "Optimizer",
    "ScaleUpdate",
    "SoftmaxCrossEntropyWithLogits",
    "StaticLossScaler",
    "StepArrays",
    "StepGradients",
    "StepResult",
    "TrainNetwork",
    "add_gradients",
    "all_finite",
    "build_train_network",
    "decorate",
    "init_status",
]

export(__name__, __all__)
