"""Variables that are tied: all of a group are equal, and one of them decides."""

from collections.abc import Sequence
from itertools import repeat

from onnxamp._decide.variables.ports import HIGH, NONE, Variable
from onnxamp._graph.view import ABSENT


class TiedVariables:
    """A list of variables that grows, with groups that are merged (union-find).

    Attributes:
        all: the variables.
        fixed_high: variables that are tied to a port that is float32 in any case.
    """

    def __init__(self) -> None:
        self.all = list[Variable]()
        self.fixed_high = set[int]()
        self._parents = list[int]()

    def add(self, node: int, params: Sequence[str], value: int = ABSENT) -> range:
        """Add a variable for each parameter of a node, or one for an initializer, and return their indices."""
        first = len(self.all)
        added = range(first, first + len(params))
        self.all += map(Variable, added, repeat(node), params, repeat(value))
        self._parents += added
        return added

    def join(self, variables: Sequence[int]) -> None:
        """Make variables equal; HIGH among them fixes them all."""
        first, *others = [variable for variable in variables if variable >= 0] or [
            NONE
        ]
        for variable in others:
            # The older one decides, so that the order of ties does not matter.
            older, newer = sorted((self._root(first), self._root(variable)))
            self._parents[newer] = older
        if first >= 0 and HIGH in variables:
            self.fixed_high.add(first)

    def roots(self) -> list[int]:
        """Return for each variable the one that decides for it."""
        # Most variables are tied to none and decide for themselves.
        return [
            own if parent == own else self._root(own)
            for own, parent in enumerate(self._parents)
        ]

    def _root(self, variable: int) -> int:
        """Return the variable that decides for this one, and shorten the path to it."""
        parents = self._parents
        while parents[variable] != variable:
            parents[variable] = parents[parents[variable]]
            variable = parents[variable]
        return variable
