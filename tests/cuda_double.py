"""A CUDA device whose sessions compute on the CPU, put in place of ONNX Runtime's and of the driver's public names."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onnxamp._runtime.sessions import plugins
from onnxamp._runtime.sessions.session import cuda_trouble

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@dataclass
class CudaDouble:
    """What sessions on CUDA do, and which were started."""

    noise: float = 0.0
    """Relative error of all float32 that they compute."""
    falls_back: bool = False
    """They run on the CPU, and say so."""
    preload: Callable[..., None] = lambda **_: None
    """Loads libraries, and prints those that are missing."""
    models: list[Any] = field(default_factory=list)
    """What sessions were made of: bytes, or paths."""
    started: list[tuple[dict[str, Mapping[str, str]], bool]] = field(default_factory=list)
    """Of each session: options by provider, and whether it asks for deterministic kernels."""


class Driver:
    """A driver that sees one device, and tells nothing else of it."""

    def __init__(self, *_: Any) -> None:
        pass

    def cuInit(self, _: int) -> int:  # noqa: N802 - its name in the driver
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802 - its name in the driver
        count._obj.value = 1
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 1


@contextmanager
def forgotten() -> Iterator[None]:
    """What was found out about the machine is found out again, inside as well as behind it."""
    caches = (plugins._driver, cuda_trouble)
    for cached in caches:
        cached.cache_clear()
    try:
        yield
    finally:
        for cached in caches:
            cached.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    """Put the device in place for a test."""
    double = CudaDouble()
    real = ort.InferenceSession

    class Binding(ort.IOBinding):
        def bind_output(self, name: str, device_type: str = "cpu", *rest: Any) -> None:
            super().bind_output(name, "cpu", *rest)

    class Session(real):
        def __init__(self, source: Any, options: Any, *, providers: Any, **given: Any) -> None:
            named = {item: {} for item in providers} if isinstance(providers[0], str) else dict(providers)
            double.models.append(source)
            double.started.append((named, options.use_deterministic_compute))
            super().__init__(source, options, providers=[CPU], **given)
            self.on_cuda = CUDA in named and not double.falls_back

        def get_providers(self) -> list[str]:
            return [CUDA, CPU] if self.on_cuda else [CPU]

        def io_binding(self) -> Binding:
            return Binding(self)

        def run(self, *arguments: Any, **given: Any) -> list[Any]:
            found = super().run(*arguments, **given)
            if not (self.on_cuda and double.noise):
                return found
            is_float = [isinstance(value, np.ndarray) and value.dtype == np.float32 for value in found]
            return [v * np.float32(1 + double.noise) if f else v for v, f in zip(found, is_float, strict=True)]

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setattr(ort, "InferenceSession", Session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])

    def preload(**given: Any) -> None:
        double.preload(**given)

    monkeypatch.setattr(ort, "preload_dlls", preload, raising=False)
    return double


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no driver."""

    def missing(name: str, *_: Any) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
