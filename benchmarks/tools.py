"""The tools that are compared: what each needs, how it is called, and an environment of its own for each."""

import hashlib
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Tool:
    """``needs`` are requirements of pip; ``calls`` says what :mod:`worker` calls, and is kept with the results.

    ``shares`` says that this interpreter will do where no environment shall be made.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    calls: str
    shares: bool = False


TOOLS = (
    Tool(
        "onnxamp", "onnxamp", (f"-e{ROOT}[cpu]",), "onnxamp.convert_file(source, target, validate=False)", shares=True
    ),
    Tool(
        "onnxruntime",
        "onnxruntime.transformers",
        ("onnxruntime", "onnx", "numpy", "sympy", "packaging"),
        "onnxruntime.transformers.float16.convert_float_to_float16(onnx.load(source), keep_io_types=True,"
        " op_block_list=DEFAULT_OP_BLOCK_LIST + black list); with external data the model's path instead",
        shares=True,
    ),
    Tool(
        "onnxconverter-common",
        "onnxconverter-common",
        ("onnxconverter-common", "onnx", "numpy", "setuptools<81"),
        "onnxconverter_common.float16.convert_float_to_float16(onnx.load(source), min_positive_val=5.96e-8,"
        " max_finite_val=65504.0, keep_io_types=True, op_block_list=DEFAULT_OP_BLOCK_LIST + black list);"
        " with external data convert_float_to_float16_model_path(source, ...)",
    ),
    Tool(
        "modelopt",
        "NVIDIA AutoCast",
        ("torch==2.13.0", "nvidia-modelopt[onnx]"),
        "modelopt.onnx.autocast.convert_to_mixed_precision(source, keep_io_types=True, op_types_to_exclude=black list)",
    ),
)


def interpreter(tool: Tool, folder: Path) -> Path:
    """The Python of a tool's environment, which is made in ``folder`` where it is missing or needs something else.

    Raises:
        RuntimeError: pip cannot install what the tool needs; the text is its last line.
    """
    home = folder / tool.name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = hashlib.sha256("\n".join((*tool.needs, (ROOT / "pyproject.toml").read_text())).encode()).hexdigest()
    stamp = home / "made.stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    sys.stderr.write(f"Making an environment for {tool.name} ...\n")
    venv.create(home, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *tool.needs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"pip ended with {done.returncode}").splitlines()[-1][:300])
    stamp.write_text(wanted)
    return python
