"""Overrides: what the user demands of single nodes and weights, by names, by patterns and by a rule."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from onnxamp._base.errors import ArgumentError, ContradictionError, first_of
from onnxamp._decide.kinds import Harm, Hazard, find_hazards
from onnxamp._decide.listed import absent_names, taken_off
from onnxamp._decide.unmatched import named_weights, unmatched_names
from onnxamp._decide.verdicts import Basis, Reason
from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS, Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied
from onnxamp._options.options import DECIDED_LOW, LOSS_SCALED, Options

_WEIGHTS_ONLY: Final = "weights_only (--weights-only)"

DECIDED: Final = "decided before"
"""The detail of overrides that :data:`DECIDED_LOW` makes. No warning is about them."""

_SMALL: Final = 256
"""Elements of a constant below which the Cast of a low one takes about as many bytes as it saves."""


class Override(NamedTuple):
    """The precision that the user demands for a node."""

    low: bool
    reason: Basis
    detail: str


class Overrides(NamedTuple):
    """Overrides by node index, warnings about names that match nothing, and notes about op types in lists.

    ``low_weights`` are the constants that the user wants in low precision, by value, with the option that says so.
    ``scaled`` are nodes whose values a loss scale keeps in range.
    """

    of_node: Mapping[int, Override]
    low_weights: Mapping[int, str]
    warnings: Sequence[str]
    notes: Sequence[str]
    scaled: AbstractSet[int]


def find_overrides(graph: Graph, options: Options) -> Overrides:
    """Match patterns with names and outputs of nodes, and call the rule for every node.

    Raises:
        ContradictionError: one override lowers a node, and another keeps it in float32.
        ArgumentError: the rule returns something other than "low", "high" or None.

    Complexity: nodes times patterns.
    """
    overrides: dict[int, Override] = {}
    scaled = set[int]()
    named = (*options.keep_nodes, *options.keep_patterns, *options.low_patterns)
    is_asked = named or options.rule is not None or options.weights_only
    for node in graph.nodes if is_asked else ():
        opinion = _opinion(node, options)
        matching = [*_from_patterns(graph, node, options)]
        if opinion == LOSS_SCALED:
            scaled.add(node.index)
        elif opinion == DECIDED_LOW:
            matching.append(Override(True, Reason.RULE, DECIDED))
        elif opinion is not None:
            why = f"rule says {opinion!r}"
            matching.append(Override(opinion == "low", Reason.RULE, why))
        is_constant = not graph.constants.tensors.keys().isdisjoint(node.outputs)
        if options.weights_only and not is_constant:
            matching.append(Override(False, Reason.PATTERN, _WEIGHTS_ONLY))
        for one in matching:
            first = overrides.setdefault(node.index, one)
            if one.low != first.low:
                raise ContradictionError(
                    f"Node {node.label!r}: {first.detail} contradicts {one.detail}; drop one."
                )
    weights = dict[int, str]()
    if options.weights_only:
        weights = dict.fromkeys(_all_weights(graph, options), _WEIGHTS_ONLY)
    for value, names in named_weights(graph) if options.weight_patterns else ():
        text = next(_matching(options.weight_patterns, names), None)
        if text is not None:
            weights[value] = f"low_weights (--low-weight) {text!r}"
    absent = absent_names(graph, options)
    warnings = [
        *(name.text for name in unmatched_names(graph, options)),
        *absent.unseen.values(),
    ]
    notes = [*absent.known.values()]
    # Where names are checked strictly, as on the command line, a list means what it says, and reports propose such.
    (notes if options.strict_options else warnings).extend(taken_off(options))
    return Overrides(overrides, weights, warnings, notes, scaled)


def forced_hazards(
    graph: Graph, overrides: Overrides, hazards: Iterable[Hazard]
) -> Iterator[str]:
    """Return sentences about nodes that the user forces low against hazards: one per override and kind of hazard."""
    forced = {
        node: one
        for node, one in overrides.of_node.items()
        if one.low and one.detail != DECIDED
    }
    risks = (
        (forced[hazard.node].detail, graph.nodes[hazard.node].label, hazard)
        for hazard in hazards
        if hazard.node in forced and hazard.reason.harm is not Harm.CAST
    )
    return _told(risks, "lowers {}")


def lost_weights(
    graph: Graph, overrides: Overrides, hazards: Iterable[Hazard], low: Format
) -> Iterator[str]:
    """Return sentences about weights that the user stores low against hazards: one per pattern and kind of hazard."""
    weights = overrides.low_weights
    risks = (
        (weights[source], graph.values[source].name, hazard)
        for source, hazard in _lost(graph, weights, hazards, low)
    )
    return _told(risks, "stores {} in low precision")


def _lost(
    graph: Graph, weights: Collection[int], hazards: Iterable[Hazard], low: Format
) -> Iterator[tuple[int, Hazard]]:
    """Yield the weights that lose the numbers which a hazard is about if they are stored low."""
    for hazard in hazards if weights else ():
        is_about_all = hazard.value == ABSENT
        inputs = graph.nodes[hazard.node].inputs
        for value in inputs if is_about_all else (hazard.value,):
            source = graph.constants.source(value)
            if source in weights and hazard.reason.loses(graph, source, low):
                yield source, hazard


def _all_weights(graph: Graph, options: Options) -> list[int]:
    """Return the float32 constants that are worth being stored low, and lose nothing but digits by it."""
    weights = set[int]()
    low = options.low
    for value, _ in named_weights(graph):
        if elements(graph.shapes[value]) < _SMALL:
            continue
        stats = graph.constants.stats(value)
        if stats and stats.out_of_range(low) is None and not stats.has_sentinel(low):
            weights.add(value)
    hazards = graph.ask(find_hazards, low) if options.hazards else ()
    return sorted(
        weights - {value for value, _ in _lost(graph, weights, hazards, low)}
    )


def _told(risks: Iterable[tuple[str, str, Hazard]], does: str) -> Iterator[str]:
    """Yield a sentence per option and kind of hazard; ``risks`` are (option, what it names, hazard)."""
    risks_of = dict[tuple[str, Basis], dict[str, Hazard]]()
    for option, name, hazard in risks:
        risks_of.setdefault((option, hazard.reason), {}).setdefault(name, hazard)
    for (option, reason), rows in risks_of.items():
        what = does.format(first_of(rows))
        first = next(iter(rows.values()))
        yield f"{option} {what} although that is known to break: {reason.value}: {first.detail}."


def _cast_names(graph: Graph, node: Node) -> Iterator[str]:
    """Yield the names of the model's outputs that an earlier conversion gave to Casts after the node."""
    for value in node.outputs:
        for reader, _ in graph.uses[value]:
            cast = graph.nodes[reader]
            result = cast.outputs[0] if cast.key == "Cast" else ABSENT
            kinds = {graph.types[value], graph.types[result]}
            is_returned = result != ABSENT and bool(graph.results[result])
            if is_returned and FLOAT in kinds and kinds & LOW_TENSORS.keys():
                yield cast.proto.output[0]


