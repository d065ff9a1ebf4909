"""Automatic mixed precision: the API of ``mindspore.amp``, ``paddle.amp`` and ``torch.amp``, for ONNX models.

======================================================  ============================================================
to convert a model                                      auto_mixed_precision, custom_mixed_precision,
                                                        get_white_list, get_black_list, is_float16_supported,
                                                        is_bfloat16_supported, HazardWarning, OptionWarning
to train one                                            build_train_network, decorate, GradScaler, AmpScaler,
                                                        LossScaleManager, FixedLossScaleManager,
                                                        DynamicLossScaleManager
to scale arrays                                         LossScaler, StaticLossScaler, DynamicLossScaler,
                                                        all_finite, init_status
for sessions and networks created in a block of code    auto_cast, autocast (as in PyTorch)
by the former names of Paddle                           amp_guard, amp_decorate
to find NaN and Inf, and compare                        debugging
======================================================  ============================================================
"""

from onnxamp import debugging
from onnxamp._amp import (
    auto_cast,
    auto_mixed_precision,
    autocast,
    custom_mixed_precision,
    is_bfloat16_supported,
    is_float16_supported,
)
from onnxamp._base.errors import HazardWarning, OptionWarning
from onnxamp._base.public import export
from onnxamp._options.lists import get_black_list, get_white_list
from onnxamp.train import (
    AmpScaler,
    Decorated,
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    GradScaler,
    LossScaleManager,
    LossScaler,
    StaticLossScaler,
    TrainNetwork,
    all_finite,
    build_train_network,
    decorate,
    init_status,
)

amp_guard = auto_cast
amp_decorate = decorate

__all__ = [
    "AmpScaler",
    "Decorated",
    "DynamicLossScaleManager",
    "DynamicLossScaler",
    "FixedLossScaleManager",
    "GradScaler",
    "HazardWarning",
    "LossScaleManager",
    "LossScaler",
    "OptionWarning",
    "StaticLossScaler",
    "TrainNetwork",
    "all_finite",
    "amp_decorate",
    "amp_guard",
    "auto_cast",
    "auto_mixed_precision",
    "autocast",
    "build_train_network",
    "custom_mixed_precision",
    "debugging",
    "decorate",
    "get_black_list",
    "get_white_list",
    "init_status",
    "is_bfloat16_supported",
    "is_float16_supported",
]

export(__name__, __all__)
