"""The user's demands on nodes: lists of op types, and overrides of single nodes by name patterns and by a rule.

Lists may also contain a framework's names, which stand for the forms that exporters write for them. Names that match
nothing lead to warnings.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from onnxamp._base.errors import (
    ArgumentError,
    ContradictionError,
    first_of,
    suggestion,
)
from onnxamp._decide.kinds import Harm, Hazard, find_hazards
from onnxamp._decide.patterns import named_forms, named_nodes, unrecognized
from onnxamp._decide.ports import HIGH, PortVariables
from onnxamp._decide.variables import unknown_floats
from onnxamp._decide.verdicts import Basis, Reason, Verdict, told
from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied
from onnxamp._options.lists import is_known, nearest_name
from onnxamp._options.options import DECIDED_LOW, LOSS_SCALED, Options
from onnxamp._options.values import Level


class Listed(NamedTuple):
    """The nodes that lists refer to.

    Attributes:
        white, black: nodes of the user's lists -> description of the entry; black if in both.
        usual_white, usual_black: nodes of the preset's lists, unless the user's op types overrule them.
    """

    white: Mapping[int, str]
    black: Mapping[int, str]
    usual_white: Mapping[int, str]
    usual_black: Mapping[int, str]

    def is_white(self, node: int) -> bool:
        """Return whether a white list contains the node."""
        return node in self.white or node in self.usual_white

    def black_entry(self, node: int) -> str | None:
        """Return the entry of a black list that contains the node; None if none does, or the user's white list does."""
        if node in self.white:
            return None
        return self.black.get(node) or self.usual_black.get(node)


def find_listed(graph: Graph, options: Options) -> Listed:
    """Return the nodes that the lists of the options refer to.

    Complexity: linear in nodes for each name that exporters write out.
    """
    preset = options.preset
    is_read = preset.is_literal and options.level != Level.O3
    white = _meant(graph, options.white_list, options.user_white)
    black = _meant(graph, options.black_list, options.user_black)
    return Listed(
        {node: entry for node, entry in white.items() if node not in black},
        black,
        _meant(
            graph,
            preset.white_names if is_read else (),
            options.white - options.user_white,
        ),
        _meant(
            graph,
            preset.black_names if is_read else (),
            options.black - options.user_black,
        ),
    )


def _meant(graph: Graph, names: Iterable[str], ops: Iterable[str]) -> dict[int, str]:
    """Return the nodes that a framework's names and op types mean -> the name or op type."""
    meant = dict[int, str]()
    for name in names:
        meant |= dict.fromkeys(graph.ask(named_forms, name), name)
    return meant | {node.index: node.key for node in graph.nodes_of(ops)}


class AbsentNames(NamedTuple):
    """Names in the user's lists that match nothing in the model -> a message.

    Attributes:
        unknown: names that are probably misspelled.
        unseen: names for ops that may be in the model in an unrecognized form.
        known: names of ops that exist, or may exist in an unknown domain.
    """

    unknown: Mapping[str, str]
    unseen: Mapping[str, str]
    known: Mapping[str, str]


def absent_names(graph: Graph, options: Options) -> AbsentNames:
    """Return the names in the user's lists that match nothing in the model.

    Known names are those of ONNX's standard ops, of ops that ONNX Runtime has kernels for, of the ops in presets and
    their frameworks, and of custom ops that are declared.
    """
    names = dict.fromkeys((*options.white_list, *options.black_list))
    declared = {f"{op.domain}::{op.type}" for op in options.custom_ops}
    unknown = dict[str, str]()
    unseen = dict[str, str]()
    known = dict[str, str]()
    for name in sorted(name for name in names if not named_nodes(graph, name)):
        text = f"The op type {name!r} in your lists does not occur in the model."
        cores = ", ".join(unrecognized(graph, name))
        if cores:
            unseen[name] = (
                f"{name!r} in your lists was not recognized in the model, but its {cores} may implement"
                " it: list op types instead."
            )
        elif is_known(name, declared):
            known[name] = text
        elif near := nearest_name(name, declared | graph.by_key.keys()):
            unknown[name] = f"{text} Did you mean {near!r}?"
        else:
            (known if "::" in name else unknown)[name] = text
    return AbsentNames(unknown, unseen, known)


def taken_off(options: Options) -> list[str]:
    """Return sentences about ops that the user's white list removes from the preset's black list."""
    if options.level not in (Level.O1, Level.O2):
        return []
    ops = sorted(options.preset.black_of(options.level).keys() & options.user_white)
    return [
        f"Your white list removes {op} from the black list of {options.preset.name!r}."
        for op in ops
    ]


