"""What bounds of a decoder of 2.3 GB take: time, and memory beside its weights.

The decoder is the one that ``tune.py`` tunes. It is made in a scratch folder, and converted without a validation.
Bounds of the original read all of its weights, as ``inspect`` does; those of the result are a part of its validation.
Each is a process of its own, which does nothing else.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import engine_commit, warm, watched
from tune import LARGE

import onnxamp

MOST_SECONDS, MOST_MEMORY = 15.0, 600_000_000
"""What bounds may take: processor seconds, and bytes of the process that are no pages of files."""
LIMIT, MEMORY = 300.0, 8 << 30
"""At which a process is stopped: seconds and bytes."""
ORIGINAL = "the float32 model"
CHILD = """
import json, sys, time
from onnxamp._facts.dtypes import FORMATS
from onnxamp._graph.bounds.find import find_bounds
from onnxamp._graph.graph import graph_of
from onnxamp._model.model import Model
path, is_original = sys.argv[1], bool(sys.argv[2])
start, used = time.perf_counter(), time.process_time()
bounds = Model.of(path).ask(graph_of).ask(find_bounds, FORMATS["float16"], (), is_original)
seconds, used = time.perf_counter() - start, time.process_time() - used
values = bounds.floats if is_original else bounds.at_risk
proven = sum(map(bounds.is_safe, values))
facts = {"values": len(values), "proven": proven, "seconds": seconds, "processor seconds": used}
print(json.dumps(facts))
"""

Facts = dict[str, Any]


def large_bounds(folder: Path) -> Iterator[Facts]:
    """Yield what bounds of the original and of its result take; both are made in a folder."""
    original = LARGE.file(folder)
    result = folder / "low.onnx"
    onnxamp.convert_file(original, result, validate=False)
    for path, name in ((original, ORIGINAL), (result, "its float16 result")):
        yield {"model": name, "sizes": LARGE.sizes, "commit": engine_commit(), **_measured(path, name)}


def _measured(path: Path, name: str) -> Facts:
    files = [file for file in (path, *path.parent.glob(f"{path.stem}*.data")) if file.is_file()]
    for file in files:
        warm(file)
    command = [sys.executable, "-c", CHILD, str(path), "original" if name == ORIGINAL else ""]
    found = watched(command, limit=LIMIT, memory=MEMORY, environment=os.environ)
    return {"bytes": sum(file.stat().st_size for file in files), **found}
