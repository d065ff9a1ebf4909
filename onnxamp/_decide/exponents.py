"""Integer exponents under linear equations, solved exactly. This module knows nothing of ONNX.

Variables are exponents; variable :data:`ZERO` is 0. Relations are homogeneous equations with small integer
coefficients, so that all zeros satisfy them. Some variables want to be in a window; changing others costs.
:func:`solve` looks for exponents that satisfy every relation exactly and, in this order,

1. leave the fewest steps by which variables miss the lower ends of their windows (overflow),
2. ... and the upper ends (loss of small numbers),
3. touch the fewest variables that cost something,
4. are the smallest.

Propagation first finds the variables that relations force to zero; :meth:`Solution.chain` names the relations. The rest
starts from zero and improves by moves: a variable gets another exponent, and every relation that this breaks is
repaired by another variable of it, until all hold again. Moves that make the total worse are not made. Finally, an
integer program improves on the moves, and bounds the distance to the optimum.

Complexity: linear in the terms of all relations for propagation and for each sweep of moves, of which there are few;
the proof takes about as long as these.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxamp._base.optional import require
from onnxamp._decide.relations import (
    ABSENT,
    ZERO,
    Classes,
    Problem,
    Window,
    find_forced,
)


def components(
    members: Iterable[int], joined: Iterable[Sequence[int]]
) -> list[list[int]]:
    """Return the members in groups that rows of ``joined`` connect, both in the order of the members.

    Complexity: near linear in members and joined ones.
    """
    members = list(members)
    parents = {member: member for member in members}

    def root(member: int) -> int:
        while parents[member] != member:
            parents[member] = parents[parents[member]]
            member = parents[member]
        return member

    for first, *others in joined:
        for other in others:
            parents[root(other)] = root(first)
    found: dict[int, list[int]] = {}
    for member in members:
        found.setdefault(root(member), []).append(member)
    return list(found.values())


_LARGEST: Final = 64
"""Exponents are looked for within this magnitude."""

_NODES: Final = 400_000
"""Nodes of a search, times classes; most problems need one node."""

_MEMBERS: Final = 50_000
"""Most classes of a component to search, which takes a second for 20,000."""

_TOLERANCE: Final = 1e-6


class Objective(NamedTuple):
    """The criteria in this order: steps of overflow, steps of lost digits, and the cost of the affected nodes."""

    over: int
    under: int
    touched: int


class Proof(NamedTuple):
    """Exponents, and the least touched cost that others could have; None where overflow itself is not proven least."""

    exponents: dict[int, int]
    bound: int | None


def objective_of(
    classes: Classes, exponents: Sequence[int], members: Iterable[int]
) -> Objective:
    """Return the total cost of exponents among these classes."""
    over = under = touched = 0
    for member in members:
        exponent = exponents[member]
        touched += classes.costs[member] if exponent else 0
        for multiple, window in classes.windows[member].items():
            over += max(0, window.least - multiple * exponent)
            under += max(0, multiple * exponent - window.most)
    return Objective(over, under, touched)


def related(classes: Classes) -> list[list[int]]:
    """Classes that relations join, apart from ZERO; near linear in terms."""
    joined = (
        [member for member in row if member != ZERO]
        for row in classes.relations
        if len(row) > 1
    )
    return components(range(1, len(classes.windows)), joined)


def prove(
    classes: Classes,
    exponents: Sequence[int],
    members: Sequence[int],
    rows: Sequence[int],
) -> Proof:
    """Better exponents for a component if there are any, and a bound.

    Complexity: that of a linear program in its relations and windows, times the nodes of the search.

    Args:
        classes: the problem.
        exponents: a solution.
        members: the classes of the component.
        rows: its relations.
    """
    known = objective_of(classes, exponents, members)
    if known == (0, 0, 0):
        return Proof({}, 0)
    if len(members) > _MEMBERS:
        return Proof({}, None)
    program = _Program(classes, members, rows)
    best = list(exponents)
    limits = list[int]()
    for position in range(len(known)):
        value = objective_of(classes, best, members)[position]
        if not value:  # nothing is less
            limits.append(0)
            continue
        found = program.least(position, limits)
        if found is None or (position < len(known) - 1 and not found.optimal):
            return Proof({}, None)
        if found.value < value:
            for member, exponent in zip(members, found.exponents, strict=True):
                best[member] = int(exponent)
        limits.append(min(found.bound, value))
    return Proof({member: best[member] for member in members}, limits[-1])


class _Found(NamedTuple):
    exponents: NDArray[np.int64]
    value: int
    bound: int
    optimal: bool


class _Program:
    """An integer program in exponents x, steps beyond windows o and u, and what is touched t."""

    def __init__(
        self, classes: Classes, members: Sequence[int], rows: Sequence[int]
    ) -> None:
        self.place = {member: k for k, member in enumerate(members)}
        self.windows = [
            (x, k, w)
            for m, x in self.place.items()
            for k, w in classes.windows[m].items()
        ]
        costs = ((x, classes.costs[m]) for m, x in self.place.items())
        self.priced = [(x, cost) for x, cost in costs if cost]
        self.members = n = len(members)
        w = len(self.windows)
        self.starts = (n, n + w, n + 2 * w)
        self.count = n + 2 * w + len(self.priced)
        self.entries = list[tuple[int, int, float]]()
        self.lower, self.upper = list[float](), list[float]()
        for row in rows:
            terms = classes.relations[row].items()
            self.add([(self.place[m], k) for m, k in terms if m != ZERO], 0, 0)
        for k, (x, multiple, window) in enumerate(self.windows):
            self.add([(x, multiple), (n + k, 1)], window.least, np.inf)
            self.add([(x, multiple), (n + w + k, -1)], -np.inf, window.most)
        for k, (x, _) in enumerate(self.priced):
            touch = n + 2 * w + k
            self.add([(x, 1), (touch, -_LARGEST)], -np.inf, 0)
            self.add([(x, 1), (touch, _LARGEST)], 0, np.inf)

    def add(
        self, terms: Sequence[tuple[int, float]], least: float, most: float
    ) -> None:
        """Add a row: the sum of (variable, coefficient) products is between two numbers."""
        row = len(self.lower)
        self.entries += [(row, column, number) for column, number in terms]
        self.lower.append(least)
        self.upper.append(most)

    def objective(self, position: int) -> NDArray[np.float64]:
        """Return the coefficients of an objective."""
        result = np.zeros(self.count)
        n, over, under = self.members, *self.starts[1:]
        if position == 0:
            result[n:over] = 1
        elif position == 1:
            result[over:under] = 1
        else:
            result[under:] = [cost for _, cost in self.priced]
        return result

    def least(self, position: int, limits: Sequence[int]) -> _Found | None:
        """Return the minimum of an objective while those before it are limited; None if no solution was found."""
        require("scipy", "Solving for exponents needs scipy", "measure")
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - only exponents need it
        from scipy.sparse import csr_array, vstack  # noqa: PLC0415

        i, j, number = np.array(self.entries, float).reshape(-1, 3).T
        matrix = csr_array(
            (number, (i.astype(int), j.astype(int))), (len(self.lower), self.count)
        )
        extra = [csr_array(self.objective(k)[None]) for k in range(len(limits))]
        matrix = vstack([matrix, *extra], format="csr")
        matrix.indices = matrix.indices.astype(
            np.int32
        )  # milp of scipy 1.14 accepts no others
        matrix.indptr = matrix.indptr.astype(np.int32)
        least = np.zeros(self.count)
        most = np.full(self.count, np.inf)
        least[: self.members], most[: self.members] = -_LARGEST, _LARGEST
        most[self.starts[2] :] = 1
        constraints = LinearConstraint(
            matrix, [*self.lower, *[-np.inf] * len(extra)], [*self.upper, *limits]
        )
        whole = np.ones(self.count)
        whole[self.members : self.starts[2]] = 0  # they are integers if x is
        cost = self.objective(position)
        found = milp(
            cost,
            integrality=whole,
            bounds=Bounds(least, most),
            constraints=constraints,
            options={"node_limit": max(_NODES // self.members, 1), "mip_rel_gap": 0},
        )
        if found.x is None:
            return None
        bound = found.mip_dual_bound if found.mip_dual_bound is not None else found.fun
        return _Found(
            exponents=np.rint(found.x[: self.members]).astype(np.int64),
            value=round(float(cost @ found.x)),
            bound=int(np.ceil(bound - _TOLERANCE)),
            optimal=found.status == 0,
        )


_OVER: Final = 1 << 40
_UNDER: Final = 1 << 24
_TOUCH: Final = 1 << 8
"""Weights of the objectives: a step out of a window, a variable that is touched; an exponent weighs its magnitude."""

_SWEEPS: Final = 12
_TARGETS: Final = 6
"""Sweeps of moves, and exponents that a move tries because they make a neighbor zero."""

_CHANGES: Final = 1 << 12
_FEW_CHANGES: Final = 24
"""Variables that one move may change, for one that is out of its window, and for any other."""


class Solution(NamedTuple):
    """Exponents by variable, and why those that must be 0 are."""

    exponents: Sequence[int]
    forced: Mapping[int, tuple[int, int]]
    """Variable that must be 0 -> (relation that says so, another variable of it that is 0)."""
    gap: int | None = None
    """Bound on how much less could be touched, if less overflow is proven impossible; otherwise None."""

    def chain(self, variable: int) -> list[int]:
        """Return the relations from a variable that must be 0 to one that is 0 in itself; empty for other variables."""
        found = []
        while variable in self.forced:
            relation, variable = self.forced[variable]
            if relation != ABSENT:
                found.append(relation)
        return found


def solve(problem: Problem) -> Solution:
    """Return the exponents of a problem; the module says which."""
    forced = find_forced(problem)
    classes = Classes.of(problem, forced)
    search = _Search(classes)
    search.run()
    gap = _improved(search)
    return Solution(
        [search.exponents[c] * multiple for c, multiple in classes.of_variable],
        forced,
        gap,
    )


def _improved(search: "_Search") -> int | None:
    """Apply improvements by integer programs; return a bound on further ones."""
    classes = search.classes
    exponents = search.exponents
    found = related(classes)
    before = list(exponents)
    gaps = list[int | None]()
    of_member = {member: k for k, members in enumerate(found) for member in members}
    rows: list[list[int]] = [[] for _ in found]
    for row, relation in enumerate(classes.relations):
        owner = next(
            (of_member[member] for member in relation if member != ZERO), None
        )
        if owner is not None:
            rows[owner].append(row)
    for members, own in zip(found, rows, strict=True):
        better, bound = prove(classes, exponents, members, own)
        for member, exponent in better.items():
            exponents[member] = exponent
        touched = objective_of(classes, exponents, members).touched
        gaps.append(None if bound is None else touched - bound)
    if exponents != before:
        search.run()  # for the smallest exponents
    known = [gap for gap in gaps if gap is not None]
    return sum(known) if len(known) == len(gaps) else None


def _ends(window: Window, multiple: int) -> tuple[int, int, int]:
    """Exponents at which a multiple enters and leaves the window, and the next one, for the sake of halves."""
    least, most = (
        (window.least, window.most) if multiple > 0 else (-window.most, -window.least)
    )
    first = -(-least // abs(multiple))
    return first, first + 1, most // abs(multiple)


class _Search:
    """Moves from exponents that satisfy all relations to better ones that do.

    Attributes:
        uses: class -> relations that it is in.
        leaves: relation -> a class that is in no other, and can absorb any remainder of the relation; ZERO if there is
            none.
        bounds: class -> (multiple, least, most) of its windows.
        ends: class -> where its windows begin and end.
    """

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        windows = classes.windows
        self.exponents = [0] * len(windows)
        self.uses: list[list[int]] = [[] for _ in windows]
        for index, row in enumerate(classes.relations):
            for member in row:
                self.uses[member].append(index)
        self.leaves = list(map(self.leaf, classes.relations))
        self.bounds = [
            [(m, *window) for m, window in held.items()] for held in windows
        ]
        self.ends = [
            {end for m, w in held.items() for end in _ends(w, m)} for held in windows
        ]
        self.touches = [_TOUCH * cost for cost in classes.costs]

    def leaf(self, relation: Mapping[int, int]) -> int:
        """Return the leaf of a relation: if there are several, one with a cost of its own."""
        found = [
            c
            for c, number in relation.items()
            if len(self.uses[c]) == 1 and abs(number) == 1
        ]
        costs = self.classes.costs
        windows = self.classes.windows
        return max(found, key=lambda c: (costs[c] > 0, not windows[c]), default=ZERO)

    def run(self) -> None:
        """Move classes with a cost, and classes near them, until nothing improves; then move neighbors together."""
        pending = [c for c in range(1, len(self.exponents)) if self.cost(c, 0)]
        pending.sort(key=lambda c: (-self.cost(c, 0), c))
        self.sweep(pending, together=False)
        leaves = set(self.leaves)
        uneven = (
            row
            for row, leaf in zip(self.classes.relations, self.leaves, strict=True)
            if self.exponents[leaf]
        )
        self.sweep(sorted({c for row in uneven for c in row} - leaves), together=True)

    def sweep(self, pending: Iterable[int], *, together: bool) -> None:
        """Improve classes one after the other, then classes near those that changed, a few times."""
        leaves = set(self.leaves)  # what moves them moves another of their relation
        for turn in range(_SWEEPS):
            changed: dict[int, None] = {}
            for member in pending:
                for new in self.improve(member, together=together):
                    changed[new] = None
            near = {
                other
                for member in changed
                for row in self.uses[member]
                for other in self.classes.relations[row]
            }
            pending = sorted(near - leaves, reverse=turn % 2 > 0)

    def cost(self, member: int, exponent: int) -> int:
        """Return the cost of a class at an exponent."""
        cost = abs(exponent)
        if exponent:
            cost += self.touches[member]
        for multiple, least, most in self.bounds[member]:
            own = multiple * exponent
            if own < least:
                cost += _OVER * (least - own)
            elif own > most:
                cost += _UNDER * (own - most)
        return cost

    def improve(self, member: int, *, together: bool) -> Iterable[int]:
        """Make the best move of a class, and return the classes that it changed."""
        best = dict[int, int]()
        gain = 0
        now = self.cost(member, self.exponents[member])
        for target in self.targets(member):
            changes = self.move(member, target, together=together)
            if changes is None and now >= _UNDER:
                changes = self.move(member, target, together=not together)
            if changes is None:
                continue
            saved = sum(
                self.cost(c, self.exponents[c]) - self.cost(c, new)
                for c, new in changes.items()
            )
            if saved > gain:
                best = changes
                gain = saved
        for changed, new in best.items():
            self.exponents[changed] = new
        return best

    def targets(self, member: int) -> list[int]:
        """Return other exponents to try: 0, the ends of the window, and those that let neighbors be zero or fit."""
        wanted: Counter[int] = Counter({0: len(self.exponents)})
        now = self.exponents[member]
        for end in self.ends[member]:
            wanted[end] += len(self.exponents)
        for row in self.uses[member]:
            relation = self.classes.relations[row]
            for other, coefficient in relation.items():
                if other == member:
                    continue
                for aim in {0, *self.ends[other]}:
                    step = coefficient * (self.exponents[other] - aim)
                    if step % relation[member] == 0:
                        wanted[now + step // relation[member]] += 1
        wanted.pop(now, None)
        likely = sorted(
            wanted, key=lambda target: (-wanted[target], abs(target), target)
        )
        return likely[: _TARGETS + 3]

    def move(
        self, member: int, target: int, *, together: bool
    ) -> dict[int, int] | None:
        """Return the changes that bring a class to an exponent; None if relations cannot be repaired.

        Leaves are changed first; ``together``, what costs least, so that neighbors move along.
        """
        changes = {member: target}
        pending = [member]
        most = (
            _CHANGES
            if self.cost(member, self.exponents[member]) >= _UNDER
            else _FEW_CHANGES
        )
        while pending:
            moved = pending.pop()
            for row in self.uses[moved]:
                repair = self.repair(row, changes, together=together)
                if repair is None:
                    continue
                other, new = repair
                if other == ZERO or len(changes) > most:
                    return None
                changes[other] = new
                pending.append(other)
        return changes

    def repair(
        self, row: int, changes: Mapping[int, int], *, together: bool
    ) -> tuple[int, int] | None:
        """Return the class, and its exponent, that make a relation hold again; ZERO if none can, None if it holds."""
        relation = self.classes.relations[row]
        rest = sum(
            coefficient * changes.get(c, self.exponents[c])
            for c, coefficient in relation.items()
        )
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
            rank = (
                (rise // _TOUCH, spread, other) if together else (spread, rise, other)
            )
            if best is None or rank < best[0]:
                best = rank, other, new
        return (ZERO, 0) if best is None else (best[1], best[2])