_FEW: Final = 8
"""Names that a message lists in full."""


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A name or pattern that matches nothing.

    Attributes:
        option: its field of :class:`onnxamp.Options`, or another argument.
        name: the name or pattern.
        text: the message, in sentences.
        is_unaided: whether the message says nothing about the names that exist.
    """

    option: str
    name: str
    text: str
    is_unaided: bool = False


def unmatched_names(graph: Graph, options: Options) -> tuple[Unmatched, ...]:
    """Return the names and patterns of the options that match nothing in the graph.

    Complexity: linear in nodes for each pattern, and slower only if a pattern matches nothing.
    """
    is_asked = options.keep_nodes or options.keep_patterns or options.low_patterns
    nodes = node_names(graph) if is_asked else []
    weights = set[str]()
    if options.weight_patterns:
        weights.update(*(names for _, names in _weights(graph)))
    return (
        *_patterns("keep_high", options.keep_patterns, nodes, "node name"),
        *_patterns("force_low", options.low_patterns, nodes, "node name"),
        *_patterns("low_weights", options.weight_patterns, sorted(weights), _WEIGHT),
        *_nodes(nodes, options.keep_nodes),
        *_ends(graph, options.keep_io_types),
        *_op_types(graph, options),
    )


_WEIGHT: Final = "float32 weight, and no node that reads one"


def _patterns(
    option: str, patterns: Sequence[re.Pattern[str]], names: Sequence[str], what: str
) -> Iterator[Unmatched]:
    """Yield the patterns of an option that match none of the names."""
    for pattern in patterns:
        if not any(map(pattern.fullmatch, names)):
            text = f"The pattern {pattern.pattern!r} matches no {what}."
            hint = _suggested(names, pattern)
            yield Unmatched(option, pattern.pattern, text + hint, is_unaided=not hint)


def _weights(graph: Graph) -> Iterator[tuple[int, set[str]]]:
    """Yield the float32 constants, each with its name and those of the nodes that read it."""
    for value in graph.constants.tensors:
        if graph.types[value] == FLOAT:
            readers = (node.proto.name for node, _ in graph.consumers(value))
            yield value, {graph.values[value].name, *readers} - {""}


def _nodes(names: Sequence[str], given: Iterable[str]) -> Iterator[Unmatched]:
    """Yield the given names that no node and no output of a node has."""
    for name in sorted(set(given).difference(names)):
        text = f"No node and no output of a node is called {name!r}."
        hint = suggestion(names, name)
        yield Unmatched("keep_nodes", name, text + hint, is_unaided=not hint)


def _ends(graph: Graph, given: bool | frozenset[str]) -> Iterator[Unmatched]:
    """Yield the given names that no input or output of the model has."""
    if isinstance(given, bool):
        return
    proto = graph.model.graph
    known = [entry.name for entry in (*proto.input, *proto.output)]
    for name in sorted(given.difference(known)):
        listed = (
            f" It has {', '.join(map(repr, known))}." if len(known) <= _FEW else ""
        )
        text = (
            f"keep_io_types (--io-types): the model has no input or output {name!r}."
        )
        yield Unmatched(
            "keep_io_types", name, text + (suggestion(known, name) or listed)
        )


def _op_types(graph: Graph, options: Options) -> Iterator[Unmatched]:
    """Yield the names in lists that are probably misspelled."""
    for name, text in absent_names(graph, options).unknown.items():
        yield Unmatched(
            "white_list" if name in options.white_list else "black_list", name, text
        )


def node_names(graph: Graph) -> list[str]:
    """Return the names of nodes and of their outputs, sorted."""
    names = set[str]()
    for node in graph.nodes:
        names.update((node.proto.name, *node.proto.output))
    return sorted(names - {""})


def _suggested(names: Sequence[str], pattern: re.Pattern[str]) -> str:
    """Return a sentence that suggests another pattern; "" if no name is similar."""
    # A pattern must match the full name.
    if parts := [name for name in names if pattern.search(name)]:
        whole = f".*{pattern.pattern}.*"
        return f" It matches only part of {first_of(parts)}: write {whole!r}."
    return suggestion(names, pattern.pattern)


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
    for value, names in _weights(graph) if options.weight_patterns else ():
        text = next(_matching(options.weight_patterns, names), None)
        if text is not None:
            weights[value] = f"low_weights (--low-weight) {text!r}"
    absent = absent_names(graph, options)
    warnings = [
        *(one.text for one in unmatched_names(graph, options)),
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


_WEIGHTS_ONLY: Final = "weights_only (--weights-only)"
DECIDED: Final = "decided before"
"""The detail of overrides that :data:`DECIDED_LOW` makes. No warning is about them."""
_SMALL: Final = 256
"""Elements of a constant below which the Cast of a low one takes about as many bytes as it saves."""


def _all_weights(graph: Graph, options: Options) -> list[int]:
    """Return the float32 constants that are worth being stored low, and lose nothing but digits by it."""
    found = set[int]()
    low = options.low
    for value, _ in _weights(graph):
        if elements(graph.shapes[value]) < _SMALL:
            continue
        stats = graph.constants.stats(value)
        if stats and stats.out_of_range(low) is None and not stats.has_sentinel(low):
            found.add(value)
    hazards = graph.ask(find_hazards, low) if options.hazards else ()
    return sorted(found - {value for value, _ in _lost(graph, found, hazards, low)})


def _told(risks: Iterable[tuple[str, str, Hazard]], does: str) -> Iterator[str]:
    """Yield a sentence per option and kind of hazard; ``risks`` are (option, what it names, hazard)."""
    found = dict[tuple[str, Basis], dict[str, Hazard]]()
    for option, name, hazard in risks:
        found.setdefault((option, hazard.reason), {}).setdefault(name, hazard)
    for (option, reason), rows in found.items():
        what = does.format(first_of(rows))
        first = next(iter(rows.values()))
        yield f"{option} {what} although that is known to break: {reason.value}: {first.detail}."


def _cast_names(graph: Graph, node: Node) -> Iterator[str]:
    """Yield the names of the model's outputs that an earlier conversion gave to Casts after the node."""
    for value in node.outputs:
        for reader, _ in graph.uses[value]:
            cast = graph.nodes[reader]
            made = cast.outputs[0] if cast.key == "Cast" else ABSENT
            kinds = {graph.types[value], graph.types[made]}
            is_returned = made != ABSENT and bool(graph.results[made])
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
    return (one.pattern for one in patterns if any(map(one.fullmatch, names)))


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


