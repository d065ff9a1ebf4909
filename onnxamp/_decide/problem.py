"""The precision problem of a graph: everything that is known before anything is decided."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from onnx import ModelProto

from onnxamp._base.errors import OpsetError
from onnxamp._base.public import no_collections
from onnxamp._decide.exponents.rows import fitting_sums
from onnxamp._decide.kinds import (
    Hazard,
    HazardKind,
    KnownNodes,
    hazards_for,
    kinds,
)
from onnxamp._decide.listed import Listed, find_listed
from onnxamp._decide.overrides import Overrides, find_overrides
from onnxamp._decide.patterns.find import TIED, patterns_of
from onnxamp._decide.patterns.fusion_groups import (
    absorbed_casts,
    batch_norm_folds,
    skip_sums,
)
from onnxamp._decide.patterns.quantized_units import bounded_nodes
from onnxamp._decide.patterns.split_products import (
    SUM,
    split_products,
    target_sums_low,
)
from onnxamp._decide.proofs import undisproved
from onnxamp._decide.variables.find import find_variables
from onnxamp._decide.variables.ports import PortVariables
from onnxamp._facts.ops import op_facts
from onnxamp._facts.targets import target_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.masks.added import AddedMasks, may_be_bounded
from onnxamp._graph.masks.made import bounded_masks
from onnxamp._graph.masks.paths import sentinel_paths
from onnxamp._graph.targets.freedom import Freedom, Typed, deciding_form, freedom
from onnxamp._model.protos import opset_imports
from onnxamp._options.options import Options
from onnxamp._options.values import Level


class Problem(NamedTuple):
    """A graph, the options, and everything that follows from both.

    Attributes:
        ports: the precision variables.
        freedoms: node -> the choices that the target's kernels leave to its variables.
        hazards: the places where low precision is known to break or lose values.
        overrides: the user's overrides for single nodes.
        listed: the nodes that lists refer to.
        sentinels: nodes of mask paths, see :func:`onnxamp._graph.masks.paths.sentinel_paths`.
        folded: normalizations that ONNX Runtime folds into the node before them, and sums over the parts of a product.
        unfit: constants, and what is moved from them, with numbers that low precision cannot hold.
        constant_fed: exact ops on constants alone. At O3, a look-up in a constant counts only if the constant is unfit.
        joined: see :func:`onnxamp._decide.patterns.fusion_groups.skip_sums`.
        shares: nodes that lose digits by a hazard -> its kind, and their squared error as a share of what is bearable,
            where the level lets that decide.
        twofold: nodes that may dequantize in both precisions, one node for each, instead of being followed by a Cast.
        bounded: see :func:`onnxamp._decide.patterns.quantized_units.bounded_nodes`.
        absorbed: values whose up-cast a fusion would absorb, see
            :func:`onnxamp._decide.patterns.fusion_groups.absorbed_casts`.
        masks: the masks among the inputs, which low precision bounds lest they become infinite.
    """

    graph: Graph
    options: Options
    ports: PortVariables
    freedoms: Mapping[int, Freedom]
    hazards: Sequence[Hazard]
    overrides: Overrides
    listed: Listed
    sentinels: Sequence[Sequence[int]]
    folded: frozenset[int]
    unfit: frozenset[int]
    constant_fed: frozenset[int]
    joined: Mapping[int, int]
    shares: Mapping[int, tuple[HazardKind, float]]
    twofold: frozenset[int]
    bounded: frozenset[int]
    absorbed: frozenset[int]
    masks: AddedMasks


@no_collections()
def find_problem(graph: Graph, options: Options, *, replayed: bool = False) -> Problem:
    """State the problem. Complexity: near linear in nodes; each constant is read once.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        replayed: do not group nodes, because a plan decides which of them share a precision.

    Raises:
        ModelError: the model breaks a rule of ONNX.
        OpsetError: its opset is too old for the low-precision type.
        ContradictionError: two overrides of a node exclude each other.
    """
    require_opset(graph.model, options)
    is_judged = options.level != Level.O0
    overrides = find_overrides(graph, options)
    listed = find_listed(graph, options)
    wished = overrides.of_node.keys()
    masks = AddedMasks()
    sentinels = list[list[int]]()
    hazards = list[Hazard]()
    folds = list[tuple[int, int]]()
    groups = list[Sequence[int]]()
    if is_judged:
        masks = _masks(graph, options)
        sentinels = _sentinels(graph, options, masks)
        folds = _folds(graph, options, wished, listed)
        hazards = _hazards(graph, options, overrides)
    if is_judged and not replayed:
        groups += _patterns(graph, wished, listed)
        groups += [*folds, *(sentinels if options.hazards else ())]
    low_weights = frozenset(overrides.low_weights if is_judged else ())
    ports = find_variables(graph, options, groups, low_weights)
    freedoms = _freedoms(graph, options, ports)
    unfit = _unfit(graph, options) if is_judged else frozenset[int]()
    # A node that dequantizes twice follows its readers, so nothing else may settle its precision.
    settled = {*wished, *(hazard.node for hazard in hazards)}
    return Problem(
        graph=graph,
        options=options,
        ports=ports,
        freedoms=freedoms,
        hazards=hazards,
        overrides=overrides,
        listed=listed,
        sentinels=sentinels,
        folded=frozenset(last for _, last in folds),
        unfit=unfit,
        constant_fed=_constant_fed(graph, unfit, lookups=options.level != Level.O3),
        joined=graph.ask(skip_sums),
        shares=_shares(graph, options),
        twofold=_twofold(graph, options, freedoms) - settled,
        bounded=graph.ask(bounded_nodes, options.target),
        absorbed=frozenset(graph.ask(absorbed_casts, options.low, options.target)),
        masks=masks,
    )


def _masks(graph: Graph, options: Options) -> AddedMasks:
    """Return the masks that may be bounded, if hazards count."""
    can_bound = options.hazards and may_be_bounded(graph)
    return bounded_masks(graph, options.low) if can_bound else AddedMasks()


def _sentinels(graph: Graph, options: Options, masks: AddedMasks) -> list[list[int]]:
    """Return the paths of sentinels, apart from those of masks that are computed in float32."""
    paths = graph.ask(sentinel_paths, options.low)
    return [path for path in paths if masks.arithmetic.isdisjoint(path)]


def _folds(
    graph: Graph, options: Options, wished: AbstractSet[int], listed: Listed
) -> list[tuple[int, int]]:
    """Return the nodes that become one: products with the norms after them, and with the sums of their parts."""
    folds = list[tuple[int, int]]()
    for product, norm in batch_norm_folds(graph, options):
        if wished.isdisjoint((product, norm)) and norm not in listed.white:
            folds.append((product, norm))
    return folds + _sums_of_parts(graph, options)


def _hazards(graph: Graph, options: Options, overrides: Overrides) -> list[Hazard]:
    """Return the hazards of the graph on the target, but for nodes of which more is known."""
    chosen = options.rescaling
    is_measured = chosen is not None and not chosen.made_up
    known = KnownNodes(
        scaled=overrides.scaled,
        fitting=fitting_sums(graph, options),
        ranged=frozenset(range(len(graph.nodes)) if is_measured else ()),
    )
    spared = {kind: kind.spared(known) for kind in kinds()}
    all_hazards = hazards_for(graph, options.low, options.target)
    at_risk = (
        hazard for hazard in all_hazards if hazard.node not in spared[hazard.reason]
    )
    return undisproved(graph, options, at_risk)


def _shares(graph: Graph, options: Options) -> Mapping[int, tuple[HazardKind, float]]:
    """Return the nodes whose error has a price: the kind of the hazard, and the share of what is bearable."""
    is_priced = options.level in (Level.O1, Level.O2) and not options.strict
    if not (is_priced and options.hazards):
        return {}
    shares = dict[int, tuple[HazardKind, float]]()
    for kind in kinds():
        prices = kind.prices(graph, options.low, options.target)
        shares |= {node: (kind, share) for node, share in prices.items()}
    return shares


def _patterns(
    graph: Graph, wished: AbstractSet[int], listed: Listed
) -> Iterator[Sequence[int]]:
    """Yield the nodes of decomposed ops, which need one precision unless overrides or the user's lists split them."""
    for match in patterns_of(graph, *TIED):
        is_split = match.kind != "normalization" and not wished.isdisjoint(match.nodes)
        if not is_split and listed.white.keys().isdisjoint(match.nodes):
            yield sorted(match.nodes)


