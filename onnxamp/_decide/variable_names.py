"""Names of precision variables that survive re-exporting a model: plans know decisions by them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxamp._decide.ports import Variable
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, scope_path


@dataclass(frozen=True, slots=True)
class VariableName:
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
    """One name per variable."""
    names, taken = [], Counter[VariableName]()
    for variable in variables:
        name = _variable_name(graph, variable)
        names.append(replace(name, rank=taken[name]))
        taken[name] += 1
    return names


def _variable_name(graph: Graph, variable: Variable) -> VariableName:
    if variable.node == ABSENT:
        scope, own = graph.values[variable.value].scope, graph.values[variable.value].name
    else:
        scope, own = graph.nodes[variable.node].scope, graph.nodes[variable.node].label
    return VariableName(scope_path(graph, scope), own, variable.param, 0)
