"""The solver of exponents: relations hold exactly, and small problems are solved as well as by trying everything."""

import itertools
from random import Random

import pytest

from onnxamp._decide.exponents.relations import ZERO, ExponentProblem, Window
from onnxamp._decide.exponents.solve import solve


def objective(problem: ExponentProblem, exponents: tuple[int, ...]) -> tuple[int, int, int]:
    """Steps by which variables miss the lower ends of their windows, and the upper ends, and what is touched."""
    windows = [(exponents[variable], window) for variable, window in problem.windows.items()]
    touched = sum(cost for variable, cost in problem.costs.items() if exponents[variable])
    over = sum(max(0, window.least - exponent) for exponent, window in windows)
    return over, sum(max(0, exponent - window.most) for exponent, window in windows), touched


def holds(problem: ExponentProblem, exponents: tuple[int, ...]) -> bool:
    return all(sum(exponents[variable] * number for variable, number in row) == 0 for row in problem.relations)


def random_problem(seed: int) -> ExponentProblem:
    rng = Random(seed)
    problem = ExponentProblem(rng.randint(4, 5))
    variables = range(1, problem.count)
    for _ in range(rng.randint(1, 4)):
        chosen = rng.sample(variables, min(rng.choice([1, 2, 2, 3, 3, 3, 3]), len(variables)))
        problem.relations.append(tuple((variable, rng.choice([1, 1, -1, 2])) for variable in chosen))
    for variable in variables:
        if rng.random() < 0.5:
            least = rng.randint(-3, 3)
            problem.windows[variable] = Window(least, least + rng.randint(0, 3))
        if rng.random() < 0.5:
            problem.costs[variable] = 1
    return problem


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("part", range(4))
def test_as_good_as_trying_everything(part: int) -> None:
    """And proven to be."""
    for seed in range(part, 120, 4):
        problem = random_problem(seed)
        solution = solve(problem)
        found = tuple(solution.exponents)
        assert holds(problem, found), seed
        every = ((0, *rest) for rest in itertools.product(range(-4, 5), repeat=problem.count - 1))
        best = min(objective(problem, each) for each in every if holds(problem, each))
        assert objective(problem, found) <= best, seed  # exponents beyond 4 may be better
        assert solution.gap == 0, seed


def test_what_moves_miss_is_found() -> None:
    """Two weights lead around an input whose change costs more than both: no single move gets there."""
    problem = ExponentProblem()
    entry, one, other, stream, sums, late = (problem.variable() for _ in range(6))
    problem.relations += [
        ((stream, 1), (entry, -1), (one, -1)),
        ((sums, 1), (stream, -1), (other, -1)),
        ((late, 1), (sums, -1), (one, -1)),
        ((late, 1),),
    ]
    problem.windows[stream] = Window(3, 9)
    problem.costs |= {entry: 8, one: 1, other: 1}
    solution = solve(problem)
    assert (solution.exponents[entry], solution.exponents[stream]) == (0, 3)
    assert solution.gap == 0


def chain_of_layers(count: int, needs: dict[int, int]) -> tuple[ExponentProblem, list[int], list[int]]:
    """x[k + 1] = x[k] + weight[k], as through convolutions, between an input and an output that are 0."""
    problem = ExponentProblem()
    values, weights = [problem.variable()], []
    problem.relations.append(((values[0], 1),))
    for _ in range(count):
        weights.append(problem.variable())
        values.append(problem.variable())
        problem.relations.append(((values[-1], 1), (values[-2], -1), (weights[-1], -1)))
        problem.costs[weights[-1]] = 1
    problem.relations.append(((values[-1], 1),))
    problem.windows |= {values[k]: Window(need, need + 9) for k, need in needs.items()}
    return problem, values, weights


def test_few_weights_change() -> None:
    problem, values, weights = chain_of_layers(9, {3: 2, 4: 5, 6: 3})
    exponents = solve(problem).exponents
    assert [exponents[value] for value in values] == [0, 0, 0, 5, 5, 5, 5, 0, 0, 0]
    assert [k for k, weight in enumerate(weights) if exponents[weight]] == [2, 6]


def test_what_forbids_an_exponent_is_named() -> None:
    problem = ExponentProblem()
    scores, probabilities, sums = problem.variable(), problem.variable(), problem.variable()
    problem.relations += [((probabilities, 1),), ((sums, 1), (probabilities, -1), (scores, -1)), ((sums, 1),)]
    problem.windows[scores] = Window(3, 9)
    solution = solve(problem)
    assert solution.exponents[scores] == 0
    assert solution.chain(scores) in ([1, 2], [1, 0])
    assert solution.chain(ZERO) == []


def test_what_two_relations_force_is_named() -> None:
    problem = ExponentProblem()
    one, other = problem.variable(), problem.variable()
    problem.relations += [((one, 1), (other, -1)), ((one, 1), (other, 1))]
    problem.windows[one] = Window(3, 9)
    solution = solve(problem)
    assert list(solution.exponents) == [0, 0, 0]
    assert solution.chain(one) == [1]


def test_halves_are_whole() -> None:
    """A square has twice the exponent: an odd need of it is rounded up."""
    problem = ExponentProblem()
    square, root, weight = (problem.variable() for _ in range(3))
    problem.relations += [((square, 1), (root, -2)), ((root, 1), (weight, -1))]
    problem.windows[square] = Window(5, 20)
    problem.costs[weight] = 1
    exponents = solve(problem).exponents
    assert (exponents[square], exponents[root]) == (6, 3)


@pytest.mark.slow
def test_long_chains_do_not_recurse() -> None:
    problem, values, _ = chain_of_layers(5000, dict.fromkeys(range(100, 4900, 7), 4))
    exponents = solve(problem).exponents
    assert all(exponents[values[k]] >= 4 for k in range(100, 4900, 7))


@pytest.mark.parametrize("count", [200, 300])
def test_long_chains_change_two_weights(count: int) -> None:
    """Whether or not the last criterion may choose others: from 500 classes on it may not."""
    problem, _, _ = chain_of_layers(count, dict.fromkeys(range(50, count - 50, 7), 4))
    solution = solve(problem)
    exponents = tuple(solution.exponents)
    assert holds(problem, exponents)
    assert objective(problem, exponents) == (0, 0, 2)
    assert solution.gap == 0
    assert max(map(abs, exponents)) == 4
