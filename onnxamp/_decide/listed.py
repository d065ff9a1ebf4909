"""The nodes that lists refer to: those of op types, and the ordinary ops that exporters write for a
framework's name.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onnxamp._graph.graph import Graph
from onnxamp._options.levels import Level
from onnxamp._options.lists import is_known, nearest_name
from onnxamp._options.options import Options
from onnxamp._patterns.named import named_forms, named_nodes, unrecognized


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
    """Return the nodes that the lists of the options refer to. Linear in nodes for each name that exporters
    write out.
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
    own = {node.index: node.key for node in graph.nodes_of(ops)}
    return _forms(graph, names) | own


def _forms(graph: Graph, names: Iterable[str]) -> dict[int, str]:
    return {node: name for name in names for node in graph.ask(named_forms, name)}


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

    Known are the ops of ONNX's standard, those that ONNX Runtime has kernels for, those of the presets, the names of
    the presets' frameworks, and custom ops that are declared.
    """
    names = dict.fromkeys((*options.white_list, *options.black_list))
    declared = {f"{op.domain}::{op.type}" for op in options.custom_ops}
    unknown, unseen, known = dict[str, str](), dict[str, str](), dict[str, str]()
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
