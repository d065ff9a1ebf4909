"""The values that a checker examines: the op lists of its config, resolved in a model."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from onnxamp._errors import suggestion
from onnxamp._graph.bodies import inline_functions
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._patterns.patterns import named_nodes
from onnxamp._warnings import warn
from onnxamp.debugging._modes import TensorCheckerConfig
from onnxamp.debugging._records import ValueRecord


class Chosen(NamedTuple):
    """The values that a checker examines: those in ``only`` (all if it is None) but not in ``skip``.

    In both sets, "" stands for all inputs.
    """

    only: AbstractSet[str] | None = None
    skip: AbstractSet[str] = frozenset()

    def takes(self, record: ValueRecord) -> bool:
        """Return whether a value is examined."""
        name = record.tensor if record.op else ""
        return name not in self.skip and (self.only is None or name in self.only)


@dataclass(slots=True)
class Chooser:
    """Finds the values of a model that checkers examine, once for each config."""

    model: Model
    _last: tuple[TensorCheckerConfig, Chosen] | None = None

    def values(self, config: TensorCheckerConfig) -> Chosen:
        """Return the values that a config selects.

        Warns:
            OptionWarning: a name matches nothing in the model.
        """
        if not config.checked_op_list and not config.skipped_op_list:
            return Chosen()
        if self._last is None or self._last[0] is not config:
            graph = Graph.of(inline_functions(self.model.proto))
            lists = "checked_op_list", "skipped_op_list"
            only, skip = (_meant(graph, name, getattr(config, name)) for name in lists)
            chosen = Chosen(only if config.checked_op_list else None, skip)
            self._last = config, chosen
        return self._last[1]


def _meant(graph: Graph, option: str, names: Sequence[str] | None) -> frozenset[str]:
    """Return the outputs of the nodes that a list selects."""
    values, absent = set[str](), list[str]()
    for name in names or ():
        nodes = named_nodes(graph, name)
        values.update(out for node in nodes for out in graph.nodes[node].proto.output)
        if name == "":
            values.add("")
        elif not nodes:
            present, own = graph.by_key, name.rpartition("::")[2]
            near = suggestion(present, name) or suggestion(present, own)
            absent.append(f"{option}: no op of the model is a {name!r}.{near}")
    warn(absent)
    return frozenset(values)
