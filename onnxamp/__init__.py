"""onnxamp: mixed precision for ONNX models."""

from onnxamp._api import apply_plan, convert_file, convert_model, plan_model
from onnxamp._audit import Audit, audit_model
from onnxamp._autocast import auto_cast
from onnxamp._batch.folder import FolderReport, convert_folder
from onnxamp._bench.bench import BenchOptions, bench_models
from onnxamp._bench.records import BenchReport
from onnxamp._convert.convert import Conversion
from onnxamp._convert.plan import Plan, load_plan
from onnxamp._errors import (
    ArgumentError,
    ArgumentTypeError,
    ContradictionError,
    ExternalDataError,
    GradientError,
    InternalError,
    ModelError,
    NumericsError,
    OnnxAmpError,
    OpsetError,
    OutputError,
    RuntimeFailure,
)
from onnxamp._extract import Region, extract_region, save_region
from onnxamp._numerics.check import check_run
from onnxamp._numerics.diff import diff_models
from onnxamp._numerics.limits import Limits, make_limits
from onnxamp._numerics.results import DiffReport, RunCheck
from onnxamp._options.lists import get_black_list, get_white_list
from onnxamp._rewrite.casts import remove_redundant_casts
from onnxamp._runtime.samples import Samples, load_samples, random_samples
from onnxamp._tuning.results import Tuned
from onnxamp._tuning.tune import tune_model
from onnxamp.amp import auto_mixed_precision, custom_mixed_precision
from onnxamp.debugging import InferenceSession

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Audit",
    "BenchOptions",
    "BenchReport",
    "ContradictionError",
    "Conversion",
    "DiffReport",
    "ExternalDataError",
    "FolderReport",
    "GradientError",
    "InferenceSession",
    "InternalError",
    "Limits",
    "ModelError",
    "NumericsError",
    "OnnxAmpError",
    "OpsetError",
    "OutputError",
    "Plan",
    "Region",
    "RunCheck",
    "RuntimeFailure",
    "Samples",
    "Tuned",
    "__version__",
    "apply_plan",
    "audit_model",
    "auto_cast",
    "auto_mixed_precision",
    "bench_models",
    "check_run",
    "convert_file",
    "convert_folder",
    "convert_model",
    "custom_mixed_precision",
    "diff_models",
    "extract_region",
    "get_black_list",
    "get_white_list",
    "load_plan",
    "load_samples",
    "make_limits",
    "plan_model",
    "random_samples",
    "remove_redundant_casts",
    "save_region",
    "tune_model",
]

__version__ = "0.1.0"
