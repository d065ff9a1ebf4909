"""The browser that tests run models in, with float16 also where there is no GPU."""

import atexit
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from repository import ROOT

from onnxamp._bench.text_engines import PACKAGE
from onnxamp._errors import RuntimeFailure
from onnxamp._runtime.browser import CHROMIUM, find_chromium, open_browser
from onnxamp._runtime.browser.server import WEB, find_package, find_web

SOURCE = Path(__file__).parent / "standin" / "any_vulkan.c"
DRIVERS = Path("/usr/share/vulkan/icd.d")


def look_for_packages() -> None:
    """Let npm packages be found where ``.ci/run`` installs them."""
    if WEB not in os.environ and (installed := ROOT / "build" / "npm").is_dir():
        os.environ[WEB] = str(installed)


def command() -> None:
    """Run the command line where npm packages are found and Chromium has software Vulkan."""
    from onnxamp._cli.command import group

    look_for_packages()
    if "browser" in sys.argv and (trouble := browser_trouble()):
        sys.exit(trouble)
    group()


def javascript_trouble() -> str | None:
    """Why transformers.js does not run in Node here; None if it does."""
    look_for_packages()
    if shutil.which("node") is None:
        return "Node is not installed"
    if find_package(PACKAGE, "package.json") is None:
        return f"transformers.js is not installed: npm install --prefix build/npm {PACKAGE}"
    return None


@cache
def browser_trouble() -> str | None:
    """Why models cannot be run in a browser here; None if they can, in float16, too."""
    look_for_packages()
    try:
        find_web()
        if CHROMIUM not in os.environ and (found := find_chromium()):
            variables = " ".join(f"{name}={value}" for name, value in software_vulkan().items())
            os.environ[CHROMIUM] = f"env {variables} {found}"
        if not open_browser().has_float16:
            return f"{open_browser().name} does not compute float16"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"Mesa's software Vulkan cannot be shown to Chromium as a GPU: {error}"
    except RuntimeFailure as error:
        return str(error)
    return None


def software_vulkan() -> dict[str, str]:
    """Environment variables that let Chromium run on Mesa's software Vulkan, behind a driver that passes for a GPU's.

    Raises:
        FileNotFoundError: Mesa is not installed. subprocess.CalledProcessError: the driver cannot be compiled.
    """
    mesa = next(iter(sorted(DRIVERS.glob("lvp_icd*.json"))), None)
    if mesa is None:
        raise FileNotFoundError(f"{DRIVERS} holds no lvp_icd.json")
    driver = json.loads(mesa.read_text(encoding="utf-8"))["ICD"]
    folder = TemporaryDirectory(prefix="onnxamp-")
    atexit.register(folder.cleanup)
    library, manifest = Path(folder.name, "any_vulkan.so"), Path(folder.name, "any_vulkan.json")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    own = {"api_version": driver["api_version"], "library_path": str(library)}
    manifest.write_text(json.dumps({"ICD": own, "file_format_version": "1.0.1"}), encoding="utf-8")
    return {"VK_DRIVER_FILES": str(manifest), "ONNXAMP_VULKAN": driver["library_path"]}


if __name__ == "__main__":
    command()
