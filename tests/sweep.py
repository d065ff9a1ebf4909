"""Ask of a folder of models what test_properties.py asks of random ones: ``python tests/sweep.py FOLDER [--every N]``.

Each model is converted at O1, O2 and O3 to float16 and bfloat16, for each target in turn, and the result is held to the
same properties. Its weights are rounded before, so that both low types hold them exactly: then the result without
its low types must compute the same bits. A file of the same name that ends in .npz holds inputs; others are made up.
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper
from properties import WAYS, Way, graphs, unchanged, violations

from onnxamp._base.errors import OnnxAmpError
from onnxamp._runtime.inputs.random_inputs import random_inputs

TINY = 2.0**-14
"""The smallest number that float16 holds as precisely as others."""


def inputs(path: Path, model: onnx.ModelProto) -> Mapping[str, Any]:
    given = path.with_suffix(".npz")
    if given.exists():
        with np.load(given) as arrays:
            return {name: arrays[name] for name in arrays.files}
    return random_inputs(model, seed=0)


def coarse(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with weights of eight significant bits, of which the tiny ones are zero."""
    bodies = [*graphs(model), *model.functions]
    constants = [a for body in bodies for node in body.node if node.op_type == "Constant" for a in node.attribute]
    tensors = [attribute.t for attribute in constants if attribute.HasField("t")]
    for tensor in (*tensors, *(tensor for graph in graphs(model) for tensor in graph.initializer)):
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(rounded(numpy_helper.to_array(tensor)), tensor.name))
    for attribute in constants:
        attribute.f = float(rounded(np.float32(attribute.f)))
        attribute.floats[:] = rounded(np.array(attribute.floats, np.float32)).tolist()
    return model


def rounded(array: np.ndarray) -> np.ndarray:
    """As bfloat16 has the numbers; single tiny ones stay as they are, and what would become infinite."""
    with np.errstate(over="ignore"):
        exact = np.asarray(array).astype(ml_dtypes.bfloat16).astype(np.float32)
    tiny = (np.abs(exact) < TINY) & (exact != 0)
    exact = np.where(tiny & (exact.size > 1), np.float32(0), np.where(tiny, array, exact))
    return np.where(np.isfinite(exact), exact, array)


def ways(turn: int) -> Iterator[Way]:
    """Every level and both low types; targets and the types of inputs and outputs take turns."""
    for place, (level, dtype) in enumerate(itertools.product(("O1", "O2", "O3"), ("float16", "bfloat16"))):
        fitting = [way for way in WAYS if (way.level, way.dtype) == (level, dtype)]
        yield fitting[(turn + place) % len(fitting)]


def sweep(paths: list[Path]) -> Counter[str]:
    """Print what is wrong with which model; returns how often each kind of thing was."""
    found: Counter[str] = Counter()
    for turn, path in enumerate(paths):
        model = coarse(onnx.load(path))
        found["models"] += 1
        try:
            feeds = inputs(path, model)
        except OnnxAmpError:
            found["refused"] += 1
            continue
        complaints = [(way, text) for way in ways(turn) for text in violations(model, feeds, way, smooth=False)]
        complaints += [(None, text) for text in unchanged(model)]
        for _way, text in complaints:
            found[text.split(":")[0]] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take each N-th model alone")
    parser.add_argument("--first", type=int, default=0, help="leave out so many models at the beginning")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob("*.onnx"))[arguments.first :: arguments.every]
    time.monotonic()
    found = sweep(paths)
    return int(any(kind not in ("models", "refused") for kind in found))


if __name__ == "__main__":
    sys.exit(main())
