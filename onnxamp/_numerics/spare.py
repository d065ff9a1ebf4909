"""Some nodes of an emulated model in float32: what converting with ``--keep-fp32`` would change, without converting."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from onnx import NodeProto, TensorProto

from onnxamp._numerics.watch import Watched
from onnxamp._runtime.flow import Flow

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
    exact = {row.value: row.exact for row in rows if row.node in chosen and _is_rounded(flow, row)}
    wanted = {name for node in chosen for name in flow.reads[node]}
    for row in reversed(rows):  # Casts between chosen nodes pass exact results on
        node = flow.nodes[row.node]
        if node.op_type in _PASSING and row.value in wanted:
            chosen.add(row.node)
            wanted.update(flow.reads[row.node])
    for row in rows:  # what is cast up from them is float32 in the model that they are float32 in
        if row.value not in flow.low and flow.nodes[row.node].op_type in _PASSING:
            chosen |= {row.node} if any(name in exact for name in flow.reads[row.node]) else set()
    exact |= {row.value: row.exact for row in rows if row.node in chosen and row.exact in exact}
    nodes, reads = list(flow.nodes), list(flow.reads)
    for index in chosen:
        nodes[index] = NodeProto()
        nodes[index].CopyFrom(flow.nodes[index])
        nodes[index].input[:] = [exact.get(name, name) for name in flow.nodes[index].input]
        reads[index] = tuple(dict.fromkeys(exact.get(name, name) for name in reads[index]))
    for row in rows:  # integers are cast to float32 then, if nobody else wants them low
        if row.node not in chosen or row.exact == row.value or _is_rounded(flow, row):
            continue
        if {index for index, names in enumerate(reads) if row.value in names} <= chosen:
            nodes[row.node] = NodeProto()
            nodes[row.node].CopyFrom(flow.nodes[row.node])
            for item in nodes[row.node].attribute:
                item.i = TensorProto.FLOAT if item.name == "to" else item.i
    read = {name for names in reads for name in names} | set(flow.outputs)
    kept = [row for row in rows if row.node not in chosen or not _is_rounded(flow, row) or row.value in read]
    return replace(flow, nodes=tuple(nodes), reads=tuple(reads)), kept


def _is_rounded(flow: Flow, row: Watched) -> bool:
    """Whether a float32 value stands behind the row's: integers that are cast to the low type cannot stand in."""
    return row.exact != row.value and flow.types.get(row.exact) == "tensor(float)"


def label(flow: Flow, row: Watched) -> str:
    """How reports and patterns name the node of a value."""
    return flow.nodes[row.node].name or row.value