def unmet_lists(
    graph: Graph,
    options: Options,
    listed: Listed,
    ports: PortVariables,
    pins: Mapping[int, Verdict],
    refusals: Mapping[int, str] = MappingProxyType({}),
) -> list[str]:
    """Return why white-listed nodes stay in float32: one text per entry and reason. Linear in nodes.

    For a preset that is applied literally, only kernels and schemas are reported; hazards have their own warnings.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        listed: the nodes that the lists refer to.
        ports: the precision variables.
        pins: deciding variable -> its pin.
        refusals: node that a newer opset would lower -> why the model stays at its own, as a sentence.
    """
    found = dict[tuple[str, str], list[tuple[Node, str]]]()
    entries = {} if options.level == Level.O0 else dict(sorted(listed.white.items()))
    usual = {}
    if options.preset.is_literal and options.level != Level.O0:
        nodes = graph.nodes_of(options.white - options.user_white)
        usual = {node.index: node.key for node in nodes if node.index not in entries}
    for index, entry in (entries | usual).items():
        node = graph.nodes[index]
        refusal = _refusal(graph, ports, pins, node, options.low)
        if refusal is None or (index in usual and refusal[0] not in _OF_TYPES):
            continue
        whose = "the" if index in usual else "your"
        key = f"{entry} of {whose} white list", refusal[0]
        found.setdefault(key, []).append((node, refusal[1]))
    return [
        _sentence(entry, reason, nodes, refusals)
        for (entry, reason), nodes in found.items()
    ]


_SCHEMA: Final = "schema"
_OF_TYPES: Final = frozenset({_SCHEMA, Reason.NO_KERNEL.value})
_OF_USER: Final = frozenset({Reason.PATTERN, Reason.RULE})
"""Overrides of single nodes need no warning."""


def _refusal(
    graph: Graph,
    ports: PortVariables,
    pins: Mapping[int, Verdict],
    node: Node,
    low: Format,
) -> tuple[str, str] | None:
    """Return why a listed node stays in float32: the reason and its detail; None if it does not."""
    variables = ports.of(node.index)
    for variable in variables:
        pin = pins.get(ports.root(variable))
        if pin is not None and not pin.low and pin.reason not in _OF_USER:
            own = ports.variables[pin.variable].node in (node.index, ABSENT)
            return pin.reason.value, pin.detail + " (shares its precision)" * (not own)
    produced = (ports.produced[value] for value in node.writes)
    if variables or HIGH not in (*ports.consumed[node.index], *produced):
        return None
    if node.signature is None or graph.scopes[node.scope].opaque:
        return _SCHEMA, "its schema, or that of an op around it, is unknown"
    if unknown := unknown_floats(graph, node):
        name = graph.values[unknown[0]].name
        return _SCHEMA, f"the type of {name!r}, which it reads or writes, is unknown"
    if node.key in op_facts().pinned_parameters:
        return _SCHEMA, "its input must not be rounded"
    return (
        _SCHEMA,
        f"opset {node.signature.since} does not allow {low.name}",
    )


_WAYS_OUT: Final = {
    Reason.NO_KERNEL.value: "Another target (--target) or opset (--opset) may have one.",
    _SCHEMA: "",
    Reason.BLACK.value: "",
    Reason.TIE.value: "",
}


def _sentence(
    entry: str,
    reason: str,
    nodes: list[tuple[Node, str]],
    refusals: Mapping[int, str],
) -> str:
    """Return why nodes of a white list stay in float32, and which option changes it."""
    where = first_of([node.label for node, _ in nodes])
    why = told(reason, nodes[0][1])
    way_out = _WAYS_OUT.get(reason, "force_low (--force-low) lowers it anyway.")
    if reason in _OF_TYPES:
        refused = (refusals[node.index] for node, _ in nodes if node.index in refusals)
        way_out = next(refused, way_out)
    return f"{entry} stays in float32 at {where}: {why}. {way_out}".rstrip()