def _from_patterns(graph: Graph, node: Node, options: Options) -> list[Override]:
    """Return the overrides by names and patterns that match a node."""
    names = {node.proto.name, *node.proto.output, *_cast_names(graph, node)} - {""}
    kept = sorted(names.intersection(options.keep_nodes))
    high = _matching(options.keep_patterns, names)
    low = _matching(options.low_patterns, names)
    overrides = list[Override]()
    for is_low, option, texts in (
        (False, "keep_nodes (--keep-node)", kept),
        (False, "keep_high (--keep-fp32)", high),
        (True, "force_low (--force-low)", low),
    ):
        for text in texts:
            detail = f"{option} {text!r}"
            overrides.append(Override(is_low, Reason.PATTERN, detail))
    return overrides


def _matching(
    patterns: Iterable[re.Pattern[str]], names: Iterable[str]
) -> Iterator[str]:
    """Return the patterns that match one of the names."""
    return (
        pattern.pattern for pattern in patterns if any(map(pattern.fullmatch, names))
    )


def _opinion(node: Node, options: Options) -> str | None:
    """Return the opinion of the user's rule on a node; None if it has none, or there is no rule."""
    if options.rule is None:
        return None
    opinion = options.rule(copied(node.proto))
    if opinion not in ("low", "high", LOSS_SCALED, DECIDED_LOW, None):
        raise ArgumentError(
            f"rule returned {opinion!r} for node {node.label!r}: return 'low', 'high' or None."
        )
    return opinion
