# ruff: noqa: PLC0415 - a tool can be imported in its own environment alone
"""Convert one model with one tool, and print what it took: runs in the tool's own environment and process.

python worker.py TOOL SOURCE TARGET JSON, where JSON is {"external": bool, "blocked": [op types]}. What a tool imports
is imported before the clock starts.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Convert = Callable[[str, str, bool, list[str]], None]
"""From the source, the target, whether weights are in a data file, and the blocked op types."""

PACKAGES = (
    "onnxamp", "onnxconverter-common", "nvidia-modelopt", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "numpy",
    "scipy", "protobuf", "torch",
)  # fmt: skip


def onnxamp() -> Convert:
    import onnxruntime
    import scipy.sparse.csgraph

    from onnxamp import convert_file

    del onnxruntime, scipy  # imported here because onnxamp does so when it needs them

    def convert(source: str, target: str, external: bool, blocked: list[str]) -> None:
        del external, blocked  # it sees to both by itself: its own black list is the one that the others get
        convert_file(source, target, validate=False)

    return convert


def onnxamp_validated() -> Convert:
    from onnxamp import convert_file

    def convert(source: str, target: str, external: bool, blocked: list[str]) -> None:
        del external, blocked
        convert_file(source, target)

    return convert


def onnxruntime() -> Convert:
    import onnx
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    def convert(source: str, target: str, external: bool, blocked: list[str]) -> None:
        model = source if external else onnx.load(source)
        blocks = [*DEFAULT_OP_BLOCK_LIST, *blocked]
        save(convert_float_to_float16(model, keep_io_types=True, op_block_list=blocks), target, external)

    return convert


def onnxconverter_common() -> Convert:
    import onnx
    from onnxconverter_common import float16

    limits = {"min_positive_val": 5.96e-8, "max_finite_val": 65504.0, "keep_io_types": True}

    def convert(source: str, target: str, external: bool, blocked: list[str]) -> None:
        if external:
            model = float16.convert_float_to_float16_model_path(source, **limits)
        else:
            blocks = [*float16.DEFAULT_OP_BLOCK_LIST, *blocked]
            model = float16.convert_float_to_float16(onnx.load(source), op_block_list=blocks, **limits)
        save(model, target, external)

    return convert


def modelopt() -> Convert:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    def convert(source: str, target: str, external: bool, blocked: list[str]) -> None:
        model = convert_to_mixed_precision(source, keep_io_types=True, op_types_to_exclude=blocked or None)
        save(model, target, external)

    return convert


def save(model: Any, target: str, external: bool) -> None:
    """Write a result as onnx does."""
    import onnx

    if external:
        onnx.save_model(model, target, save_as_external_data=True, location=f"{Path(target).name}.data")
    else:
        onnx.save(model, target)


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def peak() -> int | None:
    """Most bytes that were resident, with the file pages that were mapped."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def main() -> None:
    name, source, target, facts = sys.argv[1:]
    options = json.loads(facts)
    convert = globals()[name.replace("-", "_")]()
    start, busy = time.perf_counter(), time.process_time()
    convert(source, target, options["external"], options["blocked"])
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak(), "versions": versions()}) + "\n")


if __name__ == "__main__":
    main()