def _sums_of_parts(graph: Graph, options: Options) -> list[tuple[int, int]]:
    """Return products that are split for the target, each with the node that adds its parts.

    There are none if these nodes stay in float32.
    """
    is_summed = target_sums_low(options) and SUM not in options.user_black
    return graph.ask(split_products) if is_summed else []


def _freedoms(
    graph: Graph, options: Options, ports: PortVariables
) -> dict[int, Freedom]:
    """Return the choices that kernels leave to each node, by one look-up for each distinct form of a node."""
    # Nodes of equal layout share the object, so it is a cheap key.
    known = dict[object, Freedom]()
    freedoms = dict[int, Freedom]()
    for index, layout in ports.layouts.items():
        node = graph.nodes[index]
        assert node.signature is not None
        key = layout, deciding_form(options.target, node)
        if key not in known:
            typed = Typed(node.signature, layout.bound, node.proto)
            known[key] = freedom(options.target, typed, layout.params, options.low)
        freedoms[index] = known[key]
    return freedoms


def _unfit(graph: Graph, options: Options) -> frozenset[int]:
    """Return the constants with numbers out of the range of low precision, sentinels included, if hazards count."""
    low = options.low
    unfit = set[int]()
    for value, stats in graph.constants.floats().items() if options.hazards else ():
        if stats is None:
            continue
        if stats.out_of_range(low) is not None or stats.has_sentinel(low):
            unfit.add(value)
    return frozenset(unfit)


