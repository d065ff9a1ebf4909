"""What a result is worth: Casts, bytes, whether it loads, and its error. Runs in a process of its own.

python judge.py ORIGINAL RESULT prints JSON. The error is the worst relative L2 error of a float output against the
float32 original under onnxamp's emulation (every low-precision value is rounded), or on CUDA where there is a device.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from onnxamp import OnnxAmpError, diff_models
from onnxamp._model.model import find_data_files, folder_of, load_model
from onnxamp._runtime.sessions.session import make_session


def casts(path: Path) -> int:
    """Cast nodes, in subgraphs, too."""
    graphs, found = [load_model(path).graph], 0
    while graphs:
        for node in graphs.pop().node:
            found += node.op_type == "Cast"
            graphs += [graph for item in node.attribute for graph in (*item.graphs, item.g) if graph.node]
    return found


def size(path: Path) -> int:
    """Bytes of the model file and of its data files."""
    data = {file.path for file in find_data_files(load_model(path), folder_of(path)).values()}
    return sum(file.stat().st_size for file in (path, *data))


def error(original: Path, result: Path) -> dict[str, Any]:
    """The error, what it was measured on, and what the comparison says of it."""
    try:
        found = diff_models(original, result)
    except OnnxAmpError as failure:
        return {"error": None, "verdict": str(failure)}
    worst = max((diff.rel_l2 for diff in found.outputs if diff.is_float), default=math.nan)
    shown = worst if math.isfinite(worst) else str(worst)
    why = found.skipped or found.failure or next(iter(found.warnings), "beyond limits")
    return {"error": shown, "ran_on": found.ran_on, "verdict": "within limits" if found.passed else why}


def judge(original: Path, result: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"casts_added": casts(result) - casts(original), "bytes": size(result), "loads": True}
    try:
        make_session(str(result), optimize=False, lean=True)
    except OnnxAmpError as failure:
        return facts | {"loads": False, "error": None, "verdict": str(failure).replace(str(result), "it")}
    return facts | error(original, result)


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(judge(Path(sys.argv[1]), Path(sys.argv[2]))) + "\n")
