"""Graph optimizers of ONNX Runtime that break a model when a session with default options opens it.

The facts are in ``optimizers.toml`` in the folders of targets, whose README explains the fields.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from onnx import ModelProto, NodeProto

from onnxamp._base.errors import ModelError, OpsetError
from onnxamp._facts.dtypes import readable_types
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.tables import holds_in, read_table, target_names, target_table
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import all_nodes

_CPU: Final = "cpu"
"""The provider whose faults also count for providers without a table, which leave nodes to it."""


class OptimizerFault(NamedTuple):
    """An input of a node through which an optimizer breaks the model.

    Attributes:
        optimizer: its name, as ``disabled_optimizers`` of ONNX Runtime's sessions takes it.
        node: the node into which the optimizer absorbs a factor.
        reader: the node that reads the absorbed value: ``node``, or one before it.
        port: the position of the input of ``reader``.
        value: the value that is absorbed. Nodes that ONNX Runtime removes first may follow it.
        skipped: these nodes, from the reader on.
        because: what the optimizer does, as a clause.
    """

    optimizer: str
    node: Node
    reader: Node
    port: int
    value: int
    skipped: tuple[Node, ...]
    because: str


def optimizer_faults(
    graph: Graph, providers: Iterable[str], version: str = ""
) -> Iterator[OptimizerFault]:
    """Yield the inputs through which an optimizer breaks a model, each once, in the order of nodes.

    Args:
        graph: the model.
        providers: the providers of sessions that count, by the names of targets.
        version: the version of ONNX Runtime; "" for any, for which all known faults count.

    Complexity: linear in nodes, and that of shape inference if there are candidates.
    """
    rows = list[Mapping[str, Any]]()
    for provider in dict.fromkeys(providers):
        rows += [row for row in _rows(provider) if holds_in(row, version)]
    # Types and shapes, which faults depend on, take far longer than this look at the nodes.
    if not may_break(graph.model):
        return
    ops = set[str]().union(*(row["ops"] for row in rows))
    for node in graph.nodes_of(ops):
        mine = [row for row in rows if node.key in row["ops"]]
        for port in range(len(node.inputs)):
            faults = (_fault(graph, node, port, row) for row in mine)
            if fault := next(filter(None, faults), None):
                yield fault


def faulty_optimizers(
    model: ModelProto, provider: str, version: str
) -> tuple[str, ...]:
    """Return the optimizers to disable so that a session can open a model.

    Args:
        model: the model; the data of its weights do not matter.
        provider: the provider of the session.
        version: the version of ONNX Runtime.

    Complexity: as :func:`optimizer_faults`.
    """
    if not may_break(model):
        return ()
    try:
        faults = optimizer_faults(Graph.of(model), (provider,), version)
        return tuple(dict.fromkeys(fault.optimizer for fault in faults))
    except (ModelError, OpsetError):
        # The session says what is wrong with the model.
        return ()


def suspected_optimizers(model: ModelProto) -> tuple[str, ...]:
    """Return the optimizers that may absorb nodes of a model and break it, in any version.

    Complexity: linear in nodes.
    """
    makers = _makers()
    optimizers = dict[str, None]()
    for node in all_nodes(model.graph.node):
        for row in makers.get(node.op_type, ()):
            if _is_taken(node, row):
                optimizers[row["optimizer"]] = None
    return tuple(optimizers)


@cache
def known_optimizers() -> tuple[str, ...]:
    """Return the graph optimizers of ONNX Runtime, in the order in which they run."""
    return tuple(read_table("graph_optimizers")["names"])


def may_break(model: ModelProto) -> bool:
    """Return whether a model has any node that a faulty optimizer may absorb. Complexity: linear in nodes."""
    return bool(suspected_optimizers(model))


@cache
def _rows(provider: str) -> tuple[Mapping[str, Any], ...]:
    """Return the facts about a provider's sessions."""
    table = target_table(provider, "optimizers") or target_table(_CPU, "optimizers")
    return tuple(table["rows"])


