"""What a conversion keeps in float32 and random samples do not need.

A validated conversion is compared with one that is not validated, whose nodes are kept for hazards alone. That one, and
one for each hazard whose nodes are lowered (``--force-low``), run on as many random samples as a budget of processor
seconds allows, at most a thousand. If the model stays right on all of them, the hazard counts as a false alarm.
Traffic is the elements of the float results of nodes, without Casts.
"""

import re
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from onnx import ModelProto

import onnxamp
from onnxamp._facts.dtypes import FLOAT, FLOAT16
from onnxamp._facts.ops import op_key
from onnxamp._graph.graph import graph_of
from onnxamp._model.model import Model, ModelSource
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.samples import Samples

Facts = dict[str, Any]

CHUNKS = (0, 1, 10, 100, 250, 500, 750, 1000)
"""Numbers of samples after which the budget is looked at, so that a failure ends a run early."""
SEED = 1_000
"""Of the first chunk: none of the samples that conversions take."""


class Traffic(NamedTuple):
    """Elements of the float results of nodes: in low precision, and in all."""

    low: int
    total: int

    @classmethod
    def of(cls, model: ModelSource, sizes: Mapping[str, int]) -> "Traffic":
        """Return the traffic of a model with these sizes of open dimensions."""
        draw = onnxamp.random_samples(model, dims=sizes).draw
        assert draw is not None
        maker = draw.maker()
        graph = Model.of(model).ask(graph_of)
        shapes = maker.shapes()
        low = total = 0
        for node in graph.nodes:
            if op_key(node.proto) in ("Cast", "Constant"):
                continue
            for value in node.writes:
                size = _size(shapes[value])
                total += size if graph.types[value] in (FLOAT, FLOAT16.tensor) else 0
                low += size if graph.types[value] == FLOAT16.tensor else 0
        return cls(low, total)


def _size(shape: Sequence[Any] | None) -> int:
    size = 1
    for dim in shape or ():
        size *= dim if isinstance(dim, int) else 1
    return size


def samples_of(path: Path, count: int = 1, seed: int = 0) -> Samples:
    """Return random samples as conversions take them, with sizes that the model runs with."""
    return requested_samples(RunOptions(count=count, seed=seed), Model.of(path))


def on_samples(path: Path, low: ModelProto, seconds: float) -> Facts:
    """Return whether a result fails on random samples, and on how many it ran."""
    start = time.process_time()
    for before, after in pairwise(CHUNKS):
        samples = samples_of(path, after - before, SEED + before)
        if not onnxamp.diff_models(path, low, samples, provider="cpu").passed:
            return {"fails": True, "samples": after}
        spent = time.process_time() - start
        following = next((later for later in CHUNKS if later > after), after)
        if spent * following / after > seconds:
            break
    return {"fails": False, "samples": after}


def false_alarms(path: Path, validated: Path, seconds: float, *, by_stress: bool) -> Facts:
    """Return the traffic that a conversion keeps in float32, and how much of it no sample needs.

    Args:
        path: the original.
        validated: its validated conversion.
        seconds: processor seconds for the samples.
        by_stress: whether stress alone made validation keep nodes in float32.
    """
    draw = samples_of(path).draw
    sizes = draw.sizes if draw is not None else {}
    usual = onnxamp.convert_model(path)
    traffic = Traffic.of(usual, sizes)
    kinds = dict[str, list[str]]()
    for row in onnxamp.plan_model(path).hazards:
        if not row.low:
            kinds.setdefault(row.reason, []).append(row.node)
    lowered = dict[str, ModelProto]()
    found: Facts = {"traffic": traffic.total, "low": traffic.low / traffic.total, "hazards": [], "validation": None}
    for kind, nodes in kinds.items():
        forced = onnxamp.convert_model(path, force_low=[re.escape(node) for node in nodes])
        share = (Traffic.of(forced, sizes).low - traffic.low) / traffic.total
        found["hazards"].append({"hazard": kind, "nodes": len(nodes), "share": share})
        if share > 0:
            lowered[kind] = forced
    kept = (traffic.low - Traffic.of(validated, sizes).low) / traffic.total
    runs = len(lowered) + (kept > 0)
    for row in found["hazards"]:
        if row["hazard"] in lowered:
            row.update(on_samples(path, lowered[row["hazard"]], seconds / runs))
    if kept > 0:
        reason = "stress" if by_stress else "samples"
        found["validation"] = {"reason": reason, "share": kept, **on_samples(path, usual, seconds / runs)}
    return found
