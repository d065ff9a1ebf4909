"""What holds for all tests."""

import contextlib
import multiprocessing
import os
import platform
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from cuda_double import CudaDouble

# Tests run beside each other: threads that wait busily for work take the cores from the others.
os.environ.setdefault("ONNXAMP_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what a marker "mostly_slow" does not leave: of the cases of a test, a few all over the list stay."""
    families: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("mostly_slow") is not None:
            families.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for family in families.values():
        marker = family[0].get_closest_marker("mostly_slow")
        assert marker is not None
        parts = marker.kwargs["fast"]
        bounds = [number * len(family) // parts for number in range(parts + 1)]
        for start, end in pairwise(bounds):
            # By chance: every sixth case, say, may be of the same target.
            drawn = sorted(family[start:end], key=lambda item: crc32(item.nodeid.encode()))
            for item in drawn[1:]:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide the CPU's vendor from OpenVINO before tests start processes, which would not find it later."""
    if any(item.get_closest_marker("openvino") is not None for item in session.items):
        from any_cpu import hide_cpu

        hide_cpu(session.config.add_cleanup)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say where failed tests ran. Kernels differ from CPU to CPU, so that a failure may show on one of them alone."""
    if not terminalreporter.stats.get("failed"):
        return
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    names = re.findall(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = set(text.split())
    known = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    kinds = ", ".join(name for name in known if name in flags) or "unknown"
    packages = ", ".join(f"{name} {import_module(name).__version__}" for name in ("onnx", "onnxruntime", "numpy"))
    terminalreporter.section("where the tests ran")
    terminalreporter.line(f"{next(iter(names), platform.machine())} (instructions: {kinds}); {packages}")
    terminalreporter.line("No test may depend on the CPU. If these pass on another one, report them with this line.")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs an engine that cannot be used here, with the reason."""
    if item.get_closest_marker("tensorrt") is not None and find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed")
    if item.get_closest_marker("openvino") is not None:
        from any_cpu import openvino_trouble

        if trouble := openvino_trouble(item.config.add_cleanup):
            pytest.skip(trouble)
    if item.get_closest_marker("webgpu") is not None:
        from onnxamp._base.errors import RuntimeFailure
        from onnxamp._runtime.sessions.plugins import engine_called

        try:
            engine_called("webgpu")
        except RuntimeFailure as failure:
            pytest.skip(str(failure))


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The current folder of all tests: it is empty, and stays so. The clone may hold files that users wrote there."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with contextlib.chdir(folder):
        yield
    assert [path.name for path in folder.iterdir()] == [], "tests wrote into the current folder"


@pytest.fixture
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads as there are where nothing limits them: what writes weights uses several."""
    monkeypatch.delenv("ONNXAMP_THREADS")


@pytest.fixture
def cuda_double(monkeypatch: pytest.MonkeyPatch) -> Iterator["CudaDouble"]:
    """A CUDA device that computes on the CPU."""
    from cuda_double import forgotten, install

    with forgotten(), monkeypatch.context() as patch:
        yield install(patch)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No CUDA device, whatever the machine has."""
    from cuda_double import forgotten, remove

    with forgotten(), monkeypatch.context() as patch:
        remove(patch)
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked off a process that has imported everything, which is quicker than to start each anew."""
    context = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    context.set_forkserver_preload(
        ["onnxruntime", "onnxamp._fleet.job", "onnx_ir.external_data", "scipy.sparse.csgraph"]
    )
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