@cache
def _makers() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return op -> the facts about sessions in which a faulty optimizer may absorb it."""
    makers = dict[str, list[Mapping[str, Any]]]()
    for provider in target_names():
        for row in _rows(provider):
            rows = makers.setdefault(row["producer"], [])
            if not any(_is_same_maker(row, other) for other in rows):
                rows.append(row)
    return makers


def _is_same_maker(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two facts are about the same nodes that an optimizer absorbs."""
    return all(row.get(key) == other.get(key) for key in ("attribute", "among"))


def _is_taken(proto: NodeProto, row: Mapping[str, Any]) -> bool:
    """Return whether the attribute of a producer is one that counts."""
    value = attribute(proto, row["attribute"])
    return list(value or ()) in row["among"] if "among" in row else bool(value)


def _fault(
    graph: Graph, node: Node, port: int, row: Mapping[str, Any]
) -> OptimizerFault | None:
    """Return how an optimizer breaks the model through an input of a node; None if it does not."""
    value = node.inputs[port]
    if value == ABSENT or port not in row.get("ports", (port,)):
        return None
    if readable_types(graph.types[value]) not in row["types"]:
        return None
    # ONNX Runtime removes idle nodes before this optimizer sees the graph.
    reader = node
    skipped = _skipped(graph, node, value)
    value = skipped[-1].inputs[0] if skipped else value
    if "through" in row:
        maker = _maker(graph, node, value)
        if maker is None or maker.key != row["through"]:
            return None
        reader, port, value = maker, 0, maker.inputs[0]
        skipped = _skipped(graph, node, value)
        value = skipped[-1].inputs[0] if skipped else value
    maker = _maker(graph, node, value)
    if maker is None or not _is_absorbed(graph, maker, row):
        return None
    if "ranks" in row and not _differ_in_rank(graph, node):
        return None
    return OptimizerFault(
        optimizer=row["optimizer"],
        node=node,
        reader=reader,
        port=port,
        value=value,
        skipped=skipped,
        because=row["because"],
    )


def _is_absorbed(graph: Graph, maker: Node, row: Mapping[str, Any]) -> bool:
    """Return whether an optimizer absorbs the node before an input."""
    if maker.key != row["producer"] or not _is_taken(maker.proto, row):
        return False
    # The optimizer keeps what the model returns.
    if graph.results[maker.outputs[0]]:
        return False
    typer = row.get("typed_by")
    if typer is None:
        return True
    return len({*graph.types_of([maker.input(typer), *maker.outputs])}) > 1


def _differ_in_rank(graph: Graph, node: Node) -> bool:
    """Return whether the ranks of a node's first two inputs differ, or are not known."""
    shapes = [graph.shapes[value] for value in node.inputs[:2]]
    ranks = {None if shape is None else len(shape) for shape in shapes}
    return None in ranks or len(ranks) > 1


def _skipped(graph: Graph, reader: Node, value: int) -> tuple[Node, ...]:
    """Return the nodes before a value that ONNX Runtime removes first, the last one first."""
    nodes = list[Node]()
    maker = _maker(graph, reader, value)
    while maker is not None and _is_removed(graph, maker):
        nodes.append(maker)
        maker = _maker(graph, reader, maker.inputs[0])
    return tuple(nodes)


def _maker(graph: Graph, reader: Node, value: int) -> Node | None:
    """Return the node of the reader's graph that makes a value; None if it is made elsewhere."""
    maker = graph.producer(value)
    return None if maker is None or maker.scope != reader.scope else maker


def _is_removed(graph: Graph, node: Node) -> bool:
    """Return whether ONNX Runtime removes a node first, such as a Reshape that changes no shape."""
    facts = op_facts()
    if node.key in facts.eliminated or node.key not in facts.views:
        return node.key in facts.eliminated
    before, after = (
        graph.shapes[value] for value in (node.inputs[0], node.outputs[0])
    )
    return before is not None and None not in before and before == after
