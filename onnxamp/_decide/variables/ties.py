"""Variables that are tied: all of a group are equal, and one of them decides."""

from collections.abc import Sequence
from itertools import repeat
from typing import cast

from onnxamp._base.groups import Groups
from onnxamp._decide.mincut import Question
from onnxamp._decide.variables.ports import HIGH, Variable
from onnxamp._graph.view import ABSENT


class TiedVariables:
    """A list of variables that grows, with groups of equal ones: the oldest of each decides.

    Attributes:
        all: the variables.
        fixed_high: variables that are tied to a port that is float32 in any case.
    """

    def __init__(self) -> None:
        self.all = list[Variable]()
        self.fixed_high = set[Question]()
        self._groups = Groups()

    def add(
        self, node: int, params: Sequence[str], value: int = ABSENT
    ) -> Sequence[Question]:
        """Add a variable for each parameter of a node, or one for an initializer, and return their indices."""
        first = len(self.all)
        added = cast(Sequence[Question], range(first, first + len(params)))
        self.all += map(Variable, added, repeat(node), params, repeat(value))
        return added

    def join(self, variables: Sequence[Question]) -> None:
        """Make variables equal; HIGH among them fixes them all."""
        own = [variable for variable in variables if variable >= 0]
        self._groups.join(own)
        if own and HIGH in variables:
            self.fixed_high.add(own[0])

    def roots(self) -> list[Question]:
        """Return for each variable the one that decides for it."""
        groups = self._groups
        # Most variables are tied to none and decide for themselves.
        roots = [
            groups.first(own) if own in groups.above else own
            for own in range(len(self.all))
        ]
        return cast(list[Question], roots)
