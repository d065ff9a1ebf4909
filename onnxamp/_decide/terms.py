"""Precision variables, and where they sit in the graph.

A *variable* is one question: low or float32? A *term* answers for one port of the graph: a variable's index, or one of
the constants below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from onnxamp._graph.view import ABSENT

HIGH: Final = -1
"""Term of a port that is float32 whatever the cut says."""
LOW: Final = -2
"""Term of a port that is low already: a Cast of the user's, or a graph input that shall be low."""
NONE: Final = -3
"""Term of a port that carries no float32."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One yes/no question. ``node`` is ABSENT for an initializer, which then is ``value``."""

    index: int
    node: int
    param: str
    value: int = ABSENT


@dataclass(frozen=True, slots=True)
class Terms:
    """Where every variable sits.

    ``produced[v]``: term of the value's producer; ``consumed[n][i]``: of input i of node n; ``returned[s, i]``: of
    output i of scope s; ``of_node[n]``: the node's variables by type parameter; ``free``: values that exist in either
    precision at no cost; ``lowered[v]``: for a value that the user cast up from low, the low value;
    ``roots[x]``: the variable that decides for x (ties make variables equal); ``bound[n]``: the node's type binding.
    """

    variables: tuple[Variable, ...]
    produced: Sequence[int]
    consumed: Sequence[Sequence[int]]
    returned: Mapping[tuple[int, int], int]
    of_node: Mapping[int, Mapping[str, int]]
    free: frozenset[int]
    lowered: Mapping[int, int]
    roots: Sequence[int]
    bound: Mapping[int, Mapping[str, str]]
    fixed_high: frozenset[int]
    """Variables tied to a port that is float32 in any case."""
    wanted_low: frozenset[int]
    """Sequences and optionals of the signature that the user wants low."""

    def root(self, term: int) -> int:
        """The deciding variable of a term; constants are returned as they are."""
        return self.roots[term] if term >= 0 else term
