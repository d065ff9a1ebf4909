"""Names of variables in plans, which survive re-exporting a model."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from onnxamp._decide.variables.ports import Variable
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, scope_path


class VariableName(NamedTuple):
    """A name that survives re-exporting a model: scopes, node (or weight), and type parameter.

    ``rank`` numbers the variables that share all three, from 0.
    """

    scope: str
    node: str
    param: str
    rank: int

    def __str__(self) -> str:
        path = f"{self.scope}/{self.node}" if self.scope else self.node
        return f"{path}:{self.param}" + (f" ({self.rank + 1})" if self.rank else "")


def variable_names(graph: Graph, variables: Sequence[Variable]) -> list[VariableName]:
    """Return the names of variables, one for each."""
    names = list[VariableName]()
    times = Counter[tuple[str, str, str]]()
    for variable in variables:
        if variable.node == ABSENT:
            value = graph.values[variable.value]
            scope = value.scope
            label = value.name
        else:
            node = graph.nodes[variable.node]
            scope = node.scope
            label = node.label
        key = scope_path(graph, scope), label, variable.param
        names.append(VariableName(*key, rank=times[key]))
        times[key] += 1
    return names