def _twofold(
    graph: Graph, options: Options, freedoms: Mapping[int, Freedom]
) -> frozenset[int]:
    """Return nodes that dequantize: no Cast may separate them from nodes that an engine fuses with them.

    There are none if the target only fuses float32, or has no kernel that dequantizes to the low-precision type.
    """
    if target_of(options.target).fuses_quantized:
        return frozenset()
    nodes = {node.index for node in graph.nodes_of(op_facts().dequantize)}
    return frozenset(
        index for index in nodes & freedoms.keys() if not freedoms[index].high
    )


def _constant_fed(
    graph: Graph, unfit: frozenset[int], *, lookups: bool
) -> frozenset[int]:
    """Return the exact ops that constants feed.

    Without ``lookups``, these are only ops on unfit constants, and ops that can be computed beforehand.
    """
    feed = graph.constants.feed
    fed = set[int]()
    for node in graph.at(graph.exact):
        if not feed(node):
            continue
        is_unfit = not unfit.isdisjoint(node.inputs)
        if lookups or is_unfit or feed(node, whole=True):
            fed.add(node.index)
    return frozenset(fed)


def require_opset(model: ModelProto, options: Options) -> None:
    """Check that the model's opset has a Cast to the low-precision type.

    Raises:
        OpsetError: the opset is too old; the message names the first one that has such a Cast.
    """
    version = opset_imports(model)[""]
    low = options.low
    if version < low.min_opset and options.level != Level.O0:
        raise OpsetError(
            f"The model's opset {version} has no Cast to {low.name}, which needs opset {low.min_opset}: convert"
            f" with opset={low.min_opset} (--opset {low.min_opset})."
        )
