"""The question that is put to the minimum cut: all that is known about a graph under the options before a decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto

from onnxamp._decide.hazards import find_hazards
from onnxamp._decide.masks import sentinel_paths
from onnxamp._decide.overrides import Overrides, find_overrides
from onnxamp._decide.terms import Terms
from onnxamp._decide.variables import find_variables
from onnxamp._decide.verdicts import Hazard
from onnxamp._errors import OpsetError
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.graph import Graph
from onnxamp._model.protos import opset_imports
from onnxamp._ops.facts import is_exact, op_facts
from onnxamp._options.options import Level, Options
from onnxamp._patterns.fusion_groups import absorbed_casts, batch_norm_folds, skip_sums
from onnxamp._patterns.patterns import patterns_of


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph, the options, and what follows from both. It is decided as often as prices change."""

    graph: Graph
    options: Options
    terms: Terms
    hazards: Sequence[Hazard]
    overrides: Overrides
    sentinels: Sequence[Sequence[int]]
    """See :func:`onnxamp._decide.masks.sentinel_paths`."""
    folded: frozenset[int]
    """Normalisations that ONNX Runtime folds into the node in front of them."""
    moved: frozenset[int]
    """Exact ops on constants alone."""
    joined: Mapping[int, int]
    """See :func:`onnxamp._patterns.fusion_groups.skip_sums`."""
    absorbed: frozenset[int]
    """Inputs of :func:`onnxamp._patterns.fusion_groups.absorbed_casts`."""


@no_collections()
def find_problem(graph: Graph, options: Options, *, settled: bool = False) -> Problem:
    """What has to be decided about a graph. Complexity: near linear in nodes; each constant is read once.

    Args:
        settled: a plan says what goes with what.

    Raises:
        ModelError: the model breaks a rule of ONNX. OpsetError: it is too old for the low-precision type.
        ContradictionError: options exclude each other.
    """
    check_opset(graph.model, options)
    low, judged = options.low, options.level != Level.O0
    overrides = find_overrides(graph, options)
    absorbed = frozenset(graph.ask(absorbed_casts, low))
    sentinels = graph.ask(sentinel_paths, low) if judged else []
    folds = batch_norm_folds(graph, options) if judged else []
    folds = [pair for pair in folds if not overrides.of_node.keys() & set(pair)]
    groups: list[Sequence[int]] = []
    if judged and not settled:
        activations = [sorted(match.nodes) for match in patterns_of(graph, "gelu", "silu")]
        activations = [nodes for nodes in activations if overrides.of_node.keys().isdisjoint(nodes)]
        norms = [sorted(match.nodes) for match in patterns_of(graph, "normalisation")]
        groups = [*activations, *folds, *norms, *(sentinels if options.hazards else ())]
    terms = find_variables(graph, options, groups)
    hazards = graph.ask(find_hazards, low) if judged else []
    exact = (node for node in graph.nodes if node.key in op_facts().exact and is_exact(node.proto))
    moved = frozenset(node.index for node in exact if graph.constants.feed(node))
    batch_norms = frozenset(norm for _, norm in folds)
    return Problem(
        graph, options, terms, hazards, overrides, sentinels, batch_norms, moved, graph.ask(skip_sums), absorbed
    )


def check_opset(model: ModelProto, options: Options) -> None:
    """Refuse a model whose opset has no Cast to the low-precision type.

    Raises:
        OpsetError: it has none.
    """
    version, low = opset_imports(model)[""], options.low
    if version < low.min_opset and options.level != Level.O0:
        raise OpsetError(
            f"The model's opset {version} cannot cast to {low.name}, which needs opset {low.min_opset}: convert it"
            f" with opset={low.min_opset} (--opset {low.min_opset})."
        )
