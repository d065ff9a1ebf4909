"""Choices that nodes in bodies of branches and loops make by values: both models run them without control flow.

The branches that the original takes, and the turns that it makes, are put in the place of Ifs, Loops and Scans of both
models. A choice of a body then is one of the main graph in each turn.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from onnx import ValueInfoProto

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import may_be_float
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.wiring import leading_to
from onnxamp._model.model import Model
from onnxamp._model.protos import copy_without
from onnxamp._numerics.choices.close_calls import (
    Chooser,
    CloseCalls,
    choosers,
    close_calls,
)
from onnxamp._numerics.unseen.flattened import flattened, without_functions
from onnxamp._runtime.engines import Session
from onnxamp._runtime.sessions.values import Feeds


def inner_choices(
    models: tuple[Session, Session], feeds: Feeds, known: Sequence[Chooser]
) -> Iterator[CloseCalls]:
    """Yield the choices of nodes in bodies on a sample, over all turns, as far as the control flow is known.

    Args:
        models: the original and its conversion.
        feeds: the sample.
        known: nodes whose choices are counted elsewhere, as those of a branch that the sample is known to take.
    """
    one, other = models
    reference = without_functions(one.model)
    labels = _labels(reference)
    for chooser in known:
        labels.pop(chooser.node.output[0], None)
    if not labels:
        return
    flat = flattened(reference, feeds)
    if flat is None:
        return
    twin = flattened(without_functions(other.model), feeds, flat)
    if twin is None:
        return
    chosen = [name for name, origin in flat.origins.items() if origin in labels]
    flats = (
        _opened(one, _computing(flat.model, chosen)),
        _opened(other, _computing(twin.model, chosen)),
    )
    try:
        flows = [session.prepare(feeds).flow for session in flats]
    except OnnxAmpError:
        return
    choosing = [
        chooser
        for chooser in choosers(*flows)
        if flat.origins.get(chooser.node.output[0]) in labels
    ]
    total = dict[str, CloseCalls]()
    for calls in close_calls(flats, feeds, ({}, {}), choosing):
        label = labels[flat.origins[calls.node]]
        before = total.get(label)
        total[label] = replace(calls, node=label) if before is None else before + calls
    yield from total.values()


def _labels(model: Model) -> dict[str, str]:
    """Return the first outputs of the nodes in bodies that may choose by floats, with the names of the nodes."""
    decides = op_facts().decides
    graph = model.ask(graph_of)
    labels = dict[str, str]()
    for node in graph.nodes:
        is_chosen = node.scope and node.key in decides
        if is_chosen and not all(_is_integer(graph, value) for value in node.reads):
            labels[node.proto.output[0]] = node.proto.name or node.proto.output[0]
    return labels


def _is_integer(graph: Graph, value: int) -> bool:
    """Return whether a value is known to be no float, or to have been none before a Cast, or to be a constant."""
    if not may_be_float(graph.types[value]) or graph.constants.is_constant(value):
        return True
    maker = graph.producer(value, "Cast")
    return maker is not None and not may_be_float(graph.types[maker.input(0)])


def _computing(model: Model, names: Iterable[str]) -> Model:
    """Return the part of a model that computes some values, as far as it has them."""
    graph = model.ask(graph_of)
    within = graph.scopes[0].names
    targets = [name for name in names if name in within]
    nodes, _ = leading_to(graph, (within[name] for name in targets))
    part = copy_without(model.proto, "node", "output")
    part.graph.node.extend(node.proto for node in nodes)
    part.graph.output.extend(ValueInfoProto(name=name) for name in targets)
    return Model(part, model.folder)


def _opened(session: Session, model: Model) -> Session:
    """Return another model on the engine of a session."""
    return session.engine.open(model, whole=False, budget=session.budget)
