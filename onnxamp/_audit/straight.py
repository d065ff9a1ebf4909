"""Casts, and numbers in low precision, that the builder of a target does not take where they are."""

from collections.abc import Iterator

from onnxamp._audit.findings import Finding
from onnxamp._decide.dequantized import shared_factors, split_scales
from onnxamp._decide.reads import straight_reads
from onnxamp._decide.straight import constant_reads, passed_states, stacked_up
from onnxamp._dtypes import FLOAT, LOW_TYPES
from onnxamp._graph.graph import Graph
from onnxamp._ops.profiles import Profile, profile_of


def refused_casts(graph: Graph, target: str) -> Iterator[Finding]:
    """Nodes around Casts, or results of loops, that the target's builder may refuse. Complexity: linear in nodes."""
    profile = profile_of(target)
    if profile is None:
        return
    low_names = {low.tensor: low.name for low in LOW_TYPES.values()}
    for node in stacked_up(graph, profile):
        if name := low_names.get(graph.types[node.outputs[0]] or ""):
            text = f"a loop stacks up its {name} as they are: {target}'s builder may refuse that"
            yield Finding("warning", "kernel", node.label, node.key, text, f"Convert for {target}, or make it float32.")
    for node, position in constant_reads(graph, profile):
        text = f"input {position} is a constant: {target}'s builder takes none there"
        yield Finding("error", "kernel", node.label, node.key, text, "Put an Identity before it.")
    yield from _products(graph, profile, target)
    for state, moved in passed_states(graph, profile):
        owner, readers = graph.producer(state), {node.key for value in moved for node, _ in graph.consumers(value)}
        if owner is not None and "Cast" in readers:
            text = f"its body moves a state that is cast behind it: {target}'s builder may refuse that"
            action = f"Convert for {target}, or give what reads the state one type."
            yield Finding("warning", "kernel", owner.label, owner.key, text, action)
    for read in straight_reads(graph, profile):
        made = graph.producer(read.value)
        if made is None or made.key != "Cast" or graph.types[read.value] != FLOAT:
            continue
        for low in LOW_TYPES.values():
            if graph.types[made.input(0)] == low.tensor:
                what = "stacks up" if read.owner.bodies else "reads"
                text = f"it {what} float32 that is a Cast of {low.name}: {target}'s builder may refuse that"
                action = f"Convert for {target}, or keep what the Cast reads float32, too (--keep-fp32 NAME)."
                yield Finding("warning", "kernel", read.owner.label, read.owner.key, text, action)


def _products(graph: Graph, profile: Profile, target: str) -> Iterator[Finding]:
    """Products of dequantized numbers that the target's builder may refuse."""
    for node, *dequantized in split_scales(graph, profile):
        kinds = [graph.types[found.outputs[0]] for found in dequantized]
        if kinds[0] != kinds[1]:
            text = f"its factors are dequantized to different types: {target}'s builder may refuse that"
            yield Finding("warning", "kernel", node.label, node.key, text, "Give both scales one type.")
    for first, node in shared_factors(graph, profile):
        if graph.types[node.outputs[0]] != graph.types[first.outputs[0]]:
            text = f"it shares a dequantized factor with a product of another type: {target}'s builder may refuse that"
            yield Finding("warning", "kernel", node.label, node.key, text, "Give both products one type.")
