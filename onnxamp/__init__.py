"""onnxamp: mixed precision for ONNX models."""

from onnxamp.amp import auto_mixed_precision, custom_mixed_precision
from onnxamp.casts import remove_redundant_casts
from onnxamp.convert import Conversion, apply_plan, convert_file, convert_model, plan_model
from onnxamp.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContradictionError,
    ExternalDataError,
    InternalError,
    ModelError,
    NumericsError,
    OnnxAmpError,
    OpsetError,
    OutputError,
    RuntimeFailure,
)
from onnxamp.plan import Plan, load_plan
from onnxamp.policy import get_black_list, get_white_list

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ContradictionError",
    "Conversion",
    "ExternalDataError",
    "InternalError",
    "ModelError",
    "NumericsError",
    "OnnxAmpError",
    "OpsetError",
    "OutputError",
    "Plan",
    "RuntimeFailure",
    "__version__",
    "apply_plan",
    "auto_mixed_precision",
    "convert_file",
    "convert_model",
    "custom_mixed_precision",
    "get_black_list",
    "get_white_list",
    "load_plan",
    "plan_model",
    "remove_redundant_casts",
]

__version__ = "0.1.0"
