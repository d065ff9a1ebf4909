"""The parts that an output joins.

A Concat puts values of any magnitude side by side. A norm over the whole output hides what happens to the small ones,
so they are compared one by one, as outputs of their own would be.
"""

from collections.abc import Mapping
from typing import Final

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._runtime.flow import DataflowGraph

_MOST: Final = 64
"""Parts of an output that are compared. More of them are samples of a kind, such as frames."""


def joined_parts(flow: DataflowGraph) -> Mapping[str, tuple[str, ...]]:
    """Return the values that nodes compute and a Concat joins, by output.

    Between the Concat and the output, ops may move elements, or commute with rounding. Concats of Concats are followed.

    Complexity: linear in the nodes between.
    """
    found = {}
    for name in flow.outputs:
        if flow.types.get(name) in ANY_FLOAT_TENSORS:
            parts = _parts(flow, name)
            if 1 < len(parts) <= _MOST:
                found[name] = parts
    return found


def _parts(flow: DataflowGraph, output: str) -> tuple[str, ...]:
    """Return the values that an output joins; only itself if it joins none."""
    parts = dict[str, None]()
    waiting = [output]
    seen = set[str]()
    while waiting and len(parts) <= _MOST:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        joined = _joined(flow, name)
        if joined:
            waiting += joined
        elif name in flow.maker:
            parts[name] = None
    return tuple(parts)


def _joined(flow: DataflowGraph, name: str) -> tuple[str, ...]:
    """Return the operands of the Concat that a value comes from; nothing if it comes from none."""
    facts = op_facts()
    while name in flow.maker:
        index = flow.maker[name]
        node = flow.nodes[index]
        key = op_key(node)
        reads = [read for read in flow.reads[index] if read not in flow.shell.weights]
        moves = facts.moved_inputs.get(key)
        if isinstance(moves, range) and key not in facts.containers:
            return tuple(reads)
        passes = key in facts.carriers or key in facts.exact
        if not passes or not reads or (len(reads) > 1 and moves != (0,)):
            return ()
        name = reads[0]
    return ()
