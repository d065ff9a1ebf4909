"""OpenVINO's plugin provider on CPUs that Intel did not make, which it does not offer by itself."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxamp._base.errors import RuntimeFailure
from onnxamp._runtime.sessions.plugins import engine_called, plugin_called

SOURCE = Path(__file__).parent / "standin" / "any_cpu.c"


@cache
def hide_cpu(add_cleanup: Callable[[Callable[[], None]], None]) -> str | None:
    """Let processes of tests find OpenVINO behind a library that hides the CPU's vendor; return why that fails.

    Call it before any process is started: those that run already, and what they fork, do not find the library.

    Args:
        add_cleanup: registers what removes the library after the tests. Workers of pytest-xdist leave without running
            what atexit registers, so that is no way to do it.
    """
    plugin = plugin_called("openvino")
    assert plugin is not None
    try:
        module = import_module(plugin.package.replace("-", "_"))
        if not _made_by_intel():
            folder = TemporaryDirectory(prefix="onnxamp-")
            add_cleanup(folder.cleanup)
            library = str(Path(folder.name, "any_cpu.so"))
            plugin_path = f'-DPLUGIN="{module.get_library_path()}"'
            subprocess.run(["cc", "-shared", "-fPIC", plugin_path, "-o", library, str(SOURCE), "-ldl"], check=True)
            module.get_library_path = lambda: library
            text = f"get_library_path = lambda: {library!r}\nget_ep_names = lambda: {module.get_ep_names()!r}\n"
            Path(folder.name, f"{module.__name__}.py").write_text(text)  # for processes that tests start
            sys.path.insert(0, folder.name)  # multiprocessing hands it on to its processes in place of PYTHONPATH
            paths = (folder.name, os.environ.get("PYTHONPATH"))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    except ImportError:
        return f"{plugin.package} is not installed"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the CPU is not Intel's, and what hides that cannot be built: {error}"
    return None


@cache
def openvino_trouble(add_cleanup: Callable[[Callable[[], None]], None]) -> str | None:
    """Return why OpenVINO cannot be used here; None if it can, perhaps behind the library of :func:`hide_cpu`."""
    trouble = hide_cpu(add_cleanup)
    if trouble is not None:
        return trouble
    try:
        engine_called("openvino")
    except RuntimeFailure as error:
        return str(error)
    return None


def _made_by_intel() -> bool:
    info = Path("/proc/cpuinfo")
    return not info.is_file() or "GenuineIntel" in info.read_text()
