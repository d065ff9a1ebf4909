"""Debugging of numerics: the features of ``paddle.amp.debugging``, for ONNX models.

=====================================  =======================================================================
name                                   purpose
=====================================  =======================================================================
check_numerics                         statistics of a tensor; an error if it holds NaN or Inf
check_layer_numerics                   the same for the inputs and outputs of some nodes of a model
enable_tensor_checker,                 check every run of an InferenceSession and every step of training, op by op:
disable_tensor_checker,                abort at the first NaN or Inf, list all of them, list values that float16 cannot
tensor_checker                         represent, or dump statistics of all values (TensorCheckerConfig, DebugMode)
collect_operator_stats,                count the nodes per op type and precision
enable_operator_stats_collection,
disable_operator_stats_collection
compare_accuracy                       compare two dumps in a table (.xlsx or .csv)
compare_models                         compare two models in a table
=====================================  =======================================================================

ONNX Runtime does not show values inside a model, so only runs of :class:`InferenceSession` and steps of
:class:`onnxamp.train.TrainNetwork` are checked. Nothing is printed: where Paddle prints, these functions return, raise,
warn (:class:`NumericsWarning`) or write a file. Checks and counts apply only to the current thread or asyncio task.
"""

from onnxamp._base.public import export
from onnxamp.debugging._checker import (
    StepCheck,
    TensorChecker,
    TensorCheckerConfig,
    disable_tensor_checker,
    enable_tensor_checker,
    tensor_checker,
)
from onnxamp.debugging._compare import AccuracyRow, compare_accuracy, compare_models
from onnxamp.debugging._layer_check import LayerCheck, check_layer_numerics
from onnxamp.debugging._operators import (
    OperatorStats,
    collect_operator_stats,
    disable_operator_stats_collection,
    enable_operator_stats_collection,
)
from onnxamp.debugging._records import ValueRecord, read_dump
from onnxamp.debugging._session import InferenceSession
from onnxamp.debugging._tensors import (
    DebugMode,
    NumericsWarning,
    TensorStats,
    check_numerics,
)

__all__ = [
    "AccuracyRow",
    "DebugMode",
    "InferenceSession",
    "LayerCheck",
    "NumericsWarning",
    "OperatorStats",
    "StepCheck",
    "TensorChecker",
    "TensorCheckerConfig",
    "TensorStats",
    "ValueRecord",
    "check_layer_numerics",
    "check_numerics",
    "collect_operator_stats",
    "compare_accuracy",
    "compare_models",
    "disable_operator_stats_collection",
    "disable_tensor_checker",
    "enable_operator_stats_collection",
    "enable_tensor_checker",
    "read_dump",
    "tensor_checker",
]

export(__name__, __all__)
