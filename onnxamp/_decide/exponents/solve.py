"""Integer exponents under linear equations, solved exactly. This module knows nothing of ONNX.

Variables are exponents; variable :data:`ZERO` is 0. Relations are homogeneous equations with small integer
coefficients, so that all zeros satisfy them. Some variables want to be in a window; changing others costs.
:func:`solve` finds exponents that satisfy every relation exactly and, in this order,

1. leave the fewest steps by which variables miss the lower ends of their windows (overflow),
2. ... and the upper ends (loss of small numbers),
3. touch the fewest variables that cost something,
4. are the smallest.

Propagation first finds the variables that relations force to zero; :meth:`Solution.chain` names the relations. The
remaining variables form components that no relation joins. Zeros solve most components. For each of the others, HiGHS
solves one integer program per criterion, in which the earlier criteria stay as good as they are.

Complexity: linear in the terms of all relations for propagation. Programs take about as long as their linear
relaxations, 0.5 s for 1,600 classes of a component, and stop after :data:`_NODES` nodes.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxamp._base.groups import Groups
from onnxamp._base.optional import require
from onnxamp._decide.exponents.relations import (
    ABSENT,
    ZERO,
    Classes,
    ExponentProblem,
    Window,
    find_forced,
)


def components(
    members: Iterable[int], joined: Iterable[Sequence[int]]
) -> list[list[int]]:
    """Return the members in groups that rows of ``joined`` connect, both in the order of the members.

    Complexity: near linear in members and joined ones.
    """
    groups = Groups()
    for row in joined:
        groups.join(row)
    members_of: dict[int, list[int]] = {}
    for member in members:
        members_of.setdefault(groups.first(member), []).append(member)
    return list(members_of.values())


_LARGEST: Final = 64
"""Exponents are searched within this magnitude, which also tells programs whether one is touched (big M)."""

_NODES: Final = 400_000
"""Nodes of a search, times classes; most problems need one node."""

_FREE: Final = 500
"""Most classes of a component whose last criterion may also choose other variables to touch. That proof takes 0.3 s for
400 classes of a long chain, and 5 s for 2,000; for the variables that are touched anyway it takes no time.
"""

_TOLERANCE: Final = 1e-6
"""Rounding error of a bound: one that is a whole number but for this must not be rounded up to the next."""


class Objective(NamedTuple):
    """The criteria in their order: steps of overflow, steps of lost digits, the cost of what is touched, magnitudes."""

    over: int
    under: int
    touched: int
    size: int


_TOUCHED: Final = Objective._fields.index("touched")
_SIZE: Final = Objective._fields.index("size")


class Solution(NamedTuple):
    """Exponents by variable, and why those that must be 0 are."""

    exponents: Sequence[int]
    forced: Mapping[int, tuple[int, int]]
    """Variable that must be 0 -> (relation that says so, another variable of it that is 0)."""
    gap: int | None = None
    """Bound on how much less could be touched, if less overflow is proven impossible; otherwise None."""

    def chain(self, variable: int) -> list[int]:
        """Return the relations from a variable that must be 0 to one that is 0 in itself; empty for other variables."""
        relations = []
        while variable in self.forced:
            relation, variable = self.forced[variable]
            if relation != ABSENT:
                relations.append(relation)
        return relations


def solve(problem: ExponentProblem) -> Solution:
    """Return the best exponents of a problem, by the criteria that the module lists.

    Raises:
        MissingPackageError: zeros are not the answer, and scipy is not installed.
    """
    forced = find_forced(problem)
    classes = Classes.of(problem, forced)
    exponents = [0] * len(classes.windows)
    gaps = list[int | None]()
    for component in _components_of(classes):
        own, gap = _solved(component)
        for member, exponent in zip(component.members, own, strict=True):
            exponents[member] = exponent
        gaps.append(gap)
    known = [gap for gap in gaps if gap is not None]
    return Solution(
        [exponents[member] * multiple for member, multiple in classes.of_variable],
        forced,
        sum(known) if len(known) == len(gaps) else None,
    )


class _Component(NamedTuple):
    """Classes that relations join, and these relations."""

    classes: Classes
    members: Sequence[int]
    relations: Sequence[Mapping[int, int]]

    def objective(self, exponents: Sequence[int]) -> Objective:
        """Return the criteria of exponents of the members."""
        over = under = touched = 0
        for member, exponent in zip(self.members, exponents, strict=True):
            touched += self.classes.costs[member] if exponent else 0
            for multiple, window in self.classes.windows[member].items():
                over += max(0, window.least - multiple * exponent)
                under += max(0, multiple * exponent - window.most)
        return Objective(over, under, touched, sum(map(abs, exponents)))

    def holds(self, exponents: Sequence[int]) -> bool:
        """Return whether exponents of the members satisfy the relations."""
        known = dict(zip(self.members, exponents, strict=True))
        return not any(_total(row, known) for row in self.relations)


def _total(row: Mapping[int, int], exponents: Mapping[int, int]) -> int:
    """Return the sum of products of a relation, which is 0 if exponents satisfy it."""
    return sum(exponents[member] * number for member, number in row.items())


def _components_of(classes: Classes) -> list[_Component]:
    """Return the components of classes, apart from ZERO; near linear in terms."""
    relations = list[dict[int, int]]()
    for row in classes.relations:
        terms = {member: number for member, number in row.items() if member != ZERO}
        if terms:
            relations.append(terms)
    groups = components(range(1, len(classes.windows)), map(list, relations))
    group_of = dict[int, int]()
    for number, group in enumerate(groups):
        group_of |= dict.fromkeys(group, number)
    rows: list[list[dict[int, int]]] = [[] for _ in groups]
    for terms in relations:
        rows[group_of[next(iter(terms))]].append(terms)
    return [
        _Component(classes, group, own)
        for group, own in zip(groups, rows, strict=True)
    ]


def _solved(component: _Component) -> tuple[Sequence[int], int | None]:
    """Return the exponents of a component's members, and the gap as in :class:`Solution`.

    Each program starts over, and counts only if it improves the exponents.
    """
    best: Sequence[int] = [0] * len(component.members)
    reached = component.objective(best)
    if not any(reached):
        return best, 0
    program = _Program(component)
    is_proven = True
    gap: int | None = None
    for position in range(len(reached)):
        if not reached[position]:  # nothing is less
            gap = 0 if position == _TOUCHED and is_proven else gap
            continue
        solution = program.least(position, reached[:position], best)
        if solution is None:
            is_proven = is_proven and position > _TOUCHED
            continue
        # HiGHS computes in floating point: rounded exponents count only if they satisfy the relations exactly.
        exponents, bound = solution
        objective = component.objective(exponents)
        if objective < reached and component.holds(exponents):
            best = exponents
            reached = objective
        if position == _TOUCHED and is_proven:
            gap = max(reached.touched - bound, 0)
        is_proven = is_proven and bound >= reached[position]
    return best, gap


class _Program:
    """An integer program in exponents x, steps beyond windows o and u, what is touched t, and magnitudes a."""

    def __init__(self, component: _Component) -> None:
        classes = component.classes
        place = {member: x for x, member in enumerate(component.members)}
        windows = list[tuple[int, int, Window]]()
        for member, x in place.items():
            for multiple, window in classes.windows[member].items():
                windows.append((x, multiple, window))
        costs = ((x, classes.costs[member]) for member, x in place.items())
        self.priced = [(x, cost) for x, cost in costs if cost]
        sizes = len(place), len(windows), len(windows), len(self.priced), len(place)
        self.members = len(place)
        self.starts = (0, *accumulate(sizes))
        _, over, under, touched, size, self.count = self.starts
        self.entries = list[tuple[int, int, float]]()
        self.lower = list[float]()
        self.upper = list[float]()
        for row in component.relations:
            self.add([(place[member], number) for member, number in row.items()], 0, 0)
        for k, (x, multiple, window) in enumerate(windows):
            self.add([(x, multiple), (over + k, 1)], window.least, np.inf)
            self.add([(x, multiple), (under + k, -1)], -np.inf, window.most)
        # |x| <= _LARGEST * t, so that t must be 1 where x is not 0.
        for k, (x, _) in enumerate(self.priced):
            self.add([(x, 1), (touched + k, -_LARGEST)], -np.inf, 0)
            self.add([(x, 1), (touched + k, _LARGEST)], 0, np.inf)
        # |x| <= a; where magnitudes are minimized, both are equal.
        for x in place.values():
            self.add([(x, 1), (size + x, -1)], -np.inf, 0)
            self.add([(x, 1), (size + x, 1)], 0, np.inf)

    def add(
        self, terms: Sequence[tuple[int, float]], least: float, most: float
    ) -> None:
        """Add a row: the sum of (variable, coefficient) products is between two numbers."""
        row = len(self.lower)
        self.entries += [(row, column, number) for column, number in terms]
        self.lower.append(least)
        self.upper.append(most)

    def objective(self, position: int) -> NDArray[np.float64]:
        """Return the coefficients of a criterion."""
        result = np.zeros(self.count)
        start, stop = self.starts[position + 1 : position + 3]
        result[start:stop] = (
            [cost for _, cost in self.priced] if position == _TOUCHED else 1
        )
        return result

    def bounds(
        self, position: int, known: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the bounds of all variables; those of ``known`` exponents limit the last criterion."""
        touched, size = self.starts[3:5]
        least = np.zeros(self.count)
        most = np.full(self.count, np.inf)
        least[: self.members], most[: self.members] = -_LARGEST, _LARGEST
        most[touched:size] = 1
        if position == _SIZE and self.members > _FREE:
            for k, (x, _) in enumerate(self.priced):
                if known[x]:
                    least[touched + k] = 1
                else:
                    least[x] = most[x] = most[touched + k] = 0
        return least, most

    def least(
        self, position: int, limits: Sequence[int], known: Sequence[int]
    ) -> tuple[list[int], int] | None:
        """Return exponents that minimize a criterion while those before it are limited, and the least that it could be.

        Return None if no solution was found.

        Args:
            position: of the criterion.
            limits: of the criteria before it.
            known: the exponents that reach these.
        """
        require("scipy", "Solving for exponents needs scipy", "measure")
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - only exponents need it
        from scipy.sparse import csr_array, vstack  # noqa: PLC0415

        i, j, number = np.array(self.entries, float).reshape(-1, 3).T
        matrix = csr_array(
            (number, (i.astype(int), j.astype(int))), (len(self.lower), self.count)
        )
        extra = [csr_array(self.objective(k)[None]) for k in range(len(limits))]
        matrix = vstack([matrix, *extra], format="csr")
        # milp of scipy 1.14 accepts no other type of indices.
        matrix.indices = matrix.indices.astype(np.int32)
        matrix.indptr = matrix.indptr.astype(np.int32)
        constraints = LinearConstraint(
            matrix, [*self.lower, *[-np.inf] * len(extra)], [*self.upper, *limits]
        )
        # The other variables are integers if x is.
        whole = np.zeros(self.count)
        whole[: self.members] = 1
        whole[self.starts[3] : self.starts[4]] = 1
        # A gap of 0 asks for the optimum: by default, HiGHS stops at a share above it.
        solution = milp(
            self.objective(position),
            integrality=whole,
            bounds=Bounds(*self.bounds(position, known)),
            constraints=constraints,
            options={"node_limit": max(_NODES // self.members, 1), "mip_rel_gap": 0},
        )
        if solution.x is None:
            return None
        bound = (
            solution.mip_dual_bound
            if solution.mip_dual_bound is not None
            else solution.fun
        )
        exponents = np.rint(solution.x[: self.members]).astype(int).tolist()
        return exponents, int(np.ceil(bound - _TOLERANCE))
