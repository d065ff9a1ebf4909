"""The precision problem of a graph: everything that is known before anything is decided."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from onnx import ModelProto

from onnxamp._decide.hazards import accumulators, find_hazards, hazards_on
from onnxamp._decide.hazards.long_products import SUM, accumulation_shares
from onnxamp._decide.hazards.masks import sentinel_paths
from onnxamp._decide.hazards.quantized import bounded_nodes
from onnxamp._decide.overrides import Listed, Overrides, find_listed, find_overrides
from onnxamp._decide.ports import Layout, PortVariables
from onnxamp._decide.rescaling import fitting_sums
from onnxamp._decide.variables import find_variables
from onnxamp._decide.verdicts import Hazard
from onnxamp._dtypes import FLOAT16, Format
from onnxamp._errors import OpsetError
from onnxamp._graph.graph import Graph
from onnxamp._model.protos import opset_imports
from onnxamp._ops.facts import op_facts
from onnxamp._ops.providers import emulated_arithmetic
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._patterns.fusion_groups import absorbed_casts, batch_norm_folds, skip_sums
from onnxamp._patterns.patterns import patterns_of, split_products
from onnxamp._public import no_collections
from onnxamp._target import target_of
from onnxamp._target.kernels import Typed, deciding_form, freedom


class Problem(NamedTuple):
    """A graph, the options, and everything that follows from both.

    Attributes:
        ports: the precision variables.
        hazards: the places where low precision is known to break or lose values.
        overrides: the user's overrides for single nodes.
        listed: the nodes that lists refer to.
        sentinels: nodes of mask paths, see :func:`onnxamp._decide.hazards.masks.sentinel_paths`.
        folded: normalizations that ONNX Runtime folds into the node before them, and sums over the parts of a product.
        unfit: constants, and what is moved from them, with numbers that low precision cannot hold.
        constant_fed: exact ops on constants alone. At O3 a look-up in a constant is none, unless it is unfit.
        joined: see :func:`onnxamp._patterns.fusion_groups.skip_sums`.
        shares: products that the target sums up in float16 -> their squared error as a share of what is bearable, where
            the level lets that decide.
        twofold: nodes that may dequantize in both precisions, a node for each, in place of a Cast behind them.
        bounded: see :func:`onnxamp._decide.hazards.quantized.bounded_nodes`.
        absorbed: values whose up-cast a fusion would absorb, see
            :func:`onnxamp._patterns.fusion_groups.absorbed_casts`.
    """

    graph: Graph
    options: Options
    ports: PortVariables
    hazards: Sequence[Hazard]
    overrides: Overrides
    listed: Listed
    sentinels: Sequence[Sequence[int]]
    folded: frozenset[int]
    unfit: frozenset[int]
    constant_fed: frozenset[int]
    joined: Mapping[int, int]
    shares: Mapping[int, float]
    twofold: frozenset[int]
    bounded: frozenset[int]
    absorbed: frozenset[int]


@no_collections()
def find_problem(graph: Graph, options: Options, *, replayed: bool = False) -> Problem:
    """State the problem. Complexity: near linear in nodes; each constant is read once.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        replayed: a plan decides which nodes share a precision, so that no nodes are grouped here.

    Raises:
        ModelError: the model breaks a rule of ONNX.
        OpsetError: its opset is too old for the low-precision type.
        ContradictionError: two overrides of a node exclude each other.
    """
    check_opset(graph.model, options)
    low, judged = options.low, options.level != Level.O0
    overrides = find_overrides(graph, options)
    named = find_listed(graph, options)
    listed = named.white.keys()
    wished = overrides.of_node.keys()
    sentinels, hazards = list[list[int]](), list[Hazard]()
    folds, groups = list[tuple[int, int]](), list[Sequence[int]]()
    if judged:
        sentinels = graph.ask(sentinel_paths, low)
        norms = batch_norm_folds(graph, options)
        folds = [
            pair for pair in norms if wished.isdisjoint(pair) and pair[1] not in listed
        ]
        folds += _sums_of_parts(graph, options)
        fitting, found = (
            fitting_sums(graph, options),
            graph.ask(hazards_on, low, options.target),
        )
        there = (
            one
            for one in found
            if one.reason != accumulators.KIND or one.node not in fitting
        )
        hazards = [*graph.ask(find_hazards, low), *there]
    if judged and not replayed:
        activations = (match.nodes for match in patterns_of(graph, "gelu", "silu"))
        fused = [nodes for nodes in activations if wished.isdisjoint(nodes)]
        fused += (match.nodes for match in patterns_of(graph, "normalization"))
        groups += (
            sorted(nodes) for nodes in fused if listed.isdisjoint(nodes)
        )  # lists split them
        groups += [*folds, *(sentinels if options.hazards else ())]
    low_weights = frozenset(overrides.low_weights if judged else ())
    ports = find_variables(graph, options, groups, low_weights)
    priced = (
        options.hazards and not options.strict and options.level in (Level.O1, Level.O2)
    )
    shares = graph.ask(accumulation_shares, low, options.target) if priced else {}
    unfit = _unfit(graph, low) if judged and options.hazards else frozenset()
    return Problem(
        graph=graph,
        options=options,
        ports=ports,
        hazards=hazards,
        overrides=overrides,
        listed=named,
        sentinels=sentinels,
        folded=frozenset(last for _, last in folds),
        unfit=unfit,
        constant_fed=_constant_fed(graph, unfit, lookups=options.level != Level.O3),
        joined=graph.ask(skip_sums),
        shares=shares,
        twofold=_twofold(
            graph, options, ports, {*wished, *(one.node for one in hazards)}
        ),
        bounded=graph.ask(bounded_nodes, options.target),
        absorbed=frozenset(graph.ask(absorbed_casts, low, options.target)),
    )


def _sums_of_parts(graph: Graph, options: Options) -> list[tuple[int, int]]:
    """Return products that are split for the target, and the nodes that add their parts; none if these stay float32."""
    is_summed = (
        emulated_arithmetic(options.target) is not None and options.low is FLOAT16
    )
    return (
        graph.ask(split_products) if is_summed and SUM not in options.user_black else []
    )


def _unfit(graph: Graph, low: Format) -> frozenset[int]:
    floats = graph.constants.floats().items()
    return frozenset(
        value
        for value, stats in floats
        if stats and (stats.out_of_range(low) is not None or stats.has_sentinel(low))
    )


def _twofold(
    graph: Graph, options: Options, ports: PortVariables, settled: AbstractSet[int]
) -> frozenset[int]:
    """Return nodes that dequantize, except settled ones: no Cast may separate them from nodes that an engine fuses with
    them.

    There are none if the target only fuses float32, or has no kernel that dequantizes to the low-precision type.
    """
    if target_of(options.target).fuses_quantized:
        return frozenset()
    able = dict[tuple[Layout, object], bool]()
    found = set[int]()
    for node in graph.nodes_of(op_facts().dequantize):
        layout = ports.layouts.get(node.index)
        if layout is None or node.index in settled:
            continue
        key = (layout, deciding_form(options.target, node))
        if key not in able:
            assert node.signature is not None
            typed = Typed(node.signature, layout.bound, node.proto)
            free = freedom(options.target, typed, layout.params, options.low)
            able[key] = not free.high
        if able[key]:
            found.add(node.index)
    return frozenset(found)


def _constant_fed(
    graph: Graph, unfit: frozenset[int], *, lookups: bool
) -> frozenset[int]:
    """Exact ops on constants alone; without ``lookups`` only those on unfit ones, or computable beforehand."""
    feed = graph.constants.feed
    return frozenset(
        node.index
        for node in graph.at(graph.exact)
        if feed(node)
        and (lookups or feed(node, whole=True) or not unfit.isdisjoint(node.inputs))
    )


def check_opset(model: ModelProto, options: Options) -> None:
    """Check that the model's opset has a Cast to the low-precision type.

    Raises:
        OpsetError: it has not; the message names the first opset that has one.
    """
    version, low = opset_imports(model)[""], options.low
    if version < low.min_opset and options.level != Level.O0:
        raise OpsetError(
            f"The model's opset {version} has no Cast to {low.name}, which needs opset {low.min_opset}: convert"
            f" with opset={low.min_opset} (--opset {low.min_opset})."
        )
