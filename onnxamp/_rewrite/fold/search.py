"""Every fold that a model offers."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._patterns.forms import Form, Kind, fold_facts
from onnxamp._patterns.match import Reading, matches
from onnxamp._rewrite.fold.batch_norm import batch_norms
from onnxamp._rewrite.fold.elementwise import activation, softmax
from onnxamp._rewrite.fold.folds import Fold, Found, is_closed
from onnxamp._rewrite.fold.norms import norm


class _Rule(Protocol):
    def __call__(self, reading: Reading, kind: Kind, found: Found) -> Fold | None: ...


_RULES: Final[Mapping[str, _Rule]] = {
    "LayerNormalization": norm,
    "RMSNormalization": norm,
    "Gelu": activation,
    "Softmax": softmax,
    "LogSoftmax": softmax,
}

_DEPTH: Final = 16
"""Steps from an anchor to the end of a form, Identities included."""


def find_folds(graph: Graph, *, with_weights: bool = True) -> list[Fold]:
    """The folds, none of which shares a node with another, producers first.

    Args:
        with_weights: also fold batch normalisations into weights, which reads and makes these.

    Complexity: near linear in nodes; a step back from each node is bounded by the longest form.
    """
    reading, hidden = graph.ask(Reading), graph.hidden
    taken, found = set[int](), list[Fold]()
    for fold in batch_norms(reading) if with_weights else ():
        taken |= fold.nodes
        found.append(fold)
    near = {
        anchors: _behind(reading.graph, anchors)
        for anchors in {form.anchors for forms in fold_facts().forms.values() for form in forms}
    }
    for index in reading.graph.order:
        node = reading.graph.nodes[index]
        forms = [form for form in fold_facts().forms.get(node.key, ()) if index in near[form.anchors]]
        if index in taken or not forms or reading.graph.scopes[node.scope].opaque:
            continue
        best = _fold_at(reading, node, forms)
        if best is None or not taken.isdisjoint(best.nodes) or hidden.intersection(_read_by(best)):
            continue
        taken |= best.nodes
        found.append(best)
    return found


def _fold_at(reading: Reading, node: Node, forms: Sequence[Form]) -> Fold | None:
    """The first form that ends at the node and is complete."""
    for form in forms:
        kind = fold_facts().kinds[form.kind]
        for match in matches(reading, form.pattern, node.outputs[0], node.scope):
            found = Found(form, match.nodes, match.values, match.axes or (), node.index)
            fold = _RULES[kind.op](reading, kind, found) if is_closed(reading, match.nodes, node.index) else None
            if fold is not None:
                return fold
    return None


def _behind(graph: Graph, keys: frozenset[str]) -> set[int]:
    """Nodes of these types, and those a few steps behind them: no other can end a form that they are in."""
    found = {node.index for node in graph.nodes if node.key in keys}
    edge = found
    for _ in range(_DEPTH):
        values = (value for index in edge for value in graph.nodes[index].outputs if value != ABSENT)
        edge = {node for value in values for node, _ in graph.uses[value]} - found
        found |= edge
    return found


def _read_by(fold: Fold) -> set[int]:
    return {value for value in fold.inputs if isinstance(value, int)}
