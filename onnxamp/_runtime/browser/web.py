"""Finding onnxruntime-web, which npm installs. Nothing of it is part of onnxamp."""

import os
from pathlib import Path
from typing import Final

from onnxamp._errors import RuntimeFailure

WEB: Final = "ONNXAMP_ONNXRUNTIME_WEB"
"""The variable that names the package's folder, or one that it is installed in."""

_PACKAGE: Final = "onnxruntime-web"
BUNDLE: Final = "ort.webgpu.bundle.min.mjs"
"""What ``import "onnxruntime-web/webgpu"`` gives. It reads a .wasm file beside it."""


def find_web() -> Path:
    """The folder with the package's files.

    Raises:
        RuntimeFailure: it is not installed.
    """
    if named := os.environ.get(WEB):
        folder = Path(named)
        for inner in (folder / "dist", folder, folder / "node_modules" / _PACKAGE / "dist"):
            if (inner / BUNDLE).is_file():
                return inner
        wrong = f"{named}, which {WEB} names, holds no {BUNDLE}"
    else:
        here = Path.cwd()
        inside = [folder / "node_modules" for folder in (here, *here.parents)]  # where Node looks
        inside += map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)))
        for folder in inside:
            if (folder / _PACKAGE / "dist" / BUNDLE).is_file():
                return folder / _PACKAGE / "dist"
        wrong = f"the npm package {_PACKAGE} is not installed"
    raise RuntimeFailure(
        f"The provider 'browser' cannot be used here: {wrong}; npm install {_PACKAGE} installs it in this folder, and"
        f" {WEB} may name another one."
    )
