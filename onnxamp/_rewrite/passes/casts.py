"""Removal of redundant Casts from a model.

Pairs around data movement go first (:mod:`onnxamp._rewrite.passes.cast_pairs`), then idle Casts, duplicates and
chains until there are none (:mod:`onnxamp._rewrite.passes.idle_casts`).
"""

from functools import cache, partial

from onnx import ModelProto

from onnxamp._base.errors import ArgumentTypeError
from onnxamp._decide.builder import builder_of
from onnxamp._decide.kinds import asked_hazards
from onnxamp._decide.overrides import find_overrides
from onnxamp._graph.graph import Graph
from onnxamp._model.protos import all_nodes
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult
from onnxamp._rewrite.passes.cast_pairs import remove_pairs
from onnxamp._rewrite.passes.idle_casts import find_idle_casts


def remove_redundant_casts(model: ModelProto, *, lossy: bool = False) -> ModelProto:
    """Copy a model without its redundant Casts, and change nothing else.

    If data movement is between a Cast to a wider float type and a Cast back, it then moves the narrower type.

    Args:
        model: any ModelProto; it is not changed.
        lossy: also remove pairs of Casts from float32 to float16 or bfloat16 and back. These round, so outputs change.

    Returns:
        The copy.

    Raises:
        ArgumentTypeError: ``model`` is not a ModelProto.
        ModelError: the model breaks a rule of ONNX.

    Complexity: near linear in nodes.

    Example:
        >>> import onnx, onnxamp
        >>> text = '''<ir_version: 8, opset_import: ["": 17]>
        ...     g (float[4] x) => (float[4] y) { a = Cast<to = 1>(x)  y = Relu(a) }'''
        >>> [node.op_type for node in onnxamp.remove_redundant_casts(onnx.parser.parse_model(text)).graph.node]
        ['Relu']
    """
    if not isinstance(model, ModelProto):
        raise ArgumentTypeError(
            f"model must be an onnx.ModelProto, not {type(model).__name__}."
        )
    freed = remove_pairs(Graph.of(model), lambda _: ())
    return find_idle_casts(freed.graph, lossy=lossy).apply()


def apply(draft: Draft, options: Options) -> PassResult:
    """Remove pairs of Casts, and nodes that become unused; the user may want to keep all of them."""
    is_kept = options.level == Level.O0 or "Cast" in options.black
    if is_kept or "Cast" not in draft.graph.by_key:
        return PassResult(draft)
    kept = cache(partial(_kept, options=options))
    freed = remove_pairs(draft.graph, kept, options.target)
    idle = find_idle_casts(freed.graph, chains=False)
    # Most models have none. The nodes to keep, which take longer to find, matter only to the others.
    if idle.alias or idle.removed:
        idle = find_idle_casts(freed.graph, chains=False, kept=kept(freed.graph))
    casts = freed.casts + len(idle.removed)
    result = freed.draft
    if idle.alias or idle.removed:
        result = Draft(idle.apply(), draft.folder)
    return PassResult(result, requested=casts > 0, pairs=freed.pairs, casts=casts)


def _kept(graph: Graph, options: Options) -> set[int]:
    """Return the nodes that the user keeps in float32 or decides one by one, and the Casts that the target needs."""
    kept = set(find_overrides(graph, options).of_node)
    kept |= {node.index for node in graph.nodes if node.key in options.black}
    kept |= {hazard.node for hazard in asked_hazards(graph, options)}
    builder = builder_of(graph, options.target)
    needed = (*builder.casts_of_constants(), *builder.own_casts())
    return kept | {cast.index for _, cast in needed}


def redundant_casts(graph: Graph) -> frozenset[int]:
    """Return the Casts that :func:`remove_redundant_casts` removes, by node index."""
    result = remove_redundant_casts(graph.model)
    every = all_nodes(result.graph.node)
    left = {node.output[0] for node in every if node.op_type == "Cast"}
    casts = graph.nodes_of({"Cast"})
    return frozenset(cast.index for cast in casts if cast.proto.output[0] not in left)
