"""Integer exponents under linear equations, solved exactly. This module knows nothing of ONNX.

Variables are exponents; variable :data:`ZERO` is 0. Relations are homogeneous equations with small integer
coefficients, so that all zeros satisfy them. Some variables want to be in a window; changing others costs.
:func:`solve` looks for exponents that satisfy every relation exactly and, in this order,

1. leave the fewest steps by which variables miss the lower ends of their windows (overflow),
2. ... and the upper ends (loss of small numbers),
3. touch the fewest variables that cost something,
4. are the smallest.

What relations force to zero is found first, by propagation: :meth:`Solution.chain` names the relations. The rest
starts from zero and improves by moves: a variable gets another exponent, and every relation that this breaks is
repaired by another variable of it, until all hold again. A move that makes the whole worse is not made.

Complexity: linear in the terms of all relations for propagation and for each sweep of moves, of which there are few.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Final

ZERO: Final = 0
"""The variable that is 0."""

Relation = Sequence[tuple[int, int]]
"""(variable, coefficient) pairs whose sum of products is 0."""

_OVER: Final = 1 << 40
_UNDER: Final = 1 << 24
_TOUCH: Final = 1 << 8
"""Weights of the objectives: a step out of a window, a variable that is touched; an exponent weighs its magnitude."""

_SWEEPS: Final = 12
_TARGETS: Final = 6
"""Sweeps of moves, and exponents that a move tries because they make a neighbour zero."""

_CHANGES: Final = 1 << 7
"""Variables that one move may change."""

_MERGES: Final = 16
"""Passes over relations to merge what they make equal; what is left stays a relation."""

_FAR: Final = 1 << 10
"""Exponents beyond this stand for no end of a window."""

ABSENT: Final = -1
"""No relation."""


@dataclass(frozen=True, slots=True)
class Window:
    """The exponents that a variable wants."""

    least: int
    most: int


@dataclass(slots=True)
class Problem:
    """What is known of the exponents.

    Attributes:
        count: number of variables, ZERO included.
        relations: what holds among them.
        windows: variable -> what it wants.
        costs: variable -> cost of an exponent that is not 0.
    """

    count: int = 1
    relations: list[Relation] = field(default_factory=list)
    windows: dict[int, Window] = field(default_factory=dict)
    costs: dict[int, int] = field(default_factory=dict)

    def variable(self) -> int:
        """A new variable."""
        self.count += 1
        return self.count - 1


@dataclass(frozen=True, slots=True)
class Solution:
    """Exponents by variable, and why those that must be 0 are."""

    exponents: Sequence[int]
    forced: Mapping[int, tuple[int, int]]
    """Variable that must be 0 -> (relation that says so, another variable of it that is 0)."""

    def chain(self, variable: int) -> list[int]:
        """The relations from a variable that must be 0 to what is 0 in itself; empty for other variables."""
        found = []
        while variable in self.forced:
            relation, variable = self.forced[variable]
            if relation != ABSENT:
                found.append(relation)
        return found


def solve(problem: Problem) -> Solution:
    """The exponents of a problem; the module says which."""
    forced = _forced(problem)
    classes = _Classes.of(problem, forced)
    search = _Search(classes, [0] * len(classes.windows))
    search.run()
    return Solution([0 if c == ZERO else search.exponents[c] for c in classes.of_variable], forced)


def _forced(problem: Problem) -> dict[int, tuple[int, int]]:
    """Variables that must be 0: the last one of a relation all others of which are. Linear in terms."""
    uses: list[list[int]] = [[] for _ in range(problem.count)]
    left = []
    for index, relation in enumerate(problem.relations):
        left.append(len({variable for variable, _ in relation}))
        for variable in {variable for variable, _ in relation}:
            uses[variable].append(index)
    forced: dict[int, tuple[int, int]] = {}
    pending = deque([(ZERO, ZERO)])
    alone = [index for index, count in enumerate(left) if count == 1]
    for index in alone:
        _force(problem.relations[index], index, ZERO, forced, pending)
    while pending:
        variable, _ = pending.popleft()
        for index in uses[variable]:
            left[index] -= 1
            if left[index] == 1:
                _force(problem.relations[index], index, variable, forced, pending)
    return forced


def _force(
    relation: Relation, index: int, cause: int, forced: dict[int, tuple[int, int]], pending: deque[tuple[int, int]]
) -> None:
    for variable, coefficient in relation:
        if variable != ZERO and variable not in forced and coefficient:
            forced[variable] = index, cause
            pending.append((variable, cause))


@dataclass(slots=True)
class _Classes:
    """Variables that must be equal as one, and the relations among such classes. Class ZERO is 0."""

    of_variable: list[int]
    relations: list[dict[int, int]]
    windows: list[Window | None]
    costs: list[int]

    @classmethod
    def of(cls, problem: Problem, forced: dict[int, tuple[int, int]]) -> "_Classes":
        """Merge variables that relations make equal, and add to ``forced`` what is 0 only then."""
        union = _Union(list(range(problem.count)))
        for variable in forced:
            union.zeros[variable] = ABSENT
        rows = list(enumerate(problem.relations))
        for turn in range(_MERGES):
            before = len(rows)
            rows = [(index, row) for index, row in rows if not union.merge(index, row)]
            if len(rows) == before and turn:
                break
            rows.reverse()
        roots = [union.root(variable) for variable in range(problem.count)]
        for variable, root in enumerate(roots):
            if root in union.zeros and variable not in forced and variable != ZERO:
                forced[variable] = union.zeros[root], ZERO
        names: dict[int, int] = {ZERO: ZERO}
        of_variable = [ZERO if root in union.zeros else names.setdefault(root, len(names)) for root in roots]
        combined = (union.combined(row) for _, row in sorted(rows, key=lambda item: item[0]))
        relations = [{names[root]: number for root, number in row.items()} for row in combined if row]
        windows: list[Window | None] = [None] * len(names)
        for variable, window in problem.windows.items():
            windows[of_variable[variable]] = _both(windows[of_variable[variable]], window)
        costs = [0] * len(names)
        for variable, cost in problem.costs.items():
            costs[of_variable[variable]] += cost
        return cls(of_variable, relations, windows, costs)


@dataclass(slots=True)
class _Union:
    """Variables that are equal, as a forest, and the roots that are 0, each with the relation that says so."""

    parents: list[int]
    zeros: dict[int, int] = field(default_factory=lambda: {ZERO: ABSENT})

    def root(self, variable: int) -> int:
        """What stands for a variable and all that equal it."""
        parents = self.parents
        while parents[variable] != variable:
            parents[variable] = parents[parents[variable]]
            variable = parents[variable]
        return variable

    def combined(self, relation: Iterable[tuple[int, int]]) -> dict[int, int]:
        """A relation among roots, without what is 0, in lowest terms."""
        row: Counter[int] = Counter()
        for variable, coefficient in relation:
            row[self.root(variable)] += coefficient
        rest = {root: number for root, number in row.items() if number and root not in self.zeros}
        divisor = gcd(*rest.values())
        return {root: number // divisor for root, number in rest.items()}

    def merge(self, index: int, relation: Relation) -> bool:
        """Merge what the relation makes equal; whether it says nothing else."""
        row = self.combined(relation)
        if len(row) == 1:
            self.zeros[next(iter(row))] = index
        elif len(row) == 2 and set(row.values()) == {1, -1}:
            low, high = sorted(row)
            self.parents[high] = low
        return len(row) < 2 or (set(row.values()) == {1, -1} and len(row) == 2)


def _both(one: Window | None, other: Window) -> Window:
    return other if one is None else Window(max(one.least, other.least), min(one.most, other.most))


@dataclass(slots=True)
class _Search:
    """Moves from exponents that satisfy all relations to better ones that do."""

    classes: _Classes
    exponents: list[int]
    uses: list[list[int]] = field(init=False)
    """Class -> relations that it is in."""
    leaves: list[int] = field(init=False)
    """Relation -> a class that is in no other, and can take up whatever the relation lacks; ZERO if there is none."""
    ends: list[tuple[int, int]] = field(init=False)
    """Class -> the ends of its window."""
    touches: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.uses = [[] for _ in self.exponents]
        for index, row in enumerate(self.classes.relations):
            for member in row:
                self.uses[member].append(index)
        self.leaves = [self.leaf(row) for row in self.classes.relations]
        self.ends = [(-_FAR, _FAR) if w is None else (w.least, w.most) for w in self.classes.windows]
        self.touches = [_TOUCH * cost for cost in self.classes.costs]

    def leaf(self, relation: Mapping[int, int]) -> int:
        """The leaf of a relation: one that has a cost of its own, where there are several."""
        found = [c for c, number in relation.items() if len(self.uses[c]) == 1 and abs(number) == 1]
        return max(found, key=lambda c: (self.classes.costs[c] > 0, self.classes.windows[c] is None), default=ZERO)

    def run(self) -> None:
        """Move what costs something, and what is near it, until nothing improves; then neighbours together."""
        pending = [c for c in range(1, len(self.exponents)) if self.cost(c, 0)]
        pending.sort(key=lambda c: (-self.cost(c, 0), c))
        self.sweep(pending, together=False)
        leaves = set(self.leaves)
        uneven = (row for row, leaf in zip(self.classes.relations, self.leaves, strict=True) if self.exponents[leaf])
        self.sweep(sorted({c for row in uneven for c in row} - leaves), together=True)

    def sweep(self, pending: Iterable[int], *, together: bool) -> None:
        """Improve classes one after the other, then what is near those that changed, a few times."""
        leaves = set(self.leaves)  # what moves them moves another of their relation
        for turn in range(_SWEEPS):
            changed: dict[int, None] = {}
            for member in pending:
                for new in self.improve(member, together=together):
                    changed[new] = None
            near = {other for member in changed for row in self.uses[member] for other in self.classes.relations[row]}
            pending = sorted(near - leaves, reverse=turn % 2 > 0)

    def cost(self, member: int, exponent: int) -> int:
        """What a class costs at an exponent."""
        least, most = self.ends[member]
        cost = abs(exponent)
        if exponent:
            cost += self.touches[member]
        if exponent < least:
            return cost + _OVER * (least - exponent)
        return cost + _UNDER * (exponent - most) if exponent > most else cost

    def improve(self, member: int, *, together: bool) -> Iterable[int]:
        """Make the best move of a class; the classes that it changed."""
        best, gain = dict[int, int](), 0
        for target in self.targets(member):
            changes = self.move(member, target, together=together) or self.move(member, target, together=not together)
            if changes is None:
                continue
            saved = sum(self.cost(c, self.exponents[c]) - self.cost(c, new) for c, new in changes.items())
            if saved > gain:
                best, gain = changes, saved
        for changed, new in best.items():
            self.exponents[changed] = new
        return best

    def targets(self, member: int) -> Iterator[int]:
        """Other exponents that are worth a try: 0, the ends of the window, and what lets neighbours be zero or fit."""
        wanted: Counter[int] = Counter({0: len(self.exponents)})
        now, (least, most) = self.exponents[member], self.ends[member]
        for end in {least, least + 1, most}:
            if abs(end) < _FAR - 1:
                wanted[end] += len(self.exponents)
        for row in self.uses[member]:
            relation = self.classes.relations[row]
            for other, coefficient in relation.items():
                if other == member:
                    continue
                for aim in {0, *self.ends[other]}:
                    step = coefficient * (self.exponents[other] - aim)
                    if abs(aim) < _FAR and step % relation[member] == 0:
                        wanted[now + step // relation[member]] += 1
        wanted.pop(now, None)
        likely = sorted(wanted, key=lambda target: (-wanted[target], abs(target), target))
        return iter(likely[: _TARGETS + 3])

    def move(self, member: int, target: int, *, together: bool) -> dict[int, int] | None:
        """The changes that bring a class to an exponent; None where relations cannot be repaired.

        Leaves are changed first; ``together``, what costs least, so that neighbours move along.
        """
        changes, pending = {member: target}, [member]
        while pending:
            moved = pending.pop()
            for row in self.uses[moved]:
                repair = self.repair(row, changes, together=together)
                if repair is None:
                    continue
                other, new = repair
                if other == ZERO or len(changes) > _CHANGES:
                    return None
                changes[other] = new
                pending.append(other)
        return changes

    def repair(self, row: int, changes: Mapping[int, int], *, together: bool) -> tuple[int, int] | None:
        """The class, and its exponent, that make a relation hold again; ZERO if none can, None if it holds."""
        relation = self.classes.relations[row]
        rest = sum(coefficient * changes.get(c, self.exponents[c]) for c, coefficient in relation.items())
        if rest == 0:
            return None
        leaf = self.leaves[row]
        if leaf and not together and leaf not in changes:
            return leaf, self.exponents[leaf] - rest // relation[leaf]
        best: tuple[tuple[int, int, int], int, int] | None = None
        for other, coefficient in relation.items():
            if other in changes or rest % coefficient:
                continue
            new = self.exponents[other] - rest // coefficient
            spread = len(self.uses[other]) - 1
            rise = self.cost(other, new) - self.cost(other, self.exponents[other])
            rank = (rise // _TOUCH, spread, other) if together else (spread, rise, other)
            if best is None or rank < best[0]:
                best = rank, other, new
        return (ZERO, 0) if best is None else (best[1], best[2])
