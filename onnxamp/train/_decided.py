"""The precision of the forward pass of a step, decided by the conversion of the model and carried over to the step.

The step computes what the model computes, but partly by other nodes: batch statistics, dropout, unrolled recurrent ops
and function bodies replace single ops. All nodes of the step between values of the model are *parts* of the node that
computes these values in the model, and follow the decision about it.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from onnx import ModelProto, NodeProto

from onnxamp._decide.variables.ports import NONE
from onnxamp._facts.tables import read_table
from onnxamp._gradients.pointwise import RUNNING, SCALED
from onnxamp._gradients.writer import MIN_OPSET
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._job import Request
from onnxamp._job.in_memory import convert_in_memory
from onnxamp._model.model import Model
from onnxamp._options.options import DECIDED_LOW, LOSS_SCALED, Options, Rule
from onnxamp.train._step import OWN

NORMALIZATIONS: Final = frozenset(read_table("training")["normalizations"])
COMPARED: Final = frozenset(read_table("training")["compared"])
"""Ops whose gradient compares their result with their inputs."""
COMPARISON: Final = "Equal"
"""The op that does so."""
_GRADIENT: Final = "/gradient"
"""After the label of a node, or the name of a value, in the names of the nodes that compute its gradient."""

Decided = Mapping[str, bool]
"""Whether nodes are low, by first output. Nodes without a float to decide about are left out."""


class Decisions(NamedTuple):
    """The precision of a model's nodes, those of subgraphs included, and the opset that has kernels for it."""

    low: Decided
    opset: int = MIN_OPSET


def decide_forward(model: ModelProto, options: Options) -> Decisions:
    """Return the decisions of the conversion of a model."""
    converted, _ = convert_in_memory(Request(model=Model.of(model), asked=options))
    analysis = converted.analysis
    graph = analysis.graph
    ports = analysis.ports
    is_low = analysis.decision.of_ports()
    decided = dict[str, bool]()
    doubtful = set[str]()
    for node in graph.nodes:
        # A value that either precision stores at no cost is no decision: it follows its readers.
        if not ports.free.isdisjoint(node.outputs):
            continue
        produced = (ports.produced[value] for value in node.outputs if value != ABSENT)
        settled = [is_low[variable] for variable in produced if variable != NONE]
        read = {is_low[one] for one in ports.consumed[node.index] if one != NONE}
        if not settled and len(read) != 1:
            continue
        low = settled[0] if settled else read.pop()
        if decided.setdefault(node.first_output, low) != low:
            doubtful.add(node.first_output)  # subgraphs may use a name twice
    sure = {name: low for name, low in decided.items() if name not in doubtful}
    return Decisions(sure, max(MIN_OPSET, graph.book.opsets[""]))


def step_rule(forward: ModelProto, step: ModelProto, decided: Decided) -> Rule:
    """Return the rule for converting a step whose forward pass is decided. Complexity: linear in its nodes and reads.

    Nodes that the step adds to the model, such as the loss, stay in float32. So do the statistics of batch
    normalizations: their squares would overflow, and the kernels of frameworks also accumulate them in float32. Running
    statistics are state, like weights. If an op is float32, so is its gradient; otherwise, the conversion decides, and
    loss scales keep the values in range.

    Args:
        forward: the model in training mode.
        step: the graph of the step, in float32.
        decided: the precision of the nodes of ``forward``.
    """
    graph = Graph.of(step)
    opinions = dict[str, str | None]()
    origins = dict[str, Node]()
    for owner, node in _parts(Graph.of(forward), graph):
        opinions[node.first_output] = _opinion(owner, node, decided)
        origins[owner.label] = origins[node.label] = owner
    for node in graph.at(graph.scopes[0].nodes):
        if node.first_output not in opinions:
            opinions[node.first_output] = _added(node, origins, decided)

    def rule(node: NodeProto) -> str | None:
        """Decide for a node."""
        name = next(filter(None, node.output), "")
        if name in opinions:
            return opinions[name]
        return _answer(decided.get(name))

    return rule


def _answer(low: bool | None) -> str | None:
    """Return the answer of a rule for a decision."""
    if low is None:
        return None
    return DECIDED_LOW if low else "high"


def _parts(forward: Graph, step: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield nodes of the model, each with a part of it in the step; nodes of subgraphs are left out."""
    known = forward.scopes[0].names
    names = step.scopes[0].names
    seen = set[int]()
    for owner in forward.at(forward.scopes[0].nodes):
        outputs = (
            forward.values[value].name for value in owner.outputs if value != ABSENT
        )
        stack = [step.producer(names[name]) for name in outputs if name in names]
        while stack:
            node = stack.pop()
            if node is None or node.index in seen:
                continue
            seen.add(node.index)
            yield owner, node
            inner = (
                value for value in node.reads if step.values[value].name not in known
            )
            stack += map(step.producer, inner)


def _opinion(owner: Node, node: Node, decided: Decided) -> str | None:
    """Return the precision of a part of a node of the model; None leaves it to the conversion."""
    low = decided.get(owner.first_output)
    is_written = node.label.startswith(f"{owner.label}/")
    if is_written and node.label.startswith(f"{owner.label}/{RUNNING}/"):
        return "high"
    is_result = not set(node.proto.output).isdisjoint(owner.proto.output)
    if not low or is_result:
        return _answer(low)
    if owner.key in NORMALIZATIONS:
        is_scaled = node.label.startswith(f"{owner.label}/{SCALED}/")
        return DECIDED_LOW if is_scaled else None
    # The body of a function may hold what only the kernel of the op can compute in low precision.
    return DECIDED_LOW if is_written else None


def _added(node: Node, origins: Mapping[str, Node], decided: Decided) -> str | None:
    """Return the precision of a node that the step adds to the model.

    ``origins`` are the nodes of the model by label, their own or that of a part: gradients are called after them.
    """
    names = [*_derived_from(node.label)]
    if OWN in names:
        return "high"
    owners = [
        name.removesuffix(_GRADIENT) for name in names if name.endswith(_GRADIENT)
    ]
    if not owners:
        return None
    origin = next((origins[name] for name in owners if name in origins), None)
    if origin is not None and decided.get(origin.first_output) is False:
        return "high"
    # Both sides must be rounded as the op rounded them.
    is_compared = origin is not None and origin.key in COMPARED
    return DECIDED_LOW if is_compared and node.key == COMPARISON else LOSS_SCALED


def _derived_from(name: str) -> Iterator[str]:
    """Yield the name, and all names that it may be derived from, the longest first."""
    end = len(name)
    while end > 0:
        yield name[:end]
        end = name.rfind("/", 0, end)
