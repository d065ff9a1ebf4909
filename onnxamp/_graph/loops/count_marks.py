"""The marks of values that depend on integers that count.

Every value gets flags, which only ever grow, and a limit:

* *position*: position arithmetic computes it from counters, Casts from integers and graph inputs, and constants alone.
* *counting*: a position from Range, CumSum, or what a loop accumulates.
* *counted*: at least one of its terms or factors is an integer that grows with a size, whatever the others are.
* *inverse*: a constant divided by such an integer.
"""

from typing import Final, NamedTuple

POSITION: Final = 1
COUNTING: Final = 2
COUNTED: Final = 4
INVERSE: Final = 8
"""The flags of a value; see the module. Plain integers, because large models have many."""

COUNTER: Final = POSITION | COUNTING | COUNTED
"""The flags of a float that counts."""


class CountMark(NamedTuple):
    """Flags of a value, and the largest magnitude of its integers; 0 if it has none."""

    value: int
    flags: int
    limit: float = 0.0


class Counted(NamedTuple):
    """The marks of values.

    Attributes:
        marks: value -> its flags.
        limits: counted value -> the largest magnitude of its integers.
        computing: nodes that compute positions from counters.
        normalizing: nodes that divide coordinates by a size, which ends them.
    """

    marks: dict[int, int]
    limits: dict[int, float]
    computing: set[int]
    normalizing: set[int]
