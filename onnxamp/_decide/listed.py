"""Lists of op types, of the user and of presets: the nodes that they refer to, and those that stay in float32 anyway.

Lists may also contain a framework's names, which stand for the forms that exporters write for them.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from onnxamp._base.errors import first_of
from onnxamp._decide.mincut import Question
from onnxamp._decide.patterns.named import named_forms, named_nodes, unrecognized
from onnxamp._decide.variables.find import unknown_floats
from onnxamp._decide.variables.ports import HIGH, PortVariables
from onnxamp._decide.verdicts import Reason, Verdict, reason_text
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.lists import is_known_op, nearest_name
from onnxamp._options.options import Options
from onnxamp._options.values import Level

_SCHEMA: Final = "schema"

_OF_TYPES: Final = frozenset({_SCHEMA, Reason.NO_KERNEL.value})

_OF_USER: Final = frozenset({Reason.PATTERN, Reason.RULE})
"""Overrides of single nodes need no warning."""

_WAYS_OUT: Final = {
    Reason.NO_KERNEL.value: "Another target (--target) or opset (--opset) may have one.",
    _SCHEMA: "",
    Reason.BLACK.value: "",
    Reason.TIE.value: "",
}


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
        elif is_known_op(name, declared):
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


def unmet_lists(
    graph: Graph,
    options: Options,
    listed: Listed,
    ports: PortVariables,
    pins: Mapping[Question, Verdict],
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
    nodes_of = dict[tuple[str, str], list[tuple[Node, str]]]()
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
        nodes_of.setdefault(key, []).append((node, refusal[1]))
    return [
        _sentence(entry, reason, nodes, refusals)
        for (entry, reason), nodes in nodes_of.items()
    ]


def _refusal(
    graph: Graph,
    ports: PortVariables,
    pins: Mapping[Question, Verdict],
    node: Node,
    low: Format,
) -> tuple[str, str] | None:
    """Return why a listed node stays in float32: the reason and its detail; None if it does not."""
    variables = ports.of(node.index)
    for variable in variables:
        pin = pins.get(ports.root(variable))
        if pin is not None and not pin.low and pin.reason not in _OF_USER:
            is_own = ports.variables[pin.variable].node in (node.index, ABSENT)
            shared = "" if is_own else " (shares its precision)"
            return pin.reason.value, f"{pin.detail}{shared}"
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


def _sentence(
    entry: str,
    reason: str,
    nodes: list[tuple[Node, str]],
    refusals: Mapping[int, str],
) -> str:
    """Return why nodes of a white list stay in float32, and which option changes it."""
    where = first_of([node.label for node, _ in nodes])
    why = reason_text(reason, nodes[0][1])
    way_out = _WAYS_OUT.get(reason, "force_low (--force-low) lowers it anyway.")
    if reason in _OF_TYPES:
        refused = (refusals[node.index] for node, _ in nodes if node.index in refusals)
        way_out = next(refused, way_out)
    return f"{entry} stays in float32 at {where}: {why}. {way_out}".rstrip()
