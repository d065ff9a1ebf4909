"""Casts that the builder of a target does not take where they are."""

from collections.abc import Iterator

from onnxamp._audit.findings import Finding
from onnxamp._decide.straight import straight_reads
from onnxamp._dtypes import FLOAT, LOW_TYPES
from onnxamp._graph.graph import Graph
from onnxamp._ops.profiles import profile_of


def refused_casts(graph: Graph, target: str) -> Iterator[Finding]:
    """Float32 nodes that read a Cast from low precision where the target's builder may refuse it. Linear in nodes."""
    profile = profile_of(target)
    for read in straight_reads(graph, profile) if profile is not None else ():
        made = graph.producer(read.value)
        if made is None or made.key != "Cast" or graph.types[read.value] != FLOAT:
            continue
        for low in LOW_TYPES.values():
            if graph.types[made.input(0)] == low.tensor:
                what = "stacks up" if read.owner.bodies else "reads"
                text = f"it {what} float32 that is a Cast of {low.name}: {target}'s builder may refuse that"
                action = f"Convert for {target}, or keep what the Cast reads float32, too (--keep-fp32 NAME)."
                yield Finding("warning", "kernel", read.owner.label, read.owner.key, text, action)
