"""Relations among integer exponents: variables that they force to 0, and variables that they make multiples of others.

All sweeps are linear in the terms of the relations.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import gcd
from typing import Final, NamedTuple

ZERO: Final = 0
"""The variable that is 0."""

Relation = Sequence[tuple[int, int]]
"""(variable, coefficient) pairs whose sum of products is 0."""

_MERGES: Final = 16
"""Passes over relations that merge equal variables; the rest stay relations."""

ABSENT: Final = -1
"""No relation."""


class Window(NamedTuple):
    """The exponents that a variable wants."""

    least: int
    most: int


class ExponentProblem:
    """The constraints on exponents.

    Attributes:
        count: number of variables, ZERO included.
        relations: the relations among them.
        windows: variable -> its window.
        costs: variable -> cost of an exponent that is not 0.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.relations = list[Relation]()
        self.windows = dict[int, Window]()
        self.costs = dict[int, int]()

    def variable(self) -> int:
        """Return a new variable."""
        self.count += 1
        return self.count - 1


def find_forced(problem: ExponentProblem) -> dict[int, tuple[int, int]]:
    """Return the variables that must be 0, because all others of a relation are. Linear in terms."""
    uses: list[list[int]] = [[] for _ in range(problem.count)]
    left = []
    for index, relation in enumerate(problem.relations):
        terms = _terms(relation)
        left.append(len(terms))
        for variable in terms:
            uses[variable].append(index)
    forced: dict[int, tuple[int, int]] = {}
    pending = deque([(ZERO, ZERO)])
    # A relation with a single term left forces its variable to 0.
    for index, count in enumerate(left):
        if count == 1:
            _force(problem.relations[index], index, ZERO, forced, pending)
    while pending:
        variable, _ = pending.popleft()
        for index in uses[variable]:
            left[index] -= 1
            if left[index] == 1:
                _force(problem.relations[index], index, variable, forced, pending)
    return forced


def _force(
    relation: Relation,
    index: int,
    cause: int,
    forced: dict[int, tuple[int, int]],
    pending: deque[tuple[int, int]],
) -> None:
    """Note the variables of a relation that are not known to be 0 as forced, and queue them."""
    for variable in _terms(relation):
        if variable != ZERO and variable not in forced:
            forced[variable] = index, cause
            pending.append((variable, cause))


def _terms(relation: Relation) -> dict[int, int]:
    """Return variable -> its coefficient, if not 0: a variable that is added and subtracted drops out."""
    row: Counter[int] = Counter()
    for variable, coefficient in relation:
        row[variable] += coefficient
    return {variable: number for variable, number in row.items() if number}


class Classes(NamedTuple):
    """Classes of variables that are multiples of one another, and the relations among them. Class ZERO is 0."""

    of_variable: list[tuple[int, int]]
    """Variable -> its class, and the multiple of it that the variable is."""
    relations: list[dict[int, int]]
    windows: list[dict[int, Window]]
    """Class -> by multiple of it: the windows of all variables that are this multiple."""
    costs: list[int]

    @classmethod
    def of(
        cls, problem: ExponentProblem, forced: dict[int, tuple[int, int]]
    ) -> "Classes":
        """Merge variables that relations make multiples of others; variables that become 0 are added to ``forced``."""
        union = _Union(problem.count)
        union.zeros |= dict.fromkeys(forced, ABSENT)
        rows = list(enumerate(problem.relations))
        for turn in range(_MERGES):
            before = len(rows)
            rows = [(index, row) for index, row in rows if not union.merge(index, row)]
            if len(rows) == before and turn:
                break
            rows.reverse()
        roots = [union.root(variable) for variable in range(problem.count)]
        for variable, (root, _) in enumerate(roots):
            if root in union.zeros and variable not in forced and variable != ZERO:
                forced[variable] = union.zeros[root], ZERO
        names: dict[int, int] = {ZERO: ZERO}
        kept = [
            (ZERO, 1) if root in union.zeros else (root, multiple)
            for root, multiple in roots
        ]
        of_variable = [
            (names.setdefault(root, len(names)), multiple) for root, multiple in kept
        ]
        relations = list[dict[int, int]]()
        # Passes reverse the rows, so sort them back.
        for _, row in sorted(rows, key=lambda item: item[0]):
            if combined := union.combined(row):
                relations.append(
                    {names[root]: number for root, number in combined.items()}
                )
        windows: list[dict[int, Window]] = [{} for _ in names]
        for variable, window in problem.windows.items():
            member, multiple = of_variable[variable]
            windows[member][multiple] = _both(windows[member].get(multiple), window)
        costs = [0] * len(names)
        for variable, cost in problem.costs.items():
            costs[of_variable[variable][0]] += cost
        return cls(of_variable, relations, windows, costs)


class _Union:
    """Variables that are multiples of one another, as a forest, and the roots that are 0.

    Attributes:
        parents: variable -> another one, and the multiple of it that this one is; a root has itself.
        zeros: root -> the relation that makes it 0.
    """

    def __init__(self, count: int) -> None:
        self.parents = [(variable, 1) for variable in range(count)]
        self.zeros = {ZERO: ABSENT}

    def root(self, variable: int) -> tuple[int, int]:
        """Return the representative of a variable and its ties, and the variable's factor relative to it."""
        parents = self.parents
        path = []
        while parents[variable][0] != variable:
            path.append(variable)
            variable = parents[variable][0]
        multiple = 1
        for below in reversed(path):
            multiple *= parents[below][1]
            parents[below] = variable, multiple
        return variable, multiple

    def combined(self, relation: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Return a relation among roots, without those that are 0, in lowest terms."""
        row: Counter[int] = Counter()
        for variable, coefficient in relation:
            root, multiple = self.root(variable)
            row[root] += coefficient * multiple
        rest = {
            root: number
            for root, number in row.items()
            if number and root not in self.zeros
        }
        divisor = gcd(*rest.values())
        return {root: number // divisor for root, number in rest.items()}

    def merge(self, index: int, relation: Relation) -> bool:
        """Merge the variables that the relation ties; return whether it has no further meaning."""
        row = self.combined(relation)
        if len(row) == 1:
            self.zeros[next(iter(row))] = index
        elif len(row) == 2:
            # Only with a coefficient of 1 is one variable a whole multiple of the other.
            (one, a), (other, b) = sorted(row.items())
            if abs(b) == 1:
                self.parents[other] = one, -a * b
            elif abs(a) == 1:
                self.parents[one] = other, -a * b
            else:
                return False
        return len(row) <= 2


def _both(one: Window | None, other: Window) -> Window:
    """Return the exponents that both windows want."""
    if one is None:
        return other
    return Window(max(one.least, other.least), min(one.most, other.most))
