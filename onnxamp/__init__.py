"""onnxamp: mixed precision for ONNX models.

Names are imported when they are first used, so that ``import onnxamp`` and each command load only what they need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from onnxamp._base import VERSION
from onnxamp._base.public import Shown

if TYPE_CHECKING:
    from onnxamp import amp as amp
    from onnxamp import compat as compat
    from onnxamp import debugging as debugging
    from onnxamp import train as train
    from onnxamp._audit import Audit as Audit
    from onnxamp._audit.audit import audit_model as audit_model
    from onnxamp._audit.op_view import OpView as OpView
    from onnxamp._audit.op_view import describe_op as describe_op
    from onnxamp._base.errors import ArgumentError as ArgumentError
    from onnxamp._base.errors import ArgumentTypeError as ArgumentTypeError
    from onnxamp._base.errors import CallOrderError as CallOrderError
    from onnxamp._base.errors import ContradictionError as ContradictionError
    from onnxamp._base.errors import EmptyStateError as EmptyStateError
    from onnxamp._base.errors import ExternalDataError as ExternalDataError
    from onnxamp._base.errors import GradientError as GradientError
    from onnxamp._base.errors import HazardWarning as HazardWarning
    from onnxamp._base.errors import InternalError as InternalError
    from onnxamp._base.errors import MissingDataError as MissingDataError
    from onnxamp._base.errors import MissingFileError as MissingFileError
    from onnxamp._base.errors import MissingModelError as MissingModelError
    from onnxamp._base.errors import MissingNameError as MissingNameError
    from onnxamp._base.errors import MissingPackageError as MissingPackageError
    from onnxamp._base.errors import ModelError as ModelError
    from onnxamp._base.errors import NumericsError as NumericsError
    from onnxamp._base.errors import OnnxAmpError as OnnxAmpError
    from onnxamp._base.errors import OnnxAmpWarning as OnnxAmpWarning
    from onnxamp._base.errors import OpsetError as OpsetError
    from onnxamp._base.errors import OptionWarning as OptionWarning
    from onnxamp._base.errors import OutputError as OutputError
    from onnxamp._base.errors import RuntimeFailure as RuntimeFailure
    from onnxamp._base.errors import SourceChangedError as SourceChangedError
    from onnxamp._convert.plan import Plan as Plan
    from onnxamp._convert.plan import load_plan as load_plan
    from onnxamp._facts.signature import CustomOp as CustomOp
    from onnxamp._fleet.folder import convert_folder as convert_folder
    from onnxamp._fleet.outcome import FolderReport as FolderReport
    from onnxamp._job.api import apply_plan as apply_plan
    from onnxamp._job.api import convert_model as convert_model
    from onnxamp._job.api import plan_model as plan_model
    from onnxamp._job.convert_file import convert_file as convert_file
    from onnxamp._job.tune_model import tune_model as tune_model
    from onnxamp._job.writing import Conversion as Conversion
    from onnxamp._numerics.check import check_run as check_run
    from onnxamp._numerics.diff_models import diff_models as diff_models
    from onnxamp._numerics.limits import Limits as Limits
    from onnxamp._numerics.limits import make_limits as make_limits
    from onnxamp._numerics.results import DiffReport as DiffReport
    from onnxamp._numerics.results import RunCheck as RunCheck
    from onnxamp._numerics.speed.bench import BenchOptions as BenchOptions
    from onnxamp._numerics.speed.bench import bench_models as bench_models
    from onnxamp._numerics.speed.bench_results import BenchReport as BenchReport
    from onnxamp._options.options import Options as Options
    from onnxamp._report.progress import progress_bar as progress_bar
    from onnxamp._rewrite.passes.casts import (
        remove_redundant_casts as remove_redundant_casts,
    )
    from onnxamp._runtime.inputs.samples import Samples as Samples
    from onnxamp._runtime.inputs.samples import load_samples as load_samples
    from onnxamp._runtime.inputs.samples import random_samples as random_samples
    from onnxamp._runtime.sessions.starting import custom_ops as custom_ops
    from onnxamp._text.decoder import Prompts as Prompts
    from onnxamp._tuning.results import Tuned as Tuned
    from onnxamp._tuning.results import TunedModel as TunedModel
    from onnxamp.amp import auto_cast as auto_cast
    from onnxamp.amp import auto_mixed_precision as auto_mixed_precision
    from onnxamp.amp import custom_mixed_precision as custom_mixed_precision
    from onnxamp.amp import get_black_list as get_black_list
    from onnxamp.amp import get_white_list as get_white_list
    from onnxamp.debugging import InferenceSession as InferenceSession

__version__ = VERSION

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "": ("amp", "compat", "debugging", "train"),
    "_job.api": ("apply_plan", "convert_model", "plan_model"),
    "_job.convert_file": ("convert_file",),
    "_job.tune_model": ("tune_model",),
    "_audit.audit": ("audit_model",),
    "_audit": ("Audit",),
    "_fleet.folder": ("convert_folder",),
    "_audit.op_view": ("OpView", "describe_op"),
    "_convert.plan": ("Plan", "load_plan"),
    "_base.errors": (
        "ArgumentError",
        "ArgumentTypeError",
        "CallOrderError",
        "ContradictionError",
        "EmptyStateError",
        "ExternalDataError",
        "GradientError",
        "HazardWarning",
        "InternalError",
        "MissingDataError",
        "MissingFileError",
        "MissingModelError",
        "MissingNameError",
        "MissingPackageError",
        "ModelError",
        "NumericsError",
        "OnnxAmpError",
        "OnnxAmpWarning",
        "OpsetError",
        "OptionWarning",
        "OutputError",
        "RuntimeFailure",
        "SourceChangedError",
    ),
    "_fleet.outcome": ("FolderReport",),
    "_job.writing": ("Conversion",),
    "_numerics.check": ("check_run",),
    "_facts.signature": ("CustomOp",),
    "_numerics.diff_models": ("diff_models",),
    "_numerics.limits": ("Limits", "make_limits"),
    "_numerics.results": ("DiffReport", "RunCheck"),
    "_numerics.speed.bench": ("BenchOptions", "bench_models"),
    "_numerics.speed.bench_results": ("BenchReport",),
    "_options.options": ("Options",),
    "_report.progress": ("progress_bar",),
    "_rewrite.passes.casts": ("remove_redundant_casts",),
    "_text.decoder": ("Prompts",),
    "_runtime.inputs.samples": ("Samples", "load_samples", "random_samples"),
    "_runtime.sessions.starting": ("custom_ops",),
    "_tuning.results": ("Tuned", "TunedModel"),
    "amp": (
        "auto_cast",
        "auto_mixed_precision",
        "custom_mixed_precision",
        "get_black_list",
        "get_white_list",
    ),
    "debugging": ("InferenceSession",),
}
"""Module -> the public names that it defines, or that are modules themselves."""

_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__"]
__all__ += list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'onnxamp' has no attribute {name!r}")
    if not home:
        return import_module(f"onnxamp.{name}")
    value = getattr(import_module(f"onnxamp.{home}"), name)
    if "._" in value.__module__:
        value.__module__ = "onnxamp"  # what tracebacks, repr and pickle show
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _views() -> Any:
    """Import what makes reports of results; most programs never show one."""
    return import_module("onnxamp._report.views")


Shown.views = _views
