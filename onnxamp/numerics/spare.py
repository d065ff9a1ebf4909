"""Some nodes of an emulated model in float32: what converting with ``--keep-fp32`` would change, without converting."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from onnx import NodeProto

from onnxamp.numerics.watch import Watched
from onnxamp.runtime.flow import Flow

_PASSING = frozenset({"Cast", "Identity"})
"""Ops of the emulated model that Casts of the model became."""


def spare(flow: Flow, rows: Sequence[Watched], names: Collection[str]) -> tuple[Flow, list[Watched]]:
    """Let the named nodes read each other's exact results; what others read of them is rounded as before.

    Args:
        flow: emulated.
        rows: its watched values.
        names: nodes as reports call them: by name, or by the value they make where they have none.

    Returns:
        The flow, and the rows without those whose rounded form nobody reads any more.

    Complexity: linear in nodes.
    """
    chosen = {row.node for row in rows if label(flow, row) in names}
    exact = {row.value: row.exact for row in rows if row.node in chosen and row.exact != row.value}
    wanted = {name for node in chosen for name in flow.reads[node]}
    for row in reversed(rows):  # Casts between chosen nodes pass exact results on
        node = flow.nodes[row.node]
        if node.op_type in _PASSING and row.value in wanted:
            chosen.add(row.node)
            wanted.update(flow.reads[row.node])
    exact |= {row.value: row.exact for row in rows if row.node in chosen and row.exact in exact}
    nodes, reads = list(flow.nodes), list(flow.reads)
    for index in chosen:
        nodes[index] = NodeProto()
        nodes[index].CopyFrom(flow.nodes[index])
        nodes[index].input[:] = [exact.get(name, name) for name in flow.nodes[index].input]
        reads[index] = tuple(dict.fromkeys(exact.get(name, name) for name in reads[index]))
    read = {name for names in reads for name in names} | set(flow.outputs)
    kept = [row for row in rows if row.node not in chosen or row.exact == row.value or row.value in read]
    return replace(flow, nodes=tuple(nodes), reads=tuple(reads)), kept


def label(flow: Flow, row: Watched) -> str:
    """How reports and patterns name the node of a value."""
    return flow.nodes[row.node].name or row.value
