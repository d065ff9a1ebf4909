"""Exponents proven optimal: the problem of :mod:`onnxamp._decide.exponents` as small integer programs.

Each objective is an integer program of its own, in the order in which they count; an objective that is 0 needs none.
Touching a variable costs the same whatever its exponent is, so that no potentials or flows give the least: HiGHS
branches on what is touched, and its bound tells how far from the best a solution is at most. It is told to search so
many nodes, not for so long: results do not depend on the machine.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxamp._decide.components import components
from onnxamp._decide.relations import ZERO, Classes

_LARGEST: Final = 64
"""Exponents are looked for within this magnitude."""

_NODES: Final = 400_000
"""Nodes of a search, times classes; most problems need one node."""

_MEMBERS: Final = 50_000
"""Classes of a component that is searched, which takes a second for 20,000."""

_TOLERANCE: Final = 1e-6


class Objective(NamedTuple):
    """What counts, in this order: steps of overflow, steps of lost digits, and the cost of what is touched."""

    over: int
    under: int
    touched: int


class Proof(NamedTuple):
    """Exponents, and the least touched cost that others could have; None where overflow itself is not proven least."""

    exponents: dict[int, int]
    bound: int | None


def objective_of(classes: Classes, exponents: Sequence[int], members: Iterable[int]) -> Objective:
    """What exponents come to among these classes."""
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
        [member for member in row if member != ZERO] for row in classes.relations if len(row) > 1
    )
    return components(range(1, len(classes.windows)), joined)


def prove(
    classes: Classes, exponents: Sequence[int], members: Sequence[int], rows: Sequence[int]
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
    program, best, limits = _Program(classes, members, rows), list(exponents), list[int]()
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
    better = {member: best[member] for member in members} if best != list(exponents) else {}
    return Proof(better, limits[-1])


class _Found(NamedTuple):
    exponents: NDArray[np.int64]
    value: int
    bound: int
    optimal: bool


class _Program:
    """An integer program in exponents x, steps beyond windows o and u, and what is touched t."""

    def __init__(self, classes: Classes, members: Sequence[int], rows: Sequence[int]) -> None:
        self.place = {member: k for k, member in enumerate(members)}
        self.windows = [
            (self.place[m], k, w) for m in members for k, w in classes.windows[m].items()
        ]
        self.priced = [(self.place[m], classes.costs[m]) for m in members if classes.costs[m]]
        n, w, t = len(members), len(self.windows), len(self.priced)
        self.starts = (n, n + w, n + 2 * w)
        self.count = n + 2 * w + t
        self.members = n
        entries, lower, upper = list[tuple[int, int, float]](), list[float](), list[float]()

        def add(terms: Iterable[tuple[int, float]], least: float, most: float) -> None:
            entries.extend((len(lower), column, number) for column, number in terms)
            lower.append(least)
            upper.append(most)

        for row in rows:
            add(((self.place[m], k) for m, k in classes.relations[row].items() if m != ZERO), 0, 0)
        for k, (x, multiple, window) in enumerate(self.windows):
            add([(x, multiple), (n + k, 1)], window.least, np.inf)
            add([(x, multiple), (n + w + k, -1)], -np.inf, window.most)
        for k, (x, _) in enumerate(self.priced):
            touch = n + 2 * w + k
            add([(x, 1), (touch, -_LARGEST)], -np.inf, 0)
            add([(x, 1), (touch, _LARGEST)], 0, np.inf)
        self.entries, self.lower, self.upper = entries, lower, upper

    def objective(self, position: int) -> NDArray[np.float64]:
        """The coefficients of an objective."""
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
        """The least of an objective where those before it are limited; None where nothing was found."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - only exponents need it
        from scipy.sparse import csr_array, vstack  # noqa: PLC0415

        i, j, number = (
            (list(column) for column in zip(*self.entries, strict=True))
            if self.entries
            else ([], [], [])
        )
        matrix = csr_array((number, (i, j)), shape=(len(self.lower), self.count))
        extra = [self.objective(k) for k in range(len(limits))]
        matrix = (
            vstack([matrix, *(csr_array(row[None]) for row in extra)], format="csr")
            if extra
            else matrix
        )
        matrix.indices = matrix.indices.astype(np.int32)  # milp of scipy 1.14 takes no others
        matrix.indptr = matrix.indptr.astype(np.int32)
        least, most = np.zeros(self.count), np.full(self.count, np.inf)
        least[: self.members], most[: self.members] = -_LARGEST, _LARGEST
        most[self.starts[2] :] = 1
        constraints = LinearConstraint(
            matrix, [*self.lower, *[-np.inf] * len(extra)], [*self.upper, *limits]
        )
        whole = np.ones(self.count)
        whole[self.members : self.starts[2]] = 0  # they are whole where x is
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
        value = round(float(cost @ found.x))
        return _Found(
            np.rint(found.x[: self.members]).astype(np.int64),
            value,
            int(np.ceil(bound - _TOLERANCE)),
            found.status == 0,
        )
