"""Automatic mixed precision: the API of ``mindspore.amp`` and ``paddle.amp``, for ONNX models.

======================================================  ============================================================
to convert a model                                      auto_mixed_precision, custom_mixed_precision,
                                                        get_white_list, get_black_list
to train one                                            build_train_network, decorate, GradScaler,
                                                        FixedLossScaleManager, DynamicLossScaleManager
for what is created in a block of code                  auto_cast
to find NaN and Inf, and compare                        debugging
======================================================  ============================================================
"""

from onnxamp import debugging
from onnxamp._amp import auto_cast, auto_mixed_precision, custom_mixed_precision
from onnxamp._options.lists import get_black_list, get_white_list
from onnxamp._public import export
from onnxamp.train import (
    Decorated,
    DynamicLossScaleManager,
    FixedLossScaleManager,
    GradScaler,
    LossScaleManager,
    TrainNetwork,
    build_train_network,
    decorate,
)

__all__ = [
    "Decorated",
    "DynamicLossScaleManager",
    "FixedLossScaleManager",
    "GradScaler",
    "LossScaleManager",
    "TrainNetwork",
    "auto_cast",
    "auto_mixed_precision",
    "build_train_network",
    "custom_mixed_precision",
    "debugging",
    "decorate",
    "get_black_list",
    "get_white_list",
]

export(__name__, __all__)
