"""Inputs that make a divisor small, where a quotient multiplies the errors of what it divides."""

from collections.abc import Iterator, Mapping
from itertools import islice

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import FLOAT, Range
from onnxamp._facts.ops import op_facts
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.ascent import moved_values
from onnxamp._numerics.unseen.climb import Climb
from onnxamp._runtime.sessions.values import Feeds


def small_divisors(
    model: Model, ranges: Mapping[str, Range], start: Feeds, steps: int, count: int
) -> Iterator[Feeds]:
    """Yield inputs on which a divisor is as small as so many steps of gradient descent make it, for one after another.

    Args:
        model: the original, with the sizes of the sample.
        ranges: the ranges of the inputs that may change.
        start: the sample from which the steps begin.
        steps: the number of steps.
        count: how many divisors to take: the first ones, which inputs control best.
    """
    for name in islice(_divisors(model.ask(graph_of), ranges), count):
        try:
            posed, size = _with_size(model, name)
            climb = Climb.toward(posed, ranges, size)
            reached, _ = climb.climbed(start, -1.0, steps)
        except OnnxAmpError:  # an op before it has no gradient
            continue
        if reached is not start:
            yield reached


def _divisors(graph: Graph, inputs: Mapping[str, Range]) -> Iterator[str]:
    """Yield the floats of the main graph by which a node divides, and that follow from some inputs. Linear."""
    facts = op_facts()
    left = moved_values(graph, inputs)
    for node in graph.order:
        if node.scope or node.key in facts.logarithms:
            continue
        for value in map(node.input, facts.divisors.get(node.key, ())):
            if value in left and graph.types[value] == FLOAT:
                left.remove(value)
                yield graph.values[value].name


def _with_size(model: Model, name: str) -> tuple[Model, str]:
    """Return a model that also computes the mean magnitude of a value, and the name of this number."""
    graph = model.ask(graph_of)
    editor = GraphEditor(graph)
    magnitude, size = (
        editor.names.fresh(f"{name}/{what}") for what in ("magnitude", "size")
    )
    nodes = (
        editor.make("Abs", [name], [magnitude], ""),
        editor.make("ReduceMean", [magnitude], [size], "", keepdims=0),
    )
    editor.insert(0, graph.scopes[0].nodes.stop, *nodes)
    return Model(editor.finish(), model.folder), size
