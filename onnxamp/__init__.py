"""onnxamp: mixed precision for ONNX models.

Names are imported when they are first used, so that ``import onnxamp`` and each command load only what they need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from onnxamp import amp, debugging, train
    from onnxamp._api import apply_plan, convert_file, convert_model, plan_model
    from onnxamp._audit.audit import audit_model
    from onnxamp._audit.findings import Audit
    from onnxamp._batch.folder import FolderReport, convert_folder
    from onnxamp._bench.bench import BenchOptions, bench_models
    from onnxamp._bench.records import BenchReport
    from onnxamp._convert.convert import Conversion
    from onnxamp._convert.plan import Plan, load_plan
    from onnxamp._errors import (
        ArgumentError,
        ArgumentTypeError,
        CallOrderError,
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
    from onnxamp._extract.around import extract_region
    from onnxamp._extract.region import Region, save_region
    from onnxamp._numerics.check import check_run
    from onnxamp._numerics.diff import diff_models
    from onnxamp._numerics.limits import Limits, make_limits
    from onnxamp._numerics.results import DiffReport, RunCheck
    from onnxamp._options.options import Options
    from onnxamp._rewrite.casts import remove_redundant_casts
    from onnxamp._runtime.samples import Samples, load_samples, random_samples
    from onnxamp._tuning.results import Tuned
    from onnxamp._tuning.tune import tune_model
    from onnxamp._warnings import HazardWarning, OnnxAmpWarning, OptionWarning
    from onnxamp.amp import (
        auto_cast,
        auto_mixed_precision,
        custom_mixed_precision,
        get_black_list,
        get_white_list,
    )
    from onnxamp.debugging import InferenceSession

__version__ = "0.1.0"

_HOMES: Final[dict[str, tuple[str, ...]]] = {
    "_api": ("apply_plan", "convert_file", "convert_model", "plan_model"),
    "_audit.audit": ("audit_model",),
    "_audit.findings": ("Audit",),
    "_batch.folder": ("FolderReport", "convert_folder"),
    "_bench.bench": ("BenchOptions", "bench_models"),
    "_bench.records": ("BenchReport",),
    "_convert.convert": ("Conversion",),
    "_convert.plan": ("Plan", "load_plan"),
    "_errors": (
        "ArgumentError", "ArgumentTypeError", "CallOrderError", "ContradictionError", "ExternalDataError",
        "GradientError", "InternalError", "ModelError", "NumericsError", "OnnxAmpError", "OpsetError", "OutputError",
        "RuntimeFailure",
    ),
    "_extract.around": ("extract_region",),
    "_extract.region": ("Region", "save_region"),
    "_numerics.check": ("check_run",),
    "_numerics.diff": ("diff_models",),
    "_numerics.limits": ("Limits", "make_limits"),
    "_numerics.results": ("DiffReport", "RunCheck"),
    "_options.options": ("Options",),
    "_rewrite.casts": ("remove_redundant_casts",),
    "_runtime.samples": ("Samples", "load_samples", "random_samples"),
    "_tuning.results": ("Tuned",),
    "_tuning.tune": ("tune_model",),
    "_warnings": ("HazardWarning", "OnnxAmpWarning", "OptionWarning"),
    "amp": ("auto_cast", "auto_mixed_precision", "custom_mixed_precision", "get_black_list", "get_white_list"),
    "debugging": ("InferenceSession",),
}  # fmt: skip
"""Module -> the public names that it defines."""

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Audit",
    "BenchOptions",
    "BenchReport",
    "CallOrderError",
    "ContradictionError",
    "Conversion",
    "DiffReport",
    "ExternalDataError",
    "FolderReport",
    "GradientError",
    "HazardWarning",
    "InferenceSession",
    "InternalError",
    "Limits",
    "ModelError",
    "NumericsError",
    "OnnxAmpError",
    "OnnxAmpWarning",
    "OpsetError",
    "OptionWarning",
    "Options",
    "OutputError",
    "Plan",
    "Region",
    "RunCheck",
    "RuntimeFailure",
    "Samples",
    "Tuned",
    "__version__",
    "amp",
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
    "debugging",
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
    "train",
    "tune_model",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in ("amp", "debugging", "train"):
        return import_module(f"onnxamp.{name}")
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'onnxamp' has no attribute {name!r}")
    value = getattr(import_module(f"onnxamp.{home}"), name)
    if "._" in value.__module__:
        value.__module__ = "onnxamp"  # what tracebacks, repr and pickle show
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
