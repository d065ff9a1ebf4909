"""Where the elements of an output come from: the parts that it joins, and shares of 1.

A Concat puts values of any magnitude side by side. A norm over the whole output hides what happens to the small ones,
so they are compared one by one, as outputs of their own would be.
"""

from collections.abc import Mapping
from typing import Final

from onnx import NodeProto

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._runtime.piecewise.flow import DataflowGraph

_MOST: Final = 64
"""Parts of an output that are compared. More of them are samples of a kind, such as frames."""


def joined_parts(flow: DataflowGraph) -> Mapping[str, tuple[str, ...]]:
    """Return the values that nodes compute and a Concat joins, by output.

    Between the Concat and the output, ops may move elements, or commute with rounding. Concats of Concats are followed.

    Complexity: linear in the nodes between.
    """
    parts_of = {}
    for name in flow.outputs:
        if flow.types.get(name) in ANY_FLOAT_TENSORS:
            parts = _parts(flow, name)
            if 1 < len(parts) <= _MOST:
                parts_of[name] = parts
    return parts_of


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
        source = _computed(flow, name)
        if source is not None and _joins(source[0]):
            waiting += source[1]
        elif name in flow.maker:
            parts[name] = None
    return tuple(parts)


def holds_shares(flow: DataflowGraph, output: str) -> bool:
    """Return whether an output, or a part that it joins, consists of numbers between 0 and 1 that an op made as such.

    They are probabilities or weights of something: the scale of their errors is 1, however small some of them are.
    """
    parts = flow.ask(joined_parts).get(output, (output,))
    return any(_makes_shares(flow, part) for part in parts)


def _makes_shares(flow: DataflowGraph, name: str) -> bool:
    """Return whether a value consists of shares of 1, or of products and sums of such shares."""
    facts = op_facts()
    waiting = [name]
    seen = set[str]()
    while waiting:
        source = _computed(flow, waiting.pop())
        if source is None:
            return False
        node, reads = source
        if _is_share(flow, node, reads):
            continue
        key = op_key(node)
        ports = facts.multiplies.get(key) or facts.adds.get(key, ())
        if len(ports) != len(node.input) or len(reads) != len(ports):
            return False
        waiting += (read for read in reads if read not in seen)
        seen.update(reads)
    return True


def _is_share(flow: DataflowGraph, node: NodeProto, reads: tuple[str, ...]) -> bool:
    """Return whether a node makes numbers between 0 and 1, or divides numbers by their own sum."""
    facts = op_facts()
    if facts.divisors.get(op_key(node)) != (1,) or len(reads) != 2:
        return op_key(node) in facts.gates
    total = _computed(flow, reads[1])
    if total is None or op_key(total[0]) not in facts.reductions - facts.means:
        return False
    return total[1][:1] == reads[:1]


def _joins(node: NodeProto) -> bool:
    """Return whether an op puts all of its inputs together."""
    facts = op_facts()
    key = op_key(node)
    moves = facts.moved_inputs.get(key)
    return isinstance(moves, range) and key not in facts.containers


def _computed(
    flow: DataflowGraph, name: str
) -> tuple[NodeProto, tuple[str, ...]] | None:
    """Return the op that makes the elements of a value, after ops that move them or commute with rounding, and the
    values that it reads; None if no op makes them.
    """
    facts = op_facts()
    while name in flow.maker:
        index = flow.maker[name]
        node = flow.nodes[index]
        key = op_key(node)
        reads = tuple(r for r in node.input if r and r not in flow.shell.weights)
        is_moved = facts.moved_inputs.get(key) == (0,)
        passes = key in facts.carriers or key in facts.exact
        if (
            _joins(node)
            or not passes
            or not reads
            or (len(reads) > 1 and not is_moved)
        ):
            return node, reads
        name = reads[0]
    return None
