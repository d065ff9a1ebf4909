"""The values that the op lists of a checker's config choose."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from onnxamp._base.errors import suggestion, warn
from onnxamp._decide.patterns.named import named_nodes
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import inline_functions
from onnxamp._model.model import Model
from onnxamp.debugging._checker import TensorCheckerConfig
from onnxamp.debugging._records import ValueRecord


class ValueFilter(NamedTuple):
    """The values that a checker examines: those in ``only`` (all if it is None) but not in ``skip``.

    In both sets, "" stands for all inputs.
    """

    only: AbstractSet[str] | None = None
    skip: AbstractSet[str] = frozenset()

    def takes(self, record: ValueRecord) -> bool:
        """Return whether a value is examined."""
        name = record.tensor if record.op else ""
        return name not in self.skip and (self.only is None or name in self.only)


def chosen_values(model: Model, config: TensorCheckerConfig) -> ValueFilter:
    """Return the values of a model that a config selects.

    Warns:
        OptionWarning: a name matches nothing in the model.
    """
    checked = config.checked_op_list or ()
    skipped = config.skipped_op_list or ()
    return model.ask(_chosen, tuple(checked), tuple(skipped))


def _chosen(
    model: Model, checked: Sequence[str], skipped: Sequence[str]
) -> ValueFilter:
    if not checked and not skipped:
        return ValueFilter()
    graph = Graph.of(inline_functions(model.proto))
    only = _meant(graph, "checked_op_list", checked)
    skip = _meant(graph, "skipped_op_list", skipped)
    return ValueFilter(only if checked else None, skip)


def _meant(graph: Graph, option: str, names: Sequence[str]) -> frozenset[str]:
    """Return the outputs of the nodes that a list selects."""
    values = set[str]()
    absent = list[str]()
    for name in names:
        nodes = named_nodes(graph, name)
        for node in nodes:
            values.update(graph.nodes[node].proto.output)
        if name == "":
            values.add("")
        elif not nodes:
            present = graph.by_key
            own = name.rpartition("::")[2]
            near = suggestion(present, name) or suggestion(present, own)
            absent.append(f"{option}: no op of the model is a {name!r}.{near}")
    warn(absent)
    return frozenset(values)
