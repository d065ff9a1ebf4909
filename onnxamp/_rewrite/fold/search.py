"""Every fold that a model offers."""

from collections.abc import Mapping
from typing import Final, Protocol

from onnxamp._graph.graph import Graph
from onnxamp._patterns.forms import Kind, form_table
from onnxamp._patterns.match import Match
from onnxamp._patterns.patterns import find_forms
from onnxamp._rewrite.fold.batch_norm import batch_norms
from onnxamp._rewrite.fold.elementwise import activation, softmax
from onnxamp._rewrite.fold.folds import Fold
from onnxamp._rewrite.fold.norms import norm


class _Rule(Protocol):
    def __call__(self, graph: Graph, kind: Kind, match: Match) -> Fold | None: ...


_RULES: Final[Mapping[str, _Rule]] = {
    "LayerNormalization": norm,
    "RMSNormalization": norm,
    "Gelu": activation,
    "Softmax": softmax,
    "LogSoftmax": softmax,
}
"""What a form alone cannot say, by the op that it is."""


def find_folds(graph: Graph, *, with_weights: bool = True) -> list[Fold]:
    """The folds, none of which shares a node with another, producers first.

    Args:
        with_weights: also fold batch normalisations into weights, which reads and makes these.

    Complexity: linear in the matches of forms, see :func:`onnxamp._patterns.patterns.find_forms`.
    """
    folds = batch_norms(graph) if with_weights else []
    taken = {node for fold in folds for node in fold.nodes}
    ended = set[int]()
    for match in graph.ask(find_forms):
        if match.core in ended or match.core in taken:
            continue
        kind = form_table().kinds[match.kind]
        fold = _RULES[kind.op](graph, kind, match)
        if fold is None:
            continue
        ended.add(match.core)  # of several matches that end at one node, the first that is complete counts
        if taken.isdisjoint(fold.nodes) and graph.hidden.isdisjoint(_read_by(fold)):
            taken |= fold.nodes
            folds.append(fold)
    return folds


def _read_by(fold: Fold) -> set[int]:
    return {value for value in fold.inputs if isinstance(value, int)}
