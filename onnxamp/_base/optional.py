"""Optional packages: whether they are installed, ONNX Runtime among them, and what to say if not."""

from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Final

from onnxamp._base.errors import MissingPackageError

LEAST_RUNTIME: Final = "1.30"
"""The oldest supported ONNX Runtime. Older versions crash the process on float16 defaults of inputs (up to 1.29) and on
bound outputs (1.28)."""


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # not a mere folder


def require(package: str, needs: str, extra: str) -> None:
    """Make sure that a package is installed.

    Args:
        package: the name by which it is imported.
        needs: the beginning of the message if it is missing, as in "A spreadsheet needs openpyxl".
        extra: the extra of onnxamp that installs it.

    Raises:
        MissingPackageError: it is not installed.
    """
    if not _is_installed(package):
        raise MissingPackageError(
            f"{needs}, which is not installed: pip install 'onnxamp[{extra}]'."
        )


def has_runtime() -> bool:
    """Return whether ONNX Runtime is installed, from any of its packages, without importing it."""
    spec = find_spec("onnxruntime")
    places = None if spec is None else spec.submodule_search_locations
    return places is not None and bool(
        PathFinder.find_spec("onnxruntime.capi", places)
    )


def require_runtime() -> None:
    """Make sure that models can be run.

    Raises:
        MissingPackageError: ONNX Runtime is not installed, or it is too old.
    """
    fault = runtime_fault()
    if fault is not None:
        raise MissingPackageError(fault)


@cache
def runtime_fault() -> str | None:
    """Return why models cannot be run, and what to install; None if they can."""
    if not has_runtime():
        return "ONNX Runtime is not installed: pip install 'onnxamp[cpu]', or 'onnxamp[cuda]' for NVIDIA GPUs."
    version = import_module("onnxruntime").__version__
    if _numbers(version) >= _numbers(LEAST_RUNTIME):
        return None
    from importlib import metadata  # noqa: PLC0415 - costs as much as the rest of a command's start

    packages = metadata.packages_distributions().get("onnxruntime", ["onnxruntime"])
    return (
        f"ONNX Runtime {version} is installed, but to run models, onnxamp needs {LEAST_RUNTIME} or newer: pip install"
        f" --upgrade {packages[0]}"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
