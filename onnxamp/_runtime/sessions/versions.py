"""The installed versions of the software that measures, which is not imported for that."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def runtime_version() -> str:
    """Return the version of ONNX Runtime, which is not imported for that."""
    return _installed("onnxruntime-gpu", "onnxruntime")


def runtime_package() -> str:
    """Return the package of ONNX Runtime that is installed, with its version, as in "onnxruntime-gpu 1.31.1"."""
    known = (
        "onnxruntime-gpu",
        "onnxruntime-directml",
        "onnxruntime-rocm",
        "onnxruntime",
    )
    name = next(filter(_installed, known), "ONNX Runtime")
    return f"{name} {_installed(name)}".rstrip()


def own_version() -> str:
    """Return the version of onnxamp; "" for a checkout that is on Python's path, but not installed."""
    return _installed("onnxamp")


def _installed(*packages: str) -> str:
    """Return the version of the first of these packages that is installed, or ""."""
    for name in packages:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def versions() -> str:
    """Return the versions of the software that measures."""
    return f"onnxamp {own_version()}, ONNX Runtime {runtime_version()}"
