"""Looking into runs of a model: what ``paddle.amp.debugging`` offers, for ONNX models that ONNX Runtime runs.

=====================================  =======================================================================
name                                   what it does
=====================================  =======================================================================
check_numerics                         statistics of one tensor, and an error where it holds NaN or Inf
check_layer_numerics                   the same for what goes into some nodes of a model and comes out
enable_tensor_checker,                 check every run of an InferenceSession op by op: abort at the first NaN
disable_tensor_checker,                or Inf, list all, list what would not fit float16, or dump all
tensor_checker                         statistics; TensorCheckerConfig and DebugMode say which, and where to
collect_operator_stats,                how many nodes of which op type run in which precision
enable_operator_stats_collection,
disable_operator_stats_collection
compare_accuracy                       two dumps beside each other, as .xlsx or .csv
compare_models                         two models beside each other, likewise
=====================================  =======================================================================

ONNX Runtime shows nothing of what is inside a model, so that runs are looked into where they are those of
:class:`InferenceSession`. Nothing is printed: what Paddle prints is returned, raised, a :class:`NumericsWarning`, or a
file. What is switched on is so for the current thread (or asyncio task) alone.
"""

from onnxamp.debugging._checker import TensorChecker, disable_tensor_checker, enable_tensor_checker, tensor_checker
from onnxamp.debugging._compare import AccuracyRow, compare_accuracy, compare_models
from onnxamp.debugging._layers import LayerCheck, check_layer_numerics
from onnxamp.debugging._modes import DebugMode, TensorCheckerConfig
from onnxamp.debugging._operators import (
    OperatorStats,
    collect_operator_stats,
    disable_operator_stats_collection,
    enable_operator_stats_collection,
)
from onnxamp.debugging._records import StepCheck, ValueRecord, read_dump
from onnxamp.debugging._session import InferenceSession
from onnxamp.debugging._tensors import NumericsWarning, TensorStats, check_numerics

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
