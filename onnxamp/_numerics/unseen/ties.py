"""Inputs that lead toward a tie, where an ArgMax or a TopK chooses between elements that are nearly equal."""

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import NodeProto

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import Range
from onnxamp._facts.ops import attribute_of, op_facts, op_key
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import graph_of
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.climb import Climb
from onnxamp._runtime.inputs.samples import Samples, held_samples
from onnxamp._runtime.sessions.values import Feeds

_TRIES = 2
"""Nodes that are tried: what has no gradient before one has none before most others."""


def near_tie(
    model: Model,
    ranges: Mapping[str, Range],
    start: Feeds,
    names: Sequence[str],
    steps: int,
) -> Samples | None:
    """Return an input that so many steps reach toward a tie; None if no gradient leads there.

    Args:
        model: the original, with the sizes of the sample.
        ranges: the ranges of the inputs that may change.
        start: the sample from which the steps begin.
        names: nodes that choose, or their first outputs; the last one is tried first, as it is next to the outputs.
        steps: the number of steps.
    """
    for label, node in _ranking(model, names)[-_TRIES:][::-1]:
        try:
            posed, closeness = _with_closeness(model, node)
            climb = Climb.toward(posed, ranges, closeness)
            reached = climb.toward_zero(start, steps)
        except OnnxAmpError:
            continue
        if reached is not start:
            return held_samples(f"an input near a tie of {label!r}", [reached])
    return None


def _ranking(model: Model, names: Sequence[str]) -> list[tuple[str, NodeProto]]:
    """Return those of some nodes that rank elements, in order, with their names."""
    wanted = frozenset(names)
    graph = model.ask(graph_of)
    decides = op_facts().decides
    ranking = list[tuple[str, NodeProto]]()
    for node in graph.nodes:
        label = node.proto.name or node.proto.output[0]
        ranks = decides.get(node.key) == "rank"
        has_count = node.key != "TopK" or len(node.proto.input) > 1
        if label in wanted and ranks and has_count and node.scope == 0:
            ranking.append((label, node.proto))
    return ranking


def _with_closeness(model: Model, node: NodeProto) -> tuple[Model, str]:
    """Return a model that computes the margins of a node's choices, negated, and the name of this value."""
    editor = GraphEditor(model.ask(graph_of))
    name = node.input[0]
    is_top = op_key(node) == "TopK"
    axis = attribute_of(node, "axis", -1 if is_top else 0)
    is_largest = attribute_of(node, "largest", 1) and op_key(node) != "ArgMin"
    fresh = editor.names.fresh
    ranked, places, last, following, closeness, one = (
        fresh(f"{name}/{what}")
        for what in ("ranked", "places", "last", "next", "closeness", "one")
    )
    first = editor.constant(np.array([1], np.int64), one)
    count = node.input[1] if is_top else first
    more, before = fresh(f"{name}/more"), fresh(f"{name}/before")
    sides = (following, last) if is_largest else (last, following)
    nodes = (
        editor.make("Add", [count, first], [more], ""),
        editor.make("Sub", [count, first], [before], ""),
        editor.make(
            "TopK", [name, more], [ranked, places], "", axis=axis, largest=is_largest
        ),
        editor.make("Gather", [ranked, before], [last], "", axis=axis),
        editor.make("Gather", [ranked, count], [following], "", axis=axis),
        editor.make("Sub", list(sides), [closeness], ""),
    )
    editor.insert(0, model.ask(graph_of).scopes[0].nodes.stop, *nodes)
    return Model(editor.finish(), model.folder), closeness
