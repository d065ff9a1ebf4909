"""What control flow passes into bodies, out of them, and from one turn of a loop to the next."""

from collections.abc import Iterator, Sequence

from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._ops.facts import attribute


def body_sources(node: Node, body_inputs: int) -> list[int]:
    """For each input of the node's body, the position of the node input that feeds it (ABSENT: a counter).

    Loop passes (iteration, condition, state...), Scan and SequenceMap pass their inputs as they stand.
    """
    if node.key == "Loop":
        return [ABSENT, 1, *range(2, body_inputs)][:body_inputs]
    offset = (
        len(node.inputs) - body_inputs if node.key == "Scan" else 0
    )  # Scan-8 has a leading sequence_lens
    return [position + offset for position in range(body_inputs)]


def body_targets(node: Node, body_outputs: int) -> list[int]:
    """For each output of the node's body, the node output that it becomes (ABSENT for Loop's condition)."""
    return [position - 1 if node.key == "Loop" else position for position in range(body_outputs)]


def carried(view: View, node: Node) -> list[tuple[int, int]]:
    """(node input, node output) pairs that are the initial and the final value of a loop-carried state."""
    if node.key == "Loop":
        return [(2 + k, k) for k in range(max(len(node.inputs) - 2, 0))]
    if node.key == "Scan":
        scans = int(attribute(node.proto, "num_scan_inputs") or 0)
        body_inputs = len(view.scopes[node.bodies[0][1]].inputs) if node.bodies else 0
        offset = len(node.inputs) - body_inputs
        return [(offset + k, k) for k in range(body_inputs - scans)]
    return []


def transfers(view: View, node: Node) -> Iterator[tuple[int, int]]:
    """Pairs (source, result) of values, ABSENT for none, that If, Loop or Scan passes on: into bodies and out of them,
    and from one turn of a loop to the next.
    """
    states = carried(view, node)
    for source, target in states:
        yield node.input(source), _at(node.outputs, target)
    for _, body in node.bodies:
        scope = view.scopes[body]
        sources = body_sources(node, len(scope.inputs))
        targets = body_targets(node, len(scope.outputs))
        entering = {source: inner for inner, source in zip(scope.inputs, sources, strict=True)}
        leaving = {target: inner for inner, target in zip(scope.outputs, targets, strict=True)}
        yield from (
            (node.input(source), inner) for source, inner in entering.items() if source >= 0
        )
        yield from ((inner, _at(node.outputs, target)) for target, inner in leaving.items())
        yield from (
            (leaving.get(target, ABSENT), entering.get(source, ABSENT)) for source, target in states
        )


def _at(values: Sequence[int], position: int) -> int:
    return values[position] if 0 <= position < len(values) else ABSENT
